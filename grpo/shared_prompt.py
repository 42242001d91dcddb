"""Decoding attention over prompts that are held once for all their completions.

The keys and values of S prompts and of S x G completions lie in blocks that are written in place. A decoding step's
queries attend to both: those of one slot's completions to their prompt by one matrix product, each to its own earlier
tokens by another, under one softmax. Heads that share keys (grouped queries) are never repeated in memory.

transformers models reach this through their attention interface (grpo/attention.py): the cache is the layout of a
decoding step.

Shapes: S slots, G completions a slot, L live rows of the step, H query heads, K key heads, D head size, P longest
prompt, T longest completion so far.
"""

import torch
from transformers.cache_utils import DynamicCache


class SharedPromptCache(DynamicCache):
    """Blocks for S prompts of at most P tokens, and for S x G completions of at most `max_new_tokens`."""

    def __init__(self, config, slots: int, group_size: int, longest_prompt: int, max_new_tokens: int, device):
        super().__init__(config=config)
        self._shape = slots, group_size, longest_prompt, max_new_tokens
        self.prompt_lengths = torch.zeros(slots, dtype=torch.int64, device=device)  # (S,)
        self.lengths = torch.zeros(slots * group_size, dtype=torch.int64, device=device)  # (S * G,) tokens held
        self._blocks: list[tuple[torch.Tensor, ...]] = []  # a layer: prompt keys, values, completion keys, values

    def put_prompts(self, slots: torch.Tensor, cache: DynamicCache, mask: torch.Tensor) -> None:
        """Take over the prefilled prompts (left-padded, `mask` (N, P')) of some slots, whose completions start anew."""
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
        self.lengths.view(self._shape[:2])[slots] = 0

    def start_step(self, rows: torch.Tensor, slots: int, longest_prompt: int, longest: int) -> None:
        """The next forward pass brings one token for each of these completions.

        They are in the first `slots` slots; the longest of their prompts has `longest_prompt` tokens, and with this
        step the longest of them has `longest`: nothing beyond takes part.
        """
        self.rows, self.places = rows, self.lengths[rows]  # which completions, and where their keys go
        self.lengths[rows] += 1
        group_size = self._shape[1]
        self.extent = slots, longest_prompt, longest
        prompt_mask = torch.arange(longest_prompt, device=rows.device) < self.prompt_lengths[:slots, None]  # (S, P)
        lengths = self.lengths[: slots * group_size].clamp(min=1)  # no row without anything to attend to
        completion_mask = torch.arange(longest, device=rows.device) < lengths[:, None]  # (S * G, T)
        prompt_mask = prompt_mask[:, None].expand(-1, group_size, -1).reshape(slots * group_size, -1)
        self.mask = torch.cat([prompt_mask, completion_mask], 1).view(slots, 1, group_size, 1, -1)  # over P + T

    def update(self, keys, values, layer_idx: int, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's (L, K, 1, D) keys and values in their places."""
        _, _, own_keys, own_values = self._blocks[layer_idx]
        own_keys[self.rows, :, self.places] = keys[:, :, 0]
        own_values[self.rows, :, self.places] = values[:, :, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this step, of the longest; positions are given explicitly, so it only has to be above 0."""
        return self._shape[2]

    def blocks(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Prompt keys and values (S, K, P, D), completion keys and values (S * G, K, T, D), as far as the step goes."""
        slots, longest_prompt, longest = self.extent
        prompt_keys, prompt_values, keys, values = self._blocks[layer]
        prompts = (block[:slots, :, :longest_prompt] for block in (prompt_keys, prompt_values))
        completions = (block[: slots * self._shape[1], :, :longest] for block in (keys, values))
        return *prompts, *completions

    def attend(self, module, query, key, value, scaling: float | None = None, **settings) -> torch.Tensor:
        """Attention of one layer and step: query (L, H, 1, D) -> (L, 1, H, D)."""
        prompt_keys, prompt_values, keys, values = self.blocks(module.layer_idx)
        (slots, group_size), heads, size = self.shape, query.shape[1], query.shape[3]
        kv, rows = keys.shape[1], self.rows
        each = heads // kv
        scaling = size**-0.5 if scaling is None else scaling
        placed = query.new_zeros(slots * group_size, kv, each, size)
        placed[rows] = query.view(len(rows), kv, each, size) * scaling
        # (S, K, G * each, D): one slot's queries of one key head together
        by_slot = placed.view(slots, group_size, kv, each, size).transpose(1, 2)
        by_slot = by_slot.reshape(slots, kv, group_size * each, size)
        to_prompt = by_slot @ prompt_keys.transpose(2, 3)  # (S, K, G * each, P)
        to_own = placed @ keys.transpose(2, 3)  # (S * G, K, each, T)
        to_own = to_own.view(slots, group_size, kv, each, -1).transpose(1, 2)  # (S, K, G, each, T)
        width = to_prompt.shape[-1]
        scores = torch.cat([to_prompt.view(slots, kv, group_size, each, width), to_own], -1)
        scores = scores.masked_fill_(~self.mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        from_prompt = weights[..., :width].reshape(slots, kv, group_size * each, width) @ prompt_values
        own_weights = weights[..., width:].transpose(1, 2).reshape(slots * group_size, kv, each, -1)
        from_own = (own_weights @ values).view(slots, group_size, kv, each, size)
        out = from_prompt.view(slots, kv, group_size, each, size).transpose(1, 2) + from_own  # (S, G, K, each, D)
        return out.reshape(slots * group_size, 1, heads, size)[rows]

    def _allocate(self, keys, values) -> tuple[torch.Tensor, ...]:
        slots, group_size, longest, max_new_tokens = self._shape
        sizes = [(slots, longest), (slots * group_size, max_new_tokens)]
        return tuple(like.new_zeros(n, like.shape[1], m, like.shape[3]) for n, m in sizes for like in (keys, values))

    @property
    def shape(self) -> tuple[int, int]:
        """S of this step, and G."""
        return self.extent[0], self._shape[1]
