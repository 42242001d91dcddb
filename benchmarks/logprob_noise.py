"""How far the decoder's log-probs are from the learner's, against the clip widths: is --old_logprobs sampled right?

    .venv/bin/python benchmarks/logprob_noise.py --dataset gsm8k

The ratio of a policy to itself should be 1. With the decoder's log-probs as old ones it is off by what the two forward
passes round differently. Printed for each dtype: the ratio's spread over tokens (clipped at 0.2 by GRPO) and, as the
mean over a completion, over sequences (clipped at 3e-4 by GSPO). The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.workload import load_adapted, load_prompts, make_parser
from grpo.batch import collate
from grpo.generation import generate
from grpo.logprobs import completion_logprobs
from grpo.models import DTYPES, eos_token_ids, load_tokenizer

GRPO_CLIP, GSPO_CLIP = 0.2, 3e-4


def main() -> None:
    """A line for each dtype."""
    args = parse_args()
    tokenizer = load_tokenizer(args.model_path)
    prompts = load_prompts(args, tokenizer)
    rows = []
    for dtype in args.dtypes:
        model = load_adapted(args, dtype)
        rows.append({"dtype": dtype} | noise(model, prompts, eos_token_ids(model, tokenizer), args))
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"model": args.model_path, "rows": rows}))


@torch.inference_mode()
def noise(model, prompts, eos_ids, args) -> dict:
    """Of log-probs under the same weights, decoded and scored."""
    groups = generate(
        model,
        prompts,
        list(range(len(prompts))),
        group_size=args.group_size,
        max_new_tokens=args.max_new_tokens,
        temperature=1.0,
        eos_ids=eos_ids,
    )
    completions = [completion for group in groups for completion in group]
    batch = collate([torch.tensor(p) for p in prompts], [one.ids for one in completions]).to(torch.device(args.device))
    scored = completion_logprobs(model, batch, 1.0)[0].cpu()
    gaps = [scored[i, : len(one.ids)] - one.logprobs for i, one in enumerate(completions)]
    tokens, sequences = torch.cat(gaps), torch.stack([gap.mean() for gap in gaps])
    ratio, mean_ratio = tokens.exp() - 1, sequences.exp() - 1
    return {
        "tokens": len(tokens),
        "logprob_gap_mean": float(tokens.abs().mean()),
        "logprob_gap_max": float(tokens.abs().max()),
        "ratio_std": float(ratio.std()),
        "tokens_beyond_grpo_clip": float((ratio.abs() > GRPO_CLIP).float().mean()),
        "sequence_ratio_std": float(mean_ratio.std()),
        "sequences_beyond_gspo_clip": float((mean_ratio.abs() > GSPO_CLIP).float().mean()),
    }


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, prompts=4, group_size=4, max_new_tokens=64)
    add = parser.add_argument
    add("--dtypes", nargs="+", choices=sorted(DTYPES), default=["float32", "bfloat16"], help="a line for each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
