"""Tiny models and data that the tests share; everything is made here, nothing is downloaded."""

import json
import socket
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
VOCAB = 128


SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def tiny_model(seed: int = 0, **settings):
    """A random 2-layer Qwen2 whose logits differ (matrices with std 0.25)."""
    config = SHAPE | dict(max_position_embeddings=512, bos_token_id=None, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**config | settings))
    return redraw(model, seed)


def redraw(model, seed: int = 0):
    """Draw all matrices anew with std 0.25, so that logits are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """128 words: pad, unk, the end token, the four tags, digits and letters."""
    words = ["<pad>", "<unk>", "<end>", "<think>", "</think>", "<answer>", "</answer>"]
    words += [str(n) for n in range(100)] + [chr(ord("a") + i) for i in range(VOCAB - 107)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}<unk> "
    return fast


def special_tags() -> PreTrainedTokenizerFast:
    """The same tokenizer with the four tags as special tokens, as in some reasoning models."""
    tokenizer = tiny_tokenizer()
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in tags], special_tokens=True)
    assert len(tokenizer) == VOCAB and tokenizer.decode([3, 10, 4], skip_special_tokens=True) == "3"
    return tokenizer


def save_tiny(folder: Path, seed: int = 0) -> Path:
    """A model folder that both workers load."""
    tiny_model(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_questions(path: Path, rows: int = 40) -> Path:
    """GSM8K-shaped rows in the tiny vocabulary."""
    lines = [{"question": f"{n} a {n + 1} b", "answer": f"{n} + {n + 1}\n#### {2 * n + 1}"} for n in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ds_config(path: Path, micro: int = 4, accumulation: int = 2, stage: int = 2, lr: float = 1e-2, **more) -> Path:
    """A DeepSpeed configuration in fp32, unless `more` says otherwise."""
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
    }
    path.write_text(json.dumps(config | more))
    return path


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
