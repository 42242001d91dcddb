"""What a checkpoint's files may hold."""

import pickle

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from test_adapters import CONFIG

from grpo.adapters import AdapterStore
from grpo.checkpoints import _restricted_unpickler


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
