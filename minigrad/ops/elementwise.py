"""Smooth functions of each element, methods of Tensor, and their derivatives: the page of the calculus book.

A rule reads the incoming gradient ``g``, arguments by name, and the result as ``out``; broadcasting is undone for it.
NumPy's universal functions hand an array of CuPy to CuPy's function of the same name.
At kinks the rules follow ``docs/kinks.md``.
"""

from __future__ import annotations

import math

import numpy as np

from minigrad.backend import Array, ArrayLike, array_module, array_of, is_bfloat16, is_half
from minigrad.engine.core import Primitive, elementwise
from minigrad.engine.registry import composite, sample
from minigrad.machine.loops import exp as loop_exp
from minigrad.machine.loops import loop
from minigrad.ops._erf import erf as _erf
from minigrad.ops._erf import normal as _normal
from minigrad.ops._in_place import in_place
from minigrad.ops.piecewise import where, zeros_like

# fmt: off
__all__ = [
    "add", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "cos", "cosh", "divide", "erf",
    "exp", "exp2", "expm1", "hypot", "lerp", "log", "log1p", "log2", "log10", "logaddexp", "multiply", "negative",
    "power", "reciprocal", "sigmoid", "sin", "sinh", "softplus", "sqrt", "square", "subtract", "tan", "tanh",
]
# fmt: on

# ---- sums, products, quotients --------------------------------------------------------------------------------------


@elementwise()
def add(x: Array, y: Array) -> Array:
    """Sum ``x + y`` of each pair of elements.

    >>> print(add(np.array([1.0, 2.0]), 1))
    [2. 3.]
    """
    return np.add(x, y)


@elementwise()
def subtract(x: Array, y: Array) -> Array:
    """Difference ``x - y`` of each pair of elements.

    >>> print(subtract(np.array([1.0, 2.0]), 1))
    [0. 1.]
    """
    return np.subtract(x, y)


@elementwise()
def negative(x: Array) -> Array:
    """``-x`` of each element.

    >>> print(negative(np.array([1.0, -2.0])))
    [-1.  2.]
    """
    return np.negative(x)


@elementwise()
def multiply(x: Array, y: Array) -> Array:
    """Product ``x · y`` of each pair of elements.

    >>> print(multiply(np.array([1.0, 2.0]), 3))
    [3. 6.]
    """
    return np.multiply(x, y)


@elementwise(domain=(0.5, 2.0))
def divide(x: Array, y: Array) -> Array:
    """Quotient ``x / y`` of each pair of elements.

    >>> print(divide(np.array([1.0, 2.0]), 2))
    [0.5 1. ]
    """
    return np.divide(x, y)


@elementwise(domain=(0.5, 2.0))
def reciprocal(x: Array) -> Array:
    """``1 / x`` of each element.

    >>> print(reciprocal(np.array([2.0, 4.0])))
    [0.5  0.25]
    """
    return np.divide(1, x)


@composite(samples=[sample((2, 3), (2, 3), 0.3), sample((2, 3), (3,), (2, 1))])
def lerp(start: Array, end: Array, weight: ArrayLike) -> Array:
    """``start + weight · (end - start)``.

    >>> print(float(lerp(1.0, 3.0, 0.5)))
    2.0
    """
    return add(start, multiply(weight, subtract(end, start)))


# fmt: off
add       .defvjp(lambda g: g,                     lambda g: g)
subtract  .defvjp(lambda g: g,                     lambda g: -g)
negative  .defvjp(lambda g: -g)
multiply  .defvjp(lambda g, y: g * y,              lambda g, x: g * x)
divide    .defvjp(lambda g, y: g / y,              lambda g, y, out: -g * out / y)  # y² might overflow
reciprocal.defvjp(lambda g, out: -g * out * out)
# fmt: on

# ---- powers and roots -----------------------------------------------------------------------------------------------


