"""What a query may not see never changes a bit of its result or of its gradient, whatever numbers stand there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.kernel_checks import derived, rng

from minigrad.kernels import attention_tiles
from minigrad.kernels.attention import attention
from minigrad.kernels.attention_patterns import BlockPattern

pytestmark = pytest.mark.cpu_only("tiles of the CPU; tests/gpu has the same for those of a GPU")

T = 100  # queries and keys: several tiles
SHORT = 9  # all scores of a head in one tile
BLOCKS = 50  # several blocks of keys, if these are small
HUGE = [1e4, 1e20, -1e20, 3e38]  # factors: exponentials overflow; scores do; products with the gradient do
ENDLESS = [np.inf, -np.inf, np.nan]


def padding(length: int) -> Any:
    """The last third of the keys is hidden from all."""
    return np.broadcast_to(np.arange(length) < 2 * length // 3, (1, 1, length, length))


def scattered(length: int) -> Any:
    """Any key may be hidden, in each head other ones; every query sees itself."""
    return (rng(7).random((2, 4, length, length)) < 0.5) | np.eye(length, dtype=bool)


def future(length: int) -> Any:
    """Late keys are seen by earlier queries alone: by none at all, if it is causal too."""
    i, j = np.indices((length, length))
    return (i < j) | (j < length // 2)


def blocks(length: int) -> Any:
    """Every query sees its own block, and one other."""
    return BlockPattern.local(length, 1 + length // 8, reach=0, drawn=1)


CASES: dict[str, Any] = {
    "causal": lambda n: {"is_causal": True},
    "window": lambda n: {"window": 1 + n // 4},
    "causal window": lambda n: {"window": 1 + n // 4, "is_causal": True},
    "padding": lambda n: {"mask": padding(n)},
    "scattered": lambda n: {"mask": scattered(n)},
    "scattered, causal": lambda n: {"mask": scattered(n), "is_causal": True},
    "future, causal": lambda n: {"mask": future(n), "is_causal": True},
    "scattered, window": lambda n: {"mask": scattered(n), "window": 1 + n // 4},
    "blocks": lambda n: {"pattern": blocks(n)},
    "causal blocks": lambda n: {"pattern": blocks(n), "is_causal": True},
    "causal, dropped": lambda n: {"is_causal": True, "dropout_p": 0.3, "seed": 5},
}


@pytest.fixture(params=[SHORT, T, BLOCKS], ids=["one tile", "tiles", "blocks"])
def length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of queries and of keys."""
    if request.param == BLOCKS:
        monkeypatch.setattr(attention_tiles, "ROWS", 16)
        monkeypatch.setattr(attention_tiles, "KEYS", 16)
    return int(request.param)


def seen(
    length: int, mask: Any = None, is_causal: bool = False, window: Any = None, pattern: Any = None, **_: Any
) -> Any:
    """Which query sees which key: (2, 4, queries, keys)."""
    i, j = np.indices((length, length))
    allowed = (np.abs(i - j) < (window or np.inf)) & ((j <= i) | (not is_causal))
    if pattern is not None:
        allowed &= np.kron(pattern.blocks, np.ones((pattern.size, pattern.size), bool))[:length, :length]
    return np.broadcast_to(allowed & (True if mask is None else mask), (2, 4, length, length))


def arrays(length: int, dtype: Any) -> list[Any]:
    """q, k, v and the upstream gradient: two batches, four heads of queries, of which two share keys."""
    shapes = (2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 8), (2, 4, length, 8)
    return [rng(n).standard_normal(shape).astype(dtype) for n, shape in enumerate(shapes)]


def run(q: Any, k: Any, v: Any, g: Any, options: dict[str, Any]) -> list[Any]:
    out, gradients = derived(attention, [q, k, v], g, **options)
    return [out, *gradients[:3]]


