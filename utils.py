"""The file to edit: how a completion is rewarded, how rewards become advantages, and the losses.

Everything here is a plain module-level function; the workers import them by name.
"""

import math
import re

import torch

from grpo.numbers import INVISIBLE, body_value, gold_value, last_value

# ---------------------------------------------------------------------------------------------------
# Rewards

FORMAT_REWARD = 1.25
ANSWER_REWARD = 1.0
MAX_CHARS = 500  # in the answer blocks together: more is an essay, not a value; it also bounds the work

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
TAG = re.compile("|".join(TAGS))
END_TOKEN = re.compile(r"<\|(?:im_end|endoftext|end_of_text|eot_id|end)\|>|</s>")
VISIBLE = re.compile(rf"(?!{INVISIBLE})\S")


def reward_function(response: str, answer: str) -> dict:
    """Score one completion against the gold answer: {"reward": total, "format": ..., "answer": ...}."""
    format_reward = FORMAT_REWARD * check_format(response)
    answer_reward = ANSWER_REWARD * check_answer(response, answer)
    return {"reward": format_reward + answer_reward, "format": format_reward, "answer": answer_reward}


def check_format(response: str) -> bool:
    """True for <think>...</think><answer>...</answer>: each tag once, no body blank, else only whitespace."""
    if TAG.findall(response) != TAGS:
        return False
    before, thinking, between, body, after = TAG.split(response)
    outside = before + between + END_TOKEN.sub("", after)
    return not outside.strip() and bool(VISIBLE.search(thinking) and VISIBLE.search(body))


def check_answer(response: str, answer: str) -> bool:
    """True if the closed answer blocks after the last </think> name the gold's value and no other.

    A gold with letters or without exactly one number is text: each block must equal it, whitespace aside.
    """
    blocks = response.rpartition("</think>")[2].partition("<answer>")[2].split("</answer>")[:-1]
    # Past a closing tag, text is prose up to the next opening tag; without one it is in an outer block.
    blocks[1:] = [block.partition("<answer>")[2] if "<answer>" in block else block for block in blocks[1:]]
    bodies = {block.strip() for block in blocks} - {""}
    if not bodies or sum(map(len, bodies)) > MAX_CHARS:
        return False
    gold = gold_value(answer)
    if gold is None:
        return all(body.split() == answer.split() for body in bodies)
    return all(body_value(body) == gold for body in bodies)


def check_answer_lenient(response: str, answer: str) -> bool:
    """True if the last number anywhere in the response equals the gold. For evaluation, never as a reward."""
    gold = gold_value(answer)
    return check_answer(response, answer) if gold is None else last_value(response) == gold


# Shapes: B sequences, G sequences of one prompt (a group), C completion tokens (padded).

# ---------------------------------------------------------------------------------------------------
# Advantages


