"""Starting samplers and a learner of several ranks on this machine's CPU, as a user does in two terminals."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_split(
    learner_flags: list, sampler_flags: list, *, ranks: int, port: int, log: Path, limit: float, samplers: int = 1
) -> None:
    """Run both programs to their end; what the samplers print goes to the file `log`.

    Ports `port` (ZeroMQ) and `port + 1` (DeepSpeed) are used. SystemExit with the name of the program that failed, or
    when they are not done after `limit` seconds; nothing of them is left running.
    """
    launcher = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", ranks, "--master_port", port + 1]
    learner = [*launcher, "training_worker.py", "--port", port, *learner_flags]
    sampler = [sys.executable, "-u", "sampling_worker.py", "--device", "cpu", "--port", port, *sampler_flags]
    with open(log, "w") as file:
        workers = {
            f"sampler {i + 1}": _start(sampler, stdout=file, stderr=subprocess.STDOUT) for i in range(samplers)
        } | {"learner": _start(learner)}
    try:
        _wait(workers, log, limit)
    finally:
        for process in workers.values():
            if process.poll() is None:
                process.terminate()


def _start(command: list, **settings) -> subprocess.Popen:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # several busy processes share the cores
        "HF_HUB_OFFLINE": "1",
        "PATH": path,
    }
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, env=os.environ | environment, **settings)


def _wait(workers: dict[str, subprocess.Popen], log: Path, limit: float) -> None:
    deadline = time.monotonic() + limit
    while any(process.poll() is None for process in workers.values()):
        for name, process in workers.items():
            if process.poll():
                sys.exit(f"the {name} ended with code {process.poll()}; the sampler's log is {log}")
        if time.monotonic() > deadline:
            sys.exit(f"not done after {limit:.0f} s; the sampler's log is {log}")
        time.sleep(0.2)
    failed = [name for name, process in workers.items() if process.returncode]
    if failed:
        sys.exit(f"the {' and the '.join(failed)} failed; the sampler's log is {log}")
