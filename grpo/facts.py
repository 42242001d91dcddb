"""What config.json, the tokenizer and the flags tell before weights are loaded.

`./run.sh doctor` and the start of both programs ask the same function, `check_model`. Each check is one function that
raises a ValueError of one sentence; what is odd and yet works becomes a note.
"""

import importlib.util
import json
import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import cached_file

from grpo.hub import use_hub_if_it_answers
from grpo.models import ModelNotFound, eos_token_ids, load_tokenizer, not_found

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
ENCODERS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"}  # unless is_decoder or causal is set
MODALITIES = re.compile(r"image|img|video|vision|audio|speech", re.IGNORECASE)  # in the names of their placeholders
QUESTION = "What is 1 + 1?"


def check_model(
    model_path: str,
    *,
    lengths: dict[str, int] | None = None,
    render: Callable[..., str] | None = None,
    engine: str = "transformers",
) -> list[str]:
    """Whether a run can start with this model; returns notes on what may be unwanted.

    lengths: tokens by the flag that sets them, whose sum is the longest sequence. render: (tokenizer, question) -> the
    prompt's text; the learner has none. engine: what decodes.

    Raises:
        ValueError: for what cannot work, in a sentence with the value, the limit and the flag.
    """
    config = read_config(model_path)
    empty = empty_model(config, model_path)
    _check_weights(empty, model_path)
    tokenizer = load_tokenizer(model_path)
    _check_tokenizer(tokenizer, config, model_path)
    _check_end_token(tokenizer, config, model_path)
    if render:
        _check_prompt(tokenizer, config, model_path, render)
    return list(_check_lengths(empty, model_path, lengths or {}, engine))


def read_config(model_path: str):
    """The configuration of a causal language model that can be trained.

    Raises:
        ValueError: none that transformers can read, or of a model of another kind, or of quantised weights.
    """
    if not model_path.strip():
        raise ModelNotFound("--model_path is empty: give a hub name or the folder of a model")
    use_hub_if_it_answers(model_path)
    path = Path(model_path).expanduser()
    if path.is_file():
        raise ModelNotFound(f"--model_path {model_path} is a file: give the folder that holds config.json and weights")
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        base = _base_of(path) or "its base model"
        raise ModelNotFound(
            f"--model_path {model_path} is an adapter: give {base} there, and the adapter to --init_adapter of the "
            "learner or --lora_path of --evaluate"
        )
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:  # each architecture reads its own fields, and raises what it likes
        raise ModelNotFound(not_found(model_path, error)) from error
    _check_kind(config, model_path)
    _check_unquantised(config, model_path)
    return config


def empty_model(config, model_path: str) -> PreTrainedModel:
    """The model without weights: names and shapes (on the device "meta")."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # as above
        raise ModelNotFound(not_found(model_path, error)) from error
    model.tie_weights()
    return model


def _check_kind(config, model_path: str) -> None:
    """A decoder of text: each token sees those before it alone, and a head gives the next one."""
    kind = config.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        wrong = f"a {kind} model, for which transformers has no causal language model"
    elif getattr(config, "is_encoder_decoder", False):
        wrong = f"an encoder-decoder model ({kind})"
    elif kind in ENCODERS and not (getattr(config, "is_decoder", False) or getattr(config, "causal", False)):
        wrong = f"an encoder ({kind}), whose tokens see what comes after them"
    elif head := _other_head(config):
        wrong = f"a {head}, which has no head for the next token"
    else:
        return
    raise ValueError(f"--model_path {model_path} is {wrong}: give a causal language model")


def _other_head(config) -> str | None:
    """The class that the weights were saved from, where it is for another task (FooForSequenceClassification)."""
    own, names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type], config.architectures or []
    if any(name in own or not re.search("For(?!CausalLM|ConditionalGeneration)[A-Z]", name) for name in names):
        return None
    return names[0] if names else None


def _check_unquantised(config, model_path: str) -> None:
    """LoRA here is trained on weights in float32, bfloat16 or float16, and both sides must cast them."""
    text = config.get_text_config()
    for name in ("quantization_config", "compression_config", "quantization"):
        found = getattr(config, name, None) or getattr(text, name, None)
        if found:
            values = found if isinstance(found, dict) else vars(found)
            method = values.get("quant_method") or values.get("bits") and f"{values['bits']} bits" or name
            raise ValueError(
                f"--model_path {model_path} is quantised ({getattr(method, 'value', method)}), and neither side can "
                "train or score on such weights: give the unquantised model that it was made from"
            )


def _check_weights(empty: PreTrainedModel, model_path: str) -> None:
    """Weights that transformers can load are here, whole, and have the shapes that config.json gives."""
    folder = _folder(model_path)
    if not folder:
        return  # the hub will give them
    found = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
    if not found:
        suffixes = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5")
        other = sorted(path.name for path in folder.glob("*") if path.suffix in suffixes)
        raise ValueError(
            f"--model_path {model_path} has no weights that transformers can load ({WEIGHTS[0]}, {WEIGHTS[2]}, or "
            f"shards with their index){f'; it has {other[0]}' if other else ''}"
        )
    files = _shards(found, model_path) if found.suffix == ".json" else [found]
    expected = {name: list(tensor.shape) for name, tensor in empty.state_dict().items() if tensor.dim() < 3}
    for file in files:
        if file.open("rb").read(18) == b"version https://gi":
            raise ValueError(f"--model_path {model_path}: {file.name} is a pointer of Git LFS: run git lfs pull there")
        for name, shape in _header(file, model_path):
            if sorted(expected.get(name, shape)) != sorted(shape):  # some are transposed when they are loaded
                raise ValueError(
                    f"--model_path {model_path}: {name} is {shape} in {file.name} and {expected[name]} by config.json: "
                    "the two are of different models"
                )


def _folder(model_path: str) -> Path | None:
    """Where the model's files are on this machine; None for one that is still to come from the hub."""
    path = Path(model_path).expanduser()
    if path.is_dir():
        return path
    if use_hub_if_it_answers(model_path):
        return None
    return Path(cached_file(model_path, "config.json", local_files_only=True)).parent


