"""Full fine-tuning on demonstrations, so that a model can write the two blocks before GRPO begins.

GRPO re-weights what a policy already does; one that never writes the blocks gets equal rewards and learns nothing.
One program serves the tiny model and a real one:

    python -m demo.warm_start --model_path TINY --data TRAIN --output_path OUT --demonstrations sloppy \\
        --system_prompt "Think, then answer." --steps 300 --batch_size 64 --learning_rate 3e-3
    python -m demo.warm_start --model_path ~/.cache/grpo/SmolLM2-135M-Instruct --data gsm8k/train.jsonl \\
        --output_path ~/.cache/grpo/SmolLM2-135M-warm

`clean`: the rationale of the row, without calculator annotations, then its gold.
`sloppy`: for demo/problems.py, spoilt on purpose and redrawn at each use, so that GRPO has something to choose from:
a broken format, the last step left out (more often in some kinds of problem, so that the greedy answer starts between
0 and 1), a wrong number.

Prompts are rendered by data.py, as for the sampler. The loss is the cross entropy of the completion's tokens, end
token included, averaged over the tokens of the batch; everything is trained in fp32 and saved in the model's dtype.

Shapes: B sequences, P longest prompt (padded left), C longest completion (padded right), V vocabulary.
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
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import data
from demo.problems import LARGEST

BROKEN_SHARE = 0.45
WRONG_NUMBER_SHARE = 0.08
LAST_STEP_LEFT_OUT_SHARE = {
    "gain_lose": 0.36,
    "containers_and_more": 0.42,
    "containers_and_less": 0.58,
    "two_together": 0.40,
    "gain_lose_gain": 0.66,
    "times_and_more": 0.44,
}
WELL_FORMED = "<think> {steps}</think><answer> {number}</answer>"
BROKEN = [
    " {steps}</think><answer> {number}</answer>",         # thinking never opened
    "<think> {steps}<answer> {number}</answer>",          # thinking never closed
    "<think> {steps}</think> {number}",                   # answer without its tags
    " {steps}; <answer> {number}</answer>",               # no thinking block
]
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
    """The first `max_examples` rows, all by default, with what `demonstrations` needs; ValueError where it lacks."""
    examples = data.load_examples(path)
    rows = [examples.rows[index] for index in range(min(len(examples), max_examples or len(examples)))]
    for row in rows:
        if "####" not in row["answer"]:
            raise ValueError(f"--data {path} has a row without '####' before its gold: {row['question'][:60]!r}")
        if demonstrations == "sloppy" and row.get("kind") not in LAST_STEP_LEFT_OUT_SHARE:
            raise ValueError(f"--demonstrations sloppy needs rows of demo/problems.py, but --data {path} has one of "
                             f"kind {row.get('kind')!r}: use --demonstrations clean")
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

def make_batch(tokenizer, pairs: list[tuple[str, str]], system_prompt: str) -> dict[str, torch.Tensor]:
    """(question, completion) pairs as tensors; masks by position, so that pad and end may be one token."""
    prompts, completions = [], []
    for question, completion in pairs:
        opened = data.response_prefix(data.render_prompt(tokenizer, question, system_prompt))
        prompts.append(data.encode_prompt(tokenizer, question, system_prompt))
        completions.append([*tokenizer.encode(completion.removeprefix(opened), add_special_tokens=False),
                            tokenizer.eos_token_id])
    longest_prompt, longest_completion = max(map(len, prompts)), max(map(len, completions))
    shape = len(pairs), longest_prompt + longest_completion                     # B, P + C
    input_ids = torch.full(shape, tokenizer.eos_token_id)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = longest_prompt - len(prompt), longest_prompt + len(completion)
        input_ids[row, start:end] = torch.tensor(prompt + completion)
        attention_mask[row, start:end] = 1
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "completion_mask": attention_mask[:, longest_prompt:].bool(),           # B, C
    }


def completion_loss(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy over the completion tokens of the batch, in nats."""
    completion_mask = batch["completion_mask"]
    length = completion_mask.shape[1]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
                   position_ids=batch["position_ids"], logits_to_keep=length + 1, use_cache=False).logits
    targets = batch["input_ids"][:, -length:]
    return F.cross_entropy(logits[:, :-1][completion_mask].float(), targets[completion_mask])


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear from 0 over the first steps, then half a cosine down to 0; `step` counts from 1."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    if step <= warm_up:
        return step / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def train(model, tokenizer, rows: list[dict], demonstrate: Demonstrate, *, steps: int, batch_size: int,
          learning_rate: float, seed: int, system_prompt: str) -> list[float]:
    """Train all weights in place; the loss of each step."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: learning_rate_factor(done + 1, steps))
    batches, losses, started = draw_batches(rows, batch_size, rng), [], time.perf_counter()
    model.train()
    for step in range(1, steps + 1):
        pairs = [(row["question"], demonstrate(row, rng)) for row in next(batches)]
        batch = make_batch(tokenizer, pairs, system_prompt)
        loss = completion_loss(model, {name: tensor.to(model.device) for name, tensor in batch.items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step == 1 or step == steps or step % max(1, steps // 10) == 0:
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {time.perf_counter() - started:.0f} s", flush=True)
    model.eval()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a causal LM on demonstrations of the two blocks.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model_path", required=True, help="folder of model and tokenizer")
    parser.add_argument("--data", required=True, help="rows with question and GSM8K's form of answer, as for --dataset")
    parser.add_argument("--output_path", required=True, help="folder for the trained model and its tokenizer")
    parser.add_argument("--steps", type=int, default=37, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=8, help="demonstrations a step")
    parser.add_argument("--learning_rate", type=float, default=5e-5, help="AdamW's at its highest; then a cosine")
    parser.add_argument("--seed", type=int, default=0, help="order of the rows and draws of the demonstrations")
    parser.add_argument("--max_examples", type=int, help="use the first rows only (default: all)")
    parser.add_argument("--demonstrations", choices=sorted(DEMONSTRATIONS), default="clean",
                        help="clean: each row's own rationale; sloppy: spoilt, for the demo's problems")
    parser.add_argument("--system_prompt", default=data.SYSTEM_PROMPT, help="the sampler's flag of the same name")
    args = parser.parse_args()
    try:
        rows = read_rows(args.data, args.demonstrations, args.max_examples)
    except ValueError as error:
        sys.exit(str(error))

    saved_dtype = AutoConfig.from_pretrained(args.model_path).dtype or torch.float32
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    train(model, tokenizer, rows, DEMONSTRATIONS[args.demonstrations], steps=args.steps, batch_size=args.batch_size,
          learning_rate=args.learning_rate, seed=args.seed, system_prompt=args.system_prompt)
    model.to(saved_dtype).save_pretrained(Path(args.output_path))
    tokenizer.save_pretrained(Path(args.output_path))
    print(f"{args.output_path}: {len(rows)} rows, {args.steps} steps of {args.batch_size}, saved in {saved_dtype}")


if __name__ == "__main__":
    main()
