"""What the README shows works as written: its Python examples run, its commands' flags exist."""

import re
from pathlib import Path

import pytest
import torch
from tiny import VOCAB, tiny_tokenizer
from transformers import AutoModelForSequenceClassification, Qwen2Config

import sampling_worker
import training_worker
import utils
from grpo.scoring import score

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
RESPONSE = "<think>3 + 4 = 7</think><answer>7</answer>"


def example(words: str) -> dict:
    """Run the one block with `words` beside utils.py's own names, and return what it defines."""
    (block,) = [block for block in BLOCKS if words in block]
    names = vars(utils).copy()
    exec(block, names)
    return names


def test_the_example_of_another_reward():
    reward_function = example("brief = ")["reward_function"]
    one = score(reward_function, RESPONSE, "7", 0)
    assert one.reward == pytest.approx(1.2) and one.components == {"right": 1.0, "brief": 1.0}


def test_the_example_of_several_weighted_rewards_with_a_reward_model(tmp_path, monkeypatch):
    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = Qwen2Config(vocab_size=VOCAB, num_key_value_heads=2, num_labels=1, pad_token_id=0, **shape)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "reward-model")
    tiny_tokenizer().save_pretrained(tmp_path / "reward-model")
    monkeypatch.chdir(tmp_path)
    names = example("AutoModelForSequenceClassification")
    first = score(names["reward_function"], RESPONSE, "7", 0)
    assert first.components.keys() == {"format", "answer", "preference"}
    weights = {"format": 1.25, "answer": 1.0, "preference": 0.5}
    assert first.reward == pytest.approx(sum(weights[name] * value for name, value in first.components.items()))
    score(names["reward_function"], RESPONSE, "8", 0)
    assert names["reward_model"].cache_info().misses == 1  # loaded once


def test_flags_in_the_readme_exist():
    known = set()
    for worker in (sampling_worker, training_worker):
        known |= set(re.findall(r"--[a-z_]+", worker.make_parser().format_help()))
    for program in [*(ROOT / "demo").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        known |= set(re.findall(r"--[a-z_]+", program.read_text()))
    pip = {"--no-deps"}
    assert set(re.findall(r"(?<![-\w])--[a-z][a-z_-]*", README)) - known - pip == set()


def test_the_tree_in_the_readme_is_the_tree():
    named = set(re.findall(r"^  (\w+\.py) ", README, re.MULTILINE))
    assert named == {path.name for path in (ROOT / "grpo").glob("*.py")} - {"__init__.py"}
