"""Distributions under the names and signatures of ``scipy.stats``, differentiable in x and in the parameters.

>>> import minigrad as mg
>>> x, scale = mg.Tensor([-40.0, 1.0], requires_grad=True), mg.Tensor(2.0, requires_grad=True)
>>> mg.stats.norm.logpdf(x, 0.0, scale).sum().backward()
>>> print(x.grad, float(scale.grad))
[10.   -0.25] 199.125

A family is a few functions of the standard variable ``z = (x - loc) / scale`` and its shape parameters; location, scale
and support are added here. Outside of the support a density is 0, and so is its gradient; NaN stands for parameters
that the family doesn't have. The shape parameters have no closed derivative in ``cdf``, ``sf``, ``logcdf`` and
``logsf``: it is refused. They need SciPy, as ``minigrad.special`` does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from minigrad import linalg
from minigrad.backend import Array, array_module, array_of, as_arrays, is_floating
from minigrad.engine.registry import Composite, register, sample
from minigrad.errors import ArgumentError, LinAlgError, ShapeError
from minigrad.messages.arguments import as_floats
from minigrad.messages.explain import describe, explained, wrong_call
from minigrad.ops import special as s
from minigrad.ops._special import floating
from minigrad.ops.elementwise import exp, expm1, log, log1p, normal_density, power
from minigrad.ops.piecewise import floor, where
from minigrad.ops.reduce import sum as _sum
from minigrad.ops.shape import concatenate, diagonal, reshape, swapaxes, transpose

__all__ = ["beta", "chi2", "dirichlet", "expon", "gamma", "multivariate_normal", "norm", "poisson", "t"]

Function = Callable[..., Any]
OUTSIDE = {  # what each function is below and above the support
    "logpdf": (-math.inf, -math.inf), "pdf": (0, 0), "logpmf": (-math.inf, -math.inf), "pmf": (0, 0),
    "cdf": (0, 1), "sf": (1, 0), "logcdf": (-math.inf, 0), "logsf": (0, -math.inf),
}  # fmt: skip
NAMES = {
    "logpdf": "Logarithm of the density", "pdf": "Density", "logpmf": "Logarithm of the probability",
    "pmf": "Probability", "cdf": "Distribution function", "sf": "Survival function",
    "logcdf": "Logarithm of the distribution function", "logsf": "Logarithm of the survival function",
}  # fmt: skip

# ---- location, scale and support -------------------------------------------------------------------------------------


def _log(p: Array, rest: Array) -> Array:
    """The logarithm of a probability and of 1 less the rest, the smaller of which is exact; no gradient at -∞."""
    nothing, likely = p == 0, p > 0.5
    return where(nothing, -math.inf, where(likely, log1p(-where(likely, rest, 0)), log(where(nothing | likely, 1, p))))


class Family:
    """A distribution. Its functions are methods, each an operation of the registry named ``family.method``.

    takes     the names of the arguments: x, the shapes, loc and, of a continuous distribution, scale
    support   the least and the largest z, and one between them, to compute with where x is outside
    standard  functions of (z, *shapes) by method
    """

    def __init__(self, name: str, takes: str, support: tuple[float, float, float], **standard: Function) -> None:
        self.name, self.support, self.discrete = name, support, "logpmf" in standard
        kind, defaults = inspect.Parameter.POSITIONAL_OR_KEYWORD, {"loc": 0.0, "scale": 1.0}
        self.signature = inspect.Signature(
            [inspect.Parameter(k, kind, annotation="Array", default=defaults.get(k, inspect.Parameter.empty))
             for k in takes.split()]
        )  # fmt: skip
        density = "logpmf" if self.discrete else "logpdf"
        rest: dict[str, Function] = {
            density.removeprefix("log"): lambda *args: exp(standard[density](*args)),
            "logcdf": lambda *args: _log(standard["cdf"](*args), standard["sf"](*args)),
            "logsf": lambda *args: _log(standard["sf"](*args), standard["cdf"](*args)),
        }
        for method, function in (rest | standard).items():
            setattr(self, method, self._operation(method, function))

    def __repr__(self) -> str:
        return f"<distribution {self.name}>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.name} has {', '.join(k for k in vars(self) if k in OUTSIDE)}, not {name}")

    def _operation(self, method: str, function: Function) -> Composite[...]:
        """The function of x, shapes, location and scale, with its signature and its twin in SciPy."""

        def located(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = self.signature.bind(*args, **kwargs)
            except TypeError:
                raise wrong_call(located, args, kwargs) from None
            bound.apply_defaults()
            *places, loc, scale = bound.args if "scale" in bound.arguments else (*bound.args, 1.0)
            return self._at(method, function, *places, loc=loc, scale=scale)

        def scipy(_: Any, *args: Any, **kwargs: Any) -> Any:
            family = getattr(importlib.import_module("scipy.stats"), self.name)
            return getattr(family, method)(*args, **kwargs)

        located.__name__ = located.__qualname__ = f"{self.name}.{method}"
        located.__doc__ = f"{NAMES[method]}, as of ``scipy.stats.{self.name}``."
        located.__signature__ = self.signature  # type: ignore[attr-defined]
        domain, samples = SAMPLES[self.name]
        some = samples[:1] if method in ("logpdf", "pdf", "logpmf", "pmf") else samples[-1:]
        return register(Composite(located, torch=False, numpy=scipy, domain=domain, samples=some))

    def _at(self, method: str, function: Function, x: Any, *shapes: Any, loc: Any, scale: Any) -> Any:
        least, largest, between = self.support
        if self.discrete:
            x = x.detach() if hasattr(x, "detach") else x
        if getattr(getattr(x, "dtype", None), "kind", "f") in "biu":
            x = x.astype(floating([array_of(v) for v in (*shapes, loc, scale)]) or np.float64)
        given = [float(v) if isinstance(v, int) else v for v in (x, *shapes, loc, scale)]
        x, *shapes, loc, scale = as_arrays(*given)  # type: ignore[assignment]
        wrong: Any = False
        for value in (*shapes, scale):
            wrong = wrong | (array_of(value) >= 0 if self.discrete else array_of(value) > 0) ^ True
        *safe, scale = [where(wrong, 1, value) for value in (*shapes, scale)]
        z = (x - loc) / scale
        below, above = array_of(z) < least, array_of(z) > largest
        with np.errstate(over="ignore", under="ignore", divide="ignore"):  # at the end of a support
            result = function(where(below | above | wrong, between, z), *safe)
            result = result - log(scale) if method == "logpdf" else result / scale if method == "pdf" else result
        low, high = OUTSIDE[method]
        return where(wrong, math.nan, where(below, low, where(above, high, result)))


SAMPLES: dict[str, Any] = {  # the interval of random arguments; a call of the density, one of the others
    "norm": ((0.4, 2.0), [sample((2, 3), (3,), (2, 1))]),
    "expon": ((0.4, 2.0), [sample((2, 3), 0.1, (2, 1))]),
    "t": ((0.4, 2.0), [sample((2, 3), (3,), (2, 1), (3,)), sample((2, 3), 3.5, (2, 1), (3,))]),
    "gamma": ((0.4, 2.0), [sample((2, 3), (3,), 0.1, (3,)), sample((2, 3), 1.5, 0.1, (3,))]),
    "chi2": ((0.4, 2.0), [sample((2, 3), (3,), 0.1, (3,)), sample((2, 3), 1.5, 0.1, (3,))]),
    "beta": ((0.2, 0.9), [sample((2, 3), (3,), (2, 1)), sample((2, 3), 1.5, 0.5)]),
    "poisson": ((0.4, 2.0), [sample(np.array([[0, 1, 2], [4, 3, 7]]), (3,))]),
}

# ---- the families ----------------------------------------------------------------------------------------------------

REAL, POSITIVE, UNIT = (-math.inf, math.inf, 0.0), (0.0, math.inf, 1.0), (0.0, 1.0, 0.5)

norm = Family(
    "norm", "x loc scale", REAL,
    logpdf=lambda z: -0.5 * z * z - 0.5 * math.log(2 * math.pi),
    pdf=normal_density,
    cdf=s.ndtr, logcdf=s.log_ndtr,
    sf=lambda z: s.ndtr(-z), logsf=lambda z: s.log_ndtr(-z),
)  # fmt: skip
expon = Family(
    "expon", "x loc scale", POSITIVE,
    logpdf=lambda z: -z,
    cdf=lambda z: -expm1(-z),
    sf=lambda z: exp(-z), logsf=lambda z: -z,
)  # fmt: skip
t = Family(
    "t", "x df loc scale", REAL,
    logpdf=lambda z, df: -(df + 1) / 2 * log1p(z * z / df) - s.betaln(df / 2, 0.5) - log(df) / 2,
    cdf=lambda z, df: s.stdtr(df, z),
    sf=lambda z, df: s.stdtr(df, -z),
)  # fmt: skip


def _density(logpdf: Function, powers: Function, edge: Array, z: Array, *shapes: Array) -> Array:
    """``e^logpdf``; at the edge of the support, where the logarithm is infinite, the product of its powers.

    So the slope there is the limit from inside: at z = 0 that of z^p is 0, 1 or ∞ as p is above, at or below 1.
    """
    there = [where(edge, v, 1) for v in shapes]
    return where(edge, powers(where(edge, z, 0.5), *there), exp(logpdf(where(edge, 0.5, z), *shapes)))


def _log_gamma(z: Array, a: Array) -> Array:
    return s.xlogy(a - 1, z) - z - s.gammaln(a)


def _gamma(z: Array, a: Array) -> Array:
    return _density(_log_gamma, lambda z, a: power(z, a - 1) * exp(-z - s.gammaln(a)), array_of(z) == 0, z, a)


def _log_beta(z: Array, a: Array, b: Array) -> Array:
    return s.xlogy(a - 1, z) + s.xlog1py(b - 1, -z) - s.betaln(a, b)


def _beta(z: Array, a: Array, b: Array) -> Array:
    def powers(z: Array, a: Array, b: Array) -> Array:
        return power(z, a - 1) * power(1 - z, b - 1) * exp(-s.betaln(a, b))

    return _density(_log_beta, powers, (array_of(z) == 0) | (array_of(z) == 1), z, a, b)


gamma = Family(
    "gamma", "x a loc scale", POSITIVE,
    logpdf=_log_gamma, pdf=_gamma,
    cdf=lambda z, a: s.gammainc(a, z),
    sf=lambda z, a: s.gammaincc(a, z),
)  # fmt: skip
chi2 = Family(
    "chi2", "x df loc scale", POSITIVE,
    logpdf=lambda z, df: _log_gamma(z / 2, df / 2) - math.log(2), pdf=lambda z, df: _gamma(z / 2, df / 2) / 2,
    cdf=lambda z, df: s.gammainc(df / 2, z / 2),
    sf=lambda z, df: s.gammaincc(df / 2, z / 2),
)  # fmt: skip
beta = Family(
    "beta", "x a b loc scale", UNIT,
    logpdf=_log_beta, pdf=_beta,
    cdf=lambda z, a, b: s.betainc(a, b, z),
    sf=lambda z, a, b: s.betainc(b, a, 1 - z),
)  # fmt: skip


# The number of events is a constant.
poisson = Family(
    "poisson", "k mu loc", POSITIVE,
    logpmf=lambda k, mu: where(floor(k) < k, -math.inf, s.xlogy(k, mu) - mu - s.gammaln(k + 1)),
    cdf=lambda k, mu: s.gammaincc(floor(k) + 1, mu),
    sf=lambda k, mu: s.gammainc(floor(k) + 1, mu),
)  # fmt: skip


# ---- of several variables --------------------------------------------------------------------------------------------


def _dirichlet(x: Array, alpha: Array) -> Array:
    """Logarithm of the density at x, whose components lie along the first axis; the last one may be left out."""
    x, alpha = as_floats(x, alpha)
    if alpha.ndim != 1 or x.ndim == 0 or x.shape[0] not in (alpha.size, alpha.size - 1):
        expected = "alpha of shape (k,), and x of shape (k, ...) or (k - 1, ...)"
        raise ShapeError(expected, f"x {describe(x)}, alpha {describe(alpha)}", "components along the first axis")
    if x.shape[0] == alpha.size - 1:
        x = concatenate([x, 1 - _sum(x, 0, keepdims=True)], 0)
    plain = array_of(x)
    off = abs(plain.astype(np.float64).sum(0) - 1)
    if plain.size and not bool(((off < 1e-4 + 4 * alpha.size * np.finfo(x.dtype).eps) & (plain >= 0).all(0)).all()):
        raise ArgumentError("x on the simplex: no negative component, and their sum is 1", describe(x), "x / x.sum(0)")
    shape = (alpha.size,) + (1,) * (x.ndim - 1)
    powers = _sum(s.xlogy(reshape(alpha, shape) - 1, x), 0)
    return powers - _sum(s.gammaln(alpha)) + s.gammaln(_sum(alpha))


def _multivariate_normal(x: Array, mean: Array = None, cov: Array = 1, allow_singular: bool = False) -> Array:
    """Logarithm of the density at x, of shape (..., k); ``cov`` is a matrix, a vector of variances or one for all.

    With ``allow_singular`` a cov of lower rank has the density of the space that it spans, which is 0 elsewhere; there
    is no derivative by such a cov.
    """
    given = [0.0 if mean is None else mean, cov]
    x, *arrays = as_floats(x, *given)
    mean, cov = (a if a.ndim else v for a, v in zip(arrays, given, strict=True))  # a number widens nothing
    k = x.shape[-1] if x.ndim else 0
    if not x.ndim or np.shape(mean) not in ((), (k,)) or np.shape(cov) not in ((), (k,), (k, k)):
        got = f"x {describe(x)}, mean {describe(mean)}, cov {describe(cov)}"
        raise ShapeError("x of shape (..., k), mean (k,), cov (k, k), (k,) or one number", got, "k is the dimension")
    dtype = x.dtype if is_floating(x.dtype) else np.float64
    eye = array_module(x).eye(k, dtype=dtype)
    matrix = (cov + swapaxes(cov, -1, -2)) / 2 if np.ndim(cov) == 2 else eye * cov
    centred = x - mean
    if allow_singular and (found := _degenerate(centred, matrix)) is not None:
        return found
    factor = linalg.cholesky(matrix)
    rows = linalg.solve_triangular(factor, transpose(reshape(centred, (-1, k))), lower=True)
    square = reshape(_sum(rows * rows, 0), x.shape[:-1])
    return -0.5 * (square + k * math.log(2 * math.pi)) - _sum(log(diagonal(factor)))


def _degenerate(x: Array, cov: Array) -> Array | None:
    """``logpdf`` for a singular ``cov``, by its eigenvalues; None for a regular one. The limits are SciPy's."""
    values, vectors = linalg.eigh(array_of(cov))
    size = abs(values).max() if values.size else 0.0
    least = (1e6 * 2.0**-52 if values.dtype == np.float64 else 1e3 * 2.0**-23) * size
    if (values < -least).any():
        raise ArgumentError("a cov without negative eigenvalues", describe(cov), "it is the mean of (x - m)(x - m)ᵀ")
    spanned = values > least
    if spanned.all():
        return None
    if getattr(cov, "requires_grad", False):
        hint = "cov + 1e-6 * eye(k) is regular"
        raise LinAlgError("a regular cov, for a gradient by it", "a singular one", hint)
    inside = ((array_of(x) @ vectors[:, ~spanned]) ** 2).sum(-1) < (1e3 * least) ** 2
    z = x @ (vectors[:, spanned] / values[spanned] ** 0.5)
    constant = int(spanned.sum()) * math.log(2 * math.pi) + float(array_module(values).log(values[spanned]).sum())
    return where(inside, -0.5 * (_sum(z * z, -1) + constant), -math.inf)


