"""The README.md of an adapter: what one needs to use it, and what it can do."""

import copy
import json
import re

import pytest
import torch
from test_adapters import CONFIG
from test_rollout import make_group
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

import data
from grpo.adapters import AdapterStore
from grpo.curves import Curves
from grpo.metrics import MetricsLog
from grpo.model_card import Cards, curve_rows, model_card
from grpo.models import add_lora, load_tokenizer

TEMPLATES = {
    "system turn": None,  # the tiny tokenizer's own
    "no system turn": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{{ m['content'] }} {% endfor %}<unk> ",
    "system turn left out": "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }} {% endif %}"
    "{% endfor %}<unk> ",
    "no template": "",
}
EVALUATION = {"questions": 8, "accuracy": 0.75, "accuracy_lenient": 0.875}


def card(version=3, evaluations=(), sampler=None, tokenizer=None, base="models/tiny", **changes) -> str:
    settings = {"beta": 0.04, "tis_cap": float("inf")} | changes
    rows = [(1, 2, 0.5, 12.0), (3, 3, None, 11.5)]
    arguments = (base, version, "grpo_loss", "gsm8k", settings, rows, list(evaluations))
    return model_card(*arguments, sampler or {}, tokenizer or tiny_tokenizer())


def test_the_card_has_the_settings_of_both_sides_and_the_curve():
    text = card(sampler={"system_prompt": "a ``` b", "max_new_tokens": 99, "split": "train"})
    assert "base_model: models/tiny\n" in text and "| 1 to 2 | 0.500 | 12.0 |\n| 3 to 3 | - | 11.5 |" in text
    blocks = re.findall(r"````json\n(.*?)\n````", text, re.DOTALL)  # one backtick more than the prompt has
    assert [json.loads(block) for block in blocks] == [
        {"beta": 0.04, "tis_cap": None},
        {"system_prompt": "a ``` b", "max_new_tokens": 99, "split": "train"},
    ]
    assert "The samplers:" not in card()


@pytest.mark.parametrize("base", ["a: b #c", "\u6a21\u578b", "x\udcff{y}"])
def test_any_path_of_a_model_makes_a_card(base):
    text = card(base=base)
    text.encode()
    (link,) = re.findall("^base_model: (.*)$", text, re.MULTILINE)
    assert link == base or json.loads(link) == base


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("system_prompt", ["a b", ""])
def test_the_code_in_the_card_generates_from_the_prompt_that_was_trained_on(tmp_path, template, system_prompt):
    base = save_tiny(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    if TEMPLATES[template] is not None:
        tokenizer.chat_template = TEMPLATES[template]
        tokenizer.save_pretrained(base)
        (base / "chat_template.jinja").write_text(TEMPLATES[template])
    if template == "no template":
        tokenizer.chat_template = None
        (base / "chat_template.jinja").unlink()
    add_lora(AutoModelForCausalLM.from_pretrained(base), copy.copy(CONFIG)).save_pretrained(tmp_path / "adapter")
    text = card(sampler={"system_prompt": system_prompt, "max_new_tokens": 5}, tokenizer=tokenizer, base=str(base))
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(code.replace("FOLDER", str(tmp_path / "adapter")).replace("What is 12 + 30?", "12 d 30"), names)
    expected = data.encode_prompt(load_tokenizer(str(base)), "12 d 30", system_prompt)
    assert names["inputs"]["input_ids"][0].tolist() == expected
    assert 1 <= names["output"].shape[1] - len(expected) <= 5


def test_the_newest_step_is_in_the_card_before_it_is_in_the_records():
    curves = Curves(MetricsLog.POINTS, MetricsLog.CURVE)
    groups = [make_group(rewards=torch.tensor([1.0, 2.0]))]
    assert curve_rows(curves, 0, []) == [] and curve_rows(None, 1, groups) == [(1, 1, 1.5, 2.5)]
    curves.add({"step": 1, "reward": 0.5, "completions/mean_length": 3.0})
    assert curve_rows(curves, 2, groups) == [(1, 1, 0.5, 3.0), (2, 2, 1.5, 2.5)]
    assert curve_rows(curves, 1, groups) == [(1, 1, 0.5, 3.0)]


def test_a_held_out_result_gets_into_its_card_and_nothing_else_changes(tmp_path):
    store, model = AdapterStore(tmp_path), add_lora(tiny_model(), copy.copy(CONFIG))
    state = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    first = {"version": 1, **EVALUATION}
    for version in (1, 2, 3):
        fields = {"run_id": "r", "version": version, "lora": {}, "canary": []}
        store.publish(state, model.peft_config["default"], fields, card(version, [first] if version > 1 else []))
    files = {path: path.stat() for path in tmp_path.rglob("v0*/*") if path.name != "README.md"}
    open_before = open(store.folder(3) / "README.md")
    cards = Cards(tmp_path)
    gone = {"version": 0, **EVALUATION}  # its version is removed
    cards.renew([gone, first])
    assert "This version answers 75.0% of 8 questions right." in (store.folder(1) / "README.md").read_text()
    last = {"version": 3, **EVALUATION, "accuracy": 0.5}
    cards.renew([gone, first, {"version": 2, "questions": 0}, last])
    text = (store.folder(3) / "README.md").read_text()
    assert "This version answers 50.0% of 8 questions right." in text
    assert "| 1 | 8 | 0.750 | 0.875 |\n| 3 | 8 | 0.500 | 0.875 |" in text
    assert "This version" not in open_before.read()  # a reader in the middle of it keeps the old one
    assert text.count("## Held-out questions") == 1 and text.index("## Reward") < text.index("## Held-out")
    assert text == card(3, [gone, first, last])  # what it would be had the result been known
    assert files == {path: path.stat() for path in tmp_path.rglob("v0*/*") if path.name != "README.md"}
    assert not [path for path in tmp_path.rglob(".*") if "README" in path.name]
    (store.folder(3) / "README.md").write_text("the user's own")
    Cards(tmp_path).renew([last])
    assert (store.folder(3) / "README.md").read_text() == "the user's own"
