"""report.html of a run: one file without scripts or links, which opens from disk and renews itself during the run.

Notes, and samples of completions at the steps 1 to 9, 10, 20 .. 90, 100, 200 .., are kept in report.jsonl; curves are
means over so many steps that some hundred points are left. Writing takes at most a fiftieth of the run's time.
"""

import html
import time
from dataclasses import dataclass
from pathlib import Path

from grpo.charts import Line, defined, histogram, line_chart, plot_curves
from grpo.curves import Curves
from grpo.files import write_file
from grpo.json_lines import JsonLines, spread_records
from grpo.metrics import reward_spread
from grpo.model_card import package_versions
from grpo.rollout import Group

POINTS = 400  # of a curve, at most
PAGE_SECONDS = 60  # between two loadings of the page by a browser
WRITE_SECONDS = 15  # at least between two writings
COST = 50  # a writing that took t seconds is followed by none for COST * t
SAMPLES, NOTES = 12, 20  # shown on the page
KEPT = 10_000  # notes and samples that are read when a run goes on

REWARD, LENGTH = "reward", "completions/mean_length"
# title, lines (name in metrics.jsonl: label), what it says
CHARTS = [
    ("Groups without variance, truncated completions", {"frac_reward_zero_std": "groups of equal rewards",
     "completions/clipped_ratio": "truncated"}, "Near 1 either leaves nothing to learn from."),
    ("KL to the reference", {"kl": "kl"}, "Nats a token."),
    ("Drift from the sampler's policy", {"approx_kl": "approx_kl"}, "Nats a token; what clipping bounds."),
    ("Clipped tokens", {"clip_ratio/high_mean": "above", "clip_ratio/low_mean": "below"}, "Share of the tokens."),
    ("Entropy", {"entropy": "entropy"}, "Nats a token; near 0 all completions of a prompt are alike."),
    ("Gradient norm", {"grad_norm": "before clipping"}, ""),
    ("Learning rate", {"learning_rate": "learning rate"}, ""),
    ("Staleness", {"staleness/mean": "mean", "staleness/max": "max"}, "Steps between sampling and training."),
    ("Balance of the two sides", {"learner/idle_share": "learner idle", "sampler/idle_share": "sampler idle"},
     "The side that is idle waits for the other."),
    ("Seconds a step", {"step_time": "all", "time/wait": "waiting for groups", "time/train": "training",
     "time/publish": "publishing", "time/other": "logging and saving"}, ""),
    ("Completion tokens a second", {"learner/tokens_per_second": "learner, while it trains",
     "sampler/tokens_per_second": "one sampler, while it decodes", "tokens_per_second": "the run"}, ""),
]  # fmt: skip


class Report:
    """The report of the run in `folder`, at rank 0."""

    def __init__(self, folder: Path, settings: dict, tokenizer, steps_done: int = 0):
        self._folder, self._settings, self._tokenizer = folder, settings, tokenizer
        self._lines = JsonLines(folder / "report.jsonl", steps_done)
        self._events = spread_records(folder / "report.jsonl", KEPT)
        self.curves = Curves(POINTS)
        if steps_done:
            self.curves.read(folder / "metrics.jsonl")
        self._newest: tuple[int, list[Group]] | None = None  # the newest step, unless it is among the events
        self._next = 0.0

    def step(self, step: int, groups: list[Group], record: dict[str, float], notes: list[str]) -> None:
        """Take down the numbers, what the advisor said and, at some steps, what the policy wrote."""
        self.curves.add(record | {"step": step})
        events = [{"step": step, "note": note} for note in notes]
        keep = step == int(str(step)[0]) * 10 ** (len(str(step)) - 1)
        if keep:
            events.append({"step": step} | self._sample(groups))
        self._newest = None if keep else (step, groups)
        self._events += events
        if events:
            self._lines.append(events)

    def refresh(self, state: str, evaluations: list[dict], sampler: dict | None = None, ended: bool = False) -> None:
        """Write report.html, unless it is too early; `state` is the sentence under the title, `sampler` the sampler's
        settings.
        """
        started = time.monotonic()
        if started < self._next and not ended:
            return
        self._next = started + WRITE_SECONDS  # also if the writing fails
        samples = [event for event in self._events if "rewards" in event]
        if self._newest:
            step, groups = self._newest
            samples.append({"step": step} | self._sample(groups))
        data = RunData(
            settings=self._settings,
            sampler=sampler or {},
            state=state,
            ended=ended,
            records=self.curves.records(),
            evaluations=spread_out([one for one in evaluations if one.get("questions")], POINTS),
            notes=[event for event in self._events if "note" in event],
            samples=samples,
        )
        write_file(self._folder / "report.html", page(data).encode(errors="backslashreplace"))
        now = time.monotonic()
        self._next = now + max(WRITE_SECONDS, COST * (now - started))

    def close(self, state: str, evaluations: list[dict], sampler: dict | None = None) -> None:
        """The last version, which renews itself no more."""
        self.refresh(state, evaluations, sampler, ended=True)
        self._lines.close()

    def _sample(self, groups: list[Group]) -> dict:
        """All rewards and lengths of the step, and the best and the worst completion of its most uneven group."""
        group = max(groups, key=lambda one: reward_spread(one.rewards))
        rows = group.completions()
        ranked = sorted((reward, i) for i, reward in enumerate(group.rewards.tolist()) if reward == reward)
        ends = {"best": ranked[-1], "worst": ranked[0]} if ranked else {}
        return {
            "prompt": self._tokenizer.decode(group.prompt_ids),
            "answer": group.answer,
            "texts": {name: [reward, self._tokenizer.decode(rows[i])] for name, (reward, i) in ends.items()},
            "rewards": [round(r, 4) for one in groups for r in one.rewards.tolist() if r == r],
            "lengths": [n for one in groups for n in one.lengths.tolist()],
        }


