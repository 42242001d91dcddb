"""The training worker (learner): groups -> advantages -> GRPO loss -> step -> adapter.

    deepspeed --num_gpus 2 training_worker.py --model_path Qwen/Qwen2.5-1.5B-Instruct --save_path ./checkpoints

Rank 0 listens for samplers (sampling_worker.py) and hands each step's groups to all ranks; every rank takes its share
of the sequences. After each step the LoRA adapter is published in --save_path, where the samplers find it. One rank
also runs under plain `python training_worker.py`.

Deviations from the paper (DeepSeekMath, arXiv 2402.03300, algorithm 1):
1. Sampling and training overlap: a group may be --max_staleness steps old; the ratio to its own policy corrects for it.
2. One denominator for the whole optimizer step, whatever its split over ranks and micro-batches.
3. The standard deviation of a group has 1e-4 added, and equal rewards give advantages of exactly 0.
4. The reference policy is the base model, the adapter switched off, and is not renewed; --init_adapter makes it the
   adapter that training starts from, --ref_sync_steps has it follow the policy.

Shapes: B sequences of a micro-batch, G completions of a prompt, C completion tokens.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers warn and may lock up after a fork otherwise

import torch

from grpo.adapters import AdapterError
from grpo.address import is_loopback
from grpo.batch import Batch
from grpo.channel import ChannelError
from grpo.facts import check_numbers
from grpo.flags import Parser
from grpo.held_out import MAX_QUESTIONS
from grpo.learner import Learner
from grpo.logprobs import completion_logprobs
from grpo.loss_contract import accepted, check_loss, own_beta
from grpo.metrics import Means
from grpo.models import ModelNotFound, quiet_libraries
from grpo.ranks import RankLost
from grpo.rollout import Group
from grpo.step_data import StepData
from grpo.streams import make_streams_safe
from grpo.trackers import NAMES
from utils import *  # noqa: F403  (so that LOSS may name any loss there, one of your own included)
from utils import group_advantages, grpo_loss, process_advantages, truncated_importance_weights

LOSS = grpo_loss  # or gspo_loss, dapo_loss, dr_grpo_loss, cispo_loss from utils.py


def main() -> None:
    """Train until --max_steps, or until stopped."""
    make_streams_safe()
    args = parse_args()
    quiet_libraries()
    learner = Learner(args, needs_reference=beta(args) > 0, loss=LOSS.__name__)
    for groups in learner.steps():  # o_1 .. o_G ~ pi_old for each prompt of the batch
        means = update(learner, groups, args)  # pi_theta <- GRPO(pi_theta, groups)
        learner.finish_step(groups, means)  # publish the adapter: pi_old <- pi_theta
    learner.close()


def update(learner: Learner, groups: list[Group], args: argparse.Namespace) -> Means:
    """The optimizer steps on one batch of groups; returns the metrics of this rank."""
    data = learner.prepare(groups, advantages(groups, args), LOSS.denominator)  # A_1 .. A_G
    means = Means()
    means.add(data.metrics)
    for _ in range(args.num_iterations):  # mu
        for batch in learner.micro_batches(data):
            logprobs, entropy = completion_logprobs(learner.engine, batch, args.temperature)  # log pi_theta
            loss, metrics = LOSS(
                logprobs,
                batch.old_logprobs,
                batch.ref_logprobs,
                batch.advantages,
                batch.completion_mask,
                **loss_settings(args, data, batch),
            )
            sound = learner.watch.guarded(loss, logprobs, batch, metrics)
            learner.engine.backward(sound * data.loss_scale)
            learner.take_step()  # at the last micro-batch: pi_theta <- pi_theta - lr * gradient
            means.add(metrics | diagnostics(batch, data, loss, entropy))
    return means


def advantages(groups: list[Group], args: argparse.Namespace) -> list[torch.Tensor]:
    """Each group's advantages: (G,) by outcome, or (G, C) where reward_function gave process rewards."""
    result = []
    for group in groups:
        if group.step_rows is None:
            result.append(group_advantages(group.rewards, group.size, scale=args.scale_rewards))
        else:
            steps = [[] for _ in range(group.size)]
            for row, end, reward in zip(group.step_rows, group.step_ends, group.step_rewards, strict=True):
                steps[row].append((int(end), float(reward)))
            result.append(process_advantages(steps, int(group.lengths.max()), scale=args.scale_rewards))
    return result


