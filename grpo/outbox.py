"""Work that is finished in a thread, in order, behind the decode loop's back: rewards, packing, sending."""

import queue
import threading
import time
from collections.abc import Callable


class Outbox:
    """Calls `finish(start(item))` for each item: `start` as it is put in, `finish` in a thread, one after another.

    So whatever `start` sets going, in other threads or processes, is under way for up to `capacity` items at once.
    What either raises is raised at the next put, check or close, in the caller's thread.
    """

    def __init__(self, finish: Callable, capacity: int = 64, start: Callable = lambda item: item):
        self._start, self._finish = start, finish
        self._items: queue.Queue = queue.Queue(capacity)  # full: the decode loop waits, memory does not grow
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, item) -> None:
        """Hand an item over; waits only while `capacity` items are unfinished."""
        self.check()
        started = self._start(item)
        while True:
            self.check()
            try:
                return self._items.put((started,), timeout=0.5)
            except queue.Full:
                continue

    def check(self) -> None:
        """Raise what went wrong with an earlier item."""
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:  # SystemExit would end the program without a word
            raise RuntimeError(f"finishing a group ended with {self._error!r}") from self._error

    def close(self, limit: float) -> None:
        """Finish what was put in, within `limit` seconds."""
        deadline = time.monotonic() + limit
        if self._thread.is_alive():
            try:
                self._items.put(None, timeout=limit)
            except queue.Full:
                pass  # it was not done in time, which the caller sees by what is unacknowledged
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self.check()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._finish(*item)
            except BaseException as error:  # any error belongs into the main thread; this one would end in silence
                self._error = error
                return
