"""Which completions of one optimizer step run on which rank, and in which micro-batch.

The step's parts are shared out so that every rank has equally many micro-batches, for DeepSpeed's ranks meet in each
backward pass, and nearly equal work. Deterministic: every rank computes the same plan.
"""

import math
from dataclasses import dataclass

import torch

from grpo.rollout import Group


@dataclass
class Part:
    """Some completions of a group, with the advantages of the whole group."""

    group: Group
    advantages: torch.Tensor  # (G,) or (G, C)
    rows: range
    counts: bool = True  # False: it only keeps a rank company that has nothing to do

    @property
    def tokens(self) -> int:
        """What the model has to run over: the prompt once, and the completions."""
        return len(self.group.prompt_ids) + int(self.group.lengths[self.rows.start : self.rows.stop].sum())

    def token_advantages(self) -> list[torch.Tensor]:
        """One advantage for each token of each completion."""
        pairs = [(self.advantages[i], int(self.group.lengths[i])) for i in self.rows]
        return [value[:n] if value.dim() else value.expand(n) for value, n in pairs]

    def values(self, name: str) -> list[torch.Tensor]:
        """The group's `name` (completion_ids, old_logprobs ...) of these completions."""
        return self.group.completions(name)[self.rows.start : self.rows.stop]


def make_plan(
    groups: list[Group],
    advantages: list[torch.Tensor],
    ranks: int,
    *,
    max_rows: int,
    max_tokens: int = 0,
    skip_zero: bool = False,
) -> list[list[list[Part]]]:
    """The parts of each micro-batch of each rank: plan[rank][micro-batch].

    A micro-batch has at most `max_rows` completions, or, where `max_tokens` is given, at most so many tokens (a
    longer completion is alone). `skip_zero` leaves out groups whose advantages are all 0.
    """
    chosen = [pair for pair in zip(groups, advantages, strict=True) if not skip_zero or pair[1].any()]
    size = _rows_of_a_part(chosen, ranks, max_rows, max_tokens)
    parts = [
        Part(group, values, range(start, start + size))
        for group, values in chosen
        for start in range(0, group.size, size)
    ]
    costs = [part.tokens for part in parts]
    room = max(1, len(parts)) if max_tokens else max_rows // size
    for count in range(max(1, math.ceil(len(parts) / (ranks * room))), len(parts) + 2):
        shares = deal(costs, ranks * count, room)
        if not max_tokens or all(len(share) < 2 or sum(costs[i] for i in share) <= max_tokens for share in shares):
            break
    idle = Part(groups[0], torch.zeros_like(advantages[0]), range(1), counts=False)
    # micro-batches that run at the same time are neighbours in size, for the ranks wait for each other after each
    shares.sort(key=lambda share: -sum(costs[i] for i in share))
    bins = [[parts[i] for i in share] or [idle] for share in shares]
    return [bins[rank::ranks] for rank in range(ranks)]


def imbalance(plan: list[list[list[Part]]]) -> float:
    """The time that an average rank waits for others in its micro-batches, over the time it works, by tokens."""
    loads = [[sum(part.tokens for part in share if part.counts) for share in shares] for shares in plan]
    longest, total = sum(map(max, zip(*loads, strict=True))), sum(map(sum, loads))
    return longest * len(plan) / total - 1 if total else 0.0


def deal(costs: list[int], slots: int, room: int) -> list[list[int]]:
    """Share out len(costs) items over `slots`, at most `room` in each, with nearly equal sums of cost.

    The most costly go first, each to the lightest slot that still has room.
    """
    assert len(costs) <= room * slots, f"{len(costs)} items in {slots} slots of {room}"
    shares: list[list[int]] = [[] for _ in range(slots)]
    loads = [0] * slots
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        slot = min((s for s in range(slots) if len(shares[s]) < room), key=lambda s: (loads[s], s))
        shares[slot].append(i)
        loads[slot] += costs[i]
    return [sorted(share) for share in shares]


def _rows_of_a_part(chosen: list, ranks: int, max_rows: int, max_tokens: int) -> int:
    """Completions of a group that stay together: as many as fit, for they share their prompt."""
    if not chosen:
        return 1
    group_size = chosen[0][0].size
    if not max_tokens:
        return math.gcd(max_rows, group_size)
    sizes = [size for size in range(group_size, 0, -1) if group_size % size == 0]
    for size in sizes:
        longest = max(len(g.prompt_ids) + size * int(g.lengths.max()) for g, _ in chosen)
        if longest <= max_tokens and len(chosen) * group_size // size >= ranks:
            return size
    return 1
