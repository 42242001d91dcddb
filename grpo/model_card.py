"""The README.md beside each published adapter: what it is, how it was made, how to use it."""

import functools
import importlib.metadata
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from grpo.adapters import AdapterStore
from grpo.curves import Curves
from grpo.files import write_file
from grpo.json_lines import to_json
from grpo.rollout import Group

PACKAGES = ("torch", "transformers", "peft", "deepspeed")
ROWS = 10  # of the evaluations
LEFT = 20  # evaluations that can end between two calls
REWARD, LENGTH = "reward", "completions/mean_length"
HELD_OUT, MADE = "\n## Held-out questions\n", "\n## How it was made\n"
CARD = """---
base_model: {link}
library_name: peft
pipeline_tag: text-generation
tags: [grpo, lora]
---
# A LoRA adapter of {name}, version {version}

Trained by reinforcement learning ({loss}) for {version} optimizer steps on {dataset}.

{fence}python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({base!r})
model = AutoModelForCausalLM.from_pretrained({base!r})
model = PeftModel.from_pretrained(model, "FOLDER")  # this folder; .merge_and_unload() gives a plain model

question = "What is 12 + 30?"
{ask}
output = model.generate(**inputs, max_new_tokens={max_new_tokens}, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
{fence}

## Reward

{curve}
{evaluation}{made}
{fence}json
{settings}
{fence}

{sampler}
{packages}.
"""


def model_card(
    base: str,
    version: int,
    loss: str,
    dataset: str,
    settings: dict,
    rows: Iterable[tuple[int, int, float | None, float | None]],
    evaluations: list[dict],
    sampler: dict,
    tokenizer,
) -> str:
    """The text.

    `rows` are those of `curve_rows`, `evaluations` those of evaluations.jsonl, `sampler` the sampler's settings by
    flag, as far as they are known.
    """
    packages = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    ask = how_to_ask(tokenizer, sampler.get("system_prompt"))
    texts = [to_json(values, indent=2, default=str) for values in (settings, sampler)]
    fence = _fence(ask, *texts)
    card = CARD.format(
        base=base,
        link=base if re.fullmatch(r"[\w./-]+", base) else to_json(base),
        name=Path(base).name,
        version=version,
        loss=loss,
        dataset=dataset or "the samplers' --dataset",
        ask=ask,
        max_new_tokens=sampler.get("max_new_tokens", 256),
        curve=_curve(rows),
        evaluation=_evaluation(version, evaluations),
        made=MADE,
        settings=texts[0],
        sampler=f"The samplers:\n\n{fence}json\n{texts[1]}\n{fence}\n" if sampler else "",
        packages=packages,
        fence=fence,
    )
    return card.encode(errors="backslashreplace").decode()


def how_to_ask(tokenizer, system_prompt: str | None) -> str:
    """Python that turns `question` into `inputs`, by the prompt that was trained on (data.py, render_prompt)."""
    lines = [] if system_prompt is None else [f"system_prompt = {system_prompt!r}"]
    lines += ["system_prompt = ''  # the samplers' --system_prompt"] * (system_prompt is None)
    if not tokenizer.chat_template:
        return "\n".join(
            [
                *lines,
                r'text = "\n\n".join(part for part in (system_prompt, f"Question: {question}", "Answer:\n") if part)',
                'inputs = tokenizer(text, return_tensors="pt")',
            ]
        )
    if takes_system_turn(tokenizer, system_prompt or "x"):
        turns = '{"role": "system", "content": system_prompt}, {"role": "user", "content": question}'
    elif system_prompt:
        turns = r'{"role": "user", "content": f"{system_prompt}\n\n{question}"}'
    else:
        turns = '{"role": "user", "content": question}'
    asked = 'messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"'
    return "\n".join([*lines, f"messages = [{turns}]", f"inputs = tokenizer.apply_chat_template({asked})"])


def takes_system_turn(tokenizer, system_prompt: str) -> bool:
    """Whether the chat template writes down a system turn."""
    from jinja2 import TemplateError

    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": "question"}]
    try:
        return system_prompt.strip() in tokenizer.apply_chat_template(messages, tokenize=False)
    except TemplateError:
        return False


def curve_rows(
    curves: Curves | None, step: int, groups: list[Group]
) -> list[tuple[int, int, float | None, float | None]]:
    """First step, last step, mean reward and mean length of each stretch of the run; `groups` are those of the newest
    step, which the curves may lack yet.
    """
    stretches = curves.stretches() if curves else []
    rows = [(first, last, means[REWARD], means[LENGTH]) for first, last, means in stretches]
    if groups and (not rows or rows[-1][1] < step):
        reward = torch.stack([group.rewards for group in groups]).nanmean()
        length = torch.cat([group.lengths for group in groups]).float().mean()
        rows.append((step, step, float(reward), float(length)))
    return rows


@functools.cache
def package_versions() -> dict[str, str]:
    """What is installed of the packages that decide what a run computes."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


class Cards:
    """Puts a version's held-out result, which comes after it was published, into its card in the run's `folder`.

    The README.md is replaced as a whole, by a file that was written outside the version's folder; nothing else in that
    folder is touched.
    """

    def __init__(self, folder: Path):
        self._store, self._done = AdapterStore(folder), 0  # evaluations that are in the cards

    def renew(self, evaluations: list[dict]) -> None:
        """Go through the evaluations that are new since the last call; at first, those that a crash may have left."""
        self._done = max(self._done, len(evaluations) - LEFT)
        for one in evaluations[self._done :]:
            card = self._store.folder(one["version"]) / "README.md"
            if card.is_file():  # else the version is removed
                self._replace(card, with_evaluation(card.read_text("utf-8"), one["version"], evaluations))
            self._done += 1

    def _replace(self, card: Path, text: str) -> None:
        if text != card.read_text("utf-8"):
            draft = self._store.path / ".card.md"
            write_file(draft, text.encode())
            os.replace(draft, card)


def with_evaluation(card: str, version: int, evaluations: list[dict]) -> str:
    """The card with these evaluations; as it is where it is none of ours."""
    head, made, rest = card.partition(MADE)
    return head.partition(HELD_OUT)[0] + _evaluation(version, evaluations) + made + rest if made else card


def _curve(rows: Iterable[tuple]) -> str:
    if not rows:
        return "The curve is in the run's metrics.jsonl."
    lines = ["| steps | mean reward | mean length |", "| --- | --- | --- |"]
    for first, last, reward, length in rows:
        lines.append(f"| {first} to {last} | {_number(reward, 3)} | {_number(length, 1)} |")
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _evaluation(version: int, evaluations: list[dict]) -> str:
    known = [one for one in evaluations if one.get("questions") and one["version"] <= version]
    if not known:
        return ""
    lines = [HELD_OUT]
    own = [one for one in known if one["version"] == version]
    lines += [f"This version answers {one['accuracy']:.1%} of {one['questions']} questions right.\n" for one in own]
    lines += ["| version | questions | strict accuracy | lenient |", "| --- | --- | --- | --- |"]
    for one in known[-ROWS:]:
        strict, lenient = (_number(one.get(name), 3) for name in ("accuracy", "accuracy_lenient"))
        lines.append(f"| {one['version']} | {one['questions']} | {strict} | {lenient} |")
    return "\n".join(lines) + "\n"


def _fence(*texts: str) -> str:
    """More backticks than any of the texts has together."""
    longest = max((len(run) for text in texts for run in re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)
