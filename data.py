"""Where the prompts and the gold answers come from.

    examples = load_examples("gsm8k", split="train")     # or a file, a folder, another hub dataset
    examples[0].question, examples[0].answer             # "Natalia sold clips to ...", "72"
    prompt_ids = encode_prompt(tokenizer, examples[0].question)                     # list of P token ids

Rows are read when they are asked for: a jsonl file is indexed by line offsets (8 bytes a row), everything
else is a memory-mapped Arrow table. For a dataset with another kind of answer column, change `gold_answer`.
"""

import csv
import functools
import glob
import hashlib
import json
import logging
import os
import re
from array import array
from pathlib import Path
from typing import NamedTuple

SYSTEM_PROMPT = (
    "Solve the problem. Think step by step between <think> and </think>, then give the result between <answer> "
    "and </answer>, as a number alone. Reply in this form:\n<think>reasoning</think><answer>number</answer>"
)
GOLD_MARKERS = ("####", r"\boxed{")     # GSM8K, MATH
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")     # owner/name:config
FULL_CHECK_ROWS = 20_000                # datasets up to this size are checked and hashed row by row at start,
SAMPLED_ROWS = 1_024                    # larger ones by this many rows, spread evenly over the dataset


class Example(NamedTuple):
    question: str
    answer: str     # the gold alone: "72", not the worked solution


# ---------------------------------------------------------------- gold answers

def gold_answer(answer, marker=None):
    """The gold in one row's answer column. For another kind of dataset, this is the function to change.

    marker "####" takes what follows the last "####" on its line (GSM8K), r"\\boxed{" the content of the last
    \\boxed{...} whose braces balance (MATH), "" the whole text, None whichever of these the text has. Raises
    ValueError where there is nothing to take.
    """
    marker = find_marker([answer]) if marker is None else marker
    if marker not in answer:
        raise ValueError(f"has no {marker!r} in its answer {answer[-60:]!r}, unlike other rows of this dataset")
    if marker == "####":
        gold = answer.rpartition("####")[2].partition("\n")[0]
    elif marker == r"\boxed{":
        gold = last_boxed(answer)
    else:
        gold = answer
    if not gold.strip():
        raise ValueError(f"has nothing after {marker!r} in its answer {answer[-60:]!r}")
    return gold.strip()


def find_marker(answers):
    """The first of GOLD_MARKERS that any of the answers has, or ""."""
    return next((marker for marker in GOLD_MARKERS if any(marker in answer for answer in answers)), "")


