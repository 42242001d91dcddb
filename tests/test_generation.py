"""The decode loop: the right distribution, the right masks, and nothing of the model's own sampling settings."""

import pytest
import torch
from tiny import SHAPE, VOCAB, redraw, tiny_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from grpo.generation import decoding_way, generate

PROMPTS = [[5, 6, 7], list(range(20, 27)), list(range(40, 52))]


def make(config, **settings):
    return redraw(AutoModelForCausalLM.from_config(config(**SHAPE | {"head_dim": 8} | settings)))


def gpt2():
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return redraw(AutoModelForCausalLM.from_config(config))


MODELS = {
    "qwen2": tiny_model,
    "llama": lambda: make(LlamaConfig),
    "qwen3": lambda: make(Qwen3Config),
    "gemma": lambda: make(GemmaConfig),
    "gemma 2, soft caps": lambda: make(Gemma2Config, layer_types=["full_attention"] * 2, attn_logit_softcapping=0.5),
    "mistral, window 4": lambda: make(MistralConfig, sliding_window=4),
    "gpt2": gpt2,
}
ALL = pytest.mark.parametrize("name", MODELS)


def run(model, prompts, seeds=None, **settings):
    defaults = dict(group_size=2, max_new_tokens=10, temperature=1.0, eos_ids=[2])
    return generate(model, prompts, seeds or list(range(len(prompts))), **defaults | settings)


def same(one, other):
    return all(torch.equal(a.ids, b.ids) for a, b in zip(one, other, strict=True))


@ALL
@pytest.mark.parametrize("places", [0, 1, 2])
def test_greedy_is_that_of_transformers_alone_or_in_a_batch_with_places_that_are_refilled(name, places):
    model = MODELS[name]()
    together = run(model, PROMPTS, temperature=0, group_size=1, places=places)
    for prompt, (completion,) in zip(PROMPTS, together, strict=True):
        alone = run(model, [prompt], temperature=0, group_size=1)[0][0]
        greedy = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=2, pad_token_id=0)
        expected = model.generate(torch.tensor([prompt]), generation_config=greedy)[0, len(prompt) :]
        assert completion.ids.tolist() == alone.ids.tolist() == expected.tolist()


@ALL
@pytest.mark.parametrize("places", [0, 4])
def test_sampling_logprobs_are_those_of_a_plain_forward(name, places, temperature=0.7):
    model = MODELS[name]()
    groups = run(model, PROMPTS * 2, group_size=4, temperature=temperature, places=places, eos_ids=[2, 3, 50])
    assert len({len(completion.ids) for group in groups for completion in group}) > 1
    for prompt, group in zip(PROMPTS * 2, groups, strict=True):
        for completion in group:
            ids = torch.tensor([prompt + completion.ids.tolist()])
            logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
            expected = torch.log_softmax(logits, -1).gather(-1, completion.ids.long()[:, None])[:, 0]
            torch.testing.assert_close(completion.logprobs, expected, rtol=0, atol=1e-4)


def test_the_models_own_generation_config_takes_no_part():
    model = tiny_model()
    plain = [completion for group in run(model, PROMPTS, group_size=8) for completion in group]
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1, eos_token_id=2
    )
    assert same(plain, [completion for group in run(model, PROMPTS, group_size=8) for completion in group])


def test_a_seed_draws_the_same_whatever_else_is_in_the_batch():
    model = tiny_model()
    together = run(model, PROMPTS, seeds=[11, 22, 33], group_size=4)
    ends = dict(eos_ids=list(range(0, VOCAB, 8)), group_size=4)
    refilled = run(model, PROMPTS, seeds=[11, 22, 33], places=4, **ends)
    for prompt, seed, group, other in zip(PROMPTS, [11, 22, 33], together, refilled, strict=True):
        assert same(group, run(model, [prompt], seeds=[seed], group_size=4)[0])
        assert same(other, run(model, [prompt], seeds=[seed], **ends)[0])
    assert not same(together[0], run(model, [PROMPTS[0]], seeds=[12], group_size=4)[0])


def test_completions_end_at_any_of_the_end_tokens_and_keep_it():
    model = tiny_model()
    eos = list(range(0, VOCAB, 4))
    groups = run(model, PROMPTS, group_size=16, eos_ids=eos, max_new_tokens=6)
    completions = [completion for group in groups for completion in group]
    for completion in completions:
        inner, last = completion.ids[:-1].tolist(), int(completion.ids[-1])
        assert not set(inner) & set(eos)
        assert completion.truncated == (last not in eos)
        assert len(completion.ids) == len(completion.logprobs) <= 6
        assert not completion.truncated or len(completion.ids) == 6
    assert any(completion.truncated for completion in completions)
    assert len({len(completion.ids) for completion in completions}) > 2


def chi_square(counts, probabilities):
    """The statistic and the number of cells, small cells put together."""
    expected = probabilities * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    return float(((counts - expected) ** 2 / expected.clamp(min=1e-9))[keep].sum()), int(keep.sum())


@pytest.mark.parametrize("refilled", [False, True])
def test_first_and_second_tokens_have_the_exact_distribution(refilled):
    """10^5 draws; the chance that a right sampler fails is about 1e-5 (statistic over 4.5 standard deviations)."""
    model = tiny_model()
    prompt, temperature, draws = PROMPTS[0], 0.8, 100_000
    # a longer prompt is beside this one, rows retire at the end token, and some places have been used before
    prompts, group_size = ([prompt, PROMPTS[2]] * 20, draws // 20) if refilled else ([prompt, PROMPTS[2]], draws)
    groups = run(
        model,
        prompts,
        seeds=list(range(len(prompts))),
        group_size=group_size,
        max_new_tokens=2,
        temperature=temperature,
        places=2 * group_size if refilled else 0,
    )
    groups = [[completion for group in groups[::2] for completion in group]]
    first = torch.tensor([int(completion.ids[0]) for completion in groups[0]])
    with torch.no_grad():
        exact = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / temperature, -1)
    statistic, cells = chi_square(torch.bincount(first, minlength=VOCAB).double(), exact.double())
    assert statistic < cells + 4.5 * (2 * cells) ** 0.5
    common = int(first.mode().values)
    second = torch.tensor([int(c.ids[1]) for c in groups[0] if int(c.ids[0]) == common and len(c.ids) > 1])
    with torch.no_grad():
        exact = torch.softmax(model(torch.tensor([[*prompt, common]])).logits[0, -1] / temperature, -1)
    statistic, cells = chi_square(torch.bincount(second, minlength=VOCAB).double(), exact.double())
    assert len(second) > 1000 and statistic < cells + 4.5 * (2 * cells) ** 0.5


def test_models_that_the_fast_path_does_not_fit_say_so(capsys):
    engines = {name: decoding_way(make()).engine for name, make in MODELS.items()}
    assert [name for name in MODELS if engines[name] == "repeated"] == ["gemma 2, soft caps", "mistral, window 4"]
    assert {engines[name] for name in MODELS} == {"shared", "repeated"}
