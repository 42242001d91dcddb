"""Numbers that are not finite: the step is not taken, on no rank, and nothing of it is left in the optimizer."""

import json
import math

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from processes import LIMIT, engine_jobs
from safetensors.torch import load_file
from test_checkpoints import publish_versions
from test_invariance import job, material  # noqa: F401  (a fixture)
from test_settings import COMBINATIONS, LINEAR, PRECISIONS, an_engine

from grpo.adapters import AdapterStore
from grpo.batch import collate
from grpo.checkpoints import checkpoint_steps
from grpo.engine import RESCALED, SKIPPED, TAKEN, adapter_state, scaler, take_step
from grpo.logprobs import completion_logprobs
from grpo.soundness import LIMIT as IN_A_ROW
from grpo.soundness import NotFinite, Watch, go_back


class Alone:
    """The ranks of a run with one."""

    def add_up(self, values):
        return values


def a_batch():
    batch = collate([torch.tensor([5, 6])], [torch.tensor([7, 8, 9]), torch.tensor([7, 3])], [0, 0])
    batch.advantages = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])
    batch.old_logprobs = torch.full((2, 3), -2.0)
    return batch


def one_step(watch, engine, spoil=None, spoiled_loss=None, metrics=(1.0, 1)):
    """A step of the plain policy gradient; `spoil` names a number that becomes NaN."""
    batch = a_batch()
    logprobs, _ = completion_logprobs(engine, batch, 1.0)
    if spoil:
        getattr(batch, spoil)[0, 1] = math.nan
    loss = -(logprobs.float() * batch.advantages)[batch.completion_mask].mean()
    loss = spoiled_loss(loss) if spoiled_loss else loss
    engine.backward(watch.guarded(loss, logprobs, batch, {"metric": metrics}))
    watch.step(engine)
    return watch.finish(watch.moved + watch.in_a_row + 1, Alone())


def state_of(engine):
    """All that a step may move."""
    adapter = adapter_state(engine)
    moments = [dict(state) for state in engine.basic_optimizer.state.values()]
    return adapter, [{k: torch.as_tensor(v).clone() for k, v in state.items()} for state in moments]


def same(one, other):
    return all(torch.equal(one[0][name], other[0][name]) for name in one[0]) and all(
        torch.equal(a[key], b[key]) for a, b in zip(one[1], other[1], strict=True) for key in a
    )


@pytest.mark.parametrize("stage, precision", COMBINATIONS)
def test_a_step_that_is_not_finite_moves_neither_weights_nor_optimizer_nor_schedule(
    ranks, tmp_path, monkeypatch, stage, precision
):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    engine, watch = an_engine(tmp_path, stage, 1e-2, precision, LINEAR), Watch(0)
    assert [one_step(watch, engine).taken for _ in range(2)] == [True, True]
    before, rate = state_of(engine), engine.get_lr()
    cases = {
        "advantages": dict(spoil="advantages"),
        "sampler's log-probs": dict(spoil="old_logprobs"),
        "loss": dict(spoiled_loss=lambda loss: loss.detach() * math.inf + loss),  # with a gradient that is finite
        "loss's metrics": dict(metrics=(math.inf, 1)),
    }
    for n, (name, case) in enumerate(cases.items(), 1):
        outcome = one_step(watch, engine, **case)
        assert not (outcome.taken or outcome.proven) and outcome.skipped == 1, name
        assert f"step {2 + n} is not taken: " in outcome.sentence and name in outcome.sentence
    assert same(before, state_of(engine)) and engine.get_lr() == rate and watch.in_a_row == 4 and watch.moved == 2
    outcome = one_step(watch, engine)
    assert outcome.taken and outcome.proven and watch.in_a_row == 0 and watch.moved == 7
    assert not same(before, state_of(engine)) and engine.get_lr() != rate and engine.skipped_steps == 4
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])  # 3 adds the squares up in float64, and clips what it finds
def test_a_gradient_whose_norm_is_not_finite_is_not_stepped_on(ranks, tmp_path, stage):
    engine, watch = an_engine(tmp_path, stage, 1e-2, "fp32"), Watch(0)
    one_step(watch, engine)
    assert 0 < float(engine.get_global_grad_norm()) < math.inf
    before = state_of(engine)
    outcome = one_step(watch, engine, spoiled_loss=lambda loss: loss * 1e38)  # each number is finite, its square is not
    assert outcome.sentence == "step 2 is not taken: gradient not finite; the weights stay as they were"
    assert not outcome.taken and not outcome.proven and same(before, state_of(engine)) and watch.in_a_row == 1
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_of_fp16_is_told_and_does_not_end_a_run_while_the_scale_can_fall(
    ranks, tmp_path, monkeypatch, stage
):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    monkeypatch.setitem(PRECISIONS, "scaled", {"fp16": {"enabled": True, "hysteresis": 1}})
    engine, watch = an_engine(tmp_path, stage, 1e-2, "scaled"), Watch(0)
    scaler(engine).cur_scale = 2.0**24
    outcomes = [one_step(watch, engine, spoiled_loss=lambda loss: loss * 10) for _ in range(20)]
    sentences = [outcome.sentence for outcome in outcomes if not outcome.taken]
    assert sentences and all("overflowed in fp16" in sentence for sentence in sentences)
    assert outcomes[-1].taken and all(outcome.proven for outcome in outcomes) and watch.in_a_row == 0
    results = []
    for _ in range(40):  # until the scale is at its least
        engine.backward(engine(input_ids=torch.tensor([[5, 6]])).logits.sum() * torch.inf)
        results.append(take_step(engine))
    assert results[0] == RESCALED and results[-1] == SKIPPED and TAKEN not in results
    engine.destroy()


