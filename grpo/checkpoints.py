"""Checkpoints of adapter and optimizer: DeepSpeed's own files, and a last one that says they are complete.

    save_path/checkpoints/step00000010/                what DeepSpeed wrote at every rank, without the frozen base
    save_path/checkpoints/step00000010/complete.json   written by rank 0 when all the others are on disk

DeepSpeed's files are pickles. They are read with torch's restricted unpickler, which builds tensors, plain containers
and the few DeepSpeed classes named here, and runs nothing.
"""

import contextlib
import copy
import json
import os
import pickle
import shutil
from enum import Enum
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from grpo.files import sync, write_file
from grpo.ranks import Ranks

COMPLETE = "complete.json"
FULL = 1 << 20  # bytes; a disk with less free is full
KEPT = 2  # checkpoints, so that one is whole whatever happens to the other


def _member(kind: type, name: str) -> Enum:
    """What Python 3.11.0 to 3.11.3 pickle an Enum with is getattr; this does the same for Enums and nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"getattr of {kind!r:.60} is not allowed")
    return kind[name]


_ALLOWED = [ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler, (_member, "builtins.getattr")]


def save_checkpoint(engine, folder: Path, step: int, ranks: Ranks) -> None:
    """Write the checkpoint of `step`; every rank takes part.

    Raises:
        OSError: it could not be written; older checkpoints are as they were.
    """
    place = folder / f"step{step:08d}"
    try:
        engine.save_checkpoint(str(folder), tag=place.name, exclude_frozen_parameters=True)
    except RuntimeError as error:  # torch's zip writer on a full disk, which does not say so
        full = shutil.disk_usage(folder).free < FULL
        reason = "No space left on device" if full else error
        raise OSError(f"checkpoint {place} could not be written: {reason}") from error
    ranks.add_up([0])  # every rank has written its part
    if ranks.rank == 0:
        for path in place.iterdir():
            sync(path)
        facts = {"step": step, "ranks": ranks.size, "stage": engine.zero_optimization_stage()}
        write_file(place / COMPLETE, json.dumps(facts).encode())
        sync(place)
        complete = sorted(path.parent for path in folder.glob(f"step*/{COMPLETE}"))[-KEPT:]
        for old in set(folder.glob("step*")) - set(complete):
            shutil.rmtree(old)


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    return sorted(int(path.parent.name.removeprefix("step")) for path in folder.glob(f"step*/{COMPLETE}"))


def remove_checkpoints(folder: Path, first: int) -> None:
    """Remove those of step `first` and later ones, the newest first."""
    for step in reversed(checkpoint_steps(folder)):
        if step >= first:
            (folder / f"step{step:08d}" / COMPLETE).unlink()  # from here on it does not count
            shutil.rmtree(folder / f"step{step:08d}")


def newest_checkpoint(folder: Path) -> dict | None:
    """The facts of the newest complete checkpoint; None while there is none."""
    complete = sorted(folder.glob(f"step*/{COMPLETE}"))
    return json.loads(complete[-1].read_text()) if complete else None


def load_checkpoint(engine, folder: Path, facts: dict, ranks: int, new_scale: bool = False) -> None:
    """Put adapter and optimizer state back as they were, under the settings that `engine` was built with.

    Learning rate, betas, clipping and so on are those of ds_config.json now, and its scheduler is where as many steps
    of it lead. So is the loss scale with `new_scale`; otherwise it is the one that was reached.

    Raises:
        ValueError: it was written by another number of ranks or under another ZeRO stage, or cannot be read.
    """
    stage = engine.zero_optimization_stage()
    if (facts["ranks"], facts["stage"]) != (ranks, stage):
        raise ValueError(
            f"the checkpoint of step {facts['step']} was written by {facts['ranks']} ranks under ZeRO stage "
            f"{facts['stage']}, this start has {ranks} under stage {stage}; start it as it was, or a new run elsewhere"
        )
    tag = f"step{facts['step']:08d}"
    built = _built_with(engine, new_scale)
    try:
        with _restricted_unpickler():
            path, _ = engine.load_checkpoint(
                str(folder), tag=tag, load_module_strict=False, load_lr_scheduler_states=False
            )
    except (RuntimeError, OSError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"the checkpoint {folder / tag} cannot be read: {error}") from error
    if path is None:
        raise ValueError(f"the checkpoint {folder / tag} is incomplete: files of a rank are missing")
    _restore(engine, *built)


def _built_with(engine, new_scale: bool) -> tuple[list[dict], dict]:
    """Each parameter group's settings, and the attributes that DeepSpeed's optimizers would take from a checkpoint."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.basic_optimizer.param_groups]
    names = ["clip_grad", *(("loss_scaler", "dynamic_loss_scale", "loss_scale_config") if new_scale else ())]
    own = vars(engine.optimizer)
    return copy.deepcopy(groups), {name: copy.deepcopy(own[name]) for name in names if name in own}


def _restore(engine, groups: list[dict], attributes: dict) -> None:
    for group, settings in zip(engine.basic_optimizer.param_groups, groups, strict=True):
        group.update(settings)
    for name, value in attributes.items():
        setattr(engine.optimizer, name, value)
    if engine.lr_scheduler is not None:
        for _ in range(engine.global_steps - engine.skipped_steps):  # all of them are functions of that number
            engine.lr_scheduler.step()


@contextlib.contextmanager
def _restricted_unpickler():
    variable = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(variable)
    os.environ[variable] = "1"  # DeepSpeed asks for the unrestricted one; this outranks it
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
