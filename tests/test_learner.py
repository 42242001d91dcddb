"""The learner's engine: what it trains, what it refuses, what it writes."""

import argparse
import json
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from test_checkpoints import publish_versions
from test_rollout import make_group
from tiny import ds_config, tiny_model

from grpo.batch import collate
from grpo.channel import ChannelError
from grpo.engine import adapter_state, make_engine, precision, read_ds_config
from grpo.held_out import HeldOut
from grpo.learner import Learner
from grpo.logprobs import completion_logprobs
from grpo.metrics import Means, draw_curve, group_metrics
from grpo.models import add_lora
from grpo.ranks import SIGNALS


def arguments(**changes) -> argparse.Namespace:
    defaults = dict(lora_rank=4, lora_alpha=8, lora_targets="all-linear", init_adapter=None)
    defaults |= dict(gradient_checkpointing=False)
    return argparse.Namespace(**defaults | changes)


def test_only_the_adapter_is_handed_to_the_optimizer_and_the_base_stays(ranks, tmp_path):
    config = read_ds_config(str(ds_config(tmp_path / "ds.json", micro=1, accumulation=1)), 1)
    model = tiny_model()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine, dtype = make_engine(model, arguments(), config)
    adapter = [p for p in engine.module.parameters() if p.requires_grad]
    optimized = sum(p.numel() for group in engine.optimizer.optimizer.param_groups for p in group["params"])
    assert dtype == "float32" and optimized == sum(p.numel() for p in adapter)
    for _ in range(3):
        loss = engine(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.square().mean()
        engine.backward(loss)
        engine.step()
    trained = engine.module.base_model.model.state_dict()
    for name, tensor in base.items():
        wrapped = name if name in trained else name.replace(".weight", ".base_layer.weight").replace(
            ".bias", ".base_layer.bias"
        )
        assert torch.equal(trained[wrapped], tensor), name
    assert all(tensor.abs().max() > 0 for name, tensor in adapter_state(engine).items() if "lora_B" in name)


def test_a_checkpoint_leaves_the_frozen_base_out(ranks, tmp_path):
    config = read_ds_config(str(ds_config(tmp_path / "ds.json", micro=1, accumulation=1)), 1)
    engine, _ = make_engine(tiny_model(), arguments(), config)
    engine.save_checkpoint(str(tmp_path / "checkpoint"), tag="one", exclude_frozen_parameters=True)
    states = torch.load(tmp_path / "checkpoint" / "one" / "mp_rank_00_model_states.pt", weights_only=False)
    assert states["module"] and all("lora_" in name for name in states["module"])


def test_a_scheduler_in_the_configuration_works(ranks, tmp_path):
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"}}
    path = ds_config(tmp_path / "ds.json", micro=1, accumulation=1, scheduler=scheduler)
    engine, _ = make_engine(tiny_model(), arguments(), read_ds_config(str(path), 1))
    rates = []
    for _ in range(3):
        engine.backward(engine(input_ids=torch.tensor([[5, 6]])).logits.square().mean())
        engine.step()
        rates.append(engine.get_lr()[0])
    assert rates == sorted(rates) and rates[0] < rates[-1]


@pytest.mark.parametrize("order", ["before", "after"])
def test_gradients_reach_every_lora_b_with_checkpointing(order):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing and order == "before":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(0)
        model = add_lora(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
        if checkpointing and order == "after":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(input_ids=torch.tensor([[5, 6, 7]])).logits.square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if "lora_B" in n})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_learner_recomputes_layers_when_told_to(ranks, tmp_path, checkpointing):
    config = read_ds_config(str(ds_config(tmp_path / "ds.json", micro=1, accumulation=1)), 1)
    engine, _ = make_engine(tiny_model(), arguments(gradient_checkpointing=checkpointing), config)
    calls = []
    layer = engine.module.get_base_model().model.layers[0]
    layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = collate([torch.tensor([5, 6])], [torch.tensor([7, 8, 9])] * 2)
    completion_logprobs(engine, batch, 1.0)  # the first call also tries what fits
    calls.clear()
    engine.backward(completion_logprobs(engine, batch, 1.0)[0].sum())
    assert len(calls) == 1 + checkpointing


def test_a_frozen_model_is_refused_by_name(ranks, tmp_path):
    config = read_ds_config(str(ds_config(tmp_path / "ds.json")), 1)
    with pytest.raises(ValueError, match="--lora_targets nothing_proj"):
        make_engine(tiny_model(), arguments(lora_targets="nothing_proj"), config)


CONFIGS = {
    "no JSON": ("{", ["is no JSON"]),
    "no batch sizes": ('{"optimizer": {}}', ["train_micro_batch_size_per_gpu", "[None, None]"]),
    "auto": (
        '{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1, "optimizer": {}}',
        ["['auto', 1]"],
    ),
    "auto elsewhere": (
        '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,'
        '"optimizer": {"params": {"lr": "auto"}}}',
        ['"auto" for optimizer.params.lr'],
    ),
    "a total that does not fit": (
        '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "train_batch_size": 6,'
        '"optimizer": {}}',
        ["train_batch_size 6", "2 a micro-batch x 3 accumulation steps x 2 ranks are 12"],
    ),
    "fp16 under stage 0": (
        '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "fp16": {"enabled": true}}',
        ["fp16", "stage 0", "1, 2 or 3"],
    ),
    "an unseen gradient": (
        '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,'
        '"bf16": {"check_grad_overflow": false}}',
        ["bf16.check_grad_overflow"],
    ),
    "no optimizer": ('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}', ["optimizer"]),
}


