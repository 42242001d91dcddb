"""Forward passes of LoRA layers and head as few, plain operations, for the many small steps of decoding.

PEFT's own forward casts, scales and adds in operations of their own, 20 to 40 % of a decoding step. The values are
the same up to rounding; weights are neither copied nor merged, so a merged weight's rounding cannot hide an update.

On a CPU, products are written as W x^T: with the few rows of a decoding step that is up to 1.6 times faster than
x W^T, and the next layer takes the transposed result as it is. Half-precision weights are held in float32 meanwhile
where the CPU has no instructions for them: a product of bfloat16 numbers, added up in float32 and rounded to bfloat16,
is the same by either way, and this one is several times faster.
"""

import contextlib
from collections.abc import Callable

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

WHOLE = 8  # numbers in a CPU's vector register: products of a multiple of it are faster than of a few less


@contextlib.contextmanager
def lean(model: nn.Module, contiguous: bool = False):
    """Within it, and without gradients, the model's layers run the short way where they have one.

    contiguous: results lie in memory as the layers' own do, for models that look at them in other shapes.
    """
    layers = {layer: _with_adapter(layer) for layer in model.modules() if _is_plain(layer)}
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        layers[head] = _product(head)
    for layer, forward in layers.items():
        layer.forward = _contiguous(forward) if contiguous else forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _contiguous(forward: Callable) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: forward(x).contiguous()


def _is_plain(layer: nn.Module) -> bool:
    """Whether it is a LoRA layer whose output is base(x) + scaling * B A x and no more."""
    if not isinstance(layer, LoraLinear) or layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return False
    (name,) = layer.active_adapters
    plain = type(layer.base_layer) is nn.Linear and name in layer.lora_A and not layer.lora_variant.get(name)
    return plain and isinstance(layer.lora_dropout[name], nn.Identity) and layer.lora_B[name].bias is None


def _with_adapter(layer: LoraLinear) -> Callable[[torch.Tensor], torch.Tensor]:
    (name,) = layer.active_adapters
    return _product(layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])


def _product(base: nn.Linear, down=None, up=None, scaling: float = 1.0) -> Callable[[torch.Tensor], torch.Tensor]:
    """x -> x (W + scaling * up down)^T + bias, for weights W (out, in), up (out, r) and down (r, in)."""
    weight, bias = base.weight, base.bias
    dtype = weight.dtype
    if _is_slow(weight):
        weight, bias, down, up = (None if t is None else t.float() for t in (weight, bias, down, up))

    def by_rows(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = nn.functional.linear(rows, weight, bias)
        if down is not None:
            out.addmm_(rows @ down.t(), up.t(), alpha=scaling)
        return out.view(*x.shape[:-1], -1)

    def by_columns(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        count = len(rows)
        if count > WHOLE and count % WHOLE:
            rows = nn.functional.pad(rows, (0, 0, 0, -count % WHOLE))
        columns = rows.t().to(weight.dtype)
        out = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
        if down is not None:
            out.addmm_(up, down @ columns, alpha=scaling)
        return out[:, :count].t().to(dtype).view(*x.shape[:-1], -1)

    return by_columns if weight.device.type == "cpu" else by_rows


def _is_slow(weight: torch.Tensor) -> bool:
    """Whether this is half precision on a CPU that has no instructions for it."""
    if weight.device.type != "cpu" or weight.dtype == torch.float32:
        return False
    fast = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}
    able = torch.cpu.get_capabilities()
    return not any(able.get(name) for name in fast.get(str(weight.dtype).removeprefix("torch."), ()))
