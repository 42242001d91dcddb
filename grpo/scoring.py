"""Calling the user's reward function and holding it to its contract.

reward_function(response, answer) returns a dict with "reward" (a finite number, or None to leave the completion out
of its group's baseline) and any further numbers, which are logged by name. An optional "steps" entry, a list of
(end_character, reward), gives process rewards.
"""

import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as LimitPassed  # before Python 3.11 another one than the built-in
from dataclasses import dataclass, field

SHOWN_CHARACTERS = 200  # of a response, in an error
START_SECONDS = 300  # for a reward process to start
LARGEST = 3.4e38  # rewards travel as float32

# why a ticket is dropped; the learner counts by these words
FAILED = "reward_function failed"
HUNG = "reward_function took longer than --reward_timeout"
DIED = "reward_function ended its process"

FIRST = 8  # groups: where none of so many has a reward, the function is broken
FIRST_HUNG = 2  # the same, of a function that hangs, for each of them costs --reward_timeout
LATEST = 32  # groups: more than half of so many without a reward is too many
SHOWN_KINDS = 20


class RewardError(RuntimeError):
    """The reward function broke its contract; the message holds the prompt index, the response and the traceback.

    `reason` is one of the few above; `kind` tells one fault from another, so that each is shown once.
    """

    def __init__(self, message: str, reason: str = FAILED, kind: str = ""):
        super().__init__(message)
        self.reason, self.kind = reason, kind or reason


class Failures:
    """Keeps count of the groups whose reward failed: some are left out, nearly all end the sampler."""

    def __init__(self):
        self._latest: deque[bool] = deque(maxlen=LATEST)
        self._any_good = False
        self._hung = 0
        self._shown: set[str] = set()

    def good(self) -> None:
        """A group has its rewards."""
        self._any_good = True
        self._latest.append(False)

    def bad(self, error: RewardError) -> None:
        """A group has none: show the error if it is the first of its kind.

        Raises:
            RewardError: where none of the first groups has a reward, or most of the latest have none.
        """
        self._latest.append(True)
        self._hung += error.reason == HUNG
        failed = sum(self._latest)
        if not self._any_good and (failed >= FIRST or self._hung >= FIRST_HUNG) or failed > LATEST // 2:
            raise RewardError(
                f"{error.reason}, for {failed} of the last {len(self._latest)} prompts; the latest:\n{error}",
                error.reason,
            ) from error
        if error.kind not in self._shown and len(self._shown) < SHOWN_KINDS:
            self._shown.add(error.kind)
            print(f"sampling_worker: {error}\nthis prompt is left out", file=sys.stderr, flush=True)


@dataclass
class Score:
    """One completion's reward; NaN stands for None."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[int, float]] = field(default_factory=list)  # (end_character, reward)


class RewardPool:
    """Calls the reward function beside the decode loop: in one thread, or in `workers` processes for slow functions.

    The reward function must be importable by name, as one in utils.py is. What it loads at its first call, a reward
    model for instance, it loads once per process. Responses of any number of groups are called in the order in which
    they were handed in, as many at a time as there are workers. A call that hangs or ends its process fails alone: it
    has a worker for itself, which is replaced.
    """

    def __init__(self, reward_function: Callable[[str, str], dict], workers: int, timeout: float):
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._closed = False
        self._callers = [_Caller(reward_function, workers > 0, timeout) for _ in range(max(1, workers))]
        for caller in self._callers:
            threading.Thread(target=self._serve, args=(caller,), name="rewards", daemon=True).start()

    def start(self, responses: list[str], answer: str, prompt_index: int) -> list[Future]:
        """Hand a group's responses in; returns what `results` waits for."""
        futures = [Future() for _ in responses]
        for future, response in zip(futures, responses, strict=True):
            self._calls.put((future, response, answer, prompt_index))
        return futures

    def results(self, futures: list[Future]) -> list["Score"]:
        """The scores of a group's responses, in their order.

        Raises:
            RewardError: as `score` does; also when one response takes longer than the limit, or its process dies.
        """
        try:
            return [future.result() for future in futures]
        except RewardError:
            for future in futures:
                future.cancel()  # those that have not begun: the group is lost anyway
            raise

    def score_all(self, responses: list[str], answer: str, prompt_index: int) -> list["Score"]:
        """The same in one call."""
        return self.results(self.start(responses, answer, prompt_index))

    def close(self) -> None:
        """Let go of the workers, hung ones included, and of what has not been called."""
        self._closed = True
        for caller in self._callers:
            self._calls.put(None)
            caller.close()

    def _serve(self, caller: "_Caller") -> None:
        caller.start()
        while (call := self._calls.get()) is not None:
            future, *arguments = call
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(caller.call(*arguments))
            except BaseException as error:  # whatever it is, whoever waits for the result must get it
                future.set_exception(error)


