"""The edits that the README tells users to make, made in a copy of the project as they would make them."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from processes import ENVIRONMENT, LIMIT, ROOT, Worker, learner, sampler
from tiny import VOCAB, ds_config, free_port, save_questions, save_tiny, special_tags, tiny_tokenizer
from transformers import AutoModelForSequenceClassification, Qwen2Config

from data import FULL_CHECK_ROWS
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


# A reward for chosen prompts raises what ends a program; others leave completions out, or reward steps.
OWN_REWARD = '''
import sys


def reward_function(response: str, answer: str) -> dict:
    if answer.startswith("bad"):
        sys.exit(3)
    even = [i + 1 for i, c in enumerate(response) if c in "02468"]
    return {
        "reward": None if len(even) == 3 else len(even) / max(1, len(response)),
        "even": len(even),
        "tags": sum(response.count(tag) for tag in TAGS),
        "steps": [(end, end % 3) for end in even],
    }
'''
OWN_GOLD = '''
def gold_answer(answer, row, marker):
    return row["options"][answer["correct"]]
'''


def own_rows(folder, rows):
    """A file of multiple-choice rows; some that nobody looks at when it is opened lack their gold."""
    looked_at = {i * (rows - 1) // 1023 for i in range(1024)}
    lines = []
    for n in range(rows):
        options = ["wrong", f"bad {n}" if n % 4 == 1 else n]
        if n % 4 == 2 and n not in looked_at:
            options = []
        lines.append({"task": [{"role": "user", "content": f"{n % 90} a"}], "key": {"correct": 1}, "options": options})
    path = folder / "choices.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_a_reward_and_a_kind_of_row_of_ones_own_train_and_what_fails_is_left_out(tmp_path, kept_run, start):
    folder, _ = kept_run
    project = copy_of_the_project(tmp_path / "copy")
    edit(project / "utils.py", r"^def reward_function\(", "def shipped_reward(")
    edit(project / "data.py", r"^def gold_answer\(", "def shipped_gold(")
    for name, source in (("utils.py", OWN_REWARD), ("data.py", OWN_GOLD)):
        with open(project / name, "a") as file:
            file.write(f"\n{source}")
    model = shutil.copytree(folder / "model", tmp_path / "model")
    special_tags().save_pretrained(model)
    port, run, common = str(free_port()), tmp_path / "run", ["--model_path", model]
    flags = [*common, "--ds_config", folder / "ds.json", "--max_steps", "5", "--port", port, "--lora_rank", "4"]
    trainer = start(ROOT / "training_worker.py", tmp_path / "trainer.log", *flags, "--save_path", run)
    dataset = own_rows(tmp_path, FULL_CHECK_ROWS + 50)
    rows = ["--dataset", dataset, "--question_column", "task", "--answer_column", "key"]
    own = [*rows, "--lora_path", run, "--max_new_tokens", "12", "--device", "cpu", "--reward_workers", "2"]
    actor = start(project / "sampling_worker.py", tmp_path / "actor.log", *common, *own, "--port", port)
    assert trainer.wait(LIMIT) == 0, trainer.output()[-3000:] + actor.output()[-3000:]
    assert actor.wait(LIMIT) == 0, actor.output()[-3000:]
    dropped = re.findall(r"dropped ticket \d+, prompt (\d+): (.*)", trainer.output())
    by_reason = {reason: {int(prompt) % 4 for prompt, why in dropped if why == reason} for _, reason in dropped}
    assert by_reason == {"reward_function failed": {1}, "no gold answer": {2}}
    assert actor.output().count("SystemExit: 3") == 1 and "this prompt is left out" in actor.output()
    assert actor.output().count("left out (no gold answer)") == 1
    *_, last = records = read_metrics(run / "metrics.jsonl")
    assert sum(record["rewards/tags/mean"] for record in records) > 0  # special tokens reach the reward
    assert last["step"] == 5 and last["rewards/even/mean"] > 0 and last["grad_norm"] > 0
    counted = {name.rpartition("/")[2]: n for name, n in last.items() if name.startswith("groups/dropped/")}
    assert counted.keys() >= by_reason.keys() and 0 <= last["sampler/reward_seconds"] < LIMIT


def test_the_readmes_rewards_in_a_copy_of_utils(tmp_path):
    """Both examples, each in a copy of utils.py, called as the sampler calls them, in a process of its own."""
    project = copy_of_the_project(tmp_path / "copy")
    examples = re.findall(r"```python\n(.*?def reward_function.*?)```", README, re.DOTALL)
    edit(project / "utils.py", r"^def reward_function\(", "def shipped_reward(")
    for name, source in zip(("brief", "weighted"), examples, strict=True):
        (project / f"{name}.py").write_text(f"{(project / 'utils.py').read_text()}\n\n{source}")
    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = Qwen2Config(vocab_size=VOCAB, num_key_value_heads=2, num_labels=1, pad_token_id=0, **shape)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(project / "reward-model")
    tiny_tokenizer().save_pretrained(project / "reward-model")
    code = (
        "import json, brief, weighted; from grpo.scoring import RewardPool\n"
        "for module in (brief, weighted):\n"
        "    pool = RewardPool(module.reward_function, 0, 60)\n"
        "    (one,) = pool.score_all(['<think>3</think><answer>7</answer>'], '7', 0)\n"
        "    print('FOUND', json.dumps([one.reward, one.components]))\n"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": str(project)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=LIMIT)
    brief, weighted = (json.loads(line[6:]) for line in run.stdout.split("\n") if line.startswith("FOUND"))
    assert brief == [1.2, {"right": 1.0, "brief": 1.0}], run.stderr
    preference = weighted[1].pop("preference")
    assert weighted[1] == {"format": 1.0, "answer": 1.0} and 0 < preference < 1
    assert weighted[0] == pytest.approx(2.25 + 0.5 * preference)
