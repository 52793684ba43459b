import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_checks import (
    DTYPES,
    check_threads,
    derived,
    error,
    is_floating,
    of_the_threads,
    random,
    rng,
    torch_derived,
)

import minigrad as mg
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.kernels import attention_tiles
from minigrad.kernels.attention import attention
from minigrad.kernels.attention_patterns import BlockPattern, Pattern
from minigrad.kernels.attention_tiles import dropout_mask


def twin(q, k, v, mask=None, is_causal=False, scale=None, window=None, pattern=None):
    """The formula in torch, with the T × T weights."""
    group = q.shape[-3] // k.shape[-3] if q.ndim > 2 and k.ndim > 2 and q.shape[-3] > 1 else 1
    if group > 1:
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    i, j = np.indices(scores.shape[-2:])
    if pattern is not None:
        pattern = pattern if isinstance(pattern, Pattern) else Pattern(grid=pattern)
        i = i + pattern.start
    seen = (np.abs(i - j) < (window or np.inf)) & ((j <= i) | (not is_causal))
    if pattern is not None and pattern.grid is not None:
        dense = np.kron(pattern.grid.blocks, np.ones([pattern.grid.size] * 2, bool))
        seen = seen & dense[pattern.start :][: seen.shape[0], : seen.shape[1]]
    seen = torch.from_numpy(seen).expand(scores.shape)
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask > -np.inf)
        scores = scores + (0 if mask.dtype == torch.bool else torch.where(mask > -np.inf, mask, 0))
    some = seen.any(-1, keepdim=True)
    weights = torch.where(seen | ~some, scores, -np.inf).softmax(-1) * some
    return weights @ v


def check(args, dtypes=DTYPES, **options):
    """Value and gradients beside torch and beside the definition.

    The largest error of the gradients is taken over the largest value in any of them: those of q and k are differences
    of numbers of that order, and 0 but for rounding where a query sees one key.
    """
    for dtype in dtypes:
        cast = [a.astype(dtype) if is_floating(a) else a for a in args]
        upstream = rng(1).standard_normal(attention(*cast, **options).shape).astype(dtype)
        value, grads = derived(attention, cast, upstream, **options)
        assert all(array.dtype == dtype for array in (value, *grads))
        limit = 1e-12 if dtype == np.float64 else 1e-6 * max(10, args[1].shape[-2] ** 0.5)
        for expected, wanted in (
            torch_derived(twin, cast, upstream, **options),
            derived(attention.definition, cast, upstream, **options),
        ):
            unit = max(1e-3, *(np.abs(gradient).max() for gradient in wanted))
            assert error(value, expected) < limit
            assert all(
                a.shape == b.shape and np.abs(a - b).max() < limit * unit for a, b in zip(grads, wanted, strict=True)
            )