def last_boxed(text):
    """The content of the last \\boxed{...} in a LaTeX text, inner braces included, or ""."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start:end]
    return ""


# ---------------------------------------------------------------- examples

class Examples:
    """A dataset as a sequence: `len(examples)`, `examples[i] -> Example`, and `examples.fingerprint`.

    The fingerprint is a sha256 over the number of rows and over questions and golds (all of them up to
    FULL_CHECK_ROWS rows, else SAMPLED_ROWS of them), so the same rows have the same fingerprint from jsonl, csv,
    parquet or the hub, on any machine. The rows it covers are checked at start, any other when it is reached;
    a bad row raises a ValueError that names it. If any of the first 100 answers has one of GOLD_MARKERS, every
    answer must have it.
    """

    def __init__(self, rows, question_column, answer_column, marker=None):
        if len(rows) == 0:
            raise ValueError(f"--dataset {rows.source} has no rows: give another file or --split")
        self.rows, self.question_column, self.answer_column = rows, question_column, answer_column
        if marker is None:
            marker = find_marker([self.texts(index)[1] for index in range(min(100, len(rows)))])
        self.marker = marker
        self.fingerprint = self.hash_rows()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        index = range(len(self))[index]
        question, answer = self.texts(index)
        try:
            return Example(question, gold_answer(answer, self.marker))
        except ValueError as error:
            raise ValueError(f"{self.rows.place(index)} {error}: repair it or choose --answer_column") from None

    def texts(self, index):
        """The question and the answer column of row `index`, checked to be text."""
        row = self.rows[index]
        for column, flag in (self.question_column, "--question_column"), (self.answer_column, "--answer_column"):
            if column not in row:
                raise ValueError(f"{self.rows.place(index)} has no column {column!r}, it has {', '.join(row)}: "
                                 f"set {flag}")
            if not is_text(row[column]):
                raise ValueError(f"{self.rows.place(index)} has {row[column]!r:.60} as its {column}, which must be "
                                 f"valid text and not blank: repair it or choose {flag}")
        return row[self.question_column], row[self.answer_column]

    def hash_rows(self):
        rows = len(self)
        covered = range(rows)
        if rows > FULL_CHECK_ROWS:
            covered = [i * (rows - 1) // (SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)]   # first and last too
        digest = hashlib.sha256(f"{rows} rows".encode())
        for index in covered:
            digest.update(json.dumps(self[index]).encode())     # escaped to ASCII: one form for one text
        return digest.hexdigest()


def is_text(value):
    """Whether it is a string with something in it that a tokenizer takes: half a surrogate pair is refused."""
    return isinstance(value, str) and value.strip() != "" and not re.search("[\ud800-\udfff]", value)


class JsonLines:
    """Rows of a file with one JSON object a line, parsed when asked for; safe to read from threads and forks."""

    def __init__(self, path):
        self.source = str(path)
        self.file = open(path, "rb")
        self.offsets = array("Q")       # where each row starts, and where the last one ends
        position = 0
        for line in self.file:          # a binary file splits at \n alone; questions contain U+2028
            if line.strip():
                self.offsets.append(position)
            position += len(line)
        self.offsets.append(position)

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, index):
        start, end, fault = self.offsets[index], self.offsets[index + 1], "another JSON value"
        try:
            row = json.loads(os.pread(self.file.fileno(), end - start, start))
        except (ValueError, RecursionError) as error:
            row, fault = None, getattr(error, "msg", error)
        if isinstance(row, dict):
            return row
        raise ValueError(f"{self.place(index)} is not a JSON object ({fault}): write one object a line")

    def place(self, index):
        before, line = self.offsets[index], 1
        for start in range(0, before, 1 << 20):
            line += os.pread(self.file.fileno(), min(1 << 20, before - start), start).count(b"\n")
        return f"{self.source}, line {line},"


class Table:
    """Rows of a datasets.Dataset, memory-mapped."""

    def __init__(self, dataset, source):
        self.dataset, self.source = dataset, source

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]

    def place(self, index):
        return f"{self.source}, row {index + 1},"


# ---------------------------------------------------------------- loading

def load_examples(dataset="gsm8k", split="train", question_column="question", answer_column="answer"):
    """Examples from "gsm8k", a jsonl/parquet/csv file, a folder, or a hub dataset "owner/name[:config]".

    A file is taken whole, whatever `split` says. A folder holds <split>.jsonl, .parquet or .csv, or a copy of a
    hub repository (main/train-00000-of-00001.parquet), or what `save_to_disk` wrote. "gsm8k" is openai/gsm8k,
    config main, from the hub or its cache; a folder of that name is "./gsm8k". Raises ValueError with one
    sentence that names the value and what to change.
    """
    dataset = str(dataset)
    if dataset in ("gsm8k", "openai/gsm8k", "openai/gsm8k:main"):
        return Examples(load_hub("openai/gsm8k:main", split), question_column, answer_column, marker="####")
    path = Path(dataset).expanduser()
    if path.is_dir():
        rows = load_folder(path, split)
    elif path.is_file():
        rows = load_files([path])
    elif HUB_NAME.fullmatch(dataset) and path.suffix not in READERS:
        rows = load_hub(dataset, split)
    else:
        raise ValueError(f"--dataset {dataset} does not exist: give a file, a folder or the name of a hub dataset")
    return Examples(rows, question_column, answer_column)


def load_files(paths):
    """Rows of one jsonl or csv file, or of the parquet files of one split, in order."""
    source = str(paths[0]) if len(paths) == 1 else str(paths[0].parent)
    kind = READERS.get(paths[0].suffix)
    if kind is None:
        raise ValueError(f"--dataset {source} is not a .jsonl, .parquet or .csv file")
    try:
        if kind == "json":
            return JsonLines(paths[0])
        options = {"data_files": [glob.escape(str(path.absolute())) for path in paths]}
        if kind == "csv":       # every column as text: a column of numbers keeps its digits, "NA" stays "NA"
            from datasets import Features, Value
            with open(paths[0], newline="", encoding="utf-8-sig") as file:
                columns = next(csv.reader(file), [])
            options.update(features=Features({name: Value("string") for name in columns}), keep_default_na=False)
        if all(path.stat().st_size == 0 for path in paths):
            return Table([], source)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset {source} cannot be read ({error}): repair or replace it") from None
    from datasets import load_dataset
    return load_table(source, load_dataset, kind, split="train", **options)


def load_folder(folder, split):
    """Rows of `split` in a folder: a saved dataset, or data files in it, in main/ or in its only subfolder."""
    if (folder / "dataset_dict.json").exists():
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        if split not in splits:
            raise ValueError(f"--dataset {folder} has no split {split!r}, it has {', '.join(splits)}: set --split")
        folder = folder / split
    if (folder / "state.json").exists():
        from datasets import load_from_disk
        return load_table(str(folder), load_from_disk, str(folder))

    found = {}      # subfolder -> its files of this split
    for path in sorted([*folder.glob(f"{split}[.-]*"), *folder.glob(f"*/{split}[.-]*")]):
        if path.suffix in READERS and (path.stem == split or re.fullmatch(r".*-\d+-of-\d+", path.stem)):
            found.setdefault(path.parent, []).append(path)
    for place in folder, folder / "main", *(found if len(found) == 1 else ()):
        if place in found:
            shards = [path for path in found[place] if path.stem != split]
            if len(shards) < len(found[place]):
                return load_files([path for path in found[place] if path not in shards][:1])
            if len(shards) != int(shards[0].stem.rpartition("-")[2]):
                raise ValueError(f"--dataset {place} has {len(shards)} of the files {shards[0].name}: complete it")
            return load_files(shards)
    if found:
        raise ValueError(f"--dataset {folder} has several folders with {split} data: give one of "
                         f"{', '.join(map(str, found))}")
    raise ValueError(f"--dataset {folder} holds no {split}.jsonl, {split}.parquet or {split}.csv: give another "
                     "folder, --split, or a file")


def load_hub(name, split):
    """Rows of a hub dataset "owner/name[:config]"; without a network, of its copy in the datasets cache."""
    import datasets
    repository, _, config = name.partition(":")
    offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or not hub_answers(repository)     # else it retries for 23 s
    try:
        return load_table(name, datasets.load_dataset, repository, config or None, split=split)
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def hub_answers(repository, seconds=5):
    """Whether anything, an error page included, comes back from the hub (or HF_ENDPOINT) in a few seconds."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    try:
        HfApi().dataset_info(repository, timeout=seconds)
    except HfHubHTTPError:
        return True
    except (OSError, HTTPError):
        return False
    return True


