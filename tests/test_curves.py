"""Records of a run of any length: read from the end, or sparsely, and kept as a bounded number of means."""

import json
import random

import pytest

from grpo import json_lines
from grpo.curves import READ, Curves
from grpo.json_lines import keep_steps, lines_backwards, spread_records
from grpo.metrics import MetricsLog, read_metrics


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
@pytest.mark.parametrize("end", [b"", b"half a line"])
def test_lines_are_read_backwards_whatever_the_block(tmp_path, monkeypatch, block, end):
    monkeypatch.setattr(json_lines, "BLOCK", block)
    rng = random.Random(block)
    for count in (0, 1, 2, 30):
        lines = [b"x" * rng.choice((0, 1, 6, 7, 63, 64, 65)) for _ in range(count)]
        path = tmp_path / "lines"
        path.write_bytes(b"".join(line + b"\n" for line in lines) + end)
        with open(path, "rb") as file:
            found = list(lines_backwards(file))
        starts = [sum(len(line) + 1 for line in lines[:i]) for i in range(count)]
        assert found == list(zip(starts, lines, strict=True))[::-1]


@pytest.mark.parametrize("steps_done, kept", [(0, []), (1, [1]), (2, [1, 2, 2]), (9, [1, 2, 2, 5, 9])])
@pytest.mark.parametrize("end", ["", '{"step": 9', 'no JSON\n{"no": "step"}\n[1]\n'])
def test_later_records_and_what_is_no_record_are_cut_off(tmp_path, steps_done, kept, end):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 2, 5, 9)) + end)
    assert keep_steps(path, steps_done) == ({"step": kept[-1]} if kept else None)
    assert [record["step"] for record in read_metrics(path)] == kept
    assert keep_steps(tmp_path / "nothing", 3) is None


def write_records(path, steps: int) -> None:
    path.write_text("".join(f'{{"step": {n}, "reward": {n / 1000}, "x": "{"y" * 40}"}}\n' for n in range(1, steps + 1)))


def test_a_long_run_is_taken_up_by_few_of_its_records(tmp_path, monkeypatch):
    path, steps = tmp_path / "metrics.jsonl", 50_000
    write_records(path, steps)
    read = []
    real = json_lines.read_record
    monkeypatch.setattr(json_lines, "read_record", lambda line: read.append(1) or real(line))
    log = MetricsLog(path, steps)
    assert len(read) <= READ * MetricsLog.POINTS + 2  # one of them the record that stays last
    rows = log.curve.stretches()
    assert [(first, last) for first, last, _ in rows] == [(8192 * i + 1, min(8192 * (i + 1), steps)) for i in range(7)]
    for first, last, means in rows:
        assert means["reward"] == pytest.approx((first + last) / 2000, abs=0.5)  # of 50, so within 1 % of the range
    log.log(steps + 1, {"reward": 7.0})
    assert log.curve.records()[-1]["reward"] == 7.0 and log.curve.stretches()[-1][1] == steps + 1


def test_a_short_run_is_taken_up_by_all_of_its_records(tmp_path):
    write_records(tmp_path / "x", 50)
    assert [record["step"] for record in spread_records(tmp_path / "x", 40)] == list(range(1, 51))
    again, straight = Curves(8).read(tmp_path / "x"), Curves(8)
    for record in read_metrics(tmp_path / "x"):
        straight.add(record)
    assert again.records() == straight.records()


def test_a_step_costs_the_same_after_many(tmp_path):
    curves = Curves(10, ("step", "reward"))
    for step in range(1, 100_001):
        curves.add({"step": step, "reward": 1.0 if step % 2 else float("inf")})
        if step % 9_999 == 0:
            assert len(curves.buckets) <= 10
    assert all(bucket.means()["reward"] == 1.0 for bucket in curves.buckets)
    assert [first for first, _, _ in curves.stretches()][:3] == [1, 16385, 32769]  # 10 x 2^14 hold them


def test_a_gap_in_the_records_is_a_gap(tmp_path):
    curves = Curves(10)
    for step in (1, 2, 500, 501):
        curves.add({"step": step, "x": float(step)})
    assert [(first, last) for first, last, _ in curves.stretches()] == [(1, 64), (449, 501)]
    assert [record["x"] for record in curves.records()] == [1.5, 501.0]
