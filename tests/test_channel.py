"""The wire, over real sockets: welcome and refusal, tickets, acknowledgement, either start order, silence."""

import json
import shutil
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import zmq
from test_rollout import make_group
from tiny import free_port

from grpo import channel as channel_module
from grpo.channel import ChannelError, LearnerChannel, SamplerChannel
from grpo.collector import Collector
from grpo.held_out import HeldOut, read_evaluations
from grpo.journal import Journal
from grpo.keys import make_keys
from grpo.messages import PROTOCOL_VERSION, HeldOutFacts, Hello, Welcome
from grpo.rollout import pack

RUN = {"run_id": "run", "model": "m" * 64, "tokenizer": "t" * 64, "model_path": "/models/a", "save_path": "/runs/a"}
WELCOME = Welcome(
    run_id="run", group_size=2, temperature=1.0, dtype="float32", needs_reference=True, vocab_size=100
)
HASH = "0" * 64  # of every version that the tests publish
FACTS = {
    "protocol": PROTOCOL_VERSION,
    "model_path": "/models/a",
    "model": "m" * 64,
    "tokenizer": "t" * 64,
    "dataset": "d",
    "dataset_name": "questions.jsonl",
    "settings": {"system_prompt": "say it"},
    "num_prompts": 10,
    "max_new_tokens": 8,
    "batch_size": 4,
    "lora_path": "/runs/a",
    "run_id": "run",
    "held_out": {"dataset": "e", "num_prompts": 5},
}


def published(version: int) -> str | None:
    """The hash of an adapter version; there are ten."""
    return HASH if 0 <= version < 10 else None


def hello(holding=(), **changes) -> Hello:
    """A sampler's introduction, as the learner reads it."""
    facts = FACTS | changes
    return Hello(**facts | {"held_out": HeldOutFacts(**facts["held_out"]), "holding": tuple(holding)})


@pytest.fixture
def wire(tmp_path_factory):
    """Makes collectors and channels on one port, and closes them all."""
    port, opened = free_port(), []

    class Wire:
        address = f"tcp://127.0.0.1:{port}"

        def learner(self, **settings) -> tuple[Collector, LearnerChannel]:
            defaults = dict(groups_per_step=2, max_staleness=0, seed=0, max_steps=0)
            silence, keys = settings.pop("silence_limit", 30), settings.pop("keys", None)
            folder = settings.pop("folder", None) or tmp_path_factory.mktemp("journal")
            journal = Journal(Path(folder), keep=False)
            collector = Collector(RUN, WELCOME, journal=journal, hash_of=published, **defaults | settings)
            opened.append(LearnerChannel(self.address, silence, keys))
            opened[-1].start(collector)
            return collector, opened[-1]

        def sampler(self, name="s", timeout=30.0, startup=30.0, keys=None, **changes) -> SamplerChannel:
            opened.append(SamplerChannel(self.address, name, lambda: FACTS | changes, timeout, startup, keys))
            return opened[-1]

    yield Wire()
    for end in reversed(opened):
        end.close(limit=5)


