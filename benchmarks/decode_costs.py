"""How the time of one decoding step grows with batch, completion, prompt and group, beside what the machine allows.

    .venv/bin/python benchmarks/decode_costs.py

Each cell is the median of a few real steps of the decode loop, with caches as full as the cell says. The limit is the
larger of arithmetic (weights and attention, over the rate of a large matrix product measured just before) and memory
traffic (weights and caches, over the rate of a large sum). The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections import deque
from pathlib import Path

import torch
from peft import LoraConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from grpo.generation import _SharedPrompts, decoding_way
from grpo.lean import lean
from grpo.models import DTYPES, add_lora, load_model

BASE = {"batch": 64, "completion": 256, "prompt": 200, "group": 8}
VARIED = {"batch": [8, 32, 64, 128], "completion": [128, 256, 512, 1024], "prompt": [50, 200, 500, 1000]}
VARIED["group"] = [1, 4, 8, 16]


@torch.inference_mode()
def main() -> None:
    """One table, a block for each dimension."""
    args = parse_args()
    dtype = DTYPES[args.dtype]
    model = add_lora(load_model(args.model_path).to(args.device, dtype), LoraConfig(r=16, target_modules="all-linear"))
    assert decoding_way(model).engine == "shared", "this model's attention cannot be exchanged"
    operations, traffic = rates(args.device, dtype)
    print(f"{operations / 1e9:.0f} GFLOP/s in matrix products, {traffic / 1e9:.1f} GB/s in sums, {args.dtype}")
    rows = []
    for name in args.vary:
        for value in VARIED[name]:
            cell = BASE | {name: value}
            with lean(model.eval()):
                seconds = measure(model, args.steps, **cell)
            least = limit(model, operations, traffic, **cell)
            rows.append({"varied": name, **cell, "ms": 1000 * seconds, "limit_ms": 1000 * least})
            rows[-1] |= {"tokens_per_second": cell["batch"] / seconds, "of_limit": least / seconds}
            print(
                f"{name:>10} {value:5d}: {1000 * seconds:7.1f} ms a step, limit {1000 * least:7.1f}, "
                f"{cell['batch'] / seconds:7.1f} tokens/s",
                flush=True,
            )
    print(json.dumps({"flops": operations, "bytes_per_second": traffic, "dtype": args.dtype, "rows": rows}))


def measure(model, steps: int, batch: int, completion: int, prompt: int, group: int) -> float:
    """Seconds of a step in which `batch` completions of length `completion` get one token more."""
    device = next(model.parameters()).device
    count = max(1, batch // group)
    prompts = torch.randint(10, 1000, (count, prompt)).tolist()
    engine = _SharedPrompts(model, prompts, group, completion + steps + 1, count)
    engine.start(engine.room([], deque(range(count))), 0)
    engine._cache.lengths += completion
    engine._age.update(dict.fromkeys(range(count), completion))
    live = list(range(count * group))
    rows = torch.tensor(live, device=device)
    tokens, times = torch.full((len(live),), 5, device=device), []
    for _ in range(steps):
        started = time.monotonic()
        engine.step(live, rows, tokens).sum().item()
        times.append(time.monotonic() - started)
    return statistics.median(times[1:])


def limit(model, operations: float, traffic: float, batch: int, completion: int, prompt: int, group: int) -> float:
    """Seconds below which no implementation gets on this machine, by arithmetic or by memory traffic."""
    config = model.config.get_text_config()
    element = next(model.parameters()).element_size()
    weights = sum(p.numel() for p in model.parameters()) - config.vocab_size * config.hidden_size
    head = config.vocab_size * config.hidden_size
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4 * batch * config.num_hidden_layers * config.num_attention_heads * size * (prompt + completion)
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * size
    moved = element * (weights + head + cached * (batch * completion + batch / group * prompt))
    return max((2 * batch * (weights + head) + attention) / operations, moved / traffic)


def rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Operations a second of a matrix product, bytes a second of a sum."""
    a = torch.randn(1536, 1536, device=device).to(dtype)
    b = torch.randn(1 << 26, device=device).to(dtype)
    best, moved = [], b.numel() * b.element_size()
    for work, call in ((2 * 1536**3, lambda: (a @ a).sum().item()), (moved, lambda: b.sum().item())):
        times = []
        for _ in range(5):
            started = time.monotonic()
            call()
            times.append(time.monotonic() - started)
        best.append(work / min(times))
    return best[0], best[1]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model_path", default=str(Path("~/.cache/grpo/SmolLM2-135M-Instruct").expanduser()), help="the model")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16", help="float32 on CPUs without bf16 instructions")
    add("--device", default="cpu", help="cpu or cuda:0")
    add("--vary", nargs="+", choices=list(VARIED), default=list(VARIED), help="the dimensions to go through")
    add("--steps", type=int, default=4, help="steps measured in each cell")
    return parser.parse_args()


if __name__ == "__main__":
    main()
