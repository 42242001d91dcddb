"""How many groups one learner process takes in from 1 to 64 samplers, and what each costs it.

    .venv/bin/python benchmarks/samplers.py

The samplers are fast fakes in a process of their own: real channels that answer each ticket at once with a ready-made
group of 4 completions x 128 tokens. The learner is the real channel, collector and journal, without training: each step
is finished as soon as its groups are here. The last line is JSON.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from grpo.channel import LearnerChannel, SamplerChannel
from grpo.collector import Collector
from grpo.journal import Journal
from grpo.messages import PROTOCOL_VERSION, Welcome
from grpo.rollout import Group, pack
from grpo.tickets import Ticket

GROUP_SIZE, TOKENS, PROMPT, VOCAB, GROUPS_PER_STEP = 4, 128, 100, 151_936, 32
HASH = "0" * 64
RUN = {"run_id": "run", "model": "m", "tokenizer": "t", "model_path": "m", "save_path": "p"}
WELCOME = Welcome(
    run_id="run", group_size=GROUP_SIZE, temperature=1.0, dtype="bfloat16", needs_reference=True, vocab_size=VOCAB
)
FACTS = {
    "protocol": PROTOCOL_VERSION,
    "model_path": "m",
    "model": "m",
    "tokenizer": "t",
    "dataset": "d",
    "dataset_name": "d",
    "settings": {},
    "num_prompts": 7473,
    "max_new_tokens": TOKENS,
    "batch_size": 4 * GROUP_SIZE,
    "lora_path": "p",
    "run_id": "run",
    "held_out": {"error": "none"},
}


def main() -> None:
    """One line for each number of samplers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samplers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--groups", type=int, default=1600, help="groups of each measurement")
    parser.add_argument("--port", type=int, default=5855)
    args = parser.parse_args()
    rows = []
    for count in args.samplers:
        rows.append(measure(count, args.groups, args.port))
        print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    print(json.dumps({"group_bytes": len(pack(fake_group(Ticket(0, 0, 0, 0), "s"))), "rows": rows}))


def measure(count: int, groups: int, port: int) -> dict:
    """Groups per second, the learner's CPU time for each, and the staleness that came out, with `count` samplers."""
    steps = groups // GROUPS_PER_STEP
    settings = dict(groups_per_step=GROUPS_PER_STEP, max_staleness=1, seed=0, max_steps=steps, hash_of=lambda _: HASH)
    with tempfile.TemporaryDirectory() as folder:
        collector = Collector(RUN, WELCOME, journal=Journal(Path(folder), keep=False), **settings)
        channel = LearnerChannel(f"tcp://127.0.0.1:{port}", silence_limit=60)
        channel.start(collector)
        fakes = multiprocessing.get_context("spawn").Process(target=run_fakes, args=(count, port))
        fakes.start()
        staleness = []
        for step in range(steps):
            while (arrived := collector.next_step(1.0)) is None:
                channel.check()
            staleness += [step - group.adapter_version for group in arrived]
            if step == 0:  # the rest is measured: everybody is there
                started, cpu = time.monotonic(), time.process_time()
            collector.finish_step(step + 1)
            collector.saved()
            collector.covered()
            channel.wake()
        seconds, cpu = time.monotonic() - started, time.process_time() - cpu
        channel.stop_samplers("done")
        channel.close()
        fakes.join(60)
    measured = (steps - 1) * GROUPS_PER_STEP
    return {
        "samplers": count,
        "groups_per_second": measured / seconds,
        "cpu_ms_per_group": 1000 * cpu / measured,
        "staleness_max": max(staleness),
    }


def run_fakes(count: int, port: int) -> None:
    """The samplers, each in a thread."""
    threads = [threading.Thread(target=run_fake, args=(f"fake{i}", port)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_fake(name: str, port: int) -> None:
    """Answer every ticket at once."""
    channel = SamplerChannel(f"tcp://127.0.0.1:{port}", name, lambda: FACTS, 60, 60)
    channel.connect()
    for tickets in channel.tickets(capacity=4):
        for ticket in tickets:
            channel.send(ticket.ticket_id, pack(fake_group(ticket, name)))
    channel.finish()


def fake_group(ticket: Ticket, name: str) -> Group:
    """A group of the usual size."""
    n = GROUP_SIZE * TOKENS
    return Group(
        ticket_id=ticket.ticket_id,
        prompt_index=ticket.prompt_index,
        run_id="run",
        sampler_id=name,
        adapter_version=ticket.version,
        adapter_sha256=HASH,
        temperature=1.0,
        prompt_ids=torch.zeros(PROMPT, dtype=torch.int32),
        completion_ids=torch.zeros(n, dtype=torch.int32),
        lengths=torch.full((GROUP_SIZE,), TOKENS, dtype=torch.int32),
        truncated=torch.ones(GROUP_SIZE, dtype=torch.bool),
        sampling_logprobs=torch.full((n,), -1.0),
        old_logprobs=torch.full((n,), -1.0),
        ref_logprobs=torch.full((n,), -1.0),
        rewards=torch.zeros(GROUP_SIZE),
    )


if __name__ == "__main__":
    main()