def wait_until(condition, limit: float = 20.0) -> None:
    """Wait for what another thread brings about."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def answer(ticket, **changes) -> bytes:
    fields = dict(ticket_id=ticket.ticket_id, prompt_index=ticket.prompt_index, adapter_version=ticket.version)
    return pack(make_group(**fields | {"adapter_sha256": HASH} | changes))


def test_a_step_goes_round(wire):
    collector, learner = wire.learner()
    sampler = wire.sampler()
    welcome = sampler.connect()
    assert welcome.run_id == "run" and welcome.version == 0
    batches = sampler.tickets(capacity=2)
    tickets = next(batches)
    assert [t.ticket_id for t in tickets] == [0, 1]
    for ticket in reversed(tickets):  # the order of arrival does not matter
        sampler.send(ticket.ticket_id, answer(ticket))
    groups = collector.next_step(wait=10)
    assert [g.ticket_id for g in groups] == [0, 1]
    collector.finish_step(version=1)
    learner.wake()
    assert [(t.ticket_id, t.version) for t in next(batches)] == [(2, 1), (3, 1)]
    stopper = threading.Thread(target=learner.stop_samplers, args=("done",))
    stopper.start()
    assert list(batches) == [] and sampler.stop_reason == "done"
    assert sampler.finish() == 0
    stopper.join()
    assert learner.samplers == []


def test_the_sampler_may_start_first(wire):
    sampler = wire.sampler()
    time.sleep(0.5)
    wire.learner()
    assert sampler.connect().group_size == 2


REFUSALS = {
    "model": (dict(model="x" * 64, model_path="/models/b"), ["/models/b", "/models/a", "--model_path"]),
    "tokenizer": (dict(tokenizer="x" * 64), ["tokenizer", "--model_path"]),
    "run": (dict(run_id="old", lora_path="/runs/b"), ["/runs/b holds run old", "--lora_path /runs/a"]),
    "no run": (dict(run_id=None), ["holds no run.json", "--lora_path /runs/a"]),
    "group size": (dict(batch_size=3), ["--batch_size 3", "--group_size 2"]),
    "protocol": (dict(protocol=99), ["protocol 99", str(PROTOCOL_VERSION)]),
    "empty dataset": (dict(num_prompts=0), ["--dataset"]),
}


@pytest.mark.parametrize("changes, words", REFUSALS.values(), ids=REFUSALS.keys())
def test_a_disagreement_is_refused_with_both_values_and_the_flag(wire, changes, words, monkeypatch):
    monkeypatch.setattr(channel_module, "REFUSAL_SECONDS", 1.0)
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.2)
    wire.learner()
    with pytest.raises(ChannelError) as error:
        wire.sampler(**changes).connect()
    assert all(word in str(error.value) for word in words), error.value


def test_a_sampler_that_was_there_before_the_runs_folder_is_welcomed_once_it_sees_it(wire, monkeypatch):
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.2)
    facts = {"run_id": None}
    wire.learner()
    sampler = SamplerChannel(wire.address, "early", lambda: FACTS | facts, 30.0, 30.0)
    threading.Timer(1.0, facts.update, [{"run_id": "run"}]).start()
    try:
        assert sampler.connect().run_id == "run"
    finally:
        sampler.close(limit=5)


@pytest.mark.parametrize("changes", [dict(dataset="other"), dict(num_prompts=11), dict(max_new_tokens=9)])
def test_the_first_valid_group_decides_the_data_and_others_are_refused(wire, changes):
    collector, _ = wire.learner(max_staleness=1)
    odd = wire.sampler("odd", **changes)
    odd.connect()  # first, and yet nothing follows from what it says
    odd_tickets = next(odd.tickets(capacity=1))
    good = wire.sampler("good")
    good.connect()
    (ticket,) = next(good.tickets(capacity=1))
    assert ticket.ticket_id == odd_tickets[0].ticket_id == 0
    good.send(ticket.ticket_id, answer(ticket))
    wait_until(lambda: collector.queue == 1)
    odd.send(0, answer(odd_tickets[0]))
    with pytest.raises(ChannelError, match="start every sampler with the same --"):
        next(odd.tickets(capacity=1))
    with pytest.raises(ChannelError, match="start every sampler with the same --"):
        wire.sampler("late", **changes).connect()
    assert collector.queue == 1


def test_a_port_in_use_is_one_sentence(wire):
    wire.learner()
    with pytest.raises(ChannelError, match="choose another --port"):
        wire.learner()


def test_malformed_groups_are_dropped_and_their_tickets_granted_again(wire):
    collector, _ = wire.learner()
    sampler = wire.sampler()
    sampler.connect()
    batches = sampler.tickets(capacity=2)
    first, second = next(batches)
    sampler.send(first.ticket_id, b"garbage")
    sampler.send(second.ticket_id, answer(second, run_id="another run"))
    again = next(batches)
    while len(again) < 2:
        again += next(batches)
    assert {t.ticket_id for t in again} == {0, 1} and collector.malformed == 2
    for ticket in again:
        sampler.send(ticket.ticket_id, answer(ticket))
    assert len(collector.next_step(wait=10)) == 2


def test_groups_outside_the_runs_limits_are_refused(wire):
    collector, _ = wire.learner()
    collector.hello("s", hello())
    ticket = collector.grant("s", 1)[0]
    good = answer(ticket)
    for changes in (
        dict(temperature=0.5),
        dict(ref_logprobs=None),
        dict(prompt_ids=make_group().prompt_ids + 100),
    ):
        assert not collector.receive("s", ticket.ticket_id, answer(ticket, **changes))
    assert not collector.receive("s", 5, good)  # never issued
    assert not collector.receive("s", ticket.ticket_id, pack(make_group(ticket_id=3)))  # another ticket's
    assert collector.receive("s", ticket.ticket_id, good)
    assert collector.receive("s", ticket.ticket_id, good)  # a resend is acknowledged, not taken twice
    assert collector.queue == 1


def test_a_silent_samplers_tickets_go_to_another(wire, monkeypatch):
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.2)
    wire.learner(silence_limit=1.5)
    silent = wire.sampler("silent")
    silent.connect()
    lost = next(silent.tickets(capacity=2))
    silent._send = lambda frames: None  # it is there, yet nothing comes from it
    other = wire.sampler("other")
    other.connect()
    assert next(other.tickets(capacity=2)) == lost


def test_a_restarted_learner_gets_the_unacknowledged_groups_again(wire, monkeypatch):
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.2)
    _, learner = wire.learner()
    sampler = wire.sampler()
    sampler.connect()
    batches = sampler.tickets(capacity=2)
    tickets = next(batches)
    learner.close()
    for ticket in tickets:
        sampler.send(ticket.ticket_id, answer(ticket))
    collector, _ = wire.learner()
    deadline = time.monotonic() + 20
    while sampler._unanswered and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sampler._unanswered  # this learner does not know the tickets, but it has answered


def test_nobody_there_ends_with_the_address_and_the_flag(wire):
    sampler = wire.sampler(startup=0.5)
    with pytest.raises(ChannelError, match=r"tcp://127.0.0.1:\d+ .*--startup_timeout"):
        sampler.connect()


def test_a_learner_that_dies_is_named_after_the_timeout(wire, monkeypatch):
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.2)
    _, learner = wire.learner()
    sampler = wire.sampler(timeout=1.0)
    sampler.connect()
    learner.close()
    with pytest.raises(ChannelError, match="nothing heard from the learner at .*--timeout"):
        list(sampler.tickets(capacity=2))


def test_closing_with_nobody_there_is_quick(wire):
    started = time.monotonic()
    sampler = wire.sampler()
    sampler.close(limit=5)
    assert time.monotonic() - started < 5


def test_foreign_messages_are_counted_and_dropped(wire):
    collector, learner = wire.learner()
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"stranger")
    stranger.connect(wire.address)
    for frames in ([b""], [b"\xff\xff", b"{}"], [b"HELLO", b"{"], [b"HELLO", b"[]"], [b"HELLO", b"{}"], [b"a"] * 9):
        stranger.send_multipart(frames)
    stranger.send_multipart([b"GROUP", b'{"ticket_id": 0}', b"x"])  # well formed, from nobody who was welcomed
    deadline = time.monotonic() + 10
    while learner.foreign < 6 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert learner.foreign == 6
    stranger.close(linger=0)
    assert wire.sampler().connect().run_id == "run"


def test_a_ticket_whose_prompt_does_not_fit_is_dropped_and_replaced(wire):
    collector, _ = wire.learner()
    sampler = wire.sampler()
    sampler.connect()
    batches = sampler.tickets(capacity=2)
    first, second = next(batches)
    sampler.drop(first.ticket_id, "prompt longer than --max_prompt_length")
    sampler.send(second.ticket_id, answer(second))
    third = next(batches)
    assert [t.ticket_id for t in third] == [2]
    assert collector.dropped == {"prompt longer than --max_prompt_length": 1}


def test_groups_of_equal_rewards_are_replaced_up_to_the_limit_of_each_step(wire):
    collector, learner = wire.learner(resample=1, max_staleness=1)
    sampler = wire.sampler()
    sampler.connect()
    batches = sampler.tickets(capacity=2)
    trained = []
    for step in range(2):
        while (groups := collector.next_step(wait=0.2)) is None:
            for ticket in next(batches):
                sampler.send(ticket.ticket_id, answer(ticket, rewards=torch.tensor([1.0, 1.0])))
        trained.append([group.ticket_id for group in groups])
        collector.finish_step(version=step + 1)
        learner.wake()
    assert collector.dropped["equal rewards"] in (1, 2)  # the second step's limit may have been used by then
    assert 0 not in trained[0] and len(trained[0]) == len(trained[1]) == 2


def record(ticket, **changes) -> bytes:
    one = {"index": ticket.prompt_index, "response": "4", "answer": "4", "strict": ticket.version == 1}
    one |= {"lenient": True, "format": False, "truncated": False, "length": 1}
    return json.dumps(one | changes).encode()


def test_held_out_questions_come_in_turn_with_training_at_a_pinned_version(wire, tmp_path):
    collector, learner = wire.learner(max_staleness=1, held_out=HeldOut(tmp_path, limit=100))
    collector.evaluate(0)
    sampler = wire.sampler()
    sampler.connect()
    batches = sampler.tickets(capacity=2)  # of groups of 2
    training, held_out = next(batches), next(batches)
    assert [t.ticket_id for t in training] == [0, 1]
    assert [(t.held_out, t.version, t.prompt_index) for t in held_out] == [(True, 0, i) for i in range(4)]
    assert collector.pinned == {0}
    collector.evaluate(1)
    for ticket in held_out:
        sampler.send(ticket.ticket_id, record(ticket))
    assert [t.ticket_id for t in next(batches)] == [2, 3]
    (last,) = next(batches)  # five questions, as the samplers have; a batch is of one version
    assert (last.version, last.prompt_index) == (0, 4)
    sampler.drop(last.ticket_id, "prompt longer than --max_prompt_length")
    while collector.pinned:  # nothing left to train on: only questions come
        for ticket in next(batches):
            assert ticket.version == 1
            sampler.send(ticket.ticket_id, record(ticket))
            sampler.send(ticket.ticket_id, record(ticket, strict=False))  # the second one changes nothing
        deadline = time.monotonic() + 10
        while sampler._unanswered and time.monotonic() < deadline:
            time.sleep(0.02)
    first, second = read_evaluations(tmp_path)
    assert (first["version"], first["questions"], first["left_out"], first["accuracy"]) == (0, 4, 1, 0.0)
    assert (second["version"], second["questions"], second["left_out"], second["accuracy"]) == (1, 5, 0, 1.0)
    lines = (tmp_path / "evaluations" / "v00000001.jsonl").read_text().split("\n")
    assert [json.loads(line)["index"] for line in lines if line] == list(range(5))
    collector.evaluate(1)  # known already
    assert not collector.pinned


def test_malformed_records_are_refused_and_their_questions_asked_again(wire, tmp_path, capsys):
    collector, _ = wire.learner(held_out=HeldOut(tmp_path, limit=1))
    collector.hello("s", hello())
    collector.evaluate(3)
    collector.grant("s", 1)
    (ticket,) = collector.grant("s", 1)
    bad = [b"", b"{", b"[]", b"{}", record(ticket, index=7), record(ticket, strict=1), record(ticket, more=1)]
    for blob in bad * 20:
        assert not collector.receive("s", ticket.ticket_id, blob)
    assert collector.malformed == 20 * len(bad)
    assert capsys.readouterr().out.count("dropped a malformed evaluation record") == len(set(bad)) - 2  # kinds
    collector.arrived = 0
    for name in ("other", "third"):
        collector.hello(name, hello())
    (again,) = collector._held_out.grant("other", 5, 5, 30.0)
    assert again == ticket
    collector.leave("other", "it said goodbye")
    assert collector._held_out.grant("third", 5, 5, 30.0) == [ticket]
    assert collector.receive("third", ticket.ticket_id, record(ticket))
    assert not collector.pinned and read_evaluations(tmp_path)[0]["version"] == 3


def test_a_sampler_without_held_out_questions_is_refused_where_they_are_wanted(wire, tmp_path):
    wire.learner(held_out=HeldOut(tmp_path, limit=1))
    with pytest.raises(ChannelError, match="--eval_steps.*a single file"):
        wire.sampler(held_out={"error": "--dataset x is a single file"}).connect()


def test_an_evaluation_line_that_a_crash_cut_off_is_removed_and_its_version_evaluated_again(wire, tmp_path):
    (tmp_path / "evaluations.jsonl").write_text('{"version": 0, "questions": 1}\n{"version": 2, "que')
    collector, _ = wire.learner(held_out=HeldOut(tmp_path, limit=1))
    for version in (0, 2):
        collector.evaluate(version)
    assert collector.pinned == {2} and [one["version"] for one in collector.evaluations] == [0]
    assert (tmp_path / "evaluations.jsonl").read_text().count("\n") == 1


def test_a_sampler_that_has_not_seen_that_the_run_evaluates_is_welcomed_once_it_has(wire, tmp_path, monkeypatch):
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.2)
    facts = {"held_out": {}}
    wire.learner(held_out=HeldOut(tmp_path, limit=1))
    sampler = SamplerChannel(wire.address, "early", lambda: FACTS | facts, 30.0, 30.0)
    threading.Timer(1.0, facts.update, [{"held_out": FACTS["held_out"]}]).start()
    try:
        assert sampler.connect().run_id == "run"
    finally:
        sampler.close(limit=5)


def test_records_where_nobody_evaluates_are_refused(wire):
    collector, _ = wire.learner()
    collector.hello("s", hello(holding=[-5]))
    assert not collector.receive("s", -5, b"{}")
    collector.drop("s", -5, "no reason")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two folders of keys."""
    folders = tmp_path_factory.mktemp("keys") / "ours", tmp_path_factory.mktemp("keys") / "theirs"
    for folder in folders:
        make_keys(folder)
    return folders


