"""Reductions: sums, means, norms, extremes, counts over axes.

Half-precision inputs are accumulated in float32 and rounded once, at the end. ``where`` leaves elements out, as in
NumPy: it is a mask, True for those that count.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, Axes, accumulator, array_module, cast_to, is_half
from minigrad.engine.core import primitive
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError
from minigrad.ops.elementwise import exp, safe_divide
from minigrad.ops.piecewise import absolute, astype, isfinite, sign, where
from minigrad.ops.shape import as_tuple, broadcast_to, expand_dims, normal_axis, reshape

# fmt: off
__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "logsumexp", "max", "mean", "min", "norm", "std",
    "sum", "var",
]
# fmt: on

over_axes = [
    sample((2, 3)),
    sample((2, 3, 2), axis=1),
    sample((2, 3, 2), axis=(0, -1), keepdims=True),
    sample((2, 3), axis=1, where=np.array([[True, False, True], [False, True, True]])),
]


def broadcast_back(g: Array, shape: tuple[int, ...], axis: Axes, keepdims: bool) -> Array:
    """Repeat ``g``, of the shape of a reduction over ``axis``, over the axes that it had lost: the adjoint of a sum."""
    if axis is not None and not keepdims and shape:  # NumPy lets a 0-d array be reduced over axis 0 or -1
        g = expand_dims(g, axis)
    return broadcast_to(g, shape)


def counted(shape: tuple[int, ...], axis: Axes, where: Array | None) -> Any:
    """How many elements go into each result of a reduction, in a form that broadcasts against it with keepdims."""
    axes = range(len(shape)) if axis is None or not shape else [normal_axis(a, len(shape)) for a in as_tuple(axis)]
    if where is None:
        return math.prod(shape[a] for a in axes)
    return broadcast_to(where, shape).sum(axis=None if axis is None else tuple(axes), keepdims=True)


def masked(g: Array, mask: Array | None) -> Array:
    """``g``, and 0 where the mask of a reduction leaves an element out."""
    return g if mask is None else where(mask, g, 0)


def chosen(x: Array, mask: Array | None, neutral: float = 0) -> Array:
    """The array ``x``, with a neutral number where the mask of a reduction leaves an element out."""
    xp = array_module(x)
    return x if mask is None else xp.where(xp.broadcast_to(mask, x.shape), x, neutral)


# ---- sums and means -------------------------------------------------------------------------------------------------


@primitive(precision="wide", samples=over_axes)
def sum(x: Array, axis: Axes = None, keepdims: bool = False, where: Array | None = None) -> Array:
    """Sum ``Σ x`` over ``axis`` (an int, a tuple, or all).

    >>> print(sum(np.ones((2, 3)), axis=1))
    [3. 3.]
    """
    xp = array_module(x)
    x = chosen(xp.asarray(x), where)
    if is_half(x.dtype):
        return cast_to(xp.sum(x, axis=axis, keepdims=keepdims, dtype=np.float32), x.dtype)
    return xp.sum(x, axis=axis, keepdims=keepdims)


sum.defvjp(lambda g, x_shape, axis, keepdims, where: masked(broadcast_back(g, x_shape, axis, keepdims), where))


@primitive(precision="wide", samples=over_axes)
def mean(x: Array, axis: Axes = None, keepdims: bool = False, where: Array | None = None) -> Array:
    """Mean ``(1/n) Σ x`` over ``axis``; NaN of nothing.

    >>> print(mean(np.array([[1.0, 3.0], [2.0, 6.0]]), axis=1))
    [2. 4.]
    """
    xp = array_module(x)
    x = xp.asarray(x)
    n = counted(x.shape, axis, where)
    floating = x.dtype if x.dtype.kind not in "biu" else np.dtype(np.float64)
    total = xp.sum(chosen(x, where), axis=axis, keepdims=keepdims, dtype=accumulator(floating))
    n = n if isinstance(n, int) else n.reshape(total.shape)
    with np.errstate(invalid="ignore", divide="ignore"):
        return cast_to(xp.asarray(total / xp.asarray(n, dtype=total.dtype)), floating)


def _mean_rule(g: Array, x_shape: Any, x_dtype: Any, axis: Axes, keepdims: bool, where: Array | None) -> Array:
    n = counted(x_shape, axis, where)
    g = g.astype(accumulator(x_dtype)) if is_half(x_dtype) else g  # which may not hold n
    if isinstance(n, int):
        return broadcast_back(g / n if n else g, x_shape, axis, keepdims)
    g = g if keepdims or axis is None else expand_dims(g, axis)
    n = array_module(n).maximum(n, 1)  # nothing at all receives nothing
    return masked(broadcast_to(g / n.astype(accumulator(x_dtype)), x_shape), where)


mean.defvjp(_mean_rule)


_ddof = [*over_axes, sample((2, 3), axis=1, ddof=1)]


@primitive(precision="wide", samples=_ddof)
def var(x: Array, axis: Axes = None, ddof: int = 0, keepdims: bool = False, where: Array | None = None) -> Array:
    """Variance ``Σ (x - mean)² / (n - ddof)`` over ``axis``; a large offset of all x costs no digits.

    >>> print(float(var(np.array([1e8 + 1, 1e8 + 3]))))
    1.0
    """
    return cast_to(_wide_var(x, axis, ddof, keepdims, where), _floating(x))


def _floating(x: Array) -> Any:
    """The dtype of a mean of ``x``: its own, float64 for integers."""
    dtype = array_module(x).asarray(x).dtype
    return dtype if dtype.kind not in "biu" else np.dtype(np.float64)


def _wide_var(x: Array, axis: Axes, ddof: int, keepdims: bool, mask: Array | None) -> Array:
    xp = array_module(x)
    wide = xp.asarray(x).astype(accumulator(_floating(x)))
    with np.errstate(invalid="ignore", divide="ignore"):
        off = _centred(wide, axis, mask)
        total = xp.asarray(xp.sum(off * off, axis=axis, keepdims=keepdims))
        n = xp.asarray(counted(wide.shape, axis, mask), dtype=wide.dtype)
        return xp.asarray(total / xp.maximum(n.reshape(total.shape if n.ndim else ()) - ddof, 0))


def _centred(x: Array, axis: Axes, mask: Array | None) -> Array:
    """``x - mean``, 0 where masked out; centred twice, since the mean of numbers with a large offset is rounded."""
    off = x - mean(x, axis, True, mask)
    return masked(off - mean(off, axis, True, mask), mask)


def _off_centre(x: Array, axis: Axes, ddof: int, mask: Array | None) -> Array:
    """``(x - mean) / (n - ddof)``, 0 where nothing can vary."""
    off = _centred(x.astype(accumulator(x.dtype)), axis, mask)
    n = counted(x.shape, axis, mask)
    if isinstance(n, int):
        return off / (n - ddof) if n > ddof else off * math.nan
    xp = array_module(n)
    return off / xp.where(n > ddof, n - ddof, math.nan).astype(off.dtype)


var.defvjp(
    lambda g, x, axis, ddof, keepdims, where: (
        broadcast_back(g, x.shape, axis, keepdims) * (2 * _off_centre(x, axis, ddof, where))
    )
)


@primitive(precision="wide", samples=_ddof)
def std(x: Array, axis: Axes = None, ddof: int = 0, keepdims: bool = False, where: Array | None = None) -> Array:
    """Standard deviation, the root of ``var``; its gradient is 0 where it is 0.

    >>> print(float(std(np.array([1.0, 3.0]))))
    1.0
    """
    return cast_to(array_module(x).sqrt(_wide_var(x, axis, ddof, keepdims, where)), _floating(x))


std.defvjp(
    lambda g, x, out, axis, ddof, keepdims, where: (
        broadcast_back(safe_divide(g, out), x.shape, axis, keepdims) * _off_centre(x, axis, ddof, where)
    )
)


# ---- norms ----------------------------------------------------------------------------------------------------------


_squares = [sample((2, 3), axis=1, keepdims=False), sample((2, 3), axis=None, keepdims=True)]
_powers = [sample((2, 3), ord=p, axis=1, keepdims=False) for p in (3, 0.5, -1)]


@primitive(precision="wide", part_of="norm", samples=_squares)
def root_sum_square(x: Array, axis: Axes, keepdims: bool) -> Array:
    """``√(Σ x²)``; its gradient x / norm is 0 where the norm is 0."""
    xp = array_module(x)
    x = xp.asarray(x)
    wide = x.astype(accumulator(x.dtype))
    return cast_to(xp.asarray(xp.sqrt(xp.sum(wide * wide, axis=axis, keepdims=keepdims))), x.dtype)


root_sum_square.defvjp(
    lambda g, x, out, axis, keepdims: x * broadcast_back(safe_divide(g, out), x.shape, axis, keepdims),
)


@primitive(precision="wide", part_of="norm", kinks=(0,), samples=_powers)
def root_sum_power(x: Array, ord: float, axis: Axes, keepdims: bool) -> Array:
    """``(Σ |x|^p)^(1/p)`` for any p but 0 and ±∞; an element that is 0 receives the gradient 0."""
    xp = array_module(x)
    x = xp.asarray(x)
    wide = xp.abs(x.astype(accumulator(x.dtype)))
    with np.errstate(divide="ignore"):
        return cast_to(xp.asarray(xp.sum(wide**ord, axis=axis, keepdims=keepdims) ** (1 / ord)), x.dtype)


def _power_norm_rule(g: Array, x: Array, out: Array, ord: float, axis: Axes, keepdims: bool) -> Array:
    size, total = absolute(x), broadcast_back(out, x.shape, axis, keepdims)
    zero = (size == 0) | (total == 0)
    ratio = where(zero, 1, size) / where(zero, 1, total)
    return where(zero, 0, broadcast_back(g, x.shape, axis, keepdims) * sign(x) * ratio ** (ord - 1))


root_sum_power.defvjp(_power_norm_rule)


@composite(
    kinks=(0,),
    samples=[sample((2, 3)), *[sample((2, 3), ord=p, axis=-1) for p in (2, 1, 3, 0.5, -1, math.inf, -math.inf, 0)]],
)
def norm(x: Array, ord: float = 2, axis: Axes = None, keepdims: bool = False) -> Array:
    """Vector norm ``(Σ |x|^p)^(1/p)`` over ``axis``: any order p, ±∞ (largest, smallest |x|), 0 (how many are not 0).

    ``axis=None`` flattens. The gradient is 0 where the norm is 0.

    >>> print(norm(np.array([[3.0, 4.0], [0.0, 0.0]]), axis=1))
    [5. 0.]
    """
    if not isinstance(ord, int | float) or math.isnan(ord):
        raise ArgumentError("the order of a vector norm, a number", repr(ord), "matrix norms are out of scope")
    for a in () if axis is None else as_tuple(axis):
        normal_axis(a, np.ndim(x))
    if x.dtype.kind in "biu":
        x = astype(x, np.dtype(np.float64))
    if ord == 2:
        return root_sum_square(x, axis, keepdims)
    if ord == 0:
        return sum(absolute(sign(x)), axis, keepdims)
    if ord == 1:
        return sum(absolute(x), axis, keepdims)
    if ord == math.inf:
        return max(absolute(x), axis, keepdims, initial=0)
    if ord == -math.inf:
        return min(absolute(x), axis, keepdims)
    return root_sum_power(x, ord, axis, keepdims)


# ---- largest and smallest -------------------------------------------------------------------------------------------

_extreme = [
    *over_axes[:3],
    sample((2, 3), axis=1, initial=0.25),
    sample((2, 3), axis=1, where=over_axes[3].params["where"], initial=-9.0),
]


def _largest(name: str, x: Array, axis: Axes, keepdims: bool, where: Array | None, initial: Any) -> Array:
    """The module's ``max`` or ``min``; CuPy's knows neither ``where`` nor ``initial``."""
    xp = array_module(x)
    if xp is np:
        limits = {k: v for k, v in (("where", where), ("initial", initial)) if v is not None}
        return getattr(np, name)(x, axis=axis, keepdims=keepdims, **limits)
    if initial is None:
        return getattr(xp, name)(x, axis=axis, keepdims=keepdims)
    initial = xp.asarray(initial, x.dtype)
    x = chosen(x, where, initial)
    if not x.size:
        return xp.full_like(xp.sum(x, axis=axis, keepdims=keepdims), initial)
    return getattr(xp, f"{name}imum")(getattr(xp, name)(x, axis=axis, keepdims=keepdims), initial)


@primitive(samples=_extreme)
def max(
    x: Array, axis: Axes = None, keepdims: bool = False, where: Array | None = None, initial: float | None = None
) -> Array:
    """Largest element over ``axis``, NaN if one is; equal ones share the gradient equally.

    ``initial`` is the least result, needed for an empty axis and with ``where``.

    >>> print(max(np.array([[1.0, 3.0], [5.0, 2.0]]), axis=1))
    [3. 5.]
    """
    return _largest("max", x, axis, keepdims, where, initial)


@primitive(
    samples=[sample(*s.arrays, **{k: -v if k == "initial" else v for k, v in s.params.items()}) for s in _extreme]
)
def min(
    x: Array, axis: Axes = None, keepdims: bool = False, where: Array | None = None, initial: float | None = None
) -> Array:
    """Smallest element over ``axis``, NaN if one is; equal ones share the gradient equally.

    ``initial`` is the largest result, needed for an empty axis and with ``where``.

    >>> print(min(np.array([[1.0, 3.0], [5.0, 2.0]]), axis=1))
    [1. 2.]
    """
    return _largest("min", x, axis, keepdims, where, initial)


def _shared_by_ties(
    g: Array, x: Array, out: Array, axis: Axes, keepdims: bool, where: Array | None, initial: float | None
) -> Array:
    """Each of the n elements equal to the result receives g / n; so does ``initial``, if it ties."""
    tied = x == broadcast_back(out, x.shape, axis, keepdims)
    tied = tied if where is None else tied & where
    count = sum(tied, axis, keepdims=True)
    if initial is not None:
        count = count + reshape(out == initial, count.shape)
    share = 1 / (count + (count == 0)).astype(accumulator(x.dtype))  # NaN equals nothing: a count of 0
    return masked(broadcast_back(g, x.shape, axis, keepdims) * share, tied)


max.defvjp(_shared_by_ties)
min.defvjp(_shared_by_ties)


@composite(samples=_extreme[:3])
def amax(x: Array, axis: Axes = None, keepdims: bool = False, where: Any = None, initial: Any = None) -> Array:
    """The same as ``max``.

    >>> print(float(amax(np.array([1.0, 3.0]))))
    3.0
    """
    return max(x, axis, keepdims, where, initial)


@composite(samples=_extreme[:3])
def amin(x: Array, axis: Axes = None, keepdims: bool = False, where: Any = None, initial: Any = None) -> Array:
    """The same as ``min``.

    >>> print(float(amin(np.array([1.0, 3.0]))))
    1.0
    """
    return min(x, axis, keepdims, where, initial)


@primitive(precision="wide", samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=0, keepdims=True)])
def logsumexp(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:
    """``ln Σ e^x`` over ``axis`` without overflow; its gradient is the softmax, 0 in a row of only -∞.

    >>> print(float(logsumexp(np.array([0.0, 0.0]))).__round__(4))
    0.6931
    """
    xp = array_module(x)
    x = xp.asarray(x)
    wide = x.astype(accumulator(x.dtype if x.dtype.kind not in "biu" else np.dtype(np.float64)))
    if x.size == 0:
        with np.errstate(divide="ignore"):
            return cast_to(xp.asarray(xp.log(xp.sum(wide, axis=axis, keepdims=keepdims))), wide.dtype)
    top = xp.max(wide, axis=axis, keepdims=True)
    top = xp.where(xp.isfinite(top), top, 0)
    with np.errstate(divide="ignore", under="ignore", over="ignore"):
        total = xp.log(xp.sum(xp.exp(wide - top), axis=axis, keepdims=True)) + top
    total = total if keepdims else xp.squeeze(total, axis=axis)
    return cast_to(xp.asarray(total), x.dtype if x.dtype.kind not in "biu" else wide.dtype)


def softmax_from(x: Array, total: Array) -> Array:
    """``e^(x - total)``, 0 where the log of the total is not finite."""
    finite = isfinite(total)
    return exp(where(finite, x, -math.inf) - where(finite, total, 0))


logsumexp.defvjp(
    lambda g, x, out, axis, keepdims: (
        broadcast_back(g, x.shape, axis, keepdims) * softmax_from(x, broadcast_back(out, x.shape, axis, keepdims))
    )
)

# ---- counts and places: no derivative -------------------------------------------------------------------------------


@primitive(samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=0, keepdims=True)])
def argmax(x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
    """Place of the largest element along ``axis``, the first of equal ones; an integer, so without a derivative.

    >>> print(int(argmax(np.array([1.0, 3.0, 3.0]))))
    1
    """
    return array_module(x).argmax(x, axis=axis, keepdims=keepdims)


@primitive(samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=0, keepdims=True)])
def argmin(x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
    """Place of the smallest element along ``axis``, the first of equal ones; an integer, so without a derivative.

    >>> print(int(argmin(np.array([3.0, 1.0, 1.0]))))
    1
    """
    return array_module(x).argmin(x, axis=axis, keepdims=keepdims)


_flags = np.array([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])


@primitive(samples=[sample(_flags), sample(_flags, axis=1), sample(_flags, axis=0, keepdims=True)])
def any(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:
    """Whether an element over ``axis`` is not 0; a boolean, so without a derivative.

    >>> print(bool(any(np.array([0.0, 1.0]))))
    True
    """
    return array_module(x).any(x, axis=axis, keepdims=keepdims)


@primitive(samples=[sample(_flags), sample(_flags, axis=1), sample(_flags, axis=0, keepdims=True)])
def all(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:
    """Whether every element over ``axis`` is not 0; a boolean, so without a derivative.

    >>> print(bool(all(np.array([0.0, 1.0]))))
    False
    """
    return array_module(x).all(x, axis=axis, keepdims=keepdims)


@primitive(samples=[sample(_flags), sample(_flags, axis=1), sample(_flags, axis=0, keepdims=True)])
def count_nonzero(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:
    """How many elements over ``axis`` are not 0; an integer, so without a derivative.

    >>> print(int(count_nonzero(np.array([0.0, 1.0, 2.0]))))
    2
    """
    xp = array_module(x)
    return xp.sum(xp.asarray(x) != 0, axis=axis, keepdims=keepdims)  # count_nonzero gives a plain int in NumPy 2.0
