"""Forward and backward of one optimizer step by the learner's function and by a plain padded pass.

    .venv/bin/python -m demo.smollm2                          # once: SmolLM2-135M-Instruct, see the README
    .venv/bin/python benchmarks/learner.py --dataset gsm8k    # or a folder or file with GSM8K

8 prompts x 8 completions with a LoRA adapter on all linear layers: real questions, each with the written solutions of
other questions as completions, cut at 256 tokens. The plain pass is what one writes first, and what trainers do:
prompt and completion in one row, padded to the longest of the micro-batch, logits of the completion part, log_softmax.
Both give the same gradient, which is checked. Each way runs in a process of its own, in turns; the last line is JSON.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.workload import load_adapted, load_prompts, make_parser
from data import load_examples
from grpo.batch import collate
from grpo.logprobs import completion_logprobs, ways_that_fit
from grpo.models import load_tokenizer


def main() -> None:
    """Measure both in turn, or, with --way, one of them here."""
    args = parse_args()
    if args.way:
        return print(json.dumps(measure(args)))
    results: dict[str, list[dict]] = {"padded": [], "ours": []}
    for _ in range(args.turns):
        for way, found in results.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            found.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1]))
            print(f"{way}: {found[-1]['seconds']:.2f} s, {found[-1]['peak_bytes'] / 1e6:.0f} MB", flush=True)
    seconds = {way: statistics.median(one["seconds"] for one in found) for way, found in results.items()}
    peak = {way: statistics.median(one["peak_bytes"] for one in found) for way, found in results.items()}
    held = {way: found[0]["held_bytes"] for way, found in results.items()}
    norms = {way: found[0]["gradient_norm"] for way, found in results.items()}
    result = {"ratio_vs_padded": seconds["padded"] / seconds["ours"], "memory_ratio": peak["ours"] / peak["padded"]}
    result |= {"activations_ratio": (peak["ours"] - held["ours"]) / (peak["padded"] - held["padded"])}
    result |= {"seconds": seconds, "peak_bytes": peak, "before_bytes": held, "gradient_norm": norms}
    result |= {"micro_batch": args.micro_batch, "dtype": args.dtype, "tokens": results["ours"][0]["tokens"]}
    print(json.dumps(result))


def measure(args) -> dict:
    """Seconds of the second of two steps, peak memory, and the gradient's norm."""
    model = load_adapted(args, args.dtype).train()
    if args.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parts = micro_batches(args)
    way = {"padded": padded, "ours": ours}[args.way]
    ways_that_fit(model)
    held = memory(args.device)
    for _ in range(2):
        model.zero_grad()
        started = time.monotonic()
        for prompt, completions in parts:
            logprobs, mask, advantages = way(model, prompt, completions, args.device)
            (-(logprobs - logprobs.detach()).exp() * advantages * mask).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]).norm().item()
        seconds = time.monotonic() - started
    tokens = sum(len(completion) for _, completions in parts for completion in completions)
    return {"seconds": seconds, "peak_bytes": memory(args.device), "held_bytes": held, "gradient_norm": gradient} | {
        "tokens": tokens
    }


def memory(device: str) -> int:
    """The most that this process has held so far, in bytes."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ours(model, prompt, completions, device):
    """The learner's function."""
    batch = collate([prompt], completions).to(device)
    return completion_logprobs(model, batch, 1.0)[0], batch.completion_mask, advantages_of(completions, device)


def padded(model, prompt, completions, device):
    """One padded row for each completion."""
    width = max(len(completion) for completion in completions)
    rows = [torch.cat([prompt, one, one.new_zeros(width - len(one))]) for one in completions]
    mask = torch.tensor([[1] * (len(prompt) + len(one)) + [0] * (width - len(one)) for one in completions])
    ids, mask = torch.stack(rows).to(device), mask.to(device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=width + 1).logits[:, :-1]
    logp = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, len(prompt) :, None])[..., 0]
    return logp, mask[:, len(prompt) :], advantages_of(completions, device)


def advantages_of(completions, device) -> torch.Tensor:
    """(B, 1), some above and some below 0."""
    return torch.linspace(-1, 1, len(completions), device=device)[:, None]


def micro_batches(args) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """(prompt, completions) of each micro-batch: a group, or equal parts of it."""
    tokenizer, examples = load_tokenizer(args.model_path), load_examples(args.dataset)
    result = []
    for i, prompt in enumerate(load_prompts(args, tokenizer)):
        texts = [examples.rows[args.prompts + i * args.group_size + j]["answer"] for j in range(args.group_size)]
        group = [torch.tensor(tokenizer(text).input_ids[: args.max_new_tokens]) for text in texts]
        for start in range(0, len(group), args.micro_batch):
            result.append((torch.tensor(prompt), group[start : start + args.micro_batch]))
    return result


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--micro_batch", type=int, default=8, help="completions in a forward pass")
    add("--gradient_checkpointing", action="store_true", help="recompute activations, both ways")
    add("--turns", type=int, default=3, help="measurements of each")
    add("--way", choices=("padded", "ours"), help="measure this one only, once, in this process")
    return parser.parse_args()


if __name__ == "__main__":
    main()
