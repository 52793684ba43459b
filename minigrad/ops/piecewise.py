"""Functions made of flat and straight pieces: choosing, clipping, rounding, tests of elements, changes of dtype.

The derivative of a piece is 0 or ±1. What it is where pieces meet says ``docs/kinks.md``, as for the kinks of other
tables: norms, maxima over an axis, powers at 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, ArrayLike, DType, array_module, array_of, to_device
from minigrad.engine.core import elementwise, primitive
from minigrad.engine.registry import composite, sample

# fmt: off
__all__ = [
    "absolute", "astype", "ceil", "clip", "copysign", "floor", "fmax", "fmin", "fmod", "isfinite", "isinf", "isnan",
    "masked_fill", "maximum", "minimum", "nan_to_num", "remainder", "round", "sign", "stop_gradient", "trunc",
    "where",
]
# fmt: on


def zeros_like(x: Array) -> Array:
    """Zeros in the shape of ``x``, as a constant."""
    return array_module(x).zeros_like(array_of(x))


def _flat(g: Array) -> Array:
    """The derivative of steps."""
    return zeros_like(g)


@elementwise(kinks=(0,))
def absolute(x: Array) -> Array:
    """``|x|`` of each element; its derivative at 0 is 0.

    >>> print(absolute(np.array([-2.0, 3.0])))
    [2. 3.]
    """
    return array_module(x).abs(x)


@elementwise(kinks=(0,))
def sign(x: Array) -> Array:
    """-1, 0 or 1 by the sign of each element; its derivative is 0 everywhere.

    >>> print(sign(np.array([-2.0, 0.0, 3.0])))
    [-1.  0.  1.]
    """
    return array_module(x).sign(x)


@elementwise(torch="copysign", kinks=(0,))
def copysign(x: Array, y: Array) -> Array:
    """``|x|`` with the sign of ``y``, which zeros have too; its derivative at x = 0 is 0, and 0 with respect to y.

    >>> print(copysign(np.array([-2.0, 3.0]), np.array([1.0, -0.0])))
    [ 2. -3.]
    """
    return array_module(x, y).copysign(x, y)


absolute.defvjp(lambda g, x: g * sign(x))
sign.defvjp(_flat)
copysign.defvjp(lambda g, x, y: g * sign(x) * copysign(1, y), _flat)

# ---- tests of elements: boolean results, no derivative --------------------------------------------------------------


@elementwise(samples=[sample(np.array([0.0, np.nan, np.inf]))])
def isnan(x: Array) -> Array:
    """Whether each element is NaN; no derivative.

    >>> print(isnan(np.array([np.nan, 1.0])))
    [ True False]
    """
    return array_module(x).isnan(x)


@elementwise(samples=[sample(np.array([0.0, np.nan, np.inf]))])
def isinf(x: Array) -> Array:
    """Whether each element is +∞ or -∞; no derivative.

    >>> print(isinf(np.array([np.inf, 1.0])))
    [ True False]
    """
    return array_module(x).isinf(x)


@elementwise(samples=[sample(np.array([0.0, np.nan, np.inf]))])
def isfinite(x: Array) -> Array:
    """Whether each element is neither NaN nor infinite; no derivative.

    >>> print(isfinite(np.array([np.inf, 1.0])))
    [False  True]
    """
    return array_module(x).isfinite(x)


# ---- choosing -------------------------------------------------------------------------------------------------------


@elementwise(samples=[sample(np.array([[True, False, True]]), (2, 3), (2, 1))])
def where(condition: Array, x: Array, y: Array) -> Array:
    """``x`` where the condition holds, else ``y``; the one not taken receives a gradient of exactly 0.

    >>> print(where(np.array([True, False]), 1.0, 2.0))
    [1. 2.]
    """
    out: Array = array_module(condition, x, y).where(condition, x, y)
    if out.dtype.kind in "iu":  # where() takes an integer of Python in any case, and keeps its last bits
        for value in (x, y):
            if type(value) is int:
                out.dtype.type(value)
    return out


@elementwise()
def maximum(x: Array, y: Array) -> Array:
    """The larger of each pair, NaN if one is; at a tie each receives half of the gradient.

    >>> print(maximum(np.array([1.0, 3.0]), 2.0))
    [2. 3.]
    """
    return array_module(x, y).maximum(x, y)


@elementwise()
def minimum(x: Array, y: Array) -> Array:
    """The smaller of each pair, NaN if one is; at a tie each receives half of the gradient.

    >>> print(minimum(np.array([1.0, 3.0]), 2.0))
    [1. 2.]
    """
    return array_module(x, y).minimum(x, y)


@elementwise()
def fmax(x: Array, y: Array) -> Array:
    """The larger of each pair, the number if the other is NaN; at a tie each receives half of the gradient.

    >>> print(float(fmax(np.nan, 2.0)))
    2.0
    """
    return array_module(x, y).fmax(x, y)


@elementwise()
def fmin(x: Array, y: Array) -> Array:
    """The smaller of each pair, the number if the other is NaN; at a tie each receives half of the gradient.

    >>> print(float(fmin(np.nan, 2.0)))
    2.0
    """
    return array_module(x, y).fmin(x, y)


def _half_at_ties(g: Array, x: Array, y: Array, lost: Array) -> Array:
    """g, halved where x equals y, and 0 where x lost."""
    return where(x == y, g * 0.5, where(lost, 0, g))


where.defvjp(None, lambda g, condition: where(condition, g, 0), lambda g, condition: where(condition, 0, g))
maximum.defvjp(lambda g, x, y: _half_at_ties(g, x, y, x < y), lambda g, x, y: _half_at_ties(g, x, y, y < x))
minimum.defvjp(lambda g, x, y: _half_at_ties(g, x, y, x > y), lambda g, x, y: _half_at_ties(g, x, y, y > x))
fmax.defvjp(
    lambda g, x, y: _half_at_ties(g, x, y, (x < y) | isnan(x) & ~isnan(y)),
    lambda g, x, y: _half_at_ties(g, x, y, (y < x) | isnan(y)),
)
fmin.defvjp(
    lambda g, x, y: _half_at_ties(g, x, y, (x > y) | isnan(x) & ~isnan(y)),
    lambda g, x, y: _half_at_ties(g, x, y, (y > x) | isnan(y)),
)


@primitive(
    part_of="clip",
    kinks=(-1, 1),
    stacks=True,
    samples=[sample((3, 4), min=-1, max=1), sample((3, 4), min=None, max=1)],
)
def clip_to_numbers(x: Array, min: Any, max: Any) -> Array:
    """``clip`` between numbers: the whole gradient passes inside and at the bounds, 0 outside."""
    return array_module(x).clip(x, min, max)


def _inside(g: Array, x: Array, min: Any, max: Any) -> Array:
    low = x >= (-math.inf if min is None else min)
    return where(low & (x <= (math.inf if max is None else max)), g, 0)


clip_to_numbers.defvjp(_inside).defjvp(_inside)


@composite(
    samples=[sample((3, 4), min=-1, max=1), sample((3, 4), min=0.5), sample((4,), (3, 4), (4,))], kinks=(-1, 0.5, 1)
)
def clip(x: Array, min: ArrayLike | None = None, max: ArrayLike | None = None) -> Array:
    """Each element moved into [min, max].

    At bounds that are numbers the whole gradient passes; bounds that are arrays or Tensors share it at a tie, as
    ``minimum(maximum(x, min), max)``. NaN stays NaN.

    >>> print(clip(np.array([-2.0, 0.5, 2.0]), -1, 1))
    [-1.   0.5  1. ]
    """
    if all(bound is None or isinstance(bound, int | float | np.number) for bound in (min, max)):
        return clip_to_numbers(x, min, max)
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


@composite(samples=[sample((2, 3), mask=np.array([[True, False, True]]), value=-1.0)])
def masked_fill(x: Array, mask: Array, value: ArrayLike) -> Array:
    """``value`` where the mask is True, ``x`` elsewhere.

    >>> print(masked_fill(np.array([1.0, 2.0]), np.array([True, False]), 0.0))
    [0. 2.]
    """
    return where(mask, value, x)


@elementwise(
    samples=[sample((2, 3)), sample(np.array([np.nan, np.inf, -np.inf, 1.0]), nan=2.0, posinf=3.0, neginf=-3.0)]
)
def nan_to_num(x: Array, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Array:
    """NaN and infinities replaced by numbers (infinities by the largest ones of the dtype unless told).

    >>> print(nan_to_num(np.array([np.nan, 1.0])))
    [0. 1.]
    """
    return array_module(x).nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf)


nan_to_num.defvjp(lambda g, x: where(isfinite(x), g, 0))

# ---- rounding -------------------------------------------------------------------------------------------------------

_STEPS = (-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2)


@elementwise(kinks=_STEPS)
def floor(x: Array) -> Array:
    """The largest whole number not above each element; its derivative is 0.

    >>> print(float(floor(-1.5)))
    -2.0
    """
    return array_module(x).floor(x)


@elementwise(kinks=_STEPS)
def ceil(x: Array) -> Array:
    """The smallest whole number not below each element; its derivative is 0.

    >>> print(float(ceil(-1.5)))
    -1.0
    """
    return array_module(x).ceil(x)


@elementwise(kinks=_STEPS)
def trunc(x: Array) -> Array:
    """Each element with its fraction cut off; its derivative is 0.

    >>> print(float(trunc(-1.5)))
    -1.0
    """
    return array_module(x).trunc(x)


@elementwise(kinks=_STEPS)
def round(x: Array, decimals: int = 0) -> Array:
    """Each element rounded to ``decimals`` places, halves to even; its derivative is 0.

    >>> print(float(round(2.5)))
    2.0
    """
    return array_module(x).round(x, decimals)


@elementwise(samples=[sample(np.array([[5.3, -5.3, 4.1]]), np.array([[2.0], [-3.0]]))])
def fmod(x: Array, y: Array) -> Array:
    """The remainder of ``x / y`` with the sign of ``x``.

    >>> print(float(fmod(-5.0, 3.0)))
    -2.0
    """
    return array_module(x, y).fmod(x, y)


@elementwise(samples=[sample(np.array([[5.3, -5.3, 4.1]]), np.array([[2.0], [-3.0]]))])
def remainder(x: Array, y: Array) -> Array:
    """The remainder of ``x / y`` with the sign of ``y``; what ``x % y`` gives.

    >>> print(float(remainder(-5.0, 3.0)))
    1.0
    """
    return array_module(x, y).remainder(x, y)


def _quotient(x: Array, y: Array, out: Array) -> Array:
    """The whole number (x - out) / y, a constant; x / y, a little less than a whole number, may round up to it."""
    x, y, out = array_of(x), array_of(y), array_of(out)
    return array_module(x, y).rint(x / y - out / y)


floor.defvjp(_flat)
ceil.defvjp(_flat)
trunc.defvjp(_flat)
round.defvjp(_flat)
fmod.defvjp(lambda g: g, lambda g, x, y, out: -g * _quotient(x, y, out))
remainder.defvjp(lambda g: g, lambda g, x, y, out: -g * _quotient(x, y, out))

# ---- dtype and history ----------------------------------------------------------------------------------------------


@primitive(linear="jointly", stacks=True, samples=[sample((2, 3), dtype=np.dtype(np.float64))])
def astype(x: Array, dtype: DType) -> Array:
    """``x`` in another dtype; the gradient comes back in the dtype of ``x``.

    >>> print(astype(np.array([1.7]), np.int64))
    [1]
    """
    with np.errstate(over="ignore"):
        return x.astype(dtype)


astype.defvjp(lambda g, x_dtype: astype(g, x_dtype))


@primitive(view=True, samples=[sample((2, 3))])
def stop_gradient(x: Array) -> Array:
    """``x`` itself as a constant, without a derivative.

    >>> print(stop_gradient(np.array([1.0])))
    [1.]
    """
    return array_module(x).asarray(x)[...]


@primitive(linear="jointly", stacks=True, part_of="to", samples=[sample((2, 3), device="cpu")])
def transfer(x: Array, device: str) -> Array:
    """``x`` on another device; the gradient comes back to the device of ``x``."""
    return to_device(x, device)


transfer.defvjp(lambda g, x_device: transfer(g, x_device))
