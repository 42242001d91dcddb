"""Decoding attention over prompts that are held once for all their completions.

The keys and values of S prompts lie in one set of blocks, those of the live completions in another, and are written in
place. A decoding step's queries attend to both: those of one slot's completions to their prompt by one matrix product,
each to its own earlier tokens by another, under one softmax. Heads that share keys (grouped queries) are never
repeated in memory.

transformers models reach this through their attention interface (grpo/attention.py): the cache is the layout of a
decoding step.

Shapes: S slots, G completions a slot, L live completions, H query heads, K key heads, D head size, P longest prompt, T
longest completion so far.
"""

import torch
from transformers.cache_utils import DynamicCache


class SharedPromptCache(DynamicCache):
    """Blocks for S prompts of at most P tokens, and for `rows` completions of at most `max_new_tokens`.

    Row i holds the i-th live completion.
    """

    def __init__(
        self, config, slots: int, group_size: int, rows: int, longest_prompt: int, max_new_tokens: int, device
    ):
        super().__init__(config=config)
        self._group_size = group_size
        self._sizes = [(slots, longest_prompt), (rows, max_new_tokens)]
        self.prompt_lengths = torch.zeros(slots, dtype=torch.int64, device=device)  # (S,)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)  # tokens held
        self._rows = torch.arange(rows, device=device)
        self._blocks: list[tuple[torch.Tensor, ...]] = []  # a layer: prompt keys, values, completion keys, values

    def put_prompts(self, slots: torch.Tensor, cache: DynamicCache, mask: torch.Tensor) -> None:
        """Take over the prefilled prompts (left-padded, `mask` (N, P')) of some slots."""
        lengths = mask.sum(-1)
        width = mask.shape[1]
        # left-padded to left-aligned: column j of the block is column j + width - length of the prefill
        columns = (torch.arange(width, device=mask.device) + (width - lengths)[:, None]).clamp(max=width - 1)
        for layer, prefilled in enumerate(cache.layers):
            if layer == len(self._blocks):
                self._blocks.append(self._allocate(prefilled.keys, prefilled.values))
            for block, source in zip(self._blocks[layer][:2], (prefilled.keys, prefilled.values), strict=True):
                index = columns[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3])
                block[slots, :, :width] = source.gather(2, index)
        self.prompt_lengths[slots] = lengths

    def start_rows(self, first: int, last: int) -> None:
        """Rows first .. last - 1 are new completions."""
        self.lengths[first:last] = 0

    def move_rows(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Completions change their rows, into such as are free."""
        self.lengths[targets] = self.lengths[sources]
        for _, _, keys, values in self._blocks:
            keys[targets], values[targets] = keys[sources], values[sources]

    def start_step(self, places: torch.Tensor, slots: int, longest_prompt: int, longest: int) -> None:
        """The next forward pass brings one token for each of the first L rows.

        `places` (L,) is slot * G + g of each. They are in the first `slots` slots; the longest of their prompts has
        `longest_prompt` tokens, and with this step the longest of them has `longest`: nothing beyond takes part.
        """
        self._places, self._slots, live = places, slots, len(places)
        self._extent = longest_prompt, longest
        self._ends = self.lengths[:live].clone()  # where the new keys go
        self.lengths[:live] += 1
        prompt_lengths = self.prompt_lengths[places // self._group_size]
        prompt_mask = torch.arange(longest_prompt, device=places.device) >= prompt_lengths[:, None]  # (L, P)
        own_mask = torch.arange(longest, device=places.device) > self._ends[:, None]  # (L, T)
        self._unseen = torch.cat([prompt_mask, own_mask], 1)[:, None, None]  # over P + T

    def update(self, keys, values, layer_idx: int, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's (L, K, 1, D) keys and values in their places."""
        _, _, own_keys, own_values = self._blocks[layer_idx]
        rows = self._rows[: len(keys)]
        own_keys[rows, :, self._ends] = keys[:, :, 0]
        own_values[rows, :, self._ends] = values[:, :, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this step, of the longest; positions are given explicitly, so it only has to be above 0."""
        return self._sizes[0][1]

    def attend(self, module, query, key, value, scaling: float | None = None, **settings) -> torch.Tensor:
        """Attention of one layer and step: query (L, H, 1, D) -> (L, 1, H, D of the values)."""
        (longest_prompt, longest), (live, heads, _, size) = self._extent, query.shape
        prompt_keys, prompt_values, keys, values = self._blocks[module.layer_idx]
        prompt_keys, prompt_values = (b[: self._slots, :, :longest_prompt] for b in (prompt_keys, prompt_values))
        keys, values = (block[:live, :, :longest] for block in (keys, values))  # (L, K, T, D)
        kv = keys.shape[1]
        query = query.reshape(live, kv, heads // kv, size) * (size**-0.5 if scaling is None else scaling)
        to_prompt = self._from_slots(self._by_slot(query) @ prompt_keys.transpose(2, 3))  # (L, K, H / K, P)
        scores = torch.cat([to_prompt, query @ keys.transpose(2, 3)], -1)
        scores = scores.masked_fill_(self._unseen, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        out = self._from_slots(self._by_slot(weights[..., :longest_prompt]) @ prompt_values)
        out = out + weights[..., longest_prompt:] @ values
        return out.view(live, 1, heads, values.shape[-1])  # values may have a size of their own

    def _by_slot(self, rows: torch.Tensor) -> torch.Tensor:
        """(L, K, H / K, X) -> (S, K, G * H / K, X): what belongs to one slot and key head together, zeros between."""
        grid = rows.new_zeros(self._slots * self._group_size, *rows.shape[1:])
        grid[self._places] = rows
        _, kv, each, width = rows.shape
        grid = grid.view(self._slots, self._group_size, kv, each, width).transpose(1, 2)
        return grid.reshape(self._slots, kv, self._group_size * each, width)

    def _from_slots(self, grid: torch.Tensor) -> torch.Tensor:
        """The way back."""
        slots, kv, together, width = grid.shape
        grid = grid.view(slots, kv, self._group_size, together // self._group_size, width).transpose(1, 2)
        return grid.reshape(slots * self._group_size, kv, -1, width)[self._places]

    def _allocate(self, keys, values) -> tuple[torch.Tensor, ...]:
        like = (keys, values)
        return tuple(one.new_zeros(n, one.shape[1], m, one.shape[3]) for n, m in self._sizes for one in like)
