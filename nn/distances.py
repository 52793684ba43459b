"""Distances and angles between vectors, which losses are made of, with torch's argument order."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad import broadcast_to, norm, where
from minigrad.backend import array_of
from minigrad.messages.explain import explained
from minigrad.tensor import Operand, X
from .checks import as_operand


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
    return where(x <= eps, eps, x)  # which NaN is not


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
