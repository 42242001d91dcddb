"""Loading a causal LM and its tokenizer the same way on both sides, and telling whether both sides loaded the same."""

import functools
import hashlib
import json
import warnings
from pathlib import Path

import torch
import transformers
from huggingface_hub import constants
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo.hub import use_hub_if_it_answers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANDOM = ("dropout", "jitter", "layerdrop", "drop_path")  # in the names of a configuration's entries
_SAMPLED_ELEMENTS = 64  # of each weight, for the fingerprint


def quiet_libraries() -> None:
    """Keep progress bars of loading and deprecation notes of pinned libraries out of the workers' output."""
    transformers.utils.logging.disable_progress_bar()
    for library in ("torch", "transformers", "peft"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{library}\.")


def switch_dropout_off(config) -> None:
    """Log-probs of both sides must agree, and dropout, layers left out or noise in a router would make them random."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if isinstance(value, float) and (name.endswith("_pdrop") or any(word in name for word in RANDOM)):
                setattr(part, name, 0.0)


class ModelNotFound(ValueError):
    """--model_path names nothing that can be loaded; the message says what was tried."""


def load_model(model_path: str) -> PreTrainedModel:
    """The causal LM in its checkpoint's own dtype, all dropout off, ready to be fingerprinted and cast."""
    use_hub_if_it_answers(model_path)
    try:
        config = AutoConfig.from_pretrained(model_path)
        switch_dropout_off(config)
        model, loading = AutoModelForCausalLM.from_pretrained(
            model_path, config=config, dtype="auto", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # RuntimeError: weights of other shapes
        raise ModelNotFound(not_found(model_path, error)) from error
    if loading["missing_keys"]:  # transformers would make them up
        missing = sorted(loading["missing_keys"])
        raise ModelNotFound(f"--model_path {model_path} lacks {len(missing)} weights, for instance {missing[0]}")
    return model.eval()


def load_tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer."""
    use_hub_if_it_answers(model_path)
    try:
        return AutoTokenizer.from_pretrained(model_path)
    except Exception as error:  # each kind of tokenizer reads its own files, and raises what it likes
        raise ModelNotFound(not_found(model_path, error)) from error


def model_fingerprint(model: PreTrainedModel) -> str:
    """sha256 over every weight's name, shape and a spread of its values, rounded to bfloat16: equal for any dtype."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().flatten()
        spread = flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)].to(torch.bfloat16).cpu().view(torch.int16)
        digest.update(f"{name}{tuple(weight.shape)}".encode() + spread.numpy().tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over vocabulary, merges, special tokens and chat template."""
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, tokenizer.eos_token_id]
    if tokenizer.is_fast:
        content.append(json.loads(tokenizer.backend_tokenizer.to_str())["model"])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token id that ends a completion, by generation config, model config and tokenizer together."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, (list, tuple)) else {ids}
    return sorted(found - {None})


def attends_in_windows(model) -> bool:
    """Whether some layer sees only the nearest tokens before."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None


def has_full_attention(model) -> bool:
    """Whether every layer attends to everything before: no sliding windows, no recurrent state."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    return set(kinds) == {"full_attention"} if kinds else not attends_in_windows(model)


@functools.lru_cache
def say_once(text: str) -> None:
    """Print a line, the first time it comes up."""
    print(text, flush=True)


def add_lora(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Wrap the model with a new adapter in the model's own dtype; everything else is frozen.

    Raises:
        ValueError: when the target modules fit nothing in the model.
    """
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def not_found(model_path: str, error: Exception) -> str:
    """The sentence for a model that cannot be loaded."""
    text = " ".join(str(error).split())[:400]
    if Path(model_path).expanduser().is_dir():
        return f"--model_path {model_path} is a folder that holds no usable model: {text}"
    if "gated" in text:
        return f"--model_path {model_path} is gated: ask for access on its page on the hub, then: hf auth login"
    if constants.HF_HUB_OFFLINE:
        return (
            f"--model_path {model_path} is no local folder, the hub is out of reach (no network, or HF_HUB_OFFLINE), "
            "and its cache has no copy: check the spelling, or download the model elsewhere and give its folder"
        )
    return (
        f"--model_path {model_path} is no local folder, and the hub could not give it ({error.__class__.__name__}); "
        "check the spelling, or download the model elsewhere and give its folder"
    )
