"""The same groups, cut into any ranks x accumulation x micro-batch size, in any order, under any ZeRO stage, give the
same loss and the same adapter, and these are the ones of a plain single-process reference written here.

The optimizer is SGD, so that an adapter's update is its gradient: Adam's first step is nearly the gradient's sign and
would hide a wrong scale.
"""

import json
import random
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from processes import LIMIT, engine_jobs
from safetensors.torch import load_file
from tiny import ds_config, free_port, save_tiny

import utils
from grpo.models import add_lora, load_model
from grpo.rollout import Group, pack

GROUPS, GROUP_SIZE, NEW_TOKENS, STEPS, RATE = 4, 4, 12, 2, 0.5
# (of the adapter by norm, of the loss), relative to the reference in float64
TOLERANCES = {"float32": (2e-6, 5e-6), "float16": (2e-3, 5e-3), "bfloat16": (5e-2, 5e-2)}


def random_groups(seed=0) -> list[Group]:
    """Groups of uneven prompts and completions, off-policy enough that some ratios are clipped."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, n):
        return torch.randint(low, high, (n,), generator=generator, dtype=torch.int32)

    groups = []
    for ticket_id in range(GROUPS):
        lengths = draw(1, NEW_TOKENS + 1, GROUP_SIZE)
        n = int(lengths.sum())
        old = -4 - 2 * torch.rand(n, generator=generator)
        groups.append(
            Group(
                ticket_id=ticket_id,
                prompt_index=ticket_id,
                run_id="run",
                sampler_id="s",
                adapter_version=0,
                adapter_sha256="",
                temperature=1.0,
                prompt_ids=draw(3, 128, 3 + 4 * ticket_id),
                completion_ids=draw(3, 128, n),
                lengths=lengths,
                truncated=lengths == NEW_TOKENS,
                sampling_logprobs=old - 0.1 * torch.rand(n, generator=generator),
                old_logprobs=old,
                ref_logprobs=old + 0.3 * torch.randn(n, generator=generator).clamp(max=1),
                rewards=torch.rand(GROUP_SIZE, generator=generator),
            )
        )
    return groups


def groups_named(name: str) -> list[Group]:
    """The groups, in this order or another, or with equal rewards in the first three of them or in all."""
    groups = random_groups()
    equal = {"equal": 3, "all equal": GROUPS}.get(name, 0)
    groups = [replace(g, rewards=torch.ones(GROUP_SIZE)) if i < equal else g for i, g in enumerate(groups)]
    if name == "shuffled":
        random.Random(3).shuffle(groups)
    return groups


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """The model folder and folders with groups."""
    folder = tmp_path_factory.mktemp("invariance")
    save_tiny(folder / "model")
    for name in ("ordered", "shuffled", "equal", "all equal"):
        (folder / name).mkdir()
        for i, group in enumerate(groups_named(name)):
            (folder / name / f"{i}.group").write_bytes(pack(group))
    return folder


def job(material, out, config, loss="grpo_loss", groups="ordered", flags=()):
    """One entry of a job file; `config` are the arguments of tiny.ds_config."""
    sgd = {"type": "SGD", "params": {"lr": RATE}}
    more = {"optimizer": sgd, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    path = ds_config(material / f"{out.name}.json", **config, **more)
    values = {
        "--model_path": material / "model",
        "--save_path": out,
        "--ds_config": path,
        "--port": free_port(),
        "--max_steps": STEPS,
        "--lora_rank": 4,
        "--lora_alpha": 8,
        "--max_staleness": 10,
    }
    return {
        "flags": [str(part) for pair in values.items() for part in pair] + list(flags),
        "groups": str(material / groups),
        "loss": loss,
        "max_new_tokens": NEW_TOKENS,
    }


def reference(material, loss="grpo_loss", keep_truncated=True, tis_cap=None, beta=0.04, groups="ordered"):
    """Loss of each step and final adapter, sequence by sequence without padding, batching or DeepSpeed."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = add_lora(load_model(str(material / "model")).float(), config).double()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss_fn, losses = getattr(utils, loss), []
    for _ in range(STEPS):
        terms, counts = [], {"sequences": 0, "tokens": 0}
        for group in groups_named(groups):
            advantages = utils.group_advantages(group.rewards, GROUP_SIZE)
            fields = ("completion_ids", "old_logprobs", "ref_logprobs", "sampling_logprobs")
            rows = zip(
                *(group.completions(name) for name in fields),
                advantages,
                group.truncated,
                strict=True,
            )
            for ids, old, ref, sampling, advantage, truncated in rows:
                if truncated and not keep_truncated:
                    continue
                both = torch.cat([group.prompt_ids, ids]).long()[None]
                logits = model(both).logits[0, len(group.prompt_ids) - 1 : -1].double()
                logprobs = torch.log_softmax(logits, -1).gather(-1, ids.long()[:, None])[:, 0]
                weights = None if tis_cap is None else (old - sampling).double().exp().clamp(max=tis_cap)[None]
                term, _ = loss_fn(
                    logprobs[None],
                    old.double()[None],
                    ref.double()[None],
                    advantage.double()[None],
                    torch.ones(1, len(ids), dtype=torch.bool),
                    beta=beta,
                    denominator=1,
                    importance_weights=weights,
                )
                terms.append(term)
                counts["sequences"] += 1
                counts["tokens"] += len(ids)
        denominator = {
            "grpo_loss": counts["sequences"],
            "gspo_loss": counts["sequences"],
            "dapo_loss": counts["tokens"],
            "cispo_loss": counts["tokens"],
            "dr_grpo_loss": counts["sequences"] * NEW_TOKENS,
        }[loss]
        total = torch.stack(terms).sum() / denominator
        losses.append(total.item())
        for parameter, gradient in zip(parameters, torch.autograd.grad(total, parameters), strict=True):
            with torch.no_grad():
                parameter -= RATE * gradient
    return losses, {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}


