"""How the learner's forward and backward pass grows with group size, completion length, LoRA rank and vocabulary.

    .venv/bin/python benchmarks/learner_costs.py

A random Llama of SmolLM2-135M's width and fewer layers, prompts of 130 tokens, completions all of one length. Seconds
per thousand completion tokens, and the peak of memory above the model, by our function and by the plain padded pass of
benchmarks/learner.py; a process for each cell and way. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learner import memory, ours, padded
from grpo.logprobs import ways_that_fit
from grpo.models import add_lora

PROMPT = 130
BASE = {"group": 8, "completion": 128, "rank": 16, "vocabulary": 49152}
VARIED = {"group": [2, 4, 8, 16], "completion": [64, 128, 256, 512], "rank": [4, 16, 64]}
VARIED["vocabulary"] = [8192, 49152, 151936]


def main() -> None:
    """One table, a block for each dimension."""
    args = parse_args()
    if args.cell:
        return print(json.dumps(measure(args.layers, **json.loads(args.cell))))
    rows = []
    for name, values in VARIED.items():
        for value in values:
            row = {"varied": name, "value": value}
            for way in ("padded", "ours"):
                cell = json.dumps(BASE | {name: value, "way": way})
                command = [sys.executable, __file__, "--layers", str(args.layers), "--cell", cell]
                done = subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
                row[way] = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            tokens = (BASE | {name: value})["group"] * (BASE | {name: value})["completion"] / 1000
            plain, own = row["padded"], row["ours"]
            text = "; ".join(f"{one['seconds'] / tokens:6.2f} s, {one['bytes'] / 1e6:6.0f} MB" for one in (plain, own))
            ratios = f"{plain['seconds'] / own['seconds']:.2f}x, {own['bytes'] / plain['bytes']:.2f} of the memory"
            print(f"{name:>10} {value:6d}: padded, ours {text}; {ratios}", flush=True)
    print(json.dumps({"layers": args.layers, "rows": rows}))


def measure(layers: int, group: int, completion: int, rank: int, vocabulary: int, way: str) -> dict:
    """Seconds of the faster of two passes after a first one, and the memory they added."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    model = add_lora(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    ways_that_fit(model)
    prompt = torch.randint(3, vocabulary, (PROMPT,))
    completions = list(torch.randint(3, vocabulary, (group, completion)))
    held, seconds = memory("cpu"), []
    for _ in range(3):
        started = time.monotonic()
        logprobs, mask, advantages = {"padded": padded, "ours": ours}[way](model, prompt, completions, "cpu")
        (logprobs * mask * advantages).sum().backward()
        seconds.append(time.monotonic() - started)
    return {"seconds": min(seconds[1:]), "bytes": memory("cpu") - held}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6, help="of the model; SmolLM2 has 30")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # set where this script runs itself
    return parser.parse_args()


if __name__ == "__main__":
    main()
