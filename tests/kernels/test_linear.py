import numpy as np
import pytest
import torch
from support.kernel_checks import check, check_threads, derived, of_the_threads, random

from minigrad.errors import ShapeError
from minigrad.kernels.linear import linear


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (2, 2000)])
@pytest.mark.parametrize(("d_in", "d_out"), [(1, 1), (65, 3), (33, 257)])
@pytest.mark.parametrize("biased", [True, False])
def test_is_torch(lead, d_in, d_out, biased):
    x, w, b = random((*lead, d_in), (d_out, d_in), (d_out,))
    length = max(d_in, d_out, int(np.prod(lead)))
    check(linear, torch.nn.functional.linear, [x, w, b if biased else None], length=length)


@pytest.mark.parametrize(("lead", "d_in", "d_out"), [((0,), 3, 2), ((2, 3), 0, 2), ((2, 3), 3, 0)])
def test_empty(lead, d_in, d_out):
    """Nothing summed is 0, so the result is the bias."""
    value, (gx, gw, gb) = derived(linear, [np.ones((*lead, d_in)), np.ones((d_out, d_in)), np.full(d_out, 7.0)])
    np.testing.assert_array_equal(value, np.full((*lead, d_out), 7.0 + d_in))
    np.testing.assert_array_equal(gx, np.full((*lead, d_in), float(d_out)))
    np.testing.assert_array_equal(gw, np.full((d_out, d_in), float(np.prod(lead))))
    np.testing.assert_array_equal(gb, np.full(d_out, float(np.prod(lead))))


def test_half_precision_multiplies_in_float32():
    """64 products of numbers in [0, 1): relative error at most that of one rounding to float16."""
    x, w = (np.random.default_rng(s).random((16, 64)).astype(np.float16) for s in (0, 1))
    value, grads = derived(linear, [x, w])
    exact = [
        x.astype(float) @ w.T.astype(float),
        np.tile(w.sum(0, dtype=float), (16, 1)),
        np.tile(x.sum(0, dtype=float), (16, 1)),
    ]
    for ours, theirs in zip([value, *grads], exact, strict=True):
        assert ours.dtype == np.float16
        np.testing.assert_allclose(ours, theirs, rtol=2**-10)


@pytest.mark.cpu_only("memory of the CPU")
def test_gradients_are_fresh():
    """No gradient shares memory with the upstream gradient, the arguments, or another gradient."""
    upstream = np.ones((4, 3))
    args = [np.ones((4, 3)), np.eye(3), np.ones(3)]
    value, grads = derived(linear, args, upstream)
    arrays = [value, *grads, *args, upstream]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    assert all(a.base is None for a in [value, *grads])


@of_the_threads
def test_threads():
    check_threads(linear, [a.astype(np.float32) for a in random((2048, 256), (688, 256), (688,))], blas_alone=True)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3), (4, 2)), r"\(2, 3\) and \(4, 2\)"),
        (((2, 3), (3,)), r"weight \(d_out, d_in\)"),
        (((), (3, 3)), r"x \(..., d_in\)"),
        (((2, 3), (4, 3), (3,)), r"a bias of shape \(4,\)"),
    ],
)
def test_errors(shapes, message):
    with pytest.raises(ShapeError, match=message):
        linear(*random(*shapes))
