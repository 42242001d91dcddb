"""The whole loop against TRL's GRPOTrainer: completions per second and peak memory, with the same work on both sides.

    .venv/bin/python -m demo.smollm2                          # once, and the warm start of the README
    python3 -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.24.0 peft==0.21.2
    .venv/bin/python benchmarks/end_to_end.py --trl_python .venv-trl/bin/python --dataset gsm8k/train.jsonl

Same model, LoRA, questions, reward, group size, lengths, loss, beta and learning rate, one update a batch, all cores
for both. TRL runs in one process, we in two that share the cores. Times are medians over all steps but the first.
Memory is the peak of the sum over processes of proportional set sizes, looked at every second. The last line is JSON.

Do both learn the same? On the model of the demo, whose reward moves within minutes (./run.sh demo leaves it):

    .venv/bin/python benchmarks/end_to_end.py --trl_python .venv-trl/bin/python --model_path runs/demo/model \
        --dataset runs/demo/problems/train.jsonl --system_prompt "Think, then answer." --prompts 16 --micro_batch 64 \
        --max_new_tokens 40 --learning_rate 2e-3 --beta 0 --steps 40
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data import SYSTEM_PROMPT


def main() -> None:
    """Both, one after the other."""
    args = parse_args()
    if args.only == "trl_itself":
        return run_trl(args)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, run in {"trl": start_trl, "ours": start_ours}.items():
            if args.only in (None, name):
                results[name] = watch(*run(args, Path(folder)), Path(folder), args)
                print(name, json.dumps(results[name]), flush=True)
    if len(results) == 2:
        ours, trl = results["ours"], results["trl"]
        results["ratio_vs_trl"] = ours["completions_per_second"] / trl["completions_per_second"]
        results["memory_ratio"] = ours["peak"] / trl["peak"]
    print(json.dumps(results | {"settings": {k: v for k, v in vars(args).items() if "python" not in k}}))


def start_trl(args, folder: Path):
    """This script under --trl_python."""
    command = [args.trl_python, __file__, *sys.argv[1:], "--only", "trl_itself", "--output", folder / "trl.jsonl"]
    return [start(command, folder / "trl.log")], folder / "trl.jsonl"


def start_ours(args, folder: Path):
    """Sampler and learner, each with a share of the cores."""
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.prompts * args.group_size // args.micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": args.learning_rate, "weight_decay": 0.0, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    }
    (folder / "ds.json").write_text(json.dumps(config))
    run = folder / "run"
    common = ["--model_path", args.model_path, "--port", 5954]
    learner = [ROOT / "training_worker.py", *common, "--save_path", run, "--ds_config", folder / "ds.json"]
    learner += ["--max_steps", args.steps, "--group_size", args.group_size, "--beta", args.beta, "--save_steps", 1000]
    learner += ["--max_staleness", args.max_staleness, "--seed", args.seed, *args.learner_flags.split()]
    sampler = [ROOT / "sampling_worker.py", *common, "--lora_path", run, "--dataset", args.dataset, "--device", "cpu"]
    sampler += ["--batch_size", args.prompts * args.group_size, "--max_new_tokens", args.max_new_tokens]
    sampler += ["--old_logprobs", "sampled", *args.sampler_flags.split()]  # exact in fp32
    sampler += ["--system_prompt", args.system_prompt]
    processes = [
        start([sys.executable, "-u", *command], folder / name, threads)
        for name, command, threads in (
            ("learner.log", learner, args.threads),
            ("sampler.log", sampler, args.sampler_threads),
        )
    ]
    return processes, run / "metrics.jsonl"


def start(command: list, log: Path, threads: int | None = None) -> subprocess.Popen:
    """A process whose output goes to `log`."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if threads:
        environment |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}  # none spins on a shared core
    with open(log, "w") as file:
        return subprocess.Popen([str(part) for part in command], stdout=file, stderr=subprocess.STDOUT, env=environment)


