import numpy as np
import pytest
import torch
from support.kernel_checks import check, check_threads, derived, many_rows, of_the_threads, random

from minigrad.kernels.relu import relu


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 65), many_rows((700, 344))])
def test_is_torch(shape):
    check(relu, torch.nn.functional.relu, random(shape, scale=3))


def test_nothing_comes_through_below_zero_and_nan_does():
    """At 0 the derivative is 0; an infinite gradient is stopped too, where 0 · inf would be NaN."""
    x = np.array([-1.0, -0.0, 0.0, np.nan, 2.0, -np.inf, np.inf])
    value, (gx,) = derived(relu, [x], np.full(7, np.inf))
    np.testing.assert_array_equal(value, [0, 0, 0, np.nan, 2, 0, np.inf])
    np.testing.assert_array_equal(gx, [0, 0, 0, np.inf, np.inf, 0, np.inf])


def test_plain_numbers():
    assert relu(-2.0) == 0 and relu(3) == 3


def test_strided_arguments():
    x, g = random((6, 8), (6, 8))
    value, (gx,) = derived(relu, [x.T[::-2]], g.T[::-2])
    np.testing.assert_array_equal(value, np.clip(x, 0, None).T[::-2])
    np.testing.assert_array_equal(gx, np.where(x > 0, g, 0).T[::-2])


@of_the_threads
def test_threads():
    check_threads(relu, [a.astype(np.float32) for a in random((2048, 344))])
