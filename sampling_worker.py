"""The sampling worker (actor): tickets -> completions -> log-probs and rewards -> stream to the learner.

    python sampling_worker.py --model_path Qwen/Qwen2.5-1.5B-Instruct --lora_path ./checkpoints --device cuda:0

    python sampling_worker.py --evaluate --split test --lora_path ./checkpoints     # held-out accuracy, no learner

It connects to the learner (training_worker.py) over ZeroMQ in either start order, takes tickets that name a prompt
and a seed, and for each one sends a Group: G completions with sampling, old and reference log-probs and rewards.
Before each batch it loads the newest adapter that the learner has published in --lora_path.

Deviations from the paper (DeepSeekMath, arXiv 2402.03300, algorithm 1): pi_old's log-probs are scored by the learner's
own forward function instead of taken from the decoder, for in half precision the two differ.

Shapes: B prompts, G completions of each, P prompt tokens, C completion tokens, N completion tokens of a group.
"""

import argparse
import functools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers warn and may lock up after a fork otherwise

import torch

from data import SYSTEM_PROMPT, RowError, encode_prompt, load_examples, render_prompt, response_decoder, response_prefix
from grpo.adapters import AdapterError, AdapterStore, find_adapter
from grpo.address import check_reachable, tcp
from grpo.batch import collate
from grpo.channel import ChannelError, SamplerChannel
from grpo.evaluation import Question, evaluate, evaluate_to_files
from grpo.facts import check_adapter, check_installed, check_model, check_numbers
from grpo.flags import Parser
from grpo.generation import Completion
from grpo.keys import check_sampler_keys
from grpo.logprobs import ways_that_fit
from grpo.memory import Places, halving, places_that_fit
from grpo.messages import PROTOCOL_VERSION, Welcome
from grpo.models import (
    DTYPES,
    ModelNotFound,
    eos_token_ids,
    load_model,
    load_tokenizer,
    model_fingerprint,
    quiet_libraries,
    tokenizer_fingerprint,
)
from grpo.outbox import Outbox
from grpo.policy import Policy
from grpo.rollout import Group, pack
from grpo.sampler_terminal import SamplerTerminal
from grpo.scoring import Failures, RewardError, RewardPool
from grpo.streams import make_streams_safe
from grpo.tickets import Ticket, derive_seed
from grpo.vllm_engine import VllmPolicy
from utils import check_answer, check_answer_lenient, check_format, reward_function

TOO_LONG = "prompt longer than --max_prompt_length"
MAX_TOKENS = 1 << 14  # completion tokens that are scored at a time
EVALUATION = ("limit", "samples", "temperature", "dtype", "evaluate_output")  # flags without meaning in a run
TOLD: set[str] = set()  # kinds of trouble that a line was printed about
# flags that whoever uses the adapter needs to know: the learner puts them into model cards
SETTINGS = ("dataset", "split", "question_column", "answer_column", "system_prompt", "max_new_tokens",
            "max_prompt_length", "engine", "old_logprobs", "reward_workers")  # fmt: skip
MAX_LOGITS = 1 << 28  # elements of logits at a time, for models that need them: 1 GiB in float32


def main() -> None:
    """Serve tickets until the learner ends the run."""
    make_streams_safe()
    args = parse_args()
    quiet_libraries()
    if args.evaluate:
        return evaluate_policy(args)
    with Sampler(args) as sampler:
        sampler.join()
        for tickets in sampler.tickets():  # sample D_b
            sampler.load_newest(at_least=max(ticket.version for ticket in tickets))  # pi_old <- pi_theta
            prompts = sampler.prompts(tickets)
            completions = sampler.generate(prompts)  # o_1 .. o_G ~ pi_old
            for group in sampler.score(prompts, completions):  # log-probs under pi_old and pi_ref
                sampler.outbox.put(group)  # r_1 .. r_G, then to the learner, while the next completions are generated


