"""Products of a few rows, of any number of rows, features and threads."""

import itertools

import numpy as np
import pytest

from minigrad.kernels.products import few_products, few_rows
from minigrad.machine import parallel

pytestmark = pytest.mark.cpu_only("products of the CPU")
SIZES = (1, 3, 4, 5, 9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_few_rows_by_matrices_of_all_sizes(dtype):
    rng = np.random.default_rng(0)
    for rows, inner, outputs in itertools.product(SIZES, (1, 7, 40), SIZES):
        x, w = (rng.standard_normal((n, inner)).astype(dtype) for n in (rows, outputs))
        out = np.full((rows, outputs + 3), 7.0, dtype)
        few_rows(x, w, out, 2)
        expected = [[sum(float(a) * float(b) for a, b in zip(p, q, strict=True)) for q in w] for p in x]
        np.testing.assert_allclose(out[:, 2:-1], expected, rtol=0, atol=50 * np.finfo(dtype).eps * np.sqrt(inner))
        assert (out[:, :2] == 7).all() and (out[:, -1] == 7).all()


def test_threads_share_large_matrices_and_change_no_bit():
    rng, before = np.random.default_rng(1), parallel.get_num_threads()
    x = rng.standard_normal((3, 700)).astype(np.float32)
    matrices = [rng.standard_normal((n, 700)).astype(np.float32) for n in (8191, 1, 300)]
    found = []
    try:
        for threads in (1, 2, 3):
            parallel.set_num_threads(threads)
            found.append(np.empty((3, 8492), np.float32))
            few_products(x, found[-1], *matrices)
    finally:
        parallel.set_num_threads(before)
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    exact = x.astype(float) @ np.concatenate(matrices).astype(float).T
    np.testing.assert_allclose(found[0], exact, rtol=0, atol=1e-4)