def _normalise(rewards, scale, eps):
    """(..., N) float64 rewards -> (reward - mean) / (std + eps) over N; NaN is left out and becomes 0."""
    if rewards.isinf().any():
        raise ValueError(f"rewards must be finite numbers or None, got {rewards[rewards.isinf()].tolist()}")
    valid = ~rewards.isnan()
    count = valid.sum(-1, keepdim=True)
    # Measured from the best reward, equal rewards are exactly 0 whatever the rounding of their mean.
    best = rewards.masked_fill(~valid, -torch.inf).amax(-1, keepdim=True)
    centred = (rewards - best).masked_fill(~valid, 0.0)
    centred = (centred - centred.sum(-1, keepdim=True) / count.clamp(min=1)).masked_fill(~valid, 0.0)
    std = (centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()  # ddof 1; one reward: 0
    return centred / (std + eps) if scale else centred


def group_advantages(rewards, group_size, *, scale=True, eps=1e-4):
    """A_i = (r_i - mean of the group) / (std of the group + eps), one advantage per sequence.

    rewards: (B,) tensor or list, the groups one after another. None, which is NaN in a tensor, is left out
        of its group's mean and std, and its advantage is 0.
    scale: False leaves out the division by the std (Dr. GRPO, arXiv 2503.20783).
    Returns (B,) in fp32 (float64 for a float64 tensor). The std has ddof 1; equal rewards and a group of
    one give exactly 0. Raises ValueError if B is not a multiple of group_size or a reward is infinite.
    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    if group_size < 1 or len(rewards) % group_size:
        count = len(rewards)
        raise ValueError(f"{count} rewards do not divide into groups of {group_size}: check --group_size")
    if not torch.is_tensor(rewards):
        rewards = torch.tensor([math.nan if reward is None else reward for reward in rewards])
    groups = rewards.double().view(-1, group_size)  # (B / G, G)
    return _normalise(groups, scale, eps).flatten().to(torch.promote_types(rewards.dtype, torch.float32))


def process_advantages(steps, completion_length, *, scale=True, eps=1e-4):
    """Process supervision: A_{i,t} = sum of the normalised rewards of the steps that end at or after t.

    steps: for each of the group's G outputs a list of (end_token_index, reward), in any order; the rewards
        of all steps of all outputs are normalised together. A NaN is left out, as above.
    completion_length: C, to which the outputs are padded.
    Returns (G, C) in fp32. Tokens after the last step's end and outputs without steps get 0, and so does
    everything if the group has one step or equal rewards. Raises ValueError for an index outside 0..C-1
    or an infinite reward.
    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.3.
    """
    advantages = torch.zeros(len(steps), completion_length, dtype=torch.float64)  # (G, C)
    flat = [(i, end, reward) for i, output in enumerate(steps) for end, reward in output]
    if not flat:
        return advantages.float()
    normalised = _normalise(torch.tensor([reward for *_, reward in flat], dtype=torch.float64), scale, eps)
    for (i, end, _), value in zip(flat, normalised, strict=True):
        if not 0 <= end < completion_length:
            raise ValueError(f"a step of output {i} ends at token {end}, not in 0..{completion_length - 1}")
        advantages[i, : end + 1] += value
    return advantages.float()


# ---------------------------------------------------------------------------------------------------
# Losses
#
# Another loss is one other name in training_worker.py: LOSS = dapo_loss. One of your own needs the tensors, in this
# order, a `denominator` that its sum is divided by, and @per above it, which says what that counts over a step:
#
#   @per(count_tokens)  # or count_sequences, or count_token_budget
#   def reinforce_loss(logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, *, denominator):
#       loss = -(advantages * logprobs).masked_fill(~completion_mask, 0.0).sum() / denominator
#       return loss, {"logprob": (logprobs.detach()[completion_mask].sum(), completion_mask.sum())}
#
# The other keyword arguments are passed to a loss that has them, and a flag for one that it lacks is refused: beta
# (--beta), clip_eps, clip_eps_high, importance_weights (--tis_cap). A default holds where no flag is given. The
# learner tries LOSS on a few made-up numbers before it loads anything, and says what is missing.
#
#   logprobs            (B, C)  log pi_theta of each completion token; the gradient flows through these alone
#   old_logprobs        (B, C)  log pi_old
#   ref_logprobs        (B, C)  log pi_ref, or None if beta is 0
#   advantages          (B, C)  one a token, as the learner gives them; the losses below take (B,) too
#   completion_mask     (B, C)  bool, True on the tokens that count; a sequence may have none. Where it is False the
#                       learner's tensors hold 0 or another finite number; the losses below take NaN there too
#   clip_eps            the ratio is clipped to [1 - clip_eps, 1 + clip_eps_high];
#   clip_eps_high       None: the same as clip_eps
#   beta                weight of the KL term, k3 per token, under the same mean as the policy term
#   denominator         what the sum is divided by: the count over the whole optimizer step, all micro-batches
#                       and ranks, so that the losses of any split add up to the loss of the whole. The losses
#                       below take None too: this batch is the whole step and max_new_tokens is C
#   importance_weights  (B, C) or None: multiplies the policy term, not the KL (truncated_importance_weights)
#
# loss: a scalar in fp32, or in float64 if logprobs are. A sequence without a single unmasked token adds 0 to
# the loss and is not counted; a batch without one gives 0.
# metrics: {name: (sum, count)}, detached scalars. Add the sums and the counts over micro-batches and ranks,
# then divide: the same mean for every split.
#   clip_ratio/low_mean     share of tokens (GSPO: of sequences) with ratio < 1 - clip_eps and advantage < 0
#   clip_ratio/high_mean    share with ratio > 1 + clip_eps_high and advantage > 0
#   clip_ratio/region_mean  share with either
#   approx_kl               token mean of r - 1 - log r, r = pi_theta / pi_old: estimates KL(pi_old, pi_theta)
#   kl                      token mean of k3, which estimates KL(pi_theta, pi_ref); if there are ref_logprobs
# Errors of the losses below: ValueError for beta without ref_logprobs, AssertionError for tensors not (B, C).

MAX_EXPONENT = 20.0  # exp(20) is 5e8: beyond any ratio worth learning from, far from overflow
MAX_DIFFERENCE = 1e4  # of two log-probs, in nats: wider than any softmax gives, and makes infinities finite


def truncated_importance_weights(old_logprobs, sampling_logprobs, cap):
    """min(pi_old / pi_sampling, cap): corrects for the engine drawing tokens from not quite pi_old.

    old_logprobs, sampling_logprobs: (B, C). cap: C_max > 0, else ValueError.
    Returns (B, C) in fp32 or better, without gradient.
    Source: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS).
    """
    if not cap > 0:
        raise ValueError(f"the cap on importance weights must be above 0, got {cap}: check --tis_cap")
    dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
    return (old_logprobs.detach().to(dtype) - sampling_logprobs.detach().to(dtype)).exp().clamp(max=cap)


def count_sequences(completion_mask, max_new_tokens):
    """Sequences with at least one unmasked token: the denominator of a mean over sequences."""
    return float(completion_mask.bool().any(1).sum())


def count_tokens(completion_mask, max_new_tokens):
    """Unmasked tokens: the denominator of a mean over tokens."""
    return float(completion_mask.bool().sum())


def count_token_budget(completion_mask, max_new_tokens):
    """Sequences x max_new_tokens: a constant a sequence, so that length changes no token's weight."""
    return count_sequences(completion_mask, max_new_tokens) * max_new_tokens


