"""What the learner's ranks share: rank 0 receives, every rank gets the same bytes, no wait is without a limit.

Rank 0 sends a word at least once a second (WAIT, STEP or STOP), so no rank is parked in a collective while nothing
arrives. Words and blobs travel over a gloo group of their own, whatever backend the gradients use.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import deepspeed
import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

WAIT, STEP, STOP = 0, 1, 2
FOLLOW_SECONDS = 0.5  # how often a rank looks for its launcher


class RankLost(RuntimeError):
    """Another rank is gone or silent; the message holds what the backend says."""


class Ranks:
    """The process group, as seen from one rank."""

    def __init__(self, timeout: float):
        _single_process_defaults()
        self.launched = _follow_launchers()  # by DeepSpeed's launcher, which passes signals on
        if get_accelerator().device_name() == "cpu":
            # Without this DeepSpeed compiles a shared-memory extension at the first start, which takes a minute and
            # a C++ compiler; adapters are small enough for gloo.
            deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(timeout=timedelta(seconds=timeout), verbose=False)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._words = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def share(self, word: int = WAIT, blobs: list[bytes] = ()) -> tuple[int, list[bytes]]:
        """Rank 0's word and blobs, at every rank; the other ranks' arguments are ignored."""
        head = torch.tensor([word, len(blobs)])
        try:
            dist.broadcast(head, 0, group=self._words)
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of {self.size} lost the others: {error}") from error
        word, count = head.tolist()
        if count == 0:
            return word, []
        lengths = torch.tensor([len(blob) for blob in blobs] or [0] * count)
        dist.broadcast(lengths, 0, group=self._words)
        joined = bytearray(b"".join(blobs)) if self.rank == 0 else bytearray(int(lengths.sum()))
        dist.broadcast(torch.frombuffer(joined, dtype=torch.uint8), 0, group=self._words)
        if self.rank == 0:
            return word, list(blobs)
        ends = lengths.cumsum(0).tolist()
        return word, [bytes(joined[end - n : end]) for end, n in zip(ends, lengths.tolist(), strict=True)]

    def add_up(self, values: list[float]) -> list[float]:
        """Elementwise sums over ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        try:
            dist.all_reduce(total, group=self._words)
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of {self.size} lost the others: {error}") from error
        return total.tolist()

    def any(self, mine: bool) -> bool:
        """Whether it is true at any rank."""
        return mine if self.size == 1 else self.add_up([float(mine)])[0] > 0

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


class Signals:
    """Tells of SIGINT and SIGTERM in a thread, at once, even while the main thread is deep in a forward pass."""

    def __init__(self):
        self.heard = threading.Event()
        self._listeners: list[Callable[[int], None]] = []
        self._started = False

    def tell(self, listener: Callable[[int], None]) -> None:
        """Call `listener` with the number of each signal from now on, instead of what the process did on it."""
        self.start()
        self._listeners = [listener]
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)

    def start(self) -> None:
        """Listen; called in the main thread."""
        if not self._started:
            self._started = True
            ear, bell = os.pipe()  # open for as long as this process may get a signal
            os.set_blocking(bell, False)
            signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(ear,), daemon=True).start()

    def _listen(self, ear: int) -> None:
        while True:
            for number in os.read(ear, 64):
                self.heard.set()
                for listener in self._listeners:
                    listener(number)


SIGNALS = Signals()


def say_at_once(sentence: str) -> None:
    """Print beside whatever the main thread prints just now; over the live line, if there is one."""
    live = sys.__stdout__.isatty() or os.environ.get("GRPO_TERMINAL", "").isdigit()
    os.write(1, (f"\x1b[2K\r{sentence}\n" if live else f"{sentence}\n").encode())


def _follow_launchers() -> bool:
    """End when DeepSpeed's launcher is killed: a rank that outlives it would hold port and folder for nobody.

    A signal to the whole group takes the launcher too, yet then this rank has heard it and saves its work first.
    Returns whether there is a launcher.
    """
    launchers = [process for process in psutil.Process().parents() if _is_launcher(process)]
    if not launchers:
        return False
    SIGNALS.start()

    def watch() -> None:
        while all(_lives(process) for process in launchers):
            time.sleep(FOLLOW_SECONDS)
        if not SIGNALS.heard.wait(2 * FOLLOW_SECONDS):
            print("DeepSpeed's launcher is gone, so this rank ends", file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return True


def _is_launcher(process: psutil.Process) -> bool:
    try:
        command, name = process.cmdline(), process.name()
    except psutil.Error:  # another user's process on a machine that hides those, or one that ends just now
        return False
    ours = any(part.endswith("/deepspeed") or part.startswith("deepspeed.launcher") for part in command[1:])
    return ours and name.startswith("python")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _single_process_defaults() -> None:
    """Let `python training_worker.py` run alone: without these variables DeepSpeed looks for MPI."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone)
