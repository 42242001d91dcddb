"""reward_function's contract: what may come back, and what stops the run with everything needed to find the cause."""

import asyncio
import functools
import math
import os
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
import torch
from rewards import eight_together, slow_for_some
from test_rollout import make_group
from tiny import tiny_tokenizer

from grpo.outbox import Outbox
from grpo.scoring import DIED, FAILED, HUNG, Failures, RewardError, RewardPool, score
from sampling_worker import Sampler, token_at


def call(result):
    """Score with a reward function that returns, or raises, `result`."""

    def reward_function(response, answer):
        if isinstance(result, BaseException):
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
    "sys.exit": (SystemExit(3), ["SystemExit: 3", "Traceback"]),
    "Ctrl-C of its own": (KeyboardInterrupt("mine"), ["KeyboardInterrupt: mine"]),
    "a cancelled task": (asyncio.CancelledError(), ["CancelledError"]),
    "two numbers in a tensor": ({"reward": torch.tensor([1.0, 2.0])}, ["'reward' is tensor([1., 2.])"]),
    "more than float32 holds": ({"reward": 1e39}, ["'reward' is 1e+39"]),
    "a step of infinity": ({"reward": 1.0, "steps": [(math.inf, 1.0)]}, ['"steps"']),
    "NaN": ({"reward": math.nan}, ["'reward' is nan"]),
    "infinity": ({"reward": math.inf}, ["'reward' is inf"]),
    "text": ({"reward": "1.0"}, ["'reward' is '1.0'"]),
    "a list": ({"reward": [1.0]}, ["'reward' is [1.0]"]),
    "a component of NaN": ({"reward": 1.0, "format": math.nan}, ["'format' is nan"]),
    "a component of None": ({"reward": 1.0, "format": None}, ["'format' is None"]),
    "a name that cannot be sent": ({"reward": 1.0, "half \ud83d": 1.0}, ["UnicodeEncodeError"]),
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
        assert token_at(tokenizer.decode, torch.tensor(ids), characters) == token
    assert token_at(tokenizer.decode, torch.tensor(ids), 1) == 0
    assert token_at(tokenizer.decode, torch.tensor(ids), 3) == 1


@pytest.fixture
def make_pool():
    """Makes pools and lets go of them after the test."""
    made = []

    def make(*arguments):
        made.append(RewardPool(*arguments))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pool_keeps_the_order_and_reports_like_a_direct_call(make_pool, workers):
    pool = make_pool(slow_for_some, workers, 30)
    responses = ["", "aaaa", "a", "aaaaaaa"] * 3
    scores = pool.score_all(responses, "7", 5)
    assert [one.reward for one in scores] == [float(len(response)) for response in responses]
    own = {one.components["process"] for one in scores} == {float(os.getpid())}
    assert own == (workers == 0)
    with pytest.raises(RewardError) as error:
        pool.score_all(["a", "bug"], "7", 5)
    assert all(word in str(error.value) for word in ("prompt 5", "'bug'", "my own bug", "Traceback"))
    assert error.value.reason == FAILED


@pytest.mark.parametrize("workers", [0, 1])
def test_whatever_the_reward_raises_is_reported_and_the_next_response_is_scored(make_pool, workers):
    pool = make_pool(slow_for_some, workers, 30)
    for response, words in (("exit", "SystemExit: 3"), ("cancelled", "CancelledError"), ("bug", "my own bug")):
        with pytest.raises(RewardError, match="prompt 8") as error:
            pool.score_all([response], "7", 8)
        assert words in str(error.value) and error.value.reason == FAILED
        assert pool.score_all(["abc"], "7", 9)[0].reward == 3.0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_that_hangs_is_bounded_and_named_and_the_next_group_is_scored(make_pool, workers):
    pool = make_pool(slow_for_some, workers, 3.0)
    pool.score_all(["warm"], "7", 0)
    started = time.monotonic()
    hung, after = pool.start(["hang", "ab"], "7", 8), pool.start(["abc"], "7", 9)
    words = "prompt 8, response 'hang'\\nit has not returned within 3 s .--reward_time"
    with pytest.raises(RewardError, match=words) as error:
        pool.results(hung)
    assert error.value.reason == HUNG and time.monotonic() - started < 10
    assert pool.results(after)[0].reward == 3.0


def test_a_reward_process_that_dies_is_named_and_takes_nothing_with_it(make_pool):
    pool = make_pool(slow_for_some, 2, 30)
    groups = [pool.start(responses, "7", i) for i, responses in enumerate((["slow"], ["die"], ["abc", "ab"]))]
    assert pool.results(groups[0])[0].reward == 4.0
    with pytest.raises(RewardError, match="prompt 1, response 'die'\\nits process died") as error:
        pool.results(groups[1])
    assert error.value.reason == DIED
    assert [one.reward for one in pool.results(groups[2])] == [3.0, 2.0]


