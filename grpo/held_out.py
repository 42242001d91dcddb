"""Evaluation during a run: adapter versions are pinned, and held-out questions go to samplers as tickets of their own.

Pure bookkeeping on the learner's side, like grpo/tickets.py; what comes back is written to

    save_path/evaluations.jsonl                  a summary for each version
    save_path/evaluations/v00000010.jsonl        every completion of a version

Question i of version v is ticket -1 - (v * 2^20 + i): below zero, so never taken for a training ticket, and the same
after a restart.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from grpo.clock import awake
from grpo.evaluation import RECORD, one_line, summarize
from grpo.files import append_line, read_lines, write_file
from grpo.json_lines import to_json
from grpo.tickets import MAX_HANDOVERS, Ticket

MAX_QUESTIONS = 1 << 20


class MalformedRecord(ValueError):
    """Bytes that are no evaluation record; the message names the field and the value."""


class HeldOut:
    """Hands out the first `limit` held-out questions, or as many as there are, for each version to be evaluated."""

    def __init__(self, folder: Path, limit: int):
        self._folder, self._questions = folder, limit
        self.summaries = read_evaluations(folder, mend=True)  # of finished versions, in the order of their end
        self._waiting: list[int] = []  # ticket ids
        self._held: dict[int, tuple[str, float]] = {}  # ticket id -> sampler id, and since when
        self._records: dict[int, dict[int, dict | None]] = {}  # version -> question -> record, None if dropped
        self._started: dict[int, float] = {}
        self._failures: Counter[int] = Counter()  # open ticket -> handovers so far

    @property
    def pinned(self) -> set[int]:
        """Versions that are still being evaluated: their adapters must stay on disk."""
        return set(self._records)

    def resize(self, available: int) -> None:
        """There are only so many questions; known once a sampler has delivered.

        What samplers gave up before that is asked again: they may have meant other questions.
        """
        self._questions = min(self._questions, available)
        self._waiting = []
        for version, records in self._records.items():
            records.clear()
            self._waiting += [t for t in self._tickets(version) if t not in self._held]

    def start(self, version: int) -> None:
        """Put a version in line, unless its evaluation is on disk already."""
        if version not in self._records and version not in {summary["version"] for summary in self.summaries}:
            self._records[version] = {}
            self._started[version] = time.monotonic()
            self._waiting += self._tickets(version)

    def grant(self, sampler_id: str, capacity: int, available: int, limit: float) -> list[Ticket]:
        """Up to `capacity` questions of one version, the oldest version first.

        The sampler has `available` questions. One that another sampler has had for more than `limit` seconds is asked
        again; whichever answer comes first counts. One that too many samplers had is left out.
        """
        now = awake.now()
        for ticket_id, (holder, since) in list(self._held.items()):
            if holder != sampler_id and now - since > limit:
                self.give_back(ticket_id, holder, weight=1.0)
        tickets = [self._ticket(t) for t in self._waiting if self._ticket(t).prompt_index < available][:capacity]
        tickets = [ticket for ticket in tickets if ticket.version == tickets[0].version]
        granted = {ticket.ticket_id for ticket in tickets}
        self._waiting = [t for t in self._waiting if t not in granted]
        self._held |= dict.fromkeys(granted, (sampler_id, now))
        return tickets

    def receive(self, ticket_id: int, blob: bytes, bind: Callable[[], None] = lambda: None) -> None:
        """Take a record in; one that is here already changes nothing. MalformedRecord for anything else.

        `bind` is called once the record is known to be sound and wanted, before it is taken.
        """
        ticket, record = self._ticket(ticket_id), read_record(blob)
        if record["index"] != ticket.prompt_index:
            raise MalformedRecord(f"the record of question {record['index']} for question {ticket.prompt_index}")
        if self._wanted(ticket):
            bind()
            self._finish(ticket_id, record)

    def drop(self, ticket_id: int, sampler_id: str) -> None:
        """A question that its sampler cannot ask is left out of the summary."""
        if self._holder(ticket_id) == sampler_id:
            self._finish(ticket_id, None)

    def release(self, sampler_id: str, keep: set[int] = frozenset(), weight: float = 0.0) -> None:
        """Take back what a sampler holds, except `keep`; `weight`: see `give_back`."""
        for ticket_id in [t for t in self._held if self._holder(t) == sampler_id and t not in keep]:
            self.give_back(ticket_id, sampler_id, weight)

    def give_back(self, ticket_id: int, sampler_id: str, weight: float = 0.0) -> None:
        """A ticket that this sampler holds goes to the next one that asks; once too often, and it is left out.

        `weight`: how much of such a handover it counts, as in grpo/tickets.py.
        """
        if self._holder(ticket_id) != sampler_id:
            return
        del self._held[ticket_id]
        self._failures[ticket_id] += weight
        if self._failures[ticket_id] > MAX_HANDOVERS:
            ticket = self._ticket(ticket_id)
            what = f"question {ticket.prompt_index} of version {ticket.version}"
            print(f"evaluation: {what} is left out, for no sampler answered it")
            self._finish(ticket_id, None)
        elif self._wanted(self._ticket(ticket_id)):
            self._waiting = sorted([*self._waiting, ticket_id], reverse=True)

    def _holder(self, ticket_id: int) -> str | None:
        return self._held.get(ticket_id, (None, 0.0))[0]

    def _tickets(self, version: int) -> list[int]:
        return [-1 - (version * MAX_QUESTIONS + i) for i in range(self._questions)]

    def _wanted(self, ticket: Ticket) -> bool:
        """Whether the answer is still missing; a version may be done, or be no longer evaluated since a restart."""
        records = self._records.get(ticket.version, {ticket.prompt_index})
        return ticket.prompt_index < self._questions and ticket.prompt_index not in records

    def _ticket(self, ticket_id: int) -> Ticket:
        version, index = divmod(-1 - ticket_id, MAX_QUESTIONS)
        return Ticket(ticket_id, index, 0, version)

    def _finish(self, ticket_id: int, record: dict | None) -> None:
        ticket = self._ticket(ticket_id)
        self._held.pop(ticket_id, None)
        self._failures.pop(ticket_id, None)
        if ticket_id in self._waiting:
            self._waiting.remove(ticket_id)
        if not self._wanted(ticket):
            return
        records = self._records[ticket.version]
        records[ticket.prompt_index] = record
        if len(records) == self._questions:
            self._write(ticket.version)

    def _write(self, version: int) -> None:
        everything = self._records.pop(version)
        records = [everything[i] for i in sorted(everything) if everything[i] is not None]
        summary = summarize(records, self._started.pop(version)) if records else {"questions": 0}
        summary["left_out"] = len(everything) - len(records)
        folder = self._folder / "evaluations"
        folder.mkdir(exist_ok=True)
        lines = "".join(to_json(record) + "\n" for record in records)
        (folder / f"v{version:08d}.jsonl").write_text(lines, encoding="utf-8")
        self.summaries.append({"version": version} | summary)
        with open(self._folder / "evaluations.jsonl", "ab") as file:
            append_line(file, to_json(self.summaries[-1]).encode())
        print(f"evaluation of version {version}: {one_line(summary) if records else 'no question could be asked'}")


def read_evaluations(folder: Path, mend: bool = False) -> list[dict]:
    """The summaries in a run's folder, in the order of their end; `mend` as in grpo/files.py."""
    return [json.loads(line) for line in read_lines(folder / "evaluations.jsonl", mend)]


def forget_evaluations(folder: Path, first: int) -> None:
    """Remove the summaries of version `first` and later ones, whose weights are gone."""
    summaries = read_evaluations(folder)
    kept = [summary for summary in summaries if summary["version"] < first]
    if len(kept) < len(summaries):
        lines = "".join(to_json(summary) + "\n" for summary in kept)
        write_file(folder / "evaluations.jsonl", lines.encode())


def read_record(blob: bytes) -> dict:
    """An evaluation record from foreign bytes."""
    try:
        record = json.loads(blob)
    except Exception as error:  # foreign bytes can make a parser fail in any way
        raise MalformedRecord(f"the record is no JSON: {error!s:.200}") from error
    if not isinstance(record, dict) or record.keys() != RECORD.keys():
        raise MalformedRecord(f"the record is no object with {', '.join(RECORD)}")
    for name, kind in RECORD.items():
        if type(record[name]) is not kind:
            raise MalformedRecord(f"{name} is a {type(record[name]).__name__}, not {kind.__name__}")
    if not 0 <= record["length"] <= MAX_QUESTIONS:
        raise MalformedRecord("length is out of bounds")
    return record
