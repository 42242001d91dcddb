"""Batch sizes by memory, and what happens when it runs out."""

import argparse

import pytest
import torch
from tiny import tiny_model

import sampling_worker
from grpo import memory
from grpo.memory import halving, places_that_fit


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
