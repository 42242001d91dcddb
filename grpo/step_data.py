"""One rank's share of one step: micro-batches as tensors, and what the loss is divided by."""

from dataclasses import dataclass

import torch

from grpo.batch import Batch, collate, pad_right
from grpo.plan import Part
from grpo.rollout import Group


@dataclass
class StepData:
    """One rank's share of one step."""

    micro_batches: list[Batch]
    denominator: float  # what the loss divides by: the count over the whole step, all ranks and micro-batches
    loss_scale: float  # DeepSpeed divides by accumulation steps and averages over ranks; this undoes both
    share: float  # one micro-batch's part of the step
    metrics: dict[str, tuple[float, float]]  # of the plan, as (sum, count) pairs


def micro_batch(parts: list[Part], mask_truncated: bool, needs_reference: bool) -> Batch:
    """Some completions as tensors, with their advantages and the log-probs that the loss needs."""
    groups = list({id(part.group): part.group for part in parts}.values())  # each prompt once
    index = {id(group): i for i, group in enumerate(groups)}
    batch = collate(
        [group.prompt_ids for group in groups],
        [row for part in parts for row in part.values("completion_ids")],
        [index[id(part.group)] for part in parts for _ in part.rows],
    )
    width = batch.completion_ids.shape[1]
    counts = torch.tensor([part.counts for part in parts for _ in part.rows])
    if mask_truncated:
        counts &= ~torch.cat([part.group.truncated[part.rows.start : part.rows.stop] for part in parts])
    batch.completion_mask &= counts[:, None]
    needed = ["old_logprobs", "sampling_logprobs"]
    if needs_reference:  # a run that went on with --beta 0 has some groups with and some without
        needed.append("ref_logprobs")
    for name in needed:
        setattr(batch, name, pad_right([row for part in parts for row in part.values(name)], width))
    batch.advantages = pad_right([row for part in parts for row in part.token_advantages()], width)
    return batch


def completion_mask(group: Group, mask_truncated: bool) -> torch.Tensor:
    """(G, C) bool: which tokens of the group count, by position."""
    mask = torch.arange(max(1, int(group.lengths.max()))) < group.lengths[:, None]
    return mask & ~group.truncated[:, None] if mask_truncated else mask
