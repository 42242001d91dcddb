"""One record a step, a JSON object in metrics.jsonl, under the names that TRL uses."""

import json
import math
import time
from collections import defaultdict
from pathlib import Path

import torch

from grpo.curves import Curves
from grpo.json_lines import JsonLines, clean
from grpo.rollout import Group


class Means:
    """Sums and counts by name, so that means over any split of a step come out the same."""

    def __init__(self):
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, metrics: dict) -> None:
        """Add {name: (sum, count)}."""
        for name, (total, count) in metrics.items():
            self._sums[name][0] += float(total)
            self._sums[name][1] += float(count)

    def over_ranks(self, ranks) -> dict[str, float]:
        """The means over all ranks, which must all have the same names; nothing counted gives NaN."""
        names = sorted(self._sums)
        flat = ranks.add_up([value for name in names for value in self._sums[name]])
        return {
            name: total / count if count else math.nan
            for name, total, count in zip(names, flat[::2], flat[1::2], strict=True)
        }


class MetricsLog:
    """Appends to `path`; records after `steps_done` are of steps that will be done again.

    A record that the disk has no room for is kept, and written with the next one (grpo/json_lines.py).
    """

    CURVE = ("step", "reward", "completions/mean_length")
    POINTS = 10  # of the curve

    def __init__(self, path: Path, steps_done: int = 0):
        self._lines = JsonLines(path, steps_done)
        kept = self._lines.last or {}
        self.curve = Curves(self.POINTS, self.CURVE)
        if kept:
            self.curve.read(path)
        self._started = time.monotonic() - (kept.get("seconds") or 0.0)
        self.num_tokens = kept.get("num_tokens") or 0  # of all steps so far

    def log(self, step: int, metrics: dict[str, float]) -> dict:
        """Write one step's record, with the tokens of all steps so far as num_tokens, and return it."""
        self.num_tokens += metrics.get("num_tokens", 0)
        record = {"step": step, "seconds": round(time.monotonic() - self._started, 3)} | clean(metrics)
        record["num_tokens"] = self.num_tokens
        self.curve.add(record)
        self._lines.append([record])
        return record

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(path: Path) -> list[dict]:
    """All records of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def group_metrics(groups: list[Group], step: int) -> dict[str, float]:
    """What the groups of a step say, before any loss: rewards, lengths, staleness, decode/score mismatch."""
    rewards = torch.stack([group.rewards for group in groups])  # (groups, G), NaN where the reward was None
    lengths = torch.cat([group.lengths for group in groups]).float()
    mismatch = torch.cat([group.old_logprobs - group.sampling_logprobs for group in groups]).abs()
    staleness = torch.tensor([float(step - group.adapter_version) for group in groups])
    spread = torch.tensor([reward_spread(row) for row in rewards])
    metrics = {
        "reward": rewards.nanmean(),
        "reward_std": reward_spread(rewards),
        "reward_stderr": standard_error(rewards.nanmean(dim=1)),
        "frac_reward_zero_std": (spread == 0).float().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/length_p10": lengths.quantile(0.1),
        "completions/length_p90": lengths.quantile(0.9),
        "completions/clipped_ratio": torch.cat([group.truncated for group in groups]).float().mean(),
        "num_tokens": float(lengths.sum() + sum(len(group.prompt_ids) * group.size for group in groups)),
        "staleness/mean": staleness.mean(),
        "staleness/max": staleness.max(),
        "sampling/sampling_logp_difference/mean": mismatch.mean() if len(mismatch) else 0.0,
        "sampling/sampling_logp_difference/max": mismatch.max() if len(mismatch) else 0.0,
    }
    for name in sorted({name for group in groups for name in group.components}):
        parts = [group.components[name] for group in groups if name in group.components]
        metrics[f"rewards/{name}/mean"] = torch.cat(parts).mean()
    for name in sorted({name for group in groups for name in group.stats}):
        metrics[f"sampler/{name}"] = sum(group.stats.get(name, 0.0) for group in groups)
    waited = metrics.get("sampler/waiting_seconds", 0.0)
    worked = sum(metrics.get(f"sampler/{name}_seconds", 0.0) for name in ("generation", "scoring"))
    if waited + worked > 0:  # rewards are computed beside the next generation
        metrics["sampler/idle_share"] = waited / (waited + worked)
    if metrics.get("sampler/generation_seconds"):
        metrics["sampler/tokens_per_second"] = float(lengths.sum()) / metrics["sampler/generation_seconds"]
    return {name: float(value) for name, value in metrics.items()}


def reward_spread(rewards: torch.Tensor) -> float:
    """ddof-1 standard deviation of the rewards that are not NaN; exactly 0 for equal ones and for fewer than two."""
    valid = rewards[~rewards.isnan()]
    if len(valid) < 2 or (valid == valid[0]).all():
        return 0.0
    return float(valid.std())


def standard_error(means: torch.Tensor) -> float:
    """Of the mean over groups, from the groups' own means; NaN for fewer than two."""
    valid = means[~means.isnan()]
    return float(valid.std() / len(valid) ** 0.5) if len(valid) > 1 else math.nan


def draw_curve(values: list[float], title: str, width: int = 60, height: int = 10) -> str:
    """A curve for the terminal."""
    columns = min(width, len(values))
    edges = [len(values) * i // columns for i in range(columns + 1)]
    points = [sum(values[a:b]) / (b - a) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    low, high = min(points), max(points)
    rows = [round((point - low) / ((high - low) or 1) * (height - 1)) for point in points]
    lines = [title]
    for level in reversed(range(height)):
        label = {height - 1: f"{high:.2f}", 0: f"{low:.2f}"}.get(level, "")
        lines.append(f"{label:>7} |" + "".join("*" if row == level else " " for row in rows))
    return "\n".join([*lines, f"{'':>7} +{'-' * columns}", f"{'':>9}step 1 to {len(values)}"])
