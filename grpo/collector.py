"""The learner's desk: decides what each message of a sampler means, and hands whole steps to the training loop.

The channel's thread calls hello, grant, receive, drop and leave; the main thread calls next_step and finish_step.
Everything they share is behind one lock.

What a sampler says of its data (dataset, number of prompts, held-out questions) binds nobody until it has delivered a
valid group: until then it has a ticket book of its own, beside those of samplers that say otherwise. The first valid
group makes its sampler's data the run's, and whoever has other data is refused from then on.
"""

import dataclasses
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable

from grpo.channel import ChannelError, Refusal
from grpo.clock import awake
from grpo.held_out import HeldOut, MalformedRecord
from grpo.journal import Journal
from grpo.messages import MAX_GRANTED, Hello, Welcome
from grpo.metrics import reward_spread
from grpo.rollout import Group, MalformedGroup, unpack
from grpo.tickets import SILENCE, Ticket, TicketBook

MAX_REPORTED = 50  # kinds of malformed groups
MAX_BOOKS = 8  # ticket books of samplers that disagree, before the first group
MAX_SHOWN_DROPS = 10  # for each reason; further ones are only counted
FRUITLESS = 1000  # prompts that a sampler may drop without a group between them; all, if the dataset has fewer
MAX_REASONS = 32  # for which tickets are dropped; what samplers call others beyond that is counted as OTHER

EQUAL = "equal rewards"  # why a group was replaced
LATE = "no sampler finished it in time"
SILENT_SAMPLERS = "the samplers that had it fell silent"
FAILED_SAMPLERS = "the samplers that had it failed"
REFUSED_GROUPS = "its groups were malformed"
OTHER = "other reasons"
# What samplers of one run must agree on, with the flag to change.
_SHARED = {
    "dataset": "--dataset, --split or --system_prompt",
    "num_prompts": "--dataset or --split",
    "max_new_tokens": "--max_new_tokens",
    "held_out": "--eval_dataset and --eval_split",
}