def test_with_keys_the_owner_of_one_is_served(wire, keys):
    collector, learner = wire.learner(keys=keys[0])
    sampler = wire.sampler(keys=keys[0])
    assert sampler.connect().run_id == "run"
    for ticket in next(sampler.tickets(capacity=2)):
        sampler.send(ticket.ticket_id, answer(ticket))
    assert len(collector.next_step(wait=10)) == 2 and learner.handshakes_refused == 0


@pytest.mark.parametrize("theirs", [True, False], ids=["another key", "no key"])
def test_with_keys_nobody_else_gets_an_answer_and_it_is_logged(wire, keys, theirs, capsys):
    collector, learner = wire.learner(keys=keys[0])
    mixed = None
    if theirs:  # a stranger knows the learner's public key, and has a key of its own
        mixed = keys[1].parent / "mixed"
        shutil.copytree(keys[1], mixed, dirs_exist_ok=True)
        shutil.copy(keys[0] / "learner.key", mixed)
    stranger = wire.sampler("stranger", startup=3.0, keys=mixed)
    with pytest.raises(ChannelError, match="--startup_timeout.*do the --keys of both sides fit"):
        stranger.connect()
    assert learner.handshakes_refused > 0 and learner.samplers == [] and collector._hellos == {}
    assert "refused a connection without the right key" in capsys.readouterr().out
    assert wire.sampler("friend", keys=keys[0]).connect().run_id == "run"


