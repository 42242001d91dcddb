"""The protocol under foreign frames, cut connections and lost messages: nothing is lost, nothing ends it."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_channel import FACTS, HASH, RUN, WELCOME, answer, hello, published, wait_until, wire  # noqa: F401  (fixture)
from test_rollout import make_group
from tiny import free_port

from grpo import channel as channel_module
from grpo import clock, messages
from grpo.channel import ChannelError, LearnerChannel, SamplerChannel
from grpo.clock import AwakeClock
from grpo.collector import Collector
from grpo.held_out import MAX_QUESTIONS, HeldOut
from grpo.journal import Journal, read_history
from grpo.messages import TO_LEARNER, TO_SAMPLER, ForeignMessage, parse
from grpo.rollout import MalformedGroup, pack, unpack
from grpo.tickets import Ticket

KINDS = sorted(TO_LEARNER)
SHOWN = "prompt longer than --max_prompt_length"


def nest(depth: int, inner: str) -> bytes:
    """JSON of any depth, which would be slow to draw."""
    return (depth * "[" + inner + depth * "]").encode()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
headers = (
    values.map(lambda value: json.dumps(value).encode())
    | st.builds(nest, st.sampled_from([1, 100, 1000, 100_000]), st.sampled_from(["", "0", "NaN", "{"]))
    | st.binary(max_size=50)
)


@st.composite
def near_misses(draw) -> bytes:
    """The header of a message of ours with some fields replaced, added or missing."""
    sound = dict(
        vars(hello()) | {"held_out": FACTS["held_out"], "holding": [], "settings": {}},
        number=1, capacity=2, ticket_id=0, reason="no", failed=False,
    )  # fmt: skip
    kind = draw(st.sampled_from([TO_LEARNER[name] for name in KINDS]))
    header = {field.name: sound[field.name] for field in fields(kind)}
    for name in draw(st.lists(st.sampled_from([*header, "other"]), max_size=3)):
        if draw(st.booleans()):
            header.pop(name, None)
        else:
            header[name] = draw(values)
    return json.dumps(header, default=list).encode()


names = st.sampled_from([kind.encode() for kind in KINDS]) | st.binary(max_size=20)
strange = st.tuples(names, headers | near_misses())
with_blob = st.one_of(st.just([]), st.lists(st.binary(max_size=100), min_size=1, max_size=2))


@given(strange, with_blob, st.sampled_from([TO_LEARNER, TO_SAMPLER]))
def test_foreign_frames_are_a_message_or_foreign_and_nothing_else(frames, blob, kinds):
    try:
        message, _ = parse([*frames, *blob], kinds)
    except ForeignMessage as error:
        assert len(str(error)) < 2000
    else:
        assert type(message) in kinds.values()


BOMBS = {
    "deep": (b"BEAT", b"[" * 1000),
    "deeper": (b"BEAT", b"[" * 500_000),
    "infinite": (b"WANT", b'{"number": Infinity, "capacity": 1}'),
    "huge": (b"WANT", b'{"number": 1' + b"0" * 400 + b', "capacity": 1}'),
    "endless": (b"HELLO", json.dumps(vars(hello()) | {"holding": [float("inf")]}, default=vars).encode()),
    "held out": (b"HELLO", json.dumps(vars(hello()) | {"held_out": "yes"}, default=vars).encode()),
    "prompts": (b"HELLO", json.dumps(vars(hello(num_prompts=10**13)), default=vars).encode()),
}


@pytest.mark.parametrize("frames", BOMBS.values(), ids=BOMBS.keys())
def test_one_message_does_not_end_the_learner(wire, frames):  # noqa: F811
    _, learner = wire.learner()
    with stranger(wire.address) as socket:
        socket.send_multipart(frames)
        wait_until(lambda: learner.foreign == 1)
    assert wire.sampler().connect().run_id == "run"


class stranger:
    """A client that sends what it likes."""

    def __init__(self, address: str, name: bytes = b"stranger"):
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(address)

    def __enter__(self):
        return self._socket

    def __exit__(self, *_):
        self._socket.close()


def train(collector, learner, sampler, steps: int) -> list[int]:
    """Good steps by a good sampler; the tickets that were trained on."""
    trained, batches = [], sampler.tickets(capacity=2)
    done = threading.Event()

    def serve():
        for tickets in batches:
            for ticket in tickets:
                sampler.send(ticket.ticket_id, answer(ticket))
            if done.is_set():
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    for step in range(1, steps + 1):
        deadline = time.monotonic() + 30
        while (groups := collector.next_step(wait=0.5)) is None:
            learner.check()
            sampler.check()
            assert time.monotonic() < deadline
        trained += [group.ticket_id for group in groups]
        done.set() if step == steps else None
        collector.finish_step(step)
        learner.wake()
    thread.join(10)
    return trained


def test_arbitrary_frames_before_and_after_hello_leave_three_good_steps(wire, monkeypatch):  # noqa: F811
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.1)
    collector, learner = wire.learner(max_staleness=1)
    sent, good_hello = 0, json.dumps(vars(hello()), default=vars).encode()
    with stranger(wire.address, b"before") as before, stranger(wire.address, b"after") as after:
        after.send_multipart([b"HELLO", good_hello])

        @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(strange, with_blob)
        def pour(frames, blob):
            nonlocal sent
            if frames[0] in (b"BYE", b"HELLO") and not blob:
                return  # well formed, these are the stranger's own business
            for socket in (before, after):
                assert socket.poll(5000, zmq.POLLOUT)
                socket.send_multipart([*frames, *blob])
                sent += 1
                while socket.poll(0):
                    socket.recv_multipart()

        pour()
        assert sent > 200
        assert train(collector, learner, wire.sampler("good"), steps=3) == [0, 1, 2, 3, 4, 5]
    assert learner.foreign > 50 and collector.arrived >= 6


GROUPS_OF_NOBODY = {
    "stats that overflow": dict(stats={"x": 10**400}),
    "a version that overflows": dict(adapter_version=10**400),
    "a version of the future": dict(adapter_version=11),
    "a hash of no version": dict(adapter_sha256="f" * 64),
    "another ticket's prompt": dict(prompt_index=10**6),
    "a name that draws on the terminal": dict(sampler_id="\x1b[2J"),
    "rewards that overflow": dict(rewards=torch.tensor([3e38, -3e38])),
    "a part that is no number": dict(components={"format": torch.tensor([float("nan"), 1.0])}),
    "a temperature that is no number": dict(temperature=float("nan")),
}


@pytest.mark.parametrize("changes", GROUPS_OF_NOBODY.values(), ids=GROUPS_OF_NOBODY.keys())
def test_a_group_that_cannot_be_true_never_reaches_the_journal(wire, tmp_path, changes):  # noqa: F811
    collector, _ = wire.learner(folder=tmp_path)
    collector.hello("s", hello())
    (ticket,) = collector.grant("s", 1)
    assert not collector.receive("s", ticket.ticket_id, answer(ticket, **changes))
    assert not list((tmp_path / "journal").iterdir()) and collector.queue == 0
    assert collector.receive("s", ticket.ticket_id, answer(ticket))  # and the ticket is still open


@given(st.binary(max_size=200) | st.builds(lambda n, b: n.to_bytes(8, "little") + b, st.integers(0, 60), st.binary()))
def test_any_bytes_are_a_group_or_malformed(blob):
    with pytest.raises(MalformedGroup):
        unpack(blob)


def test_a_group_in_the_journal_that_cannot_be_read_is_asked_for_again(tmp_path):
    def collector() -> Collector:
        settings = dict(groups_per_step=2, max_staleness=1, seed=0, max_steps=0)
        return Collector(RUN, WELCOME, journal=Journal(tmp_path, keep=False), hash_of=published, **settings)

    one = collector()
    one.hello("s", hello())
    for ticket in one.grant("s", 2):
        one.receive("s", ticket.ticket_id, answer(ticket))
    (tmp_path / "journal" / "t00000001.group").write_bytes(b"garbage")
    again = collector()
    assert again.queue == 1
    again.hello("s", hello())
    assert again.grant("s", 1)[0].ticket_id == 1


def test_a_ticket_is_dropped_by_the_one_who_has_it_alone(wire):  # noqa: F811
    collector, _ = wire.learner()
    for name in ("one", "other"):
        collector.hello(name, hello())
    collector.grant("one", 2)
    collector.drop("other", 0, "mischief")
    assert collector.receive("one", 0, answer(collector._book_of("one").ticket(0))) and not collector.dropped


def test_a_dataset_without_a_prompt_that_fits_ends_after_one_round_and_names_the_flag(wire, capsys):  # noqa: F811
    collector, _ = wire.learner(max_staleness=1)
    collector.hello("s", hello())
    for _ in range(5):
        for ticket in collector.grant("s", 2):
            collector.drop("s", ticket.ticket_id, SHOWN)
    with pytest.raises(ChannelError, match=r"10 tickets in a row were dropped.*--max_prompt_length \(10\)"):
        collector.next_step(wait=5)
    assert capsys.readouterr().out.count("dropped ticket") == 10


def test_one_prompt_that_fits_is_enough_however_often_the_others_are_dropped(wire):  # noqa: F811
    collector, _ = wire.learner(groups_per_step=2, max_staleness=1)
    collector.hello("s", hello())
    delivered = 0
    for _ in range(40):
        for ticket in collector.grant("s", 2):
            if ticket.prompt_index == 3:
                delivered += collector.receive("s", ticket.ticket_id, answer(ticket, adapter_version=0))
            else:
                collector.drop("s", ticket.ticket_id, SHOWN)
        if collector.next_step(wait=0):
            collector.finish_step(version=None)
    assert delivered >= 3


def test_log_lines_about_drops_are_bounded_and_a_group_in_between_starts_the_count_anew(wire, capsys):  # noqa: F811
    collector, _ = wire.learner(groups_per_step=50, max_staleness=0)
    collector.hello("s", hello())
    for round_ in range(4):
        for i, ticket in enumerate(collector.grant("s", 8)):
            if i:
                collector.drop("s", ticket.ticket_id, SHOWN)
            else:
                assert collector.receive("s", ticket.ticket_id, answer(ticket))
        assert collector.next_step(wait=0) is None, round_
    assert capsys.readouterr().out.count("dropped ticket") == 10 and collector.dropped == {SHOWN: 28}


def test_a_sampler_that_hangs_and_beats_loses_its_tickets_to_others(wire, monkeypatch):  # noqa: F811
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr("grpo.tickets.MIN_DEADLINE", 0.5)
    collector, learner = wire.learner(patience=1.0)
    hung = wire.sampler("hung")
    hung.connect()
    assert len(next(hung.tickets(capacity=2))) == 2  # and that was the last of it, though it beats on
    assert train(collector, learner, wire.sampler("good"), steps=2) == [0, 1, 2, 3]
    assert "hung" in learner.samplers


@pytest.mark.parametrize("count", [1, 4, 64])
def test_tickets_are_shared_over_the_wire(wire, count):  # noqa: F811
    collector, learner = wire.learner(groups_per_step=8, max_staleness=1)
    learner.close()
    learner = LearnerChannel(wire.address, 30)
    samplers = [wire.sampler(f"s{i}", batch_size=0) for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        learner.start(collector)
        list(pool.map(SamplerChannel.connect, samplers))
        taken = []
        for sampler in samplers:  # all ask before anything is granted
            sampler._outbox.put(messages.frames(messages.Want(1, 1000)))
        monkeypatched = collector.grant
        collector.grant = lambda sampler_id, capacity, asking: taken.append(len(asking)) or []
        wait_until(lambda: taken and taken[-1] == count)
        collector.grant = monkeypatched
        learner.wake()
        wait_until(lambda: len(learner._answers) == min(count, 16))
    shares = sorted(len(answer.tickets) for answer in learner._answers.values())
    assert shares == {1: [16], 4: [4] * 4, 64: [1] * 16}[count]
    learner.close()


def test_a_learner_that_comes_back_with_other_settings_is_followed_or_named(wire, monkeypatch):  # noqa: F811
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.1)
    _, learner = wire.learner()
    one = wire.sampler("one")
    assert one.connect().needs_reference
    learner.close()
    import test_channel

    monkeypatch.setattr(test_channel, "WELCOME", replace(WELCOME, needs_reference=False))
    _, learner = wire.learner()
    wait_until(lambda: not one.welcome.needs_reference)  # --beta 0 is taken over
    learner.close()
    monkeypatch.setattr(test_channel, "WELCOME", replace(WELCOME, dtype="bfloat16"))
    wire.learner()
    with pytest.raises(ChannelError, match="restarted with dtype 'bfloat16', this sampler works with 'float32'"):
        next(one.tickets(capacity=2))


def test_a_stop_is_repeated_to_a_sampler_that_connects_late(wire, monkeypatch):  # noqa: F811
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.1)
    _, learner = wire.learner()
    deaf = wire.sampler("deaf")
    deaf.connect()
    handle, heard = deaf._handle, []

    def lose_two_stops(received):
        if received[0] == b"STOP" and len(heard) < 2:
            return heard.append(1)
        return handle(received)

    deaf._handle = lose_two_stops
    stopper = threading.Thread(target=learner.stop_samplers, args=("done", 20.0))
    stopper.start()
    late = wire.sampler("late")
    with pytest.raises(ChannelError, match="has ended: done"):
        late.connect()
    assert list(deaf.tickets(capacity=2)) == [] and deaf.stop_reason == "done" and len(heard) == 2
    for sampler in (deaf, late):
        sampler.finish()
    stopper.join(10)
    assert not stopper.is_alive() and learner.samplers == []


def test_the_reason_for_which_a_sampler_left_reaches_the_learner(wire, capsys):  # noqa: F811
    collector, learner = wire.learner()
    sampler = wire.sampler("s")
    sampler.connect()
    next(sampler.tickets(capacity=2))
    sampler.finish(reason="it failed: reward_function raised KeyError", failed=True)
    wait_until(lambda: not learner.samplers)
    assert learner.who() == (
        "none (start one with ./run.sh sampler); sampler s left: it failed: reward_function raised KeyError"
    )
    assert "left (it failed: reward_function raised KeyError); 2 of its tickets go to others" in capsys.readouterr().out


def test_a_ticket_that_ends_every_sampler_is_dropped_after_the_third(wire):  # noqa: F811
    collector, _ = wire.learner()
    for name in "abc":
        collector.hello(name, hello())
        assert collector.grant(name, 1)[0].ticket_id == 0
        collector.leave(name, "it failed: out of memory", failed=True)
    collector.hello("d", hello())
    (ticket,) = collector.grant("d", 1)
    assert ticket.ticket_id == 1 and collector.receive("d", 1, answer(ticket))
    assert collector.dropped == {"the samplers that had it failed": 1}


def test_ones_own_sleep_is_not_the_others_silence(wire, monkeypatch):  # noqa: F811
    time_ = [0.0]
    sleepy = AwakeClock(lambda: time_[0])
    readings = []
    for now in (0.0, 1.0, 2.0, 1000.0, 1001.0, 1002.0):
        time_[0] = now
        readings.append(sleepy.now())
    assert readings == [0.0, 1.0, 2.0, 2.0, 3.0, 4.0]
    assert clock.SLEEP_SECONDS > channel_module.BEAT_SECONDS  # a thread that runs reads it more often than that


class Thief:
    """Stands between samplers and the learner; swallows the nth message of a kind and cuts both connections then."""

    def __init__(self, target: str, kind: bytes, position: int):
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self._target, self._kind, self._left, self.stolen = target, kind, position, 0
        self._context, self._stopping = zmq.Context(), threading.Event()
        self._front, self._back = None, {}
        self._open_front()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _open_front(self) -> None:
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        deadline = time.monotonic() + 5
        while True:
            try:
                return self._front.bind(self.address)
            except zmq.ZMQError:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def _back_of(self, name: bytes) -> zmq.Socket:
        if name not in self._back:
            self._back[name] = self._context.socket(zmq.DEALER)
            self._back[name].setsockopt(zmq.IDENTITY, name)
            self._back[name].setsockopt(zmq.LINGER, 0)
            self._back[name].connect(self._target)
        return self._back[name]

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._front.poll(5):
                name, *frames = self._front.recv_multipart()
                if self._steals(frames):
                    continue
                self._back_of(name).send_multipart(frames)
            for name, back in list(self._back.items()):
                while back.poll(0):
                    frames = back.recv_multipart()
                    if self._steals(frames):
                        break
                    self._front.send_multipart([name, *frames])
        self._cut()
        self._front.close()
        self._context.term()

    def _steals(self, frames: list[bytes]) -> bool:
        self._left -= frames[0] == self._kind
        if self._left != 0 or self.stolen:
            return False
        self.stolen = 1
        self._front.close()
        self._cut()
        self._open_front()
        return True

    def _cut(self) -> None:
        for back in self._back.values():
            back.close()
        self._back = {}

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(10)


class ShortRun:
    """Two steps of two groups: a refusal, a welcome, a dropped prompt, a restart of the learner, a stop, a goodbye.

    One message is swallowed, and the connections are cut, on the way.
    """

    def __init__(self, folder, kind: bytes, position: int):
        self.folder, self.address = folder, f"tcp://127.0.0.1:{free_port()}"
        self.start_learner()
        self.thief = Thief(self.address, kind, position)
        self.facts, self.failures, self.trained = FACTS | {"run_id": None}, [], []
        self.sampler = SamplerChannel(self.thief.address, "s", lambda: self.facts, 20, 20)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def start_learner(self, done: int = 0) -> None:
        settings = dict(groups_per_step=2, max_staleness=1, seed=0, max_steps=2, steps_done=done, version=done)
        journal = Journal(self.folder, keep=False)
        self.collector = Collector(RUN, WELCOME, journal=journal, hash_of=published, **settings)
        self.learner = LearnerChannel(self.address, 30)
        self.learner.start(self.collector)

    def serve(self) -> None:
        try:
            time.sleep(0.3)  # refused so far, for its folder has no run yet
            self.facts = FACTS
            self.sampler.connect()
            time.sleep(0.3)  # beats
            for tickets in self.sampler.tickets(capacity=1):
                for ticket in tickets:
                    if ticket.ticket_id == 1:
                        self.sampler.drop(1, SHOWN)
                    else:
                        self.sampler.send(ticket.ticket_id, answer(ticket))
            assert self.sampler.finish(limit=15) == 0
        except Exception as error:  # shown by the test
            self.failures.append(error)

    def train(self, step: int) -> None:
        deadline = time.monotonic() + 60
        while (groups := self.collector.next_step(wait=0.2)) is None:
            self.learner.check()
            assert time.monotonic() < deadline and not self.failures, self.failures
        self.trained += [group.ticket_id for group in groups]
        self.collector.finish_step(step)
        self.learner.wake()

    def to_the_end(self) -> tuple[int, list[int], dict]:
        """How many messages were stolen, what was trained and dropped."""
        self.train(1)
        self.learner.close()
        self.start_learner(done=1)
        self.train(2)
        self.learner.stop_samplers("done", limit=30)
        self.thread.join(30)
        assert not self.thread.is_alive() and not self.failures, self.failures
        assert self.learner.samplers == []
        self.thief.close()
        self.learner.close()
        return self.thief.stolen, self.trained, read_history(self.folder).dropped


ALL_KINDS = sorted(TO_LEARNER.keys() | TO_SAMPLER.keys())


@pytest.mark.slow
def test_no_swallowed_message_and_no_cut_connection_loses_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(channel_module, "RESEND_SECONDS", 1.0)
    cases = [(kind, position) for kind in ALL_KINDS for position in range(1, 7)]

    def run(case):
        kind, position = case
        folder = tmp_path / f"{kind}{position}"
        folder.mkdir()
        return case, ShortRun(folder, kind.encode(), position).to_the_end()

    with ThreadPoolExecutor(6) as pool:
        results = dict(pool.map(run, cases))
    for case, (_, trained, dropped) in results.items():
        assert sorted(trained) == [0, 2, 3, 4] and dropped == {1: SHOWN}, case
    stolen = {kind: sum(results[kind, n][0] for n in range(1, 7)) for kind in ALL_KINDS}
    print(stolen)
    assert all(stolen.values()), f"some kind was never stolen: {stolen}"


def test_messages_come_back_as_they_were():
    rng = random.Random(0)
    samples = [
        hello(holding=[3, -5]),
        messages.Want(rng.randint(1, 9), 2),
        messages.Drop(1, SHOWN),
        messages.Bye("gone", True),
        messages.Beat(),
    ]
    for sample in samples:
        assert parse(messages.frames(sample), TO_LEARNER) == (sample, b"")
    for sample in (WELCOME, messages.Tickets(2, (Ticket(-3, 1, 2**62, 4),)), messages.Stop("done"), messages.Who()):
        assert parse(messages.frames(sample), TO_SAMPLER) == (sample, b"")
    assert pack(make_group(adapter_sha256=HASH))


def test_samplers_that_say_ever_other_data_shut_nobody_out(wire):  # noqa: F811
    collector, learner = wire.learner()
    with stranger(wire.address) as socket:
        for i in range(40):
            socket.send_multipart(messages.frames(hello(num_prompts=11 + i)))
        wait_until(lambda: collector._hellos and collector._hellos["stranger"].num_prompts == 50)
    for i in range(40):
        collector.hello(f"guest{i}", hello(num_prompts=11 + i))
        collector.leave(f"guest{i}", "it said goodbye")
    assert wire.sampler("good").connect().run_id == "run" and len(collector._books) < 5
    learner.check()


def test_a_sampler_that_changes_what_it_says_keeps_no_ticket_of_the_other_data(wire):  # noqa: F811
    collector, _ = wire.learner(max_staleness=1)
    for name in ("good", "fickle"):
        collector.hello(name, hello())
    assert [t.ticket_id for t in collector.grant("fickle", 9)] == [0, 1, 2, 3]
    collector.hello("fickle", hello(num_prompts=99, holding=[0, 1, 2, 3]))
    assert [t.ticket_id for t in collector.grant("good", 9)] == [0, 1, 2, 3]


def evaluated(index: int) -> bytes:
    record = {"index": index, "response": "4", "answer": "4", "strict": True, "lenient": True, "format": False}
    return json.dumps(record | {"truncated": False, "length": 1}).encode()


def evaluate_all(collector, name: str) -> None:
    for _ in range(20):
        for ticket in collector.grant(name, 2):
            blob = evaluated(ticket.prompt_index) if ticket.held_out else answer(ticket)
            assert collector.receive(name, ticket.ticket_id, blob)


def test_an_evaluation_record_that_nobody_asked_for_binds_nobody(wire, tmp_path):  # noqa: F811
    collector, _ = wire.learner(held_out=HeldOut(tmp_path, limit=3), max_staleness=1)
    collector.evaluate(0)
    collector.hello("odd", hello(held_out={"dataset": "z", "num_prompts": 50}))
    collector.hello("good", hello())
    for version, index in ((999, 1), (0, 30)):
        collector.receive("odd", -1 - (version * MAX_QUESTIONS + index), evaluated(index))
    evaluate_all(collector, "good")
    assert not collector.pinned and collector.evaluations[0]["questions"] == 3


def test_questions_given_up_by_a_sampler_with_other_ones_are_asked(wire, tmp_path):  # noqa: F811
    collector, _ = wire.learner(held_out=HeldOut(tmp_path, limit=100), max_staleness=1)
    collector.evaluate(0)
    collector.hello("odd", hello(held_out={"dataset": "z", "num_prompts": 50}))
    collector.hello("good", hello())
    for _ in range(10):
        for ticket in collector.grant("odd", 1):
            collector.drop("odd", ticket.ticket_id, SHOWN) if ticket.held_out else None
    collector.leave("odd", "it said goodbye")
    evaluate_all(collector, "good")
    assert not collector.pinned
    assert collector.evaluations[0]["questions"] == 5 and collector.evaluations[0]["left_out"] == 0


def test_a_question_that_ends_every_sampler_is_left_out_after_the_third(wire, tmp_path, capsys):  # noqa: F811
    collector, _ = wire.learner(held_out=HeldOut(tmp_path, limit=1))
    collector.evaluate(0)
    for name in "abc":
        collector.hello(name, hello())
        collector.grant(name, 1)
        assert collector.grant(name, 1)[0].held_out
        collector.leave(name, "it failed: out of memory", failed=True)
    assert not collector.pinned and collector.evaluations[0]["left_out"] == 1
    assert "question 0 of version 0 is left out" in capsys.readouterr().out


def test_a_sampler_that_drops_everything_is_refused_while_others_are_there(wire):  # noqa: F811
    collector, _ = wire.learner(max_staleness=1)
    collector.hello("good", hello())
    collector.hello("bad", hello())
    tickets = collector.grant("good", 2)
    with pytest.raises(ChannelError, match=r"1\d tickets in a row were dropped.*--max_prompt_length \(1\d\)"):
        for _ in range(20):  # two epochs: each of the ten prompts has come up
            for ticket in collector.grant("bad", 1):
                collector.drop("bad", ticket.ticket_id, SHOWN)
    for ticket in tickets:
        assert collector.receive("good", ticket.ticket_id, answer(ticket))
    assert [group.ticket_id for group in collector.next_step(wait=0)] == [0, 1]


def test_reasons_without_end_become_other_reasons(wire):  # noqa: F811
    collector, _ = wire.learner(max_staleness=1, groups_per_step=50)
    collector.hello("s", hello(num_prompts=1000))
    for i, ticket in enumerate(collector.grant("s", 100)):
        collector.drop("s", ticket.ticket_id, f"reason {i}")
    dropped = collector._book_of("s").dropped
    assert len(dropped) == 33 and dropped["other reasons"] == 68


def test_a_group_too_long_for_the_wire_is_dropped_and_the_next_one_arrives(wire, monkeypatch):  # noqa: F811
    monkeypatch.setattr(channel_module, "MAX_GROUP_BYTES", 1 << 14)  # at both ends
    collector, _ = wire.learner(max_staleness=1)
    sampler = wire.sampler()
    sampler.connect()
    batches = sampler.tickets(capacity=2)
    long, short = next(batches)
    sampler.send(long.ticket_id, bytes(1 << 15))
    sampler.send(short.ticket_id, answer(short))
    wait_until(lambda: collector.queue == 1 and collector.dropped)
    assert "lower --max_new_tokens or --group_size" in next(iter(collector.dropped))


def test_more_held_out_questions_than_one_message_holds_are_granted_in_parts(wire, tmp_path):  # noqa: F811
    facts = {"held_out": {"dataset": "e", "num_prompts": 30_000}}
    collector, _ = wire.learner(held_out=HeldOut(tmp_path, limit=30_000))
    collector.evaluate(2**40)
    sampler = wire.sampler(**facts)
    sampler.connect()
    batches = sampler.tickets(capacity=10**9)
    assert [len(next(batches)) for _ in range(2)] == [2, 4096]


def test_a_hello_that_no_learner_reads_is_a_sentence_at_the_start(wire):  # noqa: F811
    with pytest.raises(ValueError, match="holds a system_prompt that is .* text of 65536 characters"):
        wire.sampler(settings={"system_prompt": "x" * 70_000})


def test_a_stop_is_obeyed_by_a_sampler_that_was_busy_for_longer_than_its_timeout(wire, monkeypatch):  # noqa: F811
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.1)
    _, learner = wire.learner()
    busy = wire.sampler("busy", timeout=0.5)
    busy.connect()
    batches = busy.tickets(capacity=2)
    next(batches)
    learner.stop_samplers("done", limit=0.2)
    learner.close()
    time.sleep(1.5)
    assert list(batches) == [] and busy.stop_reason == "done"


def test_a_disk_that_is_full_ends_the_learner_with_a_sentence_so_that_it_saves(wire, monkeypatch):  # noqa: F811
    collector, learner = wire.learner()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(collector._journal, "put", full)
    sampler = wire.sampler()
    sampler.connect()
    (ticket,) = next(sampler.tickets(capacity=1))
    sampler.send(ticket.ticket_id, answer(ticket))
    wait_until(lambda: learner._error)
    with pytest.raises(ChannelError, match="the channel failed: OSError.*No space left on device"):
        learner.check()


def test_a_held_out_question_has_half_of_the_patience_however_quick_the_groups_are(wire, tmp_path):  # noqa: F811
    collector, _ = wire.learner(held_out=HeldOut(tmp_path, limit=1))
    collector.hello("s", hello())
    for ticket in collector.grant("s", 2):
        collector.receive("s", ticket.ticket_id, answer(ticket))
    assert collector._book.deadline() == 30 and collector._held_out_limit() == 150
