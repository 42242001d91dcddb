"""Group: the one message of the system, G completions of one prompt with everything the loss needs.

A Group travels as one safetensors blob whose metadata is JSON, so reading one can run no code. `unpack` trusts
nothing: the header's size, every name, dtype and shape, and the finiteness of the log-probs are checked before a
tensor is used, and whatever fails is a MalformedGroup that says what was wrong.

Shapes: G completions, P prompt tokens, N completion tokens of all G together (ragged: concatenated, no padding),
K process-reward steps.
"""

import json
from dataclasses import dataclass, field

import torch
from safetensors.torch import load, save

FORMAT_VERSION = 1  # of a packed Group, on the wire and in journals
MAX_HEADER_BYTES = 1 << 16
MAX_GROUP_BYTES = 64 << 20
MAX_NAMES = 64  # of components, and of stats
LONGEST_NAME = 128  # characters
LARGEST = 1 << 53  # what a float holds exactly, so that arithmetic on a foreign number cannot overflow
MAX_ANSWER = 2_000  # characters of a gold answer


class MalformedGroup(ValueError):
    """Bytes that are not a Group; the message names the field and the value."""


@dataclass
class Group:
    """G completions of one prompt, sampled by one adapter version."""

    ticket_id: int
    prompt_index: int
    run_id: str
    sampler_id: str
    adapter_version: int
    adapter_sha256: str
    temperature: float
    prompt_ids: torch.Tensor  # (P,) int32
    completion_ids: torch.Tensor  # (N,) int32, completion after completion, each with its end token if it has one
    lengths: torch.Tensor  # (G,) int32, sums to N
    truncated: torch.Tensor  # (G,) bool, no end token within max_new_tokens
    sampling_logprobs: torch.Tensor  # (N,) float32, what the generator drew the token with
    old_logprobs: torch.Tensor  # (N,) float32, pi_old by the learner's own forward function
    rewards: torch.Tensor  # (G,) float32, NaN where the reward function gave None
    ref_logprobs: torch.Tensor | None = None  # (N,) float32, adapter off; None when the run has beta 0
    components: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> (G,) float32
    step_rows: torch.Tensor | None = None  # (K,) int32, the completion that a process-reward step belongs to
    step_ends: torch.Tensor | None = None  # (K,) int32, index of the step's last token in its completion
    step_rewards: torch.Tensor | None = None  # (K,) float32
    stats: dict[str, float] = field(default_factory=dict)  # the sampler's own measurements, seconds and tokens
    answer: str = ""  # the gold answer, cut to MAX_ANSWER characters: for people who read completions

    @property
    def size(self) -> int:
        """G, the number of completions."""
        return len(self.lengths)

    def completions(self, name: str = "completion_ids") -> list[torch.Tensor]:
        """The G rows, each of its own length, of a per-token field."""
        return list(getattr(self, name).split(self.lengths.tolist()))


_METADATA = {
    "ticket_id": int,
    "prompt_index": int,
    "run_id": str,
    "sampler_id": str,
    "adapter_version": int,
    "adapter_sha256": str,
    "temperature": float,
}
# name -> (dtype as safetensors spells it, the length it must have, required)
_TENSORS = {
    "prompt_ids": ("I32", "P", True),
    "completion_ids": ("I32", "N", True),
    "lengths": ("I32", "G", True),
    "truncated": ("BOOL", "G", True),
    "sampling_logprobs": ("F32", "N", True),
    "old_logprobs": ("F32", "N", True),
    "rewards": ("F32", "G", True),
    "ref_logprobs": ("F32", "N", False),
    "step_rows": ("I32", "K", False),
    "step_ends": ("I32", "K", False),
    "step_rewards": ("F32", "K", False),
}
_COMPONENT = "component/"


def pack(group: Group) -> bytes:
    """Serialise a Group; the blob is both the message and the journal record."""
    tensors = {name: getattr(group, name) for name in _TENSORS}
    tensors |= {_COMPONENT + name: value for name, value in group.components.items()}
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items() if value is not None}
    metadata = {name: getattr(group, name) for name in _METADATA}
    metadata |= {"protocol": FORMAT_VERSION, "stats": group.stats, "answer": group.answer[:MAX_ANSWER]}
    return save(tensors, metadata={"group": json.dumps(metadata)})


def unpack(blob: bytes, max_bytes: int = MAX_GROUP_BYTES) -> Group:
    """Read a Group from foreign bytes, or raise MalformedGroup with what is wrong with them, and nothing else."""
    try:
        return _unpack(blob, max_bytes)
    except MalformedGroup:
        raise
    except Exception as error:  # foreign bytes can make a parser fail in any way: RecursionError, OverflowError ...
        raise MalformedGroup(f"{type(error).__name__}: {error!s:.200}") from error


def _unpack(blob: bytes, max_bytes: int) -> Group:
    header = _read_header(blob, max_bytes)
    metadata = _read_metadata(header)
    _check_shapes(header)
    tensors = load(blob)
    components = {name.removeprefix(_COMPONENT): tensors.pop(name) for name in list(tensors) if name not in _TENSORS}
    stats = metadata.pop("stats")
    group = Group(**metadata, **tensors, components=components, stats=stats)
    _check_values(group)
    return group


