"""Special functions and distributions at the ends of their ranges, and what they refuse.

Values and derivatives in between are the registry's tests; over the whole range they are ``test_accuracy.py``'s.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats
from mpmath import mp, mpf
from support.cases import LACKING

import minigrad as mg
from minigrad.errors import ArgumentError, CallError, ShapeError

lacking = pytest.mark.cpu_only("CuPy has no such function")
ROOT = Path(__file__).parents[2]
special, stats = mg.special, mg.stats


def first_and_second(function: Any, at: float) -> list[float]:
    x = mg.Tensor(at, requires_grad=True)
    (first,) = mg.grad(function(x), x, create_graph=True)
    return [float(first.data), float(mg.grad(first, x)[0].data)]


def exactly(function: Any, at: float) -> list[float]:
    """The two derivatives by Taylor's theorem in 400 digits: differences of a function that mpmath knows."""
    with mp.workdps(400):
        at, h = mpf(at), mpf(10) ** -130 * (abs(mpf(at)) or 1)
        below, middle, above = function(at - h), function(at), function(at + h)
        return [float((above - below) / (2 * h)), float((above - 2 * middle + below) / h**2)]


def phi(x: Any) -> Any:
    return mpmath.erfc(-x / mp.sqrt(2)) / 2


def of_half_order(z: Any) -> Any:
    return special.ive(0.5, z)


EXTREMES = [  # ours, the same in mpmath, where, and the relative error that half a unit of the arguments explains
    (special.gammaln, mpmath.loggamma, [1e-300, 1e-8, 1.0, 2.0, 1e10], 1e-14),
    (special.gamma, mpmath.gamma, [1e-100, -0.5, -3.25, 150.0], 1e-13),
    (special.digamma, mpmath.digamma, [1e-5, -1 + 1e-3, -2.5, 1e8], 1e-9),
    (special.erfc, mpmath.erfc, [-5.0, 5.0, 26.0], 1e-12),
    (special.erfcx, lambda x: mp.exp(x * x) * mpmath.erfc(x), [-3.0, 0.0, 0.49, 0.51, 2.0, 30.0, 1e4, 1e8], 1e-14),
    (special.ndtr, phi, [-37.0, -1.0, 0.0, 8.0], 1e-12),
    (special.log_ndtr, lambda x: mp.log(phi(x)), [-1e4, -40.0, -1.0, 0.0, 3.0, 8.0], 1e-13),
    (special.i0, lambda x: mpmath.besseli(0, x), [0.0, 1e-8, 30.0, 700.0], 1e-12),
    (special.i1, lambda x: mpmath.besseli(1, x), [0.0, 1e-8, 1.9, 2.1, -30.0, 700.0], 1e-12),
    (special.i0e, lambda x: mp.exp(-x) * mpmath.besseli(0, x), [1e-8, 39.9, 40.1, 1e6], 1e-14),
    (special.i1e, lambda x: mp.exp(-x) * mpmath.besseli(1, x), [1e-8, 39.9, 40.1, 1e6], 1e-14),
    (of_half_order, lambda z: mp.exp(-z) * mpmath.besseli(mpf(0.5), z), [0.1, 20.0, 1e6], 1e-12),
    (special.j1, lambda x: mpmath.besselj(1, x), [0.0, 1e-8, 2.9, 3.1, -20.0], 1e-12),
    (special.logit, lambda p: mp.log(p / (1 - p)), [1e-300, 0.25, 1 - 2.0**-53], 1e-14),
    (lambda a: special.betaln(a, 1e-6), lambda a: mp.log(mpmath.beta(a, mpf(1e-6))), [1e-3, 1.0, 1e6, 1e10], 1e-13),
    (stats.norm.logcdf, lambda x: mp.log(phi(x)), [-40.0], 1e-13),
    (stats.norm.logsf, lambda x: mp.log(phi(-x)), [40.0], 1e-13),
    (stats.expon.logcdf, lambda x: mp.log(-mpmath.expm1(-x)), [1e-10, 0.7, 40.0], 1e-13),
]


