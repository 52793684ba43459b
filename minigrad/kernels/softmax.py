"""Softmax and its logarithm along an axis, row by row over cache-sized tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, cast_to
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.kernels.rows import as_matrix, dtypes, exponentials, matrix_of, over_rows
from minigrad.ops import astype, exp, isfinite, log, max, stop_gradient, sum, where
from minigrad.ops.shape import normal_axis

_samples = [sample((2, 3)), sample((2, 3, 4), axis=1), sample((4,), 0)]


def _shifted(x: Array, axis: int) -> tuple[Array, Array, Array]:
    """``x`` less its largest element, the exponentials of that, and their sums; a row of only -∞ stays as it is."""
    wide = astype(x, dtypes(x)[1])
    top = stop_gradient(max(wide, normal_axis(axis, x.ndim), True, initial=-math.inf))
    shifted = wide - where(isfinite(top), top, 0)
    weights = exp(shifted)
    return shifted, weights, sum(weights, axis, True)


@fused(precision="wide", torch=lambda t, x, axis=-1: t.softmax(x, axis), numpy=False, samples=_samples)
def softmax(x: Array, axis: int = -1) -> Array:
    """``e^x / Σ e^x`` along ``axis``: positive numbers that sum to 1.

    A row of only -∞, in which nothing is allowed, gives zeros, and its gradient is 0. Half precision is computed in
    float32 and rounded once.

    >>> print(softmax(np.array([[0.0, 0.0], [-np.inf, -np.inf]])))
    [[0.5 0.5]
     [0.  0. ]]
    """
    _, weights, total = _shifted(x, axis)
    return astype(weights / where(total == 0, 1, total), dtypes(x)[0])


@softmax.defforward
def _softmax_forward(x: Any, axis: int) -> tuple[Array, dict[str, Any]]:
    def finish(x: Array, e: Array, shift: Array, total: Array) -> None:
        with np.errstate(under="ignore"):
            e *= np.divide(1, total)[:, None]

    return _by_rows(x, axis, 3.0, finish), {}


@softmax.defbackward("x")
def _softmax_backward(g: Any, out: Any, x_dtype: Any, axis: int) -> tuple[Array]:
    """s (g - Σ g s); where one s is nearly 1, with its g taken off first: 1 - s would be noise."""
    work = accumulator(out.dtype)
    g, out = _last(g, axis, work), _last(out, axis, work)
    gx = np.empty_like(out)
    up, rows, result = as_matrix(g, work), as_matrix(out, work), matrix_of(gx)

    def body(a: int, b: int) -> None:
        mean = np.vecdot(up[a:b], rows[a:b])
        with np.errstate(under="ignore"):
            np.subtract(up[a:b], mean[:, None], out=result[a:b])
            result[a:b] *= rows[a:b]
            if len(peaked := a + _peaked(rows[a:b])):
                s = rows[peaked]
                apart = up[peaked] - up[peaked, s.argmax(1)][:, None]
                result[peaked] = (apart - np.vecdot(apart, s)[:, None]) * s

    over_rows(body, rows, arrays=3, ns=1.0)
    return (_home(gx, axis, x_dtype),)


@fused(precision="wide", torch=lambda t, x, axis=-1: t.log_softmax(x, axis), numpy=False, samples=_samples)
def log_softmax(x: Array, axis: int = -1) -> Array:
    """``x - ln Σ e^x`` along ``axis``: the logarithm of softmax, exact where that would be 0.

    A row of only -∞ stays -∞, and its gradient is 0. Half precision is computed in float32 and rounded once.

    >>> print(log_softmax(np.array([0.0, -1000.0])))
    [    0. -1000.]
    """
    shifted, _, total = _shifted(x, axis)
    empty = total == 0
    return astype(where(empty, -math.inf, shifted - log(where(empty, 1, total))), dtypes(x)[0])


@log_softmax.defforward
def _log_forward(x: Any, axis: int) -> tuple[Array, dict[str, Any]]:
    def finish(x: Array, e: Array, shift: Array, total: Array) -> None:
        np.subtract(x, shift[:, None], out=e)
        e -= np.log(total)[:, None]

    return _by_rows(x, axis, 3.3, finish), {}


@log_softmax.defbackward("x")
def _log_backward(g: Any, out: Any, x_dtype: Any, axis: int) -> tuple[Array]:
    """g - e^out Σ g, and 0 in a row of only -∞; a row sums to 0, by which the entry is got whose e^out is nearly 1."""
    work = accumulator(out.dtype)
    g, out = _last(g, axis, work), _last(out, axis, work)
    gx = np.empty_like(out)
    up, rows, result = as_matrix(g, work), as_matrix(out, work), matrix_of(gx)

    def body(a: int, b: int) -> None:
        dx, ones = result[a:b], np.ones(rows.shape[1], work)
        with np.errstate(under="ignore"):
            np.exp(rows[a:b], out=dx)
            empty, peaked = dx @ ones == 0, _peaked(dx)
            dx *= -(up[a:b] @ ones)[:, None]
            dx += up[a:b]
            if len(peaked):
                top = rows[a + peaked].argmax(1)
                dx[peaked, top] = 0
                dx[peaked, top] = -(dx[peaked] @ ones)
        dx[empty] = 0

    over_rows(body, rows, arrays=3, ns=3.3)
    return (_home(gx, axis, x_dtype),)


def _peaked(weights: Array) -> Array:
    """Which rows of weights that sum to 1 may have one above 0.9: beside it less than 0.1 is left for all others."""
    return np.flatnonzero(np.vecdot(weights, weights) > 0.8)


def _by_rows(x: Any, axis: int, ns: float, finish: Callable[[Array, Array, Array, Array], None]) -> Array:
    """What ``finish(x, e, shift, total)`` makes, in place, of the exponentials e = e^(x - shift) of tiles of rows.

    total is the sum of a row of e, 1 in a row of only -∞.
    """
    dtype, work = dtypes(x)
    x = _last(x, axis, work)
    out = np.empty_like(x)
    rows, result = as_matrix(x, work), matrix_of(out)

    def body(a: int, b: int) -> None:
        e, (shift, total) = result[a:b], np.empty((2, b - a), work)
        exponentials(rows[a:b], e, shift, total)
        total[total == 0] = 1
        finish(rows[a:b], e, shift, total)

    over_rows(body, rows, arrays=2, ns=ns)
    return _home(out, axis, dtype)


def _last(x: Any, axis: int, work: Any) -> Array:
    """``x`` with ``axis`` moved to the end, contiguous; a copy only where it must be."""
    x = np.asarray(x)
    return np.ascontiguousarray(np.moveaxis(x, normal_axis(axis, x.ndim), -1), work)


def _home(out: Array, axis: int, dtype: Any) -> Array:
    """The inverse of :func:`_last`, as a contiguous array of its own."""
    out = cast_to(out, dtype)
    return out if axis in (-1, out.ndim - 1) else np.moveaxis(out, -1, axis).copy()
