"""Advantages and losses against numbers worked by hand, finite differences and their own invariances."""

import math

import pytest
import torch

from utils import (
    cispo_loss,
    count_sequences,
    count_token_budget,
    count_tokens,
    dapo_loss,
    dr_grpo_loss,
    group_advantages,
    grpo_loss,
    gspo_loss,
    process_advantages,
    truncated_importance_weights,
)

NAN, INF = float("nan"), float("inf")
LOSSES = [grpo_loss, gspo_loss, dapo_loss, dr_grpo_loss, cispo_loss]
each_loss = pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda loss_fn: loss_fn.__name__)


def tensor(rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def mean(metric):
    total, count = metric
    return float(total) / float(count)


def value_and_gradient(loss_fn, logprobs, *inputs, **options):
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, metrics = loss_fn(logprobs, *inputs, **options)
    loss.backward()
    return loss.detach(), logprobs.grad, metrics


def fixture(pad=NAN):
    """Lengths 3 and 2, ratios [1, 1.5, 0.5] and [1.2, 0.7, pad], advantages +1, -1, old log-probs ln 0.5."""
    mask = tensor([[1, 1, 1], [1, 1, 0]])
    old = torch.full((2, 3), math.log(0.5), dtype=torch.float64)
    logprobs = old + tensor([[1, 1.5, 0.5], [1.2, 0.7, 1]]).log()
    ref = logprobs + tensor([[0, 0.1, -0.2], [0.3, -0.1, 0]])
    for x in (old, logprobs, ref):
        x[1, 2] = pad
    return logprobs, old, ref, tensor([1, -1]), mask


def importance_weights(pad=NAN):
    _, old, *_ = fixture()
    return truncated_importance_weights(old, old - tensor([[0, 0.5, 1.2], [-0.1, 0.2, pad]]), 2.0)


def random_batch(batch=8, length=7, *, seed=0, dtype=torch.float64):
    """Rows of unequal length, one of them empty, with NaN under the mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(batch, length, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    lengths[2], lengths[-1] = 0, length
    mask = torch.arange(length) < lengths[:, None]
    old = -normal(1.0).abs() - 0.1
    logprobs, ref, sampling = old + normal(0.25), old + normal(0.3), old + normal(0.2)
    advantages = torch.randn(batch, generator=generator, dtype=torch.float64)
    weights = truncated_importance_weights(old, sampling, 1.2)
    logprobs, old, ref, weights = (x.masked_fill(~mask, NAN).to(dtype) for x in (logprobs, old, ref, weights))
    return logprobs, old, ref, advantages.to(dtype), mask, weights


# ----- advantages ------------------------------------------------------------------------------------


def test_group_advantages_of_one_group():
    rewards = tensor([2.25, 1.25, 0, 1.25])
    expected = tensor([1.153025, 0.067825, -1.288675, 0.067825])
    torch.testing.assert_close(group_advantages(rewards, 4), expected, atol=5e-7, rtol=0)
    unscaled = group_advantages(rewards, 4, scale=False)
    torch.testing.assert_close(unscaled, tensor([1.0625, 0.0625, -1.1875, 0.0625]), atol=1e-15, rtol=0)


def test_each_group_has_its_own_mean_and_std():
    advantages = group_advantages(tensor([2.25, 1.25, 0, 1.25, 102.25, 101.25, 100, 101.25]), 4)
    torch.testing.assert_close(advantages[:4], advantages[4:], atol=1e-12, rtol=0)
    halves = group_advantages(tensor([0, 1, 10, 30]), 2)
    low, high = math.sqrt(0.5) / (1 + 1e-4 / math.sqrt(0.5)), 10 / (math.sqrt(200) + 1e-4)
    torch.testing.assert_close(halves, tensor([-low, low, -high, high]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.25, 1 / 3, -1e9, 2.25])
@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [True, False])
def test_equal_rewards_give_exactly_zero(reward, group_size, dtype, scale):
    rewards = torch.full((2 * group_size,), reward, dtype=dtype)
    assert group_advantages(rewards, group_size, scale=scale).tolist() == [0.0] * (2 * group_size)


def test_group_of_one_is_zero():
    assert group_advantages(tensor([3, -7, NAN]), 1).tolist() == [0, 0, 0]


def test_a_reward_of_none_is_left_out():
    advantages = group_advantages(tensor([2.25, NAN, 1.25, 0, 1.25]), 5)
    expected = tensor([1.153025, 0, 0.067825, -1.288675, 0.067825])
    torch.testing.assert_close(advantages, expected, atol=5e-7, rtol=0)
    assert group_advantages(tensor([NAN, 5, NAN, NAN, NAN, NAN]), 3).tolist() == [0] * 6
    listed = group_advantages([2.25, None, 1.25, 0, 1.25], 5)
    torch.testing.assert_close(listed, expected.float(), atol=1e-6, rtol=0)


def test_advantages_stay_bounded_for_nearly_equal_rewards():
    assert group_advantages(tensor([0.3, 0.1 + 0.2]), 2).abs().max() < 1e-9


def test_advantages_are_in_fp32_or_better():
    for given, returned in [(torch.bfloat16, torch.float32), (torch.float32, torch.float32),
                            (torch.int64, torch.float32), (torch.float64, torch.float64)]:
        advantages = group_advantages(torch.tensor([2, 1, 0, 1]).to(given), 4)
        assert advantages.dtype == returned
        expected = group_advantages(tensor([2, 1, 0, 1]), 4)
        torch.testing.assert_close(advantages.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("count, group_size", [(6, 4), (3, 2), (4, 0), (4, -2)])
def test_rewards_that_do_not_divide_into_groups(count, group_size):
    with pytest.raises(ValueError, match=rf"{count} rewards.*groups of {group_size}: check --group_size"):
        group_advantages(torch.zeros(count), group_size)


def test_infinite_rewards_are_refused():
    with pytest.raises(ValueError, match=r"finite numbers or None, got \[inf\]"):
        group_advantages(tensor([1, INF]), 2)
    with pytest.raises(ValueError, match=r"finite numbers or None, got \[-inf\]"):
        process_advantages([[(0, -INF)], [(1, 2.0)]], 3)


def test_process_advantages_worked_example():
    advantages = process_advantages([[(2, 1.0), (5, 0.0)], [(3, 1.0), (4, 1.0)]], 7)
    expected = tensor([[-0.9998] * 3 + [-1.4997] * 3 + [0], [0.9998] * 4 + [0.4999, 0, 0]], torch.float32)
    torch.testing.assert_close(advantages, expected, atol=5e-5, rtol=0)
    assert advantages.dtype == torch.float32


def test_process_advantages_do_not_depend_on_the_order_of_steps():
    one = process_advantages([[(5, 0.0), (2, 1.0)], [(4, 1.0), (3, 1.0)]], 6)
    other = process_advantages([[(2, 1.0), (5, 0.0)], [(3, 1.0), (4, 1.0)]], 6)
    torch.testing.assert_close(one, other)


def test_process_advantages_without_scale():
    advantages = process_advantages([[(0, 1.0), (1, 0.0)], [(0, 1.0), (1, 1.0)]], 2, scale=False)
    assert advantages.tolist() == [[-0.5, -0.75], [0.5, 0.25]]


@pytest.mark.parametrize("steps", [
    [[], []],
    [[(1, 0.7)], []],
    [[(0, 0.1), (2, 0.1)], [(1, 0.1)]],
    [[(0, NAN)], [(1, 3.0)]],
], ids=["no steps", "one step", "equal rewards", "one step that is not None"])  # fmt: skip
def test_process_advantages_that_are_exactly_zero(steps):
    assert process_advantages(steps, 3).tolist() == [[0.0] * 3] * 2


def test_an_output_without_steps_gets_zeros():
    advantages = process_advantages([[(1, 1.0)], [], [(0, 0.0)]], 2)
    value = math.sqrt(0.5) / (1 + 1e-4 / math.sqrt(0.5))
    expected = tensor([[value, value], [0, 0], [-value, 0]], torch.float32)
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("end", [-1, 3])
def test_a_step_outside_its_output(end):
    with pytest.raises(ValueError, match=rf"output 1 ends at token {end}, not in 0\.\.2"):
        process_advantages([[(0, 1.0)], [(end, 0.0)]], 3)


# ----- the worked fixture ----------------------------------------------------------------------------

NARROW = {"clip_eps": 0.2, "clip_eps_high": 0.2}


@pytest.mark.parametrize("loss_fn, options, expected", [
    (grpo_loss, {"beta": 0.0}, 0.05),
    (grpo_loss, dict(NARROW, beta=0.0), 0.05),
    (grpo_loss, {}, 0.050706),
    (dapo_loss, NARROW, -0.14),
    (dapo_loss, {}, -0.156),  # 1.28 in the place of 1.2
    (dapo_loss, dict(NARROW, beta=0.04), -0.139371),
    (dr_grpo_loss, {"denominator": 8.0}, -0.0875),
    (dr_grpo_loss, {}, -0.7 / 6),  # B x C
    (gspo_loss, {}, 0.045570),
    (gspo_loss, NARROW, 0.003977),
    (cispo_loss, {}, 0.081332),
    (cispo_loss, NARROW, 0.081332 + 0.08 * math.log(0.75) / 5),  # 1.2 in the place of 1.28
])  # fmt: skip
def test_fixture(loss_fn, options, expected):
    loss, _ = loss_fn(*fixture(), **options)
    assert float(loss) == pytest.approx(expected, abs=6e-7)


@pytest.mark.parametrize("loss_fn, options, gradient", [
    (grpo_loss, {"beta": 0.0}, [[-1 / 6, 0, -0.5 / 6], [1.2 / 4, 0, 0]]),
    (dapo_loss, NARROW, [[-1 / 5, 0, -0.5 / 5], [1.2 / 5, 0, 0]]),
    (dr_grpo_loss, {"denominator": 8.0}, [[-1 / 8, 0, -0.5 / 8], [1.2 / 8, 0, 0]]),
    (gspo_loss, {}, [[-0.9085603 / 6] * 3, [0, 0, 0]]),
    (gspo_loss, NARROW, [[-0.9085603 / 6] * 3, [0.9165151 / 4, 0.9165151 / 4, 0]]),
    (cispo_loss, {}, [[-1 / 5, -1.28 / 5, -0.5 / 5], [1.2 / 5, 0.7 / 5, 0]]),
])  # fmt: skip
def test_fixture_gradient(loss_fn, options, gradient):
    _, grad, _ = value_and_gradient(loss_fn, *fixture(), **options)
    torch.testing.assert_close(grad, tensor(gradient), atol=1e-7, rtol=0)


def test_fixture_kl():
    *_, metrics = value_and_gradient(grpo_loss, *fixture(), beta=0.0)
    assert mean(metrics["kl"]) == pytest.approx(0.015720, abs=5e-7)
    logprobs, old, ref, advantages, mask = fixture()
    sequence_means, _ = grpo_loss(logprobs, old, ref, 0 * advantages, mask, beta=1.0)
    assert float(sequence_means) == pytest.approx(0.017658, abs=5e-7)
    token_mean, _ = dapo_loss(logprobs, old, ref, 0 * advantages, mask, beta=1.0)
    assert float(token_mean) == pytest.approx(0.015720, abs=5e-7)


@each_loss
def test_kl_is_under_the_same_mean_as_the_policy_term(loss_fn):
    with_kl, grad, _ = value_and_gradient(loss_fn, *fixture(), beta=0.04)
    without, policy_grad, _ = value_and_gradient(loss_fn, *fixture(), beta=0.0)
    lengths, scale = tensor([[3], [2]]), {count_sequences: 2, count_tokens: 5, count_token_budget: 6}
    per_token = scale[loss_fn.denominator] * (lengths if loss_fn.denominator is count_sequences else 1)
    d = tensor([[0, 0.1, -0.2], [0.3, -0.1, 0]])
    expected = (0.04 * (d.exp() - d - 1) / per_token).sum()
    torch.testing.assert_close(with_kl - without, expected, atol=1e-14, rtol=0)
    torch.testing.assert_close(grad - policy_grad, 0.04 * (1 - d.exp()) / per_token, atol=1e-14, rtol=0)


def test_fixture_truncated_importance_sampling():
    weights = importance_weights()
    expected = [1, 1.648721, 2, 0.904837, 1.221403]
    assert weights[fixture()[-1].bool()].tolist() == pytest.approx(expected, abs=5e-7)
    loss, _ = grpo_loss(*fixture(), beta=0.0, importance_weights=weights)
    assert float(loss) == pytest.approx(-0.147346, abs=5e-7)
    with_kl, _ = grpo_loss(*fixture(), beta=0.04, importance_weights=weights)  # the KL is not weighted
    assert float(with_kl - loss) == pytest.approx(0.04 * 0.017658, abs=5e-8)


def test_importance_weights_scale_the_policy_gradient_of_each_token():
    weights = importance_weights()
    for loss_fn in (grpo_loss, dapo_loss, dr_grpo_loss, cispo_loss):
        _, grad, _ = value_and_gradient(loss_fn, *fixture(), beta=0.0, importance_weights=weights)
        _, plain, _ = value_and_gradient(loss_fn, *fixture(), beta=0.0)
        torch.testing.assert_close(grad, plain * weights.nan_to_num(), atol=1e-14, rtol=0)


def test_gspo_weighs_a_sequence_by_the_geometric_mean():
    options = {**NARROW, "importance_weights": importance_weights()}
    loss, grad, _ = value_and_gradient(gspo_loss, *fixture(), **options)
    weights = [(1 * 1.648721271 * 2) ** (1 / 3), math.exp(0.05)]
    losses = [-0.9085603, 0.9165151]
    assert float(loss) == pytest.approx((weights[0] * losses[0] + weights[1] * losses[1]) / 2, abs=1e-7)
    assert grad[0].tolist() == pytest.approx([weights[0] * losses[0] / 6] * 3, abs=1e-7)
    zero = torch.zeros(2, 3, dtype=torch.float64)
    loss, grad, _ = value_and_gradient(gspo_loss, *fixture(), importance_weights=zero)
    assert loss == 0 and grad.eq(0).all()


def test_truncated_importance_weights():
    old = tensor([[-1.0, -1.0, 0.0]], torch.bfloat16).requires_grad_()
    weights = truncated_importance_weights(old, torch.tensor([[-1.0, -1e4, -INF]], dtype=torch.bfloat16), 3.0)
    assert weights.tolist() == [[1, 3, 3]]
    assert weights.dtype == torch.float32 and not weights.requires_grad
    with pytest.raises(ValueError, match="got 0: check --tis_cap"):
        truncated_importance_weights(old, old, 0)


def test_fixture_clip_fractions():
    for loss_fn in (grpo_loss, dapo_loss, dr_grpo_loss, cispo_loss):
        _, metrics = loss_fn(*fixture(), **NARROW, beta=0.0)
        shares = [mean(metrics[f"clip_ratio/{name}_mean"]) for name in ("low", "high", "region")]
        assert shares == pytest.approx([0.2, 0.2, 0.4])


def test_gspo_clip_fractions_count_sequences():
    logprobs, old, ref, advantages, mask = fixture()

    def pairs(*inputs):
        _, metrics = gspo_loss(*inputs, mask)
        return [tuple(map(float, metrics[f"clip_ratio/{name}_mean"])) for name in ("low", "high", "region")]

    assert pairs(logprobs, old, ref, advantages) == [(1, 2), (0, 2), (1, 2)]  # both s below 1, one A below 0
    assert pairs(old, logprobs, ref, advantages) == [(0, 2), (1, 2), (1, 2)]  # the inverse ratios


@each_loss
def test_metrics_are_sums_and_counts_without_gradient(loss_fn):
    logprobs, old, ref, advantages, mask = fixture()
    _, metrics = loss_fn(logprobs.requires_grad_(), old, ref, advantages, mask, beta=0.0)
    clip_ratios = {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
    assert set(metrics) == clip_ratios | {"approx_kl", "kl"}
    for total, count in metrics.values():
        assert total.shape == count.shape == () and not total.requires_grad and float(count) in (2, 5)
    r = tensor([1, 1.5, 0.5, 1.2, 0.7])
    assert mean(metrics["approx_kl"]) == pytest.approx(float((r - 1 - r.log()).mean()), abs=1e-14)
    _, metrics = loss_fn(logprobs, old, None, advantages, mask, beta=0.0)
    assert "kl" not in metrics


@each_loss
def test_one_clip_width_is_symmetric_where_the_upper_is_none(loss_fn):
    one, _ = loss_fn(*fixture(), clip_eps=0.1, clip_eps_high=None)
    two, _ = loss_fn(*fixture(), clip_eps=0.1, clip_eps_high=0.1)
    assert one == two


def test_cispo_has_no_lower_clip():
    narrow, _ = cispo_loss(*fixture(), clip_eps=0.01)
    wide, _ = cispo_loss(*fixture(), clip_eps=1.0)
    assert narrow == wide


# ----- gradients against finite differences ----------------------------------------------------------


def away_from_kinks(seed, clip):
    logprobs, old, ref, advantages, mask, weights = random_batch(5, 4, seed=seed)
    log_ratio = (logprobs - old).masked_fill(~mask, 0)
    ratios = torch.cat([log_ratio.exp().flatten(), (log_ratio.sum(1) / mask.sum(1).clamp(min=1)).exp()])
    assert min((ratios - edge).abs().min() for edge in (1 - clip, 1 + clip)) > 1e-4
    return logprobs.masked_fill(~mask, -1.0).requires_grad_(), (old, ref, advantages, mask), weights


@pytest.mark.parametrize("loss_fn", [grpo_loss, gspo_loss, dapo_loss, dr_grpo_loss])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_is_that_of_finite_differences(loss_fn, beta, weighted):
    for seed in range(3):
        logprobs, rest, weights = away_from_kinks(seed, clip=0.1)
        options = {"clip_eps": 0.1, "beta": beta, "importance_weights": weights if weighted else None}
        options["clip_eps_high"] = 0.1
        assert torch.autograd.gradcheck(lambda x: loss_fn(x, *rest, **options)[0], (logprobs,))  # noqa: B023


@pytest.mark.parametrize("loss_fn", [grpo_loss, dapo_loss, dr_grpo_loss])
def test_gradient_with_an_advantage_per_token(loss_fn):
    logprobs, (old, ref, _, mask), weights = away_from_kinks(0, clip=0.1)
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    options = {"clip_eps": 0.1, "clip_eps_high": 0.1, "beta": 0.1, "importance_weights": weights}
    rest = (old, ref, advantages, mask)
    assert torch.autograd.gradcheck(lambda x: loss_fn(x, *rest, **options)[0], (logprobs,))


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_cispo_gradient_holds_its_weights_still(beta):
    logprobs, (old, ref, advantages, mask), weights = away_from_kinks(0, clip=0.1)
    options = {"clip_eps_high": 0.1, "beta": beta, "importance_weights": weights}
    _, grad, _ = value_and_gradient(cispo_loss, logprobs, old, ref, advantages, mask, **options)
    ratio, d = (logprobs - old).detach().exp(), (ref - logprobs).detach()
    expected = -ratio.clamp(max=1.1) * weights * advantages[:, None] + beta * (1 - d.exp())
    torch.testing.assert_close(grad, expected.masked_fill(~mask, 0) / mask.sum(), atol=1e-14, rtol=0)


def test_gspo_with_an_advantage_per_token_credits_each_token():
    logprobs, old, _, _, mask = fixture()
    advantages = tensor([[1.0, -2.0, 0.5], [0.0, 3.0, NAN]])
    loss, grad, metrics = value_and_gradient(gspo_loss, logprobs, old, None, advantages, mask, **NARROW)
    s = tensor([[0.9085603], [0.9165151]])
    expected = (-s * advantages / tensor([[3], [2]]) / 2).nan_to_num()
    torch.testing.assert_close(grad, expected, atol=1e-7, rtol=0)
    assert float(loss) == pytest.approx(float(expected.sum()), abs=1e-7)
    assert float(metrics["clip_ratio/low_mean"][1]) == 2


@each_loss
def test_a_column_of_equal_advantages_is_one_advantage_per_sequence(loss_fn):
    logprobs, old, ref, advantages, mask, weights = random_batch()
    one = value_and_gradient(loss_fn, logprobs, old, ref, advantages, mask, importance_weights=weights)
    columns = advantages[:, None].expand(mask.shape).masked_fill(~mask, INF)
    two = value_and_gradient(loss_fn, logprobs, old, ref, columns, mask, importance_weights=weights)
    torch.testing.assert_close(one, two, atol=0, rtol=0)


@each_loss
def test_only_the_new_log_probs_get_a_gradient(loss_fn):
    logprobs, old, ref, advantages, mask, weights = random_batch()
    inputs = [x.clone().requires_grad_() for x in (logprobs, old, ref, advantages, weights)]
    loss, _ = loss_fn(*inputs[:4], mask, beta=0.1, importance_weights=inputs[4])
    loss.backward()
    assert [x.grad is not None for x in inputs] == [True, False, False, False, False]


# ----- invariance ------------------------------------------------------------------------------------


def shortened(mask, *tensors):
    width = max(int(mask.sum(1).max()), 1)
    return [x[:, :width] if x.dim() == 2 else x for x in (*tensors, mask)]


@each_loss
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [[8], [4, 4], [1] * 8, [3, 5], [2, 1, 5], [6, 2]], ids=str)
def test_any_split_gives_the_same_loss_gradient_and_metrics(loss_fn, weighted, sizes):
    logprobs, old, ref, advantages, mask, weights = random_batch()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(len(sizes)))
    options = {"beta": 0.07, "denominator": loss_fn.denominator(mask, 10)}
    extra = {"importance_weights": weights} if weighted else {}
    whole = value_and_gradient(loss_fn, logprobs, old, ref, advantages, mask, **options, **extra)

    leaf = logprobs.clone().requires_grad_()
    total, denominator, sums = 0.0, 0.0, {}
    for rows in order.split(sizes):
        *inputs, w, m = shortened(mask[rows], *(x[rows] for x in (leaf, old, ref, advantages, weights)))
        loss, metrics = loss_fn(*inputs, m, **options, **({"importance_weights": w} if weighted else {}))
        loss.backward()
        total += float(loss.detach())
        denominator += loss_fn.denominator(m, 10)
        for name, pair in metrics.items():
            sums[name] = [a + float(b) for a, b in zip(sums.get(name, (0, 0)), pair, strict=True)]

    assert denominator == options["denominator"]
    assert total == pytest.approx(float(whole[0]), abs=1e-12)
    torch.testing.assert_close(leaf.grad, whole[1], atol=1e-12, rtol=0)
    for name, pair in whole[2].items():
        assert sums[name] == pytest.approx([float(x) for x in pair], abs=1e-12), name


@each_loss
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30, 0.0])
@pytest.mark.parametrize("left, right", [(0, 3), (3, 0), (2, 2)])
def test_padding_changes_nothing(loss_fn, garbage, left, right):
    logprobs, old, ref, advantages, mask, weights = random_batch()
    advantages = advantages[:, None].expand(mask.shape)
    options = {"beta": 0.07, "denominator": loss_fn.denominator(mask, 10)}
    plain = value_and_gradient(
        loss_fn, logprobs, old, ref, advantages, mask, importance_weights=weights, **options)

    def pad(x, value=garbage):
        x = x.masked_fill(~mask, value)
        return torch.nn.functional.pad(x, (left, right), value=value)

    *inputs, w, m = [pad(x) for x in (logprobs, old, ref, advantages, weights)] + [pad(mask.int(), 0)]
    padded = value_and_gradient(loss_fn, *inputs, m, importance_weights=w, **options)
    torch.testing.assert_close(padded[0], plain[0], atol=1e-14, rtol=0)
    torch.testing.assert_close(padded[1], pad(plain[1], 0.0), atol=1e-14, rtol=0)
    torch.testing.assert_close(padded[2], plain[2], atol=1e-12, rtol=0)


@each_loss
def test_rows_may_come_in_any_order(loss_fn):
    batch = random_batch()
    order = torch.tensor([5, 0, 7, 2, 1, 6, 4, 3])
    one = value_and_gradient(loss_fn, *batch[:5], beta=0.1, importance_weights=batch[5])
    moved = [x[order] for x in batch]
    two = value_and_gradient(loss_fn, *moved[:5], beta=0.1, importance_weights=moved[5])
    torch.testing.assert_close((one[0], one[1][order], one[2]), two, atol=1e-13, rtol=0)


@each_loss
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_the_mask_may_have_any_dtype(loss_fn, mask_dtype):
    logprobs, old, ref, advantages, mask, _ = random_batch()
    one, _ = loss_fn(logprobs, old, ref, advantages, mask)
    two, _ = loss_fn(logprobs, old, ref, advantages, mask.to(mask_dtype))
    assert one == two


@each_loss
def test_a_masked_row_adds_nothing_and_is_not_counted(loss_fn):
    logprobs, old, ref, advantages, mask, _ = random_batch()
    rows = mask.any(1)
    advantages = advantages.masked_fill(~rows, NAN)
    with_row = value_and_gradient(loss_fn, logprobs, old, ref, advantages, mask, beta=0.1)
    without = value_and_gradient(
        loss_fn, *(x[rows] for x in (logprobs, old, ref, advantages, mask)), beta=0.1)
    torch.testing.assert_close(with_row[0], without[0], atol=1e-14, rtol=0)
    torch.testing.assert_close(with_row[1][rows], without[1], atol=1e-14, rtol=0)
    assert with_row[1][~rows].eq(0).all()
    torch.testing.assert_close(with_row[2], without[2], atol=1e-12, rtol=0)


@each_loss
@pytest.mark.parametrize("shape", [(3, 4), (2, 0), (0, 5)])
@pytest.mark.parametrize("denominator", [None, 0.0, 16.0])
def test_an_all_masked_batch_gives_zero(loss_fn, shape, denominator):
    garbage = torch.full(shape, NAN)
    inputs = (garbage, -garbage, garbage, garbage, torch.zeros(shape))
    loss, grad, metrics = value_and_gradient(
        loss_fn, *inputs, beta=0.1, importance_weights=garbage, denominator=denominator)
    assert loss == 0 and grad.eq(0).all()
    assert all(float(x) == 0 for pair in metrics.values() for x in pair)


def test_the_counts():
    mask = tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    assert count_sequences(mask, 4) == 2.0
    assert count_tokens(mask, 4) == 5.0
    assert count_token_budget(mask, 4) == 8.0
    assert [loss_fn.denominator for loss_fn in LOSSES] == [
        count_sequences, count_sequences, count_tokens, count_token_budget, count_tokens]


@each_loss
def test_denominator_none_means_that_this_batch_is_all(loss_fn):
    logprobs, old, ref, advantages, mask, _ = random_batch()
    one, _ = loss_fn(logprobs, old, ref, advantages, mask)
    denominator = loss_fn.denominator(mask, mask.shape[1])
    two, _ = loss_fn(logprobs, old, ref, advantages, mask, denominator=denominator)
    assert one == two


# ----- on-policy, extremes, dtypes, errors -----------------------------------------------------------


@each_loss
@pytest.mark.parametrize("detached", [True, False])
def test_first_step_on_policy(loss_fn, detached):
    logprobs, _, _, _, mask, _ = random_batch()
    mask[2, 0], logprobs[2, 0] = True, -1.5
    advantages = group_advantages(tensor([2.25, 1.25, 0, 1.25, 0, 0, 2.25, 1.0]), 4)
    leaf = logprobs.clone().requires_grad_()
    same = leaf.detach() if detached else leaf
    loss, metrics = loss_fn(leaf, same, same, advantages, mask, beta=0.04)
    loss.backward()
    assert all(float(total) == 0 for total, _ in metrics.values())  # ratio 1: nothing clipped, no KL
    denominator = loss_fn.denominator(mask, mask.shape[1])
    lengths = mask.sum(1, keepdim=True) if loss_fn.denominator is count_sequences else 1
    expected = (-advantages[:, None] * mask / lengths / denominator).double()
    torch.testing.assert_close(leaf.grad, expected, atol=1e-15, rtol=0)
    assert leaf.grad.abs().max() > 0.01
    if loss_fn in (grpo_loss, gspo_loss):
        assert abs(float(loss.detach())) < 1e-12  # minus the mean of A


EXTREMES = [-1e4, 1e4, -1e30, 1e30, -INF, INF]


@each_loss
@pytest.mark.parametrize("which", ["old", "ref"])
@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_stay_finite(loss_fn, which, value, dtype):
    for sign in (1.0, -1.0):
        logprobs, old, ref, _, mask, weights = random_batch(dtype=dtype)
        (old if which == "old" else ref)[-1, 1] = value
        advantages = torch.full((8,), sign, dtype=dtype)
        loss, grad, metrics = value_and_gradient(
            loss_fn, logprobs, old, ref, advantages, mask, beta=0.04, importance_weights=weights)
        assert loss.isfinite() and grad.isfinite().all()
        assert all(torch.as_tensor(x).isfinite() for pair in metrics.values() for x in pair)


@each_loss
@pytest.mark.parametrize("value", [-1e4, -1e30])
def test_an_extreme_new_log_prob_stays_finite(loss_fn, value):
    for sign in (1.0, -1.0):
        logprobs, old, ref, _, mask, _ = random_batch(dtype=torch.float32)
        logprobs[-1, 1] = value
        inputs = (logprobs, old, ref, torch.full((8,), sign), mask)
        loss, grad, _ = value_and_gradient(loss_fn, *inputs, beta=0.04)
        assert loss.isfinite() and grad.isfinite().all()


@pytest.mark.parametrize("d", [0.5, 5.0, 19.9, 20.1, 50.0, 9e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kl_pulls_back_however_far_the_policy_is_gone(d, dtype):
    one, zero = torch.ones(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    for sign in (1, -1):
        logprobs = -sign * d * one
        loss, grad, metrics = value_and_gradient(grpo_loss, logprobs, logprobs, zero, zero, one, beta=1.0)
        x = sign * d
        value = math.expm1(min(x, 20)) - min(x, 20) + math.expm1(20) * max(x - 20, 0)
        assert float(loss) == pytest.approx(value, rel=1e-5)
        assert float(grad) == pytest.approx(-math.expm1(min(x, 20)), rel=1e-5)  # towards the reference
        assert mean(metrics["kl"]) == float(loss)


def test_the_kl_is_continuous_at_its_bound_and_exact_near_zero():
    one = torch.ones(1, 1, dtype=torch.float64)
    below, above = (-(20 + side * 1e-9) * one for side in (-1, 1))
    kl_below, kl_above = (float(grpo_loss(x, x, 0 * one, 0 * one, one, beta=1.0)[0]) for x in (below, above))
    assert kl_below == pytest.approx(kl_above, rel=1e-8)
    small = torch.full((1, 1), -1e-3)  # in fp32
    inputs = (small, small, 0 * small, 0 * small, torch.ones(1, 1))
    loss, grad, _ = value_and_gradient(grpo_loss, *inputs, beta=1.0)
    assert float(loss) == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)
    assert float(grad) == pytest.approx(-math.expm1(1e-3), rel=1e-3)


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(loss_fn, dtype):
    logprobs, old, ref, advantages, mask, weights = random_batch(dtype=dtype)
    inputs = (logprobs, old, ref, advantages, mask)
    half = value_and_gradient(loss_fn, *inputs, beta=0.1, importance_weights=weights)
    inputs = [x.float() for x in inputs]
    full = value_and_gradient(loss_fn, *inputs, beta=0.1, importance_weights=weights.float())
    assert half[0].dtype == torch.float32 and half[0] == full[0]
    assert half[1].dtype == dtype and half[1].equal(full[1].to(dtype))
    torch.testing.assert_close(half[2], full[2], atol=0, rtol=0)


@each_loss
def test_double_precision_is_kept(loss_fn):
    logprobs, old, ref, advantages, mask, _ = random_batch()
    double, _ = loss_fn(logprobs, old, ref, advantages, mask)
    single, _ = loss_fn(logprobs.float(), old.float(), ref.float(), advantages.float(), mask)
    assert double.dtype == torch.float64 and single.dtype == torch.float32
    assert float(single) == pytest.approx(float(double), rel=1e-5, abs=1e-6)


@each_loss
def test_single_precision_is_close_in_gradient_too(loss_fn):
    *inputs, weights = random_batch()
    _, double, _ = value_and_gradient(loss_fn, *inputs, beta=0.3, importance_weights=weights)
    inputs = [x.float() for x in inputs]
    _, single, _ = value_and_gradient(loss_fn, *inputs, beta=0.3, importance_weights=weights.float())
    torch.testing.assert_close(single.double(), double, atol=1e-6, rtol=0)


@each_loss
def test_beta_needs_the_reference(loss_fn):
    logprobs, old, _, advantages, mask = fixture()
    with pytest.raises(ValueError, match=r"beta is 0\.04.*ref_logprobs.*--beta 0"):
        loss_fn(logprobs, old, None, advantages, mask, beta=0.04)
    loss, _ = loss_fn(logprobs, old, None, advantages, mask, beta=0.0)
    assert loss.isfinite()


@each_loss
def test_tensors_of_another_shape_are_refused_instead_of_broadcast(loss_fn):
    logprobs, old, ref, advantages, mask = fixture()
    for wrong in ((logprobs[:, :1], old, ref, advantages), (logprobs, old[:1], ref, advantages),
                  (logprobs, old, ref[:, :1], advantages), (logprobs, old, ref, advantages[:1]),
                  (logprobs, old, ref, advantages[:, None])):
        with pytest.raises(AssertionError):
            loss_fn(*wrong, mask, beta=0.1)


@each_loss
def test_a_nan_that_counts_is_seen(loss_fn):
    logprobs, old, ref, advantages, mask, _ = random_batch()
    logprobs[-1, 0] = NAN
    assert loss_fn(logprobs, old, ref, advantages, mask)[0].isnan()
