"""The demonstration: the real split loop on a tiny model, from nothing, without GPU or download.

    ./run.sh demo [--seed 0] [--output_path runs/demo]

It makes word problems and a tiny model, trains the model on sloppy demonstrations until it answers about half right,
then runs one sampling worker and a two-rank DeepSpeed ZeRO-2 learner as two programs that talk over ZeroMQ, and
measures held-out accuracy before and after. GRPO re-weights what the model already does some of the time, right
format and right last step; it teaches no new arithmetic.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import demo.problems
import demo.tiny_model
import demo.warm_start
import sampling_worker
from data import load_examples, response_decoder
from demo.launch import run_split
from demo.problems import SYSTEM_PROMPT
from grpo.evaluation import evaluate, summarize
from grpo.memory import Places
from grpo.metrics import draw_curve, read_metrics
from grpo.models import eos_token_ids, load_model, load_tokenizer, quiet_libraries
from grpo.policy import Policy
from sampling_worker import held_out_questions, judge

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
    problems, model, run = folder / "problems", folder / "model", folder / "run"
    say("making word problems, a tiny model and its sloppy demonstrations")
    make_model(folder, problems, model, args.seed)
    before = held_out_accuracy(model, problems, None)
    say(f"held-out accuracy before GRPO: {before:.2f} (sampled)")
    say(f"GRPO: 1 sampler, {RANKS} learner ranks, {PROMPTS} prompts x {GROUP_SIZE} completions a step")
    learner, sampler = worker_flags(model, problems, run, args)
    run_split(learner, sampler, ranks=RANKS, port=args.port, log=folder / "sampler.log", limit=LIMIT_SECONDS)
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
    print(draw_curve(rewards, "mean reward a step (at most 2.25)"))
    say(f"mean reward {summary['reward_first']:.2f} -> {summary['reward_last']:.2f} (first and last five steps)")
    say(f"held-out accuracy {before:.2f} -> {after:.2f} (sampled)")
    say(f"numbers in {run / 'summary.json'}; {summary['seconds']:.0f} s in all")
    say(f"everything about the run: {run / 'report.html'} (a picture: {run / 'curves.png'})")


def make_model(folder: Path, problems: Path, model: Path, seed: int) -> None:
    """Data, model, warm start: each is also a program of its own, and the warm start serves real models too."""
    common = ["--seed", str(seed), "--output_path"]
    demo.problems.main([*common, str(problems)])
    demo.tiny_model.main([*common, str(folder / "untrained")])
    demo.warm_start.main(
        [
            *(*common, str(model), "--model_path", str(folder / "untrained"), "--data", str(problems / "train.jsonl")),
            *("--demonstrations", "sloppy", "--system_prompt", SYSTEM_PROMPT),
            *("--steps", "300", "--batch_size", "64", "--learning_rate", "5e-3"),
        ]
    )


def worker_flags(model: Path, problems: Path, run: Path, args: argparse.Namespace) -> tuple[list, list]:
    """The learner's and the sampler's command lines."""
    learner = [
        *("--model_path", model, "--save_path", run, "--ds_config", "demo/ds_config.json"),
        *("--group_size", GROUP_SIZE, "--max_steps", args.steps, "--max_staleness", args.max_staleness),
        *("--lora_rank", 8, "--lora_alpha", 16, "--save_steps", 20, "--seed", args.seed),
        *("--beta", 0, "--startup_timeout", 120, "--timeout", 120),  # no KL term, so no reference pass
    ]
    sampler = [
        *("--model_path", model, "--lora_path", run, "--dataset", problems / "train.jsonl"),
        *("--system_prompt", SYSTEM_PROMPT, "--batch_size", GROUP_SIZE * PROMPTS // 2),
        *("--max_new_tokens", NEW_TOKENS, "--startup_timeout", 120, "--timeout", 120),
        *("--old_logprobs", "sampled"),  # exact in float32, and a pass less
    ]
    return learner, sampler


def held_out_accuracy(model_path: Path, problems: Path, adapter: Path | None) -> float:
    """Share of right answers among 4 samples for each of the held-out problems."""
    args = sampling_worker.parse_args(["--system_prompt", SYSTEM_PROMPT, "--device", "cpu"])
    examples = load_examples(problems / "test.jsonl")
    tokenizer, model = load_tokenizer(str(model_path)), load_model(str(model_path))
    questions, _ = held_out_questions(tokenizer, examples, range(len(examples)), args)
    eos_ids = eos_token_ids(model, tokenizer)
    policy = Policy(model, eos_ids, "cpu", dtype="float32", temperature=1.0)
    if adapter:
        policy.load_folder(adapter)
    decode = response_decoder(tokenizer, eos_ids)
    settings = dict(samples=4, max_new_tokens=NEW_TOKENS, places=Places(256, each=4))
    started = time.monotonic()
    batches = evaluate(policy, decode, questions, judge, **settings)
    return summarize([record for batch in batches for record in batch], started)["accuracy"]


def mean(values: list[float]) -> float:
    """Arithmetic mean, rounded for the summary."""
    return round(sum(values) / len(values), 4)


def say(text: str) -> None:
    """A line that stands out from the workers' output."""
    print(f"demo: {text}", flush=True)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output_path", default="runs/demo", help="run folder, made anew")
    parser.add_argument("--seed", type=int, default=0, help="of data, model and run")
    parser.add_argument("--steps", type=int, default=75, help="GRPO steps")
    parser.add_argument("--max_staleness", type=int, default=1, help="as for the learner")
    parser.add_argument("--port", type=int, default=5555, help="this port and the next are used")
    return parser.parse_args()


if __name__ == "__main__":
    main()
