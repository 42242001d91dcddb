"""From the Groups of one optimizer step to each rank's micro-batches.

A micro-batch is held twice: as one row of real tokens (grpo/packed.py), which the model runs on, and padded, which is
what losses see: prompts padded on the left and completions on the right. Padding is told apart by position only, never
by token id: any id may be the pad id. Each prompt is held once for all its completions in the micro-batch.

Shapes: Q prompts, B sequences, P longest prompt, C longest completion, M completion tokens.
"""

from dataclasses import dataclass, replace

import torch

from grpo.packed import Packed, move, pack_row

PAD_ID = 0  # any valid id does: padded positions are masked by position


@dataclass
class Batch:
    """B sequences ready for the model, with what the loss needs about each completion token."""

    prompt_ids: torch.Tensor  # (Q, P) int64
    prompt_mask: torch.Tensor  # (Q, P) int64, 1 on prompt tokens
    completion_ids: torch.Tensor  # (B, C) int64
    present: torch.Tensor  # (B, C) int64, 1 on completion tokens
    completion_mask: torch.Tensor  # (B, C) bool, the completion tokens that the loss counts
    places: torch.Tensor  # (M,) int64, index into B * C of the completion tokens
    packed: Packed
    old_logprobs: torch.Tensor | None = None  # (B, C) float32
    ref_logprobs: torch.Tensor | None = None  # (B, C) float32
    sampling_logprobs: torch.Tensor | None = None  # (B, C) float32
    advantages: torch.Tensor | None = None  # (B, C) float32

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`."""
        device = torch.device(device)
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved = {name: move(value, device) for name, value in tensors.items()}
        return replace(self, packed=self.packed.to(device), **moved)


def pad_right(rows: list[torch.Tensor], width: int, value: float = 0) -> torch.Tensor:
    """Stack rows of different length into (len(rows), width)."""
    out = torch.full((len(rows), width), value, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def collate(
    prompts: list[torch.Tensor], completions: list[torch.Tensor], prompt_of: list[int] | None = None
) -> Batch:
    """1-D id tensors as a Batch.

    Completion i continues prompt `prompt_of[i]`; by default each prompt has equally many, one after another.
    """
    if prompt_of is None:
        assert len(completions) % len(prompts) == 0, f"{len(completions)} completions of {len(prompts)} prompts"
        prompt_of = [i * len(prompts) // len(completions) for i in range(len(completions))]
    width = max(1, *(len(completion) for completion in completions))  # a column stays even if all are empty
    completion_ids = pad_right([completion.long() for completion in completions], width, PAD_ID)
    present = pad_right([torch.ones(len(completion), dtype=torch.int64) for completion in completions], width)
    backwards = [prompt.long().flip(0) for prompt in prompts]
    longest = max(len(prompt) for prompt in prompts)
    return Batch(
        prompt_ids=pad_right(backwards, longest, PAD_ID).flip(1),
        prompt_mask=pad_right([torch.ones_like(prompt) for prompt in backwards], longest).flip(1),
        completion_ids=completion_ids,
        present=present,
        completion_mask=present.bool(),
        places=present.flatten().nonzero()[:, 0],
        packed=pack_row(prompts, completions, prompt_of),
    )
