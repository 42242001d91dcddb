"""How many completions fit into memory, and going on with half as many where that was too optimistic."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil
import torch

T = TypeVar("T")
USABLE = {"cuda": 0.8, "cpu": 0.4}  # of what is free: fragments, and the other processes of a machine, want the rest
OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED", "not enough memory")
LARGEST = 256  # more rows than this gain little speed


@dataclass
class Places:
    """How many completions are decoded at a time: a multiple of `each`; fewer from then on once memory has run out."""

    size: int
    each: int
    flag: str = "--batch_size"

    def run(self, call: Callable[[int], T]) -> T:
        """call(size), with `halving`."""
        result, self.size = halving(call, self.size, self.each, self.flag)
        return result


def places_that_fit(model, group_size: int, prompt_length: int, max_new_tokens: int) -> int:
    """Completions that can be decoded at a time with the memory that is free: a multiple of the group size.

    Counted are the blocks of grpo/shared_prompt.py (prompts for twice as many groups as are alive) and float32
    logits, three times.

    Raises:
        ValueError: not even one group fits.
    """
    config, device = model.config.get_text_config(), next(model.parameters()).device
    queries = _entry(config, "num_attention_heads", 1)  # models without attention have none, and need less than this
    heads = _entry(config, "num_key_value_heads", queries)
    size = _entry(config, "head_dim", config.hidden_size // queries)
    token = 2 * config.num_hidden_layers * heads * size * next(model.parameters()).element_size()
    group = token * (2 * prompt_length + group_size * max_new_tokens) + group_size * config.vocab_size * 4 * 3
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    groups = int(free * USABLE.get(device.type, 0.4) / group)
    if groups < 1:
        raise ValueError(
            f"{free / 1e9:.1f} GB are free on {device}, one group of {group_size} completions takes {group / 1e9:.1f}: "
            "smaller --max_new_tokens, --max_prompt_length or model"
        )
    return min(groups * group_size, max(LARGEST // group_size, 1) * group_size)


def _entry(config, name: str, otherwise: int) -> int:
    """A number of the configuration; the largest, where each layer has its own."""
    value = getattr(config, name, None)
    return max(value) if isinstance(value, (list, tuple)) and value else value or otherwise


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: of a device by torch's own error, of the CPU by a plain one, within a library by text."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def halving(call: Callable[[int], T], size: int, least: int, what: str) -> tuple[T, int]:
    """call(size), tried again with half the size whenever memory runs out; its result and the size that worked.

    Raises:
        ValueError: `least`, of which sizes are multiples, is too much as well.
    """
    while True:
        try:
            return call(size), size
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if size <= least:
                raise ValueError(f"out of memory with {what} {size} already, and less is not possible") from error
        size = max(least, size // 2 // least * least)
        torch.cuda.empty_cache()
        print(f"out of memory: {what} is {size} from now on", flush=True)
