"""What each learning rate does to a LoRA adapter in the same number of steps: reward at the start and at the end.

    python benchmarks/learning_rate.py --model_path runs/demo/model --dataset runs/demo/problems/train.jsonl \\
        --ds_config demo/ds_config.json --steps 40 --sampler_flags "--system_prompt 'Think, then answer.' ..."

One run of the real split loop for each rate, one after another; the last line is JSON.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo.launch import run_split
from grpo.metrics import read_metrics


def main() -> None:
    """Run every rate and print a table."""
    args = parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for rate in args.rates:
            rows.append(measure(rate, Path(folder) / f"rate-{rate:g}", args))
            print(json.dumps(rows[-1]), flush=True)
    print(f"{'rate':>8} {'first 5':>8} {'last 5':>8} {'kl':>9} {'grad':>8} {'s/step':>7}")
    for row in rows:
        print(
            f"{row['rate']:8.0e} {row['reward_first']:8.3f} {row['reward_last']:8.3f} {row['approx_kl']:9.1e} "
            f"{row['grad_norm']:8.3f} {row['step_time']:7.1f}"
        )
    print(json.dumps({"steps": args.steps, "rows": rows}))


def measure(rate: float, folder: Path, args: argparse.Namespace) -> dict:
    """One run at one rate."""
    folder.mkdir()
    config = json.loads(Path(args.ds_config).read_text())
    config["optimizer"]["params"]["lr"] = rate
    (folder / "ds_config.json").write_text(json.dumps(config))
    run = folder / "run"
    model = ["--model_path", args.model_path]
    learner = [*model, "--save_path", run, "--ds_config", folder / "ds_config.json", "--max_steps", args.steps]
    sampler = [*model, "--lora_path", run, "--dataset", args.dataset]
    run_split(
        learner + shlex.split(args.learner_flags),
        sampler + shlex.split(args.sampler_flags),
        ranks=args.ranks,
        port=args.port,
        log=folder / "sampler.log",
        limit=args.limit,
    )
    records = read_metrics(run / "metrics.jsonl")

    def mean(name: str, part: list[dict]) -> float:
        return sum(record[name] for record in part) / len(part)

    return {
        "rate": rate,
        "reward_first": mean("reward", records[:5]),
        "reward_last": mean("reward", records[-5:]),
        "approx_kl": mean("approx_kl", records[-5:]),
        "grad_norm": mean("grad_norm", records[-5:]),
        "step_time": mean("step_time", records[1:]),
        "rewards": [round(record["reward"], 4) for record in records],
    }


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model_path", required=True, help="model that writes the format at least some of the time")
    add("--dataset", required=True, help="as for the sampler")
    add("--ds_config", default="demo/ds_config.json", help="its learning rate is replaced")
    add("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4, 1e-3], help="learning rates")
    add("--steps", type=int, default=40, help="steps of each run")
    add("--ranks", type=int, default=2, help="ranks of the learner")
    add("--learner_flags", default="", help="further flags of training_worker.py, in one string")
    add("--sampler_flags", default="", help="further flags of sampling_worker.py, in one string")
    add("--port", type=int, default=5655, help="this port and the next are used")
    add("--limit", type=float, default=7200, help="seconds for each run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