def test_a_run_ends_after_some_steps_in_a_row_with_what_to_try():
    watch = Watch(5)
    for step in range(6, 6 + IN_A_ROW):
        watch._odd, watch._results = [torch.tensor([0, 0, 0, 1, 0])], [SKIPPED]
        outcome = watch.finish(step, Alone())
        if step < 5 + IN_A_ROW:
            watch.check(outcome, step, 0.5)
    with pytest.raises(NotFinite, match="3 steps in a row were not taken .loss not finite at step 8.*0.5.*--ds_config"):
        watch.check(outcome, step, 0.5)
    assert watch.moved == 5


def test_what_an_unproven_step_made_is_removed_if_it_can_be_made_again(tmp_path):
    for suspect, redo, expected in ((4, True, 2), (4, False, None), (0, True, None), (1, True, 0)):
        folder = tmp_path / f"{suspect}{redo}"
        store = publish_versions(folder, range(6))
        for step in (2, 4):
            (folder / "checkpoints" / f"step{step:08d}").mkdir(parents=True)
            (folder / "checkpoints" / f"step{step:08d}" / "complete.json").write_text("{}")
        lines = [json.dumps({"version": version}) + "\n" for version in range(6)]
        (folder / "evaluations.jsonl").write_text("".join(lines))
        assert go_back(store, folder / "checkpoints", suspect, lambda step, redo=redo: redo) == expected
        left = range(suspect) if expected is not None else range(6)
        assert store.versions() == list(left) and (folder / "latest").resolve() == store.folder(left[-1])
        assert len((folder / "evaluations.jsonl").read_text().splitlines()) == len(left)
        assert checkpoint_steps(folder / "checkpoints") == [step for step in (2, 4) if step < suspect or step in left]


@pytest.mark.slow
def test_a_loss_that_is_nan_on_one_rank_alone_stops_the_step_on_both(material, tmp_path):  # noqa: F811
    jobs = []
    for stage in (0, 1, 2, 3):
        for name, steps, spoiled in (("spoiled", 3, {"step": 1, "rank": 1}), ("without", 2, None)):
            case = job(material, tmp_path / f"{name}{stage}", dict(micro=2, accumulation=4, stage=stage))
            case["flags"] += ["--max_steps", str(steps)]
            jobs.append(case | {"spoiled": spoiled})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    worker = engine_jobs(tmp_path / "jobs.log", tmp_path / "jobs.json", ranks=2)
    try:
        assert worker.wait(LIMIT) == 0, worker.output()[-4000:]
    finally:
        worker.end()
    assert worker.output().count("step 2 is not taken: loss not finite") == 4
    for stage in (0, 1, 2, 3):
        spoiled, without = (
            load_file(AdapterStore(tmp_path / f"{name}{stage}").folder(version) / "adapter_model.safetensors")
            for name, version in (("spoiled", 3), ("without", 2))
        )
        assert all(torch.equal(spoiled[name], without[name]) for name in without), f"stage {stage}"
