"""The sampling worker with another reward function, named by the variable REWARD (default: even)."""

import os
import re
import sys

import sampling_worker


def even(response: str, answer: str) -> dict:
    """A reward in 0..1 that any model can earn: the share of even digits among the characters."""
    return {"reward": sum(c in "02468" for c in response) / max(1, len(response)), "length": float(len(response))}


def steps(response: str, answer: str) -> dict:
    """Process rewards: each digit is a step that earns 1 if it is even."""
    each = [(digit.end(), float(digit[0] in "02468")) for digit in re.finditer(r"[0-9]", response)]
    return {"reward": sum(reward for _, reward in each), "steps": each}


def broken(response: str, answer: str) -> dict:
    """A bug in the user's code."""
    raise KeyError("a bug in my reward")


if __name__ == "__main__":
    sampling_worker.reward_function = globals()[os.environ.get("REWARD", "even")]
    sys.exit(sampling_worker.run())
