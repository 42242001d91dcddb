"""./run.sh doctor: each mistake is one line that says what to do, and a good set of flags passes."""

import json
import re
import socket
import sys

import pytest
from tiny import ds_config, free_port, save_questions, save_tiny

from grpo import doctor
from grpo.keys import make_keys


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Flags that pass, as a dict."""
    folder = tmp_path_factory.mktemp("doctor")
    save_tiny(folder / "model")
    return {
        "--model_path": folder / "model",
        "--save_path": folder / "run",
        "--lora_path": folder / "run",
        "--dataset": save_questions(folder / "questions.jsonl"),
        "--ds_config": ds_config(folder / "ds.json"),
        "--port": free_port(),
        "--device": "cpu",
    }


def run(flags: dict, monkeypatch, capsys) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["doctor", *(str(part) for pair in flags.items() for part in pair)])
    with pytest.raises(SystemExit) as end:
        doctor.main()
    printed = capsys.readouterr().out
    return (end.value.code, printed) if isinstance(end.value.code, int) else (1, str(end.value.code))


def test_flags_that_work_pass(good, monkeypatch, capsys, tmp_path):
    make_keys(tmp_path / "keys")
    for more in ({}, {"--keys": tmp_path / "keys", "--host": "127.0.0.1"}):
        code, printed = run(good | more, monkeypatch, capsys)
        assert code == 0 and "NO" not in printed and printed.endswith("ready\n"), printed
    assert "40 questions" in printed and "4 prompts x 4 completions on 2 ranks, float32" in printed


MISTAKES = {
    "folders": ({"--lora_path": "/tmp/elsewhere"}, ["--save_path is", "/tmp/elsewhere", "the same folder"]),
    "batch": ({"--batch_size": 6}, ["--batch_size 6", "--group_size 4"]),
    "step": ({"--group_size": 5, "--batch_size": 5}, ["16 sequences", "--group_size 5"]),
    "model": ({"--model_path": "no/such/model"}, ["--model_path no/such/model"]),
    "dataset": ({"--dataset": "no/such.jsonl"}, ["--dataset no/such.jsonl"]),
    "held out": ({"--eval_steps": 5}, ["is a single file", "--eval_dataset"]),
    "no keys": ({"--keys": "/tmp"}, ["--keys /tmp", "./run.sh keys"]),
    "a host of others": ({"--host": "0.0.0.0"}, ["trainer: --host 0.0.0.0", "./run.sh keys DIR"]),
    "device": ({"--device": "cuda:9"}, ["sampler: --device cuda:9", "--device cpu"]),
    "a flag of nobody": ({"--bach_size": 4}, ["neither side knows --bach_size"]),
    "a host with a port": ({"--host": "127.0.0.1:5555"}, ["--host 127.0.0.1 --port 5555"]),
    "an address of another machine": (
        {"--host": "192.0.2.7", "--keys": "KEYS"},
        ["--host 192.0.2.7", "no such address", "another --host"],
    ),
    "layers that the model lacks": ({"--lora_targets": "c_attn"}, ["--lora_targets c_attn does not fit the model"]),
    "no adapter to start from": ({"--init_adapter": "no/such"}, ["--init_adapter", "no/such"]),
    "a temperature that is none": ({"--temperature": "nan"}, ["--temperature is nan", "finite"]),
    "a device that holds nothing": ({"--device": "meta"}, ["--device meta", "or cpu"]),
    "a folder of root": ({"--save_path": "/proc/run", "--lora_path": "/proc/run"}, ["--save_path /proc/run"]),
}


@pytest.mark.parametrize("changes, words", MISTAKES.values(), ids=MISTAKES.keys())
def test_each_mistake_is_a_line(good, changes, words, monkeypatch, capsys, tmp_path):
    if changes.get("--keys") == "KEYS":
        make_keys(tmp_path / "keys")
        changes = changes | {"--keys": tmp_path / "keys"}
    code, printed = run(good | changes, monkeypatch, capsys)
    (line,) = [line for line in printed.split("\n") if line.startswith("NO")]
    assert code == 1 and all(word in line for word in words), printed


def spoilt_model(folder, **fields):
    """A model folder with other values in its config.json."""
    config = json.loads((save_tiny(folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


CONFIGS = {
    "no object": ([], "must hold an object"),
    "a switch as a value": ({"bf16": True}, "has True for \"bf16\""),
    "no optimizer": ({"optimizer": None}, "has None for \"optimizer\""),
}


@pytest.mark.parametrize("change, words", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_configuration_that_is_none_is_one_line(good, change, words, monkeypatch, capsys, tmp_path):
    path = tmp_path / "ds.json"
    content = json.loads(good["--ds_config"].read_text())
    path.write_text(json.dumps(change if isinstance(change, list) else content | change))
    code, printed = run(good | {"--ds_config": path}, monkeypatch, capsys)
    assert code == 1 and printed.count("NO ") == 1 and f"NO   --ds_config {path} {words}" in printed


def test_what_config_json_tells_is_checked_for_both_sides(good, monkeypatch, capsys, tmp_path):
    quantised = spoilt_model(tmp_path / "awq", quantization_config={"quant_method": "awq", "bits": 4})
    code, printed = run(good | {"--model_path": quantised}, monkeypatch, capsys)
    assert code == 1 and f"NO   --model_path {quantised} is quantised (awq)" in printed
    code, printed = run(good | {"--max_new_tokens": 600}, monkeypatch, capsys)
    assert code == 0 and "note: --max_prompt_length 1024 and --max_new_tokens 600" in printed  # angles do not end
    bare = save_tiny(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    code, printed = run(good | {"--model_path": bare}, monkeypatch, capsys)
    assert code == 1 and "has no weights that transformers can load" in printed


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_ipv6_needs_no_keys_on_this_machine(good, monkeypatch, capsys):
    code, printed = run(good | {"--host": "::1", "--port": free_port()}, monkeypatch, capsys)
    assert code == 0 and "on ::1 is free" in printed or "no such address" in printed


SPOILT_KEYS = ["", "curve\n", 'curve\n    public-key = "short"\n', 'curve\n    public-key = "' + "\u00e9" * 40 + '"\n']


@pytest.mark.parametrize("name", ["learner.key_secret", "sampler.key_secret", "learner.key", "sampler.key"])
def test_keys_that_are_none_are_named(good, name, monkeypatch, capsys, tmp_path):
    make_keys(tmp_path / "keys")
    whole = (tmp_path / "keys" / name).read_text()
    no_secret = re.sub("secret-key.*", "", whole)
    for content in [*SPOILT_KEYS, re.sub('-key = ".', '-key = "', whole), *[no_secret] * (no_secret != whole)]:
        (tmp_path / "keys" / name).write_text(content, encoding="utf-8")
        code, printed = run(good | {"--keys": tmp_path / "keys"}, monkeypatch, capsys)
        assert code == 1 and f"NO   --keys {tmp_path / 'keys'}: {name} cannot be read" in printed, content


def test_a_taken_port_is_named(good, monkeypatch, capsys):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", good["--port"]))
        holder.listen()
        code, printed = run(good, monkeypatch, capsys)
    assert code == 1 and f"--port {good['--port']}" in printed


def test_a_model_too_large_for_the_machine_is_named(good, monkeypatch, capsys, tmp_path):
    config = json.loads((good["--model_path"] / "config.json").read_text())
    save_tiny(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 1 << 15, "intermediate_size": 1 << 21}))
    code, printed = run(good | {"--model_path": tmp_path}, monkeypatch, capsys)
    assert code == 1 and "alone take" in printed and "ZeRO stage 3" in printed
