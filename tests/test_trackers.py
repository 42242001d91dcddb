"""Metrics for TensorBoard and its kind."""

import sys
import types

import pytest

from grpo.trackers import open_trackers


def test_tensorboard_has_every_scalar_once_even_after_a_crash(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps_done, steps, offset in ((0, (1, 2, 3), 0), (1, (2, 3, 4), 10)):  # killed after 3, goes on after 1
        (tracker,) = open_trackers(["tensorboard"], tmp_path, "run", {"lr": 1e-3}, steps_done)
        for step in steps:
            tracker.log(step, {"reward": step + offset, "kl": 0.5})
        tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"reward", "kl"} <= set(events.Tags()["scalars"])
    assert [(one.step, one.value) for one in events.Scalars("reward")] == [(1, 1), (2, 12), (3, 13), (4, 14)]


def test_wandb_and_its_likes_get_the_run_and_each_step(tmp_path, monkeypatch):
    calls = []
    module = types.ModuleType("wandb")
    module.init = lambda **settings: calls.append(settings)
    module.log = lambda record, step: calls.append((step, record))
    module.finish = lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", module)
    (tracker,) = open_trackers(["wandb"], tmp_path / "mine", "0123456789", {"lr": 1}, 0)
    tracker.log(1, {"reward": 2.0})
    tracker.close()
    assert calls[0]["name"] == "mine-01234567" and calls[0]["id"] == "0123456789" and calls[0]["config"] == {"lr": 1}
    assert calls[1:] == [(1, {"reward": 2.0}), "finish"]


def test_a_folder_that_wandb_left_behind_is_no_wandb(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match="--log_to wandb: it is not installed here"):
        open_trackers(["wandb"], tmp_path, "run", {}, 0)


def test_one_that_is_not_installed_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ValueError, match="--log_to trackio: it is not installed here"):
        open_trackers(["trackio"], tmp_path, "run", {}, 0)
