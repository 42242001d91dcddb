"""Whatever goes wrong with what only reports, at whatever moment, is a sentence, and the run goes on."""

import argparse
import asyncio
import io
import json
import math
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from test_rollout import make_group
from tiny import tiny_tokenizer

from grpo import guard
from grpo.advice import Advisor
from grpo.completions import CompletionLog
from grpo.guard import Guard
from grpo.json_lines import JsonLines
from grpo.logbook import Logbook
from grpo.metrics import MetricsLog, read_metrics
from grpo.model_card import Cards
from grpo.report import Report
from grpo.sampler_terminal import SamplerTerminal
from grpo.terminal import Terminal
from grpo.trackers import Remote, TensorBoard

RECORD = {"reward": 1.0, "num_tokens": 40, "step_time": 1.0, "tokens_per_second": 40.0, "grad_norm": math.inf}
ERRORS = [
    OSError(28, "No space left on device"),
    BrokenPipeError(32, "Broken pipe"),
    UnicodeEncodeError("ascii", "\u7b54", 0, 1, "ordinal not in range(128)"),
    KeyError("reward"),
    RecursionError("too deep"),
    MemoryError(),
    SystemExit("no key"),
    asyncio.CancelledError(),
]
# what is broken -> (its name in the sentence, the class, its methods at start, step and end)
REPORTERS = {
    "metrics": ("metrics.jsonl", MetricsLog, "__init__", "log", "close"),
    "advice": ("advice on the run", Advisor, "__init__", "look", "look"),
    "report": ("report.html", Report, "__init__", "step", "close"),
    "page": ("report.html", Report, "__init__", "refresh", "refresh"),
    "completions": ("completions.jsonl", CompletionLog, "__init__", "log", "close"),
    "cards": ("the renewal of model cards", Cards, "__init__", "renew", "renew"),
    "progress": ("progress", Terminal, "__init__", "step", "close"),
    "tensorboard": ("--log_to tensorboard", TensorBoard, "__init__", "log", "close"),
    "wandb": ("--log_to wandb", Remote, "__init__", "log", "close"),
}


class Recorder:
    """Stands for wandb: takes down what it is called with."""

    def __init__(self):
        self.steps = []

    def init(self, **settings) -> None:
        """A run begins."""

    def log(self, record: dict, step: int) -> None:
        """One step."""
        self.steps.append((step, record))

    def finish(self) -> None:
        """The run ends."""


@pytest.fixture
def wandb(monkeypatch):
    module = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def no_picture(monkeypatch):
    """curves.png takes most of a short run's time."""
    monkeypatch.setattr("grpo.logbook.picture", lambda path, records: path.touch())


def drive(folder: Path, steps: int = 3, tokenizer=None) -> None:
    """A run of `steps` steps, as the learner's rank 0 calls the logbook."""
    args = argparse.Namespace(max_steps=steps, log_to=["tensorboard", "wandb"], num_iterations=1, max_staleness=1)
    args.log_completions = 1
    folder.mkdir(exist_ok=True)
    logbook = Logbook(args, folder, "run", {"lr": 1}, tokenizer or tiny_tokenizer(), 0)
    logbook.waiting(0, 1)
    for step in range(1, steps + 1):
        logbook.step(step, [make_group()], [torch.tensor([0.5, -0.5])], dict(RECORD), [])
    logbook.close("done", [])


def raising(error: BaseException):
    def fail(*args, **settings):
        raise error

    return fail


def hang(*args, **settings) -> None:
    threading.Event().wait()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("moment", ["start", "step", "end"])