def _shards(index: Path, model_path: str) -> list[Path]:
    """The files that an index names, all of which are there."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--model_path {model_path}: {index.name} cannot be read ({error!r:.200})") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(
            f"--model_path {model_path} lacks {len(missing)} of the {len(names)} files that {index.name} names, for "
            f"instance {missing[0]}: download it again"
        )
    return [index.parent / name for name in names]


def _header(file: Path, model_path: str) -> list[tuple[str, list[int]]]:
    """Name and shape of each tensor in a safetensors file, without reading any; nothing for a file of another kind."""
    if file.suffix != ".safetensors":
        return []
    try:
        with safe_open(file, "pt") as tensors:
            return [(name, tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"--model_path {model_path}: {file.name} is damaged or incomplete ({error}): download it again"
        ) from error


def _check_tokenizer(tokenizer, config, model_path: str) -> None:
    """Each token that can come up has its row in the embedding."""
    vocabulary, special = tokenizer.get_vocab(), set(tokenizer.all_special_tokens)
    if len(vocabulary.keys() - special) < 2:
        raise ValueError(f"--model_path {model_path} has no tokenizer: copy its files (tokenizer.json ...) there too")
    rows = getattr(config.get_text_config(), "vocab_size", None) or max(vocabulary.values()) + 1
    beyond = sorted(token for token, number in vocabulary.items() if number >= rows)
    # the text half of a model of texts and images keeps a few tokens that stand for images, and never come up
    beyond = [token for token in beyond if not (MODALITIES.search(token) and tokenizer.added_tokens_encoder.get(token))]
    if beyond:
        raise ValueError(
            f"--model_path {model_path}: the tokenizer has {len(beyond)} tokens, for instance {beyond[0]!r}, beyond "
            f"the {rows} rows of the embedding (vocab_size): resize the model's embeddings, or use its own tokenizer"
        )


def _check_end_token(tokenizer, config, model_path: str) -> None:
    """Something ends a completion."""
    try:
        generation = GenerationConfig.from_pretrained(model_path)
    except (OSError, ValueError):  # a model need not have one
        generation = GenerationConfig.from_model_config(config)
    found = eos_token_ids(SimpleNamespace(generation_config=generation, config=config), tokenizer)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if not [number for number in found if number >= 0 and (rows is None or number < rows)]:
        raise ValueError(
            f"--model_path {model_path} has no end token (eos_token_id in config.json, generation_config.json or the "
            f"tokenizer){f' below vocab_size {rows}, it has {found}' if found else ''}: no completion could end"
        )


def _check_prompt(tokenizer, config, model_path: str, render: Callable[..., str]) -> None:
    """The chat template renders a question."""
    try:
        text = render(tokenizer, QUESTION)
    except Exception as error:  # a template is foreign code, and may use anything that a message lacks
        raise ValueError(
            f"--model_path {model_path}: its chat template fails on a system prompt and a question "
            f"({type(error).__name__}: {_line(error)}): fix chat_template in the tokenizer's files"
        ) from error
    if QUESTION not in text:
        raise ValueError(
            f"--model_path {model_path}: its chat template leaves the question out ({text!r:.200}): fix chat_template "
            "in the tokenizer's files"
        )


def _check_lengths(empty: PreTrainedModel, model_path: str, lengths: dict[str, int], engine: str) -> Iterator[str]:
    """The longest sequence has a position for each token: a must with a table of positions, else a note."""
    config = empty.config.get_text_config()
    limit, wanted = getattr(config, "max_position_embeddings", None), sum(lengths.values())
    if not limit or limit < 0 or wanted <= limit:  # XLNet has -1: none
        return
    flags = " and ".join(f"{flag} {value}" for flag, value in lengths.items())
    sentence = f"{flags} make sequences of up to {wanted} tokens, --model_path {model_path} has {limit} positions"
    if engine == "vllm" or _has_table(empty, limit):
        raise ValueError(f"{sentence} (max_position_embeddings in config.json): lower one of them")
    yield f"note: {sentence} in its training: what it writes beyond them may be nonsense"


def _has_table(empty: PreTrainedModel, limit: int) -> bool:
    """Whether positions are rows of a table, which ends, instead of angles, which can be computed for any."""
    tensors = dict([*empty.named_parameters(), *empty.named_buffers()])
    rows = [max(tensor.shape, default=0) for name, tensor in tensors.items() if re.search("pos|wpe", name)]
    attributes = ("embed_positions", "pos_encoding")  # tables of sines in GPT-J and CTRL
    return any(limit <= count <= limit + 8 for count in rows) or any(  # a few more, for OPT begins at the third
        hasattr(part, name) for part in empty.modules() for name in attributes
    )


def check_installed(flag: str, package: str) -> None:
    """ValueError unless `package`, which `flag` asks for, can be imported; it is not imported here."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{flag} {package}: {package} is not installed here; see the README")


