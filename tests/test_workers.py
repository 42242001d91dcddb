"""The two programs as users start them: real sockets, real DeepSpeed, real adapters."""

import json
import math
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from datasets import load_dataset
from peft import PeftModel
from processes import LIMIT, Worker, by_run_sh, learner, sampler
from safetensors.torch import load_file
from tiny import ds_config, free_port, save_questions, save_tiny, tiny_model

from grpo.adapters import AdapterStore
from grpo.held_out import read_evaluations
from grpo.journal import read_history
from grpo.keys import make_keys
from grpo.metrics import read_metrics
from grpo.replay import Replay


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A tiny model folder and a dataset."""
    folder = tmp_path_factory.mktemp("material")
    return save_tiny(folder / "model"), save_questions(folder / "questions.jsonl")


@pytest.fixture
def workers():
    """Starts workers and ends them after the test."""
    started = []

    def start(kind, *arguments, **settings):
        started.append(kind(*arguments, **settings))
        return started[-1]

    yield start
    for worker in started:
        worker.end()

BF16_APPROX_KL = 2e-3  # of a tiny model at its first step; measured 1e-5 to 3e-4


class Run:
    """One run's folder and flags."""

    def __init__(self, folder, material, name="run", *, ranks=1, steps=3, staleness=0, learner_flags=(), **config):
        self.model, self.questions = material
        self.path, self.folder, self.ranks = folder / name, folder, ranks
        self.port = free_port()
        self.config = ds_config(folder / f"{name}.json", **config)
        self.learner_flags = [
            *("--model_path", self.model, "--save_path", self.path, "--ds_config", self.config, "--port", self.port),
            *("--max_steps", steps, "--max_staleness", staleness, "--lora_rank", 4, "--lora_alpha", 8, *learner_flags),
        ]
        self.sampler_flags = [
            *("--model_path", self.model, "--lora_path", self.path, "--dataset", self.questions, "--port", self.port),
            *("--max_new_tokens", 12),
        ]

    def start_learner(self, workers, *more):
        log = self.folder / f"{self.path.name}-trainer.log"
        return workers(learner, log, *map(str, [*self.learner_flags, *more]), ranks=self.ranks)

    def start_sampler(self, workers, *more, name="sampler", **settings):
        log = self.folder / f"{self.path.name}-{name}.log"
        return workers(sampler, log, *map(str, [*self.sampler_flags, *more]), **settings)

    def to_the_end(self, workers):
        both = self.start_learner(workers), self.start_sampler(workers)
        for worker in both:
            assert worker.wait(LIMIT) == 0, worker.output()[-4000:]
        return both


