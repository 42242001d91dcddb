"""The two ends of the wire: a ROUTER at the learner, a DEALER at each sampler, each in a thread of its own.

A message is a kind, a JSON header and, for GROUP, one blob. What the ends promise: a group is kept by the sampler
until it is acknowledged and sent again after any reconnect; a request for tickets is numbered and repeated until it is
answered, and the same number always gets the same tickets; a learner that was restarted asks an unknown sampler to
introduce itself again (WHO); every wait has a limit, says what it waits for, and ends with an error naming the peer.

    sampler -> learner   HELLO  WANT  GROUP  DROP  BEAT  BYE
    learner -> sampler   WELCOME  REFUSED  WHO  TICKETS  ACK  BEAT  STOP
"""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from grpo.keys import guard_learner, guard_sampler
from grpo.rollout import MAX_GROUP_BYTES
from grpo.tickets import Ticket

BEAT_SECONDS = 2.0
NOTICE_SECONDS = 10.0  # how often a wait says what it waits for
REFUSAL_SECONDS = 10.0  # how long a refusal that may pass is met with another HELLO
RESEND_SECONDS = 20.0  # an unacknowledged group is sent again after this
MAX_REFUSED_GROUPS = 10  # a sampler whose groups are not taken stops instead of generating for nothing
LINGER_MS = 2000  # what a closing socket may take to hand over its last messages
MAX_HEADER_BYTES = 1 << 20
MAX_SAMPLERS = 1024
MAX_QUEUED = 16  # messages that wait in a socket for each peer: what a flood can take of the memory
_REFUSED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ChannelError(RuntimeError):
    """The other side refused, fell silent, or the address cannot be used; the message names it and the flag."""


class Refusal(ChannelError):
    """The learner's reason for refusing a sampler; `passing` if it may be about to go away by itself."""

    def __init__(self, reason: str, passing: bool = False):
        super().__init__(reason)
        self.passing = passing


def _frames(kind: str, header: dict | None = None, blob: bytes | None = None) -> list[bytes]:
    frames = [kind.encode(), json.dumps(header or {}).encode()]
    return frames if blob is None else [*frames, blob]


def _parse(frames: list[bytes]) -> tuple[str, dict, bytes | None]:
    """Kind, header and blob of a message; ValueError if it is none of ours."""
    if len(frames) not in (2, 3):
        raise ValueError(f"a message of {len(frames)} frames")
    if len(frames[0]) > 16 or len(frames[1]) > MAX_HEADER_BYTES:
        raise ValueError(f"a kind of {len(frames[0])} and a header of {len(frames[1])} bytes")
    header = json.loads(frames[1])
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return frames[0].decode("ascii"), header, frames[2] if len(frames) == 3 else None


class Desk(Protocol):
    """What the learner's end calls for each message; see grpo/collector.py."""

    def hello(self, sampler_id: str, header: dict) -> dict:
        """Return the WELCOME header, or raise Refusal."""

    def grant(self, sampler_id: str, capacity: int) -> list[Ticket]: ...

    def receive(self, sampler_id: str, ticket_id: int, blob: bytes) -> bool:
        """Take in a group; True once it is safe here, False for bytes that are no group for this ticket."""

    def drop(self, sampler_id: str, ticket_id: int, reason: str) -> None: ...

    def leave(self, sampler_id: str, reason: str) -> None:
        """The sampler said goodbye or fell silent: its tickets go to others."""