class Sampler:
    """What one sampling worker holds: dataset, tokenizer, policy, adapter folder and the channel to the learner."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        if args.engine == "vllm":
            check_installed("--engine", "vllm")
        if args.keys:
            check_sampler_keys(args.keys)
        check_facts(args)
        self.examples = load_examples(args.dataset, args.split, args.question_column, args.answer_column)
        self.tokenizer = load_tokenizer(args.model_path)
        self.model = load_model(args.model_path)
        self.store = AdapterStore(args.lora_path)
        self.facts = {
            "protocol": PROTOCOL_VERSION,
            "model_path": args.model_path,
            "model": model_fingerprint(self.model),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "dataset": f"{self.examples.fingerprint[:16]}-{derive_seed(args.system_prompt)}",
            "dataset_name": args.dataset,
            "num_prompts": len(self.examples),
            "max_new_tokens": args.max_new_tokens,
            "batch_size": args.batch_size,
            "lora_path": str(self.store.path),
            "settings": {name: getattr(args, name) for name in SETTINGS},
        }
        host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname())[:64]
        self.sampler_id = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
        self.channel = SamplerChannel(
            tcp(args.host, args.port),
            self.sampler_id,
            self.hello,
            args.timeout,
            args.startup_timeout,
            args.keys,
        )
        self.reward_pool = RewardPool(reward_function, args.reward_workers, args.reward_timeout)
        self.reward_failures, self.rewarded = Failures(), 0.0
        self.decode = response_decoder(self.tokenizer, eos_token_ids(self.model, self.tokenizer))
        self.terminal = SamplerTerminal(args.reward_workers)
        self.outbox = Outbox(self.reward_and_send, start=self.start_rewards)
        stop_on_signals(self.channel)

    def hello(self) -> dict:
        """The facts the learner compares, with the run that the adapter folder belongs to at this moment."""
        run = self.store.read_run() or {}
        held_out = self.held_out_facts() if run.get("evaluates") else {}
        return self.facts | {"run_id": run.get("run_id"), "held_out": held_out}

    @property
    def welcome(self) -> Welcome:
        """What the learner says of the run; a learner that was restarted may say it anew."""
        return self.channel.welcome

    @functools.cached_property
    def held_out(self):
        """The questions for the learner's --eval_steps, loaded when a run first asks for them."""
        return load_held_out(self.args)

    @functools.cached_property
    def held_out_places(self) -> Places:
        """How many held-out questions are answered at a time: counted for single completions, once the first are."""
        args = self.args
        size = args.batch_size or places_that_fit(self.policy.model, 1, args.max_prompt_length, args.max_new_tokens)
        return Places(size, each=1)

    def held_out_facts(self) -> dict:
        """What the learner compares of the held-out questions, or why there are none."""
        try:
            return {"dataset": self.held_out.fingerprint, "num_prompts": len(self.held_out)}
        except ValueError as error:
            return {"error": f"{error!s:.2000}"}

    def __enter__(self) -> "Sampler":
        return self

    def join(self) -> None:
        """Wait for the learner's welcome, then put the model on the device in the learner's dtype."""
        print(f"sampler {self.sampler_id}: {len(self.examples)} prompts, adapters from {self.store.path}", flush=True)
        self.channel.connect()
        self.policy = make_policy(
            self.model,
            eos_token_ids(self.model, self.tokenizer),
            self.args,
            dtype=self.welcome.dtype,
            temperature=self.welcome.temperature,
        )
        del self.model
        group_size = self.welcome.group_size
        self.places = self.args.batch_size or places_that_fit(
            self.policy.model, group_size, self.args.max_prompt_length, self.args.max_new_tokens
        )
        tokens = MAX_TOKENS if ways_that_fit(self.policy.model)[1] else MAX_LOGITS // self.welcome.vocab_size
        self.groups_at_a_time = max(1, tokens // (group_size * self.args.max_new_tokens))  # in scoring

    def tickets(self) -> Iterator[list[Ticket]]:
        """As many tickets at a time as fit --batch_size, or --prompts_at_a_time, until the learner ends the run.

        Tickets for held-out questions (--eval_steps of the learner) come between and are worked off here.
        """
        room = self.args.prompts_at_a_time or self.places // self.welcome.group_size
        waiting = time.monotonic()
        self.terminal.doing("waiting for tickets")
        for tickets in self.channel.tickets(room, check=self.check):
            self.waiting_seconds = (time.monotonic() - waiting) / len(tickets)
            if tickets[0].held_out:
                self.evaluate(tickets)
            else:
                yield tickets
            self.terminal.doing("waiting for tickets")
            waiting = time.monotonic()

    def check(self) -> None:
        """While there are no tickets: raise what went wrong in the outbox, tell of what is still in it."""
        self.outbox.check()
        self.terminal.waiting()

    def evaluate(self, tickets: list[Ticket]) -> None:
        """Answer held-out questions greedily with the version that their tickets pin."""
        version = tickets[0].version
        self.policy.load_version(self.store, self.welcome.run_id, version, self.args.adapter_timeout)
        by_index = {ticket.prompt_index: ticket.ticket_id for ticket in tickets}
        self.terminal.doing(f"answering {len(tickets)} held-out questions")
        questions, left_out = held_out_questions(self.tokenizer, self.held_out, sorted(by_index), self.args)
        for index, reason in left_out.items():
            self.channel.drop(by_index[index], reason)
        for records in evaluate(
            self.policy,
            self.decode,
            questions,
            judge,
            samples=0,
            max_new_tokens=self.args.max_new_tokens,
            places=self.held_out_places,
        ):
            for record in records:
                self.channel.send(by_index[record["index"]], json.dumps(record).encode())

    def load_newest(self, at_least: int) -> None:
        """Hot reload: take on the newest published adapter."""
        if self.policy.load_newest(self.store, self.welcome.run_id, at_least, self.args.adapter_timeout):
            print(f"adapter version {self.policy.version} ({self.policy.sha256[:12]}) is in use", flush=True)

    def prompts(self, tickets: list[Ticket]) -> dict[Ticket, list[int]]:
        """Each ticket's prompt as token ids; one whose row has no gold, or is too long, is dropped with the reason."""
        prompts = {}
        for ticket in tickets:
            question, reason = read_question(self.tokenizer, self.examples, ticket.prompt_index, self.args)
            if reason:
                self.channel.drop(ticket.ticket_id, reason)
            else:
                prompts[ticket] = question.prompt_ids
        return prompts

    def generate(self, prompts: dict[Ticket, list[int]]) -> list[list[Completion]]:
        """G completions for each prompt."""
        if not prompts:
            return []
        self.terminal.doing(f"generating {len(prompts)} groups")
        started = time.monotonic()
        seeds = [ticket.seed for ticket in prompts]
        group_size = self.welcome.group_size

        def decode(places: int):
            ids = list(prompts.values())
            return self.policy.generate(ids, seeds, group_size, self.args.max_new_tokens, places=places)

        groups, self.places = halving(decode, self.places, group_size, "--batch_size")
        self.generation_seconds = (time.monotonic() - started) / len(prompts)
        return groups

    def score(self, prompts: dict[Ticket, list[int]], completions: list[list[Completion]]) -> Iterator[Group]:
        """Groups that lack their rewards: old and reference log-probs come from the learner's forward function."""
        self.terminal.doing("scoring log-probs")
        pairs = list(zip(prompts.items(), completions, strict=True))
        while pairs:
            scored, self.groups_at_a_time = halving(
                lambda size, left=pairs: self.score_together(left[:size]), self.groups_at_a_time, 1, "groups at a time"
            )
            self.terminal.made(len(scored))
            yield from scored
            pairs = pairs[len(scored) :]

    def score_together(self, pairs: list) -> list[Group]:
        """The groups of some ((ticket, prompt ids), completions) pairs, by one forward pass for each policy."""
        started = time.monotonic()
        tensors = [torch.tensor(prompt_ids, dtype=torch.int32) for (_, prompt_ids), _ in pairs]
        batch = collate(tensors, [completion.ids for _, group in pairs for completion in group])
        sizes = [sum(len(completion.ids) for completion in group) for _, group in pairs]  # N of each group
        old, ref = [None] * len(pairs), [None] * len(pairs)
        if self.args.old_logprobs == "scored":
            old = self.policy.logprobs(batch).split(sizes)
        if self.welcome.needs_reference:
            ref = self.policy.reference_logprobs(batch).split(sizes)
        seconds = (time.monotonic() - started) / len(pairs)
        return [
            self.make_group(ticket, tensors[i], group, old[i], ref[i], seconds)
            for i, ((ticket, _), group) in enumerate(pairs)
        ]

    def make_group(self, ticket: Ticket, prompt_ids, completions: list[Completion], old, ref, seconds: float) -> Group:
        """Everything known of a group before its rewards; without `old`, the decoder's log-probs stand for pi_old's."""
        sampling = torch.cat([completion.logprobs for completion in completions])  # (N,)
        return Group(
            ticket_id=ticket.ticket_id,
            prompt_index=ticket.prompt_index,
            run_id=self.welcome.run_id,
            sampler_id=self.sampler_id,
            adapter_version=self.policy.version,
            adapter_sha256=self.policy.sha256,
            temperature=self.welcome.temperature,
            prompt_ids=prompt_ids,
            completion_ids=torch.cat([completion.ids for completion in completions]),
            lengths=torch.tensor([len(completion.ids) for completion in completions], dtype=torch.int32),
            truncated=torch.tensor([completion.truncated for completion in completions]),
            sampling_logprobs=sampling,
            old_logprobs=sampling.clone() if old is None else old,
            ref_logprobs=ref,
            rewards=torch.full((len(completions),), torch.nan),
            stats={
                "waiting_seconds": self.waiting_seconds,
                "generation_seconds": self.generation_seconds,
                "scoring_seconds": seconds,
            },
        )

    def start_rewards(self, group: Group) -> tuple:
        """Hand each completion's text to reward_function; returns what reward_and_send takes."""
        started = time.monotonic()
        prefix = response_prefix(self.tokenizer.decode(group.prompt_ids))
        texts = [prefix + self.decode(row) for row in group.completions()]
        answer = group.answer = self.examples[group.prompt_index].answer
        return group, self.reward_pool.start(texts, answer, group.prompt_index), len(prefix), started

    def reward_and_send(self, work: tuple) -> None:
        """Put the results of reward_function into the group and send it; without them its ticket is dropped."""
        group, calls, prefix, started = work
        try:
            scores = self.reward_pool.results(calls)
        except RewardError as error:
            self.terminal.dropped()
            self.reward_failures.bad(error)
            return self.channel.drop(group.ticket_id, error.reason)
        finally:
            now = time.monotonic()  # groups are rewarded at the same time, and no second may count for two of them
            seconds, self.rewarded = now - max(started, self.rewarded), now
        self.reward_failures.good()
        group.rewards = torch.tensor([one.reward for one in scores], dtype=torch.float32)
        for name in sorted({name for one in scores for name in one.components}):
            values = [one.components.get(name, 0.0) for one in scores]
            group.components[name] = torch.tensor(values, dtype=torch.float32)
        for name, tensor in self.step_tensors(scores, group.completions(), prefix).items():
            setattr(group, name, tensor)
        group.stats["reward_seconds"] = seconds
        self.channel.send(group.ticket_id, pack(group))
        self.terminal.sent(group)

    def step_tensors(self, scores, ids: list[torch.Tensor], prefix: int) -> dict[str, torch.Tensor]:
        """The scores' (end_character, reward) steps by token: the fields step_rows, step_ends and step_rewards."""
        steps = [
            (row, token_at(self.decode, ids[row], end - prefix), reward)
            for row, one in enumerate(scores)
            for end, reward in one.steps
            if len(ids[row])
        ]
        if not steps:
            return {}
        rows, ends, rewards = zip(*steps, strict=True)
        return {
            "step_rows": torch.tensor(rows, dtype=torch.int32),
            "step_ends": torch.tensor(ends, dtype=torch.int32),
            "step_rewards": torch.tensor(rewards, dtype=torch.float32),
        }

    def __exit__(self, kind, error, trace) -> None:
        """Say goodbye once everything is sent and acknowledged; after an error, at once."""
        if error is None:
            self.outbox.close(self.args.reward_timeout)
        self.terminal.close()
        self.reward_pool.close()
        first_line = str(error).partition("\n")[0]
        farewell = {"reason": f"it failed: {first_line:.500}", "failed": True} if error else {}
        unacknowledged = self.channel.finish(limit=2.0 if error else 10.0, **farewell)
        if error is None:
            print(f"the learner ended the run: {self.channel.stop_reason}; {unacknowledged} groups unacknowledged")


def check_facts(args: argparse.Namespace) -> None:
    """What can be known of the model before its weights are loaded; doctor asks the same. ValueError if not."""
    lengths = {"--max_prompt_length": args.max_prompt_length, "--max_new_tokens": args.max_new_tokens}
    if args.engine == "vllm" and args.vllm_max_model_len:
        lengths = {"--vllm_max_model_len": args.vllm_max_model_len}
    render = functools.partial(render_prompt, system_prompt=args.system_prompt)
    for note in check_model(args.model_path, lengths=lengths, render=render, engine=args.engine):
        print(note, flush=True)


def make_policy(model, eos_ids: list[int], args: argparse.Namespace, **settings) -> Policy:
    """The policy with the decode loop that --engine names."""
    if args.engine == "transformers":
        return Policy(model, eos_ids, args.device, **settings)
    return VllmPolicy(
        model,
        eos_ids,
        args.device,
        **settings,
        model_path=args.model_path,
        vllm_dtype=args.vllm_dtype,
        max_model_len=args.vllm_max_model_len or args.max_prompt_length + args.max_new_tokens,
        memory=args.vllm_gpu_memory_utilization,
    )


def evaluate_policy(args: argparse.Namespace) -> None:
    """Accuracy on held-out questions: a summary in the terminal and in FILE.json, every completion in FILE.jsonl."""
    check_facts(args)
    adapter = find_adapter(args.lora_path)
    if adapter:
        check_adapter(adapter, args.model_path, "--lora_path")
    tokenizer, model = load_tokenizer(args.model_path), load_model(args.model_path)
    examples = load_examples(args.dataset, args.split, args.question_column, args.answer_column)
    indices = range(min(len(examples), args.limit or len(examples)))
    questions, left_out = held_out_questions(tokenizer, examples, indices, args)
    too_long = sum(reason == TOO_LONG for reason in left_out.values())
    if too_long == len(indices):
        raise ValueError(f"all {len(indices)} prompts are longer than --max_prompt_length {args.max_prompt_length}")
    if not questions:
        raise ValueError(f"--dataset {args.dataset}: no row can be asked ({', '.join(sorted(set(left_out.values())))})")
    eos_ids = eos_token_ids(model, tokenizer)
    policy = Policy(model, eos_ids, args.device, dtype=args.dtype, temperature=args.temperature)
    if adapter:
        policy.load_folder(adapter)
    facts = {"model": args.model_path, "adapter": adapter, "dataset": args.dataset, "split": args.split}
    evaluate_to_files(
        policy,
        response_decoder(tokenizer, eos_ids),
        questions,
        judge,
        samples=args.samples,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size or places_that_fit(
            policy.model, max(1, args.samples), args.max_prompt_length, args.max_new_tokens
        ),
        output=Path(args.evaluate_output),
        facts=facts | {"prompts_too_long": too_long, "rows_left_out": len(left_out) - too_long},
    )


def judge(response: str, answer: str) -> dict[str, bool]:
    """The verdicts that evaluation reports."""
    checks = {
        "strict": lambda: check_answer(response, answer),
        "lenient": lambda: check_answer_lenient(response, answer),
        "format": lambda: check_format(response),
    }
    return {name: verdict(name, check) for name, check in checks.items()}


def verdict(name: str, check: Callable[[], bool]) -> bool:
    """What a check of utils.py says; one that fails on a response is no reason to lose the answers to all others."""
    try:
        return bool(check())
    except Exception as error:  # utils.py is the user's code, which may raise anything
        tell_once(
            f"{name}, {type(error)}", f"evaluation: the {name} check fails, which counts as not passed: {error!r}"
        )
        return False


def tell_once(kind: str, text: str) -> None:
    """Print a line, the first time that something of this kind comes up."""
    if kind not in TOLD:
        TOLD.add(kind)
        print(text, flush=True)


def load_held_out(args: argparse.Namespace):
    """The examples of --eval_dataset and --eval_split; ValueError where they would be those that are trained on."""
    dataset = args.eval_dataset or args.dataset
    if Path(dataset).expanduser().is_file() and not args.eval_dataset:
        raise ValueError(f"--dataset {dataset} is a single file; held-out questions need --eval_dataset")
    if args.eval_split == args.split and dataset == args.dataset:
        raise ValueError(f"--eval_split {args.eval_split} is the split that is trained on")
    try:
        return load_examples(dataset, args.eval_split, args.question_column, args.answer_column)
    except ValueError as error:
        named = str(error).replace("--split", "--eval_split")
        raise ValueError(named.replace("--dataset", "--eval_dataset") if args.eval_dataset else named) from error


def held_out_questions(
    tokenizer, examples, indices, args: argparse.Namespace
) -> tuple[list[Question], dict[int, str]]:
    """The questions of these rows, ready for the model, and why the others are left out."""
    questions, left_out = [], {}
    for index in indices:
        question, reason = read_question(tokenizer, examples, index, args)
        if reason:
            left_out[index] = reason
        else:
            questions.append(question)
    return questions, left_out


def read_question(tokenizer, examples, index: int, args: argparse.Namespace) -> tuple[Question | None, str]:
    """A row as a question ready for the model, or why it is none."""
    try:
        question, answer = examples[index]
        prompt_ids = encode_prompt(tokenizer, question, args.system_prompt)
    except RowError as error:
        tell_once(error.reason, f"left out ({error.reason}), as any such row is: {error}")
        return None, error.reason
    if len(prompt_ids) > args.max_prompt_length:
        return None, TOO_LONG
    return Question(index, prompt_ids, response_prefix(tokenizer.decode(prompt_ids)), answer), ""


def token_at(decode: Callable, ids: torch.Tensor, characters: int) -> int:
    """Index of the token with which the first `characters` characters of the decoded text are complete."""
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        if len(decode(ids[: middle + 1])) >= characters:
            high = middle
        else:
            low = middle + 1
    return low


def stop_on_signals(channel: SamplerChannel) -> None:
    """The first Ctrl-C or SIGTERM says goodbye to the learner and exits, a second one exits at once."""

    def stop(signum, frame):
        signal.signal(signum, signal.SIG_DFL)
        print(f"stopping on {signal.Signals(signum).name}: unsent work goes to other samplers", flush=True)
        channel.finish(limit=2.0, reason=f"stopped by {signal.Signals(signum).name}")
        os._exit(0)  # a forward pass may hold the main thread for long; nothing is left to save here

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)


