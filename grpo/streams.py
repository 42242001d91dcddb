"""Standard output and error that nobody has to read: what they cannot take is left out, and the program goes on.

Without this a character that the terminal's encoding lacks, a closed pipe (`| head`), a full disk under a log file or
a reader that has stopped (Ctrl-S, a pager) would end or stall the program that prints.
"""

import logging
import os
import select
import sys
import threading

PIECE = 400  # characters, 4,000 bytes with every one escaped: a pipe that is writable takes 4,096 without blocking
STALL_SECONDS = 5.0  # that one line may wait for a reader; the following ones wait no more until there is one


def make_streams_safe() -> None:
    """Replace sys.stdout and sys.stderr, also in logging; processes that it starts escape what they cannot encode."""
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the descriptor is closed: without this the next file that is opened would get its number
            stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        if not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            for stream in (sys.stdout, sys.stderr):
                if getattr(handler, "stream", None) is stream.unsafe:
                    handler.setStream(stream)  # of libraries that were imported before


class SafeStream:
    """A text stream whose write and flush never raise and never wait for long; all else is the stream's own."""

    def __init__(self, stream):
        self.unsafe, self._stalled = stream, False
        self._lock = threading.RLock()  # lines of several threads stay whole; a signal handler may print too
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str):
        return getattr(self.unsafe, name)

    def write(self, text: str) -> int:
        """Write what can be written."""
        with self._lock:
            try:
                for start in range(0, len(text), PIECE):
                    if not self._ready():
                        break
                    self.unsafe.write(text[start : start + PIECE])
                    self.unsafe.flush()
            except (OSError, ValueError):  # closed, full, or nobody at the other end
                pass
        return len(text)

    def flush(self) -> None:
        """Everything is written already."""

    def isatty(self) -> bool:
        """Whether a terminal is at the other end."""
        try:
            return self.unsafe.isatty()
        except ValueError:  # it is closed
            return False

    def _ready(self) -> bool:
        """Whether the stream takes a piece now, or within STALL_SECONDS if the last one was taken."""
        try:
            poll = select.poll()
            poll.register(self.unsafe.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # no file, such as a test's buffer
            return True
        self._stalled = not poll.poll(0 if self._stalled else STALL_SECONDS * 1000)
        return not self._stalled
