"""Made-up word problems in the shape of GSM8K, for runs without a download.

Six kinds of two- or three-step problems; every number, also in between, is in 0..99. A row has `question`,
`answer` in GSM8K's form (one line of arithmetic a step, then `#### N`) and `kind`. The same seed gives the
same rows.

    python -m demo.problems --output_path FOLDER     # FOLDER/train.jsonl (4,000) and FOLDER/test.jsonl (256)
"""
import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

# Short, so that a prompt of the tiny model stays near 40 tokens. Workers take it through --system_prompt.
SYSTEM_PROMPT = "Think, then answer."

NAMES = ["Ada", "Bela", "Carlo", "Dina", "Emre", "Fay", "Goran", "Hana", "Ivo", "Juno", "Kofi", "Lena",
         "Milo", "Nia"]
ITEMS = ["acorns", "beads", "buttons", "cards", "coins", "dice", "keys", "marbles", "pears", "pens", "plums",
         "shells", "stamps", "stones"]
CONTAINERS = ["bags", "baskets", "boxes", "crates", "jars", "tins"]
LARGEST = 99

Step = tuple[int, str, int]  # left operand, one of + - *, right operand
Draw = Callable[[random.Random], tuple[str, list[Step]]]


def evaluate(step: Step) -> int:
    left, operator, right = step
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def gain_lose(rng: random.Random) -> tuple[str, list[Step]]:
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    have, gain, lose = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    question = (
        f"{name} has {have} {items}, finds {gain} more and gives {lose} away. "
        f"How many {items} does {name} have left?"
    )
    return question, [(have, "+", gain), (have + gain, "-", lose)]


def containers_and_more(rng: random.Random) -> tuple[str, list[Step]]:
    name, items, containers = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(CONTAINERS)
    count, each, more = rng.randint(2, 5), rng.randint(2, 6), rng.randint(2, 9)
    question = (
        f"{name} fills {count} {containers} with {each} {items} each, and {more} {items} do not fit. "
        f"How many {items} are there in all?"
    )
    return question, [(count, "*", each), (count * each, "+", more)]


def containers_and_less(rng: random.Random) -> tuple[str, list[Step]]:
    name, items, containers = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(CONTAINERS)
    count, each, less = rng.randint(2, 5), rng.randint(2, 6), rng.randint(2, 9)
    question = (
        f"{name} buys {count} {containers} of {each} {items} each, but {less} {items} are broken. "
        f"How many good {items} does {name} have?"
    )
    return question, [(count, "*", each), (count * each, "-", less)]


def two_together(rng: random.Random) -> tuple[str, list[Step]]:
    (name, other), items = rng.sample(NAMES, 2), rng.choice(ITEMS)
    have, more = rng.randint(2, 9), rng.randint(2, 9)
    question = (
        f"{name} has {have} {items}. {other} has {more} more than {name}. "
        f"How many {items} do they have together?"
    )
    return question, [(have, "+", more), (have, "+", have + more)]


def gain_lose_gain(rng: random.Random) -> tuple[str, list[Step]]:
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    have, gain, lose, again = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    question = (
        f"{name} owns {have} {items}, wins {gain}, loses {lose} and then wins {again} more. "
        f"How many {items} does {name} own now?"
    )
    return question, [(have, "+", gain), (have + gain, "-", lose), (have + gain - lose, "+", again)]


def times_and_more(rng: random.Random) -> tuple[str, list[Step]]:
    (name, other), items = rng.sample(NAMES, 2), rng.choice(ITEMS)
    have, times, more = rng.randint(2, 6), rng.randint(2, 5), rng.randint(2, 9)
    question = (
        f"{name} sells {have} {items}. {other} sells {times} times as many, and then {more} more. "
        f"How many {items} does {other} sell?"
    )
    return question, [(have, "*", times), (have * times, "+", more)]


KINDS: dict[str, Draw] = {
    "gain_lose": gain_lose,
    "containers_and_more": containers_and_more,
    "containers_and_less": containers_and_less,
    "two_together": two_together,
    "gain_lose_gain": gain_lose_gain,
    "times_and_more": times_and_more,
}


def draw_problem(rng: random.Random) -> dict[str, str]:
    """One problem of a random kind, with every number in 0..99."""
    kind = rng.choice(list(KINDS))
    while True:
        question, steps = KINDS[kind](rng)
        if all(0 <= evaluate(step) <= LARGEST for step in steps):
            break
    lines = [f"{step[0]} {step[1]} {step[2]} = {evaluate(step)}" for step in steps]
    return {"question": question, "answer": "\n".join([*lines, f"#### {evaluate(steps[-1])}"]), "kind": kind}


def draw_splits(seed: int, train_size: int = 4000, test_size: int = 256) -> tuple[list[dict], list[dict]]:
    """Train and test rows; no question occurs twice, neither within a split nor across the two."""
    rng = random.Random(seed)
    rows: dict[str, dict] = {}
    while len(rows) < train_size + test_size:
        problem = draw_problem(rng)
        rows.setdefault(problem["question"], problem)
    unique = list(rows.values())
    return unique[test_size:], unique[:test_size]


def write_splits(folder: str | Path, seed: int, train_size: int = 4000, test_size: int = 256) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "test"), draw_splits(seed, train_size, test_size), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write made-up word problems as train.jsonl and test.jsonl.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output_path", required=True, help="folder for the two files; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same problems")
    parser.add_argument("--train_size", type=int, default=4000, help="training problems")
    parser.add_argument("--test_size", type=int, default=256, help="held-out problems")
    args = parser.parse_args(argv)
    write_splits(args.output_path, args.seed, args.train_size, args.test_size)
    print(f"{args.train_size} training and {args.test_size} held-out problems in {args.output_path}")


if __name__ == "__main__":
    main()
