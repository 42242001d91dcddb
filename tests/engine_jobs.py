"""One rank of a learner that trains on stored groups, job after job, without a sampler.

    deepspeed --num_gpus 2 tests/engine_jobs.py JOBS.json

A job is {"flags": flags of training_worker.py, "groups": folder of packed groups, "loss": name in utils.py}, and
{"spoiled": {"step": n, "rank": r}} where the loss is NaN once. It leaves the adapters and losses.json in its
--save_path. test_invariance.py cuts the same groups in many ways and compares, test_soundness.py spoils.
"""

import functools
import json
import sys
from pathlib import Path

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import training_worker
import utils
from grpo.learner import Learner
from grpo.rollout import unpack


def main() -> None:
    """Run all jobs."""
    # DeepSpeed refuses fp16 on CPUs without fp16 instructions; torch computes it all the same, only slowly
    get_accelerator().is_fp16_supported = lambda: True
    jobs = json.loads(Path(sys.argv[-1]).read_text())
    for job in jobs:
        run(job)
    dist.destroy_process_group()


def run(job: dict) -> None:
    """Train --max_steps steps, each on the same groups."""
    args = training_worker.parse_args(job["flags"])
    training_worker.LOSS = getattr(utils, job["loss"])
    learner = Learner(args, needs_reference=training_worker.beta(args) > 0, loss=job["loss"])
    learner._max_new_tokens = job["max_new_tokens"]
    groups = [unpack(path.read_bytes()) for path in sorted(Path(job["groups"]).glob("*.group"))]
    losses = []
    for step in range(args.max_steps):
        training_worker.LOSS = getattr(utils, job["loss"])
        if job.get("spoiled") == {"step": step, "rank": learner.ranks.rank}:
            training_worker.LOSS = spoiled(training_worker.LOSS)
        means = training_worker.update(learner, groups, args).over_ranks(learner.ranks)
        outcome = learner.watch.finish(step + 1, learner.ranks)
        if outcome.sentence and learner.ranks.rank == 0:
            print(outcome.sentence, flush=True)
        losses.append(means | {"dtype": learner.dtype})
        learner.steps_done += 1
        learner.publish()
    if learner.ranks.rank == 0:
        Path(args.save_path, "losses.json").write_text(json.dumps(losses))
        learner.channel.close()
    learner.engine.destroy()


def spoiled(loss):
    """The loss, NaN with a gradient that is finite."""

    @functools.wraps(loss)
    def call(*arguments, **settings):
        value, metrics = loss(*arguments, **settings)
        return value + float("nan"), metrics

    return call


if __name__ == "__main__":
    main()