def per(count):
    """Decorator of a loss: `count(completion_mask, max_new_tokens)` is a batch's part of the loss's denominator."""

    def mark(loss_fn):
        loss_fn.denominator = count
        return loss_fn

    return mark


def _masked_inputs(logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, weights, beta):
    """All as (B, C) in fp32 or better, neutral under mask 0: a sum over C is one over real tokens alone."""
    if beta != 0 and ref_logprobs is None:
        raise ValueError(f"beta is {beta}, but ref_logprobs is None: pass the reference's, or use --beta 0")
    mask = completion_mask.bool()
    dtype = torch.promote_types(logprobs.dtype, torch.float32)

    def keep(x, neutral=0.0):
        assert x.shape == mask.shape, f"expected the mask's shape {tuple(mask.shape)}, got {tuple(x.shape)}"
        # Filled before any arithmetic: 0 x NaN is NaN, in the value and in the gradient.
        return x.to(dtype).masked_fill(~mask, neutral)

    if advantages.dim() == 1:
        assert len(advantages) == len(mask), f"{len(advantages)} advantages for {len(mask)} sequences"
        advantages = advantages[:, None].expand(mask.shape)
    ref = None if ref_logprobs is None else keep(ref_logprobs.detach())
    weights = torch.ones_like(logprobs, dtype=dtype) if weights is None else keep(weights.detach(), 1.0)
    return keep(logprobs), keep(old_logprobs.detach()), ref, keep(advantages.detach()), weights, mask


def _clip_range(clip_eps, clip_eps_high):
    return 1 - clip_eps, 1 + (clip_eps if clip_eps_high is None else clip_eps_high)


def _log_ratio(logp, other):
    return (logp - other).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)


def _ratio(log_ratio):
    # Outside the clamp a token has no gradient: the policy that drew it says nothing about it any more.
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def _k3(d):
    """exp(d) - d - 1, continued by its tangent from d = MAX_EXPONENT on."""
    # A clamp alone has gradient 0: the KL would let go of just the tokens furthest from the reference.
    # The tangent does not overflow and still pulls them back. Downwards k3 is nearly linear by itself.
    bounded = d.clamp(max=MAX_EXPONENT)
    return bounded.expm1() - bounded + math.expm1(MAX_EXPONENT) * (d - MAX_EXPONENT).relu()


