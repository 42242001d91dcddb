"""Starting the two workers as users do, and reading what they say."""

import base64
import functools
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
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


class Forked:
    """A process that tests/zygote.py forked, with as much of Popen's interface as a Worker needs."""

    def __init__(self, argv: list[str], log: Path, environment: dict[str, str]):
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_zygote())
        request = {"argv": argv, "env": environment, "log": str(log)}
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._connection.makefile()
        self.pid, self.returncode = int(self._answers.readline()), None

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.returncode = int(self._answers.readline())
        return self.returncode

    def wait(self, timeout: float = LIMIT) -> int:
        """The exit code."""
        if self.returncode is None and not select.select([self._connection], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("forked", timeout)
        return self.poll()

    def terminate(self) -> None:
        """SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)


@functools.lru_cache
def _zygote() -> str:
    """Start tests/zygote.py at the first use; the address of its socket."""
    address = str(Path(tempfile.mkdtemp()) / "zygote")
    process = subprocess.Popen([sys.executable, "-u", ROOT / "tests" / "zygote.py", address], env=ENVIRONMENT, cwd=ROOT)
    while not Path(address).exists():
        assert process.poll() is None, "tests/zygote.py has ended"
        time.sleep(0.05)
    time.sleep(0.2)  # from bind to listen
    return address


class Worker:
    """A worker process whose output goes to a file.

    Scripts that are started as `python -u script flags` are forked from a process that has their imports already.
    """

    copier: threading.Thread | None = None  # takes what is printed at a terminal into the file

    def __init__(self, command: list, log: Path, output: int | None = None, cwd: Path = ROOT, **environment: str):
        self.log = log
        parts = [str(part) for part in command]
        if parts[:2] == [sys.executable, "-u"] and parts[2].endswith(".py"):
            log.touch()
            self.process = Forked([str(ROOT / parts[2]), *parts[3:]], log, environment)
            return
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                parts,
                stdout=file if output is None else output,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT | environment,
                cwd=cwd,
                start_new_session=True,  # a process group of its own, as a terminal gives it
            )

    def wait(self, limit: float) -> int:
        """The exit code; past `limit` seconds the process is ended and the test fails with its output."""
        try:
            code = self.process.wait(limit)
            if self.copier:
                self.copier.join(10)
            return code
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
        return self.log.read_bytes().decode(errors="replace")  # with carriage returns as they are

    def end(self) -> None:
        """Make sure that nothing of it is left."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait()


def by_run_sh(log: Path, *arguments: str, before: tuple = (), **environment: str) -> Worker:
    """`./run.sh ...` at a terminal, in the log's folder and the tests' environment, by the command `before`, if any."""
    terminal, other_end = pty.openpty()
    command = [*before, ROOT / "run.sh", *arguments]
    worker = Worker(command, log, other_end, log.parent, VENV=sys.prefix, **environment)
    os.close(other_end)
    worker.copier = threading.Thread(target=_copy, args=(terminal, log), daemon=True)
    worker.copier.start()
    return worker


def _copy(terminal: int, log: Path) -> None:
    with open(log, "ab") as file:
        while True:
            try:
                file.write(os.read(terminal, 1 << 16))
            except OSError:  # nobody writes any more
                return os.close(terminal)
            file.flush()


def learner(log: Path, *flags, ranks: int = 1, **environment: str) -> Worker:
    """training_worker.py: alone under python with one rank, under DeepSpeed's launcher with more."""
    return _launch(log, [ROOT / "training_worker.py", *flags], ranks, environment)


def engine_jobs(log: Path, jobs: Path, ranks: int) -> Worker:
    """tests/engine_jobs.py on a file of jobs."""
    return _launch(log, [ROOT / "tests" / "engine_jobs.py", jobs], ranks, {})


def _launch(log: Path, script: list, ranks: int, environment: dict[str, str]) -> Worker:
    if ranks == 1:
        return Worker([sys.executable, "-u", *script], log, **environment)
    # what the command `deepspeed` starts in its turn: run.sh and the demo test the command, this saves its imports
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    launcher = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
    return Worker([*launcher, "--master_addr=127.0.0.1", f"--master_port={free_port()}", *script], log, **environment)


def sampler(log: Path, *flags, script: str = "tests/sampler_with_reward.py", **environment: str) -> Worker:
    """The sampling worker on the CPU, by default with a reward that a random model can earn."""
    return Worker([sys.executable, "-u", ROOT / script, "--device", "cpu", *flags], log, **environment)
