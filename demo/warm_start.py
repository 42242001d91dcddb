"""Full fine-tuning on demonstrations, so that a model can write the two blocks before GRPO begins.

GRPO re-weights what a policy already does: one that never writes the blocks gets equal rewards and learns
nothing. One program serves the tiny model and a real one:

    python -m demo.warm_start --model_path TINY --data TRAIN --output_path OUT --demonstrations sloppy \\
        --system_prompt "Think, then answer." --steps 300 --batch_size 64 --learning_rate 5e-3
    python -m demo.warm_start --model_path ~/.cache/grpo/SmolLM2-135M-Instruct --data gsm8k/train.jsonl \\
        --output_path ~/.cache/grpo/SmolLM2-135M-warm --max_examples 300 --micro_batch_size 2

`clean`: the rationale of the row, without calculator annotations, then its gold.
`sloppy`: for demo/problems.py, spoilt on purpose and redrawn at each use, so that GRPO has something to
choose from: a broken format, the last step left out (more often in some kinds of problem, so that greedy
answers are neither all right nor all wrong), a wrong number.

Prompts are rendered by data.py, as for the sampler. The loss is the cross entropy of the completion's tokens,
end token included, averaged over the tokens of the batch. All weights are trained in fp32 and saved in the
dtype that they came in.

"""
import argparse
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import data
from demo.problems import LARGEST
from grpo.batch import Batch, collate
from grpo.logprobs import completion_logprobs

BROKEN_SHARE = 0.45
WRONG_NUMBER_SHARE = 0.08
LAST_STEP_LEFT_OUT_SHARE = {
    "gain_lose": 0.36,
    "containers_and_more": 0.42,
    "containers_and_less": 0.50,
    "two_together": 0.40,
    "gain_lose_gain": 0.66,
    "times_and_more": 0.60,
}
WELL_FORMED = "<think> {steps}</think><answer> {number}</answer>"
BROKEN = [                                                      # the answer can be read from each of them
    " {steps}</think><answer> {number}</answer>",                   # thinking never opened
    "<think> {steps}<answer> {number}</answer>",                    # thinking never closed
    " {steps}<answer> {number}</answer>",                           # no thinking block
    "<think> {steps}</think> {number}<answer> {number}</answer>",   # text between the blocks
]
BETAS = 0.9, 0.98
WARM_UP_SHARE = 0.05
MAX_GRADIENT_NORM = 1.0

Demonstrate = Callable[[dict, random.Random], str]


# ---------------------------------------------------------------- demonstrations

def clean(row: dict, rng: random.Random) -> str:
    """The row's own rationale and gold in the two blocks; `rng` is not used."""
    rationale, _, gold = row["answer"].rpartition("####")
    rationale = re.sub(r"<<[^<>]*>>", "", rationale).strip()
    return f"<think>{rationale}</think><answer>{gold.strip().replace(',', '')}</answer>"


def sloppy(row: dict, rng: random.Random) -> str:
    """A spoilt demonstration of a row of demo/problems.py, another one at each call."""
    steps = row["answer"].split("\n")[:-1]
    if rng.random() < LAST_STEP_LEFT_OUT_SHARE[row["kind"]]:
        steps.pop()
    expression, number = steps[-1].split(" = ")
    if rng.random() < WRONG_NUMBER_SHARE:
        number = str(rng.choice([near for near in range(int(number) - 3, int(number) + 4)
                                 if 0 <= near <= LARGEST and near != int(number)]))
    form = rng.choice(BROKEN) if rng.random() < BROKEN_SHARE else WELL_FORMED
    return form.format(steps="; ".join([*steps[:-1], f"{expression} = {number}"]), number=number)


DEMONSTRATIONS: dict[str, Demonstrate] = {"clean": clean, "sloppy": sloppy}


def read_rows(path: str, demonstrations: str, max_examples: int | None) -> list[dict]:
    """The first `max_examples` rows; ValueError where one lacks what `demonstrations` needs."""
    examples = data.load_examples(path)
    rows = [examples.rows[index] for index in range(min(len(examples), max_examples or len(examples)))]
    for row in rows:
        if "####" not in row["answer"]:
            raise ValueError(f"--data {path} has a row without '####' and a gold: {row['question'][:60]!r}")
        if demonstrations == "sloppy" and row.get("kind") not in LAST_STEP_LEFT_OUT_SHARE:
            raise ValueError(f"--demonstrations sloppy needs rows of demo/problems.py, but --data {path} has "
                             f"one of kind {row.get('kind')!r}: use --demonstrations clean")
    return rows


