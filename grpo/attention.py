"""Attention of our own inside transformers models.

A model that is told `attn_implementation` NAME calls `attend` in every layer. Which keys a query sees is then up to
the layout that the forward pass was given as the keyword argument LAYOUT: a Packed row (grpo/packed.py) in scoring and
training, a SharedPromptCache (grpo/shared_prompt.py) in decoding. Without a layout it is PyTorch's attention.
"""

import functools

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME, LAYOUT = "grpo", "grpo_layout"


def attend(module, query, key, value, attention_mask, **settings):
    """transformers' attention interface: query (B, H, T, D), key and value (B, K, S, D) -> ((B, T, H, D), None)."""
    layout = settings.pop(LAYOUT, None)
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    strange = [name for name in ("s_aux", "softcap") if settings.get(name) is not None]
    if strange:
        raise NotImplementedError(f"attention with {strange[0]}")
    return layout.attend(module, query, key, value, **settings), None


def run(model, layout, **inputs):
    """One forward pass in which `layout` decides what each token attends to."""
    return model(attention_mask=_all_seen(inputs["input_ids"].device), **{LAYOUT: layout}, **inputs)


def own_attention(model) -> bool:
    """Let the model attend by `attend`; False where its attention cannot be exchanged."""
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return False
    if not all(getattr(part, "_supports_attention_backend", True) for part in model.modules()):
        return False
    config._attn_implementation = NAME
    return True


@functools.lru_cache
@torch.inference_mode(False)  # it may be made while decoding and is kept for training, whose graph it is part of
def _all_seen(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it outlives the call, and autograd takes no tensor of inference mode
        return torch.ones(1, 1, 1, 1, device=device)  # four dimensions: transformers makes no mask of its own


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
