"""The two ends of the wire: a ROUTER at the learner, a DEALER at each sampler, each in a thread of its own.

What the ends promise (grpo/messages.py has the messages): any message may be lost, doubled or late, and nothing is
lost by it. Each one is repeated until it is answered, and can be answered twice:

    HELLO, BYE, WANT   at every beat, until WELCOME or REFUSED, GOODBYE, TICKETS; a WANT is numbered, and the same
                       number always gets the same tickets
    GROUP, DROP        every RESEND_SECONDS and after every reconnect, until ACK, DROPPED
    STOP               several times a second, until BYE

A learner that was restarted asks an unknown sampler to introduce itself again (WHO). Foreign frames are counted,
reported once per kind and dropped (`_Endpoint._receive`, the one boundary). Every wait has a limit, says what it waits
for, and ends with an error naming the peer; time for which a process itself was stopped does not count (grpo/clock.py).
"""

import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from grpo.address import cannot_listen
from grpo.clock import awake
from grpo.keys import guard_learner, guard_sampler
from grpo.messages import (
    MAX_GRANTED,
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    TO_LEARNER,
    TO_SAMPLER,
    Ack,
    Beat,
    Bye,
    Drop,
    Dropped,
    ForeignMessage,
    Goodbye,
    GroupHeader,
    Hello,
    OtherProtocol,
    Refused,
    Stop,
    Tickets,
    Want,
    Welcome,
    Who,
    frames,
    parse,
)
from grpo.rollout import MAX_GROUP_BYTES
from grpo.tickets import Ticket

BEAT_SECONDS = 2.0
NOTICE_SECONDS = 10.0  # how often a wait says what it waits for
REFUSAL_SECONDS = 10.0  # how long a refusal that may pass is met with another HELLO
RESEND_SECONDS = 20.0  # an unacknowledged group is sent again after this
MAX_REFUSED_GROUPS = 10  # a sampler whose groups are not taken stops instead of generating for nothing
LINGER_MS = 2000  # what a closing socket may take to hand over its last messages
MAX_SAMPLERS = 1024
MAX_QUEUED = 16  # messages that wait in a socket for each peer: what a flood can take of the memory
MAX_DRAINED = 256  # messages that are taken in before everything else has its turn
MAX_REPORTED = 50  # kinds of foreign messages
_REFUSED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
FIXED = ("run_id", "group_size", "temperature", "dtype", "vocab_size")  # of a Welcome: a sampler cannot change them
SILENT = "nothing was heard from it for {:.0f} s"


class ChannelError(RuntimeError):
    """The other side refused, fell silent, or the address cannot be used; the message names it and the flag."""


class Refusal(ChannelError):
    """The learner's reason for refusing a sampler; `passing` if it may be about to go away by itself."""

    def __init__(self, reason: str, passing: bool = False):
        super().__init__(reason)
        self.passing = passing


