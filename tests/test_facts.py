"""What is known before weights are loaded: each model that cannot be trained is one sentence, and none that can is."""

import importlib.util
import json
import shutil
import socket
import threading
import time
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny import VOCAB, save_tiny, tiny_model, tiny_tokenizer
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    OPTConfig,
    T5Config,
)

import sampling_worker
import training_worker
from data import render_prompt
from grpo.facts import check_adapter, check_model
from grpo.models import add_lora, load_model, load_tokenizer
from grpo.policy import Policy

LENGTHS = {"--max_prompt_length": 1024, "--max_new_tokens": 256}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with nothing wrong."""
    return save_tiny(tmp_path_factory.mktemp("facts") / "model")


@pytest.fixture
def model(whole, tmp_path):
    """A copy of it to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def change(folder: Path, file: str = "config.json", **fields) -> None:
    """Other values in a JSON file; None takes an entry out."""
    content = json.loads((folder / file).read_text()) | fields
    (folder / file).write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def check(folder, lengths=None) -> list[str]:
    return check_model(str(folder), lengths=lengths, render=render_prompt)


def quantised(**fields):
    return lambda folder: change(folder, quantization_config=fields)


def without(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(folder, name="model.safetensors", size=-100):
    (folder / name).write_bytes((folder / name).read_bytes()[:size])


def as_shards(folder):
    model = tiny_model()
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return sorted(folder.glob("model-*.safetensors"))


def lose_a_shard(folder):
    as_shards(folder)[1].unlink()


def template(text):
    def spoil(folder):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = text
        tokenizer.save_pretrained(folder)

    return spoil


def more_tokens(*tokens):
    def spoil(folder):
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens], special_tokens=True)
        tokenizer.save_pretrained(folder)

    return spoil


def no_end(folder):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    change(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink(missing_ok=True)


def an_end_beyond(folder):
    no_end(folder)
    change(folder, eos_token_id=VOCAB + 7)


def config_of(config):
    def spoil(folder):
        (folder / "config.json").unlink()
        config.save_pretrained(folder)

    return spoil


def an_adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")
    change(folder, "adapter_config.json", base_model_name_or_path="owner/base")


SPOILT = {
    "gptq": (quantised(quant_method="gptq", bits=4), ["is quantised (gptq)", "unquantised model"]),
    "awq": (quantised(quant_method="awq", bits=4), ["is quantised (awq)"]),
    "bitsandbytes": (quantised(quant_method="bitsandbytes", load_in_4bit=True), ["is quantised (bitsandbytes)"]),
    "fp8": (quantised(quant_method="fp8"), ["is quantised (fp8)"]),
    "compressed": (quantised(quant_method="compressed-tensors"), ["is quantised (compressed-tensors)"]),
    "mlx": (lambda folder: change(folder, quantization={"bits": 4, "group_size": 64}), ["is quantised (4 bits)"]),
    "encoder-decoder": (config_of(T5Config()), ["t5", "causal language model"]),
    "encoder": (config_of(BertConfig()), ["an encoder (bert)", "causal language model"]),
    "classifier": (
        lambda folder: change(folder, architectures=["Qwen2ForSequenceClassification"]),
        ["a Qwen2ForSequenceClassification", "no head for the next token"],
    ),
    "unknown kind": (lambda folder: change(folder, model_type="nosuch"), ["no usable model", "`nosuch`"]),
    "custom code": (
        lambda folder: change(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        ["no usable model", "custom code"],
    ),
    "a wrong field": (lambda folder: change(folder, num_attention_heads="x"), ["num_attention_heads"]),
    "heads that do not divide": (lambda folder: change(folder, layer_types=["full_attention"]), ["num_hidden_layers"]),
    "no config": (without("config.json"), ["is a folder that holds no usable model"]),
    "half a config": (lambda folder: cut(folder, "config.json", 50), ["not a valid JSON"]),
    "an adapter": (an_adapter, ["is an adapter: give owner/base", "--init_adapter"]),
    "no weights": (without("model.safetensors"), ["has no weights that transformers can load (model.safetensors"]),
    "gguf": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"),
        ["no weights that transformers can load", "it has model.gguf"],
    ),
    "a shard is missing": (lose_a_shard, ["lacks 1 of the", "model-00002-of-", "download it again"]),
    "an index of nothing": (
        lambda folder: (as_shards(folder), (folder / "model.safetensors.index.json").write_text("[]")),
        ["model.safetensors.index.json cannot be read"],
    ),
    "half a file": (cut, ["model.safetensors is damaged or incomplete", "download it again"]),
    "an empty file": (lambda folder: cut(folder, size=0), ["is damaged or incomplete"]),
    "a pointer": (
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        ["model.safetensors is a pointer of Git LFS", "git lfs pull"],
    ),
    "other shapes": (
        lambda folder: change(folder, intermediate_size=96),
        ["mlp.down_proj.weight is [32, 64] in model.safetensors and [32, 96] by config.json"],
    ),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), ["has no tokenizer", "tokenizer.json"]),
    "half a tokenizer": (lambda folder: cut(folder, "tokenizer.json", 200), ["no usable model"]),
    "more tokens than rows": (
        more_tokens("<tool>", "<plan>"),
        ["the tokenizer has 2 tokens, for instance '<plan>'", f"the {VOCAB} rows", "vocab_size"],
    ),
    "no end token": (no_end, ["has no end token", "no completion could end"]),
    "an end token that is none": (an_end_beyond, [f"below vocab_size {VOCAB}, it has [{VOCAB + 7}]"]),
    "a template that is none": (template("{% for %}"), ["its chat template fails", "Expected an expression"]),
    "a template that raises": (template("{{ raise_exception('never') }}"), ["its chat template fails", "never"]),
    "a template of other fields": (template("{{ messages[0].parts[0].text }}"), ["its chat template fails"]),
    "a template without the question": (template("hello"), ["leaves the question out ('hello')"]),
}