SHAPES = [  # q, k, v
    ((2, 3, 70, 4), (2, 3, 70, 4), (2, 3, 70, 4)),
    ((5, 3), (7, 3), (7, 2)),
    ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    ((2, 1, 5), (2, 9, 5), (2, 9, 5)),  # one query
    ((2, 4, 1, 3), (2, 2, 9, 3), (2, 2, 9, 3)),  # the same for grouped heads, as in decoding
    ((3, 8, 65, 2), (3, 2, 129, 2), (3, 2, 129, 5)),  # groups of 4 heads
    ((2, 6, 9, 3), (2, 1, 9, 3), (2, 1, 9, 3)),  # one head of keys for all
    ((2, 1, 4, 5, 3), (3, 4, 6, 3), (4, 6, 3)),  # leading axes broadcast
    ((1, 4, 20, 4), (2, 4, 20, 4), (4, 20, 4)),
    ((4, 1, 20, 4), (4, 3, 20, 4), (4, 3, 20, 4)),  # one head of queries for all
    ((1, 2, 600, 8), (1, 2, 600, 8), (1, 2, 600, 8)),  # several blocks of keys
    ((2, 200, 3), (2, 40, 3), (2, 40, 3)),  # with a window, late queries see nothing
]
SCATTERED = BlockPattern(rng(5).random((40, 40)) < 0.3, 16)  # some queries see nothing
BIG_BIRD = BlockPattern.local(640, 70, reach=1, first=1, drawn=1)  # tiles of 64 rows don't share out a block
OPTIONS = [
    {},
    {"is_causal": True},
    {"window": 1},
    {"window": 5, "is_causal": True},
    {"window": 70},
    {"pattern": SCATTERED, "is_causal": True},
    {"pattern": BIG_BIRD},
    {"pattern": BIG_BIRD, "window": 33},
    {"pattern": Pattern(start=9, grid=SCATTERED), "is_causal": True},
    {"pattern": Pattern(start=30), "window": 20, "is_causal": True},
    {"scale": 0.1},
    {"scale": 40.0},  # the exponentials would overflow in float32, so the maximum is taken off
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_is_torch(shapes, options):
    q, k, v = random(*shapes)
    if "scale" in options:  # weights of a saturated softmax hang on the last digits of the scores
        q, k = np.round(q * 8) / 8, np.round(k * 8) / 8
    check([q, k, v], **options)


def masks(name, lead, queries, keys):
    generator = rng(3)
    boolean = generator.random((queries, keys)) < 0.6
    boolean[0] = False
    added = generator.standard_normal((*lead, queries, keys))
    return {
        "boolean": boolean,
        "padding": generator.random((lead[0], 1, 1, keys)) < 0.7,
        "heads": generator.random((lead[1], 1, 1)) < 0.7,
        "added": np.where(boolean, added, -np.inf),
        "bias": added[0, :, :, :1],
        "number": np.full((1,), 3.0),
    }[name]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": 7}, {"pattern": SCATTERED}], ids=str)
@pytest.mark.parametrize("shapes", [SHAPES[0], SHAPES[5]], ids=str)
@pytest.mark.parametrize("name", ["boolean", "padding", "heads", "added", "bias", "number"])
def test_masks(name, shapes, options):
    """Values and gradients, those of an added mask too, with rows that see nothing."""
    mask = masks(name, shapes[0][:2], shapes[0][-2], shapes[1][-2])
    check([*random(*shapes), mask], **options)


size = st.integers(1, 13)


@given(st.data())
def test_borders_of_tiles(data):
    """With tiles of a few numbers, small calls of every shape cross their borders."""
    queries, keys, heads, group, d, batch = (data.draw(s) for s in (size, size, *[st.integers(1, 3)] * 4))
    options = {"is_causal": data.draw(st.booleans()), "window": data.draw(st.none() | st.integers(1, 9))}
    grid = BlockPattern(rng(2).random((13, 13)) < 0.5, data.draw(st.integers(1, 4)))
    blocks = grid.blocks.shape[0] * grid.size
    start = data.draw(st.integers(0, 9))
    if data.draw(st.booleans()) and max(queries + start, keys) <= blocks:
        options["pattern"] = Pattern(start=start, grid=grid)
    mask = [data.draw(st.none()) if data.draw(st.booleans()) else rng(0).random((heads * group, queries, keys)) < 0.5]
    shapes = [(batch, heads * group, queries, d), (batch, heads, keys, d), (batch, heads, keys, d)]
    with pytest.MonkeyPatch.context() as patch:
        for name, small in {"ROWS": 4, "KEYS": 3, "TILE": 40, "COPIES": 60}.items():
            patch.setattr(attention_tiles, name, small)
        check([*random(*shapes), *mask], **options)


def test_a_masked_row_adds_nothing():
    """The masked row gives 0 and no gradient, so weights shared with other rows keep theirs."""
    q, k, v = np.array([[1.0], [1.0]]), np.array([[0.0], [0.0]]), np.array([[2.0], [4.0]])
    mask = np.array([[False, False], [True, True]])
    added = np.where(mask, 0.0, -np.inf)
    for form in (mask, added):
        value, grads = derived(attention, [q, k, v, form])
        expected = [[[0], [0]], [[-0.5], [0.5]], [[0.5], [0.5]], [[0, 0], [-0.5, 0.5]]]
        np.testing.assert_array_equal(value, [[0], [3]])
        for ours, right in zip(grads, expected[: len(grads)], strict=True):
            np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize(("score", "factor"), [(30, 1e30), (88, 1e-5), (86, 1), (-80, 1), (-200, 1e-25), (500, 1e30)])
def test_no_overflow_or_underflow_on_the_way(score, factor):
    """Equal weights give the mean of the values, where the exponentials, their sum or the products leave float32."""
    n = 50
    q, k = np.full((1, n, 1), float(score), np.float32), np.ones((1, n, 1), np.float32)
    v = (factor * (1 + random((1, n, 1))[0] ** 2)).astype(np.float32)
    upstream = (random((1, n, 1), seed=2)[0] / factor).astype(np.float32)
    with np.errstate(all="raise"):
        value, (gq, gk, gv) = derived(attention, [q, k, v], upstream, scale=1.0)
    mean, total = v.astype(np.float64).mean(), upstream.astype(np.float64).sum()
    np.testing.assert_allclose(value[0, :, 0], np.full(n, mean), rtol=1e-5)
    np.testing.assert_allclose(gv[0, :, 0], np.full(n, total / n), rtol=1e-4)
    np.testing.assert_allclose(gk[0, :, 0], score * total * (v[0, :, 0] - mean) / n, rtol=1e-3, atol=1e-4 * abs(score))
    np.testing.assert_allclose(gq, np.zeros_like(gq), atol=1e-5)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_nan_and_infinity_are_not_hidden(special):
    q, k, v = random((3, 2), (3, 2), (3, 2))
    q[1, 0] = special
    with np.errstate(invalid="ignore"):
        value = attention(q, k, v)
        expected = attention.definition(q, k, v)
    assert np.isnan(value[1]).all()
    np.testing.assert_allclose(value[[0, 2]], expected[[0, 2]], rtol=1e-12)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, 1e30, 1e4])
