"""Special functions and their derivatives. Values are SciPy's, on a GPU CuPy's; the derivatives are ours.

SciPy is imported when a function is used. Where the textbook's derivative subtracts two numbers that are nearly equal,
the rule calls one of five families of functions, which come first. An argument by which there is no closed derivative
is refused when its gradient is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, array_module, array_of, as_arrays
from minigrad.engine.core import Primitive, elementwise
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError, CallError
from minigrad.ops import _special
from minigrad.ops._scipy import scipy_module
from minigrad.ops._special import evaluate
from minigrad.ops.elementwise import (
    erf,
    exp,
    gaussian,
    log,
    log1p,
    normal_density,
    sigmoid,
)
from minigrad.ops.more_elementwise import sinc
from minigrad.ops.piecewise import absolute, minimum, sign, stop_gradient, where, zeros_like
from minigrad.ops.reduce import logsumexp as _logsumexp
from minigrad.ops.reduce import max as _max
from minigrad.ops.reduce import sum as _sum
from minigrad.ops.shape import squeeze

# fmt: off
__all__ = [
    "beta", "betainc", "betaln", "digamma", "entr", "erf", "erfc", "erfcinv", "erfcx", "erfinv", "expit", "gamma",
    "gammainc", "gammaincc", "gammaln", "gammasgn", "i0", "i0e", "i1", "i1e", "iv", "ive", "j0", "j1", "jn", "log_ndtr",
    "logit", "logsumexp", "multigammaln", "ndtr", "ndtri", "polygamma", "psi", "rel_entr", "rgamma", "stdtr", "xlog1py",
    "xlogy", "y0", "y1", "yn", "zeta",
]
# fmt: on

expit = sigmoid


def special(**facts: Any) -> Callable[[Callable[..., Any]], Primitive[...]]:
    """An elementwise operation whose twin for the tests is SciPy's function of the same name."""

    def declare(function: Callable[..., Any]) -> Primitive[...]:
        def scipy(_: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(scipy_module(), function.__name__)(*args, **kwargs)

        return elementwise(**{"numpy": scipy, "torch": False, **facts})(function)

    return declare


def _refuse(operation: str, argument: str, reason: str = "which has no closed form") -> Callable[[Any], Any]:
    """The rule of an argument by which an operation has no derivative."""

    def rule(g: Any) -> Any:
        got = f"its derivative by {argument!r}, {reason}"
        raise CallError(f"{operation} with a constant {argument!r}", got, f"{argument}.detach() makes it one")

    return rule


# ---- the families that the rules call --------------------------------------------------------------------------------


@elementwise(
    torch=False,
    numpy=lambda numpy, a, b, n: scipy_module().polygamma(n, a + b) - scipy_module().polygamma(n, a),
    domain=(0.3, 3.0),
    samples=[sample((2, 3), (2, 3), n=n) for n in (0, 1)],
)
def polygamma_step(a: Array, b: Array, n: int) -> Array:
    """``ψₙ(a + b) - ψₙ(a)`` of each pair, exact where b is small beside a."""
    return _special.polygamma_step(a, b, n)


def _scaled_tail(numpy: Any, x: Any, n: int) -> Any:
    """The twin of ``scaled_tail``, from the definition by integrals."""
    below, value = 2 / math.sqrt(math.pi), scipy_module().erfcx(x)
    return value if n == 0 else (below - 2 * x * value) / 2


@elementwise(torch=False, numpy=_scaled_tail, samples=[sample((2, 3), n=n) for n in (0, 1)])
def scaled_tail(x: Array, n: int) -> Array:
    """``e^(x²) iⁿerfc(x)`` of each element, iⁿerfc being the n-th repeated integral of erfc from x to ∞."""
    return _special.scaled_tail(x, n)


@elementwise(
    torch=False,
    numpy=lambda numpy, x, n: scipy_module().i0e(x) - n * scipy_module().i1e(abs(x)),
    samples=[sample((2, 3), n=n) for n in (0, 1)],
    kinks=(0,),
)
def decaying(x: Array, n: int) -> Array:
    """``(-d/d|x|)ⁿ (e^-|x| i0(x))`` of each element."""
    return _special.decaying(x, n)


def _ive_slope(numpy: Any, v: Any, z: Any, n: int) -> Any:
    """The twin of ``ive_slope`` for n = 0 and 1, by the recurrence of its orders."""
    ive = scipy_module().ive
    return ive(v, z) if n == 0 else (ive(v - 1, z) + ive(v + 1, z)) / 2 - ive(v, z)


@elementwise(
    torch=False,
    numpy=_ive_slope,
    domain=(0.5, 4.0),
    samples=[sample(v, (2, 3), n=n) for v in (0, 2.5) for n in (0, 1)],
)
def ive_slope(v: Array, z: Array, n: int) -> Array:
    """The n-th derivative of ``ive(v, z)`` by ``|z|``."""
    return _special.ive_slope(v, z, n)


@elementwise(
    torch=False,
    numpy=lambda numpy, x, n, sign: (scipy_module().jv if sign < 0 else scipy_module().iv)(n, x),
    domain=(-6.0, 6.0),
    samples=[sample((2, 3), n=n, sign=s) for n in (2, 3) for s in (-1, 1)],
)
def bessel(x: Array, n: int, sign: int) -> Array:
    """Bessel's J (sign -1) or I (sign 1) of a whole order n ≥ 2, on a GPU too."""
    return _special.bessel(x, n, sign)


def _bessel_slope(x: Array, n: int, sign: int) -> Array:
    below = bessel(x, n - 1, sign) if n > 2 else (j1 if sign < 0 else i1)(x)
    return (below + sign * bessel(x, n + 1, sign)) / 2


def _polygamma(n: int, x: Array) -> Array:
    return polygamma(n, x)


# fmt: off
polygamma_step.defvjp(lambda g, a, b, n: g * polygamma_step(a, b, n + 1),
                      lambda g, a, b, n: g * _polygamma(n + 1, a + b))
scaled_tail   .defvjp(lambda g, x, n: g * (-2 * (n + 1)) * scaled_tail(x, n + 1))
decaying      .defvjp(lambda g, x, n: -g * sign(x) * decaying(x, n + 1))
ive_slope     .defvjp(None, lambda g, v, z, n: g * sign(z) * ive_slope(v, z, n + 1))
bessel        .defvjp(lambda g, x, n, sign: g * _bessel_slope(x, n, sign))
# fmt: on

# ---- the gamma function and its logarithm's derivatives --------------------------------------------------------------


@special(torch="special.gammaln", domain=(0.2, 4.0))
def gammaln(x: Array) -> Array:
    """``ln |Γ(x)|`` of each element, infinite at 0, -1, -2 and so on.

    >>> print(float(gammaln(4.0)).__round__(4))
    1.7918
    """
    return evaluate("gammaln", x)


@special(domain=(-3.9, 3.0), kinks=(-3, -2, -1, 0))
def gammasgn(x: Array) -> Array:
    """The sign of the gamma function at each element, with the derivative 0; on the CPU alone.

    >>> print(gammasgn(np.array([-1.5, -0.5, 2.0])))
    [ 1. -1.  1.]
    """
    return evaluate("gammasgn", x)


gammasgn.defvjp(lambda g: zeros_like(g))


@special(domain=(0.3, 3.0))
def gamma(x: Array) -> Array:
    """Gamma function ``Γ(x) = ∫₀^∞ t^(x-1) e^-t dt`` of each element, (x-1)! of whole numbers.

    >>> print(float(gamma(5.0)))
    24.0
    """
    return evaluate("gamma", x)


@special(domain=(0.3, 3.0))
def rgamma(x: Array) -> Array:
    """``1 / Γ(x)`` of each element, 0 at 0, -1, -2 and so on.

    >>> print(float(rgamma(3.0)))
    0.5
    """
    return evaluate("rgamma", x)


@composite(numpy=lambda n, a, d: scipy_module().multigammaln(a, d), torch=False, domain=(2.5, 5.0),
           samples=[sample((2, 3), 3), sample((), 1)])  # fmt: skip
def multigammaln(a: Array, d: int) -> Array:
    """Logarithm of the gamma function of ``d`` variables: ``d (d - 1) / 4 ln π + Σ ln Γ(a - j/2)`` over j < d.

    >>> print(float(multigammaln(2.0, 2)).__round__(4))
    0.4516
    """
    if d < 1:
        raise ArgumentError("d, a whole number from 1", str(d), "it counts dimensions")
    total = gammaln(a) + d * (d - 1) / 4 * math.log(math.pi)
    for j in range(1, d):
        total = total + gammaln(a - j / 2)
    return total


@special(domain=(0.3, 4.0))
def digamma(x: Array) -> Array:
    """``ψ(x) = Γ'(x) / Γ(x)`` of each element.

    >>> print(float(digamma(1.0)).__round__(4))
    -0.5772
    """
    return evaluate("digamma", x)


@special(domain=(0.4, 4.0), samples=[sample(n, (2, 3)) for n in (0, 1, 3)])
def polygamma(n: Array, x: Array) -> Array:
    """The n-th derivative of digamma at each x, for whole n ≥ 0; no derivative by n.

    >>> print(float(polygamma(1, 1.0)).__round__(4))
    1.6449
    """
    return _special.polygamma(n, x)


@special(domain=(0.3, 3.0))
def beta(a: Array, b: Array) -> Array:
    """``B(a, b) = Γ(a) Γ(b) / Γ(a + b)`` of each pair.

    >>> print(float(beta(2.0, 3.0)).__round__(4))
    0.0833
    """
    return _special.beta(a, b)


@special(domain=(0.3, 3.0))
def betaln(a: Array, b: Array) -> Array:
    """``ln |B(a, b)|`` of each pair.

    >>> print(float(betaln(2.0, 3.0)).__round__(4))
    -2.4849
    """
    return _special.betaln(a, b)


@special(domain=(0.3, 4.0), samples=[sample(2.5, (2, 3)), sample(0.7, ())])
def gammainc(a: Array, x: Array) -> Array:
    """``P(a, x) = 1/Γ(a) ∫₀ˣ t^(a-1) e^-t dt`` of each pair; no derivative by a.

    >>> print(float(gammainc(1.0, 1.0)).__round__(4))
    0.6321
    """
    return evaluate("gammainc", a, x)


@special(domain=(0.3, 4.0), samples=[sample(2.5, (2, 3)), sample(0.7, ())])
def gammaincc(a: Array, x: Array) -> Array:
    """``1 - P(a, x)`` of each pair, exact in the tail; no derivative by a.

    >>> print(float(gammaincc(1.0, 1.0)).__round__(4))
    0.3679
    """
    return evaluate("gammaincc", a, x)


@special(domain=(0.1, 0.9), samples=[sample(2.5, 1.5, (2, 3)), sample(0.7, 3.0, ())])
def betainc(a: Array, b: Array, x: Array) -> Array:
    """``I(a, b, x) = 1/B(a, b) ∫₀ˣ t^(a-1) (1-t)^(b-1) dt`` of each triple; no derivative by a or b.

    >>> print(float(betainc(1.0, 1.0, 0.25)))
    0.25
    """
    return evaluate("betainc", a, b, x)


@special(samples=[sample(3.5, (2, 3)), sample(0.7, ())])
def stdtr(df: Array, t: Array) -> Array:
    """Distribution function of Student's t with ``df`` degrees of freedom; no derivative by df; on the CPU alone.

    >>> print(float(stdtr(1.0, 1.0)).__round__(4))
    0.75
    """
    return evaluate("stdtr", df, t)


@special(
    domain=(0.5, 3.0),
    torch=lambda t, x, q: t.special.zeta(t.as_tensor(x, dtype=q.dtype), q),
    samples=[sample(2.5, (2, 3)), sample(4.0, ())],
)
def zeta(x: Array, q: Array | None = None) -> Array:
    """Hurwitz' ``ζ(x, q) = Σ (q + k)^-x`` over k = 0, 1, …; Riemann's for q = 1 or None; no derivative by x.

    >>> print(float(zeta(2.0)).__round__(4))
    1.6449
    """
    if q is None and array_module(x) is np:
        return evaluate("zeta", x)
    return evaluate("zeta", x, 1.0 if q is None else q)


# The densities of the distributions whose distribution functions these are; they are tested as slopes.
gamma_density = Primitive(lambda a, x: _special.gamma_density(a, x), elementwise=True)
beta_density = Primitive(lambda a, b, x: _special.beta_density(a, b, x), elementwise=True)
student_density = Primitive(lambda df, t: _special.student_density(df, t), elementwise=True)

beta_slope = Primitive(lambda a, b: _special.beta_slope(a, b), elementwise=True)
beta_mixed = Primitive(lambda a, b: _special.beta_mixed(a, b), elementwise=True)


def _beta_third(g: Array, a: Array, b: Array, out: Array) -> Array:
    """The derivative of ``beta_mixed`` by a."""
    step, other = polygamma_step(a, b, 0), polygamma_step(b, a, 0)
    bend = polygamma_step(a, b, 1) * other + step * polygamma(1, a + b) - polygamma(2, a + b)
    return g * (beta(a, b) * bend - out * step)


def _rgamma_slope(x: Array, out: Array) -> Array:
    """``-out ψ(x)``, in forms whose terms don't cancel and that have no pole at 0, -1 and so on.

    Below 1/2 it is the derivative of ``Γ(1 - x) sin(πx) / π``, up to 2 that of ``x / Γ(x + 1)``.
    """
    low, high = array_of(x) < 0.5, array_of(x) > 2
    a, b, c = where(low, x, 0), where(low | high, 1, x), where(high, x, 2)
    far = gamma(1 - a) * (math.pi * (a + 0.5) * sinc(a + 0.5) - digamma(1 - a) * a * sinc(a))
    return where(low, far, where(high, -out * digamma(c), rgamma(b + 1) * (1 - b * digamma(b + 1))))


# fmt: off
gammaln  .defvjp(lambda g, x: g * digamma(x))
gamma    .defvjp(lambda g, x, out: g * out * digamma(x))
rgamma   .defvjp(lambda g, x, out: g * _rgamma_slope(x, out))
digamma  .defvjp(lambda g, x: g * polygamma(1, x))
polygamma.defvjp(_refuse("polygamma", "n", "a whole number"), lambda g, n, x: g * polygamma(n + 1, x))
beta     .defvjp(lambda g, a, b: g * beta_slope(a, b), lambda g, a, b: g * beta_slope(b, a))
beta_slope.defvjp(lambda g, a, b, out: -g * (out * polygamma_step(a, b, 0) + beta(a, b) * polygamma_step(a, b, 1)),
                  lambda g, a, b: g * beta_mixed(a, b))
beta_mixed.defvjp(_beta_third, lambda g, a, b, out: _beta_third(g, b, a, out))
betaln   .defvjp(lambda g, a, b: -g * polygamma_step(a, b, 0), lambda g, a, b: -g * polygamma_step(b, a, 0))
gammainc .defvjp(_refuse("gammainc", "a"), lambda g, a, x: g * gamma_density(a, x))
gammaincc.defvjp(_refuse("gammaincc", "a"), lambda g, a, x: -g * gamma_density(a, x))
betainc  .defvjp(_refuse("betainc", "a"), _refuse("betainc", "b"), lambda g, a, b, x: g * beta_density(a, b, x))
stdtr    .defvjp(_refuse("stdtr", "df"), lambda g, df, t: g * student_density(df, t))
zeta     .defvjp(_refuse("zeta", "x"), lambda g, x, q: -g * x * zeta(x + 1, q))
gamma_density  .defvjp(None, lambda g, a, x, out: g * out * ((a - 1) / x - 1))
beta_density   .defvjp(None, None, lambda g, a, b, x, out: g * out * ((a - 1) / x - (b - 1) / (1 - x)))
student_density.defvjp(None, lambda g, df, t, out: -g * out * (df + 1) * (t / (df + t * t)))
# fmt: on
psi = digamma

# ---- the error function and the normal distribution ------------------------------------------------------------------


@special(torch="special.erfc")
def erfc(x: Array) -> Array:
    """``1 - erf(x)`` of each element, exact in the tail.

    >>> print(float(erfc(30.0)))
    0.0
    """
    return evaluate("erfc", x)


@special(torch="special.erfcx")
def erfcx(x: Array) -> Array:
    """``e^(x²) erfc(x)`` of each element, without underflow for large x.

    >>> print(float(erfcx(30.0)).__round__(6))
    0.018796
    """
    return evaluate("erfcx", x)


@special(torch="special.erfinv", domain=(-0.9, 0.9))
def erfinv(x: Array) -> Array:
    """The number of which ``x`` is the error function; ±∞ at ±1.

    >>> print(float(erfinv(0.5)).__round__(4))
    0.4769
    """
    return evaluate("erfinv", x)


@special(domain=(0.1, 1.9))
def erfcinv(x: Array) -> Array:
    """The number of which ``x`` is 1 - erf; ∞ at 0 and -∞ at 2.

    >>> print(float(erfcinv(0.5)).__round__(4))
    0.4769
    """
    return evaluate("erfcinv", x)


@special(torch="special.ndtr")
def ndtr(x: Array) -> Array:
    """``Φ(x)``, the distribution function of the standard normal, of each element.

    >>> print(float(ndtr(0.0)))
    0.5
    """
    return _special.ndtr(x)


@special(torch="special.log_ndtr")
def log_ndtr(x: Array) -> Array:
    """``ln Φ(x)`` of each element, exact in both tails.

    >>> print(float(log_ndtr(-40.0)).__round__(4))
    -804.6084
    """
    return _special.log_ndtr(x)


@special(torch="special.ndtri", domain=(0.1, 0.9))
def ndtri(x: Array) -> Array:
    """The quantile ``Φ⁻¹(x)`` of the standard normal; -∞ at 0 and ∞ at 1.

    >>> print(float(ndtri(0.975)).__round__(4))
    1.96
    """
    return evaluate("ndtri", x)


def _exp_square(x: Array, tail: Array) -> Array:
    """``e^(x²)``, of which the erfc of |x| is known, and more exact than x: ``erfcx(|x|) / tail``."""
    xp = array_module(x, tail)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return xp.where(tail == 0, math.inf, evaluate("erfcx", abs(x)) / tail)


exp_square = Primitive(_exp_square, elementwise=True)
exp_square.defvjp(lambda g, x, out: g * 2 * x * out, None)


def _normal_score(x: Array) -> Array:
    """``φ(x) / Φ(x)``, the slope of ln Φ; ``√(2/π) / erfcx(-x/√2)`` where Φ is small."""
    low = x < 0
    above = where(low, 0, x)
    tail = math.sqrt(2 / math.pi) / scaled_tail(where(low, x, 0) * -math.sqrt(0.5), 0)
    return where(low, tail, normal_density(above) / ndtr(above))


# fmt: off
erfc    .defvjp(lambda g, x: g * (-2 / math.sqrt(math.pi)) * gaussian(x))
erfcx   .defvjp(lambda g, x: g * -2 * scaled_tail(x, 1))
erfinv  .defvjp(lambda g, x, out: g * (math.sqrt(math.pi) / 2) * exp_square(out, 1 - absolute(x)))
erfcinv .defvjp(lambda g, x, out: g * (-math.sqrt(math.pi) / 2) * exp_square(out, minimum(x, 2 - x)))
ndtr    .defvjp(lambda g, x: g * normal_density(x))
log_ndtr.defvjp(lambda g, x: g * _normal_score(x))
ndtri   .defvjp(lambda g, x, out: g * math.sqrt(2 * math.pi) * exp_square(out * math.sqrt(0.5), 2 * minimum(x, 1 - x)))
# fmt: on

# ---- logarithms and entropies ----------------------------------------------------------------------------------------


@special(torch="special.logit", domain=(0.1, 0.9))
def logit(x: Array) -> Array:
    """``ln(x / (1 - x))`` of each element, the inverse of expit.

    >>> print(float(logit(0.5)))
    0.0
    """
    return evaluate("logit", x)


@special(torch="special.xlogy", domain=(0.3, 3.0))
def xlogy(x: Array, y: Array) -> Array:
    """``x ln y`` of each pair, 0 where x is 0.

    >>> print(float(xlogy(0.0, 0.0)))
    0.0
    """
    return evaluate("xlogy", x, y)


@special(torch="special.xlog1py", domain=(-0.6, 2.0))
def xlog1py(x: Array, y: Array) -> Array:
    """``x ln(1 + y)`` of each pair, 0 where x is 0.

    >>> print(float(xlog1py(0.0, -1.0)))
    0.0
    """
    return evaluate("xlog1py", x, y)


@special(torch="special.entr", domain=(0.2, 2.0))
def entr(x: Array) -> Array:
    """``-x ln x`` of each element, 0 at 0, -∞ below.

    >>> print(float(entr(0.0)))
    0.0
    """
    return evaluate("entr", x)


@special(domain=(0.2, 2.0))
def rel_entr(x: Array, y: Array) -> Array:
    """``x ln(x / y)`` of each pair, 0 where x is 0, ∞ where y is 0 alone, or one is negative.

    >>> print(float(rel_entr(0.0, 0.0)))
    0.0
    """
    return evaluate("rel_entr", x, y)


def _log_ratio(x: Array, y: Array) -> Array:
    """``ln(x / y)``, exact near 1 and where the quotient is no normal number."""
    xp = array_module(x, y)
    with np.errstate(all="ignore"):
        ratio = x / y
        near = (ratio > 0.5) & (ratio < 2)
        apart = (ratio < 1e-30) | (ratio > 1e30)
        return xp.where(near, xp.log1p((x - y) / y), xp.where(apart, xp.log(x) - xp.log(y), xp.log(ratio)))


log_ratio = Primitive(_log_ratio, elementwise=True)
log_ratio.defvjp(lambda g, x: g / x, lambda g, y: -g / y)


def _log_or_zero(logarithm: Callable[[Any], Any], x: Array, y: Array, least: float) -> Array:
    """The logarithm of y, and 0 where x is 0 and the logarithm is not finite."""
    empty = (x == 0) & (y <= least)
    return where(empty, 0, logarithm(where(empty, 1, y)))


def _quotient(x: Array, y: Array) -> Array:
    """``x / y``, and 0 for 0 / 0."""
    empty = (x == 0) & (y == 0)
    return where(empty, 0, x / where(empty, 1, y))


def _relative_entropy_slope(x: Array, y: Array) -> Array:
    """``ln(x / y) + 1``, and 0 for x = y = 0."""
    empty = (x == 0) & (y == 0)
    return where(empty, 0, log_ratio(where(empty, 1, x), where(empty, 1, y)) + 1)


# fmt: off
logit   .defvjp(lambda g, x: g / x + g / (1 - x))
xlogy   .defvjp(lambda g, x, y: g * _log_or_zero(log, x, y, 0), lambda g, x, y: g * _quotient(x, y))
xlog1py .defvjp(lambda g, x, y: g * _log_or_zero(log1p, x, y, -1), lambda g, x, y: g * _quotient(x, 1 + y))
entr    .defvjp(lambda g, x: -g * (log(x) + 1))
rel_entr.defvjp(lambda g, x, y: g * _relative_entropy_slope(x, y), lambda g, x, y: -g * _quotient(x, y))
# fmt: on


@composite(
    torch=False,
    numpy=lambda n, a, b, axis=None, keepdims=False: n.log(n.sum(b * n.exp(a), axis, keepdims=keepdims)),
    domain=(0.2, 2.0),
    samples=[sample((2, 3), (2, 3)), sample((2, 3, 2), (3, 1), axis=1), sample((2, 3), (2, 3), axis=0, keepdims=True)],
)
def weighted_logsumexp(a: Array, b: Array, axis: Any = None, keepdims: bool = False) -> Array:
    """``ln Σ b e^a`` over ``axis`` without overflow; NaN where the sum is negative."""
    total, top = _weighted_sum(a, b, axis, keepdims)
    return _log_of_sum(total) + top


def _log_of_sum(total: Array) -> Array:
    """The logarithm of a sum of exponentials, -∞ without a gradient for a sum of nothing."""
    nothing = total == 0
    return where(nothing, -math.inf, log(where(nothing, 1, total)))


def _weighted_sum(a: Array, b: Array, axis: Any, keepdims: bool) -> tuple[Array, Array]:
    """``Σ b e^(a - top)`` and the largest a, called top, whose weight is not 0."""
    a, b = as_arrays(a, b)
    taken = where(b == 0, -math.inf, a)
    top = stop_gradient(_max(taken, axis, keepdims=True, initial=-math.inf))
    top = where(abs(array_of(top)) < math.inf, top, 0)
    size = where(b == 0, minimum(a - top, 500), a - top)  # which the gradient of a weight 0 reads
    return _sum(b * exp(size), axis, keepdims), top if keepdims else squeeze(top, axis)


def logsumexp(a: Array, axis: Any = None, b: Any = None, keepdims: bool = False, return_sign: bool = False) -> Any:
    """``ln Σ b e^a`` over ``axis`` without overflow; with ``return_sign`` ln of its size, and its sign.

    >>> print(float(logsumexp(np.array([1000.0, 1000.0]), b=np.array([2.0, 1.0]))).__round__(4))
    1001.0986
    """
    if return_sign:
        total, top = _weighted_sum(a, 1.0 if b is None else b, axis, keepdims)
        return _log_of_sum(absolute(total)) + top, sign(total)
    return _logsumexp(a, axis, keepdims) if b is None else weighted_logsumexp(a, b, axis, keepdims)


# ---- Bessel functions ------------------------------------------------------------------------------------------------


@special(domain=(-6.0, 6.0))
def j0(x: Array) -> Array:
    """Bessel function of the first kind, order 0.

    >>> print(float(j0(0.0)))
    1.0
    """
    return evaluate("j0", x)


@special(domain=(-6.0, 6.0))
def j1(x: Array) -> Array:
    """Bessel function of the first kind, order 1.

    >>> print(float(j1(0.0)))
    0.0
    """
    return evaluate("j1", x)


@special(domain=(0.5, 6.0))
def y0(x: Array) -> Array:
    """Bessel function of the second kind, order 0; -∞ at 0.

    >>> print(float(y0(1.0)).__round__(4))
    0.0883
    """
    return evaluate("y0", x)


@special(domain=(0.5, 6.0))
def y1(x: Array) -> Array:
    """Bessel function of the second kind, order 1; -∞ at 0.

    >>> print(float(y1(1.0)).__round__(4))
    -0.7812
    """
    return evaluate("y1", x)


@special(torch="special.i0")
def i0(x: Array) -> Array:
    """Modified Bessel function of the first kind, of order 0.

    >>> print(float(i0(0.0)))
    1.0
    """
    return evaluate("i0", x)


@special(torch="special.i0e", kinks=(0,))
def i0e(x: Array) -> Array:
    """``e^-|x| i0(x)`` of each element, without overflow.

    >>> print(float(i0e(0.0)))
    1.0
    """
    return evaluate("i0e", x)


@special(torch="special.i1")
def i1(x: Array) -> Array:
    """Modified Bessel function of the first kind, of order 1.

    >>> print(float(i1(0.0)))
    0.0
    """
    return evaluate("i1", x)


@special(torch="special.i1e", kinks=(0,))
def i1e(x: Array) -> Array:
    """``e^-|x| i1(x)`` of each element, without overflow.

    >>> print(float(i1e(0.0)))
    0.0
    """
    return evaluate("i1e", x)


@special(domain=(0.5, 6.0), samples=[sample(2, (2, 3)), sample(0.5, (2, 3)), sample(0, ())])
def jn(n: Array, x: Array) -> Array:
    """Bessel function of the first kind of order n; no derivative by n; on the CPU alone.

    >>> print(float(jn(2, 1.0)).__round__(4))
    0.1149
    """
    return evaluate("jn", n, x)


@special(domain=(0.5, 6.0), samples=[sample(2, (2, 3)), sample(3, (2, 3)), sample(0, ())])
def yn(n: Array, x: Array) -> Array:
    """Bessel function of the second kind, of a whole order n; -∞ at 0; no derivative by n.

    >>> print(float(yn(2, 1.0)).__round__(4))
    -1.6507
    """
    return evaluate("yn", n, x)


@special(domain=(0.5, 4.0), samples=[sample(2, (2, 3)), sample(0.5, (2, 3)), sample(0, ())])
def iv(v: Array, z: Array) -> Array:
    """Modified Bessel function of the first kind of order v; no derivative by v; on the CPU alone.

    >>> print(float(iv(1, 1.0)).__round__(4))
    0.5652
    """
    return evaluate("iv", v, z)


@special(domain=(0.5, 4.0), samples=[sample(2, (2, 3)), sample(0.5, (2, 3)), sample(0, ())])
def ive(v: Array, z: Array) -> Array:
    """``e^-|z| iv(v, z)`` of each pair, without overflow; no derivative by v; on the CPU alone.

    >>> print(float(ive(1, 1.0)).__round__(4))
    0.2079
    """
    return _special.ive(v, z)


# fmt: off
j0 .defvjp(lambda g, x: -g * j1(x))
j1 .defvjp(lambda g, x: g * (j0(x) - bessel(x, 2, -1)) / 2)
y0 .defvjp(lambda g, x: -g * y1(x))
y1 .defvjp(lambda g, x, out: g * (y0(x) - out / x))
i0 .defvjp(lambda g, x: g * i1(x))
i1 .defvjp(lambda g, x: g * (i0(x) + bessel(x, 2, 1)) / 2)
i0e.defvjp(lambda g, x: -g * sign(x) * decaying(x, 1))
i1e.defvjp(lambda g, x: g * (decaying(x, 2) - decaying(x, 1)))
jn .defvjp(_refuse("jn", "n"), lambda g, n, x: g * (jn(n - 1, x) - jn(n + 1, x)) / 2)
yn .defvjp(_refuse("yn", "n"), lambda g, n, x: g * (yn(n - 1, x) - yn(n + 1, x)) / 2)
iv .defvjp(_refuse("iv", "v"), lambda g, v, z: g * (iv(v - 1, z) + iv(v + 1, z)) / 2)
ive.defvjp(_refuse("ive", "v"), lambda g, v, z: g * sign(z) * ive_slope(v, z, 1))
# fmt: on

# ---- code that is written for SciPy ----------------------------------------------------------------------------------


def of_scipy() -> dict[Any, Callable[..., Any]]:
    """For each of SciPy's ufuncs that has one: ours. Code that is written for SciPy then runs on Tensors."""
    scipy, ours = scipy_module(), globals()
    pairs = [
        *((name, getattr(scipy, name, None)) for name in __all__),
        *(("zeta", getattr(scipy._ufuncs, name, None)) for name in ("_zeta", "_riemann_zeta")),
    ]
    return {ufunc: ours[name] for name, ufunc in pairs if isinstance(ufunc, np.ufunc)}
