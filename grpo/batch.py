"""From the Groups of one optimizer step to each rank's micro-batches.

Layout of a micro-batch: prompts padded on the left and completions on the right, so that all completions start in the
same column. Padding is told apart by position only, never by token id: any id may be the pad id. Each prompt is held
once for all its completions in the micro-batch.

Shapes: Q prompts, B sequences, B / Q completions of each prompt, P longest prompt, C longest completion.
"""

from dataclasses import dataclass, fields

import torch

PAD_ID = 0  # any valid id does: padded positions are masked by position


@dataclass
class Batch:
    """B sequences ready for the model, with what the loss needs about each completion token."""

    prompt_ids: torch.Tensor  # (Q, P) int64
    prompt_mask: torch.Tensor  # (Q, P) int64, 1 on prompt tokens
    completion_ids: torch.Tensor  # (B, C) int64; row i continues prompt i * Q // B
    present: torch.Tensor  # (B, C) int64, 1 on completion tokens
    completion_mask: torch.Tensor  # (B, C) bool, the completion tokens that the loss counts
    old_logprobs: torch.Tensor | None = None  # (B, C) float32
    ref_logprobs: torch.Tensor | None = None  # (B, C) float32
    sampling_logprobs: torch.Tensor | None = None  # (B, C) float32
    advantages: torch.Tensor | None = None  # (B, C) float32

    @property
    def rows_per_prompt(self) -> int:
        """B / Q."""
        return len(self.completion_ids) // len(self.prompt_ids)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: None if value is None else value.to(device) for name, value in moved.items()})


def pad_right(rows: list[torch.Tensor], width: int, value: float = 0) -> torch.Tensor:
    """Stack rows of different length into (len(rows), width)."""
    out = torch.full((len(rows), width), value, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def collate(prompts: list[torch.Tensor], completions: list[torch.Tensor]) -> Batch:
    """Q prompts and B completions, B / Q of each prompt one after another, as a Batch; all are 1-D id tensors."""
    assert len(completions) % len(prompts) == 0, f"{len(completions)} completions of {len(prompts)} prompts"
    width = max(1, *(len(completion) for completion in completions))  # a column stays even if all are empty
    completion_ids = pad_right([completion.long() for completion in completions], width, PAD_ID)
    present = pad_right([torch.ones(len(completion), dtype=torch.int64) for completion in completions], width)
    backwards = [prompt.long().flip(0) for prompt in prompts]
    longest = max(len(prompt) for prompt in prompts)
    prompt_ids = pad_right(backwards, longest, PAD_ID).flip(1)
    prompt_mask = pad_right([torch.ones_like(prompt) for prompt in backwards], longest).flip(1)
    return Batch(prompt_ids, prompt_mask, completion_ids, present, present.bool())


def deal(costs: list[int], slots: int) -> list[list[int]]:
    """Share out len(costs) items over `slots` micro-batches: equal counts, nearly equal sums of cost.

    The most costly go first, each to the lightest slot that still has room. Deterministic, so every rank computes the
    same.
    """
    room = len(costs) // slots
    assert room * slots == len(costs), f"{len(costs)} items cannot be dealt equally to {slots} micro-batches"
    shares: list[list[int]] = [[] for _ in range(slots)]
    loads = [0] * slots
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        slot = min((s for s in range(slots) if len(shares[s]) < room), key=lambda s: (loads[s], s))
        shares[slot].append(i)
        loads[slot] += costs[i]
    return [sorted(share) for share in shares]
