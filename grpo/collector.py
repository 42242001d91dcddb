"""The learner's desk: decides what each message of a sampler means, and hands whole steps to the training loop.

The channel's thread calls hello, grant, receive, drop and leave; the main thread calls next_step and finish_step.
Everything they share is behind one lock.
"""

import re
import threading
import time

from grpo.channel import Refusal
from grpo.held_out import HeldOut, MalformedRecord
from grpo.journal import Journal
from grpo.metrics import reward_spread
from grpo.rollout import PROTOCOL_VERSION, Group, MalformedGroup, unpack
from grpo.tickets import Ticket, TicketBook

MAX_REPORTED = 50  # kinds of malformed groups

# What samplers of one run must agree on, with the flag to change; the first sampler's values become the run's.
EQUAL = "equal rewards"  # why a group was replaced
_SHARED = {
    "dataset": "--dataset, --split or --system_prompt",
    "num_prompts": "--dataset or --split",
    "max_new_tokens": "--max_new_tokens",
    "held_out": "--eval_dataset and --eval_split",
}


class Collector:
    """Takes groups in for a run described by `run` (the content of run.json) and `welcome` (what samplers need)."""

    def __init__(
        self,
        run: dict,
        welcome: dict,
        *,
        groups_per_step: int,
        max_staleness: int,
        seed: int,
        max_steps: int,
        journal: Journal,
        steps_done: int = 0,
        version: int = 0,
        held_out: HeldOut | None = None,
        resample: int = 0,
    ):
        self._run, self._welcome, self._journal = run, welcome, journal
        self._held_out = held_out
        self._resample = resample  # groups of equal rewards that may be replaced, for each step so far
        self._turn: dict[str, bool] = {}  # sampler id -> whether held-out questions come next
        self._book_settings = dict(
            groups_per_step=groups_per_step, max_staleness=max_staleness, seed=seed, max_steps=max_steps
        )
        self._book: TicketBook | None = None  # made when the first sampler tells the size of the dataset
        self._shared: dict = {}
        self._known: set[str] = set()  # samplers that are or were here
        self._groups: dict[int, Group] = {}
        self._trained: list[int] = []  # tickets that no checkpoint covers yet
        self._saved: list[int] = []  # those that one covers whose weights are not proven yet (grpo/soundness.py)
        self._changed = threading.Condition()
        self.malformed = self.arrived = 0  # groups
        self._reported: set[str] = set()  # kinds of malformed groups
        self._stale_lengths: list[float] = []  # mean length of each group that came too late
        self.last_arrival = time.monotonic()
        if journal.history.data:
            self._restore(steps_done, version)

    def _restore(self, steps_done: int, version: int) -> None:
        """Take up the journal: the steps after the checkpoint, the groups that wait, the tickets that are done."""
        history = self._journal.history
        self._shared = {name: value for name, value in history.data.items() if name != "held_out"}
        self._book = TicketBook(num_prompts=history.data["num_prompts"], **self._book_settings)
        finished = set(history.dropped).union(*(ids for step, ids in history.steps.items() if step <= steps_done))
        planned = [history.steps[step] for step in sorted(history.steps) if step > steps_done]
        here = set(self._journal.ticket_ids())
        self._journal.forget(here & history.dropped.keys())
        self._saved = sorted(here & finished - history.dropped.keys())
        for ticket_id in sorted(here - finished):
            self._groups[ticket_id] = unpack(self._journal.get(ticket_id))
        missing = [t for ids in planned for t in ids if t not in self._groups]
        if missing:
            raise ValueError(
                f"the journal in {self._run['save_path']} lacks the groups of tickets {missing[:5]}, which a step "
                "after the newest checkpoint was trained on: the run cannot go on"
            )
        waiting = self._groups.keys() - {t for ids in planned for t in ids}
        arrived = {ticket_id: self._groups[ticket_id].adapter_version for ticket_id in waiting}
        self._book.dropped.update(history.dropped.values())
        self._book.restore(steps_done, max(version, steps_done), planned, arrived, finished)
        if self._welcome["needs_reference"] and any(group.ref_logprobs is None for group in self._groups.values()):
            raise ValueError("--beta is above 0, but the groups that wait in the journal have no reference log-probs")

    def _note_step(self, ticket_ids: list[int]) -> None:
        step = self._book.steps_done + 1
        if step not in self._journal.history.steps:  # else it is trained again after a crash
            self._journal.note_step(step, ticket_ids)

    # -- called by the channel's thread ------------------------------------------------------------------------

    def hello(self, sampler_id: str, header: dict) -> dict:
        """Compare the sampler's facts with the run's; the WELCOME header, or Refusal naming what disagrees."""
        self._check_hello(header)
        facts = header | {"held_out": header["held_out"].get("dataset") if self._held_out else None}
        with self._changed:
            for name, flag in _SHARED.items():
                expected = self._shared.setdefault(name, facts[name])
                if facts[name] != expected:
                    raise Refusal(
                        f"its {name} is {facts[name]!r}, the run's first sampler has {expected!r}; "
                        f"start every sampler with the same {flag}"
                    )
            self._shared.setdefault("dataset_name", str(header.get("dataset_name", ""))[:200])
            if self._book is None:
                self._journal.note_data(self._shared)
                self._book = TicketBook(num_prompts=self._shared["num_prompts"], **self._book_settings)
            if self._held_out:
                self._held_out.resize(int(header["held_out"]["num_prompts"]))
            holding = {int(ticket_id) for ticket_id in header["holding"]}
            self._release(sampler_id, keep=holding)
            self._book.claim(sampler_id, holding)
            if sampler_id not in self._known:
                self._known.add(sampler_id)
                print(f"sampler {sampler_id} joined", flush=True)
            return self._welcome | {"version": self._book.version}

    def grant(self, sampler_id: str, capacity: int) -> list[Ticket]:
        """Tickets for a sampler that has room for `capacity` groups; those of held-out questions come in turn."""
        with self._changed:
            training = self._book.grant
            orders = [training]
            if self._held_out:
                turn = self._turn.get(sampler_id, False)
                orders = [self._grant_held_out, training] if turn else [training, self._grant_held_out]
            for order in orders:
                tickets = order(sampler_id, capacity)
                if tickets:
                    self._turn[sampler_id] = order is training
                    return tickets
            return []

    def _grant_held_out(self, sampler_id: str, capacity: int) -> list[Ticket]:
        return self._held_out.grant(sampler_id, capacity * self._welcome["group_size"])

    def _release(self, sampler_id: str, keep: set[int] = frozenset()) -> int:
        if self._held_out:
            self._held_out.release(sampler_id, keep)
        return len(self._book.release(sampler_id, keep))

    def receive(self, sampler_id: str, ticket_id: int, blob: bytes) -> bool:
        """Take a group in; True once it is safe or known already, False for bytes that are no group for the ticket."""
        if ticket_id < 0:
            return self._receive_held_out(sampler_id, ticket_id, blob)
        try:
            group = unpack(blob)
            self._check_group(group, ticket_id)
        except MalformedGroup as error:
            self._note_malformed(f"a malformed group from sampler {sampler_id}: {error}")
            with self._changed:
                self._book.give_back(sampler_id, ticket_id)
            return False
        with self._changed:
            wanted = self._book.open(ticket_id)
        if wanted:  # only this thread takes groups in, so it is still wanted below
            self._journal.put(ticket_id, blob)
        with self._changed:
            if self._book.arrive(ticket_id, group.adapter_version) == "accepted":
                self.arrived += 1
                self.last_arrival = time.monotonic()
                if self._may_replace(group):
                    self._book.drop(ticket_id, EQUAL)
                    self._journal.note_drop(ticket_id, EQUAL)
                else:
                    self._groups[ticket_id] = group
                self._changed.notify_all()
        return True

    def _may_replace(self, group: Group) -> bool:
        """Whether further prompts may take the place of a group that teaches nothing (DAPO's dynamic sampling)."""
        left = self._resample * (self._book.steps_done + 1) - self._book.dropped[EQUAL]
        return left > 0 and group.step_rows is None and not reward_spread(group.rewards)

    def _receive_held_out(self, sampler_id: str, ticket_id: int, blob: bytes) -> bool:
        with self._changed:
            try:
                if not self._held_out:
                    raise MalformedRecord("this run has no held-out questions")
                self._held_out.receive(ticket_id, blob)
            except MalformedRecord as error:
                self._note_malformed(f"a malformed evaluation record from sampler {sampler_id}: {error}")
                if self._held_out:
                    self._held_out.give_back(ticket_id)
                return False
            self.last_arrival = time.monotonic()
            self._changed.notify_all()
        return True

    def _note_malformed(self, text: str) -> None:
        self.malformed += 1
        kind = re.sub(r"[0-9]+", "0", text)
        if kind not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add(kind)
            print(f"dropped {text}; more of this kind are only counted", flush=True)

    def drop(self, sampler_id: str, ticket_id: int, reason: str) -> None:
        """A sampler gives a ticket up; it is recorded under the reason and replaced by the next prompt."""
        with self._changed:
            if ticket_id < 0:
                if self._held_out:
                    self._held_out.drop(ticket_id)
            elif self._book.drop(ticket_id, reason):
                self._journal.note_drop(ticket_id, reason)
                prompt = self._book.ticket(ticket_id).prompt_index
                print(f"sampler {sampler_id} dropped ticket {ticket_id}, prompt {prompt}: {reason}", flush=True)
            self._changed.notify_all()

    def leave(self, sampler_id: str, reason: str) -> None:
        """Give a departed sampler's tickets to the others."""
        with self._changed:
            lost = self._release(sampler_id)
        print(f"sampler {sampler_id} left ({reason}); {lost} of its tickets go to others")

    # -- called by the training loop ---------------------------------------------------------------------------

    def next_step(self, wait: float) -> list[Group] | None:
        """The groups of the next step in training order, or None if they are not all here within `wait` seconds."""
        deadline = time.monotonic() + wait
        with self._changed:
            while True:
                if self._book is not None:
                    for ticket_id in self._book.drop_stale():
                        self._stale_lengths.append(float(self._groups.pop(ticket_id).lengths.float().mean()))
                        self._journal.note_drop(ticket_id, "stale")
                    ticket_ids = self._book.start_step()
                    if ticket_ids is not None:
                        self._note_step(ticket_ids)
                        return [self._groups.pop(ticket_id) for ticket_id in ticket_ids]
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def finish_step(self, version: int | None) -> None:
        """The step is trained and, if `version` is given, that adapter is published."""
        with self._changed:
            self._trained += self._book.in_training
            self._book.finish_step(version)
            self._changed.notify_all()

    def saved(self) -> None:
        """A checkpoint holds everything that was trained so far."""
        self._saved += self._trained
        self._trained = []

    def covered(self) -> None:
        """The newest checkpoint is good to resume from: what it holds is not trained again."""
        self._journal.forget(self._saved)
        self._saved = []

    def can_redo(self, step: int) -> bool:
        """Whether the groups of all steps after `step` are still there."""
        return self._journal.holds_since(step)

    def evaluate(self, version: int) -> None:
        """Have the held-out questions answered by a version, beside the training."""
        if self._held_out:
            with self._changed:
                self._held_out.start(version)

    @property
    def pinned(self) -> set[int]:
        """Versions that are being evaluated."""
        with self._changed:
            return self._held_out.pinned if self._held_out else set()

    @property
    def evaluations(self) -> list[dict]:
        """The summaries of versions that are evaluated."""
        with self._changed:
            return list(self._held_out.summaries) if self._held_out else []

    @property
    def dropped(self) -> dict[str, int]:
        """How many tickets were dropped, by reason."""
        with self._changed:
            return dict(self._book.dropped) if self._book else {}

    @property
    def stale_length(self) -> float | None:
        """Mean length of the completions that came too late, None without any."""
        with self._changed:
            return sum(self._stale_lengths) / len(self._stale_lengths) if self._stale_lengths else None

    @property
    def queue(self) -> int:
        """Groups that wait to be trained on."""
        with self._changed:
            return len(self._groups)

    @property
    def dataset_name(self) -> str:
        """The first sampler's --dataset."""
        return self._shared.get("dataset_name", "")

    @property
    def max_new_tokens(self) -> int:
        """The samplers' limit on completion length."""
        return self._shared["max_new_tokens"]

    def _check_hello(self, header: dict) -> None:
        run, group_size = self._run, self._welcome["group_size"]
        if header["protocol"] != PROTOCOL_VERSION:
            raise Refusal(
                f"it speaks protocol {header['protocol']!r}, the learner {PROTOCOL_VERSION}; use one checkout for both"
            )
        for name, flag in (("model", "--model_path"), ("tokenizer", "--model_path")):
            if header[name] != run[name]:
                raise Refusal(
                    f"its {name} ({header['model_path']}, fingerprint {str(header[name])[:12]}) is not the learner's "
                    f"({run['model_path']}, {run[name][:12]}); start both with the same {flag}"
                )
        if header["run_id"] != run["run_id"]:
            found = f"run {header['run_id']}" if header["run_id"] else "no run.json"
            raise Refusal(
                f"its adapter folder {header['lora_path']} holds {found}, the learner publishes run {run['run_id']} in "
                f"{run['save_path']}; start the sampler with --lora_path {run['save_path']}",
                passing=True,  # the file may have been written a moment ago, or not be visible over the network yet
            )
        if header["batch_size"] % group_size:
            raise Refusal(
                f"its --batch_size {header['batch_size']} is no multiple of the learner's --group_size {group_size}"
            )
        for name in ("num_prompts", "max_new_tokens", "batch_size"):
            if type(header[name]) is not int:
                raise ValueError(f"{name} is {header[name]!r:.60}")
        if header["num_prompts"] < 1:
            raise Refusal("its dataset is empty; give another --dataset")
        if self._held_out and not header["held_out"]:
            raise Refusal("it has not seen yet that this run evaluates", passing=True)
        if self._held_out and "error" in header["held_out"]:
            raise Refusal(
                f"the learner evaluates (--eval_steps), and it has no held-out questions: {header['held_out']['error']}"
            )

    def _check_group(self, group: Group, ticket_id: int) -> None:
        if group.ticket_id != ticket_id or not self._book.issued(ticket_id):
            raise MalformedGroup(f"a group of ticket {group.ticket_id} for ticket {ticket_id}, not one that was issued")
        if group.run_id != self._run["run_id"]:
            raise MalformedGroup(f"run {group.run_id!r}, this is run {self._run['run_id']!r}")
        if group.size != self._welcome["group_size"]:
            raise MalformedGroup(f"{group.size} completions, --group_size is {self._welcome['group_size']}")
        if group.temperature != self._welcome["temperature"]:
            raise MalformedGroup(f"temperature {group.temperature}, the run's is {self._welcome['temperature']}")
        if self._welcome["needs_reference"] and group.ref_logprobs is None:
            raise MalformedGroup("no reference log-probs, which --beta above 0 needs")
        largest = max(int(ids.max()) for ids in (group.prompt_ids, group.completion_ids) if len(ids))
        if largest >= self._welcome["vocab_size"]:
            raise MalformedGroup(f"token id {largest}, the model has {self._welcome['vocab_size']}")
        if int(group.lengths.max()) > self.max_new_tokens:
            raise MalformedGroup(f"a completion of {int(group.lengths.max())} tokens, more than {self.max_new_tokens}")
