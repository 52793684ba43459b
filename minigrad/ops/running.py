"""Running sums and products along an axis, and the product over axes, whose derivative is made of running ones.

A product may be a number of its dtype where a partial one is not. Where one overflowed or lost digits, the elements are
divided by powers of two with which every running product is near 1; no digit changes. A GPU is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, Axes, accumulator, array_module, array_of, cast_to, is_half
from minigrad.engine.core import primitive
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError
from minigrad.messages.arguments import normal_axis
from minigrad.ops.piecewise import astype, zeros_like
from minigrad.ops.reduce import broadcast_back, chosen, masked, over_axes, summed
from minigrad.ops.shape import as_tuple, concatenate, flip, moveaxis, pad, reshape

__all__ = ["cumprod", "cumsum", "cumulative_prod", "cumulative_sum", "prod"]

# ---- the range of a dtype -------------------------------------------------------------------------------------------


def in_range(form: Callable[[], Any]) -> Any:
    """What ``form`` makes, None where a product overflowed or lost digits by being too small on the way."""
    found: list[str] = []
    note = lambda kind, flag: found.append(kind)
    with np.errstate(over="call", under="call", invalid="call", call=note):  # NumPy looks for these in any case
        out = form()
    return None if found else out


def exponents(rows: Array) -> tuple[Array, Array]:
    """For each running product along the last axis the power of two near it, and how much each element adds to that.

    Zeros and what is not finite count as 1. With an element's share taken out of it, every running product is near 1.
    """
    xp = array_module(rows)
    with np.errstate(divide="ignore"):
        size = xp.log2(xp.abs(rows).astype(np.float64))
    powers = xp.rint(xp.cumsum(xp.where(xp.isfinite(size), size, 0), axis=-1))
    return powers, xp.diff(powers, axis=-1, prepend=0)


def times_power(x: Array, powers: Array) -> Array:
    """``x · 2^powers`` in two steps, since a power may leave the range where the product doesn't."""
    xp, most = array_module(array_of(x)), np.finfo(x.dtype).maxexp - 2
    first = xp.clip(xp.trunc(powers / 2), -most, most)
    rest = xp.clip(powers - first, -most, most)
    return x * xp.exp2(first).astype(x.dtype) * xp.exp2(rest).astype(x.dtype)


# ---- products -------------------------------------------------------------------------------------------------------


@primitive(stacks=True, precision="wide", samples=over_axes)
def prod(x: Array, axis: Axes = None, keepdims: bool = False, where: Array | None = None) -> Array:
    """Product ``Π x`` over ``axis``; the gradient, the product of the others, is exact with zeros.

    >>> print(prod(np.array([2.0, 3.0, 4.0])))
    24.0
    """
    xp = array_module(x)
    x = chosen(xp.asarray(x), where, 1)
    work = np.float32 if is_half(x.dtype) else None

    def plain() -> Array:
        return xp.prod(x, axis=axis, keepdims=keepdims, dtype=work)

    out = in_range(plain)
    if out is None:
        rows = _as_rows(x if work is None else x.astype(work), _axes(x, axis))
        powers, shares = exponents(rows)
        with np.errstate(all="ignore"):
            shape = plain().shape
        out = times_power(xp.prod(times_power(rows, -shares), axis=-1), powers[..., -1]).reshape(shape)
    return out if work is None else cast_to(out, x.dtype)


def _axes(x: Array, axis: Axes) -> tuple[int, ...]:
    return tuple(range(x.ndim)) if axis is None or not x.ndim else as_tuple(axis)


def _as_rows(x: Array, axes: tuple[int, ...]) -> Array:
    """``x`` with ``axes`` as the last one."""
    moved = moveaxis(x, axes, tuple(range(x.ndim - len(axes), x.ndim)))
    return reshape(moved, (*moved.shape[: x.ndim - len(axes)], math.prod(moved.shape[x.ndim - len(axes) :])))


