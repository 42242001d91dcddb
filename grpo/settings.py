"""What may change when a run resumes: a rule for every flag of the learner and every entry of ds_config.json.

A rule is one of

    HOLDS            may change: what is given now holds from the next step, and a line says what changed
    FREE             may change: it says where and how, not what is trained
    a fact's name    stays: another value is refused, with both values and what to change back

Facts and the last start's HOLDS values are in run.json. What the samplers must agree on (dataset, system prompt,
--max_new_tokens, held-out questions) is in tickets.jsonl, and grpo/collector.py compares it.
"""

import json
from pathlib import Path

from grpo.engine import flatten

HOLDS, FREE = "holds", "free"

FLAGS = {
    "model_path": "model",  # by fingerprint: the folder may move
    "seed": "seed",
    "group_size": "group_size",
    "temperature": "temperature",
    "lora_rank": "lora",
    "lora_alpha": "lora",
    "lora_targets": "lora",
    "init_adapter": "reference",
    "ref_sync_steps": "reference",
    "ref_mixup_alpha": "reference",
    "replay": "replay",
    **dict.fromkeys(
        ("max_steps", "save_steps", "publish_steps", "max_staleness", "num_iterations", "beta", "clip_eps")
        + ("clip_eps_high", "tis_cap", "scale_rewards", "mask_truncated", "resample_zero_groups")
        + ("run_zero_groups", "eval_steps", "eval_limit", "keep_journal"),
        HOLDS,
    ),
    **dict.fromkeys(
        ("save_path", "ds_config", "port", "host", "keys", "resume", "max_tokens_per_micro_batch", "log_to")
        + ("gradient_checkpointing", "log_completions", "timeout", "startup_timeout", "sampler_timeout", "local_rank"),
        FREE,
    ),
}

# By the longest prefix. Entries that are not here are refused when they change, since nobody has tried them.
DS_CONFIG = {
    "": "ds_config",
    "train_batch_size": HOLDS,  # these three as far as the step's groups stay as many: the fact groups_per_step
    "train_micro_batch_size_per_gpu": HOLDS,
    "gradient_accumulation_steps": HOLDS,
    "optimizer.params": HOLDS,
    "optimizer.params.torch_adam": "ds_config",  # another class, with another state
    "optimizer.params.adam_w_mode": "ds_config",
    "scheduler": HOLDS,
    "gradient_clipping": HOLDS,
    "prescale_gradients": HOLDS,
    "gradient_predivide_factor": HOLDS,
    "communication_data_type": HOLDS,
    "bf16.enabled": "precision",
    "fp16.enabled": "precision",
    "fp16": HOLDS,  # the loss scale, which then starts anew
    "zero_optimization.stage": "stage",
    **dict.fromkeys(
        [f"zero_optimization.{name}" for name in ("allgather_partitions", "allgather_bucket_size", "overlap_comm")]
        + [f"zero_optimization.{name}" for name in ("reduce_scatter", "reduce_bucket_size", "contiguous_gradients")]
        + [f"zero_optimization.stage3_{name}" for name in ("max_live_parameters", "max_reuse_distance")]
        + [f"zero_optimization.stage3_{name}" for name in ("prefetch_bucket_size", "param_persistence_threshold")]
        + ["activation_checkpointing", "zero_allow_untested_optimizer", "steps_per_print", "wall_clock_breakdown"]
        + ["memory_breakdown", "dump_state", "comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor"],
        FREE,
    ),
}

# How to change a fact back.
FACTS = {
    "model": "--model_path",
    "tokenizer": "--model_path",
    "seed": "--seed",
    "group_size": "--group_size",
    "groups_per_step": "the batch sizes in --ds_config, or the number of ranks",
    "temperature": "--temperature",
    "lora": "--lora_rank, --lora_alpha, --lora_targets or --init_adapter",
    "reference": "--init_adapter, --ref_sync_steps or --ref_mixup_alpha",
    "replay": "--replay",
    "precision": "bf16 or fp16 in --ds_config",
    "stage": "zero_optimization.stage in --ds_config",
    "ds_config": "the entry in --ds_config",
}
LACKING = {"reference": [None, 0, None]}  # of a run.json that does not tell; of other facts nothing is known then
CALLED = {"optimizer.params.lr": "learning rate", "loss": "LOSS"}


def rule_of(entry: str) -> str:
    """The rule of a ds_config.json entry, such as optimizer.params.lr."""
    parts = entry.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), -1, -1)]
    return next(DS_CONFIG[prefix] for prefix in prefixes if prefix in DS_CONFIG)


def fixed_entries(ds_config: dict) -> dict:
    """The ds_config.json entries that must stay and are no fact of their own."""
    return {name: value for name, value in flatten(ds_config) if rule_of(name) == "ds_config"}


def settings_that_hold(flags: dict, ds_config: dict, loss: str) -> dict:
    """What may change and makes a difference, by name; `flags` are the learner's, by name."""
    held = {f"--{name}": flags[name] for name, rule in FLAGS.items() if rule == HOLDS}
    held |= {name: value for name, value in flatten(ds_config) if rule_of(name) == HOLDS}
    return json.loads(json.dumps(held | {"loss": loss}))  # as run.json gives it back


def check_same_run(run: dict, facts: dict, folder: Path) -> None:
    """ValueError where the run in `folder`, whose run.json is `run`, was started with other facts than these."""
    for name, value in facts.items():
        before = run.get(name, LACKING.get(name, value))
        if before == value:
            continue
        named = name
        if isinstance(value, dict) and isinstance(before, dict):
            named = next(key for key in sorted({**before, **value}) if before.get(key) != value.get(key))
            before, value = before.get(named), value.get(named)
        raise ValueError(
            f"the run in {folder} has {named} {before!r:.60}, this start has {value!r:.60}; change {FACTS[name]} back "
            "to resume it, or choose another --save_path for a new run"
        )


def changes(before: dict, now: dict) -> list[str]:
    """What changed since the last start, as "learning rate 0.0003 -> 5e-05"; the arguments are settings that hold."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{CALLED.get(name, name)} {_shown(before.get(name))} -> {_shown(now.get(name))}" for name in names]


def _shown(value) -> str:
    return "none" if value is None else str(value)
