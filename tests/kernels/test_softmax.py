import numpy as np
import pytest
import torch
from support.kernel_checks import check, check_threads, derived, many_rows, of_the_threads, random

import minigrad as mg
from minigrad.errors import AxisError
from minigrad.kernels.softmax import log_softmax, softmax

INF = np.inf
both = pytest.mark.parametrize("operation", [softmax, log_softmax])


def twin(operation):
    return lambda x, axis=-1: getattr(torch, operation.name)(x, axis)


@both
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((7,), -1), ((5, 65), 1), ((5, 65), 0), ((3, 4, 9), 1), many_rows((3000, 65), -1), ((3, 40000), -1), ((4, 2), -1)],
)
@pytest.mark.parametrize("scale", [1, 200])
def test_is_torch(operation, shape, axis, scale):
    """At scale 200 the exponentials overflow unless the maximum is taken off."""
    check(operation, twin(operation), [*random(shape, scale=scale), axis], length=shape[axis])


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_minus_infinity(operation, dtype):
    """A row in which nothing is allowed: softmax 0, its logarithm -∞, gradient 0; other rows don't notice."""
    x = np.array([[-INF, -INF], [-INF, 1.0], [0.0, 0.0]], dtype)
    with np.errstate(all="raise"):
        value, (gx,) = derived(operation, [x], np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    p = np.array([[0, 0], [0, 1], [0.5, 0.5]])
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(value, p if operation is softmax else np.log(p), atol=np.finfo(dtype).eps)
    expected = {softmax: [[0, 0], [0, 0], [-0.25, 0.25]], log_softmax: [[0, 0], [3, -3], [-0.5, 0.5]]}
    np.testing.assert_allclose(gx, expected[operation], rtol=4 * np.finfo(dtype).eps)
    leaf = mg.Tensor(x, requires_grad=True)
    (again,) = mg.grad(operation.definition(leaf), leaf, mg.Tensor(np.array([[1, 2], [3, 4], [5, 6]], dtype)))
    np.testing.assert_allclose(again.data, gx, rtol=4 * np.finfo(dtype).eps)


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [3, 100])
def test_gradients_where_one_weight_is_nearly_one(operation, width, dtype):
    """Rows whose largest weight is 1 but for e^-2 to e^-15: its gradient, all of which cancels, to some units."""
    x, g = (a.astype(dtype) for a in random((14, width), (14, width)))
    x[:, 1] = np.log(width) + x.max(1) + np.arange(2, 16)
    g[:, 1] *= 30
    _, (gx,) = derived(operation, [x], g)
    s, up = np.exp(x.astype(np.longdouble)), g.astype(np.longdouble)
    s /= s.sum(1, keepdims=True)
    others = np.arange(width) != 1
    slope = s[:, 1] * (s * (up[:, 1:2] - up))[:, others].sum(1)  # no term of the sum is larger than the result
    if operation is log_softmax:
        slope = s[:, others].sum(1) * up[:, 1] - s[:, 1] * up[:, others].sum(1)
    scale = np.abs(slope) if operation is softmax else np.abs(up[:, others]).sum(1) + np.abs(slope)
    np.testing.assert_array_less(np.abs(gx[:, 1] - slope), 40 * np.finfo(dtype).eps * scale)


@both
def test_one_element(operation):
    value, (gx,) = derived(operation, [random((4, 1))[0]])
    np.testing.assert_allclose(value, np.full((4, 1), float(operation is softmax)), atol=1e-15)
    np.testing.assert_allclose(gx, np.zeros((4, 1)), atol=1e-15)


@both
def test_an_offset_changes_nothing(operation):
    x = np.round(random((6, 50))[0] * 64) / 64  # so that adding 2¹⁰ is exact in float32
    for offset in (1024, -1024):
        value, (gx,) = derived(operation, [(x + offset).astype(np.float32)], np.cos(x))
        expected, (gexpected,) = derived(operation, [x], np.cos(x))
        np.testing.assert_allclose(value, expected, rtol=3e-6, atol=1e-7)
        np.testing.assert_allclose(gx, gexpected, rtol=3e-6, atol=1e-6)


@both
def test_half_precision_sums_in_float32(operation):
    """4096 equal weights sum to 1; in float16 the sum would stop at 2048."""
    value, _ = derived(operation, [np.zeros((1, 4096), np.float16)])
    np.testing.assert_array_equal(value, np.float16(1 / 4096 if operation is softmax else -np.log(4096)))


@both
@pytest.mark.parametrize(("shape", "axis"), [((0, 3), -1), ((3, 0), -1), ((0, 3), 0)])
def test_empty(operation, shape, axis):
    value, (gx,) = derived(operation, [np.zeros(shape), axis])
    assert value.shape == gx.shape == shape


@both
@of_the_threads
def test_threads(operation):
    check_threads(operation, [a.astype(np.float32) for a in random((4096, 256))])


@both
def test_errors(operation):
    with pytest.raises(AxisError, match="an axis from -2 to 1"):
        operation(np.ones((2, 3)), 2)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cross_entropy"])
def test_a_row_does_not_depend_on_its_neighbours(name):
    """Rows that need a shift beside rows that don't, in one tile: the same bits as beside others, both ways."""
    rows = np.random.default_rng(0).normal(size=(64, 33)).astype(np.float32) * 3
    far = rows.copy()
    far[::2] *= 1e4
    more = (np.arange(64) % 33, -100, 0.0, "none") if name == "cross_entropy" else ()
    found = []
    for x in (rows, far):
        x = mg.Tensor(x, requires_grad=True)
        out = mg.REGISTRY[name](x, *more)
        out.backward(np.ones(out.shape, np.float32))
        found += [out.data[1::2], x.grad[1::2]]
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])
