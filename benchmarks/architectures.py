"""Every causal language model of transformers, made tiny: decoded, scored and trained for one step by our functions.

    .venv/bin/python benchmarks/architectures.py            # all of them, in about three minutes on two cores
    .venv/bin/python benchmarks/architectures.py phi3 lfm2  # some

Each result is compared with the model's own plain forward pass of each unpadded sequence, in float32, with a LoRA
adapter on all linear layers: log-probs of what was drawn and of what was scored, and the gradient of the adapter. A
model is right where all are within 1e-4, or refused in a sentence. Windows, chunks and the length at which LongRoPE
changes are shrunk to sizes that the texts cross; short prompts are beside long ones. The last line is JSON.
"""

import argparse
import contextlib
import io
import json
import sys
import time
import warnings
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from grpo.batch import collate
from grpo.generation import decoding_way, generate
from grpo.logprobs import completion_logprobs, ways_that_fit
from grpo.models import add_lora, switch_dropout_off
from grpo.ways import UnfitModel, plain_forward

LIMIT, VOCABULARY, WINDOW = 1e-4, 128, 16
LENGTHS = (3, 7, 19, 24)  # of the prompts: below the windows, and beyond them
# values for entries of configurations, whichever of them a model has
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, d_model=32, n_embd=32, dim=32, embedding_size=32, intermediate_size=64,
    ffn_dim=64, n_inner=64, num_hidden_layers=4, n_layer=4, n_layers=4, num_layers=4, num_attention_heads=4, n_head=4,
    n_heads=4, num_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128, n_positions=128, n_ctx=128,
    sliding_window=WINDOW, attention_window_size=WINDOW, attention_chunk_size=WINDOW, sliding_window_size=WINDOW,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, n_shared_experts=1, moe_intermediate_size=32, moe_k=2, q_lora_rank=16, kv_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def main() -> None:
    """Try all, or those that are named."""
    args = parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    results, started = {}, time.monotonic()
    for config_class in sorted(MODEL_FOR_CAUSAL_LM_MAPPING.keys(), key=lambda one: one.model_type):
        kind = config_class.model_type
        if args.kinds and kind not in args.kinds or kind in results:
            continue
        results[kind] = try_kind(config_class)
        print(f"{kind:28} {results[kind]}", flush=True)
    made = {kind: text for kind, text in results.items() if not text.startswith("cannot be made")}
    counts = {word: sum(text.startswith(word) for text in made.values()) for word in ("right", "refused", "WRONG")}
    print(json.dumps(counts | {"models": len(made), "seconds": round(time.monotonic() - started)}))


def try_kind(config_class) -> str:
    """What became of one kind of model, in a line."""
    try:
        model = tiny(config_class)
        plain_forward(model, torch.arange(3, 12)[None])
    except Exception as error:  # foreign code, with sizes that it was not made for
        return f"cannot be made tiny: {type(error).__name__}: {error!s:.100}".replace("\n", " ")
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            gaps, ways = try_model(model)
    except ValueError as error:  # UnfitModel, and PEFT's word on targets that it does not know
        return f"refused: {error}"
    except Exception as error:  # a fault that a user would meet as a traceback
        return f"WRONG: {type(error).__name__}: {error!s:.150}".replace("\n", " ")
    text = ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
    return f"{'right' if max(gaps.values()) < LIMIT else 'WRONG'} ({ways}): {text}"


def tiny(config_class):
    """A random model of this kind with matrices of std 0.25, and an adapter that does something."""
    config = config_class()
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        shrink(part)
    switch_dropout_off(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if sum(parameter.numel() for parameter in model.parameters()) > 20e6:
        raise ValueError("it stays large")
    return redraw(model)
