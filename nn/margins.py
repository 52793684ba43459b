"""Losses of margins and distances, with torch's argument order and reductions: compositions, as in ``losses.py``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad import absolute, broadcast_to, clip, exp, log, minimum, norm, softplus, sqrt, where
from minigrad.backend import array_of
from minigrad.errors import ArgumentError
from minigrad.messages.explain import explained
from minigrad.tensor import Operand, X
from .checks import as_operand
from .losses import _checked, _reduced


def _rectified(x: Any) -> Any:
    """``max(x, 0)``, whose derivative at 0 is 0."""
    return where(x > 0, x, 0 * x)


@explained
def l1_loss(input: Operand[X], target: Operand[X], reduction: str = "mean") -> X:
    """Absolute error ``|input - target|``, elementwise, then reduced by "mean", "sum" or "none".

    >>> print(l1_loss(np.array([1.0, 3.0]), np.array([1.0, 1.0])))
    1.0
    """
    x, t = _checked(input, target, reduction)
    return _reduced(absolute(x - t), reduction)


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
    losses = 0.5 * (log(v) + (x - t) ** 2 / v)
    return _reduced(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


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
def cosine_similarity(x1: Operand[X], x2: Operand[X], axis: int = 1, eps: float = 1e-8) -> X:
    """``x1 · x2 / (max(|x1|, eps) max(|x2|, eps))`` of vectors along ``axis``; the others broadcast.

    >>> print(cosine_similarity(np.array([[3.0, 4.0]]), np.array([[3.0, 0.0]])))
    [0.6]
    """
    first, second = as_operand(x1), as_operand(x2)
    shape = np.broadcast_shapes(np.shape(array_of(first)), np.shape(array_of(second)))
    first, second = broadcast_to(first, shape), broadcast_to(second, shape)
    a, b = (v / _at_least(norm(v, 2, axis, keepdims=True), eps) for v in (first, second))
    return (a * b).sum(axis)


def _at_least(x: Any, eps: float) -> Any:
    """``max(x, eps)``, whose derivative is 0 up to eps."""
    return where(x > eps, x, eps)


@explained
def normalize(x: Operand[X], p: float = 2.0, axis: int = 1, eps: float = 1e-12) -> X:
    """``x / max(|x|ₚ, eps)`` along ``axis``.

    >>> print(normalize(np.array([[3.0, 4.0]])))
    [[0.6 0.8]]
    """
    array: Any = as_operand(x)
    return array / _at_least(norm(array, p, axis, keepdims=True), eps)


@explained
def pairwise_distance(x1: Operand[X], x2: Operand[X], p: float = 2.0, eps: float = 1e-6, keepdims: bool = False) -> X:
    """``|x1 - x2 + eps|ₚ`` of vectors along the last axis; eps keeps it differentiable where they are equal.

    >>> print(pairwise_distance(np.array([3.0, 4.0]), np.zeros(2), eps=0.0))
    5.0
    """
    first, second = as_operand(x1), as_operand(x2)
    return norm(first - second + eps, p, -1, keepdims)


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
    cosine = ((first * second).sum(-1)) / sqrt(((first * first).sum(-1) + 1e-12) * ((second * second).sum(-1) + 1e-12))
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
