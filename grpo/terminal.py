"""What the learner says in the terminal: a line a step, and below it, where there is a terminal, one live line.

run.sh copies all output to a file, so the learner cannot see for itself that a terminal is at the other end: run.sh
says so in GRPO_TERMINAL, which holds the width.
"""

import os
import shutil
import sys
import time
from collections import deque

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

SHOWN = {
    "reward": "reward",
    "kl": "kl",
    "loss": "loss",
    "grad_norm": "grad",
    "step_time": "s/step",
    "tokens_per_second": "tokens/s",
}
RECENT = 20  # steps from which the remaining time is estimated


class Terminal:
    """Progress of a run of `max_steps` steps (0: without end), `steps_done` of which are done.

    Where there is a live line, all that is printed meanwhile goes above it.
    """

    def __init__(self, max_steps: int, steps_done: int):
        width = os.environ.get("GRPO_TERMINAL", "")
        self._max_steps = max_steps
        self._times: deque[float] = deque([time.monotonic()], maxlen=RECENT + 1)
        self._before = sys.stdout, sys.stderr
        live = sys.stdout.isatty() or width.isdigit()
        self._bar = tqdm(
            total=max_steps or None,
            initial=steps_done,
            disable=not live,
            file=sys.stdout,
            leave=False,
            ncols=int(width) if width.isdigit() else shutil.get_terminal_size().columns,
            bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}" if max_steps else "step {n_fmt} {desc}",
        )
        if live:
            sys.stdout = sys.stderr = DummyTqdmFile(sys.stdout)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """The line of a step, and the live line."""
        self._times.append(time.monotonic())
        values = "  ".join(f"{label} {metrics[name]:.4g}" for name, label in SHOWN.items() if name in metrics)
        total = left = ""
        if self._max_steps:
            total, left = f"/{self._max_steps}", f"  left {self._left(step)}"
        print(f"step {step}{total}  {values}{left}", flush=True)
        self._bar.update(1)
        speed = f"{metrics['tokens_per_second']:,.0f} tokens/s"
        self._bar.set_description_str(f"reward {metrics['reward']:.3g}  {speed}{left}")

    def waiting(self, here: int, wanted: int) -> None:
        """The live line while the groups of a step come in."""
        self._bar.set_description_str(f"{here} of {wanted} groups are here")

    def close(self) -> None:
        """Remove the live line."""
        sys.stdout, sys.stderr = self._before
        self._bar.close()

    def _left(self, step: int) -> str:
        seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1) * (self._max_steps - step)
        return remaining(seconds)


def remaining(seconds: float) -> str:
    """hours:minutes:seconds, with days in front where there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour}:{minute:02}:{second:02}"
