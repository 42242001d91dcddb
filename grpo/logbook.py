"""Everything that rank 0 takes down of a run: metrics, terminal, trackers, advice, completions, the report."""

import math
from pathlib import Path

import torch

from grpo.advice import Advisor
from grpo.completions import CompletionLog
from grpo.metrics import MetricsLog
from grpo.report import Report
from grpo.rollout import Group
from grpo.terminal import Terminal
from grpo.trackers import open_trackers


class Logbook:
    """The records of the run `run_id` in `folder`, of which `steps_done` steps stay as they are."""

    def __init__(self, args, folder: Path, run_id: str, settings: dict, tokenizer, steps_done: int):
        self._max_steps, self._steps_done = args.max_steps, steps_done
        self._metrics = MetricsLog(folder / "metrics.jsonl", steps_done)
        self._trackers = open_trackers(args.log_to, folder, run_id, settings, steps_done)
        self._advisor = Advisor(args.num_iterations)
        self._report = Report(folder, settings, tokenizer, steps_done)
        self._completions = None
        if args.log_completions:
            self._completions = CompletionLog(folder / "completions.jsonl", tokenizer, args.log_completions, steps_done)
        self.terminal = Terminal(args.max_steps, steps_done)

    @property
    def curve(self) -> list[dict]:
        """Step, reward and mean length of every step so far."""
        return self._metrics.curve

    def step(
        self,
        step: int,
        groups: list[Group],
        advantages: list[torch.Tensor],
        record: dict[str, float],
        evaluations: list[dict],
    ) -> None:
        """One step is done; `record` is its line in metrics.jsonl."""
        self._steps_done = step
        self._metrics.num_tokens += record["num_tokens"]
        record = record | {"num_tokens": self._metrics.num_tokens}
        self._metrics.log(step, record)
        self.terminal.step(step, record)
        for tracker in self._trackers:
            tracker.log(step, {name: value for name, value in record.items() if math.isfinite(value)})
        notes = self._advisor.look(record, evaluations)
        for sentence in notes:
            print(f"note: {sentence}", flush=True)
        if self._completions:
            self._completions.log(step, groups, advantages)
        self._report.step(step, groups, record, notes)
        self._report.refresh(f"Step {step}{f' of {self._max_steps}' if self._max_steps else ''}.", evaluations)

    def close(self, reason: str, evaluations: list[dict]) -> None:
        """The run is over: last report, curves as a picture."""
        self.terminal.close()
        for log in (self._metrics, *self._trackers):
            log.close()
        if self._completions:
            self._completions.close()
        self._report.close(f"Ended after {self._steps_done} steps: {reason}.", evaluations)