def picture(path: Path, records: list[dict]) -> None:
    """curves.png, whole or not there."""
    plot_curves(records, path.with_name(".tmp-curves.png"))
    path.with_name(".tmp-curves.png").replace(path)


@dataclass
class RunData:
    """Everything that a page shows."""

    settings: dict
    sampler: dict
    state: str
    ended: bool
    records: list[dict]
    evaluations: list[dict]
    notes: list[dict]
    samples: list[dict]


def page(data: RunData) -> str:
    """The whole page as HTML; every text that a model or a user wrote is escaped."""
    title = f"GRPO: {Path(str(data.settings.get('model_path', ''))).name}"
    return PAGE.format(
        refresh="" if data.ended else f'<meta http-equiv="refresh" content="{PAGE_SECONDS}">',
        title=html.escape(title),
        state=html.escape(data.state),
        written=f"Written {time.strftime('%Y-%m-%d %H:%M:%S')}." + ("" if data.ended else f" {WAITING}"),
        tiles=tiles(data),
        notes=notes(data.notes),
        charts="".join(charts(data)),
        samples="".join(
            sample(one, opened=one is data.samples[-1]) for one in reversed(spread_out(data.samples, SAMPLES))
        ),
        settings=table(data.settings),
        sampler=table(data.sampler) if data.sampler else "<p>Not known yet.</p>",
        versions=table(package_versions()),
    )


def charts(data: RunData) -> list[str]:
    """All figures that have something to show."""
    records = data.records
    components = sorted({name for record in records for name in record if name.startswith("rewards/")})
    found = [
        line_chart(
            "Reward", [banded(records, REWARD, "mean of a step", "reward_stderr")], "Band: two standard errors."
        ),
        line_chart("Parts of the reward", [line(records, name, part(name)) for name in components]),
        evaluation_chart(data.evaluations),
        line_chart(
            "Length of completions",
            [between(records, LENGTH, "mean", "completions/length_p10", "completions/length_p90")],
            "Tokens. Band: from the 10th to the 90th of a hundred.",
        ),
    ]
    if data.samples:
        ends = {f"step {one['step']}": one for one in (data.samples[0], data.samples[-1])}
        found.append(histogram("Rewards", {name: one["rewards"] for name, one in ends.items()}))
        found.append(histogram("Lengths", {name: one["lengths"] for name, one in ends.items()}))
    for title, lines, note in CHARTS:
        found.append(line_chart(title, [line(records, *pair) for pair in lines.items()], note))
    return [one for one in found if one]


def part(name: str) -> str:
    """rewards/format/mean -> format"""
    return name.removeprefix("rewards/").removesuffix("/mean")


def line(records: list[dict], name: str, label: str) -> Line:
    """One metric by step."""
    return Line(label, [record["step"] for record in records], [record.get(name) for record in records])


def banded(records: list[dict], name: str, label: str, error: str) -> Line:
    """A metric with a band of two standard errors."""
    curve = line(records, name, label)
    pairs = [(record.get(name), record.get(error)) for record in records]
    curve.low = [None if None in pair else pair[0] - 2 * pair[1] for pair in pairs]
    curve.high = [None if None in pair else pair[0] + 2 * pair[1] for pair in pairs]
    return curve


def between(records: list[dict], name: str, label: str, low: str, high: str) -> Line:
    """A metric with a band between two others."""
    curve = line(records, name, label)
    curve.low, curve.high = ([record.get(edge) for record in records] for edge in (low, high))
    return curve


def evaluation_chart(evaluations: list[dict]) -> str:
    """Held-out accuracy by adapter version, by both rules."""
    records = [one | {"step": one["version"]} for one in evaluations]
    strict = banded(records, "accuracy", "strict", "accuracy_stderr")
    lenient = line(records, "accuracy_lenient", "lenient")
    return line_chart("Held-out accuracy", [strict, lenient], "By adapter version. Band: two standard errors.")


def tiles(data: RunData) -> str:
    """The newest values of what people look at first."""
    newest = data.records[-1] if data.records else {}
    accuracies = [one["accuracy"] for one in data.evaluations]
    shown = {
        "reward": newest.get(REWARD),
        **{part(name): value for name, value in newest.items() if name.startswith("rewards/")},
        "held-out accuracy": accuracies[-1] if accuracies else None,
        "mean length": newest.get(LENGTH),
        "seconds a step": newest.get("step_time"),
    }
    return "".join(
        f"<div><b>{value:.3g}</b>{html.escape(name)}</div>" for name, value in shown.items() if defined(value)
    )


