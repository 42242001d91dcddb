"""The run's metrics in the tools that people watch runs with: TensorBoard, Weights & Biases, Trackio.

None of them is a requirement; metrics.jsonl has everything. In TensorBoard the steps that are trained again after a
crash replace those that were logged before; the others keep what they have.
"""

import importlib
from pathlib import Path

NAMES = ("tensorboard", "wandb", "trackio")


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

    def __init__(self, module, folder: Path, run_id: str, settings: dict):
        self._module = module
        same = {"id": run_id} if module.__name__ == "wandb" else {}
        module.init(project="grpo", name=f"{folder.name}-{run_id[:8]}", config=settings, resume="allow", **same)

    def log(self, step: int, record: dict[str, float]) -> None:
        """One step."""
        self._module.log(record, step=step)

    def close(self) -> None:
        """The end of the run."""
        self._module.finish()


def open_trackers(names: list[str], folder: Path, run_id: str, settings: dict, steps_done: int) -> list:
    """One tracker for each name.

    Raises:
        ValueError: a name whose package is not installed.
    """
    trackers = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"--log_to {name}: it is not installed here; .venv/bin/pip install {name}") from error
        if name == "tensorboard":
            trackers.append(TensorBoard(folder, run_id, settings, steps_done))
        else:
            trackers.append(Remote(module, folder, run_id, settings))
    return trackers
