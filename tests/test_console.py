"""The filter between a program and the terminal: however the bytes are cut, the log has whole plain lines."""

import io
import random
import subprocess
import sys
import time

import pytest
from processes import ROOT

from grpo import console as console_module
from grpo.console import Console, Log

LAUNCHER = b"[2026-12-01 02:15:01,123] [INFO] [launch.py:230:main] nnodes=1, num_local_procs=2\n"
FAILED = b"[2026-12-01 02:15:09,123] [ERROR] [launch.py:343:sigkill_handler] ['python'] exits with return code = 1\n"
WARNED = b"[2026-12-01 02:15:09,123] [WARNING] [stage_1_and_2.py:9:step] scale is 2\n"
OUTPUT = (
    LAUNCHER
    + b"learner: listening\n[not of DeepSpeed] a line\n\rstep 1  reward 1\r\x1b[Kstep 1/3  reward 1.0\n\rlive\r      \r"
    + WARNED
    + b"[\n[2026-12-01\n"
    + b"training_worker: the port is taken\n"
    + FAILED
)


class Terminal(io.BytesIO):
    """Counts how often it was written to."""


@pytest.mark.parametrize("seed", range(20))
def test_terminal_and_log_get_theirs_however_the_bytes_are_cut(tmp_path, seed):
    rng, terminal = random.Random(seed), Terminal()
    console = Console(terminal, Log(str(tmp_path / "log")))
    rest = OUTPUT
    while rest:
        size = rng.randint(1, rng.choice([1, 3, 50, 500]))
        console.feed(rest[:size])
        rest = rest[size:]
    console.close()
    kept = (tmp_path / "log").read_bytes()
    assert b"\r" not in kept and kept.startswith(LAUNCHER) and FAILED in kept and WARNED in kept
    assert b"\x1b[Kstep 1/3  reward 1.0\n" in kept and kept.count(b"live") == 0
    shown = terminal.getvalue()
    assert shown == OUTPUT.replace(LAUNCHER, b"").replace(FAILED, b"")
    assert shown.endswith(b"training_worker: the port is taken\n")  # our sentence is the last line


def test_the_live_line_is_shown_at_once():
    terminal = Terminal()
    console = Console(terminal, None)
    console.feed(b"\rstep 3  12 tokens/s")
    assert terminal.getvalue() == b"\rstep 3  12 tokens/s"
    console.feed(b"\r       \r")
    console.feed(FAILED[:30])
    console.feed(FAILED[30:])  # of the launcher, behind a live line that was wiped out
    console.feed(b"[2026")
    assert terminal.getvalue().endswith(b"tokens/s\r       \r")
    console.feed(b" was a good year")
    assert terminal.getvalue().endswith(b"\r       \r[2026 was a good year")


def test_a_log_does_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(console_module, "MAX_BYTES", 1000)
    log = Log(str(tmp_path / "log"))
    for i in range(1000):
        log.write(b"line %d\n" % i)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2 and max(sizes) <= 1010 and b"line 999\n" in (tmp_path / "log").read_bytes()


def test_as_a_program_it_outlives_ctrl_c_and_ends_with_its_input(tmp_path):
    command = [sys.executable, "-u", ROOT / "grpo" / "console.py", tmp_path / "log"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(b"first\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"first\n"
    process.send_signal(2)
    process.send_signal(15)
    time.sleep(0.1)
    out, _ = process.communicate(b"last", timeout=10)
    assert out == b"last\n" and (tmp_path / "log").read_bytes() == b"first\nlast\n" and process.returncode == 0
