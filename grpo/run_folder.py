"""What may lie in --save_path when a learner starts: nothing, or one run with all that belongs to it."""

import math

from grpo.adapters import AdapterError, AdapterStore
from grpo.checkpoints import checkpoint_steps
from grpo.journal import read_history


def check_folder(store: AdapterStore, run: dict | None, replays: bool) -> None:
    """AdapterError where versions, checkpoints or tickets lie in the folder that are not of this run.

    run: the content of run.json, None without one; replays: it trains on another run's tickets.
    """
    steps = read_history(store.path).steps
    newest = math.inf if replays else max(steps, default=0)  # the newest version that this run can have published
    for kind in ("adapters", "references"):
        AdapterStore(store.path, kind).check_owner(run and run.get("run_id"), newest)
    saved = checkpoint_steps(store.path / "checkpoints")
    if run is None and (saved or steps):
        raise AdapterError(
            f"--save_path {store.path} holds {'checkpoints' if saved else 'tickets.jsonl'} of a run, but no run.json "
            "that tells which: choose another folder, or move its content away"
        )
    if saved and saved[-1] > newest:
        raise AdapterError(
            f"--save_path {store.path} holds the checkpoint of step {saved[-1]}, but its tickets.jsonl ends at step "
            f"{newest}: put the run's own tickets.jsonl back, or choose another folder"
        )