@pytest.mark.parametrize("queries", ["random", "zero"])
def test_a_hidden_key_changes_no_result(special, queries):
    """Rows before it are as if it weren't there, whatever its exponential is."""
    q, k, v = (a.astype(np.float32) for a in random(*[(2, 150, 4)] * 3))
    q *= queries == "random"
    expected = attention(q[:, :100], k[:, :100], v[:, :100], is_causal=True)
    k[:, 100] = special
    with np.errstate(all="ignore"):
        value = attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(value[:, :100], expected, rtol=1e-5, atol=1e-6)


def test_a_hidden_exponential_that_overflows_where_every_seen_score_is_0():
    """The backward pass too begins again with a shift, of 0 here. dv = Pᵀ g with P = ((1, 0), (½, ½))."""
    q, k, v = (np.array(a, np.float32) for a in ([[1, 0], [0, 0]], [[0, 1], [100, 0]], [[2, 3], [4, 7]]))
    upstream = np.array([[1, 2], [3, 5]], np.float32)
    with np.errstate(all="raise"):
        value, (gq, gk, gv) = derived(attention, [q, k, v], upstream, scale=1.0, is_causal=True)
    np.testing.assert_array_equal(value, [[2, 3], [3, 5]])
    np.testing.assert_array_equal(gv, [[2.5, 4.5], [1.5, 2.5]])
    row = np.array([-6.5, 6.5])  # P (g vᵀ - D) of the second: ½ (21 - 34), ½ (47 - 34)
    np.testing.assert_array_equal(gq, [[0, 0], row @ k])
    np.testing.assert_array_equal(gk, np.zeros((2, 2)))


@pytest.mark.parametrize(("queries", "keys"), [(64, 513), (40, 2000), (50, 50), (130, 130), (3, 513)])
def test_hidden_scores_at_the_edge_of_overflow(queries, keys):
    """An exponential that is finite forward is finite backward: both passes round its score alike."""
    top, draw = np.log(np.finfo(np.float32).max), rng(0).standard_normal
    for _ in range(40):
        q, k, v = (np.zeros((1, n, 3), np.float32) for n in (queries, keys, keys))
        q[0, 0], k[0, queries - 1] = draw((2, 3))
        k[0, queries - 1] *= top / (q[0, 0] @ k[0, queries - 1] / np.sqrt(3))  # a score that query 0 doesn't see
        value, grads = derived(attention, [q, k, v + 1], is_causal=True)
        assert all(np.isfinite(a).all() for a in (value, *grads))