@pytest.mark.parametrize("spoil, words", SPOILT.values(), ids=SPOILT.keys())
def test_a_model_that_cannot_be_trained_is_one_sentence(model, spoil, words):
    spoil(model)
    with pytest.raises(ValueError) as error:
        check(model)
    message = str(error.value)
    assert f"--model_path {model}" in message and "\n" not in message and len(message) < 700
    assert all(word in message for word in words), message


def test_a_model_with_nothing_wrong_passes(whole, model, tmp_path):
    assert check(whole, {"--max_prompt_length": 500, "--max_new_tokens": 12}) == []
    as_shards(model)
    assert check(model) == []
    torch.save(tiny_model().state_dict(), model / "pytorch_model.bin")
    for file in model.glob("model*"):
        file.unlink()
    assert check(model) == []
    more_tokens("<image_soft_token>")(model)  # as the text models of Gemma 3 have it: no prompt brings it up
    assert check(model) == []
    template("")(model)
    change(model, architectures=["Qwen2Model"])
    assert check(model) == []


def test_a_file_as_the_model_is_refused(whole):
    with pytest.raises(ValueError, match="is a file: give the folder"):
        check(whole / "model.safetensors")


def test_what_is_no_path_or_no_package_is_named(tmp_path):
    with pytest.raises(ValueError, match="--model_path is empty"):
        check(" ")
    args = sampling_worker.parse_args(["--device", "cpu", "--engine", "vllm", "--model_path", "no/such"])
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ValueError, match="--engine vllm: vllm is not installed here"):
            sampling_worker.Sampler(args)
    args = sampling_worker.parse_args(["--device", "cpu", "--keys", str(tmp_path)])
    with pytest.raises(ValueError, match=f"--keys {tmp_path}: sampler.key_secret cannot be read"):
        sampling_worker.Sampler(args)


def test_held_out_questions_that_are_not_there_name_their_own_flag(tmp_path):
    args = sampling_worker.parse_args(["--device", "cpu", "--eval_dataset", "no/such.jsonl"])
    with pytest.raises(ValueError, match="--eval_dataset no/such.jsonl"):
        sampling_worker.load_held_out(args)


