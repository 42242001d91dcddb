"""What run.sh puts between a program and the terminal: everything goes to a log file as plain lines, and the terminal
is spared what DeepSpeed's launcher says of itself.

    PROGRAM 2>&1 | python -u grpo/console.py LOGFILE

A live line (redrawn with carriage returns) reaches the terminal as it is written; of it, the log gets what stood last.
The log file is started anew, with the old content in LOGFILE.1, when it has grown beyond MAX_BYTES. Ctrl-C and SIGTERM
are for the program, so the filter ignores them and ends when the program has closed its output. Standard library
only: it starts in a few hundredths of a second.
"""

import contextlib
import os
import re
import signal
import sys
from typing import IO

MAX_BYTES = 50 << 20
# DeepSpeed's loggers: "[2026-12-01 02:15:01,123] [INFO] [launch.py:230:main] ..."; their warnings while it trains stay
OF_DEEPSPEED = re.compile(rb"\[\d{4}-\d\d-\d\d [\d:,]+\] \[(?:INFO\]|\w+\] \[(?:launch|runner|real_accelerator)\.py)")
PREFIX = re.compile(rb"\[[\d:, -]*(?:\] ?(?:\[\w*(?:\] ?(?:\[[\w.]*)?)?)?)?")  # what may still become such a line


class Console:
    """Takes the program's bytes, however they are cut; `log` is None where no file can be written."""

    def __init__(self, terminal: IO[bytes], log: "Log | None"):
        self._terminal, self._log = terminal, log
        self._line = b""  # since the last newline
        self._shown = 0  # bytes of it that the terminal has

    def feed(self, data: bytes) -> None:
        """Some more of the program's output."""
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._line += part
            self._show(whole=True)
            self._keep()
            self._line, self._shown = b"", 0
        self._line += rest
        self._show(whole=False)

    def close(self) -> None:
        """The program has ended; a last line without a newline counts too."""
        if self._line:
            self.feed(b"\n")

    def _show(self, whole: bool) -> None:
        last = self._line.rpartition(b"\r")[2]  # behind a live line that was wiped out
        hidden = OF_DEEPSPEED.match(last) or (not whole and PREFIX.fullmatch(last))  # or not known yet
        end = len(self._line) - (len(last) if hidden else 0)
        with contextlib.suppress(OSError):  # the terminal is gone: the log is kept all the same
            self._terminal.write(self._line[self._shown : end] + b"\n" * (whole and not hidden))
            self._terminal.flush()
        self._shown = max(self._shown, end)

    def _keep(self) -> None:
        if self._log:
            self._log.write(self._line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n")


class Log:
    """A file that is appended to, and never larger than twice MAX_BYTES together with its predecessor."""

    def __init__(self, path: str):
        self._path = path
        self._file = open(path, "ab", buffering=0)

    def write(self, line: bytes) -> None:
        """Append a line; a disk that is full loses it, for this only reports."""
        with contextlib.suppress(OSError):
            if self._file.tell() > MAX_BYTES:
                self._file.close()
                os.replace(self._path, self._path + ".1")
                self._file = open(self._path, "ab", buffering=0)
            self._file.write(line)


def main() -> None:
    """Copy standard input until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log = None
    if len(sys.argv) > 1 and sys.argv[1]:
        try:
            log = Log(sys.argv[1])
        except OSError as error:
            print(f"no log is kept: {sys.argv[1]} cannot be written ({error.strerror})", flush=True)
    console = Console(sys.stdout.buffer, log)
    while data := os.read(0, 1 << 16):
        console.feed(data)
    console.close()


if __name__ == "__main__":
    main()
