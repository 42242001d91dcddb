"""Calling the user's reward function and holding it to its contract.

reward_function(response, answer) returns a dict with "reward" (a finite number, or None to leave the completion out
of its group's baseline) and any further numbers, which are logged by name. An optional "steps" entry, a list of
(end_character, reward), gives process rewards.
"""

import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

SHOWN_CHARACTERS = 200  # of a response, in an error
START_SECONDS = 300  # for the reward processes to start


class RewardError(RuntimeError):
    """The reward function broke its contract; the message holds the prompt index, the response and the traceback."""


@dataclass
class Score:
    """One completion's reward; NaN stands for None."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[int, float]] = field(default_factory=list)  # (end_character, reward)


class RewardPool:
    """Calls the reward function beside the decode loop: in one thread, or in `workers` processes for slow functions.

    The reward function must be importable by name, as one in utils.py is. What it loads at its first call, a reward
    model for instance, it loads once per process.
    """

    def __init__(self, reward_function: Callable[[str, str], dict], workers: int, timeout: float):
        self._function, self._timeout = reward_function, timeout
        self._executor: Executor = (
            ProcessPoolExecutor(
                workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_follow_parent,
                initargs=(os.getpid(),),
            )
            if workers
            else ThreadPoolExecutor(1, thread_name_prefix="reward")
        )
        # a process imports the user's code with its first task; that is not the reward's time
        self._starting = [self._executor.submit(callable, reward_function) for _ in range(workers)]

    def score_all(self, responses: list[str], answer: str, prompt_index: int) -> list[Score]:
        """The scores of a group's responses, in their order.

        Raises:
            RewardError: as `score` does; also when one response takes longer than the limit, or its process dies.
        """
        while self._starting:
            self._starting.pop().result(START_SECONDS)
        futures = [self._executor.submit(score, self._function, text, answer, prompt_index) for text in responses]
        return [self._result(future, text, prompt_index) for future, text in zip(futures, responses, strict=True)]

    def _result(self, future, response: str, prompt_index: int) -> Score:
        try:
            return future.result(self._timeout)
        except TimeoutError as error:
            raise RewardError(
                f"{_where(prompt_index, response)}\nit has not returned within {self._timeout:g} s (--reward_timeout)"
            ) from error
        except BrokenProcessPool as error:
            raise RewardError(
                f"{_where(prompt_index, response)}\nits process died (out of memory, or it called exit)"
            ) from error

    def close(self) -> None:
        """Let go of the workers, hung ones included."""
        processes = list((getattr(self._executor, "_processes", None) or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


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
        result = reward_function(response, answer)
    except Exception as error:  # the user's code may raise anything; it is reported, never swallowed
        raise RewardError(f"{where}\n{traceback.format_exc()}") from error
    if not isinstance(result, dict) or "reward" not in result:
        raise RewardError(f'{where}\nit returned {result!r}, not a dict with "reward"')
    numbers = {name: value for name, value in result.items() if name != "steps"}
    for name, value in numbers.items():
        if name == "reward" and value is None:
            continue
        if isinstance(value, str) or not _is_finite(value):
            raise RewardError(f"{where}\nits {name!r} is {value!r}, not a finite number")
    reward = math.nan if numbers.pop("reward") is None else float(result["reward"])
    steps = _check_steps(result.get("steps", []), len(response), where)
    return Score(reward, {str(name): float(value) for name, value in numbers.items()}, steps)


def _check_steps(steps, length: int, where: str) -> list[tuple[int, float]]:
    try:
        checked = [(int(end), float(reward)) for end, reward in steps]
    except (TypeError, ValueError) as error:
        raise RewardError(f'{where}\nits "steps" are {steps!r}, not (end_character, reward) pairs: {error}') from error
    for end, reward in checked:
        if not 0 < end <= length or not math.isfinite(reward):
            raise RewardError(f"{where}\nits step {(end, reward)} is outside the {length} characters, or not finite")
    return checked


def _is_finite(value) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False
