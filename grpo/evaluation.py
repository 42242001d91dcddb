"""Accuracy of a policy on held-out questions, greedy or sampled.

Two accuracies are reported: strict, by the reward's own rule, and lenient, by the last number of the response; the two
can differ by tens of points before training, and readers compare with both.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from grpo.json_lines import to_json
from grpo.memory import Places
from grpo.policy import Policy
from grpo.tickets import derive_seed

REFILLS = 8  # how often a place is used before what was answered is handed out

# one answered question
RECORD = {
    "index": int,
    "response": str,
    "answer": str,
    "strict": bool,
    "lenient": bool,
    "format": bool,
    "truncated": bool,
    "length": int,
}


@dataclass(frozen=True)
class Question:
    """One held-out question, ready for the model."""

    index: int
    prompt_ids: list[int]
    prefix: str  # what the prompt has already put into the response's mouth
    answer: str


def evaluate(
    policy: Policy,
    decode: Callable[[list[int]], str],
    questions: list[Question],
    judge: Callable[[str, str], dict[str, bool]],
    *,
    samples: int,
    max_new_tokens: int,
    places: Places,
    seed: int = 0,
) -> Iterator[list[dict]]:
    """Answer the questions; yields records in parts, `max(1, samples)` a question.

    As many completions at a time as there are `places`, which are halved, for later calls too, when memory runs out.

    samples: 0 for one greedy completion a question, k for k sampled at the policy's temperature.
    judge: (response, answer) -> {"strict", "lenient", "format"}.
    """
    each = max(1, samples)
    at_a_time = REFILLS * max(1, places.size // each)
    for start in range(0, len(questions), at_a_time):
        batch = questions[start : start + at_a_time]
        prompts = [question.prompt_ids for question in batch]
        seeds = [derive_seed(seed, "evaluation", question.index) for question in batch]
        temperature = None if samples else 0

        def answer(size: int, prompts=prompts, seeds=seeds, temperature=temperature):
            return policy.generate(prompts, seeds, each, max_new_tokens, places=size, temperature=temperature)

        groups = places.run(answer)
        records = []
        for question, group in zip(batch, groups, strict=True):
            for completion in group:
                response = question.prefix + decode(completion.ids)
                records.append(
                    {"index": question.index, "response": response, "answer": question.answer}
                    | judge(response, question.answer)
                    | {"truncated": completion.truncated, "length": len(completion.ids)}
                )
        yield records


def evaluate_to_files(
    policy: Policy,
    decode,
    questions: list[Question],
    judge,
    *,
    samples: int,
    batch_size: int,
    output: Path,
    facts: dict,
    **settings,
) -> None:
    """Greedy, and with `samples` sampled too: a summary in the terminal and in OUTPUT.json, every completion in
    OUTPUT.jsonl, `batch_size` completions at a time. `settings` are those of `evaluate`; `facts` go into the summary.
    """
    results = dict(facts)
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output.with_suffix(".jsonl"), "w", encoding="utf-8") as file:
        for name, each in [("greedy", 0)] + [("sampled", samples)] * bool(samples):
            records, started = [], time.monotonic()
            places = Places(max(1, batch_size // max(1, each)) * max(1, each), max(1, each))
            bar = tqdm(total=len(questions), desc=name, disable=not sys.stderr.isatty())
            for batch in evaluate(policy, decode, questions, judge, samples=each, places=places, **settings):
                records += batch
                file.writelines(to_json({"decoding": name} | record) + "\n" for record in batch)
                bar.update(len(batch) // max(1, each))
            bar.close()
            batch_size = places.size
            results[name] = summarize(records, started)
            print(f"{name}: {one_line(results[name])}", flush=True)
    output.with_suffix(".json").write_text(to_json(results, indent=2) + "\n")
    print(f"summary in {output.with_suffix('.json')}, completions in {output.with_suffix('.jsonl')}")


def one_line(summary: dict) -> str:
    """Accuracy with its standard error, and what explains it."""
    extra = "".join(f", {key} {value:.3f}" for key, value in summary.items() if key.startswith("pass@"))
    return (
        f"accuracy {summary['accuracy']:.3f} +- {summary['accuracy_stderr']:.3f} strict, "
        f"{summary['accuracy_lenient']:.3f} lenient{extra}; format {summary['format']:.3f}, truncated "
        f"{summary['truncated']:.3f}, mean length {summary['mean_length']:.0f} tokens, "
        f"{summary['tokens_per_second']:.0f} tokens/s, {summary['questions']} questions"
    )


def summarize(records: list[dict], started: float) -> dict:
    """Means over questions with the standard error of the strict accuracy; `started` is a time.monotonic().

    With k completions a question `accuracy` is mean@k, and `pass@k` counts a question with one right completion.
    """
    by_question: dict[int, list[dict]] = {}
    for record in records:
        by_question.setdefault(record["index"], []).append(record)
    strict = [_mean(group, "strict") for group in by_question.values()]
    questions, each = len(strict), len(records) // len(strict)
    mean = sum(strict) / questions
    variance = sum((value - mean) ** 2 for value in strict) / max(1, questions - 1)
    seconds, tokens = time.monotonic() - started, sum(record["length"] for record in records)
    return {
        "questions": questions,
        "completions_each": each,
        "accuracy": mean,
        "accuracy_stderr": math.sqrt(variance / questions),
        "accuracy_lenient": _mean(records, "lenient"),
        **({f"pass@{each}": sum(value > 0 for value in strict) / questions} if each > 1 else {}),
        "format": _mean(records, "format"),
        "truncated": _mean(records, "truncated"),
        "mean_length": tokens / len(records),
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
    }


def _mean(records: list[dict], name: str) -> float:
    return sum(record[name] for record in records) / len(records)
