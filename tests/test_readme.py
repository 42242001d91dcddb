"""What the README shows works as written: its Python examples run, its commands' flags exist."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from test_adapters import CONFIG
from tiny import VOCAB, save_tiny, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config

import data
import sampling_worker
import training_worker
import utils
from grpo.models import add_lora
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


def test_the_example_of_another_kind_of_gold(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "gold_answer", example("def gold_answer")["gold_answer"])
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "3 + 5?", "answer": 2, "options": ["3", "5", "8"]}\n')
    assert data.load_examples(rows)[0].answer == "8"


def test_flags_in_the_readme_exist():
    known = set()
    for worker in (sampling_worker, training_worker):
        known |= set(re.findall(r"--[a-z_]+", worker.make_parser().format_help()))
    for program in [*(ROOT / "demo").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        known |= set(re.findall(r"--[a-z_]+", program.read_text()))
    others = {"--no-deps", "--delay-updates", "--model", "--enable-lora", "--max-lora-rank", "--lora-modules"}
    others |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--time"}
    assert set(re.findall(r"(?<![-\w])--[a-z][a-z_-]*", README)) - known - others == set()


def test_every_flag_has_its_row():
    for worker in (sampling_worker, training_worker):
        for flag in set(worker.make_parser()._option_string_actions) - {"-h", "--help"}:
            assert f"| `{flag}` |" in README, flag


def test_the_adapter_loads_and_merges_as_shown(tmp_path, monkeypatch):
    save_tiny(tmp_path / "model")
    model = add_lora(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), CONFIG)
    torch.nn.init.normal_(model.base_model.model.model.layers[0].mlp.up_proj.lora_B.default.weight, std=0.3)
    model.save_pretrained(tmp_path / "checkpoints" / "latest")
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in BLOCKS if "merge_and_unload" in block]
    exec(block.replace("Qwen/Qwen2.5-1.5B-Instruct", "model"), {})
    merged, ids = AutoModelForCausalLM.from_pretrained("merged"), torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(merged(ids).logits, model.eval()(ids).logits, rtol=0, atol=1e-4)
    assert AutoTokenizer.from_pretrained("merged").get_vocab() == tiny_tokenizer().get_vocab()


def test_the_shell_in_the_readme_is_shell():
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        assert subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True).stderr == "", block


def test_the_chinese_readme_is_in_step():
    chinese = (ROOT / "README.zh.md").read_text()
    fenced = re.compile(r"```.*?```", re.DOTALL)
    assert fenced.findall(chinese) == fenced.findall(README)
    untranslated = ("Every flag", "If you come from TRL")

    def shape(text: str, left_out: tuple[str, ...] = ()) -> list[tuple[int, list[str]]]:
        """For each section, how many rows its tables have and which numbers are in them."""
        found = []
        for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
            rows = [] if section.startswith(left_out) else re.findall(r"^\|.*\|$", section, re.MULTILINE)
            found.append((len(rows), sorted(re.findall(r"\d+(?:[.,]\d+)*", "".join(rows)))))
        return found

    assert shape(chinese) == shape(README, untranslated)


def test_the_tree_in_the_readme_is_the_tree():
    named = set(re.findall(r"^  (\w+\.py) ", README, re.MULTILINE))
    assert named == {path.name for path in (ROOT / "grpo").glob("*.py")} - {"__init__.py"}
