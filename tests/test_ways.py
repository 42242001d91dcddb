"""Which way a model goes: the fast ones where a trial covers them, the plain forward's values in every case."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from tiny import SHAPE, VOCAB, redraw, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
)

from grpo import attention
from grpo import logprobs as scoring
from grpo.batch import collate
from grpo.generation import decoding_way, generate
from grpo.logprobs import completion_logprobs, ways_that_fit
from grpo.models import add_lora, switch_dropout_off
from grpo.ways import UnfitModel, length_to_try, lengths_that_matter

WINDOW = 12
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    partial_rotary_factor=1.0,
    short_factor=[1.0, 1.1, 1.3, 1.5],
    long_factor=[1.5, 3.0, 6.0, 9.0],
    original_max_position_embeddings=WINDOW,
)
SHORT = [[5, 6, 7], list(range(40, 44))]  # with 6 more tokens they stay below the window
MIXED = [*SHORT, list(range(20, 31)), list(range(50, 65))]  # the third crosses it, the last is beyond it


def make(config, std=0.25, **settings):
    made = config(**SHAPE | {"head_dim": 8, "eos_token_id": 2, "pad_token_id": 0} | settings)
    switch_dropout_off(made)
    model = redraw(AutoModelForCausalLM.from_config(made).float())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(std / 0.25)
    return model


MLA = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=12,
    head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    num_key_value_heads=4,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=16, shared_intermediate_size=32)
LLAMA4 = dict(
    num_local_experts=2,
    attention_chunk_size=WINDOW,
    intermediate_size_mlp=64,
    layer_types=["chunked_attention", "full_attention"],
)
# name -> (model, targets, its ways with short prompts, its ways with all of them): (decoding, scoring)
MODELS = {
    "lfm2": (
        lambda: make(Lfm2Config, layer_types=["conv", "full_attention"], block_multiple_of=8),
        "all-linear",
        ("grouped", "padded"),
        ("grouped", "padded"),
    ),
    "granitemoehybrid": (
        lambda: make(GraniteMoeHybridConfig, 0.15, layer_types=["linear_attention", "full_attention"], **MAMBA),
        ["q_proj", "v_proj"],
        ("grouped", "padded"),
        ("grouped", "padded"),
    ),
    "phi3, LongRoPE": (
        lambda: make(Phi3Config, original_max_position_embeddings=WINDOW, rope_parameters=LONGROPE),
        "all-linear",
        ("shared", "packed"),
        ("plain", "alone"),
    ),
    "llama4, chunks": (
        lambda: make(Llama4TextConfig, **LLAMA4),
        ["q_proj", "k_proj", "v_proj", "o_proj"],
        ("repeated", "packed"),
        ("repeated", "padded"),
    ),
    "deepseek_v3": (
        lambda: make(DeepseekV3Config, **MLA),
        "all-linear",
        ("repeated", "packed"),
        ("repeated", "packed"),
    ),
    "mistral, windows": (
        lambda: make(MistralConfig, sliding_window=WINDOW),
        "all-linear",
        ("repeated", "packed"),
        ("repeated", "packed"),
    ),
}
ALL = pytest.mark.parametrize("name", MODELS)


def adapted(model, targets):
    model = add_lora(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def plain(model, ids, start):
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[start:])[:, None])[:, 0]


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("prompts", [SHORT, MIXED], ids=["short", "mixed"])
def test_decoding_scoring_and_gradient_are_those_of_the_plain_forward_whatever_the_company(name, prompts):
    make_model, targets, short_ways, mixed_ways = MODELS[name]
    model = adapted(make_model(), targets)
    ways = short_ways if prompts is SHORT else mixed_ways
    settings = dict(group_size=2, max_new_tokens=5, temperature=1.0, eos_ids=list(range(0, VOCAB, 9)), places=6)
    groups = generate(model, prompts, list(range(len(prompts))), **settings)
    longest = max(map(len, prompts)) + 5
    assert (decoding_way(model, longest).engine, ways_that_fit(model, longest).forward) == ways
    rows = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    for prompt, one in rows:
        ids = prompt + one.ids.tolist()
        for n, logprob in enumerate(one.logprobs, len(prompt)):  # a decoder knows the text so far
            logits = model(input_ids=torch.tensor([ids[:n]]), use_cache=False).logits[0, -1]
            assert abs(torch.log_softmax(logits, -1)[ids[n]] - logprob) < 1e-4
    batch = collate([torch.tensor(prompt) for prompt in prompts], [one.ids for _, one in rows])
    found, _ = completion_logprobs(model, batch, 1.0)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    total = 0
    for i, (prompt, one) in enumerate(rows):
        expected = plain(model, prompt + one.ids.tolist(), len(prompt))
        torch.testing.assert_close(found[i, : len(expected)], expected, rtol=0, atol=1e-4)
        total = total + (weights[i, : len(expected)] * expected).sum()
    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wanted = torch.autograd.grad(total, adapter, allow_unused=True)
    gradients = torch.autograd.grad((weights * found).sum(), adapter, allow_unused=True)
    for one, other in zip(gradients, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).norm() <= 1e-4 * other.norm() + 1e-6


def test_a_score_does_not_depend_on_the_company():
    """LongRoPE takes other frequencies for all sequences of a call once one of them is long."""
    model = MODELS["phi3, LongRoPE"][0]()
    short, long = torch.tensor([5, 6, 7]), torch.arange(20, 60)
    completion = torch.tensor([8, 9, 10])
    alone, _ = completion_logprobs(model, collate([short], [completion]), 1.0)
    together, _ = completion_logprobs(model, collate([short, long], [completion] * 2), 1.0)
    torch.testing.assert_close(together[0], alone[0], rtol=0, atol=1e-5)
    wrong = scoring._packed(model, collate([short, long], [completion] * 2))
    assert (torch.log_softmax(wrong, -1)[range(3), completion] - alone[0]).abs().max() > 0.01


def test_lengths_that_change_a_model_are_read_from_its_configuration():
    assert lengths_that_matter(tiny_model()) == ([], [])
    assert lengths_that_matter(make(MistralConfig, sliding_window=9)) == ([9], [])
    unused = make(Qwen2Config, sliding_window=9, use_sliding_window=False)
    assert lengths_that_matter(unused) == ([], [])
    longrope = MODELS["phi3, LongRoPE"][0]()
    assert lengths_that_matter(longrope) == ([], [WINDOW])
    assert [length_to_try(longrope, n) for n in (0, WINDOW, WINDOW + 1)] == [0, 0, None]
    chunks = MODELS["llama4, chunks"][0]()
    assert [length_to_try(chunks, n) for n in (0, WINDOW, WINDOW + 1)] == [0, 0, WINDOW]


def test_models_that_cannot_be_used_are_named_in_a_sentence():
    growing = make(LlamaConfig, max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    batch = collate([torch.arange(3, 33)], [torch.arange(3, 10)])
    with pytest.raises(UnfitModel, match="--model_path: a model of type llama .*beyond 32 tokens.*--max_new_tokens"):
        completion_logprobs(growing, batch, 1.0)
    with pytest.raises(UnfitModel, match="type bert cannot be used here: .* depends on the tokens after it"):
        ways_that_fit(make(BertConfig))
    with pytest.raises(UnfitModel, match="type bert cannot be used here: .* depends on the tokens after it"):
        ways_that_fit(make(BertConfig).bfloat16())
    broken = tiny_model()
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    with pytest.raises(UnfitModel, match="not finite"):
        ways_that_fit(broken)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
@pytest.mark.parametrize("way", ["_packed", "_padded"])
def test_out_of_memory_during_a_trial_is_raised_and_the_next_trial_is_a_new_one(monkeypatch, error, way):
    model = tiny_model() if way == "_packed" else make(LlamaConfig)
    implementation = model.config._attn_implementation
    with monkeypatch.context() as patch:
        if way == "_padded":
            patch.setattr(scoring, "_packs", lambda *arguments, **settings: False)

        def full(*arguments):
            raise error

        patch.setattr(scoring, way, full)
        with pytest.raises(type(error)):
            ways_that_fit(model)
    assert model.config._attn_implementation == implementation
    assert ways_that_fit(model) == (way.removeprefix("_"), True)


def test_a_trial_leaves_random_numbers_and_training_flags_alone():
    model = tiny_model().train()
    model.model.layers[1].eval()
    flags = [module.training for module in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ways_that_fit(model)
    decoding_way(model)
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == flags


CACHED = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from test_generation import gpt2
from test_logprobs import COMPLETIONS, PROMPTS
from grpo.batch import collate
from grpo.generation import generate
from grpo.logprobs import completion_logprobs
model = gpt2()
generate(model, [[5, 6, 7]], [0], group_size=2, max_new_tokens=3, temperature=1.0, eos_ids=[2])
model.train().enable_input_require_grads()
model.gradient_checkpointing_enable({"use_reentrant": False})
completion_logprobs(model, collate(PROMPTS, COMPLETIONS), 1.0)[0].sum().backward()
print("trained")
"""


def test_a_model_can_be_trained_after_it_has_decoded_first():
    """In a process of its own: what decoding, under inference mode, makes first must not be what training meets."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", CACHED, str(root), str(root / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "trained\n", done.stderr


def test_nothing_that_is_kept_for_later_calls_is_made_under_inference_mode():
    attention._all_seen.cache_clear()
    with torch.inference_mode():
        assert not attention._all_seen(torch.device("cpu")).is_inference()
