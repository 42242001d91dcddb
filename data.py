"""Where the prompts and the gold answers come from.

    examples = load_examples("gsm8k", split="train")     # or a file, a folder, another hub dataset
    examples[0].question, examples[0].answer             # "Natalia sold clips to ...", "72"
    prompt_ids = encode_prompt(tokenizer, examples[0].question)                     # list of P token ids
    decode = response_decoder(tokenizer, end_ids)                                   # and back: ids -> text

Rows are read when they are asked for: a jsonl file is indexed by line offsets (8 bytes a row), everything
else is a memory-mapped Arrow table. For a dataset with golds of another kind, change `gold_answer`.
"""

import csv
import functools
import glob
import hashlib
import json
import logging
import math
import numbers
import os
import re
from array import array
from pathlib import Path
from typing import NamedTuple

from grpo.hub import hub_answers
from grpo.numbers import gold_value

SYSTEM_PROMPT = (
    "Solve the problem. Think step by step between <think> and </think>, then give the result between <answer> "
    "and </answer>, as a number alone. Reply in this form:\n<think>reasoning</think><answer>number</answer>"
)
HASHES, BOXED = "####", r"\boxed{"      # what a gold stands behind, in GSM8K and in MATH
MANY_WORDS = 6                          # behind a marker, so many are a heading or a sentence
ESSAY_WORDS = 20                        # of a whole answer column: so many are a solution, not a gold
NO_ROW, NO_QUESTION, NO_GOLD = "unreadable row", "no question", "no gold answer"    # why a row is left out
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")     # owner/name:config
FULL_CHECK_ROWS = 20_000                # datasets up to this size are checked and hashed row by row at start,
SAMPLED_ROWS = 1_024                    # larger ones by this many rows, spread evenly over the dataset


class Example(NamedTuple):
    question: str | list    # a text, or chat messages: [{"role": "user", "content": "..."}, ...]
    answer: str     # the gold alone: "72", not the worked solution


class RowError(ValueError):
    """A row that cannot be asked; the message names it, `reason` is what such rows are counted under."""

    def __init__(self, message, reason):
        super().__init__(message)
        self.reason = reason


# ---------------------------------------------------------------- gold answers

def gold_answer(answer, row=None, marker=None):
    """The gold of one row. For another kind of dataset, this is the function to change.

    answer: what the row has in --answer_column, as it is in the file: a text, a number, a list, a dict, or None where
    there is nothing. row: the whole row, a dict. marker: what most rows have their golds behind, "####" (GSM8K),
    r"\\boxed{" (MATH) or "" for neither. Returns the gold, a text or a number. None, a blank text and any error mean
    that the row has none.

    Here a number is its own gold, and the gold of a text is what `marked` finds in it, else the whole text.
    """
    if isinstance(answer, numbers.Number):
        return answer
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("it must be a number, or text that is not blank; dots lead into nested columns")
    gold = marked(answer, marker)
    if gold is None and marker:
        raise ValueError(f"it has no {marker!r}, unlike other rows of this dataset")
    return answer.strip() if gold is None else gold


def marked(text, marker=None):
    """What stands behind the last "####" on its line, or in the last \\boxed{...} whose braces balance.

    Of a text with both it is the box where most rows have one (marker), where it comes after the "####", or where the
    "####" begins a heading or a sentence. None for a text with neither; ValueError where nothing stands there.
    """
    if HASHES not in text and BOXED not in text:
        return None
    box = last_boxed(text).strip()
    line, _, below = text.rpartition(HASHES)[2].partition("\n")
    line = line.strip() if HASHES in text else ""
    is_heading = bool(line and below.strip()) and gold_value(line) is None
    is_sentence = len(line.split()) >= MANY_WORDS
    box_is_last = BOXED in text.rpartition(HASHES)[2]
    if box and (not line or marker == BOXED or box_is_last or is_heading or is_sentence):
        return box
    if is_heading:
        raise ValueError(f"{HASHES} {line!r:.60} is a heading in it, with text below, and nothing is boxed")
    if not line:
        raise ValueError(f"nothing stands behind {HASHES if HASHES in text else BOXED!r} in it")
    return line