def beta(args: argparse.Namespace) -> float:
    """The weight of the KL term: --beta, or the loss's own default; 0 for a loss that has none."""
    return own_beta(LOSS) if args.beta is None else args.beta


def loss_settings(args: argparse.Namespace, data: StepData, batch: Batch) -> dict:
    """The keyword arguments that the loss takes; a clip width that no flag gives is the loss's own default."""
    settings = {"beta": beta(args), "denominator": data.denominator}
    settings |= {name: getattr(args, name) for name in ("clip_eps", "clip_eps_high") if getattr(args, name) is not None}
    if args.tis_cap is not None:
        settings["importance_weights"] = truncated_importance_weights(
            batch.old_logprobs, batch.sampling_logprobs, args.tis_cap
        )
    return accepted(LOSS, settings)


def check_loss_line(args: argparse.Namespace) -> None:
    """ValueError where LOSS breaks the contract of a loss, or a flag is for something that it lacks."""
    flags = {"beta": args.beta, "clip_eps": args.clip_eps, "clip_eps_high": args.clip_eps_high}
    flags["importance_weights"] = args.tis_cap
    check_loss(LOSS, {name: value for name, value in flags.items() if value is not None})


def diagnostics(batch: Batch, data: StepData, loss: torch.Tensor, entropy: torch.Tensor) -> dict:
    """What is logged beside the loss's own metrics, as (sum, count) pairs; the loss's parts add up to the whole."""
    mask = batch.completion_mask
    return {"entropy": (entropy[mask].sum(), mask.sum()), "loss": (loss.detach(), data.share)}


