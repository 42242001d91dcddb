"""A micro-batch as one row of real tokens: every prompt once, then all completions, with no padding between them.

All layers but attention work on the N tokens of the row. Attention is computed on padded blocks: prompts among
themselves, completions with their prompt and their own earlier tokens. The gradients of all completions add up in the
one copy of their prompt. The last token of a completion predicts nothing that counts, so it is not run.

Shapes: Q prompts, B completions, P longest prompt, W longest completion without its last token, N tokens of the row,
M completion tokens, H query heads, K key heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

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
    longest: int  # P
    width: int  # W
    calls: int = 0  # layers that have attended by it so far
    _masks: dict = field(default_factory=dict, repr=False)

    def to(self, device: torch.device) -> "Packed":
        """The same on `device`."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved = {name: move(value, device) for name, value in tensors.items()}
        return replace(self, **moved, _masks={})

    def attend(self, module, query, key, value, scaling: float | None = None, sliding_window=None, **settings):
        """Attention of one layer: query (1, H, N, D), key and value (1, K, N, D) -> (1, N, H, D)."""
        self.calls += 1
        settings = {"window": sliding_window, "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling}
        split = len(self.prompt_places)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (N, heads, D)
        prompts = [
            _blocks(rows[:split], self.prompt_places, len(self.prompt_lengths), self.longest) for rows in (q, k, v)
        ]
        out = [self._attention(*prompts, self._prompt_distance, **settings)[self.prompt_places]]
        if self.width:
            of_row, places = self.prompt_of, self.completion_places
            q, k, v = (_blocks(rows[split:], places, len(of_row), self.width) for rows in (q, k, v))
            k = torch.cat([prompts[1].index_select(0, of_row), k], 2)  # (B, K, P + W, D)
            v = torch.cat([prompts[2].index_select(0, of_row), v], 2)
            out.append(self._attention(q, k, v, self._completion_distance, **settings)[places])
        return torch.cat(out)[None]

    @property
    def size(self) -> int:
        """Places of the blocks in which attention is computed."""
        return len(self.prompt_lengths) * self.longest + len(self.prompt_of) * self.width

    @property
    def padding(self) -> int:
        """Those of them that hold no token; other layers see no padding."""
        return self.size - self.ids.shape[1]

    @property
    def windowed(self) -> bool:
        """Whether a layer has asked for a sliding window so far."""
        return any(window is not None for _, window, *_ in self._masks)

    def _attention(self, query, key, value, distance: Callable, window: int | None, scaling: float) -> torch.Tensor:
        """(R, H, T, D) queries on (R, K, S, D) keys -> (R * T, H, D of the values)."""
        rows, heads, length, size = query.shape
        each = heads // key.shape[1]
        # query heads that share keys become more queries of one head: keys are not repeated
        folded = query.reshape(rows, heads // each, each * length, size)
        mask = self._mask(distance, window, each, query.dtype)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        out = out.reshape(rows, heads, length, value.shape[-1])
        return out.transpose(1, 2).reshape(rows * length, heads, value.shape[-1])

    def _mask(self, distance: Callable, window: int | None, each: int, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores, made once for all layers: (R, 1, each * T, S)."""
        which = distance.__name__, window, each, dtype
        if which not in self._masks:
            apart = distance()
            seen = apart >= 0 if window is None else (apart >= 0) & (apart < window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._masks[which] = mask.repeat(1, each, 1)[:, None]
        return self._masks[which]

    def _prompt_distance(self) -> torch.Tensor:
        """(1, P, P) position of the query minus that of the key; below 0 is unseen."""
        columns = torch.arange(self.longest, dtype=torch.int32, device=self.ids.device)
        return (columns[:, None] - columns)[None]

    def _completion_distance(self) -> torch.Tensor:
        """(B, W, P + W) the same from completions to their prompts and to themselves."""
        columns, own = (
            torch.arange(n, dtype=torch.int32, device=self.ids.device) for n in (self.longest, self.width)
        )
        ends = self.prompt_lengths[self.prompt_of].int()[:, None, None]
        to_prompt = (ends + own[:, None] - columns).masked_fill(columns >= ends, -1)
        return torch.cat([to_prompt, (own[:, None] - own).expand(len(self.prompt_of), -1, -1)], 2)


def pack_row(prompts: list[torch.Tensor], completions: list[torch.Tensor], prompt_of: list[int]) -> Packed:
    """Lay out 1-D id tensors: completion i continues prompt `prompt_of[i]`."""
    kept = [completion[:-1] for completion in completions]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width, longest = max(len(row) for row in kept), int(lengths.max())
    last_tokens = (lengths.cumsum(0) - 1).tolist()
    predictors, next_token = [], int(lengths.sum())
    for row, parent in zip(completions, prompt_of, strict=True):
        if len(row):
            predictors += [last_tokens[parent], *range(next_token, next_token + len(row) - 1)]
            next_token += len(row) - 1
    return Packed(
        ids=torch.cat([*prompts, *kept]).long()[None],
        positions=torch.cat(
            [torch.arange(len(prompt)) for prompt in prompts]
            + [len(prompts[parent]) + torch.arange(len(row)) for row, parent in zip(kept, prompt_of, strict=True)]
        )[None],
        prompt_places=_places(lengths.tolist(), longest),
        completion_places=_places([len(row) for row in kept], width),
        predictors=torch.tensor(predictors, dtype=torch.int64),
        prompt_of=torch.tensor(prompt_of),
        prompt_lengths=lengths,
        longest=longest,
        width=width,
    )


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`; to a GPU the copy runs beside its work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _places(lengths: list[int], width: int) -> torch.Tensor:
    return torch.cat([i * width + torch.arange(length) for i, length in enumerate(lengths)])


def _blocks(rows: torch.Tensor, places: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """(tokens, heads, D) -> (count, heads, width, D), zeros between."""
    blocks = rows.new_zeros(count * width, *rows.shape[1:]).index_copy(0, places, rows)
    return blocks.view(count, width, *rows.shape[1:]).transpose(1, 2)
