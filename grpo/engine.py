"""DeepSpeed around a LoRA model: reading ds_config.json, building the engine, taking the adapter out of it."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from peft import LoraConfig, TaskType

from grpo.adapters import AdapterError, adapter_in, adapter_tensors, copy_into
from grpo.facts import check_adapter, empty_model, read_config
from grpo.models import DTYPES, add_lora
from grpo.reference import load_init_adapter

TAKEN, SKIPPED, RESCALED = "taken", "skipped", "rescaled"  # what comes of an optimizer step


def read_ds_config(path: str, ranks: int) -> dict:
    """The DeepSpeed configuration; ValueError for what cannot work here.

    Raises:
        ValueError: no JSON, batch sizes that are absent or do not fit the number of ranks, or a dtype that this device
            lacks.
    """
    try:
        config = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"--ds_config {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--ds_config {path} must hold an object, as in the ds_config.json beside training_worker.py")
    for name in ("optimizer", "scheduler", "zero_optimization", "bf16", "fp16"):
        if not isinstance(config.get(name, {}), dict):
            raise ValueError(f'--ds_config {path} has {config[name]!r} for "{name}", where an object must stand')
    sizes = [config.get(name) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(
            f"--ds_config {path} must give train_micro_batch_size_per_gpu and gradient_accumulation_steps as whole "
            f"numbers, it has {sizes}"
        )
    total = config.get("train_batch_size", sizes[0] * sizes[1] * ranks)
    if total != sizes[0] * sizes[1] * ranks:
        raise ValueError(
            f"--ds_config {path} has train_batch_size {total}, but {sizes[0]} a micro-batch x {sizes[1]} accumulation "
            f"steps x {ranks} ranks are {sizes[0] * sizes[1] * ranks}; leave train_batch_size out"
        )
    automatic = sorted(name for name, value in flatten(config) if value == "auto")
    if automatic:
        raise ValueError(f'--ds_config {path} has "auto" for {automatic[0]}; give a number')
    for name in ("bf16.check_grad_overflow", "zero_optimization.compute_grad_norm"):
        if dict(flatten(config)).get(name) is False:
            raise ValueError(f"--ds_config {path} has {name} false, so a gradient of NaN would go unseen: leave it out")
    if precision(config) == "float16" and not config.get("zero_optimization", {}).get("stage"):
        raise ValueError(
            f"--ds_config {path} has fp16 under ZeRO stage 0, where DeepSpeed divides gradients by a loss scale that "
            "it has not applied: set the stage to 1, 2 or 3, or take bf16"
        )
    if "optimizer" not in config:
        raise ValueError(f'--ds_config {path} has no "optimizer": it sets the learning rate')
    if precision(config) == "float16" and not get_accelerator().is_fp16_supported():
        raise ValueError(f"this device has no fp16; take fp16 out of --ds_config {path}, or put bf16 there")
    return config


def flatten(config: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The entries of nested objects, as (name.name, value) pairs."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def groups_per_step(ds_config: dict, ranks: int, group_size: int, path: str) -> int:
    """How many groups one optimizer step takes; ValueError, which names the file `path`, unless they come out whole."""
    micro, accumulation = ds_config["train_micro_batch_size_per_gpu"], ds_config["gradient_accumulation_steps"]
    sequences = micro * accumulation * ranks
    if sequences % group_size:
        raise ValueError(
            f"one optimizer step takes {sequences} sequences ({micro} a micro-batch x {accumulation} accumulation "
            f"steps x {ranks} ranks), no multiple of --group_size {group_size}; change one of them (--ds_config {path})"
        )
    return sequences // group_size


def make_engine(model, args, ds_config: dict, start: Path | None = None) -> tuple[deepspeed.DeepSpeedEngine, str]:
    """Put a LoRA adapter on the model, fresh or from the folder `start`, and hand its parameters alone to DeepSpeed."""
    dtype = precision(ds_config)
    model = model.to(DTYPES[dtype])
    model = with_saved_adapter(model, start) if start else with_fresh_adapter(model, args)
    if args.gradient_checkpointing:
        model.enable_input_require_grads()  # the frozen embeddings would give the first block inputs without gradient
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # layers recompute in training mode only; dropout is off by configuration
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError(f"nothing is trainable: --lora_targets {args.lora_targets} selects no layer of the model")
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=ds_config)
    except (TypeError, ValueError, AssertionError, KeyError, AttributeError) as error:  # how it refuses an entry
        raise ValueError(f"DeepSpeed refuses --ds_config {args.ds_config}: {error!r:.300}") from error
    return engine, dtype


def check_lora(args, start: Path | None = None) -> None:
    """ValueError where the adapter that `make_engine` would put on the model does not fit it; loads no weights."""
    if start:
        load_init_adapter(start)
        check_adapter(adapter_in(start) or start, args.model_path, "--init_adapter")
        return
    with torch.device("meta"):
        with_fresh_adapter(empty_model(read_config(args.model_path), args.model_path), args)


def with_saved_adapter(model, folder: Path):
    """The model with the adapter in `folder`."""
    config, state = load_init_adapter(folder)
    try:
        model = add_lora(model, config)
        copy_into(model, state, str(folder))
    except (ValueError, AdapterError) as error:
        raise ValueError(f"--init_adapter {folder} does not fit the model: {error}") from error
    return model


def with_fresh_adapter(model, args):
    """The model with the adapter that the flags describe."""
    targets = args.lora_targets if args.lora_targets == "all-linear" else args.lora_targets.split(",")
    lora = LoraConfig(
        r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=targets, task_type=TaskType.CAUSAL_LM
    )
    try:
        return add_lora(model, lora)
    except ValueError as error:
        raise ValueError(f"--lora_targets {args.lora_targets} does not fit the model: {error}") from error


def precision(ds_config: dict) -> str:
    """The dtype that ds_config.json selects for weights and forward passes."""
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if ds_config.get(name, {}).get("enabled"):
            return dtype
    return "float32"


def take_step(engine) -> str | None:
    """DeepSpeed's step; after the last micro-batch tells what came of it: TAKEN, SKIPPED or RESCALED.

    A gradient that is not finite moves neither weights nor optimizer state nor scheduler. DeepSpeed's own optimizers
    see to that; the one of torch that ZeRO 0 leaves as it is in fp32 is kept from stepping here.
    """
    if not engine.is_gradient_accumulation_boundary():
        engine.step()
        return None
    scale = scaler(engine)
    can_fall = _scale_can_fall(scale)
    if hasattr(scale, "raise_error_at_min_scale"):
        scale.raise_error_at_min_scale = False  # at the least one the step is skipped like any other
    with _checked(engine.optimizer) if engine.optimizer is engine.basic_optimizer else contextlib.nullcontext():
        engine.step()
    return TAKEN if engine.was_step_applied() else RESCALED if can_fall else SKIPPED


@contextlib.contextmanager
def _checked(optimizer: torch.optim.Optimizer):
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)  # the same at every rank, for the gradients are
    optimizer._global_grad_norm, optimizer.overflow = norm, not norm.isfinite()  # where DeepSpeed looks for them
    step = optimizer.step
    if optimizer.overflow:
        optimizer.step = lambda *arguments, **settings: None
    try:
        yield
    finally:
        optimizer.step = step


def _scale_can_fall(scale) -> bool:
    """Whether an overflow lowers the loss scale of fp16, so that the next step may fit."""
    dynamic = getattr(scale, "dynamic", False) or getattr(scale, "dynamic_loss_scale", False)
    least = getattr(scale, "min_scale", None) or getattr(scale, "min_loss_scale", None)
    return bool(dynamic) and scale.cur_scale > least


def scaler(engine):
    """What holds the loss scale of fp16 as `cur_scale`; None where there is none."""
    return getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)


def adapter_state(engine) -> dict[str, torch.Tensor]:
    """PEFT's state dict of the adapter as it is now, whole at every rank whatever the ZeRO stage."""
    adapter = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    with deepspeed.zero.GatheredParameters(adapter, enabled=engine.zero_optimization_stage() == 3):
        return {name: tensor.detach().cpu().clone() for name, tensor in adapter_tensors(engine.module).items()}
