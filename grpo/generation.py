"""The decode loop: G completions for each prompt, sampled from the full distribution at the run's temperature.

Nothing of the model's generation_config takes part, so there is no top-k, top-p or penalty that could leak in. Each
prompt is prefilled and held once for its group, finished completions are retired, and their places go to the next
prompts. The noise of a group comes from its ticket's seed alone: what else is in the batch does not change what is
drawn, up to the rounding of the logits.

Shapes: G group, L completions still decoding ("live rows"), P longest prompt, V vocabulary.
"""

import contextlib
import heapq
import weakref
from collections import Counter, deque
from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache

from grpo.attention import run
from grpo.lean import lean
from grpo.logprobs import ways_that_fit
from grpo.models import has_full_attention, say_once
from grpo.packed import move
from grpo.shared_prompt import SharedPromptCache
from grpo.ways import attempt, inner_model, is_recurrent, kind_of, length_to_try, plain_forward, texts, trial

CHUNK = 256  # probabilities that are summed before the draw looks inside


@dataclass
class Completion:
    """One sampled completion; its end token, if it has one, is the last of its ids."""

    ids: torch.Tensor  # (C,) int32
    logprobs: torch.Tensor  # (C,) float32, under the distribution it was drawn from
    truncated: bool  # no end token within max_new_tokens


@dataclass(frozen=True)
class DecodingWay:
    """How a model decodes."""

    engine: str  # a key of ENGINES
    contiguous: bool = False  # whether its layers need each other's results in their own layout (grpo/lean.py)


TRIAL_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}  # nats a token, mean of a completion
_ways: "weakref.WeakKeyDictionary[nn.Module, dict[int, DecodingWay]]" = weakref.WeakKeyDictionary()


@torch.inference_mode()
def generate(
    model,
    prompts: list[list[int]],
    seeds: list[int],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    eos_ids: list[int],
    places: int = 0,
) -> list[list[Completion]]:
    """Sample `group_size` completions for each prompt; temperature 0 is greedy decoding.

    At most `places` completions are decoded at a time, 0: all. `model` is a causal LM of transformers, bare or wrapped
    by PEFT. Greedy log-probs are those at temperature 1.

    Raises:
        UnfitModel: no way of running the model gives what its own plain forward gives.
    """
    if not prompts:
        return []
    way = decoding_way(model, max(len(prompt) for prompt in prompts) + max_new_tokens)
    return _decode_by(way, model, prompts, seeds, group_size, max_new_tokens, temperature, eos_ids, places)


def decoding_way(model, longest: int = 0) -> DecodingWay:
    """How to decode texts of up to `longest` tokens: tried once, and once more for longer ones where it matters.

    The first of the ENGINES whose log-probs are those of the model's own plain forward. The plain one is no trial's
    matter: it is that forward.
    """
    scoring, _ = ways_that_fit(model, longest)
    length = length_to_try(model, longest)
    if length is None:
        say_once(f"{kind_of(model)} works in another way on long sequences: they are decoded without a cache, slowly")
        return DecodingWay("plain")
    tried = _ways.setdefault(model, {})
    if length not in tried:
        shares = scoring == "packed" and has_full_attention(model)
        with trial(model):
            tried[length] = _first_that_fits(model, length, shares)
    return tried[length]


def _first_that_fits(model, length: int, shares: bool) -> DecodingWay:
    dtype = inner_model(model).dtype
    told = dtype == torch.float32 or not is_recurrent(model)  # half precision hides what padding does to a state
    reasons = []
    for engine in ["shared"] * shares + ["repeated"] * told + ["grouped"]:
        for contiguous in (False, True):
            way = DecodingWay(engine, contiguous)
            gap, reason = attempt(lambda way=way: _gap(model, way, length))
            # that every layer attends by the layout is known here, and rounding alone is no reason to go another way
            known = engine == "shared" and dtype != torch.float32
            if gap is not None and gap < TRIAL_LIMIT[dtype] * (4 if known else 1):
                if engine != "shared":
                    say_once(f"{kind_of(model)} does not share prompts in decoding: {SAYS[engine]}")
                return way
            reasons.append(reason or f"log-probs are {gap:.3g} nats off")
    say_once(f"{kind_of(model)} decodes without a cache, slowly: with one, {reasons[-1]}")
    return DecodingWay("plain")


