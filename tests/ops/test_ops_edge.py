"""Known faults of comparable libraries, each with its number, and the kind that each is an instance of."""

import math

import numpy as np
import pytest

import minigrad as mg
import nn.functional as F
from minigrad.backend import is_array
from minigrad.errors import DTypeError, IndexRangeError, NonFiniteError, ShapeError

HALF = np.float16
A = [[1.0, 2.0], [3.0, 4.0]]


def arange(start, stop, *shape):
    return np.arange(start, stop, dtype=float).reshape(shape)


def check(fn, inputs, value, gradients, upstream=None):
    """``fn`` on leaves gives the value, and the gradients of the sum of its results, each in its dtype and shape."""
    leaves = [mg.Tensor(x, requires_grad=True) for x in inputs]
    out = fn(*leaves)
    out.backward(np.ones(out.shape) if upstream is None else np.array(upstream))
    assert is_array(out.data)
    assert out.shape == np.shape(value)
    np.testing.assert_allclose(out.data, value, rtol=1e-12)
    for x, expected in zip(leaves, gradients, strict=True):
        assert is_array(x.grad) and (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)
        np.testing.assert_allclose(x.grad, np.broadcast_to(expected, x.shape), rtol=1e-12, atol=1e-15)


CASES = {
    "1 max": (lambda x: x.max(), [[1.0, 1.0]], 1, [[1 / 2, 1 / 2]]),
    "1 max of a row": (lambda x: x.max(axis=-1), [[[2.0, 2.0, 1.0]]], [2], [[[1 / 2, 1 / 2, 0]]]),
    "1 min": (lambda x: x.min(), [[3.0, 3.0, 3.0]], 3, [[1 / 3, 1 / 3, 1 / 3]]),
    "1 over two axes": (lambda x: x.max(axis=(0, 2)), [np.ones((2, 2, 3))], [1, 1], [1 / 6]),
    "2 near tie": (lambda x: x.max(), [[1, 1.005]], 1.005, [[0, 1]]),
    "2 one step": (lambda x: x.max(), [[1, 1 + 2**-52]], 1 + 2**-52, [[0, 1]]),
    "2 one step of float32": (lambda x: x.max(), [np.float32([1, 1 + 2**-23])], np.float32(1 + 2**-23), [[0, 1]]),
    "2 pair": (lambda x, y: mg.maximum(x, y), [1.0, 1 + 2**-52], 1 + 2**-52, [0, 1]),
    "4 norm": (lambda x: x.norm(), [[0.0, 0.0]], 0, [[0, 0]]),
    "4 rows": (lambda x: x.norm(axis=1), [[[0.0, 0.0], [3.0, 4.0]]], [0, 5], [[[0, 0], [0.6, 0.8]]]),
    "6 one zero": (lambda x: x.prod(), [[2.0, 0.0, 3.0, 4.0]], 0, [[0, 24, 0, 0]]),
    "6 two zeros": (lambda x: x.prod(), [[2.0, 0.0, 0.0, 4.0]], 0, [0]),
    "6 rows": (lambda x: x.prod(axis=1), [[[2.0, 0.0], [0.0, 3.0]]], [0, 0], [[[0, 2], [3, 0]]]),
    "7 one": (lambda x: x.prod(), [[0.0]], 0, [[1]]),
    "7 axis": (lambda x: x.prod(axis=0), [[0.0]], 0, [[1]]),
    "7 keepdims": (lambda x: x.prod(axis=0, keepdims=True), [[0.0]], [0], [[1]]),
    "16 trace": (lambda a: mg.einsum("ii->", a), [A], 5, [np.eye(2)]),
    "16 diagonal": (
        lambda a: mg.einsum("iij->ij", a), [arange(1, 13, 2, 2, 3)],
        [[1, 2, 3], [10, 11, 12]], [np.eye(2)[:, :, None]],
    ),
    "16 lonely": (lambda a, b: mg.einsum("ij,k->i", a, b), [A, [1.0, 2.0]], [9, 21], [3, 10]),
    "16 implicit": (lambda a: mg.einsum("ji", a), [A], np.transpose(A), [1]),
    "16 broadcast": (lambda a, b: mg.einsum("...i,...i", a, b), [np.ones((3, 1, 2)), [[1.0, 2.0]] * 2], [[3, 3]] * 3,
                     [np.broadcast_to([2, 4], (3, 1, 2)), 3]),
    "17 list": (lambda x: x[[0, 0]].sum(), [[5.0, 7.0]], 10, [[2, 0]]),
    "17 take": (lambda x: mg.take(x, [0, 0]).sum(), [[5.0, 7.0]], 10, [[2, 0]]),
    "17 take_along_axis": (lambda x: mg.take_along_axis(x, np.array([0, 0]), 0).sum(), [[5.0, 7.0]], 10, [[2, 0]]),
    "17 embedding": (lambda w: F.embedding(np.array([3, 3, 3]), w), [arange(0, 8, 4, 2)], [[6, 7]] * 3,
                     [[[0, 0], [0, 0], [0, 0], [3, 3]]]),
    "17 two index arrays": (lambda x: x[[0, 0], [1, 1]], [A], [2, 2], [[[0, 2], [0, 0]]]),
    "19 times": (lambda x: x * 2, [np.float32(3)], np.float32(6), [2]),
    "19 sum": (lambda x: (x * x).sum(), [np.float32(3)], np.float32(9), [6]),
    "19 many uses": (lambda x: x + x + x + x * x, [np.float32(3)], np.float32(18), [9]),
    "20 vector matrix": (lambda x, y: x @ y, [[1.0, 2.0], A], [7, 10], [[3, 7], [[1, 1], [2, 2]]]),
    "20 matrix vector": (lambda x, y: x @ y, [A, [1.0, 2.0]], [5, 11], [[[1, 2], [1, 2]], [4, 6]]),
    "20 vectors": (lambda x, y: x @ y, [[1.0, 2.0], [3.0, 4.0]], 11, [[3, 4], [1, 2]]),
    "20 batch": (lambda x, y: x @ y, [arange(0, 8, 2, 2, 2), [1.0, 2.0]], [[2, 8], [14, 20]], [[1, 2], [12, 16]]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_value_and_gradient(case):
    check(*case)


# ---- 3, 5, 8: what the second derivative and the instruments say ----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fn", "at"),
    [
        ("exp", lambda x: mg.where(x <= 0, mg.exp(x), 1 + x), 1000.0),
        ("sqrt", lambda x: mg.where(x == 0, 0, x * mg.sqrt(x)), 0.0),
    ],
)
def test_3_anomalies_of_the_branch_not_taken_are_named(name, fn, at):
    x = mg.Tensor(at, requires_grad=True)
    with np.errstate(all="ignore"), pytest.raises(NonFiniteError, match=name), mg.detect_anomaly():
        fn(x).backward()


@pytest.mark.parametrize(("p", "first", "second"), [(0, 0, 0), (1, 1, 0), (2, 0, 2), (3, 0, 0)])
@pytest.mark.parametrize("kind", [int, float, np.array, mg.Tensor])
def test_5_second_derivative_of_powers_at_zero(p, first, second, kind):
    x = mg.Tensor([0.0, 0.0], requires_grad=True)
    (dx,) = mg.grad((x ** kind(p)).sum(), x, create_graph=True)
    assert dx.tolist() == [first, first]
    if dx.requires_grad:
        (ddx,) = mg.grad(dx.sum(), x, allow_unused=True)
        assert (ddx.tolist() if ddx is not None else [0, 0]) == [second, second]


@pytest.mark.parametrize("fn", [mg.sigmoid, mg.softplus, F.silu, F.gelu, lambda x: F.gelu(x, "tanh"), mg.tanh, mg.erf])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_far_out_nothing_overflows(fn, dtype):
    """±1e4 with every floating-point condition an error, forward, backward and, in float64, second derivative."""
    with np.errstate(all="raise"):
        far = [-1e4, -1, 0, 1, 1e4] if dtype == np.float16 else [-1e4, -50, -1, 0, 1, 50, 1e4]
        x = mg.Tensor(far, dtype=dtype, requires_grad=True)
        fn(x).sum().backward()
        assert np.isfinite(x.grad).all()
        if dtype == np.float64:
            (dx,) = mg.grad(fn(x).sum(), x, create_graph=True)
            (ddx,) = mg.grad(dx.sum(), x)
            assert np.isfinite(ddx.data).all()


# ---- 12, 43: half precision -----------------------------------------------------------------------------------------

ONES = np.ones(4096, HALF)
ACCUMULATED = {
    "sum": (lambda x: x.sum(), 4096),
    "mean": (lambda x: x.mean(), 1),
    "cumsum": (lambda x: x.cumsum()[-1], 4096),
    "dot": (lambda x: x @ x, 4096),
    "einsum": (lambda x: mg.einsum("i,i->", x, x), 4096),
    "tensordot": (lambda x: mg.tensordot(x, x, 1), 4096),
    "norm": (lambda x: x.norm(), 64),
    "norm of order 3": (lambda x: x.norm(3), 16),
    "norm of order 1": (lambda x: x.norm(1), 4096),
    "logsumexp": (lambda x: x.logsumexp(), HALF(1 + math.log(4096))),
    "std": (lambda x: (x * np.where(np.arange(4096) % 2, 400, 402).astype(HALF)).std(), 1),
    "trace": (lambda x: x.trace(), 2100),
    "put": (lambda x: mg.scatter_add(np.zeros(1, HALF), np.zeros(4096, int), x, 0).sum(), 4096),
    "gradient of a sum over rows": (
        lambda x: mg.grad((x.reshape(-1, 1) + mg.Tensor([0], True, HALF)).sum(), x)[0].sum(),
        4096,
    ),
}


@pytest.mark.parametrize("name", ACCUMULATED)
def test_12_half_precision_accumulates_in_float32(name):
    fn, expected = ACCUMULATED[name]
    x = mg.Tensor(np.eye(2100, dtype=HALF) if name == "trace" else ONES, requires_grad=True)
    out = fn(x)
    assert out.dtype == HALF
    assert out.item() == expected


def test_12_gradients_that_sum_over_repeats_accumulate_in_float32():
    bias = mg.Tensor([0.0], requires_grad=True, dtype=HALF)
    (ONES[:, None] + bias).sum().backward()
    assert bias.grad.tolist() == [4096]
    table = mg.Tensor(np.zeros((2, 1)), requires_grad=True, dtype=HALF)
    table[np.zeros(4096, int)].sum().backward()
    assert table.grad.tolist() == [[4096], [0]]


def test_12_large_counts_in_half_precision():
    """70 000 is no float16, as a sum or as a count of ties."""
    ones = mg.Tensor(np.ones(70000, HALF), requires_grad=True)
    assert ones.mean().item() == 1
    assert mg.Tensor(np.full(65536, 4, HALF)).mean().item() == 4
    assert ones.sum().item() == math.inf
    ones.max().backward()
    assert ones.grad.astype(np.float64).sum() == pytest.approx(1, rel=1e-2)  # 1 / 70000 has 8 bits in float16


def test_43_half_precision_products():
    ones = np.ones((8, 64, 64), HALF)
    out = mg.Tensor(ones) @ ones
    assert out.dtype == HALF
    assert (out.data == 64).all()
    a, b = np.random.default_rng(0).random((2, 64, 64)).astype(HALF)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    for found in (mg.matmul(a, b), mg.einsum("ij,jk->ik", a, b), mg.tensordot(a, b, 1)):
        assert np.abs(found / exact - 1).max() <= 2**-10
    with pytest.raises(DTypeError, match="complex64"):
        mg.Tensor(a, dtype="complex64")


# ---- 22: types ------------------------------------------------------------------------------------------------------


def test_22_integers_have_no_gradient():
    with pytest.raises(TypeError, match="floating-point"):
        mg.Tensor([1, 2], requires_grad=True)
    x = mg.Tensor([1.0, 2.0], requires_grad=True)
    assert not mg.argmax(x).requires_grad
    assert not (x > 1).requires_grad
    assert not x.astype("int64").requires_grad
    half = mg.Tensor([1]) / mg.Tensor([2])
    assert (half.tolist(), half.dtype) == ([0.5], np.float64)


def test_python_numbers_never_widen_an_array():
    x = mg.Tensor(np.ones(2, HALF), requires_grad=True)
    for out in (x + 1, 2.0 * x, x**2, x / 3, 1 - x, mg.maximum(x, 0.5), x.clip(0, 1), mg.where(x > 0, x, 0.0), x % 2):
        assert out.dtype == HALF
    assert (x * np.float32(2)).dtype == np.float32
    (x * np.float64(2)).sum().backward()
    assert x.grad.dtype == HALF


@pytest.mark.parametrize("to", ["float16", "float32", "float64"])
def test_casts_pass_the_gradient_on(to):
    x = mg.Tensor(np.float32([1, 2]), requires_grad=True)
    (x.astype(to) ** 2).sum().backward()
    assert (x.grad.tolist(), x.grad.dtype) == ([2, 4], np.float32)


# ---- 41, 42: indices ------------------------------------------------------------------------------------------------

X = np.arange(12.0).reshape(3, 4)
INDICES = [
    1, -1, np.int64(2), slice(None), slice(None, None, -1), slice(2, 0, -1), slice(1, 1), None, ..., (), True, False,
    (..., 0), (None, 1, ..., None), (slice(None, None, 2), slice(None, None, -3)), [0, 0, 2], [], [[0], [1]],
    np.array(1), (np.array([0, 0]), np.array([1, 1])), (np.array([[0], [2]]), np.array([3, 3, 0])),
    (slice(None), [1, 1]),
    ([1, 1], slice(None, None, -1)), (None, [0, 0], ..., [1, 2]), X > 5, (X > 5)[:, 0],
    (slice(None), np.array([True, False, True, True])),
    (np.array([True, False, True]), [1, 1]), np.zeros((0,), int), (1, np.array([2, 2, 2])), np.array([-1, 2]),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=[str(i).replace("\n", "") for i in INDICES])
def test_every_index_of_numpy(index):
    """Values are NumPy's; gradients add up where an element is taken more than once."""
    x = mg.Tensor(X, requires_grad=True)
    expected = X[index]
    g = np.random.default_rng(0).normal(size=expected.shape)
    x[index].backward(g)
    numbers = np.arange(12).reshape(3, 4)[index]
    assert np.array_equal(x[index].data, expected)
    np.testing.assert_allclose(x.grad.ravel(), np.bincount(np.ravel(numbers).astype(int), g.ravel(), 12), rtol=1e-12)
    assert mg.gradgradcheck(lambda x: x[index], X)


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (lambda x: x[3], "3"),
        (lambda x: x[np.array([0, -4])], "-4"),
        (lambda x: x[:, 4], "4"),
        (lambda x: x[np.array([0]), np.array([7])], "7"),
        (lambda x: mg.take(x, 12), "12"),
        (lambda x: mg.take(x, [0, -4], axis=0), "-4"),
        (lambda x: mg.take(x, 4, axis=-1), "4"),
        (lambda x: mg.take_along_axis(x, np.array([[4]]), 1), "4"),
        (lambda x: mg.put_along_axis(x, np.array([[-5]]), 1.0, 1), "-5"),
        (lambda x: mg.scatter_add(x, np.array([[4]]), np.ones((1, 1)), 1), "4"),
        (lambda x: F.embedding(np.array([3]), x), "3"),
        (lambda x: F.embedding(np.array([-1]), x), "-1"),
    ],
)
def test_41_indices_out_of_range_are_named(fn, named):
    for x in (X, mg.Tensor(X, requires_grad=True)):
        with pytest.raises(IndexRangeError, match=rf"(?<![\d-]){named}(?!\d)"):
            fn(mg.asarray(x))