def watched(length: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """Queries of the first batch, and the keys (2 heads, keys) that none of them sees."""
    queries = np.arange(length) < length // 2
    if "mask" in options or "pattern" in options:
        queries = np.arange(length) == length // 2  # one alone, from which many are hidden
    sees = seen(length, **options)[0][:, queries].any(1)
    hidden = ~sees.reshape(2, 2, length).any(1)
    assert hidden.any() and not hidden.all()
    return queries, hidden


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_hidden_numbers_change_no_bit(case: str, length: int, dtype: Any) -> None:
    options = CASES[case](length)
    q, k, v, g = arrays(length, dtype)
    queries, hidden = watched(length, options)
    before = run(q, k, v, g, options)
    factors = [*HUGE, *([] if dtype == np.float32 else [1e300]), *ENDLESS]
    for factor in factors:
        for changes in ("keys", "values", "keys and values") if dtype == np.float32 else ("keys and values",):
            k2, v2 = k.copy(), v.copy()
            with np.errstate(over="ignore"):
                for x, name in ((k2, "keys"), (v2, "values")):
                    if name in changes:
                        x[0][hidden] *= dtype(factor)
            after = run(q, k2, v2, g, options)
            for name, a, b in zip(("out", "dq"), before, after, strict=False):
                np.testing.assert_array_equal(a[0][:, queries], b[0][:, queries], f"{name}, {changes} {factor}")
                np.testing.assert_array_equal(a[1], b[1], f"{name} of the other batch, {changes} {factor}")
            for name, a, b in zip(("dk", "dv"), before[2:], after[2:], strict=True):
                np.testing.assert_array_equal(a[1], b[1], f"{name} of the other batch, {changes} {factor}")


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_keys_hear_of_those_alone_that_see_them(case: str, length: int) -> None:
    """Where only the watched queries count, hidden keys have a gradient of 0, and the others the same bits."""
    options = CASES[case](length)
    q, k, v, g = arrays(length, np.float32)
    queries, hidden = watched(length, options)
    g[0][:, ~queries] = 0
    before = run(q, k, v, g, options)
    k[0][hidden] *= 1e18
    v[0][hidden] *= 1e18
    after = run(q, k, v, g, options)
    for a, b in zip(before[2:], after[2:], strict=True):
        np.testing.assert_array_equal(a, b)
        assert not a[0][hidden].any() and a[0][~hidden].any()


def test_a_query_hears_of_no_other(length: int) -> None:
    """Neither a query beside it, nor one of another head or batch: huge, infinite or not a number."""
    q, k, v, g = arrays(length, np.float32)
    for options in ({}, {"is_causal": True}):
        out, dq, _, _ = run(q, k, v, g, options)
        for factor in (1e3, 1e20, np.inf, np.nan):
            other = q.copy()
            other[0, 1, 3] *= np.float32(factor)
            out2, dq2, _, _ = run(other, k, v, g, options)
            rest = np.ones(q.shape[:3], bool)
            rest[0, 1, 3] = False
            np.testing.assert_array_equal(out[rest], out2[rest])
            np.testing.assert_array_equal(dq[rest], dq2[rest])


@pytest.mark.parametrize("number", ENDLESS)
def test_who_sees_a_nonfinite_value_gets_it(length: int, number: float) -> None:
    q, k, v, g = arrays(length, np.float32)
    v[0, 0, length - 2, 5] = number
    out = run(q, k, v, g, {"is_causal": True})[0]
    np.testing.assert_array_equal(out[0, :2, -2:, 5], np.full((2, 2), number))
    out[0, :2, -2:, 5] = 0
    assert np.isfinite(out).all()


@pytest.mark.parametrize("special", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_a_nonfinite_query_gives_keys_that_it_does_not_see_nothing(case, dtype, special, length) -> None:
    """Their gradients are those where that query is 0 and its result counts for nothing."""
    options = CASES[case](length)
    q, k, v, g = arrays(length, dtype)
    queries, hidden = watched(length, options)
    q[0][:, queries] = special
    with np.errstate(all="ignore"):
        found = run(q, k, v, g, options)
    q[0][:, queries] = 0
    g[0][:, queries] = 0
    right = run(q, k, v, g, options)
    for a, b in zip(found[2:], right[2:], strict=True):
        np.testing.assert_allclose(a[0][hidden], b[0][hidden], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(a[1], b[1], rtol=1e-4, atol=1e-5)