@elementwise()
def square(x: Array) -> Array:
    """``x²`` of each element.

    >>> print(square(np.array([2.0, -3.0])))
    [4. 9.]
    """
    return np.multiply(x, x)


@elementwise(domain=(0.3, 2.0))
def sqrt(x: Array) -> Array:
    """Square root of each element; its derivative at 0 is +∞.

    >>> print(sqrt(np.array([4.0, 9.0])))
    [2. 3.]
    """
    return np.sqrt(x)


@elementwise(domain=(0.5, 2.0))
def power(x: Array, y: Array) -> Array:
    """``x`` to the power ``y``; its derivative ``y x^(y-1)`` is 0 for y = 0, also at x = 0.

    >>> print(power(np.array([2.0, 3.0]), 2))
    [4. 9.]
    """
    return x**y


def _power_base(g: Array, x: Array, y: Array, k: int = 0, whole: Array = None) -> Array:
    """g (y-k) x^(y-k-1), the derivative of x^(y-k), and 0 where y is k; ``whole`` is x^y.

    It isn't kept for this: the exponent is a plain number most often, for which it isn't needed.
    """
    if isinstance(y, int | float) and (y - k - 1) + (k + 1) == y:
        return zeros_like(g) if y == k else g * ((y - k) * (x if y - k == 2 else x ** (y - k - 1)))
    whole = array_of(x) ** array_of(y) if whole is None else whole
    flat = array_of(y) == k
    if not array_module(flat).any(flat):
        return times_power(g * (y - k), x, y, whole, k + 1)
    return where(flat, 0, times_power(g * (y - k), x, where(flat, k + 1, y), where(flat, 0, whole), k + 1))


def _power_exponent(g: Array, x: Array, out: Array) -> Array:
    """x^y ln x, and 0 where x is 0."""
    zero = x == 0
    return where(zero, 0, g * where(zero, 0, out) * log(where(zero, 1, x)))


def _times_power(top: Array, x: Array, y: Array, whole: Array, k: int) -> Array:
    """``top · x^(y-k)`` of each pair, for k of 1 or more, given ``whole = x^y``.

    Usually it is top · x^y / x^k. Where x^y is 0, subnormal or infinite it is a power again, and what rounding cuts off
    y - k (a large ln x would magnify it) comes back as a factor.
    """
    xp = array_module(x, y)
    size, limits = xp.abs(whole), np.finfo(np.float32 if is_bfloat16(whole.dtype) else whole.dtype)  # of one range
    with np.errstate(all="ignore"):
        out = whole / x * top  # in this order, so that a small top meets a small x early
        for _ in range(k - 1):
            out = out / x
        good = (size >= limits.smallest_normal) & (size <= limits.max)
        if good.all():
            return out
        y = xp.asarray(y, whole.dtype)
        less = y - k
        moved = less - y
        lost = (y - (less - moved)) - (k + moved)
        again = top * x**less * (1 + lost * xp.clip(xp.log(xp.abs(x)), -1000, 1000))
        return xp.where(good, out, again)


times_power = Primitive(_times_power, elementwise=True)  # not registered: no test can vary x^y by itself


# fmt: off
square.defvjp(lambda g, x: g * (2 * x))
sqrt  .defvjp(lambda g, out: g / (2 * out))
power .defvjp(lambda g, x, y: _power_base(g, x, y), _power_exponent)
times_power.defvjp(
    lambda g, x, y, whole, k: times_power(g, x, y, whole, k),
    lambda g, top, x, y, whole, k: _power_base(g * top, x, y, k, whole),
    lambda g, x, out: _power_exponent(g, x, out),
)
# fmt: on

# ---- exponentials ---------------------------------------------------------------------------------------------------


@elementwise()
def exp(x: Array) -> Array:
    """``e^x`` of each element.

    >>> print(exp(np.array([0.0, 1.0])).round(4))
    [1.     2.7183]
    """
    return np.exp(x)


@elementwise()
def exp2(x: Array) -> Array:
    """``2^x`` of each element.

    >>> print(exp2(np.array([0.0, 3.0])))
    [1. 8.]
    """
    return np.exp2(x)


