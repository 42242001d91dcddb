"""What people type who come from elsewhere is answered in a sentence."""

import pytest

import sampling_worker
import training_worker

WRONG = [
    (training_worker, ["--learning_rate", "1e-4"], "--learning_rate is no flag here: the learning rate is"),
    (training_worker, ["--lr=1e-4"], "--lr is no flag here: the learning rate is optimizer.params.lr"),
    (training_worker, ["--batch_size", "8"], "--batch_size, the completions decoded at a time, is the sampler's"),
    (training_worker, ["--lora_r", "8"], "--lora_r is no flag here: the rank is the learner's --lora_rank"),
    (training_worker, ["--num_generations", "8"], "the learner's --group_size"),
    (training_worker, ["--num_epochs", "3"], "--max_steps"),
    (training_worker, ["--max_new_tokens", "3"], "--max_new_tokens is a flag of the other program, sampling_worker.py"),
    (training_worker, ["--save_stps", "3"], "--save_stps is no flag of this program; did you mean --save_steps?"),
    (training_worker, ["--xyzzy"], "--xyzzy is no flag of this program; --help lists the flags"),
    (training_worker, ["--max_steps", "many"], "argument --max_steps: invalid int value: 'many'"),
    (sampling_worker, ["--max_completion_length", "9"], "the sampler's --max_new_tokens"),
    (sampling_worker, ["--group_size", "9"], "--group_size is a flag of the other program, training_worker.py"),
]  # fmt: skip


@pytest.mark.parametrize("program, argv, words", WRONG)
def test_a_wrong_flag_is_one_sentence(program, argv, words, capsys):
    with pytest.raises(SystemExit) as end:
        program.parse_args(argv)
    error = capsys.readouterr().err
    assert end.value.code == 2 and words in error and error.count("\n") == 1 and len(error) < 400


def test_one_rank_says_it(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        training_worker.parse_args(["--xyzzy"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("program", [sampling_worker, training_worker])
def test_help_shows_no_default_that_says_nothing(program):
    text = " ".join(program.make_parser().format_help().split())
    for nothing in ("(default: None)", "(default: False)", "(default: [])", "(default: off) (default"):
        assert nothing not in text
    assert "(default: 5555)" in text and "(default: ./checkpoints)" in text