@pytest.mark.parametrize(
    ("ours", "right", "at", "error"),
    [pytest.param(f, g, x, e, marks=[lacking] * (f is of_half_order)) for f, g, points, e in EXTREMES for x in points],
)
def test_derivatives_at_the_ends(ours: Any, right: Any, at: float, error: float) -> None:
    with np.errstate(over="ignore"):  # a second derivative
        found = first_and_second(ours, at)
    np.testing.assert_allclose(found, exactly(right, at), rtol=error, atol=1e-100)


@pytest.mark.parametrize("p", [1e-300, 1e-10, 0.3, 0.5])
def test_slopes_of_quantiles(p: float) -> None:
    """``1 / density(quantile)``, the quantile to 60 digits, so that no rounding of it is magnified."""
    with mp.workdps(60):
        start = mpf(float(scipy.special.ndtri(p)))
        quantile = mpmath.findroot(lambda t: mp.log(phi(t)) - mp.log(mpf(p)), start)
        slope = float(mp.sqrt(2 * mp.pi) * mp.exp(quantile**2 / 2))

    def first(function: Any, at: float) -> Any:
        x = mg.Tensor(at, requires_grad=True)
        return mg.grad(function(x), x)[0].data

    np.testing.assert_allclose(first(special.ndtri, p), slope, rtol=4e-15)
    np.testing.assert_allclose(first(special.ndtri, 1 - p), slope if p > 1e-300 else np.inf, rtol=1e-6)
    np.testing.assert_allclose(first(special.erfcinv, 2 * p), -slope / np.sqrt(8), rtol=4e-15)


def test_float32_keeps_its_digits_where_the_exponents_are_large() -> None:
    """A density of gamma at shape 1000: its logarithm is a difference of thousands."""
    x = mg.Tensor(np.array([950.0, 1000.0, 1100.0], np.float32), requires_grad=True)
    special.gammainc(1000.0, x).sum().backward()
    assert x.grad is not None and x.grad.dtype == np.float32
    np.testing.assert_allclose(x.grad, scipy.stats.gamma.pdf(x.numpy().astype(float), 1000.0), rtol=1e-6)


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "gammainc": ("a", (2.0, 1.0)), "gammaincc": ("a", (2.0, 1.0)), "betainc": ("ab", (2.0, 1.0, 0.5)),
    "jn": ("n", (1.0, 2.0)), "iv": ("v", (1.0, 2.0)), "ive": ("v", (1.0, 2.0)), "polygamma": ("n", (1.0, 2.0)),
    "zeta": ("x", (2.0, 1.0)), "stdtr": ("d", (3.0, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        pytest.param(n, k, marks=[lacking] * (n in LACKING))
        for n, (names, _) in REFUSED.items()
        for k in range(len(names))
    ],
)
def test_derivatives_without_a_closed_form_are_refused(name: str, argument: int) -> None:
    """By the names of function and argument, and only when the gradient is asked for."""
    values = REFUSED[name][1]
    leaves = [mg.Tensor(v, requires_grad=k == argument) for k, v in enumerate(values)]
    operation = getattr(special, name)
    out = operation(*leaves)
    assert float(out.data) == pytest.approx(float(operation(*values)))
    with pytest.raises(
        CallError, match=rf"Expected: {name} with a constant '{operation.names[argument]}'\nGot: its deriv"
    ):
        out.backward()


