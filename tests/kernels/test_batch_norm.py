"""normalize_batch beside torch in float64: all three results, and gradients that come through all three."""

import numpy as np
import pytest
import torch
from support.kernel_checks import DTYPES, error, many_rows, of_the_threads, random

import minigrad as mg
from minigrad.kernels.batch_norm import normalize_batch


def results(dtype, shape, affine, upstream):
    """y, mean and var, and the gradients of x, weight and bias."""
    x, *affine = (a.astype(dtype) for a in (random(shape)[0], *affine))
    leaves = [mg.Tensor(a, requires_grad=True) for a in (x, *affine)]
    out = normalize_batch(*leaves)
    total = sum((o * g.astype(dtype)).sum() for o, g in zip(out, upstream, strict=True))
    return [*(o.data for o in out), *(g.data for g in mg.grad(total, leaves))]


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (5, 3, 7), (5, 3, 8), (2, 3, 9, 5), many_rows((40, 17, 30, 5))])
def test_is_torch(shape, affine):
    """With few places of a channel and with many; gradients of y, of the means and of the variances at once."""
    affine = random(shape[1:2], shape[1:2], seed=2) if affine else []
    upstream = random(shape, shape[1:2], shape[1:2], seed=3)
    x, *weights = (torch.tensor(a, requires_grad=True) for a in (random(shape)[0], *affine))
    axes = [0, *range(2, len(shape))]
    y = torch.nn.functional.batch_norm(x, None, None, *(weights or (None, None)), True)
    theirs = [y, x.mean(axes), x.var(axes, unbiased=False)]
    sum((o * torch.tensor(g)).sum() for o, g in zip(theirs, upstream, strict=True)).backward()
    expected = [*(o.detach().numpy() for o in theirs), *(leaf.grad.numpy() for leaf in (x, *weights))]
    for dtype in DTYPES:
        for ours, wanted in zip(results(dtype, shape, affine, upstream), expected, strict=True):
            assert ours.dtype == dtype
            assert error(ours, wanted) < (1e-12 if dtype == np.float64 else 1e-5)


@pytest.mark.parametrize("shape", [(64, 2), (8, 2, 16)])
def test_a_large_offset_costs_few_digits(shape):
    """In float32 beside the same float32 numbers in float64: two means, the second of what the first left."""
    (x,) = random(shape)
    x = (x + 1000).astype(np.float32)
    for ours, exact in zip(normalize_batch(x), normalize_batch(x.astype(np.float64)), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=2e-5)


@of_the_threads
def test_threads():
    before, found = mg.get_num_threads(), []
    shape = (64, 24, 300)
    for threads in (1, 2, 2):
        mg.set_num_threads(threads)
        found.append(results(np.float32, shape, random((24,), (24,)), random(shape, (24,), (24,), seed=3)))
    mg.set_num_threads(before)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
