"""What the learner says in the terminal: a row a step, and below it, where there is a terminal, one live line.

run.sh copies all output to a file, so a program cannot see for itself that a terminal is at the other end: run.sh says
so in GRPO_TERMINAL, which holds the width.
"""

import math
import os
import shutil
import sys
import time
from collections import deque
from dataclasses import dataclass

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

WIDTH = 80  # of a row, where no terminal says otherwise
RECENT = 20  # steps from which the remaining time is estimated
HEADER_STEPS = 20  # rows between two headers


@dataclass
class Column:
    """A metric in the row of a step."""

    label: str
    name: str  # in metrics.jsonl
    form: str = ""  # a format specification; none: as many digits as fit
    least: int = 6  # characters
    rank: int = 0  # the columns of the highest rank go first where there is no room

    @property
    def width(self) -> int:
        """Characters, with the space before them."""
        return max(self.least, len(self.label)) + 1

    def cell(self, value: float | None) -> str:
        """The value, as wide as the column."""
        if value is None or not math.isfinite(value):
            return "-".rjust(self.width)
        text = format(value, self.form) if self.form else ""
        return (text if 0 < len(text) < self.width else short(value, self.width - 1)).rjust(self.width)


FIRST = [Column("reward", "reward", ".3f")]  # then its parts, by name
LAST = [
    Column("length", "completions/mean_length", ".1f", rank=1),
    Column("clipped", "completions/clipped_ratio", ".0%", rank=3),
    Column("equal", "frac_reward_zero_std", ".0%", 4, rank=4),
    Column("kl", "kl", rank=2),
    Column("grad", "grad_norm", rank=6),
    Column("s/step", "step_time", ".2f", rank=1),
    Column("left", "left", least=7, rank=7),
    Column("tokens/s", "tokens_per_second", ",.0f", rank=8),
]
PARTS_RANK, PART_LETTERS = 5, 10


class LiveLine:
    """One line below all others that is redrawn, where somebody looks; all that is printed meanwhile goes above it."""

    def __init__(self, total: int | None, initial: int, form: str):
        width = os.environ.get("GRPO_TERMINAL", "")
        self.live = sys.stdout.isatty() or width.isdigit()
        self._before = sys.stdout, sys.stderr
        self.width = int(width) if width.isdigit() else shutil.get_terminal_size().columns
        self._bar = tqdm(
            total=total,
            initial=initial,
            disable=not self.live,
            file=sys.stdout,
            leave=False,
            ncols=self.width,
            bar_format=form,
        )
        if self.live:
            sys.stdout = sys.stderr = DummyTqdmFile(sys.stdout)

    def show(self, text: str, done: int = 0) -> None:
        """Redraw it, `done` steps further."""
        if done:
            self._bar.update(done)
        self._bar.set_description_str(text)

    def close(self) -> None:
        """Remove it."""
        sys.stdout, sys.stderr = self._before
        self._bar.close()


class Terminal:
    """Progress of a run of `max_steps` steps (0: without end), `steps_done` of which are done."""

    def __init__(self, max_steps: int, steps_done: int):
        self._max_steps = max_steps
        self._times: deque[float] = deque([time.monotonic()], maxlen=RECENT + 1)
        form = "{n_fmt}/{total_fmt} |{bar}| {desc}" if max_steps else "step {n_fmt} {desc}"
        self._line = LiveLine(max_steps or None, steps_done, form)
        self._columns: list[Column] = []
        self._rows = 0  # since the last header

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """The row of a step, and the live line."""
        self._times.append(time.monotonic())
        left = self._left(step) if self._max_steps else ""
        start = f"step {step}/{self._max_steps}" if self._max_steps else f"step {step}"
        start = start.ljust(2 * len(str(self._max_steps)) + 6 if self._max_steps else 10)
        columns = fitting(metrics, len(start), self._line.width - 1 if self._line.live else WIDTH)
        if columns != self._columns or self._rows == HEADER_STEPS:
            self._columns, self._rows = columns, 0
            print(" " * len(start) + "".join(column.label.rjust(column.width) for column in columns))
        self._rows += 1
        cells = [left.rjust(c.width) if c.name == "left" else c.cell(metrics.get(c.name)) for c in columns]
        print(start + "".join(cells), flush=True)
        reward, speed = metrics.get("reward", math.nan), metrics.get("tokens_per_second", math.nan)
        self._line.show(f"reward {reward:.3g}  {speed:,.0f} tokens/s" + (f"  left {left}" if left else ""), done=1)

    def waiting(self, here: int, wanted: int, doing: str = "") -> None:
        """The live line while the groups of a step come in; `doing` says what the samplers do."""
        self._line.show(f"{here} of {wanted} groups{f'; {doing}' if doing else ' are here'}")

    def close(self) -> None:
        """Remove the live line."""
        self._line.close()

    def _left(self, step: int) -> str:
        seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1) * (self._max_steps - step)
        return remaining(seconds)


def fitting(metrics: dict[str, float], start: int, width: int) -> list[Column]:
    """The columns for which there is something to show and room beside `start` characters, the parts of the reward
    under their own names.
    """
    names = sorted(name for name in metrics if name.startswith("rewards/"))
    labels = [name.removeprefix("rewards/").removesuffix("/mean")[:PART_LETTERS] for name in names]
    parts = [Column(label, name, ".3f", 5, PARTS_RANK) for label, name in zip(labels, names, strict=True)]
    columns = [c for c in (*FIRST, *parts, *LAST) if c.name in metrics or c.name == "left"]
    kept, room = set(), width - start
    for column in sorted(columns, key=lambda column: column.rank):
        if column.width <= room:
            kept.add(column.name)
            room -= column.width
    return [column for column in columns if column.name in kept]


def short(value: float, width: int) -> str:
    """A number in as many digits as fit."""
    small = 0 < abs(value) < 1e-3
    for digits in (4, 3, 2, 1):
        text = (f"{value:.{digits - 1}e}" if small else f"{value:.{digits}g}").replace("e-0", "e-").replace("e+0", "e")
        if len(text) <= width:
            break
    return text


def remaining(seconds: float) -> str:
    """hours:minutes:seconds, with days in front where there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour}:{minute:02}:{second:02}"
