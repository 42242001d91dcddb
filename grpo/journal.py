"""What the learner has taken in, on disk before it is acknowledged.

    save_path/journal/t00000042.group   a Group's blob, as it came over the wire
    save_path/tickets.jsonl             an event a line: what the run samples from, each step's tickets, dropped tickets

A group's file is renamed into place before its sampler is told, and a step's line is written before the step is
trained. So after a crash the newest checkpoint, the steps written since and their groups give the state at the crash,
and tickets.jsonl, which is kept for ever, names each ticket once: in the step that trained it, or with the reason for
which it was dropped. Groups that a checkpoint covers are deleted, unless they are to be replayed.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from grpo.files import append_line, read_lines, sync, write_file


@dataclass
class History:
    """What tickets.jsonl tells."""

    data: dict | None = None  # what all samplers must agree on; None before the first sampler came
    steps: dict[int, list[int]] = field(default_factory=dict)  # step -> its tickets in training order
    dropped: dict[int, str] = field(default_factory=dict)  # ticket -> reason


class Journal:
    """One run's journal; `keep` leaves the groups on disk for ever."""

    def __init__(self, save_path: Path, keep: bool):
        self._save_path, self._folder, self._keep = save_path, save_path / "journal", keep
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(".tmp-*"):
            leftover.unlink()
        self.history = read_history(save_path, mend=True)
        self._log = open(save_path / "tickets.jsonl", "ab")

    def put(self, ticket_id: int, blob: bytes) -> None:
        """Write a group; it is safe when this returns."""
        write_file(_path(self._save_path, ticket_id), blob)
        sync(self._folder)

    def get(self, ticket_id: int) -> bytes:
        """A group's blob; FileNotFoundError if it is not here."""
        return read_group(self._save_path, ticket_id)

    def ticket_ids(self) -> list[int]:
        """All tickets whose groups are here."""
        return ticket_ids(self._save_path)

    def holds_since(self, step: int) -> bool:
        """Whether the groups of all steps after `step` are here."""
        here, history = set(self.ticket_ids()), read_history(self._save_path)
        return all(here.issuperset(ids) for number, ids in history.steps.items() if number > step)

    def forget(self, ticket_ids: Iterable[int]) -> None:
        """These groups are not needed to go on after a crash."""
        if not self._keep:
            for ticket_id in ticket_ids:
                _path(self._save_path, ticket_id).unlink(missing_ok=True)

    def note_data(self, data: dict) -> None:
        """The first sampler is here: what it samples from is now the run's."""
        self._append({"event": "data"} | data)

    def note_step(self, step: int, ticket_ids: list[int]) -> None:
        """Step `step` (counted from 1) is about to be trained on these."""
        self._append({"event": "step", "step": step, "tickets": ticket_ids})

    def note_drop(self, ticket_id: int, reason: str) -> None:
        """A ticket is finished without being trained on."""
        self._append({"event": "drop", "ticket": ticket_id, "reason": reason})
        self.forget([ticket_id])

    def _append(self, event: dict) -> None:
        append_line(self._log, json.dumps(event).encode())


def _path(save_path: Path, ticket_id: int) -> Path:
    return save_path / "journal" / f"t{ticket_id:08d}.group"


def read_group(save_path: Path, ticket_id: int) -> bytes:
    """A group's blob; FileNotFoundError if it is not there."""
    return _path(save_path, ticket_id).read_bytes()


def ticket_ids(save_path: Path) -> list[int]:
    """All tickets whose groups are on disk."""
    return sorted(int(path.stem[1:]) for path in (save_path / "journal").glob("t*.group"))


def read_history(save_path: Path, mend: bool = False) -> History:
    """The events of a run; `mend` removes a last line that a crash cut off, which only the run itself may do.

    Raises:
        ValueError: a line that is no event, with its number.
    """
    path, history = save_path / "tickets.jsonl", History()
    for number, line in enumerate(read_lines(path, mend), 1):
        try:
            event = json.loads(line)
            kind = event.pop("event")
            if kind == "data":
                history.data = event
            elif kind == "step":
                history.steps[event["step"]] = event["tickets"]
            elif kind == "drop":
                history.dropped[event["ticket"]] = event["reason"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number} is no event ({error!r}): the run cannot be resumed") from error
    return history
