"""reward_function's contract: what may come back, and what stops the run with everything needed to find the cause."""

import math
import os
import time

import pytest
import torch
from tiny import tiny_tokenizer

from grpo.outbox import Outbox
from grpo.scoring import RewardError, RewardPool, score
from sampling_worker import token_at


def call(result):
    """Score with a reward function that returns, or raises, `result`."""

    def reward_function(response, answer):
        if isinstance(result, Exception):
            raise result
        return result

    return score(reward_function, "the response", "7", prompt_index=41)


def test_reward_and_components_come_through():
    one = call({"reward": 2.25, "format": 1.25, "answer": True})
    assert one.reward == 2.25 and one.components == {"format": 1.25, "answer": 1.0} and one.steps == []


def test_tensors_and_integers_are_numbers_too():
    assert call({"reward": torch.tensor(0.5)}).reward == 0.5
    assert call({"reward": 1}).reward == 1.0


def test_none_leaves_the_completion_out():
    assert math.isnan(call({"reward": None, "format": 0.0}).reward)


def test_steps_come_through():
    assert call({"reward": 1.0, "steps": [(3, 1.0), (12, 0)]}).steps == [(3, 1.0), (12, 0.0)]


WRONG = {
    "an exception": (ZeroDivisionError("my own bug"), ["my own bug", "Traceback", "raise result"]),
    "NaN": ({"reward": math.nan}, ["'reward' is nan"]),
    "infinity": ({"reward": math.inf}, ["'reward' is inf"]),
    "text": ({"reward": "1.0"}, ["'reward' is '1.0'"]),
    "a list": ({"reward": [1.0]}, ["'reward' is [1.0]"]),
    "a component of NaN": ({"reward": 1.0, "format": math.nan}, ["'format' is nan"]),
    "a component of None": ({"reward": 1.0, "format": None}, ["'format' is None"]),
    "no reward": ({"format": 1.0}, ['not a dict with "reward"']),
    "no dict": (1.0, ["it returned 1.0"]),
    "nothing": (None, ["it returned None"]),
    "steps that are no pairs": ({"reward": 1.0, "steps": [3]}, ['"steps"']),
    "a step past the end": ({"reward": 1.0, "steps": [(13, 1.0)]}, ["(13, 1.0)", "12 characters"]),
    "a step of NaN": ({"reward": 1.0, "steps": [(1, math.nan)]}, ["(1, nan)"]),
}


@pytest.mark.parametrize("result, words", WRONG.values(), ids=WRONG.keys())
def test_a_broken_contract_names_the_prompt_the_response_and_the_cause(result, words):
    with pytest.raises(RewardError) as error:
        call(result)
    assert all(word in str(error.value) for word in ["prompt 41", "'the response'", *words]), error.value


def test_a_very_long_response_is_shown_by_its_start():
    with pytest.raises(RewardError) as error:
        score(lambda response, answer: {}, "x" * 100_000, "7", 0)
    assert len(str(error.value)) < 1000


def test_end_characters_become_tokens():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("10 20 30 a b", add_special_tokens=False)
    text = tokenizer.decode(ids)
    ends = {2: 0, 5: 1, 8: 2, 10: 3, len(text): 4}
    for characters, token in ends.items():
        assert token_at(tokenizer, torch.tensor(ids), characters) == token
    assert token_at(tokenizer, torch.tensor(ids), 1) == 0 and token_at(tokenizer, torch.tensor(ids), 3) == 1


def slow_for_some(response: str, answer: str) -> dict:
    """A reward whose time depends on the response, so that processes finish out of order."""
    if response == "hang":
        time.sleep(12)  # longer than the limit; the thread of a pool without processes outlives it
    if response == "die":
        os._exit(3)
    if response == "bug":
        raise KeyError("my own bug")
    time.sleep(0.2 / (1 + len(response)))
    return {"reward": float(len(response)), "process": float(os.getpid())}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pool_keeps_the_order_and_reports_like_a_direct_call(workers):
    pool = RewardPool(slow_for_some, workers, timeout=30)
    try:
        responses = ["", "aaaa", "a", "aaaaaaa"] * 3
        scores = pool.score_all(responses, "7", 5)
        assert [one.reward for one in scores] == [float(len(response)) for response in responses]
        own = {one.components["process"] for one in scores} == {float(os.getpid())}
        assert own == (workers == 0)
        with pytest.raises(RewardError) as error:
            pool.score_all(["a", "bug"], "7", 5)
        assert all(word in str(error.value) for word in ("prompt 5", "'bug'", "my own bug", "Traceback"))
    finally:
        pool.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_that_hangs_is_bounded_and_named(workers):
    pool = RewardPool(slow_for_some, workers, timeout=3.0)
    pool.score_all(["warm"], "7", 0)
    started = time.monotonic()
    with pytest.raises(RewardError, match="prompt 8, response 'hang'\\nit has not returned within 3 s .--reward_time"):
        pool.score_all(["hang"], "7", 8)
    pool.close()
    assert time.monotonic() - started < 10


def test_a_reward_process_that_dies_is_named():
    pool = RewardPool(slow_for_some, 1, timeout=30)
    with pytest.raises(RewardError, match="prompt 8, response 'die'\\nits process died"):
        pool.score_all(["die"], "7", 8)
    pool.close()


def test_the_outbox_finishes_in_order_and_raises_in_the_callers_thread():
    done = []
    box = Outbox(lambda item: done.append(item) if item != "bad" else 1 / 0, capacity=2)
    for item in range(20):
        box.put(item)
    box.put("bad")
    with pytest.raises(ZeroDivisionError):
        for item in range(100):
            box.put(item)
            time.sleep(0.01)
    assert done == list(range(20))


def test_closing_the_outbox_waits_for_what_is_in_it():
    done = []
    box = Outbox(lambda item: (time.sleep(0.05), done.append(item)))
    for item in range(5):
        box.put(item)
    box.close(limit=10)
    assert done == list(range(5))
