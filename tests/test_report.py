"""The report of a run: right numbers at the right places, no foreign text run as HTML, readable on desk and phone."""

import html
import json
import re
import shutil
import subprocess

import pytest
from test_rollout import make_group
from tiny import tiny_tokenizer

from grpo.charts import Line, histogram, label, line_chart, nice_ticks, plot_curves
from grpo.curves import Curves
from grpo.metrics import MetricsLog, read_metrics
from grpo.report import POINTS, Report, spread_out

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "<script>document.title = 'run'"


def record(step: int) -> dict:
    """A line of metrics.jsonl."""
    return {
        "reward": 1 + step / 100,
        "reward_stderr": 0.1,
        "rewards/format/mean": 0.5,
        "completions/mean_length": 100.0 - step,
        "completions/length_p10": 50.0,
        "completions/length_p90": 130.0,
        "entropy": 0.4,
        "kl": float("nan") if step == 3 else 0.01 * step,
        "learner/idle_share": 0.3,
        "sampler/idle_share": 0.1,
        "step_time": 2.0,
    }


EVALUATIONS = [
    {"version": 0, "questions": 10, "accuracy": 0.25, "accuracy_stderr": 0.1, "accuracy_lenient": 0.5},
    {"version": 10, "questions": 0},  # all were dropped
    {"version": 12, "questions": 10, "accuracy": 0.75, "accuracy_stderr": 0.1, "accuracy_lenient": 0.75},
]


def make_report(folder, steps=12, ended=True):
    """A run's folder with a report."""
    log = MetricsLog(folder / "metrics.jsonl")
    report = Report(folder, {"model_path": f"models/{EVIL}", "beta": 0.04}, tiny_tokenizer())
    for step in range(1, steps + 1):
        log.log(step, record(step))
        notes = [f"a note of step {step} {EVIL}"] if step == 3 else []
        report.step(step, [make_group(answer=f"17 {EVIL}")], record(step), notes)
        report.refresh(f"Step {step} of {steps}.", [])
    log.close()
    if ended:
        sampler = {"system_prompt": f"think {EVIL}", "max_new_tokens": 77}
        report.close(f"Ended after {steps} steps: done {EVIL}.", EVALUATIONS, sampler)
    return folder / "report.html"


