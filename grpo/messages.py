"""What may be on the wire: one frozen dataclass per message kind, and `parse`, the one place where foreign bytes
become one of them.

Every field is typed and bounded here, once: whole numbers have limits, numbers are finite, texts are short and
printable, lists are limited in length. What `parse` returns can be believed as far as its form goes; whether it is true
(a ticket that was granted, a version that was published) is for grpo/collector.py to say. Anything else is a
ForeignMessage, whatever the bytes hold.

    sampler -> learner   HELLO  WANT  GROUP  DROP  BEAT  BYE
    learner -> sampler   WELCOME  REFUSED  WHO  TICKETS  ACK  DROPPED  BEAT  STOP  GOODBYE
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from grpo.tickets import LARGEST_TICKET, MAX_PROMPTS, Ticket

PROTOCOL_VERSION = 2
MAX_HEADER_BYTES = 1 << 20
MAX_TICKETS = 1 << 14  # in one list: more than any number of groups that are out at a time
MAX_GRANTED = 1 << 12  # in one answer, which stays far below MAX_HEADER_BYTES
MAX_SETTINGS = 64
LONGEST_TEXT = 4096  # characters, of a path or a sentence
LONGEST_SETTING = 1 << 16  # a system prompt may be long
LARGEST = 1 << 53  # what a float holds exactly, so that arithmetic on it cannot overflow


class ForeignMessage(ValueError):
    """Bytes that are none of our messages; the text names the kind, the field and the value."""


# ---------------------------------------------------------------- checks of one value: the value, or ValueError


def whole(low: int = 0, high: int = LARGEST) -> Callable:
    """A whole number from low to high."""

    def check(value):
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"is not a whole number from {low} to {high}")
        return value

    return check


def number(value) -> float:
    """A finite number."""
    if type(value) not in (int, float) or not abs(value) <= LARGEST:
        raise ValueError("is not a finite number")
    return float(value)


def yes_or_no(value) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise ValueError("is neither true nor false")
    return value


def text(longest: int = LONGEST_TEXT) -> Callable:
    """A text of at most `longest` characters; what a terminal would not print as a character becomes '?'."""

    def check(value):
        if type(value) is not str or len(value) > longest:
            raise ValueError(f"is not a text of at most {longest} characters")
        return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in value)

    return check


def optional(check: Callable) -> Callable:
    """The same, or null."""
    return lambda value: None if value is None else check(value)


def listed(check: Callable, most: int = MAX_TICKETS) -> Callable:
    """A list of at most `most` such values, as a tuple."""

    def check_all(value):
        if type(value) is not list or len(value) > most:
            raise ValueError(f"is not a list of at most {most}")
        return tuple(check(one) for one in value)

    return check_all


def settings(value) -> dict:
    """Flags by name, without nesting."""
    if type(value) is not dict or len(value) > MAX_SETTINGS:
        raise ValueError(f"is not an object of at most {MAX_SETTINGS} settings")
    return {text(64)(name): setting(text(64)(name), one) for name, one in value.items()}


def setting(name: str, value):
    """A flag's value: a text, a finite number, true, false or null."""
    if type(value) is str and len(value) <= LONGEST_SETTING:
        return text(LONGEST_SETTING)(value)
    if type(value) in (int, float):
        number(value)
    elif value is not None and type(value) is not bool:
        raise ValueError(f"holds a {name} that is no number, true, false, null or text of {LONGEST_SETTING} characters")
    return value


def held_out(value) -> "HeldOutFacts":
    """The facts of a sampler's held-out questions."""
    return _read(HeldOutFacts, value)


def ticket(value) -> Ticket:
    """A Ticket from its fields."""
    return Ticket(**vars(_read(_TicketFields, value)))


def checked(check: Callable, **options):
    """A dataclass field whose foreign value goes through `check`."""
    return dataclasses.field(metadata={"check": check}, **options)


# ---------------------------------------------------------------- messages

INDEX = whole(-LARGEST_TICKET, LARGEST_TICKET)  # of a ticket; below 0 a held-out question


