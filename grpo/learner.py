"""What surrounds the algorithm on the learner's side: the start, waiting for groups, the step's data, the end.

Every rank builds a Learner and walks through `steps` together; rank 0 alone has the channel and writes files.
"""

import copy
import functools
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from grpo import address
from grpo.adapters import AdapterError, AdapterStore
from grpo.batch import Batch
from grpo.channel import NOTICE_SECONDS, ChannelError, LearnerChannel
from grpo.checkpoints import checkpoint_steps, load_checkpoint, newest_checkpoint, save_checkpoint
from grpo.clock import awake
from grpo.collector import Collector
from grpo.engine import check_lora, groups_per_step, make_engine, read_ds_config
from grpo.facts import check_model
from grpo.guard import Guard
from grpo.held_out import HeldOut
from grpo.journal import Journal
from grpo.logbook import Logbook
from grpo.messages import PROTOCOL_VERSION, Welcome
from grpo.metrics import Means, group_metrics
from grpo.model_card import curve_rows, model_card
from grpo.models import load_model, load_tokenizer, model_fingerprint, tokenizer_fingerprint
from grpo.plan import imbalance, make_plan
from grpo.publisher import Publisher
from grpo.ranks import SIGNALS, STEP, STOP, Ranks, say_at_once
from grpo.reference import References
from grpo.replay import Replay
from grpo.rollout import Group, pack, unpack
from grpo.run_folder import check_folder
from grpo.settings import changes, check_same_run, fixed_entries, settings_that_hold
from grpo.soundness import NotFinite, Watch, go_back
from grpo.step_data import StepData, completion_mask, micro_batch

POLL_SECONDS = 1.0  # how often rank 0 gives the other ranks a sign of life
CLAIM_SECONDS = 5.0  # how long port and folder are asked for
SAME_SIGNAL_SECONDS = 1.0  # the terminal and the launcher both pass one Ctrl-C on
ECHO_SECONDS, LAUNCHER_ECHOES = 10.0, 3  # on a busy machine the launcher passes it on later, as several SIGTERMs


