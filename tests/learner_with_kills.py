"""training_worker.py again and again, killed with SIGKILL at one named point after another, then left to end.

    KILLS="publishing:2 saved:1" python tests/learner_with_kills.py FLAGS

"publishing:2" kills the second time that point is reached. Each start is a process of its own, forked after the
imports; the last one is not killed.
"""

import os
import signal
import sys
from pathlib import Path

import deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine as deepspeed_files

import training_worker
from grpo import adapters, checkpoints, journal
from grpo.adapters import AdapterStore
from grpo.collector import Collector
from grpo.journal import Journal
from grpo.metrics import MetricsLog
from grpo.reference import References


def half_an_event(file, line: bytes) -> None:
    """A line of tickets.jsonl without its end."""
    file.write(line[: len(line) // 2])
    file.flush()


def half_pruned(store: AdapterStore, keep_newest: int, keep: set[int]) -> None:
    """The oldest version that may go, if there is one, has lost its first file."""
    for version in [version for version in store.versions()[:-keep_newest] if version not in keep][:1]:
        (store.folder(version) / "manifest.json").unlink()


POINTS = {
    # name -> (object, attribute, what happens before the kill: nothing, all of the call, or something half done)
    "group half written": (journal, "write_file", lambda path, content: path.with_name(f".tmp-{path.name}").touch()),
    "group unacknowledged": (Journal, "put", "call"),
    "event half written": (journal, "append_line", half_an_event),
    "step noted": (Journal, "note_step", "call"),
    "step trained": (AdapterStore, "publish", None),
    "publishing": (adapters.os, "rename", None),
    "renamed": (AdapterStore, "_point_latest", None),
    "last renamed": (AdapterStore, "_point_latest", None),  # the version of --max_steps
    "published": (AdapterStore, "publish", "call"),
    "pruning": (AdapterStore, "prune", half_pruned),
    "reference written": (References, "renew", "call"),
    "checkpoint half written": (
        deepspeed_files.TorchCheckpointEngine,
        "save",
        lambda self, state_dict, path: Path(path).write_bytes(b"PK"),
    ),
    "checkpoint not complete": (checkpoints, "write_file", None),
    "checkpoint complete": (Collector, "covered", None),
    "before the record": (MetricsLog, "log", None),
    "after the record": (MetricsLog, "log", "call"),
}


def main() -> None:
    """One child process for each kill, and a last one."""
    for name, count in [*(kill.rsplit(":", 1) for kill in os.environ["KILLS"].split(", ")), (None, 0)]:
        child = os.fork()
        if child == 0:
            if name:
                arm(name, int(count))
            training_worker.main()
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        print(f"--- {name}: {os.waitstatus_to_exitcode(status)}", flush=True)
    sys.exit(os.waitstatus_to_exitcode(status))


def arm(name: str, count: int) -> None:
    """Replace the function at this point by one that kills the process when it is called the count-th time."""
    owner, attribute, action = POINTS[name]
    original, left = getattr(owner, attribute), count
    last = int(sys.argv[sys.argv.index("--max_steps") + 1])

    def call(*arguments, **settings):
        nonlocal left
        left -= name != "last renamed" or arguments[1] == last
        if left:
            return original(*arguments, **settings)
        if action == "call":
            original(*arguments, **settings)
        elif action:
            action(*arguments, **settings)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, attribute, call)


if __name__ == "__main__":
    main()
