"""Every elementwise operation, its first and its second derivative, to the last digits over the whole range of a float.

Nothing here names an operation, apart from tables of exceptions: whoever registers one gets these tests, and is asked
for its formula (``FORMULAS`` in ``tests/support/exact.py``). ``HYPOTHESIS_PROFILE=deep`` takes thirty times the points;
``python benchmarks/accuracy.py`` writes ``docs/accuracy.md`` from the same.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
from hypothesis import settings
from mpmath import mp
from support import exact, exact_special
from support.cases import LACKING
from support.exact import CASES, LIMITS, measure

import minigrad as mg

JUDGED = [
    pytest.param(case, marks=[pytest.mark.cpu_only("CuPy has no such function")] * (case.name in LACKING))
    for case in CASES
]
COUNT = 1500 if settings.default.max_examples > 1000 else 40
UNITS = 4.0


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", JUDGED, ids=str)
def test_within_four_units(case, dtype) -> None:
    """Value and derivatives are within 4 units in the last place of the formula, or within the limit that is explained.

    Units beyond what half a unit of the arguments explains, wherever value and derivative are normal numbers.
    """
    for order, found in enumerate(measure(case, dtype, COUNT)):
        assert found.units <= LIMITS.get((case.title, order), (UNITS, ""))[0], (order, found)


@pytest.mark.cpu_only("CuPy's values are its own")
@pytest.mark.parametrize("title", exact_special.OWN)
def test_a_limit_of_scipys_own_error_is_that(title) -> None:
    """The value is SciPy's, bit for bit, and over many points the limit a small multiple of its error.

    That is large at rare points, so a factor of five is left.
    """
    case = next(case for case in CASES if case.title == title)
    found = []
    for dtype in (np.float64, np.float32):
        inputs = exact.points(title, dtype, COUNT, case.arguments)
        with np.errstate(all="ignore"):
            theirs = getattr(scipy.special, case.name)(*exact_special.LEADING.get(title, ()), *inputs).astype(dtype)
        np.testing.assert_array_equal(case(*inputs), theirs)
        if COUNT > 1000:
            found.append(exact.worst(title, (0,) * case.arguments, inputs, theirs).units)
    assert not found or LIMITS[title, 0][0] <= 5 * max(found)


def test_every_elementwise_operation_has_a_formula() -> None:
    """Whoever registers an elementwise operation says what it is, in tests/support/exact.py."""
    registered = {
        name
        for name, operation in mg.REGISTRY.items()
        if getattr(operation, "elementwise", False) and operation.function.__module__.startswith("minigrad")
    }
    assert registered == {case.name for case in CASES} | exact.WITHOUT_FORMULA


def test_the_oracle_can_fail() -> None:
    """1 - tanh² in place of the slope of tanh is found at once."""
    case = next(case for case in CASES if case.title == "tanh")
    inputs = exact.points("tanh", np.float64, 200, 1)
    assert exact.worst("tanh", (1,), inputs, 1 - np.tanh(inputs[0]) ** 2).units > 1e12
    assert exact.worst("tanh", (1,), inputs, case.numbers(inputs)[(1,)]).units < UNITS


# ---- the tails, by numbers ------------------------------------------------------------------------------------------


def slopes(function, *values, dtype=np.float64, upstream=1.0):
    leaves = [mg.Tensor(np.array(v, dtype), requires_grad=True) for v in values]
    out = function(*leaves)
    out.backward(np.full(out.shape, upstream, dtype))
    return [leaf.grad for leaf in leaves]


def second(function, value):
    x = mg.Tensor(value, requires_grad=True)
    (first,) = mg.grad(function(x), x, create_graph=True)
    return mg.grad(first, x)[0].data


TAILS = [  # beside the numbers of mpmath: how many units in the last place a slope may be off
    ("expm1", -40.0, np.float64, 2),
    ("expm1", -17.0, np.float32, 2),
    ("sigmoid", 40.0, np.float64, 2),
    ("tanh", -9.010913848876953, np.float32, 4),
    ("tanh", 20.0, np.float64, 4),
    ("arcsin", 0.999982496, np.float64, 2),
    ("arccos", 0.999982496, np.float64, 2),
    ("arctanh", 1 - 2.0**-50, np.float64, 2),
    ("arccosh", 1 + 2.0**-50, np.float64, 2),
    ("gelu", -7.80784225, np.float32, 60),  # what half a unit of x makes of e^(-x²/2)
]


@pytest.mark.parametrize(("name", "at", "dtype", "units"), TAILS)
def test_slopes_in_the_tails(name, at, dtype, units) -> None:
    at = float(dtype(at))
    (slope,) = slopes(mg.REGISTRY[name], at, dtype=dtype)
    right = float(exact.exact(name, (1,), (at,)))
    assert abs(float(slope) - right) <= units * np.spacing(dtype(abs(right)))


@pytest.mark.parametrize(
    ("function", "at", "right"),
    [
        (mg.sigmoid, 40.0, -4.248354255291589e-18),
        (lambda x: -mg.softplus(-x), -37.42994775023705, -5.551115123125783e-17),
        (lambda x: -mg.softplus(-x), 37.42994775023705, -5.551115123125783e-17),
    ],
)
def test_second_derivatives_in_the_tails(function, at, right) -> None:
    np.testing.assert_allclose(second(function, at), right, rtol=1e-14)


@pytest.mark.parametrize(
    ("function", "points", "right"),
    [
        (mg.hypot, (3e30, 4e30), (6e9, 8e9)),
        (mg.arctan2, (3e30, 4e30), (1.6e-21, -1.2e-21)),
        (mg.arctan2, (3e-30, 4e-30), (np.inf, -np.inf)),
        (mg.divide, (3e30, 4e30), (2.5e-21, -1.875e-21)),
        (mg.reciprocal, (3e14,), (-1.1111111e-19,)),
    ],
)
def test_a_large_upstream_gradient_does_not_overflow(function, points, right) -> None:
    with np.errstate(over="ignore"):
        found = slopes(function, *points, dtype=np.float32, upstream=1e10)
    np.testing.assert_allclose(found, right, rtol=1e-6)


@pytest.mark.parametrize(("x", "y"), [(np.nextafter(3.0, 0.0), 1.0), (np.nextafter(21.0, 0.0) / 10, 0.7)])
def test_a_quotient_just_below_a_whole_number_is_not_rounded_up(x, y) -> None:
    whole = [int(x // y)] if np.fmod(x, y) else []
    for function in (mg.fmod, mg.remainder):
        assert -slopes(function, x, y)[1] == np.round((x - np.fmod(x, y)) / y) and whole


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("dtype", "gap"), [(np.float64, 40.0), (np.float32, 18.0), (np.float64, 3.0)])
def test_gradient_beside_a_probability_of_one(name, dtype, gap) -> None:
    """p (1 - p) of the entry that has all the weight, and of the other: as large, with the other sign."""
    x = mg.Tensor(np.array([[gap, 0.0], [0.0, gap]], dtype), requires_grad=True)
    getattr(mg, name)(x)[0, 0].backward()
    rest = np.exp(-gap) / (1 + np.exp(-gap))
    right = rest * (1 - rest) if name == "softmax" else rest
    np.testing.assert_allclose(x.grad, [[right, -right], [0, 0]], rtol=8 * np.finfo(dtype).eps)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("row", [[40.0, 0.0, 1.0], [35.0, 0.0, -20.0], [5.0, -2.0, 0.0], [0.3, -2.0, 0.0]], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cross_entropy"])
def test_second_derivatives_beside_a_probability_of_one(name, row, at) -> None:
    """p_at ((δ_i - p_i)(δ_j - p_j) - p_i (δ_ij - p_j)), and -p_i (δ_ij - p_j) of the logarithm, in 300 bits."""
    x = mg.Tensor(np.array(row), requires_grad=True)
    operation = mg.REGISTRY[name]
    out = operation(x[None], np.array([at])) if name == "cross_entropy" else operation(x)[at]
    (first,) = mg.grad(out, x, create_graph=True)
    found = np.array([mg.grad(first[i], x, retain_graph=True)[0].data for i in range(3)])
    with mp.workprec(300):
        e = [mp.exp(mp.mpf(v)) for v in row]
        p, one = [v / sum(e) for v in e], np.eye(3, dtype=int).tolist()
        spread = [[p[i] * (one[i][j] - p[j]) for j in range(3)] for i in range(3)]
        if name == "softmax":
            turned = [[(one[at][i] - p[i]) * (one[at][j] - p[j]) - spread[i][j] for j in range(3)] for i in range(3)]
            right = np.array([[float(p[at] * v) for v in line] for line in turned])
        else:
            right = np.array([[float(v) for v in line] for line in spread]) * (1 if name == "cross_entropy" else -1)
    np.testing.assert_allclose(found, right, rtol=1e-14)


# ---- fused kernels beside their definition in float64 ----------------------------------------------------------------


IDS = np.arange(64) % 16
PICKED = (np.arange(16) == IDS[:, None]).astype(float)
EACH, ROW = (
    False,
    True,
)  # what the error is measured by: each number, where all terms have one sign, or the row's largest
KERNELS = {
    "softmax": (1, PICKED, EACH, lambda op, x: op(x)),
    "log_softmax": (1, PICKED, EACH, lambda op, x: op(x)),
    "cross_entropy": (1, np.ones(64), EACH, lambda op, x: op(x, IDS, reduction="none")),
    "layer_norm": (1, PICKED, ROW, lambda op, x: op(x)),
    "rms_norm": (1, PICKED, ROW, lambda op, x: op(x)),
    "attention": (3, PICKED, ROW, lambda op, q, k, v: op(q, k, v)),
}


def differentiated(function, arrays, upstream):
    leaves = [mg.Tensor(a, requires_grad=True) for a in arrays]
    out = function(*leaves)
    out.backward(upstream.astype(out.dtype))
    return [out.data, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_in_the_tails(name) -> None:
    """In float32, over rows one entry of which has nearly all weight: what the definition gives in float64.

    Of e^-d, d up to 40, half a unit of d makes 40 · 2⁻²⁴ = 2.4e-6; the limit is four times that. A logarithm near 0 is
    a difference of numbers up to 40: that much of them may be left.
    """
    count, upstream, by_row, call = KERNELS[name]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(64, 16)).astype(np.float32) for _ in range(count)]
    if name in ("softmax", "log_softmax", "cross_entropy"):
        arrays[0][np.arange(64), IDS] += np.linspace(0, 18, 64, dtype=np.float32)
    operation = mg.REGISTRY[name]
    found = differentiated(lambda *a: call(operation, *a), arrays, upstream)
    right = differentiated(lambda *a: call(operation.definition, *a), [a.astype(float) for a in arrays], upstream)
    for place, (ours, wanted) in enumerate(zip(found, right, strict=True)):
        assert ours.dtype == np.float32
        scale = np.abs(wanted).max(-1, keepdims=True) if by_row else np.abs(wanted)
        least = 40 * 2.0**-24 if place == 0 and name in ("log_softmax", "cross_entropy") else 0
        assert (np.abs(ours - wanted) <= 1e-5 * scale + least).all()


def test_cross_entropy_of_a_sure_answer() -> None:
    """The gradient of the target's logit is minus the probability that is left, however small."""
    x = mg.Tensor(np.array([[30.0, 0.0, 1.0], [0.0, 3.0, 0.0]], np.float32), requires_grad=True)
    mg.REGISTRY["cross_entropy"](x, np.array([0, 1]), reduction="sum").backward()
    rest = np.array([np.exp(-30.0) + np.exp(-29.0), 2 * np.exp(-3.0) / (1 + 2 * np.exp(-3.0))])
    np.testing.assert_allclose([-x.grad[0, 0], -x.grad[1, 1]], rest, rtol=1e-6)
