"""The sampling worker with another reward function, named by the variable REWARD (default: even)."""

import os
import re
import sys

import sampling_worker


def even(response: str, answer: str) -> dict:
    """A reward in 0..1 that any model can earn: the share of even numbers among the words."""
    words = response.split()
    count = sum(word.isdigit() and int(word) % 2 == 0 for word in words)
    return {"reward": count / max(1, len(words)), "length": float(len(words))}


def steps(response: str, answer: str) -> dict:
    """Process rewards: each word is a step that earns 1 if it is an even number."""
    words = list(re.finditer(r"\S+", response))
    each = [(word.end(), float(word[0].isdigit() and int(word[0]) % 2 == 0)) for word in words]
    return {"reward": sum(reward for _, reward in each), "steps": each}


def broken(response: str, answer: str) -> dict:
    """A bug in the user's code."""
    raise KeyError("a bug in my reward")


if __name__ == "__main__":
    sampling_worker.reward_function = globals()[os.environ.get("REWARD", "even")]
    sys.exit(sampling_worker.run())