def _gap(model, way: DecodingWay, length: int) -> float:
    """How far the log-probs of drawn tokens are from those of the plain forward, in nats, at the worst completion."""
    prompts = [prompt.tolist() for prompt in texts(model, length)]
    vocabulary = inner_model(model).get_input_embeddings().num_embeddings
    ends = list(range(0, vocabulary, 5))  # some completions end early and make room
    new = 3 if way.engine == "shared" else 5
    settings = dict(group_size=2, max_new_tokens=new, temperature=1.0, eos_ids=ends, places=4)
    groups = _decode_by(way, model, prompts, list(range(len(prompts))), **settings)
    worst = 0.0
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            ids = torch.tensor([prompt + completion.ids.tolist()], device=next(model.parameters()).device)
            logits = plain_forward(model, ids, len(completion.ids) + 1)[0, :-1].float()
            expected = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
            gaps = (completion.logprobs - expected).abs()
            worst = max(worst, float(gaps.max() if logits.dtype == model.dtype else gaps.mean()))
    return worst


def _decode_by(way: DecodingWay, model, *args, **settings) -> list[list[Completion]]:
    """`_decode` by one way."""
    with contextlib.nullcontext() if way.engine == "plain" else lean(model, way.contiguous):
        return _decode(ENGINES[way.engine], model, *args, **settings)