@pytest.mark.cpu_only("the memory order of a kernel of the CPU")
def test_results_lie_in_memory_as_the_arguments():
    """Heads that were transposed out of (batch, positions, heads, d) go back without a copy, in both directions."""
    args = [a.transpose(0, 2, 1, 3) for a in random(*[(2, 30, 3, 4)] * 3)]
    upstream = random((2, 30, 3, 4))[0].transpose(0, 2, 1, 3)
    leaves = [mg.asarray(a) for a in args]
    for leaf in leaves:
        leaf.requires_grad = True
    out = attention(*leaves, is_causal=True)
    grads = mg.grad(out, leaves, mg.asarray(upstream))
    expected, wanted = derived(attention, [a.copy() for a in args], upstream.copy(), is_causal=True)
    for ours, theirs in zip([out, *grads], [expected, *wanted], strict=True):
        np.testing.assert_allclose(ours.data, theirs, rtol=0, atol=1e-14)
    assert out.data.transpose(0, 2, 1, 3).flags.c_contiguous


@pytest.mark.parametrize("step", [-1, 2])
def test_strided_arguments(step):
    wide = random((2, 20, 8), (2, 20, 8), (2, 20, 8))
    views = [a[:, ::step, ::step] for a in wide]
    shape = attention(*views).shape
    upstream = random((*shape[:-1], 2 * shape[-1]), seed=4)[0][..., ::2]
    value, grads = derived(attention, [a.copy() for a in views], upstream)
    leaves = [mg.asarray(a) for a in views]
    for leaf in leaves:
        leaf.requires_grad = True
    out = attention(*leaves)
    for ours, theirs in zip([out, *mg.grad(out, leaves, mg.asarray(upstream))], [value, *grads], strict=True):
        np.testing.assert_allclose(ours.data, theirs, rtol=0, atol=1e-14)


def test_half_precision():
    """Computed in float32 and rounded once: 4096 weights of 1/4096 sum to 1, where float16 would stop before."""
    q, k, v = (a.astype(np.float16) for a in random((2, 70, 8), (2, 70, 8), (2, 70, 8)))
    upstream = random((2, 70, 8), seed=5)[0].astype(np.float16)
    value, grads = derived(attention, [q, k, v], upstream, is_causal=True)
    expected, wanted = torch_derived(twin, [q, k, v], upstream, is_causal=True)
    for ours, theirs in zip([value, *grads], [expected, *wanted], strict=True):
        assert ours.dtype == np.float16
        assert error(ours, theirs) < 2e-3
    flat = np.zeros((1, 1, 2), np.float16), np.zeros((1, 4096, 2), np.float16), np.ones((1, 4096, 2), np.float16)
    np.testing.assert_array_equal(attention(*flat), np.ones((1, 1, 2)))


@pytest.mark.parametrize("shapes", [((0, 2, 3, 4), (0, 2, 5, 4)), ((2, 2, 0, 4), (2, 2, 5, 4)), ((2, 3, 4), (2, 0, 4))])
def test_empty(shapes):
    q, k = random(*shapes)
    value, grads = derived(attention, [q, k, k], is_causal=True)
    assert value.shape == q.shape
    for ours, shape in zip([value, *grads], [q.shape, q.shape, k.shape, k.shape], strict=True):
        np.testing.assert_array_equal(ours, np.zeros(shape))


# ---- dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": 30}, {"pattern": SCATTERED}], ids=str)
@pytest.mark.parametrize("shapes", [SHAPES[0], SHAPES[1], SHAPES[5], SHAPES[10]], ids=str)
def test_dropout_is_that_of_the_definition(shapes, options):
    """In every tile the same weights are dropped as in the definition, forward and backward."""
    for dtype, limit in ((np.float64, 1e-12), (np.float32, 1e-5)):
        args = [a.astype(dtype) for a in random(*shapes)]
        params = {"dropout_p": 0.3, "seed": 7, **options}
        upstream = np.cos(np.arange(attention(*args).size)).reshape(attention(*args).shape)
        ours, theirs = (derived(f, args, upstream, **params) for f in (attention, attention.definition))
        for a, b in zip([ours[0], *ours[1]], [theirs[0], *theirs[1]], strict=True):
            assert error(a, b) < limit


