"""The learner's journal: what was acknowledged is there after a crash, and nothing is there twice."""

import json
from dataclasses import replace

import pytest
from test_channel import RUN, WELCOME, answer, hello, published

from grpo.collector import Collector
from grpo.files import read_lines, write_file
from grpo.journal import Journal, read_history
from grpo.metrics import MetricsLog, read_metrics
from grpo.rollout import pack, unpack


def collector(folder, **changes) -> Collector:
    settings = dict(groups_per_step=2, max_staleness=1, seed=0, max_steps=0) | changes
    journal = Journal(folder, keep=settings.pop("keep", False))
    return Collector(RUN, WELCOME, journal=journal, hash_of=published, **settings)


def fill(one, count) -> list:
    """Hand in groups for the next `count` tickets."""
    one.hello("s", hello())
    tickets = one.grant("s", count)
    assert len(tickets) == count
    for ticket in tickets:
        assert one.receive("s", ticket.ticket_id, answer(ticket))
    return tickets


def test_a_group_is_on_disk_before_it_is_acknowledged(tmp_path):
    one = collector(tmp_path)
    (ticket,) = fill(one, 1)
    assert pack(unpack(Journal(tmp_path, keep=False).get(0))) == answer(ticket)
    assert [path.stat().st_size for path in (tmp_path / "journal").iterdir()] == [len(answer(ticket))]


def test_a_restarted_learner_has_what_was_acknowledged_and_wants_the_rest(tmp_path):
    fill(collector(tmp_path), 3)
    again = collector(tmp_path)
    assert again.queue == 3
    again.hello("t", hello())
    assert [group.ticket_id for group in again.next_step(wait=0)] == [0, 1]
    assert [ticket.ticket_id for ticket in again.grant("t", 9)] == [3]


def test_steps_after_the_checkpoint_are_trained_again_on_the_same_groups_in_the_same_order(tmp_path):
    one = collector(tmp_path, max_staleness=2)
    fill(one, 6)
    for version in (1, 2):
        one.next_step(wait=0)
        one.finish_step(version)
        if version == 1:
            one.saved()
            one.covered()
    assert Journal(tmp_path, keep=False).ticket_ids() == [2, 3, 4, 5]
    again = collector(tmp_path, max_staleness=2, steps_done=1, version=2)
    for step, ids in ((2, [2, 3]), (3, [4, 5])):
        assert [group.ticket_id for group in again.next_step(wait=0)] == ids
        again.finish_step(step)
    history = read_history(tmp_path)
    assert history.steps == {1: [0, 1], 2: [2, 3], 3: [4, 5]}
    assert len(read_lines(tmp_path / "tickets.jsonl")) == 4  # step 2 is written once


def test_dropped_tickets_stay_dropped(tmp_path):
    one = collector(tmp_path)
    fill(one, 1)
    one.grant("s", 3)
    one.drop("s", 1, "prompt longer than --max_prompt_length")
    again = collector(tmp_path)
    again.hello("s", hello())
    assert [ticket.ticket_id for ticket in again.grant("s", 9)] == [2, 3, 4]
    assert again.dropped == {"prompt longer than --max_prompt_length": 1}
    assert read_history(tmp_path).dropped == {1: "prompt longer than --max_prompt_length"}


def test_a_missing_group_of_a_step_is_named(tmp_path):
    one = collector(tmp_path)
    fill(one, 2)
    one.next_step(wait=0)
    (tmp_path / "journal" / "t00000001.group").unlink()
    with pytest.raises(ValueError, match=r"lacks the groups of tickets \[1\]"):
        collector(tmp_path)


def test_samplers_of_another_dataset_are_refused_after_a_restart_too(tmp_path):
    fill(collector(tmp_path), 1)
    with pytest.raises(Exception, match="start every sampler with the same --dataset"):
        collector(tmp_path).hello("s", hello(dataset="other"))


def test_groups_without_reference_are_not_taken_up_where_beta_needs_them(tmp_path):
    one = Collector(
        RUN,
        replace(WELCOME, needs_reference=False),
        journal=Journal(tmp_path, keep=False),
        hash_of=published,
        groups_per_step=2,
        max_staleness=1,
        seed=0,
        max_steps=0,
    )
    one.hello("s", hello())
    (ticket,) = one.grant("s", 1)
    assert one.receive("s", ticket.ticket_id, answer(ticket, ref_logprobs=None))
    with pytest.raises(ValueError, match="--beta"):
        collector(tmp_path)


@pytest.mark.parametrize("cut", range(1, 40, 7))
def test_a_line_that_a_crash_cut_off_is_removed(tmp_path, cut):
    journal = Journal(tmp_path, keep=False)
    journal.note_step(1, [0, 1])
    whole = (tmp_path / "tickets.jsonl").read_bytes()
    journal.note_step(2, [2, 3])
    (tmp_path / "tickets.jsonl").write_bytes((tmp_path / "tickets.jsonl").read_bytes()[: len(whole) + cut])
    assert read_history(tmp_path).steps == {1: [0, 1]}
    assert len((tmp_path / "tickets.jsonl").read_bytes()) == len(whole) + cut  # who only reads, changes nothing
    again = Journal(tmp_path, keep=False)
    assert again.history.steps == {1: [0, 1]} and (tmp_path / "tickets.jsonl").read_bytes() == whole
    again.note_step(2, [3, 2])
    assert read_history(tmp_path).steps[2] == [3, 2]


@pytest.mark.parametrize("line", [b"{", b"[]", b"1", b'{"event": "step"}', b"\xff"])
def test_a_line_that_is_no_event_is_named(tmp_path, line):
    (tmp_path / "tickets.jsonl").write_bytes(b'{"event": "data"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"tickets.jsonl, line 2 is no event"):
        read_history(tmp_path)


def test_a_kept_journal_forgets_nothing(tmp_path):
    one = collector(tmp_path, keep=True)
    fill(one, 2)
    one.next_step(wait=0)
    one.finish_step(1)
    one.saved()
    one.covered()
    assert Journal(tmp_path, keep=True).ticket_ids() == [0, 1]


def test_records_of_steps_that_are_done_again_are_cut_off(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.log(step, {"reward": float(step)})
    log.close()
    again = MetricsLog(tmp_path / "metrics.jsonl", steps_done=1)
    again.log(2, {"reward": 20.0})
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["reward"]) for record in records] == [(1, 1.0), (2, 20.0)]
    assert records[1]["seconds"] >= records[0]["seconds"]


def test_a_full_disk_keeps_what_was_there(tmp_path, monkeypatch):
    write_file(tmp_path / "file", b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("grpo.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert json.dumps([path.name for path in tmp_path.glob("f*")]) == '["file"]'


def test_groups_stay_until_the_checkpoint_that_covers_them_is_proven_also_after_a_restart(tmp_path):
    one = collector(tmp_path, max_staleness=2)
    fill(one, 6)
    for version in (1, 2):
        one.next_step(wait=0)
        one.finish_step(version)
        one.saved()
    assert Journal(tmp_path, keep=False).ticket_ids() == [0, 1, 2, 3, 4, 5] and one.can_redo(0)
    again = collector(tmp_path, max_staleness=2, steps_done=2, version=2)
    assert Journal(tmp_path, keep=False).ticket_ids() == [0, 1, 2, 3, 4, 5] and again.can_redo(0)
    assert [group.ticket_id for group in again.next_step(wait=0)] == [4, 5]
    again.covered()
    assert Journal(tmp_path, keep=False).ticket_ids() == [4, 5]
    assert again.can_redo(2) and not again.can_redo(1)
