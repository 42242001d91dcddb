"""Which prompt is wanted next, who holds it, what is done. Pure bookkeeping: no sockets, no clock of its own.

Ticket k asks for prompt permutation_e[k mod D] of epoch e = k div D, so any number of samplers covers a dataset of D
prompts without overlap. At most (max_staleness + 1) steps' worth of tickets are out at a time, counting those being
trained on: that alone bounds both the age of what is trained on and the memory held.

Those tickets are shared among the samplers that are there. A sampler has a ticket until a deadline that follows from
the pace so far; past it, another sampler that asks gets the ticket too, and whichever group comes first counts. A
ticket that comes back too often is dropped, with the reason, so that one bad prompt cannot take every sampler with it.
"""

import hashlib
import heapq
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

import torch

MAX_PROMPTS = 1 << 24  # of a dataset: a permutation of them takes 128 MiB and a second
LARGEST_TICKET = 1 << 62  # and the smallest: minus that
MAX_HANDOVERS = 2  # how often a ticket goes to another sampler before it is dropped
SILENCE = 0.5  # what a sampler that vanished counts of a handover: machines are taken away, tickets do not kill often
SLACK = 3.0  # a ticket's deadline, in times of the slowest recent group
MIN_DEADLINE = 30.0  # seconds
RECENT = 64  # groups that the pace is measured by


@dataclass(frozen=True)
class Ticket:
    """An order for one Group, or for the answer to one held-out question (see grpo/held_out.py)."""

    ticket_id: int  # below 0: a held-out question
    prompt_index: int
    seed: int  # of the group's sampling noise
    version: int  # the oldest adapter version that may be used; at max_staleness 0, and held out, the only one

    @property
    def held_out(self) -> bool:
        """Whether it asks for an evaluation instead of a Group."""
        return self.ticket_id < 0