def usual_marker(texts):
    """The marker that most of the texts have, or "" where fewer than half have any."""
    counts = dict.fromkeys(("rows", HASHES, BOXED, "either"), 0)
    for text in texts:
        counts["rows"] += 1
        counts[HASHES] += HASHES in text
        counts[BOXED] += BOXED in text
        counts["either"] += HASHES in text or BOXED in text
    if not counts["either"] or 2 * counts["either"] < counts["rows"]:
        return ""
    return HASHES if counts[HASHES] >= counts[BOXED] else BOXED


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
    a bad row raises a RowError that names it. If at least half of the covered answers have a marker, every answer
    must have one.
    """

    def __init__(self, rows, question_column, answer_column, marker=None):
        if len(rows) == 0:
            raise ValueError(f"--dataset {rows.source} has no rows: give another file or --split")
        self.rows, self.question_column, self.answer_column = rows, question_column, answer_column
        if marker is None:
            answers = (field(self.row(index), answer_column) for index in self.covered())
            marker = usual_marker(answer for answer in answers if isinstance(answer, str))
        self.marker = marker
        self.fingerprint = self.hash_rows()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        index = range(len(self))[index]
        row = self.row(index)
        return Example(self.question(row, index), self.gold(row, index))

    def row(self, index):
        try:
            return self.rows[index]
        except ValueError as error:
            raise RowError(str(error), NO_ROW) from None

    def question(self, row, index):
        """The question of a row, checked: text, or chat messages."""
        value = field(row, self.question_column)
        if is_text(value):
            return value
        try:
            return chat_messages(value)
        except ValueError as error:
            raise self.fault(row, index, self.question_column, "--question_column", error, NO_QUESTION) from None

    def gold(self, row, index):
        """The gold of a row as text."""
        answer = field(row, self.answer_column)
        try:
            gold = gold_text(gold_answer(answer, row, self.marker))
        except Exception as error:  # gold_answer is for users to change, and theirs may raise anything
            if type(error) is not ValueError:
                error = f"gold_answer raised {error!r:.200}"
            raise self.fault(row, index, self.answer_column, "--answer_column", error, NO_GOLD) from None
        return gold

    def fault(self, row, index, column, flag, error, reason):
        """The RowError for what a row has in a column."""
        place, value, names = self.rows.place(index), field(row, column), ", ".join(field_names(row))
        if value is None and column not in row and column not in field_names(row):
            return RowError(f"{place} has no column {column!r}, it has {names}: set {flag}", reason)
        shown = repr(value[-60:]) if isinstance(value, str) else f"{value!r:.60}"
        return RowError(f"{place} has {shown} as its {column}: {error}; repair it or choose {flag}", reason)

    def covered(self):
        """The rows that are looked at when the dataset is opened, first and last too."""
        rows = len(self)
        if rows <= FULL_CHECK_ROWS:
            return range(rows)
        return [i * (rows - 1) // (SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)]

    def hash_rows(self):
        digest, essays = hashlib.sha256(f"{len(self)} rows".encode()), 0
        for index in self.covered():
            example = self[index]
            digest.update(json.dumps(example).encode())         # escaped to ASCII: one form for one text
            essays += len(example.answer.split()) >= ESSAY_WORDS
        if 2 * essays > len(self.covered()):
            say_once(f"--dataset {self.rows.source}: most golds have {ESSAY_WORDS} words or more, such as "
                     f"{example.answer[:60]!r}, which no response will equal: choose another --answer_column, or "
                     "change gold_answer in data.py")
        return digest.hexdigest()


def gold_text(gold):
    """What gold_answer returned as text: 204 and 204.0 are "204"."""
    if isinstance(gold, float) and gold.is_integer():
        gold = int(gold)
    if isinstance(gold, numbers.Number) and math.isfinite(gold):
        return str(gold)
    if not is_text(gold):
        raise ValueError(f"its gold is {gold!r:.60}, which must be a finite number, or valid text that is not blank")
    return gold.strip()


def chat_messages(value):
    """A prompt given as chat messages, as [{"role": ..., "content": text}, ...]; ValueError for anything else."""
    if isinstance(value, dict) and isinstance(value.get("role"), list) and isinstance(value.get("content"), list):
        value = [{"role": role, "content": text} for role, text in zip(value["role"], value["content"])]   # by columns
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise ValueError("it must be valid text and not blank, or a list of chat messages")
    turns = [{"role": turn.get("role"), "content": message_text(turn.get("content"))} for turn in value]
    if not all(is_text(text) for turn in turns for text in turn.values()):
        raise ValueError("each chat message must have a role and a content of text that is not blank")
    if turns[-1]["role"] == "assistant":
        raise ValueError("the last chat message must not be the assistant's, which is the answer")
    return turns


def message_text(content):
    """The text of a message, which may be in parts: [{"type": "text", "text": ...}, ...]."""
    if isinstance(content, list) and all(isinstance(part, dict) and is_text(part.get("text")) for part in content):
        return "".join(part["text"] for part in content)
    return content


def field(row, column):
    """A column of a row, by its name or by a dotted path into nested ones (prompt.0.content); None if it is absent."""
    if column in row:
        return row[column]
    value = row
    for part in column.split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict):
            value = value.get(part)
        else:
            return None
    return value


def field_names(row):
    """The columns of a row, nested ones by their paths."""
    nested = {name: value for name, value in row.items() if isinstance(value, dict) and value}
    return [path for name in row for path in ([f"{name}.{n}" for n in field_names(nested[name])] if name in nested
                                              else [name])]


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
        return Examples(load_hub("openai/gsm8k:main", split), question_column, answer_column, marker=HASHES)
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
                lines = csv.reader(file)
                columns, first = next(lines, []), next(lines, [])
            features = Features({name: Value("string") for name in columns if name.strip()})   # not an unnamed index
            options.update(features=features, keep_default_na=False)
            if len(first) > len(columns) and not any(first[len(columns):]):
                options["index_col"] = False    # a comma ends each line: else pandas takes the first column for names
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
    datasets.config.HF_HUB_OFFLINE = offline or not hub_answers()     # else it retries for 23 s
    try:
        return load_table(name, datasets.load_dataset, repository, config or None, split=split)
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


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

    A question of chat messages takes the place of the user turn; a system message that they begin with takes the
    place of ours. A template that takes no system turn gets the system prompt at the head of the user turn. Without
    a template the text is system prompt, "Question: ..." and "Answer:", with blank lines between. An empty system
    prompt means no system turn, the template's own included. Raises RowError for messages that the template refuses.
    """
    turns = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    if turns[0]["role"] == "system":
        system_prompt = turns.pop(0)["content"]
    if not tokenizer.chat_template:
        heads = {"user": "Question: ", "assistant": "Answer:\n"}
        parts = [system_prompt, *(heads.get(turn["role"], "") + turn["content"] for turn in turns), "Answer:\n"]
        return "\n\n".join(part for part in parts if part)
    from jinja2 import TemplateError

    def render(messages):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    try:
        with_system = render([{"role": "system", "content": system_prompt}, *turns])
    except TemplateError:
        with_system = ""
    if system_prompt.strip() and system_prompt.strip() in with_system:
        return with_system
    try:
        if system_prompt.strip():
            say_once("The chat template takes no system turn: the system prompt is put before the question.")
            return render([turns[0] | {"content": f"{system_prompt}\n\n{turns[0]['content']}"}, *turns[1:]])
        # Qwen2.5's template writes a system turn of its own when it gets none, and an empty one keeps that out;
        # other templates need no turn. The shorter text is the one with nothing that nobody wrote.
        without_system = render(turns)
    except TemplateError as error:
        raise RowError(f"the chat template refuses the messages {turns!r:.200}: {error}", NO_QUESTION) from None
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


def response_decoder(tokenizer, end_ids):
    """A function from a completion's token ids (a list or a tensor) to its text, for rewards and evaluation.

    Only the tokens that end a completion (end_ids, and the tokenizer's own) and padding are left out. Other special
    tokens stay: tags such as <think> are special tokens of some models, and the reward looks for them.
    """
    dropped = {*end_ids, tokenizer.eos_token_id, tokenizer.pad_token_id}

    def decode(ids):
        kept = [token for token in map(int, ids) if token not in dropped]
        return tokenizer.decode(kept, skip_special_tokens=False)

    return decode
