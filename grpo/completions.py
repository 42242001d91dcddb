"""What the model wrote: every completion in completions.jsonl, some of them in the terminal."""

from pathlib import Path

import torch

from grpo.json_lines import JsonLines
from grpo.rollout import Group

SHOWN_CHARACTERS = 600  # of a prompt or completion, in the terminal


class CompletionLog:
    """Appends all completions to `path` and prints the best and the worst of one group every `every` steps."""

    def __init__(self, path: Path, tokenizer, every: int, steps_done: int = 0):
        self._lines = JsonLines(path, steps_done)
        self._tokenizer, self._every = tokenizer, every

    def log(self, step: int, groups: list[Group], advantages: list[torch.Tensor]) -> None:
        """Record a step; `advantages` holds (G,) or (G, C) per group, the latter recorded by the first token's."""
        each = [self._records(step, group, values) for group, values in zip(groups, advantages, strict=True)]
        if each and step % self._every == 0:
            self._show(each[0])
        self._lines.append([record for records in each for record in records])

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _records(self, step: int, group: Group, advantages: torch.Tensor) -> list[dict]:
        prompt = self._tokenizer.decode(group.prompt_ids)
        rewards = group.rewards.tolist()
        return [
            {
                "step": step,
                "ticket_id": group.ticket_id,
                "prompt_index": group.prompt_index,
                "adapter_version": group.adapter_version,
                "prompt": prompt,
                "completion": self._tokenizer.decode(ids),
                "answer": group.answer,
                "reward": None if rewards[i] != rewards[i] else rewards[i],
                "components": {name: float(values[i]) for name, values in group.components.items()},
                "advantage": float(advantages[i].flatten()[0]),
                "truncated": bool(group.truncated[i]),
            }
            for i, ids in enumerate(group.completions())
        ]

    def _show(self, records: list[dict]) -> None:
        ranked = sorted(records, key=lambda record: record["advantage"])
        print(f"--- step {ranked[0]['step']}, prompt {ranked[0]['prompt_index']}: {_cut(ranked[0]['prompt'])}")
        if ranked[0]["answer"]:
            print(f"--- gold answer: {_cut(ranked[0]['answer'])}")
        for label, record in (("best", ranked[-1]), ("worst", ranked[0])):
            parts = "  ".join(f"{name} {value:g}" for name, value in record["components"].items())
            print(f"--- {label}: reward {record['reward']}  advantage {record['advantage']:.3f}  {parts}")
            print(_cut(record["completion"]), flush=True)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