@pytest.mark.slow
def test_two_ranks_and_a_sampler_train_and_both_exit_cleanly(tmp_path, material, workers):
    run = Run(tmp_path, material, ranks=2, steps=3, staleness=1, learner_flags=["--save_steps", 2])
    trainer, actor = run.to_the_end(workers)

    records = read_metrics(run.path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert 0 <= record["reward"] <= 1 and record["rewards/length/mean"] > 0
        assert record["grad_norm"] > 0 and record["staleness/max"] <= 1
        assert record["completions/max_length"] <= 12

    store = AdapterStore(run.path)
    assert store.versions() == [1, 2, 3]  # max_staleness + 2 are the newest, 2 and 3 belong to checkpoints
    assert (run.path / "latest").resolve() == store.folder(3)
    assert store.read_run()["run_id"] == store.read(3)[0].run_id
    assert [p.name for p in sorted((run.path / "checkpoints").glob("step*"))] == ["step00000002", "step00000003"]

    first, last = (store.read(version)[2] for version in (1, 3))
    moved = [name for name in last if not torch.equal(first[name], last[name])]
    assert any("lora_B" in name for name in moved) and any("lora_A" in name for name in moved)
    assert "adapter version 1" in actor.output() and "--max_steps 3 reached" in actor.output()
    assert "run ended after 3 steps" in trainer.output()


@pytest.mark.slow
def test_strictly_on_policy_runs_are_bit_identical_in_either_start_order(tmp_path, material, workers):
    finals = []
    for name in ("trainer-first", "sampler-first"):
        run = Run(tmp_path, material, name, steps=3, staleness=0)
        if name == "sampler-first":
            actor = run.start_sampler(workers)
            actor.wait_for("prompts, adapters from", LIMIT)
            trainer = run.start_learner(workers)
        else:
            trainer = run.start_learner(workers)
            trainer.wait_for("listening at", LIMIT)
            actor = run.start_sampler(workers)
        assert trainer.wait(LIMIT) == 0 and actor.wait(LIMIT) == 0
        finals.append(load_file(run.path / "latest" / "adapter_model.safetensors"))
        assert all(record["staleness/max"] == 0 for record in read_metrics(run.path / "metrics.jsonl"))
    assert finals[0].keys() == finals[1].keys()
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


@pytest.mark.slow
def test_the_first_step_is_on_policy_and_the_adapter_loads_in_a_fresh_model(tmp_path, material, workers):
    run = Run(tmp_path, material, steps=2, learner_flags=["--log_completions", 2])
    trainer, _ = run.to_the_end(workers)
    first = read_metrics(run.path / "metrics.jsonl")[0]
    assert abs(first["approx_kl"]) < 1e-9 and first["kl"] < 1e-9  # ratio 1, and the new adapter changes nothing
    assert abs(first["loss"]) < 1e-5 and first["grad_norm"] > 0  # the mean of the advantages is 0, the gradient is not
    assert first["sampling/sampling_logp_difference/max"] < 1e-4
    manifest, _, state = AdapterStore(run.path).read(2)
    fresh = PeftModel.from_pretrained(tiny_model(), str(run.path / "latest"))
    loaded = dict(fresh.named_parameters())
    for name, tensor in state.items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], tensor)
    assert manifest.version == 2
    card = (run.path / "latest" / "README.md").read_text()
    assert f"base_model: {run.model}" in card and "(grpo_loss)" in card and str(run.questions) in card
    assert "| 1 to 1 |" in card and '"max_steps": 2' in card and "FOLDER" in card

    written = [json.loads(line) for line in (run.path / "completions.jsonl").read_text().split("\n") if line]
    assert len(written) == 2 * 8 and trainer.output().count("--- best: reward") == 1
    by_ticket = {record["ticket_id"]: 0.0 for record in written}
    for record in written:
        by_ticket[record["ticket_id"]] += record["advantage"]
    assert all(abs(total) < 1e-4 for total in by_ticket.values()) and len(by_ticket) == 4
    assert load_dataset("json", data_files=str(run.path / "completions.jsonl"), split="train").num_rows == 16


@pytest.mark.slow
def test_evaluation_during_a_run_is_that_of_the_command_on_the_same_version(tmp_path, material, workers):
    held_out = save_questions(tmp_path / "held_out.jsonl", rows=7)
    evaluating = ["--eval_steps", 2, "--eval_limit", 50]
    run = Run(tmp_path, material, steps=3, staleness=1, lr=0.05, learner_flags=evaluating)
    run.sampler_flags += ["--eval_dataset", held_out]
    trainer, _ = run.to_the_end(workers)
    found = read_evaluations(run.path)
    assert [record["version"] for record in found] == [0, 2, 3] and all(one["questions"] == 7 for one in found)
    assert trainer.output().count("evaluation of version") == 3
    texts = {}
    for version in (0, 2, 3):
        lines = (run.path / "evaluations" / f"v{version:08d}.jsonl").read_text().split("\n")
        texts[version] = [json.loads(line)["response"] for line in lines if line]
    assert texts[0] != texts[3]
    for one in found[-2:]:  # each card has what its own version answered, which came after it was published
        card = (AdapterStore(run.path).folder(one["version"]) / "README.md").read_text()
        assert f"This version answers {one['accuracy']:.1%} of 7 questions right." in card
    assert "| 3 to 3 |" in card

    evaluation = workers(
        sampler,
        tmp_path / "evaluation.log",
        *("--evaluate", "--model_path", run.model, "--lora_path", AdapterStore(run.path).folder(3)),
        *("--dataset", held_out, "--max_new_tokens", 12, "--dtype", "float32", "--evaluate_output", tmp_path / "e"),
        script="sampling_worker.py",
    )
    assert evaluation.wait(LIMIT) == 0, evaluation.output()[-2000:]
    lines = (tmp_path / "e.jsonl").read_text().split("\n")
    assert [json.loads(line)["response"] for line in lines if line] == texts[3]


