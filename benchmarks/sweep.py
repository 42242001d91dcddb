"""What one setting does to the same run: reward, drift and time per step for each of its values.

    ./run.sh demo                                                    # leaves runs/demo/model and runs/demo/problems
    .venv/bin/python benchmarks/sweep.py --vary learning_rate --values 1e-6 1e-5 1e-4 1e-3
    .venv/bin/python benchmarks/sweep.py --vary max_staleness --values 0 1 2 4
    .venv/bin/python benchmarks/sweep.py --vary samplers --values 1 2 4
    .venv/bin/python benchmarks/sweep.py --vary ranks --values 1 2

One run of the real split loop, sampler and two-rank learner, for each value, one after another. By default on the
demo's warm model; any other by --model_path, --dataset, --ds_config and further flags of the two programs. The last
line is JSON.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from demo.launch import run_split
from demo.problems import SYSTEM_PROMPT
from grpo.metrics import read_metrics

DEMO = ROOT / "runs" / "demo"
DEMO_LEARNER = "--beta 0 --group_size 8 --lora_rank 8 --lora_alpha 16 --save_steps 1000"
DEMO_SAMPLER = (
    f"--system_prompt {shlex.quote(SYSTEM_PROMPT)} --batch_size 64 --max_new_tokens 40 --old_logprobs sampled"
)
COLUMNS = ["reward_first", "reward_last", "approx_kl", "grad_norm", "staleness", "dropped", "step_time", "idle"]


def main() -> None:
    """Run every value and print a table."""
    args = parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for value in args.values:
            rows.append(measure(value, Path(folder) / f"{args.vary}-{value}", args))
            print(json.dumps(rows[-1]), flush=True)
    print(f"{args.vary:>14} " + " ".join(f"{name:>12}" for name in COLUMNS))
    for row in rows:
        print(f"{row['value']:>14} " + " ".join(f"{row[name]:12.4g}" for name in COLUMNS))
    print(json.dumps({"vary": args.vary, "steps": args.steps, "rows": rows}))


def measure(value: str, folder: Path, args: argparse.Namespace) -> dict:
    """One run with one value."""
    folder.mkdir()
    run, config = folder / "run", json.loads(Path(args.ds_config).read_text())
    if args.accumulation:
        config["gradient_accumulation_steps"] = args.accumulation
    if args.vary == "learning_rate":
        config["optimizer"]["params"]["lr"] = float(value)
    counts = {"ranks": args.ranks, "samplers": 1}
    if args.vary in counts:
        counts[args.vary] = int(value)
    if args.vary == "ranks":  # the same sequences a step
        if config["gradient_accumulation_steps"] * args.ranks % int(value):
            sys.exit(f"{config['gradient_accumulation_steps']} accumulation steps do not share out to {value} ranks")
        config["gradient_accumulation_steps"] = config["gradient_accumulation_steps"] * args.ranks // int(value)
    varied = [] if args.vary in ("learning_rate", *counts) else [f"--{args.vary}", value]
    (folder / "ds_config.json").write_text(json.dumps(config))
    model = ["--model_path", args.model_path]
    learner = [*model, "--save_path", run, "--ds_config", folder / "ds_config.json", "--max_steps", args.steps]
    sampler = [*model, "--lora_path", run, "--dataset", args.dataset]
    run_split(
        [*learner, *shlex.split(args.learner_flags), *varied],
        [*sampler, *shlex.split(args.sampler_flags)],
        **counts,
        port=args.port,
        log=folder / "sampler.log",
        limit=args.limit,
    )
    return {"value": value} | summary(read_metrics(run / "metrics.jsonl"))


def summary(records: list[dict]) -> dict:
    """First and last five steps; time per step without the first, which waits for everything to start."""

    def mean(name: str, part: list[dict]) -> float:
        return sum(record[name] or 0.0 for record in part) / len(part)

    return {
        "reward_first": mean("reward", records[:5]),
        "reward_last": mean("reward", records[-5:]),
        "approx_kl": mean("approx_kl", records[-5:]),
        "grad_norm": mean("grad_norm", records[-5:]),
        "staleness": mean("staleness/mean", records[1:]),
        "dropped": records[-1].get("groups/dropped/stale", 0),
        "step_time": (records[-1]["seconds"] - records[0]["seconds"]) / (len(records) - 1),
        "idle": mean("learner/idle_share", records[1:]),
        "rewards": [round(record["reward"], 4) for record in records],
    }


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--vary", default="learning_rate", help="learning_rate, ranks, samplers, or any flag of training_worker.py")
    add("--values", nargs="+", default=["1e-6", "1e-5", "1e-4", "1e-3"], help="its values, a run each")
    add("--steps", type=int, default=40, help="steps of each run")
    add("--model_path", default=str(DEMO / "model"), help="must write the format at least some of the time")
    add("--dataset", default=str(DEMO / "problems" / "train.jsonl"), help="as for the sampler")
    add("--ds_config", default=str(ROOT / "demo" / "ds_config.json"), help="DeepSpeed configuration")
    add("--accumulation", type=int, default=0, help="gradient_accumulation_steps; 0: the configuration's own")
    add("--learner_flags", default=DEMO_LEARNER, help="further flags of training_worker.py, in one string")
    add("--sampler_flags", default=DEMO_SAMPLER, help="further flags of sampling_worker.py, in one string")
    add("--ranks", type=int, default=2, help="ranks of the learner")
    add("--port", type=int, default=5655, help="this port and the next are used")
    add("--limit", type=float, default=7200, help="seconds for each run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
