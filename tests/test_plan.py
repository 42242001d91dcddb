"""Which completions run where: everything once, equally many micro-batches, nearly equal work."""

import time
from itertools import pairwise

import pytest
import torch
from test_rollout import make_group

from grpo.plan import _fill, deal, imbalance, make_plan

GROUP_SIZE = 4


def groups_and_advantages(count, zero=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    groups, advantages = [], []
    for i in range(count):
        lengths = torch.randint(1, 40, (GROUP_SIZE,), generator=generator, dtype=torch.int32)
        n = int(lengths.sum())
        groups.append(
            make_group(
                ticket_id=i,
                prompt_ids=torch.arange(5 + i, dtype=torch.int32),
                completion_ids=torch.zeros(n, dtype=torch.int32),
                lengths=lengths,
            )
        )
        advantages.append(torch.tensor([1.0, -1.0, 0.0, 0.0]) * (i not in zero))
    return groups, advantages


def rows_of(plan):
    return sorted((p.group.ticket_id, i) for rank in plan for share in rank for p in share if p.counts for i in p.rows)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("limits", [dict(max_rows=2), dict(max_rows=4), dict(max_rows=4, max_tokens=100)])
def test_every_completion_runs_once_in_equally_many_micro_batches_within_the_limit(ranks, limits):
    groups, advantages = groups_and_advantages(6)
    plan = make_plan(groups, advantages, ranks, **limits)
    assert rows_of(plan) == [(g, i) for g in range(6) for i in range(GROUP_SIZE)]
    assert len({len(shares) for shares in plan}) == 1 and len(plan) == ranks
    for share in (share for rank in plan for share in rank):
        assert share
        if "max_tokens" in limits:
            longest = max(part.longest for part in share)
            assert sum(len(part.rows) for part in share) * longest <= 100 or len(share) == 1
        else:
            assert sum(len(part.rows) for part in share) <= limits["max_rows"]
    assert plan == make_plan(groups, advantages, ranks, **limits)


def test_micro_batches_by_tokens_are_of_nearly_equal_work():
    groups, advantages = groups_and_advantages(32)
    assert imbalance(make_plan(groups, advantages, 2, max_rows=4, max_tokens=400)) < 0.02


def test_a_sequence_longer_than_the_limit_is_alone():
    groups, advantages = groups_and_advantages(2)
    plan = make_plan(groups, advantages, 1, max_rows=4, max_tokens=3)
    assert all(len(share) == 1 and len(share[0].rows) == 1 for share in plan[0])
    assert rows_of(plan) == [(g, i) for g in range(2) for i in range(GROUP_SIZE)]


@pytest.mark.parametrize("max_tokens", [0, 200])
def test_groups_without_advantage_are_left_out_and_nobody_runs_more_often_than_the_others(max_tokens):
    groups, advantages = groups_and_advantages(6, zero={0, 1, 2, 3, 4})
    plan = make_plan(groups, advantages, 2, max_rows=4, max_tokens=max_tokens, skip_zero=True)
    assert rows_of(plan) == [(5, i) for i in range(GROUP_SIZE)]
    assert {len(shares) for shares in plan} == {1}


def test_with_nothing_to_do_every_rank_has_an_idle_micro_batch():
    groups, advantages = groups_and_advantages(3, zero={0, 1, 2})
    plan = make_plan(groups, advantages, 2, max_rows=4, skip_zero=True)
    assert [[part.counts for part in share] for rank in plan for share in rank] == [[False], [False]]
    assert imbalance(plan) == 0


def test_deal_gives_equal_counts_and_nearly_equal_loads():
    generator = torch.Generator().manual_seed(0)
    for slots in (1, 2, 4, 8):
        costs = torch.randint(10, 300, (64,), generator=generator).tolist()
        shares = deal(costs, slots, 64 // slots)
        assert sorted(i for share in shares for i in share) == list(range(64))
        assert {len(share) for share in shares} == {64 // slots}
        loads = [sum(costs[i] for i in share) for share in shares]
        assert max(loads) - min(loads) <= max(costs)
        assert shares == deal(costs, slots, 64 // slots)


def padded(share):
    """Tokens of a micro-batch if all its completions were as long as the longest; each prompt counts once."""
    prompts = {part.group.ticket_id: len(part.group.prompt_ids) for part in share}
    return sum(prompts.values()) + sum(len(part.rows) for part in share) * max(part.longest for part in share)


def test_micro_batches_by_tokens_are_filled_from_the_longest_on_as_far_as_the_limit_lets_them():
    groups, advantages = groups_and_advantages(8)
    parts = [share[0] for share in make_plan(groups, advantages, 1, max_rows=1)[0]]
    by_length = sorted(parts, key=lambda part: -part.longest)
    for limit in (45, 100, 200, 1000):
        bins = _fill(by_length, limit)
        assert [part for share in bins for part in share] == by_length
        assert all(padded(share) <= limit or len(share) == 1 for share in bins)
        assert all(padded([*share, after[0]]) > limit for share, after in pairwise(bins))  # none could be fuller


def test_a_plan_takes_nearly_linear_time_also_when_one_completion_is_long():
    groups, advantages = groups_and_advantages(512)  # of 4, with prompts of 5 to 516 tokens
    lengths = groups[0].lengths.clone()
    lengths[0] = 16000
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int32)
    groups[0] = make_group(ticket_id=0, prompt_ids=groups[0].prompt_ids, lengths=lengths, completion_ids=ids)
    started = time.process_time()  # of this process alone, however busy the machine is
    make_plan(groups, advantages, 2, max_rows=4, max_tokens=20_000)
    make_plan(groups, advantages, 2, max_rows=1)
    assert time.process_time() - started < 2  # both together take 0.2 s; quadratic ways take 7 s
