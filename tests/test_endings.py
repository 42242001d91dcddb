"""How a run ends when it cannot go on or is told to stop, and that the same command resumes it."""

import base64
import json
import signal
import sys
import time

import pytest
from processes import LIMIT, ROOT, Worker
from test_workers import Run, material, workers  # noqa: F401  (fixtures)
from tiny import ds_config, free_port

from grpo.adapters import AdapterStore
from grpo.checkpoints import checkpoint_steps
from grpo.journal import read_history
from grpo.metrics import read_metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, rate, said", [(0, 1e30, "step 1 made an adapter"), (5, 3e3, "3 steps in a row were not taken")]
)
def test_a_rate_that_is_far_too_high_ends_the_run_and_a_sane_one_resumes_it(
    tmp_path, material, workers, before, rate, said  # noqa: F811
):
    run = Run(tmp_path, material, steps=before, staleness=1, lr=1e-3, learner_flags=["--save_steps", 1])
    if before:
        run.to_the_end(workers)
    run.learner_flags += ["--max_steps", 10]
    ds_config(run.config, lr=rate)
    trainer, actor = run.start_learner(workers), run.start_sampler(workers)
    assert trainer.wait(LIMIT) == 1 and actor.wait(LIMIT) == 0, trainer.output()[-3000:]
    assert f"training_worker: {said}" in trainer.output() and "--ds_config" in trainer.output()
    assert f"removed; the run resumes from step {before}" in trainer.output() and "Traceback" not in trainer.output()
    store = AdapterStore(run.path)
    assert store.versions()[-1] == before and (run.path / "latest").resolve() == store.folder(before)
    assert checkpoint_steps(run.path / "checkpoints")[-1:] == ([before] if before else [])
    ds_config(run.config, lr=1e-3)
    trainer, _ = run.to_the_end(workers)
    assert f"learning rate {rate} -> 0.001 from step {before + 1} on" in trainer.output()
    records = read_metrics(run.path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 11))
    assert all(record["skipped_steps"] == 0 and record["kl"] < 0.1 for record in records)
    assert all(tensor.isfinite().all() for tensor in store.read(10)[2].values())
    history = read_history(run.path)
    tickets = [ticket for step in sorted(history.steps) for ticket in history.steps[step]]
    assert sorted([*tickets, *history.dropped]) == list(range(len(tickets) + len(history.dropped)))
    assert not list((run.path / "journal").iterdir())


SLOW = """
import os, sys, time
sys.path.insert(0, {root!r})
import training_worker
loss, calls = training_worker.LOSS, 0
def slow(*arguments, **settings):
    global calls
    calls += 1
    time.sleep(3 * (calls > {quick}))  # the second step takes 48 seconds
    return loss(*arguments, **settings)
slow.__dict__.update(loss.__dict__)
slow.__name__, slow.__signature__ = loss.__name__, __import__("inspect").signature(loss)
training_worker.LOSS = slow
training_worker.main()
"""


@pytest.mark.slow
def test_a_signal_in_a_step_longer_than_the_launchers_patience_saves_what_is_trained(
    tmp_path, material, workers  # noqa: F811
):
    run = Run(tmp_path, material, ranks=2, steps=2, micro=1, accumulation=16)
    script = tmp_path / "slow.py"
    script.write_text(SLOW.format(root=str(ROOT), quick=16))
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    launcher = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
    launcher += ["--master_addr=127.0.0.1", f"--master_port={free_port()}", script, *run.learner_flags]
    trainer, actor = workers(lambda: Worker(launcher, tmp_path / "slow.log")), run.start_sampler(workers)
    trainer.wait_for("step 1/2", LIMIT)
    deadline = time.monotonic() + LIMIT
    while 2 not in read_history(run.path).steps:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)  # the second step is under way
    trainer.signal(signal.SIGINT)
    trainer.wait_for("stopping, saving; again ends at once", 5)
    assert actor.wait(60) == 0
    trainer.wait(60)
    assert "run ended after 1 steps (stopped by SIGINT)" in trainer.output(), trainer.output()[-3000:]
    assert trainer.output().count("stopping, saving") == 1
    assert checkpoint_steps(run.path / "checkpoints") == [1] and sorted(read_history(run.path).steps) == [1, 2]
    run.to_the_end(workers)
    assert [record["step"] for record in read_metrics(run.path / "metrics.jsonl")] == [1, 2]
