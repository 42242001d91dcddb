"""The demonstration: the real split loop on a tiny model, from nothing, without GPU or download.

    ./run.sh demo [--seed 0] [--output_path runs/demo]

It makes word problems and a tiny model, trains the model on sloppy demonstrations until it answers about half right,
then runs one sampling worker and a two-rank DeepSpeed ZeRO-2 learner as two programs that talk over ZeroMQ, and
measures held-out accuracy before and after. GRPO re-weights what the model already does some of the time, right
format and right last step; it teaches no new arithmetic.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from data import encode_prompt, load_examples
from demo.problems import SYSTEM_PROMPT
from grpo.evaluation import Question, evaluate, summarize
from grpo.metrics import draw_curve, plot_curves, read_metrics
from grpo.models import eos_token_ids, load_model, load_tokenizer, quiet_libraries
from grpo.policy import Policy
from utils import check_answer, check_answer_lenient, check_format

ROOT = Path(__file__).resolve().parents[1]
GROUP_SIZE, PROMPTS, NEW_TOKENS, RANKS = 8, 16, 40, 2
LIMIT_SECONDS = 900  # for the two workers; they take about a minute and a half on two cores


def main() -> None:
    """Make, warm up, measure, train, measure again."""
    args = parse_args()
    quiet_libraries()
    started = time.monotonic()
    folder = Path(args.output_path).resolve()
    if folder.exists():
        shutil.rmtree(folder)
    problems, model = folder / "problems", folder / "model"
    say("making word problems, a tiny model and its sloppy demonstrations")
    make_model(folder, problems, model, args.seed)
    before = held_out_accuracy(model, problems, None)
    say(f"held-out accuracy before GRPO: {before:.2f} (sampled)")
    run = folder / "run"
    say(f"GRPO: 1 sampler, {RANKS} learner ranks, {PROMPTS} prompts x {GROUP_SIZE} completions a step")
    train(model, problems, run, folder, args)
    after = held_out_accuracy(model, problems, run / "latest")
    records = read_metrics(run / "metrics.jsonl")
    rewards = [record["reward"] for record in records]
    summary = {
        "reward_first": mean(rewards[:5]),
        "reward_last": mean(rewards[-5:]),
        "accuracy_before": before,
        "accuracy_after": after,
        "steps": len(rewards),
        "seed": args.seed,
        "seconds": round(time.monotonic() - started, 1),
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot_curves(records, run / "curve.png")
    print(draw_curve(rewards, "mean reward a step (at most 2.25)"))
    say(f"mean reward {summary['reward_first']:.2f} -> {summary['reward_last']:.2f} (first and last five steps)")
    say(f"held-out accuracy {before:.2f} -> {after:.2f} (sampled)")
    say(f"curve in {run / 'curve.png'}, numbers in {run / 'summary.json'}; {summary['seconds']:.0f} s in all")


def make_model(folder: Path, problems: Path, model: Path, seed: int) -> None:
    """Data, model, warm start: each is a program of its own that also serves real models."""
    run_module("demo.problems", "--output_path", problems, "--seed", seed)
    run_module("demo.tiny_model", "--output_path", folder / "untrained", "--seed", seed)
    run_module(
        "demo.warm_start",
        *("--model_path", folder / "untrained", "--data", problems / "train.jsonl", "--output_path", model),
        *("--demonstrations", "sloppy", "--system_prompt", SYSTEM_PROMPT, "--seed", seed),
        *("--steps", 300, "--batch_size", 64, "--learning_rate", 3e-3),
    )


def run_module(module: str, *arguments) -> None:
    """Run a module of this project; its failure ends the demo with its own message."""
    command = [sys.executable, "-u", "-m", module, *map(str, arguments)]
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(f"demo: {module} failed, see above")


def held_out_accuracy(model_path: Path, problems: Path, adapter: Path | None) -> float:
    """Share of right answers among 4 samples for each of the held-out problems."""
    tokenizer, model = load_tokenizer(str(model_path)), load_model(str(model_path))
    policy = Policy(model, eos_token_ids(model, tokenizer), "cpu", dtype="float32", temperature=1.0)
    if adapter:
        policy.load_folder(adapter)
    examples = load_examples(str(problems / "test.jsonl"))
    questions = [
        Question(i, encode_prompt(tokenizer, examples[i].question, SYSTEM_PROMPT), "", examples[i].answer)
        for i in range(len(examples))
    ]

    def judge(response: str, answer: str) -> dict[str, bool]:
        return {
            "strict": check_answer(response, answer),
            "lenient": check_answer_lenient(response, answer),
            "format": check_format(response),
        }

    def decode(ids: torch.Tensor) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    started, records = time.monotonic(), []
    settings = dict(samples=4, max_new_tokens=NEW_TOKENS, batch_size=256)
    for batch in evaluate(policy, decode, questions, judge, **settings):
        records += batch
    return summarize(records, started)["accuracy"]


def train(model: Path, problems: Path, run: Path, folder: Path, args: argparse.Namespace) -> None:
    """Start both workers as a user does, and wait for them."""
    common = ["--model_path", model, "--port", args.port]
    learner = [
        *(Path(sys.executable).with_name("deepspeed"), "--num_gpus", RANKS, "--master_port", args.port + 1),
        *("training_worker.py", *common, "--save_path", run, "--ds_config", "demo/ds_config.json"),
        *("--group_size", GROUP_SIZE, "--max_steps", args.steps, "--lora_rank", 8, "--lora_alpha", 16),
        *("--save_steps", 20, "--seed", args.seed, "--startup_timeout", 120, "--timeout", 120),
    ]
    sampler = [
        *(sys.executable, "-u", "sampling_worker.py", *common, "--lora_path", run, "--device", "cpu"),
        *("--dataset", problems / "train.jsonl", "--system_prompt", SYSTEM_PROMPT, "--startup_timeout", 120),
        *("--batch_size", GROUP_SIZE * PROMPTS // 2, "--max_new_tokens", NEW_TOKENS, "--timeout", 120),
    ]
    environment = worker_environment()
    with open(folder / "sampler.log", "w") as log:
        workers = {
            "learner": subprocess.Popen(list(map(str, learner)), cwd=ROOT, env=environment),
            "sampler": subprocess.Popen(
                list(map(str, sampler)), cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            ),
        }
    try:
        wait(workers, folder)
    finally:
        for process in workers.values():
            if process.poll() is None:
                process.terminate()


def wait(workers: dict[str, subprocess.Popen], folder: Path) -> None:
    """Until both have ended well; one that fails ends the demo."""
    deadline = time.monotonic() + LIMIT_SECONDS
    where = f"the sampler's log is {folder / 'sampler.log'}"
    while any(process.poll() is None for process in workers.values()):
        for name, process in workers.items():
            if process.poll():
                sys.exit(f"demo: the {name} ended with code {process.poll()}; {where}")
        if time.monotonic() > deadline:
            sys.exit(f"demo: not done after {LIMIT_SECONDS} s; {where}")
        time.sleep(0.2)
    if any(process.returncode for process in workers.values()):
        sys.exit(f"demo: a worker failed; {where}")


def worker_environment() -> dict[str, str]:
    """No GPU, and one thread a process: four busy processes share the cores."""
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def mean(values: list[float]) -> float:
    """Arithmetic mean, rounded for the summary."""
    return round(sum(values) / len(values), 4)


def say(text: str) -> None:
    """A line that stands out from the workers' output."""
    print(f"demo: {text}", flush=True)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_path", default="runs/demo", help="run folder, made anew (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of data, model and run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps (default: %(default)s)")
    parser.add_argument("--port", type=int, default=5555, help="this port and the next are used (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
