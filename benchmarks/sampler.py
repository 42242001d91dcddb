"""Useful tokens per second of our decode loop and of `model.generate`: same model, adapter, prompts and machine.

    .venv/bin/python -m demo.smollm2                          # once: SmolLM2-135M-Instruct, see the README
    .venv/bin/python benchmarks/sampler.py --dataset gsm8k    # or a folder or file with GSM8K

8 prompts x 8 completions of at most 256 tokens, with a LoRA adapter on all linear layers. They take turns, and the
ratio is that of the medians. A token is useful up to its completion's end token. With --vllm_python, the Python of an
environment that has vLLM (see the README), vLLM's API is measured on the same adapter too, in a process of its own
whose loading does not count. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.workload import load_adapted, load_prompts, make_parser
from grpo.generation import generate
from grpo.models import eos_token_ids, load_tokenizer


def main() -> None:
    """Measure both in turn."""
    args = parse_args()
    tokenizer = load_tokenizer(args.model_path)
    prompts = load_prompts(args, tokenizer)
    if args.adapter:
        return measure_vllm(args, prompts)
    model = load_adapted(args, args.dtype)
    eos_ids = eos_token_ids(model, tokenizer)
    ways = {"generate": by_transformers, "ours": by_ours}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.turns):
        for name, way in ways.items():
            started = time.monotonic()
            tokens = way(model, prompts, eos_ids, args, seed=turn)
            note(speeds[name], name, tokens, time.monotonic() - started)
    if args.vllm_python:
        speeds["vllm"] = by_vllm(model, args)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    result: dict = {"tokens_per_second": medians}
    result |= {f"ratio_vs_{name}": medians["ours"] / medians[name] for name in speeds if name != "ours"}
    result |= {"dtype": args.dtype, "threads": torch.get_num_threads(), "completions": args.prompts * args.group_size}
    print(json.dumps(result | {"max_new_tokens": args.max_new_tokens}))


def note(speeds: list[float], name: str, tokens: int, seconds: float) -> None:
    """One measurement."""
    speeds.append(tokens / seconds)
    print(f"{name}: {tokens} useful tokens, {speeds[-1]:.1f} a second", flush=True)


def by_vllm(model, args) -> list[float]:
    """This script under --vllm_python, on the adapter of `model`; useful tokens per second of each turn."""
    limits = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        command = [args.vllm_python, __file__, *sys.argv[1:], "--adapter", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | limits, check=True)
    speeds = json.loads(done.stdout.splitlines()[-1])
    print(f"vllm: {', '.join(f'{speed:.1f}' for speed in speeds)} useful tokens a second", flush=True)
    return speeds


def measure_vllm(args, prompts) -> None:
    """vLLM's own API; prints the speeds of all turns as its last line."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from grpo.vllm_engine import UNCHUNKED

    llm = LLM(
        args.model_path,
        dtype=args.dtype,
        max_model_len=max(map(len, prompts)) + args.max_new_tokens,
        max_num_seqs=args.places,
        **UNCHUNKED,
        enable_lora=True,
        max_lora_rank=16,
        max_loras=1,
        generation_config="vllm",
        enforce_eager=args.vllm_eager,
    )
    speeds: list[float] = []
    for turn in range(-1, args.turns):  # the first one warms up
        params = [
            SamplingParams(
                n=args.group_size,
                seed=1000 * turn + i,
                temperature=1.0,
                max_tokens=args.max_new_tokens if turn >= 0 else 4,
                logprobs=0,
                detokenize=False,
            )
            for i in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.monotonic()
        outputs = llm.generate(requests, params, lora_request=LoRARequest("adapter", 1, args.adapter), use_tqdm=False)
        seconds = time.monotonic() - started
        if turn >= 0:
            note(speeds, "vllm", sum(len(one.token_ids) for output in outputs for one in output.outputs), seconds)
    print(json.dumps(speeds))


def by_ours(model, prompts, eos_ids, args, seed: int) -> int:
    """Our loop; returns the number of useful tokens."""
    groups = generate(
        model,
        prompts,
        list(range(1000 * seed, 1000 * seed + len(prompts))),
        group_size=args.group_size,
        max_new_tokens=args.max_new_tokens,
        temperature=1.0,
        eos_ids=eos_ids,
        places=args.places,
    )
    return sum(len(completion.ids) for group in groups for completion in group)


def by_transformers(model, prompts, eos_ids, args, seed: int) -> int:
    """model.generate, sampling from the whole distribution, `places` completions at a time."""
    torch.manual_seed(seed)
    at_a_time, useful = max(1, args.places // args.group_size), 0
    for start in range(0, len(prompts), at_a_time):
        batch = prompts[start : start + at_a_time]
        width = max(len(prompt) for prompt in batch)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=args.device)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in batch], device=args.device)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                num_return_sequences=args.group_size,
                max_new_tokens=args.max_new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                repetition_penalty=1.0,
                eos_token_id=eos_ids,
                pad_token_id=eos_ids[0],
            )[:, width:]
        ends = torch.isin(out, torch.tensor(eos_ids, device=out.device))
        first = torch.where(ends.any(-1), ends.int().argmax(-1) + 1, out.shape[1])
        useful += int(first.sum())
    return useful


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, dtype="bfloat16")
    add = parser.add_argument
    add("--places", type=int, default=64, help="completions decoded at a time")
    add("--turns", type=int, default=3, help="measurements of each")
    add("--vllm_eager", action="store_true", help="vLLM without torch.compile, which needs a C++ compiler")
    add("--vllm_python", help="the Python of an environment with vLLM, to measure that as well")
    add("--adapter", help=argparse.SUPPRESS)  # set where this script runs itself for vLLM
    return parser.parse_args()


if __name__ == "__main__":
    main()