def make_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = Parser(
        description="Training worker: receives rollouts, trains a LoRA adapter with DeepSpeed, publishes it.",
        epilog="Batch sizes, learning rate, precision and ZeRO stage are read from --ds_config.",
        other="sampling_worker",
    )
    add = parser.add_argument
    add("--model_path", default="Qwen/Qwen2.5-1.5B-Instruct", help="hub name or local folder; the samplers' must agree")
    add("--save_path", default="./checkpoints", help="folder of this run: adapters, checkpoints, metrics.jsonl")
    add("--ds_config", default="ds_config.json", help="DeepSpeed configuration")
    add("--port", type=int, default=5555, help="port on which samplers connect")
    add("--host", default="127.0.0.1", help="address to listen at")
    add("--keys", type=Path, help="folder of CURVE keys (./run.sh keys DIR), for any --host beyond this machine")
    add("--resume", choices=("auto", "never"), default="auto", help="auto: resume the run in --save_path, if any")
    add("--keep_journal", action="store_true", help="keep all groups in --save_path, for --replay")
    add("--replay", help="train on the groups that a run kept in this folder (--keep_journal), without samplers")
    add("--save_steps", type=int, default=10, help="steps between checkpoints")
    add("--publish_steps", type=int, default=1, help="steps between published adapters")
    add("--group_size", type=int, default=4, help="completions for each prompt")
    add("--max_steps", type=int, default=0, help="end the run after this many steps; 0: run until stopped")
    add("--max_staleness", type=int, default=1, help="steps a group may lag behind; 0: strictly on-policy")
    add("--num_iterations", type=int, default=1, help="optimizer steps on each batch (mu)")
    add("--temperature", type=float, default=1.0, help="sampling temperature; also divides the logits of all log-probs")
    add("--beta", type=float, help="weight of the KL term, 0 skips the reference pass (default: the loss's own)")
    add("--clip_eps", type=float, help="lower clip width of the ratio (default: the loss's own)")
    add("--clip_eps_high", type=float, help="upper clip width (default: the loss's own)")
    add("--tis_cap", type=float, help="truncated importance sampling: cap on pi_old / pi_sampling (default: off)")
    add("--scale_rewards", type=yes_no, default=True, help="divide advantages by the group's std (no: Dr. GRPO)")
    add("--mask_truncated", action="store_true", help="leave truncated completions out of loss and denominator")
    add("--lora_rank", type=int, default=16, help="rank of the LoRA matrices")
    add("--lora_alpha", type=float, default=32, help="scale of the LoRA update: alpha / rank")
    add("--lora_targets", default="all-linear", help="all-linear, or module names separated by commas")
    add("--init_adapter", help="PEFT adapter to start from, which is the first reference too; replaces --lora_*")
    add("--ref_sync_steps", type=int, default=0, help="steps between renewals of the reference (TR-DPO); 0: none")
    add("--ref_mixup_alpha", type=float, default=0.6, help="the policy's share in a renewed reference; 1: all")
    add("--max_tokens_per_micro_batch", type=int, default=0, help="size of micro-batches in tokens; 0: in rows")
    add("--resample_zero_groups", type=int, default=0, help="groups of equal rewards to replace by others, "
        "at most so many a step on average")  # fmt: skip
    add("--run_zero_groups", action="store_true", help="run groups without advantages even if --beta is 0")
    add("--gradient_checkpointing", action="store_true", help="recompute activations in the backward: less memory")
    add("--log_to", nargs="*", default=[], choices=NAMES, help="also log metrics to these, where installed")
    add("--log_completions", type=int, default=0, help="show samples every so many steps, and keep all; 0: off")
    add("--eval_steps", type=int, default=0, help="steps between evaluations on held-out questions; 0: none")
    add("--eval_limit", type=int, default=200, help="held-out questions of each evaluation")
    add("--seed", type=int, default=0, help="of the adapter's start, the order of prompts and the sampling noise")
    add("--timeout", type=float, default=300, help="seconds without a group (from living samplers) before giving up")
    add("--startup_timeout", type=float, default=1800, help="seconds to wait for the first group")
    add("--sampler_timeout", type=float, default=60, help="seconds of silence before a sampler's tickets go to others")
    add("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be before anything is loaded."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.model_path = os.path.expanduser(args.model_path)
    check_numbers(parser, args, above_zero=("temperature", "tis_cap", "timeout", "startup_timeout", "sampler_timeout"))
    for name in ("group_size", "save_steps", "publish_steps", "num_iterations", "lora_rank", "eval_limit"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, it must be at least 1")
    for name in ("max_steps", "max_staleness", "eval_steps", "max_tokens_per_micro_batch", "resample_zero_groups",
                 "ref_sync_steps", "log_completions"):  # fmt: skip
        if getattr(args, name) < 0:
            parser.error(f"--{name} is {getattr(args, name)}, it must not be negative")
    if not 0 < args.port < 65536:
        parser.error(f"--port is {args.port}, it must be from 1 to 65535")
    check_host(parser, args)
    for name in ("beta", "clip_eps", "clip_eps_high"):
        if (getattr(args, name) or 0) < 0:
            parser.error(f"--{name} is {getattr(args, name)}, it must not be negative")
    try:
        check_loss_line(args)
    except ValueError as error:
        parser.error(str(error))
    if args.ref_sync_steps and not beta(args):
        parser.error(f"--ref_sync_steps {args.ref_sync_steps} renews the reference of the KL term: give --beta above 0")
    if args.publish_steps > args.max_staleness + 1:
        parser.error(
            f"--publish_steps {args.publish_steps} leaves groups older than --max_staleness {args.max_staleness}; "
            f"it can be {args.max_staleness + 1} at most"
        )
    if args.eval_limit > MAX_QUESTIONS:
        parser.error(f"--eval_limit is {args.eval_limit}, it can be {MAX_QUESTIONS} at most")
    if args.replay and args.eval_steps:
        parser.error("--replay has no samplers to answer held-out questions: leave --eval_steps out")
    if args.replay and args.ref_sync_steps:
        parser.error("--replay has the references' log-probs already: leave --ref_sync_steps out")
    for name in ("eval_steps", "ref_sync_steps"):
        if getattr(args, name) % args.publish_steps:
            parser.error(f"--{name} {getattr(args, name)} is not a multiple of --publish_steps {args.publish_steps}")
    if not 0 < args.ref_mixup_alpha <= 1:
        parser.error(f"--ref_mixup_alpha is {args.ref_mixup_alpha}, it must be above 0 and at most 1")
    if not Path(args.ds_config).is_file():
        parser.error(f"--ds_config {args.ds_config} is no file")
    return args


def check_host(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse a host that is none, or that lets others in without keys; of several machines the first alone listens."""
    try:
        if os.environ.get("RANK", "0") == "0" and not is_loopback(args.host) and not args.keys:
            parser.error(
                f"--host {args.host} lets other machines in: make keys with ./run.sh keys DIR, copy the folder to "
                "them, and give both sides --keys DIR"
            )
    except ValueError as error:
        parser.error(str(error))


def yes_no(text: str) -> bool:
    """argparse type of a switch that is on by default."""
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return text == "yes"


if __name__ == "__main__":
    try:
        main()
    except (ChannelError, AdapterError, ModelNotFound, RankLost, ValueError, OSError) as error:
        sys.exit(f"training_worker: {error}" if os.environ.get("RANK", "0") == "0" else 1)