def test_dropout_is_fair():
    """Shares of rows, columns and of pairs of neighbours are those of independent draws, within five deviations."""
    p, n = 0.3, 500
    keep = dropout_mask(5, np.arange(n), slice(0, n), p)
    sigma = np.sqrt(p * (1 - p) / n)
    assert np.abs(keep.mean(0) - (1 - p)).max() < 5 * sigma
    assert np.abs(keep.mean(1) - (1 - p)).max() < 5 * sigma
    both = [keep[1:] & keep[:-1], keep[:, 1:] & keep[:, :-1], keep & dropout_mask(6, np.arange(n), slice(0, n), p)]
    for pairs in both:
        assert abs(pairs.mean() - (1 - p) ** 2) < 5 / n
    np.testing.assert_array_equal(keep[100:103, 200:300], dropout_mask(5, np.arange(100, 103), slice(200, 300), p))


def test_dropout_keeps_the_mean():
    """With equal weights a row is the share of kept keys over 1 - p: its mean is 1; p = 1 leaves nothing."""
    q, v = np.zeros((1000, 1)), np.ones((1000, 1))
    rows = attention(q, q, v, dropout_p=0.25, seed=1)
    assert abs(rows.mean() - 1) < 5 * np.sqrt(0.25 / 0.75 / 1e6)
    np.testing.assert_array_equal(attention(q, q, v, dropout_p=1.0), np.zeros((1000, 1)))
    assert (rows != attention(q, q, v, dropout_p=0.25, seed=2)).mean() > 0.9


# ---- patterns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [9, 70, 600])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_hides_nothing_is_full_attention_bit_for_bit(length, is_causal):
    args = [a.astype(np.float32) for a in random((1, 4, length, 8), (1, 2, length, 8), (1, 2, length, 8))]
    plain = derived(attention, args, is_causal=is_causal)
    for options in ({"window": length}, {"window": 10**9}, {"pattern": Pattern()}):
        value, grads = derived(attention, args, is_causal=is_causal, **options)
        for a, b in zip([plain[0], *plain[1]], [value, *grads], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.cpu_only("scores of the tiles of the CPU")
def test_empty_blocks_cost_nothing(monkeypatch):
    """The scores that are computed, forward and backward, are those of the blocks that are seen."""
    computed = []
    scores = attention_tiles.AttentionCall.scores
    counted = lambda call, *args: computed.append(scores(call, *args)) or computed[-1]
    monkeypatch.setattr(attention_tiles.AttentionCall, "scores", counted)
    for size in (32, 64, 256):
        pattern = BlockPattern.local(2048, size, reach=0, first=0, drawn=2)
        computed.clear()
        derived(attention, random(*[(2, 2048, 4)] * 3), pattern=pattern)
        assert sum(part.size for part in computed) == 2 * 2 * pattern.blocks.sum() * size**2


@pytest.mark.parametrize(
    "options",
    [{"window": 3}, {"pattern": BlockPattern(np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]]) > 0, 2)}],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_derivatives_of_both_orders(options, is_causal):
    args = random((2, 6, 3), (1, 6, 3), (1, 6, 2))
    assert mg.gradcheck(lambda *x: attention(*x, is_causal=is_causal, **options), args)
    assert mg.gradgradcheck(lambda *x: attention(*x, is_causal=is_causal, **options), args)


def test_patterns_of_blocks():
    """Each beside its words."""
    n, size = 12, 5
    local = BlockPattern.local(58, size, reach=2, first=1, drawn=2, seed=3).blocks
    for a, b in np.ndindex(n, n):
        assert local[a, b] or (abs(a - b) > 2 and a and b)
    assert (local.sum(1) == np.minimum(BlockPattern.local(58, size, 2, 1).blocks.sum(1) + 2, n)).all()
    np.testing.assert_array_equal(BlockPattern.local(58, size, 2, 1, 2, seed=3).blocks, local)
    strided = BlockPattern.strided(60, size, 4).blocks
    for a, b in np.ndindex(n, n):
        assert strided[a, b] == (abs(a - b) < 4 or abs(a - b) in (4, 8))
    both = BlockPattern.local(60, size) | BlockPattern.strided(56, size, 6)
    np.testing.assert_array_equal(
        both.blocks, BlockPattern.local(60, size).blocks | BlockPattern.strided(60, size, 6).blocks
    )


