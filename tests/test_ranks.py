"""A rank and the launcher above it: killed together, the rank goes; told to stop together, it saves first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-u", *sys.argv[1:]])
"""
RANK = """
import signal, sys, time
sys.path.insert(0, {root!r})
from grpo.ranks import _follow_launchers
_follow_launchers()
def save(*_):
    time.sleep(4)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
print("outlived its launcher", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number, whole_group, ending", [(signal.SIGTERM, True, "saved"), (signal.SIGKILL, False, "")])
def test_a_rank_follows_a_killed_launcher_and_saves_when_both_are_told_to_stop(tmp_path, number, whole_group, ending):
    launcher, rank = tmp_path / "deepspeed", tmp_path / "rank.py"
    launcher.write_text(LAUNCHER)
    rank.write_text(RANK.format(root=str(ROOT)))
    process = subprocess.Popen(
        [sys.executable, launcher, rank], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert any(line == "ready\n" for line in process.stdout)  # DeepSpeed may have something to say before
    os.killpg(process.pid, number) if whole_group else os.kill(process.pid, number)
    started = time.monotonic()
    assert process.stdout.read().strip() == ending  # until the rank, which holds the other end, is gone
    assert time.monotonic() - started < 20
    process.wait()
