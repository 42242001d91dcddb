"""Files that are whole or not there, even if the process is killed or the power fails in between."""

import fcntl
import os
from pathlib import Path
from typing import IO


def write_file(path: Path, content: bytes) -> None:
    """Write under a temporary name, fsync, rename."""
    temporary = path.with_name(f".tmp-{path.name}")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """fsync a file or a folder: a folder's new names are on disk only after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(file: IO[bytes], line: bytes) -> None:
    """Append a line and fsync it."""
    file.write(line + b"\n")
    file.flush()
    os.fsync(file.fileno())


def read_lines(path: Path, mend: bool = True) -> list[bytes]:
    """The whole lines of a file that is appended to; `mend` removes a last line that a crash cut off from the file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = content[: content.rfind(b"\n") + 1]
    if mend and len(whole) < len(content):
        os.truncate(path, len(whole))
    return whole.split(b"\n")[:-1]


def lock(path: Path) -> IO | None:
    """Hold the lock file `path` until the process ends, however it ends; None if another process holds it."""
    file = open(path, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:  # some network file systems have no locks
        print(f"{path} cannot be locked ({error.strerror}): see to it that one learner alone uses the folder")
    return file
