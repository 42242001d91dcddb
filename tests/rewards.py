"""Reward functions for tests of the processes that call them; importing this file is quick."""

import asyncio
import os
import sys
import time
from pathlib import Path


def slow_for_some(response: str, answer: str) -> dict:
    """A reward whose time depends on the response, so that processes finish out of order."""
    if response == "hang":
        time.sleep(12)  # longer than the limit; the thread of a pool without processes outlives it
    if response == "die":
        os._exit(3)
    if response == "exit":
        sys.exit(3)
    if response == "cancelled":
        raise asyncio.CancelledError
    if response == "bug":
        raise KeyError("my own bug")
    time.sleep(0.5 if response == "slow" else 0.2 / (1 + len(response)))
    return {"reward": float(len(response)), "process": float(os.getpid())}


def eight_together(response: str, answer: str) -> dict:
    """The number of calls that are under way, once there are eight; each leaves the file that its response names."""
    Path(response).touch()
    deadline = time.monotonic() + 50
    while (calls := len(list(Path(response).parent.iterdir()))) < 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    return {"reward": calls}