# ---- threads, memory, errors ----------------------------------------------------------------------------------------

WIDE = BlockPattern.local(700, 64, reach=0, drawn=2)


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"dropout_p": 0.2}, {"window": 40}, {"pattern": WIDE}], ids=str
)
@pytest.mark.parametrize("shape", [(4, 8, 130, 16), (1, 3, 700, 8)])
@of_the_threads
def test_threads(shape, options):
    check_threads(attention, [a.astype(np.float32) for a in random(shape, shape, shape)], **options)


@of_the_threads
def test_threads_with_a_mask_that_learns(monkeypatch):
    """Tiles of all heads add to the gradient of one mask: always in the same order."""
    monkeypatch.setattr(attention_tiles, "TILE", 5000)
    shape = (2, 32, 130, 8)
    check_threads(attention, [a.astype(np.float32) for a in random(shape, shape, shape, (130, 130))])


def test_no_array_of_all_scores():
    """64 MB of scores are never there at once: the peak stays below 16 MB, forward and backward."""
    args = [a.astype(np.float32) for a in random(*[(1, 4096, 8)] * 3)]
    derived(attention, [a[:, :10] for a in args])
    tracemalloc.start()
    derived(attention, args, np.ones((1, 4096, 8)), is_causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6


ok = np.zeros((2, 3, 4))


@pytest.mark.parametrize(
    ("kind", "args", "options", "words"),
    [
        (ShapeError, [ok, np.zeros((2, 3, 5)), ok], {}, "k (2, 3, 5)"),
        (ShapeError, [ok, ok, np.zeros((2, 4, 4))], {}, "v (2, 4, 4)"),
        (ShapeError, [np.zeros(4), ok, ok], {}, "q (4,)"),
        (ShapeError, [np.zeros((3, 3, 4)), ok, ok], {}, "multiple"),
        (ShapeError, [ok, np.zeros((4, 3, 4)), np.zeros((4, 3, 4))], {}, "multiple"),
        (ShapeError, [np.zeros((2, 2, 3, 4)), np.zeros((3, 2, 3, 4)), ok], {}, "broadcast"),
        (ShapeError, [ok, ok, ok, np.ones((4, 3), bool)], {}, "(2, 3, 3)"),
        (ShapeError, [ok, ok, ok, np.ones((5, 1, 3, 3), bool)], {}, "(5, 1, 3, 3)"),
        (DTypeError, [ok, ok, ok.astype(int)], {}, "int64"),
        (DTypeError, [ok, ok, ok, np.ones((3, 3), int)], {}, "True where attention is allowed"),
        (ArgumentError, [ok, ok, ok], {"window": 0}, "window"),
        (ShapeError, [ok, ok, ok], {"pattern": BlockPattern([[True]], 2)}, "2 x 2 blocks of 2"),
        (ShapeError, [ok, ok, ok], {"pattern": Pattern(start=2, grid=BlockPattern([[True]], 4))}, "5 queries"),
        (DTypeError, [ok, ok, ok], {"pattern": np.ones((3, 3), bool)}, "nn.BlockPattern"),
        (ArgumentError, [ok, ok, ok], {"dropout_p": 1.5}, "dropout_p"),
    ],
)
@pytest.mark.parametrize("tensors", [False, True])
def test_errors(kind, args, options, words, tensors):
    args = [mg.Tensor(a, requires_grad=is_floating(a)) for a in args] if tensors else args
    with pytest.raises(kind) as caught:
        attention(*args, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: BlockPattern([[1, 0]], 4), DTypeError, "int64"),
        (lambda: BlockPattern([True], 4), ShapeError, "(1,)"),
        (lambda: BlockPattern([[True]], 0), ArgumentError, "size=0"),
        (lambda: BlockPattern.local(0, 4), ArgumentError, "length=0"),
        (lambda: BlockPattern.local(8, 4, reach=-1), ArgumentError, "reach=-1"),
        (lambda: BlockPattern.strided(8, 4, 0), ArgumentError, "stride=0"),
        (lambda: BlockPattern.local(8, 4) | BlockPattern.local(8, 2), ShapeError, "blocks of 2"),
    ],
)
def test_patterns_that_are_none(make, kind, words):
    with pytest.raises(kind) as caught:
        make()
    assert words in str(caught.value)


