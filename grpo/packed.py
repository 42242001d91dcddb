"""A micro-batch as one row of real tokens: every prompt once, then all completions, with no padding between them.

All layers but attention work on the N tokens of the row. Attention is computed on padded blocks: prompts among
themselves, completions with their prompt and their own earlier tokens. The gradients of all completions add up in the
one copy of their prompt. The last token of a completion predicts nothing that counts, so it is not run.

Shapes: Q prompts, B completions, P longest prompt, W longest completion without its last token, N tokens of the row,
M completion tokens, H query heads, K key heads, D head size.
"""

from dataclasses import dataclass, field, fields

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class Packed:
    """The row, and where its tokens belong."""

    ids: torch.Tensor  # (1, N) int64
    positions: torch.Tensor  # (1, N) position ids, counted from the start of each prompt
    prompt_places: torch.Tensor  # for each prompt token of the row its index into Q * P
    completion_places: torch.Tensor  # for each completion token of the row its index into B * W
    predictors: torch.Tensor  # (M,) index into N: the token before each completion token, completion by completion
    prompt_of: torch.Tensor  # (B,) the prompt that a completion continues
    prompt_lengths: torch.Tensor  # (Q,)
    prompt_distance: torch.Tensor  # (1, P, P) int32, position of the query minus that of the key, negative where unseen
    completion_distance: torch.Tensor  # (B, W, P + W) the same of completions, to prompt and completion
    _masks: dict = field(default_factory=dict, init=False, repr=False)

    def to(self, device: torch.device) -> "Packed":
        """The same on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        pinned = {name: v.pin_memory() if device.type == "cuda" else v for name, v in values.items()}
        return Packed(**{name: value.to(device, non_blocking=True) for name, value in pinned.items()})

    def attend(self, module, query, key, value, scaling: float | None = None, sliding_window=None, **settings):
        """Attention of one layer: query (1, H, N, D), key and value (1, K, N, D) -> (1, N, H, D)."""
        settings = {"window": sliding_window, "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling}
        split, (longest, width) = len(self.prompt_places), (self.prompt_distance.shape[1], self.width)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (N, heads, D)
        prompts = [_blocks(rows[:split], self.prompt_places, len(self.prompt_lengths), longest) for rows in (q, k, v)]
        out = [self._attention(*prompts, "prompt_distance", **settings)[self.prompt_places]]
        if width:
            of_row, places = self.prompt_of, self.completion_places
            q, k, v = (_blocks(rows[split:], places, len(of_row), width) for rows in (q, k, v))
            k = torch.cat([prompts[1].index_select(0, of_row), k], 2)  # (B, K, P + W, D)
            v = torch.cat([prompts[2].index_select(0, of_row), v], 2)
            out.append(self._attention(q, k, v, "completion_distance", **settings)[places])
        return torch.cat(out)[None]

    @property
    def width(self) -> int:
        """W."""
        return self.completion_distance.shape[1]

    @property
    def size(self) -> int:
        """Places of the blocks in which attention is computed."""
        return len(self.prompt_lengths) * self.prompt_distance.shape[1] + len(self.prompt_of) * self.width

    @property
    def padding(self) -> int:
        """Those of them that hold no token; other layers see no padding."""
        return self.size - self.ids.shape[1]

    @property
    def windowed(self) -> bool:
        """Whether a layer has asked for a sliding window so far."""
        return any(window is not None for _, window, *_ in self._masks)

    def _attention(self, query, key, value, distances: str, window: int | None, scaling: float) -> torch.Tensor:
        """(R, H, T, D) queries on (R, K, S, D) keys -> (R * T, H, D)."""
        rows, heads, length, size = query.shape
        each = heads // key.shape[1]
        # query heads that share keys become more queries of one head: keys are not repeated
        folded = query.reshape(rows, heads // each, each * length, size)
        mask = self._mask(distances, window, each, query.dtype)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        return out.view(rows, heads, length, size).transpose(1, 2).reshape(rows * length, heads, size)

    def _mask(self, distances: str, window: int | None, each: int, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores, made once for all layers: (R, 1, each * T, S)."""
        which = distances, window, each, dtype
        if which not in self._masks:
            distance = getattr(self, distances)
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._masks[which] = mask.repeat(1, each, 1)[:, None]
        return self._masks[which]


def pack_row(prompts: list[torch.Tensor], completions: list[torch.Tensor], prompt_of: list[int]) -> Packed:
    """Lay out 1-D id tensors: completion i continues prompt `prompt_of[i]`."""
    kept = [completion[:-1] for completion in completions]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width, longest = max(len(row) for row in kept), int(lengths.max())
    starts = lengths.cumsum(0) - lengths
    of_row = torch.tensor(prompt_of)
    predictors, next_token = [], int(lengths.sum())
    for row, parent in zip(completions, prompt_of, strict=True):
        if len(row):
            last_of_prompt = int(starts[parent] + lengths[parent] - 1)
            predictors += [last_of_prompt, *range(next_token, next_token + len(row) - 1)]
            next_token += len(row) - 1
    columns, prompt_columns = torch.arange(width, dtype=torch.int32), torch.arange(longest, dtype=torch.int32)
    prompt_distance = prompt_columns[:, None] - prompt_columns
    ends = lengths[of_row].int()[:, None, None]
    to_prompt = (ends + columns[:, None] - prompt_columns).masked_fill(prompt_columns >= ends, -1)  # (B, W, P)
    to_own = (columns[:, None] - columns).expand(len(kept), -1, -1)
    return Packed(
        ids=torch.cat([*prompts, *kept]).long()[None],
        positions=torch.cat(
            [torch.arange(len(prompt)) for prompt in prompts]
            + [len(prompts[parent]) + torch.arange(len(row)) for row, parent in zip(kept, prompt_of, strict=True)]
        )[None],
        prompt_places=_places(lengths.tolist(), longest),
        completion_places=_places([len(row) for row in kept], width),
        predictors=torch.tensor(predictors, dtype=torch.int64),
        prompt_of=of_row,
        prompt_lengths=lengths,
        prompt_distance=prompt_distance[None],
        completion_distance=torch.cat([to_prompt, to_own], 2),
    )


def _places(lengths: list[int], width: int) -> torch.Tensor:
    return torch.cat([i * width + torch.arange(length) for i, length in enumerate(lengths)])


def _blocks(rows: torch.Tensor, places: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """(tokens, heads, D) -> (count, heads, width, D), zeros between."""
    blocks = rows.new_zeros(count * width, *rows.shape[1:]).index_copy(0, places, rows)
    return blocks.view(count, width, *rows.shape[1:]).transpose(1, 2)