@elementwise()
def expm1(x: Array) -> Array:
    """``e^x - 1`` of each element, exact near 0.

    >>> print(float(expm1(1e-20)))
    1e-20
    """
    return np.expm1(x)


LOOK = 8192  # numbers below which it takes less time to be exact everywhere than to look where that is needed


def _result_plus_one(g: Array, x: Array, result: Array, out: Array) -> None:
    """g · (result + 1), and g · e^x where that is small and would be noise: an exponential costs three additions."""
    low = 0.125 if out.dtype == np.float32 else 0.0625
    if out.size <= LOOK or 4096 * np.count_nonzero(result[::256] < low - 1) > out.size:  # a sample says: many
        np.exp(x, out=out)
    else:
        np.add(result, 1, out=out)
        few = (out < low).nonzero()
        out[few] = np.exp(x[few])
    out *= g


@loop(_result_plus_one)
def _expm1_slopes(g: Array, x: Array, result: Array, out: Array) -> None:
    """The same, everywhere by an exponential, which costs a loop no pass."""
    for i in range(out.size):
        out[i] = g[i] * loop_exp(x[i])


@in_place(_expm1_slopes)
def _expm1_rule(g: Array, x: Array, out: Array) -> Array:
    return g * exp(x)


# fmt: off
exp  .defvjp(lambda g, out: g * out)
exp2 .defvjp(lambda g, out: g * (out * math.log(2)))
expm1.defvjp(_expm1_rule)
# fmt: on

# ---- logarithms -----------------------------------------------------------------------------------------------------


@elementwise(domain=(0.3, 3.0))
def log(x: Array) -> Array:
    """Natural logarithm of each element.

    >>> print(float(log(1.0)))
    0.0
    """
    return np.log(x)


@elementwise(domain=(-0.7, 2.0))
def log1p(x: Array) -> Array:
    """``ln(1 + x)`` of each element, exact near 0.

    >>> print(float(log1p(1e-20)))
    1e-20
    """
    return np.log1p(x)


@elementwise(domain=(0.3, 3.0))
def log2(x: Array) -> Array:
    """Logarithm to base 2 of each element.

    >>> print(log2(np.array([1.0, 8.0])))
    [0. 3.]
    """
    return np.log2(x)


@elementwise(domain=(0.3, 3.0))
def log10(x: Array) -> Array:
    """Logarithm to base 10 of each element.

    >>> print(log10(np.array([1.0, 100.0])))
    [0. 2.]
    """
    return np.log10(x)


# fmt: off
log  .defvjp(lambda g, x: g / x)
log1p.defvjp(lambda g, x: g / (1 + x))
log2 .defvjp(lambda g, x: g / x / math.log(2))
log10.defvjp(lambda g, x: g / x / math.log(10))
# fmt: on

# ---- circle: sine, cosine, tangent ----------------------------------------------------------------------------------


@elementwise()
def sin(x: Array) -> Array:
    """Sine of each element, in radians.

    >>> print(float(sin(0.0)))
    0.0
    """
    return np.sin(x)


@elementwise()
def cos(x: Array) -> Array:
    """Cosine of each element, in radians.

    >>> print(float(cos(0.0)))
    1.0
    """
    return np.cos(x)


@elementwise(domain=(-1.2, 1.2))
def tan(x: Array) -> Array:
    """Tangent of each element, in radians.

    >>> print(float(tan(0.0)))
    0.0
    """
    return np.tan(x)


# fmt: off
sin.defvjp(lambda g, x: g * cos(x))
cos.defvjp(lambda g, x: -g * sin(x))
tan.defvjp(lambda g, out: g * (1 + out * out))
# fmt: on

# ---- angles: the inverse of those -----------------------------------------------------------------------------------


