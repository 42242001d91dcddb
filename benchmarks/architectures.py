"""Every causal language model of transformers, made tiny: decoded, scored and trained for one step by our functions.

    .venv/bin/python benchmarks/architectures.py            # all of them, in five minutes on two busy cores
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
from grpo.ways import plain_forward

LARGEST = 2e7  # parameters of a tiny model
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
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, unpadded_vocab_size=VOCABULARY, rotary_dim=8,
    decoder_ffn_dim=64, encoder_ffn_dim=64, decoder_layers=2, encoder_layers=2, decoder_attention_heads=4,
    encoder_attention_heads=4, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=16, n_groups=1,
    state_size=16, index_topk=WINDOW, index_n_heads=4, index_head_dim=16, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, window_size=WINDOW,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    partial_rotary_factor=1.0,
    short_factor=[1.0, 1.1, 1.3, 1.5],
    long_factor=[1.5, 3.0, 6.0, 9.0],
    original_max_position_embeddings=WINDOW,
)
# what some kinds need beside or instead, to have all kinds of layers that they can have
SPECIAL: dict[str, dict] = {
    "phi3": dict(original_max_position_embeddings=WINDOW, rope_parameters=LONGROPE),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=2),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"] * 2),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "bamba": dict(attn_layer_indices=[1, 3]),
    "mamba2": dict(num_heads=8, head_dim=8),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "xmod": dict(default_language="en_XX"),
    "cohere_compass_text": dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "whisper": dict(max_target_positions=128),
}
TARGETS = ["all-linear", ["q_proj", "k_proj", "v_proj", "o_proj"], ["in_proj", "x_proj"], ["in_proj"]]  # in turn


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
    refusals: list[str] = []
    for targets in TARGETS:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                gaps, ways = try_model(tiny(config_class), targets)
            break
        except ValueError as error:  # UnfitModel, and PEFT's word on layers that it cannot adapt
            refusals.append(f"refused: {error}".replace("\n", " "))
        except Exception as error:  # a fault that a user would meet as a traceback
            return f"WRONG: {type(error).__name__}: {error!s:.150}".replace("\n", " ")
    else:
        return max(refusals, key=lambda text: "--model_path" in text)  # our own sentence, if there is one
    text = ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
    return f"{'right' if max(gaps.values()) < LIMIT else 'WRONG'} ({ways}): {text}"


def tiny(config_class):
    """A random model of this kind with matrices of std 0.15."""
    default = config_class()
    if default.get_text_config() is not default:
        raise ValueError("a model of several parts, whose text model is tried by itself")
    known = default.to_dict()
    settings = {name: value for name, value in SIZES.items() if name in known}
    if "qk_nope_head_dim" in known:
        settings.pop("head_dim", None)  # it follows from the sizes of its two parts
    config = config_class(**settings | SPECIAL.get(default.model_type, {}))
    switch_dropout_off(config)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"it keeps {size / 1e6:.0f} million parameters")
    model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def try_model(model, targets) -> tuple[dict[str, float], str]:
    """The largest differences of decoding, scoring and training, and the ways that were taken."""
    model = add_lora(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    prompts = [(3 + torch.arange(n) * 11 % 120) for n in LENGTHS]
    ends = list(range(0, VOCABULARY, 9))
    groups = generate(
        model.eval(),
        [prompt.tolist() for prompt in prompts],
        [1, 2, 3, 4],
        group_size=2,
        max_new_tokens=8,
        temperature=1.0,
        eos_ids=ends,
        places=6,
    )
    drawn = [completion for group in groups for completion in group]
    rows = [(prompts[i // 2], completion.ids.long()) for i, completion in enumerate(drawn)]
    with torch.no_grad():
        exact = [plain_logprobs(model, *row) for row in rows]
        texts_so_far = [decoded_logprobs(model, *row) for row in rows]
    decoding = max(gap(one.logprobs, other) for one, other in zip(drawn, texts_so_far, strict=True))
    batch = collate(prompts, [completion for _, completion in rows])
    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()
    found, _ = completion_logprobs(model, batch, 1.0)
    scoring = max(gap(row[: len(one)], one) for row, one in zip(found, exact, strict=True))
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    gradient = flat(torch.autograd.grad((weights * found).sum(), adapter, allow_unused=True), adapter)
    total = sum((weights[i, : len(row[1])] * plain_logprobs(model, *row)).sum() for i, row in enumerate(rows))
    expected = flat(torch.autograd.grad(total, adapter, allow_unused=True), adapter)
    training = float((gradient - expected).norm() / expected.norm())
    longest = max(LENGTHS) + 8
    ways = f"{decoding_way(model, longest).engine}, {ways_that_fit(model, longest).forward}"
    return {"decoding": decoding, "scoring": scoring, "gradient": training}, ways


def plain_logprobs(model, prompt: torch.Tensor, completion: torch.Tensor) -> torch.Tensor:
    """(C,) by one plain forward pass."""
    logits = plain_forward(model, torch.cat([prompt, completion])[None])[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, completion[:, None])[:, 0]


def decoded_logprobs(model, prompt: torch.Tensor, completion: torch.Tensor) -> torch.Tensor:
    """The same token by token: one plain forward pass of each text so far, for decoders know no more than that."""
    ids = torch.cat([prompt, completion])
    ends = range(len(prompt), len(ids))
    return torch.stack([torch.log_softmax(plain_forward(model, ids[None, :n])[0, -1], -1)[ids[n]] for n in ends])


def flat(gradients, parameters) -> torch.Tensor:
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = float((found - expected).abs().max())
    return difference if difference == difference else float("inf")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="model types; none: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
