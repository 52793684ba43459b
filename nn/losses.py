"""Losses written as compositions, with torch's argument order and reductions; all are differentiable in float targets.

Cross-entropy, the one that training a language model spends time in, is a kernel of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad import (
    Tensor,
    absolute,
    asarray,
    clip,
    exp,
    hypot,
    log,
    minimum,
    norm,
    softplus,
    sqrt,
    take_along_axis,
    where,
)
from minigrad.backend import accumulator, array_module, array_of, is_on_gpu, to_device_of
from minigrad.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError
from minigrad.messages.explain import explained
from minigrad.tensor import Operand, TensorLike, X
from .checks import as_operand, check_sizes
from .distances import pairwise_distance


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


# ---- of numbers ------------------------------------------------------------------------------------------------------


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
def l1_loss(input: Operand[X], target: Operand[X], reduction: str = "mean") -> X:
    """Absolute error ``|input - target|``, elementwise, then reduced by "mean", "sum" or "none".

    >>> print(l1_loss(np.array([1.0, 3.0]), np.array([1.0, 1.0])))
    1.0
    """
    x, t = _checked(input, target, reduction)
    return _reduced(absolute(x - t), reduction)


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
def smooth_l1_loss(input: Operand[X], target: Operand[X], reduction: str = "mean", beta: float = 1.0) -> X:
    """``d² / (2 beta)`` of a difference d below beta, ``|d| - beta/2`` beyond: ``huber_loss / beta``.

    >>> print(smooth_l1_loss(np.array([1.0, 4.0]), np.array([0.0, 0.0]), reduction="none"))
    [0.5 3.5]
    """
    x, t = _checked(input, target, reduction)
    if not 0 <= beta < math.inf:
        raise ArgumentError("beta, a finite number from 0", repr(beta), "1 is usual")
    difference = x - t
    if beta == 0:
        return _reduced(absolute(difference), reduction)
    inner = clip(difference, -beta, beta)
    return _reduced(inner / beta * (difference - inner / 2), reduction)


# ---- of probabilities ------------------------------------------------------------------------------------------------


@explained
def binary_cross_entropy(
    input: Operand[X], target: Operand[X], weight: Operand[X] | None = None, reduction: str = "mean"
) -> X:
    """``-t ln p - (1 - t) ln(1 - p)`` of probabilities p, elementwise; a logarithm below -100 counts as -100.

    From logits ``binary_cross_entropy_with_logits`` is exact.

    >>> print(binary_cross_entropy(np.array([0.5]), np.array([1.0])).round(4))
    0.6931
    """
    p, t = _checked(input, target, reduction)
    plain = array_of(p)
    if plain.size and not bool(((plain >= 0) & (plain <= 1)).all()):
        hint = "binary_cross_entropy_with_logits takes any number"
        raise ArgumentError("probabilities from 0 to 1", f"numbers from {plain.min()} to {plain.max()}", hint)

    def logarithm(q: Any) -> Any:
        small = array_of(q) < math.exp(-100)
        return where(small, -100, log(where(small, 1, q)))

    losses = -(t * logarithm(p) + (1 - t) * logarithm(1 - p))
    return _reduced(losses if weight is None else losses * weight, reduction)


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


@explained
def poisson_nll_loss(
    input: Operand[X], target: Operand[X], log_input: bool = True, full: bool = False, eps: float = 1e-8,
    reduction: str = "mean",
) -> X:  # fmt: skip
    """``e^x - t x`` of logarithms x of a Poisson rate, or ``x - t ln(x + eps)`` of rates, elementwise.

    full: with Stirling's ``t ln t - t + ½ ln 2πt`` for targets above 1, which doesn't depend on the input.

    >>> print(poisson_nll_loss(np.array([0.0]), np.array([2.0])))
    1.0
    """
    x, t = _checked(input, target, reduction)
    losses = exp(x) - t * x if log_input else x - t * log(x + eps)
    if full:
        large = array_of(t) > 1
        s = where(large, t, 1)
        losses = losses + where(large, s * log(s) - s + 0.5 * log(2 * math.pi * s), 0)
    return _reduced(losses, reduction)


@explained
def gaussian_nll_loss(
    input: Operand[X], target: Operand[X], var: Operand[X], full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> X:  # fmt: skip
    """``½ (ln v + (input - target)² / v)`` with v = max(var, eps); ``var`` broadcasts. full: with ``½ ln 2π``.

    >>> print(gaussian_nll_loss(np.array([1.0]), np.array([3.0]), np.array([1.0])))
    2.0
    """
    x, t = _checked(input, target, reduction)
    spread: Any = as_operand(var)
    if bool((array_of(spread) < 0).any()):
        raise ArgumentError("variances from 0", "a negative one", "exp makes every number positive")
    v = where(array_of(spread) < eps, eps, spread)
    losses = 0.5 * (log(v) + ((x - t) / sqrt(v)) ** 2)  # where the quotient fits, the square need not
    return _reduced(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


# ---- of margins ------------------------------------------------------------------------------------------------------


def _rectified(x: Any) -> Any:
    """``max(x, 0)``, whose derivative at 0 is 0."""
    return where(x <= 0, 0, x)  # which NaN is not


@explained
def soft_margin_loss(input: Operand[X], target: Operand[X], reduction: str = "mean") -> X:
    """``ln(1 + e^(-t x))`` of scores x and targets t of 1 and -1, without overflow.

    >>> print(soft_margin_loss(np.array([0.0]), np.array([1.0])).round(4))
    0.6931
    """
    x, t = _checked(input, target, reduction)
    return _reduced(softplus(-t * x), reduction)


@explained
def hinge_embedding_loss(input: Operand[X], target: Operand[X], margin: float = 1.0, reduction: str = "mean") -> X:
    """``x`` where the target is 1, ``max(0, margin - x)`` where it is -1.

    >>> print(hinge_embedding_loss(np.array([0.25, 0.25]), np.array([1.0, -1.0]), reduction="none"))
    [0.25 0.75]
    """
    x, t = _checked(input, target, reduction)
    sign = array_of(t)
    return _reduced(where(sign != -1, x, 0) + where(sign != 1, _rectified(margin - x), 0), reduction)


@explained
def margin_ranking_loss(
    input1: Operand[X], input2: Operand[X], target: Operand[X], margin: float = 0.0, reduction: str = "mean"
) -> X:
    """``max(0, margin - t (x1 - x2))``: the first is to be larger where t is 1, the second where it is -1.

    >>> print(margin_ranking_loss(np.array([1.0]), np.array([3.0]), np.array([1.0])))
    2.0
    """
    first, second = _checked(input1, input2, reduction)
    return _reduced(_rectified(margin - as_operand(target) * (first - second)), reduction)


@explained
def cosine_embedding_loss(
    input1: Operand[X], input2: Operand[X], target: Operand[X], margin: float = 0.0, reduction: str = "mean"
) -> X:
    """``1 - cos`` of the angle between vectors whose target is 1, ``max(0, cos - margin)`` where it is -1.

    >>> print(cosine_embedding_loss(np.array([[1.0, 0.0]]), np.array([[0.0, 2.0]]), np.array([1.0])))
    1.0
    """
    first, second = _checked(input1, input2, reduction)
    sign = array_of(as_operand(target))
    a, b = (v / hypot(norm(v, 2, -1, keepdims=True), 1e-6) for v in (first, second))  # √(|v|² + 1e-12)
    cosine = (a * b).sum(-1)
    return _reduced(where(sign == 1, 1 - cosine, 0) + where(sign == -1, _rectified(cosine - margin), 0), reduction)


@explained
def triplet_margin_loss(
    anchor: Operand[X], positive: Operand[X], negative: Operand[X], margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-6, swap: bool = False, reduction: str = "mean",
) -> X:  # fmt: skip
    """``max(0, |a - b|ₚ - |a - c|ₚ + margin)`` of an anchor a, a positive b and a negative c: vectors on the last axis.

    swap: the distance of the negative is that to the nearer of a and b. Balntas et al. (2016).

    >>> print(triplet_margin_loss(np.array([[0.0]]), np.array([[3.0]]), np.array([[1.0]])).round(4))
    3.0
    """
    a, b = _checked(anchor, positive, reduction)
    near, far = pairwise_distance(a, b, p, eps), pairwise_distance(a, negative, p, eps)
    if swap:
        far = minimum(far, pairwise_distance(b, negative, p, eps))
    return _reduced(_rectified(near - far + margin), reduction)