def make_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = Parser(
        description="Sampling worker: generates completions with the newest adapter and streams them to the learner.",
        other="training_worker",
    )
    add = parser.add_argument
    add("--model_path", default="Qwen/Qwen2.5-1.5B-Instruct", help="hub name or local folder; the learner's must agree")
    add("--lora_path", default="./checkpoints", help="adapter folder: the learner's --save_path")
    add("--batch_size", type=batch_size, default=8, help="completions decoded at a time, a multiple of the group size; "
        "auto: as many as fit")  # fmt: skip
    add("--prompts_at_a_time", type=int, default=0, help="prompts taken on together; with more than fit --batch_size, "
        "finished completions make room for the next ones; 0: as many as fit")  # fmt: skip
    add("--max_new_tokens", type=int, default=256, help="completions are cut at this length")
    add("--device", default="cuda:0", help="cuda:0, cuda:1, ... or cpu")
    add("--port", type=int, default=5555, help="the learner's port")
    add("--host", default="127.0.0.1", help="the learner's address")
    add("--keys", type=Path, help="folder of CURVE keys (./run.sh keys DIR), the learner's")
    add("--dataset", default="gsm8k", help="gsm8k, another hub name, or a local file or folder (jsonl, parquet, csv)")
    add("--split", default="train", help="split of the dataset")
    add("--eval_dataset", help="held-out questions for the learner's --eval_steps (default: --dataset)")
    add("--eval_split", default="test", help="their split")
    add("--question_column", default="question", help="column with the question (prompt.0.content: a nested one)")
    add("--answer_column", default="answer", help="column with the gold answer (GSM8K: the text after ####), dots too")
    add("--system_prompt", default=SYSTEM_PROMPT, help="asks for the format that reward_function checks")
    add("--max_prompt_length", type=int, default=1024, help="a longer prompt (in tokens) is dropped and counted")
    add("--engine", choices=("transformers", "vllm"), default="transformers", help="what decodes: our loop on the "
        "transformers model, or vLLM, installed separately")  # fmt: skip
    add("--vllm_gpu_memory_utilization", type=float, default=0.5, help="vllm: its share of the GPU's memory")
    add("--vllm_max_model_len", type=int, default=0, help="vllm: tokens of prompt and completion; 0: both limits' sum")
    add("--vllm_dtype", default="auto", help="vllm: auto (the run's), or a dtype of its own")
    add("--old_logprobs", choices=("scored", "sampled"), default="scored", help="scored: by the learner's own forward "
        "function; sampled: the decoder's, which saves a pass and is exact in float32 only")  # fmt: skip
    add("--timeout", type=float, default=300, help="seconds without a sign of life from the learner before giving up")
    add("--startup_timeout", type=float, default=1800, help="seconds to wait for the learner at the start")
    add("--adapter_timeout", type=float, default=120, help="seconds to wait for a usable adapter version")
    add("--reward_workers", type=int, default=0, help="processes for reward_function; 0: a thread of this process")
    add("--reward_timeout", type=float, default=60, help="seconds that reward_function may take for one response")
    add("--evaluate", action="store_true", help="measure held-out accuracy instead of serving a learner")
    add("--limit", type=int, default=0, help="evaluate: use the first so many questions; 0: all")
    add("--samples", type=int, default=0, help="evaluate: completions a question for mean@k and pass@k, beside greedy")
    add("--temperature", type=float, default=1.0, help="evaluate: of the samples")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16", help="evaluate: of the model")
    add("--evaluate_output", default="evaluation", help="evaluate: writes this name with .json and .jsonl")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be before anything is loaded."""
    parser = make_parser()
    args = parser.parse_args(argv)
    device_given = parser.parse_args(argv, argparse.Namespace(device=None)).device is not None
    args.model_path = os.path.expanduser(args.model_path)
    check_numbers(parser, args, above_zero=("timeout", "startup_timeout", "adapter_timeout", "reward_timeout"))
    for name in ("prompts_at_a_time", "vllm_max_model_len", "reward_workers", "limit", "samples", "temperature"):
        if getattr(args, name) < 0:
            parser.error(f"--{name} is {getattr(args, name)}, it must not be negative")
    if not 0 < args.vllm_gpu_memory_utilization <= 1:
        parser.error(
            f"--vllm_gpu_memory_utilization is {args.vllm_gpu_memory_utilization}, it must be above 0 and at most 1"
        )
    for name in ("max_new_tokens", "max_prompt_length"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, it must be at least 1")
    if not 0 < args.port < 65536:
        parser.error(f"--port is {args.port}, it must be from 1 to 65535")
    if args.evaluate and args.engine != "transformers":
        parser.error(f"--evaluate decodes by our own loop: leave --engine {args.engine} out")
    for name in () if args.evaluate else EVALUATION:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} is for --evaluate; in a run it is the learner's matter, leave it out here")
    if args.engine == "vllm" and args.device not in ("cpu", "cuda", "cuda:0"):
        parser.error(
            f"--device {args.device}: vLLM takes the first GPU that it sees; start with CUDA_VISIBLE_DEVICES="
            f"{args.device.rpartition(':')[2]} and --device cuda:0"
        )
    if not args.evaluate:
        try:
            check_reachable(args.host)
        except ValueError as error:
            parser.error(str(error))
    if args.evaluate and not device_given and not torch.cuda.device_count():
        print("no GPU here: evaluating on the CPU (--device cpu)", flush=True)
        args.device = "cpu"
    check_device(parser, args.device)
    return args


def batch_size(text: str) -> int:
    """argparse type: a number from 1 on, or auto, which is 0 here."""
    if text == "auto":
        return 0
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number from 1 on nor auto")
    return int(text)


def check_device(parser: argparse.ArgumentParser, name: str) -> None:
    """Refuse a device that this machine does not have."""
    try:
        device = torch.device(name)
    except RuntimeError:
        parser.error(f"--device {name} is no device; use cuda:0, cuda:1, ... or cpu")
    if device.type == "meta":
        parser.error(f"--device {name} holds no numbers; use cuda:0, cuda:1, ... or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices here; use --device cpu")


def run() -> None:
    """main, with what a user can mend told in a sentence instead of a traceback."""
    try:
        main()
    except (ChannelError, AdapterError, RewardError, ModelNotFound, ValueError) as error:
        print(f"sampling_worker: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # a reward function that hangs in a thread would keep the interpreter from ending


if __name__ == "__main__":
    run()
