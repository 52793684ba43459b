"""Reductions: sums, means, norms, extremes, counts over axes.

Half-precision inputs are accumulated in float32 and rounded once, at the end. ``where`` leaves elements out, as in
NumPy: it is a mask, True for those that count.

A norm may be a number of its dtype where the squares of the elements are not. The plain sum is formed first. Only where
it overflowed, or is so small that its terms lost digits, the elements are divided by a power of two near the largest,
which changes no digit, and the result is multiplied by it. To look at a sum would be to wait for a GPU: there norms and
deviations are always scaled.

The product is in ``running.py``, since its derivative is made of running products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, ArrayLike, Axes, accumulator, array_module, array_of, cast_to, is_half, is_on_gpu
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

EXACT_SHIFT = 16  # the rounding of a smaller logarithm changes e^(x - log) by 8 units in the last place at most

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
    if where is axis is None:
        return math.prod(shape)
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


# ---- the range of a dtype -------------------------------------------------------------------------------------------


@functools.cache
def _smallest(dtype: Any) -> tuple[float, float]:
    """The smallest normal number of a dtype, and the smallest sum in which errors of terms below that don't count."""
    info = np.finfo(dtype)
    return float(info.tiny), float(info.tiny / info.eps)


def in_range(x: Array, form: Callable[[Array], Array], far: float = math.inf) -> Array | None:
    """A sum of squares or powers that ``form`` makes of x, None where one overflowed or the sum has lost digits.

    NumPy looks for an overflow in any case, so that asking for an error costs nothing. Sums outside of 1/far … far are
    refused too.
    """
    if is_on_gpu(x) and x.size:
        return None
    try:
        with np.errstate(over="raise", under="ignore", divide="ignore", invalid="ignore"):
            total = form(x)
    except FloatingPointError:
        return None
    low = _smallest(x.dtype)[1]
    if x.size and not float(total if total.ndim == 0 else total.min()) >= (low if low > 1 / far else 1 / far):
        return None  # also where a NaN hides the smallest
    return None if x.size and far < math.inf and float(total.max()) > far else total


def summed(form: Callable[[Array], Array], x: Array) -> Array:
    """Sums of elements of x that ``form`` makes; of smaller numbers, where one overflowed on the way.

    ``[3e38, 3e38, -3e38]`` sums to 3e38 in float32. A sum that is beyond the range itself is infinite, and NumPy warns.
    """
    try:
        with np.errstate(over="raise"):
            return form(x)
    except FloatingPointError:
        with np.errstate(over="ignore", invalid="ignore"):
            plain = form(x)
    part = 2.0 ** -x.size.bit_length()
    return np.where(np.isfinite(plain), plain, form(x * part) / part).astype(plain.dtype)[()]


def share_of(g: Array, size: Array) -> Array | None:
    """``g / size``; None where a size is 0, or a digit is lost to the range of the dtype."""
    if is_on_gpu(array_of(g)):
        return None
    try:
        with np.errstate(all="raise"):
            share = array_of(g) / array_of(size)
    except FloatingPointError:
        return None
    return g / size if hasattr(g, "_data") else share


def power_of_two(sizes: Array) -> Array:
    """For each size a power of two that isn't larger, and more than half of it; 1 for 0 and what is not finite."""
    xp = array_module(sizes)
    power = xp.ldexp(xp.ones_like(sizes), xp.frexp(sizes)[1] - 1)
    return xp.where((sizes > 0) & xp.isfinite(sizes), power, 1).astype(sizes.dtype)


def scale_of(x: Array, axis: Axes, mask: Array | None = None) -> Array:
    """A power of two near the largest ``|x|`` over ``axis``, whose axes stay with length 1."""
    xp = array_module(x)
    return power_of_two(xp.asarray(xp.max(xp.abs(chosen(x, mask)), axis=axis, keepdims=True)))


def total_of(x: Array) -> Any:
    """The function that sums an array such as x; ``np.sum`` takes a microsecond more than what it calls."""
    return np.add.reduce if type(x) is np.ndarray else array_module(x).sum


