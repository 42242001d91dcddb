"""Held-out accuracy: the command, what it writes, and the arithmetic of its summary."""

import json
import sys
import time

import pytest
from peft import LoraConfig
from test_adapters import learner_model, publish
from tiny import save_questions, save_tiny, special_tags

import data
import sampling_worker
from grpo.adapters import AdapterStore
from grpo.evaluation import summarize


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A model folder, questions, and a run folder with one version."""
    folder = tmp_path_factory.mktemp("evaluation")
    publish(AdapterStore(folder / "run"), 3)
    return save_tiny(folder / "model"), save_questions(folder / "test.jsonl", rows=10), folder


def run_command(material, output, monkeypatch, *flags):
    model, questions, _ = material
    fixed = ["--evaluate", "--model_path", model, "--dataset", questions, "--device", "cpu", "--dtype", "float32"]
    more = ["--max_new_tokens", 6, "--batch_size", 8, "--evaluate_output", output, *flags]
    monkeypatch.setattr(sys, "argv", ["sampling_worker.py", *map(str, [*fixed, *more])])
    sampling_worker.main()
    records = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().split("\n") if line]
    return json.loads(output.with_suffix(".json").read_text()), records


def test_the_command_writes_a_summary_and_every_completion(material, tmp_path, monkeypatch, capsys):
    results, records = run_command(material, tmp_path / "e", monkeypatch, "--lora_path", "none", "--samples", 3)
    assert results["adapter"] is None and results["greedy"]["questions"] == 10
    assert results["sampled"]["completions_each"] == 3 and "pass@3" in results["sampled"]
    assert [sum(record["decoding"] == name for record in records) for name in ("greedy", "sampled")] == [10, 30]
    assert {"index", "response", "answer", "strict", "lenient", "format", "truncated", "length"} <= records[0].keys()
    assert "greedy: accuracy 0." in capsys.readouterr().out


def test_run_folder_and_adapter_folder_are_evaluated_and_differ_from_the_base(material, tmp_path, monkeypatch):
    folder = material[2]
    texts = {}
    for name, path in {"base": "none", "run": folder / "run", "peft": folder / "run" / "latest"}.items():
        results, records = run_command(material, tmp_path / name, monkeypatch, "--lora_path", path, "--limit", 6)
        assert (results["adapter"] is None) == (name == "base") and results["greedy"]["questions"] == 6
        texts[name] = [record["response"] for record in records]
    assert texts["run"] == texts["peft"] != texts["base"]


def test_special_tokens_are_in_the_responses_and_rows_without_a_gold_are_counted(material, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FULL_CHECK_ROWS", 5)
    monkeypatch.setattr(data, "SAMPLED_ROWS", 2)  # the first and the last row
    lines = [{"question": f"{n} a", "answer": f"#### {n}" if n % 3 else "none"} for n in range(1, 11)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = save_tiny(tmp_path / "model")
    special_tags().save_pretrained(model)
    flags = ["--lora_path", "none", "--samples", 4, "--max_new_tokens", 40]
    results, records = run_command((model, questions, None), tmp_path / "e", monkeypatch, *flags)
    assert results["rows_left_out"] == 3 and results["prompts_too_long"] == 0 and results["greedy"]["questions"] == 7
    assert {record["index"] for record in records} == {0, 1, 3, 4, 6, 7, 9}
    text = " ".join(record["response"] for record in records)
    assert "<think>" in text and "</answer>" in text and "<end>" not in text and "<pad>" not in text


def test_a_check_that_fails_on_one_response_costs_nothing_else(monkeypatch, capsys):
    monkeypatch.setattr(sampling_worker, "check_answer", lambda response, answer: response.index("7") == 0)
    assert sampling_worker.judge("7", "7") == {"strict": True, "lenient": True, "format": False}
    assert sampling_worker.judge("8", "8") == {"strict": False, "lenient": True, "format": False}
    assert sampling_worker.judge("9", "8") == {"strict": False, "lenient": False, "format": False}
    assert capsys.readouterr().out.count("evaluation: the strict check fails, which counts as not passed") == 1


def test_a_folder_without_adapter_or_with_a_foreign_one_is_one_sentence(material, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--lora_path none"):
        run_command(material, tmp_path / "e", monkeypatch, "--lora_path", tmp_path)
    foreign = AdapterStore(tmp_path / "foreign")
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    publish(foreign, 0, model=learner_model(0, config), config=config)
    config_file = foreign.folder(0) / "adapter_config.json"
    config_file.write_text(config_file.read_text().replace("q_proj", "of_another_model"))
    with pytest.raises(Exception, match="holds no adapter that fits the model"):
        run_command(material, tmp_path / "e", monkeypatch, "--lora_path", foreign.path)


def test_the_summary_by_hand():
    rows = [(0, True), (0, False), (1, True), (1, True), (2, False), (2, False), (3, False), (3, True)]
    records = [
        {"index": i, "strict": right, "lenient": True, "format": right, "truncated": False, "length": 10}
        for i, right in rows
    ]
    found = summarize(records, time.monotonic() - 2)
    assert found["questions"] == 4 and found["completions_each"] == 2
    assert found["accuracy"] == 0.5 and found["pass@2"] == 0.75 and found["accuracy_lenient"] == 1.0
    # means of the questions 0.5, 1, 0, 0.5: variance (0 + 0.25 + 0.25 + 0) / 3
    assert found["accuracy_stderr"] == pytest.approx((0.5 / 3 / 4) ** 0.5)
    assert found["mean_length"] == 10 and 30 < found["tokens_per_second"] < 45
