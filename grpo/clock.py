"""Time as a process lives it, so that its own sleep is not taken for the other side's silence."""

import threading
import time

SLEEP_SECONDS = 5.0  # between two readings: more than this, and the process was stopped or starved


class AwakeClock:
    """time.monotonic() less the time for which this process did not run: SIGSTOP, a debugger, a starved machine.

    It must be read every second or so: a longer gap between two readings than SLEEP_SECONDS counts as sleep.
    """

    def __init__(self, monotonic=time.monotonic):
        self._monotonic, self._lock = monotonic, threading.Lock()
        self._last, self._slept = monotonic(), 0.0

    def now(self) -> float:
        """Seconds awake, from an arbitrary start; never decreases."""
        with self._lock:
            now = self._monotonic()
            if now - self._last > SLEEP_SECONDS:
                self._slept += now - self._last
            self._last = now
            return now - self._slept


awake = AwakeClock()  # of this process; a channel's thread reads it every half second
