"""The error function, which NumPy lacks, beside the C library's."""

import math

import numpy as np
import pytest

from minigrad.ops._erf import erf


@pytest.mark.parametrize(("dtype", "limit"), [(np.float64, 1e-15), (np.float32, 4e-7)])
def test_last_digits(dtype, limit):
    """Relative error beside the C library's erf, over the joints of the approximations, tiny numbers included."""
    x = np.concatenate([np.linspace(-7, 7, 4001), np.linspace(0.99, 1.01, 101), 10.0 ** np.arange(-30, 1)]).astype(
        dtype
    )
    exact = np.array([math.erf(v) for v in x])
    with np.errstate(all="raise"):
        value = erf(x)
    assert value.dtype == dtype
    assert np.abs(value).max() == 1
    assert (np.abs(value - exact) <= limit * np.abs(exact)).all()


def test_ends():
    """Odd, ±1 at ±∞, NaN of NaN; half precision is one rounding of float32, integers are float64."""
    x = np.array([-np.inf, -1e308, -0.0, 1e308, np.inf, np.nan])
    np.testing.assert_array_equal(erf(x), [-1, -1, -0.0, 1, 1, np.nan])
    assert np.signbit(erf(x)[2])
    half = np.linspace(-3, 3, 41).astype(np.float16)
    np.testing.assert_array_equal(erf(half), erf(half.astype(np.float32)).astype(np.float16))
    assert erf(np.array([1])) == math.erf(1)
