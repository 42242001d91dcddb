"""Reference policies other than the base model: mixing, renewing, and what both sides make of it."""

import copy
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from test_adapters import CONFIG, learner_model, policy
from test_workers import Run, material, workers  # noqa: F401  (fixtures)
from tiny import VOCAB, tiny_model

import training_worker
from grpo.adapters import AdapterError, AdapterStore
from grpo.batch import collate
from grpo.engine import with_saved_adapter
from grpo.logprobs import completion_logprobs
from grpo.metrics import read_metrics
from grpo.models import add_lora
from grpo.policy import canary_batch
from grpo.reference import RANKS, References, load_init_adapter, mix, shorten

BATCH = collate([torch.tensor([5, 6, 7])], [torch.tensor([8, 9]), torch.tensor([10, 2])])


def updates(state, config) -> dict[str, torch.Tensor]:
    """What an adapter adds to each weight."""
    scaling = config.lora_alpha / config.r
    return {
        name: scaling * state[name.replace("lora_A", "lora_B")] @ state[name] for name in state if "lora_A" in name
    }


def of(seed: int, config=CONFIG):
    return get_peft_model_state_dict(learner_model(seed, config)), config


def test_a_mixture_by_hand():
    policy = {"x.lora_A.weight": torch.tensor([[1.0, 0.0]]), "x.lora_B.weight": torch.tensor([[2.0], [0.0]])}
    reference = {"x.lora_A.weight": torch.tensor([[0.0, 1.0]]), "x.lora_B.weight": torch.tensor([[0.0], [4.0]])}
    config = LoraConfig(r=1, lora_alpha=3)
    state, mixed = mix(policy, config, reference, config, alpha=0.25)
    # 3 (0.25 [2 0; 0 0] + 0.75 [0 0; 0 4]) = [1.5 0; 0 9]
    torch.testing.assert_close(updates(state, mixed)["x.lora_A.weight"], torch.tensor([[1.5, 0.0], [0.0, 9.0]]))
    assert (mixed.r, mixed.lora_alpha, config.r) == (2, 6, 1)


@pytest.mark.parametrize("alpha", [0.6, 1.0])
@pytest.mark.parametrize("first", ["base", "adapter"])
def test_mixtures_of_mixtures_are_exact_up_to_four_ranks(alpha, first):
    states = [of(seed) for seed in range(3)]
    config = copy.deepcopy(CONFIG)
    config.r, config.lora_alpha = 8, 40  # another rank and scaling than the policy's
    reference, reference_config = of(9, config) if first == "adapter" else ({}, CONFIG)
    exact = updates(reference, reference_config)
    for i, (state, state_config) in enumerate(states):
        reference, reference_config = mix(state, state_config, reference, reference_config, alpha)
        own = updates(state, state_config)
        exact = {name: alpha * own[name] + (1 - alpha) * exact.get(name, 0.0) for name in own}
        rank = 4 if alpha == 1 else min(16, 4 * (i + 1) + 8 * (first == "adapter"))
        assert reference_config.r == rank
        found = updates(reference, reference_config)
        if alpha == 1 or 4 * (i + 1) + 8 * (first == "adapter") <= RANKS * 4:
            for name in exact:
                torch.testing.assert_close(found[name], exact[name], rtol=1e-4, atol=1e-5)


def test_what_is_shortened_is_the_nearest_matrix_of_that_rank():
    torch.manual_seed(0)
    down, up = torch.randn(10, 12, dtype=torch.float64), torch.randn(14, 10, dtype=torch.float64)
    values = torch.linalg.svdvals(up @ down)
    short_down, short_up = shorten(down, up, 6)
    assert short_down.shape == (6, 12) and short_up.shape == (14, 6)
    error = torch.linalg.norm(up @ down - short_up @ short_down)
    assert float(error) == pytest.approx(float(values[6:].square().sum().sqrt()))
    wide_down, wide_up = torch.randn(10, 3, dtype=torch.float64), torch.randn(14, 10, dtype=torch.float64)
    padded_down, padded_up = shorten(wide_down, wide_up, 6)  # a matrix of rank 3
    assert padded_down.shape == (6, 3) and padded_up.shape == (14, 6)
    torch.testing.assert_close(padded_up @ padded_down, wide_up @ wide_down)


def test_which_reference_goes_with_which_version(tmp_path):
    store = AdapterStore(tmp_path)
    assert [References(store, None, 0, 0.6).of(v) for v in (0, 7)] == [None, None]
    assert [References(store, "adapter", 0, 0.6).of(v) for v in (0, 7)] == [0, 0]
    assert [References(store, None, 3, 0.6).of(v) for v in (0, 2, 3, 7)] == [None, None, 3, 6]
    assert [References(store, "adapter", 3, 0.6).of(v) for v in (0, 2, 3, 7)] == [0, 0, 3, 6]