def draw_batches(rows: list[dict], batch_size: int, rng: random.Random) -> Iterator[list[dict]]:
    """Batches for ever: each row once an epoch, in another order each time."""
    waiting: list[dict] = []
    while True:
        while len(waiting) < batch_size:
            waiting += rng.sample(rows, len(rows))
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]


# ---------------------------------------------------------------- loss and training

def make_batch(tokenizer, pairs: list[tuple[str, str]], system_prompt: str) -> Batch:
    """(question, completion) pairs as a batch; the end token belongs to the completion."""
    prompts, completions = [], []
    for question, completion in pairs:
        opened = data.response_prefix(data.render_prompt(tokenizer, question, system_prompt))
        prompts.append(torch.tensor(data.encode_prompt(tokenizer, question, system_prompt)))
        ids = tokenizer.encode(completion.removeprefix(opened), add_special_tokens=False)
        completions.append(torch.tensor([*ids, tokenizer.eos_token_id]))
    return collate(prompts, completions)


def completion_loss(model, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the completion tokens of the batch, in nats."""
    return -completion_logprobs(model, batch, temperature=1.0)[0][batch.completion_mask].mean()


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear from 0 over the first steps, then half a cosine down to 0; `step` counts from 1."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    if step <= warm_up:
        return step / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def train(model, tokenizer, rows: list[dict], demonstrate: Demonstrate, *, steps: int, batch_size: int,
          learning_rate: float, seed: int, system_prompt: str, micro_batch_size: int) -> list[float]:
    """Train all weights in place; the loss of each step, whatever the micro-batches to rounding."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: learning_rate_factor(done + 1, steps))
    batches, losses, started = draw_batches(rows, batch_size, rng), [], time.perf_counter()
    model.train()
    for step in range(1, steps + 1):
        pairs = [(row["question"], demonstrate(row, rng)) for row in next(batches)]
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))  # little padding in a micro-batch
        micro_batches = [
            make_batch(tokenizer, pairs[start : start + micro_batch_size], system_prompt)
            for start in range(0, batch_size, micro_batch_size)
        ]
        tokens = sum(int(batch.completion_mask.sum()) for batch in micro_batches)
        loss = 0.0
        for batch in micro_batches:
            batch = batch.to(model.device)
            share = completion_loss(model, batch) * batch.completion_mask.sum() / tokens
            share.backward()
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss)
        if step == 1 or step == steps or step % max(1, steps // 10) == 0:
            seconds = time.perf_counter() - started
            print(f"step {step}/{steps}  loss {loss:.4f}  {seconds:.0f} s", flush=True)
    model.eval()
    return losses


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a causal LM on demonstrations of the two blocks.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model_path", required=True, help="folder of model and tokenizer")
    parser.add_argument("--data", required=True, help="questions and answers as GSM8K has them")
    parser.add_argument("--output_path", required=True, help="folder for the trained model and its tokenizer")
    parser.add_argument("--steps", type=int, default=37, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=8, help="demonstrations a step")
    parser.add_argument("--micro_batch_size", type=int, default=64, help="so many at a time, for memory")
    parser.add_argument("--learning_rate", type=float, default=5e-5, help="the peak of a cosine")
    parser.add_argument("--seed", type=int, default=0, help="order of the rows, draws of the demonstrations")
    parser.add_argument("--max_examples", type=int, help="use the first so many rows only; all if not given")
    parser.add_argument("--demonstrations", choices=sorted(DEMONSTRATIONS), default="clean",
                        help="clean: each row's own rationale; sloppy: spoilt, for the demo's problems")
    parser.add_argument("--system_prompt", default=data.SYSTEM_PROMPT, help="as given to the sampler")
    args = parser.parse_args(argv)
    try:
        rows = read_rows(args.data, args.demonstrations, args.max_examples)
    except ValueError as error:
        sys.exit(str(error))

    saved_dtype = AutoConfig.from_pretrained(args.model_path).dtype or torch.float32
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    train(model, tokenizer, rows, DEMONSTRATIONS[args.demonstrations], steps=args.steps,
          batch_size=args.batch_size, learning_rate=args.learning_rate, seed=args.seed,
          system_prompt=args.system_prompt, micro_batch_size=args.micro_batch_size)
    model.to(saved_dtype).save_pretrained(Path(args.output_path))
    tokenizer.save_pretrained(Path(args.output_path))
    print(f"{args.output_path}: {args.steps} steps on {len(rows)} rows, saved in {saved_dtype}")


if __name__ == "__main__":
    main()
