import numpy as np
import pytest
import torch
from support.kernel_checks import check, check_threads, derived, many_rows, of_the_threads, random

from minigrad.kernels.swiglu import silu, swiglu


def twin(gate, up):
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("shape", [(), (1,), (3, 65), many_rows((700, 344)), (2, 3, 1025)])
def test_is_torch(shape):
    check(swiglu, twin, random(shape, shape, scale=3))
    check(silu, torch.nn.functional.silu, random(shape, scale=3))


def test_broadcasts():
    check(swiglu, twin, random((3, 1, 5), (4, 1)))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_far_out(dtype):
    """At ±1e4 σ is exactly 1 or 0, and no floating-point exception is raised on the way."""
    x = np.array([-1e4, -100, 0, 100, 1e4], dtype)
    with np.errstate(all="raise"):
        value, (gx,) = derived(silu, [x])
        both, grads = derived(swiglu, [x, np.full(5, 2, dtype)])
    np.testing.assert_allclose(value, [0, 0, 0, 100, 1e4], rtol=1e-7, atol=1e-40)
    np.testing.assert_allclose(gx, [0, 0, 0.5, 1, 1], rtol=1e-7, atol=1e-40)
    np.testing.assert_array_equal(both, 2 * value)
    np.testing.assert_array_equal(grads[0], 2 * gx)
    np.testing.assert_array_equal(grads[1], value)


def test_half_precision_rounds_once():
    x, y = (a.astype(np.float16) for a in random((50, 7), (50, 7), scale=4))
    wide = [a.astype(np.float64) for a in (x, y)]
    for ours, exact in zip(derived(swiglu, [x, y])[1], derived(swiglu, wide)[1], strict=True):
        assert ours.dtype == np.float16
        np.testing.assert_allclose(ours.astype(np.float64), exact, rtol=2**-11 * 1.01, atol=2**-25)


def test_empty():
    value, grads = derived(swiglu, [np.zeros((0, 3)), np.zeros((0, 3))])
    assert value.shape == grads[0].shape == grads[1].shape == (0, 3)


@of_the_threads
def test_threads():
    check_threads(swiglu, [a.astype(np.float32) for a in random((2048, 344), (2048, 344))])
    check_threads(silu, [a.astype(np.float32) for a in random((2048, 344))])