@elementwise(domain=(-0.8, 0.8))
def arcsin(x: Array) -> Array:
    """Inverse sine of each element, in radians.

    >>> print(float(arcsin(1.0)).__round__(4))
    1.5708
    """
    return np.arcsin(x)


@elementwise(domain=(-0.8, 0.8))
def arccos(x: Array) -> Array:
    """Inverse cosine of each element, in radians.

    >>> print(float(arccos(1.0)))
    0.0
    """
    return np.arccos(x)


@elementwise(domain=(-0.8, 0.8), numpy=lambda n, x: n.sqrt(1 - x * x), torch=lambda t, x: t.sqrt(1 - x * x))
def root_one_minus_square(x: Array) -> Array:
    """``√(1 - x²)`` of each element, near 1 to the last digit: 1 - |x| is exact there."""
    xp = array_module(x)
    size = xp.asarray(xp.abs(x))
    rest = 1 - size
    size *= rest
    size += rest
    return xp.sqrt(size, out=size)


@elementwise()
def arctan(x: Array) -> Array:
    """Inverse tangent of each element, in radians.

    >>> print(float(arctan(1.0)).__round__(4))
    0.7854
    """
    return np.arctan(x)


@elementwise(numpy=lambda n, top, x: top / (1 + x * x), torch=lambda t, top, x: top / (1 + x * x))
def over_one_plus_square(top: Array, x: Array) -> Array:
    """``top / (1 + x²)`` of each pair, where x² may overflow: the slope of ``arctan``."""
    xp = array_module(top, x)
    if xp is np:
        try:  # NumPy looks for an overflow in any case
            with np.errstate(over="raise", under="ignore"):
                return top / (1 + x * x)
        except FloatingPointError:
            pass
    with np.errstate(under="ignore"):
        size = xp.asarray(xp.abs(x))
        inverse, ratio = xp.asarray(1 / xp.maximum(size, 1)), xp.minimum(size, 1, out=size)
        ratio *= ratio
        out = top * inverse
        out *= inverse
        inverse *= inverse
        inverse += ratio
        out /= inverse
        return out


def _over_root(g: Array, x: Array, out: Array) -> None:
    np.subtract(1, x, out=out)
    out *= 1 + x
    np.divide(g, np.sqrt(out, out=out), out=out)


def _over_minus_root(g: Array, x: Array, out: Array) -> None:
    _over_root(g, x, out)
    np.negative(out, out=out)


@in_place(_over_root)
def _arcsin_rule(g: Array, x: Array) -> Array:
    return g / root_one_minus_square(x)


@in_place(_over_minus_root)
def _arccos_rule(g: Array, x: Array) -> Array:
    return -g / root_one_minus_square(x)


# fmt: off
arcsin               .defvjp(_arcsin_rule)
arccos               .defvjp(_arccos_rule)
root_one_minus_square.defvjp(lambda g, x, out: -g * x / out)
arctan               .defvjp(lambda g, x: over_one_plus_square(g, x))
over_one_plus_square.defvjp(
    lambda g, x: over_one_plus_square(g, x), lambda g, x, out: over_one_plus_square(-2 * g * x * out, x)
)
# fmt: on

# ---- points of the plane --------------------------------------------------------------------------------------------


@elementwise(domain=(0.3, 2.0))
def hypot(x: Array, y: Array) -> Array:
    """``√(x² + y²)`` of each pair, without overflow; its gradient at the origin is 0.

    >>> print(float(hypot(3.0, 4.0)))
    5.0
    """
    return np.hypot(x, y)


@elementwise(domain=(0.3, 2.0))
def arctan2(y: Array, x: Array) -> Array:
    """Angle of the point (x, y) in radians; its gradient at the origin is 0.

    >>> print(float(arctan2(1.0, 1.0)).__round__(4))
    0.7854
    """
    return array_module(y, x).arctan2(y, x)


def safe_divide(numerator: Array, denominator: Array) -> Array:
    """``numerator / denominator``, and 0 where the denominator is 0, for derivatives of norms."""
    zero = denominator == 0
    return where(zero, 0, numerator / where(zero, 1, denominator))


