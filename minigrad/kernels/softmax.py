"""Softmax and its logarithm along an axis, row by row over cache-sized tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, cast_to
from minigrad.engine.core import Primitive
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.kernels.rows import as_matrix, dtypes, exponentials, matrix_of, over_rows
from minigrad.machine.loops import dot, helper, loop
from minigrad.machine.loops import exp as exp_of_one
from minigrad.ops import astype, exp, isfinite, log, max, stop_gradient, sum, where
from minigrad.ops.shape import normal_axis

PEAK = 0.9  # of a weight above it less than 0.1 is left for all others of its row

_samples = [sample((2, 3)), sample((2, 3, 4), axis=1), sample((4,), 0)]


def _shifted(x: Array, axis: int) -> tuple[Array, Array, Array]:
    """``x`` less its largest element, the exponentials of that, and their sums; a row of only -∞ stays as it is."""
    wide = astype(x, dtypes(x)[1])
    top = stop_gradient(max(wide, normal_axis(axis, x.ndim), True, initial=-math.inf))
    shifted = wide - where(isfinite(top), top, 0)
    weights = exp(shifted)
    return shifted, weights, sum(weights, axis, True)


def _calm(weights: Array, axis: int) -> Array:
    return weights


def _calm_rule(g: Array, out: Array, axis: int) -> Array:
    """g less that of a weight above 0.9: weights sum to 1, so what all of a row have in common is nothing.

    Beside such a weight nothing is left to cancel, here and in the derivatives of this rule.
    """
    return g - sum(where(out > PEAK, g, 0), axis, True)


calm = Primitive(_calm, view=True).defvjp(_calm_rule)


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
    return astype(calm(weights / where(total == 0, 1, total), axis), dtypes(x)[0])


@softmax.defforward
def _softmax_forward(x: Any, axis: int) -> tuple[Array, dict[str, Any]]:
    def finish(x: Array, e: Array, shift: Array, total: Array) -> None:
        with np.errstate(under="ignore"):
            e *= np.divide(1, total)[:, None]

    return _by_rows(x, axis, 3.0, finish), {}


@softmax.defbackward("x")
def _softmax_backward(g: Any, out: Any, x_dtype: Any, axis: int) -> tuple[Array]:
    """s (g - Σ g s), and where one s is nearly 1, minus what all others of its row have: 1 - s would be noise."""
    work = accumulator(out.dtype)
    g, out = _last(g, axis, work), _last(out, axis, work)
    gx = np.empty_like(out)
    up, rows, result = as_matrix(g, work), as_matrix(out, work), matrix_of(gx)
    over_rows(lambda a, b: softmax_slopes(up[a:b], rows[a:b], result[a:b]), rows, arrays=3, ns=1.0)
    return (_home(gx, axis, x_dtype),)


def _softmax_slopes(g: Array, s: Array, dx: Array) -> None:
    ones = np.ones(s.shape[1], s.dtype)
    with np.errstate(under="ignore"):
        mean = np.vecdot(g, s) if len(ones) > 64 else np.multiply(g, s, out=dx) @ ones  # twice as fast if short
        np.subtract(g, mean[:, None], out=dx)
        dx *= s
        _mend(dx, _peaks(s), ones)


@helper()
def _peak(weights: Array) -> int:
    """The place of the weight above PEAK in a row that has one."""
    place = 0
    while not weights[place] > PEAK:
        place += 1
    return place


@loop(_softmax_slopes)
def softmax_slopes(g: Array, s: Array, dx: Array) -> None:
    """The rows of s (g - Σ g s), mended at a peak."""
    ones, peaks = np.ones(s.shape[1], np.float32), np.empty(len(s), np.intp)
    for i in range(len(s)):
        mean, count = dot(g[i], s[i]), 0
        for j in range(s.shape[1]):
            dx[i, j] = s[i, j] * (g[i, j] - mean)
            count += s[i, j] > PEAK
        peaks[i] = count
    for i in range(len(s)):  # not at once: a processor waits where it reads what it has just written
        if peaks[i]:
            dx[i, _peak(s[i])] -= dot(dx[i], ones)


def _logarithms(x: Array, logs: Array, axis: int) -> Array:
    return logs


def _logarithms_rule(g: Array, x: Array, axis: int) -> Array:
    """g - s Σ g, s the softmax of x, and g less the multiple of s that makes it 0 at a weight above 0.9.

    A multiple of s is nothing, since Σ s d(log s) is 0, and again nothing is left to cancel.
    """
    s = softmax.definition(x, axis)
    large = s > PEAK
    g = where(large, 0, g - s * sum(where(large, g, 0) / where(large, s, 1), axis, True))
    return g - s * sum(g, axis, True)


logarithms = Primitive(_logarithms).defvjp(_logarithms_rule)


@fused(precision="wide", torch=lambda t, x, axis=-1: t.log_softmax(x, axis), numpy=False, samples=_samples)
def log_softmax(x: Array, axis: int = -1) -> Array:
    """``x - ln Σ e^x`` along ``axis``: the logarithm of softmax, exact where that would be 0.

    A row of only -∞ stays -∞, and its gradient is 0. Half precision is computed in float32 and rounded once.

    >>> print(log_softmax(np.array([0.0, -1000.0])))
    [    0. -1000.]
    """
    shifted, _, total = _shifted(x, axis)
    empty, (dtype, work) = total == 0, dtypes(x)
    logs = logarithms(astype(x, work), stop_gradient(shifted - log(where(empty, 1, total))), axis)
    return astype(where(empty, -math.inf, logs), dtype)


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

    over_rows(lambda a, b: log_softmax_slopes(up[a:b], rows[a:b], result[a:b]), rows, arrays=3, ns=3.3)
    return (_home(gx, axis, x_dtype),)


def _log_softmax_slopes(g: Array, logs: Array, dx: Array) -> None:
    ones = np.ones(logs.shape[1], logs.dtype)
    with np.errstate(under="ignore"):
        np.exp(logs, out=dx)
        empty = dx @ ones == 0 if not dx[:, :1].all() else None  # such a row begins with 0
        peaks = _peaks(dx)
        dx *= -(g @ ones)[:, None]
        dx += g
        _mend(dx, peaks, ones)
    if empty is not None:
        dx[empty] = 0


@loop(_log_softmax_slopes)
def log_softmax_slopes(g: Array, logs: Array, dx: Array) -> None:
    """The rows of g - e^logs Σ g, mended at a peak."""
    ones, flat, weights = np.ones(logs.shape[1], np.float32), logs.ravel(), dx.ravel()
    for k in range(flat.size):
        weights[k] = exp_of_one(flat[k])
    for i in range(len(logs)):
        whole, zeros, peak = dot(g[i], ones), 0, 0
        for j in range(logs.shape[1]):
            zeros += dx[i, j] == 0.0
            peak += dx[i, j] > PEAK
        place = _peak(dx[i]) if peak else 0
        for j in range(logs.shape[1]):
            dx[i, j] = g[i, j] - dx[i, j] * whole
        if zeros == logs.shape[1]:
            dx[i] = 0.0
        elif peak:
            dx[i, place] -= dot(dx[i], ones)


def _peaks(weights: Array) -> Array | None:
    """Where in the flat array a weight is above PEAK."""
    high = weights > PEAK
    return np.flatnonzero(high) if high.any() else None


def _mend(gradients: Array, peaks: Array | None, ones: Array) -> None:
    """Subtract at each peak the sum of its row of gradients: what rounding left, since that sum should be 0."""
    if peaks is None:
        return
    left, entries = gradients @ ones, gradients.reshape(-1)
    entries[peaks] -= left if len(peaks) == len(left) else left[peaks // len(ones)]  # a row has one at most


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
    if normal_axis(axis, x.ndim) != x.ndim - 1:
        x = np.moveaxis(x, axis, -1)
    return np.ascontiguousarray(x, work)


def _home(out: Array, axis: int, dtype: Any) -> Array:
    """The inverse of :func:`_last`, as a contiguous array of its own."""
    out = cast_to(out, dtype)
    return out if axis in (-1, out.ndim - 1) else np.moveaxis(out, -1, axis).copy()