NO_NUMBERS = {
    training_worker: ["--temperature nan", "--temperature 0", "--timeout inf", "--timeout 0", "--beta nan",
                      "--lora_alpha inf", "--tis_cap 0", "--clip_eps nan", "--sampler_timeout -1",
                      "--max_steps 9999999999999999999", "--log_completions -1"],
    sampling_worker: ["--timeout nan", "--adapter_timeout 0", "--reward_timeout inf", "--reward_workers -1",
                      "--prompts_at_a_time -1", "--vllm_gpu_memory_utilization 2", "--evaluate --limit -1",
                      "--evaluate --samples -1", "--evaluate --temperature nan"],
}  # fmt: skip


@pytest.mark.parametrize(
    "side, flags", [(side, flags) for side, every in NO_NUMBERS.items() for flags in every], ids=str
)
def test_a_number_that_is_none_is_refused_with_its_flag(side, flags, capsys):
    *before, flag, value = flags.split()
    more = ["--device", "cpu"] if side is sampling_worker else []
    with pytest.raises(SystemExit):
        side.parse_args([*more, *before, f"{flag}={value}"])
    printed = capsys.readouterr().err
    assert f"error: {flag} is " in printed and "it must" in printed


def test_weights_that_are_missing_are_not_made_up(model):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 2 weights, for instance model.layers.1.mlp.up_proj.weight"):
        load_model(str(model))
    tensors["model.norm.weight"] = torch.ones(33)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"--model_path {model} is a folder that holds no usable model"):
        load_model(str(model))


def test_a_reward_model_is_no_policy(tmp_path):
    config = AutoConfig.for_model("gpt2", vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a GPT2ForSequenceClassification"):
        check(tmp_path)


SMALL = dict(vocab_size=VOCAB, bos_token_id=2, eos_token_id=2)
TABLES = [
    GPT2Config(n_embd=32, n_layer=1, n_head=2, **SMALL),
    OPTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, word_embed_proj_dim=32,
              max_position_embeddings=1024, **SMALL),
]  # fmt: skip


