"""Token log-probabilities: the one function with which both sides score completions.

Where a prompt has several completions, the model runs on it once and they continue from its cache; gradients flow
through the cache. Models that cannot be continued like that (sliding windows, recurrent state, or gradient
checkpointing, which keeps no cache) get the prompt repeated before each completion.

Shapes: Q prompts, B sequences, P prompt, C completion, V vocabulary.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from grpo.batch import Batch
from grpo.models import has_full_attention

CHUNK_ELEMENTS = 1 << 25  # float32 logits that are alive at a time, about 128 MiB


def completion_logprobs(model: nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every completion token under softmax(logits / temperature).

    Returns two (B, C) float32 tensors: log-probs, through which gradients flow, and entropies in nats, through which
    none do. Values where `present` is 0 mean nothing. `model` is a causal LM of transformers, bare, wrapped by PEFT
    or by a DeepSpeed engine.
    """
    width = batch.completion_ids.shape[1]
    share = batch.rows_per_prompt > 1 and width > 1 and can_share_prompt(model)
    logits = (_shared_prompt_logits if share else _repeated_prompt_logits)(model, batch)  # (B, C, V)
    flat, targets = logits.flatten(0, 1), batch.completion_ids.flatten()
    rows = max(1, CHUNK_ELEMENTS // flat.shape[1])
    parts = [
        checkpoint(_pick, chunk, ids, temperature, use_reentrant=False)  # float32 logits are made again in backward
        for chunk, ids in zip(flat.split(rows), targets.split(rows), strict=True)
    ]
    logprobs, entropies = (torch.cat(column).view(-1, width) for column in zip(*parts, strict=True))
    return logprobs, entropies


def can_share_prompt(model: nn.Module) -> bool:
    """Whether completions of a prompt can continue from its cache."""
    inner = getattr(model, "module", model)  # a DeepSpeed engine's own config is not the model's
    if inner.training and any(getattr(part, "gradient_checkpointing", False) for part in inner.modules()):
        return False
    return has_full_attention(inner)


def _repeated_prompt_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """(B, C, V): one forward pass over prompt and completion; position t predicts token t + 1."""
    each, width = batch.rows_per_prompt, batch.completion_ids.shape[1]
    attention_mask = torch.cat([batch.prompt_mask.repeat_interleave(each, 0), batch.present], 1)
    return model(
        input_ids=torch.cat([batch.prompt_ids.repeat_interleave(each, 0), batch.completion_ids], 1),
        attention_mask=attention_mask,
        position_ids=_positions(attention_mask),
        use_cache=False,
        logits_to_keep=width + 1,
    ).logits[:, :-1]


def _shared_prompt_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """(B, C, V): the prompts once, then all completions but their last token as continuations of the cache."""
    each = batch.rows_per_prompt
    cache = DynamicCache(config=getattr(model, "module", model).config)
    first = model(
        input_ids=batch.prompt_ids,
        attention_mask=batch.prompt_mask,
        position_ids=_positions(batch.prompt_mask),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits  # (Q, 1, V): the last prompt token predicts the first completion token
    cache.batch_repeat_interleave(each)
    attention_mask = torch.cat([batch.prompt_mask.repeat_interleave(each, 0), batch.present[:, :-1]], 1)
    rest = model(
        input_ids=batch.completion_ids[:, :-1],
        attention_mask=attention_mask,
        position_ids=_positions(attention_mask)[:, batch.prompt_ids.shape[1] :],
        past_key_values=cache,
        use_cache=True,
    ).logits  # (B, C - 1, V)
    return torch.cat([first.repeat_interleave(each, 0), rest], 1)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Position ids counted from the first real token, whatever the padding before it."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _pick(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropy = torch.special.entr(logp.detach().exp()).sum(-1)
    return logp.gather(-1, ids[:, None]).squeeze(-1), entropy