def compare(out, expected):
    losses, adapter = expected
    found = json.loads((out / "losses.json").read_text())
    for one, value in zip(found, losses, strict=True):
        assert one["loss"] == pytest.approx(value, rel=TOLERANCES[one["dtype"]][1], abs=1e-7), out.name
    state = load_file(out / "latest" / "adapter_model.safetensors")
    assert state.keys() == adapter.keys()
    whole, gap = (torch.cat([one[n].double().flatten() for n in sorted(adapter)]) for one in (adapter, state))
    gap = (gap - whole).norm() / whole.norm()
    print(f"{out.name}: adapter within {gap:.1e}, losses {[one['loss'] for one in found]}")
    tolerance = TOLERANCES[found[0]["dtype"]][0]
    assert gap < tolerance, f"{out.name}: the adapter differs by {gap:.1e}"
    for name, tensor in adapter.items():  # no single tensor may hide in the whole
        assert (state[name].double() - tensor).norm() <= 10 * tolerance * tensor.norm(), f"{out.name}: {name}"


BETA = ["--beta", "0.04"]
ONE_RANK = {
    "whole": dict(config=dict(micro=16, accumulation=1)),
    "quarters": dict(config=dict(micro=4, accumulation=4)),
    "sixteenths": dict(config=dict(micro=1, accumulation=16)),
    "shuffled": dict(config=dict(micro=4, accumulation=4), groups="shuffled"),
    "stage 0": dict(config=dict(micro=4, accumulation=4, stage=0)),
    "stage 3": dict(config=dict(micro=4, accumulation=4, stage=3)),
    "checkpointing": dict(config=dict(micro=8, accumulation=2), flags=["--gradient_checkpointing"]),
    "gspo": dict(config=dict(micro=4, accumulation=4), loss="gspo_loss"),
    "dapo": dict(config=dict(micro=4, accumulation=4), loss="dapo_loss"),
    "dr": dict(config=dict(micro=4, accumulation=4), loss="dr_grpo_loss"),
    "cispo": dict(config=dict(micro=4, accumulation=4), loss="cispo_loss"),
    "no truncated": dict(config=dict(micro=4, accumulation=4), flags=["--mask_truncated"]),
    "tis": dict(config=dict(micro=4, accumulation=4), flags=["--tis_cap", "1.05"]),
    "by tokens": dict(config=dict(micro=4, accumulation=4), flags=["--max_tokens_per_micro_batch", "50"]),
    "equal, left out": dict(config=dict(micro=4, accumulation=4), groups="equal", flags=["--beta", "0"]),
    "equal, run": dict(
        config=dict(micro=4, accumulation=4), groups="equal", flags=["--beta", "0", "--run_zero_groups"]
    ),
}
TWO_RANKS = {
    "two ranks": dict(config=dict(micro=8, accumulation=1)),
    "two ranks, eighths": dict(config=dict(micro=2, accumulation=4), groups="shuffled"),
    "two ranks, stage 0": dict(config=dict(micro=4, accumulation=2, stage=0)),
    "two ranks, stage 3": dict(config=dict(micro=4, accumulation=2, stage=3)),
    "two ranks, stage 1": dict(config=dict(micro=4, accumulation=2, stage=1)),
    "two ranks, gspo": dict(config=dict(micro=2, accumulation=4), loss="gspo_loss"),
    "two ranks, fp16": dict(config=dict(micro=4, accumulation=2, fp16={"enabled": True, "initial_scale_power": 8})),
    "two ranks, bf16": dict(config=dict(micro=4, accumulation=2, bf16={"enabled": True})),
    "two ranks, dapo": dict(config=dict(micro=2, accumulation=4), loss="dapo_loss"),
    "two ranks, by tokens": dict(config=dict(micro=4, accumulation=2), flags=["--max_tokens_per_micro_batch", "50"]),
    "two ranks, stage 3, by tokens": dict(
        config=dict(micro=4, accumulation=2, stage=3), flags=["--max_tokens_per_micro_batch", "30"]
    ),
    "two ranks, equal": dict(config=dict(micro=4, accumulation=2), groups="equal", flags=["--beta", "0"]),
    "two ranks, all equal": dict(config=dict(micro=4, accumulation=2), groups="all equal", flags=["--beta", "0"]),
}


