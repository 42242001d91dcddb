"""Everything that rank 0 takes down of a run: metrics, terminal, trackers, advice, completions, the report, the cards.

Each stands behind a guard (grpo/guard.py), so whatever goes wrong with one is a printed sentence, and the run goes on.
"""

from pathlib import Path

import torch

from grpo.advice import Advisor
from grpo.charts import defined
from grpo.completions import CompletionLog
from grpo.curves import Curves
from grpo.guard import AGAIN, END_SECONDS, Guard, leave_in_time
from grpo.metrics import MetricsLog
from grpo.model_card import Cards
from grpo.report import Report, picture
from grpo.rollout import Group
from grpo.terminal import Terminal
from grpo.trackers import open_trackers


class Logbook:
    """The records of the run `run_id` in `folder`, of which `steps_done` steps stay as they are.

    Raises:
        ValueError: a name in --log_to whose package is not installed.
    """

    def __init__(self, args, folder: Path, run_id: str, settings: dict, tokenizer, steps_done: int):
        self._max_steps, self._steps_done = args.max_steps, steps_done
        self._exit_code = 1
        self.sampler_settings: dict = {}
        self._trackers = open_trackers(args.log_to, folder, run_id, settings, steps_done)
        if self._trackers:
            leave_in_time(lambda: self._exit_code)

        def guard(name: str, start, remedy: str = AGAIN, release=None) -> Guard:
            return Guard(name, start, remedy, release).start()

        self._metrics = guard("metrics.jsonl", lambda: MetricsLog(folder / "metrics.jsonl", steps_done))
        self._advisor = guard("advice on the run", lambda: Advisor(args.num_iterations, args.max_staleness))
        self._report = guard("report.html", lambda: Report(folder, settings, tokenizer, steps_done))
        self._picture = Guard("curves.png", lambda: folder / "curves.png")
        self._cards = guard("the renewal of model cards", lambda: Cards(folder))
        self._completions = None
        if args.log_completions:
            every, path = args.log_completions, folder / "completions.jsonl"
            self._completions = guard("completions.jsonl", lambda: CompletionLog(path, tokenizer, every, steps_done))
        in_a_file = "the steps are in metrics.jsonl"
        self._terminal = guard("progress", lambda: Terminal(args.max_steps, steps_done), in_a_file, Terminal.close)

    def curve(self) -> Curves | None:
        """Reward and mean length of the steps so far; None if they are not to be had."""
        return self._metrics(lambda metrics: metrics.curve)

    def step(
        self,
        step: int,
        groups: list[Group],
        advantages: list[torch.Tensor],
        record: dict[str, float] | None,
        evaluations: list[dict],
    ) -> None:
        """One step is done; `record` is its line in metrics.jsonl, None where there is none."""
        self._steps_done = step
        notes = self._numbers(step, record, evaluations) if record else []
        if self._completions:
            self._completions(CompletionLog.log, step, groups, advantages)
        state = f"Step {step}{f' of {self._max_steps}' if self._max_steps else ''}."
        self._report(Report.step, step, groups, record or {}, notes)
        self._report(Report.refresh, state, evaluations, self.sampler_settings)
        self._cards(Cards.renew, evaluations)

    def _numbers(self, step: int, record: dict[str, float], evaluations: list[dict]) -> list[str]:
        """Metrics, terminal, trackers and advice, which is returned."""
        record = self._metrics(MetricsLog.log, step, record, default=record)
        self._terminal(Terminal.step, step, record)
        numbers = {name: value for name, value in record.items() if name != "step" and defined(value)}
        for tracker in self._trackers:
            tracker.log(step, numbers)
        notes = self._advisor(Advisor.look, record, evaluations, self.sampler_settings, default=[])
        for sentence in notes:
            print(f"note: {sentence}", flush=True)
        return notes

    def waiting(self, here: int, wanted: int) -> None:
        """The groups of a step come in; the live line says how many are here."""
        self._terminal(Terminal.waiting, here, wanted, self.samplers_do())

    def samplers_do(self) -> str:
        """What the samplers spend their time on, by the groups of the last steps; empty where nothing is known."""
        return self._advisor(Advisor.samplers_do, default="")

    def close(self, reason: str, evaluations: list[dict], failed: bool = False) -> None:
        """The run is over: last report, curves as a picture, held-out results in the cards. Takes no longer than a
        minute for each, whatever they wait for.
        """
        self._exit_code = int(failed)
        self._terminal(Terminal.close)
        self._metrics.within(END_SECONDS, MetricsLog.close)
        if self._completions:
            self._completions.within(END_SECONDS, CompletionLog.close)
        self._cards.within(END_SECONDS, Cards.renew, evaluations)
        state = f"Ended after {self._steps_done} steps: {reason}."
        self._report.within(END_SECONDS, Report.close, state, evaluations, self.sampler_settings)
        records = self._report(lambda report: report.curves.records(), default=[])
        if records:
            self._picture.within(END_SECONDS, picture, records)
        for tracker in self._trackers:
            tracker.close()