def notes(found: list[dict]) -> str:
    """The advisor's sentences, newest last."""
    if not found:
        return ""
    items = "".join(f"<li>Step {note['step']}: {html.escape(note['note'])}</li>" for note in found[-NOTES:])
    return f'<section><h2>Notes</h2><ul class="notes">{items}</ul></section>'


def sample(one: dict, opened: bool) -> str:
    """A prompt with its gold answer, its best and its worst completion, folded up unless `opened`."""
    rows = "".join(
        f"<h4>{name}, reward {reward:g}</h4><pre>{html.escape(text)}</pre>"
        for name, (reward, text) in one["texts"].items()
    )
    gold = f"<h4>gold answer</h4><pre>{html.escape(one['answer'])}</pre>" if one.get("answer") else ""
    return (
        f"<details{' open' if opened else ''}><summary>Step {one['step']}</summary>"
        f"<h4>prompt</h4><pre>{html.escape(one['prompt'])}</pre>{gold}{rows}</details>"
    )


def spread_out(items: list, count: int) -> list:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def table(values: dict) -> str:
    """Names and values."""
    rows = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in values.items()
    )
    return f"<table>{rows}</table>"


WAITING = f"The page loads itself anew every {PAGE_SECONDS} s; if that was long ago, the run was killed."
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{refresh}
<title>{title}</title>
<style>
:root {{ --ink: #1b1f24; --soft: #5b6570; --page: #fff; --card: #f5f7f9; --grid: #dfe4ea;
  --c0: #0063b1; --c1: #c75300; --c2: #00805a; --c3: #a33f86; --c4: #7a6a00; --c5: #4a4f57 }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e8eaed; --soft: #a2abb5; --page: #14171a; --card: #1e2328;
  --grid: #39414a; --c0: #62b0f5; --c1: #ff9a52; --c2: #3fd0a0; --c3: #e58cc9; --c4: #e0cb4e; --c5: #b7bec6 }} }}
* {{ box-sizing: border-box }}
body {{ margin: 0 auto; max-width: 1400px; padding: 1rem; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }}
h1 {{ font-size: 1.5rem; margin: 0 }} h2 {{ font-size: 1.15rem; margin: 1.6rem 0 .6rem }}
h4 {{ margin: .7rem 0 .2rem; font-size: .9rem }}
header p {{ margin: .2rem 0; color: var(--soft) }}
.tiles {{ display: flex; flex-wrap: wrap; gap: .6rem; margin-top: .8rem }}
.tiles div {{ background: var(--card); border-radius: 8px; padding: .5rem .9rem; color: var(--soft) }}
.tiles b {{ display: block; font-size: 1.3rem; color: var(--ink) }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: .8rem }}
figure {{ margin: 0; background: var(--card); border-radius: 8px; padding: .7rem }}
figcaption {{ font-weight: 600 }} figure p {{ margin: .2rem 0 0; color: var(--soft); font-size: .85rem }}
.legend {{ display: flex; flex-wrap: wrap; gap: 0 .9rem; font-size: .85rem; min-height: 1.3em }}
.key::before {{ content: ""; display: inline-block; width: .7em; height: .7em; margin-right: .35em;
  border-radius: 2px; background: var(--c) }}
.c0 {{ --c: var(--c0) }} .c1 {{ --c: var(--c1) }} .c2 {{ --c: var(--c2) }}
.c3 {{ --c: var(--c3) }} .c4 {{ --c: var(--c4) }} .c5 {{ --c: var(--c5) }}
svg {{ display: block; width: 100%; height: auto }}
svg line {{ stroke: var(--grid) }} svg text {{ fill: var(--soft); font-size: 12px }}
svg polyline {{ fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round }}
svg circle, svg rect {{ fill: var(--c) }} svg .band {{ fill: var(--c); opacity: .18 }}
.notes li {{ margin: .3rem 0 }}
details {{ background: var(--card); border-radius: 8px; padding: .5rem .8rem; margin: .4rem 0 }}
summary {{ cursor: pointer }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: .85rem }}
table {{ border-collapse: collapse; font-size: .85rem; width: 100% }}
th, td {{ text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top; overflow-wrap: anywhere }}
th {{ font-weight: 500; color: var(--soft) }}
</style>
</head>
<body>
<header><h1>{title}</h1><p>{state}</p><p>{written}</p><div class="tiles">{tiles}</div></header>
{notes}
<section><h2>Curves</h2><div class="charts">{charts}</div></section>
<section><h2>Completions</h2>{samples}</section>
<section><h2>Configuration</h2><details><summary>Flags and ds_config of the learner</summary>{settings}</details>
<details><summary>Flags of the samplers</summary>{sampler}</details>
<details><summary>Versions</summary>{versions}</details></section>
</body>
</html>
"""
