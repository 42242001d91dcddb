"""What a sampler says in the terminal: a line a version on what it did with it, and a live line on what it does now.

Called from the decode loop and from the thread that sends; like all that only reports, it cannot end the sampler.
"""

import threading
import time

from grpo.advice import more_workers
from grpo.guard import Guard
from grpo.rollout import Group
from grpo.terminal import LiveLine

LINE_SECONDS = 60.0  # a version that is in use longer has a line so often
NOTICE_SECONDS = 30.0  # between two lines on groups that wait for their rewards
WORTH_SAYING = 2  # groups that wait for their rewards


class SamplerTerminal:
    """Guards the lines; each method may be called from any thread."""

    def __init__(self, reward_workers: int):
        start = lambda: _Lines(reward_workers)  # noqa: E731
        self._lines = Guard("the sampler's progress", start, release=_Lines.close).start()

    def doing(self, text: str) -> None:
        """What the decode loop does from now on."""
        self._lines(_Lines.doing, text)

    def made(self, groups: int) -> None:
        """So many more groups lack nothing but their rewards."""
        self._lines(_Lines.made, groups)

    def dropped(self) -> None:
        """A group gets no rewards."""
        self._lines(_Lines.made, -1)

    def sent(self, group: Group) -> None:
        """A group has its rewards and is on its way."""
        self._lines(_Lines.sent, group)

    def waiting(self) -> None:
        """Nothing is left to decode; called now and then until there is."""
        self._lines(_Lines.waiting)

    def close(self) -> None:
        """The last version's line; the live line goes."""
        self._lines(_Lines.close)


class _Lines:
    def __init__(self, reward_workers: int):
        self._reward_workers = reward_workers
        self._lock = threading.RLock()
        self._live = LiveLine(None, 0, "{desc}")
        self._doing = self._speed = ""
        self._unrewarded = 0  # groups
        self._sent: list[Group] = []  # since the last line, all of one version
        self._printed = self._noticed = time.monotonic()
        self._reward_seconds = 0.0  # of the last group

    def doing(self, text: str) -> None:
        with self._lock:
            self._doing = text
            self._show()

    def made(self, groups: int) -> None:
        with self._lock:
            self._unrewarded += groups

    def sent(self, group: Group) -> None:
        with self._lock:
            self._unrewarded -= 1
            if self._sent and self._sent[0].adapter_version != group.adapter_version:
                self._line()
            self._sent.append(group)
            self._speed = f"{tokens_per_second([group])} tokens/s  "
            self._reward_seconds = group.stats.get("reward_seconds", 0.0)
            if time.monotonic() - self._printed > LINE_SECONDS:
                self._line()
            self._show()

    def waiting(self) -> None:
        with self._lock:
            now = time.monotonic()
            if self._unrewarded < WORTH_SAYING or now - self._noticed < NOTICE_SECONDS:
                return
            self._noticed = now
            print(f"{self._unrewarded} groups wait for reward_function{self._slowness()}", flush=True)

    def close(self) -> None:
        with self._lock:
            self._live.close()
            if self._sent:
                self._line()

    def _slowness(self) -> str:
        seconds = f", which takes {self._reward_seconds:.1f} s a group" if self._reward_seconds else ""
        return f"{seconds}: {more_workers(self._reward_workers)}"

    def _line(self) -> None:
        print(summary(self._sent), flush=True)
        self._sent, self._printed = [], time.monotonic()

    def _show(self) -> None:
        unrewarded = f"; {self._unrewarded} groups await rewards" if self._unrewarded >= WORTH_SAYING else ""
        self._live.show(f"{self._speed}{self._doing}{unrewarded}")


def summary(groups: list[Group]) -> str:
    """A line of at most 80 columns on groups of one version."""
    rewards = [reward for group in groups for reward in group.rewards.tolist() if reward == reward]
    lengths = [length for group in groups for length in group.lengths.tolist()]
    reward = f"{sum(rewards) / len(rewards):.3f}" if rewards else "none"
    return (
        f"version {groups[0].adapter_version:<5} {len(groups):>4} groups  reward {reward:>6}  "
        f"length {sum(lengths) / max(1, len(lengths)):>6.1f}  {tokens_per_second(groups):>7} tokens/s"
    )


def tokens_per_second(groups: list[Group]) -> str:
    """Completion tokens by the seconds of their decoding; a dash where those are not known."""
    seconds = sum(group.stats.get("generation_seconds", 0.0) for group in groups)
    return f"{sum(int(group.lengths.sum()) for group in groups) / seconds:,.0f}" if seconds else "-"
