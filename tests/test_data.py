"""data.py: rows and golds from every kind of source, one clear sentence for each fault, prompts rendered once."""

import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

import data
from data import RowError, encode_prompt, gold_answer, load_examples, render_prompt, response_decoder, response_prefix

GSM8K = Path(__file__).resolve().parents[2] / "shared" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason=f"the GSM8K files are not in {GSM8K}")
ROWS = [
    {"question": "Ada has 3 figs.\u2028She eats 1. How many are left?", "answer": "3 - 1 = 2\n#### 2"},
    {"question": 'Ben, "the baker", sells 1,200 rolls\nand 5 more.', "answer": "1,200 + 5 = 1,205\n#### 1,205"},
    {"question": "It is 4 degrees and falls by 9. What is it\u200b then?", "answer": "4 - 9 = -5\n#### -5\n"},
]


def write_jsonl(path, rows, ensure_ascii=False):
    path.write_text("".join(json.dumps(row, ensure_ascii=ensure_ascii) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """`datasets` with a cache folder of the test's own, quiet and offline."""
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield tmp_path / "cache"
    datasets.enable_progress_bars()


def fault(*arguments, **options):
    """The message of the ValueError that loading (or reading every row) raises; it is one line."""
    with pytest.raises(ValueError) as caught:
        list(load_examples(*arguments, **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- the real data

@needs_gsm8k
@pytest.mark.parametrize(("split", "rows", "commas", "negative"), [("train", 7473, 79, 3), ("test", 1319, 14, 2)])
def test_gsm8k_rows_and_golds(split, rows, commas, negative):
    examples = load_examples(str(GSM8K), split)
    golds = [example.answer for example in examples]
    assert len(examples) == len(golds) == rows
    assert all(re.fullmatch(r"-?\d{1,3}(,\d{3})+|-?\d+", gold) for gold in golds)
    assert sum("," in gold for gold in golds) == commas
    assert sum(gold.startswith("-") for gold in golds) == negative
    assert examples.fingerprint == load_examples(GSM8K / f"{split}.jsonl").fingerprint


@needs_gsm8k
def test_gsm8k_written_with_raw_unicode_is_the_same_data(tmp_path):
    original = load_examples(GSM8K / "train.jsonl")
    rows = [json.loads(line) for line in (GSM8K / "train.jsonl").read_bytes().split(b"\n") if line]
    copy = load_examples(write_jsonl(tmp_path / "raw.jsonl", rows))
    assert len((tmp_path / "raw.jsonl").read_text(encoding="utf-8").splitlines()) > 7473
    assert list(copy) == list(original)
    assert copy.fingerprint == original.fingerprint
    assert copy[2381].question.count("\u2028") == 2
    assert [copy[0].answer, copy[-1].answer] == ["72", gold_answer(rows[-1]["answer"])]


# ---------------------------------------------------------------- kinds of sources

def test_every_kind_of_source_gives_the_same_examples(tmp_path, cache):
    from datasets import Dataset, DatasetDict
    table = Dataset.from_list(ROWS)
    hub = tmp_path / "hub [v1]"
    for folder in (hub / "main", hub / "socratic", tmp_path / ".plain" / "data"):
        folder.mkdir(parents=True)
        for shard in range(2):
            table.select([[0], [1, 2]][shard]).to_parquet(str(folder / f"train-0000{shard}-of-00002.parquet"))
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.to_csv(str(tmp_path / "rows.csv"))
    table.save_to_disk(str(tmp_path / "saved"))
    DatasetDict(train=table, test=table.select([0])).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", ROWS, ensure_ascii=True)
    write_jsonl(tmp_path / "files" / "test.jsonl", ROWS[:1])
    write_jsonl(tmp_path / "renamed.jsonl", [{"n": 1, "Q": row["question"], "A": row["answer"]} for row in ROWS])

    sources = ["rows.parquet", "rows.csv", "saved", "splits", "files", "hub [v1]", "hub [v1]/main", ".plain"]
    loaded = [load_examples(str(tmp_path / source)) for source in sources]
    loaded.append(load_examples(tmp_path / "renamed.jsonl", question_column="Q", answer_column="A"))
    for examples in loaded:
        assert [example.question for example in examples] == [row["question"] for row in ROWS]
        assert [example.answer for example in examples] == ["2", "1,205", "-5"]
    assert len({examples.fingerprint for examples in loaded}) == 1
    for source in ("splits", "files"):
        assert len(load_examples(str(tmp_path / source), "test")) == 1


def test_fingerprint_follows_content_order_and_size(tmp_path):
    changed = [ROWS[0], ROWS[1], {**ROWS[2], "answer": "#### 5"}]
    variants = [ROWS, ROWS[::-1], ROWS[:2], changed]
    prints = [load_examples(write_jsonl(tmp_path / f"{i}.jsonl", rows)).fingerprint
              for i, rows in enumerate(variants)]
    assert len(set(prints)) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", fingerprint) for fingerprint in prints)


def test_examples_are_a_sequence(tmp_path):
    examples = load_examples(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    assert examples[-1] == examples[2]
    for index in (3, -4):
        with pytest.raises(IndexError):
            examples[index]


def test_blank_lines_crlf_and_byte_order_mark(tmp_path):
    lines = [json.dumps(row).encode() for row in ROWS]
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n  \n" + lines[1] + b"\n\n" + lines[2])
    examples = load_examples(tmp_path / "rows.jsonl")
    assert [example.answer for example in examples] == ["2", "1,205", "-5"]


def test_csv_cells_stay_text(tmp_path, cache):
    (tmp_path / "rows.csv").write_text("\ufeffquestion,answer\na,007\nb,NA\nc,1.50\n", encoding="utf-8")
    assert [example.answer for example in load_examples(tmp_path / "rows.csv")] == ["007", "NA", "1.50"]


def test_hub_copy_in_the_cache_serves_without_a_network(tmp_path, cache):
    import datasets
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    table = datasets.load_dataset("parquet", data_files=str(tmp_path / "rows.parquet"), split="train")
    made, copy = Path(table.cache_files[0]["filename"]), cache / "openai___gsm8k" / "main" / "0.0.0" / "0"
    copy.mkdir(parents=True)
    (copy / "gsm8k-train.arrow").write_bytes(made.read_bytes())
    info = json.loads((made.parent / "dataset_info.json").read_text())
    (copy / "dataset_info.json").write_text(json.dumps({**info, "dataset_name": "gsm8k", "config_name": "main"}))
    for name in ("gsm8k", "openai/gsm8k", "openai/gsm8k:main"):
        assert [example.answer for example in load_examples(name)] == ["2", "1,205", "-5"]
    assert "nosuch" in fault("gsm8k", "nosuch")


# ---------------------------------------------------------------- golds

def test_gold_of_each_kind():
    assert gold_answer("4 #### 1\nso\n#### 1,000 \n") == "1,000"
    assert gold_answer("####-5") == "-5"
    assert gold_answer(r"so $\boxed{1}$, no: $\boxed{\frac{1}{\sqrt{2}}}$.") == r"\frac{1}{\sqrt{2}}"
    assert gold_answer(r"\boxed{7} and \boxed{8") == "7"
    assert gold_answer(" 42 \n") == "42"
    for answer in ("", "  ", "#### ", "x ####\n5", r"\boxed{", r"\boxed{ }"):
        with pytest.raises(ValueError):
            gold_answer(answer)


def test_math_style_rows(tmp_path):
    rows = [
        {"problem": "Half of 1?", "solution": r"It is $\boxed{\frac{1}{2}}$."},
        {"problem": "1+1?", "solution": "2"},
    ]
    columns = {"question_column": "problem", "answer_column": "solution"}
    assert load_examples(write_jsonl(tmp_path / "a.jsonl", rows[:1]), **columns)[0].answer == r"\frac{1}{2}"
    assert "boxed" in fault(write_jsonl(tmp_path / "b.jsonl", rows), **columns)


STEPS = "#### Step 1: read\nTwo.\n#### Step 2: solve x + 2 = 9\n"


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (STEPS + r"so it is \boxed{7}.", "7"),
        (STEPS + r"so it is \boxed{7}." + "\n#### Note\nas above", "7"),  # a heading below the box
        ("#### 2\nx is nine, \\boxed{9}", "9"),  # a numbered heading
        (r"\boxed{3}, and then" + "\n#### 8", "8"),  # the answer comes last
        (r"#### the answer is \boxed{7}", "7"),
        (r"\boxed{7}" + "\n#### that was all that there is to say", "7"),
        ("#### \n\\boxed{7}", "7"),
        ("####\u00a0 1,000 apples", "1,000 apples"),
        ("#### 5\n\nThat is the end.", "5"),
    ],
)
def test_of_headings_and_boxes_the_answer_is_taken(text, gold):
    assert gold_answer(text) == gold


def test_a_heading_is_no_gold():
    with pytest.raises(ValueError, match="'Step 2: solve x . 2 = 9' is a heading in it"):
        gold_answer(STEPS + "It is 7.")


def test_the_marker_is_that_of_most_rows_and_one_odd_row_is_read_by_its_own(tmp_path):
    def golds(name, *answers):
        rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
        return [example.answer for example in load_examples(write_jsonl(tmp_path / f"{name}.jsonl", rows))]

    both = r"\boxed{3}" + "\n#### 4"
    assert golds("a", "#### 1", "#### 2", both) == ["1", "2", "4"]
    assert golds("b", r"\boxed{1}", r"\boxed{2}", both) == ["1", "2", "3"]
    assert golds("c", "#### 1", "#### 2", STEPS + r"\boxed{7}") == ["1", "2", "7"]
    assert golds("d", "1", "2", "3", STEPS + r"\boxed{7}") == ["1", "2", "3", "7"]
    assert golds("e", *["#### 1"] * 150, r"\boxed{7}") == ["1"] * 150 + ["7"]
    plain_first = [{"question": "q", "answer": "1"}] * 120 + [{"question": "q", "answer": "#### 2"}] * 200
    assert "line 1, has '1' as its answer: it has no '####'" in fault(write_jsonl(tmp_path / "f.jsonl", plain_first))


@pytest.mark.parametrize(
    ("value", "text"), [(204, "204"), (0.5, "0.5"), (204.0, "204"), (-3, "-3"), (10**20, "1" + "0" * 20)]
)
def test_a_gold_that_is_a_number_is_its_text(tmp_path, value, text):
    assert load_examples(write_jsonl(tmp_path / "rows.jsonl", [{"question": "q", "answer": value}]))[0].answer == text


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"content": "1 + 1?", "role": "user"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 0, "deep": {"er": "3"}},
}


def test_nested_columns_and_prompts_of_chat_messages(tmp_path, cache):
    from datasets import Dataset

    Dataset.from_list([VERL]).to_parquet(str(tmp_path / "rows.parquet"))
    write_jsonl(tmp_path / "rows.jsonl", [VERL])
    columns = dict(question_column="prompt", answer_column="reward_model.ground_truth")
    loaded = [load_examples(tmp_path / name, **columns) for name in ("rows.parquet", "rows.jsonl")]
    assert [examples[0].answer for examples in loaded] == ["2", "2"]
    assert loaded[0][0].question == loaded[1][0].question == [{"role": "user", "content": "1 + 1?"}]
    assert loaded[0].fingerprint == loaded[1].fingerprint
    columns = dict(question_column="prompt.0.content", answer_column="extra_info.deep.er")
    deeper = load_examples(tmp_path / "rows.jsonl", **columns)
    assert list(deeper) == [("1 + 1?", "3")]
    message = fault(tmp_path / "rows.jsonl", question_column="prompt", answer_column="reward_model.truth")
    assert "no column 'reward_model.truth'" in message and "reward_model.ground_truth" in message
    message = fault(tmp_path / "rows.jsonl", question_column="prompt", answer_column="reward_model")
    assert "a number, or text that is not blank; dots lead into nested columns" in message
    dotted = {"question": "q", "reward.model": 5}
    assert load_examples(write_jsonl(tmp_path / "d.jsonl", [dotted]), answer_column="reward.model")[0].answer == "5"


@pytest.mark.parametrize("messages", [
    [], [7], [{"role": "user"}], [{"role": "user", "content": " "}], [{"content": "1+1?"}],
    [{"from": "human", "value": "x"}],
    [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
])  # fmt: skip
def test_messages_that_are_no_prompt_are_refused(tmp_path, messages):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": messages, "answer": "2"}])
    assert "chat message" in fault(path) and "--question_column" in fault(path)


def test_messages_may_be_in_parts_or_by_columns(tmp_path):
    forms = [
        [{"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}], "name": None}],
        {"role": ["user"], "content": ["1 + 1?"]},
    ]
    rows = [{"question": form, "answer": "2"} for form in forms]
    for example in load_examples(write_jsonl(tmp_path / "rows.jsonl", rows)):
        assert example.question == [{"role": "user", "content": "1 + 1?"}]


def test_whole_solutions_as_golds_are_pointed_out(tmp_path, caplog):
    data.say_once.cache_clear()
    for words, lines in ((19, 0), (20, 1)):
        rows = [{"question": "q", "answer": "word " * words}, {"question": "q", "answer": "word " * words}]
        load_examples(write_jsonl(tmp_path / "rows.jsonl", [*rows, {"question": "q", "answer": "7"}]))
        assert len([record for record in caplog.records if "which no response will equal" in record.message]) == lines


def test_gold_answer_sees_the_raw_value_and_the_row(tmp_path, monkeypatch):
    seen = []

    def own(answer, row, marker):
        seen.append((answer, row["options"]))
        return row["options"][answer["correct"]]

    rows = [{"question": "q", "answer": {"correct": 1}, "options": ["a", 5]}, {"question": "r", "options": []}]
    monkeypatch.setattr(data, "gold_answer", own)
    assert load_examples(write_jsonl(tmp_path / "one.jsonl", rows[:1]))[0].answer == "5"
    assert seen[0] == ({"correct": 1}, ["a", 5])
    assert "line 2, has no column 'answer', it has question" in fault(write_jsonl(tmp_path / "two.jsonl", rows))
    rows[1]["answer"] = {"correct": 3}
    assert "gold_answer raised IndexError" in fault(write_jsonl(tmp_path / "three.jsonl", rows))
    monkeypatch.setattr(data, "gold_answer", lambda answer, row, marker: None)
    assert "its gold is None, which must be" in fault(tmp_path / "one.jsonl")


def test_a_bad_row_beyond_those_that_are_looked_at_says_why_when_it_is_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FULL_CHECK_ROWS", 20)
    monkeypatch.setattr(data, "SAMPLED_ROWS", 5)  # rows 0, 25, 50, 75 and 100 of 101
    rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(101)]
    rows[30]["answer"], rows[31]["question"], rows[32] = "none", None, []
    examples = load_examples(write_jsonl(tmp_path / "rows.jsonl", rows))
    reasons = {}
    for index in range(101):
        try:
            assert examples[index].answer == str(index)
        except RowError as error:
            assert f"rows.jsonl, line {index + 1}," in str(error)
            reasons[index] = error.reason
    assert reasons == {30: "no gold answer", 31: "no question", 32: "unreadable row"}


@pytest.mark.parametrize("lines", [
    [",question,answer", "0,a,007", "1,b,8"],  # df.to_csv(path)
    ["question,answer,", "a,007,", "b,8,"],
    ["question,answer", "a,007,", "b,8,"],
    ["question,,answer, ,answer", "a,x,007,y,z", "b,x,8,y,z"],
    ["question,answer", "0,a,007", "1,b,8"],  # df.to_csv(path, index_label=False)
    ["id,question,answer", "5,a,007", "6,b,8"],
])  # fmt: skip
def test_csv_columns_that_nobody_named_are_left_alone(tmp_path, cache, lines):
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    assert list(load_examples(tmp_path / "rows.csv")) == [("a", "007"), ("b", "8")]


# ---------------------------------------------------------------- faults

@pytest.mark.parametrize("bad", [0, 1, 2])
def test_row_without_the_marker(tmp_path, bad):
    rows = [{**row, "answer": "just 7"} if i == bad else row for i, row in enumerate(ROWS)]
    message = fault(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert f"rows.jsonl, line {bad + 1}," in message and "'####'" in message and "just 7" in message


@pytest.mark.parametrize("value", [None, math.nan, "", " \n", ["x"], "half \ud83d"])
@pytest.mark.parametrize("column", ["question", "answer"])
def test_row_that_is_not_text(tmp_path, column, value):
    path = write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], {**ROWS[1], column: value}], ensure_ascii=True)
    message = fault(path)
    assert "rows.jsonl, line 2," in message and repr(value) in message and f"--{column}_column" in message


def test_missing_column_names_those_there_are(tmp_path, cache):
    from datasets import Dataset
    rows = [{"problem": "1+1?", "answer": "2"}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    for path in (write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "rows.parquet"):
        message = fault(path)
        assert "'question'" in message and "problem, answer" in message and "--question_column" in message
        message = fault(path, question_column="problem", answer_column="gold")
        assert "'gold'" in message and "--answer_column" in message


@pytest.mark.parametrize("line", [b'{"question": "q", "answer": }', b"[1, 2]", b"7", b"{", b'{"question": "\xff"}'])
def test_malformed_line_names_file_and_line(tmp_path, line):
    good = json.dumps(ROWS[0]).encode()
    (tmp_path / "rows.jsonl").write_bytes(good + b"\n\n" + line + b"\n" + good + b"\n")
    assert "rows.jsonl, line 3," in fault(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(("name", "content"), [("e.jsonl", ""), ("b.jsonl", "\n \n"), ("e.csv", ""), ("e.parquet", ""),
                                               ("h.csv", "question,answer\n")])
def test_empty_file(tmp_path, cache, name, content):
    (tmp_path / name).write_text(content)
    message = fault(tmp_path / name)
    assert name in message and "no rows" in message


def test_unreadable_tables_name_the_file(tmp_path, cache):
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    (tmp_path / "ragged.csv").write_text("question,answer\na,1\nb,2,3,4\n")
    (tmp_path / "latin.csv").write_bytes("question,answer\ncafé,1\n".encode("latin-1"))
    (tmp_path / "notes.txt").write_text("x")
    for name in ("bad.parquet", "ragged.csv", "latin.csv", "notes.txt"):
        assert name in fault(tmp_path / name)


def test_folder_faults(tmp_path, cache):
    from datasets import Dataset, DatasetDict
    table = Dataset.from_list(ROWS)
    DatasetDict(train=table).save_to_disk(str(tmp_path / "saved"))
    message = fault(tmp_path / "saved", "test")
    assert "'test'" in message and "train" in message and "--split" in message
    (tmp_path / "void").mkdir()
    assert "train.jsonl" in fault(tmp_path / "void")
    for config in ("algebra", "geometry"):
        (tmp_path / "many" / config).mkdir(parents=True)
        table.to_parquet(str(tmp_path / "many" / config / "train-00000-of-00002.parquet"))
    message = fault(tmp_path / "many")
    assert "algebra" in message and "geometry" in message
    assert "1 of the files" in fault(tmp_path / "many" / "algebra")     # the second file is missing


@pytest.mark.parametrize("path", ["nosuch/file.jsonl", "/nosuch/folder", "../nosuch", "nosuch.parquet", "a/b/c"])
def test_path_that_does_not_exist(path):
    assert f"--dataset {path} does not exist" in fault(path)


def test_cache_folder_that_cannot_be_written(tmp_path, cache, monkeypatch):
    import datasets
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "rows.parquet" / "cache")
    message = fault(tmp_path / "rows.parquet")
    assert "rows.parquet/cache" in message and "HF_DATASETS_CACHE" in message


@pytest.mark.parametrize("offline", [True, False])
def test_no_network_is_said_at_once(tmp_path, cache, monkeypatch, offline):
    import datasets
    import huggingface_hub.constants
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")      # nothing listens there
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    for name in ("gsm8k", "nosuch/dataset"):
        message = fault(name)
        assert name in message and "no network" in message and "--dataset PATH" in message
    assert time.monotonic() - started < 8
    assert datasets.config.HF_HUB_OFFLINE is offline


@pytest.mark.parametrize(("reply", "answers"), [(b"", False), (b"HTTP/1.1 404 Not Found\r\n\r\n", True)])
def test_hub_that_hangs_is_out_of_reach_and_one_that_refuses_is_not(monkeypatch, reply, answers):
    import huggingface_hub.constants
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)
                if not reply:
                    time.sleep(1.5)

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        started = time.monotonic()
        assert data.hub_answers(seconds=0.5) is answers
        assert time.monotonic() - started < 1.4


# ---------------------------------------------------------------- large files

def test_large_jsonl_opens_quickly_and_flat(tmp_path):
    rows, path = 200_000, tmp_path / "large.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for i in range(rows):
            text = "\u2028not json" if i == 150_001 else json.dumps({"question": f"{i} + 1?\u2028" + "x" * 100,
                                                                     "answer": f"one more\n#### {i + 1}"})
            file.write(text + "\n")
    started = time.monotonic()
    examples = load_examples(path)
    seconds = time.monotonic() - started
    assert len(examples) == rows
    assert [examples[i].answer for i in (0, 77_777, rows - 1)] == ["1", "77778", "200000"]
    with pytest.raises(ValueError, match="large.jsonl, line 150002,"):
        examples[150_001]
    assert seconds < 5

    tracemalloc.start()
    load_examples(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6       # the file has 40 MB


def test_dataset_start_benchmark(tmp_path):
    program = Path(data.__file__).parent / "benchmarks" / "dataset_start.py"
    run = subprocess.run([sys.executable, program, "--rows", "30000"], capture_output=True, text=True, check=True)
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["rows"] == 30_000 and result["open_seconds"] < 5 and result["rss_growth_mb"] < 50


def test_import_is_light():
    code = "import sys, data; print([m for m in ('datasets', 'torch', 'transformers', 'jinja2') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         cwd=Path(data.__file__).parent)
    assert run.stdout.strip() == "[]"


# ---------------------------------------------------------------- prompts

TURNS = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
QWEN = ("{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful robot.<|im_end|>\n"
        "{% endif %}" + TURNS)
LLAMA = "{{ bos_token }}" + TURNS
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TURNS
DROPS_SYSTEM = TURNS.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
PREFILLED = TURNS.replace("assistant\n", "assistant\n<think>\n")


@pytest.fixture
def make_tokenizer():
    """A tokenizer of single characters and chat tags that adds <s> by itself, with the given chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    special = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]

    def make(chat_template=None, ends="<s>:0 $A:0"):
        vocabulary = {token: i for i, token in enumerate([*special, *map(chr, range(10, 127))])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=ends, special_tokens=[("<s>", 0), ("</s>", 1)])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
            extra_special_tokens=["<|im_start|>", "<|im_end|>"], chat_template=chat_template)

    return make


def text_of(tokenizer, prompt_ids):
    return "".join(tokenizer.convert_ids_to_tokens(prompt_ids))


def test_system_prompt_names_the_four_tags():
    assert re.search("<think>.*</think><answer>.*</answer>", data.SYSTEM_PROMPT)


@pytest.mark.parametrize("template", [QWEN, TURNS, PREFILLED])
def test_one_system_turn_and_it_is_ours(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    prompt_ids = encode_prompt(tokenizer, "What is 1+1?")
    text = text_of(tokenizer, prompt_ids)
    assert isinstance(prompt_ids, list) and all(type(token) is int for token in prompt_ids)
    assert text == render_prompt(tokenizer, "What is 1+1?")
    turns = f"<|im_start|>system\n{data.SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\nWhat is 1+1?<|im_end|>"
    assert text.startswith(turns)
    assert text.count("<|im_start|>system") == 1 and "robot" not in text and "<s>" not in text
    assert "<|im_start|>assistant\n" in text


def test_bos_is_written_once(make_tokenizer):
    prompt_ids = encode_prompt(make_tokenizer(LLAMA), "What is 1+1?")
    assert prompt_ids[0] == 0 and prompt_ids.count(0) == 1


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_template_without_system_turn_gets_it_in_the_user_turn(make_tokenizer, template, caplog):
    data.say_once.cache_clear()
    tokenizer = make_tokenizer(template)
    for question in ("What is 1+1?", "What is 2+2?"):
        text = text_of(tokenizer, encode_prompt(tokenizer, question, "Be brief."))
        assert text == f"<|im_start|>user\nBe brief.\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert len([record for record in caplog.records if "system turn" in record.message]) == 1


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM, TURNS, QWEN])
def test_empty_system_prompt_leaves_nothing_nobody_wrote(make_tokenizer, template, caplog):
    tokenizer = make_tokenizer(template)
    text = text_of(tokenizer, encode_prompt(tokenizer, "1+1?", ""))
    nothing = "<|im_start|>system\n<|im_end|>\n" if template is QWEN else ""    # an empty turn keeps Qwen's out
    assert text == f"{nothing}<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert not caplog.records


def test_tokenizer_without_chat_template(make_tokenizer):
    for ends in ("<s>:0 $A:0", "<s>:0 $A:0 </s>:0"):
        tokenizer = make_tokenizer(ends=ends)
        text = text_of(tokenizer, encode_prompt(tokenizer, "1+1?", "Be brief."))
        assert text == "<s>Be brief.\n\nQuestion: 1+1?\n\nAnswer:\n"
        assert text_of(tokenizer, encode_prompt(tokenizer, "1+1?", "")) == "<s>Question: 1+1?\n\nAnswer:\n"


CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2?"}]


@pytest.mark.parametrize("template", [QWEN, TURNS, NO_SYSTEM])
def test_chat_messages_go_through_the_template_with_our_system_prompt_or_their_own(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in CHAT]
    own, end = "<|im_start|>system\n{}<|im_end|>\n", "<|im_start|>assistant\n"
    for messages, system in ((CHAT, "Be brief."), ([{"role": "system", "content": "Be long."}, *CHAT], "Be long.")):
        text = text_of(tokenizer, encode_prompt(tokenizer, messages, "Be brief."))
        expected = [own.format(system), *turns, end]
        if template is NO_SYSTEM:
            expected = [turns[0].replace("1+1?", f"{system}\n\n1+1?"), *turns[1:], end]
        assert text == "".join(expected)
    single = [{"role": "user", "content": "1+1?"}]
    assert encode_prompt(tokenizer, single, "Be brief.") == encode_prompt(tokenizer, "1+1?", "Be brief.")


def test_chat_messages_without_a_template_are_plain_text(make_tokenizer):
    text = text_of(make_tokenizer(), encode_prompt(make_tokenizer(), CHAT, "Be brief."))
    assert text == "<s>Be brief.\n\nQuestion: 1+1?\n\nAnswer:\n2\n\nQuestion: 2+2?\n\nAnswer:\n"


def test_messages_that_the_template_refuses_are_a_row_that_cannot_be_asked(make_tokenizer):
    strict = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    with pytest.raises(RowError, match="no tools"):
        encode_prompt(make_tokenizer(strict + TURNS), [{"role": "tool", "content": "x"}])


def test_only_end_and_padding_tokens_are_left_out_of_a_response():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<end>", "<turn>", "<think>", "</think>", "<answer>", "</answer>", "7", "8"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tags = words[3:7]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", extra_special_tokens=tags
    )
    assert fast.decode(range(9), skip_special_tokens=True) == "<turn> 7 8"
    decode = response_decoder(fast, [2])
    assert decode([3, 7, 4, 5, 8, 6, 1, 0, 0]) == "<think> 7 </think> <answer> 8 </answer>"
    import torch
    assert decode(torch.tensor([7, 2], dtype=torch.int32)) == "7" and decode([]) == ""


def test_prefilled_think_tag_is_given_back(make_tokenizer):
    assert response_prefix(render_prompt(make_tokenizer(PREFILLED), "1+1?")) == "<think>"
    assert response_prefix(render_prompt(make_tokenizer(QWEN), "1+1?")) == ""
    assert response_prefix(render_prompt(make_tokenizer(), "1+1?")) == ""
    assert response_prefix("<think>\n\n</think>\n\n") == ""
