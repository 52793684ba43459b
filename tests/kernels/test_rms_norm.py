import numpy as np
import pytest
import torch
from support.kernel_checks import check, check_threads, derived, many_rows, of_the_threads, random

import minigrad as mg
from minigrad.errors import ShapeError
from minigrad.kernels.rms_norm import rms_norm


def twin(x, normalized_shape=None, weight=None, eps=1e-5):
    return torch.nn.functional.rms_norm(x, normalized_shape or x.shape[-1:], weight, eps)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 1), (5, 65), (2, 3, 129), many_rows((3000, 130)), (2, 40000)])
@pytest.mark.parametrize("weighted", [True, False])
def test_is_torch(shape, weighted):
    """Of one number a row little is left but its sign, unless eps is large: so large it is there."""
    x, w = random(shape, shape[-1:])
    eps = 0.1 if shape[-1] == 1 else 1e-5
    check(rms_norm, twin, [x, None, w if weighted else None, eps], length=max(shape[-1], int(np.prod(shape[:-1]))))


def test_several_axes():
    x, w = random((4, 3, 5), (3, 5))
    check(rms_norm, twin, [x, (3, 5), w, 0.1])


@pytest.mark.parametrize("shape", [(0, 4), (0,), (3, 0)])
def test_empty(shape):
    value, (gx, gw) = derived(rms_norm, [np.zeros(shape), None, np.ones(shape[-1:])])
    assert value.shape == gx.shape == shape
    np.testing.assert_array_equal(gw, np.zeros(shape[-1:]))


def test_half_precision_squares_in_float32():
    """1000² is no float16; of a row of zeros dy/dx is 1/√eps = 316.23, which float16 rounds to 316.25."""
    value, _ = derived(rms_norm, [np.array([[1000, -1000]], np.float16)])
    np.testing.assert_array_equal(value, np.array([[1, -1]], np.float16))
    for dtype, slope in ((np.float64, 1e5**0.5), (np.float16, 316.25)):
        value, (gx, _) = derived(rms_norm, [np.zeros((2, 3), dtype), None, np.ones(3, dtype)])
        np.testing.assert_array_equal(value, np.zeros((2, 3)))
        np.testing.assert_allclose(gx, np.full((2, 3), slope), rtol=1e-12)
        assert gx.dtype == dtype


def test_only_what_is_needed():
    """With a constant weight x alone gets a gradient, and the other way round."""
    import minigrad as mg

    x, w = random((4, 6), (6,))
    _, (gx, gw) = derived(rms_norm, [x, None, w])
    for leaf, expected, call in [
        (mg.Tensor(x, requires_grad=True), gx, lambda t: rms_norm(t, None, w)),
        (mg.Tensor(w, requires_grad=True), gw, lambda t: rms_norm(x, None, t)),
    ]:
        call(leaf).sum().backward()
        np.testing.assert_array_equal(leaf.grad, expected)


@of_the_threads
def test_threads():
    x, w = random((4096, 256), (256,))
    check_threads(rms_norm, [x.astype(np.float32), None, w.astype(np.float32)])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((np.ones((2, 3)), 4), r"normalized shape \(4,\)"),
        ((np.ones((2, 3)), None, np.ones(2)), r"normalized shape \(2,\)"),
        ((np.ones((2, 3)), 3, np.ones((2, 3))), r"a weight of the normalized shape \(3,\)"),
        ((np.array(1.0),), "normalized shape"),
    ],
)
def test_errors(args, message):
    with pytest.raises(ShapeError, match=message):
        rms_norm(*args)


def test_rows_that_are_no_numbers_stay_alone() -> None:
    """1/rms is 0 of an infinite row and NaN of one with NaN: their gradients are NaN, those of other rows are not."""
    rows = np.array([[1.0, 2.0], [np.inf, 1.0], [np.nan, 1.0], [3.0, 4.0]], np.float32)
    x = mg.Tensor(rows, requires_grad=True)
    fine = mg.Tensor(rows[[0, 3]], requires_grad=True)
    with np.errstate(invalid="ignore"):
        rms_norm(x).backward(np.ones((4, 2), np.float32))
    rms_norm(fine).backward(np.ones((2, 2), np.float32))
    assert np.isnan(x.grad[1:3]).any(axis=1).all()
    np.testing.assert_array_equal(x.grad[[0, 3]], fine.grad)
