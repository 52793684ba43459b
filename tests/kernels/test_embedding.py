import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_checks import check, derived, random

from minigrad.errors import DTypeError, IndexRangeError, ShapeError
from minigrad.kernels.embedding import embedding
from minigrad.ops._rows import add_rows


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (4000,)])
@pytest.mark.parametrize(("size", "width"), [(1, 1), (7, 3), (300, 65)])
def test_is_torch(shape, size, width):
    ids = np.random.default_rng(0).integers(0, size, shape)
    (weight,) = random((size, width))
    check(embedding, torch.nn.functional.embedding, [ids, weight], length=ids.size)
    check(embedding, torch.nn.functional.embedding, [ids, weight, 0], length=ids.size)


def test_repeats_add():
    _, (grad,) = derived(embedding, [np.array([3, 3, 3]), np.zeros((5, 2))])
    np.testing.assert_array_equal(grad, [[0, 0], [0, 0], [0, 0], [3, 3], [0, 0]])


def test_padding_counts_from_the_end():
    _, (grad,) = derived(embedding, [np.array([4, 1]), np.zeros((5, 2)), -1])
    np.testing.assert_array_equal(grad[:, 0], [0, 1, 0, 0, 0])


@given(st.data())
def test_add_rows(data):
    """The row sum, in each of its ways, is a loop of additions: few repeats and many, narrow and wide rows."""
    size, count = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 60))
    width = data.draw(st.sampled_from([(), (1,), (3,), (2, 20), (33,), (0,)]))
    ids = np.array(data.draw(st.lists(st.integers(-size, size - 1), min_size=count, max_size=count)), np.int64)
    g = np.round(np.random.default_rng(count).standard_normal((count, *width)) * 8)
    expected = np.zeros((size, *width))
    for i, row in zip(ids, g, strict=True):
        expected[i] += row
    for dtype in (np.float64, np.float32, np.float16):
        out = add_rows((size, *width), dtype, ids, g.astype(dtype))
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, expected)
    small = ids[ids >= 0].astype(np.uint8)
    np.testing.assert_array_equal(
        add_rows((size, *width), np.float64, small, g[ids >= 0]),
        add_rows((size, *width), np.float64, ids[ids >= 0], g[ids >= 0]),
    )


@pytest.mark.parametrize("zipf", [True, False])
def test_many_ids(zipf):
    """50 000 ids over 70 000 rows, more than 16 bits can name, as words are distributed and evenly."""
    generator = np.random.default_rng(0)
    weights = 1 / np.arange(1, 70_001) if zipf else np.ones(70_000)
    ids = generator.choice(70_000, 50_000, p=weights / weights.sum())
    g = generator.integers(-8, 8, (50_000, 64)).astype(np.float32)
    expected = np.zeros((70_000, 64), np.float32)
    np.add.at(expected, ids, g)
    np.testing.assert_array_equal(add_rows((70_000, 64), np.float32, ids, g), expected)


def test_half_precision_sums_in_float32():
    """4096 ones; in float16 the sum would stop at 2048."""
    _, (grad,) = derived(embedding, [np.zeros(4096, int), np.zeros((2, 20), np.float16)])
    np.testing.assert_array_equal(grad[0], np.float16(4096))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_small_integers(dtype):
    value, (grad,) = derived(embedding, [np.array([200, 0], dtype), np.ones((201, 3))])
    assert value.shape == (2, 3)
    np.testing.assert_array_equal(np.flatnonzero(grad), [0, 1, 2, 600, 601, 602])


@pytest.mark.parametrize("wrong", [5, -1, -6, 2**40])
def test_out_of_range(wrong):
    """Nothing wraps: the error names the id and the size."""
    for ids in (np.array([0, wrong]), np.array([[0], [wrong]])):
        for call in (embedding, embedding.definition):
            with pytest.raises(IndexError, match=rf"(?s)0 to 4.*id {wrong}\b") as caught:
                call(ids, np.ones((5, 2)))
            assert isinstance(caught.value, IndexRangeError)


def test_errors():
    with pytest.raises(DTypeError, match="ids as integers"):
        embedding(np.ones(2), np.ones((5, 2)))
    with pytest.raises(ShapeError, match=r"weight of shape \(V, d\)"):
        embedding(np.array([0]), np.ones(5))
    with pytest.raises(IndexRangeError, match="padding_idx from -5 to 4"):
        embedding(np.array([0]), np.ones((5, 2)), 5)
