"""Log-probs by the shared function: exact for every architecture, with the prompt run once for its completions."""

import pytest
import torch
from test_generation import MODELS
from tiny import VOCAB, tiny_model

from grpo.batch import collate
from grpo.logprobs import can_share_prompt, completion_logprobs

PROMPTS = [torch.tensor(p) for p in ([5, 6, 7], [20, 21, 22, 23, 24, 25, 26], [40, 41])]
COMPLETIONS = [torch.tensor(c) for c in ([8, 9, 2], [10], [11, 12, 13, 14, 15], [16, 2], [17, 18, 19], [3])]


def plain(model, prompt, completion, temperature):
    """One sequence, one forward pass, the formula."""
    logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    return torch.distributions.Categorical(logits=logits / temperature)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_a_plain_forward(name, temperature):
    model = MODELS[name]()
    logprobs, entropies = completion_logprobs(model, collate(PROMPTS, COMPLETIONS), temperature)
    weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    expected_total = found_total = 0
    for i, completion in enumerate(COMPLETIONS):
        distribution, n = plain(model, PROMPTS[i // 2], completion, temperature), len(completion)
        expected = distribution.log_prob(completion)
        torch.testing.assert_close(logprobs[i, :n], expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(entropies[i, :n], distribution.entropy(), rtol=0, atol=2e-5)
        expected_total = expected_total + (weights[i, :n] * expected).sum()
        found_total = found_total + (weights[i, :n] * logprobs[i, :n]).sum()
    parameters = list(model.parameters())
    expected_gradients = torch.autograd.grad(expected_total, parameters)
    for found, wanted in zip(torch.autograd.grad(found_total, parameters), expected_gradients, strict=True):
        assert (found - wanted).norm() <= 1e-5 * wanted.norm() + 1e-7


def test_models_that_cannot_be_continued_get_the_prompt_repeated():
    assert can_share_prompt(MODELS["qwen2"]()) and can_share_prompt(MODELS["gpt2"]())
    assert not can_share_prompt(MODELS["mistral, window 4"]())


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            assert not can_share_prompt(model)
        logprobs, _ = completion_logprobs(model, collate(PROMPTS, COMPLETIONS), 1.0)
        logprobs[:, 0].sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def test_chunks_of_the_head_change_nothing(monkeypatch):
    model = tiny_model()
    results = []
    for elements in (1 << 25, 2 * VOCAB):
        monkeypatch.setattr("grpo.logprobs.CHUNK_ELEMENTS", elements)
        model.zero_grad()
        logprobs = completion_logprobs(model, collate(PROMPTS, COMPLETIONS), 1.0)[0]
        logprobs[:, 0].sum().backward()
        results.append((logprobs.detach(), model.model.embed_tokens.weight.grad.clone()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_empty_completions_have_a_place_in_a_batch():
    batch = collate([torch.tensor([5, 6])], [torch.tensor([], dtype=torch.int64)] * 2)
    logprobs, _ = completion_logprobs(tiny_model(), batch, 1.0)
    assert logprobs.shape == batch.completion_mask.shape == (2, 1) and not batch.completion_mask.any()