@pytest.mark.parametrize("broken", REPORTERS)
def test_any_error_of_any_reporter_at_any_moment_is_one_sentence(
    tmp_path, monkeypatch, capsys, wandb, no_picture, broken, moment, error
):
    name, owner, *methods = REPORTERS[broken]
    monkeypatch.setattr(owner, methods[["start", "step", "end"].index(moment)], raising(error))
    drive(tmp_path / "run")
    printed = capsys.readouterr().out
    told = [line for line in printed.split("\n") if line.startswith((f"{name} fails", f"{name} is given up"))]
    assert len(told) == 1 and type(error).__name__ in told[0], printed
    if isinstance(error, OSError):
        assert "is tried again at each step: make room there" in told[0]
    else:
        assert "the run goes on without it: " in told[0]
    folder = tmp_path / "run"
    if broken != "metrics":
        assert [record["step"] for record in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3]
    if broken not in ("report", "page"):
        assert "Ended after 3 steps" in (folder / "report.html").read_text()
    if broken != "completions":
        assert len((folder / "completions.jsonl").read_text().split("\n")) == 7
    if broken != "progress":
        assert "step 3/3" in printed
    if broken != "wandb":
        assert [step for step, _ in wandb.steps] == [1, 2, 3]
        assert "grad_norm" not in wandb.steps[0][1]  # it is infinite


@pytest.mark.parametrize("moment", ["__init__", "log", "close"])
@pytest.mark.parametrize("name, owner", [("tensorboard", TensorBoard), ("wandb", Remote)])
def test_a_tracker_that_hangs_is_left_behind(tmp_path, monkeypatch, capsys, wandb, no_picture, name, owner, moment):
    monkeypatch.setattr(owner, moment, hang)
    monkeypatch.setattr(guard, "END_SECONDS", 0.3)
    monkeypatch.setattr(guard, "ANSWER_SECONDS", 0.2)
    started = time.monotonic()
    drive(tmp_path / "run")
    assert time.monotonic() - started < 60
    assert capsys.readouterr().out.count(f"--log_to {name} is given up (it has not") == 1
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


def test_a_tracker_that_hangs_is_given_up_in_mid_run_and_its_calls_are_bounded(monkeypatch, capsys):
    monkeypatch.setattr(guard, "BACKLOG", 2)
    apart = guard.Apart(Guard("slow", object))
    apart(hang)
    for _ in range(100):
        apart(print)
        time.sleep(0.001)
    assert capsys.readouterr().out.count("slow is given up (it is 2 calls behind)") == 1
    apart.close(print)  # at once


@pytest.mark.parametrize("target", ["grpo.logbook.picture", "grpo.report.page"])
def test_an_end_that_hangs_is_bounded(tmp_path, monkeypatch, capsys, wandb, target):
    monkeypatch.setattr(target, hang)
    monkeypatch.setattr("grpo.logbook.END_SECONDS", 0.3)
    monkeypatch.setattr("grpo.report.Report.refresh", lambda *args, **settings: None)
    if target == "grpo.report.page":
        monkeypatch.setattr(Report, "close", hang)
    drive(tmp_path / "run")
    name = "curves.png" if "picture" in target else "report.html"
    assert f"{name} is given up (it has not ended within 0 s)" in capsys.readouterr().out


def test_a_tokenizer_that_fails_ends_nothing(tmp_path, capsys, wandb, no_picture):
    class Broken:
        chat_template = None
        decode = staticmethod(raising(TypeError("ids")))

    drive(tmp_path / "run", tokenizer=Broken())
    printed = capsys.readouterr().out
    assert printed.count("is given up (TypeError: ids)") == 2  # completions and report
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


def test_a_system_without_threads_costs_the_trackers_alone(tmp_path, monkeypatch, capsys, wandb, no_picture):
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    drive(tmp_path / "run")
    assert capsys.readouterr().out.count("is given up (it has no thread to work in)") == 2
    assert "Ended after 3 steps" in (tmp_path / "run" / "report.html").read_text()


def test_ctrl_c_passes_through_a_guard():
    with pytest.raises(KeyboardInterrupt):
        Guard("x", object)(raising(KeyboardInterrupt()))