def _from_rows(rows: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """The inverse of :func:`_as_rows`."""
    last = tuple(range(len(shape) - len(axes), len(shape)))
    kept = [n for a, n in enumerate(shape) if a not in {a % max(len(shape), 1) for a in axes}]
    return moveaxis(reshape(rows, (*kept, *(shape[a] for a in axes))), last, axes)


def product_of_others(rows: Array) -> Array:
    """For each element the product of all others of its row: exclusive products from both sides, no division."""
    if not hasattr(rows, "_data"):  # nothing records: the same in half the time
        xp = array_module(rows)
        before, after = xp.ones_like(rows), xp.ones_like(rows)
        before[..., 1:] = xp.cumprod(rows[..., :-1], axis=-1)
        after[..., :-1] = xp.cumprod(rows[..., :0:-1], axis=-1)[..., ::-1]
        return before * after
    ones = zeros_like(rows[..., :1]) + 1
    before = cumprod(concatenate([ones, rows[..., :-1]], -1), -1)
    after = flip(cumprod(concatenate([ones, flip(rows, -1)[..., :-1]], -1), -1), -1)
    return before * after


def _prod_rule(g: Array, x: Array, axis: Axes, keepdims: bool, where: Array | None) -> Array:
    axes, counting = _axes(x, axis), x if where is None else masked(x, where) + ~where
    g = masked(broadcast_back(g, x.shape, axis, keepdims), where)
    rows, g = _as_rows(counting, axes), _as_rows(g, axes)
    if is_half(x.dtype):  # rounded once, at the end
        rows, g = astype(rows, np.float32), astype(g, np.float32)
    out = in_range(lambda: array_of(g) * product_of_others(array_of(rows)))
    if out is None:
        powers, shares = exponents(array_of(rows))
        level = product_of_others(times_power(rows, -shares)) * g
        out = times_power(level, powers[..., -1:] - shares)
    elif hasattr(rows, "_data") or hasattr(g, "_data"):  # which record
        out = g * product_of_others(rows)
    return masked(_from_rows(astype(out, x.dtype) if is_half(x.dtype) else out, x.shape, axes), where)


prod.defvjp(_prod_rule)


# ---- running sums and products --------------------------------------------------------------------------------------


def _running(x: Array) -> Any:
    """The dtype of a running sum or product: float32 while it runs over half precision."""
    return np.float32 if is_half(x.dtype) else None


@primitive(
    linear="jointly",
    stacks=True,
    precision="wide",
    samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=0)],
)
def cumsum(x: Array, axis: int | None = None) -> Array:
    """Running sums along ``axis`` (of the flattened array for None).

    >>> print(cumsum(np.array([1.0, 2.0, 3.0])))
    [1. 3. 6.]
    """
    xp = array_module(x)
    x = xp.asarray(x)
    out = summed(lambda x: x.cumsum(axis=axis, dtype=_running(x)), x)
    return cast_to(out, x.dtype) if is_half(x.dtype) else out


def _cumsum_rule(g: Array, x_shape: Any, axis: int | None) -> Array:
    a = 0 if axis is None else axis
    return reshape(flip(cumsum(flip(g, a), a), a), x_shape)


cumsum.defvjp(_cumsum_rule)


@primitive(stacks=True, precision="wide", samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=0)])
def cumprod(x: Array, axis: int | None = None) -> Array:
    """Running products along ``axis`` (of the flattened array for None); the gradient is exact with zeros.

    >>> print(cumprod(np.array([1.0, 2.0, 3.0])))
    [1. 2. 6.]
    """
    xp = array_module(x)
    x = xp.asarray(x)
    out = in_range(lambda: xp.cumprod(x, axis=axis, dtype=_running(x)))
    if out is None:
        rows = (x.reshape(-1) if axis is None else xp.moveaxis(x, axis, -1)).astype(accumulator(x.dtype))
        powers, shares = exponents(rows)
        out = times_power(xp.cumprod(times_power(rows, -shares), axis=-1), powers)
        out = out if axis is None else xp.moveaxis(out, -1, axis)
    return cast_to(out, x.dtype) if is_half(x.dtype) else out


