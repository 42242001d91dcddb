"""What the benchmarks on a real model share: their flags, the prompts, and the model with an adapter on it."""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig

from data import encode_prompt, load_examples
from grpo.models import DTYPES, add_lora, load_model

LORA = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


def make_parser(doc: str, **defaults) -> argparse.ArgumentParser:
    """Model, data and sizes; `doc` is the script's docstring, `defaults` replace those given here."""
    parser = argparse.ArgumentParser(
        description=doc.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model_path", default=str(Path("~/.cache/grpo/SmolLM2-135M-Instruct").expanduser()), help="the model")
    add("--dataset", default="gsm8k", help="whose first questions are taken")
    add("--dtype", choices=sorted(DTYPES), default="float32", help="of weights and forward passes")
    add("--device", default="cpu", help="cpu or cuda:0")
    add("--prompts", type=int, default=8, help="prompts")
    add("--group_size", type=int, default=8, help="completions of each")
    add("--max_new_tokens", type=int, default=256, help="limit of a completion")
    parser.set_defaults(**defaults)
    return parser


def load_prompts(args: argparse.Namespace, tokenizer) -> list[list[int]]:
    """The ids of the first --prompts prompts."""
    examples = load_examples(args.dataset)
    return [encode_prompt(tokenizer, examples[i].question) for i in range(args.prompts)]


def load_adapted(args: argparse.Namespace, dtype: str):
    """--model_path with a LoRA adapter on all linear layers that changes it a little, the same at every call."""
    torch.manual_seed(0)
    model = add_lora(load_model(args.model_path).to(args.device, DTYPES[dtype]), LORA)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-3)
    return model.eval()