# ---- sums and means -------------------------------------------------------------------------------------------------


@primitive(linear="jointly", stacks=True, precision="wide", samples=over_axes)
def sum(x: Array, axis: Axes = None, keepdims: bool = False, where: Array | None = None) -> Array:
    """Sum ``Σ x`` over ``axis`` (an int, a tuple, or all).

    >>> print(sum(np.ones((2, 3)), axis=1))
    [3. 3.]
    """
    x = array_module(x).asarray(x)
    x = x if where is None else chosen(x, where)
    if is_half(x.dtype):
        return cast_to(summed(lambda x: x.sum(axis, np.float32, keepdims=keepdims), x), x.dtype)
    total = total_of(x)
    try:  # NumPy looks for an overflow in any case
        with np.errstate(over="raise"):
            return total(x, axis=axis, keepdims=keepdims)
    except FloatingPointError:
        return summed(lambda x: total(x, axis=axis, keepdims=keepdims), x)


sum.defvjp(lambda g, x_shape, axis, keepdims, where: masked(broadcast_back(g, x_shape, axis, keepdims), where))


@primitive(linear="jointly", stacks=True, precision="wide", samples=over_axes)
def mean(x: Array, axis: Axes = None, keepdims: bool = False, where: Array | None = None) -> Array:
    """Mean ``(1/n) Σ x`` over ``axis``; NaN of nothing.

    >>> print(mean(np.array([[1.0, 3.0], [2.0, 6.0]]), axis=1))
    [2. 4.]
    """
    xp = array_module(x)
    x = xp.asarray(x)
    n = counted(x.shape, axis, where)
    floating = x.dtype if x.dtype.kind not in "biu" else np.dtype(np.float64)
    wide = accumulator(floating)

    def quotient(x: Array) -> Array:
        total = total_of(x)(chosen(x, where), axis=axis, keepdims=keepdims, dtype=wide)
        return xp.asarray(total / xp.asarray(n if isinstance(n, int) else n.reshape(total.shape), dtype=wide))

    with np.errstate(invalid="ignore", divide="ignore", over="raise"):
        try:
            out = quotient(x)
        except FloatingPointError:  # of the sum
            scale = scale_of(x.astype(wide, copy=False), axis, where)
            out = quotient(x / scale)
            out = out * scale.reshape(out.shape)
    return cast_to(out, floating)


def _mean_rule(g: Array, x_shape: Any, x_dtype: Any, axis: Axes, keepdims: bool, where: Array | None) -> Array:
    n = counted(x_shape, axis, where)
    g = g.astype(accumulator(x_dtype)) if is_half(x_dtype) else g  # which may not hold n
    if isinstance(n, int):
        return broadcast_back(g / n if n else g, x_shape, axis, keepdims)
    g = g if keepdims or axis is None or not x_shape else expand_dims(g, axis)
    n = array_module(n).maximum(n, 1)  # nothing at all receives nothing
    return masked(broadcast_to(g / n.astype(accumulator(x_dtype)), x_shape), where)


mean.defvjp(_mean_rule)


_ddof = [*over_axes, sample((2, 3), axis=1, ddof=1)]


@primitive(stacks=True, precision="wide", samples=_ddof)
def var(x: Array, axis: Axes = None, ddof: int = 0, keepdims: bool = False, where: Array | None = None) -> Array:
    """Variance ``Σ (x - mean)² / (n - ddof)`` over ``axis``; a large offset of all x costs no digits.

    >>> print(float(var(np.array([1e8 + 1, 1e8 + 3]))))
    1.0
    """
    variance, scale = _scaled_var(x, axis, ddof, keepdims, where)
    return cast_to(variance if scale is None else variance * scale * scale, _floating(x))


def _floating(x: Array) -> Any:
    """The dtype of a mean of ``x``: its own, float64 for integers."""
    dtype = array_module(x).asarray(x).dtype
    return dtype if dtype.kind not in "biu" else np.dtype(np.float64)


