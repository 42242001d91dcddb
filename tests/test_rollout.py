"""Groups on the wire: what is packed comes back, and nothing foreign gets through."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from grpo.rollout import MAX_ANSWER, Group, MalformedGroup, pack, unpack


def make_group(**changes) -> Group:
    group = Group(
        ticket_id=7,
        prompt_index=3,
        run_id="run",
        sampler_id="sampler",
        adapter_version=2,
        adapter_sha256="ab" * 32,
        temperature=1.0,
        prompt_ids=torch.tensor([1, 2, 3], dtype=torch.int32),
        completion_ids=torch.tensor([4, 5, 6, 7, 2], dtype=torch.int32),
        lengths=torch.tensor([3, 2], dtype=torch.int32),
        truncated=torch.tensor([True, False]),
        sampling_logprobs=torch.tensor([-1.0, -2.0, -0.5, -0.1, 0.0]),
        old_logprobs=torch.tensor([-1.1, -2.0, -0.5, -0.1, 0.0]),
        rewards=torch.tensor([2.25, float("nan")]),
        ref_logprobs=torch.tensor([-1.0, -2.0, -0.5, -0.1, 0.0]),
        components={"format": torch.tensor([1.25, 0.0])},
        stats={"generation_seconds": 0.5},
    )
    return replace(group, **changes)


def test_pack_and_unpack_give_the_same_group():
    steps = dict(
        step_rows=torch.tensor([0, 1], dtype=torch.int32),
        step_ends=torch.tensor([2, 0], dtype=torch.int32),
        step_rewards=torch.tensor([1.0, 0.5]),
    )
    for group in (make_group(), make_group(ref_logprobs=None), make_group(**steps)):
        found = unpack(pack(group))
        for name, value in vars(group).items():
            if isinstance(value, torch.Tensor):
                assert getattr(found, name).dtype == value.dtype
                torch.testing.assert_close(getattr(found, name), value, rtol=0, atol=0, equal_nan=True)
            elif name == "components":
                assert found.components["format"].tolist() == [1.25, 0.0]
            else:
                assert getattr(found, name) == value


def test_the_gold_answer_travels_cut_to_a_length_and_may_be_absent():
    assert unpack(pack(make_group(answer="42 \u7b54"))).answer == "42 \u7b54"
    assert unpack(pack(make_group(answer="\U0001f600" * 9_999))).answer == "\U0001f600" * MAX_ANSWER
    group = make_group(answer="42")
    for answer, fits in (("42", True), (None, True), (42, False), ("4" * (MAX_ANSWER + 1), False)):
        blob = pack(group)
        size = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + size])
        metadata = json.loads(header["__metadata__"]["group"]) | {"answer": answer}
        if answer is None:
            del metadata["answer"]  # as in the journals of older runs
        header["__metadata__"]["group"] = json.dumps(metadata)
        text = json.dumps(header).encode()
        changed = len(text).to_bytes(8, "little") + text + blob[8 + size :]
        if fits:
            assert unpack(changed).answer == (answer or "")
        else:
            with pytest.raises(MalformedGroup, match="answer"):
                unpack(changed)


def test_completions_are_cut_by_length():
    rows = make_group().completions()
    assert [row.tolist() for row in rows] == [[4, 5, 6], [7, 2]]


MALFORMED = {
    "run id of the wrong type": dict(run_id=5),
    "ticket id of the wrong type": dict(ticket_id="7"),
    "lengths that do not add up": dict(lengths=torch.tensor([3, 3], dtype=torch.int32)),
    "a negative length": dict(lengths=torch.tensor([6, -1], dtype=torch.int32)),
    "a reward too many": dict(rewards=torch.tensor([1.0, 1.0, 1.0])),
    "an infinite reward": dict(rewards=torch.tensor([1.0, float("inf")])),
    "a NaN log-prob": dict(old_logprobs=torch.tensor([float("nan"), -1, -1, -1, -1])),
    "a positive log-prob": dict(sampling_logprobs=torch.tensor([0.5, -1, -1, -1, -1])),
    "an infinite reference": dict(ref_logprobs=torch.tensor([float("-inf"), -1, -1, -1, -1])),
    "a log-prob too few": dict(ref_logprobs=torch.tensor([-1.0])),
    "ids of another dtype": dict(completion_ids=torch.tensor([4, 5, 6, 7, 2])),
    "a negative id": dict(prompt_ids=torch.tensor([1, -2], dtype=torch.int32)),
    "an empty prompt": dict(prompt_ids=torch.tensor([], dtype=torch.int32)),
    "two dimensions": dict(rewards=torch.tensor([[1.0, 2.0]])),
    "steps without rewards": dict(step_rows=torch.tensor([0], dtype=torch.int32)),
    "a step outside its completion": dict(
        step_rows=torch.tensor([1], dtype=torch.int32),
        step_ends=torch.tensor([2], dtype=torch.int32),
        step_rewards=torch.tensor([1.0]),
    ),
    "a step of no completion": dict(
        step_rows=torch.tensor([2], dtype=torch.int32),
        step_ends=torch.tensor([0], dtype=torch.int32),
        step_rewards=torch.tensor([1.0]),
    ),
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED.keys())
def test_groups_with_a_flaw_are_refused(changes):
    with pytest.raises(MalformedGroup):
        unpack(pack(make_group(**changes)))


class Bomb:
    """Unpickling this would run code."""

    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def test_foreign_bytes_are_refused():
    header = json.dumps({"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    foreign = [
        b"",
        b"\0" * 7,
        b"\xff" * 64,
        pickle.dumps(Bomb()),
        save({"x": torch.zeros(3)}),
        len(header).to_bytes(8, "little") + header,
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (60000).to_bytes(8, "little") + b"[" * 60000,
    ]
    for blob in foreign:
        with pytest.raises(MalformedGroup):
            unpack(blob)


def test_a_blob_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(MalformedGroup, match="limit of 100"):
        unpack(pack(make_group()), max_bytes=100)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_never_raise_anything_else(blob):
    with pytest.raises(MalformedGroup):
        unpack(blob)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_group_is_refused_or_still_valid(data):
    blob = bytearray(pack(make_group()))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(blob)))
    for damaged in (bytes(blob), bytes(blob[:cut])):
        try:
            assert unpack(damaged).size == 2
        except MalformedGroup:
            pass
