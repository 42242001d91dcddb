"""Whether the Hugging Face hub can be reached: asked once, within seconds, instead of a minute of retries.

A local folder never needs the hub. The first name that does need it is preceded by one request; where nothing comes
back, this process goes offline: transformers, PEFT and datasets then take what their caches have.
"""

import contextlib
import functools
import os
import threading
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import get_session

PROBE_SECONDS = 5.0


def use_hub_if_it_answers(name: str) -> bool:
    """Whether `name` can come from the hub; after a silent hub the process is offline. False for a local folder."""
    if Path(name).expanduser().exists():
        return False
    if not hub_answers():
        constants.HF_HUB_OFFLINE = True  # read at each request,
        os.environ["HF_HUB_OFFLINE"] = "1"  # or read here, and by worker processes
    return not constants.HF_HUB_OFFLINE


def hub_answers(seconds: float = PROBE_SECONDS) -> bool:
    """Whether anything, an error page included, comes back from the hub (or HF_ENDPOINT) in a few seconds."""
    return not constants.HF_HUB_OFFLINE and _probe(constants.ENDPOINT, seconds)


@functools.lru_cache
def _probe(endpoint: str, seconds: float) -> bool:
    answered = threading.Event()

    def ask() -> None:
        # a silent hub, a refused connection, an HF_ENDPOINT that is no address: all the same here
        with contextlib.suppress(OSError, HTTPError, ValueError):
            get_session().head(endpoint, timeout=seconds)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # for looking up a name has no limit of its own
    thread.start()
    thread.join(seconds)
    return answered.is_set()
