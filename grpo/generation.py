"""The decode loop: G completions for each prompt, sampled from the full distribution at the run's temperature.

Nothing of the model's generation_config takes part, so there is no top-k, top-p or penalty that could leak in. Each
prompt is prefilled once for its group. The noise of a group comes from its ticket's seed alone: what else is in the
batch does not change what is drawn, up to the rounding of the logits.

Shapes: B prompts, G group, R = B * G rows still decoding, P longest prompt, V vocabulary.
"""

from dataclasses import dataclass

import torch
from transformers import DynamicCache


@dataclass
class Completion:
    """One sampled completion; its end token, if it has one, is the last of its ids."""

    ids: torch.Tensor  # (C,) int32
    logprobs: torch.Tensor  # (C,) float32, under the distribution it was drawn from
    truncated: bool  # no end token within max_new_tokens


@torch.inference_mode()
def generate(
    model,
    prompts: list[list[int]],
    seeds: list[int],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    eos_ids: list[int],
) -> list[list[Completion]]:
    """Sample `group_size` completions for each of the B prompts; temperature 0 is greedy decoding.

    `model` is a causal LM of transformers, bare or wrapped by PEFT. Greedy log-probs are those at temperature 1.
    """
    device = next(model.parameters()).device
    noise = torch.cat([_noise(seed, group_size, max_new_tokens) for seed in seeds]).to(device)  # (B * G, max_new)
    end_ids = torch.tensor(eos_ids, device=device)
    logits, cache, attention_mask = _prefill(model, prompts, group_size, device)
    total = len(prompts) * group_size
    ids = torch.zeros(total, max_new_tokens, dtype=torch.int64, device=device)
    logprobs = torch.zeros(total, max_new_tokens, device=device)
    lengths = torch.full((total,), max_new_tokens, device=device)
    rows = torch.arange(total, device=device)  # (R,) which completion each row of the cache belongs to
    ended = torch.zeros(total, dtype=torch.bool, device=device)
    for t in range(max_new_tokens):
        tokens, logp = _draw(logits, noise[rows, t], temperature)
        ids[rows, t], logprobs[rows, t] = tokens, logp
        finished = torch.isin(tokens, end_ids)
        if finished.any():
            ended[rows[finished]], lengths[rows[finished]] = True, t + 1
            keep = (~finished).nonzero().flatten()
            if len(keep) == 0:
                break
            rows, tokens, attention_mask = rows[keep], tokens[keep], attention_mask[keep]
            cache.batch_select_indices(keep)
        if t + 1 < max_new_tokens:
            attention_mask = torch.nn.functional.pad(attention_mask, (0, 1), value=1)
            logits = _decode_one(model, tokens, attention_mask, cache)
    return _collect(ids, logprobs, lengths, ended, group_size)


def _noise(seed: int, group_size: int, max_new_tokens: int) -> torch.Tensor:
    """(G, max_new_tokens) uniform draws in [0, 1) of one ticket."""
    return torch.rand(group_size, max_new_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _prefill(model, prompts: list[list[int]], group_size: int, device: torch.device):
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)  # (B, P)
    attention_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    cache = DynamicCache(config=model.config)
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    cache.batch_repeat_interleave(group_size)
    return logits.repeat_interleave(group_size, 0), cache, attention_mask.repeat_interleave(group_size, 0)


def _decode_one(model, tokens: torch.Tensor, attention_mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """(R,) tokens -> (R, V) logits of the next position."""
    return model(
        input_ids=tokens[:, None],
        attention_mask=attention_mask,
        position_ids=attention_mask.sum(-1, keepdim=True) - 1,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]


def _draw(logits: torch.Tensor, noise: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sampling: (R, V) logits and (R,) uniforms -> (R,) tokens and their (R,) log-probs."""
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logp.argmax(-1)
    else:
        cdf = logp.exp().cumsum(-1, dtype=torch.float64)  # in float64 a tail of tiny probabilities is not lost
        tokens = torch.searchsorted(cdf, (noise * cdf[:, -1])[:, None], right=True).squeeze(-1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1)


def _collect(ids, logprobs, lengths, ended, group_size: int) -> list[list[Completion]]:
    ids, logprobs = ids.to(torch.int32).cpu(), logprobs.cpu()
    completions = [
        Completion(ids[i, :length].clone(), logprobs[i, :length].clone(), not end)
        for i, (length, end) in enumerate(zip(lengths.tolist(), ended.tolist(), strict=True))
    ]
    return [completions[i : i + group_size] for i in range(0, len(completions), group_size)]