@pytest.mark.slow
def test_prompts_that_are_too_long_are_left_out_counted_and_named(tmp_path, material, workers):
    lines = [{"question": "a " * (30 if n in (3, 8) else 3), "answer": f"#### {n}"} for n in range(12)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Run(tmp_path, (material[0], questions), steps=3, accumulation=4)
    run.sampler_flags += ["--max_prompt_length", 10, "--system_prompt", "b"]
    trainer, _ = run.to_the_end(workers)
    named = re.findall(r"dropped ticket \d+, prompt (\d+): prompt longer than --max_prompt_length", trainer.output())
    last = read_metrics(run.path / "metrics.jsonl")[-1]
    assert set(named) == {"3", "8"} and last["groups/dropped/prompt longer than --max_prompt_length"] == len(named)
    assert len(read_history(run.path).dropped) == len(named)


@pytest.mark.slow
def test_a_taken_port_ends_all_ranks_with_one_sentence(tmp_path, material, workers):
    run = Run(tmp_path, material, ranks=2)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", run.port))
        holder.listen()
        trainer = run.start_learner(workers)
        assert trainer.wait(LIMIT) != 0
    assert trainer.output().count("choose another --port") == 1
    assert "Traceback" not in trainer.output()


@pytest.mark.slow
def test_a_sampler_on_another_folder_is_refused_and_the_run_goes_on(tmp_path, material, workers):
    run = Run(tmp_path, material, steps=1)
    trainer = run.start_learner(workers)
    trainer.wait_for("listening at", LIMIT)
    stray = run.start_sampler(workers, "--lora_path", tmp_path / "elsewhere", name="stray")
    odd = run.start_sampler(workers, "--batch_size", 6, name="odd")
    assert stray.wait(LIMIT) != 0 and odd.wait(LIMIT) != 0
    run_id = AdapterStore(run.path).read_run()["run_id"]
    assert f"holds no run.json, the learner publishes run {run_id}" in stray.output()
    assert "--batch_size 6 is not a multiple of the learner's --group_size 4" in odd.output()
    actor = run.start_sampler(workers)
    assert trainer.wait(LIMIT) == 0 and actor.wait(LIMIT) == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["terminal", "run.sh"])
def test_a_signal_ends_both_sides_with_the_work_saved(tmp_path, material, workers, way):
    run = Run(tmp_path, material, ranks=2, steps=0, staleness=1, learner_flags=["--save_steps", 1000])
    if way == "terminal":
        trainer = run.start_learner(workers)
    else:
        trainer = workers(by_run_sh, tmp_path / "terminal.log", "trainer", *map(str, run.learner_flags))
    actor = run.start_sampler(workers)
    trainer.wait_for("step 2", LIMIT)
    if way == "terminal":
        trainer.signal(signal.SIGINT)  # Ctrl-C: the whole process group gets it
    else:
        trainer.process.terminate()  # a batch system's stop, to the one process that it knows
    trainer.wait(LIMIT)
    assert "run ended after" in trainer.output(), trainer.output()[-4000:]
    assert actor.wait(LIMIT) == 0 and "stopped by SIG" in actor.output()
    if way != "terminal":  # run.sh wrote to a terminal, with a live line, and to a file, without
        assert re.search(r"\rstep \d+ reward [^\n]* tokens/s", trainer.output())
        kept = (run.path / "logs" / "trainer.log").read_bytes().decode()
        assert "run ended after" in kept  # run.sh has waited for the filter
        assert "\r" not in kept and re.search(r"\nstep 2 +\d", kept) and "\nlearner: run " in kept
    records = read_metrics(run.path / "metrics.jsonl")
    assert AdapterStore(run.path).versions()[-1] == records[-1]["step"]
    assert (run.path / "checkpoints" / f"step{records[-1]['step']:08d}").is_dir()