@pytest.mark.parametrize("text, words", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_configuration_that_cannot_work_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_ds_config(str(path), ranks=2)
    assert all(word in str(error.value) for word in ["--ds_config", *words]), error.value


def test_precision_follows_the_configuration():
    assert precision({"bf16": {"enabled": True}}) == "bfloat16"
    assert precision({"fp16": {"enabled": True}}) == "float16"
    assert precision({"bf16": {"enabled": False}}) == precision({}) == "float32"


def test_the_shipped_configuration_is_zero_2_bf16_with_clipping():
    config = read_ds_config("ds_config.json", ranks=2)
    assert config["zero_optimization"]["stage"] == 2 and config["bf16"]["enabled"] and config["gradient_clipping"] > 0
    assert json.dumps(config).count("torch_adam") == 1  # no compiler is needed


def test_group_metrics_by_hand():
    groups = [
        make_group(rewards=torch.tensor([2.25, 0.25]), adapter_version=3),
        make_group(rewards=torch.tensor([1.0, float("nan")]), adapter_version=5),
    ]
    found = group_metrics(groups, step=5)
    assert found["reward"] == pytest.approx(3.5 / 3) and found["reward_std"] == pytest.approx((49 / 48) ** 0.5)
    assert found["frac_reward_zero_std"] == 0.5 and found["rewards/format/mean"] == pytest.approx(0.625)
    assert found["completions/mean_length"] == 2.5 and found["completions/clipped_ratio"] == 0.5
    assert found["reward_stderr"] == pytest.approx(0.125)  # of the groups' means 1.25 and 1
    assert found["completions/length_p10"] == 2 and found["completions/length_p90"] == 3
    assert found["num_tokens"] == 2 * (5 + 2 * 3)
    assert found["staleness/mean"] == 1 and found["staleness/max"] == 2
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(0.1, abs=1e-6)
    assert found["sampler/generation_seconds"] == 1.0


def test_means_are_those_of_sums_over_counts():
    class Two:
        """Two ranks with the same values."""

        def add_up(self, values):
            return [2 * value for value in values]

    means = Means()
    means.add({"a": (1.0, 1), "b": (0.0, 0)})
    means.add({"a": (5.0, 3), "b": (0.0, 0)})
    found = means.over_ranks(Two())
    assert found["a"] == 1.5 and found["b"] != found["b"]


def test_the_terminal_curve_shows_first_and_last():
    text = draw_curve([0.0, 1.0, 2.0], "title", height=3)
    assert text.split("\n")[:4] == ["title", "   2.00 |  *", "        | * ", "   0.00 |*  "]


def test_evaluations_that_a_crash_cut_short_are_due_whatever_step_the_run_resumes_from(tmp_path):
    held_out = HeldOut(tmp_path, 3)
    held_out.summaries = [{"version": 0}, {"version": 2}]
    learner = Learner.__new__(Learner)
    learner.store = publish_versions(tmp_path, range(8))
    learner.source = SimpleNamespace(evaluate=held_out.start)
    learner.steps_done = 5  # between versions 4, whose evaluation was under way, and 6, whose step is trained again
    learner.args = SimpleNamespace(eval_steps=2, max_steps=7)
    learner._evaluate_what_is_due()
    assert held_out.pinned == {4, 6, 7}  # 7 is the last
    granted = [ticket.version for _ in range(3) for ticket in held_out.grant("s", 9, 9, 30.0)]
    assert granted == [4] * 3 + [6] * 3 + [7] * 3


def a_learner_that_listens(launched):
    learner = Learner.__new__(Learner)
    learner._stop_signal, learner.ranks = None, SimpleNamespace(rank=0, launched=launched)
    return learner


def test_a_second_signal_ends_the_process_at_once_and_the_launchers_echo_of_the_first_does_not(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr("grpo.learner.os._exit", ended.append)
    learner = a_learner_that_listens(launched=True)
    learner._hear(signal.SIGINT)
    learner._hear(signal.SIGINT)  # the terminal and run.sh pass one Ctrl-C on
    assert ended == [] and learner._stop_signal == "stopped by SIGINT"
    assert capfd.readouterr().out == "stopping, saving; again ends at once\n"
    monkeypatch.setattr("grpo.learner.SAME_SIGNAL_SECONDS", -1.0)
    for _ in range(3):
        learner._hear(signal.SIGTERM)  # the launcher passes it on too, later on a busy machine
    assert ended == []
    learner._hear(signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]
    alone = a_learner_that_listens(launched=False)
    for _ in range(2):
        alone._hear(signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM] * 2


def test_a_signal_is_heard_while_the_main_thread_is_in_one_long_call(capfd):
    learner = a_learner_that_listens(launched=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heard_after = []
    done = threading.Event()

    def watch():
        os.kill(os.getpid(), signal.SIGTERM)
        while learner._stop_signal is None and not done.wait(0.01):
            pass
        heard_after.append(done.is_set())

    try:
        SIGNALS.tell(learner._hear)
        thread = threading.Thread(target=watch)
        thread.start()
        torch.linalg.svd(torch.rand(2000, 2000))  # seconds in which no line of Python runs in this thread
        done.set()
        thread.join()
        assert heard_after == [False] and learner._stop_signal == "stopped by SIGTERM"
        assert capfd.readouterr().out == "stopping, saving; again ends at once\n"
    finally:
        done.set()
        SIGNALS.tell(lambda number: None)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_channel_that_has_failed_fails_a_run_that_is_being_stopped():
    def check():
        raise ChannelError("the channel failed: KeyError('x')")

    learner = Learner.__new__(Learner)
    learner.channel, learner._failure = SimpleNamespace(check=check), None
    learner._check_channel()
    assert "the channel failed" in str(learner._failure)