def test_42_repeats_add_in_the_gradient_and_the_last_wins_in_put():
    check(lambda x: x[[0, 0]], [[5.0, 7.0]], [5, 5], [[3, 0]], upstream=[1.0, 2.0])
    put = lambda x, v: mg.put_along_axis(x, np.array([0, 0]), v, 0)
    check(put, [[0.0, 0.0], [1.0, 2.0]], [2, 0], [[0, 1], [0, 1]])
    check(lambda x, v: mg.scatter_add(x, np.array([0, 0]), v, 0), [[0.0, 0.0], [1.0, 2.0]], [3, 0], [[1, 1], [1, 1]])


def test_values_put_into_integers_are_not_cut():
    assert mg.scatter_add(np.zeros(2, int), np.array([0]), np.array([0.5]), 0).tolist() == [0.5, 0]
    assert mg.put_along_axis(np.zeros(2, int), np.array([1]), 0.5, 0).tolist() == [0, 0.5]


def test_an_index_of_shape_is_a_number_also_to_the_gradient():
    x, i = [1.0, 5.0, 2.0], np.array(1)
    check(lambda x: x[i] * x[i], [x], 25, [[0, 10, 0]])
    check(lambda x: x.take(i) * 2, [x], 10, [[0, 2, 0]])
    check(lambda x: x[x.argmax()] ** 3, [x], 125, [[0, 75, 0]])
    check(lambda x: x.take(i, 0) * x, [x], [5, 25, 10], [[5, 13, 5]])


