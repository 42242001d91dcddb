"""What can be known to go wrong before a model is loaded: `./run.sh doctor` with the flags of both sides.

Each check is one line: ok or NO, what was found, and what to do. Flags that one side alone has go to that side, flags
of both to both. The exit code is the number of NOs.
"""

import argparse
import contextlib
import importlib.metadata
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import zmq

# This is a program of its own, run from the root beside the two workers; nothing in grpo/ imports it.
import sampling_worker
import training_worker
from data import load_examples
from grpo.adapters import AdapterStore
from grpo.address import check_free
from grpo.engine import groups_per_step, precision, read_ds_config
from grpo.facts import empty_model, read_config
from grpo.files import sync
from grpo.keys import guard_learner, guard_sampler
from grpo.learner import check_facts
from grpo.models import quiet_libraries
from grpo.reference import References

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def main() -> None:
    """Run every check."""
    quiet_libraries()
    ranks, learner, sampler = parse_both(sys.argv[1:])
    failed: list[str] = []
    for check in (versions, folder, port, keys, batch_sizes, model, dataset):
        try:
            for line in check(learner, sampler, ranks):
                print(f"ok   {line}", flush=True)
        except (ValueError, OSError) as error:
            if str(error) not in failed:  # two checks may stumble over one thing
                failed.append(str(error))
                print(f"NO   {error}", flush=True)
    things = "1 thing" if len(failed) == 1 else f"{len(failed)} things"
    print("ready" if not failed else f"{things} to fix first")
    sys.exit(len(failed))


def parse_both(argv: list[str]) -> tuple[int, argparse.Namespace, argparse.Namespace]:
    """Both sides' flags by their own rules, which say NO and end the program where a flag is wrong."""
    own = argparse.ArgumentParser(
        prog="./run.sh doctor",
        description="Checks that trainer and sampler can start, before any model is loaded: port, folder, sizes, "
        "model, memory, dataset, keys.",
        epilog="Give it the flags of both sides as you would give them to ./run.sh trainer and ./run.sh sampler.",
    )
    own.add_argument("--ranks", type=int, help="ranks of the learner (run.sh knows them)")
    mine, argv = own.parse_known_args(argv)
    parsed, unknown = [], []
    for name, module in (("trainer", training_worker), ("sampler", sampling_worker)):
        known, rest = _share_of(module.make_parser(), argv, leave_out=sampling_worker.EVALUATION if parsed else ())
        unknown.append(set(rest))
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                parsed.append(module.parse_args(known))
        except SystemExit:
            sys.exit(f"NO   {name}: {errors.getvalue().strip().rpartition('error: ')[2]}")
    if unknown[0] & unknown[1]:
        sys.exit(f"NO   neither side knows {', '.join(sorted(unknown[0] & unknown[1]))}")
    ranks = mine.ranks or (1 if torch.cuda.device_count() in (1, 2) else 2)  # what run.sh takes by default
    return ranks, *parsed


