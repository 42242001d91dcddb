"""What the two programs say in the terminal: rows that fit, and one live line where somebody looks."""

import re
import sys
import types

import pytest
import torch
from test_rollout import make_group

from grpo.sampler_terminal import SamplerTerminal, summary
from grpo.terminal import HEADER_STEPS, Terminal, fitting, remaining, short

METRICS = {
    "reward": 1.25,
    "rewards/correct/mean": 0.8125,
    "rewards/format/mean": 0.62,
    "completions/mean_length": 123.44,
    "completions/clipped_ratio": 0.1,
    "frac_reward_zero_std": 0.25,
    "kl": 0.001234,
    "loss": 0.0,
    "grad_norm": 0.523,
    "step_time": 2.0,
    "tokens_per_second": 4321.0,
}


def play(monkeypatch, max_steps: int, steps: int = 3, metrics: dict = METRICS) -> None:
    clock = iter(range(0, 10_000, 60))
    monkeypatch.setattr("grpo.terminal.time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    terminal = Terminal(max_steps, 0)
    terminal.waiting(1, 4)
    for step in range(1, steps + 1):
        terminal.step(step, metrics)
    print("note: something")
    print("a warning", file=sys.stderr)
    terminal.close()
    print("the end")


def test_without_a_terminal_there_are_plain_aligned_rows(monkeypatch, capsys):
    play(monkeypatch, max_steps=75)
    printed = capsys.readouterr()
    assert printed.out.split("\n")[:2] == [
        "           reward correct format length clipped equal     kl   grad s/step",
        "step 1/75   1.250   0.812  0.620  123.4     10%   25% 0.0012  0.523   2.00",
    ]
    assert printed.out.endswith("note: something\nthe end\n") and "loss" not in printed.out
    assert "\r" not in printed.out and printed.err == "a warning\n"


@pytest.mark.parametrize("max_steps", [0, 50, 1000, 100_000])
@pytest.mark.parametrize("parts", [0, 2, 9])
def test_a_row_fits_80_columns_and_stands_under_its_header(monkeypatch, capsys, max_steps, parts):
    wide = METRICS | {f"rewards/{'p' * 30}{i}/mean": -123456.789 for i in range(parts)}
    wide |= {"kl": 1.23456e-12, "reward": -1e10, "grad_norm": float("nan"), "step_time": None}
    play(monkeypatch, max_steps, HEADER_STEPS + 1, wide)
    lines = capsys.readouterr().out.split("\n")
    rows = [line for line in lines if line.startswith("step ")]
    headers = [line for line in lines if "reward" in line]
    assert len(rows) == HEADER_STEPS + 1 and len(headers) == 2 and len(set(headers)) == 1
    assert {len(line) for line in rows + headers} == {len(headers[0])} and len(headers[0]) <= 80
    for name in ("reward", "length", "s/step", "kl", "clipped"):
        assert name in headers[0]
    ends = [match.end() for match in re.finditer(r"\S+", headers[0])]
    assert all(row[end - 1] != " " and row[end : end + 1] in ("", " ") for row in rows for end in ends)


def test_a_row_takes_no_column_for_what_is_not_measured():
    names = [column.name for column in fitting({"reward": 1.0, "step_time": 1.0}, 10, 80)]
    assert names == ["reward", "step_time", "left"]
    assert [short(v, 6) for v in (1234567.0, 0.00012345, -12.3456, 1e-300)] == ["1.23e6", "1.2e-4", "-12.35", "1e-300"]


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
    assert lines[0].split()[:2] == ["reward", "correct"]
    assert [line[:7] for line in lines[1:4]] == [f"step {n}{'/' if max_steps else ' '}" for n in (1, 2, 3)]
    assert lines[4:] == ["note: something", "a warning", "the end", ""]  # nothing else is on a line of its own
    assert all(len(part) <= 100 for part in re.split(r"[\r\n]", printed))


def test_the_live_line_names_what_the_samplers_do(monkeypatch, capsys):
    monkeypatch.setenv("GRPO_TERMINAL", "80")
    terminal = Terminal(75, 0)
    terminal.waiting(3, 16, "reward_function takes 96% of the samplers' time")
    terminal.close()
    assert "3 of 16 groups; reward_function takes 96% of the samplers' time" in capsys.readouterr().out


def test_times_for_people():
    assert [remaining(s) for s in (0.4, 61, 3600, 200000)] == ["0:00:00", "0:01:01", "1:00:00", "2 d 7:33:20"]


def group(version: int, reward_seconds: float = 0.1):
    stats = {"generation_seconds": 0.01, "reward_seconds": reward_seconds}
    return make_group(adapter_version=version, stats=stats, rewards=torch.tensor([1.5, float("nan")]))


def test_the_sampler_has_a_line_a_version(capsys):
    terminal = SamplerTerminal(0)
    terminal.doing("generating 3 groups")
    terminal.made(3)
    for version in (1, 1, 2):
        terminal.sent(group(version))
    terminal.close()
    # groups of 5 tokens in two completions, 0.01 s each
    assert capsys.readouterr().out == (
        "version 1        2 groups  reward  1.500  length    2.5      500 tokens/s\n"
        "version 2        1 groups  reward  1.500  length    2.5      500 tokens/s\n"
    )
    none = make_group(rewards=torch.tensor([float("nan")] * 2), stats={})
    assert "reward   none" in summary([none]) and len(summary([group(99_999)] * 9_999)) <= 80


def test_a_long_version_has_further_lines(capsys, monkeypatch):
    monkeypatch.setattr("grpo.sampler_terminal.LINE_SECONDS", 0.0)
    terminal = SamplerTerminal(0)
    terminal.made(2)
    terminal.sent(group(1))
    terminal.sent(group(1))
    assert capsys.readouterr().out.count("version 1 ") == 2


@pytest.mark.parametrize("workers, words", [(0, "--reward_workers N"), (4, "--reward_workers from 4")])
def test_a_sampler_without_tickets_says_that_its_groups_wait_for_the_reward(capsys, monkeypatch, workers, words):
    monkeypatch.setattr("grpo.sampler_terminal.NOTICE_SECONDS", 0.0)
    terminal = SamplerTerminal(workers)
    terminal.made(9)
    terminal.sent(group(1, reward_seconds=12.0))
    terminal.waiting()
    printed = capsys.readouterr().out
    assert "8 groups wait for reward_function, which takes 12.0 s a group: " in printed and words in printed
    terminal.made(-8)
    terminal.waiting()
    assert capsys.readouterr().out == ""


def test_at_a_terminal_the_sampler_says_what_it_does(capsys, monkeypatch):
    monkeypatch.setenv("GRPO_TERMINAL", "90")
    terminal = SamplerTerminal(0)
    terminal.made(4)
    terminal.sent(group(3))
    terminal.doing("generating 8 groups")
    terminal.close()
    printed = capsys.readouterr().out
    assert "500 tokens/s  generating 8 groups; 3 groups await rewards" in printed
    assert all(len(part) <= 90 for part in re.split(r"[\r\n]", printed))