def derive_seed(*parts) -> int:
    """A 63-bit seed from the parts, the same on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class TicketBook:
    """Grants tickets, takes back those of dead samplers, and picks each step's groups.

    A ticket is in one of five states: not yet issued, waiting to be issued again, held by a sampler, arrived, or
    finished (trained on, or dropped with a reason). Only `finish_step` and `drop` finish one.

    Times are seconds of one clock of the caller's. `patience` is how long the run waits without any group at all: a
    ticket is handed over after half of it at the latest, unless groups take longer than a third of it.
    """

    def __init__(
        self,
        num_prompts: int,
        groups_per_step: int,
        max_staleness: int,
        seed: int,
        max_steps: int = 0,
        patience: float = 300.0,
    ):
        self.num_prompts, self.groups_per_step = num_prompts, groups_per_step
        self.max_staleness, self.seed, self.max_steps = max_staleness, seed, max_steps
        self.patience = patience
        self.steps_done = 0
        self.version = 0  # newest published adapter
        self.next_ticket = 0
        self.returned: list[int] = []  # heap
        self.held: dict[int, str] = {}  # ticket id -> sampler id
        self.arrived: dict[int, int] = {}  # ticket id -> adapter version
        self.in_training: list[int] = []
        self.planned: list[list[int]] = []  # steps that are trained again after a crash, with their tickets
        self.dropped: Counter[str] = Counter()
        self.fresh_drops: list[tuple[int, str]] = []  # for the caller, who takes down what happened to each ticket
        self._since: dict[int, float] = {}  # held ticket -> when it was granted
        self._failures: Counter[int] = Counter()  # open ticket -> handovers so far
        self._claimed: dict[int, str] = {}  # ticket -> a sampler that says it works on it
        self._durations: deque[float] = deque(maxlen=RECENT)  # from grant to arrival
        self._permutations: dict[int, torch.Tensor] = {}

    def grant(
        self, sampler_id: str, capacity: int, now: float = 0.0, asking: Collection[str] = frozenset()
    ) -> list[Ticket]:
        """Up to `capacity` tickets for this sampler, its share at most; those of dead samplers first.

        `asking` are the samplers that wait for tickets at this moment. At max_staleness 0 a ticket is granted again
        together with those it was first granted with, even if these are done: what is decoded and scored together
        then never depends on who died when, so neither does its rounding.
        """
        capacity = min(capacity, self._share(sampler_id, asking))
        if self.max_staleness == 0 and self.returned and capacity:
            tickets = self._grant_batch_again(sampler_id, capacity)
        else:
            tickets = []
            while len(tickets) < capacity and (ticket_id := self._next(sampler_id)) is not None:
                self.held[ticket_id] = sampler_id
                tickets.append(self.ticket(ticket_id))
        self._since |= {ticket.ticket_id: now for ticket in tickets if ticket.ticket_id in self.held}
        return tickets

    def _share(self, sampler_id: str, asking: Collection[str]) -> int:
        """What this sampler may still take of the tickets that can be out, if all that work for the run get as many.

        At max_staleness 0 all samplers wait for the new version together, so those that ask are all there are.
        """
        others = set(asking) if self.max_staleness == 0 else set(asking) | set(self.held.values())
        share = -(-self._limit() // len(others | {sampler_id}))
        has = sum(holder == sampler_id for holder in self.held.values())
        return max(0, share - (has if self.max_staleness else 0))

    def _next(self, sampler_id: str) -> int | None:
        """The next ticket to grant to this sampler, taken off the books."""
        own = [t for t in self.returned if self._claimed.get(t) == sampler_id]  # it works on them already
        free = [t for t in self.returned if t not in own]
        if free:
            ticket_id = min(free, key=lambda t: (t in self._claimed, t))
            self._take_back_in(ticket_id)
        elif self._outstanding() < self._limit():
            ticket_id = self.next_ticket
            self.next_ticket += 1
        else:
            return None
        return ticket_id

    def _take_back_in(self, ticket_id: int) -> None:
        self.returned.remove(ticket_id)
        heapq.heapify(self.returned)

    def _grant_batch_again(self, sampler_id: str, capacity: int) -> list[Ticket]:
        first = self.returned[0]
        if all(self._claimed.get(t) == sampler_id for t in self.returned):
            return []  # it works on them already
        step_start = first // self.groups_per_step * self.groups_per_step
        start = step_start + (first - step_start) // capacity * capacity
        batch = range(start, min(start + capacity, step_start + self.groups_per_step, self.next_ticket))
        for ticket_id in set(batch) & set(self.returned):
            self._take_back_in(ticket_id)
            self.held[ticket_id] = sampler_id
        return [self.ticket(ticket_id) for ticket_id in batch]

    def deadline(self) -> float:
        """Seconds that a sampler has for a ticket before others may take it: a few times what groups took lately."""
        if not self._durations:
            return max(MIN_DEADLINE, self.patience / 2)
        slowest = max(self._durations)
        return max(MIN_DEADLINE, 1.5 * slowest, min(SLACK * slowest, self.patience / 2))

    def overdue(self, sampler_id: str, now: float) -> list[int]:
        """Tickets that samplers other than this one have had for too long."""
        limit = self.deadline()
        return [t for t, holder in self.held.items() if holder != sampler_id and now - self._since.get(t, now) > limit]

    def fail(self, ticket_id: int, reason: str, weight: float = 1.0) -> None:
        """Take an open ticket from whoever has it, for another sampler; once too often, and it is dropped."""
        if ticket_id >= self.next_ticket or not self.open(ticket_id):
            return
        self._claimed.pop(ticket_id, None)
        if self.held.pop(ticket_id, None) is not None:
            self._since.pop(ticket_id, None)
            heapq.heappush(self.returned, ticket_id)
        self._failures[ticket_id] += weight
        if self._failures[ticket_id] > MAX_HANDOVERS:
            self.drop(ticket_id, reason)

    def _finish(self, ticket_id: int) -> None:
        for table in (self._since, self._failures, self._claimed):
            table.pop(ticket_id, None)

    def restore(self, steps_done: int, version: int, planned: list[list[int]], arrived: dict[int, int], finished: set):
        """Resume where a run ended: `planned` steps come first, `arrived` groups are here, `finished` tickets done.

        Every other ticket below the highest of them is granted again.
        """
        self.steps_done, self.version, self.planned, self.arrived = steps_done, version, list(planned), dict(arrived)
        known = set(arrived) | finished | {t for step in planned for t in step}
        self._issue_until(max(known, default=-1) + 1, known)

    def claim(self, sampler_id: str, holding: set[int]) -> None:
        """A sampler says that it works on these tickets, from before a restart perhaps.

        It is believed of itself alone: it does not get them again, and others get them last. Nothing is held by a
        claim, for whoever invents some must not stop the run. Tickets that only a learner that crashed remembered
        are issued again up to the highest claimed one.
        """
        self._claimed = {t: holder for t, holder in self._claimed.items() if holder != sampler_id}
        self._issue_until(max((t for t in holding if self.acceptable(t)), default=-1) + 1, set())
        self._claimed |= {t: sampler_id for t in holding if t in self.returned}

    def _issue_until(self, ticket_id: int, known: set[int]) -> None:
        if self.max_staleness == 0 and not self.dropped:  # the tickets of a step are granted in one go
            ticket_id = -(-ticket_id // self.groups_per_step) * self.groups_per_step
        self.returned += [t for t in range(self.next_ticket, ticket_id) if t not in known]
        heapq.heapify(self.returned)
        self.next_ticket = max(self.next_ticket, ticket_id)

    def ticket(self, ticket_id: int) -> Ticket:
        """What ticket `ticket_id` asks for now."""
        prompt_index = self._prompt_index(ticket_id)
        return Ticket(ticket_id, prompt_index, derive_seed(self.seed, "ticket", ticket_id), self.version)

    def arrive(self, ticket_id: int, version: int, now: float = 0.0) -> str:
        """Note a received group: 'accepted', or 'duplicate' when it is already here or finished.

        It counts whoever sends it: a sampler that was given up may be quicker than the one that has its ticket now,
        and one that outlived a restart of the learner may have tickets that the learner does not remember.
        """
        assert self.acceptable(ticket_id), f"ticket {ticket_id} was never issued"
        if ticket_id >= self.next_ticket:
            self._issue_until(ticket_id + 1, set())
        if ticket_id in self.returned:
            self._take_back_in(ticket_id)
        elif self.held.pop(ticket_id, None) is None:
            return "duplicate"
        elif ticket_id in self._since:
            self._durations.append(now - self._since[ticket_id])
        self._finish(ticket_id)
        self.arrived[ticket_id] = version
        return "accepted"

    def open(self, ticket_id: int) -> bool:
        """Whether a group for this ticket is still wanted."""
        return ticket_id in self.held or ticket_id in self.returned or ticket_id >= self.next_ticket

    def acceptable(self, ticket_id: int) -> bool:
        """Whether this ticket was ever granted, or may have been granted by a learner that has crashed since."""
        return 0 <= ticket_id < self.next_ticket + max(0, self._limit() - self._outstanding())

    def drop(self, ticket_id: int, reason: str) -> bool:
        """Finish a ticket without training on it; False if it is not open."""
        if ticket_id in self.returned:
            self._take_back_in(ticket_id)
        elif self.held.pop(ticket_id, None) is None and self.arrived.pop(ticket_id, None) is None:
            return False
        self._finish(ticket_id)
        self.dropped[reason] += 1
        self.fresh_drops.append((ticket_id, reason))
        return True

    def belongs_to(self, ticket_id: int, sampler_id: str) -> bool:
        """Whether this sampler has the ticket, as far as the book knows or by what it says itself."""
        return sampler_id in (self.held.get(ticket_id), self._claimed.get(ticket_id))

    def release(
        self, sampler_id: str, keep: set[int] = frozenset(), reason: str = "", weight: float = 0.0
    ) -> list[int]:
        """Take back what a sampler holds, except `keep`; others get it next. `weight`, `reason`: see `fail`."""
        lost = [t for t, holder in self.held.items() if holder == sampler_id and t not in keep]
        for ticket_id in lost:
            self.fail(ticket_id, reason, weight)
        self._claimed = {t: holder for t, holder in self._claimed.items() if holder != sampler_id}
        return lost

    def drop_stale(self) -> list[int]:
        """Finish arrived groups that are too old for the next step."""
        stale = [t for t, version in self.arrived.items() if self.steps_done - version > self.max_staleness]
        for ticket_id in stale:
            self.drop(ticket_id, "stale")
        return stale

    def start_step(self) -> list[int] | None:
        """The next step's ticket ids, oldest policy first, or None while there are too few."""
        if self.in_training:
            return None
        if self.planned:
            self.in_training = self.planned.pop(0)
            return self.in_training
        if len(self.arrived) < self.groups_per_step:
            return None
        oldest_first = sorted(self.arrived, key=lambda t: (self.arrived[t], t))
        self.in_training = oldest_first[: self.groups_per_step]
        for ticket_id in self.in_training:
            del self.arrived[ticket_id]
        return self.in_training

    def finish_step(self, version: int | None) -> None:
        """The step is trained; `version` is the adapter published after it, None if none was."""
        self.in_training = []
        self.steps_done += 1
        self.version = self.version if version is None else version

    def _outstanding(self) -> int:
        planned = sum(map(len, self.planned))
        return len(self.held) + len(self.arrived) + len(self.in_training) + len(self.returned) + planned

    def _limit(self) -> int:
        steps = self.max_staleness + 1
        if self.max_steps:
            steps = min(steps, self.max_steps - self.steps_done)
        return steps * self.groups_per_step

    def _prompt_index(self, ticket_id: int) -> int:
        epoch, position = divmod(ticket_id, self.num_prompts)
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
            permutation = torch.randperm(self.num_prompts, generator=generator)
            # tickets of two neighbouring epochs can be out at once; older permutations are not needed again
            self._permutations = {e: p for e, p in self._permutations.items() if e >= epoch - 1} | {epoch: permutation}
        return int(self._permutations[epoch][position])
