"""Work that a thread finishes, in order, behind the decode loop's back: rewards, packing, sending."""

import queue
import threading
from collections.abc import Callable


class Outbox:
    """Calls `finish(item)` for each item put in, one after another; an error is raised at the next put or close."""

    def __init__(self, finish: Callable, capacity: int = 64):
        self._finish = finish
        self._items: queue.Queue = queue.Queue(capacity)  # full: the decode loop waits, memory does not grow
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, item) -> None:
        """Hand an item over; waits only while `capacity` items are unfinished."""
        while True:
            self.check()
            try:
                return self._items.put(item, timeout=0.5)
            except queue.Full:
                continue

    def check(self) -> None:
        """Raise what went wrong with an earlier item."""
        if self._error is not None:
            raise self._error

    def close(self, limit: float) -> None:
        """Finish what was put in, within `limit` seconds."""
        if self._thread.is_alive():
            self._items.put(None)
            self._thread.join(limit)
        self.check()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._finish(item)
            except Exception as error:  # any error of the user's reward belongs into the main thread
                self._error = error
                return
