"""training_worker.py with a fault in everything that reports, all at once.

    python tests/learner_with_faults.py FLAGS
"""

import sys
import threading
import types

import grpo.guard
import grpo.learner
import grpo.report
import training_worker
from grpo.advice import Advisor
from grpo.completions import CompletionLog
from grpo.metrics import MetricsLog
from grpo.model_card import Cards
from grpo.report import Report
from grpo.terminal import Terminal
from grpo.trackers import TensorBoard


def raising(error: BaseException):
    """A function that fails."""

    def fail(*args, **settings):
        raise error

    return fail


def hang(*args, **settings) -> None:
    """A function that never returns."""
    threading.Event().wait()


def break_everything() -> None:
    """Each reporter fails in its own way, at its start, at each step or at its end."""
    Advisor.look = raising(KeyError("reward"))
    CompletionLog.log = raising(RecursionError("too deep"))
    MetricsLog.log = raising(OSError(28, "No space left on device"))
    Cards.renew = raising(PermissionError(13, "Permission denied"))
    Report.__init__ = raising(MemoryError())
    Terminal.step = raising(UnicodeEncodeError("ascii", "\u7b54", 0, 1, "ordinal not in range(128)"))
    TensorBoard.log = hang
    grpo.learner.model_card = raising(ValueError("unmatched '{' in format spec"))
    grpo.guard.END_SECONDS = 2.0  # that a hanging one is waited for
    wandb = types.ModuleType("wandb")
    wandb.init = raising(SystemExit("api_key not configured (no-tty)"))
    sys.modules["wandb"] = wandb


if __name__ == "__main__":
    break_everything()
    training_worker.main()