OVERFLOWING = {
    "plain": ((2, 3, 9, 4), (2, 3, 9, 4), {}),
    "causal": ((2, 70, 4), (2, 70, 4), {"is_causal": True}),
    "window": ((90, 4), (90, 4), {"window": 20}),
    "shared keys": ((2, 4, 7, 4), (2, 2, 7, 4), {}),
    "mask": ((1, 9, 4), (3, 9, 4), {"mask": np.tri(9, dtype=bool)}),
    "numbers": ((1, 9, 4), (3, 9, 4), {"mask": np.tri(9, dtype=np.float32)}),
    "dropout": ((2, 9, 4), (2, 9, 4), {"dropout_p": 0.5}),
}


@pytest.mark.cpu_only("on a GPU such scores give NaN")
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "definition"])
@pytest.mark.parametrize("name", OVERFLOWING)
@pytest.mark.parametrize("size", [1e36, 3e37])
def test_scores_beyond_the_range_of_float32_are_those_of_float64(name, size, kernel):
    """Half of the queries make scores of 1e38 to 1e40, and choose one key; values and upstream are whole numbers."""
    shape, keys, options = OVERFLOWING[name]
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal(s).astype(np.float32) for s in (shape, keys, keys))
    q *= np.where(np.arange(shape[-2]) % 2, 0.01, size).astype(np.float32)[:, None]
    v, options = np.rint(2 * v), {"scale": 100.0, **options}
    operation = attention if kernel else attention.definition
    g = random.integers(-2, 3, (*np.broadcast_shapes(shape[:-3], keys[:-3]), *shape[-3:-1], 4))
    found = []
    for dtype in (np.float32, np.float64):
        leaves = [mg.Tensor(x.astype(dtype), requires_grad=True) for x in (q, k, v)]
        out = operation(*leaves, **options)
        out.backward(np.broadcast_to(g, out.shape).astype(dtype))
        found.append([out.data, *(x.grad for x in leaves)])
    for ours, wanted in zip(*found, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5 * abs(wanted).max())


@pytest.mark.cpu_only("on a GPU such scores give NaN")
def test_scores_beyond_the_range_choose_one_key():
    """Of float64 too, and in second derivatives; a score of -1e40 for every key is one as any other."""
    for dtype, size in ((np.float32, 1e25), (np.float64, 1e200)):
        if np.finfo(np.longdouble).maxexp > np.finfo(dtype).maxexp:
            q, k, v = (
                mg.Tensor(x, dtype=dtype, requires_grad=True)
                for x in ([[size], [-size]], [[size], [2 * size]], [[3.0], [5.0]])
            )
            out = attention(q, k, v)
            np.testing.assert_array_equal(out.data, [[5.0], [3.0]])
            for x, wanted in zip(
                (q, k, v), mg.grad(out, [q, k, v], np.array([[1.0], [7.0]], dtype), create_graph=True), strict=True
            ):
                np.testing.assert_array_equal(wanted.data, [[7.0], [1.0]] if x is v else [[0.0], [0.0]])


@pytest.mark.cpu_only("on a GPU such scores give NaN")
@pytest.mark.parametrize("length", [9, 150])
def test_scores_beyond_the_range_change_no_row_that_sees_no_such_key(length):
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, length, 4)).astype(np.float32) for _ in range(3))
    found = []
    for factor in (1.0, 1e38):
        k[:, -3:] *= np.float32(factor)
        leaves = [mg.Tensor(x.copy(), requires_grad=True) for x in (q, k, v)]
        out = attention(*leaves, is_causal=True)
        out.backward(np.ones(out.shape, np.float32))
        found.append([out.data[:, :-3], leaves[0].grad[:, :-3]])
    for before, after in zip(*found, strict=True):
        assert before.tobytes() == after.tobytes()
