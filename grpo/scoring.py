"""Calling the user's reward function and holding it to its contract.

reward_function(response, answer) returns a dict with "reward" (a finite number, or None to leave the completion out
of its group's baseline) and any further numbers, which are logged by name. An optional "steps" entry, a list of
(end_character, reward), gives process rewards.
"""

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

SHOWN_CHARACTERS = 200  # of a response, in an error


class RewardError(RuntimeError):
    """The reward function broke its contract; the message holds the prompt index, the response and the traceback."""


@dataclass
class Score:
    """One completion's reward; NaN stands for None."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[int, float]] = field(default_factory=list)  # (end_character, reward)


def score(reward_function: Callable[[str, str], dict], response: str, answer: str, prompt_index: int) -> Score:
    """Call the reward function on one response.

    Raises:
        RewardError: when it raises, or returns anything but what its contract allows.
    """
    where = f"reward_function failed for prompt {prompt_index}, response {response[:SHOWN_CHARACTERS]!r}"
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
