"""Elementwise functions and their derivatives: the page of the calculus book.

A rule reads the incoming gradient ``g``, arguments by name, and the result as ``out``; broadcasting is undone for it.
At kinks the rules follow ``docs/kinks.md``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, array_module, to_device
from minigrad.core import composite, elementwise, primitive, sample
from minigrad.ops._erf import erf as _erf

# fmt: off
__all__ = [
    "absolute", "add", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "astype", "ceil",
    "clip", "cos", "cosh", "divide", "erf", "exp", "exp2", "expm1", "floor", "fmax", "fmin", "fmod", "hypot",
    "isfinite", "isinf", "isnan", "lerp", "log", "log1p", "log2", "log10", "logaddexp", "masked_fill", "maximum",
    "minimum", "multiply", "nan_to_num", "negative", "power", "reciprocal", "remainder", "round", "sigmoid", "sign",
    "sin", "sinh", "softplus", "sqrt", "square", "stop_gradient", "subtract", "tan", "tanh", "trunc", "where",
]
# fmt: on

# ---- arithmetic -----------------------------------------------------------------------------------------------------


@elementwise()
def add(x: Array, y: Array) -> Array:
    """Sum ``x + y`` of each pair of elements.

    >>> print(add(np.array([1.0, 2.0]), 1))
    [2. 3.]
    """
    return array_module(x, y).add(x, y)


@elementwise()
def subtract(x: Array, y: Array) -> Array:
    """Difference ``x - y`` of each pair of elements.

    >>> print(subtract(np.array([1.0, 2.0]), 1))
    [0. 1.]
    """
    return array_module(x, y).subtract(x, y)


@elementwise()
def multiply(x: Array, y: Array) -> Array:
    """Product ``x · y`` of each pair of elements.

    >>> print(multiply(np.array([1.0, 2.0]), 3))
    [3. 6.]
    """
    return array_module(x, y).multiply(x, y)


@elementwise(domain=(0.5, 2.0))
def divide(x: Array, y: Array) -> Array:
    """Quotient ``x / y`` of each pair of elements.

    >>> print(divide(np.array([1.0, 2.0]), 2))
    [0.5 1. ]
    """
    return array_module(x, y).divide(x, y)


@elementwise(domain=(0.5, 2.0))
def power(x: Array, y: Array) -> Array:
    """``x`` to the power ``y``; its derivative ``y x^(y-1)`` is 0 for y = 0, also at x = 0.

    >>> print(power(np.array([2.0, 3.0]), 2))
    [4. 9.]
    """
    return x**y


@elementwise()
def negative(x: Array) -> Array:
    """``-x`` of each element.

    >>> print(negative(np.array([1.0, -2.0])))
    [-1.  2.]
    """
    return array_module(x).negative(x)


@elementwise(domain=(0.5, 2.0))
def reciprocal(x: Array) -> Array:
    """``1 / x`` of each element.

    >>> print(reciprocal(np.array([2.0, 4.0])))
    [0.5  0.25]
    """
    return array_module(x).divide(1, x)


@elementwise()
def square(x: Array) -> Array:
    """``x²`` of each element.

    >>> print(square(np.array([2.0, -3.0])))
    [4. 9.]
    """
    return array_module(x).multiply(x, x)


@elementwise(domain=(0.3, 2.0))
def sqrt(x: Array) -> Array:
    """Square root of each element; its derivative at 0 is +∞.

    >>> print(sqrt(np.array([4.0, 9.0])))
    [2. 3.]
    """
    return array_module(x).sqrt(x)


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


def zeros_like(x: Array) -> Array:
    """Zeros in the shape of ``x``, as a constant: the derivative of what is flat."""
    raw = getattr(x, "_data", x)
    return array_module(raw).zeros_like(raw)


def _flat(g: Array) -> Array:
    return zeros_like(g)


def _power_base(g: Array, x: Array, y: Array) -> Array:
    """y x^(y-1), and 0 where y is 0."""
    if isinstance(y, int | float):
        return _flat(g) if y == 0 else g * (y * x ** (y - 1))
    flat = y == 0
    return where(flat, 0, g * y * x ** where(flat, 1, y - 1))


def _power_exponent(g: Array, x: Array, out: Array) -> Array:
    """x^y ln x, and 0 where x is 0."""
    zero = x == 0
    return where(zero, 0, g * where(zero, 0, out) * log(where(zero, 1, x)))


# fmt: off
add       .defvjp(lambda g: g,                     lambda g: g)
subtract  .defvjp(lambda g: g,                     lambda g: -g)
multiply  .defvjp(lambda g, y: g * y,              lambda g, x: g * x)
divide    .defvjp(lambda g, y: g / y,              lambda g, y, x: -g * x / (y * y))
power     .defvjp(_power_base,                     _power_exponent)
negative  .defvjp(lambda g: -g)
reciprocal.defvjp(lambda g, out: -g * out * out)
square    .defvjp(lambda g, x: g * (2 * x))
sqrt      .defvjp(lambda g, out: g / (2 * out))
absolute  .defvjp(lambda g, x: g * sign(x))
sign      .defvjp(_flat)
# fmt: on

# ---- exponentials and logarithms ------------------------------------------------------------------------------------


@elementwise()
def exp(x: Array) -> Array:
    """``e^x`` of each element.

    >>> print(exp(np.array([0.0, 1.0])).round(4))
    [1.     2.7183]
    """
    return array_module(x).exp(x)


@elementwise()
def expm1(x: Array) -> Array:
    """``e^x - 1`` of each element, exact near 0.

    >>> print(float(expm1(1e-20)))
    1e-20
    """
    return array_module(x).expm1(x)


@elementwise()
def exp2(x: Array) -> Array:
    """``2^x`` of each element.

    >>> print(exp2(np.array([0.0, 3.0])))
    [1. 8.]
    """
    return array_module(x).exp2(x)


@elementwise(domain=(0.3, 3.0))
def log(x: Array) -> Array:
    """Natural logarithm of each element.

    >>> print(float(log(1.0)))
    0.0
    """
    return array_module(x).log(x)


@elementwise(domain=(-0.7, 2.0))
def log1p(x: Array) -> Array:
    """``ln(1 + x)`` of each element, exact near 0.

    >>> print(float(log1p(1e-20)))
    1e-20
    """
    return array_module(x).log1p(x)


@elementwise(domain=(0.3, 3.0))
def log2(x: Array) -> Array:
    """Logarithm to base 2 of each element.

    >>> print(log2(np.array([1.0, 8.0])))
    [0. 3.]
    """
    return array_module(x).log2(x)


@elementwise(domain=(0.3, 3.0))
def log10(x: Array) -> Array:
    """Logarithm to base 10 of each element.

    >>> print(log10(np.array([1.0, 100.0])))
    [0. 2.]
    """
    return array_module(x).log10(x)


@elementwise()
def sigmoid(x: Array) -> Array:
    """``1 / (1 + e^-x)`` of each element, without overflow at any x.

    >>> print(sigmoid(np.array([-1e4, 0.0, 1e4])))
    [0.  0.5 1. ]
    """
    xp = array_module(x)
    with np.errstate(under="ignore"):
        z = xp.exp(-xp.abs(x))
        return xp.where(x >= 0, 1, z) / (1 + z)


@elementwise(torch="nn.functional.softplus")
def softplus(x: Array) -> Array:
    """``ln(1 + e^x)`` of each element, without overflow at any x.

    >>> softplus(np.array([-1e4, 0.0, 1e4])).round(4).tolist()
    [0.0, 0.6931, 10000.0]
    """
    xp = array_module(x)
    with np.errstate(under="ignore"):
        return xp.log1p(xp.exp(-xp.abs(x))) + xp.maximum(x, 0)


@elementwise()
def logaddexp(x: Array, y: Array) -> Array:
    """``ln(e^x + e^y)`` of each pair; its gradient is (softmax of the pair) · g, and 0 where both are infinite.

    >>> print(float(logaddexp(-np.inf, 2.0)))
    2.0
    """
    return array_module(x, y).logaddexp(x, y)


@elementwise()
def erf(x: Array) -> Array:
    """Error function ``2/√π ∫₀ˣ e^(-t²) dt`` of each element, by rational approximations good to the last digits.

    >>> print(float(erf(0.5)).__round__(10))
    0.5204998778
    """
    return _erf(x)


@elementwise(numpy=lambda n, x: n.exp(-x * x), torch=lambda t, x: t.exp(-x * x))
def gaussian(x: Array) -> Array:
    """``e^(-x²)`` of each element, in silence where that is too small for its dtype: the slope of ``erf``.

    >>> print(float(gaussian(1e200)))
    0.0
    """
    with np.errstate(over="ignore", under="ignore"):
        return array_module(x).exp(-x * x)


def _softmax_of_pair(x: Array, y: Array) -> Array:
    """The share of x in a softmax over (x, y): sigmoid(x - y), and 0 where both are the same infinity."""
    both_infinite = (x == y) & isinf(x)
    share = sigmoid(where(both_infinite, 0, x) - where(both_infinite, 0, y))
    return where(both_infinite, 0, share)


# fmt: off
exp     .defvjp(lambda g, out: g * out)
expm1   .defvjp(lambda g, out: g * (out + 1))
exp2    .defvjp(lambda g, out: g * out * math.log(2))
log     .defvjp(lambda g, x: g / x)
log1p   .defvjp(lambda g, x: g / (1 + x))
log2    .defvjp(lambda g, x: g / (x * math.log(2)))
log10   .defvjp(lambda g, x: g / (x * math.log(10)))
sigmoid .defvjp(lambda g, out: g * out * (1 - out))
softplus.defvjp(lambda g, x: g * sigmoid(x))
erf     .defvjp(lambda g, x: g * (2 / math.sqrt(math.pi)) * gaussian(x))
gaussian.defvjp(lambda g, x, out: g * out * x * -2)
logaddexp.defvjp(lambda g, x, y: g * _softmax_of_pair(x, y), lambda g, x, y: g * _softmax_of_pair(y, x))
# fmt: on

# ---- trigonometric and hyperbolic -----------------------------------------------------------------------------------


@elementwise()
def sin(x: Array) -> Array:
    """Sine of each element, in radians.

    >>> print(float(sin(0.0)))
    0.0
    """
    return array_module(x).sin(x)


@elementwise()
def cos(x: Array) -> Array:
    """Cosine of each element, in radians.

    >>> print(float(cos(0.0)))
    1.0
    """
    return array_module(x).cos(x)


@elementwise(domain=(-1.2, 1.2))
def tan(x: Array) -> Array:
    """Tangent of each element, in radians.

    >>> print(float(tan(0.0)))
    0.0
    """
    return array_module(x).tan(x)


@elementwise(domain=(-0.8, 0.8))
def arcsin(x: Array) -> Array:
    """Inverse sine of each element, in radians.

    >>> print(float(arcsin(1.0)).__round__(4))
    1.5708
    """
    return array_module(x).arcsin(x)


@elementwise(domain=(-0.8, 0.8))
def arccos(x: Array) -> Array:
    """Inverse cosine of each element, in radians.

    >>> print(float(arccos(1.0)))
    0.0
    """
    return array_module(x).arccos(x)


@elementwise()
def arctan(x: Array) -> Array:
    """Inverse tangent of each element, in radians.

    >>> print(float(arctan(1.0)).__round__(4))
    0.7854
    """
    return array_module(x).arctan(x)


@elementwise(domain=(0.3, 2.0))
def arctan2(y: Array, x: Array) -> Array:
    """Angle of the point (x, y) in radians; its gradient at the origin is 0.

    >>> print(float(arctan2(1.0, 1.0)).__round__(4))
    0.7854
    """
    return array_module(y, x).arctan2(y, x)


@elementwise()
def sinh(x: Array) -> Array:
    """Hyperbolic sine of each element.

    >>> print(float(sinh(0.0)))
    0.0
    """
    return array_module(x).sinh(x)


@elementwise()
def cosh(x: Array) -> Array:
    """Hyperbolic cosine of each element.

    >>> print(float(cosh(0.0)))
    1.0
    """
    return array_module(x).cosh(x)


@elementwise()
def tanh(x: Array) -> Array:
    """Hyperbolic tangent of each element.

    >>> print(float(tanh(0.0)))
    0.0
    """
    return array_module(x).tanh(x)


@elementwise()
def arcsinh(x: Array) -> Array:
    """Inverse hyperbolic sine of each element.

    >>> print(float(arcsinh(0.0)))
    0.0
    """
    return array_module(x).arcsinh(x)


@elementwise(domain=(1.3, 3.0))
def arccosh(x: Array) -> Array:
    """Inverse hyperbolic cosine of each element.

    >>> print(float(arccosh(1.0)))
    0.0
    """
    return array_module(x).arccosh(x)


@elementwise(domain=(-0.8, 0.8))
def arctanh(x: Array) -> Array:
    """Inverse hyperbolic tangent of each element.

    >>> print(float(arctanh(0.0)))
    0.0
    """
    return array_module(x).arctanh(x)


@elementwise(domain=(0.3, 2.0))
def hypot(x: Array, y: Array) -> Array:
    """``√(x² + y²)`` of each pair, without overflow; its gradient at the origin is 0.

    >>> print(float(hypot(3.0, 4.0)))
    5.0
    """
    return array_module(x, y).hypot(x, y)


def over(numerator: Array, denominator: Array) -> Array:
    """``numerator / denominator``, and 0 where the denominator is 0, for derivatives of norms."""
    zero = denominator == 0
    return where(zero, 0, numerator / where(zero, 1, denominator))


def _over_square(numerator: Array, x: Array, y: Array) -> Array:
    """``numerator / (x² + y²)``, in two divisions so that no square overflows, and 0 at the origin."""
    radius = hypot(x, y)
    return over(over(numerator, radius), radius)


# fmt: off
sin    .defvjp(lambda g, x: g * cos(x))
cos    .defvjp(lambda g, x: -g * sin(x))
tan    .defvjp(lambda g, out: g * (1 + out * out))
arcsin .defvjp(lambda g, x: g / sqrt(1 - x * x))
arccos .defvjp(lambda g, x: -g / sqrt(1 - x * x))
arctan .defvjp(lambda g, x: g / (1 + x * x))
arctan2.defvjp(lambda g, y, x: _over_square(g * x, y, x), lambda g, y, x: _over_square(-g * y, y, x))
sinh   .defvjp(lambda g, x: g * cosh(x))
cosh   .defvjp(lambda g, x: g * sinh(x))
tanh   .defvjp(lambda g, out: g * (1 - out * out))
arcsinh.defvjp(lambda g, x: g / sqrt(x * x + 1))
arccosh.defvjp(lambda g, x: g / sqrt(x * x - 1))
arctanh.defvjp(lambda g, x: g / (1 - x * x))
hypot  .defvjp(lambda g, x, out: over(g * x, out), lambda g, y, out: over(g * y, out))
# fmt: on

# ---- tests of elements: boolean results, no derivative --------------------------------------------------------------


@elementwise(samples=[sample(np.array([0.0, np.nan, np.inf]))])
def isnan(x: Array) -> Array:
    """Whether each element is NaN.

    >>> print(isnan(np.array([np.nan, 1.0])))
    [ True False]
    """
    return array_module(x).isnan(x)


@elementwise(samples=[sample(np.array([0.0, np.nan, np.inf]))])
def isinf(x: Array) -> Array:
    """Whether each element is +∞ or -∞.

    >>> print(isinf(np.array([np.inf, 1.0])))
    [ True False]
    """
    return array_module(x).isinf(x)


@elementwise(samples=[sample(np.array([0.0, np.nan, np.inf]))])
def isfinite(x: Array) -> Array:
    """Whether each element is neither NaN nor infinite.

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
    return array_module(condition, x, y).where(condition, x, y)


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


