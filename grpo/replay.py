"""Training again on the groups that a run kept, in place of samplers: to try another loss on the same rollouts."""

import json
from pathlib import Path

from grpo.journal import read_group, read_history, ticket_ids
from grpo.rollout import Group, unpack

_SAME = {
    "model": "--model_path",
    "tokenizer": "--model_path",
    "group_size": "--group_size",
    "groups_per_step": "the batch sizes in --ds_config, or the number of ranks",
    "temperature": "--temperature",
}


class Replay:
    """Stands where the Collector does: hands out a run's steps as they were trained, from `steps_done` on.

    Raises:
        ValueError: the folder is no run that `run` (the content of run.json) can replay, with what differs.
    """

    malformed = queue = 0
    stale_length = None
    dropped: dict[str, int] = {}
    pinned: frozenset[int] = frozenset()
    evaluations: tuple[dict, ...] = ()
    sampler_settings: dict = {}

    def __init__(self, folder: Path, run: dict, needs_reference: bool, steps_done: int):
        self._folder, self._steps_done, self._needs_reference = folder, steps_done, needs_reference
        if folder.resolve() == Path(run["save_path"]):
            raise ValueError(f"--replay {folder} is --save_path too; give the new run a folder of its own")
        try:
            original = json.loads((folder / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--replay {folder} holds no run: {error}") from error
        for name, flag in _SAME.items():
            if original.get(name) != run[name]:
                raise ValueError(
                    f"--replay {folder}: its {name} is {original.get(name)!r:.60}, this start has {run[name]!r:.60}; "
                    f"change {flag}"
                )
        history, here = read_history(folder), set(ticket_ids(folder))
        self._steps = [history.steps[step] for step in sorted(history.steps)]
        missing = [n for n, ids in enumerate(self._steps, 1) if n > steps_done and not here.issuperset(ids)]
        if missing or not self._steps:
            what = f"groups of step {missing[0]}" if missing else "any step"
            raise ValueError(f"--replay {folder}: its journal lacks {what}; only a run with --keep_journal has all")
        self.max_new_tokens = history.data["max_new_tokens"]
        self.dataset_name = history.data.get("dataset_name", "")
        self.sampler_settings = history.data.get("settings", {})

    @property
    def last_step(self) -> int:
        """How many steps there are to replay."""
        return len(self._steps)

    def next_step(self, wait: float) -> list[Group]:
        """The groups of the next step; an empty list after the last one."""
        if self._steps_done >= len(self._steps):
            return []
        groups = [unpack(read_group(self._folder, ticket_id)) for ticket_id in self._steps[self._steps_done]]
        if self._needs_reference and any(group.ref_logprobs is None for group in groups):
            raise ValueError(f"--replay {self._folder}: its groups have no reference log-probs; start with --beta 0")
        return groups

    def finish_step(self, version: int | None) -> None:
        """A step is trained."""
        self._steps_done += 1

    def saved(self) -> None:
        """A checkpoint was written; the groups belong to the run that is replayed, so they stay."""

    covered = saved

    def can_redo(self, step: int) -> bool:
        """Whether the groups of all steps after `step` are there."""
        return True