@primitive(stacks=True, samples=[sample((2, 3), (2, 3))], flops=lambda out: 2 * out.size)
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


def _levelled(derivative: Callable[[Array, Array], Array], g: Array, rows: Array) -> Array:
    """The gradient of a running product of rows whose products leave the range, relative to the row's largest term."""
    wide = astype(rows, np.float64)
    powers, shares = exponents(array_of(wide))
    xp = array_module(powers)
    with np.errstate(divide="ignore"):
        terms = powers + xp.log2(xp.abs(array_of(g)).astype(np.float64))
    largest = xp.rint(xp.max(xp.where(xp.isfinite(terms), terms, -math.inf), axis=-1, keepdims=True, initial=-math.inf))
    largest = xp.where(xp.isfinite(largest), largest, 0)
    level = derivative(times_power(astype(g, wide.dtype), powers - largest), times_power(wide, -shares))
    return astype(times_power(level, largest - shares), rows.dtype)


def _cumprod_rule(g: Array, x: Array, axis: int | None) -> Array:
    """x[k] receives (product before k) · (g[k] + x[k+1] (g[k+1] + x[k+2] (…))): Horner, without a division."""
    axis = None if x.ndim == 0 else axis
    rows = reshape(x, (-1,)) if axis is None else moveaxis(x, axis, -1)
    g = g if axis is None else moveaxis(g, axis, -1)

    def derivative(g: Array, rows: Array) -> Array:
        return cumprod(_shifted(rows, zeros_like(rows[..., :1]) + 1), -1) * _suffix_recurrence(g, rows)

    result = in_range(lambda: derivative(array_of(g), array_of(rows)))
    if result is None:
        result = _levelled(derivative, g, rows)
    elif hasattr(rows, "_data") or hasattr(g, "_data"):  # which record
        result = derivative(g, rows)
    return reshape(result, x.shape) if axis is None else moveaxis(result, -1, axis)


cumprod.defvjp(_cumprod_rule)

# ---- the array API's, which take an axis of several and may begin with the empty sum or product ---------------------

_cumulated = [sample((3,)), sample((2, 3), axis=1), sample((2, 3), axis=0, include_initial=True)]


def _cumulated_by(running: Callable[..., Any], first: int, x: Array, axis: int | None, include_initial: bool) -> Any:
    x = x if getattr(x, "ndim", 0) else reshape(x, (1,))
    if axis is None and x.ndim > 1:
        raise ArgumentError("the axis to run along", f"none, of shape {x.shape}", f"{running.name} flattens")  # type: ignore[attr-defined]
    axis = 0 if axis is None else normal_axis(axis, x.ndim)
    out = running(x, axis)
    return pad(out, [(int(a == axis), 0) for a in range(x.ndim)], constant_values=first) if include_initial else out


@composite(samples=_cumulated)
def cumulative_sum(x: Array, axis: int | None = None, include_initial: bool = False) -> Array:
    """Running sums along ``axis``, which an array of one axis needn't name, behind a 0 with ``include_initial``.

    >>> print(cumulative_sum(np.array([1.0, 2.0, 3.0]), include_initial=True))
    [0. 1. 3. 6.]
    """
    return _cumulated_by(cumsum, 0, x, axis, include_initial)


@composite(samples=_cumulated)
def cumulative_prod(x: Array, axis: int | None = None, include_initial: bool = False) -> Array:
    """Running products along ``axis``, which an array of one axis needn't name, behind a 1 with ``include_initial``.

    >>> print(cumulative_prod(np.array([1.0, 2.0, 3.0]), include_initial=True))
    [1. 1. 2. 6.]
    """
    return _cumulated_by(cumprod, 1, x, axis, include_initial)
