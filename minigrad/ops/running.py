"""Running sums and products along an axis, and the product over axes, whose derivative is made of running ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, Axes, array_module, cast_to, is_half
from minigrad.engine.core import primitive
from minigrad.engine.registry import sample
from minigrad.ops.piecewise import zeros_like
from minigrad.ops.reduce import broadcast_back, chosen, masked, over_axes
from minigrad.ops.shape import as_tuple, concatenate, flip, moveaxis, reshape

__all__ = ["cumprod", "cumsum", "prod"]

# ---- products -------------------------------------------------------------------------------------------------------


@primitive(precision="wide", samples=over_axes)
def prod(x: Array, axis: Axes = None, keepdims: bool = False, where: Array | None = None) -> Array:
    """Product ``Π x`` over ``axis``; the gradient, the product of the others, is exact with zeros.

    >>> print(prod(np.array([2.0, 3.0, 4.0])))
    24.0
    """
    xp = array_module(x)
    x = chosen(xp.asarray(x), where, 1)
    if is_half(x.dtype):
        return cast_to(xp.prod(x, axis=axis, keepdims=keepdims, dtype=np.float32), x.dtype)
    return xp.prod(x, axis=axis, keepdims=keepdims)


def product_of_others(x: Array, axis: Axes) -> Array:
    """For each element the product of all others along ``axis``: exclusive products from both sides, no division."""
    axes = tuple(range(x.ndim)) if axis is None or not x.ndim else as_tuple(axis)
    last = tuple(range(x.ndim - len(axes), x.ndim))
    moved = moveaxis(x, axes, last)
    n = math.prod(moved.shape[a] for a in last)
    rows = reshape(moved, (*moved.shape[: x.ndim - len(axes)], n))
    ones = zeros_like(rows[..., :1]) + 1
    before = cumprod(concatenate([ones, rows[..., :-1]], -1), -1)
    after = flip(cumprod(concatenate([ones, flip(rows, -1)[..., :-1]], -1), -1), -1)
    return moveaxis(reshape(before * after, moved.shape), last, axes)


def _prod_rule(g: Array, x: Array, axis: Axes, keepdims: bool, where: Array | None) -> Array:
    counting = x if where is None else masked(x, where) + ~where
    return masked(broadcast_back(g, x.shape, axis, keepdims) * product_of_others(counting, axis), where)


prod.defvjp(_prod_rule)


# ---- running sums and products --------------------------------------------------------------------------------------


def _running(x: Array) -> Any:
    """The dtype of a running sum or product: float32 while it runs over half precision."""
    return np.float32 if is_half(x.dtype) else None


@primitive(precision="wide", samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=0)])
def cumsum(x: Array, axis: int | None = None) -> Array:
    """Running sums along ``axis`` (of the flattened array for None).

    >>> print(cumsum(np.array([1.0, 2.0, 3.0])))
    [1. 3. 6.]
    """
    xp = array_module(x)
    x = xp.asarray(x)
    out = xp.cumsum(x, axis=axis, dtype=_running(x))
    return cast_to(out, x.dtype) if is_half(x.dtype) else out


def _cumsum_rule(g: Array, x_shape: Any, axis: int | None) -> Array:
    a = 0 if axis is None else axis
    return reshape(flip(cumsum(flip(g, a), a), a), x_shape)


cumsum.defvjp(_cumsum_rule)


@primitive(precision="wide", samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=0)])
def cumprod(x: Array, axis: int | None = None) -> Array:
    """Running products along ``axis`` (of the flattened array for None); the gradient is exact with zeros.

    >>> print(cumprod(np.array([1.0, 2.0, 3.0])))
    [1. 2. 6.]
    """
    xp = array_module(x)
    x = xp.asarray(x)
    out = xp.cumprod(x, axis=axis, dtype=_running(x))
    return cast_to(out, x.dtype) if is_half(x.dtype) else out


@primitive(samples=[sample((2, 3), (2, 3))], flops=lambda out: 2 * out.size)
def linear_recurrence(a: Array, b: Array) -> Array:
    """``y[t] = b[t] + a[t] · y[t-1]`` along the last axis, from 0: what a running product differentiates to.

    >>> print(linear_recurrence(np.array([9.0, 2.0, 2.0]), np.ones(3)))
    [1. 3. 7.]
    """
    y = array_module(a, b).array(b)
    for t in range(1, y.shape[-1]):
        y[..., t] += a[..., t] * y[..., t - 1]
    return y


def _shifted(x: Array, fill: Array) -> Array:
    """``x`` one place later along the last axis, with ``fill`` in front."""
    return concatenate([fill, x[..., :-1]], -1)


def _suffix_recurrence(g: Array, a: Array) -> Array:
    """``s[t] = g[t] + a[t+1] · s[t+1]``: the gradient that reaches ``b`` in a linear recurrence."""
    backwards = flip(a, -1)
    return flip(linear_recurrence(_shifted(backwards, zeros_like(backwards[..., :1])), flip(g, -1)), -1)


linear_recurrence.defvjp(
    lambda g, a, out: _suffix_recurrence(g, a) * _shifted(out, zeros_like(out[..., :1])),
    lambda g, a: _suffix_recurrence(g, a),
)


def _cumprod_rule(g: Array, x: Array, axis: int | None) -> Array:
    """x[k] receives (product before k) · (g[k] + x[k+1] (g[k+1] + x[k+2] (…))): Horner, without a division."""
    axis = None if x.ndim == 0 else axis
    rows = reshape(x, (-1,)) if axis is None else moveaxis(x, axis, -1)
    g = g if axis is None else moveaxis(g, axis, -1)
    before = cumprod(_shifted(rows, zeros_like(rows[..., :1]) + 1), -1)
    result = before * _suffix_recurrence(g, rows)
    return reshape(result, x.shape) if axis is None else moveaxis(result, -1, axis)


cumprod.defvjp(_cumprod_rule)