def _entropy(mean: Array = None, cov: Array = 1) -> Array:
    """Differential entropy ``k/2 (1 + ln 2π) + ½ ln |cov|``; the mean gives the dimension, where cov does not."""
    at, like = as_floats(0.0 if mean is None else mean, cov)
    k = max(at.shape[-1:] + like.shape[-1:], default=1)
    matrix = (like + swapaxes(like, -1, -2)) / 2 if like.ndim == 2 else array_module(like).eye(k) * like
    return k / 2 * (1 + math.log(2 * math.pi)) + linalg.slogdet(matrix).logabsdet / 2


def _of_vectors(name: str, logpdf: Function, **more: Function) -> SimpleNamespace:
    """A distribution of vectors: its density and the logarithm of that."""

    @functools.wraps(logpdf)
    def pdf(*args: Any, **kwargs: Any) -> Any:
        return exp(logpdf(*args, **kwargs))

    pdf.__doc__ = str(logpdf.__doc__).replace("Logarithm of the density", "Density")
    functions: dict[str, Any] = {"logpdf": logpdf, "pdf": pdf, **more}
    for method, function in functions.items():
        function.__name__ = function.__qualname__ = f"{name}.{method}"
    return SimpleNamespace(**{method: explained(function) for method, function in functions.items()})


dirichlet = _of_vectors("dirichlet", _dirichlet)
multivariate_normal = _of_vectors("multivariate_normal", _multivariate_normal, entropy=_entropy)