def _read_header(blob: bytes, max_bytes: int) -> dict:
    if len(blob) > max_bytes:
        raise MalformedGroup(f"{len(blob)} bytes exceed the limit of {max_bytes}")
    size = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or size > min(MAX_HEADER_BYTES, len(blob) - 8):
        raise MalformedGroup(f"a header of {size} bytes in a blob of {len(blob)} (limit {MAX_HEADER_BYTES})")
    header = json.loads(blob[8 : 8 + size])
    if not isinstance(header, dict):
        raise MalformedGroup(f"the header is a {type(header).__name__}, not an object")
    return header


def _read_metadata(header: dict) -> dict:
    outer = header.pop("__metadata__", None)
    try:
        metadata = json.loads(outer["group"])
        protocol = metadata.pop("protocol")
        stats = dict(metadata.pop("stats").items())
    except (TypeError, KeyError, AttributeError) as error:
        raise MalformedGroup(f"the metadata holds no Group: {error!r:.200}") from error
    if protocol != FORMAT_VERSION:
        raise MalformedGroup(f"format version {protocol!r:.60}, this program reads {FORMAT_VERSION}")
    answer = metadata.pop("answer", "")
    if not isinstance(answer, str) or len(answer) > MAX_ANSWER:
        raise MalformedGroup(f"answer is {answer!r:.60}, not a text of at most {MAX_ANSWER} characters")
    if metadata.keys() != _METADATA.keys():
        raise MalformedGroup(f"metadata fields {sorted(metadata)!s:.300}, expected {sorted(_METADATA)}")
    for name, kind in _METADATA.items():
        _check_field(name, metadata[name], kind)
    _check_names("stats", stats)
    for name, value in stats.items():
        _check_field(name, value, float if type(value) is float else int)
    return metadata | {"stats": {name: float(value) for name, value in stats.items()}, "answer": answer}


def _check_field(name: str, value, kind: type) -> None:
    """A field of this type, within what arithmetic, file names and a terminal can take."""
    if type(value) is not kind:
        raise MalformedGroup(f"{name} is a {type(value).__name__}, not {kind.__name__}")
    short = kind is not str or (len(value) <= LONGEST_NAME and value.isprintable())
    small = kind is str or abs(value) <= LARGEST  # which NaN is not
    if not (short and small):
        raise MalformedGroup(f"{name} is out of bounds")


def _check_names(what: str, names) -> None:
    if len(names) > MAX_NAMES or not all(len(name) <= LONGEST_NAME and name.isprintable() for name in names):
        raise MalformedGroup(f"{what} has more than {MAX_NAMES} names, or one that is no short text")


def _check_shapes(header: dict) -> None:
    sizes: dict[str, int] = {}
    for name, entry in header.items():
        dtype, length, _ = _TENSORS.get(name, ("F32", "G", False))
        if name not in _TENSORS and not name.startswith(_COMPONENT):
            raise MalformedGroup(f"unknown tensor {name!r}")
        if not isinstance(entry, dict) or entry.get("dtype") != dtype:
            raise MalformedGroup(f"{name} is not of dtype {dtype}: {entry!r}")
        shape = entry.get("shape")
        if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int:
            raise MalformedGroup(f"{name} has shape {shape!r}, expected one dimension")
        if sizes.setdefault(length, shape[0]) != shape[0]:
            raise MalformedGroup(f"{name} has {shape[0]} elements where {length} is {sizes[length]}")
    missing = [name for name, (_, _, required) in _TENSORS.items() if required and name not in header]
    steps = [name for name in ("step_rows", "step_ends", "step_rewards") if name in header]
    if missing or len(steps) not in (0, 3):
        raise MalformedGroup(f"missing tensors: {missing or 'step_rows, step_ends and step_rewards go together'}")


def _check_values(group: Group) -> None:
    if group.size == 0 or len(group.prompt_ids) == 0:
        raise MalformedGroup(f"{group.size} completions of a prompt of {len(group.prompt_ids)} tokens")
    if group.lengths.min() < 0 or int(group.lengths.long().sum()) != len(group.completion_ids):
        raise MalformedGroup(f"lengths {group.lengths.tolist()} for {len(group.completion_ids)} completion tokens")
    if (group.prompt_ids < 0).any() or (group.completion_ids < 0).any():
        raise MalformedGroup("negative token ids")
    for name in ("sampling_logprobs", "old_logprobs", "ref_logprobs"):
        values = getattr(group, name)
        if values is not None and not (values.isfinite().all() and (values <= 1e-3).all()):
            raise MalformedGroup(f"{name} holds a value that is no log-probability")
    if (group.rewards.abs() > LARGEST).any():
        raise MalformedGroup(f"rewards {group.rewards.tolist()}")
    _check_names("components", group.components)
    for name, values in group.components.items():
        if not (values.abs() <= LARGEST).all():
            raise MalformedGroup(f"component {name} is {values.tolist()}")
    if group.step_rows is not None:
        rows = group.step_rows.long()
        if ((rows < 0) | (rows >= group.size)).any():
            raise MalformedGroup(f"process-reward steps of completions {rows.tolist()} in a group of {group.size}")
        if ((group.step_ends < 0) | (group.step_ends >= group.lengths[rows])).any():
            raise MalformedGroup(f"process-reward steps end at {group.step_ends.tolist()}, outside their completions")
        if not (group.step_rewards.abs() <= LARGEST).all():
            raise MalformedGroup(f"process rewards {group.step_rewards.tolist()}")
