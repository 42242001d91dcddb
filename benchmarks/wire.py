"""What a group costs on its way: bytes, microseconds to pack, unpack, journal, and to send and acknowledge.

    .venv/bin/python benchmarks/wire.py

Ours (safetensors over ZeroMQ), pickle over ZeroMQ, and JSON over HTTP (one connection that is kept), all between two
threads of one process. The journal's time is that of a file that is synced before the acknowledgement. Medians; the
last line is JSON.
"""

import argparse
import http.client
import http.server
import json
import pickle
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import zmq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from grpo.journal import Journal
from grpo.rollout import Group, pack, unpack


def main() -> None:
    """A table, a row for each way."""
    args = parse_args()
    group = make_group(args.group_size, args.tokens, args.prompt)
    ways = {"ours": (pack, unpack), "pickle": (pickle.dumps, pickle.loads), "http": (to_json, from_json)}
    rows = {}
    for name, (write, read) in ways.items():
        blob = write(group)
        row = {"bytes": len(blob), "pack_us": time_of(lambda w=write: w(group), args.repeats)}
        row["unpack_us"] = time_of(lambda r=read, b=blob: r(b), args.repeats)
        trip = round_trip_http if name == "http" else round_trip_zmq
        row["round_trip_us"] = trip(lambda w=write: w(group), read, args.repeats)
        if name == "ours":
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                journal, numbers = Journal(Path(folder), keep=True), iter(range(10**9))
                row["journal_us"] = time_of(lambda j=journal, n=numbers, b=blob: j.put(next(n), b), args.repeats)
        rows[name] = row
        print(f"{name:>7}: " + ", ".join(f"{key} {value:.0f}" for key, value in row.items()), flush=True)
    print(json.dumps({"group": [args.group_size, args.tokens, args.prompt], **rows}))


def make_group(size: int, tokens: int, prompt: int) -> Group:
    """`size` completions of `tokens` tokens."""
    n = size * tokens
    return Group(
        ticket_id=1,
        prompt_index=1,
        run_id="0" * 32,
        sampler_id="sampler",
        adapter_version=1,
        adapter_sha256="0" * 64,
        temperature=1.0,
        prompt_ids=torch.randint(0, 150_000, (prompt,), dtype=torch.int32),
        completion_ids=torch.randint(0, 150_000, (n,), dtype=torch.int32),
        lengths=torch.full((size,), tokens, dtype=torch.int32),
        truncated=torch.zeros(size, dtype=torch.bool),
        sampling_logprobs=-torch.rand(n),
        old_logprobs=-torch.rand(n),
        ref_logprobs=-torch.rand(n),
        rewards=torch.rand(size),
        components={"format": torch.rand(size), "answer": torch.rand(size)},
    )


def to_json(group: Group) -> bytes:
    """Everything as lists of numbers."""
    plain = asdict(group)
    plain |= {name: value.tolist() for name, value in plain.items() if isinstance(value, torch.Tensor)}
    plain["components"] = {name: value.tolist() for name, value in group.components.items()}
    return json.dumps(plain).encode()


def from_json(blob: bytes) -> dict:
    """The longer ones as tensors again."""
    return {name: torch.tensor(v) if isinstance(v, list) else v for name, v in json.loads(blob).items()}


def time_of(call: Callable, repeats: int) -> float:
    """Median microseconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def round_trip_zmq(write: Callable, read: Callable, repeats: int) -> float:
    """Pack, send, unpack, acknowledge."""
    context = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client.connect(f"tcp://127.0.0.1:{port}")

    def serve():
        for _ in range(repeats):
            sender, blob = server.recv_multipart()
            read(blob)
            server.send_multipart([sender, b"ACK"])

    def send():
        client.send(write())
        client.recv()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        return time_of(send, repeats)
    finally:
        thread.join(10)
        context.destroy(linger=0)


def round_trip_http(write: Callable, read: Callable, repeats: int) -> float:
    """The same by POST."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self):
            read(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "3")
            self.end_headers()
            self.wfile.write(b"ACK")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post():
        connection.request("POST", "/", body=write())
        connection.getresponse().read()

    try:
        return time_of(post, repeats)
    finally:
        connection.close()
        server.shutdown()


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--group_size", type=int, default=8, help="completions")
    add("--tokens", type=int, default=256, help="tokens of each")
    add("--prompt", type=int, default=150, help="tokens of the prompt")
    add("--repeats", type=int, default=300, help="measurements of each")
    add("--folder", help="where the journal is measured (default: the system's temporary folder)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