def test_scipy_is_imported_when_a_function_is_used() -> None:
    """And its absence is one error, which says what to install."""
    code = """
import sys, minigrad as mg, numpy as np
assert "scipy" not in sys.modules
sys.modules["scipy"] = None
try:
    mg.special.gammaln(mg.Tensor([1.0]))
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("Expected: scipy.special, which computes the special functions\nGot: ")
    assert done.stdout.strip().endswith("Hint: pip install -e '.[scipy]' in the folder of minigrad")


# ---- logsumexp with weights ------------------------------------------------------------------------------------------


def test_logsumexp_with_weights_is_scipys() -> None:
    a, b = np.array([[1000.0, 1001.0], [-5.0, 3.0]]), np.array([[1.0, -2.0], [0.5, 0.0]])
    for axis in (None, 0, 1):
        for found, wanted in zip(
            special.logsumexp(a, axis, b, return_sign=True),
            scipy.special.logsumexp(a, axis, b, return_sign=True),
            strict=True,
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-14)
    np.testing.assert_allclose(special.logsumexp(a, axis=1), scipy.special.logsumexp(a, axis=1), rtol=1e-14)
    assert mg.gradcheck(lambda a, b: special.logsumexp(a, 1, b, return_sign=True)[0], [a / 100, b])


# ---- distributions ---------------------------------------------------------------------------------------------------

FAMILIES = {
    "norm": (), "expon": (), "t": (3.5,), "gamma": (1.7,), "chi2": (3.0,), "beta": (1.5, 2.5),
}  # fmt: skip
POINTS = np.array([-np.inf, -1e3, -2.0, -0.0, 0.0, 1e-200, 0.3, 1.0, 1.5, 40.0, np.inf, np.nan])
METHODS = ["pdf", "logpdf", "cdf", "sf", "logcdf", "logsf"]


@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(n, m, marks=[lacking] * (f"{n}.{m}" in LACKING)) for n in FAMILIES for m in METHODS],
)
def test_values_in_and_outside_of_the_support_are_scipys(name: str, method: str) -> None:
    """Infinities, NaN and wrong parameters too, and gradients are finite or NaN where the value is."""
    shapes = FAMILIES[name]
    ours, theirs = getattr(getattr(stats, name), method), getattr(getattr(scipy.stats, name), method)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(ours(POINTS, *shapes), theirs(POINTS, *shapes), rtol=1e-12, atol=1e-300)
        located = ours(POINTS, *shapes, loc=0.5, scale=2.0)
        np.testing.assert_allclose(located, theirs(POINTS, *shapes, loc=0.5, scale=2.0), rtol=1e-12, atol=1e-300)
    assert np.isnan(ours(np.ones(2), *shapes, scale=np.array([-1.0, 0.0]))).all()
    if shapes:
        assert np.isnan(ours(0.5, -1.0, *shapes[1:]))


@pytest.mark.parametrize("name", FAMILIES)
def test_outside_of_the_support_no_gradient_flows(name: str) -> None:
    low, high = getattr(scipy.stats, name)(*FAMILIES[name]).support()
    x = mg.Tensor([v for v in (low - 1, high + 1) if np.isfinite(v)], requires_grad=True)
    leaves = [mg.Tensor(v, requires_grad=True) for v in (*FAMILIES[name], 0.0, 1.0)]
    getattr(stats, name).logpdf(x, *leaves).sum().backward()
    assert all(not np.any(leaf.grad) for leaf in (x, *leaves))


def test_poisson() -> None:
    k = np.array([-1, 0, 3, 2.5, 400, np.nan])
    mu = mg.Tensor([1.5, 0.0, 2.0, 2.0, 380.0, 2.0], requires_grad=True)
    for method in ("pmf", "logpmf", "cdf", "sf", "logcdf", "logsf"):
        found = getattr(stats.poisson, method)(k, mu)
        wanted = getattr(scipy.stats.poisson, method)(k, mu.numpy())
        np.testing.assert_allclose(found.data, wanted, rtol=1e-12)
    found = mg.grad(stats.poisson.logpmf(k, mu).sum(), mu)[0].data
    np.testing.assert_allclose(found, [0, -1, 0.5, 0, 400 / 380 - 1, np.nan], rtol=1e-12)
    assert np.isnan(stats.poisson.pmf(1, -1.0))


def test_signatures_and_names_are_scipys() -> None:
    assert np.isclose(stats.norm.logpdf(1.0, 2.0, 3.0), scipy.stats.norm.logpdf(1.0, 2.0, 3.0))
    assert np.isclose(stats.gamma.logpdf(1.0, a=2.0, scale=3.0), scipy.stats.gamma.logpdf(1.0, a=2.0, scale=3.0))
    with pytest.raises(CallError, match=r"t\.logpdf\(x, df, loc=0\.0, scale=1\.0\)"):
        stats.t.logpdf(1.0)
    with pytest.raises(AttributeError, match=r"norm has .*logpdf.*, not rvs"):
        _ = stats.norm.rvs


def test_dirichlet() -> None:
    rng = np.random.default_rng(0)
    alpha = np.array([0.5, 1.0, 3.0])
    x = rng.dirichlet(alpha, 4).T
    np.testing.assert_allclose(stats.dirichlet.logpdf(x, alpha), scipy.stats.dirichlet.logpdf(x, alpha), rtol=1e-13)
    np.testing.assert_allclose(
        stats.dirichlet.logpdf(x[:-1, 0], alpha), scipy.stats.dirichlet.logpdf(x[:-1, 0], alpha), rtol=1e-13
    )
    for check in (mg.gradcheck, mg.gradgradcheck):
        assert check(stats.dirichlet.logpdf, [x, alpha])
    with pytest.raises(ArgumentError, match="x on the simplex"):
        stats.dirichlet.logpdf(np.array([0.5, 0.6, 0.1]), alpha)
    with pytest.raises(ShapeError, match="components along the first axis"):
        stats.dirichlet.logpdf(x.T, alpha)


SPREAD = np.array([[2.0, 0.3, -0.4], [0.3, 1.5, 0.2], [-0.4, 0.2, 0.7]])


@pytest.mark.parametrize("cov", [SPREAD, np.array([0.5, 1.0, 2.0]), 1.7], ids=["matrix", "variances", "number"])
def test_multivariate_normal(cov: Any) -> None:
    rng = np.random.default_rng(1)
    x, mean = rng.normal(size=(2, 4, 3)), rng.normal(size=3)
    ours, theirs = stats.multivariate_normal.logpdf, scipy.stats.multivariate_normal.logpdf
    np.testing.assert_allclose(ours(x, mean, cov), theirs(x, mean, cov), rtol=1e-12)
    np.testing.assert_allclose(ours(x[0, 0]), theirs(x[0, 0], np.zeros(3)), rtol=1e-12)
    for check in (mg.gradcheck, mg.gradgradcheck):
        assert check(ours, [x[0], mean, np.asarray(cov)])


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.cpu_only("SciPy beside it")
def test_multivariate_normal_of_lower_rank(rank: int) -> None:
    """The density of the space that cov spans: SciPy's; by x and mean that of the coordinates in the space."""
    rng = np.random.default_rng(2)
    root = rng.normal(size=(3, rank))
    cov, inside = root @ root.T, rng.normal(size=(4, rank)) @ root.T
    ours, theirs = stats.multivariate_normal, scipy.stats.multivariate_normal
    off = np.vstack([inside, inside[:1] + rng.normal(size=3)])
    for name in ("logpdf", "pdf"):
        found = getattr(ours, name)(off, None, cov, allow_singular=True)
        np.testing.assert_allclose(found, getattr(theirs, name)(off, None, cov, allow_singular=True), rtol=1e-9)
        assert rank == 3 or found[-1] == (-np.inf if name == "logpdf" else 0)
    x, mean = mg.Tensor(inside, requires_grad=True), mg.Tensor(np.zeros(3), requires_grad=True)
    ours.logpdf(x, mean, cov, True).sum().backward()
    np.testing.assert_allclose(x.grad, -inside @ np.linalg.pinv(cov, rcond=1e-10), atol=1e-8)
    np.testing.assert_allclose(mean.grad, -x.grad.sum(0), rtol=1e-12)
    within = lambda z, m: ours.logpdf(z @ root.T, m @ root.T, cov, True)
    for check in (mg.gradcheck, mg.gradgradcheck):
        assert check(within, [rng.normal(size=(2, rank)), rng.normal(size=rank)])
    if rank < 3:
        with pytest.raises(np.linalg.LinAlgError, match="for a gradient by it"):
            ours.logpdf(inside, None, mg.Tensor(cov, requires_grad=True), True)
    else:
        assert mg.gradcheck(lambda a: ours.logpdf(inside, None, a @ a.T, True), [root])


def test_multivariate_normal_refuses() -> None:
    ours = stats.multivariate_normal.logpdf
    with pytest.raises(np.linalg.LinAlgError):
        ours(np.ones(2), np.zeros(2), -np.eye(2))
    with pytest.raises(ShapeError, match="k is the dimension"):
        ours(np.ones(3), np.zeros(2), np.eye(2))
