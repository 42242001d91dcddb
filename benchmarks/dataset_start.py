"""How long a large jsonl file takes to open, and how much memory that costs.

    python benchmarks/dataset_start.py [--rows 1000000]

Writes a file of made-up problems to a temporary folder, opens it with `load_examples` in a fresh process, reads
the first row and 10,000 random ones. The last line is JSON: seconds, and megabytes of growth in resident memory
(the file itself is several times larger).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_problems(path, rows):
    with open(path, "w", encoding="utf-8") as file:
        for i in range(rows):
            question = f"Nadia\u2028packs {i} crates with {i % 50} jars in each and then breaks 3. How many are whole?"
            answer = f"The crates hold {i} * {i % 50} jars. Three of them break.\n#### {i * (i % 50) - 3}"
            file.write(json.dumps({"question": question, "answer": answer}, ensure_ascii=False) + "\n")


def resident_mb():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(path):
    from data import load_examples
    before, started = resident_mb(), time.perf_counter()
    examples = load_examples(path)
    opened = time.perf_counter()
    first = examples[0]
    first_read = time.perf_counter()
    assert first.answer == "-3"
    picks = random.Random(0).choices(range(len(examples)), k=10_000)
    for index in picks:
        assert examples[index].answer == str(index * (index % 50) - 3)
    return {
        "rows": len(examples),
        "file_mb": round(os.path.getsize(path) / 1e6, 1),
        "open_seconds": round(opened - started, 3),
        "first_row_microseconds": round((first_read - opened) * 1e6, 1),
        "random_row_microseconds": round((time.perf_counter() - first_read) / len(picks) * 1e6, 1),
        "rss_growth_mb": round(resident_mb() - before, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the file (default: 1000000)")
    parser.add_argument("--measure", metavar="PATH", help="measure this jsonl file instead of a generated one")
    arguments = parser.parse_args()
    if arguments.measure:
        sys.path.insert(0, str(ROOT))
        print(json.dumps(measure(arguments.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problems.jsonl"
        print(f"writing {arguments.rows} rows", flush=True)
        write_problems(path, arguments.rows)
        subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True)


if __name__ == "__main__":
    main()
