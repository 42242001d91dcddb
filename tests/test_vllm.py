"""`--engine vllm`, where vLLM is installed: in .venv-vllm, or under the Python that VLLM_PYTHON names."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from demo.smollm2 import default_output_path
from grpo.vllm_engine import _start

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(default_output_path()).expanduser()
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))


def test_without_vllm_it_is_a_sentence():
    with pytest.raises(ValueError, match="--engine vllm: vLLM is not installed here"):
        _start(8, model="m")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}")
@pytest.mark.skipif(not FOLDER.exists(), reason="no SmolLM2: python -m demo.smollm2")
def test_vllm_samples_with_the_newest_version_and_its_log_probs_are_ours(tmp_path):
    command = [PYTHON, "tests/vllm_check.py", FOLDER, tmp_path / "run"]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.strip().split("\n")[-1])
    assert found["greedy"] == found["ours"] and found["greedy"][0] != found["greedy"][1]
    assert max(found["gap"]) < 1e-2 and max(found["canary"]) < 1e-2 and found["repeatable"]
    assert found["adapters"] == [2]  # version 1 alone
