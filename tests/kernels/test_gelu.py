import math

import numpy as np
import pytest
import torch
from support.kernel_checks import check, check_threads, derived, of_the_threads, random

from minigrad.errors import ArgumentError
from minigrad.kernels.gelu import gelu


def twin(x, approximate="none"):
    return torch.nn.functional.gelu(x, approximate=approximate)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 65), (700, 344)])
def test_is_torch(shape, approximate):
    check(gelu, twin, [*random(shape, scale=3), approximate])


def test_is_x_phi():
    """x Φ(x) by the error function of the standard library."""
    x = np.linspace(-7, 7, 57)
    exact = [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x]
    np.testing.assert_allclose(gelu(x), exact, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_far_out(approximate, dtype):
    x = np.array([-1e4, -50, 50, 1e4], dtype)
    with np.errstate(all="raise"):
        value, (gx,) = derived(gelu, [x, approximate])
    np.testing.assert_allclose(value, [0, 0, 50, 1e4], rtol=1e-7, atol=1e-30)
    np.testing.assert_allclose(gx, [0, 0, 1, 1], rtol=1e-7, atol=1e-30)


@of_the_threads
def test_threads():
    for approximate in ("none", "tanh"):
        check_threads(gelu, [*[a.astype(np.float32) for a in random((2048, 344))], approximate])


def test_errors():
    with pytest.raises(ArgumentError, match="'none' or 'tanh'"):
        gelu(np.ones(2), "sigmoid")


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_far_below_zero_it_is_zero(approximate, dtype):
    """Also where the exponential that it takes overflows."""
    x = np.array([-1e30, -1e5, -40, -20, -12, -10.5, -10.1], dtype)
    value, (slope,) = derived(lambda t: gelu(t, approximate), [x])
    np.testing.assert_allclose(value, 0, atol=1e-20)
    np.testing.assert_allclose(slope, 0, atol=1e-20)
