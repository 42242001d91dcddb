"""What run.sh works out by itself: GPUs, ranks, cores, logs. The programs that it starts are recorders here."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

RECORDER = f"""#!/usr/bin/env bash
case "$*" in
    -c*) echo 12345 ;;
    *console.py*) exec {sys.executable} "$@" ;;
    *)
        echo "STARTED CUDA_VISIBLE_DEVICES=${{CUDA_VISIBLE_DEVICES-unset}} OMP=${{OMP_NUM_THREADS-unset}} $*"
        exit "${{CODE:-0}}"
        ;;
esac
"""
UUIDS = [f"GPU-{i}{i}{i}{i}-aa" for i in range(8)]


@pytest.fixture
def machine(tmp_path):
    """Runs run.sh on a machine with some GPUs, in an empty folder."""
    programs, venv = tmp_path / "bin", tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    programs.mkdir()
    for name in ("python", "deepspeed"):
        (venv / "bin" / name).write_text(RECORDER)
        (venv / "bin" / name).chmod(0o755)
    sums = subprocess.run(["cksum"], stdin=open(ROOT / "requirements.txt"), capture_output=True, text=True).stdout
    (venv / f"installed-{sums.split()[0]}").touch()

    def run(gpus: int, *arguments, code: int = 0, **variables) -> tuple[int, str]:
        lines = "\n".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: {UUIDS[i]})'" for i in range(gpus))
        (programs / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}\nexit 0\n")
        (programs / "nvidia-smi").chmod(0o755)
        kept = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
        environment = kept | {"VENV": str(venv), "CODE": str(code), "PATH": f"{programs}:{kept['PATH']}"}
        done = subprocess.run(
            [ROOT / "run.sh", *arguments],
            env=environment | {name: str(value) for name, value in variables.items()},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout

    return run


def ids(output: str) -> list[str]:
    """The GPU of each rank."""
    (found,) = re.findall(r"--world_info=(\S+)", output)
    return json.loads(base64.urlsafe_b64decode(found))["localhost"]


ALLOCATIONS = {
    # GPUs of the machine, CUDA_VISIBLE_DEVICES -> ids of the trainer's ranks, the sampler's id
    "one": (1, None, ["0"], "0"),
    "two": (2, None, ["0"], "1"),
    "three": (3, None, ["0", "1"], "2"),
    "eight": (8, None, ["0", "1"], "2"),
    "one of eight": (8, "5", ["5"], "5"),
    "two of eight": (8, "5,6", ["5"], "6"),
    "three of eight": (8, "7,3,5", ["7", "3"], "5"),
    "uuids": (8, f"{UUIDS[4]},{UUIDS[2][:8]}", ["4"], "2"),
    "a part of a card": (8, "MIG-1-2", ["MIG-1-2"], "MIG-1-2"),
    "up to the first that is none": (8, "4,-1,5", ["4"], "4"),
    "hidden": (8, "", ["-1", "-1"], ""),
    "hidden by a number": (8, "-1", ["-1", "-1"], ""),
    "none": (0, None, ["-1", "-1"], ""),
}


@pytest.mark.parametrize("gpus, visible, ranks, sampler", ALLOCATIONS.values(), ids=ALLOCATIONS.keys())
def test_the_allocation_is_what_the_machine_has(machine, gpus, visible, ranks, sampler):
    allocated = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    _, trainer_says = machine(gpus, "trainer", **allocated)
    assert ids(trainer_says) == ranks
    _, sampler_says = machine(gpus, "sampler", **allocated)
    assert f"STARTED CUDA_VISIBLE_DEVICES={sampler} " in sampler_says
    assert ("--device cpu" in sampler_says) == (sampler == "")
    _, doctor_says = machine(gpus, "doctor", **allocated)
    assert f"-m grpo.doctor --ranks {len(ranks)}" in doctor_says and ("--device cpu" in doctor_says) == (sampler == "")


def test_gpus_and_ranks_of_ones_own(machine):
    assert ids(machine(8, "trainer", TRAINER_GPUS="0,1,2")[1]) == ["0", "1", "2"]
    assert "--ranks 3" in machine(8, "doctor", TRAINER_GPUS="0,1,2")[1]
    assert ids(machine(8, "trainer", CUDA_VISIBLE_DEVICES="5,6,7", TRAINER_GPUS="7")[1]) == ["7"]
    assert "STARTED CUDA_VISIBLE_DEVICES=6 " in machine(8, "sampler", CUDA_VISIBLE_DEVICES="5,6", SAMPLER_GPUS="6")[1]
    assert ids(machine(0, "trainer", TRAINER_RANKS="3")[1]) == ["-1"] * 3
    assert "--device cuda:0" in machine(8, "sampler", "--device", "cuda:0")[1]


@pytest.mark.parametrize(
    "gpus, variables, words",
    [
        (8, dict(CUDA_VISIBLE_DEVICES="5,6", TRAINER_GPUS="0,1"), "TRAINER_GPUS=0,1: GPU 0 is not among those that are ours (5,6)"),  # fmt: skip  # noqa: E501
        (2, dict(SAMPLER_GPUS="2"), "SAMPLER_GPUS=2: GPU 2 is not among those that are ours (0,1)"),
        (2, dict(TRAINER_GPUS=","), "TRAINER_GPUS=, is not a list of GPU ids such as 0,1"),
        (2, dict(TRAINER_GPUS="0,0"), "TRAINER_GPUS=0,0 names a GPU twice"),
        (0, dict(TRAINER_GPUS="0"), "TRAINER_GPUS=0, but there is no GPU here"),
        (0, dict(TRAINER_RANKS="none"), "TRAINER_RANKS=none is not a number from 1 on"),
    ],
)
def test_what_is_not_there_is_refused_by_every_verb(machine, gpus, variables, words):
    for verb in ("trainer", "sampler", "doctor"):
        code, output = machine(gpus, verb, **variables)
        assert code == 1 and words in output and "STARTED" not in output, verb


def test_without_a_gpu_the_cores_are_divided_and_a_line_says_so(machine):
    cores = len(os.sched_getaffinity(0))
    each = max(1, cores // 3)
    for verb in ("trainer", "sampler"):
        _, output = machine(0, verb)
        assert f"no GPU: {each} of {cores} cores for each of 2 ranks and a sampler" in output
        assert f"OMP={each} " in output
        assert "OMP=7 " in machine(0, verb, OMP_NUM_THREADS=7)[1]
        assert "OMP=unset " in machine(3, verb)[1]


def test_help_starts_nothing_and_writes_no_log(machine, tmp_path):
    for verb in ("trainer", "sampler"):
        _, output = machine(3, verb, "--help")
        assert output.count("STARTED") == 1 and "launcher" not in output
        assert output.rstrip().endswith("_worker.py --help")
    for verb, usage in (("keys", "usage: ./run.sh keys DIR"), ("vllm", "usage: ./run.sh vllm")):
        code, output = machine(0, verb, "--help")
        assert code == 1 and usage in output
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "--help").exists()


def test_logs_lie_in_the_runs_folder_one_file_for_each_start(machine, tmp_path):
    for flags in (["--save_path", "runs/a"], ["--save_path=runs/a"]):
        assert machine(0, "trainer", *flags)[0] == 0
    machine(0, "sampler", "--lora_path", "runs/a")
    machine(0, "sampler", "--lora_path", "runs/a")
    machine(0, "sampler", "--evaluate", "--lora_path", "none")
    logs = tmp_path / "runs" / "a" / "logs"
    for side in ("trainer", "sampler"):
        files = list(logs.glob(f"{side}-*.log"))
        assert len(files) == 2 and (logs / f"{side}.log").resolve() in files
        assert "STARTED" in (logs / f"{side}.log").read_text()
    assert not (tmp_path / "none").exists() and not list(tmp_path.glob("*.log"))
    for i in range(30):
        (logs / f"trainer-2020{i:02}.log").touch()
        os.utime(logs / f"trainer-2020{i:02}.log", (i, i))
    machine(0, "trainer", "--save_path", "runs/a")
    assert len(list(logs.glob("trainer-*.log"))) == 20 and len(list(logs.glob("sampler-*.log"))) == 2


def test_a_folder_that_takes_no_log_and_a_program_that_fails(machine):
    code, output = machine(0, "trainer", "--save_path", "/proc/none", code=3)
    assert code == 3 and "STARTED" in output


def test_bash_is_content_with_the_script():
    assert shutil.which("bash") and subprocess.run(["bash", "-n", Path(ROOT) / "run.sh"]).returncode == 0
