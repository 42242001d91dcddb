"""`--engine vllm`, where vLLM is installed: in .venv-vllm, or under the Python that VLLM_PYTHON names."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from processes import LIMIT, Worker, learner
from tiny import SHARED, ds_config, free_port

from demo.smollm2 import default_output_path
from grpo.metrics import read_metrics
from grpo.vllm_engine import _start

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(default_output_path()).expanduser()
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))


def test_without_vllm_it_is_a_sentence():
    with pytest.raises(ValueError, match="--engine vllm: vLLM is not installed here"):
        _start(8, model="m")


needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}: ./run.sh vllm")


@pytest.mark.slow
@needs_vllm
@pytest.mark.skipif(not FOLDER.exists(), reason="no SmolLM2: python -m demo.smollm2")
def test_vllm_samples_with_the_newest_version_and_its_log_probs_are_ours(tmp_path):
    command = [PYTHON, "tests/vllm_check.py", FOLDER, tmp_path / "run"]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.strip().split("\n")[-1])
    assert found["greedy"] == found["ours"] and found["greedy"][0] != found["greedy"][1]
    assert max(found["gap"]) < 1e-2 and max(found["canary"]) < 1e-2 and found["repeatable"]
    assert found["adapters"] == [2]  # version 1 alone


@pytest.mark.slow
@needs_vllm
@pytest.mark.skipif(not FOLDER.exists(), reason="no SmolLM2: python -m demo.smollm2")
def test_the_whole_loop_with_vllm_is_on_policy_and_reports_the_mismatch(tmp_path):
    questions = SHARED / "gsm8k" / "train.jsonl"
    if not questions.exists():
        pytest.skip(f"the GSM8K data is not at {questions}")
    port, run = free_port(), tmp_path / "run"
    common = ["--model_path", FOLDER, "--port", port]
    config = ds_config(tmp_path / "ds.json", micro=4, accumulation=2, lr=1e-3)
    flags = [*common, "--save_path", run, "--ds_config", config, "--max_steps", 3, "--max_staleness", 0, "--tis_cap", 2]
    trainer = learner(tmp_path / "trainer.log", *map(str, flags))
    flags = [*common, "--lora_path", run, "--dataset", questions, "--max_new_tokens", 24, "--device", "cpu"]
    flags += ["--engine", "vllm", "--max_prompt_length", 400]
    limits = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "REWARD": "even"}
    command = [PYTHON, "-u", ROOT / "tests" / "sampler_with_reward.py", *flags]
    actor = Worker(command, tmp_path / "sampler.log", **limits)
    try:
        for worker in (trainer, actor):
            assert worker.wait(2 * LIMIT) == 0, worker.output()[-4000:]
    finally:
        trainer.end(), actor.end()
    records = read_metrics(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3] and "adapter version 2" in actor.output()
    for record in records:
        assert 0 < record["sampling/sampling_logp_difference/max"] < 1e-2 and abs(record["approx_kl"]) < 1e-6
        assert record["staleness/max"] == 0
