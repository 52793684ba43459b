"""Special functions on plain arrays: values of SciPy and CuPy, and five families that neither has.

The families are the derivatives of what SciPy has, in forms that lose no digits by subtraction. They are computed in
float64, whatever comes.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, array_module, cast_to, is_floating, is_half
from minigrad.ops._erf import gaussian_of
from minigrad.ops._scipy import cupy_lacks, scipy_module

# ---- values of SciPy and CuPy ----------------------------------------------------------------------------------------


def evaluate(name: str, *args: Any) -> Any:
    """The function of that name on the device of its arguments; half precision is computed in float32.

    >>> print(evaluate("gamma", np.float32([5.0])))
    [24.]
    """
    xp = array_module(*args)
    function = getattr(scipy_module(on_gpu=xp is not np), name, None)
    if function is None:
        raise cupy_lacks(name)
    dtype = floating(args)
    if dtype is None:
        return function(*args)
    wide = np.dtype(np.float32) if is_half(dtype) else dtype
    return cast_to(function(*[a.astype(wide, copy=False) if hasattr(a, "dtype") else a for a in args]), dtype)


def floating(args: Any) -> Any:
    """The dtype of the floating-point arrays among ``args``, None where there is none: whole numbers don't widen it."""
    found = [a.dtype for a in args if hasattr(a, "dtype") and is_floating(a.dtype)]
    return np.result_type(*found) if found else None


def polygamma(n: Any, x: Any) -> Any:
    """The n-th derivative of digamma: ``(-1)^(n+1) n! ζ(n+1, x)``, and digamma for n = 0."""
    xp = array_module(n, x)
    if isinstance(n, int) and n == 0:
        return evaluate("digamma", x)
    dtype = floating([x]) or np.dtype(np.float64)
    wide = np.dtype(np.float32) if is_half(dtype) else dtype
    n, x = xp.asarray(n).astype(wide), xp.asarray(x).astype(wide)
    with np.errstate(all="ignore"):
        higher = (-1.0) ** (n + 1) * evaluate("gamma", n + 1) * evaluate("zeta", n + 1, x)
        return cast_to(xp.where(n == 0, evaluate("digamma", x), higher), dtype)


def in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute in float64, in silence, and give the result in the dtype of the floating-point arguments; orders stay."""
    orders = [p.annotation == "int" for p in inspect.signature(function).parameters.values()][1:]

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        xp, dtype = array_module(*args), floating(args) or np.dtype(np.float64)
        wide = [a if order else xp.asarray(a, dtype=np.float64) for a, order in zip(args, orders, strict=True)]
        with np.errstate(all="ignore"):
            return cast_to(function(xp, *wide), dtype)

    return wrapped


# ---- the families ----------------------------------------------------------------------------------------------------


@in_double
def ndtr(xp: Any, x: Array) -> Array:
    """Φ(x); below -1 ``e^(-x²/2) erfcx(-x/√2) / 2``, as x/√2, rounded, would cost erfc x² units in its tail."""
    low = xp.clip(x, -40, -1)
    return xp.where(x < -1, gaussian_of(low) * evaluate("erfcx", low * -math.sqrt(0.5)) / 2, evaluate("ndtr", x))


@in_double
def log_ndtr(xp: Any, x: Array) -> Array:
    """ln Φ(x); for positive x from what Φ(x) lacks to 1."""
    return xp.where(x > 0, xp.log1p(-ndtr(-abs(x))), evaluate("log_ndtr", x))


_STEPS = np.arange(-2.9, 3.9, 0.1)
_NODES = np.exp(_STEPS - np.exp(-_STEPS))  # the double exponential rule on (0, ∞): u ↦ e^(u - e^-u), in steps of 0.1
_WEIGHTS = 0.1 * _NODES * (1 + np.exp(-_STEPS))


@in_double
def scaled_tail(xp: Any, x: Array, n: int) -> Array:
    """``e^(x²) iⁿerfc(x) = 2/(√π n!) ∫₀^∞ tⁿ e^(-t²-2xt) dt``, erfcx for n = 0; the slope is -2(n+1) times the next.

    Below ½ by ``2n iⁿerfc = iⁿ⁻²erfc - 2x iⁿ⁻¹erfc``, which cancels for larger x; there by quadrature (Abramowitz and
    Stegun, 7.2).
    """
    before, value = 2 / math.sqrt(math.pi), evaluate("erfcx", x)
    for k in range(1, n + 1):
        before, value = value, (before - 2 * x * value) / (2 * k)
    if n == 0:
        return value
    near = x < 0.5
    x = xp.where(near, 0.5, x)
    scale, slope, total = 1 / xp.maximum(2 * x, 1), xp.minimum(2 * x, 1), 0.0
    for t, weight in zip(_NODES.tolist(), _WEIGHTS.tolist(), strict=True):
        total = total + weight * t**n * xp.exp(-t * (t * scale * scale + slope))
    return xp.where(near, value, 2 / (math.sqrt(math.pi) * math.factorial(n)) * total * scale ** (n + 1))


_ANGLES = 1 - np.cos(np.pi * np.arange(33) / 32)


@in_double
def decaying(xp: Any, x: Array, n: int) -> Array:
    """``1/π ∫₀^π (1 - cos θ)ⁿ e^(-|x|(1 - cos θ)) dθ``, i0e for n = 0; by |x| the slope is minus the next.

    By the trapezoidal rule, which is exact to the last digits on a circle, and by the series in 1/x beyond 40.
    """
    x = abs(x)
    near, far, total, term = xp.minimum(x, 40), xp.maximum(x, 40), 0.0, 1.0
    for k, z in enumerate(_ANGLES.tolist()):
        total = total + (0.5 if k in (0, 32) else 1) * z**n / 32 * xp.exp(-near * z)
    series = 0.0
    for k in range(22):
        series = series + term
        term = term * ((k + 0.5) * (n + k + 0.5) / (k + 1)) / (2 * far)
    return xp.where(x < 40, total, series * (math.gamma(n + 0.5) / math.pi / math.sqrt(2)) / xp.sqrt(far) / far**n)


@in_double
def ive(xp: Any, v: Array, z: Array) -> Array:
    """``e^-|z| I_v(z)`` by its factors up to z = 300: SciPy's own product is off by a hundred units near z = 10."""
    far, near = evaluate("ive", v, z), xp.clip(z, -300, 300)
    return xp.where(near == z, xp.exp(-abs(near)) * evaluate("iv", v, near), far)