@pytest.mark.slow
def test_a_stopped_sampler_gives_its_tickets_back(tmp_path, material, workers):
    run = Run(tmp_path, material, steps=0, staleness=0)
    trainer, actor = run.start_learner(workers), run.start_sampler(workers)
    trainer.wait_for("step 1", LIMIT)
    actor.signal(signal.SIGTERM)
    assert actor.wait(20) == 0
    trainer.wait_for("left (stopped by SIGTERM)", 20)
    step = read_metrics(run.path / "metrics.jsonl")[-1]["step"]
    run.start_sampler(workers, name="next")
    trainer.wait_for(f"step {step + 2}", LIMIT)


@pytest.mark.slow
def test_bfloat16_trains_and_its_first_step_is_on_policy_within_the_stated_bound(tmp_path, material, workers):
    run = Run(tmp_path, material, steps=3, ranks=2, bf16={"enabled": True})
    run.to_the_end(workers)
    first, *_ = records = read_metrics(run.path / "metrics.jsonl")
    assert first["approx_kl"] < BF16_APPROX_KL and first["kl"] < 1e-3
    assert 0 < first["sampling/sampling_logp_difference/mean"] < 0.2
    assert all(math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"]) for record in records)
    before, after = (AdapterStore(run.path).read(version)[2] for version in (2, 3))
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    assert any(not torch.equal(before[key], after[key]) for key in after)


@pytest.mark.slow
def test_process_rewards_and_several_iterations_train_end_to_end(tmp_path, material, workers):
    flags = ["--num_iterations", 3, "--beta", 0, "--max_tokens_per_micro_batch", 60, "--resample_zero_groups", 2]
    run = Run(tmp_path, material, steps=2, lr=0.05, learner_flags=flags)
    more = ["--batch_size", 4, "--prompts_at_a_time", 3]  # completions of three prompts share the places of one
    trainer, actor = run.start_learner(workers), run.start_sampler(workers, *more, REWARD="steps")
    assert trainer.wait(LIMIT) == 0 and actor.wait(LIMIT) == 0, trainer.output()[-3000:] + actor.output()[-3000:]
    records = read_metrics(run.path / "metrics.jsonl")
    assert all(record["learner/micro_batches"] > 1 and 0 <= record["learner/padding_share"] < 1 for record in records)
    assert all(record["grad_norm"] > 0 and "kl" not in record for record in records)
    assert records[0]["clip_ratio/region_mean"] > 0 and records[0]["approx_kl"] > 1e-4  # off-policy after the first


@pytest.mark.slow
def test_a_bug_in_the_reward_stops_the_sampler_and_another_takes_over(tmp_path, material, workers):
    run = Run(tmp_path, material, steps=1)
    trainer = run.start_learner(workers)
    faulty = run.start_sampler(workers, name="faulty", REWARD="broken")
    assert faulty.wait(LIMIT) != 0
    for words in ("a bug in my reward", "prompt ", "response '", "Traceback", "raise KeyError"):
        assert words in faulty.output()
    assert "sampling_worker: reward_function failed, for 8 of the last 8 prompts" in faulty.output()
    trainer.wait_for("of its tickets go to others", 60)
    actor = run.start_sampler(workers)
    assert trainer.wait(LIMIT) == 0 and actor.wait(LIMIT) == 0


SAMPLER_FAILURES = {
    "no model folder": (["--model_path", "no/such/folder"], ["--model_path no/such/folder", "hub"]),
    "no dataset": (["--dataset", "no/such/file.jsonl"], ["no/such/file.jsonl"]),
    "no GPU": (["--device", "cuda:7"], ["--device cuda:7", "--device cpu"]),
    "a device that is none": (["--device", "gpu"], ["--device gpu"]),
    "a port out of range": (["--port", "99999"], ["--port", "99999"]),
    "an engine that evaluation has not": (["--evaluate", "--engine", "vllm"], ["--evaluate", "--engine vllm"]),
    "a flag of evaluation": (["--temperature", "0.7"], ["--temperature is for --evaluate"]),
    "another GPU for vLLM": (["--engine", "vllm", "--device", "cuda:1"], ["CUDA_VISIBLE_DEVICES=1"]),
    "nobody there": (["--startup_timeout", "1"], ["--startup_timeout", "tcp://127.0.0.1"]),
}
LEARNER_FAILURES = {
    "no model folder": (["--model_path", "no/such/folder"], ["--model_path no/such/folder", "hub"]),
    "no adapter to start from": (["--init_adapter", "no/such"], ["--init_adapter", "no/such"]),
    "a host of nobody": (["--host", "no.such.host", "--keys", "keys"], ["--host no.such.host"]),
    "no configuration": (["--ds_config", "no.json"], ["--ds_config no.json"]),
    "targets that do not exist": (["--lora_targets", "nothing_proj"], ["--lora_targets nothing_proj"]),
    "publishing too rarely": (["--publish_steps", "4"], ["--publish_steps 4", "--max_staleness 0"]),
    "an impossible temperature": (["--temperature", "0"], ["--temperature", "above 0"]),
    "a group size that does not divide the step": (["--group_size", "3"], ["8 sequences", "--group_size 3"]),
    "nobody there": (["--startup_timeout", "1"], ["--startup_timeout", "samplers connected: none"]),
    "a folder that cannot be written to": (["--save_path", "/proc/run"], ["/proc/run"]),
    "other machines without keys": (["--host", "0.0.0.0"], ["--host 0.0.0.0", "./run.sh keys DIR"]),
    "a replay that evaluates": (["--replay", "x", "--eval_steps", "2"], ["--replay", "--eval_steps"]),
    "more questions than tickets": (["--eval_limit", "2000000"], ["--eval_limit is 2000000", "1048576"]),
    "no journal to replay": (["--replay", "no/such/run"], ["--replay no/such/run"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("side", ["sampler", "learner"])
def test_what_a_newcomer_gets_wrong_is_one_sentence(tmp_path, material, workers, side):
    started = {}
    for i, (name, (flags, words)) in enumerate((SAMPLER_FAILURES if side == "sampler" else LEARNER_FAILURES).items()):
        run = Run(tmp_path, material, f"run{i}")
        if side == "sampler":
            started[name] = run.start_sampler(workers, *flags, script="sampling_worker.py"), words
        else:
            started[name] = run.start_learner(workers, *flags), words
    for name, (worker, words) in started.items():
        assert worker.wait(LIMIT) not in (0, None), name
        assert all(word in worker.output() for word in words), f"{name}:\n{worker.output()[-2000:]}"
        assert "Traceback" not in worker.output(), name


@pytest.mark.slow
def test_a_run_goes_on_by_the_same_command_or_is_refused(tmp_path, material, workers):
    run = Run(tmp_path, material, ranks=2, steps=3, learner_flags=["--save_steps", 2, "--log_completions", 10])
    run.to_the_end(workers)
    first = read_metrics(run.path / "metrics.jsonl")
    run.learner_flags += ["--max_steps", 6]
    run.ranks = 1
    ds_config(run.config, accumulation=4)  # a step of as many sequences by one rank
    for flags, words in (
        (["--resume", "never"], "leave --resume never out"),
        (["--lora_rank", 8], "has lora [4, 8.0, 'all-linear'], this start has [8, 8.0"),
        ([], "was written by 2 ranks under ZeRO stage 2"),
    ):
        refused = run.start_learner(workers, *flags)
        assert refused.wait(LIMIT) != 0 and words in refused.output()
    run.ranks = 2
    ds_config(run.config, bf16={"enabled": True})
    refused = run.start_learner(workers)
    assert refused.wait(LIMIT) != 0 and "has precision 'float32', this start has 'bfloat16'" in refused.output()
    ds_config(run.config, lr=5e-3)
    trainer, _ = run.to_the_end(workers)
    assert "from the checkpoint of step 3" in trainer.output()
    assert "learner: --max_steps 3 -> 6, learning rate 0.01 -> 0.005 from step 4 on" in trainer.output()
    records = read_metrics(run.path / "metrics.jsonl")
    assert [record["learning_rate"] for record in records] == [1e-2] * 3 + [5e-3] * 3
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6] and records[:3] == first
    assert [record["seconds"] for record in records] == sorted(record["seconds"] for record in records)
    history = read_history(run.path)
    tickets = [ticket for step in range(1, 7) for ticket in history.steps[step]]
    assert tickets == list(range(24)) and not history.dropped  # 2 x 2 x 4 sequences a step
    lines = (run.path / "completions.jsonl").read_text().split("\n")
    assert [json.loads(line)["step"] for line in lines if line] == [n for n in range(1, 7) for _ in range(16)]
    assert len(list((run.path / "journal").iterdir())) == 0
    (run.path / "run.json").unlink()
    refused = run.start_learner(workers)
    assert refused.wait(LIMIT) != 0 and "choose another --save_path" in refused.output()


@pytest.mark.slow
def test_a_kept_journal_is_replayed_to_the_same_adapters(tmp_path, material, workers):
    run = Run(tmp_path, material, steps=4, staleness=1, learner_flags=["--keep_journal"])
    run.to_the_end(workers)
    replays = {}
    for name, flags in {"same": [], "other": ["--clip_eps", "0.0001", "--beta", "0.5"]}.items():
        replay = Run(tmp_path, material, name, steps=0)
        replays[name] = replay, replay.start_learner(workers, "--replay", run.path, *flags)
    for _, trainer in replays.values():
        assert trainer.wait(LIMIT) == 0, trainer.output()
    folders = [run.path, *(replay.path for replay, _ in replays.values())]
    original, same, other = (AdapterStore(folder).read(4)[2] for folder in folders)
    assert all(torch.equal(original[name], same[name]) for name in original)
    assert not all(torch.equal(original[name], other[name]) for name in original)
    assert "replaying 4 steps" in replays["same"][1].output()


    facts = AdapterStore(run.path).read_run() | {"save_path": "elsewhere"}
    with pytest.raises(ValueError, match="is --save_path too"):
        Replay(run.path, facts | {"save_path": str(run.path)}, needs_reference=True, steps_done=0)
    with pytest.raises(ValueError, match="its group_size is 4, this start has 8; change --group_size"):
        Replay(run.path, facts | {"group_size": 8}, needs_reference=True, steps_done=0)
    (run.path / "journal" / "t00000005.group").unlink()
    with pytest.raises(ValueError, match="lacks groups of step 3; only a run with --keep_journal"):
        Replay(run.path, facts, needs_reference=True, steps_done=0)
    assert Replay(run.path, facts, needs_reference=True, steps_done=3).last_step == 4


@pytest.fixture
def two_machines():
    """Two network namespaces with a cable between them: 10.213.7.1 and 10.213.7.2."""
    names = [f"grpo{free_port()}", f"grpo{free_port()}"]
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add {names[0]}a type veth peer name {names[1]}b"]
    commands += [f"ip link set {names[0]}a netns {names[0]}", f"ip link set {names[1]}b netns {names[1]}"]
    for name, link, host in ((names[0], f"{names[0]}a", 1), (names[1], f"{names[1]}b", 2)):
        commands += [f"ip -n {name} addr add 10.213.7.{host}/24 dev {link}"]
        commands += [f"ip -n {name} link set {device} up" for device in (link, "lo")]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_a_sampler_on_another_machine_with_keys_trains_and_one_without_gets_nothing(
    tmp_path, material, workers, two_machines
):
    make_keys(tmp_path / "keys")
    run = Run(tmp_path, material, steps=2, learner_flags=["--host", "10.213.7.1", "--keys", tmp_path / "keys"])
    here, there = (["ip", "netns", "exec", name, sys.executable, "-u"] for name in two_machines)
    trainer = workers(lambda: Worker([*here, "training_worker.py", *run.learner_flags], tmp_path / "trainer.log"))
    flags = ["tests/sampler_with_reward.py", "--device", "cpu", "--host", "10.213.7.1", *run.sampler_flags]
    trainer.wait_for("listening at", LIMIT)
    stranger = workers(lambda: Worker([*there, *flags, "--startup_timeout", 3], tmp_path / "stranger.log"))
    assert stranger.wait(LIMIT) != 0 and "do the --keys of both sides fit?" in stranger.output()
    friend = workers(lambda: Worker([*there, *flags, "--keys", tmp_path / "keys"], tmp_path / "friend.log"))
    assert trainer.wait(LIMIT) == 0, trainer.output()[-3000:]
    assert friend.wait(LIMIT) == 0, friend.output()[-3000:]
    assert "refused a connection without the right key" in trainer.output()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 500 kB, and a way to make it larger."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options):
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True, capture_output=True)

    try:
        mount("size=500k")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    yield place, lambda: mount("remount,size=50m")
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_learner_with_a_sentence_and_more_room_lets_it_go_on(
    tmp_path, material, workers, small_disk
):
    place, enlarge = small_disk
    run = Run(tmp_path, material, steps=40, staleness=1, learner_flags=["--keep_journal", "--save_steps", 5])
    run.path = place / "run"
    for flags in (run.learner_flags, run.sampler_flags):
        flags[flags.index(tmp_path / "run")] = run.path
    trainer, actor = run.start_learner(workers), run.start_sampler(workers)
    assert trainer.wait(LIMIT) != 0 and "No space left" in trainer.output() and "Traceback" not in trainer.output()
    store = AdapterStore(run.path)
    newest = store.versions()[-1]
    assert 0 < newest < 40 and store.read(newest) and (run.path / "latest").resolve() == store.folder(newest)
    enlarge()
    again = run.start_learner(workers)
    assert again.wait(LIMIT) == 0, again.output()[-3000:]
    assert actor.wait(LIMIT) == 0
    history = read_history(run.path)
    trained = [ticket for step in range(1, 41) for ticket in history.steps[step]]
    assert sorted([*trained, *history.dropped]) == list(range(len(trained) + len(history.dropped)))


@pytest.mark.slow
def test_ranks_outwait_a_sampler_that_is_later_than_the_limit_of_a_collective(tmp_path, material, workers):
    run = Run(tmp_path, material, ranks=2, steps=1, learner_flags=["--timeout", 12])
    trainer = run.start_learner(workers)
    trainer.wait_for("waiting for groups for 1", LIMIT)  # rank 1 has waited longer than a collective may take
    time.sleep(5)
    actor = run.start_sampler(workers)
    assert trainer.wait(LIMIT) == 0, trainer.output()[-3000:]
    assert actor.wait(LIMIT) == 0


@pytest.mark.slow
def test_a_side_that_was_stopped_for_longer_than_its_own_timeout_resumes(tmp_path, material, workers):
    runs = {}
    for name in ("trainer", "sampler"):
        run = Run(tmp_path, material, name, steps=0, staleness=1)
        limits = {"trainer": [], "sampler": []} | {name: ["--timeout", 7]}  # of the side that sleeps
        trainer = run.start_learner(workers, *limits["trainer"])
        actor = run.start_sampler(workers, *limits["sampler"])
        runs[name] = run, {"trainer": trainer, "sampler": actor}
    for name, (_, sides) in runs.items():
        sides["trainer"].wait_for("step 2", LIMIT)
        sides[name].signal(signal.SIGSTOP)
    time.sleep(12)
    for name, (run, sides) in runs.items():
        before = read_metrics(run.path / "metrics.jsonl")[-1]["step"]
        sides[name].signal(signal.SIGCONT)
        sides["trainer"].wait_for(f"step {before + 5} ", LIMIT)
        assert sides["sampler"].process.poll() is None
