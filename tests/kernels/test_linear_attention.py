"""Linear attention beside its definition and a recurrence written out, in all forms."""

import numpy as np
import pytest
from support.kernel_checks import check_threads, derived, error, of_the_threads, random, rng
from support.twins import NUMPY

import minigrad as mg
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.kernels.linear_attention import continued, linear_attention

MAPS = ["elu+1", "taylor", "identity"]
CHUNKS = [1, 3, 8, 64, None]  # the recurrent form, chunks that do and don't divide the length, the quadratic form


def features(x, name):
    """φ of one vector, written out."""
    if name == "elu+1":
        return np.array([y + 1 if y > 0 else np.exp(y) for y in x])
    root = len(x) ** -0.25
    if name == "identity":
        return x * root
    pairs = [a * b * root**2 / 2**0.5 for a in x for b in x]
    return np.array([1, *(x * root), *pairs])


def recurrence(q, k, v, name, decay=None, mask=None):
    """A head, query by query: S ← γ S + φ(k) vᵀ, z ← γ z + φ(k); the sums divide unless there is a decay."""
    state, total, rows = 0, 0, []
    for i in range(len(q)):
        phi = features(k[i], name) * (1 if mask is None else mask[i])
        state = (decay or 1) * state + np.outer(phi, v[i])
        total = (decay or 1) * total + phi
        weight = features(q[i], name) @ total
        rows.append(features(q[i], name) @ state / (weight if decay is None and name != "identity" and weight else 1))
    return np.array(rows)