def _kl(logp, ref):
    return torch.zeros_like(logp) if ref is None else _k3(_log_ratio(ref, logp))


def _clipped_objective(ratio, advantages, low, high):
    return torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)


def _sequence_means(values, mask):
    return values.sum(1) / mask.sum(1).clamp(min=1)  # (B,); the values are 0 under mask 0


def _divisor(denominator, count, mask):
    denominator = count(mask, mask.shape[1]) if denominator is None else denominator
    return denominator or 1.0  # nothing to count: 0 / 1


def _token_total(values, mask):
    return values.detach().sum(), mask.sum()


def _sequence_total(values, mask):
    return _sequence_means(values.detach(), mask).sum(), mask.any(1).sum()


def _metrics(ratio, logp, old, ref, advantages, mask, low, high, clip_total=_token_total):
    clipped_low = ((ratio < low) & (advantages < 0)).to(ratio.dtype)  # an advantage is 0 under mask 0
    clipped_high = ((ratio > high) & (advantages > 0)).to(ratio.dtype)
    metrics = {
        "clip_ratio/low_mean": clip_total(clipped_low, mask),
        "clip_ratio/high_mean": clip_total(clipped_high, mask),
        "clip_ratio/region_mean": clip_total(clipped_low + clipped_high, mask),
        "approx_kl": _token_total(_k3(_log_ratio(logp, old)), mask),
    }
    if ref is not None:
        metrics["kl"] = _token_total(_kl(logp, ref), mask)
    return metrics


@per(count_sequences)
def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, *,
              clip_eps=0.2, clip_eps_high=None, beta=0.04, denominator=None, importance_weights=None):
    """GRPO: mean over sequences of the mean over each sequence's tokens of
    -min(r A, clip(r, 1 - eps, 1 + eps_high) A) + beta KL, with r = pi_theta / pi_old of the token.

    Arguments, returns and errors as at the top of this section; denominator: the number of sequences.
    Source: DeepSeekMath (arXiv 2402.03300), eq. 3, and eq. 4 for the KL term.
    """
    logp, old, ref, adv, weights, mask = _masked_inputs(
        logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, importance_weights, beta)
    low, high = _clip_range(clip_eps, clip_eps_high)
    ratio = _ratio(_log_ratio(logp, old))  # (B, C)
    policy = -weights * _clipped_objective(ratio, adv, low, high)
    per_sequence = _sequence_means(policy + beta * _kl(logp, ref), mask)
    loss = per_sequence.sum() / _divisor(denominator, count_sequences, mask)
    return loss, _metrics(ratio, logp, old, ref, adv, mask, low, high)


@per(count_sequences)
def gspo_loss(logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, *,
              clip_eps=3e-4, clip_eps_high=4e-4, beta=0.0, denominator=None, importance_weights=None):
    """GSPO: mean over sequences of -min(s A, clip(s, 1 - eps, 1 + eps_high) A), with one ratio a sequence,
    s = exp(mean over its tokens of log(pi_theta / pi_old)), through which the gradient flows.

    With one advantage a token it is the paper's GSPO-token; with one a sequence the two are the same in value
    and gradient. A sequence's importance weight is the geometric mean of its tokens' weights, as s is of its
    tokens' ratios: together they compare pi_theta with the policy that drew the sequence. The KL term is
    GRPO's: a mean over the sequence's tokens, then over sequences.
    Arguments, returns and errors as at the top of this section; denominator: the number of sequences.
    The paper leaves out the KL term, hence beta 0.
    Source: GSPO (arXiv 2507.18071), eq. 5 to 7; GSPO-token eq. 13 and 14; clip widths from its section 5.1.
    """
    logp, old, ref, adv, weights, mask = _masked_inputs(
        logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, importance_weights, beta)
    low, high = _clip_range(clip_eps, clip_eps_high)
    log_ratio = _log_ratio(logp, old)  # (B, C)
    mean_log_ratio = _sequence_means(log_ratio.detach(), mask)[:, None]  # (B, 1)
    # s of the sequence at each of its tokens: the value is the mean's, the gradient the token's own.
    ratio = _ratio(mean_log_ratio + (log_ratio - log_ratio.detach()))  # (B, C)
    weight = _sequence_means(weights.log(), mask).exp()[:, None]  # (B, 1)
    policy = -weight * _clipped_objective(ratio, adv, low, high)
    per_sequence = _sequence_means(policy + beta * _kl(logp, ref), mask)
    loss = per_sequence.sum() / _divisor(denominator, count_sequences, mask)
    return loss, _metrics(ratio, logp, old, ref, adv, mask, low, high, clip_total=_sequence_total)