def _turn(top: Array, x: Array, y: Array, r: Array) -> Array:
    """``top x / r²`` of each point (x, y) and its radius r, and 0 at the origin: the slope of ``arctan2``.

    The square of r might overflow, and so might top x.
    """
    return safe_divide(top, r) * safe_divide(x, r)


def _turn_along(g: Array, top: Array, x: Array, y: Array, r: Array) -> Array:
    """g top (y² - x²)/r⁴, the derivative of x/r² in x."""
    across, along = cosine(y, x, r), cosine(x, y, r)
    return safe_divide(g * top * (across - along), r) * safe_divide(across + along, r)


def _turn_across(g: Array, top: Array, x: Array, y: Array, r: Array) -> Array:
    """-2 g top x y/r⁴, the derivative of x/r² in y."""
    return safe_divide(-2 * g * top * cosine(x, y, r), r) * safe_divide(cosine(y, x, r), r)


turn = Primitive(_turn, elementwise=True)  # like cosine below, not registered: its r isn't free, no test can vary it


def _cosine(x: Array, y: Array, r: Array) -> Array:
    """``x / r`` of each point (x, y) and its radius r, and 0 at the origin: the slope of ``hypot``."""
    return safe_divide(x, r)


cosine = Primitive(_cosine, elementwise=True)


def _cosine_along(g: Array, x: Array, y: Array, r: Array) -> Array:
    """g y²/r³, the derivative of x/r in x; as 1/r - x²/r³ it would lose every digit where x is the larger."""
    sine = cosine(y, x, r)
    return safe_divide(g * sine, r) * sine


def _cosine_across(g: Array, x: Array, y: Array, r: Array) -> Array:
    """-g x y/r³, the derivative of x/r in y."""
    return safe_divide(-g * cosine(x, y, r) * cosine(y, x, r), r)


# fmt: off
hypot  .defvjp(lambda g, x, y, out: g * cosine(x, y, out), lambda g, x, y, out: g * cosine(y, x, out))
arctan2.defvjp(lambda g, y, x: turn(g, x, y, hypot(x, y)), lambda g, y, x: turn(-g, y, x, hypot(x, y)))
turn   .defvjp(lambda g, x, y, r: turn(g, x, y, r), _turn_along, _turn_across, None)
cosine .defvjp(_cosine_along, _cosine_across, None)
# fmt: on

# ---- hyperbola ------------------------------------------------------------------------------------------------------


@elementwise()
def sinh(x: Array) -> Array:
    """Hyperbolic sine of each element.

    >>> print(float(sinh(0.0)))
    0.0
    """
    return np.sinh(x)


@elementwise()
def cosh(x: Array) -> Array:
    """Hyperbolic cosine of each element.

    >>> print(float(cosh(0.0)))
    1.0
    """
    return np.cosh(x)


@elementwise()
def tanh(x: Array) -> Array:
    """Hyperbolic tangent of each element.

    >>> print(float(tanh(0.0)))
    0.0
    """
    return np.tanh(x)


@elementwise(numpy=lambda n, top, x: top / n.cosh(x) ** 2, torch=lambda t, top, x: top / t.cosh(x) ** 2)
def over_cosh_square(top: Array, x: Array) -> Array:
    """``top / cosh² x`` of each pair, the slope of ``tanh``; in the tails 1 - tanh² would be noise."""
    xp = array_module(x)
    x = xp.asarray(x)
    if is_half(x.dtype):
        return over_cosh_square(top, x.astype(np.float32)).astype(x.dtype)
    with np.errstate(over="ignore", under="ignore"):
        square = xp.sinh(x)
        square *= square
        square += 1
        return top / square