@pytest.mark.parametrize(
    "low, high, ticks",
    [
        (0.0, 1.0, [0, 0.25, 0.5, 0.75, 1.0]),
        (1.04, 2.11, [1.0, 1.5, 2.0, 2.5]),
        (0, 3e-4, [0, 1e-4, 2e-4, 3e-4]),
        (5.0, 5.0, [4.5, 4.75, 5.0, 5.25, 5.5]),
        (0.0, 0.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_axis_numbers():
    assert [label(v) for v in (0, 0.25, 1234.5, 2e-4, 123456.0)] == ["0", "0.25", "1,234", "2.0e-4", "1.2e5"]


def test_a_line_is_drawn_where_its_values_are():
    chart = line_chart("t", [Line("x", [1, 2, 3], [0.0, 1.0, None])])
    # 406 units from x 52 to 458, values 0 to 1 from y 196 up to 10
    assert 'points="52.0,196.0 255.0,10.0"' in chart and "<b>1</b>" in chart
    assert line_chart("t", [Line("x", [1], [None])]) == ""
    gap = line_chart("t", [Line("x", [1, 2, 3, 4, 5], [0.0, 1.0, None, 0.5, float("nan")])])
    assert gap.count("<polyline") == 1 and gap.count("<circle") == 1


@pytest.mark.parametrize("steps", [1, 2, POINTS, POINTS + 1, 4 * POINTS, 50_000])
def test_curves_of_any_length_keep_mean_and_newest_value(steps):
    curves = Curves(POINTS)
    for step in range(1, steps + 1):
        curves.add({"step": step, "x": float(step), "gap": None if step % 2 else 1.0})
    records = curves.records()
    assert len(records) <= POINTS + 1 and records[-1]["step"] == records[-1]["x"] == steps
    assert [record["step"] for record in records] == sorted({record["step"] for record in records})
    assert all(record["x"] == record["step"] and record.get("gap") in (None, 1.0) for record in records)
    assert Curves(POINTS).records() == []


def test_shares_of_a_histogram_add_up():
    chart = histogram("t", {"a": [0, 0, 1, 3], "b": [3.0]}, bins=2)
    heights = [float(h) for h in re.findall(r'<rect class="c0".*?height="([\d.]+)"', chart)]
    assert heights[0] == pytest.approx(3 * heights[1], abs=0.2)  # three of four below the middle
    assert histogram("t", {"a": []}) == "" and histogram("t", {"a": [2.0, 2.0]})


def test_the_page_has_all_and_runs_nothing(tmp_path):
    text = make_report(tmp_path).read_text()
    for wanted in ("Reward", "Held-out accuracy", "<b>0.75</b>",
                   "Length of completions", "Entropy", "Balance of the two sides", "Ended after 12 steps",
                   "a note of step 3", "Step 10", "Step 12", "beta", "transformers",
                   "<h4>gold answer</h4><pre>17", "system_prompt", "<td>77</td>"):  # fmt: skip
        assert wanted in text, wanted
    assert "Step 11<" not in text  # samples are kept at 1 to 9, 10, 20 .. and the newest
    assert "<script" not in text
    assert text.count("&lt;script") == 6 + 11  # title twice, state, note, settings of both sides; gold answers
    assert not re.search(r'(src|href)=|url\(|@import|http-equiv="refresh"', text)
    assert "Clipped tokens" not in text  # nothing was measured


def test_the_page_renews_itself_while_the_run_goes_on(tmp_path):
    assert 'http-equiv="refresh"' in make_report(tmp_path, ended=False).read_text()


def test_steps_that_are_done_again_are_not_shown_twice(tmp_path):
    make_report(tmp_path, steps=9)
    report = Report(tmp_path, {}, tiny_tokenizer(), steps_done=4)
    assert [event["step"] for event in read_metrics(tmp_path / "report.jsonl")] == [1, 2, 3, 3, 4]
    report.step(5, [make_group()], record(5), [])
    report.close("done", [])
    assert "<b>1.05</b>reward" in (tmp_path / "report.html").read_text()
    assert [event["step"] for event in read_metrics(tmp_path / "report.jsonl")] == [1, 2, 3, 3, 4, 5]


def test_samples_are_spread_over_the_run():
    assert spread_out(list(range(5)), 12) == [0, 1, 2, 3, 4]
    assert spread_out(list(range(100)), 4) == [0, 33, 66, 99]


def test_the_curves_are_a_picture(tmp_path):
    plot_curves([{"step": step} | record(step) for step in (1, 2)], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    plot_curves([], tmp_path / "empty.png")


PROBE = """
<!DOCTYPE html><body style="margin: 0"><iframe width="%d" height="900" style="border: 0" srcdoc="%s"></iframe>
<script>
  onload = () => {
    const page = document.querySelector("iframe").contentDocument, width = page.documentElement.clientWidth;
    const wide = [...page.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > width + 1);
    const figures = [...page.querySelectorAll("svg")].map(e => e.getBoundingClientRect());
    document.body.innerHTML = "<pre></pre>";
    document.querySelector("pre").textContent = JSON.stringify({
      width, wide: wide.length, figures: figures.length, columns: new Set(figures.map(r => r.left)).size,
      drawn: figures.every(r => r.width > 200 && r.height > 90), title: page.title });
  };
</script></body>"""


@pytest.mark.slow
@pytest.mark.parametrize("width, columns", [(1280, 3), (390, 1)])
def test_the_page_fits_the_window_of_a_browser(tmp_path, width, columns):
    if not BROWSER:
        pytest.skip("no Chromium here: apt-get install chromium")
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE % (width, html.escape(make_report(tmp_path).read_text())))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *options, "--virtual-time-budget=5000", "--dump-dom", probe.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(html.unescape(re.search(r"<pre>(.*)</pre>", shown.stdout)[1]))
    assert abs(found["width"] - width) <= 20 and found["wide"] == 0 and found["drawn"]  # a scroll bar takes some
    assert found["columns"] == columns and found["figures"] >= 8 and found["title"].startswith("GRPO")