class Desk(Protocol):
    """What the learner's end calls for each message; see grpo/collector.py. Any of it may raise Refusal."""

    def hello(self, sampler_id: str, hello: Hello) -> Welcome: ...

    def grant(self, sampler_id: str, capacity: int, asking: set[str]) -> list[Ticket]:
        """Tickets for one of the samplers that are `asking` at this moment."""

    def receive(self, sampler_id: str, ticket_id: int, blob: bytes) -> bool:
        """Take in a group; True once it is safe here, False for bytes that are no group for this ticket."""

    def drop(self, sampler_id: str, ticket_id: int, reason: str) -> None: ...

    def leave(self, sampler_id: str, reason: str, *, failed: bool, silent: bool) -> None:
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
        self.foreign = 0  # messages that were none of ours
        self._reported: set[str] = set()  # kinds of them
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
        """Raise in the caller's thread what ended the channel's thread, as a ChannelError: the work is saved then."""
        if self._error is not None and not isinstance(self._error, ChannelError):
            raise ChannelError(f"the channel failed: {self._error!r:.500}") from self._error
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
                    if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        self._note_connection()
                    else:
                        self._note_refused_handshake()
                self._tick(awake.now())
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
        self._socket.ipv6 = "[" in self.address
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._monitor = self._socket.get_monitor_socket(_REFUSED_HANDSHAKES | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return self._socket

    def _note_refused_handshake(self) -> None:
        self.handshakes_refused += 1

    def _note_connection(self) -> None:
        pass

    def _drain(self) -> None:
        for _ in range(MAX_DRAINED):
            if self._stopping.is_set():
                return
            try:
                received = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._receive(received)

    def _receive(self, received: list[bytes]) -> None:
        """The boundary: what foreign frames hold is handled, or it is counted, reported once per kind and dropped."""
        try:
            self._handle(received)
        except (ChannelError, OSError):  # what ends this side: the peer's refusal, a disk of our own that is full
            raise
        except ForeignMessage as error:
            self._note_foreign(str(error))
        except Exception as error:  # well formed, and yet something failed: it must not end the run, nor go unseen
            self._note_foreign(f"{type(error).__name__} over it: {error!s:.200}", traceback.format_exc())

    def _note_foreign(self, text: str, trace: str = "") -> None:
        self.foreign += 1
        kind = re.sub(r"[0-9]+", "0", text)
        if kind not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add(kind)
            print(f"channel: dropped a message that is none of ours ({text:.500}); more are only counted", flush=True)
            if trace:
                print(trace, flush=True)

    def _flush(self) -> None:
        while not self._outbox.empty():
            self._send(self._outbox.get())

    def _send(self, message: list[bytes]) -> None:
        try:
            self._socket.send_multipart(message, zmq.DONTWAIT)
        except zmq.Again:
            pass  # the peer is gone or its queue is full: whatever matters is sent again

    def _handle(self, received: list[bytes]) -> None:
        raise NotImplementedError

    def _tick(self, now: float) -> None:
        raise NotImplementedError


class LearnerChannel(_Endpoint):
    """The learner's end: binds `address` at once, and from `start` on talks to samplers on behalf of a Desk.

    What samplers send before that waits in the socket, so the port is sure before a model is loaded.
    """

    def __init__(self, address: str, silence_limit: float, keys: Path | None = None):
        super().__init__("learner-channel")
        self.address, self._silence_limit = address, silence_limit
        self._desk: Desk | None = None
        self._last_heard: dict[bytes, float] = {}  # welcomed samplers only
        self._wants: dict[bytes, Want] = {}  # unanswered requests, the oldest first
        self._answers: dict[bytes, Tickets] = {}  # the last answer to each sampler
        self._stop: Stop | None = None  # the run is over: what every sampler is told
        self._last_stop = 0.0
        self.departed = ""  # which sampler left last, and why
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
            raise ChannelError(cannot_listen(address, error.errno, error.strerror)) from error

    def start(self, desk: Desk) -> None:
        """Begin to answer samplers."""
        self._desk = desk
        self._thread.start()

    @property
    def samplers(self) -> list[str]:
        """Ids of the samplers that are present."""
        return [identity.decode() for identity in list(self._last_heard)]

    def who(self) -> str:
        """The samplers that are connected, or why there are none, in words."""
        if self._last_heard:
            return ", ".join(self.samplers)
        return f"none (start one with ./run.sh sampler){f'; {self.departed}' if self.departed else ''}"

    def stop_samplers(self, reason: str, limit: float = 10.0) -> None:
        """Tell every sampler that the run is over and wait, bounded, until they have said goodbye."""
        deadline = time.monotonic() + limit
        self._stop = Stop(f"{reason:.2000}")
        self.wake()
        while self._last_heard and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.02)

    def _note_refused_handshake(self) -> None:
        super()._note_refused_handshake()
        if self.handshakes_refused == 1:
            print("channel: refused a connection without the right key; further ones are only counted", flush=True)

    def _handle(self, received: list[bytes]) -> None:
        identity, *rest = received
        sampler_id = identity.decode("ascii", "replace")
        if not re.fullmatch(r"[\w.-]{1,128}", sampler_id, re.ASCII):
            raise ForeignMessage("a sender without a name of letters, digits, '.', '_' and '-'")
        try:
            message, blob = parse(rest, TO_LEARNER)
            self._dispatch(identity, sampler_id, message, blob)
        except OtherProtocol as error:
            self._reply(identity, Refused(f"{error}, the learner {PROTOCOL_VERSION}; use one checkout for both"))
        except Refusal as refusal:
            self._refuse(identity, refusal)

    def _reply(self, identity: bytes, message) -> None:
        self._send([identity, *frames(message)])

    def _refuse(self, identity: bytes, refusal: Refusal) -> None:
        self._reply(identity, Refused(f"{refusal!s:.2000}", refusal.passing))
        if identity in self._last_heard:
            self._forget(identity, f"refused: {refusal}")

    def _dispatch(self, identity: bytes, sampler_id: str, message, blob: bytes) -> None:
        if isinstance(message, Bye):
            if identity in self._last_heard:
                self._forget(identity, message.reason, failed=message.failed)
            return self._reply(identity, Goodbye())
        if self._stop and not isinstance(message, GroupHeader):
            return self._reply(identity, self._stop)
        if isinstance(message, Hello):
            return self._welcome(identity, sampler_id, message)
        if identity not in self._last_heard:
            return self._reply(identity, Who())
        self._last_heard[identity] = awake.now()
        if isinstance(message, Want):
            self._want(identity, message)
        elif isinstance(message, GroupHeader):
            taken = self._desk.receive(sampler_id, message.ticket_id, blob)
            self._reply(identity, Ack(message.ticket_id, taken))
        elif isinstance(message, Drop):
            self._desk.drop(sampler_id, message.ticket_id, message.reason)
            self._reply(identity, Dropped(message.ticket_id))
        elif isinstance(message, Beat):
            self._reply(identity, message)

    def _welcome(self, identity: bytes, sampler_id: str, hello: Hello) -> None:
        if len(self._last_heard) >= MAX_SAMPLERS and identity not in self._last_heard:
            raise Refusal(f"{MAX_SAMPLERS} samplers are here already")
        welcome = self._desk.hello(sampler_id, hello)
        self._last_heard[identity] = awake.now()
        self._reply(identity, welcome)

    def _want(self, identity: bytes, want: Want) -> None:
        answer = self._answers.get(identity)
        if answer and want.number == answer.number:
            self._reply(identity, answer)
        elif not answer or want.number > answer.number:
            self._wants.setdefault(identity, want)  # repeated, it keeps its place in the queue
            if want.number > self._wants[identity].number:
                self._wants[identity] = want

    def _forget(self, identity: bytes, reason: str, failed: bool = False, silent: bool = False) -> None:
        for table in (self._last_heard, self._wants, self._answers):
            table.pop(identity, None)
        self.departed = f"sampler {identity.decode()} left: {reason}"
        self._desk.leave(identity.decode(), reason, failed=failed, silent=silent)

    def _tick(self, now: float) -> None:
        for identity, heard in list(self._last_heard.items()):
            if now - heard > self._silence_limit:
                self._forget(identity, SILENT.format(now - heard), silent=True)
        if self._stop:
            return self._say_stop(now)
        asking = {identity.decode() for identity in self._wants}
        for identity, want in list(self._wants.items()):
            try:
                tickets = self._desk.grant(identity.decode(), min(want.capacity, MAX_GRANTED), asking)
            except Refusal as refusal:
                self._refuse(identity, refusal)
                continue
            if tickets:
                del self._wants[identity]
                self._answers[identity] = Tickets(want.number, tuple(tickets))
                self._reply(identity, self._answers[identity])

    def _say_stop(self, now: float) -> None:
        if now - self._last_stop >= BEAT_SECONDS / 8:
            self._last_stop = now
            for identity in self._last_heard:
                self._reply(identity, self._stop)