def _share_of(
    parser: argparse.ArgumentParser, argv: list[str], leave_out: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """The part of `argv` that a parser knows, less some flags, and the flags that it does not know."""
    known, rest, take = [], [], True
    for part in argv:
        if part.startswith("--"):
            name = part.partition("=")[0]
            take = name in parser._option_string_actions and name[2:] not in leave_out
            if not take:
                rest.append(name)
        if take:
            known.append(part)
    return known, rest


def versions(learner, sampler, ranks: int) -> Iterator[str]:
    """The packages are those of requirements.txt."""
    lines = Path(__file__).resolve().parents[1].joinpath("requirements.txt").read_text().split("\n")
    wanted = dict(re.match(r"([\w-]+)==([\w.]+)", line).groups() for line in lines if re.match(r"[\w-]+==", line))
    del wanted["transformers"]  # pinned by Python version
    for name, version in wanted.items():
        try:
            found = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != version:
            raise ValueError(f"{name} is {found}, requirements.txt has {version}: ./run.sh setup")
    yield f"Python {sys.version.split()[0]}, torch {torch.__version__}, packages as in requirements.txt"


def folder(learner, sampler, ranks: int) -> Iterator[str]:
    """The adapter folder is one folder for both sides, and can do what a run asks of it."""
    path, other = (Path(value).expanduser().resolve() for value in (learner.save_path, sampler.lora_path))
    if path != other:
        raise ValueError(f"--save_path is {path}, --lora_path {other}: give both the same folder")
    parent = next(place for place in [path, *path.parents] if place.exists())
    trial = parent / f".doctor-{os.getpid()}"
    try:
        trial.mkdir()
        (trial / "file").write_bytes(b"x")
        sync(trial / "file")
        os.rename(trial / "file", trial / "renamed")
        (trial / "link").symlink_to("renamed")
        os.replace(trial / "link", trial / "latest")
    except OSError as error:
        raise ValueError(f"--save_path {path}: {error}; choose a folder that you may write to") from error
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    free = shutil.disk_usage(parent).free
    found = "holds a run, which will go on" if (path / "run.json").exists() else "is free"
    yield f"--save_path {path} {found}; rename, fsync and links work, {free / 1e9:.0f} GB are left"


def port(learner, sampler, ranks: int) -> Iterator[str]:
    """The learner can listen where the samplers look for it."""
    if learner.port != sampler.port:
        raise ValueError(f"--port is {learner.port} and {sampler.port}: give both the same")
    check_free(learner.host, learner.port)
    yield f"port {learner.port} on {learner.host} is free"


def keys(learner, sampler, ranks: int) -> Iterator[str]:
    """Keys can be read, and both sides have the same."""
    if not learner.keys:
        yield "no keys, and none needed: the learner listens to this machine alone"
        return
    with zmq.Context() as context, context.socket(zmq.ROUTER) as one, context.socket(zmq.DEALER) as other:
        guard_learner(one, learner.keys, context).stop()
        guard_sampler(other, sampler.keys)
    yield f"keys in {learner.keys}"


def batch_sizes(learner, sampler, ranks: int) -> Iterator[str]:
    """The sizes of step, group and decoding batch go together."""
    config = read_ds_config(learner.ds_config, ranks)
    prompts = groups_per_step(config, ranks, learner.group_size, learner.ds_config)
    if sampler.batch_size % learner.group_size:
        raise ValueError(
            f"--batch_size {sampler.batch_size} is not a multiple of --group_size {learner.group_size}: change one of "
            "them"
        )
    decoded = f"{sampler.batch_size} completions at a time" if sampler.batch_size else "as many completions as fit"
    yield (
        f"a step takes {prompts} prompts x {learner.group_size} completions on {ranks} ranks, "
        f"{precision(config)}; the sampler decodes {decoded}"
    )


def model(learner, sampler, ranks: int) -> Iterator[str]:
    """Both sides name one model, it is here, and its weights fit; activations and caches come on top."""
    path = learner.model_path
    if path != sampler.model_path:
        raise ValueError(f"--model_path is {path} and {sampler.model_path}: give both the same")
    empty = empty_model(read_config(path), path)
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    dtype = precision(read_ds_config(learner.ds_config, ranks))
    needed, gpus = parameters * BYTES[dtype], torch.cuda.device_count()
    if gpus:
        what, available = "the fullest GPU has", min(torch.cuda.mem_get_info(i)[0] for i in range(gpus))
    else:
        what, available, needed = "the machine has", psutil.virtual_memory().available, needed * (ranks + 1)
    if needed > 0.9 * available:
        raise ValueError(
            f"{what} {available / 1e9:.1f} GB free, the weights of --model_path {path} in {dtype} alone take "
            f"{needed / 1e9:.1f}: a smaller model, fewer ranks, or ZeRO stage 3 in --ds_config"
        )
    store = AdapterStore(learner.save_path)
    references = References(store, learner.init_adapter, learner.ref_sync_steps, learner.ref_mixup_alpha)
    check_facts(learner, references.start())
    sampling_worker.check_facts(sampler)
    yield (
        f"--model_path {path}: {parameters / 1e6:.0f} million parameters, {needed / 1e9:.1f} GB in {dtype}; {what} "
        f"{available / 1e9:.1f} GB free"
    )


def dataset(learner, sampler, ranks: int) -> Iterator[str]:
    """The questions are here, held-out ones too if they are wanted."""
    examples = load_examples(sampler.dataset, sampler.split, sampler.question_column, sampler.answer_column)
    yield f"--dataset {sampler.dataset}: {len(examples)} questions"
    if learner.eval_steps:
        yield f"held out: {len(sampling_worker.load_held_out(sampler))} questions"


if __name__ == "__main__":
    main()
