"""The README.md beside each published adapter: what it is, how it was made, how to load it."""

import importlib.metadata
import json
import math
from pathlib import Path

PACKAGES = ("torch", "transformers", "peft", "deepspeed")
ROWS = 10  # of the curve
CARD = """---
base_model: {base}
library_name: peft
pipeline_tag: text-generation
tags: [grpo, lora]
---
# A LoRA adapter of {name}, version {version}

Trained by reinforcement learning ({loss}) for {version} optimizer steps on {dataset}.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(model, "FOLDER")  # this folder; .merge_and_unload() gives a plain model
tokenizer = AutoTokenizer.from_pretrained("{base}")
```

## Reward

{curve}

{evaluation}
## How it was made

```json
{settings}
```

{packages}.
"""


def model_card(
    base: str, version: int, loss: str, dataset: str, settings: dict, records: list[dict], evaluations: list[dict]
) -> str:
    """The text; `records` are those of metrics.jsonl so far, `evaluations` those of evaluations.jsonl."""
    packages = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    return CARD.format(
        base=base,
        name=Path(base).name,
        version=version,
        loss=loss,
        dataset=dataset or "the samplers' --dataset",
        curve=_curve(records),
        evaluation=_evaluation(evaluations),
        settings=json.dumps(settings, indent=2, default=str),
        packages=packages,
    )


def package_versions() -> dict[str, str]:
    """What is installed of the packages that decide what a run computes."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def _curve(records: list[dict]) -> str:
    if not records:
        return "The curve is in the run's metrics.jsonl."
    edges = [len(records) * i // min(ROWS, len(records)) for i in range(min(ROWS, len(records)) + 1)]
    lines = ["| steps | mean reward | mean length |", "| --- | --- | --- |"]
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        part = records[start:end]
        reward, length = (_mean([record[name] for record in part]) for name in ("reward", "completions/mean_length"))
        lines.append(f"| {part[0]['step']} to {part[-1]['step']} | {reward:.3f} | {length:.1f} |")
    return "\n".join(lines)


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _evaluation(evaluations: list[dict]) -> str:
    evaluations = [one for one in evaluations if one.get("questions")]
    if not evaluations:
        return ""
    lines = ["## Held-out questions", ""]
    lines += ["| version | questions | strict accuracy | lenient |", "| --- | --- | --- | --- |"]
    for one in evaluations[-ROWS:]:
        strict, lenient = (f"{one[name]:.3f}" for name in ("accuracy", "accuracy_lenient"))
        lines.append(f"| {one['version']} | {one['questions']} | {strict} | {lenient} |")
    return "\n".join(lines) + "\n"