def test_a_guard_tries_again_after_a_full_disk_and_not_after_a_bug(capsys):
    errors = [OSError(28, "full"), OSError(28, "full"), None, ValueError("a bug"), None]

    def act(_):
        error = errors.pop(0)
        if error:
            raise error
        return "done"

    one = Guard("x", object)
    assert [one(act, default="-") for _ in range(6)] == ["-", "-", "done", "-", "-", "-"] and len(errors) == 1
    assert capsys.readouterr().out.count("\n") == 2  # one line of each kind


def test_what_was_taken_from_the_terminal_is_given_back(monkeypatch, capsys):
    monkeypatch.setenv("GRPO_TERMINAL", "80")
    before = sys.stdout
    one = Guard("progress", lambda: Terminal(3, 0), release=Terminal.close).start()
    assert sys.stdout is not before
    one(raising(KeyError("x")))
    assert sys.stdout is before and "progress is given up" in capsys.readouterr().out


def test_the_samplers_progress_cannot_end_it(monkeypatch, capsys):
    monkeypatch.setattr("grpo.sampler_terminal._Lines.sent", raising(KeyError("x")))
    terminal = SamplerTerminal(0)
    for _ in range(2):
        terminal.sent(make_group())
    terminal.waiting()
    terminal.close()
    assert capsys.readouterr().out.count("the sampler's progress is given up (KeyError: 'x')") == 1


