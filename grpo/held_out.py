"""Evaluation during a run: adapter versions are pinned, and held-out questions go to samplers as tickets of their own.

Pure bookkeeping on the learner's side, like grpo/tickets.py; what comes back is written to

    save_path/evaluations.jsonl                  a summary for each version
    save_path/evaluations/v00000010.jsonl        every completion of a version

Question i of version v is ticket -1 - (v * 2^20 + i): below zero, so never taken for a training ticket, and the same
after a restart.
"""

import json
import time
from pathlib import Path

from grpo.evaluation import RECORD, one_line, summarize
from grpo.files import append_line, read_lines, write_file
from grpo.tickets import Ticket

MAX_QUESTIONS = 1 << 20


class MalformedRecord(ValueError):
    """Bytes that are no evaluation record; the message names the field and the value."""


class HeldOut:
    """Hands out the first `limit` held-out questions, or as many as there are, for each version to be evaluated."""

    def __init__(self, folder: Path, limit: int):
        self._folder, self._questions = folder, limit
        self.summaries = read_evaluations(folder, mend=True)  # of finished versions, in the order of their end
        self._waiting: list[int] = []  # ticket ids
        self._held: dict[int, str] = {}  # ticket id -> sampler id
        self._records: dict[int, dict[int, dict | None]] = {}  # version -> question -> record, None if dropped
        self._started: dict[int, float] = {}

    @property
    def pinned(self) -> set[int]:
        """Versions that are still being evaluated: their adapters must stay on disk."""
        return set(self._records)

    def resize(self, available: int) -> None:
        """There are only so many questions; known before the first is handed out."""
        self._questions = min(self._questions, available)
        self._waiting = [t for t in self._waiting if self._ticket(t).prompt_index < self._questions]

    def start(self, version: int) -> None:
        """Put a version in line, unless its evaluation is on disk already."""
        if version not in self._records and version not in {summary["version"] for summary in self.summaries}:
            self._records[version] = {}
            self._started[version] = time.monotonic()
            self._waiting += [-1 - (version * MAX_QUESTIONS + i) for i in range(self._questions)]

    def grant(self, sampler_id: str, capacity: int) -> list[Ticket]:
        """Up to `capacity` questions of one version, the oldest version first."""
        tickets = [self._ticket(ticket_id) for ticket_id in self._waiting[:capacity]]
        tickets = [ticket for ticket in tickets if ticket.version == tickets[0].version]
        del self._waiting[: len(tickets)]
        self._held |= {ticket.ticket_id: sampler_id for ticket in tickets}
        return tickets

    def receive(self, ticket_id: int, blob: bytes) -> None:
        """Take a record in; one that is here already changes nothing. MalformedRecord for anything else."""
        ticket, record = self._ticket(ticket_id), read_record(blob)
        if record["index"] != ticket.prompt_index:
            raise MalformedRecord(f"the record of question {record['index']} for question {ticket.prompt_index}")
        self._finish(ticket_id, record)

    def drop(self, ticket_id: int) -> None:
        """A question that cannot be asked is left out of the summary."""
        self._finish(ticket_id, None)

    def release(self, sampler_id: str, keep: set[int] = frozenset()) -> None:
        """Take back what a sampler holds, except `keep`."""
        lost = [t for t, holder in self._held.items() if holder == sampler_id and t not in keep]
        for ticket_id in lost:
            self.give_back(ticket_id)

    def give_back(self, ticket_id: int) -> None:
        """One ticket goes to the next sampler that asks."""
        if self._held.pop(ticket_id, None) is not None:
            self._waiting = sorted([*self._waiting, ticket_id], reverse=True)

    def _ticket(self, ticket_id: int) -> Ticket:
        version, index = divmod(-1 - ticket_id, MAX_QUESTIONS)
        return Ticket(ticket_id, index, 0, version)

    def _finish(self, ticket_id: int, record: dict | None) -> None:
        ticket = self._ticket(ticket_id)
        self._held.pop(ticket_id, None)
        if ticket_id in self._waiting:
            self._waiting.remove(ticket_id)
        records = self._records.get(ticket.version)
        if records is None:
            return  # of a version that is done, or was evaluated before a restart
        records.setdefault(ticket.prompt_index, record)
        if len(records) == self._questions:
            self._write(ticket.version)

    def _write(self, version: int) -> None:
        everything = self._records.pop(version)
        records = [everything[i] for i in sorted(everything) if everything[i] is not None]
        summary = summarize(records, self._started.pop(version)) if records else {"questions": 0}
        summary["left_out"] = len(everything) - len(records)
        folder = self._folder / "evaluations"
        folder.mkdir(exist_ok=True)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"v{version:08d}.jsonl").write_text(lines, encoding="utf-8")
        self.summaries.append({"version": version} | summary)
        with open(self._folder / "evaluations.jsonl", "ab") as file:
            append_line(file, json.dumps(self.summaries[-1]).encode())
        print(f"evaluation of version {version}: {one_line(summary) if records else 'no question could be asked'}")


def read_evaluations(folder: Path, mend: bool = False) -> list[dict]:
    """The summaries in a run's folder, in the order of their end; `mend` as in grpo/files.py."""
    return [json.loads(line) for line in read_lines(folder / "evaluations.jsonl", mend)]


def forget_evaluations(folder: Path, first: int) -> None:
    """Remove the summaries of version `first` and later ones, whose weights are gone."""
    summaries = read_evaluations(folder)
    kept = [summary for summary in summaries if summary["version"] < first]
    if len(kept) < len(summaries):
        lines = "".join(json.dumps(summary) + "\n" for summary in kept)
        write_file(folder / "evaluations.jsonl", lines.encode())


def read_record(blob: bytes) -> dict:
    """An evaluation record from foreign bytes."""
    try:
        record = json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise MalformedRecord(f"the record is no JSON: {error}") from error
    if not isinstance(record, dict) or record.keys() != RECORD.keys():
        raise MalformedRecord(f"the record is no object with {', '.join(RECORD)}")
    for name, kind in RECORD.items():
        if type(record[name]) is not kind:
            raise MalformedRecord(f"{name} is {record[name]!r:.60}, not {kind.__name__}")
    return record
