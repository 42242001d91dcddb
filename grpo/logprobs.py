"""Token log-probabilities: the one function with which both sides score completions.

The model runs on the real tokens of prompts and completions in one row, each prompt once (grpo/packed.py), and its
head on completion tokens only (grpo/head.py). A model that the row does not fit gets padded sequences with the prompt
before each completion, one that padding disturbs gets sequences of equal length, and one whose logits are not its
head's output is asked for logits; a line says so, and a trial decides (grpo/ways.py).

Shapes: Q prompts, B sequences, P prompt, C completion, M completion tokens, h hidden size, V vocabulary.
"""

import contextlib
import weakref
from typing import NamedTuple

import torch
from torch import nn

from grpo.attention import own_attention, run
from grpo.batch import Batch, collate
from grpo.head import headless, pick, pick_from_logits
from grpo.models import attends_in_windows, say_once
from grpo.ways import (
    ROUNDING,
    apart,
    attempt,
    inner_model,
    is_partitioned,
    is_recurrent,
    kind_of,
    length_to_try,
    plain_forward,
    texts,
    trial,
    unfit,
)


class Ways(NamedTuple):
    """How a model's completions are scored."""

    forward: str  # a key of FORWARDS: "packed", "padded" or "alone"
    plain_head: bool  # whether its logits are its head's output


_heads: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()
_forwards: "weakref.WeakKeyDictionary[nn.Module, dict[int, str]]" = weakref.WeakKeyDictionary()


