"""What the model wrote: every completion in completions.jsonl, some of them in the terminal."""

import json
from pathlib import Path

import torch

from grpo.metrics import keep_steps
from grpo.rollout import Group

SHOWN_CHARACTERS = 600  # of a prompt or completion, in the terminal


class CompletionLog:
    """Appends all completions to `path` and prints the best and the worst of one group every `every` steps."""

    def __init__(self, path: Path, tokenizer, every: int, steps_done: int = 0):
        keep_steps(path, steps_done)
        self._file = open(path, "a", encoding="utf-8")
        self._tokenizer, self._every = tokenizer, every

    def log(self, step: int, groups: list[Group], advantages: list[torch.Tensor]) -> None:
        """Record a step; `advantages` holds (G,) or (G, C) per group, the latter recorded by the first token's."""
        for i, (group, values) in enumerate(zip(groups, advantages, strict=True)):
            records = self._records(step, group, values)
            self._file.writelines(json.dumps(record) + "\n" for record in records)
            if i == 0 and step % self._every == 0:
                self._show(records)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

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
        for label, record in (("best", ranked[-1]), ("worst", ranked[0])):
            parts = "  ".join(f"{name} {value:g}" for name, value in record["components"].items())
            print(f"--- {label}: reward {record['reward']}  advantage {record['advantage']:.3f}  {parts}")
            print(_cut(record["completion"]), flush=True)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
