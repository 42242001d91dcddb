"""The sampling worker with a reward that a random model can earn: how many of its tokens are words for even numbers."""

import sys

import sampling_worker


def count_even(response: str, answer: str) -> dict:
    """Reward in 0..1: the share of even numbers among the words."""
    words = response.split()
    even = sum(word.isdigit() and int(word) % 2 == 0 for word in words)
    return {"reward": even / max(1, len(words)), "length": float(len(words))}


if __name__ == "__main__":
    sampling_worker.reward_function = count_even
    sys.exit(sampling_worker.main())