def check_numbers(parser: ArgumentParser, args: Namespace, above_zero: tuple[str, ...]) -> None:
    """End the program over a flag that is no finite number below 2**63, or over one of `above_zero` that is not."""
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < 2**63):
            parser.error(f"--{name} is {value}, it must be a finite number below 2**63")
        if name in above_zero and value is not None and value <= 0:
            parser.error(f"--{name} is {value}, it must be above 0")


def check_adapter(folder: str | Path, model_path: str, flag: str) -> None:
    """ValueError unless the PEFT adapter in `folder`, which `flag` names, fits the model: layers and shapes."""
    folder = Path(folder).expanduser()
    if (folder / "adapter_model.bin").exists() and not (folder / "adapter_model.safetensors").exists():
        return  # an older file without a header: PEFT compares it when it loads it
    try:
        config = PeftConfig.from_pretrained(str(folder))
        with safe_open(folder / "adapter_model.safetensors", "pt") as tensors:
            found = {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{flag} {folder} holds no adapter that can be read: {_line(error)}") from error
    base, config.base_model_name_or_path = config.base_model_name_or_path or "a model that it does not name", None
    try:
        wrong = _misfit(_expected(model_path, config), found)
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError):  # PEFT's, where layers are not found
        wrong = f"the model has no place for {next(iter(sorted(found)), 'its layers')}"
    if wrong:
        raise ValueError(
            f"{flag} {folder} holds no adapter that fits the model: {wrong}; --model_path is {model_path}, and it was "
            f"made for {base} (base_model_name_or_path)"
        )


def _expected(model_path: str, config: PeftConfig) -> dict[str, list[int]]:
    """Names and shapes of such an adapter for this model."""
    with torch.device("meta"):
        model = get_peft_model(empty_model(read_config(model_path), model_path), config)
        state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: list(tensor.shape) for name, tensor in state.items()}


def _misfit(expected: dict[str, list[int]], found: dict[str, list[int]]) -> str:
    """The first tensor that is too many, too few or of another shape, in words; "" if there is none."""
    for name in sorted(expected.keys() - found.keys()):
        return f"it has no {name}"
    for name in sorted(name for name in found.keys() - expected.keys() if "lora_" in name):
        return f"the model has no place for {name}"
    for name in sorted(name for name in expected if expected[name] != found[name]):
        return f"{name} is {found[name]} in it and {expected[name]} for the model"
    return ""


def _base_of(folder: Path) -> str | None:
    try:
        return json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