@pytest.mark.parametrize("seed", range(4))
def test_dropout_of_a_number(seed):
    mg.random.seed(seed)
    x = mg.Tensor(3.0, requires_grad=True)
    out = F.dropout(x, 0.5)
    (out * out).backward()
    assert (out.item(), x.grad.item()) in [(0.0, 0.0), (6.0, 24.0)]  # (2x)², if it is kept


# ---- reductions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "max", "min", "var", "std", "logsumexp", "norm"])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), (), (2, 1, 0)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_axes_of_reductions(name, axis, keepdims):
    """int, tuple, empty tuple or None, with and without ``keepdims``, to second order."""
    x = np.random.default_rng(0).permutation(24).reshape(2, 3, 4) / 7 + 0.5
    options = {"axis": axis, "keepdims": keepdims}
    if name in ("var", "std") and axis == ():
        return  # of single elements: 0 everywhere, a kink of std
    if hasattr(np, name):
        np.testing.assert_allclose(getattr(mg, name)(x, **options), getattr(np, name)(x, **options), rtol=1e-13)
    assert mg.gradgradcheck(lambda t: getattr(t, name)(**options), x)


@pytest.mark.parametrize("axis", [0, -1])
def test_numpy_reduces_scalars_over_an_axis(axis):
    check(lambda x: x.sum(axis=axis), [2.0], 2, [1])
    check(lambda x: x.mean(axis=axis), [2.0], 2, [1])
    check(lambda x: x.max(axis=axis), [2.0], 2, [1])
    check(lambda x: x.prod(axis=axis), [2.0], 2, [1])
    check(lambda x: x.prod(axis=axis, keepdims=True), [0.0], 0, [1])


