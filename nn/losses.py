"""Losses written as compositions, with torch's argument order and reductions; all are differentiable in float targets.

Cross-entropy, the one that training a language model spends time in, is a kernel of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad import Tensor, asarray, clip, exp, log, softplus, take_along_axis, where
from minigrad.backend import accumulator, array_module, array_of, is_on_gpu, to_device_of
from minigrad.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError
from minigrad.messages.explain import explained
from minigrad.tensor import Operand, TensorLike, X
from .checks import as_operand, check_sizes


def _reduced(losses: Any, reduction: str) -> Any:
    if reduction == "mean":
        return losses.mean() if losses.size else losses.sum()
    return losses.sum() if reduction == "sum" else losses


def _mean_over(losses: Any, count: int) -> Any:
    """The sum over ``count``, formed wide: in half precision neither the sum nor the count need be a number."""
    wide = losses.astype(accumulator(losses.dtype))
    return _unless_overflown(lambda: wide.sum() / count, lambda: (wide / count).sum()).astype(losses.dtype)


def _unless_overflown(plain: Callable[[], Any], small: Callable[[], Any]) -> Any:
    """The number that the first function gives; where it isn't finite, what the second does of smaller numbers.

    To look would be to wait for a GPU: there the first number stays.
    """
    with np.errstate(over="ignore"):
        found = plain()
    return found if is_on_gpu(array_of(found)) or math.isfinite(array_of(found)) else small()


def _checked(input: Any, target: Any, reduction: str, more: tuple[str, ...] = ()) -> tuple[Any, Any]:
    input, target = as_operand(input), as_operand(target)
    legal = ("mean", "sum", "none", *more)
    if reduction not in legal:
        raise ArgumentError(f"a reduction of {legal}", repr(reduction), "'none' gives every loss")
    if np.shape(input) != np.shape(target):
        hint = "nothing is broadcast in a loss: (N,) against (N, 1) would give N² terms"
        raise ShapeError(f"a target of the input's shape {np.shape(input)}", f"shape {np.shape(target)}", hint)
    return input, target


@explained
def mse_loss(input: Operand[X], target: Operand[X], reduction: str = "mean") -> X:
    """Mean squared error ``(input - target)²``, elementwise, then reduced by "mean", "sum" or "none".

    >>> print(mse_loss(np.array([1.0, 3.0]), np.array([1.0, 1.0])))
    2.0
    """
    x, t = _checked(input, target, reduction)
    difference = x - t
    if reduction != "mean" or not difference.size:
        return _reduced(difference * difference, reduction)
    count = difference.size
    return _unless_overflown(
        lambda: (difference * difference).mean(), lambda: (difference * (difference / count)).sum()
    )


@explained
def huber_loss(input: Operand[X], target: Operand[X], reduction: str = "mean", delta: float = 1.0) -> X:
    """``d²/2`` of a difference d of at most delta, ``delta (|d| - delta/2)`` beyond: an outlier pulls no harder.

    Elementwise, then reduced by "mean", "sum" or "none". Huber, "Robust estimation of a location parameter" (1964).

    >>> print(huber_loss(np.array([1.0, 4.0]), np.array([0.0, 0.0]), reduction="none"))
    [0.5 3.5]
    """
    x, t = _checked(input, target, reduction)
    if isinstance(delta, bool) or not isinstance(delta, int | float | np.number) or not 0 < delta < math.inf:
        raise ArgumentError("delta, a finite number above 0", repr(delta), "1 is usual")
    difference = x - t
    inner = clip(difference, -delta, delta)
    return _reduced(inner * (difference - inner / 2), reduction)


@explained
def binary_cross_entropy_with_logits(
    input: Operand[X],
    target: Operand[X],
    weight: Operand[X] | None = None,
    reduction: str = "mean",
    pos_weight: Operand[X] | None = None,
) -> X:
    """``-t log σ(x) - (1 - t) log(1 - σ(x))`` of logits x and probabilities t, elementwise, without overflow.

    weight multiplies the losses, pos_weight the first term; both broadcast. reduction: "mean", "sum" or "none".

    >>> print(binary_cross_entropy_with_logits(np.array([0.0]), np.array([1.0])).round(4))
    0.6931
    """
    x, t = _checked(input, target, reduction)
    more: Any = pos_weight
    positive = 1 if more is None else 1 + (more - 1) * t
    losses = (1 - t) * x + positive * softplus(-x)
    return _reduced(losses if weight is None else losses * weight, reduction)


@explained
def kl_div(input: Operand[X], target: Operand[X], reduction: str = "mean", log_target: bool = False) -> X:
    """Kullback-Leibler divergence ``t (log t - x)`` of log-probabilities x from probabilities t, elementwise.

    Where t is 0 the loss and its gradients are 0. log_target: the target holds log t. reduction: "batchmean" (the sum
    over the length of the first axis, the divergence itself), "mean" over all elements, "sum" or "none".

    >>> print(kl_div(np.log(np.array([0.5, 0.5])), np.array([1.0, 0.0]), reduction="sum").round(4))
    0.6931
    """
    x, t = _checked(input, target, reduction, ("batchmean",))
    if log_target:
        losses = exp(t) * (t - x)
    else:
        some = t > 0
        losses = where(some, t * (log(where(some, t, 1)) - where(some, x, 0)), 0)
    if reduction == "batchmean":
        return _mean_over(losses, max(losses.shape[0] if losses.ndim else 1, 1))
    return _reduced(losses, reduction)


@explained
def nll_loss(log_probs: Operand[X], targets: Operand[X], ignore_index: int = -100, reduction: str = "mean") -> X:
    """Negative log-likelihood ``-log_probs[..., target]`` of class ids, classes on the last axis.

    log_probs (..., V), targets integers (...). Targets equal to ignore_index count for nothing: "mean" is over the
    others, and 0 if there are none. A class outside of 0 … V-1 raises an IndexRangeError.

    >>> print(nll_loss(np.log(np.array([[0.25, 0.75]])), np.array([1])).round(4))
    0.2877
    """
    given: Any = targets
    x, t = as_operand(log_probs), asarray(given).data
    _checked(np.broadcast_to(0, x.shape[:-1]), t, reduction)
    counted = t != ignore_index
    ids = t * counted if t.dtype.kind in "iu" else t
    _check_classes(ids, x.shape[-1])
    losses = where(to_device_of(counted, array_of(x)), -take_along_axis(x, ids[..., None], -1)[..., 0], 0)
    return _mean_over(losses, max(int(counted.sum()), 1)) if reduction == "mean" else _reduced(losses, reduction)


def _check_classes(ids: Any, classes: float) -> None:
    if ids.dtype.kind not in "iu":
        raise DTypeError("class ids as integers", f"dtype {ids.dtype}", "astype('int64') makes integers")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= classes):
        wrong = ids[(ids < 0) | (ids >= classes)].reshape(-1)[0]
        most = "" if classes == math.inf else f" to {int(classes) - 1}, for {int(classes)} of them"
        raise IndexRangeError(f"classes from 0{most}", f"class {int(wrong)}", "classes count from 0")


@explained
def one_hot(ids: TensorLike, num_classes: int | None = None) -> Tensor:
    """Integers 0 and 1: a row for each id, with a 1 in its place; (...) to (..., num_classes).

    num_classes is by default one more than the largest id.

    >>> print(one_hot([0, 2]).data)
    [[1 0 0]
     [0 0 1]]
    """
    ids = asarray(ids).data
    if num_classes is not None:
        check_sizes(num_classes=num_classes)
    _check_classes(ids, math.inf if num_classes is None else num_classes)
    if num_classes is None:
        num_classes = int(ids.max()) + 1 if ids.size else 0
    xp = array_module(ids)
    return asarray((ids[..., None] == xp.arange(num_classes)).astype(np.int64))
