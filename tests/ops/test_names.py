"""What NumPy's further names promise beyond the generated tests: lists with tensors, aliases, constants, ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.errors import ArgumentError, CallError, DTypeError, ShapeError
from minigrad.ops.aliases import ALIASES

X = np.array([0.7, 1.3, 0.4])


def leaf(x: Any = X, dtype: Any = None) -> mg.Tensor:
    return mg.Tensor(x, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_original(alias: str) -> None:
    """So its tests are those of the original; and NumPy has the name, with the same numbers."""
    assert getattr(mg, alias) is getattr(mg, ALIASES[alias])
    assert alias in mg.__all__
    theirs = getattr(np, alias)
    arguments = {"concat": ([X, X],), "acosh": (X + 1,)}.get(alias, (X / 2, X)[: getattr(theirs, "nin", 1)])
    np.testing.assert_allclose(getattr(mg, alias)(*arguments), theirs(*arguments), rtol=1e-14)


# ---- lists with tensors in them -------------------------------------------------------------------------------------

LISTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {  # of a tensor x, and of an array
    "array": (lambda x: mg.array([[x[0], 2.0], [x[1] * x[2], 0]]), lambda x: [[x[0], 2], [x[1] * x[2], 0]]),
    "asarray": (lambda x: mg.asarray([x[0], x[2]]), lambda x: [x[0], x[2]]),
    "array of rows": (lambda x: mg.array([x, x * 2, mg.asarray(X)]), lambda x: [x, x * 2, X]),
    "stack of lists": (lambda x: mg.stack([[x[0], x[1]], [x[2], 1.0]], 1), lambda x: [[x[0], x[2]], [x[1], 1.0]]),
    "concatenate of lists": (lambda x: mg.concatenate([[x[0], x[1]], x]), lambda x: [x[0], x[1], *x]),
    "mean": (lambda x: mg.mean([x[0], x[1]]), lambda x: np.mean(x[:2])),
    "std": (lambda x: mg.std([x[0], x[1], x[2]]), np.std),
    "var": (lambda x: mg.var([x, 3 * x], 0), lambda x: np.var([x, 3 * x], 0)),
    "norm": (lambda x: mg.norm([x, x]), lambda x: np.sqrt(2) * np.linalg.norm(x)),
    "norm of linalg": (lambda x: mg.linalg.norm([x[0], x[1]]), lambda x: np.hypot(x[0], x[1])),
    "outer of linalg": (lambda x: mg.linalg.outer([x[0], x[1]], [x[2], 1]), lambda x: np.outer(x[:2], [x[2], 1])),
    "quantile": (lambda x: mg.quantile(X, [x[0] / 2, x[2]]), lambda x: np.quantile(X, [x[0] / 2, x[2]])),
    "norm.logpdf": (
        lambda x: mg.stats.norm.logpdf([x[0], 1.0], x[1]),
        lambda x: -((np.array([x[0], 1]) - x[1]) ** 2 + np.log(2 * np.pi)) / 2,
    ),
    "multivariate_normal": (
        lambda x: mg.stats.multivariate_normal.logpdf([x[0], 1.0], [x[1], 0.0], [[1.0, 0.0], [0.0, x[2]]]),
        lambda x: -((x[0] - x[1]) ** 2 + 1 / x[2] + np.log(x[2])) / 2 - np.log(2 * np.pi),
    ),
    "dirichlet": (  # of two components, a beta distribution
        lambda x: mg.stats.dirichlet.logpdf([0.4, 0.6], [x[0] + 1, 1.0]),
        lambda x: x[0] * np.log(0.4) + np.log(x[0] + 1),
    ),
    "sum in places": (lambda x: mg.sum([x, x], 0), lambda x: x + x),
    "exp": (lambda x: mg.exp([x[0], 1.0]), lambda x: np.exp([x[0], 1.0])),
    "dot": (lambda x: mg.dot([x[0], x[1]], [x[1], x[2]]), lambda x: x[0] * x[1] + x[1] * x[2]),
    "hstack": (lambda x: mg.hstack([x[0], x]), lambda x: [x[0], *x]),
    "beside a tensor": (lambda x: mg.add(x, [x[0], 1.0, x[2]]), lambda x: x + np.array([x[0], 1.0, x[2]])),
}


@pytest.mark.parametrize("form", LISTS)
def test_a_list_with_tensors_keeps_the_graph(form: str) -> None:
    ours, theirs = LISTS[form]
    x = leaf()
    out, wanted = ours(x), np.array(theirs(X), dtype=float)
    assert isinstance(out, mg.Tensor)
    np.testing.assert_allclose(out.data, wanted, rtol=1e-14)
    up = np.cos(np.arange(wanted.size)).reshape(wanted.shape)
    out.backward(up)
    for place in range(3):
        step = 1e-6 * np.eye(3)[place]
        slope = (up * (np.array(theirs(X + step)) - np.array(theirs(X - step)))).sum() / 2e-6
        np.testing.assert_allclose(x.grad[place], slope, atol=1e-8)


def test_lists_of_constants_and_wrong_lists() -> None:
    assert isinstance(mg.mean([mg.Tensor(1.0), mg.Tensor(2.0)]), mg.Tensor)
    assert mg.array([leaf(1.0, "float32"), 1.0]).dtype == np.float32  # a Python number widens nothing
    assert mg.array([leaf(1.0, "float32"), np.float64(1)]).dtype == np.float64
    with pytest.raises(ShapeError, match="equal lengths"):
        mg.array([[leaf(1.0)], [1.0, 2.0]])
    with pytest.raises(ShapeError, match="one shape"):
        mg.array([leaf(), 1.0])
    with pytest.raises(DTypeError):
        mg.array([leaf(1.0), "a"])
    with pytest.raises(DTypeError, match=r"minigrad\.array"):
        mg.Tensor([leaf(1.0), 1.0])  # a leaf of its own would cut the graph


def test_array_copies_and_adds_axes() -> None:
    given = mg.ones(2)
    mg.array(given).data[0] = 3.0
    assert given.tolist() == [1, 1]
    mg.array(given, copy=False).data[0] = 3.0
    assert given.tolist() == [3, 1]
    assert mg.array(2, ndmin=2).shape == (1, 1)
    assert mg.array([1, 2], "float32").dtype == np.float32
    x = leaf()
    mg.array(x, ndmin=2).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


# ---- constants ------------------------------------------------------------------------------------------------------


def test_constants_take_shape_dtype_and_place() -> None:
    x = leaf(np.ones((2, 3), np.float32))
    assert mg.zeros_like(x).dtype == np.float32
    assert mg.ones_like(x, "int64", (2,)).tolist() == [1, 1]
    assert mg.full_like([1, 2], 7).tolist() == [7, 7]
    assert not mg.zeros_like(x).requires_grad
    v = leaf(2.0)
    (mg.full((2, 3), v) * mg.full_like(np.ones(3), v)).sum().backward()
    assert v.grad == 6 * 2 * 2
    assert mg.full(2, v).dtype == mg.full(2, v.detach()).dtype == np.float64  # recorded or not
    assert mg.full(2, 1.0).dtype == np.float32


@pytest.mark.parametrize("options", [{}, {"endpoint": False}, {"num": 1}, {"num": 0}, {"dtype": "float32"}])
def test_linspace_of_numbers_is_numpys(options: dict[str, Any]) -> None:
    ours, theirs = mg.linspace(-1, 3.5, **{"num": 7, **options}), np.linspace(-1, 3.5, **{"num": 7, **options})
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours.data, theirs)


@pytest.mark.parametrize("axis", [0, -1])
def test_linspace_has_derivatives(axis: int) -> None:
    a, b = leaf(X[:2]), leaf(X[1:] + 1)
    out = mg.linspace(a, b, 5, axis=axis)
    np.testing.assert_allclose(out.data, np.linspace(X[:2], X[1:] + 1, 5, axis=axis), rtol=1e-14)
    share = np.linspace(0, 1, 5)
    up = share.reshape((5, 1) if axis == 0 else (1, 5)) * np.ones(out.shape)
    out.backward(up)
    np.testing.assert_allclose(a.grad, np.full(2, (share * (1 - share)).sum()), rtol=1e-14)
    np.testing.assert_allclose(b.grad, np.full(2, (share * share).sum()), rtol=1e-14)


# ---- what samples don't reach ---------------------------------------------------------------------------------------


def test_quantiles_are_numpys_and_have_a_slope_by_q() -> None:
    x = np.random.default_rng(0).normal(size=(3, 4, 5))
    for axis in (None, 1, (0, -1)):
        for keepdims in (False, True):
            np.testing.assert_allclose(
                mg.quantile(x, [0.1, 0.5], axis, keepdims), np.quantile(x, [0.1, 0.5], axis, keepdims=keepdims)
            )
            np.testing.assert_allclose(mg.median(x, axis, keepdims), np.median(x, axis, keepdims=keepdims), rtol=1e-15)
    q = leaf(np.array([0.1, 0.6]))
    mg.quantile(np.array([1.0, 2.0, 5.0]), q).sum().backward()
    assert q.grad.tolist() == [2.0, 6.0]  # two pieces, over half of the range each
    assert np.isnan(mg.median(np.array([1.0, np.nan])))
    with pytest.raises(ArgumentError, match="percentile"):
        mg.quantile(x, 50)


@pytest.mark.parametrize("name", ["cumulative_sum", "cumulative_prod"])
def test_a_cumulated_array_of_several_axes_needs_one(name: str) -> None:
    ours = getattr(mg, name)
    assert ours(3.0).tolist() == [3.0]
    with pytest.raises(ArgumentError, match="the axis"):
        ours(np.ones((2, 3)))
    first = {"cumulative_sum": 0.0, "cumulative_prod": 1.0}[name]
    assert ours(np.ones((2, 0)), axis=-1, include_initial=True).tolist() == [[first]] * 2
    if hasattr(np, name):  # since NumPy 2.1
        x = leaf()
        out = getattr(np, name)(x, axis=0, include_initial=True)
        assert out.tolist() == getattr(np, name)(X, include_initial=True).tolist()
        out.sum().backward()
        np.testing.assert_allclose(
            x.grad, [3, 2, 1] if first == 0 else [1 + 1.3 + 1.3 * 0.4, 0.7 + 0.7 * 0.4, 0.7 * 1.3]
        )


def test_interp_is_numpys_at_and_between_knots() -> None:
    xp, fp = np.array([0.0, 1.0, 3.0]), np.array([2.0, -1.0, 5.0])
    at = np.array([-1.0, 0.0, 0.25, 1.0, 2.0, 3.0, 4.0])
    for options in ({}, {"left": 9.0, "right": -9.0}, {"period": 2.5}):
        np.testing.assert_allclose(mg.interp(at, xp, fp, **options), np.interp(at, xp, fp, **options), rtol=1e-15)
    x, knots, heights = leaf(np.array([0.25])), leaf(xp), leaf(fp)
    mg.interp(x, knots, heights).sum().backward()
    assert (x.grad.tolist(), heights.grad.tolist()) == ([-3.0], [0.75, 0.25, 0.0])
    assert knots.grad.tolist() == [2.25, 0.75, 0.0]


@pytest.mark.parametrize("form", ["nanmax", "nanmin", "median", "quantile"])
def test_what_is_left_out_takes_no_share_of_an_infinite_extreme(form: str) -> None:
    """Two equal elements share; before, so did those that are NaN or above the rank, which counted as -inf."""
    operation, sign = {
        "nanmax": (mg.nanmax, 1),
        "nanmin": (mg.nanmin, -1),
        "median": (lambda x, axis: mg.median(x, axis), 1),
        "quantile": (lambda x, axis: mg.quantile(x, 0.25, axis), 1),
    }[form]
    other = np.nan if form.startswith("nan") else 7.0
    x = leaf(sign * np.array([[-np.inf, other, -np.inf, -np.inf, other], [1.0, 2.0, 0.0, -np.inf, np.inf]]))
    out = operation(x, 1)
    out.backward(np.ones(2))
    assert out.data[0] == sign * -np.inf
    np.testing.assert_allclose(x.grad[0], [1 / 3, 0, 1 / 3, 1 / 3, 0], rtol=1e-15)
    assert sorted(x.grad[1].tolist()) == [0, 0, 0, 0, 1]


def test_interp_has_finite_slopes_at_equal_knots_and_far_out() -> None:
    x, knots, heights = (leaf(np.array(v)) for v in ([0.5, 1.0, np.inf, -np.inf], [0.0, 1.0, 1.0], [1.0, 2.0, 4.0]))
    out = mg.interp(x, knots, heights)
    out.backward(np.ones(4))
    np.testing.assert_array_equal(out.data, np.interp(x.data, knots.data, heights.data))
    assert (x.grad.tolist(), heights.grad.tolist()) == ([1.0, 0.0, 0.0, 0.0], [1.5, 0.5, 2.0])
    assert knots.grad.tolist() == [-0.5, -0.5, 0.0]


POINTS = [([0.0, 1.0, 2.0], [1.0, np.inf, 3.0]), ([-np.inf, 1.0, 2.0], [1.0, 2.0, 3.0]), ([0, 1, np.inf], [1, 2, 3])]


@pytest.mark.parametrize(("xp", "fp"), POINTS)
def test_interp_between_infinite_points_is_numpys(xp: Any, fp: Any) -> None:
    x = np.array([-np.inf, 0.0, 0.5, 1.0, 1.5, 2.0, np.nan])
    np.testing.assert_array_equal(mg.interp(x, xp, fp), np.interp(x, xp, fp))


def test_averages_of_small_numbers_do_not_leave_their_range() -> None:
    """Products, sums and differences of int8, uint8, bool and float16; NumPy wraps some of them around."""
    many = np.full(3, 100, np.int8)
    assert mg.average(many, weights=many) == 100.0
    half = mg.average(np.full(3, 300, np.float16), weights=np.full(3, 300, np.float16))
    assert half == 300 and half.dtype == np.float16
    spread = np.tile(np.array([150, -150], np.float16), 20)
    assert mg.cov(spread) == np.float16(np.cov(spread))
    down = np.array([3, 2, 1], np.uint8)
    assert mg.gradient(X, down).tolist() == mg.gradient(X, down.astype(float)).tolist()
    assert mg.trapezoid(np.full(2, 200, np.uint8)) == 200.0 and mg.trapezoid(np.ones(3), down) == -2.0
    assert mg.trapezoid(np.array([True, True])) == 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda x: mg.where(x > 1, x, 300),
        lambda x: mg.where(x > 1, -200, x),
        lambda x: mg.masked_fill(x, x > 1, 300),
        lambda x: mg.select([x > 1], [x], 300),
        lambda x: mg.array([x[0], 300]),
        lambda x: mg.array([x, [1, -300]]),
    ],
)
def test_an_integer_that_the_dtype_does_not_hold_is_refused(call: Any) -> None:
    with pytest.raises(ArgumentError, match="holds"):
        call(mg.tensor([1, 2], dtype="int8"))


def test_correlations_are_at_most_one() -> None:
    x = np.random.default_rng(1).normal(size=(40, 9))
    found = mg.corrcoef(np.vstack([x, 3.3 * x, -0.7 * x]))
    assert abs(found).max() == 1.0
    np.testing.assert_allclose(found, np.corrcoef(np.vstack([x, 3.3 * x, -0.7 * x])), atol=1e-14)


def test_refusals_say_what_is_wrong() -> None:
    for call, kind in (
        (lambda: mg.select([X > 1], [X, X]), ArgumentError),
        (lambda: mg.select([X], [X]), ArgumentError),
        (lambda: mg.average(X, weights=[1.0, 2.0]), ShapeError),
        (lambda: mg.average(X, weights=[1.0, -1.0, 0.0]), ArgumentError),
        (lambda: mg.cross([1.0, 2.0], [1.0, 2.0]), ShapeError),
        (lambda: mg.convolve(X, X, "best"), ArgumentError),
        (lambda: mg.correlate(X, 2.0), ShapeError),
        (lambda: mg.interp(X, X[:0], X[:0]), ShapeError),
        (lambda: mg.gradient(X, edge_order=3), ArgumentError),
        (lambda: mg.vsplit(X, 3), ShapeError),
        (lambda: mg.diff(X, -1), ArgumentError),
        (lambda: mg.stats.multivariate_normal.logpdf(X, X, -np.eye(3), True), ArgumentError),
        (lambda: mg.r_["r", X], ArgumentError),
        (lambda: mg.c_[X, X[:2]], ShapeError),
        (lambda: mg.hstack(X, X), CallError),
    ):
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.hint


@pytest.mark.parametrize("key", [
    np.s_[X, 1.0, X], np.s_[X], np.s_[1:4, X, 0:1:5j, 2], np.s_["0,2", X, X], np.s_["0,2,0", X, [4.0, 5.0, 6.0]],
    np.s_["1,2", X, X], np.s_["-1", np.ones((2, 2)), np.zeros((2, 1))], np.s_["0,2,-1", X, X],
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["r_", "c_"])
def test_joined_by_index_as_in_numpy(name: str, key: Any) -> None:
    """The parts are joined as NumPy joins them, and each element's gradient is the sum over its places."""
    try:
        expected = getattr(np, name)[key]
    except (ValueError, np.exceptions.AxisError):
        pytest.skip("NumPy refuses it")
    parts = key if isinstance(key, tuple) else (key,)
    x, u = leaf(X), np.random.default_rng(0).normal(size=expected.shape)
    made = getattr(mg, name)[tuple(x if part is X else part for part in parts)]
    np.testing.assert_array_equal(mg.asarray(made).numpy(), expected)
    if all(part is not X for part in parts):
        return
    marks = getattr(np, name)[tuple(np.array([10.0, 20.0, 30.0]) if p is X else np.zeros(np.shape(p)) if not
                                    isinstance(p, str | slice) else p for p in parts)]  # fmt: skip
    (made * u).sum().backward()
    np.testing.assert_allclose(x.grad, [u[marks == mark].sum() for mark in (10.0, 20.0, 30.0)])


