"""Batch sizes by memory, and what happens when it runs out."""

import argparse

import pytest
import torch
from tiny import tiny_model
from transformers import AutoModelForCausalLM, MambaConfig

import sampling_worker
from grpo import memory
from grpo.evaluation import Question, evaluate
from grpo.generation import Completion
from grpo.memory import Places, halving, places_that_fit


def test_what_fits_is_a_multiple_of_the_group_and_follows_the_memory(monkeypatch):
    model, found = tiny_model(), []
    # a token: 2 x 2 layers x 2 heads x 8 x 4 bytes = 256; a group: 256 x (2 x 100 + 4 x 50) + 4 x 128 x 4 x 3 = 108544
    left = argparse.Namespace(available=0)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: left)
    for left.available in (108_544 / 0.4 + 10, 3.9 * 108_544 / 0.4, 10**12):
        found.append(places_that_fit(model, 4, 100, 50))
    assert found == [4, 12, 256]
    left.available = 60_000
    with pytest.raises(ValueError, match="--max_new_tokens"):
        places_that_fit(model, 4, 100, 50)


def test_models_without_attention_have_places_too():
    config = MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=4)
    assert places_that_fit(AutoModelForCausalLM.from_config(config), 4, 100, 50) == 256


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: not enough")])
def test_out_of_memory_halves_until_it_fits(error, capsys):
    def call(size):
        if size > 8:
            raise error
        return f"done with {size}"

    assert halving(call, 40, 4, "--batch_size") == ("done with 8", 8)
    printed = capsys.readouterr().out
    assert printed.count("out of memory") == 2 and "--batch_size is 8 from now on" in printed


def test_too_little_for_one_group_is_a_sentence_and_other_errors_pass():
    def full(size):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ValueError, match="--batch_size 4 already"):
        halving(full, 16, 4, "--batch_size")

    def broken(size):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        halving(broken, 16, 4, "--batch_size")


def test_batch_sizes_on_the_command_line(capsys):
    parse = sampling_worker.parse_args
    assert parse(["--device", "cpu", "--batch_size", "12"]).batch_size == 12
    assert parse(["--device", "cpu", "--batch_size", "auto"]).batch_size == 0
    for wrong in ("0", "-4", "many"):
        with pytest.raises(SystemExit):
            parse(["--device", "cpu", "--batch_size", wrong])
        assert "neither a number from 1 on nor auto" in capsys.readouterr().err


class TooSmall:
    """A policy with memory for `fits` completions at a time, whose answers are one token each."""

    def __init__(self, fits: int):
        self.fits, self.asked = fits, []

    def generate(self, prompts, seeds, group_size, max_new_tokens, places=0, temperature=None):
        self.asked.append(places)
        if places > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        one = Completion(torch.tensor([3], dtype=torch.int32), torch.zeros(1), truncated=False)
        return [[one] * group_size for _ in prompts]


def judge(response, answer):
    return {"strict": True, "lenient": True, "format": True}


@pytest.mark.parametrize(("samples", "sizes"), [(0, [9, 4, 2]), (3, [9, 3])])
def test_evaluation_goes_on_with_fewer_places_and_remembers_them(samples, sizes, capsys):
    policy = TooSmall(3)
    questions = [Question(i, [5, 6], "", "7") for i in range(100)]
    places = Places(9, each=max(1, samples))
    for _ in range(2):
        settings = dict(samples=samples, max_new_tokens=4, places=places)
        records = [one for part in evaluate(policy, str, questions, judge, **settings) for one in part]
        assert len(records) == 100 * max(1, samples)
    assert policy.asked[: len(sizes)] == sizes and set(policy.asked[len(sizes) :]) == {sizes[-1]}
    assert f"--batch_size is {sizes[-1]} from now on" in capsys.readouterr().out


def test_held_out_questions_have_places_for_single_completions(monkeypatch):
    seen = []
    monkeypatch.setattr(sampling_worker, "places_that_fit", lambda model, group_size, *_: seen.append(group_size) or 7)
    sampler = object.__new__(sampling_worker.Sampler)
    sampler.args = sampling_worker.parse_args(["--device", "cpu", "--batch_size", "auto"])
    sampler.policy = argparse.Namespace(model=None)
    assert sampler.held_out_places == Places(7, each=1) and seen == [1]
    assert sampler.held_out_places is sampler.held_out_places