class Collector:
    """Takes groups in for a run described by `run` (the content of run.json) and `welcome` (what samplers need).

    `hash_of(version)` is the sha256 of a published adapter's weights, None for a version that is not there;
    `patience`: seconds that the run waits without any group.
    """

    def __init__(
        self,
        run: dict,
        welcome: Welcome,
        *,
        groups_per_step: int,
        max_staleness: int,
        seed: int,
        max_steps: int,
        journal: Journal,
        hash_of: Callable[[int], str | None],
        steps_done: int = 0,
        version: int = 0,
        held_out: HeldOut | None = None,
        resample: int = 0,
        patience: float = 300.0,
    ):
        self._run, self._journal = run, journal
        self._welcome = dataclasses.replace(welcome, session=uuid.uuid4().hex)
        self._held_out = held_out
        self._resample = resample  # groups of equal rewards that may be replaced, for each step so far
        self._turn: dict[str, bool] = {}  # sampler id -> whether held-out questions come next
        self._book_settings = dict(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            seed=seed,
            max_steps=max_steps,
            patience=patience,
        )
        self._book: TicketBook | None = None  # the run's, once a group or a journal says what its data is
        self._books: dict[tuple, TicketBook] = {}  # until then: those of samplers, by what they say
        self._shared: dict = {}  # the run's data
        self._hellos: dict[str, Hello] = {}  # sampler id -> how it introduced itself
        self._hash_of, self._hashes = hash_of, {}
        self.sampler_settings: dict = {}  # flags of the first sampler that delivered
        self._groups: dict[int, Group] = {}
        self._trained: list[int] = []  # tickets that no checkpoint covers yet
        self._saved: list[int] = []  # those that one covers whose weights are not proven yet (grpo/soundness.py)
        self._changed = threading.Condition()
        self.malformed = self.arrived = 0  # groups
        self._reported: set[str] = set()  # kinds of malformed groups
        self._shown_drops: Counter[str] = Counter()
        self._in_a_row: dict[str, Counter[str]] = {}  # sampler id -> why it dropped tickets since its last group
        self._given_up: dict[str, set[int]] = {}  # and for which prompts
        self._stale_lengths: list[float] = []  # mean length of each group that came too late
        self.last_arrival = awake.now()
        if journal.history.data:
            self._restore(steps_done, version)

    def _restore(self, steps_done: int, version: int) -> None:
        """Take up the journal: the steps after the checkpoint, the groups that wait, the tickets that are done."""
        history = self._journal.history
        self._shared = {name: value for name, value in history.data.items() if name not in ("held_out", "settings")}
        self.sampler_settings = history.data.get("settings", {})
        self._book = TicketBook(num_prompts=history.data["num_prompts"], **self._book_settings)
        finished = set(history.dropped).union(*(ids for step, ids in history.steps.items() if step <= steps_done))
        planned = [history.steps[step] for step in sorted(history.steps) if step > steps_done]
        here = set(self._journal.ticket_ids())
        self._journal.forget(here & history.dropped.keys())
        self._saved = sorted(here & finished - history.dropped.keys())
        for ticket_id in sorted(here - finished):
            self._restore_group(ticket_id)
        missing = [t for ids in planned for t in ids if t not in self._groups]
        if missing:
            raise ValueError(
                f"the journal in {self._run['save_path']} lacks the groups of tickets {missing[:5]}, which a step "
                "after the newest checkpoint was trained on: the run cannot be resumed"
            )
        waiting = self._groups.keys() - {t for ids in planned for t in ids}
        arrived = {ticket_id: self._groups[ticket_id].adapter_version for ticket_id in waiting}
        self._book.dropped.update(history.dropped.values())
        self._book.restore(steps_done, max(version, steps_done), planned, arrived, finished)
        if self._welcome.needs_reference and any(group.ref_logprobs is None for group in self._groups.values()):
            raise ValueError("--beta is above 0, but the groups that wait in the journal have no reference log-probs")

    def _restore_group(self, ticket_id: int) -> None:
        """A group that cannot be read any more is as if it had never come: its ticket is granted again."""
        try:
            self._groups[ticket_id] = unpack(self._journal.get(ticket_id))
        except MalformedGroup as error:
            print(f"journal: the group of ticket {ticket_id} cannot be read ({error}) and is asked for again")
            self._journal.forget([ticket_id])

    def _note_step(self, ticket_ids: list[int]) -> None:
        step = self._book.steps_done + 1
        if step not in self._journal.history.steps:  # else it is trained again after a crash
            self._journal.note_step(step, ticket_ids)

    # -- what a sampler says, and when it binds ----------------------------------------------------------------

    def _facts(self, hello: Hello) -> dict:
        """What all samplers must agree on, as this one has it."""
        facts = {name: getattr(hello, name) for name in _SHARED}
        return facts | {"held_out": hello.held_out.dataset if self._held_out else None}

    def _check_agreement(self, facts: dict) -> None:
        for name, flag in _SHARED.items():
            expected = self._shared.get(name, facts[name])
            if facts[name] != expected:
                raise Refusal(
                    f"its {name} is {facts[name]!r}, the run has {expected!r}; start every sampler with the same {flag}"
                )

    def _book_of(self, sampler_id: str) -> TicketBook:
        """The run's ticket book, or the one of those who say what this sampler says."""
        return self._book or self._books[self._key(self._hellos[sampler_id])]

    def _key(self, hello: Hello) -> tuple:
        return tuple(self._facts(hello).values())

    def _open_book(self, hello: Hello) -> None:
        """See to it that there is a book for this hello; books of samplers that are gone or say otherwise now go."""
        key = self._key(hello)
        if self._book or key in self._books:
            return
        present = {self._key(one) for one in self._hellos.values()}
        self._books = {known: book for known, book in self._books.items() if known in present}
        if len(self._books) >= MAX_BOOKS:
            raise Refusal(f"{MAX_BOOKS} samplers disagree about the data already, and none delivered", passing=True)
        self._books[key] = TicketBook(num_prompts=hello.num_prompts, **self._book_settings)

    def _bind(self, sampler_id: str) -> None:
        """This sampler has delivered: what it samples from is what the run samples from.

        Raises:
            Refusal: another one was first, with other data.
        """
        hello = self._hellos[sampler_id]
        facts = self._facts(hello)
        self._check_agreement(facts)
        self.sampler_settings = self.sampler_settings or hello.settings
        if self._held_out:
            self._bind_held_out(sampler_id)
        self._shared = facts | self._shared
        if self._book is None:
            book = self._book_of(sampler_id)
            self._shared |= {"dataset_name": hello.dataset_name[:200], "settings": hello.settings}
            self._journal.note_data(self._shared)
            self._book, self._books = book, {}
            self._settle(book)

    # -- called by the channel's thread ------------------------------------------------------------------------

    def hello(self, sampler_id: str, hello: Hello) -> Welcome:
        """Compare the sampler's facts with the run's; its welcome, or Refusal naming what disagrees."""
        self._check_hello(hello)
        with self._changed:
            self._check_agreement(self._facts(hello))
            before = self._hellos.get(sampler_id)
            self._open_book(hello)
            if before:
                same_data = self._key(before) == self._key(hello)
                self._release(sampler_id, keep=set(hello.holding) if same_data else set())
            self._hellos[sampler_id] = hello
            book = self._book_of(sampler_id)
            book.claim(sampler_id, set(hello.holding))
            if not before:
                print(f"sampler {sampler_id} joined", flush=True)
            return dataclasses.replace(self._welcome, version=book.version)

    def grant(self, sampler_id: str, capacity: int, asking: set[str] = frozenset()) -> list[Ticket]:
        """Tickets for a sampler that has room for `capacity` groups; those of held-out questions come in turn."""
        with self._changed:
            self._check_agreement(self._facts(self._hellos[sampler_id]))
            reasons = self._fruitless(sampler_id)
            if reasons and len(self._hellos) > 1:  # the trouble may be its own: others get its tickets
                raise Refusal(f"{reasons}; change what the reason names at this sampler; others continue")
            if reasons:
                return []  # next_step ends the run
            orders = [self._grant_training]
            if self._held_out:
                turn = self._turn.get(sampler_id, False)
                orders = [self._grant_held_out, self._grant_training]
                orders = orders if turn else orders[::-1]
            for order in orders:
                tickets = order(sampler_id, capacity, asking)
                if tickets:
                    self._turn[sampler_id] = order == self._grant_training
                    return tickets
            return []

    def _grant_training(self, sampler_id: str, capacity: int, asking: set[str]) -> list[Ticket]:
        book, now = self._book_of(sampler_id), awake.now()
        for ticket_id in book.overdue(sampler_id, now):
            holder, limit = book.held[ticket_id], book.deadline()
            print(f"ticket {ticket_id} is not done after {limit:.0f} s at sampler {holder}: another one gets it too")
            book.fail(ticket_id, LATE)
        self._settle(book)
        return book.grant(sampler_id, capacity, now, asking)

    def _grant_held_out(self, sampler_id: str, capacity: int, asking: set[str]) -> list[Ticket]:
        questions = self._hellos[sampler_id].held_out.num_prompts
        capacity = min(capacity * self._welcome.group_size, MAX_GRANTED)
        return self._held_out.grant(sampler_id, capacity, questions, self._held_out_limit())

    def _held_out_limit(self) -> float:
        """Greedy answers may run on for much longer than sampled ones, so the pace of groups alone is no measure."""
        return max(self._book.deadline() if self._book else 0.0, self._book_settings["patience"] / 2)

    def _release(self, sampler_id: str, keep: set[int] = frozenset(), reason: str = "", weight: float = 0.0) -> int:
        if self._held_out:
            self._held_out.release(sampler_id, keep, weight)
        book = self._book_of(sampler_id)
        lost = book.release(sampler_id, keep, reason, weight)
        self._settle(book)
        return len(lost)

    def receive(self, sampler_id: str, ticket_id: int, blob: bytes) -> bool:
        """Take a group in; True once it is safe or known already, False for bytes that are no group for the ticket."""
        if ticket_id < 0:
            return self._receive_held_out(sampler_id, ticket_id, blob)
        with self._changed:
            self._check_agreement(self._facts(self._hellos[sampler_id]))
            book = self._book_of(sampler_id)
        try:
            group = unpack(blob)
            self._check_group(group, ticket_id, book, self._hellos[sampler_id])
        except MalformedGroup as error:
            self._note_malformed(f"a malformed group from sampler {sampler_id}: {error}")
            with self._changed:
                if book.belongs_to(ticket_id, sampler_id):
                    book.fail(ticket_id, REFUSED_GROUPS)
                    self._settle(book)
            return False
        with self._changed:
            self._bind(sampler_id)
            wanted = book.open(ticket_id)
        if wanted:  # only this thread takes groups in, so it is still wanted below
            self._journal.put(ticket_id, blob)
        with self._changed:
            self._forget_drops(sampler_id)
            if book.arrive(ticket_id, group.adapter_version, awake.now()) == "accepted":
                self._take(ticket_id, group)
        return True

    def _take(self, ticket_id: int, group: Group) -> None:
        self.arrived += 1
        self.last_arrival = awake.now()
        if self._may_replace(group):
            self._book.drop(ticket_id, EQUAL)
            self._settle(self._book)
        else:
            self._groups[ticket_id] = group
        self._changed.notify_all()

    def _may_replace(self, group: Group) -> bool:
        """Whether further prompts may take the place of a group that teaches nothing (DAPO's dynamic sampling)."""
        left = self._resample * (self._book.steps_done + 1) - self._book.dropped[EQUAL]
        return left > 0 and group.step_rows is None and not reward_spread(group.rewards)

    def _receive_held_out(self, sampler_id: str, ticket_id: int, blob: bytes) -> bool:
        with self._changed:
            try:
                if not self._held_out:
                    raise MalformedRecord("this run has no held-out questions")
                self._held_out.receive(ticket_id, blob, lambda: self._bind_held_out(sampler_id))
            except MalformedRecord as error:
                self._note_malformed(f"a malformed evaluation record from sampler {sampler_id}: {error}")
                if self._held_out:
                    self._held_out.give_back(ticket_id, sampler_id, weight=1.0)
                return False
            self.last_arrival = awake.now()
            self._changed.notify_all()
        return True

    def _bind_held_out(self, sampler_id: str) -> None:
        """This sampler has answered a held-out question: its held-out questions are the run's."""
        hello = self._hellos[sampler_id]
        self._check_agreement(self._facts(hello))
        if "held_out" not in self._shared:
            self._shared["held_out"] = hello.held_out.dataset
            self._held_out.resize(hello.held_out.num_prompts)

    def _note_malformed(self, text: str) -> None:
        self.malformed += 1
        kind = re.sub(r"[0-9]+", "0", text)
        if kind not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add(kind)
            print(f"dropped {text:.500}; more of this kind are only counted", flush=True)

    def drop(self, sampler_id: str, ticket_id: int, reason: str) -> None:
        """A sampler gives a ticket up; it is recorded under the reason and replaced by the next prompt."""
        with self._changed:
            if ticket_id < 0:
                if self._held_out:
                    self._held_out.drop(ticket_id, sampler_id)
                return
            book = self._book_of(sampler_id)
            reason = reason if reason in self._shown_drops or len(self._shown_drops) < MAX_REASONS else OTHER
            if book.belongs_to(ticket_id, sampler_id) and book.drop(ticket_id, reason):
                prompt = book.ticket(ticket_id).prompt_index
                self._in_a_row.setdefault(sampler_id, Counter())[reason] += 1
                self._given_up.setdefault(sampler_id, set()).add(prompt)
                self._shown_drops[reason] += 1
                if self._shown_drops[reason] <= MAX_SHOWN_DROPS:
                    more = "; more are only counted" if self._shown_drops[reason] == MAX_SHOWN_DROPS else ""
                    what = f"ticket {ticket_id}, prompt {prompt}"
                    print(f"sampler {sampler_id} dropped {what}: {reason}{more}", flush=True)
                self._settle(book)
            self._changed.notify_all()

    def _settle(self, book: TicketBook) -> None:
        """Take down the tickets that were dropped in the journal, once the book is the run's."""
        if book is not self._book:
            return  # they are taken down once this book's data is the run's, and dropped again after a crash
        for ticket_id, reason in book.fresh_drops:
            self._journal.note_drop(ticket_id, reason)
        book.fresh_drops.clear()

    def leave(self, sampler_id: str, reason: str, *, failed: bool = False, silent: bool = False) -> None:
        """Give a departed sampler's tickets to the others."""
        why = FAILED_SAMPLERS if failed else SILENT_SAMPLERS
        with self._changed:
            if sampler_id not in self._hellos:
                return
            lost = self._release(sampler_id, reason=why, weight=failed + SILENCE * silent)
            del self._hellos[sampler_id]
            self._turn.pop(sampler_id, None)
            self._forget_drops(sampler_id)
        print(f"sampler {sampler_id} left ({reason}); {lost} of its tickets go to others", flush=True)

    # -- called by the training loop ---------------------------------------------------------------------------

    def next_step(self, wait: float) -> list[Group] | None:
        """The groups of the next step in training order, or None if they are not all here within `wait` seconds.

        Raises:
            ChannelError: the one sampler left drops ticket after ticket, so nothing can ever be trained on.
        """
        deadline = time.monotonic() + wait
        with self._changed:
            while True:
                self._check_fruit()
                if self._book is not None:
                    for ticket_id in self._book.drop_stale():
                        self._stale_lengths.append(float(self._groups.pop(ticket_id).lengths.float().mean()))
                    self._settle(self._book)
                    ticket_ids = self._book.start_step()
                    if ticket_ids is not None:
                        self._note_step(ticket_ids)
                        return [self._groups.pop(ticket_id) for ticket_id in ticket_ids]
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def _check_fruit(self) -> None:
        if len(self._hellos) == 1 and (reasons := self._fruitless(*self._hellos)):
            raise ChannelError(
                f"nothing can be trained on: {reasons}; change what the reason names at the samplers, or give them "
                "another --dataset"
            )

    def _fruitless(self, sampler_id: str) -> str:
        """What is to be said of a sampler that dropped ticket after ticket without a group between them, else ''."""
        reasons = self._in_a_row.get(sampler_id, Counter())
        prompts = len(self._given_up.get(sampler_id, ()))
        if prompts < min(FRUITLESS, self._book_of(sampler_id).num_prompts):
            return ""
        most = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
        return f"{reasons.total()} tickets in a row were dropped, the reasons: {most}"

    def _forget_drops(self, sampler_id: str) -> None:
        for table in (self._in_a_row, self._given_up):
            table.pop(sampler_id, None)

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

    def _check_hello(self, hello: Hello) -> None:
        run, group_size = self._run, self._welcome.group_size
        for name, flag in (("model", "--model_path"), ("tokenizer", "--model_path")):
            found = getattr(hello, name)
            if found != run[name]:
                raise Refusal(
                    f"its {name} ({hello.model_path}, fingerprint {found[:12]}) is not the learner's "
                    f"({run['model_path']}, {run[name][:12]}); start both with the same {flag}"
                )
        if hello.run_id != run["run_id"]:
            found = f"run {hello.run_id}" if hello.run_id else "no run.json"
            raise Refusal(
                f"its adapter folder {hello.lora_path} holds {found}, the learner publishes run {run['run_id']} in "
                f"{run['save_path']}; start the sampler with --lora_path {run['save_path']}",
                passing=True,  # the file may have been written a moment ago, or not be visible over the network yet
            )
        if hello.batch_size % group_size:
            raise Refusal(
                f"its --batch_size {hello.batch_size} is not a multiple of the learner's --group_size {group_size}"
            )
        if hello.num_prompts < 1:
            raise Refusal("its dataset is empty; give another --dataset")
        if self._held_out and hello.held_out.error:
            raise Refusal(
                f"the learner evaluates (--eval_steps), and it has no held-out questions: {hello.held_out.error}"
            )
        if self._held_out and not hello.held_out.num_prompts:
            raise Refusal("it has not seen yet that this run evaluates", passing=True)

    def _check_group(self, group: Group, ticket_id: int, book: TicketBook, hello: Hello) -> None:
        if group.ticket_id != ticket_id or not book.acceptable(ticket_id):
            raise MalformedGroup(f"a group of ticket {group.ticket_id} for ticket {ticket_id}, not one that was issued")
        prompt = book.ticket(ticket_id).prompt_index
        if group.prompt_index != prompt:
            raise MalformedGroup(f"prompt {group.prompt_index}, ticket {ticket_id} is for prompt {prompt}")
        if group.run_id != self._run["run_id"]:
            raise MalformedGroup(f"run {group.run_id!r}, this is run {self._run['run_id']!r}")
        self._check_version(group, book)
        if group.size != self._welcome.group_size:
            raise MalformedGroup(f"{group.size} completions, --group_size is {self._welcome.group_size}")
        if group.temperature != self._welcome.temperature:
            raise MalformedGroup(f"temperature {group.temperature}, the run's is {self._welcome.temperature}")
        if self._welcome.needs_reference and group.ref_logprobs is None:
            raise MalformedGroup("no reference log-probs, which --beta above 0 needs")
        largest = max(int(ids.max()) for ids in (group.prompt_ids, group.completion_ids) if len(ids))
        if largest >= self._welcome.vocab_size:
            raise MalformedGroup(f"token id {largest}, the model has {self._welcome.vocab_size}")
        if int(group.lengths.max()) > hello.max_new_tokens:
            raise MalformedGroup(f"a completion of {int(group.lengths.max())} tokens, more than {hello.max_new_tokens}")

    def _check_version(self, group: Group, book: TicketBook) -> None:
        """Its adapter was published by this run; one that is too old to be trained on may be gone from the disk."""
        version = group.adapter_version
        expected = self._hashes.get(version) or self._hash_of(version)
        if expected:
            self._hashes = {v: known for v, known in self._hashes.items() if v > version - 100} | {version: expected}
        if version < book.steps_done - book.max_staleness and version >= 0:
            return  # it will be dropped as stale
        if expected is None:
            raise MalformedGroup(f"adapter version {version}, which this run has not published")
        if group.adapter_sha256 != expected:
            found = group.adapter_sha256
            raise MalformedGroup(f"adapter version {version} with hash {found[:12]}, not {expected[:12]}")