def _scaled_var(x: Array, axis: Axes, ddof: int, keepdims: bool, mask: Array | None) -> tuple[Array, Array | None]:
    """The variance of x, or of x over a scale and that scale; wide in either case."""
    wide = array_module(x).asarray(x).astype(accumulator(_floating(x)), copy=False)
    xp, n = array_module(wide), counted(wide.shape, axis, mask)

    def squares(x: Array) -> Array:
        off = _centred(x, axis, mask)
        return xp.asarray(xp.sum(off * off, axis=axis, keepdims=keepdims))

    total, scale = in_range(wide, squares), None
    with np.errstate(invalid="ignore", divide="ignore", under="ignore"):
        if total is None:
            scale = scale_of(wide, axis, mask)
            total = squares(wide / scale)
            scale = scale.reshape(total.shape)
        n = xp.asarray(n if isinstance(n, int) else n.reshape(total.shape), dtype=wide.dtype)
        return xp.asarray(total / xp.maximum(n - ddof, 0)), scale


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


@primitive(stacks=True, precision="wide", samples=_ddof)
def std(x: Array, axis: Axes = None, ddof: int = 0, keepdims: bool = False, where: Array | None = None) -> Array:
    """Standard deviation, the root of ``var``; its gradient is 0 where it is 0.

    >>> print(float(std(np.array([1.0, 3.0]))))
    1.0
    """
    variance, scale = _scaled_var(x, axis, ddof, keepdims, where)
    root = array_module(x).sqrt(variance)
    return cast_to(root if scale is None else root * scale, _floating(x))


def _std_rule(g: Array, x: Array, out: Array, axis: Axes, ddof: int, keepdims: bool, where: Array | None) -> Array:
    """``g (x - mean) / ((n - ddof) std)``: g over the deviation first, which is smaller, if that loses no digit."""

    def back(part: Array) -> Array:
        return broadcast_back(part, x.shape, axis, keepdims)

    share, sizes = share_of(g, out), array_of(out)
    low = 4 * math.prod(x.shape) * _smallest(accumulator(x.dtype))[0]
    if share is not None and (not x.size or float(sizes.min()) > low or not ((sizes > 0) & (sizes < low)).any()):
        return back(share) * _off_centre(x, axis, ddof, where)
    scale = power_of_two(array_of(out))
    return back(g) * safe_divide(_off_centre(x / back(scale), axis, ddof, where), back(out / scale))


std.defvjp(_std_rule)


# ---- norms ----------------------------------------------------------------------------------------------------------


_squares = [sample((2, 3), axis=1, keepdims=False), sample((2, 3), axis=None, keepdims=True)]
_powers = [sample((2, 3), ord=p, axis=1, keepdims=False) for p in (3, 0.5, -1)]


@primitive(stacks=True, precision="wide", part_of="norm", samples=_squares)
def root_sum_square(x: Array, axis: Axes, keepdims: bool) -> Array:
    """``√(Σ x²)``; its gradient x / norm is 0 where the norm is 0."""
    xp = array_module(x)
    x = xp.asarray(x)
    wide = x.astype(accumulator(x.dtype), copy=False)
    total = in_range(wide, lambda a: xp.sum(a * a, axis=axis, keepdims=keepdims))
    if total is not None:
        return cast_to(xp.asarray(xp.sqrt(total)), x.dtype)
    scale = scale_of(wide, axis)
    with np.errstate(under="ignore"):
        root = xp.asarray(xp.sqrt(xp.sum((wide / scale) ** 2, axis=axis, keepdims=keepdims)))
    return cast_to(root * scale.reshape(root.shape), x.dtype)


def _root_rule(g: Array, x: Array, out: Array, axis: Axes, keepdims: bool) -> Array:
    """``g x / norm``: g over the norm first, which is smaller, if that loses no digit."""
    share = share_of(g, out)
    if share is not None:
        return x * broadcast_back(share, x.shape, axis, keepdims)
    return broadcast_back(g, x.shape, axis, keepdims) * safe_divide(x, broadcast_back(out, x.shape, axis, keepdims))


