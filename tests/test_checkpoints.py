"""What a checkpoint's files may hold, and what may lie in a run's folder at the start."""

import pickle

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from test_adapters import CONFIG

from grpo.adapters import AdapterError, AdapterStore
from grpo.checkpoints import _restricted_unpickler
from grpo.journal import Journal
from grpo.run_folder import check_folder


def publish_versions(folder, versions, run_id="run", kind="adapters"):
    """Adapter versions of one small tensor; returns their store."""
    store = AdapterStore(folder, kind)
    for version in versions:
        fields = {"run_id": run_id, "version": version, "lora": {}, "canary": []}
        store.publish({"a.lora_A.weight": torch.full((2, 2), float(version))}, CONFIG, fields)
    return store


class Reduced:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def load(path, content):
    torch.save({"content": content}, path)
    with _restricted_unpickler():
        return torch.load(path, weights_only=False)["content"]  # as DeepSpeed asks for it


def test_an_enum_is_read_by_whichever_python_it_was_written(tmp_path):
    stage = ZeroStageEnum.gradients
    for content in (stage, Reduced(getattr, ZeroStageEnum, "gradients"), Reduced(ZeroStageEnum, 2)):
        assert load(tmp_path / "file.pt", content) is stage


@pytest.mark.parametrize(
    "content",
    [Reduced(getattr, Reduced(getattr, ZeroStageEnum, "gradients"), "__class__"), Reduced(print, "run"), Reduced],
    ids=["getattr of something else", "a call", "a class"],
)
def test_nothing_else_is_built_or_run(tmp_path, content, capsys):
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "file.pt", content)
    assert capsys.readouterr().out == ""


def test_a_latest_that_was_not_moved_or_points_at_a_broken_version_is_repaired(tmp_path, capsys):
    store = publish_versions(tmp_path, range(4))
    store._point_latest(2)  # killed between the two renames of version 3
    store.repair()
    assert (tmp_path / "latest").resolve() == store.folder(3) and store.versions() == [0, 1, 2, 3]
    (store.folder(3) / "adapter_model.safetensors").write_bytes(b"half")
    (tmp_path / "latest").unlink()
    store.repair()
    assert (tmp_path / "latest").resolve() == store.folder(2) and store.versions() == [0, 1, 2]
    assert "v00000003" in capsys.readouterr().out
    publish_versions(tmp_path / "empty", []).repair()


def noted(folder, steps):
    """A tickets.jsonl with so many steps."""
    journal = Journal(folder, keep=False)
    for step in range(1, steps + 1):
        journal.note_step(step, [step])


def test_versions_that_are_not_of_this_run_are_refused_at_the_start(tmp_path):
    store = publish_versions(tmp_path, range(4))
    for run, owner in ((None, "run run"), ({"run_id": "other"}, "run run")):
        with pytest.raises(AdapterError, match=f"holds version 0 in adapters/, of {owner}.*another --save_path"):
            check_folder(store, run, replays=False)
    with pytest.raises(AdapterError, match="holds version 1 in adapters/, of a step that .*tickets.jsonl lacks"):
        check_folder(store, {"run_id": "run"}, replays=False)
    check_folder(store, {"run_id": "run"}, replays=True)
    noted(tmp_path, 3)
    (store.folder(0) / "manifest.json").unlink()  # killed while it was removed
    check_folder(store, {"run_id": "run"}, replays=False)
    publish_versions(tmp_path, [2], "other", "references")
    with pytest.raises(AdapterError, match="holds version 2 in references/, of run other"):
        check_folder(store, {"run_id": "run"}, replays=False)


def test_checkpoints_and_tickets_without_their_run_are_refused(tmp_path):
    store = publish_versions(tmp_path, [])
    check_folder(store, None, replays=False)
    noted(tmp_path, 2)
    with pytest.raises(AdapterError, match="holds tickets.jsonl of a run, but no run.json"):
        check_folder(store, None, replays=False)
    (tmp_path / "checkpoints" / "step00000003").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step00000003" / "complete.json").write_text("{}")
    with pytest.raises(AdapterError, match="checkpoints of a run, but no run.json"):
        check_folder(store, None, replays=False)
    with pytest.raises(AdapterError, match="the checkpoint of step 3, but its tickets.jsonl ends at step 2"):
        check_folder(store, {"run_id": "run"}, replays=False)
    noted(tmp_path, 3)
    check_folder(store, {"run_id": "run"}, replays=False)
