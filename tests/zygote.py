"""A process that has imported what both workers import, and forks one worker after another: each test would otherwise
wait ten seconds for imports alone.

    python tests/zygote.py SOCKET

A request is a JSON line {"argv": [script, flags ...], "env": {...}, "log": file}; the answers are a line with the
worker's pid and, when it has ended, one with its exit code. A worker is a process of its own, in a session of its own.
"""

import json
import os
import runpy
import select
import socket
import sys

import sampling_worker  # noqa: F401  (imported so that the forks have it)
import training_worker

ROOT = os.path.dirname(training_worker.__file__)


def main() -> None:
    """Serve until the client is gone."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(sys.argv[1])
    server.listen()
    parent, waiting = os.getppid(), {}  # pid -> connection
    while os.getppid() == parent:
        if select.select([server], [], [], 0.02)[0]:
            connection, _ = server.accept()
            pid = start(json.loads(connection.makefile().readline()))
            connection.sendall(f"{pid}\n".encode())
            waiting[pid] = connection
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                with waiting.pop(pid) as connection:
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def start(request: dict) -> int:
    """Fork; the child runs the script as if it had been started by itself, and never returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["env"])
        sys.argv = request["argv"]
        sys.path[0] = os.path.dirname(sys.argv[0])
        if os.path.exists(os.path.join(sys.path[0], "grpo")) and sys.path[0] != ROOT:
            forget_the_project()  # a copy of it is started, with its own files
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # what the interpreter itself would do with it
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def forget_the_project() -> None:
    """Have the project's own modules imported again, and nothing else."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("utils", "data", "sampling_worker", "training_worker", "grpo"):
            del sys.modules[name]


if __name__ == "__main__":
    main()