def load_table(source, load, *arguments, **options):
    """What `load`, a function of `datasets`, returns, as a Table; its errors become one ValueError each."""
    import datasets
    try:
        return Table(load(*arguments, **options), source)
    except ConnectionError:
        remedy = ("it is no file or folder here, the hub is out of reach (no network, or HF_HUB_OFFLINE) and the "
                  "cache has no copy: give a local file or folder, --dataset PATH")
    except datasets.exceptions.DatasetNotFoundError:
        remedy = "it is neither a file or folder here nor a dataset on the hub that you may read"
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        if "corresponds to no data" in str(cause):
            return Table([], source)
        remedy = str(cause).partition("\n")[0]
        if isinstance(cause, OSError):
            remedy += f" (cache folder {datasets.config.HF_DATASETS_CACHE}: set HF_DATASETS_CACHE to another)"
    raise ValueError(f"--dataset {source} cannot be loaded: {remedy}")


# ---------------------------------------------------------------- prompts

def encode_prompt(tokenizer, question, system_prompt=SYSTEM_PROMPT):
    """Token ids of the prompt, a list of P ints: the text of `render_prompt`, tokenised once.

    A chat template writes the BOS that the model wants, so tokenising adds none; plain text gets the tokenizer's
    own, but no EOS at the end, after which nothing would be generated.
    """
    text = render_prompt(tokenizer, question, system_prompt)
    prompt_ids = tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)
    if not tokenizer.chat_template and prompt_ids[-1] == tokenizer.eos_token_id:
        prompt_ids.pop()
    return prompt_ids


def render_prompt(tokenizer, question, system_prompt=SYSTEM_PROMPT):
    """The prompt's text: the chat template with our system turn, the question, and the opening of the reply.

    A template that takes no system turn gets the system prompt at the head of the user turn. Without a template
    the text is system prompt, "Question: ..." and "Answer:", with blank lines between. An empty system prompt
    means no system turn, the template's own included.
    """
    if not tokenizer.chat_template:
        return "\n\n".join(part for part in (system_prompt, f"Question: {question}", "Answer:\n") if part)
    from jinja2 import TemplateError

    def render(*turns):
        messages = [{"role": role, "content": content} for role, content in turns]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    try:
        with_system = render(("system", system_prompt), ("user", question))
    except TemplateError:
        with_system = ""
    if system_prompt.strip() and system_prompt.strip() in with_system:
        return with_system
    if system_prompt.strip():
        say_once("The chat template takes no system turn: the system prompt is put before the question.")
        return render(("user", f"{system_prompt}\n\n{question}"))
    # Qwen2.5's template writes a system turn of its own when it gets none, and an empty one keeps that out;
    # other templates need no turn. The shorter text is the one with nothing that nobody wrote.
    without_system = render(("user", question))
    return min(without_system, with_system or without_system, key=len)


@functools.cache
def say_once(sentence):
    logging.getLogger(__name__).warning(sentence)


def response_prefix(rendered_prompt):
    """What the template has already written of the response: "<think>" where the prompt ends with it, else "".

    The reward is given this prefix + the decoded completion; without it every response would lack the opening
    tag and the format reward would be 0 for ever.
    """
    return "<think>" if rendered_prompt.rstrip().endswith("<think>") else ""
