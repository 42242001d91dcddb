"""Sentences for what goes wrong without an error: each is said once, with the flag or the file to change.

The limits are rules of thumb; a sentence says what was seen, so that a reader can disagree.
"""

from collections import deque
from collections.abc import Callable

WINDOW = 10  # steps that a rule looks at
SOON = 3  # steps after which a slow reward is named: such steps are long
WORK = {"generation": "generation", "scoring": "scoring log-probs", "reward": "reward_function"}  # of a sampler


class Advisor:
    """Looks at each step's record (the content of metrics.jsonl) and at the evaluations so far."""

    def __init__(self, num_iterations: int = 1, max_staleness: int = 1):
        self._num_iterations, self._max_staleness = num_iterations, max_staleness
        self._reward_workers = 0
        self._recent: deque[dict] = deque(maxlen=WINDOW)
        self._first_entropy = self._first_reward = None
        self._top_rate = 0.0
        self._evaluations: list[dict] = []
        self._said: set[str] = set()

    def look(self, record: dict, evaluations: list[dict] = (), sampler: dict | None = None) -> list[str]:
        """The sentences that this step gives rise to and that have not been said yet; `sampler` holds the samplers'
        settings.
        """
        self._recent.append(record)
        self._reward_workers = (sampler or {}).get("reward_workers", 0)
        self._evaluations = [one for one in evaluations if one.get("questions")]
        if len(self._recent) == WINDOW and self._first_entropy is None:
            self._first_entropy, self._first_reward = self._mean("entropy"), self._mean("reward")
        rules: list[Callable] = [
            self._truncated,
            self._no_variance,
            self._no_format,
            self._drift,
            self._collapse,
            self._mismatch,
            self._stale,
            self._small_rate,
            self._overfit,
            self._slow_reward,
            self._balance,
        ]
        found = [(rule.__name__, rule()) for rule in rules]
        new = [(name, text) for name, text in found if text and name not in self._said]
        self._said |= {name for name, _ in new}
        return [text for _, text in new]

    def samplers_do(self) -> str:
        """What most of the samplers' working time went to at the last step; empty where it is not known."""
        last = self._recent[-1] if self._recent else {}
        seconds = {name: last.get(f"sampler/{name}_seconds") or 0.0 for name in WORK}
        most = max(seconds, key=seconds.get)
        if not seconds[most]:
            return ""
        return f"{WORK[most]} takes {seconds[most] / sum(seconds.values()):.0%} of the samplers' time"

    def _mean(self, name: str) -> float | None:
        values = [record[name] for record in self._recent if record.get(name) is not None]
        return sum(values) / len(values) if values else None

    def _throughout(self, name: str, test: Callable[[float], bool]) -> bool:
        values = [record.get(name) for record in self._recent]
        return len(values) == WINDOW and all(value is not None and test(value) for value in values)

    def _truncated(self) -> str | None:
        share = self._recent[-1].get("completions/clipped_ratio", 0.0)
        if share >= 0.9:
            return f"{share:.0%} of the completions are cut off before their end: raise --max_new_tokens of the sampler"
        return None

    def _no_variance(self) -> str | None:
        if self._throughout("frac_reward_zero_std", lambda share: share >= 0.95):
            return (
                f"in the last {WINDOW} steps hardly any group had a better and a worse completion, so there is nothing "
                "to learn from: raise --group_size, choose prompts of middling difficulty, or warm the model up first"
            )
        return None

    def _no_format(self) -> str | None:
        if self._throughout("rewards/format/mean", lambda mean: mean == 0):
            return (
                f"no completion of the last {WINDOW} steps had the format: look at some with --log_completions 1, "
                "change --system_prompt, or warm the model up (python -m demo.warm_start)"
            )
        return None

    def _drift(self) -> str | None:
        kl = self._recent[-1].get("kl")
        if kl is not None and kl > 1:
            return (
                f"the policy is {kl:.1f} nats a token away from the reference: a lower learning rate "
                "(ds_config.json) or a higher --beta keeps it nearer"
            )
        return None

    def _collapse(self) -> str | None:
        entropy = self._mean("entropy")
        if self._first_entropy and entropy is not None and entropy < 0.1 * self._first_entropy:
            return (
                f"the entropy fell from {self._first_entropy:.2f} to {entropy:.2f} nats a token: completions of a "
                "prompt are nearly the same now; try --clip_eps_high 0.28, a higher --beta or a lower learning rate"
            )
        return None

    def _mismatch(self) -> str | None:
        last = self._recent[-1]
        on_policy = last.get("staleness/max") == 0 and self._num_iterations == 1
        if on_policy and (last.get("approx_kl") or 0.0) > 0.01:
            return (
                f"old and new log-probs differ on-policy (approx_kl {last['approx_kl']:.3g} at staleness 0): sampler "
                "and learner do not compute the same; is --old_logprobs sampled in use in half precision?"
            )
        gap = last.get("sampling/sampling_logp_difference/mean", 0.0)
        if gap > 0.1:
            return (
                f"the decoder's log-probs differ from the scored ones by {gap:.2f} nats a token: --tis_cap 2 of the "
                "learner corrects for it"
            )
        return None

    def _stale(self) -> str | None:
        name = "groups/dropped/stale"
        dropped = self._recent[-1].get(name, 0) - self._recent[0].get(name, 0)
        trained = sum(record.get("groups", 0) for record in list(self._recent)[1:])
        if len(self._recent) == WINDOW and dropped > 0.2 * (dropped + trained):
            late, kept = self._recent[-1].get("groups/stale_mean_length"), self._mean("completions/mean_length")
            lengths = f" (mean length {late:.0f} tokens, of those trained on {kept:.0f})" if late and kept else ""
            return (
                f"{dropped} of {dropped + trained:.0f} groups came too late to be trained on{lengths}; if these are "
                "long, the policy learns from the short: raise --max_staleness, or lower the sampler's --batch_size"
            )
        return None

    def _small_rate(self) -> str | None:
        first, rate = (record.get("learning_rate") or 0.0 for record in (self._recent[0], self._recent[-1]))
        self._top_rate = max(self._top_rate, rate)
        warming_up = rate > first
        if len(self._recent) == WINDOW and 0 < self._top_rate < 2e-5 and not warming_up:
            return (
                f"at a learning rate of {rate:g} a LoRA adapter hardly moves: 1e-4 to 1e-3 is usual "
                "(ds_config.json; the README has a table)"
            )
        return None

    def _overfit(self) -> str | None:
        measured, reward = self._evaluations, self._mean("reward")
        if len(measured) < 3 or self._first_reward is None or reward is None or reward <= self._first_reward:
            return None
        best = max(measured, key=lambda one: one["accuracy"])
        last = measured[-1]
        if best["accuracy"] - last["accuracy"] > 2 * (best["accuracy_stderr"] + last["accuracy_stderr"]):
            return (
                f"the reward rises, but held-out accuracy fell from {best['accuracy']:.3f} (version "
                f"{best['version']}) to {last['accuracy']:.3f}: the reward is being gamed; read some completions, and "
                "go back to that version"
            )
        return None

    def _reward_dominates(self) -> bool:
        """Whether reward_function takes longer than decoding and scoring, so that all else waits for it."""
        reward, generation, scoring = (self._mean(f"sampler/{name}_seconds") or 0.0 for name in
                                       ("reward", "generation", "scoring"))  # fmt: skip
        idle = max(self._mean("learner/idle_share") or 0.0, self._mean("sampler/idle_share") or 0.0)
        return reward > generation + scoring and idle > 0.5

    def _slow_reward(self) -> str | None:
        if len(self._recent) < SOON or not self._reward_dominates():
            return None
        groups = self._mean("groups") or 1
        each = [(self._mean(f"sampler/{name}_seconds") or 0.0) / groups for name in WORK]
        return (
            f"reward_function takes {each[2]:.2g} s a group, generation and scoring {each[0] + each[1]:.2g} s, so all "
            f"else waits for it: {more_workers(self._reward_workers)}"
        )

    def _balance(self) -> str | None:
        learner, sampler = self._mean("learner/idle_share"), self._mean("sampler/idle_share")
        if len(self._recent) < WINDOW or learner is None or sampler is None:
            return None
        if self._max_staleness == 0 or self._reward_dominates():  # waiting by design; not for want of samplers
            return None
        if learner > 0.5 and learner > sampler:
            return (
                f"the learner waits {learner:.0%} of the time for groups: start another sampler, or raise the "
                "sampler's --batch_size (auto: as many as fit)"
            )
        if sampler > 0.5:
            return (
                f"the samplers wait {sampler:.0%} of the time for tickets: fewer samplers, more GPUs for the "
                "learner, or a higher --max_staleness"
            )
        return None


def more_workers(present: int) -> str:
    """What helps against a slow reward_function; `present` is --reward_workers."""
    if present:
        return f"raise the sampler's --reward_workers from {present}, or make it faster"
    return "--reward_workers N of the sampler gives it N processes"
