"""Which of our forward passes a model can take: each is tried against the model's own plain forward.

The plain forward is one unpadded sequence, without cache: right by definition, and slow. A fast way is taken only where
a trial covers it. Models may attend or count positions another way beyond some length that their configuration names;
a call with longer sequences is tried anew, with texts that cross the length, and where a trial could not tell, the call
goes the slow way by construction.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo.memory import is_out_of_memory

T = TypeVar("T")
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}  # of logits, relative
SPREAD = 31  # how many different tokens the texts of a trial have
# entries of a configuration that are lengths in tokens: of windows, of chunks, of local or sparse attention
LENGTHS = ("window", "chunk", "block_size", "local_attention", "index_topk")
NO_LENGTHS = ("layers", "pattern", "feed_forward", "lm_head")  # what else such names are about


PARTITIONED = 8192  # tokens, to which a model is tried at once where its weights are spread over the ranks


class UnfitModel(ValueError):
    """--model_path names a model that cannot be sampled from or trained here; the message says why."""


def inner_model(model: nn.Module) -> nn.Module:
    """The transformers model in a DeepSpeed engine, a PEFT wrapper, or both."""
    inner = getattr(model, "module", model)
    return inner.get_base_model() if isinstance(inner, PeftModel) else inner


def kind_of(model: nn.Module) -> str:
    """The model's type, as its configuration has it."""
    return inner_model(model).config.get_text_config().model_type


def unfit(model: nn.Module, reason: str) -> UnfitModel:
    """The error for a model that takes none of the ways."""
    adapted = any(isinstance(part, LoraLayer) for part in model.modules())
    hint = " (with an adapter on it; other --lora_targets may do)" if adapted else ""
    return UnfitModel(f"--model_path: a model of type {kind_of(model)} cannot be used here{hint}: {reason}")


def plain_forward(model: nn.Module, ids: torch.Tensor, keep: int = 0) -> torch.Tensor:
    """(R, keep or T, V) logits of (R, T) ids by the model as it comes: no padding, no cache, no layout."""
    parameters = inspect.signature(type(inner_model(model)).forward).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    settings = {"use_cache": False, "logits_to_keep": keep}
    settings = {name: value for name, value in settings.items() if takes_any or name in parameters}
    return model(input_ids=ids, **settings).logits[:, -keep:]


def is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO stage 3 gathers the weights in each forward pass, of which all ranks must then make equally many."""
    return hasattr(inner_model(model).get_input_embeddings().weight, "ds_id")


def lengths_that_matter(model: nn.Module) -> tuple[list[int], list[int]]:
    """Sequence lengths beyond which the model works another way, by its configuration.

    The first are those that a trial can cover; beyond the second ones only the plain forward is right for sure: rotary
    frequencies that follow the longest position of a call, and sparse attention, which at first leaves out so few keys
    that a trial would not notice.
    """
    config = inner_model(model).config.get_text_config()
    entries = {name: value for name, value in vars(config).items() if type(value) is int and value > 1}
    kinds = getattr(config, "layer_types", None) or ["sliding"]
    if getattr(config, "use_sliding_window", True) is False or not any(kind != "full_attention" for kind in kinds):
        entries.pop("sliding_window", None)
    named = {
        name: value
        for name, value in entries.items()
        if any(part in name for part in LENGTHS) and not any(part in name for part in NO_LENGTHS)
    }
    sparse = {name: named.pop(name) for name in list(named) if name.startswith("index_")}
    blocks = sparse.pop("index_block_size", 1) * sparse.pop("index_topk_blocks", 1)
    untold = {*sparse.values(), *_rotary_lengths(config)} | ({blocks} if blocks > 1 else set())
    return sorted(set(named.values())), sorted(untold)


def _rotary_lengths(config) -> Iterator[int]:
    """Where LongRoPE changes its frequencies."""
    rotary = getattr(config, "rope_parameters", None) or {}
    for entry in (rotary, *(value for value in rotary.values() if isinstance(value, dict))):
        if entry.get("rope_type") == "longrope":
            own = entry.get("original_max_position_embeddings")
            yield own or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)


def grows(model: nn.Module) -> int | None:
    """The length beyond which rotary frequencies follow the longest sequence met so far; None for most models."""
    config = inner_model(model).config.get_text_config()
    rotary = getattr(config, "rope_parameters", None) or {}
    entries = (rotary, *(value for value in rotary.values() if isinstance(value, dict)))
    return config.max_position_embeddings if any(entry.get("rope_type") == "dynamic" for entry in entries) else None


def length_to_try(model: nn.Module, longest: int) -> int | None:
    """The length that a trial for sequences of up to `longest` tokens has to cross, 0: none, None: no trial can tell.

    Raises:
        UnfitModel: what the model makes of such a sequence depends on what it has seen before.
    """
    limit = grows(model)
    if limit and longest > limit:
        raise unfit(
            model,
            f'its "dynamic" rotary frequencies change beyond {limit} tokens, and a sequence may have {longest}; lower '
            "--max_prompt_length or --max_new_tokens",
        )
    told, untold = lengths_that_matter(model)
    if is_partitioned(model):  # all ranks try the same at the same time, whatever the lengths of their micro-batches
        untold = [*untold, *(length for length in told if length >= PARTITIONED)]
        told = [length for length in told if length < PARTITIONED]
        return None if any(longest > length for length in untold) else max(told, default=0)
    if any(longest > length for length in untold):
        return None
    return max((length for length in told if longest > length), default=0)


def is_recurrent(model: nn.Module) -> bool:
    """Whether layers carry a state from token to token, which padding would enter, as far as the configuration says."""
    layers = DynamicCache(config=inner_model(model).config).layers
    return any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def texts(model: nn.Module, beyond: int, count: int = 3) -> list[torch.Tensor]:
    """Prompts for a trial, short beside long: of 3 and 7 tokens, or of 3, just below `beyond` and just above it."""
    lengths = [3, max(1, beyond - 2), beyond + 4] if beyond else [3, 7]
    vocabulary = inner_model(model).get_input_embeddings().num_embeddings
    return [3 + (torch.arange(n) * 7 + i) % max(1, min(SPREAD, vocabulary - 3)) for i, n in enumerate(lengths)]


@contextlib.contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Without gradients; random numbers, training flags and what the model caches are afterwards as they were."""
    flags = {module: module.training for module in model.modules()}
    device = inner_model(model).get_input_embeddings().weight.device
    model.eval()
    try:
        random = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with random, torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """The call's result, or None and why the model does not take it; trouble with the device or memory is raised."""
    try:
        return call(), ""
    except Exception as error:  # the model is foreign code: a layout it does not take may fail in any way
        if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            raise
        return None, f"{type(error).__name__}: {error!s:.200}".replace("\n", " ")


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative distance of the row that is furthest off: (M, X) each."""
    gaps = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=1e-30)
    return float(gaps.max()) if gaps.numel() else 0.0
