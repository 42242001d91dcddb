"""The short forward passes of decoding give what the layers themselves give."""

import pytest
import torch
from peft import LoraConfig
from tiny import tiny_model

from grpo.generation import DecodingWay, decoding_way, generate
from grpo.lean import lean
from grpo.models import add_lora

IDS = torch.arange(3, 33).view(2, 15)


def with_adapter(**settings):
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    model = add_lora(tiny_model(attention_bias=True), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True}, {"use_dora": True}, {"lora_bias": True}, {"lora_dropout": 0.5}], ids=str
)
@torch.no_grad()
def test_logits_are_the_same_and_the_layers_are_as_before_afterwards(settings):
    model = with_adapter(**settings)
    expected = model(IDS).logits
    with lean(model):
        found = model(IDS).logits
        changed = [layer for layer in model.modules() if "forward" in vars(layer)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (len(changed) > 1) == (settings in ({}, {"use_rslora": True}))
    assert not any("forward" in vars(layer) for layer in model.modules())
    assert torch.equal(model(IDS).logits, expected)


@torch.no_grad()
def test_an_adapter_that_is_off_or_reloaded_is_heard_of():
    model = with_adapter()
    with model.disable_adapter():
        expected = model(IDS).logits
        with lean(model):
            torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.mul_(-1)
    expected = model(IDS).logits
    with lean(model):
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_half_precision_is_rounded_as_the_layers_themselves_round():
    model = with_adapter().to(torch.bfloat16)
    exact, expected = with_adapter()(IDS).logits, model(IDS).logits
    with lean(model):
        found = model(IDS).logits
    assert found.dtype == torch.bfloat16
    rounding = (expected.float() - exact).norm()
    assert (found.float() - exact).norm() < 1.2 * rounding and (found - expected).float().norm() < 1.5 * rounding
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


@torch.no_grad()
def test_results_can_lie_in_memory_as_those_of_the_layers_do():
    model = with_adapter()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 1, 32)
    expected = layer(x)
    for contiguous in (False, True):
        with lean(model, contiguous):
            found = layer(x)
        assert found.is_contiguous() == contiguous
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_looks_at_results_as_complex_numbers_decodes_with_them_in_their_own_layout():
    model = with_adapter()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj

    def as_complex(layer, inputs, out):
        pairs = torch.view_as_complex(out.unflatten(-1, (-1, 2)))  # refuses a transposed view
        return torch.view_as_real(pairs).flatten(-2)

    layer.register_forward_hook(as_complex)
    assert decoding_way(model) == DecodingWay("shared", contiguous=True)
    found = generate(model, [[5, 6, 7], [8, 9]], [0, 1], group_size=2, max_new_tokens=4, temperature=1.0, eos_ids=[2])
    assert [len(group) for group in found] == [2, 2]