def test_a_number_joined_by_index_widens_nothing() -> None:
    x = leaf(X.astype(np.float32))
    assert mg.r_[x, 2.0, 1].dtype == mg.c_[x, x].dtype == np.float32


def test_densities_of_vectors_are_scipys() -> None:
    scipy = pytest.importorskip("scipy.stats")
    cov = np.array([[2.0, 0.3], [0.3, 1.0]])
    ours, theirs = mg.stats.multivariate_normal, scipy.multivariate_normal
    np.testing.assert_allclose(ours.pdf(X[:2], X[1:], cov), theirs.pdf(X[:2], X[1:], cov), rtol=1e-14)
    np.testing.assert_allclose(ours.entropy(X[:2], cov), theirs.entropy(X[:2], cov), rtol=1e-14)
    share, alpha = np.array([0.3, 0.7]), np.array([1.5, 2.0])
    np.testing.assert_allclose(mg.stats.dirichlet.pdf(share, alpha), scipy.dirichlet.pdf(share, alpha), rtol=1e-13)
    assert mg.gradcheck(lambda a: ours.entropy(None, a @ a.T), [cov])
    assert mg.gradcheck(lambda x, a: ours.pdf(x, None, a @ a.T), [X[:2], cov])


def test_sinc_is_exact_at_whole_numbers() -> None:
    """π times a large number is rounded; the number is reduced first."""
    assert mg.sinc(np.array([1.0, -7.0, 1e15])).tolist() == [0.0, 0.0, 0.0]
    x = leaf(np.array([0.0, 1.0, 2.0]))
    (first,) = mg.grad(mg.sinc(x).sum(), x, create_graph=True)
    np.testing.assert_allclose(first.data, [0.0, -1.0, 0.5], atol=1e-15)
    (second,) = mg.grad(first.sum(), x)
    np.testing.assert_allclose(second.data, [-(np.pi**2) / 3, 2.0, -0.5], rtol=1e-14)
