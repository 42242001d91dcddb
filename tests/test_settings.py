"""What a resumed run takes over, and what it refuses: the whole table, then DeepSpeed's side of it."""

import json

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from test_learner import arguments
from tiny import ds_config, tiny_model

from grpo.checkpoints import load_checkpoint, newest_checkpoint, save_checkpoint
from grpo.engine import make_engine, read_ds_config, scaler
from grpo.settings import DS_CONFIG, FACTS, FLAGS, FREE, HOLDS, changes, check_same_run, fixed_entries, rule_of
from grpo.settings import settings_that_hold as held
from training_worker import make_parser

ACTIONS = {action.dest: action for action in make_parser()._actions if action.dest != "help"}
VALUES = {name: action.default for name, action in ACTIONS.items()}


def another(value):
    """A value of the same kind that is not `value`."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else "other"


def test_every_flag_has_a_rule_and_no_rule_is_without_a_flag():
    assert set(FLAGS) == set(ACTIONS)
    assert {*FLAGS.values(), *DS_CONFIG.values()} | {"tokenizer", "groups_per_step"} == {HOLDS, FREE, *FACTS}


@pytest.mark.parametrize("name", FLAGS)
def test_a_changed_flag_holds_or_is_refused_by_its_name_or_trains_nothing_else(name, tmp_path):
    rule, new = FLAGS[name], VALUES | {name: another(VALUES[name])}
    before, after = (held(values, {}, "grpo_loss") for values in (VALUES, new))
    if rule == HOLDS:
        then, now = ("none" if values[name] is None else values[name] for values in (VALUES, new))
        assert changes(before, after) == [f"--{name} {then} -> {now}"]
    elif rule == FREE:
        assert changes(before, after) == []
    else:
        with pytest.raises(ValueError) as error:
            check_same_run({rule: "then"}, {rule: "now"}, tmp_path)
        assert all(word in str(error.value) for word in (f"--{name}", "'then'", "'now'", "--save_path"))


@pytest.mark.parametrize("name", DS_CONFIG)
def test_a_changed_entry_of_the_configuration_holds_or_is_refused_by_its_name(name, tmp_path):
    entry = name or "an.entry.that.nobody.knows"
    before, after = ({entry: value} for value in (1, 2))
    lines = changes(held(VALUES, before, "l"), held(VALUES, after, "l"))
    assert lines == ([f"{entry} 1 -> 2"] if rule_of(entry) == HOLDS else [])
    if rule_of(entry) == "ds_config":
        with pytest.raises(ValueError, match=f"has {entry} 1, this start has 2; change the entry in --ds_config back"):
            check_same_run({"ds_config": fixed_entries(before)}, {"ds_config": fixed_entries(after)}, tmp_path)
    else:
        assert fixed_entries(before) == {}


def test_entries_follow_the_nearest_rule_above_them():
    assert rule_of("optimizer.params.betas") == rule_of("scheduler.params.warmup_num_steps") == HOLDS
    assert rule_of("optimizer.type") == rule_of("zero_optimization.offload_optimizer.device") == "ds_config"
    assert rule_of("zero_optimization.stage") == "stage" and rule_of("bf16.enabled") == "precision"
    assert rule_of("tensorboard.output_path") == FREE and rule_of("fp16.loss_scale") == HOLDS


def test_what_changed_is_told_with_both_values():
    before = {"optimizer.params.lr": 3e-4, "--beta": None, "loss": "grpo_loss"}
    assert changes(before, before | {"optimizer.params.lr": 5e-5}) == ["learning rate 0.0003 -> 5e-05"]
    after = {"optimizer.params.lr": 3e-4, "--beta": 0.1, "loss": "dapo_loss", "scheduler.type": "WarmupLR"}
    expected = ["--beta none -> 0.1", "LOSS grpo_loss -> dapo_loss", "scheduler.type none -> WarmupLR"]
    assert changes(before, after) == expected


def test_a_run_that_does_not_tell_a_fact_resumes(tmp_path):
    facts = {"precision": "bfloat16", "stage": 2, "ds_config": {"a": 1}, "replay": None, "seed": 0}
    check_same_run({"seed": 0}, facts, tmp_path)
    check_same_run({"seed": 0}, facts | {"reference": [None, 0, None]}, tmp_path)
    with pytest.raises(ValueError, match="has reference"):
        check_same_run({"seed": 0}, facts | {"reference": ["adapter", 0, None]}, tmp_path)


WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.08, "warmup_num_steps": 8}}
LINEAR = {"type": WARMUP["type"], "params": WARMUP["params"] | {"warmup_type": "linear"}}
STEEPER = {"type": WARMUP["type"], "params": LINEAR["params"] | {"warmup_max_lr": 0.8}}
# (scheduler then, now) -> the rates of steps 4 and 5, after 3 steps at a rate of 1e-2 and a changed one of 5e-3
SCHEDULES = {
    "none": (None, None, [5e-3, 5e-3]),
    "added": (None, LINEAR, [0.02, 0.03]),
    "removed": (LINEAR, None, [5e-3, 5e-3]),
    "as it was": (LINEAR, LINEAR, [0.02, 0.03]),
    "changed": (LINEAR, STEEPER, [0.2, 0.3]),
}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
PRECISIONS["fp16"] = {"fp16": {"enabled": True, "initial_scale_power": 4}}
COMBINATIONS = [(stage, name) for stage in range(4) for name in PRECISIONS if (stage, name) != (0, "fp16")]


def an_engine(path, stage, lr, precision, schedule=None, betas=(0.9, 0.99), clipping=1.0, seed=0):
    params = {"lr": lr, "betas": list(betas), "torch_adam": True}
    more = {"optimizer": {"type": "AdamW", "params": params}, "gradient_clipping": clipping} | PRECISIONS[precision]
    more |= {"scheduler": schedule} if schedule else {}
    config = read_ds_config(str(ds_config(path / "ds.json", micro=1, accumulation=1, stage=stage, **more)), 1)
    torch.manual_seed(seed)
    return make_engine(tiny_model(), arguments(ds_config=""), json.loads(json.dumps(config)))[0]


def train(engine, steps):
    """The rates of so many steps."""
    rates = []
    for _ in range(steps):
        rates.append(engine.get_lr()[0])
        engine.backward(engine(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.float().square().mean())
        engine.step()
    return rates


@pytest.mark.parametrize("stage, precision", COMBINATIONS)
def test_the_files_rate_betas_and_clipping_hold_after_a_checkpoint(
    ranks, tmp_path, monkeypatch, stage, precision
):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    engine = an_engine(tmp_path, stage, 1e-2, precision)
    train(engine, 3)
    counts = [float(state["step"]) for state in engine.basic_optimizer.state.values()]
    save_checkpoint(engine, tmp_path / "c", 3, ranks)
    engine.destroy()
    again = an_engine(tmp_path, stage, 5e-3, precision, betas=(0.5, 0.6), clipping=0.25, seed=1)
    load_checkpoint(again, tmp_path / "c", newest_checkpoint(tmp_path / "c"), 1)
    assert train(again, 2) == [5e-3, 5e-3]
    group = again.basic_optimizer.param_groups[0]
    assert group["lr"] == 5e-3 and list(group["betas"]) == [0.5, 0.6]
    assert getattr(again.optimizer, "clip_grad", 0.25) == 0.25
    assert [float(state["step"]) - 2 for state in again.basic_optimizer.state.values()] == counts
    again.destroy()


@pytest.mark.parametrize("then, now, rates", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("stage", [0, 2])
def test_the_files_schedule_holds_after_a_checkpoint(ranks, tmp_path, stage, then, now, rates):
    engine = an_engine(tmp_path, stage, 1e-2, "fp32", then)
    train(engine, 3)
    save_checkpoint(engine, tmp_path / "c", 3, ranks)
    engine.destroy()
    again = an_engine(tmp_path, stage, 5e-3, "fp32", now)
    load_checkpoint(again, tmp_path / "c", newest_checkpoint(tmp_path / "c"), 1)
    assert train(again, 2) == pytest.approx(rates)
    again.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_changed_loss_scale_holds_and_an_unchanged_one_is_the_one_that_was_reached(
    ranks, tmp_path, monkeypatch, stage
):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    engine = an_engine(tmp_path, stage, 1e-2, "fp16")
    scaler(engine).cur_scale = 2.0
    save_checkpoint(engine, tmp_path / "c", 3, ranks)
    for new_scale in (False, True):
        again = an_engine(tmp_path, stage, 1e-2, "fp16")
        expected = scaler(again).cur_scale if new_scale else 2.0
        load_checkpoint(again, tmp_path / "c", newest_checkpoint(tmp_path / "c"), 1, new_scale)
        assert scaler(again).cur_scale == expected and expected == (16.0 if new_scale else 2.0)
