"""JSON as everything here writes it, and files of one JSON object a line that are appended to.

NaN and Infinity are not JSON: a number that is not finite is null in every file.
"""

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

BLOCK = 1 << 16  # bytes read at a time
WAITING_BYTES = 64 << 20  # of lines that a full disk has refused, kept until there is room
USUAL_LINE = 1 << 10  # bytes; decides whether a file is read whole


def to_json(value, **options) -> str:
    """JSON text; what is no finite number becomes null."""
    return json.dumps(clean(value), allow_nan=False, **options)


def clean(value):
    """The same value with None for each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: clean(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [clean(one) for one in value]
    return value


class JsonLines:
    """Appends records to `path`, each of which has a "step"; those after `steps_done` are cut off.

    A line is whole or not there. Lines that the disk refuses are kept, up to WAITING_BYTES, and written before the next
    ones, so a file that was in want of room for a while is complete again.
    """

    def __init__(self, path: Path, steps_done: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last = keep_steps(path, steps_done)  # the newest record that stays
        self._file = open(path, "ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        self._waiting: deque[bytes] = deque()

    def append(self, records: list[dict]) -> None:
        """Write one line each; OSError if they have to wait."""
        self._waiting += [to_json(record).encode() + b"\n" for record in records]
        content = b"".join(self._waiting)
        try:
            self._write(content)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._size)  # half a line
            self._forget(len(content) - WAITING_BYTES)
            raise
        self._size += len(content)
        self._waiting.clear()

    def close(self) -> None:
        """Close the file; ValueError if there is no room for lines that wait."""
        try:
            self.append([])
        except OSError as error:
            raise ValueError(f"its last {len(self._waiting)} lines are lost: {error}") from error
        finally:
            self._file.close()

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) :]

    def _forget(self, size: int) -> None:
        while size > 0:
            size -= len(self._waiting.popleft())


def keep_steps(path: Path, steps_done: int) -> dict | None:
    """Cut the records of later steps than `steps_done` off; returns the last one that stays.

    Reads from the end, and no further than it must. What is no record is cut off with the rest.
    """
    try:
        file = open(path, "r+b")
    except FileNotFoundError:
        return None
    with file:
        for start, line in lines_backwards(file):
            record = read_record(line)
            if record is not None and record["step"] <= steps_done:
                file.truncate(start + len(line) + 1)
                return record
        file.truncate(0)
    return None


def lines_backwards(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Where each whole line starts, and the line without its end, the last one first."""
    position, rest, ended = file.seek(0, os.SEEK_END), b"", False  # ended: a line end follows `rest`
    while position:
        size = min(BLOCK, position)
        position -= size
        file.seek(position)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        start = position + len(rest) + 1 + sum(len(line) + 1 for line in lines)
        for i, line in reversed(list(enumerate(lines))):
            start -= len(line) + 1
            if ended or i < len(lines) - 1:
                yield start, line
        ended = ended or bool(lines)
    if ended:
        yield 0, rest


def spread_records(path: Path, most: int) -> list[dict]:
    """The records of a file in their order: all of them, or of a long file `most` that are spread over it evenly."""
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        lines = list(file) if size <= most * USUAL_LINE else _spread_lines(file, size, most)
    records = [read_record(line) for line in lines]
    return [record for record in records if record is not None]


def _spread_lines(file: IO[bytes], size: int, most: int) -> list[bytes]:
    found = {}
    for i in range(most):
        file.seek(size * i // most)
        if i:
            file.readline()  # the rest of a line
        found[file.tell()] = file.readline()
    for start, line in lines_backwards(file):
        found[start] = line
        break
    return list(found.values())


def read_record(line: bytes) -> dict | None:
    """The record in a line, None if there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None
