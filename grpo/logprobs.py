"""Token log-probabilities: the one function with which both sides score completions.

The model runs on the real tokens of prompts and completions in one row, each prompt once (grpo/packed.py), and its
head on completion tokens only (grpo/head.py). A model that the row does not fit gets padded sequences with the prompt
before each completion, one whose logits are not its head's output is asked for logits; a line says so.

Shapes: Q prompts, B sequences, P prompt, C completion, M completion tokens, h hidden size, V vocabulary.
"""

import math
import weakref

import torch
from peft import PeftModel
from torch import nn

from grpo.attention import own_attention, run
from grpo.batch import Batch, collate
from grpo.head import headless, pick, pick_from_logits
from grpo.models import attends_in_windows, say_once

_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}  # of logits, relative
_TEXT = torch.arange(3, 12)
_ways: "weakref.WeakKeyDictionary[nn.Module, tuple[bool, bool]]" = weakref.WeakKeyDictionary()


def completion_logprobs(model: nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every completion token under softmax(logits / temperature).

    Returns two (B, C) float32 tensors: log-probs, through which gradients flow, and entropies in nats, through which
    none do; 0 where `present` is 0. `model` is a causal LM of transformers, bare, wrapped by PEFT or by a DeepSpeed
    engine.
    """
    packs, plain = ways_that_fit(model)
    forward = _packed if packs else _padded
    ids = batch.completion_ids.flatten()[batch.places]  # (M,)
    head = _head(model)
    if plain:
        with headless(head):
            hidden = forward(model, batch)  # (M, h)
        logprobs, entropies = pick(head, hidden, ids, temperature)
    else:
        logprobs, entropies = pick_from_logits(forward(model, batch), ids, temperature)
    return tuple(
        torch.zeros(batch.completion_ids.numel(), device=ids.device)
        .index_copy(0, batch.places, values)
        .view(batch.completion_ids.shape)
        for values in (logprobs, entropies)
    )


def ways_that_fit(model: nn.Module) -> tuple[bool, bool]:
    """Whether the model runs packed rows, and whether its logits are its head's output: tried once on a short text."""
    inner = getattr(model, "module", model)  # a DeepSpeed engine's own config is not the model's
    inner = inner.get_base_model() if isinstance(inner, PeftModel) else inner  # with an adapter it is the same model
    if inner not in _ways:
        _ways[inner] = _try_ways(inner)
    return _ways[inner]


@torch.no_grad()
def _try_ways(model: nn.Module) -> tuple[bool, bool]:
    config, head = model.config.get_text_config(), _head(model)
    batch = collate([_TEXT[:4]], [_TEXT[4:], _TEXT[5:8]]).to(head.weight.device)
    logits = _padded(model, batch)
    with headless(head):
        hidden = _padded(model, batch)
    capped = getattr(config, "final_logit_softcapping", None) is not None
    plain = not capped and _apart(head(hidden), logits) < _ROUNDING[logits.dtype] / 10
    if not plain:
        say_once(f"{config.model_type} changes its head's output: logits of all completion tokens are held at a time")
    before = config._attn_implementation
    packs = own_attention(model)
    if packs:
        try:
            error = _apart(_packed(model, batch), logits)
        except (NotImplementedError, RuntimeError, TypeError):  # another kind of attention
            error = math.inf
        # every layer heard of the layout, and attends no other way; half precision may round too much to tell by values
        packs = batch.packed.calls == config.num_hidden_layers and batch.packed.windowed == attends_in_windows(model)
        packs = packs and (error < _ROUNDING[torch.float32] or (logits.dtype != torch.float32 and error < math.inf))
    if not packs:
        config._attn_implementation = before
        say_once(f"{config.model_type} does not run packed rows: prompts are repeated for each completion")
    return packs, plain


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _head(model: nn.Module) -> nn.Module:
    return getattr(model, "module", model).get_output_embeddings()


def _packed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """(M, h or V): what predicts each completion token."""
    row = batch.packed
    out = run(model, row, input_ids=row.ids, position_ids=row.positions, use_cache=False).logits
    return out[0].index_select(0, row.predictors)


def _padded(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The same from one padded row for each sequence; position t predicts token t + 1."""
    mask = torch.cat([batch.prompt_mask[batch.packed.prompt_of], batch.present], 1)
    out = model(
        input_ids=torch.cat([batch.prompt_ids[batch.packed.prompt_of], batch.completion_ids], 1),
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),  # from the first real token, whatever the padding before it
        use_cache=False,
        logits_to_keep=batch.completion_ids.shape[1] + 1,
    ).logits[:, :-1]
    return out.flatten(0, 1).index_select(0, batch.places)
