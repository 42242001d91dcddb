"""The adapter folder: whole versions or none, the newest in use, nothing broken gets into the model."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from tiny import VOCAB, tiny_model

from grpo.adapters import MANIFEST, WEIGHTS, AdapterError, AdapterStore
from grpo.batch import collate
from grpo.logprobs import completion_logprobs
from grpo.models import add_lora
from grpo.policy import Policy, canary_batch

CONFIG = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def learner_model(seed=1, config=CONFIG):
    """A model with a trained-looking adapter."""
    model = add_lora(tiny_model(), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def publish(store, version, seed=None, run_id="run", model=None, config=CONFIG):
    model = model or learner_model(version if seed is None else seed)
    canary = completion_logprobs(model, canary_batch(VOCAB), 1.0)[0].flatten().tolist()
    fields = {"run_id": run_id, "version": version, "lora": {}, "canary": canary}
    store.publish(get_peft_model_state_dict(model, save_embedding_layers=False), config, fields)
    return model


def policy() -> Policy:
    return Policy(tiny_model(), [2], "cpu", dtype="float32", temperature=1.0)


def test_a_published_version_gives_the_learners_logprobs(tmp_path):
    store, sampler = AdapterStore(tmp_path), policy()
    batch = collate([torch.tensor([5, 6, 7])], [torch.tensor([8, 9]), torch.tensor([10, 2])])
    base = completion_logprobs(tiny_model(), batch, 1.0)[0].detach().flatten()
    for version in (0, 1, 5):
        model = publish(store, version)
        assert sampler.load_newest(store, "run", at_least=version, limit=5)
        expected = completion_logprobs(model, batch, 1.0)[0].detach().flatten()
        torch.testing.assert_close(sampler.logprobs(batch), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(sampler.reference_logprobs(batch), base, rtol=0, atol=1e-5)
        assert sampler.version == version and len(sampler.sha256) == 64
    assert not sampler.load_newest(store, "run", at_least=5, limit=5)


def test_latest_is_an_adapter_that_peft_loads(tmp_path):
    store = AdapterStore(tmp_path)
    publish(store, 0)
    model = publish(store, 1)
    loaded = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "latest"))
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_versions_only_grow(tmp_path):
    store = AdapterStore(tmp_path)
    publish(store, 3)
    with pytest.raises(AssertionError):
        publish(store, 3)


def test_pruning_keeps_the_newest_and_the_checkpoints(tmp_path):
    store = AdapterStore(tmp_path)
    for version in range(8):
        publish(store, version, model=learner_model(0))
    store.prune(keep_newest=3, keep={0, 4})
    assert store.versions() == [0, 4, 5, 6, 7]


def test_what_a_killed_learner_left_behind_is_no_version(tmp_path):
    store = AdapterStore(tmp_path)
    publish(store, 0)
    shutil.copytree(store.folder(0), tmp_path / "adapters" / ".tmp-v00000001")
    assert store.versions() == [0]
    publish(store, 1)
    assert store.versions() == [0, 1]
    assert not list((tmp_path / "adapters").glob(".tmp*"))


def damage(store, how):
    folder = store.folder(1)
    weights, manifest = folder / WEIGHTS, folder / MANIFEST
    content = weights.read_bytes()
    if how == "empty":
        weights.write_bytes(b"")
    elif how == "half":
        weights.write_bytes(content[: len(content) // 2])
    elif how == "one byte short":
        weights.write_bytes(content[:-1])
    elif how == "zeros":
        weights.write_bytes(bytes(len(content)))
    elif how == "one bit":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "no weights":
        weights.unlink()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "no config":
        (folder / "adapter_config.json").unlink()
    elif how == "manifest of another form":
        manifest.write_text("{}")
    elif how == "canary of another adapter":
        fields = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(fields | {"canary": [value - 1 for value in fields["canary"]]}))
    elif how == "another version":
        fields = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(fields | {"version": 9}))
    return content


HOWS = """empty, half, one byte short, zeros, one bit, no weights, no manifest, no config, manifest of another form,
canary of another adapter, another version""".replace("\n", " ").split(", ")


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_version_is_not_taken_and_the_old_one_stays(tmp_path, how, capsys):
    store, sampler = AdapterStore(tmp_path), policy()
    publish(store, 0)
    sampler.load_newest(store, "run", at_least=0, limit=5)
    batch = canary_batch(VOCAB)
    before = sampler.logprobs(batch)
    publish(store, 1)
    damage(store, how)
    with pytest.raises(AdapterError):
        sampler.load_newest(store, "run", at_least=0, limit=0)
    assert sampler.version == 0 and "keeping adapter version 0" in capsys.readouterr().out
    torch.testing.assert_close(sampler.logprobs(batch), before, rtol=0, atol=0)
    publish(store, 2)
    assert sampler.load_newest(store, "run", at_least=0, limit=5) and sampler.version == 2


def test_a_file_cut_off_anywhere_is_not_taken(tmp_path):
    store, sampler = AdapterStore(tmp_path), policy()
    publish(store, 0)
    sampler.load_newest(store, "run", at_least=0, limit=5)
    publish(store, 1)
    weights = store.folder(1) / WEIGHTS
    content = weights.read_bytes()
    for offset in [0, 1, 4, 8, 9, 100, 1000, len(content) // 2, len(content) - 100, len(content) - 1]:
        weights.write_bytes(content[:offset])
        with pytest.raises(AdapterError):
            sampler.load_newest(store, "run", at_least=0, limit=0)
        assert sampler.version == 0
    weights.write_bytes(content)
    assert sampler.load_newest(store, "run", at_least=1, limit=5) and sampler.version == 1


def test_what_was_read_stays_readable_when_the_file_is_cut_off_in_place(tmp_path):
    store = AdapterStore(tmp_path)
    publish(store, 0)
    expected = {name: tensor.clone() for name, tensor in store.read(0)[2].items()}
    state = store.read(0)[2]
    with open(store.folder(0) / WEIGHTS, "r+b") as file:
        file.truncate(0)  # a mapped file would kill the process at the next access
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_version_that_is_replaced_or_removed_while_it_is_read_is_whole_or_an_error(tmp_path):
    store, stop, outcomes = AdapterStore(tmp_path), threading.Event(), []
    publish(store, 0)
    good = store.read(0)[2]

    def disturb():
        other = tmp_path / "other"
        shutil.copytree(store.folder(0), other)
        while not stop.is_set():
            (other / WEIGHTS).write_bytes(b"nothing")
            os.replace(other / WEIGHTS, store.folder(0) / WEIGHTS)
            shutil.rmtree(store.folder(0), ignore_errors=True)
            publish(AdapterStore(tmp_path), 0, seed=0)

    thread = threading.Thread(target=disturb)
    thread.start()
    for _ in range(200):
        try:
            state = store.read(0)[2]
            outcomes.append(all(torch.equal(state[name], good[name]) for name in good))
        except AdapterError:
            outcomes.append(None)
    stop.set()
    thread.join()
    assert False not in outcomes and None in outcomes


@pytest.mark.parametrize("change", ["rank", "alpha", "targets", "run"])
def test_an_adapter_of_another_kind_is_not_taken(tmp_path, change):
    store, sampler = AdapterStore(tmp_path), policy()
    publish(store, 0)
    sampler.load_newest(store, "run", at_least=0, limit=5)
    before = sampler.logprobs(canary_batch(VOCAB))
    targets = ["q_proj"] if change == "targets" else "all-linear"
    rank, alpha = 8 if change == "rank" else 4, 16 if change == "alpha" else 8
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    publish(store, 1, model=learner_model(1, config), config=config, run_id="x" if change == "run" else "run")
    with pytest.raises(AdapterError):
        sampler.load_newest(store, "run", at_least=0, limit=0)
    torch.testing.assert_close(sampler.logprobs(canary_batch(VOCAB)), before, rtol=0, atol=0)


def test_reloading_does_not_grow_the_model(tmp_path):
    store, sampler = AdapterStore(tmp_path), policy()
    publish(store, 0)
    sampler.load_newest(store, "run", at_least=0, limit=5)
    count, process = len(list(sampler.model.named_parameters())), psutil.Process()
    models = [learner_model(seed) for seed in (1, 2)]
    for version in range(1, 201):
        publish(store, version, model=models[version % 2])
        assert sampler.load_newest(store, "run", at_least=version, limit=5)
        store.prune(keep_newest=2, keep=set())
        if version == 20:
            before = process.memory_info().rss
    assert process.memory_info().rss - before < 30 << 20
    assert len(list(sampler.model.named_parameters())) == count
    assert not any(parameter.requires_grad for parameter in sampler.model.parameters())


def test_waiting_for_a_version_names_the_folder(tmp_path):
    with pytest.raises(AdapterError, match="version 3 did not appear in .*--lora_path"):
        AdapterStore(tmp_path).wait_for(3, limit=0.1)


def test_a_broken_run_file_is_named(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(AdapterError, match=r"run\.json"):
        AdapterStore(tmp_path).read_run()


@pytest.mark.parametrize("wrong", ["targets that the model lacks", "targets that it has in part", "another alpha"])
def test_a_wrong_first_version_does_not_keep_the_right_ones_after_it_out(tmp_path, wrong):
    store, sampler = AdapterStore(tmp_path), policy()
    before = {name: parameter.requires_grad for name, parameter in sampler.model.named_parameters()}
    logits = sampler.model(torch.tensor([[5, 6, 7]])).logits
    publish(store, 0)
    file = store.folder(0) / "adapter_config.json"
    fields = json.loads(file.read_text())
    change = {
        "targets that the model lacks": {"target_modules": ["of_another_model"]},
        "targets that it has in part": {"target_modules": ["q_proj", "v_proj"]},
        "another alpha": {"lora_alpha": 64},
    }[wrong]
    file.write_text(json.dumps(fields | change))
    with pytest.raises(AdapterError):
        sampler.load_newest(store, "run", at_least=0, limit=0)
    assert {name: parameter.requires_grad for name, parameter in sampler.model.named_parameters()} == before
    torch.testing.assert_close(sampler.model(torch.tensor([[5, 6, 7]])).logits, logits, rtol=0, atol=0)
    model = publish(store, 1)
    assert sampler.load_newest(store, "run", at_least=1, limit=0) and sampler.version == 1
    batch = canary_batch(VOCAB)
    expected = completion_logprobs(model, batch, 1.0)[0].detach().flatten()
    torch.testing.assert_close(sampler.logprobs(batch), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def young_version(store, version, alpha=8, base_canary=True):
    """An adapter of a few steps in bfloat16, whose whole effect is within the canary's tolerance; alpha in the file."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = learner_model(5, config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.mul_(0.002)
    batch = canary_batch(VOCAB)
    canary = completion_logprobs(model, batch, 1.0)[0].flatten()
    with model.disable_adapter():
        base = completion_logprobs(model, batch, 1.0)[0].flatten()
    effect = float((canary - base).abs().max())
    fields = {"run_id": "run", "version": version, "lora": {"rank": 4, "alpha": alpha}, "canary": canary.tolist()}
    if base_canary:
        fields["base_canary"] = base.tolist()
    file_config = LoraConfig(r=4, lora_alpha=alpha, target_modules=config.target_modules, task_type="CAUSAL_LM")
    file_config.target_modules = model.peft_config["default"].target_modules
    store.publish(get_peft_model_state_dict(model, save_embedding_layers=False), file_config, fields)
    return effect