def _over_cosh_square(g: Array, x: Array, out: Array, twice: int = 1) -> None:
    """g / (twice · cosh x)², in float32 by sinh² + 1: NumPy's cosh would be 7 units off, squared."""
    single = x.dtype == np.float32
    with np.errstate(over="ignore", under="ignore"):
        (np.sinh if single else np.cosh)(x, out=out)
        if twice == 2:
            out += out
        out *= out
        if single:
            out += twice * twice
        np.divide(g, out, out=out)


@loop(_over_cosh_square)
def _tanh_slopes(g: Array, x: Array, out: Array) -> None:
    """The same by e = e^(-2|x|), which never overflows: cosh⁻² is 4 e / (1 + e)²."""
    for i in range(out.size):
        e = loop_exp(-2.0 * abs(x[i]))
        half = 1.0 / (1.0 + e)
        out[i] = g[i] * (4.0 * e * half * half)


@in_place(_tanh_slopes)
def _tanh_rule(g: Array, x: Array) -> Array:
    return over_cosh_square(g, x)


# fmt: off
sinh            .defvjp(lambda g, x: g * cosh(x))
cosh            .defvjp(lambda g, x: g * sinh(x))
tanh            .defvjp(_tanh_rule)
over_cosh_square.defvjp(lambda g, x: over_cosh_square(g, x), lambda g, x, out: g * out * tanh(x) * -2)
# fmt: on

# ---- the inverse of those -------------------------------------------------------------------------------------------


@elementwise()
def arcsinh(x: Array) -> Array:
    """Inverse hyperbolic sine of each element.

    >>> print(float(arcsinh(0.0)))
    0.0
    """
    return np.arcsinh(x)


@elementwise(domain=(1.3, 3.0))
def arccosh(x: Array) -> Array:
    """Inverse hyperbolic cosine of each element.

    >>> print(float(arccosh(1.0)))
    0.0
    """
    return np.arccosh(x)


@elementwise(domain=(-0.8, 0.8))
def arctanh(x: Array) -> Array:
    """Inverse hyperbolic tangent of each element.

    >>> print(float(arctanh(0.0)))
    0.0
    """
    return np.arctanh(x)


@elementwise(numpy=lambda n, x: 1 - x * x, torch=lambda t, x: 1 - x * x)
def one_minus_square(x: Array) -> Array:
    """``1 - x²`` of each element by its factors, near 1 to the last digit; its derivative is so near 0."""
    return (1 - x) * (1 + x)


def _over_one_minus_square(g: Array, x: Array, out: Array) -> None:
    """g / ((1 - x)(1 + x)), or g / (1 - x²) where no x² is above ¾: that is as exact, and a pass less."""
    plain = False
    if out.size > LOOK:
        with np.errstate(over="ignore", under="ignore"):
            np.multiply(x, x, out=out)
        if plain := out.max() < 0.75:
            np.subtract(1, out, out=out)
    if not plain:
        np.subtract(1, x, out=out)
        out *= 1 + x
    np.divide(g, out, out=out)


@loop(_over_one_minus_square)
def _arctanh_slopes(g: Array, x: Array, out: Array) -> None:
    """The same in one pass."""
    for i in range(out.size):
        out[i] = g[i] / ((1.0 - x[i]) * (1.0 + x[i]))


@in_place(_arctanh_slopes)
def _arctanh_rule(g: Array, x: Array) -> Array:
    return g / one_minus_square(x)


# fmt: off
arcsinh         .defvjp(lambda g, x: g / hypot(x, 1))
arccosh         .defvjp(lambda g, x: g / sqrt(x - 1) / sqrt(x + 1))
arctanh         .defvjp(_arctanh_rule)
one_minus_square.defvjp(lambda g, x: g * x * -2)
# fmt: on

# ---- the logistic function and its integral -------------------------------------------------------------------------


