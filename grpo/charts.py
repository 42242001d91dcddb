"""Line charts and histograms as SVG text, so that a report opens anywhere; and the curves as a PNG.

Sizes are in SVG units of a 480 x 220 picture that scales with its column. Colours are the classes c0 .. c5, which the
page defines (for light and dark). Undefined values (None) leave gaps. How many points there are is the caller's matter.
"""

import html
import math
from dataclasses import dataclass, field
from pathlib import Path

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 22, 10, 24  # margins around the plot, for the axes' numbers
COLOURS = 6
LARGEST = 1e300  # of the numbers that are drawn


@dataclass
class Line:
    """One curve: `values[i]` at `steps[i]`, with a band from `low` to `high` if given."""

    label: str
    steps: list[float]
    values: list[float | None]
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)


def line_chart(title: str, lines: list[Line], note: str = "") -> str:
    """A figure with a legend that gives each line's last value; empty text where no line has a value."""
    lines = [line for line in lines if any(defined(value) for value in line.values)]
    if not lines:
        return ""
    values = [v for line in lines for part in (line.values, line.low, line.high) for v in part if defined(v)]
    steps = [step for line in lines for step in line.steps]
    x = scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    ticks = nice_ticks(min(values), max(values))
    y = scale(min(ticks[0], *values), max(ticks[-1], *values), HEIGHT - BOTTOM, TOP)
    parts = [horizontal(y(tick), label(tick)) for tick in ticks]
    parts += [below(x(step), f"{step:g}") for step in dict.fromkeys((min(steps), max(steps)))]
    for i, line in enumerate(lines):
        if line.low:
            parts.append(f'<polygon class="band c{i % COLOURS}" points="{around(line, x, y)}"/>')
        for run in unbroken(line, x, y):
            dot = len(run) == 1
            parts.append(circle(run[0], i) if dot else f'<polyline class="c{i % COLOURS}" points="{join(run)}"/>')
    legend = "".join(
        f'<span class="key c{i % COLOURS}">{html.escape(line.label)} <b>{label(last(line.values))}</b></span>'
        for i, line in enumerate(lines)
    )
    return figure(title, legend, parts, note)


def histogram(title: str, samples: dict[str, list[float]], bins: int = 16, note: str = "") -> str:
    """Shares of each named sample by value, side by side; empty text where there is nothing to count."""
    samples = {name: [v for v in values if defined(v)] for name, values in samples.items()}
    samples = {name: values for name, values in samples.items() if values}
    if not samples:
        return ""
    low, high = min(map(min, samples.values())), max(map(max, samples.values()))
    width = (high - low) / bins or 1.0
    shares = [[0.0] * bins for _ in samples]
    for row, values in zip(shares, samples.values(), strict=True):
        for value in values:
            row[min(bins - 1, int((value - low) / width))] += 1 / len(values)
    x = scale(0, bins, LEFT, WIDTH - RIGHT)
    ticks = nice_ticks(0, max(map(max, shares)))
    y = scale(0, ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [horizontal(y(tick), label(tick)) for tick in ticks]
    parts += [below(x(place), label(low + place * width)) for place in (0, bins // 2, bins)]
    bar = (x(1) - x(0)) * 0.9 / len(samples)
    for i, row in enumerate(shares):
        for place, share in enumerate(row):
            if share:
                left = x(place) + i * bar
                height = HEIGHT - BOTTOM - y(share)
                parts.append(
                    f'<rect class="c{i}" x="{left:.1f}" y="{y(share):.1f}" width="{bar:.1f}" height="{height:.1f}"/>'
                )
    legend = "".join(f'<span class="key c{i}">{html.escape(name)}</span>' for i, name in enumerate(samples))
    return figure(title, legend, parts, note)


def figure(title: str, legend: str, parts: list[str], note: str) -> str:
    """Title, legend, drawing and a line of explanation."""
    name = html.escape(title)
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
    explained = f"<p>{html.escape(note)}</p>" if note else ""
    return f'<figure><figcaption>{name}</figcaption><div class="legend">{legend}</div>{drawing}{explained}</figure>'


def defined(value) -> bool:
    """A number that can be drawn."""
    return isinstance(value, int | float) and abs(value) <= LARGEST


def last(values: list[float | None]) -> float:
    """The last defined value."""
    return [value for value in values if defined(value)][-1]


def label(value: float) -> str:
    """A number short enough for an axis."""
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that cover low to high; equal ends are widened."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        margin = abs(high) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, end + 1)]


def scale(low: float, high: float, start: float, end: float):
    """The linear map from [low, high] to [start, end]; the middle where low and high are one."""
    if high == low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def around(line: Line, x, y) -> str:
    """The band's outline: along its upper edge and back along the lower one."""
    both = [
        (step, a, b) for step, a, b in zip(line.steps, line.low, line.high, strict=True) if defined(a) and defined(b)
    ]
    return join([(x(s), y(b)) for s, _, b in both] + [(x(s), y(a)) for s, a, _ in reversed(both)])


def unbroken(line: Line, x, y) -> list[list[tuple[float, float]]]:
    """The stretches of the line between undefined values."""
    runs, run = [], []
    for step, value in zip(line.steps, line.values, strict=True):
        if defined(value):
            run.append((x(step), y(value)))
        elif run:
            runs.append(run)
            run = []
    return [*runs, run] if run else runs


def join(points: list[tuple[float, float]]) -> str:
    """SVG's list of points."""
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


def circle(point: tuple[float, float], colour: int) -> str:
    """A value without neighbours."""
    return f'<circle class="c{colour % COLOURS}" cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="3"/>'


def horizontal(y: float, text: str) -> str:
    """A line of the grid with its number."""
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def below(x: float, text: str) -> str:
    """A number under the plot."""
    return f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{text}</text>'


PICTURE = [  # what plot_curves has in each of its four parts; name/ stands for all names that begin so
    ("rewards/", "reward"),
    ("completions/mean_length",),
    ("entropy", "kl"),
    ("learner/idle_share", "sampler/idle_share"),
]


def plot_curves(records: list[dict], path: Path) -> None:
    """Reward and its parts, length, entropy and KL, and the balance of the two sides by step, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(picture)
    known = sorted({name for record in records for name in record})
    for axes, wanted in zip(picture.subplots(2, 2).flat, PICTURE, strict=True):
        for name in (name for name in known if name in wanted or f"{name.split('/')[0]}/" in wanted):
            points = [(record["step"], record[name]) for record in records if defined(record.get(name))]
            if points:
                axes.plot(*zip(*points, strict=True), label=name)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    picture.savefig(path, dpi=120)
