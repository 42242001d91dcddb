"""The two programs while everything that reports of them fails: they train, save and end as if nothing were."""

import json
import subprocess
import sys

import pytest
from processes import ENVIRONMENT, LIMIT, ROOT, Worker, sampler
from test_workers import Run, material, workers  # noqa: F401
from tiny import save_questions, save_tiny

from grpo.adapters import AdapterStore
from grpo.metrics import read_metrics

SAID = [
    "metrics.jsonl fails (OSError: [Errno 28] No space left on device) and is tried again at each step",
    "report.html is given up (MemoryError), the run goes on without it",
    "completions.jsonl is given up (RecursionError: too deep), the run goes on without it",
    "progress is given up (UnicodeEncodeError: 'ascii' codec can't encode character",
    "advice on the run is given up (KeyError: 'reward'), the run goes on without it",
    "the renewal of model cards fails (PermissionError: [Errno 13] Permission denied)",
    "the model card is given up (ValueError: unmatched '{' in format spec)",
    "--log_to wandb is given up (SystemExit: api_key not configured (no-tty)), the run goes on without it: log in with",
    "--log_to tensorboard is given up (it has not ended within 2 s)",
]


@pytest.mark.slow
def test_a_run_in_which_everything_that_reports_fails_is_trained_and_saved(tmp_path, material, workers):  # noqa: F811
    flags = ["--log_completions", 1, "--log_to", "tensorboard", "wandb"]
    run = Run(tmp_path, material, steps=3, staleness=1, learner_flags=flags)
    command = [sys.executable, "-u", "tests/learner_with_faults.py", *map(str, run.learner_flags)]
    trainer, actor = workers(Worker, command, tmp_path / "trainer.log"), run.start_sampler(workers)
    assert trainer.wait(LIMIT) == 0 and actor.wait(LIMIT) == 0, trainer.output()[-3000:]
    assert [trainer.output().count(sentence) for sentence in SAID] == [1] * len(SAID), trainer.output()
    assert "Traceback" not in trainer.output() and "run ended after 3 steps (--max_steps 3 reached)" in trainer.output()
    assert AdapterStore(run.path).versions()[-1] == 3 and (run.path / "checkpoints" / "step00000003").is_dir()
    assert "--max_steps 3 reached" in actor.output()


def write_chinese(model) -> None:
    """Give the letters of a tiny model's tokenizer Chinese characters for names."""
    content = json.loads((model / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    letters = [word for word in vocabulary if word.isalpha()]
    content["model"]["vocab"] = {chr(0x7B54 + ord(w)) if w in letters else w: i for w, i in vocabulary.items()}
    (model / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.slow
def test_chinese_completions_at_an_ascii_output_that_is_closed_after_a_step(tmp_path, workers):  # noqa: F811
    model, questions = save_tiny(tmp_path / "model"), save_questions(tmp_path / "questions.jsonl")
    write_chinese(model)
    run = Run(tmp_path, (model, questions), steps=3, staleness=0, learner_flags=["--log_completions", 1])
    command = [sys.executable, "training_worker.py", *map(str, run.learner_flags)]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    try:
        actor = workers(sampler, tmp_path / "sampler.log", *map(str, run.sampler_flags))
        printed = b""
        while b"--- worst" not in printed and (line := trainer.stdout.readline()):
            printed += line
        printed += trainer.stdout.readline()
        trainer.stdout.close()  # as `| head` does
        assert trainer.wait(LIMIT) == 0 and actor.wait(LIMIT) == 0, printed
    finally:
        trainer.kill()
    assert b"--- best" in printed and b"\\u7b" in printed and b"Traceback" not in printed, printed
    assert [record["step"] for record in read_metrics(run.path / "metrics.jsonl")] == [1, 2, 3]
    assert AdapterStore(run.path).versions()[-1] == 3
    completions = [json.loads(line) for line in (run.path / "completions.jsonl").read_text().split("\n") if line]
    assert any(letter >= "\u7b54" for one in completions for letter in one["completion"])
    assert all(one["answer"].isdigit() for one in completions)
    card = (run.path / "latest" / "README.md").read_text("utf-8")
    assert "| 3 to 3 |" in card
