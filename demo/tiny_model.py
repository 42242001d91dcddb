"""A tiny Qwen2 model and its tokenizer, made from nothing in a second.

The tokenizer is a real byte-level Qwen2Tokenizer in which every word and number of demo/problems.py, with the
space before it, is an added token, because for model_type qwen2 AutoTokenizer rebuilds a Qwen2Tokenizer from
the vocabulary whatever the folder names, which keeps added tokens but not a word-level model. So a number is
one token, any other text falls back to bytes, nothing is unknown, and decoding gives the encoded text back.

The four tags are added tokens that are not special: special ones vanish under skip_special_tokens=True, and
with them every format reward.

    python -m demo.tiny_model --output_path FOLDER
"""
import argparse
import random
import re
from pathlib import Path

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from demo.problems import LARGEST, SYSTEM_PROMPT, draw_problem

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> list[str]:
    """Every word of problems and chat template, with the space before it if it has one; all numbers."""
    rng = random.Random(0)
    texts = [SYSTEM_PROMPT, "system", "user", "assistant", " + - * ="]
    texts += [draw_problem(rng)["question"] for _ in range(5000)]       # every word, hundreds of times
    words = {word for text in texts for word in re.findall(r" ?[A-Za-z]+| [-+*=]", text)}
    return sorted(words) + [f" {number}" for number in range(LARGEST + 1)]


def build_tokenizer() -> Qwen2Tokenizer:
    tokens = [PAD, START, END, *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[], unk_token=PAD, pad_token=PAD,
        eos_token=END, extra_special_tokens=[START], clean_up_tokenization_spaces=False,
        model_max_length=2048)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS + vocabulary()])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=3, intermediate_size=256,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=2048,
        initializer_range=0.05,         # near 1/sqrt(hidden) such a small model learns in half the steps
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return Qwen2ForCausalLM(config).eval()


@torch.no_grad()
def check_reload(folder: Path, tokenizer: Qwen2Tokenizer, model: Qwen2ForCausalLM) -> None:
    """Raise RuntimeError unless the saved folder gives the same ids, text and logits as what is in memory."""
    loaded_tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = random.Random(1)
    texts = [draw_problem(rng)["question"] for _ in range(20)]
    texts += ["<think> 4 + 5 = 9</think><answer> 9</answer>", "Zoë pays $1,250 — 99 times\n"]
    for text in texts:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}]
        rendered, reloaded = (each.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                              for each in (tokenizer, loaded_tokenizer))
        ids = tokenizer.encode(rendered)
        if reloaded != rendered:
            raise RuntimeError(f"The chat template reloaded from {folder} renders {text!r} differently.")
        if loaded_tokenizer.encode(rendered) != ids or loaded_tokenizer.decode(ids) != rendered:
            raise RuntimeError(f"The tokenizer reloaded from {folder} encodes {text!r} differently.")
        if loaded_tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) != text:
            raise RuntimeError(f"The tokenizer reloaded from {folder} does not give {text!r} back.")
    if not torch.equal(loaded_model(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits):
        raise RuntimeError(f"The model reloaded from {folder} gives other logits.")


def build(folder: str | Path, seed: int = 0) -> Path:
    """Write the model with random weights and its tokenizer to `folder`, reload both and compare."""
    folder = Path(folder)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    check_reload(folder, tokenizer, model)
    return folder


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the demo's tiny model, untrained, with its tokenizer.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output_path", required=True, help="folder for model and tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    args = parser.parse_args(argv)
    folder = build(args.output_path, args.seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    print(f"{model.num_parameters():,} parameters, vocabulary {model.config.vocab_size}, in {folder}")


if __name__ == "__main__":
    main()