def test_means_of_nothing_are_nan_in_silence():
    x = mg.Tensor(np.zeros((2, 0)), requires_grad=True)
    for out in (x.mean(), x.mean(axis=1), x.var(), x.std(axis=1)):
        assert np.isnan(out.data).all()
    check(lambda x: x.mean(where=np.array([False, False])), [[1.0, 2.0]], np.nan, [[0, 0]])
    assert x.max(axis=1, initial=-3.0).tolist() == [-3, -3]
    with pytest.raises(ShapeError, match="max"):
        x.max()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_large_offset_costs_the_variance_no_digits(dtype):
    offset = dtype(1e7 if dtype == np.float32 else 1e15)
    x = mg.Tensor(np.array([0, 1, 2, 3], dtype) + offset, requires_grad=True)
    variance = x.var()
    variance.backward()
    assert variance.item() == 1.25
    assert x.grad.tolist() == [-0.75, -0.25, 0.25, 0.75]


# ---- extremes of geometry -------------------------------------------------------------------------------------------


def test_no_square_of_a_large_number_is_taken():
    x, y = (mg.Tensor(v, requires_grad=True) for v in (3e200, 4e200))
    mg.hypot(x, y).backward()
    np.testing.assert_allclose([x.grad, y.grad], [0.6, 0.8], rtol=1e-12)
    x.grad = y.grad = None
    mg.arctan2(y, x).backward()
    np.testing.assert_allclose([x.grad, y.grad], [-0.16e-200, 0.12e-200], rtol=1e-12)
