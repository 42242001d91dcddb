"""Token log-probabilities: the one function with which both sides score completions.

Shapes: B sequences, C completion tokens, T prompt and completion, V vocabulary.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo.batch import Batch

CHUNK_ELEMENTS = 1 << 25  # float32 logits that are alive at a time, about 128 MiB


def completion_logprobs(model: nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every completion token under softmax(logits / temperature).

    Returns two (B, C) float32 tensors: log-probs, through which gradients flow, and entropies in nats, through which
    none do. Values at positions outside completion_mask mean nothing. `model` is a causal LM of transformers, bare,
    wrapped by PEFT or by a DeepSpeed engine.
    """
    width = batch.completion_mask.shape[1]
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=width + 1,
    ).logits[:, :-1]  # (B, C, V): position t predicts token t + 1
    flat, targets = logits.flatten(0, 1), batch.completion_ids.flatten()
    rows = max(1, CHUNK_ELEMENTS // flat.shape[1])
    parts = [
        checkpoint(_pick, chunk, ids, temperature, use_reentrant=False)  # float32 logits are made again in backward
        for chunk, ids in zip(flat.split(rows), targets.split(rows), strict=True)
    ]
    logprobs, entropies = (torch.cat(column).view(-1, width) for column in zip(*parts, strict=True))
    return logprobs, entropies


def _pick(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropy = torch.special.entr(logp.detach().exp()).sum(-1)
    return logp.gather(-1, ids[:, None]).squeeze(-1), entropy
