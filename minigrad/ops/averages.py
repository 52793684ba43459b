"""Averages that are made of others: with weights, without NaN, and by rank. Compositions of sums and extremes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, Axes, accumulator, array_module, array_of, as_arrays, is_on_gpu, to_numpy
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError, ShapeError
from minigrad.messages.arguments import as_floats
from minigrad.messages.explain import describe
from minigrad.ops.elementwise import multiply, sqrt
from minigrad.ops.linalg import matmul
from minigrad.ops.piecewise import astype, clip, where
from minigrad.ops.reduce import max as largest
from minigrad.ops.reduce import mean, power_of_two, scale_of, std, sum
from minigrad.ops.reduce import min as smallest
from minigrad.ops.shape import (
    as_tuple,
    broadcast_to,
    diagonal,
    expand_dims,
    moveaxis,
    normal_axis,
    reshape,
    stack,
    swapaxes,
)

__all__ = ["average", "corrcoef", "cov", "median", "nanmax", "nanmean", "nanmin", "nansum", "percentile", "quantile"]

_some = [sample((2, 3)), sample((2, 3, 2), axis=1), sample((2, 3, 2), axis=(0, -1), keepdims=True)]
_gaps = [sample(np.array([[0.3, np.nan, -1.2], [np.nan, 0.7, 1.1]]), **p) for p in ({}, {"axis": 1}, {"axis": 0})]


# ---- with weights ---------------------------------------------------------------------------------------------------


def _numpy_average(n: Any, x: Any, axis: Any = None, weights: Any = None, keepdims: bool = False) -> Any:
    if weights is None:
        return n.mean(x, axis, keepdims=keepdims)
    if weights.ndim == 1:
        weights = n.moveaxis(n.broadcast_to(weights, n.moveaxis(x, axis, -1).shape), -1, axis)
    if not (total := n.sum(weights, axis, keepdims=keepdims)).all():
        raise ValueError("division by 0")
    return n.sum(x * weights, axis, keepdims=keepdims) / total


@composite(torch=False, numpy=_numpy_average, domain=(0.3, 2.0),
           samples=[*_some, sample((2, 3), 1, (3,)), sample((2, 3), 0, (2,)),
                    sample((2, 3), None, (2, 3), keepdims=True)])  # fmt: skip
def average(x: Array, axis: Axes = None, weights: Array | None = None, keepdims: bool = False) -> Array:
    """``Σ w x / Σ w`` over ``axis``; the weights have the shape of ``x``, or are a vector along one axis.

    >>> print(average(np.array([1.0, 5.0]), weights=np.array([3.0, 1.0])))
    2.0
    """
    if weights is None:
        return mean(x, axis, keepdims)
    x, w = as_arrays(x, weights)
    if w.shape != x.shape:
        axes = () if axis is None else tuple(normal_axis(a, x.ndim) for a in as_tuple(axis))
        if w.shape != tuple(x.shape[a] for a in axes):
            expected = "weights of the shape of x, or of its axes that are averaged over"
            raise ShapeError(expected, f"{describe(w)} for {describe(x)}", "with axis= a vector of weights does")
        w = broadcast_to(reshape(w, tuple(n if a in axes else 1 for a, n in enumerate(x.shape))), x.shape)
    dtype = np.result_type(x.dtype, w.dtype)
    dtype = np.dtype(np.float64) if dtype.kind in "biu" else dtype  # products of small integers leave their range
    x, w = (astype(v, accumulator(dtype)) for v in (x, w))
    whole = sum(w, axis, keepdims)
    if not bool((array_of(whole) != 0).all()):  # which waits for a GPU
        raise ArgumentError("weights whose sum is not 0", describe(w), "an average divides by it")
    with np.errstate(over="ignore", invalid="ignore"):
        found = sum(multiply(x, w), axis, keepdims) / whole
    size = abs(array_of(whole))
    if not bool(((size > 2**-24) & (size < 2**24) & (abs(array_of(found)) < math.inf)).all()):
        share = w / scale_of(array_of(w), axis)  # the products may have left the range where the average fits
        found = sum(multiply(x, share / sum(share, axis, True)), axis, keepdims)
    return astype(found, dtype)


# ---- of several variables -------------------------------------------------------------------------------------------


def _numpy_cov(n: Any, x: Any, rowvar: bool = True, ddof: int = 1, name: str = "cov") -> Any:
    if n.atleast_2d(x.T if x.ndim > 1 and not rowvar else x).shape[1] <= ddof:
        raise ValueError("too few")
    return n.cov(x, rowvar=rowvar, ddof=ddof) if name == "cov" else n.corrcoef(x, rowvar=rowvar)


@composite(numpy=_numpy_cov, samples=[sample((2, 4)), sample((4, 2), rowvar=False, ddof=0), sample((4,))],
           torch=lambda t, x, rowvar=True, ddof=1: t.cov(x if rowvar else x.mT, correction=ddof))  # fmt: skip
def cov(x: Array, rowvar: bool = True, ddof: int = 1) -> Array:
    """Covariances ``Σ (x - mean)(y - mean) / (n - ddof)`` of the rows of a matrix, or of its columns; of a vector, one.

    >>> print(cov(np.array([[1.0, 3.0], [2.0, 6.0]])))
    [[2. 4.]
     [4. 8.]]
    """
    if x.ndim > 2:
        raise ShapeError("a matrix or a vector", f"shape {x.shape}", "each row is a variable")
    rows = reshape(x, (1, -1)) if x.ndim < 2 else x if rowvar else swapaxes(x, 0, 1)
    if rows.shape[1] <= ddof:
        raise ShapeError(
            f"more than {ddof} samples of each variable", f"shape {x.shape}", "rowvar= says where they lie"
        )
    dtype = np.dtype(np.float64) if x.dtype.kind in "biu" else x.dtype
    rows = astype(rows, accumulator(dtype))
    off = rows - mean(rows, 1, keepdims=True)
    found = astype(matmul(off, swapaxes(off, 0, 1)) / (rows.shape[1] - ddof), dtype)
    return reshape(found, ()) if rows.shape[0] == 1 else found


@composite(numpy=lambda n, x, rowvar=True: _numpy_cov(n, x, rowvar, 1, "corrcoef"),
           samples=[sample((2, 4)), sample((4, 3), False)],
           torch=lambda t, x, rowvar=True: t.corrcoef(x if rowvar else x.mT))  # fmt: skip
def corrcoef(x: Array, rowvar: bool = True) -> Array:
    """Correlations of the rows of a matrix, or of its columns: covariances over the two standard deviations.

    >>> print(corrcoef(np.array([[1.0, 3.0], [2.0, 6.0]])).round(4))
    [[1. 1.]
     [1. 1.]]
    """
    with np.errstate(over="ignore", invalid="ignore"):
        covariances = cov(x, rowvar)
    variances = array_of(covariances).reshape(-1)[:: len(covariances) + 1 if covariances.ndim else 1]
    least = float(np.finfo(variances.dtype).tiny) * 2**24
    if not is_on_gpu(variances) and not ((variances > least) & (variances < math.inf)).all():
        deviation = std(array_of(x), 1 if rowvar and x.ndim > 1 else 0, keepdims=True)
        covariances = cov(x / power_of_two(deviation), rowvar)  # squares left the range: those of ordinary numbers
    if not covariances.ndim:
        return covariances / covariances
    deviation = sqrt(diagonal(covariances))
    return clip(covariances / deviation / reshape(deviation, (-1, 1)), -1, 1)  # a rounded 1 may lie above it


# ---- without NaN ----------------------------------------------------------------------------------------------------


def _counting(x: Array, where: Array | None) -> Array:
    """True for the elements that are not NaN, and that ``where`` takes."""
    plain = array_of(x)
    found = plain == plain
    return found if where is None else found & array_of(where)


@composite(samples=[*_some, *_gaps],
           torch=lambda t, x, axis=None, keepdims=False: t.nansum(x, axis, keepdims))  # fmt: skip
def nansum(x: Array, axis: Axes = None, keepdims: bool = False, where: Array | None = None) -> Array:
    """Sum over ``axis`` of the elements that are not NaN. NaN elements get the gradient 0.

    >>> print(nansum(np.array([1.0, np.nan, 2.0])))
    3.0
    """
    return sum(x, axis, keepdims, _counting(x, where))


@composite(samples=[*_some, *_gaps],
           torch=lambda t, x, axis=None, keepdims=False: t.nanmean(x, axis, keepdims))  # fmt: skip
def nanmean(x: Array, axis: Axes = None, keepdims: bool = False, where: Array | None = None) -> Array:
    """Mean over ``axis`` of the elements that are not NaN, or NaN if all are. NaN elements get the gradient 0.

    >>> print(nanmean(np.array([1.0, np.nan, 2.0])))
    1.5
    """
    return mean(x, axis, keepdims, _counting(x, where))


def _extreme(extreme: Any, x: Array, axis: Axes, keepdims: bool, least: float) -> Array:
    if x.dtype.kind in "biu":
        return extreme(x, axis, keepdims)
    kept = _counting(x, None)
    some = array_module(kept).any(kept, axis=axis, keepdims=keepdims)
    return where(some, _among(extreme, x, kept, axis, keepdims, least), math.nan)


def _among(extreme: Any, x: Array, kept: Array, axis: Axes, keepdims: bool, least: float) -> Array:
    """The extreme of those ``kept``. Others count as ``least``, and where that is the result they share no gradient."""
    found, plain = extreme(where(kept, x, least), axis, keepdims), array_of(x)
    lowest = array_of(found) == least
    if not bool(lowest.any()):
        return found
    return where(lowest, mean(x, axis, keepdims, kept & (plain == least)), found)


@composite(samples=[*_some, *_gaps], torch=False)
def nanmax(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:
    """Largest element over ``axis`` that is not NaN, or NaN if all are; equal ones share the gradient equally.

    >>> print(nanmax(np.array([1.0, np.nan, 2.0])))
    2.0
    """
    return _extreme(largest, x, axis, keepdims, -math.inf)


@composite(samples=[*_some, *_gaps], torch=False)
def nanmin(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:
    """Smallest element over ``axis`` that is not NaN, or NaN if all are; equal ones share the gradient equally.

    >>> print(nanmin(np.array([1.0, np.nan, 2.0])))
    1.0
    """
    return _extreme(smallest, x, axis, keepdims, math.inf)


# ---- by rank --------------------------------------------------------------------------------------------------------


def _as_rows(x: Array, axis: Axes) -> Array:
    """The elements over ``axis`` along the last axis; what is not floating as float64."""
    if x.dtype.kind in "biu":
        x = astype(x, np.dtype(np.float64))
    axes = tuple(range(x.ndim)) if axis is None else tuple(normal_axis(a, x.ndim) for a in as_tuple(axis))
    rows = moveaxis(x, axes, tuple(range(x.ndim - len(axes), x.ndim)))
    kept = rows.shape[: x.ndim - len(axes)]
    return reshape(rows, (*kept, math.prod(rows.shape[len(kept) :])))


def _restored(result: Array, ndim: int, axis: Axes, keepdims: bool) -> Array:
    """The result with axes of length 1 for those that were reduced."""
    if not keepdims or not ndim:
        return result
    return expand_dims(result, tuple(range(ndim)) if axis is None else tuple(a % ndim for a in as_tuple(axis)))


@composite(samples=[sample((2, 3), axis=1), sample((4,)), sample((3, 4), axis=0, keepdims=True)],
           torch=lambda t, x, axis=None, keepdims=False: _torch_quantile(t, x, 0.5, axis, keepdims))  # fmt: skip
def median(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:
    """The middle element over ``axis``, or the mean of the two in the middle; NaN if one is NaN.

    >>> print(median(np.array([1.0, 7.0, 2.0, 4.0])))
    3.0
    """
    rows = _as_rows(x, axis)
    if not (n := rows.shape[-1]):
        return mean(x, axis, keepdims)
    return _restored(_ranked(rows, [(n - 1) / 2])[0], x.ndim, axis, keepdims)


def _torch_quantile(t: Any, x: Any, q: Any, axis: Any = None, keepdims: bool = False) -> Any:
    axes = list(range(x.ndim)) if axis is None else [a % x.ndim for a in as_tuple(axis)]
    rows = x.movedim(axes, list(range(-len(axes), 0))).flatten(x.ndim - len(axes))
    out = t.quantile(rows, t.as_tensor(q, dtype=x.dtype), -1)
    lead = out.ndim - rows.ndim + 1
    return out.reshape(*out.shape[:lead], *(1 if a in axes else n for a, n in enumerate(x.shape))) if keepdims else out


@composite(torch=_torch_quantile,
           samples=[sample((5,), q=0.3), sample((2, 3), q=[0.0, 0.6, 1.0], axis=1),
                    sample((2, 3), q=0.25, axis=0, keepdims=True)])  # fmt: skip
def quantile(x: Array, q: Any, axis: Axes = None, keepdims: bool = False) -> Array:
    """The number below which a share ``q`` of the elements over ``axis`` lies, interpolated linearly; a NaN gives NaN.

    Several q give a first axis. Where q picks an element exactly, its slope is that of the piece above.

    >>> print(quantile(np.array([1.0, 2.0, 4.0]), [0.0, 0.75]))
    [1. 3.]
    """
    (shares,) = as_floats(q)
    plain = to_numpy(array_of(shares))
    if plain.ndim > 1 or not ((plain >= 0) & (plain <= 1)).all():
        raise ArgumentError("q from 0 to 1, a number or a vector of them", describe(q), "percentile takes 0 to 100")
    rows = _as_rows(x, axis)
    if not (n := rows.shape[-1]):
        raise ShapeError("at least one element", f"shape {x.shape}", "a quantile of nothing is none")
    numbers = shares if array_of(shares) is not shares else plain.astype(np.float64).tolist()
    ranks = [share * (n - 1) for share in (numbers if plain.ndim else [numbers])]
    found = [_restored(part, x.ndim, axis, keepdims) for part in _ranked(rows, ranks)]
    return stack(found) if plain.ndim else found[0]


def _ranked(rows: Array, ranks: list[Any]) -> list[Array]:
    """The elements of these ranks in each row, between two of them where a rank is no whole number; NaN if one is NaN.

    Equal elements share the gradient: the element of rank k is the largest of those that are not above it.
    """
    plain, n = array_of(rows), rows.shape[-1]
    ordered = array_module(plain).sort(plain, axis=-1)

    def element(k: int) -> Array:
        return _among(largest, rows, plain <= ordered[..., k : k + 1], -1, False, -math.inf)

    def between(rank: Any) -> Array:
        low = int(array_of(rank))
        if array_of(rank) is rank and rank == low:
            return element(low)
        low = min(low, max(n - 2, 0))
        return element(low) * (low + 1 - rank) + element(min(low + 1, n - 1)) * (rank - low)

    broken = ordered[..., -1] != ordered[..., -1]
    return [where(broken, math.nan, between(rank)) for rank in ranks]


@composite(torch=lambda t, x, q, axis=None, keepdims=False: _torch_quantile(t, x, np.divide(q, 100), axis, keepdims),
           samples=[sample((5,), q=30), sample((2, 3), q=[25.0, 75.0], axis=1)])  # fmt: skip
def percentile(x: Array, q: Any, axis: Axes = None, keepdims: bool = False) -> Array:
    """``quantile(x, q / 100, axis)``.

    >>> print(percentile(np.array([1.0, 2.0, 4.0]), 50))
    2.0
    """
    return quantile(x, as_floats(q)[0] / 100, axis, keepdims)
