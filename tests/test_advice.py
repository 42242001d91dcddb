"""What the learner remarks on: each fault gives its sentence once, a healthy run none."""

import pytest

from grpo.advice import WINDOW, Advisor

HEALTHY = {
    "reward": 1.0,
    "frac_reward_zero_std": 0.3,
    "completions/clipped_ratio": 0.1,
    "rewards/format/mean": 0.8,
    "kl": 0.02,
    "entropy": 1.0,
    "approx_kl": 1e-4,
    "staleness/max": 0.0,
    "sampling/sampling_logp_difference/mean": 0.01,
    "learning_rate": 3e-4,
    "learner/idle_share": 0.3,
    "sampler/idle_share": 0.3,
    "groups": 8,
}


def said(records, evaluations=(), **settings) -> list[str]:
    advisor = Advisor(**settings)
    return [sentence for record in records for sentence in advisor.look(record, list(evaluations))]


def test_a_healthy_run_is_left_alone():
    assert said([HEALTHY] * 50) == []
    assert said([HEALTHY | {"kl": None, "entropy": None, "reward": None}] * 50) == []


FAULTS = {
    "truncated": ({"completions/clipped_ratio": 0.95}, ["95%", "--max_new_tokens"]),
    "no variance": ({"frac_reward_zero_std": 1.0}, ["--group_size"]),
    "no format": ({"rewards/format/mean": 0.0}, ["--system_prompt", "--log_completions"]),
    "drift": ({"kl": 3.0}, ["3.0 nats", "--beta"]),
    "mismatch on-policy": ({"approx_kl": 0.2}, ["approx_kl 0.2", "--old_logprobs"]),
    "decoder": ({"sampling/sampling_logp_difference/mean": 0.3}, ["0.30 nats", "--tis_cap"]),
    "rate": ({"learning_rate": 1e-6}, ["1e-06", "ds_config.json"]),
    "learner idle": ({"learner/idle_share": 0.8}, ["80%", "another sampler"]),
    "sampler idle": ({"sampler/idle_share": 0.8}, ["80%", "--max_staleness"]),
}


@pytest.mark.parametrize("changes, words", FAULTS.values(), ids=FAULTS.keys())
def test_each_fault_is_one_sentence_once(changes, words):
    (sentence,) = said([HEALTHY | changes] * 50)
    assert all(word in sentence for word in words)


SLOW = {"sampler/generation_seconds": 1.0, "sampler/scoring_seconds": 1.0, "sampler/reward_seconds": 48.0}


@pytest.mark.parametrize("idle", ["learner/idle_share", "sampler/idle_share"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_slow_reward_is_named_soon_and_no_sampler_asked_for(idle, staleness):
    records = [HEALTHY | SLOW | {idle: 0.9}] * 50
    (sentence,) = said(records, max_staleness=staleness)
    assert "takes 6 s a group, generation and scoring 0.25 s" in sentence  # 48 and 2 over 8 groups
    assert "--reward_workers N" in sentence and "another sampler" not in sentence
    assert said(records[:3], max_staleness=staleness) == [sentence]
    advisor = Advisor()
    (sentence,) = [text for one in records for text in advisor.look(one, [], {"reward_workers": 4})]
    assert "raise the sampler's --reward_workers from 4" in sentence
    assert advisor.samplers_do() == "reward_function takes 96% of the samplers' time"


def test_a_reward_that_nothing_waits_for_is_left_alone():
    assert said([HEALTHY | SLOW] * 50) == []
    assert said([HEALTHY | SLOW | {"sampler/reward_seconds": 1.9, "learner/idle_share": 0.9}] * 5) == []


@pytest.mark.parametrize("idle", ["learner/idle_share", "sampler/idle_share"])
def test_waiting_at_staleness_0_is_by_design(idle):
    assert said([HEALTHY | {idle: 0.9}] * 50, max_staleness=0) == []
    assert len(said([HEALTHY | {idle: 0.9}] * 50, max_staleness=1)) == 1


def test_what_the_samplers_do_is_empty_until_it_is_known():
    advisor = Advisor()
    assert advisor.samplers_do() == ""
    advisor.look(HEALTHY)
    assert advisor.samplers_do() == ""


def test_a_rate_that_rises_or_was_high_is_left_alone():
    assert said([HEALTHY | {"learning_rate": 1e-7 * n} for n in range(150)]) == []  # a warm-up
    assert said([HEALTHY] * 20 + [HEALTHY | {"learning_rate": 1e-6}] * 20) == []  # the end of a decay


def test_a_difference_is_no_wonder_off_policy():
    assert said([HEALTHY | {"approx_kl": 0.2, "staleness/max": 1.0}] * 50) == []
    assert said([HEALTHY | {"approx_kl": 0.2}] * 50, num_iterations=3) == []


def test_collapse_is_measured_against_the_start():
    (sentence,) = said([HEALTHY] * WINDOW + [HEALTHY | {"entropy": 0.05}] * 2 * WINDOW)
    assert "from 1.00 to 0.0" in sentence
    assert said([HEALTHY | {"entropy": 0.05}] * 50) == []


def test_late_groups_are_counted_over_the_window():
    lengths = {"groups/stale_mean_length": 200.0, "completions/mean_length": 90.0}
    (sentence,) = said([HEALTHY | lengths | {"groups/dropped/stale": 4 * n} for n in range(30)])
    assert "36 of 108 groups" in sentence and "length 200 tokens, of those trained on 90" in sentence
    assert "--max_staleness" in sentence
    assert said([HEALTHY | {"groups/dropped/stale": n} for n in range(30)]) == []


def test_reward_up_and_accuracy_down_names_the_better_version():
    def evaluation(version, accuracy):
        return {"version": version, "questions": 200, "accuracy": accuracy, "accuracy_stderr": 0.03}

    rising = [HEALTHY | {"reward": 1.0 + 0.01 * n} for n in range(30)]
    falling = [evaluation(0, 0.3), evaluation(10, 0.5), evaluation(20, 0.2)]
    (sentence,) = said(rising, falling)
    assert "from 0.500 (version 10) to 0.200" in sentence
    assert said(rising, falling[:2]) == [] and said([HEALTHY] * 30, falling) == []
    assert said(rising, [evaluation(0, 0.3), evaluation(10, 0.35), evaluation(20, 0.3)]) == []