@in_double
def ive_slope(xp: Any, v: Array, z: Array, n: int) -> Array:
    """The n-th derivative of ``ive(v, z)`` by |z|, times the sign that I_v has at z.

    It is ``2⁻ⁿ`` times the difference of order 2n in v; for large z, where that cancels, by Hankel's series.
    """
    size = abs(z)
    far = size > 30 + v * v
    near, big = xp.where(far, 1, size), xp.where(far, size, 100 + v * v)
    steps = [(-1) ** j * math.comb(2 * n, j) * ive(v - n + j, near) for j in range(2 * n + 1)]
    term, series = xp.ones_like(big), 0.0
    for k in range(24):
        series = series + term * (math.gamma(k + 0.5 + n) / math.gamma(k + 0.5))
        term = term * ((2 * k + 1) ** 2 - 4 * v * v) / (8 * (k + 1) * big)
    series = (-1) ** n * series / xp.sqrt(2 * math.pi * big) / big**n
    parity = xp.where(v % 2 == 0, 1.0, xp.where(v % 2 == 1, -1.0, math.nan))
    return xp.where(far, series, sum(steps) / 2**n) * xp.where(z < 0, parity, 1.0)


@in_double
def bessel(xp: Any, x: Array, n: int, sign: int) -> Array:
    """Bessel's J_n (sign -1) or I_n (sign 1) for n = 2, 3, …: by recurrence from n = 0 and 1, near 0 by the series."""
    f, g = (evaluate(name, x) for name in (("j0", "j1") if sign < 0 else ("i0", "i1")))
    near = abs(x) < n + 1
    far, half = xp.where(near, 1, x), xp.where(near, x, 0) / 2
    for k in range(1, n):
        f, g = g, sign * f - sign * (2 * k / far) * g
    term = half**n / math.factorial(n)
    total = term
    for k in range(1, 18):
        term = term * (sign * half * half / (k * (n + k)))
        total = total + term
    return xp.where(near, total, xp.where(xp.isinf(f), f, g))


@in_double
def gamma_density(xp: Any, a: Array, x: Array) -> Array:
    """``x^(a-1) e^-x / Γ(a)``, the slope of gammainc."""
    return xp.exp(evaluate("xlogy", a - 1, x) - x - evaluate("gammaln", a))


@in_double
def beta_density(xp: Any, a: Array, b: Array, x: Array) -> Array:
    """``x^(a-1) (1-x)^(b-1) / B(a, b)``, the slope of betainc."""
    powers = evaluate("xlogy", a - 1, x) + evaluate("xlog1py", b - 1, -x)
    return xp.exp(powers - evaluate("betaln", a, b))


@in_double
def student_density(xp: Any, df: Array, t: Array) -> Array:
    """``(1 + t²/df)^(-(df+1)/2) / (√df B(df/2, ½))``, the slope of stdtr."""
    power = (df + 1) / 2 * xp.log1p(t * t / df)
    return xp.exp(-power - evaluate("betaln", df / 2, 0.5)) / xp.sqrt(df)


_BERNOULLI = [1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510]