def watch(processes: list, records: Path, folder: Path, args) -> dict:
    """Wait for the processes and read what they recorded."""
    import psutil

    peak, done = 0, threading.Event()

    def measure():
        nonlocal peak
        while not done.wait(1.0):  # reading the page tables of gigabytes takes a core a tenth of a second
            total = 0
            for process in processes:
                try:
                    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                    total += sum(member.memory_full_info().pss for member in family)
                except psutil.Error:
                    continue
            peak = max(peak, total)

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        codes = [process.wait(args.limit) for process in processes]
    finally:
        done.set()
        thread.join()
        for process in processes:
            process.kill()
    if any(codes):
        logs = "".join(log.read_text(errors="replace")[-2000:] for log in folder.glob("*.log"))
        sys.exit(f"exit codes {codes}:\n{logs}")
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    each = args.prompts * args.group_size
    times = [row["seconds"] for row in rows]
    step = statistics.median(after - before for before, after in zip(times[:-1], times[1:], strict=True))
    return {
        "completions_per_second": each / step,
        "seconds_per_step": step,
        "peak": peak,
        "reward": [round(row["reward"], 3) for row in rows],
        "mean_length": [round(row["completions/mean_length"], 1) for row in rows],
    }


def run_trl(args) -> None:
    """GRPOTrainer, under its own Python; a JSON line a step in --output."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from utils import reward_function

    rows = [json.loads(line) for line in Path(args.dataset).read_text().splitlines()]
    prompts = [
        [{"role": "system", "content": args.system_prompt}, {"role": "user", "content": row["question"]}]
        for row in rows
    ]
    golds = [row["answer"].rpartition("####")[2].strip() for row in rows]

    def reward(completions, gold, **_):
        return [reward_function(one[0]["content"], answer)["reward"] for one, answer in zip(completions, gold)]

    class Record(TrainerCallback):
        def on_log(self, trainer_args, state, control, logs=None, **_):
            if "reward" in logs:
                keep = {name: logs[name] for name in ("reward", "completions/mean_length")}
                with open(args.output, "a") as file:
                    file.write(json.dumps({"step": state.global_step, "seconds": time.monotonic()} | keep) + "\n")

    accumulation = args.prompts * args.group_size // args.micro_batch
    config = GRPOConfig(
        output_dir=str(Path(args.output).parent / "trl"),
        num_generations=args.group_size,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=accumulation,
        max_completion_length=args.max_new_tokens,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        beta=args.beta,
        loss_type="grpo",
        seed=args.seed,
        temperature=1.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=args.trl_gradient_checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(args.model_path, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts, "gold": golds}),
        processing_class=AutoTokenizer.from_pretrained(args.model_path),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[Record()],
    )
    trainer.train()


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model_path", default=str(Path("~/.cache/grpo/SmolLM2-135M-warm").expanduser()), help="the model")
    add("--dataset", default="gsm8k/train.jsonl", help="GSM8K's training file")
    add("--trl_python", default=".venv-trl/bin/python", help="a Python that has TRL")
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--prompts", type=int, default=4, help="prompts a step")
    add("--group_size", type=int, default=8, help="completions of each")
    add("--micro_batch", type=int, default=8, help="completions in one forward and backward pass")
    add("--max_new_tokens", type=int, default=128, help="limit of a completion")
    add("--learning_rate", type=float, default=3e-4, help="of AdamW")
    add("--seed", type=int, default=0, help="of both sides")
    add("--system_prompt", default=SYSTEM_PROMPT, help="system turn of the prompts")
    add("--beta", type=float, default=0.04, help="weight of the KL term")
    add("--max_staleness", type=int, default=1, help="ours; TRL's batches are always on-policy")
    add("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of our learner")
    add("--sampler_threads", type=int, default=os.cpu_count(), help="of our sampler, which also uses what is left")
    add("--learner_flags", default="", help="more flags of ours")
    add("--sampler_flags", default="", help="more flags of ours")
    add("--trl_gradient_checkpointing", action="store_true", help="TRL's default; slower, with less memory")
    add("--limit", type=float, default=7200, help="seconds after which a run has failed")
    add("--only", choices=("trl", "ours", "trl_itself"), help="one side")
    add("--output", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