def test_an_adapter_of_embeddings_cannot_be_mixed(tmp_path):
    config = LoraConfig(r=4, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    state = get_peft_model_state_dict(add_lora(tiny_model(), config))
    References(AdapterStore(tmp_path), None, 0, 0.6).renew(0, state, config, {})
    with pytest.raises(ValueError, match="--ref_sync_steps.*embed"):
        References(AdapterStore(tmp_path), None, 3, 0.6).renew(0, state, config, {})


def test_references_are_written_once_and_removed_with_their_versions(tmp_path):
    references, kept = References(AdapterStore(tmp_path), "adapter", 2, 1.0), AdapterStore(tmp_path, "references")
    for version in range(6):
        state, config = of(version)
        fields = {"run_id": "run", "version": version, "lora": {}, "canary": []}
        references.renew(version, state, config, fields)
        references.renew(version, of(99)[0], config, fields)  # trained again after a crash
        expected = of(version // 2 * 2)[0]
        found = kept.read(references.of(version))[2]
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert kept.versions() == [0, 2, 4] and not (tmp_path / "latest").exists()
    references.prune([3, 5])
    assert kept.versions() == [0, 2, 4]  # 0 is where the run started from
    references.prune([5])
    assert kept.versions() == [0, 4]


@torch.no_grad()
def test_the_samplers_reference_is_the_one_that_the_version_names(tmp_path):
    store, sampler = AdapterStore(tmp_path), policy()
    references = AdapterStore(tmp_path, "references")
    mixed, config = mix(*of(7), *of(8), alpha=0.5)
    fields = {"run_id": "run", "lora": {}, "canary": []}
    references.publish(of(7)[0], CONFIG, fields | {"version": 0})
    references.publish(mixed, config, fields | {"version": 2})
    other = add_lora(tiny_model(), config)
    other.load_state_dict({name.replace("weight", "default.weight"): t for name, t in mixed.items()}, strict=False)
    base = tiny_model()
    seventh = learner_model(7)
    sequence = ((0, None, base), (1, 0, seventh), (2, 2, other), (3, 2, other), (4, None, base), (5, 0, seventh))
    for version, reference, expected in sequence:
        model = learner_model(version)
        canary = completion_logprobs(model, canary_batch(VOCAB), 1.0)[0].flatten().tolist()
        own = fields | {"version": version, "canary": canary, "reference": reference}
        store.publish(get_peft_model_state_dict(model), CONFIG, own)
        sampler.load_newest(store, "run", at_least=version, limit=5)
        for found, wanted in (
            (sampler.reference_logprobs(BATCH), expected),
            (sampler.logprobs(BATCH), model),
            (sampler.base_logprobs(BATCH), base),
        ):
            right = completion_logprobs(wanted, BATCH, 1.0)[0].flatten()
            torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


def test_adapters_that_cannot_be_started_from_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--init_adapter .*cannot be read"):
        load_init_adapter(tmp_path)
    config = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    add_lora(tiny_model(), config).save_pretrained(tmp_path / "dora")
    with pytest.raises(ValueError, match="more than plain LoRA.*lora_magnitude_vector"):
        load_init_adapter(tmp_path / "dora")
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="olora", task_type="CAUSAL_LM")
    add_lora(tiny_model(), config).save_pretrained(tmp_path / "olora")
    with pytest.raises(ValueError, match="more than plain LoRA.*init_lora_weights"):
        load_init_adapter(tmp_path / "olora")
    learner_model(1).save_pretrained(tmp_path / "good")
    with pytest.raises(ValueError, match="does not fit the model"):
        with_saved_adapter(tiny_model(hidden_size=48, num_attention_heads=4), tmp_path / "good")


@torch.no_grad()
def test_a_reference_of_another_run_is_refused(tmp_path):
    store, sampler = AdapterStore(tmp_path), policy()
    fields = {"lora": {}, "canary": []}
    AdapterStore(tmp_path, "references").publish(of(7)[0], CONFIG, fields | {"run_id": "other", "version": 0})
    model = learner_model(1)
    canary = completion_logprobs(model, canary_batch(VOCAB), 1.0)[0].flatten().tolist()
    own = {"run_id": "run", "version": 1, "lora": {}, "canary": canary, "reference": 0}
    store.publish(get_peft_model_state_dict(model), CONFIG, own)
    sampler.load_newest(store, "run", at_least=1, limit=0)
    with pytest.raises(AdapterError, match="of run other"):
        sampler.reference_logprobs(BATCH)


def test_wrong_numbers_are_named(capsys):
    for flags, said in (
        (["--ref_mixup_alpha", "1.5"], "--ref_mixup_alpha is 1.5"),
        (["--ref_sync_steps", "3", "--publish_steps", "2"], "--ref_sync_steps 3 is not a multiple"),
        (["--ref_sync_steps", "3", "--beta", "0"], "give --beta above 0"),
        (["--clip_eps", "-1"], "--clip_eps is -1.0"),
        (["--ref_sync_steps", "3", "--replay", "x"], "leave --ref_sync_steps out"),
        (["--tis_cap", "0"], "--tis_cap is 0.0"),
    ):
        with pytest.raises(SystemExit):
            training_worker.parse_args(flags)
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_starts_from_an_adapter_and_renews_its_reference(tmp_path, material, workers):  # noqa: F811
    init = tmp_path / "init"
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    learner_model(3, config).save_pretrained(init)
    given = load_file(init / "adapter_model.safetensors")
    flags = ["--init_adapter", init, "--ref_sync_steps", 2, "--ref_mixup_alpha", 1, "--beta", 0.1]
    run = Run(tmp_path, material, steps=3, learner_flags=flags)
    run.to_the_end(workers)
    shutil.rmtree(init)  # the run has its own copy
    run.learner_flags += ["--max_steps", 4]
    trainer, _ = run.to_the_end(workers)
    assert "resuming run" in trainer.output()
    store, references = AdapterStore(run.path), AdapterStore(run.path, "references")
    first = references.read(0)
    assert first[1].r == 2 and all(torch.equal(first[2][name], given[name]) for name in given)
    assert [store.read(version)[0].reference for version in store.versions()] == [
        version // 2 * 2 for version in store.versions()
    ]
    kl = [record["kl"] for record in read_metrics(run.path / "metrics.jsonl")]
    assert kl[0] < 1e-9 and kl[2] < 1e-9  # steps 1 and 3 start at their reference
    assert kl[1] > 1e-6 and kl[3] > 1e-6