def run_all(material, tmp_path, cases, ranks):
    jobs = []
    for name, case in cases.items():
        case = {"flags": []} | case
        jobs.append(job(material, tmp_path / name.replace(" ", "_"), **case | {"flags": BETA + case["flags"]}))
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    worker = engine_jobs(tmp_path / "jobs.log", path, ranks=ranks)
    try:
        assert worker.wait(LIMIT) == 0, worker.output()[-4000:]
    finally:
        worker.end()
    references = {}
    for name, case in cases.items():
        settings = {"loss": case.get("loss", "grpo_loss")}
        settings |= {"keep_truncated": False} if name == "no truncated" else {}
        settings |= {"tis_cap": 1.05} if name == "tis" else {}
        settings |= {"groups": case["groups"], "beta": 0} if "equal" in case.get("groups", "") else {}
        key = json.dumps(settings)
        if key not in references:
            references[key] = reference(material, **settings)
        compare(tmp_path / name.replace(" ", "_"), references[key])


@pytest.mark.slow
def test_one_rank_gives_the_references_loss_and_adapter_however_it_is_cut(material, tmp_path):
    run_all(material, tmp_path, ONE_RANK, ranks=1)


@pytest.mark.slow
def test_two_ranks_give_the_references_loss_and_adapter_however_it_is_cut(material, tmp_path):
    run_all(material, tmp_path, TWO_RANKS, ranks=2)


def test_the_fixture_is_off_policy_and_uneven():
    groups = random_groups()
    assert len({len(group.prompt_ids) for group in groups}) == GROUPS
    assert any(group.truncated.any() for group in groups) and not all(group.truncated.all() for group in groups)
    assert pack(replace(groups[0])) == pack(groups[0])
