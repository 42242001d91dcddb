#!/usr/bin/env bash
# On a CUDA machine, in under eight minutes: the quick tests, the sampler benchmark, and both programs on one or more
# GPUs. Usage: benchmarks/gpu_check.sh [MODEL [DATASET]]; without MODEL a tiny one is made and the benchmark left out.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
WORK=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$WORK"' EXIT
cd "$ROOT"
export PYTHONPATH=$ROOT:$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}

"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"; print(torch.cuda.get_device_name())'
GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')

echo "== quick tests"
timeout 180 "$PYTHON" -m pytest -q -m "not slow" tests/test_generation.py tests/test_logprobs.py tests/test_losses.py

"$PYTHON" - "$WORK" <<'END'
import sys
from pathlib import Path
from tiny import save_questions, save_tiny
save_tiny(Path(sys.argv[1]) / "model")
save_questions(Path(sys.argv[1]) / "questions.jsonl")
END
MODEL=${1:-$WORK/model}
DATASET=${2:-$WORK/questions.jsonl}

if [ $# -gt 0 ]; then
    echo "== decode loop against model.generate"
    timeout 150 "$PYTHON" benchmarks/sampler.py --device cuda:0 --model_path "$MODEL" --dataset "$DATASET"
fi

echo "== both programs, bf16, $GPUS GPUs"
LEARNERS=0
[ "$GPUS" -ge 3 ] && LEARNERS=0,1
SAMPLER=$((GPUS - 1))
FLAGS=(--model_path "$MODEL" --port 5955)
PATH=$(dirname "$PYTHON"):$PATH timeout 150 deepspeed --include "localhost:$LEARNERS" --master_port 5956 \
    training_worker.py "${FLAGS[@]}" --save_path "$WORK/run" --max_steps 3 &
LEARNER=$!
CUDA_VISIBLE_DEVICES=$SAMPLER timeout 150 "$PYTHON" tests/sampler_with_reward.py "${FLAGS[@]}" --lora_path "$WORK/run" \
    --dataset "$DATASET" --max_new_tokens 32
wait "$LEARNER"
"$PYTHON" - "$WORK/run" <<'END'
import json
import sys
from pathlib import Path
records = [json.loads(line) for line in Path(sys.argv[1], "metrics.jsonl").read_text().split("\n") if line]
assert [record["step"] for record in records] == [1, 2, 3] and all(record["grad_norm"] > 0 for record in records)
print("ok: first step's approx_kl", records[0]["approx_kl"], "seconds a step", records[-1]["step_time"])
END