def completion_logprobs(model: nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every completion token under softmax(logits / temperature).

    Returns two (B, C) float32 tensors: log-probs, through which gradients flow, and entropies in nats, through which
    none do; 0 where `present` is 0. `model` is a causal LM of transformers, bare, wrapped by PEFT or by a DeepSpeed
    engine.

    Raises:
        UnfitModel: no way of running the model gives what its own plain forward gives.
    """
    name, plain = ways_that_fit(model, batch.prompt_ids.shape[1] + batch.completion_ids.shape[1])
    forward = FORWARDS[name]
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


def ways_that_fit(model: nn.Module, longest: int = 0) -> Ways:
    """How to score sequences of up to `longest` tokens: tried once, and once more for long ones where it matters.

    The first of packed rows, padded rows, and rows of equal length that gives what the model's own plain forward gives.

    Raises:
        UnfitModel: none of them does.
    """
    inner = inner_model(model)  # with an adapter it is the same model, and a DeepSpeed engine's config is its own
    if inner not in _heads:
        with trial(inner):
            _heads[inner], packs = _try_short(inner)
        _forwards[inner] = {0: "packed"} if packs else {}
    length, tried = length_to_try(inner, longest), _forwards[inner]
    if length is None:
        return _alone_from_here(inner, longest, _heads[inner])
    if length not in tried:
        with trial(inner):
            tried[length] = _first_that_fits(inner, length, _heads[inner])
    return Ways(tried[length], _heads[inner])


def _alone_from_here(model: nn.Module, longest: int, plain: bool) -> Ways:
    _refuse_partitioned(model)
    say_once(f"{kind_of(model)} works in another way on long sequences: they are scored without packing or padding")
    return Ways("alone", plain)


def _try_short(model: nn.Module) -> tuple[bool, bool]:
    """Whether the model's logits are its head's output and nothing more, and whether it runs short packed rows.

    All that most models are asked, in three short passes: two sequences of equal length, once to the end and once
    without the head, and the packed row.
    """
    head = _head(model)
    if head is None:
        raise unfit(model, "it has no output layer of its own")
    prompts = texts(model, 0)
    batch = collate(prompts, [prompts[-1][:5], prompts[-1][:1]]).to(model.get_input_embeddings().weight.device)
    logits, reason = attempt(lambda: _alone(model, batch))
    if logits is None or not logits.isfinite().all():
        raise unfit(model, reason or "its plain forward pass gives numbers that are not finite")

    def by_head() -> torch.Tensor:
        with headless(head):
            hidden = _alone(model, batch)
        return head(hidden)

    found, _ = attempt(by_head)
    capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None
    plain = not capped and found is not None and found.shape == logits.shape
    plain = plain and apart(found, logits) < ROUNDING[logits.dtype] / 10
    if not plain:
        say_once(f"{kind_of(model)} changes its head's output: logits of all completion tokens are held at a time")
    packs = _packs(model, batch, logits, exact=False)
    return plain, packs and (logits.dtype == torch.float32 or _is_causal(model))  # else told by the values


def _is_causal(model: nn.Module) -> bool:
    """Whether the first tokens of a text have the same logits without the last ones."""
    text = texts(model, 0)[-1].to(model.get_input_embeddings().weight.device)
    whole, part = (plain_forward(model, text[None, :n], n)[0, :4].float() for n in (len(text), 4))
    return apart(part, whole) < max(ROUNDING[model.dtype], 0.01) * 3


def _first_that_fits(model: nn.Module, length: int, plain: bool) -> str:
    """A key of FORWARDS, by a trial whose texts cross `length`."""
    if not _is_causal(model):
        raise unfit(model, "what it says of a token depends on the tokens after it")
    batch = _probe(model, length)
    with headless(_head(model)) if plain else contextlib.nullcontext():
        expected = _one_by_one(model, batch)
        if length and _packs(model, batch, expected, exact=True):
            return "packed"
        padded, reason = attempt(lambda: _padded(model, batch))
        told = expected.dtype == torch.float32 or not is_recurrent(model)  # half precision hides what padding does
        if told and _agree(padded, expected):
            say_once(f"{kind_of(model)} does not run packed rows: prompts are repeated for each completion")
            return "padded"
        twice = _probe(model, length, repeats=2)
        if not _agree(attempt(lambda: _alone(model, twice))[0], expected.repeat(2, 1)):
            raise unfit(model, "two sequences in one call do not give what each of them gives alone")
    _refuse_partitioned(model)
    say_once(f"{kind_of(model)} runs neither packed nor padded rows: sequences of equal length are scored together")
    return "alone"


def _packs(model: nn.Module, batch: Batch, expected: torch.Tensor, exact: bool) -> bool:
    """Whether packed rows fit; if so, the model attends by grpo/attention.py from now on."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if not own_attention(model):
        return False
    try:
        found, _ = attempt(lambda: _packed(model, batch))
    except BaseException:
        config._attn_implementation = before
        raise
    # every layer heard of the layout, and attends no other way; half precision may round too much to tell by values
    packs = batch.packed.calls == config.num_hidden_layers and batch.packed.windowed == attends_in_windows(model)
    loose = expected.dtype != torch.float32 and not exact
    packs = packs and (_agree(found, expected) or (loose and found is not None and bool(found.isfinite().all())))
    if not packs:
        config._attn_implementation = before
    return packs


def _agree(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return found is not None and found.shape == expected.shape and apart(found, expected) < ROUNDING[expected.dtype]


def _probe(model: nn.Module, length: int, repeats: int = 1) -> Batch:
    """A batch for a trial: completions of short and long prompts, all of them `repeats` times."""
    prompts = texts(model, length)
    tokens = prompts[-1][:7].flip(0)
    completions = [tokens[:5], tokens[2:4], tokens[1:4], tokens[2:6]][: len(prompts) + 1]
    prompt_of = [0, 0, 1, 2][: len(completions)]
    batch = collate(prompts, completions * repeats, prompt_of * repeats)
    return batch.to(model.get_input_embeddings().weight.device)


def _refuse_partitioned(model: nn.Module) -> None:
    """The ranks' micro-batches have different lengths, and so they would make differently many forward passes."""
    if is_partitioned(model):
        raise unfit(model, "it is scored one length at a time, which takes ZeRO stage 2 or less in --ds_config")


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
    width = batch.completion_ids.shape[1]
    out = model(
        input_ids=torch.cat([batch.prompt_ids[batch.packed.prompt_of], batch.completion_ids], 1),
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),  # from the first real token, whatever the padding before it
        use_cache=False,
        logits_to_keep=width + 1,
    ).logits[:, -width - 1 : -1]
    return out.flatten(0, 1).index_select(0, batch.places)


def _alone(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The same without padding: sequences of equal length run together, so nothing depends on the company."""
    return _unpadded(model, batch, together=True)


def _one_by_one(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The same by the definition: each sequence by itself."""
    return _unpadded(model, batch, together=False)


def _unpadded(model: nn.Module, batch: Batch, together: bool) -> torch.Tensor:
    first = (batch.prompt_ids.shape[1] - batch.prompt_mask.sum(1)).tolist()  # columns of the first real tokens
    prompts = [row[n:] for row, n in zip(batch.prompt_ids, first, strict=True)]
    lengths = batch.present.sum(1).tolist()  # of the completions
    rows = [
        torch.cat([prompts[parent], ids[:n]])
        for parent, ids, n in zip(batch.packed.prompt_of.tolist(), batch.completion_ids, lengths, strict=True)
    ]
    alike: dict[tuple, list[int]] = {}
    for i, row in enumerate(rows):
        if lengths[i]:
            alike.setdefault((len(row), 0 if together else i), []).append(i)
    found: dict[int, torch.Tensor] = {}
    for some in alike.values():
        keep = 1 + max(lengths[i] for i in some)
        out = plain_forward(model, torch.stack([rows[i] for i in some]), keep)[:, :-1]
        found |= {i: out[at, out.shape[1] - lengths[i] :] for at, i in enumerate(some)}
    if not found:
        return plain_forward(model, prompts[0][None], 1)[0, :0]
    return torch.cat([found[i] for i in sorted(found)])


FORWARDS = {"packed": _packed, "padded": _padded, "alone": _alone}
