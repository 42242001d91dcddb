"""What a loss must take and give, tried on a few made-up numbers before anything is loaded.

The contract is written where the losses are, at the top of that section of utils.py; this file holds a loss to it and
knows which keyword arguments to pass. A step trains on what a loss returns, so a fault found at step 1 costs the start
of every process, and a loss that does not divide by its denominator is found by nobody.
"""

import inspect
import math
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

TENSORS = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "completion_mask")
FLAGS = {"beta": "--beta", "clip_eps": "--clip_eps", "clip_eps_high": "--clip_eps_high"}
FLAGS["importance_weights"] = "--tis_cap"
HOW = 'see "Losses" in utils.py'


def takes(loss_fn: Callable, name: str) -> bool:
    """Whether the loss has a keyword argument of this name, or takes any (**kwargs)."""
    parameters = inspect.signature(loss_fn).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def accepted(loss_fn: Callable, settings: dict) -> dict:
    """Those of the keyword arguments that the loss takes."""
    return {name: value for name, value in settings.items() if takes(loss_fn, name)}


def own_beta(loss_fn: Callable) -> float:
    """The weight of the KL term that the loss has by itself, 0 if it names none."""
    parameter = inspect.signature(loss_fn).parameters.get("beta")
    named = parameter is not None and parameter.default is not parameter.empty
    return float(parameter.default or 0.0) if named else 0.0


def check_loss(loss_fn: Callable, flags: dict[str, float]) -> None:
    """Refuse a loss that the learner cannot train by.

    `flags` are the keyword arguments that the user's flags set, by name.

    Raises:
        ValueError: what is missing or wrong, and how to write it.
    """
    if isinstance(loss_fn, type) or not callable(loss_fn) or not hasattr(loss_fn, "__name__"):
        raise ValueError(f"LOSS is {loss_fn!r:.60}, not a function: name one of utils.py, LOSS = grpo_loss")
    name = loss_fn.__name__
    if not callable(getattr(loss_fn, "denominator", None)):
        raise ValueError(
            f"{name} does not say what its sum is divided by: write @per(count_tokens), @per(count_sequences) or "
            f"@per(count_token_budget) in the line above `def {name}`, {HOW}"
        )
    for keyword in ("denominator", *flags):
        if not takes(loss_fn, keyword) and (keyword != "beta" or flags[keyword]):  # --beta 0: no KL term, as it is
            raise ValueError(_no_taker(name, keyword, flags))
    with torch.random.fork_rng(devices=[]):  # the run's random numbers do not depend on what a loss draws here
        _try(loss_fn, name, flags)


def _no_taker(name: str, keyword: str, flags: dict[str, float]) -> str:
    if keyword == "denominator":
        return f"{name} has no argument `denominator`, the count by which it must divide its sum: {HOW}"
    flag = FLAGS[keyword]
    return f"{flag} {flags[keyword]:g} has no effect in {name}, which has no argument `{keyword}`: leave {flag} out"


def _try(loss_fn: Callable, name: str, flags: dict[str, float]) -> None:
    """Three sequences, one of which has no token that counts, for the loss and twice its denominator."""
    mask = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    old = torch.tensor([[-0.7, -1.2, -0.3], [-2.0, -0.5, 0.0], [-0.9, -0.4, -1.1]])
    advantages = torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 3)
    settings = flags | {"beta": flags.get("beta", own_beta(loss_fn))}
    if "importance_weights" in flags:
        settings["importance_weights"] = torch.ones_like(old)
    ref = old + 0.1 if settings["beta"] else None
    gradients = []
    count = _call(name, loss_fn.denominator, mask, 4)
    if isinstance(count, torch.Tensor):
        count = count.item()
    if not (isinstance(count, (int, float)) and 0 < count < math.inf):
        raise ValueError(f"@per of {name} counts {count!r:.60} of 5 tokens in 2 sequences, not a number above 0: {HOW}")
    for denominator in (float(count), 2.0 * count):
        torch.manual_seed(0)
        logprobs = (old + 1e-5).requires_grad_()
        keywords = accepted(loss_fn, settings | {"denominator": denominator})
        _check_signature(loss_fn, name, keywords)
        result = _call(name, loss_fn, logprobs, old.clone(), ref, advantages.clone(), mask.clone(), **keywords)
        gradients.append(_gradient(name, result, logprobs))
    once, twice = gradients
    if not torch.allclose(once, 2 * twice, rtol=1e-3, atol=1e-7):
        raise ValueError(
            f"{name} does not divide by `denominator`: with twice as large a one its gradient must be half, so that "
            f"the parts of a step add up to the whole, {HOW}"
        )


def _check_signature(loss_fn: Callable, name: str, keywords: dict) -> None:
    try:
        inspect.signature(loss_fn).bind(*TENSORS, **keywords)
    except TypeError as error:
        raise ValueError(
            f"{name} cannot be called as the learner calls it ({error}): it gets {', '.join(TENSORS)} in this order, "
            f"and by name those that it has of denominator, {', '.join(FLAGS)}; give any other a default, {HOW}"
        ) from None


def _call(name: str, function: Callable, *arguments, **keywords):
    try:
        return function(*arguments, **keywords)
    except Exception as error:  # the user's code may raise anything; it is told, never swallowed
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        what = " ".join(str(error).split())
        raise ValueError(
            f"{name} fails on a trial batch of 3 sequences x 3 tokens with {type(error).__name__}: {what} ({where})"
        ) from None


def _gradient(name: str, result, logprobs: torch.Tensor) -> torch.Tensor:
    """The loss's gradient, once its value and its metrics are what they must be."""
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(f"{name} returns {_kind(result)}, not a pair (loss, metrics): {HOW}")
    loss, metrics = result
    if not (isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point()):
        raise ValueError(f"{name} returns {_kind(loss)} as its loss, not one number in a tensor: {HOW}")
    if not loss.requires_grad:
        raise ValueError(f"the loss of {name} does not depend on logprobs, so it has no gradient: {HOW}")
    _check_metrics(name, metrics)
    (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    if gradient is None:
        raise ValueError(f"the loss of {name} does not depend on logprobs, so it has no gradient: {HOW}")
    for what, value in ("value", loss.detach()), ("gradient", gradient):
        if not value.isfinite().all():
            raise ValueError(
                f"{name} gives a {what} that is not finite on a trial batch in which one of 3 sequences has no token "
                f"that counts: such a sequence must add 0, {HOW}"
            )
    return gradient


def _check_metrics(name: str, metrics) -> None:
    if not isinstance(metrics, dict):
        raise ValueError(f"{name} returns {_kind(metrics)} as its metrics, not a dict {{name: (sum, count)}}: {HOW}")
    for key, pair in metrics.items():
        try:
            total, count = pair
            float(total), float(count)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"the metric {key!r} of {name} is {_kind(pair)}, not (sum, count): {HOW}") from None


def _kind(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return " ".join(f"{value!r:.60}".split())