@dataclass(frozen=True)
class _TicketFields:
    ticket_id: int = checked(INDEX)
    prompt_index: int = checked(whole(0, MAX_PROMPTS))
    seed: int = checked(whole(0, (1 << 63) - 1))
    version: int = checked(whole())


@dataclass(frozen=True)
class HeldOutFacts:
    """Of a sampler's held-out questions: their fingerprint and number, or why there are none."""

    dataset: str | None = checked(optional(text(256)), default=None)
    num_prompts: int = checked(whole(0, MAX_PROMPTS), default=0)
    error: str | None = checked(optional(text()), default=None)


@dataclass(frozen=True)
class Hello:
    """A sampler introduces itself: facts that the learner compares, and the tickets that it still works on."""

    kind: ClassVar[str] = "HELLO"
    protocol: int = checked(whole())
    model_path: str = checked(text())
    model: str = checked(text(256))  # fingerprints
    tokenizer: str = checked(text(256))
    dataset: str = checked(text(256))
    dataset_name: str = checked(text())
    num_prompts: int = checked(whole(0, MAX_PROMPTS))
    max_new_tokens: int = checked(whole(1))
    batch_size: int = checked(whole())  # 0: as many as fit
    lora_path: str = checked(text())
    run_id: str | None = checked(optional(text(256)))  # of the run in lora_path
    held_out: HeldOutFacts = checked(held_out)
    settings: dict = checked(settings)  # the sampler's flags, for cards and reports
    holding: tuple[int, ...] = checked(listed(INDEX))  # ticket ids


@dataclass(frozen=True)
class Want:
    """Room for `capacity` groups. The number grows; the same number gets the same answer."""

    kind: ClassVar[str] = "WANT"
    number: int = checked(whole(1))
    capacity: int = checked(whole(1))


@dataclass(frozen=True)
class GroupHeader:
    """A packed Group (grpo/rollout.py), or an evaluation record, follows in the blob."""

    kind: ClassVar[str] = "GROUP"
    ticket_id: int = checked(INDEX)


@dataclass(frozen=True)
class Drop:
    """The sampler gives a ticket up for good; repeated until DROPPED comes."""

    kind: ClassVar[str] = "DROP"
    ticket_id: int = checked(INDEX)
    reason: str = checked(text(256))


@dataclass(frozen=True)
class Bye:
    """The sampler leaves: its tickets go to others. `failed` if something broke, `reason` says what."""

    kind: ClassVar[str] = "BYE"
    reason: str = checked(text(), default="it said goodbye")
    failed: bool = checked(yes_or_no, default=False)


@dataclass(frozen=True)
class Beat:
    """A sign of life, from either side."""

    kind: ClassVar[str] = "BEAT"


@dataclass(frozen=True)
class Welcome:
    """What a sampler needs to know of the run. It may come again, from a learner that was restarted."""

    kind: ClassVar[str] = "WELCOME"
    run_id: str = checked(text(256))
    group_size: int = checked(whole(1))
    temperature: float = checked(number)
    dtype: str = checked(text(64))
    needs_reference: bool = checked(yes_or_no)
    vocab_size: int = checked(whole(1))
    session: str = checked(text(64), default="")  # another one after a restart of the learner
    version: int = checked(whole(), default=0)  # newest published adapter


@dataclass(frozen=True)
class Refused:
    """The learner does not take this sampler; `passing` if the reason may go away by itself."""

    kind: ClassVar[str] = "REFUSED"
    reason: str = checked(text())
    passing: bool = checked(yes_or_no, default=False)


@dataclass(frozen=True)
class Who:
    """The learner does not know the sender: it should say HELLO."""

    kind: ClassVar[str] = "WHO"


@dataclass(frozen=True)
class Tickets:
    """The answer to the Want of that number."""

    kind: ClassVar[str] = "TICKETS"
    number: int = checked(whole(1))
    tickets: tuple[Ticket, ...] = checked(listed(ticket))


