import numpy as np
import pytest
import torch
from support.kernel_checks import check, check_threads, derived, many_rows, of_the_threads, random

from minigrad.errors import ShapeError
from minigrad.kernels.layer_norm import layer_norm


def twin(x, normalized_shape=None, weight=None, bias=None, eps=1e-5):
    return torch.nn.functional.layer_norm(x, normalized_shape or x.shape[-1:], weight, bias, eps)


@pytest.mark.parametrize("shape", [(7,), (5, 65), (2, 3, 129), many_rows((3000, 130)), (2, 40000)])
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True), (False, False)])
def test_is_torch(shape, used):
    x, *parameters = random(shape, shape[-1:], shape[-1:])
    parameters = [p if u else None for p, u in zip(parameters, used, strict=True)]
    check(layer_norm, twin, [x, None, *parameters], length=max(shape[-1], int(np.prod(shape[:-1]))))


def test_several_axes():
    x, w, b = random((4, 3, 5), (3, 5), (3, 5))
    check(layer_norm, twin, [x, (3, 5), w, b, 0.1])


def test_a_large_offset_costs_no_digits():
    """In float32 the mean of squares of numbers near 10⁴ would lose the variance; the centred row doesn't."""
    row = np.arange(64, dtype=np.float32) + np.float32(1e4)
    exact = (np.arange(64) - 31.5) / np.sqrt((64**2 - 1) / 12 + 1e-5)
    np.testing.assert_allclose(layer_norm(row), exact, rtol=0, atol=2e-4)


def test_half_precision_in_float32():
    value, _ = derived(layer_norm, [np.array([[3000, 1000]], np.float16)])
    np.testing.assert_array_equal(value, np.array([[1, -1]], np.float16))


@pytest.mark.parametrize("shape", [(0, 4), (0,), (3, 0)])
def test_empty(shape):
    value, (gx, gw, gb) = derived(layer_norm, [np.zeros(shape), None, np.ones(shape[-1:]), np.ones(shape[-1:])])
    assert value.shape == gx.shape == shape
    np.testing.assert_array_equal(gw, np.zeros(shape[-1:]))
    np.testing.assert_array_equal(gb, np.zeros(shape[-1:]))


@of_the_threads
def test_threads():
    x, w, b = (a.astype(np.float32) for a in random((4096, 256), (256,), (256,)))
    check_threads(layer_norm, [x, None, w, b])


@pytest.mark.parametrize("args", [(np.ones((2, 3)), 4), (np.ones((2, 3)), 3, None, np.ones(2))])
def test_errors(args):
    with pytest.raises(ShapeError, match="normalized shape"):
        layer_norm(*args)
