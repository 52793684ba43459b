import gc
import weakref

import numpy as np
import pytest
from support.kernel_checks import DTYPES, check_threads, derived, error, of_the_threads, random, rng

import minigrad as mg
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.kernels.rope import apply_rope

LAYOUTS = ["interleaved", "half"]
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def tables(positions, d, theta=10000.0):
    angles = np.asarray(positions)[:, None] * theta ** (-2 * np.arange(d // 2) / d)
    return np.cos(angles), np.sin(angles)


def turned(x, cos, sin, layout):
    """The formula, with one rotation matrix for each pair."""
    d = x.shape[-1]
    full = (*x.shape[:-1], d // 2)
    cos, sin = np.broadcast_to(cos, full), np.broadcast_to(sin, full)
    rotation = np.zeros((*x.shape, d))
    for k in range(d // 2):
        a, b = (2 * k, 2 * k + 1) if layout == "interleaved" else (k, k + d // 2)
        rotation[..., a, a], rotation[..., a, b] = cos[..., k], -sin[..., k]
        rotation[..., b, a], rotation[..., b, b] = sin[..., k], cos[..., k]
    return rotation


def test_known_values():
    """d = 4 at position 1; position 0 changes no bit."""
    cos, sin = tables([1], 4)
    for layout, x, expected in [
        ("interleaved", [[1.0, 0, 1, 0]], [0.5403023, 0.8414710, 0.9999500, 0.0099998]),
        ("half", [[1.0, 1, 0, 0]], [0.5403023, 0.9999500, 0.8414710, 0.0099998]),
    ]:
        np.testing.assert_allclose(apply_rope(np.array(x), cos, sin, layout)[0], expected, atol=5e-8)
        x = np.arange(8.0)[None]
        np.testing.assert_array_equal(apply_rope(x, *tables([0], 8), layout), x)


@layouts
@pytest.mark.parametrize(
    ("shape", "table"),
    [
        ((3, 4, 5, 6), (5, 3)),
        ((5, 6), (5, 3)),
        ((6,), (3,)),
        ((2, 1, 1, 6), (1, 3)),
        ((2, 3, 5, 6), (2, 1, 5, 3)),  # positions of each batch entry
        ((2, 3, 4, 2), (2, 3, 4, 1)),
        ((16, 4, 24, 8), (24, 4)),  # tables small enough to be repeated over the heads
        ((8, 70, 32), (70, 16)),  # tables that are not
    ],
)
@pytest.mark.parametrize("order", ["contiguous", "transposed heads", "every second feature", "backwards"])
def test_is_a_rotation(shape, table, layout, order):
    """Value and gradients of x, cos and sin beside rotation matrices, for arrays that lie in memory in any way."""
    for dtype in DTYPES:
        limit = 1e-14 if dtype == np.float64 else 1e-6
        x, cos, sin, upstream = (a.astype(dtype) for a in random(shape, table, table, shape))
        x = {
            "contiguous": lambda x=x: x,
            "transposed heads": lambda x=x: x.swapaxes(0, -2).copy().swapaxes(0, -2) if x.ndim > 1 else x,
            "every second feature": lambda x=x: np.repeat(x, 2, axis=-1)[..., ::2],
            "backwards": lambda x=x: x[..., ::-1].copy()[..., ::-1],
        }[order]()
        leaves = [mg.asarray(a) for a in (x, cos, sin)]
        for leaf in leaves:
            leaf.requires_grad = True
        out = apply_rope(*leaves, layout)
        gx, gcos, gsin = (g.data for g in mg.grad(out, leaves, mg.asarray(upstream)))
        rotation = turned(x, cos, sin, layout)
        assert out.dtype == gx.dtype == dtype
        assert error(out.data, (rotation @ x[..., None])[..., 0]) < limit
        assert error(gx, (rotation.swapaxes(-1, -2) @ upstream[..., None])[..., 0]) < limit
        for gradient, basis in ((gcos, (1, 0)), (gsin, (0, 1))):
            part = turned(x, *[np.full(table, float(b)) for b in basis], layout) @ x[..., None]
            pairs = upstream * part[..., 0]
            pairs = pairs[..., ::2] + pairs[..., 1::2] if layout == "interleaved" else sum(np.split(pairs, 2, axis=-1))
            lead = tuple(range(pairs.ndim - len(table)))
            ones = tuple(i for i, n in enumerate(table) if n == 1)
            assert error(gradient, pairs.sum(lead).sum(ones, keepdims=True).reshape(table)) < 10 * limit


@layouts
def test_norms_and_relative_positions(layout):
    """Norms are kept, and q·k depends on the distance of the positions alone."""
    q, k = random((1, 16), (1, 16))
    at = {p: tables([p], 16) for p in (3, 8, 103, 108)}
    products = [apply_rope(q, *at[i], layout) @ apply_rope(k, *at[j], layout).T for i, j in ((3, 8), (103, 108))]
    np.testing.assert_allclose(products[0], products[1], rtol=1e-11)
    np.testing.assert_allclose(np.linalg.norm(apply_rope(q, *at[108], layout)), np.linalg.norm(q), rtol=1e-14)


@layouts
def test_results_lie_in_memory_as_x(layout):
    x = random((2, 5, 3, 8))[0].transpose(0, 2, 1, 3)
    assert apply_rope(x, *tables(range(5), 8), layout).transpose(0, 2, 1, 3).flags.c_contiguous


@layouts
def test_half_precision_is_rounded_once(layout):
    x = random((4, 5, 8))[0].astype(np.float16)
    cos, sin = tables(range(5), 8)
    exact = (turned(x, cos, sin, layout) @ x.astype(np.float64)[..., None])[..., 0]
    value, (gx,) = derived(lambda t: apply_rope(t, cos, sin, layout), [x], x.astype(np.float64))
    assert value.dtype == gx.dtype == np.float16
    np.testing.assert_allclose(value, exact, rtol=2.0**-11, atol=1e-6)


@layouts
def test_nothing_of_x_is_kept(layout):
    leaf = mg.Tensor(random((2, 5, 8))[0], requires_grad=True)
    y = leaf * 2
    array = weakref.ref(y.data)
    out = apply_rope(y, *tables(range(5), 8), layout)
    del y
    gc.collect()
    assert array() is None
    out.sum().backward()
    assert leaf.grad is not None


@layouts
@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (2, 5, 0)])
def test_empty(shape, layout):
    table = np.zeros((shape[1], shape[2] // 2))
    value, (gx,) = derived(lambda t: apply_rope(t, table, table, layout), [np.zeros(shape)])
    assert value.shape == gx.shape == shape


@layouts
@of_the_threads
def test_threads(layout):
    x = random((8, 256, 8, 32))[0].transpose(0, 2, 1, 3).astype(np.float32)
    cos, sin = (a.astype(np.float32) for a in tables(range(256), 32))
    check_threads(lambda t: apply_rope(t, cos, sin, layout), [x])


@pytest.mark.parametrize(
    ("kind", "args", "words"),
    [
        (ShapeError, [(5, 7), (5, 3), (5, 3)], "even"),
        (ShapeError, [(5, 8), (6, 4), (5, 4)], "cos (6, 4)"),
        (ShapeError, [(5, 8), (5, 4), (5, 3)], "sin (5, 3)"),
        (ShapeError, [(5, 8), (2, 5, 4), (5, 4)], "cos (2, 5, 4)"),
        (ArgumentError, [(5, 8), (5, 4), (5, 4), "pairs"], "'pairs'"),
    ],
)
def test_errors(kind, args, words):
    args = [np.zeros(a) if isinstance(a, tuple) else a for a in args]
    with pytest.raises(kind) as caught:
        apply_rope(*args)
    assert words in str(caught.value)


def test_integers_are_refused():
    with pytest.raises(DTypeError):
        apply_rope(rng(0).integers(0, 3, (5, 8)), *tables(range(5), 8))


@pytest.mark.cpu_only("short loops of the CPU")
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 5, 4), (1, 2, 1, 6), (2, 1, 3, 1, 4)])
@pytest.mark.parametrize("heads_last", [False, True])
def test_few_numbers_are_turned_as_many_are(layout, shape, heads_last, monkeypatch):
    """The path without a reordering of axes gives the same bits, also for views whose heads are transposed."""
    x, cos, sin = random(shape, (*shape[-2:-1], shape[-1] // 2), (*shape[-2:-1], shape[-1] // 2))
    if heads_last and x.ndim > 2:
        x = np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)
    found = []
    for few in (0, 1 << 20):
        monkeypatch.setattr("minigrad.kernels.rope.FEW", few)
        found.append(apply_rope(x, cos, sin, layout))
    np.testing.assert_array_equal(*found)
    assert found[0].strides == found[1].strides
