"""The language-model head on completion tokens only, without logits for the whole batch.

With a frozen head, as LoRA leaves it, the gradient of a token's log-probability with respect to its hidden state is
known as soon as its logits are: (w_token - sum_v p_v w_v) / temperature. It is kept instead of the logits, M x h
numbers instead of M x V, and the backward pass is one multiplication.

Shapes: M tokens, h hidden size, V vocabulary.
"""

import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 23  # float32 logits that are alive at a time: 32 MiB, a few of them


def pick(head: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, temperature: float):
    """Log-probs of `ids` (M,) under softmax(head(hidden) / temperature), and entropies in nats: two (M,) float32.

    `hidden` is (M, h); gradients flow through the log-probs, none through the entropies.
    """
    if type(head) is nn.Linear and not any(parameter.requires_grad for parameter in head.parameters()):
        with _whole(head):
            return _FrozenHead.apply(hidden, head.weight, head.bias, ids, temperature)
    return _in_chunks(head, head.weight.shape[0], hidden, ids, temperature)


def pick_from_logits(logits: torch.Tensor, ids: torch.Tensor, temperature: float):
    """The same from (M, V) logits."""
    return _in_chunks(nn.Identity(), logits.shape[1], logits, ids, temperature)


@contextlib.contextmanager
def headless(head: nn.Module):
    """Let the model return hidden states in place of logits."""
    before = vars(head).get("forward")
    head.forward = lambda hidden: hidden
    try:
        yield
    finally:
        del head.forward
        if before:
            head.forward = before


def _in_chunks(head: nn.Module, vocabulary: int, rows: torch.Tensor, ids: torch.Tensor, temperature: float):
    """By autograd: the float32 logits of a chunk of rows are made again in the backward pass."""
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    parts = [
        checkpoint(_pick, head, chunk, some, temperature, use_reentrant=False)
        for chunk, some in zip(rows.split(size), ids.split(size), strict=True)
    ]
    logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropies


def _pick(head: nn.Module, rows: torch.Tensor, ids: torch.Tensor, temperature: float):
    logp = torch.log_softmax(head(rows).float() / temperature, dim=-1)
    entropy = torch.special.entr(logp.detach().exp()).sum(-1)
    return logp.gather(-1, ids[:, None]).squeeze(-1), entropy


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, temperature):
        rows = max(1, CHUNK_ELEMENTS // len(weight))
        logprobs, entropies = (torch.empty(len(ids), device=hidden.device) for _ in range(2))
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(ids), rows):
            part = slice(start, start + rows)
            logits = nn.functional.linear(hidden[part], weight, bias).float().div_(temperature)
            logits.sub_(logits.amax(-1, keepdim=True))
            p = logits.exp()  # not yet divided by its sum
            total = p.sum(-1)
            logprobs[part] = logits.gather(-1, ids[part, None]).squeeze(-1) - total.log()
            entropies[part] = total.log() - torch.linalg.vecdot(p, logits) / total
            if slopes is not None:
                mean = p.to(weight.dtype) @ weight / total[:, None]  # sum_v p_v w_v
                slopes[part] = (weight[ids[part]] - mean) / temperature
        if slopes is not None:
            ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, gradient, _):
        (slopes,) = ctx.saved_tensors
        return (gradient[:, None] * slopes).to(slopes.dtype), None, None, None, None


@contextlib.contextmanager
def _whole(head: nn.Linear):
    """The head's weights in one piece, also under ZeRO-3."""
    if not hasattr(head.weight, "ds_id"):
        yield
        return
    import deepspeed  # only the learner has it loaded

    with deepspeed.zero.GatheredParameters(list(head.parameters())):
        yield