@dataclass(frozen=True)
class Ack:
    """The group of a ticket is safe at the learner, or, if it is not `taken`, was none for that ticket."""

    kind: ClassVar[str] = "ACK"
    ticket_id: int = checked(INDEX)
    taken: bool = checked(yes_or_no)


@dataclass(frozen=True)
class Dropped:
    """A Drop has arrived."""

    kind: ClassVar[str] = "DROPPED"
    ticket_id: int = checked(INDEX)


@dataclass(frozen=True)
class Stop:
    """The run is over; repeated until BYE comes."""

    kind: ClassVar[str] = "STOP"
    reason: str = checked(text())


@dataclass(frozen=True)
class Goodbye:
    """A Bye has arrived."""

    kind: ClassVar[str] = "GOODBYE"


TO_LEARNER = {one.kind: one for one in (Hello, Want, GroupHeader, Drop, Beat, Bye)}
TO_SAMPLER = {one.kind: one for one in (Welcome, Refused, Who, Tickets, Ack, Dropped, Beat, Stop, Goodbye)}


def frames(message, blob: bytes | None = None) -> list[bytes]:
    """A message as it goes over the wire: kind, JSON header and, for a group, the blob."""
    header = [message.kind.encode(), json.dumps(vars(message), default=vars).encode()]
    return header if blob is None else [*header, blob]


def parse(received: list[bytes], kinds: dict) -> tuple:
    """The message and the blob (b"" without one) in foreign frames, one of `kinds`.

    Raises:
        ForeignMessage: for anything else, and nothing but that.
    """
    try:
        return _parse(received, kinds)
    except ForeignMessage:
        raise
    except Exception as error:  # foreign bytes can make a parser fail in any way: RecursionError, OverflowError ...
        raise ForeignMessage(f"{type(error).__name__}: {error!s:.200}") from error


def _parse(received: list[bytes], kinds: dict) -> tuple:
    if len(received) not in (2, 3):
        raise ForeignMessage(f"a message of {len(received)} frames")
    name, header, *blob = received
    if len(name) > 16 or len(header) > MAX_HEADER_BYTES:
        raise ForeignMessage(f"a kind of {len(name)} and a header of {len(header)} bytes")
    kind = kinds.get(name.decode("ascii", "replace"))
    if kind is None:
        raise ForeignMessage(f"a message of kind {name!r}")
    if bool(blob) != (kind is GroupHeader):
        raise ForeignMessage(f"a {kind.kind} of {len(received)} frames")
    return _read(kind, json.loads(header)), blob[0] if blob else b""


def _read(kind: type, header):
    """`header`, what JSON has for an object, as the dataclass `kind`."""
    label = getattr(kind, "kind", kind.__name__)
    if type(header) is not dict:
        raise ForeignMessage(f"a header of {label} that is no object")
    if kind is Hello and header.get("protocol") != PROTOCOL_VERSION and type(header.get("protocol")) is int:
        raise OtherProtocol(whole()(header["protocol"]))
    fields = {field.name: field for field in dataclasses.fields(kind)}
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if not needed <= header.keys() <= fields.keys():
        raise ForeignMessage(f"a {label} with the fields {sorted(header)!s:.300}, expected {sorted(fields)}")
    values = {}
    for name, value in header.items():
        try:
            values[name] = fields[name].metadata["check"](value)
        except ForeignMessage:
            raise
        except ValueError as error:
            raise ForeignMessage(f"{name} of {label} is {_shown(value)}, which {error}") from error
    return kind(**values)


class OtherProtocol(ForeignMessage):
    """A HELLO of another version of these programs."""

    def __init__(self, version: int):
        super().__init__(f"it speaks protocol {version}")
        self.version = version


def _shown(value) -> str:
    """A foreign value for a sentence, whatever it is."""
    if type(value) in (str, int, float, bool, type(None)) and (type(value) is not int or abs(value) <= LARGEST):
        return f"{value!r:.60}"
    return f"a {type(value).__name__}"