def _decode(
    make_engine,
    model,
    prompts,
    seeds,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    eos_ids: list[int],
    places: int,
) -> list[list[Completion]]:
    device = next(model.parameters()).device
    at_a_time = max(1, places // group_size) if places else len(prompts)
    engine = make_engine(model, prompts, group_size, max_new_tokens, at_a_time)
    noise = torch.cat([_noise(seed, group_size, max_new_tokens) for seed in seeds]).to(device)  # (all, max_new_tokens)
    out = _Output(len(prompts) * group_size, max_new_tokens, device)
    end_ids = torch.tensor(eos_ids, device=device)
    waiting = deque(range(len(prompts)))
    live: list[int] = []  # completions: prompt * G + g
    logits = None
    while live or waiting:
        new = engine.room(live, waiting)
        if new:
            started = engine.start(new, len(live))
            live += [prompt * group_size + g for prompt in new for g in range(group_size)]
            rows = _put(live, device)
            logits = started if logits is None else torch.cat([logits, started])
        tokens, logprobs = _draw(logits, noise[rows, out.lengths[rows]], temperature)
        ended = out.append(rows, tokens, logprobs, torch.isin(tokens, end_ids))
        if any(ended):
            kept = _close_gaps(ended)
            live = [live[i] for i in kept]
            index = _put(kept, device)
            rows, tokens = rows[index], tokens[index]
            engine.keep(kept, index)
        logits = engine.step(live, rows, tokens) if live else None
    return out.completions(group_size)


def _close_gaps(ended: list[bool]) -> list[int]:
    """Which rows go on, in their new order: the last of them move into the places of those that ended."""
    going = [i for i, end in enumerate(ended) if not end]
    late = [i for i in going if i >= len(going)]
    return [late.pop() if ended[i] else i for i in range(len(going))]


class _Output:
    """What has been drawn so far."""

    def __init__(self, total: int, max_new_tokens: int, device: torch.device):
        self.ids = torch.zeros(total, max_new_tokens, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(total, max_new_tokens, device=device)
        self.lengths = torch.zeros(total, dtype=torch.int64, device=device)
        self.ended = torch.zeros(total, dtype=torch.bool, device=device)

    def append(self, rows, tokens, logprobs, ends) -> list[bool]:
        """One more token for each of `rows`; returns which of them are finished, the one wait for the device a step."""
        at = self.lengths[rows]
        self.ids[rows, at], self.logprobs[rows, at] = tokens, logprobs
        self.lengths[rows] = at + 1
        self.ended[rows] = ends
        return (ends | (at + 1 == self.ids.shape[1])).tolist()

    def completions(self, group_size: int) -> list[list[Completion]]:
        ids, logprobs = self.ids.to(torch.int32).cpu(), self.logprobs.cpu()
        every = [
            Completion(ids[i, :length].clone(), logprobs[i, :length].clone(), not end)
            for i, (length, end) in enumerate(zip(self.lengths.tolist(), self.ended.tolist(), strict=True))
        ]
        return [every[i : i + group_size] for i in range(0, len(every), group_size)]


class _SharedPrompts:
    """Prompts in slots, each held once; a slot is free again when its last completion is finished."""

    def __init__(self, model, prompts: list[list[int]], group_size: int, max_new_tokens: int, at_a_time: int):
        self._model, self._prompts, self._group_size = model, prompts, group_size
        self._live_limit = at_a_time * group_size
        # half-finished groups keep their slots while others take the places of their finished completions
        slots = min(len(prompts), at_a_time if group_size == 1 else 2 * at_a_time)
        self._device = next(model.parameters()).device
        longest = max(len(prompt) for prompt in prompts)
        rows = min(self._live_limit, len(prompts) * group_size)
        self._cache = SharedPromptCache(model.config, slots, group_size, rows, longest, max_new_tokens, self._device)
        self._free = list(range(slots))  # a heap: the lowest first, for a step costs what the highest in use costs
        self._slot: dict[int, int] = {}  # prompt -> slot
        self._slot_of = torch.zeros(len(prompts), dtype=torch.int64, device=self._device)  # the same on the device
        self._age: Counter[int] = Counter()  # prompt -> tokens that its live completions hold

    def room(self, live: list[int], waiting: deque[int]) -> list[int]:
        """The prompts to start now, when these completions are still decoding."""
        for prompt in self._slot.keys() - {row // self._group_size for row in live}:
            heapq.heappush(self._free, self._slot.pop(prompt))
            del self._age[prompt]
        new = []
        while waiting and self._free and len(live) + (len(new) + 1) * self._group_size <= self._live_limit:
            new.append(waiting.popleft())
            self._slot[new[-1]] = heapq.heappop(self._free)
        return new

    def start(self, new: list[int], live: int) -> torch.Tensor:
        """Prefill these prompts, beside `live` completions: (len(new) * G, V) logits of the first tokens."""
        logits, cache, mask = _prefill(self._model, [self._prompts[i] for i in new], self._device)
        slots = _put([self._slot[prompt] for prompt in new], self._device)
        self._slot_of[_put(new, self._device)] = slots
        self._cache.put_prompts(slots, cache, mask)
        self._cache.start_rows(live, live + len(new) * self._group_size)
        return logits.repeat_interleave(self._group_size, 0)

    def keep(self, kept: list[int], index: torch.Tensor) -> None:
        """Only these of the live completions go on, in this order; `index` holds them on the device."""
        moved = [(source, target) for target, source in enumerate(kept) if source != target]
        if moved:
            sources, targets = zip(*moved, strict=True)
            self._cache.move_rows(_put(list(sources), self._device), _put(list(targets), self._device))

    def step(self, live: list[int], rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The live completions' newest tokens (L,) -> (L, V) logits of the next ones."""
        self._age.update(dict.fromkeys({row // self._group_size for row in live}, 1))
        slots = self._slot_of[rows // self._group_size]
        positions = self._cache.prompt_lengths[slots] + self._cache.lengths[: len(live)]
        self._cache.start_step(
            slots * self._group_size + rows % self._group_size,
            slots=max(self._slot.values()) + 1,
            longest_prompt=max(len(self._prompts[prompt]) for prompt in self._slot),
            longest=max(self._age.values()),
        )
        return run(
            self._model,
            self._cache,
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


class _PaddedPrompts:
    """For models with other layers than full attention: transformers' own cache, prompts repeated and padded."""

    def __init__(self, model, prompts: list[list[int]], group_size: int, max_new_tokens: int, at_a_time: int):
        self._model, self._prompts, self._group_size, self._at_a_time = model, prompts, group_size, at_a_time
        self._device = next(model.parameters()).device

    def room(self, live: list[int], waiting: deque[int]) -> list[int]:
        """The next batch once this one is done."""
        return [] if live else [waiting.popleft() for _ in range(min(self._at_a_time, len(waiting)))]

    def start(self, new: list[int], live: int) -> torch.Tensor:
        """Prefill these prompts: (len(new) * G, V) logits of the first tokens."""
        logits, self._cache, mask = _prefill(self._model, [self._prompts[i] for i in new], self._device)
        self._cache.batch_repeat_interleave(self._group_size)
        self._mask = mask.repeat_interleave(self._group_size, 0)
        return logits.repeat_interleave(self._group_size, 0)

    def keep(self, kept: list[int], index: torch.Tensor) -> None:
        """Only these of the live completions go on, in this order; `index` holds them on the device."""
        self._mask = self._mask[index]
        self._cache.batch_select_indices(index)

    def step(self, live: list[int], rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The live completions' newest tokens (L,) -> (L, V) logits of the next ones."""
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        return self._model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._mask.sum(-1, keepdim=True) - 1,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


class _EqualPrompts:
    """For models whose layers carry states: the model's own cache, without padding, so prompts of equal length only.

    Rows that are finished stay until all of them are, for not every state can be taken apart.
    """

    def __init__(self, model, prompts: list[list[int]], group_size: int, max_new_tokens: int, at_a_time: int):
        self._model, self._prompts, self._group_size, self._at_a_time = model, prompts, group_size, at_a_time
        self._device = next(model.parameters()).device

    def room(self, live: list[int], waiting: deque[int]) -> list[int]:
        """The next prompts of one length, once this batch is done."""
        new: list[int] = []
        while not live and waiting and len(new) < self._at_a_time:
            if new and len(self._prompts[waiting[0]]) != len(self._prompts[new[0]]):
                break
            new.append(waiting.popleft())
        return new

    def start(self, new: list[int], live: int) -> torch.Tensor:
        """Prefill these prompts: (len(new) * G, V) logits of the first tokens."""
        ids = _put([list(self._prompts[i]) for i in new], self._device).repeat_interleave(self._group_size, 0)
        self._state: dict = {}
        self._count, self._kept = len(ids), torch.arange(len(ids), device=self._device)
        return self._run(ids)

    def keep(self, kept: list[int], index: torch.Tensor) -> None:
        """Only these of the live completions go on, in this order; `index` holds them on the device."""
        self._kept = self._kept[index]

    def step(self, live: list[int], rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The live completions' newest tokens (L,) -> (L, V) logits of the next ones."""
        ids = tokens.new_zeros(self._count)
        ids[self._kept] = tokens
        return self._run(ids[:, None])[self._kept]

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        out = self._model(input_ids=ids, use_cache=True, **self._state)
        names = ("past_key_values", "cache_params", "state")  # what models call their cache
        self._state = {name: out[name] for name in names if out.get(name) is not None}
        if not self._state:
            raise NotImplementedError("the model gives no cache")
        return out.logits[:, -1]


class _PlainForward:
    """For any model: each step is the plain forward of each text so far, those of equal length together."""

    def __init__(self, model, prompts: list[list[int]], group_size: int, max_new_tokens: int, at_a_time: int):
        self._model, self._prompts, self._group_size = model, prompts, group_size
        self._live_limit, self._device = at_a_time * group_size, next(model.parameters()).device
        self._texts: list[torch.Tensor] = []  # of the live completions, with their prompts

    def room(self, live: list[int], waiting: deque[int]) -> list[int]:
        """The prompts to start now, when these completions are still decoding."""
        new = []
        while waiting and len(live) + (len(new) + 1) * self._group_size <= self._live_limit:
            new.append(waiting.popleft())
        return new

    def start(self, new: list[int], live: int) -> torch.Tensor:
        """Take on these prompts: (len(new) * G, V) logits of the first tokens."""
        prompts = [_put(list(self._prompts[i]), self._device) for i in new]
        self._texts += [prompt for prompt in prompts for _ in range(self._group_size)]
        return self._logits(prompts).repeat_interleave(self._group_size, 0)

    def keep(self, kept: list[int], index: torch.Tensor) -> None:
        """Only these of the live completions go on, in this order; `index` holds them on the device."""
        self._texts = [self._texts[i] for i in kept]

    def step(self, live: list[int], rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The live completions' newest tokens (L,) -> (L, V) logits of the next ones."""
        self._texts = [torch.cat([text, token]) for text, token in zip(self._texts, tokens[:, None], strict=True)]
        return self._logits(self._texts)

    def _logits(self, texts: list[torch.Tensor]) -> torch.Tensor:
        """(len(texts), V) logits of the next tokens."""
        alike: dict[int, list[int]] = {}
        for i, text in enumerate(texts):
            alike.setdefault(len(text), []).append(i)
        found = {}
        for some in alike.values():
            out = plain_forward(self._model, torch.stack([texts[i] for i in some]), 1)[:, -1]
            found |= dict(zip(some, out, strict=True))
        return torch.stack([found[i] for i in range(len(texts))])


ENGINES = {
    "shared": _SharedPrompts,
    "repeated": _PaddedPrompts,
    "grouped": _EqualPrompts,
    "plain": _PlainForward,
}
SAYS = {
    "repeated": "they are repeated for each completion",
    "grouped": "those of equal length run together, repeated for each completion",
}


def _prefill(model, prompts: list[list[int]], device: torch.device):
    """(N, V) logits of the first tokens, the cache, and the (N, P) mask of the left-padded prompts."""
    width = max(len(prompt) for prompt in prompts)
    input_ids = _put([[0] * (width - len(p)) + list(p) for p in prompts], device)
    attention_mask = _put([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device)
    cache = DynamicCache(config=model.config)
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    return logits, cache, attention_mask


def _put(values: list, device: torch.device) -> torch.Tensor:
    """The values on the device; a GPU's queue is not waited for."""
    return move(torch.tensor(values, dtype=torch.int64), device)


def _noise(seed: int, group_size: int, max_new_tokens: int) -> torch.Tensor:
    """(G, max_new_tokens) uniform draws in [0, 1) of one ticket."""
    return torch.rand(group_size, max_new_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _draw(logits: torch.Tensor, noise: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sampling: (L, V) logits and (L,) uniforms -> (L,) tokens and their (L,) log-probs.

    In two steps, so that only the sums of CHUNK probabilities and one chunk are added up in float64, where a tail of
    tiny probabilities is not lost. Weights stand for probabilities that are not yet divided by their sum.
    """
    logits = logits.float() if temperature in (0, 1) else logits.float() / temperature
    rows, vocabulary = logits.shape
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_()
    if vocabulary % CHUNK:
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % CHUNK))
    weights = weights.view(rows, -1, CHUNK)
    sums = weights.sum(-1).double().cumsum(-1)  # (L, chunks)
    total = sums[:, -1:]
    if temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        target = noise[:, None] * total
        chunk = torch.searchsorted(sums, target, right=True).clamp(max=sums.shape[1] - 1)  # (L, 1)
        before = torch.nn.functional.pad(sums, (1, 0)).gather(-1, chunk)
        inside = weights[torch.arange(rows, device=logits.device), chunk[:, 0]].cumsum(-1, dtype=torch.float64)
        last = torch.searchsorted(inside, inside[:, -1:].contiguous())  # the last token that has a weight
        token = torch.minimum(torch.searchsorted(inside, target - before, right=True), last)
        tokens = chunk * CHUNK + token
    logprobs = logits.gather(-1, tokens) - top - total.log().float()
    return tokens[:, 0], logprobs[:, 0]