def test_another_alpha_of_a_young_adapter_in_half_precision_is_noticed(tmp_path):
    def sampler():
        return Policy(tiny_model(), [2], "cpu", dtype="bfloat16", temperature=1.0)

    store = AdapterStore(tmp_path / "right")
    effect = young_version(store, 0)
    one = sampler()
    assert 0 < effect < 0.25 / 4 and one.load_newest(store, "run", at_least=0, limit=0)
    # at a sampler that has a version: the setting itself is compared
    young_version(store, 1, alpha=64, base_canary=False)
    with pytest.raises(AdapterError, match="LoRA setting lora_alpha 64, the version in use has 8"):
        one.load_newest(store, "run", at_least=1, limit=0)
    # at one that has none, with a manifest and a configuration that agree: the effect is
    store = AdapterStore(tmp_path / "wrong")
    young_version(store, 0, alpha=64)
    with pytest.raises(AdapterError, match="changes log-probs of the canary text by"):
        sampler().load_newest(store, "run", at_least=0, limit=0)


def test_manifest_and_configuration_must_agree(tmp_path):
    store, sampler = AdapterStore(tmp_path), policy()
    publish(store, 0)
    manifest = store.folder(0) / MANIFEST
    fields = json.loads(manifest.read_text())
    for lora, said in (({"alpha": 64}, "alpha 8, manifest.json has 64"), ({"rank": 2}, "rank 4"), (3, "of the kinds")):
        manifest.write_text(json.dumps(fields | {"lora": lora}))
        with pytest.raises(AdapterError, match=said):
            sampler.load_newest(store, "run", at_least=0, limit=0)


HUB = """
import sys, time
sys.path[:0] = sys.argv[2:]
from test_adapters import AdapterError, AdapterStore, policy, publish
store, sampler = AdapterStore(sys.argv[1]), policy()
sampler.model.config._name_or_path = sampler.model.name_or_path = "some-owner/some-model"
for version in range(3):
    publish(store, version)
    assert sampler.load_newest(store, "run", at_least=version, limit=5)
(store.folder(2) / "adapter_config.json").unlink()
try:
    store.read(2)
except AdapterError:
    print("done")
"""


def test_reloading_asks_no_hub(tmp_path):
    """A hub that takes connections and stays silent, as a firewall does, and a model with the name of one on it."""
    root = Path(__file__).resolve().parents[1]
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(0.2)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
        command = [sys.executable, "-c", HUB, str(tmp_path), str(root), str(root / "tests")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.stdout.endswith("done\n"), done.stderr
        with pytest.raises(TimeoutError):
            hub.accept()
