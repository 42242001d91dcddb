"""What the learner asks of a loss, and the sentence for each way to break it."""

import functools

import pytest
import torch

import training_worker
import utils
from grpo.loss_contract import accepted, check_loss, own_beta, takes
from utils import count_tokens, per

FIVE = "logprobs, old_logprobs, ref_logprobs, advantages, completion_mask"
SUM = "-(advantages * logprobs).masked_fill(~completion_mask, 0.0).sum()"
GOOD = f"@per(count_tokens)\ndef mine({FIVE}, *, denominator):\n    return {SUM} / denominator, {{}}\n"
WITH_ALL = GOOD.replace("*, denominator", "**settings").replace("/ denominator", "/ settings['denominator']")
NO_COUNT = GOOD.replace("@per(count_tokens)\n", "")


def made(source):
    """The loss `mine` of a source text, beside utils.py's own names."""
    names = vars(utils).copy()
    exec(source, names)
    return names["mine"]


@pytest.mark.parametrize("name", ["grpo_loss", "gspo_loss", "dapo_loss", "dr_grpo_loss", "cispo_loss"])
@pytest.mark.parametrize(
    "flags",
    [{}, {"beta": 0}, {"beta": 0.5, "clip_eps": 0, "clip_eps_high": 0.1}, {"clip_eps": 0.3}, {"importance_weights": 2}],
    ids=str,
)
def test_the_five_losses_keep_the_contract(name, flags):
    check_loss(getattr(utils, name), flags)


def test_a_short_loss_is_given_what_it_takes():
    short, everything = made(GOOD), made(WITH_ALL)
    check_loss(short, {"beta": 0})
    check_loss(everything, {"beta": 0.1, "clip_eps": 0.2, "clip_eps_high": 0.3, "importance_weights": 2.0})
    settings = {"beta": 0.0, "denominator": 3.0}
    assert accepted(short, settings) == {"denominator": 3.0} and accepted(everything, settings) == settings
    assert own_beta(short) == own_beta(everything) == 0.0 and own_beta(utils.grpo_loss) == 0.04


def test_a_wrapped_loss_is_the_loss():
    @functools.wraps(utils.grpo_loss)
    def mine(*arguments, **settings):
        return utils.grpo_loss(*arguments, **settings)

    check_loss(mine, {"clip_eps": 0.1})
    assert own_beta(mine) == 0.04 and takes(mine, "importance_weights") and not takes(mine, "temperature")


def returning(what):
    return GOOD.replace(f"return {SUM} / denominator, {{}}", f"loss = {SUM} / denominator\n    return {what}")


BROKEN = {
    "no @per": (NO_COUNT, {}, ["mine does not say what its sum is divided by", "@per(count_tokens)", "`def mine`"]),
    "no denominator": (GOOD.replace(", *, denominator", ""), {}, ["mine has no argument `denominator`"]),
    "a count of nothing": (GOOD.replace("count_tokens", "lambda mask, most: 0"), {}, ["@per of mine counts 0 of 5"]),
    "a flag for a KL term": (GOOD, {"beta": 0.1}, ["--beta 0.1 has no effect in mine", "leave --beta out"]),
    "a flag for a clip": (GOOD, {"clip_eps": 0.2}, ["--clip_eps 0.2 has no effect in mine"]),
    "a flag for an upper clip": (GOOD, {"clip_eps_high": 0.2}, ["--clip_eps_high 0.2 has no effect in mine"]),
    "a flag for importance": (GOOD, {"importance_weights": 2}, ["--tis_cap 2 has no effect", "`importance_weights`"]),
    "a keyword that nobody gives": (
        GOOD.replace("denominator):", "denominator, entropy):"), {}, ["mine cannot be called", "'entropy'", "default"]),
    "a clip width without a default": (
        GOOD.replace("denominator):", "denominator, clip_eps):"), {}, ["mine cannot be called", "'clip_eps'"]),
    "too few tensors": (GOOD.replace("ref_logprobs, ", ""), {}, ["mine cannot be called", FIVE]),
    "a bug": (GOOD.replace(SUM, "nothing.sum()"), {}, ["mine fails on a trial", "NameError", "'nothing'", "line 3"]),
    "a mask of numbers": (GOOD.replace("~completion_mask", "1 - completion_mask"), {}, ["mine fails", "RuntimeError"]),
    "one value": (returning("loss"), {}, ["mine returns a tensor of shape (), not a pair (loss, metrics)"]),
    "three values": (returning("loss, {}, 0"), {}, ["not a pair (loss, metrics)"]),
    "a loss a sequence": (returning("loss.expand(3), {}"), {}, ["a tensor of shape (3,) as its loss, not one number"]),
    "a plain number": (returning("float(loss.detach()), {}"), {}, ["as its loss, not one number in a tensor"]),
    "no gradient": (returning("loss.detach(), {}"), {}, ["does not depend on logprobs"]),
    "a gradient of something else": (
        returning("loss.detach() * torch.ones((), requires_grad=True), {}"), {}, ["does not depend on logprobs"]),
    "a list of metrics": (returning("loss, []"), {}, ["mine returns [] as its metrics, not a dict"]),
    "a mean as a metric": (returning("loss, {'x': loss.detach()}"), {}, ["the metric 'x' of mine", "(sum, count)"]),
    "a metric of tensors": (
        returning("loss, {'x': (logprobs.detach(), 3)}"), {}, ["the metric 'x' of mine", "(sum, count)"]),
    "a mean over no tokens": (
        GOOD.replace(f"return {SUM}", f"return ({SUM[:-6]}.sum(1) / completion_mask.sum(1)).sum()"),
        {},
        ["mine gives a value that is not finite", "no token that counts"],
    ),
    "a mean of its own": (
        GOOD.replace("/ denominator", "/ completion_mask.sum()"), {}, ["mine does not divide by `denominator`"]),
    "text": ("mine = 'gspo_loss'", {}, ["LOSS is 'gspo_loss', not a function"]),
    "a class": ("class mine: pass", {}, ["not a function"]),
}  # fmt: skip


@pytest.mark.parametrize("source, flags, words", BROKEN.values(), ids=BROKEN.keys())
def test_each_breach_is_one_sentence(source, flags, words):
    with pytest.raises(ValueError) as error:
        check_loss(made(source), flags)
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message, message


def test_the_command_line_refuses_a_broken_loss(monkeypatch, capsys):
    monkeypatch.setattr(training_worker, "LOSS", made(NO_COUNT))
    with pytest.raises(SystemExit):
        training_worker.parse_args([])
    assert "mine does not say what its sum is divided by" in capsys.readouterr().err
    monkeypatch.setattr(training_worker, "LOSS", made(GOOD))
    assert training_worker.beta(training_worker.parse_args([])) == 0
    with pytest.raises(SystemExit):
        training_worker.parse_args(["--tis_cap", "2"])
    assert "--tis_cap 2 has no effect in mine" in capsys.readouterr().err


def test_the_trial_leaves_the_random_numbers_alone():
    @per(count_tokens)
    def mine(logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, *, denominator):
        noise = torch.rand(())
        return (logprobs * completion_mask).sum() * noise / denominator, {}

    before = torch.get_rng_state()
    check_loss(mine, {})
    assert torch.equal(torch.get_rng_state(), before)
