"""kill -9 at any moment, then the same command again: nothing lost, nothing doubled, the same adapter to the bit."""

import os
import random
import re
import signal
import sys
import time

import psutil
import pytest
import torch
from processes import LIMIT, ROOT, Worker, learner
from test_workers import Run, material, workers  # noqa: F401  (fixtures)

from grpo.adapters import AdapterStore
from grpo.journal import read_history
from grpo.metrics import read_metrics

KILLS = """group half written:3, group unacknowledged:2, event half written:2, step noted:1, step trained:2,
publishing:1, reference written:3, renamed:1, published:2, pruning:1, checkpoint half written:1,
checkpoint not complete:1, checkpoint complete:1, before the record:2, after the record:2,
last renamed:1""".replace("\n", " ")

VICTIMS = ["sampler"] * 13 + ["rank 0"] * 2 + ["rank 1"] * 2 + ["launcher"] * 3


def check(run, undisturbed, steps):
    """What must hold of a run that was disturbed, whatever happened to it."""
    history = read_history(run.path)
    trained = [ticket for step in sorted(history.steps) for ticket in history.steps[step]]
    assert sorted(history.steps) == list(range(1, steps + 1))
    assert sorted([*trained, *history.dropped]) == list(range(len(trained) + len(history.dropped)))
    assert [record["step"] for record in read_metrics(run.path / "metrics.jsonl")] == list(range(1, steps + 1))
    store = AdapterStore(run.path)
    assert (run.path / "latest").resolve() == store.folder(steps)
    leftovers = [path for path in run.path.rglob("*") if path.name.startswith(".tmp")]
    assert not leftovers and not list((run.path / "journal").iterdir())
    for kind in ("adapters", "references"):
        ours, theirs = AdapterStore(run.path, kind), AdapterStore(undisturbed.path, kind)
        assert ours.versions() == theirs.versions()
        for version in theirs.versions()[-1:]:
            ours, theirs = ours.read(version)[2], theirs.read(version)[2]
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs), f"not the undisturbed run's {kind}"


@pytest.mark.slow
def test_a_learner_killed_at_every_dangerous_point_goes_on_to_the_same_bit(tmp_path, material, workers):  # noqa: F811
    steps = 16
    flags = ["--save_steps", 4, "--sampler_timeout", 30, "--ref_sync_steps", 3]
    undisturbed = Run(tmp_path, material, "undisturbed", steps=steps, learner_flags=flags)
    disturbed = Run(tmp_path, material, "disturbed", steps=steps, learner_flags=flags)
    log = tmp_path / "disturbed-trainer.log"
    script = [sys.executable, "-u", ROOT / "tests" / "learner_with_kills.py", *disturbed.learner_flags]
    trainer = workers(lambda: Worker(script, log, KILLS=KILLS))
    actor = disturbed.start_sampler(workers)
    undisturbed.to_the_end(workers)
    assert trainer.wait(LIMIT) == 0, trainer.output()[-4000:]
    assert actor.wait(LIMIT) == 0, actor.output()[-4000:]
    codes = re.findall(r"--- (.*): (-?\d+)", trainer.output())
    assert [(name, code) for name, code in codes if code != "-9"] == [("None", "0")] and len(codes) == 17
    check(disturbed, undisturbed, steps)


def command_of(process: psutil.Process) -> list[str]:
    """Its command line, empty for one that has ended but is not yet reaped."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


class Chaos:
    """A run with two samplers whose processes are killed at random and started again by the same command."""

    def __init__(self, run, workers, seed):  # noqa: F811
        self.run, self.workers, self.rng = run, workers, random.Random(seed)
        self.victims = self.rng.sample(VICTIMS, len(VICTIMS))
        self.starts = 0
        self.trainer = self.start_trainer()
        self.actors = [self.start_actor(), self.start_actor()]

    def start_trainer(self):
        self.starts += 1
        log = self.run.folder / f"trainer{self.starts}.log"
        return self.workers(learner, log, *map(str, self.run.learner_flags), ranks=2)

    def start_actor(self):
        self.starts += 1
        return self.run.start_sampler(self.workers, "--timeout", 120, name=f"sampler{self.starts}")

    def kill_next(self) -> bool:
        """SIGKILL the next process of the shuffled list; False if it had ended by itself at that moment."""
        kind = self.victims[-1]
        try:
            if kind == "sampler":
                self.rng.choice(self.actors).signal(signal.SIGKILL)
            else:
                os.kill(self.process_of(kind), signal.SIGKILL)
        except (psutil.NoSuchProcess, ProcessLookupError):
            return False
        self.victims.pop()
        return True

    def process_of(self, kind: str) -> int:
        """The pid of a rank, or of the launcher; of the launcher too while it has not started that rank."""
        launcher = psutil.Process(self.trainer.process.pid)
        ranks = launcher.children(recursive=True)
        named = [process.pid for process in ranks if f"--local_rank={kind[-1]}" in command_of(process)]
        return named[0] if named else launcher.pid

    def revive(self) -> None:
        """Start again what has ended."""
        if self.trainer.process.poll() not in (None, 0):
            self.trainer = self.start_trainer()
        for i, actor in enumerate(self.actors):
            if actor.process.poll() not in (None, 0):
                self.actors[i] = self.start_actor()

    def steps(self) -> int:
        history = read_history(self.run.path) if (self.run.path / "tickets.jsonl").exists() else None
        return len(history.steps) if history else 0


@pytest.mark.slow
def test_random_kills_of_everything_lose_nothing_and_change_nothing(tmp_path, material, workers):  # noqa: F811
    steps, kills, seed = 44, len(VICTIMS), int(os.environ.get("CHAOS_SEED", "0"))
    flags = ["--save_steps", 5, "--sampler_timeout", 6]
    undisturbed = Run(tmp_path, material, "undisturbed", ranks=2, steps=steps, learner_flags=flags)
    undisturbed.to_the_end(workers)
    chaos = Chaos(Run(tmp_path, material, "disturbed", steps=steps, learner_flags=flags), workers, seed)
    killed, deadline = 0, time.monotonic() + 3 * LIMIT
    while killed < kills and chaos.trainer.process.poll() != 0:
        assert time.monotonic() < deadline, f"{killed} killed\n{chaos.trainer.output()[-3000:]}"
        if chaos.steps() >= (killed + 1) * (steps - 4) // kills or chaos.rng.random() < 0.02:
            time.sleep(chaos.rng.uniform(0, 1))
            killed += chaos.kill_next()
        time.sleep(0.1)
        chaos.revive()
    while chaos.trainer.process.poll() != 0:
        assert time.monotonic() < deadline, f"{killed} killed\n{chaos.trainer.output()[-3000:]}"
        time.sleep(0.1)
        chaos.revive()
    print(killed, "kills,", chaos.starts, "starts")
    assert killed == kills
    check(chaos.run, undisturbed, steps)