class _Endpoint:
    """A socket in a thread of its own, with a wake-up line from the other threads and an error slot."""

    def __init__(self, name: str):
        self._context = zmq.Context()  # one per process and made after any fork: sockets do not survive one
        self._socket: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None
        self._authenticator = None  # checks the other side's keys
        self.handshakes_refused = 0  # connections that came without the right key
        self._outbox: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._wake_address = f"inproc://wake-{id(self)}"
        self._wake_receiver = self._context.socket(zmq.PULL)
        self._wake_receiver.bind(self._wake_address)
        self._wake_sender = self._context.socket(zmq.PUSH)
        self._wake_sender.connect(self._wake_address)
        self._wake_lock = threading.RLock()  # a signal handler may close the channel in the middle of a wake-up
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def wake(self) -> None:
        """Make the thread look at its queues now."""
        with self._wake_lock:
            if not self._wake_sender.closed:
                try:
                    self._wake_sender.send(b"", zmq.DONTWAIT)
                except zmq.Again:
                    pass  # plenty of wake-ups are on their way already

    def close(self, limit: float = 10.0) -> None:
        """Hand over what is queued, end the thread, close the socket; bounded by `limit` seconds."""
        self._stopping.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(limit)
        with self._wake_lock:
            self._wake_sender.close(linger=0)
        if self._authenticator:
            self._authenticator.stop()
            self._authenticator = None
        self._context.destroy(linger=LINGER_MS)

    def check(self) -> None:
        """Raise in the caller's thread what ended the channel's thread."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                ready = dict(poller.poll(timeout=BEAT_SECONDS * 250))
                while self._wake_receiver in ready and self._wake_receiver.poll(0):
                    self._wake_receiver.recv()
                if self._socket in ready:
                    self._drain()
                while self._monitor in ready and self._monitor.poll(0):
                    recv_monitor_message(self._monitor)
                    self._note_refused_handshake()
                self._tick(time.monotonic())
                self._flush()
            self._flush()
        except Exception as error:  # whatever it is, the main thread must see it and not wait for ever
            self._error = error
        finally:
            self._wake_receiver.close(linger=0)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=LINGER_MS)

    def _open_socket(self, kind: int) -> zmq.Socket:
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._monitor = self._socket.get_monitor_socket(_REFUSED_HANDSHAKES)
        return self._socket

    def _note_refused_handshake(self) -> None:
        self.handshakes_refused += 1

    def _drain(self) -> None:
        while not self._stopping.is_set():
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._handle(frames)

    def _flush(self) -> None:
        while not self._outbox.empty():
            self._send(self._outbox.get())

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            pass  # the peer is gone or its queue is full: groups are sent again, everything else is asked for again

    def _handle(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _tick(self, now: float) -> None:
        raise NotImplementedError


def numeric(host: str) -> str:
    """The address of a host name, for a socket listens at addresses alone.

    Raises:
        ChannelError: a name that this machine cannot resolve.
    """
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ChannelError(f"--host {host} is no address and no name that is known here: {error.strerror}") from error


class LearnerChannel(_Endpoint):
    """The learner's end: binds `address` at once, and from `start` on talks to samplers on behalf of a Desk.

    What samplers send before that waits in the socket, so the port is sure before a model is loaded.
    """

    def __init__(self, address: str, silence_limit: float, keys: Path | None = None):
        super().__init__("learner-channel")
        self.address, self._silence_limit = address, silence_limit
        self._desk: Desk | None = None
        self._last_heard: dict[bytes, float] = {}  # welcomed samplers only
        self._wants: dict[bytes, tuple[int, int]] = {}  # unanswered requests: (number, capacity)
        self._answers: dict[bytes, tuple[int, list[bytes]]] = {}  # the last answered one: (number, frames)
        self.foreign = 0  # messages that were none of ours
        self._open_socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_GROUP_BYTES)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a sampler that reconnects takes its name with it
        try:
            if keys:
                self._authenticator = guard_learner(self._socket, keys, self._context)
            self._socket.bind(address)
        except ValueError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise ChannelError(f"cannot listen at {address}: {error.strerror}; choose another --port") from error

    def start(self, desk: Desk) -> None:
        """Begin to answer samplers."""
        self._desk = desk
        self._thread.start()

    @property
    def samplers(self) -> list[str]:
        """Ids of the samplers that are present."""
        return [identity.decode() for identity in list(self._last_heard)]

    def stop_samplers(self, reason: str, limit: float = 10.0) -> None:
        """Tell every sampler that the run is over and wait, bounded, until they have said goodbye."""
        deadline = time.monotonic() + limit
        for identity in list(self._last_heard):
            self._outbox.put([identity, *_frames("STOP", {"reason": reason})])
        self.wake()
        while self._last_heard and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.02)

    def _note_refused_handshake(self) -> None:
        super()._note_refused_handshake()
        if self.handshakes_refused == 1:
            print("channel: refused a connection without the right key; further ones are only counted", flush=True)

    def _handle(self, frames: list[bytes]) -> None:
        identity, *rest = frames
        try:
            kind, header, blob = _parse(rest)
            self._dispatch(identity, kind, header, blob)
        except (ValueError, KeyError, TypeError) as error:
            self.foreign += 1
            if self.foreign == 1:
                print(f"channel: dropped a message that is none of ours ({error}); further ones are only counted")

    def _dispatch(self, identity: bytes, kind: str, header: dict, blob: bytes | None) -> None:
        sampler_id = identity.decode("ascii")
        if kind == "HELLO":
            return self._welcome(identity, sampler_id, header)
        if identity not in self._last_heard:
            return self._send([identity, *_frames("WHO")])
        self._last_heard[identity] = time.monotonic()
        if kind == "WANT":
            self._want(identity, int(header["number"]), int(header["capacity"]))
        elif kind == "GROUP":
            ticket_id = int(header["ticket_id"])
            taken = self._desk.receive(sampler_id, ticket_id, blob or b"")
            self._send([identity, *_frames("ACK", {"ticket_id": ticket_id, "taken": taken})])
        elif kind == "DROP":
            self._desk.drop(sampler_id, int(header["ticket_id"]), str(header["reason"]))
        elif kind == "BEAT":
            self._send([identity, *_frames("BEAT")])
        elif kind == "BYE":
            self._forget(identity, "it said goodbye")
        else:
            raise ValueError(f"a message of kind {kind!r}")

    def _welcome(self, identity: bytes, sampler_id: str, header: dict) -> None:
        try:
            if len(self._last_heard) >= MAX_SAMPLERS and identity not in self._last_heard:
                raise Refusal(f"{MAX_SAMPLERS} samplers are here already")
            welcome = self._desk.hello(sampler_id, header)
        except Refusal as refusal:
            header = {"reason": str(refusal), "passing": refusal.passing}
            return self._send([identity, *_frames("REFUSED", header)])
        self._last_heard[identity] = time.monotonic()
        self._send([identity, *_frames("WELCOME", welcome)])

    def _want(self, identity: bytes, number: int, capacity: int) -> None:
        answered, frames = self._answers.get(identity, (-1, []))
        if number == answered:
            self._send(frames)
        elif number > answered:
            self._wants[identity] = number, capacity

    def _forget(self, identity: bytes, reason: str) -> None:
        for table in (self._last_heard, self._wants, self._answers):
            table.pop(identity, None)
        self._desk.leave(identity.decode(), reason)

    def _tick(self, now: float) -> None:
        for identity, heard in list(self._last_heard.items()):
            if now - heard > self._silence_limit:
                self._forget(identity, f"nothing was heard from it for {now - heard:.0f} s")
        for identity, (number, capacity) in list(self._wants.items()):
            tickets = self._desk.grant(identity.decode(), capacity)
            if tickets:
                del self._wants[identity]
                header = {"number": number, "tickets": [vars(ticket) for ticket in tickets]}
                self._answers[identity] = number, [identity, *_frames("TICKETS", header)]
                self._send(self._answers[identity][1])


class SamplerChannel(_Endpoint):
    """A sampler's end: asks for tickets, sends groups until they are acknowledged."""

    def __init__(
        self,
        address: str,
        sampler_id: str,
        hello: Callable[[], dict],
        timeout: float,
        startup_timeout: float,
        keys: Path | None = None,
    ):
        super().__init__("sampler-channel")
        self.address, self.sampler_id = address, sampler_id
        self._hello, self._timeout, self._startup_timeout = hello, timeout, startup_timeout
        self._inbox: queue.Queue[tuple[str, dict]] = queue.Queue()
        self._unacknowledged: dict[int, tuple[float, list[bytes]]] = {}
        self._lock = threading.RLock()
        self._number = 0  # of the latest request for tickets
        self._want: list[bytes] | None = None  # that request, until it is answered
        self._welcomed = False
        self._waiting_tickets: set[int] = set()  # granted, not yet sent or dropped
        self.stop_reason: str | None = None
        self.refused = 0  # groups that the learner would not take
        self._refused_since = 0.0
        self._started = self._last_heard = self._last_beat = time.monotonic()
        self._open_socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, sampler_id.encode("ascii"))
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up for a learner that is not there
        if keys:
            guard_sampler(self._socket, keys)
        self._socket.connect(address)
        self._outbox.put(self._hello_frames())
        self._thread.start()

    def connect(self) -> dict:
        """Wait for WELCOME and return its header; ChannelError when refused or nobody answers in time."""
        kind, header = self._wait({"WELCOME", "STOP"}, "the learner's welcome (started with ./run.sh trainer?)")
        if kind == "STOP":
            raise ChannelError(f"the learner at {self.address} has ended: {header.get('reason')}")
        return header

    def tickets(self, capacity: int, check: Callable[[], None] = lambda: None) -> Iterator[list[Ticket]]:
        """Batches of at most `capacity` tickets, until the learner stops the run.

        While it waits it calls `check`, which may raise: what the caller does in other threads may have failed.
        """
        while True:
            with self._lock:
                self._number += 1
                self._want = _frames("WANT", {"number": self._number, "capacity": capacity})
            self._outbox.put(self._want)
            self.wake()
            kind, header = self._wait({"TICKETS", "STOP"}, "tickets", check)
            if kind == "STOP":
                self.stop_reason = header.get("reason", "no reason given")
                return
            yield [Ticket(**fields) for fields in header["tickets"]]

    def send(self, ticket_id: int, blob: bytes) -> None:
        """Queue a packed group; it is kept and sent again until the learner acknowledges it."""
        self.check()
        frames = _frames("GROUP", {"ticket_id": ticket_id}, blob)
        with self._lock:
            self._unacknowledged[ticket_id] = (time.monotonic(), frames)
            self._waiting_tickets.discard(ticket_id)
        self._outbox.put(frames)
        self.wake()

    def drop(self, ticket_id: int, reason: str) -> None:
        """Give a ticket back as impossible, for instance because its prompt is too long."""
        with self._lock:
            self._waiting_tickets.discard(ticket_id)
        self._outbox.put(_frames("DROP", {"ticket_id": ticket_id, "reason": reason}))
        self.wake()

    def finish(self, limit: float = 10.0) -> int:
        """Say goodbye once everything is acknowledged or `limit` has passed; returns what is still unacknowledged."""
        deadline = time.monotonic() + limit
        while self._unacknowledged and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.02)
        self._outbox.put(_frames("BYE"))
        self.close(limit)
        return len(self._unacknowledged)

    def _wait(self, kinds: set[str], what: str, check: Callable[[], None] = lambda: None) -> tuple[str, dict]:
        started = noticed = time.monotonic()
        while True:
            self.check()
            check()
            try:
                kind, header = self._inbox.get(timeout=0.5)
            except queue.Empty:
                now = time.monotonic()
                if now - noticed >= NOTICE_SECONDS:
                    noticed = now
                    print(f"waiting for {what} from {self.address} for {now - started:.0f} s, {self._silence(now)}")
                continue
            if kind in kinds:
                return kind, header

    def _silence(self, now: float) -> str:
        if self.handshakes_refused:
            return f"its connection was refused {self.handshakes_refused} times: do the --keys of both sides fit?"
        if not self._welcomed:
            return "not welcomed yet"
        return f"last heard from it {now - self._last_heard:.0f} s ago"

    def _hello_frames(self) -> list[bytes]:
        with self._lock:
            holding = sorted(self._waiting_tickets | self._unacknowledged.keys())
        return _frames("HELLO", self._hello() | {"holding": holding})

    def _handle(self, frames: list[bytes]) -> None:
        kind, header, _ = _parse(frames)
        self._last_heard = time.monotonic()
        if kind == "WHO":
            self._send(self._hello_frames())
        elif kind == "REFUSED":
            self._refused_since = self._refused_since or time.monotonic()
            if not header["passing"] or time.monotonic() - self._refused_since > REFUSAL_SECONDS:
                raise ChannelError(f"the learner at {self.address} refused this sampler: {header['reason']}")
        elif kind == "WELCOME":
            if self._welcomed:
                self._resume()
            else:
                self._inbox.put((kind, header))
            self._welcomed = True
        elif kind == "ACK":
            with self._lock:
                self._unacknowledged.pop(header["ticket_id"], None)
            self.refused += not header["taken"]
            if self.refused > MAX_REFUSED_GROUPS:
                raise ChannelError(f"the learner at {self.address} refused {self.refused} groups; its log says why")
        elif kind == "TICKETS":
            with self._lock:
                expected = self._want is not None and header["number"] == self._number
                if expected:
                    self._want = None
                    self._waiting_tickets.update(fields["ticket_id"] for fields in header["tickets"])
            if expected:
                self._inbox.put((kind, header))
        elif kind == "STOP":
            self._inbox.put((kind, header))

    def _resume(self) -> None:
        """A restarted learner has welcomed this sampler again: send what it may have missed."""
        print(f"the learner at {self.address} is back: sending {len(self._unacknowledged)} groups again")
        with self._lock:
            resend = [frames for _, frames in self._unacknowledged.values()]
        for frames in resend:
            self._send(frames)

    def _tick(self, now: float) -> None:
        limit, flag = (self._timeout, "--timeout") if self._welcomed else (self._startup_timeout, "--startup_timeout")
        if now - (self._last_heard if self._welcomed else self._started) > limit:
            raise ChannelError(
                f"nothing heard from the learner at {self.address} for {limit:.0f} s ({flag}): {self._silence(now)}"
            )
        if now - self._last_beat < BEAT_SECONDS:
            return
        self._last_beat = now
        self._send(_frames("BEAT") if self._welcomed else self._hello_frames())
        with self._lock:
            want = self._want if self._welcomed else None
            late = [t for t, (sent, _) in self._unacknowledged.items() if now - sent > RESEND_SECONDS]
            resend = [self._unacknowledged[t][1] for t in late]
            self._unacknowledged |= {t: (now, frames) for t, frames in zip(late, resend, strict=True)}
        for frames in [*resend, *([want] if want else [])]:
            self._send(frames)
