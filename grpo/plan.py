"""Which completions of one optimizer step run on which rank, and in which micro-batch.

The step's parts are shared out so that every rank has equally many micro-batches, for DeepSpeed's ranks meet in each
backward pass, and nearly equal work. Deterministic: every rank computes the same plan.
"""

import heapq
import math
from dataclasses import dataclass
from functools import cached_property

import torch

from grpo.rollout import Group


@dataclass
class Part:
    """Some completions of a group, with the advantages of the whole group."""

    group: Group
    advantages: torch.Tensor  # (G,) or (G, C)
    rows: range
    counts: bool = True  # False: it only keeps a rank company that has nothing to do

    @cached_property
    def tokens(self) -> int:
        """What the model has to run over: the prompt once, and the completions."""
        return len(self.group.prompt_ids) + int(self.group.lengths[self.rows.start : self.rows.stop].sum())

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest of these completions."""
        return int(self.group.lengths[self.rows.start : self.rows.stop].max())

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

    A micro-batch has at most `max_rows` completions, or, where `max_tokens` is given, at most so many tokens, padded to
    its longest completion (a longer one is alone). `skip_zero` leaves out groups whose advantages are all 0.
    """
    chosen = [pair for pair in zip(groups, advantages, strict=True) if not skip_zero or pair[1].any()]
    size = _rows_of_a_part(chosen, ranks, max_rows, max_tokens)
    parts = [
        Part(group, values, range(start, start + size))
        for group, values in chosen
        for start in range(0, group.size, size)
    ]
    bins = _by_tokens(parts, ranks, max_tokens) if max_tokens else _by_rows(parts, ranks, max_rows // size)
    # micro-batches that run at the same time are neighbours in size, for the ranks wait for each other after each
    bins.sort(key=lambda share: -sum(part.tokens for part in share))
    idle = Part(groups[0], torch.zeros_like(advantages[0]), range(1), counts=False)
    bins += [[idle]] * (-len(bins) % ranks if bins else ranks)
    return [bins[rank::ranks] for rank in range(ranks)]


def _by_rows(parts: list[Part], ranks: int, room: int) -> list[list[Part]]:
    """Micro-batches of at most `room` parts and nearly equal work, a multiple of `ranks` where there is enough."""
    count = ranks * max(1, math.ceil(len(parts) / (ranks * room)))
    shares = deal([part.tokens for part in parts], count, room)
    return [[parts[i] for i in share] for share in shares if share]


def _by_tokens(parts: list[Part], ranks: int, max_tokens: int) -> list[list[Part]]:
    """Micro-batches of completions of similar length, as equal as the number that `max_tokens` needs lets them be."""
    by_length = sorted(parts, key=lambda part: -part.longest)
    most = math.ceil(len(_fill(by_length, max_tokens)) / ranks) * ranks
    low, high = 1, max_tokens  # the least limit that needs no more micro-batches
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(by_length, middle)) <= most else (middle + 1, high)
    return _fill(by_length, high)


def _fill(parts: list[Part], limit: int) -> list[list[Part]]:
    """Micro-batches of at most `limit` tokens if all completions of one were as long as its longest.

    `parts` come with the longest first; each prompt of a micro-batch counts once.
    """
    bins: list[list[Part]] = []
    prompts: dict[int, int] = {}  # of the last micro-batch: its groups' prompt lengths, their sum, its completions
    prompt_tokens = rows = 0
    for part in parts:
        length = 0 if id(part.group) in prompts else len(part.group.prompt_ids)
        if bins and prompt_tokens + length + (rows + len(part.rows)) * bins[-1][0].longest <= limit:
            bins[-1].append(part)
        else:
            bins.append([part])
            prompts, prompt_tokens, rows, length = {}, 0, 0, len(part.group.prompt_ids)
        prompts[id(part.group)] = length
        prompt_tokens, rows = prompt_tokens + length, rows + len(part.rows)
    return bins


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
    lightest = [(0, slot) for slot in range(slots)]  # heap of (load, slot), those with room
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, slot = heapq.heappop(lightest)
        shares[slot].append(i)
        if len(shares[slot]) < room:
            heapq.heappush(lightest, (load + costs[i], slot))
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
        largest = max(len(group.prompt_ids) + size * int(group.lengths.max()) for group, _ in chosen)
        if 2 * largest <= max_tokens and len(chosen) * group_size // size >= 2 * ranks:  # enough to share out
            return size
    return 1
