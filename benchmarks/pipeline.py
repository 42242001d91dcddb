"""A model of the two sides of the pipeline: which one starves, and how many samplers a learner wants. Computed only.

    .venv/bin/python benchmarks/pipeline.py
    .venv/bin/python benchmarks/pipeline.py --parameters 7.6e9 --layers 28 --kv_heads 4 --head_size 128

From the numbers of the model and the GPU: a decoding step reads the weights and the caches once (bandwidth), training
multiplies (arithmetic). `--efficiency` is the share of either limit that is reached. Nothing here is measured; put in
the stage times of your own metrics.jsonl with --generation_seconds and --train_seconds to have it for your run.
"""

import argparse
import math


def main() -> None:
    """One line a stage, and the conclusion."""
    args = parse_args()
    sequences = args.prompts * args.group_size
    generation = args.generation_seconds or generation_seconds(args, sequences)
    train = args.train_seconds or train_seconds(args, sequences)
    print(f"a step of {args.prompts} prompts x {args.group_size} completions x {args.new_tokens} tokens (computed):")
    print(f"  one sampler generates and scores it in {generation:.1f} s")
    print(f"  {args.learners} learner ranks train it in {train:.1f} s")
    ratio = generation / train
    print(f"  samplers that keep the learner busy: {ratio:.1f}, so {math.ceil(ratio)}")
    for samplers in sorted({1, 2, 4, max(1, math.ceil(ratio)), args.gpus - args.learners}):
        if samplers > 0:
            step = max(generation / samplers, train)
            idle = "learner" if generation / samplers > train else "samplers"
            share = 1 - min(generation / samplers, train) / step
            speed = f"{step:6.1f} s a step, {sequences / step:7.1f} completions/s"
            print(f"  {samplers:3d} samplers: {speed}, {idle} idle {share:.0%}")
    work = train * args.learners  # of one learner GPU, if the work were shared out without loss
    step, best = min((max(work / n, generation / (args.gpus - n)), n) for n in range(1, args.gpus))
    split = f"{best} learner ranks and {args.gpus - best} samplers"
    print(f"  best split of {args.gpus} GPUs: {split}, {sequences / step:.0f} completions/s")


def generation_seconds(args, sequences: int) -> float:
    """Decoding by bandwidth, `--places` completions at a time, then prompt and completions once more to score them."""
    bytes_of_weights = 2 * args.parameters
    cache = 2 * 2 * args.layers * args.kv_heads * args.head_size  # bytes a token
    places = min(args.places, sequences)
    held = places * args.new_tokens / 2 + places / args.group_size * args.prompt  # tokens, halfway through
    one_step = bytes_of_weights + cache * held
    steps = args.new_tokens * sequences / places
    decode = steps * max(
        one_step / (args.bandwidth * args.efficiency), 2 * args.parameters * places / (args.flops * args.efficiency)
    )
    tokens = args.prompts * args.prompt + sequences * args.new_tokens
    passes = 1 if args.old_logprobs == "scored" else 0
    return decode + (passes + (args.beta > 0)) * 2 * args.parameters * tokens / (args.flops * args.efficiency)


def train_seconds(args, sequences: int) -> float:
    """Forward, and backward without gradients of frozen weights: 4 operations a parameter and token."""
    tokens = args.prompts * args.prompt + sequences * args.new_tokens
    factor = 6 if args.gradient_checkpointing else 4
    return factor * args.parameters * tokens / (args.learners * args.flops * args.efficiency)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--parameters", type=float, default=1.54e9, help="of the model (Qwen2.5-1.5B)")
    add("--layers", type=int, default=28, help="of the model")
    add("--kv_heads", type=int, default=2, help="key heads")
    add("--head_size", type=int, default=128, help="of each")
    add("--prompt", type=int, default=150, help="tokens of a prompt")
    add("--new_tokens", type=int, default=256, help="tokens of a completion, on average")
    add("--prompts", type=int, default=64, help="prompts a step")
    add("--group_size", type=int, default=8, help="completions of each")
    add("--places", type=int, default=128, help="completions that a sampler decodes at a time")
    add("--old_logprobs", choices=("scored", "sampled"), default="scored", help="as the sampler's flag")
    add("--beta", type=float, default=0.04, help="above 0 there is a reference pass")
    add("--gradient_checkpointing", action="store_true", help="as the learner's flag")
    add("--learners", type=int, default=2, help="GPUs of the learner")
    add("--gpus", type=int, default=3, help="GPUs in all")
    add("--flops", type=float, default=312e12, help="operations a second of a GPU in bf16 (A100)")
    add("--bandwidth", type=float, default=2.0e12, help="bytes a second of its memory")
    add("--efficiency", type=float, default=0.3, help="share of either that is reached")
    add("--generation_seconds", type=float, help="of one sampler for a step's groups, measured, in place of the model")
    add("--train_seconds", type=float, help="of the learner for a step, measured")
    args = parser.parse_args()
    if args.gpus < 2:
        parser.error(f"--gpus is {args.gpus}, each side needs one")
    return args


if __name__ == "__main__":
    main()
