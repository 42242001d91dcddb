"""What the learner says in the terminal: plain lines, and one live line where somebody looks."""

import re
import sys
import types

import pytest

from grpo.terminal import Terminal, remaining

METRICS = {"reward": 1.25, "loss": 0.0, "grad_norm": 0.5, "step_time": 2.0, "tokens_per_second": 4321.0}


def play(monkeypatch, max_steps: int, steps: int = 3) -> None:
    clock = iter(range(0, 1000, 60))
    monkeypatch.setattr("grpo.terminal.time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    terminal = Terminal(max_steps, 0)
    terminal.waiting(1, 4)
    for step in range(1, steps + 1):
        terminal.step(step, METRICS)
    print("note: something")
    print("a warning", file=sys.stderr)
    terminal.close()
    print("the end")


def test_without_a_terminal_there_are_plain_lines(monkeypatch, capsys):
    play(monkeypatch, max_steps=10)
    printed = capsys.readouterr()
    first = "step 1/10  reward 1.25  loss 0  grad 0.5  s/step 2  tokens/s 4321  left 0:09:00"
    assert printed.out.split("\n")[0] == first and printed.out.endswith("note: something\nthe end\n")
    assert "\r" not in printed.out and printed.err == "a warning\n"


LIVE = [
    (10, r"\r3/10 \|[^|]+\| reward 1.25  4,321 tokens/s  left 0:07:00 *\r"),
    (0, r"\rstep 3 reward 1.25  4,321 tokens/s *\r"),
]


@pytest.mark.parametrize("max_steps, live", LIVE)
def test_at_a_terminal_one_line_is_redrawn_below(monkeypatch, capsys, max_steps, live):
    monkeypatch.setenv("GRPO_TERMINAL", "100")
    play(monkeypatch, max_steps)
    printed = capsys.readouterr().out
    assert re.search(live, printed) and "1 of 4 groups are here" in printed
    lines = [line.rpartition("\r")[2] for line in printed.split("\n")]  # what run.sh leaves for the file
    assert [line[:7] for line in lines[:3]] == [f"step {n}{'/' if max_steps else ' '}" for n in (1, 2, 3)]
    assert lines[3:] == ["note: something", "a warning", "the end", ""]  # nothing else is on a line of its own
    assert all(len(part) <= 100 for part in re.split(r"[\r\n]", printed))


def test_times_for_people():
    assert [remaining(s) for s in (0.4, 61, 3600, 200000)] == ["0:00:00", "0:01:01", "1:00:00", "2 d 7:33:20"]