class _Caller:
    """One thread or process of its own for the reward function, and another one after it hung or died."""

    def __init__(self, function: Callable[[str, str], dict], process: bool, timeout: float):
        self._function, self._process, self._timeout = function, process, timeout
        self._executor, self._started = None, None

    def start(self) -> None:
        """Start the thread or process, without waiting for it."""
        if not self._process:
            self._executor = _DaemonThread()
            return
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(
            1, mp_context=context, initializer=_follow_parent, initargs=(os.getpid(),)
        )
        # a process imports the user's code with its first task; that is not the reward's time
        self._started = self._executor.submit(callable, self._function)

    def call(self, response: str, answer: str, prompt_index: int) -> "Score":
        """The response's score, within the limit; RewardError otherwise."""
        if self._executor is None:
            self.start()
        where = _where(prompt_index, response)
        try:
            self._wait_for_start(where)
            return self._executor.submit(score, self._function, response, answer, prompt_index).result(self._timeout)
        except RewardError:
            raise
        except LimitPassed as error:
            self._let_go()
            limit = f"within {self._timeout:g} s (--reward_timeout)"
            raise RewardError(f"{where}\nit has not returned {limit}", HUNG) from error
        except BrokenExecutor as error:
            self._let_go()
            raise RewardError(f"{where}\nits process died (out of memory, or it called exit)", DIED) from error
        except Exception as error:  # the function, or what it returned, cannot go to a process or come back
            self._let_go()
            raise RewardError(f"{where}\nit cannot be called in a process: {error!r}") from error

    def _wait_for_start(self, where: str) -> None:
        try:
            if self._started:
                self._started.result(START_SECONDS)
        except LimitPassed as error:
            self._let_go()
            raise RewardError(f"{where}\nits process has not started within {START_SECONDS} s", HUNG) from error
        self._started = None

    def close(self) -> None:
        """End the process; a thread that hangs is left behind, and keeps nobody from exiting."""
        self._let_go()

    def _let_go(self) -> None:
        executor, self._executor, self._started = self._executor, None, None
        if executor is None:
            return
        processes = list((getattr(executor, "_processes", None) or {}).values())
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


class _DaemonThread:
    """As much of an executor with one thread as a _Caller needs; the interpreter does not wait for its end."""

    def __init__(self):
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, name="reward", daemon=True).start()

    def submit(self, function: Callable, *arguments) -> Future:
        future = Future()
        self._calls.put((future, function, arguments))
        return future

    def shutdown(self, **_) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # sys.exit in the user's code is an error like any other
                future.set_exception(error)


def _follow_parent(parent: int) -> None:
    """In a worker: end when the sampler ends, however that comes about; Ctrl-C is the sampler's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _where(prompt_index: int, response: str) -> str:
    return f"reward_function failed for prompt {prompt_index}, response {response[:SHOWN_CHARACTERS]!r}"


def score(reward_function: Callable[[str, str], dict], response: str, answer: str, prompt_index: int) -> Score:
    """Call the reward function on one response.

    Raises:
        RewardError: when it raises, or returns anything but what its contract allows.
    """
    where = _where(prompt_index, response)
    try:
        return _read(reward_function(response, answer), len(response), where)
    except RewardError:
        raise
    except BaseException as error:  # the user's code may raise anything, SystemExit included; it is always reported
        frames = traceback.extract_tb(error.__traceback__)
        kind = f"{type(error).__name__} in {frames[-1].filename}, line {frames[-1].lineno}"
        raise RewardError(f"{where}\n{traceback.format_exc()}", kind=kind) from None


def _read(result, length: int, where: str) -> Score:
    """What the reward function returned for a response of `length` characters, as a Score."""
    if not isinstance(result, dict) or "reward" not in result:
        raise _broken(f'{where}\nit returned {_shown(result)}, not a dict with "reward"', "no reward")
    numbers = {name: value for name, value in result.items() if name != "steps"}
    for name, value in numbers.items():
        str(name).encode()  # names travel as UTF-8
        if name == "reward" and value is None:
            continue
        if isinstance(value, str) or not _is_finite(value):
            raise _broken(f"{where}\nits {name!r} is {_shown(value)}, not a finite number", f"{name} is no number")
    reward = math.nan if numbers.pop("reward") is None else float(result["reward"])
    steps = _check_steps(result.get("steps", []), length, where)
    return Score(reward, {str(name): float(value) for name, value in numbers.items()}, steps)


def _check_steps(steps, length: int, where: str) -> list[tuple[int, float]]:
    try:
        checked = [(int(end), float(reward)) for end, reward in steps]
    except (TypeError, ValueError, OverflowError) as error:
        message = f'{where}\nits "steps" are {_shown(steps)}, not (end_character, reward) pairs: {error}'
        raise _broken(message, "steps are no pairs") from error
    for end, reward in checked:
        if not 0 < end <= length or not _is_finite(reward):
            message = f"{where}\nits step {(end, reward)} is outside the {length} characters, or not finite"
            raise _broken(message, "a step is outside the response")
    return checked


def _broken(message: str, kind: str) -> RewardError:
    return RewardError(message, kind=kind)


def _shown(value) -> str:
    text = repr(value)
    return text if len(text) <= 2 * SHOWN_CHARACTERS else text[: 2 * SHOWN_CHARACTERS] + " ..."


def _is_finite(value) -> bool:
    try:
        return math.isfinite(value) and abs(float(value)) <= LARGEST
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several elements raises one of these
        return False