@primitive(kinks=(-1, 1), samples=[sample((3, 4), min=-1, max=1), sample((3, 4), min=None, max=1)])
def clip_to_numbers(x: Array, min: Any, max: Any) -> Array:
    """``clip`` between numbers: the whole gradient passes inside and at the bounds, 0 outside."""
    return array_module(x).clip(x, min, max)


def _inside(g: Array, x: Array, min: Any, max: Any) -> Array:
    low = x >= (-math.inf if min is None else min)
    return where(low & (x <= (math.inf if max is None else max)), g, 0)


clip_to_numbers.defvjp(_inside)


@composite(
    samples=[sample((3, 4), min=-1, max=1), sample((3, 4), min=0.5), sample((4,), (3, 4), (4,))], kinks=(-1, 0.5, 1)
)
def clip(x: Array, min: Any = None, max: Any = None) -> Array:
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
def masked_fill(x: Array, mask: Array, value: Any) -> Array:
    """``value`` where the mask is True, ``x`` elsewhere.

    >>> print(masked_fill(np.array([1.0, 2.0]), np.array([True, False]), 0.0))
    [0. 2.]
    """
    return where(mask, value, x)


@composite(samples=[sample((2, 3), (2, 3), 0.3), sample((2, 3), (3,), (2, 1))])
def lerp(start: Array, end: Array, weight: Any) -> Array:
    """``start + weight · (end - start)``.

    >>> print(float(lerp(1.0, 3.0, 0.5)))
    2.0
    """
    return add(start, multiply(weight, subtract(end, start)))


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


floor.defvjp(_flat)
ceil.defvjp(_flat)
trunc.defvjp(_flat)
round.defvjp(_flat)
fmod.defvjp(lambda g: g, lambda g, x, y: -g * trunc(x / y))
remainder.defvjp(lambda g: g, lambda g, x, y: -g * floor(x / y))

# ---- dtype and history ----------------------------------------------------------------------------------------------


@primitive(samples=[sample((2, 3), dtype=np.dtype(np.float64))])
def astype(x: Array, dtype: Any) -> Array:
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
    return x[...]


@primitive(samples=[sample((2, 3), device="cpu")])
def transfer(x: Array, device: str) -> Array:
    """``x`` on another device; the gradient comes back to the device of ``x``."""
    return to_device(x, device)


transfer.defvjp(lambda g, x_device: transfer(g, x_device))
