"""The learner over two nodes with a sampler on the second, each node in a network namespace of its own."""

import os
import shutil
import subprocess
import sys

import pytest
from processes import LIMIT, ROOT, Worker, by_run_sh
from test_workers import Run, material, workers  # noqa: F401  (fixtures)

from grpo.adapters import AdapterStore
from grpo.keys import make_keys
from grpo.metrics import read_metrics

ADDRESSES = ["10.77.0.1", "10.77.0.2"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def nodes():
    """Two namespaces, joined by a cable; skipped where one may not make them."""
    names = [f"grpo{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield [("ip", "netns", "exec", name) for name in names]
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespaces here: root and iproute2 are needed")
    finally:
        for name in names if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_a_learner_on_two_nodes_and_a_sampler_with_keys(tmp_path, material, workers, nodes):  # noqa: F811
    make_keys(tmp_path / "keys")
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    common = ["--host", ADDRESSES[0], "--keys", str(tmp_path / "keys")]
    run = Run(tmp_path, material, steps=2, learner_flags=common)
    learners = []
    for rank, before in enumerate(nodes):
        settings = {"HOSTFILE": str(hosts), "NODE_RANK": str(rank), "MASTER_ADDR": ADDRESSES[0]}
        settings |= {"GLOO_SOCKET_IFNAME": "cable", "MASTER_PORT": "29511"}
        flags = ["trainer", *map(str, run.learner_flags)]
        learners.append(workers(by_run_sh, tmp_path / f"node{rank}.log", *flags, before=before, **settings))
    script = [sys.executable, "-u", ROOT / "tests" / "sampler_with_reward.py", "--device", "cpu"]
    actor = workers(Worker, [*nodes[1], *script, *run.sampler_flags, *common], tmp_path / "sampler.log")
    for worker in (*learners, actor):
        assert worker.wait(LIMIT) == 0, worker.output()[-4000:]
    assert f"2 ranks, float32, 4 prompts x 4 completions a step, listening at tcp://{ADDRESSES[0]}" in (
        learners[0].output()
    )
    assert [record["step"] for record in read_metrics(run.path / "metrics.jsonl")] == [1, 2]
    assert AdapterStore(run.path).versions()[-1] == 2