@in_double
def polygamma_step(xp: Any, a: Array, b: Array, n: int) -> Array:
    """``ψₙ(a + b) - ψₙ(a)``, also where b is small beside a: no term is a difference, if a and a + b are positive.

    Twelve steps of the recurrence, then the asymptotic series (Abramowitz and Stegun, 6.4).
    """

    def drop(p: Array, power: int) -> Array:
        """``p^-m - (p + b)^-m``, m being the power."""
        return -xp.expm1(-power * xp.log1p(b / p)) / p**power

    inside = (a > 0) & (a + b > 0)
    plain = polygamma(n, a + b) - polygamma(n, a)
    a, b = xp.where(inside, a, 1), xp.where(inside, b, 1)
    p, factorial = a + 12, math.factorial(n)
    total = xp.log1p(b / p) if n == 0 else math.factorial(n - 1) * drop(p, n)
    total = total + factorial / 2 * drop(p, n + 1)
    for k, number in enumerate(_BERNOULLI):
        m = 2 * k + 2
        total = total + number * (math.factorial(m + n - 1) / math.factorial(m)) * drop(p, m + n)
    for k in range(12):
        total = total + factorial * drop(a + k, n + 1)
    return xp.where(inside, (-1) ** n * total, plain)


def _stirling_rest(x: Array) -> Array:
    """``ln Γ(x) - (x - ½) ln x + x - ln √(2π)`` of x ≥ 12 (Abramowitz and Stegun, 6.1.41)."""
    total, power = 0 * x, x
    for k, number in enumerate(_BERNOULLI):
        total = total + number / ((2 * k + 1) * (2 * k + 2)) / power
        power = power * x * x
    return total


@in_double
def betaln(xp: Any, a: Array, b: Array) -> Array:
    """``ln B(a, b)`` from sums whose terms don't cancel where both are positive.

    Where the smaller is below 12, ``ln Γ(a) - (ln Γ(a + b) - ln Γ(b))`` with the difference by Stirling's formula at
    b + 12, back in twelve steps; else that formula for all three (DiDonato and Morris, ACM TOMS 18, 1992).
    """
    plain = evaluate("betaln", a, b)
    inside = (a > 0) & (b > 0) & xp.isfinite(a) & xp.isfinite(b)
    a, b = xp.where(inside, xp.minimum(a, b), 1), xp.where(inside, xp.maximum(a, b), 1)
    p, q = xp.maximum(a, 12), xp.maximum(b, 12)
    rest = _stirling_rest(p) + _stirling_rest(q) - _stirling_rest(p + q)
    both = (0.5 - p) * xp.log1p(q / p) - q * xp.log1p(p / q) - 0.5 * xp.log(q) + 0.5 * math.log(2 * math.pi) + rest
    near = b < 12
    far = xp.where(near, b + 12, b)
    step = (far - 0.5) * xp.log1p(a / far) + a * (xp.log(far + a) - 1)
    step = step + (_stirling_rest(far + a) - _stirling_rest(far))
    for k in range(12):
        step = step - xp.where(near, xp.log1p(a / (b + k)), 0)
    return xp.where(inside, xp.where(a < 12, evaluate("gammaln", a) - step, both), plain)


@in_double
def beta(xp: Any, a: Array, b: Array) -> Array:
    """``B(a, b)``, by :func:`betaln` where both are positive."""
    return xp.where((a > 0) & (b > 0), xp.exp(betaln(a, b)), evaluate("beta", a, b))


@in_double
def beta_slope(xp: Any, a: Array, b: Array) -> Array:
    """``∂B/∂a = -B (ψ(a + b) - ψ(a))``."""
    return -beta(a, b) * polygamma_step(a, b, 0)


@in_double
def beta_mixed(xp: Any, a: Array, b: Array) -> Array:
    """``∂²B/∂a∂b = B ((ψ(s) - ψ(a)) (ψ(s) - ψ(b)) - ψ₁(s))`` with s = a + b; 1/s² of product and ψ₁ cancels.

    With A = ψ(s + 1) - ψ(a + 1) and C = ψ(s + 1) - ψ(b + 1), ψ(s) - ψ(a) = b/(as) + A and ψ(s) - ψ(b) = a/(bs) + C, so
    the difference is ``b C/(as) + a A/(bs) + A C - ψ₁(s + 1)``.
    """
    s = a + b
    inside = (a > 0) & (b > 0)
    p, q = xp.where(inside, a, 1), xp.where(inside, b, 1)
    s1 = p + q
    first, second = polygamma_step(p + 1, q, 0), polygamma_step(q + 1, p, 0)
    near = (q / p * second + p / q * first) / s1 + first * second - polygamma(1, s1 + 1)
    plain = polygamma_step(a, b, 0) * polygamma_step(b, a, 0) - polygamma(1, s)
    return beta(a, b) * xp.where(inside, near, plain)
