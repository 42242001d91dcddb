"""Numbers that are not finite: the step that is not taken because of them, and the way back when they persist.

A step is not taken if its advantages, log-probs, loss or metrics are NaN or infinite at any rank, or its gradient is:
weights, optimizer and scheduler stay as they were. It counts all the same: its tickets are finished and its version is
published, with the weights of the version before, so that samplers and a resumed run need no rule of their own.

The weights of a step are proven when the next step's numbers are finite. Groups stay in the journal until the
checkpoint that covers them is proven. A run that ends with LIMIT steps in a row not taken removes what is not proven.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo.adapters import AdapterStore
from grpo.batch import Batch
from grpo.checkpoints import checkpoint_steps, remove_checkpoints
from grpo.engine import RESCALED, SKIPPED, TAKEN, take_step
from grpo.held_out import forget_evaluations

LIMIT = 3  # steps in a row that are not taken
WATCHED = ("advantages", "sampler's log-probs", "log-probs", "loss", "loss's metrics")


class NotFinite(ValueError):
    """The run cannot go on as it is; the message says since when, why, and what to try."""


@dataclass
class Outcome:
    """What became of one step, the same at every rank."""

    taken: bool  # the weights have moved
    proven: bool  # all that was computed with the weights of the step before, the gradient too, is finite
    skipped: int  # optimizer steps that were not taken
    sentence: str = ""  # what to tell of it


class Watch:
    """Looks at each step's numbers at one rank; `moved` is the last step that moved the weights."""

    def __init__(self, steps_done: int):
        self.moved, self.in_a_row = steps_done, 0
        self._odd: list[torch.Tensor] = []  # (len(WATCHED),) bool for each micro-batch: what is not finite
        self._results: list[str] = []  # of each optimizer step

    @property
    def begun(self) -> bool:
        """Whether the step under way has moved the weights."""
        return TAKEN in self._results

    def guarded(self, loss: torch.Tensor, logprobs: torch.Tensor, batch: Batch, metrics: dict) -> torch.Tensor:
        """The loss; where anything is not finite, one whose gradient is NaN, so that no rank takes the step."""
        mask = batch.completion_mask
        sums = [torch.as_tensor(total, dtype=torch.float64) for total, _ in metrics.values()]
        sampled = batch.old_logprobs if batch.ref_logprobs is None else batch.old_logprobs + batch.ref_logprobs
        numbers = [value.masked_fill(~mask, 0.0) for value in (batch.advantages, sampled, logprobs)]
        numbers += [loss, torch.stack([total.to(loss.device) for total in sums] or [loss.detach()])]
        odd = torch.stack([~value.detach().isfinite().all() for value in numbers])
        self._odd.append(odd)
        nothing = torch.where(odd.any(), torch.nan, 0.0).to(logprobs.dtype)
        return loss + nothing * logprobs.sum()

    def step(self, engine) -> None:
        """DeepSpeed's step; at the last micro-batch it moves the weights, unless the gradient is not finite."""
        result = take_step(engine)
        if result:
            self._results.append(result)

    def finish(self, step: int, ranks) -> Outcome:
        """The outcome of `step`; every rank takes part."""
        odd = torch.stack(self._odd).sum(0).tolist() if self._odd else [0] * len(WATCHED)
        names = [name for name, count in zip(WATCHED, ranks.add_up(odd), strict=True) if count]
        results, self._odd, self._results = self._results, [], []
        proven = not names and SKIPPED not in results
        outcome = Outcome(TAKEN in results, proven, sum(result != TAKEN for result in results))
        if outcome.taken:
            self.moved, self.in_a_row = step, 0
        elif names or SKIPPED in results:
            self.in_a_row += 1
        if outcome.skipped:
            what = f"step {step} is" if outcome.skipped == len(results) else (
                f"{outcome.skipped} of {len(results)} optimizer steps of step {step} are"
            )  # fmt: skip
            outcome.sentence = f"{what} not taken: {self._reason(names, results)}; the weights stay as they were"
        return outcome

    @staticmethod
    def _reason(names: list[str], results: list[str]) -> str:
        if not names and RESCALED in results and SKIPPED not in results:
            return "the gradient overflowed in fp16, so DeepSpeed lowers the loss scale"
        return f"{' and '.join(names) or 'gradient'} not finite"

    def check(self, outcome: Outcome, step: int, rate: float) -> None:
        """NotFinite after LIMIT steps in a row that were not taken."""
        if self.in_a_row >= LIMIT:
            reason = outcome.sentence.split("not taken: ")[1].split(";")[0]
            raise NotFinite(
                f"{LIMIT} steps in a row were not taken ({reason} at step {step}); is the learning rate {rate:g} too "
                "high? Lower lr in --ds_config, or look at LOSS and the rewards, and start the same command again"
            )


def go_back(store: AdapterStore, checkpoints: Path, suspect: int, can_redo: Callable[[int], bool]) -> int | None:
    """Remove all that step `suspect` and later ones made; returns the step that the run resumes from.

    None, and nothing removed, where the run could not do these steps again: `can_redo(step)` tells whether the groups
    of all steps after `step` are there.
    """
    start = max((step for step in checkpoint_steps(checkpoints) if step < suspect), default=0)
    if suspect < 1 or not can_redo(start):
        return None
    for one in (store, AdapterStore(store.path, "references")):
        one.remove_from(suspect)
    forget_evaluations(store.path, suspect)
    remove_checkpoints(checkpoints, suspect)  # last: until then the next start comes here again
    return start