@pytest.mark.parametrize("config", TABLES, ids=lambda config: config.model_type)
def test_a_table_of_positions_ends(config, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    words = "--max_prompt_length 1024 and --max_new_tokens 256 make sequences of up to 1280 tokens.*has 1024 positions"
    with pytest.raises(ValueError, match=words):
        check(tmp_path, LENGTHS)
    assert check(tmp_path, LENGTHS | {"--max_prompt_length": 768}) == []


def test_angles_do_not_end_but_are_noted(whole):
    (note,) = check(whole, LENGTHS)
    assert note.startswith("note: --max_prompt_length 1024 and --max_new_tokens 256") and "has 512 positions" in note
    with pytest.raises(ValueError, match="1280 tokens"):  # vLLM takes no more
        check_model(str(whole), lengths=LENGTHS, engine="vllm")


# -- both programs ask -------------------------------------------------------------------------------------------


def test_both_programs_ask_before_they_load_anything(model, tmp_path, monkeypatch):
    quantised(quant_method="gptq", bits=4)(model)
    (model / "model.safetensors").unlink()  # so nothing could be loaded
    sampler = ["--device", "cpu", "--model_path", str(model), "--dataset", str(tmp_path / "questions.jsonl")]
    for flags in ([], ["--evaluate"]):
        args = sampling_worker.parse_args(sampler + flags)
        with pytest.raises(ValueError, match="is quantised"):
            sampling_worker.evaluate_policy(args) if flags else sampling_worker.Sampler(args)
    args = training_worker.parse_args(["--model_path", str(model), "--replay", "x", "--save_path", str(tmp_path / "r")])
    with pytest.raises(ValueError, match="is quantised"):
        training_worker.Learner(args, needs_reference=False, loss="grpo_loss")


# -- adapters ----------------------------------------------------------------------------------------------------


def adapter(folder: Path, base, **fields) -> Path:
    lora = LoraConfig(r=4, target_modules=fields.pop("targets", "all-linear"), task_type="CAUSAL_LM", **fields)
    lora.base_model_name_or_path = "owner/other"
    add_lora(base, lora).save_pretrained(folder)
    change(folder, "adapter_config.json", base_model_name_or_path="owner/other")
    return folder


def misfit(folder, model) -> str:
    with pytest.raises(ValueError) as error:
        check_adapter(folder, str(model), "--lora_path")
    message = str(error.value)
    assert "\n" not in message and len(message) < 600
    for word in (f"--lora_path {folder}", f"--model_path is {model}", "made for owner/other (base_model_name_or_path)"):
        assert word in message, message
    return message


def test_an_adapter_of_another_model_is_one_sentence(whole, tmp_path):
    assert "is [64, 4] in it and [32, 4] for the model" in misfit(
        adapter(tmp_path / "wide", tiny_model(hidden_size=64)), whole
    )
    assert "no place for base_model.model.model.layers.2." in misfit(
        adapter(tmp_path / "deep", tiny_model(num_hidden_layers=3)), whole
    )
    assert "it has no base_model.model.model.layers.1." in misfit(
        adapter(tmp_path / "shallow", tiny_model(num_hidden_layers=1), targets=["q_proj"]), whole
    )
    gpt2 = AutoModelForCausalLM.from_config(TABLES[0])
    assert "no place for base_model.model.transformer.h.0." in misfit(adapter(tmp_path / "gpt2", gpt2), whole)


def test_adapters_of_this_model_fit(whole, tmp_path):
    for i, fields in enumerate(
        [{}, {"targets": ["q_proj"]}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True}]
    ):
        check_adapter(adapter(tmp_path / str(i), tiny_model(), **fields), str(whole), "--lora_path")
    torch.save(load_file(tmp_path / "0" / "adapter_model.safetensors"), tmp_path / "0" / "adapter_model.bin")
    (tmp_path / "0" / "adapter_model.safetensors").unlink()
    check_adapter(tmp_path / "0", str(whole), "--lora_path")


def test_a_folder_without_adapter_is_named(whole, tmp_path):
    with pytest.raises(ValueError, match="--lora_path .* holds no adapter that can be read"):
        check_adapter(tmp_path, str(whole), "--lora_path")


def test_evaluation_without_a_gpu_takes_the_cpu_unless_a_device_is_given(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    args = sampling_worker.parse_args(["--evaluate"])
    assert args.device == "cpu" and "evaluating on the CPU (--device cpu)" in capsys.readouterr().out
    for flags in (["--evaluate", "--device", "cuda:0"], ["--evaluate", "--device=cuda:0"], []):
        with pytest.raises(SystemExit):
            sampling_worker.parse_args(flags)
        assert "use --device cpu" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert sampling_worker.parse_args(["--evaluate"]).device == "cuda:0"


# -- the hub -----------------------------------------------------------------------------------------------------


@pytest.fixture
def silent_hub(monkeypatch):
    """A hub that takes connections and says nothing; gives the list of them."""
    connections, server = [], socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connections.append(server.accept()[0])
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    yield connections
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for connection in connections:
        connection.close()


def test_a_silent_hub_is_asked_once_for_all(silent_hub):
    started = time.monotonic()
    for name in ("owner/model", "owner/another", "owner/model"):
        with pytest.raises(ValueError, match=f"--model_path {name} is no local folder, the hub is out of reach"):
            check(name)
    assert len(silent_hub) == 1 and time.monotonic() - started < 30  # 5 when nothing else is running


def test_a_local_folder_never_asks_the_hub(silent_hub, whole, tmp_path):
    check(whole, LENGTHS)
    folder = adapter(tmp_path / "a", tiny_model())
    change(folder, "adapter_config.json", base_model_name_or_path=str(whole))
    check_adapter(folder, str(whole), "--lora_path")
    load_tokenizer(str(whole))
    policy = Policy(load_model(str(whole)), [2], "cpu", dtype="float32", temperature=1.0)
    policy.load_folder(folder)
    assert silent_hub == []
