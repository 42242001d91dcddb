"""Metrics by step in little room: means over equally many steps each, whatever the length of the run."""

from collections.abc import Iterable
from pathlib import Path

from grpo.charts import defined
from grpo.json_lines import spread_records

READ = 10  # records of a long file that are read for each point


class Bucket:
    """Sums of each metric over the steps of one stretch, the one with this number."""

    def __init__(self, index: int):
        self.index = index
        self._sums: dict[str, list[float]] = {}  # name -> sum, count of the steps in which it is a number

    def add(self, record: dict, names: Iterable[str]) -> None:
        """One more step."""
        for name in names:
            value = record.get(name)
            sums = self._sums.setdefault(name, [0.0, 0])
            if isinstance(value, int | float) and defined(value):
                sums[0] += value
                sums[1] += 1

    def join(self, later: "Bucket") -> None:
        """Take in the steps that follow."""
        for name, (total, count) in later._sums.items():
            sums = self._sums.setdefault(name, [0.0, 0])
            sums[0] += total
            sums[1] += count

    def means(self) -> dict:
        """The mean of each metric, None where it was no number in any step."""
        return {name: total / count if count else None for name, (total, count) in self._sums.items()}


class Curves:
    """The metrics of all steps (or those in `names`) as at most `points` means, and the newest step itself.

    A step costs the same however many there were.
    """

    def __init__(self, points: int, names: tuple[str, ...] = ()):
        self._points, self._names = points, names
        self._each = 1  # steps in a bucket
        self.buckets: list[Bucket] = []
        self._newest: dict | None = None

    def read(self, path: Path) -> "Curves":
        """Take up the records of a metrics.jsonl; of a long one, so many that each mean has READ of them or more."""
        for record in spread_records(path, READ * self._points):
            self.add(record)
        return self

    def add(self, record: dict) -> None:
        """One more step."""
        step = record["step"]
        while (step - 1) // self._each >= self._points:
            self._halve()
        index = (step - 1) // self._each
        if not self.buckets or self.buckets[-1].index != index:
            self.buckets.append(Bucket(index))
        self.buckets[-1].add(record, self._names or record)
        self._newest = record

    def records(self) -> list[dict]:
        """What is to be drawn; the last record is the newest step's own."""
        if self._newest is None:
            return []
        return [*(bucket.means() for bucket in self.buckets[:-1]), self._newest]

    def stretches(self) -> list[tuple[int, int, dict]]:
        """First step, last step and means of each stretch; they are those of the records that were seen."""
        ends = [(bucket.index * self._each + 1, (bucket.index + 1) * self._each) for bucket in self.buckets]
        newest = self._newest["step"] if self._newest else 0
        return [(a, min(b, newest), bucket.means()) for (a, b), bucket in zip(ends, self.buckets, strict=True)]

    def _halve(self) -> None:
        self._each *= 2
        joined: list[Bucket] = []
        for bucket in self.buckets:
            bucket.index //= 2
            if joined and joined[-1].index == bucket.index:
                joined[-1].join(bucket)
            else:
                joined.append(bucket)
        self.buckets = joined