class SamplerChannel(_Endpoint):
    """A sampler's end: asks for tickets, sends groups until they are acknowledged.

    `hello` gives the fields of a Hello, but for `holding`, each time the learner asks. `welcome` is the newest Welcome.
    """

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
        self.welcome: Welcome | None = None
        self._inbox: queue.Queue[Welcome | Tickets | Stop] = queue.Queue()
        self._unanswered: dict[int, tuple[float, list[bytes]]] = {}  # ticket -> its GROUP or DROP, and when it was sent
        self._lock = threading.RLock()
        self._number = 0  # of the latest request for tickets
        self._want: list[bytes] | None = None  # that request, until it is answered
        self._waiting_tickets: set[int] = set()  # granted, not yet sent or dropped
        self._reconnected = False
        self._bye: list[bytes] | None = None  # once it is time to go
        self._goodbye = threading.Event()
        self._stopped = False  # the learner said so: it may be gone before this side has worked off what it has
        self.stop_reason: str | None = None
        self.refused = 0  # groups that the learner would not take
        self._refused_since = 0.0
        self._keys = bool(keys)
        self._started = self._last_heard = self._last_beat = awake.now()
        self._open_socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, sampler_id.encode("ascii"))
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up for a learner that is not there
        if keys:
            guard_sampler(self._socket, keys)
        self._socket.connect(address)
        self._outbox.put(self._checked_hello())
        self._thread.start()

    def connect(self) -> Welcome:
        """Wait for the learner's welcome; ChannelError when refused or nobody answers in time."""
        message = self._wait((Welcome, Stop), "the learner's welcome (started with ./run.sh trainer?)")
        if isinstance(message, Stop):
            raise ChannelError(f"the learner at {self.address} has ended: {message.reason}")
        return message

    def tickets(self, capacity: int, check: Callable[[], None] = lambda: None) -> Iterator[list[Ticket]]:
        """Batches of at most `capacity` tickets, until the learner stops the run.

        While it waits it calls `check`, which may raise: what the caller does in other threads may have failed.
        """
        while True:
            with self._lock:
                self._number += 1
                self._want = frames(Want(self._number, capacity))
            self._outbox.put(self._want)
            self.wake()
            message = self._wait((Tickets, Stop), "tickets", check)
            if isinstance(message, Stop):
                self.stop_reason = message.reason
                return
            yield list(message.tickets)

    def send(self, ticket_id: int, blob: bytes) -> None:
        """Queue a packed group; it is kept and sent again until the learner acknowledges it.

        One that is too long for the wire would only cut the connection, so its ticket is dropped.
        """
        if len(blob) > MAX_GROUP_BYTES:
            too_long = f"group above {MAX_GROUP_BYTES >> 20} MiB: lower --max_new_tokens or --group_size"
            return self.drop(ticket_id, too_long)
        self._send_until_answered(ticket_id, frames(GroupHeader(ticket_id), blob))

    def drop(self, ticket_id: int, reason: str) -> None:
        """Give a ticket back as impossible, for instance because its prompt is too long."""
        self._send_until_answered(ticket_id, frames(Drop(ticket_id, reason[:256])))

    def _send_until_answered(self, ticket_id: int, message: list[bytes]) -> None:
        self.check()
        with self._lock:
            self._unanswered[ticket_id] = (awake.now(), message)
            self._waiting_tickets.discard(ticket_id)
        self._outbox.put(message)
        self.wake()

    def finish(self, limit: float = 10.0, reason: str = "it said goodbye", failed: bool = False) -> int:
        """Say goodbye once everything is acknowledged or `limit` has passed; returns what is still unacknowledged.

        `failed`: something broke here, and `reason` says what; the learner passes it on.
        """
        deadline = time.monotonic() + limit
        while self._unanswered and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.02)
        self._bye = frames(Bye(f"{reason:.2000}", failed))
        self._outbox.put(self._bye)
        self.wake()
        while self._thread.is_alive() and time.monotonic() < deadline and not self._goodbye.wait(0.02):
            pass
        self.close(limit)
        return len(self._unanswered)

    def _wait(self, kinds: tuple[type, ...], what: str, check: Callable[[], None] = lambda: None):
        started = noticed = time.monotonic()
        while True:
            self.check()
            check()
            try:
                message = self._inbox.get(timeout=0.5)
            except queue.Empty:
                now = time.monotonic()
                if now - noticed >= NOTICE_SECONDS:
                    noticed = now
                    silence = self._silence(awake.now())
                    print(f"waiting for {what} from {self.address} for {now - started:.0f} s, {silence}", flush=True)
                continue
            if isinstance(message, kinds):
                return message

    def _silence(self, now: float) -> str:
        if self.handshakes_refused and not self.welcome:
            none = "" if self._keys else " This one has none."
            times = self.handshakes_refused
            return f"its connection was refused {times} times: do the --keys of both sides fit?{none}"
        if not self.welcome:
            return "not welcomed yet"
        return f"last heard from it {now - self._last_heard:.0f} s ago"

    def _hello_frames(self) -> list[bytes]:
        with self._lock:
            holding = sorted(self._waiting_tickets | self._unanswered.keys())
        return frames(Hello(**self._hello(), holding=tuple(holding)))

    def _checked_hello(self) -> list[bytes]:
        """The first one, or ValueError: what the learner cannot read it drops without an answer."""
        first = self._hello_frames()
        try:
            parse(first, TO_LEARNER)
        except OtherProtocol:
            pass  # which it answers
        except ForeignMessage as error:
            self.close()
            raise ValueError(f"this sampler cannot introduce itself to a learner: {error}") from error
        return first

    def _note_connection(self) -> None:
        self._reconnected = True

    def _handle(self, received: list[bytes]) -> None:
        message, _ = parse(received, TO_SAMPLER)
        self._last_heard = awake.now()
        if isinstance(message, Who):
            self._send(self._hello_frames())
        elif isinstance(message, Refused):
            self._be_refused(message)
        elif isinstance(message, Welcome):
            self._be_welcomed(message)
        elif isinstance(message, Ack):
            self._be_acknowledged(message)
        elif isinstance(message, Dropped):
            with self._lock:
                self._unanswered.pop(message.ticket_id, None)
        elif isinstance(message, Tickets):
            self._take(message)
        elif isinstance(message, Stop):
            self._stopped = True
            self._inbox.put(message)
        elif isinstance(message, Goodbye):
            self._goodbye.set()

    def _be_refused(self, message: Refused) -> None:
        self._refused_since = self._refused_since or awake.now()
        if not message.passing or awake.now() - self._refused_since > REFUSAL_SECONDS:
            raise ChannelError(f"the learner at {self.address} refused this sampler: {message.reason}")

    def _be_welcomed(self, message: Welcome) -> None:
        """The first welcome starts this sampler; a later one comes from a learner that was restarted."""
        self._refused_since = 0.0
        before, self.welcome = self.welcome, message
        if before is None:
            return self._inbox.put(message)
        if message.session == before.session:
            return  # the answer to a HELLO that was repeated
        changed = [name for name in FIXED if getattr(before, name) != getattr(message, name)]
        if changed:
            raise ChannelError(
                f"the learner at {self.address} was restarted with {changed[0]} {getattr(message, changed[0])!r}, this "
                f"sampler works with {getattr(before, changed[0])!r}: start it again"
            )
        print(f"the learner at {self.address} is back: sending {len(self._unanswered)} messages again", flush=True)
        self._reconnected = True

    def _be_acknowledged(self, message: Ack) -> None:
        with self._lock:
            known = self._unanswered.pop(message.ticket_id, None)
        self.refused += known is not None and not message.taken
        if self.refused > MAX_REFUSED_GROUPS:
            raise ChannelError(f"the learner at {self.address} refused {self.refused} groups; its log says why")

    def _take(self, message: Tickets) -> None:
        with self._lock:
            if self._want is None or message.number != self._number:
                return  # an answer that came twice
            self._want = None
            self._waiting_tickets.update(ticket.ticket_id for ticket in message.tickets)
        self._inbox.put(message)

    def _tick(self, now: float) -> None:
        limit, flag = (self._timeout, "--timeout") if self.welcome else (self._startup_timeout, "--startup_timeout")
        if not self._stopped and now - (self._last_heard if self.welcome else self._started) > limit:
            raise ChannelError(
                f"nothing heard from the learner at {self.address} for {limit:.0f} s ({flag}): {self._silence(now)}"
            )
        beat = now - self._last_beat >= BEAT_SECONDS
        if not beat and not self._reconnected:
            return
        self._last_beat = now
        if self._bye or self.welcome:
            self._send(self._bye or frames(Beat()))
        else:
            self._send(self._hello_frames())
        for message in self._to_repeat(now):
            self._send(message)

    def _to_repeat(self, now: float) -> list[list[bytes]]:
        """What has had no answer for too long, or may have been lost with a connection."""
        every, self._reconnected = self._reconnected, False
        with self._lock:
            want = [self._want] if self._want and self.welcome else []
            late = [t for t, (sent, _) in self._unanswered.items() if every or now - sent > RESEND_SECONDS]
            again = [self._unanswered[t][1] for t in late]
            self._unanswered |= {t: (now, message) for t, message in zip(late, again, strict=True)}
        return again + want