class Learner:
    """The engine with its adapter, and everything that a step needs besides the loss."""

    def __init__(self, args, needs_reference: bool, loss: str):
        self.args, self._needs_reference, self._loss = args, needs_reference, loss
        self.ranks = Ranks(args.timeout)
        self.store = AdapterStore(args.save_path)
        self.channel = self.source = self.logbook = None  # rank 0 alone has them
        self._on_rank_zero(self._claim_port_and_folder)
        references = References(self.store, args.init_adapter, args.ref_sync_steps, args.ref_mixup_alpha)
        self._on_rank_zero(lambda: check_facts(args, references.start()))
        config = read_ds_config(args.ds_config, self.ranks.size)
        self.groups_per_step = groups_per_step(config, self.ranks.size, args.group_size, args.ds_config)
        self._stop_signal: str | None = None
        self._failure: ChannelError | NotFinite | None = None
        self._abandoned = False  # the step under way, for a signal
        self._stopped_at, self._echoes = 0.0, 0
        SIGNALS.tell(self._hear)
        torch.manual_seed(args.seed)  # of the adapter's start, the same on every rank
        model = load_model(args.model_path)
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.tokenizer = load_tokenizer(args.model_path)
        fingerprints = {"model": model_fingerprint(model), "tokenizer": tokenizer_fingerprint(self.tokenizer)}
        self._settings = vars(args) | {"ds_config": copy.deepcopy(config)}  # DeepSpeed takes entries out of its own
        self.engine, self.dtype = make_engine(model, args, config, references.start())
        self.publisher = Publisher(self.engine, self.store, references, self.ranks, args, self.vocab_size)
        self._start_or_resume(fingerprints)
        self.watch = Watch(self.steps_done)
        self.publish()
        self._on_rank_zero(lambda: self._open(needs_reference))

    # -- the loop ----------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[list[Group]]:
        """The groups of each step, the same at every rank, until --max_steps or a signal."""
        self._last_record = time.monotonic()
        while not (0 < self.args.max_steps <= self.steps_done or self._abandoned or self._failure):
            waited = time.monotonic()
            groups = self._wait_for_groups() if self.ranks.rank == 0 else self._follow()
            if groups is None:
                return
            self._step_started = time.monotonic()
            self._wait_seconds = self._step_started - waited
            yield groups

    def prepare(self, groups: list[Group], advantages: list[torch.Tensor], count: Callable) -> StepData:
        """This rank's micro-batches of the step.

        `advantages` holds (G,) or (G, C) per group; `count(completion_mask, max_new_tokens)` is what the loss is
        divided by, added up over the whole step, groups that need not be run included.
        """
        self._groups, self._advantages = groups, advantages
        plan = make_plan(
            groups,
            advantages,
            self.ranks.size,
            max_rows=self.engine.train_micro_batch_size_per_gpu(),
            max_tokens=self.args.max_tokens_per_micro_batch,
            skip_zero=not self._needs_reference and not self.args.run_zero_groups,
        )
        own = plan[self.ranks.rank]
        batches = [micro_batch(parts, self.args.mask_truncated, self._needs_reference) for parts in own]
        masks = [completion_mask(group, self.args.mask_truncated) for group in groups]
        return StepData(
            micro_batches=batches,
            denominator=sum(count(mask, self._max_new_tokens) for mask in masks),
            loss_scale=self.ranks.size * self.engine.gradient_accumulation_steps(),
            share=1 / (self.ranks.size * len(batches)),
            metrics={
                "learner/imbalance": (imbalance(plan), 1),
                "learner/padding_share": (sum(b.packed.padding for b in batches), sum(b.packed.size for b in batches)),
                "learner/micro_batches": (len(batches), 1),
            },
        )

    def micro_batches(self, data: StepData) -> Iterator[Batch]:
        """Each micro-batch in turn; the engine steps after the last.

        After a signal there are no more of them, at any rank: DeepSpeed's launcher kills what is still there 30 seconds
        later. The groups are in the journal, so a resumed run trains on them again.
        """
        for i, batch in enumerate(data.micro_batches, 1):
            self._abandoned = self._abandoned or self.ranks.any(self._stop_signal is not None)
            if self._abandoned:
                self._stop_signal = self._stop_signal or "stopped by a signal to another rank"
                return
            self.engine.set_gradient_accumulation_boundary(i == len(data.micro_batches))
            yield batch.to(self.engine.device)

    def take_step(self) -> None:
        """DeepSpeed's step, which moves the weights after the last micro-batch if all numbers are finite."""
        self.watch.step(self.engine)

    def finish_step(self, groups: list[Group], means: Means) -> None:
        """Publish, save, make room for new tickets, log; nothing of a step that a signal cut short."""
        if self._abandoned:
            return
        outcome = self.watch.finish(self.steps_done + 1, self.ranks)
        self.steps_done += 1
        trained = time.monotonic()
        last = self.steps_done == self.args.max_steps
        published = last or self.steps_done % self.args.publish_steps == 0
        if self.logbook and outcome.sentence:
            print(outcome.sentence, flush=True)
        try:
            self.watch.check(outcome, self.steps_done, self.engine.get_lr()[0])
            if published:
                self.publish()
        except NotFinite as error:  # at every rank; what can be saved is before it is raised
            self._failure = error
            return
        if self.source:
            if outcome.proven:
                self.source.covered()
            self._evaluate_if_due(last)
            self.source.finish_step(self.version if published else None)
        if self.channel:
            self.channel.wake()
        averages = means.over_ranks(self.ranks)
        if self.logbook:
            record = self._record(groups, averages, trained) | {"skipped_steps": float(outcome.skipped)}
            self.logbook.step(self.steps_done, groups, self._advantages, record, self.source.evaluations)
        if last or self.steps_done % self.args.save_steps == 0:
            self.save()  # last: what a checkpoint covers is not done again, so its records must be there
        self._prune()

    def _evaluate_if_due(self, last: bool = False) -> None:
        every = self.args.eval_steps
        if every and (last or self.steps_done % every == 0):
            self.source.evaluate(self.version)

    def _evaluate_what_is_due(self) -> None:
        """At the start: the versions on disk that are due, those whose evaluation a crash cut short among them."""
        every, last = self.args.eval_steps, self.args.max_steps
        for version in self.store.versions() if every else ():
            if version % every == 0 or version == last:
                self.source.evaluate(version)  # which does nothing if it is evaluated already

    def publish(self) -> None:
        """Write the engine's present adapter as version `steps_done`; every rank takes part.

        A step that is trained again after a crash leaves the version that it published before as it is.
        """
        self.version = self.steps_done
        self.publisher.publish(self.version, self._card)

    def _prune(self) -> None:
        """Remove old versions, unless the weights of the newest ones are in doubt."""
        if self.source and not self.watch.in_a_row:
            self.publisher.prune(self.source.pinned, checkpoint_steps(self._checkpoints))

    def _card(self) -> str:
        """The README.md of the version that is published, empty where that fails."""
        return self._card_guard(lambda _: self._card_text(), default="")

    @functools.cached_property
    def _card_guard(self) -> Guard:
        return Guard("the model card", object, "versions are published with an empty README.md")

    def _card_text(self) -> str:
        source, groups = self.source, getattr(self, "_groups", [])  # a version at the start has neither
        return model_card(
            self.args.model_path,
            self.version,
            self._loss,
            source.dataset_name if source else "",
            self._settings,
            curve_rows(self.logbook.curve() if self.logbook else None, self.version, groups),
            source.evaluations if source else [],
            source.sampler_settings if source else {},
            self.tokenizer,
        )

    def save(self) -> None:
        """Write a checkpoint of the optimizer and adapter, without the frozen base; every rank takes part.

        None while the weights are in doubt or a step is half done: the last one and the journal lead here too.
        """
        if self.watch.in_a_row or self.watch.begun or self._saved == self.steps_done:
            return
        save_checkpoint(self.engine, self._checkpoints, self.steps_done, self.ranks)
        self._saved = self.steps_done
        if self.source:
            self.source.saved()

    def close(self) -> None:
        """Save, tell the samplers that the run is over, leave; raises what ended the run if it was a failure."""
        if not isinstance(self._failure, NotFinite):
            self.save()
        if self.source:
            if self.channel:
                self._finish_evaluations()
                self._check_channel()
            reached = 0 < self.args.max_steps <= self.steps_done
            if reached and not self._failure:
                self.source.covered()
            ended = f"--max_steps {self.args.max_steps} reached" if reached else "all steps are replayed"
            reason = self._failure or self._stop_signal or ended
            if self.channel:
                self.channel.stop_samplers(str(reason))
                self.channel.close()
            if isinstance(self._failure, NotFinite):
                self._go_back()
            self._end_logbook(str(reason))
        self.ranks.close()
        if self._failure:
            raise self._failure

    def _go_back(self) -> None:
        """Remove what the last step that moved the weights made, so that the next start does not build on it."""
        suspect = self.watch.moved
        start = go_back(self.store, self._checkpoints, suspect, self.source.can_redo)
        if start is not None:
            print(f"versions and checkpoints from step {suspect} on are removed; the run resumes from step {start}")

    def _end_logbook(self, reason: str) -> None:
        self.logbook.sampler_settings = self.source.sampler_settings
        self.logbook.close(reason, self.source.evaluations, failed=self._failure is not None)
        report = self.store.path / "report.html"
        where = f"adapter in {self.store.path / 'latest'}" + (f", report in {report}" if report.is_file() else "")
        print(f"run ended after {self.steps_done} steps ({reason}); {where}", flush=True)

    def _finish_evaluations(self) -> None:
        """After the last step: wait for evaluations that are under way, as long as answers come."""
        started = noticed = awake.now()
        while self.source.pinned and not (self._failure or self._stop_signal):
            now = awake.now()
            if now - max(started, self.source.last_arrival) > self.args.timeout:
                limit, versions = self.args.timeout, sorted(self.source.pinned)
                print(f"evaluation of versions {versions} given up: no answer for {limit:.0f} s (--timeout)")
                return
            if now - noticed >= NOTICE_SECONDS:
                noticed = now
                print(f"waiting for the evaluation of versions {sorted(self.source.pinned)}", flush=True)
            self._check_channel()
            time.sleep(0.1)

    def _check_channel(self) -> None:
        """A channel that has failed fails the run: samplers cannot be told that it is over."""
        try:
            self.channel.check()
        except ChannelError as error:
            self._failure = self._failure or error

    # -- the start ---------------------------------------------------------------------------------------------

    def _on_rank_zero(self, action: Callable[[], None]) -> None:
        """Run `action` at rank 0; if it fails there, rank 0 raises and every other rank leaves too."""
        failure = None
        if self.ranks.rank == 0:
            try:
                action()
            except (ChannelError, AdapterError, ValueError, OSError) as error:
                failure = error
        word, _ = self.ranks.share(STOP if failure else STEP)
        if failure:
            raise failure
        if word == STOP:
            sys.exit(1)

    def _claim_port_and_folder(self) -> None:
        """First of all, for these are the commonest mistakes and a model may take minutes to load."""
        deadline = time.monotonic() + CLAIM_SECONDS  # a learner that was killed takes a moment to be gone
        while True:
            try:
                if not self.args.replay:
                    self.channel = self.channel or LearnerChannel(
                        self._address, self.args.sampler_timeout, self.args.keys
                    )
                self._lock = self.store.lock()
                break
            except (ChannelError, AdapterError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        run = self.store.read_run()
        check_folder(self.store, run, replays=bool(self.args.replay or (run and run.get("replay"))))
        self.store.repair()
        if run and self.args.resume == "never":
            raise ValueError(
                f"--save_path {self.store.path} holds run {run.get('run_id')} already; leave --resume never out to go "
                "on with it, or choose another folder"
            )

    @property
    def _address(self) -> str:
        return address.tcp(self.args.host, self.args.port)

    @property
    def _checkpoints(self) -> Path:
        return self.store.path / "checkpoints"

    def _start_or_resume(self, fingerprints: dict) -> None:
        """A new run, or the one in --save_path from its newest checkpoint; rank 0 decides for all."""
        facts = fingerprints | {
            "seed": self.args.seed,
            "group_size": self.args.group_size,
            "groups_per_step": self.groups_per_step,
            "lora": list(self.publisher.lora.values()),
            "reference": self.publisher.references.facts,
            "temperature": self.args.temperature,
            "replay": self.args.replay and (AdapterStore(self.args.replay).read_run() or {}).get("run_id"),
            "precision": self.dtype,
            "stage": self.engine.zero_optimization_stage(),
            "ds_config": fixed_entries(self._settings["ds_config"]),
        }
        held = settings_that_hold(vars(self.args), self._settings["ds_config"], self._loss)
        decision: dict = {}

        def decide():
            run = self.store.read_run() or {"run_id": uuid.uuid4().hex} | facts
            check_same_run(run, facts, self.store.path)
            decision["changes"] = changes(run.get("settings", held), held)
            run |= facts | {"protocol": PROTOCOL_VERSION, "model_path": self.args.model_path}
            run |= {"save_path": str(self.store.path), "evaluates": self.args.eval_steps > 0}
            self.store.write_run(run)
            published = max(self.store.versions(), default=-1)
            decision.update(run=run, checkpoint=newest_checkpoint(self._checkpoints), published=published)

        self._on_rank_zero(decide)
        _, (blob,) = self.ranks.share(STEP, [json.dumps(decision).encode()])
        decision = json.loads(blob)
        self.run, self.publisher.newest, self.steps_done = decision["run"], decision["published"], 0
        self.publisher.run_id = self.run["run_id"]
        if decision["checkpoint"]:
            new_scale = any(change.startswith("fp16.") for change in decision["changes"])
            load_checkpoint(self.engine, self._checkpoints, decision["checkpoint"], self.ranks.size, new_scale)
            self.steps_done = decision["checkpoint"]["step"]
        self._saved = self.steps_done
        if self.publisher.newest >= 0 and self.ranks.rank == 0:
            print(
                f"learner: resuming run {self.run['run_id'][:8]} from the checkpoint of step {self.steps_done}; "
                f"its newest adapter is version {self.publisher.newest}"
            )
            if decision["changes"]:
                print(f"learner: {', '.join(decision['changes'])} from step {self.steps_done + 1} on", flush=True)
        if self.ranks.rank == 0:  # last, so that a start that fails does not count as the one that changed them
            self.run["settings"] = held
            self.store.write_run(self.run)

    def _open(self, needs_reference: bool) -> None:
        """Rank 0: where groups come from, and where records go."""
        args = self.args
        settings = self._settings | {"ranks": self.ranks.size, "loss": self._loss}
        self.logbook = Logbook(
            args, self.store.path, self.run["run_id"], settings, self.tokenizer, self.steps_done
        )
        if args.replay:
            self.source = Replay(Path(args.replay), self.run, needs_reference, self.steps_done)
            print(f"learner: replaying {self.source.last_step} steps of {args.replay} into {self.store.path}")
        else:
            self._open_for_samplers(needs_reference)

    def _open_for_samplers(self, needs_reference: bool) -> None:
        args = self.args
        welcome = Welcome(
            run_id=self.run["run_id"],
            group_size=args.group_size,
            temperature=args.temperature,
            dtype=self.dtype,
            needs_reference=needs_reference,
            vocab_size=self.vocab_size,
        )
        self.source = Collector(
            self.run,
            welcome,
            groups_per_step=self.groups_per_step,
            max_staleness=args.max_staleness,
            seed=args.seed,
            max_steps=args.max_steps,
            journal=Journal(self.store.path, keep=args.keep_journal),
            hash_of=self.store.hash_of,
            patience=args.timeout,
            steps_done=self.steps_done,
            version=self.publisher.newest,
            held_out=HeldOut(self.store.path, args.eval_limit) if args.eval_steps else None,
            resample=args.resample_zero_groups,
        )
        self._evaluate_what_is_due()
        self.channel.start(self.source)
        print(
            f"learner: run {self.run['run_id'][:8]} in {self.store.path}, {self.ranks.size} ranks, {self.dtype}, "
            f"{self.groups_per_step} prompts x {args.group_size} completions a step, "
            f"listening at {self.channel.address}",
            flush=True,
        )

    def _hear(self, number: int) -> None:
        """A signal is here, told by a thread of its own: the first one stops the run, the next ends the process."""
        now = time.monotonic()
        if self._stop_signal is None:
            self._stopped_at, self._echoes = now, LAUNCHER_ECHOES if self.ranks.launched else 0
            self._stop_signal = f"stopped by {signal.Signals(number).name}"
            if self.ranks.rank == 0:
                say_at_once("stopping, saving; again ends at once")
        elif now - self._stopped_at > SAME_SIGNAL_SECONDS:
            if number == signal.SIGTERM and self._echoes and now - self._stopped_at < ECHO_SECONDS:
                self._echoes -= 1
            else:
                os._exit(128 + number)

    # -- waiting -----------------------------------------------------------------------------------------------

    def _wait_for_groups(self) -> list[Group] | None:
        """Rank 0: wait for the next step's groups, with a sign of life to the others every second."""
        started = noticed = awake.now()
        while True:
            if self._stop_signal:
                self.ranks.share(STOP)
                return None
            try:
                groups = self.source.next_step(POLL_SECONDS)
                if groups is None:
                    self.channel.check()
                    self._check_patience(started)
            except ChannelError as error:
                self._failure = error  # the work so far is saved before it is raised
                self.ranks.share(STOP)
                return None
            if groups == []:  # a replay is at its end
                self.ranks.share(STOP)
                return None
            if groups is not None:
                settings = json.dumps({"max_new_tokens": self.source.max_new_tokens}).encode()
                blobs = [pack(group) for group in groups] if self.ranks.size > 1 else []
                self.ranks.share(STEP, [settings, *blobs])
                self._max_new_tokens = self.source.max_new_tokens
                return groups
            self.ranks.share()
            self.logbook.waiting(self.source.queue, self.groups_per_step)
            if awake.now() - noticed >= NOTICE_SECONDS:
                noticed = awake.now()
                print(f"waiting for groups for {noticed - started:.0f} s: {self._who()}", flush=True)

    def _follow(self) -> list[Group] | None:
        """The other ranks: wait for rank 0's word."""
        while True:
            word, blobs = self.ranks.share()
            if word == STOP:
                return None
            if word == STEP:
                self._max_new_tokens = json.loads(blobs[0])["max_new_tokens"]
                return [unpack(blob) for blob in blobs[1:]]

    def _check_patience(self, started: float) -> None:
        first = self.source.arrived == 0
        limit, flag = (self.args.startup_timeout, "--startup_timeout") if first else (self.args.timeout, "--timeout")
        silent = awake.now() - max(started, self.source.last_arrival)
        if silent > limit:
            raise ChannelError(f"no group has arrived for {silent:.0f} s ({flag} {limit:.0f}): {self._who()}")

    def _who(self) -> str:
        doing = self.logbook.samplers_do()
        at_work = f"; {doing}" if doing else ""
        here = f"{self.source.queue} of {self.groups_per_step} are here"
        return f"{here}; samplers connected: {self.channel.who()}{at_work}"

    # -- one step's details ------------------------------------------------------------------------------------

    def _record(self, groups: list[Group], averages: dict[str, float], trained: float) -> dict[str, float] | None:
        """The step's line in metrics.jsonl; None where it cannot be made."""
        self.logbook.sampler_settings = self.source.sampler_settings
        now = time.monotonic()
        seconds, self._last_record = now - self._last_record, now  # from record to record, so nothing is left out
        return self._record_guard(lambda _: self._numbers(groups, averages, trained, now, seconds))

    @functools.cached_property
    def _record_guard(self) -> Guard:
        return Guard("the record of a step", object)

    def _numbers(
        self, groups: list[Group], averages: dict[str, float], trained: float, now: float, seconds: float
    ) -> dict[str, float]:
        record = group_metrics(groups, self.steps_done - 1) | averages
        tokens = sum(int(group.lengths.sum()) for group in groups)
        record |= {
            "grad_norm": float(self.engine.get_global_grad_norm() or 0.0),
            "learning_rate": self.engine.get_lr()[0],
            "step_time": seconds,
            "tokens_per_second": tokens / seconds,
            "learner/tokens_per_second": tokens / (trained - self._step_started),
            "learner/idle_share": self._wait_seconds / seconds,
            "time/wait": self._wait_seconds,
            "time/train": trained - self._step_started,
            "time/publish": now - trained,
            "time/other": seconds - self._wait_seconds - (now - self._step_started),
            "adapter_version": self.version,
            "queue": self.source.queue,
            "groups/malformed": self.source.malformed,
            "groups": len(groups),
        }
        if self.source.stale_length is not None:
            record["groups/stale_mean_length"] = self.source.stale_length
        return record | {f"groups/dropped/{reason}": n for reason, n in self.source.dropped.items()}


def check_facts(args, start: Path | None) -> None:
    """What can be known of model and adapter before weights are loaded; doctor asks the same. ValueError if not."""
    for note in check_model(args.model_path):
        print(note, flush=True)
    check_lora(args, start)