def test_a_function_that_no_process_can_have_is_an_error_too(make_pool):
    with pytest.raises(RewardError, match="cannot be called in a process"):
        make_pool(lambda response, answer: {"reward": 1}, 1, 30).score_all(["a"], "7", 3)


def test_processes_beyond_the_group_size_work_on_the_next_groups(make_pool, tmp_path):
    pool, done = make_pool(eight_together, 8, 60), []
    box = Outbox(lambda futures: done.append(pool.results(futures)), start=lambda i: pool.start(paths[i], "7", i))
    paths = [[str(tmp_path / f"{group}-{i}") for i in range(2)] for group in range(4)]
    for group in range(4):
        box.put(group)
    box.close(limit=100)
    assert [[one.reward for one in scores] for scores in done] == [[8.0, 8.0]] * 4  # all eight were called at once


def test_no_second_of_rewards_counts_for_two_groups_and_a_failed_one_is_dropped(make_pool):
    sent, dropped = [], []
    channel = SimpleNamespace(send=lambda *group: sent.append(group), drop=lambda *drop: dropped.append(drop))
    pool, failures = make_pool(slow_for_some, 0, 30), Failures()
    terminal = SimpleNamespace(sent=lambda group: None, dropped=lambda: None)
    actor = SimpleNamespace(
        reward_pool=pool, reward_failures=failures, rewarded=0.0, channel=channel, terminal=terminal
    )
    actor.step_tensors = functools.partial(Sampler.step_tensors, actor)
    groups, started = [make_group(ticket_id=i, stats={}) for i in range(3)], time.monotonic()
    texts = (["slow", "slow"], ["slow", "bug"], ["slow", "slow"])
    for group, calls in [(group, pool.start(each, "7", 0)) for group, each in zip(groups, texts, strict=True)]:
        Sampler.reward_and_send(actor, (group, calls, 0, started))
    seconds = [group.stats["reward_seconds"] for group in (groups[0], groups[2])]
    assert min(seconds) >= 0 and sum(seconds) <= time.monotonic() - started
    assert sum(seconds) >= 1.9  # two groups of two calls of 0.5 s in one thread
    assert [ticket_id for ticket_id, _ in sent] == [0, 2] and dropped == [(1, "reward_function failed")]
    assert groups[2].rewards.tolist() == [4.0, 4.0]


def test_closing_a_pool_gives_up_what_has_not_been_called(make_pool):
    pool = make_pool(slow_for_some, 1, 30)
    pool.score_all(["warm"], "7", 0)
    waiting = pool.start(["slow"] * 5, "7", 1)
    pool.close()
    for future in waiting:
        with pytest.raises((RewardError, CancelledError)):
            future.result(10)


def outcome(failures, *good):
    """Take in groups that are good or not; the error, or None."""
    try:
        for i, one in enumerate(good):
            failures.good() if one else failures.bad(RewardError(f"for prompt {i}", FAILED, "a bug"))
    except RewardError as error:
        return error
    return None


def test_a_reward_that_fails_on_some_is_shown_once_and_one_that_fails_on_all_ends_the_sampler(capfd):
    assert outcome(Failures(), *[False] * 7, True, *[False] * 7) is None
    assert capfd.readouterr().err.count("this prompt is left out") == 1
    error = outcome(Failures(), *[False] * 8)
    assert str(error).startswith("reward_function failed, for 8 of the last 8 prompts; the latest:\nfor prompt 7")
    assert error.reason == FAILED
    assert outcome(Failures(), *[True, False] * 200) is None  # half of them is not more than half
    assert "17 of the last 32" in str(outcome(Failures(), *[True, False] * 200, False))


def test_a_reward_that_always_hangs_is_not_waited_for_eight_times():
    failures = Failures()
    failures.bad(RewardError("slow", HUNG))
    with pytest.raises(RewardError, match="took longer than --reward_timeout, for 2 of the last 2"):
        failures.bad(RewardError("slow", HUNG))


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


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_the_outbox_never_ends_in_silence(error):
    def finish(item):
        raise error

    box = Outbox(finish)
    box.put(1)
    with pytest.raises(RuntimeError, match=type(error).__name__):
        box.close(limit=10)


def test_closing_the_outbox_waits_for_what_is_in_it_and_no_longer():
    done = []
    box = Outbox(lambda item: (time.sleep(0.05), done.append(item)))
    for item in range(5):
        box.put(item)
    box.close(limit=10)
    assert done == list(range(5))
    full = Outbox(lambda item: time.sleep(5), capacity=1)
    full.put(1)
    full.put(2)
    started = time.monotonic()
    full.close(limit=0.2)
    assert time.monotonic() - started < 4
