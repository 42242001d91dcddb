"""Log-probs by the shared function: exact for every architecture, with the prompt run once for its completions."""

import pytest
import torch
from peft import LoraConfig
from test_generation import MODELS
from tiny import VOCAB, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.batch import collate
from grpo.logprobs import completion_logprobs, ways_that_fit
from grpo.models import add_lora

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


def test_every_model_here_runs_packed_rows_but_the_one_with_soft_caps():
    fits = {name: ways_that_fit(make()) for name, make in MODELS.items()}
    assert fits.pop("gemma 2, soft caps") == ("padded", False)
    assert set(fits.values()) == {("packed", True)}
    assert ways_that_fit(MODELS["llama"]().bfloat16()) == ways_that_fit(MODELS["gpt2"]().half()) == ("packed", True)


def test_a_model_with_half_of_its_layers_of_another_kind_does_not_run_packed_rows():
    model = tiny_model()
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *inputs, grpo_layout=None, **settings: forward(*inputs, **settings)
    assert ways_that_fit(model) == ("padded", True)
    assert model.config._attn_implementation == "sdpa"


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logprobs, _ = completion_logprobs(model, collate(PROMPTS, COMPLETIONS), 1.0)
        logprobs[:, 0].sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_adapters_gradient_is_that_of_a_plain_forward_for_groups_of_any_size(name, checkpointing):
    prompt_of = [1, 0, 1, 1, 2, 1]
    model = MODELS[name]()
    model = add_lora(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    weights = torch.linspace(-1, 1, 30).view(6, 5)
    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = 0
    for i, completion in enumerate(COMPLETIONS):
        values = plain(model, PROMPTS[prompt_of[i]], completion, 0.7).log_prob(completion)
        expected = expected + (weights[i, : len(completion)] * values).sum()
    wanted = torch.autograd.grad(expected, adapter)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logprobs, _ = completion_logprobs(model, collate(PROMPTS, COMPLETIONS, prompt_of), 0.7)
    assert not logprobs[1, 1:].any()  # nothing where there is no token
    for one, other in zip(torch.autograd.grad((weights * logprobs).sum(), adapter), wanted, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-7


def test_no_tensor_has_the_logits_of_all_completion_tokens(monkeypatch):
    monkeypatch.setattr("grpo.head.CHUNK_ELEMENTS", 2 * VOCAB)
    model = add_lora(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    largest, weights = 0, {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), settings=None):
            nonlocal largest
            out = function(*arguments, **settings or {})
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                logits = isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCAB,)
                if logits and tensor.untyped_storage().data_ptr() not in weights:
                    largest = max(largest, tensor.numel() // VOCAB)
            return out

    batch = collate(PROMPTS, COMPLETIONS)
    completion_logprobs(model, batch, 1.0)
    with Watch():
        completion_logprobs(model, batch, 1.0)[0].sum().backward()
    assert 0 < largest <= 2


def test_chunks_of_the_head_change_nothing(monkeypatch):
    model = tiny_model()
    results = []
    for elements in (1 << 25, 2 * VOCAB):
        monkeypatch.setattr("grpo.head.CHUNK_ELEMENTS", elements)
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