@pytest.mark.parametrize("decay", [None, (0.6, 0.95)])
@pytest.mark.parametrize("name", MAPS)
def test_every_form_is_the_recurrence(name, decay):
    q, k, v = random((4, 11, 3), (2, 11, 3), (2, 11, 5))
    expected = [recurrence(q[h], k[h // 2], v[h // 2], name, decay and decay[h // 2]) for h in range(4)]
    for chunk in CHUNKS:
        assert error(linear_attention(q, k, v, None, True, name, decay, chunk), expected) < 1e-13
    assert error(linear_attention.definition(q, k, v, None, True, name, decay), expected) < 1e-13


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_every_form_has_the_gradients_of_the_definition(name, causal, dtype):
    """With keys that are hidden, shared heads, broadcast ones, and other lengths of queries than of keys."""
    mask = np.arange(9) % 4 > 0
    calls = [
        (((2, 4, 9, 4), (2, 2, 9, 4), (2, 2, 9, 3)), None),
        (((2, 4, 9, 4), (2, 2, 9, 4), (2, 2, 9, 3)), mask),
        (((2, 4, 9, 4), (1, 2, 9, 4), (2, 1, 9, 3)), np.stack([mask, ~mask])[:, None, None]),
        (((2, 2, 13, 4), (2, 2, 9, 4), (2, 2, 9, 3)), None),
        (((2, 2, 5, 4), (2, 2, 9, 4), (2, 2, 9, 3)), mask),
        (((5, 4), (9, 4), (9, 3)), None),
    ]
    for shapes, hidden in calls:
        arrays = [x.astype(dtype) for x in random(*shapes)]
        upstream = rng(3).standard_normal(linear_attention(*arrays).shape).astype(dtype)
        options = {"mask": hidden, "is_causal": causal, "feature_map": name}
        expected, wanted = derived(linear_attention.definition, arrays, upstream, **options)
        assert error(NUMPY["linear_attention"](np, *arrays, **options), expected) < (1e-13 if dtype == "f8" else 1e-5)
        for chunk in CHUNKS:
            value, grads = derived(linear_attention, arrays, upstream, **options, chunk=chunk)
            for ours, theirs in zip([value, *grads], [expected, *wanted], strict=True):
                assert ours.dtype == dtype
                assert error(ours, theirs) < (1e-12 if dtype == np.float64 else 2e-5)


@pytest.mark.parametrize("options", [
    {"is_causal": True}, {"is_causal": True, "decay": 0.8, "feature_map": "identity"}, {"feature_map": "taylor"},
    {"is_causal": True, "decay": (0.7, 0.9), "feature_map": "elu+1"}, {"is_causal": True, "feature_map": "taylor"},
], ids=str)  # fmt: skip
def test_gradients_of_first_and_second_order(options):
    arrays = random((2, 2, 5, 2), (1, 2, 5, 2), (2, 2, 5, 3))
    call = lambda q, k, v: linear_attention(q, k, v, np.arange(5) != 1, chunk=2, **options)
    assert mg.gradcheck(call, arrays)
    assert mg.gradgradcheck(call, arrays)


@pytest.mark.parametrize("number", [3.0, 1e30, -1e30, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("name", MAPS)
def test_a_later_token_changes_no_bit_of_an_earlier_row(name, decay, number):
    """Nor of the gradient of an earlier query."""
    arrays = [x.astype(np.float32) for x in random((3, 21, 4), (3, 21, 4), (3, 21, 5))]
    options = {"is_causal": True, "feature_map": name, "decay": decay, "chunk": 8}
    upstream = rng(1).standard_normal((3, 21, 5))
    before, grads = derived(linear_attention, arrays, upstream, **options)
    for changed in range(3):
        for place in (5, 10, 20):
            arrays_then = [x.copy() for x in arrays]
            arrays_then[changed][:, place] = number
            after, grads_after = derived(linear_attention, arrays_then, upstream, **options)
            np.testing.assert_array_equal(after[:, :place], before[:, :place])
            np.testing.assert_array_equal(grads_after[0][:, :place], grads[0][:, :place])
            assert (after[:, place:] != before[:, place:]).any()


@pytest.mark.parametrize("name", MAPS)
def test_a_hidden_key_changes_no_bit_whatever_it_is(name):
    arrays, mask = random((2, 9, 4), (2, 9, 4), (2, 9, 3)), np.arange(9) != 4
    for causal in (True, False):
        options = {"mask": mask, "is_causal": causal, "feature_map": name, "chunk": 4}
        before, grads = derived(linear_attention, arrays, **options)
        for number in (np.nan, np.inf, 1e300):
            q, k, v = (x.copy() for x in arrays)
            k[:, 4], v[:, 4] = number, number
            after, grads_after = derived(linear_attention, [q, k, v], **options)
            np.testing.assert_allclose(after, before, rtol=1e-15)
            for a, b in zip(grads_after, grads, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12)
        assert not grads[1][:, 4].any() and not grads[2][:, 4].any()


def test_a_row_that_sees_no_key_is_0():
    arrays = random((2, 5, 4), (2, 5, 4), (2, 5, 3))
    value, grads = derived(linear_attention, arrays, mask=np.arange(5) > 1, is_causal=True)
    assert not value[:, :2].any() and value[:, 2:].all()
    assert all(np.isfinite(g).all() for g in grads) and not grads[0][:, :2].any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_sums_of_small_features_divide_without_an_epsilon(dtype):
    """Where elu(x) + 1 rounds to 0 in float32, and beyond where it stays at exp(-40)."""
    _, _, v = random((1, 6, 3), (1, 6, 3), (1, 6, 3))
    for low in (-20.0, -50.0, -1000.0):
        q = k = np.full((1, 6, 3), low, dtype)
        value, grads = derived(linear_attention, [q, k, v.astype(dtype)], is_causal=True)
        means = np.cumsum(v.astype(dtype).astype(float), 1) / np.arange(1, 7)[:, None]
        assert error(value, means) < (2e-3 if dtype == np.float16 else 1e-5)
        assert all(np.isfinite(g).all() for g in grads)


def test_half_precision_is_summed_in_float32():
    """A sum of 4 096 ones ends at 2 048 in float16."""
    q = k = np.zeros((1, 4096, 1), np.float16)
    v = np.ones((1, 4096, 1), np.float16)
    assert (linear_attention(q, k, v, is_causal=True) == 1).all()
    assert (linear_attention(q, k, v) == 1).all()


@pytest.mark.parametrize("decay", [None, (0.9, 0.99)])
@pytest.mark.parametrize("name", MAPS)
def test_a_state_goes_on(name, decay):
    """Rows one at a time or several, from a state whose size says nothing of how many there were."""
    q, k, v = random((2, 4, 150, 4), (2, 2, 150, 4), (2, 2, 150, 3))
    mask = rng(2).random((2, 1, 1, 150)) < 0.8
    whole, state, parts, sizes, start = linear_attention(q, k, v, mask, True, name, decay), None, [], set(), 0
    for count in (1, 1, 70, 1, 64, 13):
        part = slice(start, start + count)
        arrays = *(x[..., part, :] for x in (q, k, v)), mask[..., part]
        out, state = continued(*arrays, state, name, decay)
        parts.append(out)
        sizes.add(state.shape)
        start += count
    assert error(np.concatenate(parts, 2), whole) < 1e-13
    assert len(sizes) == 1


@of_the_threads
@pytest.mark.parametrize("causal", [True, False])
def test_one_thread_is_two_bit_for_bit(causal):
    arrays = [x.astype(np.float32) for x in random((2, 8, 300, 16), (2, 4, 300, 16), (2, 4, 300, 16))]
    check_threads(linear_attention, arrays, is_causal=causal)


q = np.ones((2, 4, 5, 4))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"mask": np.zeros((5, 5))}, DTypeError, "mask of keys alone in linear attention"),
        ({"mask": np.ones((5, 5), bool)}, ShapeError, "is_causal=True hides"),
        ({"mask": np.ones((3, 1, 1, 5), bool)}, ShapeError, "keys alone"),
        ({"feature_map": "relu"}, ArgumentError, "'elu[+]1', 'taylor', 'identity'"),
        ({"feature_map": None}, ArgumentError, "a feature map"),
        ({"decay": 0.0, "is_causal": True}, ArgumentError, "above 0 and up to 1"),
        ({"decay": 1.1, "is_causal": True}, ArgumentError, "above 0 and up to 1"),
        ({"decay": (0.5, 0.5), "is_causal": True}, ArgumentError, "each of 4 heads"),
        ({"decay": 0.5}, ArgumentError, "is_causal=True beside a decay"),
        ({"chunk": 0}, ArgumentError, "a chunk of at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(options, kind, words):
    with pytest.raises(kind, match=words):
        linear_attention(q, q, q, **options)
