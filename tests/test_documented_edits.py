"""The edits that the README tells users to make, made in a copy of the project as they would make them."""

import re
import shutil
import sys

import pytest
from processes import LIMIT, ROOT, Worker, learner, sampler
from tiny import ds_config, free_port, save_questions, save_tiny

from grpo.metrics import read_metrics

LOSSES = ("grpo_loss", "gspo_loss", "dapo_loss", "dr_grpo_loss", "cispo_loss")
README = (ROOT / "README.md").read_text()
(OWN_LOSS,) = re.findall(r"```python\n(@per.*?)```", README, re.DOTALL)


def copy_of_the_project(folder):
    """The root's Python files and grpo/, without a git or a virtual environment."""
    folder.mkdir(parents=True)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "grpo", folder / "grpo", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def edit(path, pattern, replacement):
    """Rewrite the one place in a file that matches."""
    text, count = re.subn(pattern, lambda _: replacement, path.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{count} places in {path} match {pattern}"
    path.write_text(text)


@pytest.fixture
def start():
    """Starts programs and ends them after the test."""
    started = []

    def begin(script, log, *flags):
        started.append(Worker([sys.executable, "-u", script, *flags], log))
        return started[-1]

    yield begin
    for worker in started:
        worker.end()


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory):
    """A run of one step whose groups are kept, and the flags with which a learner trains on them again."""
    folder = tmp_path_factory.mktemp("kept")
    model, questions = save_tiny(folder / "model"), save_questions(folder / "questions.jsonl")
    port = str(free_port())
    common = ["--model_path", model, "--ds_config", ds_config(folder / "ds.json"), "--lora_rank", "4", "--max_steps", 1]
    trainer = learner(folder / "trainer.log", *common, "--save_path", folder / "run", "--port", port, "--keep_journal")
    own = ["--model_path", model, "--lora_path", folder / "run", "--dataset", questions, "--port", port]
    actor = sampler(folder / "sampler.log", *own, "--max_new_tokens", "60")
    try:
        assert trainer.wait(LIMIT) == 0, trainer.output()[-3000:]
        assert actor.wait(LIMIT) == 0, actor.output()[-3000:]
    finally:
        trainer.end()
        actor.end()
    return folder, [*common, "--replay", folder / "run"]


def project_with_loss(folder, name, source=""):
    """A copy of the project whose LOSS line names another loss, which `source` adds to utils.py."""
    project = copy_of_the_project(folder)
    edit(project / "training_worker.py", r"^LOSS = .*$", f"LOSS = {name}")
    with open(project / "utils.py", "a") as file:
        file.write(f"\n\n{source}")
    return project


@pytest.mark.slow
def test_each_loss_trains_by_the_one_line_and_so_does_one_of_ones_own(tmp_path, kept_run, start):
    folder, flags = kept_run
    (own_name,) = re.findall(r"def (\w+)\(", OWN_LOSS)
    started = {}
    for name in (*LOSSES, own_name):
        project = project_with_loss(tmp_path / name, name, OWN_LOSS if name == own_name else "")
        log = tmp_path / f"{name}.log"
        started[name] = start(project / "training_worker.py", log, *flags, "--save_path", tmp_path / f"run-{name}")
        if len(started) % 2 == 0:  # two cores
            started[name].wait(LIMIT)
    gradients = {}
    for name, trainer in started.items():
        assert trainer.wait(LIMIT) == 0, trainer.output()[-3000:]
        (record,) = read_metrics(tmp_path / f"run-{name}" / "metrics.jsonl")
        assert ("kl" in record) == (name == "grpo_loss") and ("logprob" in record) == (name == own_name)
        assert f"({name})" in (tmp_path / f"run-{name}" / "latest" / "README.md").read_text()
        gradients[name] = round(record["grad_norm"], 9)
    # at the first step GSPO's gradient is GRPO's without the KL term, whose gradient is 0 there, and CISPO's DAPO's
    assert gradients["grpo_loss"] == pytest.approx(gradients["gspo_loss"], rel=1e-4)
    assert gradients["dapo_loss"] == pytest.approx(gradients["cispo_loss"], rel=1e-4)
    assert gradients[own_name] == pytest.approx(gradients["dapo_loss"], rel=1e-4)
    assert len({gradients[name] for name in ("grpo_loss", "dapo_loss", "dr_grpo_loss")}) == 3


@pytest.mark.slow
def test_what_is_missing_in_a_loss_of_ones_own_is_said_before_anything_is_loaded(tmp_path, start):
    without = re.sub(r"^@per.*\n", "", OWN_LOSS)
    project = project_with_loss(tmp_path / "copy", "reinforce_loss", without)
    flags = ["--model_path", "no/such/model", "--save_path", tmp_path / "run"]
    trainer = start(project / "training_worker.py", tmp_path / "log", *flags)
    assert trainer.wait(LIMIT) != 0
    assert "reinforce_loss does not say what its sum is divided by: write @per(count_tokens)" in trainer.output()
    assert "Traceback" not in trainer.output() and "no/such/model" not in trainer.output()