@per(count_tokens)
def dapo_loss(logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, *,
              clip_eps=0.2, clip_eps_high=0.28, beta=0.0, denominator=None, importance_weights=None):
    """DAPO: GRPO's token term with a higher upper clip, as a mean over all tokens: long answers weigh more.

    Arguments, returns and errors as at the top of this section; denominator: the number of tokens.
    The paper drops the KL term, hence beta 0.
    Source: DAPO (arXiv 2503.14476), eq. 8; clip-higher and the token-level loss in sections 3.1 and 3.3.
    """
    logp, old, ref, adv, weights, mask = _masked_inputs(
        logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, importance_weights, beta)
    low, high = _clip_range(clip_eps, clip_eps_high)
    ratio = _ratio(_log_ratio(logp, old))  # (B, C)
    policy = -weights * _clipped_objective(ratio, adv, low, high)
    loss = (policy + beta * _kl(logp, ref)).sum() / _divisor(denominator, count_tokens, mask)
    return loss, _metrics(ratio, logp, old, ref, adv, mask, low, high)


@per(count_token_budget)
def dr_grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, *,
                 clip_eps=0.2, clip_eps_high=None, beta=0.0, denominator=None, importance_weights=None):
    """Dr. GRPO: GRPO's token term summed and divided by a constant, sequences x max_new_tokens, so that a
    wrong answer costs no less a token for being long. Goes with group_advantages(..., scale=False).

    Arguments, returns and errors as at the top of this section; denominator: sequences x max_new_tokens.
    The paper trains without the KL term, hence beta 0.
    Source: Dr. GRPO, "Understanding R1-Zero-Like Training" (arXiv 2503.20783), section 3.2.
    """
    logp, old, ref, adv, weights, mask = _masked_inputs(
        logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, importance_weights, beta)
    low, high = _clip_range(clip_eps, clip_eps_high)
    ratio = _ratio(_log_ratio(logp, old))  # (B, C)
    policy = -weights * _clipped_objective(ratio, adv, low, high)
    loss = (policy + beta * _kl(logp, ref)).sum() / _divisor(denominator, count_token_budget, mask)
    return loss, _metrics(ratio, logp, old, ref, adv, mask, low, high)


@per(count_tokens)
def cispo_loss(logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, *,
               clip_eps=0.2, clip_eps_high=0.28, beta=0.0, denominator=None, importance_weights=None):
    """CISPO: mean over all tokens of -stopgrad(min(r, 1 + eps_high)) A log pi_theta: REINFORCE with a capped
    weight, in which every token keeps its gradient.

    There is no lower clip, as in the paper's runs: clip_eps is the threshold of clip_ratio/low_mean alone.
    Arguments, returns and errors as at the top of this section; denominator: the number of tokens.
    The paper trains without the KL term, hence beta 0; it leaves eps_high open, 0.28 is DAPO's.
    Source: CISPO in MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5.
    """
    logp, old, ref, adv, weights, mask = _masked_inputs(
        logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, importance_weights, beta)
    low, high = _clip_range(clip_eps, clip_eps_high)
    ratio = _ratio(_log_ratio(logp, old)).detach()  # (B, C)
    policy = -weights * ratio.clamp(max=high) * adv * logp
    loss = (policy + beta * _kl(logp, ref)).sum() / _divisor(denominator, count_tokens, mask)
    return loss, _metrics(ratio, logp, old, ref, adv, mask, low, high)

