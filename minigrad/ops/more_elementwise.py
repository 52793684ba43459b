"""More functions of each element, no methods of Tensor: the cube root, logarithms to base 2, sin(πx)/(πx), degrees."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, array_module, array_of, cast_to
from minigrad.engine.core import elementwise
from minigrad.engine.registry import composite, sample
from minigrad.ops.elementwise import exp2, lost_in_difference, multiply
from minigrad.ops.piecewise import isinf, where

__all__ = ["cbrt", "deg2rad", "logaddexp2", "rad2deg", "sinc"]


@elementwise(torch=False, kinks=(0,))
def cbrt(x: Array) -> Array:
    """The cube root of each element, of negative ones too.

    >>> print(cbrt(np.array([-8.0, 27.0])))
    [-2.  3.]
    """
    return array_module(x).cbrt(x)


@elementwise(torch=False, numpy=lambda n, x: 1 / (3 * n.cbrt(x) ** 2), kinks=(0,))
def cbrt_slope(x: Array) -> Array:
    """``1 / (3 x^(2/3))``, the derivative of the cube root; a slope of its own, since a quotient's has twice the
    roundings. In float32 by float64, as the square of NumPy's root there is 5 units off.
    """
    single = getattr(x, "dtype", None) == np.float32
    root = array_module(x).cbrt(x.astype(np.float64) if single else x)
    out = 1 / (3 * (root * root))
    return out.astype(np.float32) if single else out


@elementwise(torch="logaddexp2")
def logaddexp2(x: Array, y: Array) -> Array:
    """``log2(2^x + 2^y)`` of each pair, without overflow; its gradient is 0 where both are infinite.

    >>> print(float(logaddexp2(3.0, 3.0)))
    4.0
    """
    return array_module(x, y).logaddexp2(x, y)


def _share2(x: Array, y: Array) -> Array:
    """``2^x / (2^x + 2^y)``, and 0 where both are the same infinity."""
    same = (x == y) & isinf(x)
    apart = where(same, 0, x) - where(same, 0, y)
    below = array_of(apart) < 0
    lost = lost_in_difference(array_of(x), array_of(y), array_of(apart)) * math.log(2)  # which the power magnifies
    power = exp2(where(below, apart, -apart)) * (1 + where(below, lost, -lost))
    return where(same, 0, where(below, power, 1) / (1 + power))


cbrt.defvjp(lambda g, x: g * cbrt_slope(x))
cbrt_slope.defvjp(lambda g, x, out: g * out * (-2 / 3) / x)
logaddexp2.defvjp(lambda g, x, y: g * _share2(x, y), lambda g, x, y: g * _share2(y, x))


# ---- sin(πx) / (πx) -------------------------------------------------------------------------------------------------


def sinc_derivative(x: Array, n: int) -> Array:
    """The n-th derivative of sinc: its series up to |x| = 0.4 + n/10, beyond ``(sinⁿ(πx)/π - n · the one before) / x``.

    x is reduced to half a period of the sine first, which is exact.
    """
    xp = array_module(x)
    x = xp.asarray(x)
    wide = x.astype(accumulator(x.dtype if x.dtype.kind not in "biu" else np.dtype(np.float64)))
    near = xp.abs(wide) < 0.4 + 0.1 * n
    inner, outer = xp.where(near, wide, 0), xp.where(near, 1, wide)
    whole = xp.rint(outer)
    angle, sign = math.pi * (outer - whole), 1 - 2 * xp.remainder(whole, 2)
    sine, cosine = sign * xp.sin(angle), sign * xp.cos(angle)
    turns, far = (sine, cosine, -sine, -cosine), sine / (math.pi * outer)
    for k in range(1, n + 1):
        far = (math.pi ** (k - 1) * turns[k % 4] - k * far) / outer
    return xp.where(near, _sinc_series(inner, n), far).astype(wide.dtype)


def _sinc_series(x: Array, n: int) -> Array:
    """``Σₖ (-1)ᵏ π²ᵏ (2k)! / ((2k - n)! (2k + 1)!) x^(2k - n)``, by Horner's rule in x²."""
    first = (n + 1) // 2
    terms = range(first, first + 14 + 2 * n)
    factors = [(-1) ** k * math.pi ** (2 * k) / ((2 * k + 1) * math.factorial(2 * k - n)) for k in terms]
    square, total = x * x, 0 * x
    for factor in factors[::-1]:
        total = total * square + factor
    return total * x if n % 2 else total


def _twin(n: Any, x: Any, order: int = 0) -> Any:
    """The definition, for orders 0 and 1, away from 0."""
    return n.sinc(x) if order == 0 else (n.cos(math.pi * x) - n.sinc(x)) / x


@elementwise(torch="sinc")
def sinc(x: Array) -> Array:
    """``sin(πx) / (πx)`` of each element, 1 at 0.

    >>> print(sinc(np.array([0.0, 0.5, 1.5])).round(4))
    [ 1.      0.6366 -0.2122]
    """
    return cast_to(sinc_derivative(x, 0), _kept(x))


@elementwise(numpy=_twin, torch=_twin, domain=(0.6, 1.9), samples=[sample((2, 3), order=n) for n in (0, 1)])
def sinc_slope(x: Array, order: int) -> Array:
    """The derivative of sinc of that order."""
    return cast_to(sinc_derivative(x, order), _kept(x))


def _kept(x: Array) -> Any:
    """The dtype of a result: that of x, float64 of whole numbers."""
    dtype = np.result_type(x) if not hasattr(x, "dtype") else x.dtype
    return dtype if dtype.kind not in "biu" else np.dtype(np.float64)


sinc.defvjp(lambda g, x: g * sinc_slope(x, 1))
sinc_slope.defvjp(lambda g, x, order: g * sinc_slope(x, order + 1))

# ---- degrees --------------------------------------------------------------------------------------------------------


@composite(samples=[sample((2, 3)), sample(())])
def deg2rad(x: Array) -> Array:
    """Degrees as radians: ``x π / 180``.

    >>> print(float(deg2rad(180.0)).__round__(4))
    3.1416
    """
    return multiply(x, math.pi / 180)


@composite(samples=[sample((2, 3)), sample(())])
def rad2deg(x: Array) -> Array:
    """Radians as degrees: ``x 180 / π``.

    >>> print(float(rad2deg(3.0)).__round__(4))
    171.8873
    """
    return multiply(x, 180 / math.pi)
