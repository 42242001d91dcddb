"""Which prompt is wanted next, who holds it, what is done. Pure bookkeeping: no sockets, no clock of its own.

Ticket k asks for prompt permutation_e[k mod D] of epoch e = k div D, so any number of samplers covers a dataset of D
prompts without overlap. At most (max_staleness + 1) steps' worth of tickets are out at a time, counting those being
trained on: that alone bounds both the age of what is trained on and the memory held.
"""

import hashlib
import heapq
from collections import Counter
from dataclasses import dataclass

import torch


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
    """

    def __init__(self, num_prompts: int, groups_per_step: int, max_staleness: int, seed: int, max_steps: int = 0):
        self.num_prompts, self.groups_per_step = num_prompts, groups_per_step
        self.max_staleness, self.seed, self.max_steps = max_staleness, seed, max_steps
        self.steps_done = 0
        self.version = 0  # newest published adapter
        self.next_ticket = 0
        self.returned: list[int] = []  # heap
        self.held: dict[int, str] = {}  # ticket id -> sampler id
        self.arrived: dict[int, int] = {}  # ticket id -> adapter version
        self.in_training: list[int] = []
        self.planned: list[list[int]] = []  # steps that are trained again after a crash, with their tickets
        self.dropped: Counter[str] = Counter()
        self._permutations: dict[int, torch.Tensor] = {}

    def grant(self, sampler_id: str, capacity: int) -> list[Ticket]:
        """Up to `capacity` tickets for this sampler, those of dead samplers first.

        At max_staleness 0 a ticket is granted again together with those it was first granted with, even if these are
        done: what is decoded and scored together then never depends on who died when, so neither does its rounding.
        """
        if self.max_staleness == 0 and self.returned:
            return self._grant_batch_again(sampler_id, capacity)
        tickets = []
        while len(tickets) < capacity and (self.returned or self._outstanding() < self._limit()):
            ticket_id = heapq.heappop(self.returned) if self.returned else self.next_ticket
            self.next_ticket = max(self.next_ticket, ticket_id + 1)
            self.held[ticket_id] = sampler_id
            tickets.append(self.ticket(ticket_id))
        return tickets

    def _grant_batch_again(self, sampler_id: str, capacity: int) -> list[Ticket]:
        step_start = self.returned[0] // self.groups_per_step * self.groups_per_step
        start = step_start + (self.returned[0] - step_start) // capacity * capacity
        batch = range(start, min(start + capacity, step_start + self.groups_per_step, self.next_ticket))
        for ticket_id in set(batch) & set(self.returned):
            self.returned.remove(ticket_id)
            self.held[ticket_id] = sampler_id
        heapq.heapify(self.returned)
        return [self.ticket(ticket_id) for ticket_id in batch]

    def restore(self, steps_done: int, version: int, planned: list[list[int]], arrived: dict[int, int], finished: set):
        """Go on where a run ended: `planned` steps come first, `arrived` groups are here, `finished` tickets done.

        Every other ticket below the highest of them is granted again.
        """
        self.steps_done, self.version, self.planned, self.arrived = steps_done, version, list(planned), dict(arrived)
        known = set(arrived) | finished | {t for step in planned for t in step}
        self._issue_until(max(known, default=-1) + 1, known)

    def claim(self, sampler_id: str, holding: set[int]) -> None:
        """A sampler holds tickets that it was granted before a restart: they are its own, as far as they are open."""
        for ticket_id in sorted(holding):
            if self.next_ticket <= ticket_id < self.next_ticket + self._limit():
                self._issue_until(ticket_id + 1, set())
            if ticket_id in self.returned:
                self.returned.remove(ticket_id)
                heapq.heapify(self.returned)
                self.held[ticket_id] = sampler_id

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

    def arrive(self, ticket_id: int, version: int) -> str:
        """Note a received group: 'accepted', or 'duplicate' when it is already here or finished."""
        assert self.issued(ticket_id), f"ticket {ticket_id} was never issued"
        if ticket_id in self.returned:  # its sampler was given up, yet the group came before anybody else took it on
            self.returned.remove(ticket_id)
            heapq.heapify(self.returned)
        elif self.held.pop(ticket_id, None) is None:
            return "duplicate"
        self.arrived[ticket_id] = version
        return "accepted"

    def open(self, ticket_id: int) -> bool:
        """Whether a group for this ticket is still wanted."""
        return ticket_id in self.held or ticket_id in self.returned

    def issued(self, ticket_id: int) -> bool:
        """Whether this ticket was ever granted."""
        return 0 <= ticket_id < self.next_ticket

    def give_back(self, sampler_id: str, ticket_id: int) -> None:
        """A sampler failed at one ticket that it holds: it is granted again."""
        if self.held.get(ticket_id) == sampler_id:
            del self.held[ticket_id]
            heapq.heappush(self.returned, ticket_id)

    def drop(self, ticket_id: int, reason: str) -> bool:
        """Finish a ticket without training on it; False if it is not open."""
        if self.held.pop(ticket_id, None) is None and self.arrived.pop(ticket_id, None) is None:
            return False
        self.dropped[reason] += 1
        return True

    def release(self, sampler_id: str, keep: set[int] = frozenset()) -> list[int]:
        """Take back what a sampler holds, except `keep`; others get these tickets next."""
        lost = [t for t, holder in self.held.items() if holder == sampler_id and t not in keep]
        for ticket_id in lost:
            self.give_back(sampler_id, ticket_id)
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