def test_a_learner_with_another_key_gets_nothing_from_a_sampler(wire, keys):
    wire.learner(keys=keys[1])
    with pytest.raises(ChannelError, match="--startup_timeout"):
        wire.sampler(startup=2.0, keys=keys[0]).connect()


def test_keys_are_private_and_never_overwritten(keys, tmp_path):
    for name in ("learner", "sampler"):
        assert (keys[0] / f"{name}.key_secret").stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="holds learner.key"):
        make_keys(keys[0])
    with pytest.raises(ValueError, match="--keys .*learner.key_secret.*./run.sh keys"):
        LearnerChannel(f"tcp://127.0.0.1:{free_port()}", 30, tmp_path)


def test_a_flood_from_one_client_leaves_the_others_served_and_the_memory_bounded(wire):
    collector, learner = wire.learner()
    process = psutil.Process()
    flood = zmq.Context.instance().socket(zmq.DEALER)
    flood.setsockopt(zmq.SNDHWM, 4)
    flood.connect(wire.address)
    stop, blob = threading.Event(), bytes(1 << 20)
    sent = 0

    def pour():
        nonlocal sent
        while not stop.is_set():
            if flood.poll(100, zmq.POLLOUT):
                flood.send_multipart([b"GROUP", b'{"ticket_id": 0}', blob])
                sent += 1

    thread = threading.Thread(target=pour)
    before = process.memory_info().rss
    thread.start()
    try:
        sampler = wire.sampler()
        sampler.connect()
        for ticket in next(sampler.tickets(capacity=2)):
            sampler.send(ticket.ticket_id, answer(ticket))
        assert len(collector.next_step(wait=20)) == 2
        time.sleep(1)
    finally:
        stop.set()
        thread.join()
        flood.close(linger=0)
    assert sent > 100 and process.memory_info().rss - before < 200 << 20