root_sum_square.defvjp(_root_rule)


@primitive(stacks=True, precision="wide", part_of="norm", kinks=(0,), samples=_powers)
def root_sum_power(x: Array, ord: float, axis: Axes, keepdims: bool) -> Array:
    """``(Σ |x|^p)^(1/p)`` for any p but 0 and ±∞; an element that is 0 receives the gradient 0."""
    xp = array_module(x)
    x = xp.asarray(x)
    wide = xp.abs(x.astype(accumulator(x.dtype), copy=False))
    far = math.exp(16 * abs(ord)) if abs(ord) < 40 else math.inf  # a root is off by its logarithm in units
    total = in_range(wide, lambda a: xp.sum(a**ord, axis=axis, keepdims=keepdims), far)
    with np.errstate(divide="ignore"):
        if total is not None:
            return cast_to(xp.asarray(total ** (1 / ord)), x.dtype)
        top = xp.asarray((xp.max if ord > 0 else xp.min)(wide, axis=axis, keepdims=True))  # what counts most
        top = xp.where(xp.isfinite(top) & (top > 0), top, 1).astype(wide.dtype)
        with np.errstate(over="ignore", under="ignore"):
            total = xp.sum((wide / top) ** ord, axis=axis, keepdims=keepdims)
        root = xp.asarray(total ** (1 / ord))
        return cast_to(root * top.reshape(root.shape), x.dtype)


def _power_norm_rule(g: Array, x: Array, out: Array, ord: float, axis: Axes, keepdims: bool) -> Array:
    size, total = absolute(x), broadcast_back(out, x.shape, axis, keepdims)
    zero = (size == 0) | (total == 0)
    with np.errstate(over="ignore", under="ignore"):
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
        raise ArgumentError("the order of a vector norm, a number", repr(ord), "mg.linalg.matrix_norm has ord='fro'")
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


@primitive(stacks=True, samples=_extreme)
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
    stacks=True,
    samples=[sample(*s.arrays, **{k: -v if k == "initial" else v for k, v in s.params.items()}) for s in _extreme],
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
def amax(
    x: Array, axis: Axes = None, keepdims: bool = False, where: ArrayLike | None = None, initial: float | None = None
) -> Array:
    """The same as ``max``.

    >>> print(float(amax(np.array([1.0, 3.0]))))
    3.0
    """
    return max(x, axis, keepdims, where, initial)


@composite(samples=_extreme[:3])
def amin(
    x: Array, axis: Axes = None, keepdims: bool = False, where: ArrayLike | None = None, initial: float | None = None
) -> Array:
    """The same as ``min``.

    >>> print(float(amin(np.array([1.0, 3.0]))))
    1.0
    """
    return min(x, axis, keepdims, where, initial)


@primitive(
    stacks=True,
    precision="wide",
    samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=0, keepdims=True)],
)
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


def _logsumexp_rule(g: Array, x: Array, out: Array, axis: Axes, keepdims: bool) -> Array:
    """g times the softmax ``e^(x - out)``, 0 where ``out`` is not finite.

    A large ``out`` is rounded by more than a softmax may be off: there it is divided by its sum, which should be 1.
    """

    def back(part: Array) -> Array:
        return broadcast_back(part, x.shape, axis, keepdims)

    logarithm = array_of(out)
    if not is_on_gpu(logarithm) and logarithm.size and float(abs(logarithm).max()) < EXACT_SHIFT:
        return back(g) * exp(x - back(out))
    finite = isfinite(out)
    with np.errstate(over="ignore", under="ignore"):
        weights = exp(where(back(finite), x, -math.inf) - back(where(finite, out, 0)))
    return back(safe_divide(g, sum(weights, axis, keepdims))) * weights


logsumexp.defvjp(_logsumexp_rule)

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