@elementwise()
def sigmoid(x: Array) -> Array:
    """``1 / (1 + e^-x)`` of each element, without overflow at any x.

    >>> print(sigmoid(np.array([-1e4, 0.0, 1e4])))
    [0.  0.5 1. ]
    """
    xp = array_module(x)
    if xp is np:
        try:  # NumPy looks for an overflow in any case
            with np.errstate(over="raise", under="ignore"):
                return 1 / (1 + np.exp(-x))
        except FloatingPointError:
            pass
    with np.errstate(over="ignore", under="ignore"):
        e = xp.exp(-x)
        return xp.where(xp.isinf(e), xp.exp(xp.minimum(x, 0)), 1 / (1 + e))


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
    return np.logaddexp(x, y)


@elementwise(numpy=lambda n, x, y: 1 / (1 + n.exp(y - x)), torch=lambda t, x, y: t.sigmoid(x - y))
def share(x: Array, y: Array) -> Array:
    """``e^x / (e^x + e^y)`` of each pair, the slope of ``logaddexp``; 0 where both are the same infinity."""
    xp = array_module(x, y)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = xp.asarray(x - y)
    out = xp.asarray(sigmoid(apart))
    exact = any(isinstance(v, int | float) and v == 0 for v in (x, y))  # no digit of x - y is lost
    # Far below 0, e^(x - y) magnifies what rounding cut off x - y.
    if not exact and (far := apart < -4).any():
        x, y = (v if v.shape == far.shape else xp.broadcast_to(v, far.shape) for v in map(xp.asarray, (x, y)))
        out[far] *= 1 + lost_in_difference(x[far], y[far], apart[far])
    if (nan := apart != apart).any():
        out[nan & (x == y)] = 0
    return out


def lost_in_difference(x: Array, y: Array, apart: Array) -> Array:
    """What rounding cut off ``apart = x - y``, by Knuth's sum; 0 where that isn't below 1.

    >>> print(lost_in_difference(np.array([1.0]), np.array([1e-17]), np.array([1.0])))
    [-1.e-17]
    """
    with np.errstate(invalid="ignore"):
        moved = apart - x
        lost = (x - (apart - moved)) - (y + moved)
    return array_module(lost).where(abs(lost) < 1, lost, 0)


def _sigmoid_slope(g: Array, x: Array, out: Array) -> None:
    _over_cosh_square(g, 0.5 * x, out, twice=2)


@in_place(_sigmoid_slope)
def _sigmoid_rule(g: Array, x: Array) -> Array:
    return over_cosh_square(0.25 * g, 0.5 * x)


# fmt: off
sigmoid  .defvjp(_sigmoid_rule)
softplus .defvjp(lambda g, x: g * sigmoid(x))
logaddexp.defvjp(lambda g, x, y: g * share(x, y), lambda g, x, y: g * share(y, x))
share    .defvjp(lambda g, x, y, out: g * out * share(y, x), lambda g, x, y, out: -g * out * share(y, x))
# fmt: on

# ---- the normal distribution ----------------------------------------------------------------------------------------


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


@elementwise(
    numpy=lambda n, x: n.vectorize(lambda v: math.erfc(-v / 2**0.5) / 2)(x), torch=lambda t, x: t.special.ndtr(x)
)
def normal_distribution(x: Array) -> Array:
    """``Φ(x)``, the distribution function of the standard normal, of each element: the weight of ``gelu``."""
    return _normal(x)


@elementwise(
    numpy=lambda n, x: n.exp(-0.5 * x * x) / math.sqrt(2 * math.pi),
    torch=lambda t, x: t.exp(-0.5 * x * x) / math.sqrt(2 * math.pi),
)
def normal_density(x: Array) -> Array:
    """``e^(-x²/2) / √(2π)`` of each element, the slope of Φ."""
    with np.errstate(over="ignore", under="ignore"):
        return array_module(x).exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


# fmt: off
erf                .defvjp(lambda g, x: g * (2 / math.sqrt(math.pi)) * gaussian(x))
gaussian           .defvjp(lambda g, x, out: g * out * x * -2)
normal_distribution.defvjp(lambda g, x: g * normal_density(x))
normal_density     .defvjp(lambda g, x, out: -g * out * x)
# fmt: on
