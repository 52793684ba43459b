"""Smooth functions of each element and their derivatives: the page of the calculus book.

A rule reads the incoming gradient ``g``, arguments by name, and the result as ``out``; broadcasting is undone for it.
At kinks the rules follow ``docs/kinks.md``.
"""

from __future__ import annotations

import math

import numpy as np

from minigrad.backend import Array, ArrayLike, array_module
from minigrad.engine.core import elementwise
from minigrad.engine.registry import composite, sample
from minigrad.ops._erf import erf as _erf
from minigrad.ops.piecewise import isinf, where, zeros_like

# fmt: off
__all__ = [
    "add", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "cos", "cosh", "divide", "erf",
    "exp", "exp2", "expm1", "hypot", "lerp", "log", "log1p", "log2", "log10", "logaddexp", "multiply", "negative",
    "power", "reciprocal", "sigmoid", "sin", "sinh", "softplus", "sqrt", "square", "subtract", "tan", "tanh",
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


def _power_base(g: Array, x: Array, y: Array) -> Array:
    """y x^(y-1), and 0 where y is 0."""
    if isinstance(y, int | float):
        return zeros_like(g) if y == 0 else g * (y * x ** (y - 1))
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
divide    .defvjp(lambda g, y: g / y,              lambda g, y, x: -g * (x / y) / y)  # y² might overflow
power     .defvjp(_power_base,                     _power_exponent)
negative  .defvjp(lambda g: -g)
reciprocal.defvjp(lambda g, out: -g * out * out)
square    .defvjp(lambda g, x: g * (2 * x))
sqrt      .defvjp(lambda g, out: g / (2 * out))
# fmt: on


@composite(samples=[sample((2, 3), (2, 3), 0.3), sample((2, 3), (3,), (2, 1))])
def lerp(start: Array, end: Array, weight: ArrayLike) -> Array:
    """``start + weight · (end - start)``.

    >>> print(float(lerp(1.0, 3.0, 0.5)))
    2.0
    """
    return add(start, multiply(weight, subtract(end, start)))


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
log2    .defvjp(lambda g, x: g / x / math.log(2))
log10   .defvjp(lambda g, x: g / x / math.log(10))
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


def safe_divide(numerator: Array, denominator: Array) -> Array:
    """``numerator / denominator``, and 0 where the denominator is 0, for derivatives of norms."""
    zero = denominator == 0
    return where(zero, 0, numerator / where(zero, 1, denominator))


def _over_square(numerator: Array, x: Array, y: Array) -> Array:
    """``numerator / (x² + y²)``, in two divisions so that no square overflows, and 0 at the origin."""
    radius = hypot(x, y)
    return safe_divide(safe_divide(numerator, radius), radius)


# fmt: off
sin    .defvjp(lambda g, x: g * cos(x))
cos    .defvjp(lambda g, x: -g * sin(x))
tan    .defvjp(lambda g, out: g * (1 + out * out))
arcsin .defvjp(lambda g, x: g / sqrt(1 - x * x))
arccos .defvjp(lambda g, x: -g / sqrt(1 - x * x))
arctan .defvjp(lambda g, x: g / hypot(x, 1) / hypot(x, 1))  # hypot: x² might overflow
arctan2.defvjp(lambda g, y, x: _over_square(g * x, y, x), lambda g, y, x: _over_square(-g * y, y, x))
sinh   .defvjp(lambda g, x: g * cosh(x))
cosh   .defvjp(lambda g, x: g * sinh(x))
tanh   .defvjp(lambda g, out: g * (1 - out * out))
arcsinh.defvjp(lambda g, x: g / hypot(x, 1))
arccosh.defvjp(lambda g, x: g / sqrt(x - 1) / sqrt(x + 1))
arctanh.defvjp(lambda g, x: g / (1 - x * x))
hypot  .defvjp(lambda g, x, out: safe_divide(g * x, out), lambda g, y, out: safe_divide(g * y, out))
# fmt: on
