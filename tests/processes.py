"""Starting the two workers as users do, and reading what they say."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tiny import free_port

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",  # several processes share few cores
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
}


LIMIT = 240  # seconds for a whole run; DeepSpeed alone takes about ten to start


class Worker:
    """A worker process whose output goes to a file."""

    def __init__(self, command: list, log: Path, **environment: str):
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT | environment,
                cwd=ROOT,
                start_new_session=True,  # a process group of its own, as a terminal gives it
            )

    def wait(self, limit: float) -> int:
        """The exit code; past `limit` seconds the process is ended and the test fails with its output."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still running after {limit} s:\n{self.output()[-4000:]}") from None

    def wait_for(self, text: str, limit: float) -> None:
        """Wait until the output has `text`."""
        deadline = time.monotonic() + limit
        while text not in self.output():
            assert time.monotonic() < deadline, f"no {text!r} within {limit} s:\n{self.output()[-4000:]}"
            assert self.process.poll() is None or text in self.output(), f"ended:\n{self.output()[-4000:]}"
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group, as a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, number)

    def output(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        """Make sure that nothing of it is left."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait()


def by_run_sh(log: Path, *arguments: str) -> Worker:
    """`./run.sh ...` in the environment that the tests run in."""
    return Worker([ROOT / "run.sh", *arguments], log, VENV=sys.prefix)


def learner(log: Path, *flags, ranks: int = 1, outer: bool = False, **environment: str) -> Worker:
    """training_worker.py: alone under python with one rank, under DeepSpeed's launcher with more.

    DeepSpeed has two: the command `deepspeed` (`outer`) starts the one that starts the ranks. The inner one alone is
    quicker.
    """
    return _launch(log, [ROOT / "training_worker.py", *flags], ranks, environment, outer)


def engine_jobs(log: Path, jobs: Path, ranks: int) -> Worker:
    """tests/engine_jobs.py on a file of jobs."""
    return _launch(log, [ROOT / "tests" / "engine_jobs.py", jobs], ranks, {})


def _launch(log: Path, script: list, ranks: int, environment: dict[str, str], outer: bool = False) -> Worker:
    if ranks == 1:
        return Worker([sys.executable, "-u", *script], log, **environment)
    port = free_port()
    if outer:
        launcher = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", ranks, "--master_port", port]
    else:
        world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
        launcher = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
        launcher += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    return Worker([*launcher, *script], log, **environment)


def sampler(log: Path, *flags, script: str = "tests/sampler_with_reward.py", **environment: str) -> Worker:
    """The sampling worker on the CPU, by default with a reward that a random model can earn."""
    return Worker([sys.executable, "-u", ROOT / script, "--device", "cpu", *flags], log, **environment)