@pytest.fixture
def small_files():
    """Sets a limit to the size of files that this process writes: real errors of a real disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_records_that_the_disk_refused_are_written_when_there_is_room(tmp_path, small_files):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.log(1, {"reward": 1.0, "num_tokens": 7})
    small_files(path.stat().st_size + 10)  # in the middle of the next line
    one = Guard("metrics.jsonl", lambda: log)
    for step in (2, 3):
        one(MetricsLog.log, step, {"reward": float(step), "num_tokens": 7})
        assert path.read_bytes().count(b"\n") == 1 and path.read_bytes().endswith(b"}\n")  # no half a line
    small_files(resource.RLIM_INFINITY)
    one(MetricsLog.log, 4, {"reward": 4.0, "num_tokens": 7})
    records = read_metrics(path)
    assert [(r["step"], r["reward"], r["num_tokens"]) for r in records] == [(n, float(n), 7 * n) for n in (1, 2, 3, 4)]


def test_lines_that_never_found_room_are_counted_at_the_end(tmp_path, small_files, capsys, monkeypatch):
    lines = JsonLines(tmp_path / "x.jsonl")
    one = Guard("x.jsonl", lambda: lines)
    small_files(5)
    for step in (1, 2):
        one(JsonLines.append, [{"step": step}])
    one(JsonLines.close)
    printed = capsys.readouterr().out
    assert printed.count("x.jsonl fails (OSError: [Errno 27]") == 1
    assert "x.jsonl is given up (ValueError: its last 2 lines are lost: [Errno 27]" in printed
    small_files(resource.RLIM_INFINITY)
    monkeypatch.setattr("grpo.json_lines.WAITING_BYTES", 30)  # two lines
    small_files(5)
    lines = JsonLines(tmp_path / "y.jsonl")
    for step in (1, 2, 3, 4):
        Guard("y.jsonl", lambda: lines)(JsonLines.append, [{"step": step}])
    small_files(resource.RLIM_INFINITY)
    lines.append([])
    assert [record["step"] for record in read_metrics(tmp_path / "y.jsonl")] == [3, 4]  # memory is bounded


SPEAKER = """
import os, sys, time
sys.path.insert(0, {root!r})
import grpo.streams
from grpo.streams import make_streams_safe
grpo.streams.STALL_SECONDS = 0.3
make_streams_safe()
make_streams_safe()
{code}
open({done!r}, "w").write("ended")
"""


def speak(tmp_path, code: str, **settings) -> tuple[subprocess.Popen, Path]:
    """A process with safe streams; the file says whether it got to its end."""
    done = tmp_path / "done"
    text = SPEAKER.format(root=str(Path(__file__).resolve().parents[1]), code=code, done=str(done))
    return subprocess.Popen([sys.executable, "-c", text], **settings), done


def test_characters_that_the_output_lacks_are_escaped_in_a_process_and_its_own(tmp_path):
    code = "print('\u7b54\\ud800'); os.system(sys.executable + ' -c \"print(chr(31572))\"')"
    process, done = speak(tmp_path, code, stdout=subprocess.PIPE, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert process.communicate(timeout=60)[0] == b"\\u7b54\\ud800\n\\u7b54\n" and process.returncode == 0
    assert done.read_text() == "ended"


@pytest.mark.parametrize("way", ["closed pipe", "closed descriptor", "full disk", "closed in Python"])
def test_an_output_that_takes_nothing_ends_nothing(tmp_path, way):
    code = {"closed in Python": "sys.stdout.unsafe.close(); "}.get(way, "") + (
        "print('x' * 10_000, flush=True); print(sys.stdout.isatty(), file=sys.stderr); sys.stdout.flush()"
    )
    if way == "closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
        process, done = speak(tmp_path, code, stdout=writing, stderr=writing)
        os.close(writing)
    elif way == "full disk":
        with open("/dev/full", "w") as full:
            process, done = speak(tmp_path, code, stdout=full, stderr=full)
    else:
        closing = (lambda: (os.close(1), os.close(2))) if way == "closed descriptor" else None
        process, done = speak(tmp_path, code, preexec_fn=closing)
    assert process.wait(60) == 0 and done.read_text() == "ended"


def test_an_output_that_nobody_reads_stalls_nothing_and_is_used_again_when_somebody_does(tmp_path):
    reading, writing = os.pipe()
    code = (
        "for n in range(3000): print(n, 'x' * 100)\n"  # more than a pipe holds
        "import logging; logging.basicConfig(stream=sys.stdout.unsafe, level=10); make_streams_safe()\n"
        "for n in range(3000): logging.info('a library says %s', 'y' * 100)\n"
        "open(os.environ['FULL'], 'w').close()\n"
        "while not os.path.exists(os.environ['READ']): time.sleep(0.02)\n"
        "print('the last line')"
    )
    places = {"FULL": str(tmp_path / "full"), "READ": str(tmp_path / "read")}
    process, done = speak(tmp_path, code, stdout=writing, env=os.environ | places)
    os.close(writing)
    deadline = time.monotonic() + 60
    while not Path(places["FULL"]).exists():  # it gets there although nobody reads
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    first = os.read(reading, 1 << 20)
    Path(places["READ"]).touch()
    with open(reading, "rb") as rest:
        printed = first + rest.read()
    assert process.wait(60) == 0 and done.read_text() == "ended"
    assert printed.startswith(b"0 xxx") and printed.endswith(b"the last line\n") and b"2999 x" not in printed


@pytest.mark.parametrize("code", [0, 1])
def test_foreign_code_that_hangs_at_the_exit_is_ended_in_time(code):
    text = (
        "import atexit, threading; from grpo import guard; guard.LEAVE_SECONDS = 0.2; "
        f"guard.leave_in_time(lambda: {code}); atexit.register(threading.Event().wait)"
    )
    root = Path(__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", text], cwd=root, timeout=60).returncode == code


def strict(text: str):
    """JSON as other programs read it: no NaN, no Infinity."""

    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_in_every_file(tmp_path, wandb, no_picture, monkeypatch):
    monkeypatch.setitem(RECORD, "kl", math.nan)
    drive(tmp_path / "run")
    first = strict((tmp_path / "run" / "metrics.jsonl").read_text().split("\n")[0])
    assert first["grad_norm"] is None and first["kl"] is None and first["reward"] == 1.0
    for name in ("report.jsonl", "completions.jsonl"):
        lines = (tmp_path / "run" / name).read_text().split("\n")
        assert [strict(line) for line in lines if line], name


@pytest.mark.parametrize("terminal", [io.StringIO, lambda: None])
def test_a_guard_speaks_to_nobody_without_harm(monkeypatch, terminal):
    stream = terminal()
    if stream:
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    assert Guard("x", object)(raising(ValueError("y")), default=7) == 7
