"""From the Groups of one optimizer step to each rank's micro-batches.

Layout of a micro-batch: prompts are padded on the left and completions on the right, so that all completions start in
the same column. Padding is told apart by position only, never by token id: any id may be the pad id.

Shapes: B sequences, P longest prompt, C longest completion, T = P + C.
"""

from dataclasses import dataclass, fields

import torch

PAD_ID = 0  # any valid id does: padded positions are masked by position


@dataclass
class Batch:
    """B sequences ready for the model, with what the loss needs about each completion token."""

    input_ids: torch.Tensor  # (B, T) int64
    attention_mask: torch.Tensor  # (B, T) int64, 1 on prompt and completion tokens
    completion_mask: torch.Tensor  # (B, C) bool
    old_logprobs: torch.Tensor | None = None  # (B, C) float32
    ref_logprobs: torch.Tensor | None = None  # (B, C) float32
    sampling_logprobs: torch.Tensor | None = None  # (B, C) float32
    advantages: torch.Tensor | None = None  # (B,) or (B, C) float32

    @property
    def completion_ids(self) -> torch.Tensor:
        """(B, C)"""
        return self.input_ids[:, -self.completion_mask.shape[1] :]

    @property
    def position_ids(self) -> torch.Tensor:
        """(B, T), counted from the first real token, whatever the padding before it."""
        return (self.attention_mask.cumsum(-1) - 1).clamp(min=0)

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
    """Sequences as a Batch, one prompt for each completion; both are lists of 1-D id tensors."""
    prompt_width = max(len(prompt) for prompt in prompts)
    width = max(1, *(len(completion) for completion in completions))  # a column stays even if all are empty
    input_ids = torch.full((len(prompts), prompt_width + width), PAD_ID, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = prompt_width - len(prompt), prompt_width + len(completion)
        input_ids[i, start:prompt_width], input_ids[i, prompt_width:end] = prompt, completion
        attention_mask[i, start:end] = 1
    return Batch(input_ids, attention_mask, attention_mask[:, prompt_width:].bool())


def deal(costs: list[int], slots: int) -> list[list[int]]:
    """Share out len(costs) sequences over `slots` micro-batches: equal counts, nearly equal sums of cost.

    The longest go first, each to the lightest slot that still has room. Deterministic, so every rank computes the same.
    """
    room = len(costs) // slots
    assert room * slots == len(costs), f"{len(costs)} sequences cannot be dealt equally to {slots} micro-batches"
    shares: list[list[int]] = [[] for _ in range(slots)]
    loads = [0] * slots
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        slot = min((s for s in range(slots) if len(shares[s]) < room), key=lambda s: (loads[s], s))
        shares[slot].append(i)
        loads[slot] += costs[i]
    return [sorted(share) for share in shares]
