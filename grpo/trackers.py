"""The run's metrics in the tools that people watch runs with: TensorBoard, Weights & Biases, Trackio.

None of them is a requirement; metrics.jsonl has everything. Each works in a thread of its own, so one that waits for a
network, or for ever, holds nothing up (grpo/guard.py). In TensorBoard the steps that are trained again after a crash
replace those that were logged before; the others keep what they have.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path

from grpo.guard import Apart, Guard

REMEDIES = {
    "tensorboard": "metrics.jsonl has all steps",
    "wandb": "log in with .venv/bin/wandb login, or set WANDB_MODE=offline; metrics.jsonl has all steps",
    "trackio": "metrics.jsonl has all steps",
}
NAMES = tuple(REMEDIES)


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, folder: Path, run_id: str, settings: dict, steps_done: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=steps_done + 1)
        self._writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def log(self, step: int, record: dict[str, float]) -> None:
        """One step."""
        for name, value in record.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """The end of the run."""
        self._writer.close()


class Remote:
    """wandb, or trackio, which has the same interface; a run that goes on is the same run there."""

    def __init__(self, name: str, folder: Path, run_id: str, settings: dict, steps_done: int):
        self._module = importlib.import_module(name)
        same = {"id": run_id} if name == "wandb" else {}
        title = f"{folder.name}-{run_id[:8]}"
        self._module.init(project="grpo", name=title, config=settings, resume="allow", **same)

    def log(self, step: int, record: dict[str, float]) -> None:
        """One step."""
        self._module.log(record, step=step)

    def close(self) -> None:
        """The end of the run."""
        self._module.finish()


class Tracker:
    """One of NAMES behind its guard; `start` makes the tool's own writer."""

    def __init__(self, name: str, start):
        self._apart = Apart(Guard(f"--log_to {name}", start, REMEDIES[name]))

    def log(self, step: int, record: dict[str, float]) -> None:
        """Have one step logged."""
        self._apart(lambda writer: writer.log(step, record))

    def close(self) -> None:
        """The end of the run."""
        self._apart.close(lambda writer: writer.close())


def open_trackers(names: list[str], folder: Path, run_id: str, settings: dict, steps_done: int) -> list[Tracker]:
    """One tracker for each name.

    Raises:
        ValueError: a name whose package is not installed.
    """
    for name in names:
        if not installed(name):
            raise ValueError(f"--log_to {name}: it is not installed here; .venv/bin/pip install {name}")
    if set(names) - {"tensorboard"}:
        _close_input()
    facts = (folder, run_id, settings, steps_done)
    makers = {name: functools.partial(Remote, name) for name in names} | {"tensorboard": TensorBoard}
    return [Tracker(name, functools.partial(makers[name], *facts)) for name in dict.fromkeys(names)]


def installed(name: str) -> bool:
    """Whether the package can be imported; a folder of its name, which wandb leaves behind, is no package."""
    if name in sys.modules:
        return sys.modules[name] is not None
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _close_input() -> None:
    """wandb asks for a key at a terminal; run.sh starts the learner in the background, where asking stops it."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        sys.stdin = open(0, closefd=False)
