"""How attention is cut into tiles: sizes and checks of a call, its tiles, and their scores.

Axes: n batch, h head of k and v, g head of q among those that share h, i query, j key, d feature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from minigrad.backend import Array, accumulator, array_module, is_array, is_floating
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.kernels.attention_patterns import Block, Pattern, blocks_of, cost, pattern_of
from minigrad.machine.loops import dot, exp, helper, loop
from minigrad.machine.parallel import scratch

ROWS, LONG = 64, 1024  # queries of a tile: fewer waste less above the diagonal, more make better matrix products,
LONG_ROWS = 128  # and of a sequence of LONG queries the diagonal is a small part
KEYS = 512  # keys of a block
TILE = 1 << 18  # scores of a block over all its heads: 1 MB of float32, which two threads share out of the L3 cache
COPIES = 1 << 20  # numbers in the copy of k, backward of v too, that a thread works with, unless one head has more

Place: TypeAlias = tuple[slice, slice, slice, slice]  # of a tile: its n, h, all of g, and i


# ---- sizes ----------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes of a call, read off its shapes."""

    lead: tuple[int, ...]  # leading axes of q, k and v, broadcast
    heads: int  # of k and v
    group: int  # heads of q to each of them
    scores: tuple[int, ...]  # the shape that the scores would have: (*lead, heads of q, queries, keys)


def sizes_of(q: Any, k: Any, v: Any, mask: Any) -> Sizes:
    """The sizes of a call, from arrays or Tensors; an error where they don't fit."""
    if not all(is_floating(x.dtype) for x in (q, k, v)):
        raise DTypeError("floating-point q, k and v", f"{q.dtype}, {k.dtype} and {v.dtype}", "astype('float32') first")
    sizes = _sizes(q.shape, k.shape, v.shape)
    if mask is not None:
        _check_mask(mask, sizes.scores)
    return sizes


@lru_cache(maxsize=256)
def _sizes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> Sizes:
    shapes = f"q {q}, k {k}, v {v}"
    if min(len(q), len(k), len(v)) < 2 or q[-1] != k[-1] or k[-2] != v[-2]:
        raise ShapeError(
            "q (..., heads, L, d), k (..., heads, S, d) and v (..., heads, S, d_v)", shapes, "x[None] adds an axis"
        )
    heads_q, heads_k, heads_v = ((1, *shape)[-3] for shape in (q, k, v))
    try:
        lead = np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
        (heads,) = np.broadcast_shapes((heads_k,), (heads_v,))
    except ValueError:
        raise ShapeError("leading axes that broadcast", shapes, "lengths equal or 1") from None
    if heads_q % max(heads, 1) and heads_q != 1:
        hint = f"with {heads} heads of k and v, q has {heads}, {2 * heads}, {3 * heads} ... heads, or 1"
        raise ShapeError("heads of q that are a multiple of those of k and v", shapes, hint)
    group = 1 if heads_q == 1 else heads_q // max(heads, 1)
    matrices = max(len(q), len(k), len(v)) == 2  # no axis of heads at all
    return Sizes(lead, heads, group, (*(() if matrices else (*lead, heads * group)), q[-2], k[-2]))


def _check_mask(mask: Any, scores: tuple[int, ...]) -> None:
    if mask.dtype.kind != "b" and not is_floating(mask.dtype):
        hint = "True where attention is allowed, or numbers that are added to the scores"
        raise DTypeError("a boolean or floating-point mask", f"dtype {mask.dtype}", hint)
    tail = scores[len(scores) - mask.ndim :] if mask.ndim <= len(scores) else ()
    if mask.ndim > len(scores) or any(size not in (1, full) for size, full in zip(mask.shape, tail, strict=True)):
        got, hint = f"shape {mask.shape}", "its last axes are those of the queries and of the keys"
        raise ShapeError(f"a mask that broadcasts to the scores (..., heads, L, S) = {scores}", got, hint)


def dropout_scale(dropout_p: float) -> float:
    """The factor of the weights that are kept: 1/(1 - p), and 0 where none is."""
    if not 0 <= dropout_p <= 1:
        raise ArgumentError("a dropout probability within 0 and 1", f"dropout_p={dropout_p}", "0 is off")
    return 0.0 if dropout_p == 1 else 1 / (1 - dropout_p)


def dropout_mask(seed: Any, rows: Array, columns: slice, dropout_p: float) -> Array:
    """Which weights dropout keeps: a hash of (seed, row, column) that is at least p, for each row and column.

    rows numbers the rows of all scores of the call; the result has their shape and a last axis of the columns. The
    hash is two rounds of multiply and xor-shift with constants of a low-bias search (C. Wellons, hash-prospector).
    """
    return _kept(*_keys(seed, rows, columns), threshold(dropout_p))


def drop_rows(x: Array, seed: int, rows: Array, columns: slice, dropout_p: float, out: Array) -> Array:
    """``out``, which may be x: x, as :func:`dropout_mask` says, times 0 or 1/(1 - p)."""
    keys, column = _keys(seed, rows.reshape(-1), columns)
    drop(_matrix(x), keys, column, threshold(dropout_p), dropout_scale(dropout_p), _matrix(out))
    return out


def _keys(seed: Any, rows: Array, columns: slice) -> tuple[Array, Array]:
    """What is hashed: uint32 numbers of the rows, and of the columns."""
    xp = array_module(rows)
    with np.errstate(over="ignore"):
        seed = seed if is_array(seed) else np.uint64(seed % 2**64)
        key = (rows.astype(np.uint64) + seed) * np.uint64(0x9E3779B97F4A7C15)
        key = ((key ^ (key >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(32)
        column = xp.arange(columns.start, columns.stop, dtype=np.uint32) * np.uint32(0x9E3779B9)
    return key.astype(np.uint32), column


def _kept(keys: Array, columns: Array, limit: int) -> Array:
    """Whether the hash of each key and column is at least the limit."""
    x = keys[..., None] ^ columns
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    return x >= np.uint32(limit)


@helper()
def hashed(key: Any, column: Any) -> Any:
    """The same of one key and column."""
    h = np.uint32(key ^ column)
    h = np.uint32((h ^ (h >> 16)) * 0x7FEB352D)
    h = np.uint32((h ^ (h >> 15)) * 0x846CA68B)
    return np.uint32(h ^ (h >> 16))


def _drop(x: Array, keys: Array, columns: Array, limit: int, share: float, out: Array) -> None:
    np.multiply(x, _kept(keys, columns, limit) * x.dtype.type(share), out=out)


@loop(_drop)
def drop(x: Array, keys: Array, columns: Array, limit: int, share: float, out: Array) -> None:
    """x times ``share`` where the hash is at least the limit, else times 0."""
    for i in range(len(x)):
        for j in range(len(columns)):
            out[i, j] = x[i, j] * (share if hashed(keys[i], columns[j]) >= limit else 0.0)


def _dropped(
    p: Array, ds: Array, mean: Array, remaining: Array, keys: Array, columns: Array, limit: int, share: float
) -> None:
    np.multiply(_kept(keys, columns, limit), p.dtype.type(share), out=remaining)
    ds *= remaining
    ds -= mean[:, None]
    ds *= p
    remaining *= p


@loop(_dropped)
def dropped(
    p: Array, ds: Array, mean: Array, remaining: Array, keys: Array, columns: Array, limit: int, share: float
) -> None:
    """``remaining = p r`` and ``ds = p (ds r - mean)`` in place, r the factors of dropout."""
    for i in range(len(p)):
        for j in range(len(columns)):
            factor = share if hashed(keys[i], columns[j]) >= limit else 0.0
            remaining[i, j] = p[i, j] * factor
            ds[i, j] = p[i, j] * (ds[i, j] * factor - mean[i])


def threshold(dropout_p: float) -> int:
    """The hashes below this number are dropped."""
    return min(round(dropout_p * 2**32), 2**32 - 1)


# ---- tiles ----------------------------------------------------------------------------------------------------------


@dataclass
class AttentionCall:
    """A call on NumPy arrays, brought to one form, and how its tiles are cut.

    In a tile the heads of q that share keys lie one below the other, in matrices of g·i rows.
    """

    q: Array  # (n, h, g, i, d)
    k: Array  # (n, h, j, d)
    v: Array  # (n, h, j, d_v)
    mask: Array | None  # (n, h, g, i, j), with size 1 where it is the same for all
    scale: float
    pattern: Pattern
    dropout_p: float
    seed: int

    def __post_init__(self) -> None:
        self.rows = self.q.shape[:-1]  # (n, h, g, i)
        most = ROWS if self.rows[3] < LONG else LONG_ROWS
        step = max(1, min(self.rows[3], most // max(self.rows[2], 1)))
        self.step = self.pattern.step(step)  # queries of a tile
        self.seen, self.widest = cost(self.pattern, self.rows[3], self.k.shape[2], self.step)
        self.part = KEYS * max(1, most // max(self.rows[2] * self.step, 1))  # keys of a block: more with few queries

    def groups(self) -> list[tuple[slice, slice]]:
        """The batches and heads that are worked on together; the heads of a batch lie next to each other in memory.

        There are two at least where there are two heads, for two threads.
        """
        (n, h, g, i), d = self.rows, self.k.shape[3]
        if not n * h * g * i:
            return []
        block = self.step * g * min(self.part, self.widest)  # scores of a head at once
        read = self.seen // i * d  # numbers of k that a tile reads on average
        heads = min(TILE // max(1, block), COPIES // max(1, read), (n * h + 1) // 2)
        if heads >= h:
            return [(part, slice(0, h)) for part in _split(n, heads // h)]
        return [(slice(b, b + 1), part) for b in range(n) for part in _split(h, max(1, heads))]

    def keys(self, n: slice, h: slice) -> Array:
        """The keys of some heads, transposed and with the scale in them: a copy, which small products read faster.

        Both passes read it, so they have the same bits, and an exponential that was finite is so again.
        """
        k = self.k[n, h].swapaxes(-1, -2)
        return np.multiply(k, self.scale, out=scratch(k.shape, k.dtype, "attention keys"))

    def tiles(self) -> Iterator[tuple[slice, list[Block]]]:
        """The queries of each tile and the blocks of keys that they see.

        The last queries come first: under a causal mask they see every key, so they store their part of dk and dv, and
        the others add theirs.
        """
        for start in reversed(range(0, self.rows[3], self.step)):
            yield slice(start, min(start + self.step, self.rows[3])), self.blocks(start)

    def blocks(self, start: int) -> list[Block]:
        """The keys that the queries of the tile from ``start`` on see."""
        return blocks_of(self.pattern, start, min(start + self.step, self.rows[3]), self.k.shape[2], self.part)

    def sees_all(self) -> bool:
        """Whether every key is seen by a query of the first tile."""
        blocks = self.blocks((self.rows[3] - 1) // self.step * self.step)
        return bool(sum(block.j.stop - block.j.start for block in blocks) == self.k.shape[2])

    def nanoseconds(self, products: int) -> float:
        """Estimated time on one core: of a score 2 ns, and d/32 more for each matrix product."""
        return float(self.seen * math.prod(self.rows[:3]) * (2 + products * self.q.shape[-1] / 32))

    def scores(self, at: Place, block: Block, queries: Array, keys: Array) -> Array:
        """The scores (n, h, g·i, j) of a block, under the mask."""
        n, h, rows, _ = queries.shape
        scores = scratch((n, h, rows, block.j.stop - block.j.start), queries.dtype, "rows")
        np.matmul(queries, keys[..., block.j], out=scores)
        if self.mask is not None:
            tile, mask = self._tile(scores), cut(self.mask, (*at, block.j))
            if mask.dtype == bool:
                np.copyto(tile, -np.inf, where=~mask)
            else:
                tile += mask
        return scores

    def _tile(self, scores: Array) -> Array:
        """Scores (n, h, g·i, j) as (n, h, g, i, j)."""
        n, h, rows, keys = scores.shape
        return scores.reshape(n, h, self.rows[2], rows // self.rows[2], keys)

    def hide(self, scores: Array, block: Block) -> Array:
        """Scores with -inf, in place, where a row doesn't see a key."""
        for columns, seen in block.partial:
            np.copyto(self._tile(scores)[..., columns], -np.inf, where=seen == 0)
        return scores

    def clear(self, at: Place, block: Block, weights: Array, *arrays: Array) -> None:
        """Zeros in all of them where a row doesn't see a key, though the row be NaN, and where its weight is 0."""
        unseen = weights == 0
        for columns, seen in block.partial:
            np.copyto(self._tile(unseen)[..., columns], True, where=seen == 0)
        if self.mask is not None:
            mask = cut(self.mask, (*at, block.j))
            np.copyto(self._tile(unseen), True, where=~mask if mask.dtype == bool else mask == -np.inf)
        for array in (weights, *arrays):
            array[unseen] = 0

    def exponentials(self, scores: Array, block: Block, shift: Array | None, sums: Array | None = None) -> Array:
        """E = exp(scores - shift), in place of the scores, and 0 where a row doesn't see a key; adds to the sums.

        Without a shift that is a product with 0 behind the exponential, in a quarter of the time of -inf before it. It
        gives NaN where a hidden exponential overflows, so the forward pass sees that it must compute the tile again.
        """
        if block.spans is not None and weights_of(_matrix(scores), block.spans, _flat(shift), _flat(sums)):
            return scores
        if shift is not None:
            scores = self.hide(scores, block)
            scores -= shift
            np.exp(scores, out=scores)
        else:
            np.exp(scores, out=scores)
            for columns, seen in block.partial:
                tile = self._tile(scores)[..., columns]
                tile *= seen
        if sums is not None:
            sums += np.matmul(scores, np.ones(scores.shape[-1], scores.dtype))
        return scores

    def slopes(self, scores: Array, ds: Array, block: Block, shift: Array | None) -> None:
        """Turn scores into E and ds into E ds, in place."""
        if block.spans is None or not slopes_of(_matrix(scores), _matrix(ds), block.spans, _flat(shift)):
            self.exponentials(scores, block, shift)
            ds *= scores

    def dropped_slopes(
        self, at: Place, scores: Array, ds: Array, block: Block, shift: Array | None, mean: Array
    ) -> Array:
        """Turn scores into E, ds into E (ds · r - mean), and return E · r, r the factors of dropout."""
        self.exponentials(scores, block, shift)
        remaining = scratch(scores.shape, scores.dtype, "attention weights")
        arrays = _matrix(scores), _matrix(ds), mean.reshape(-1), _matrix(remaining)
        dropped(*arrays, *_keys(self.seed, self._numbers(at), block.j), threshold(self.dropout_p), self._share())
        return remaining

    def drop(self, at: Place, j: slice, weights: Array) -> None:
        """The weights of a tile under dropout, in place."""
        x = _matrix(weights)
        drop(x, *_keys(self.seed, self._numbers(at), j), threshold(self.dropout_p), self._share(), x)

    def _share(self) -> float:
        return dropout_scale(self.dropout_p)

    def _numbers(self, at: Place) -> Array:
        """The numbers of a tile's rows among all rows of scores."""
        rows = 0
        for size, part, axis in zip(self.rows, at, range(4), strict=True):
            rows = rows * size + np.arange(size)[part].reshape(-1, *[1] * (3 - axis))
        return np.ravel(rows)


def _flat(x: Array | None) -> Array | None:
    return None if x is None else x.reshape(-1)


def _matrix(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


@loop(lambda *_: False)
def weights_of(scores: Array, spans: Array, shift: Any, sums: Any) -> bool:
    """``exp(scores - shift)`` of each row's span and 0 beyond it, in place, added up in ``sums``."""
    ones = np.ones(scores.shape[1], np.float32)
    for i in range(len(scores)):
        first, last = spans[i % len(spans)]
        top = np.float32(0.0) if shift is None else shift[i]
        row = scores[i, first:last]
        for j in range(row.size):
            row[j] = exp(row[j] - top)
        scores[i, :first], scores[i, last:] = 0.0, 0.0
        if sums is not None:
            sums[i] += dot(scores[i], ones)
    return True


@loop(lambda *_: False)
def slopes_of(scores: Array, ds: Array, spans: Array, shift: Any) -> bool:
    """``E = exp(scores - shift)`` of each row's span and 0 beyond it, in place, and ``E ds`` in place of ds."""
    for i in range(len(scores)):
        first, last = spans[i % len(spans)]
        top = np.float32(0.0) if shift is None else shift[i]
        row, slopes = scores[i, first:last], ds[i, first:last]
        for j in range(row.size):
            row[j] = exp(row[j] - top)
            slopes[j] *= row[j]
        scores[i, :first], scores[i, last:], ds[i, :first], ds[i, last:] = 0.0, 0.0, 0.0, 0.0
    return True


def call_of(q: Array, k: Array, v: Array, mask: Array | None, options: tuple[Any, ...]) -> tuple[AttentionCall, Sizes]:
    """Bring a call to the one form: leading axes flattened, heads grouped, rows that BLAS can read in place."""
    is_causal, scale, dropout_p, seed, *shape = options
    sizes, pattern = sizes_of(q, k, v, mask), pattern_of(is_causal, *shape)
    pattern.check(*sizes.scores[-2:])
    wide, n, h, g = accumulator(np.result_type(q, k, v)), math.prod(sizes.lead), sizes.heads, sizes.group
    q5 = _spread(_readable(q, wide), (*sizes.lead, h * g)).reshape(n, h, g, *q.shape[-2:])
    k4, v4 = (_spread(_readable(x, wide), (*sizes.lead, h)).reshape(n, h, *x.shape[-2:]) for x in (k, v))
    if mask is not None:
        mask = _mask_view(mask if mask.dtype == bool else mask.astype(wide, copy=False), sizes)
    dropout_scale(dropout_p)  # refuses what is no probability
    return AttentionCall(q5, k4, v4, mask, scale_of(scale, q), pattern, dropout_p, seed), sizes


def _readable(x: Array, dtype: Any) -> Array:
    """x in dtype, copied where its rows aren't such that BLAS reads them in place."""
    x = np.asarray(x, dtype)
    size = x.itemsize
    fits = x.strides[-1] == size and x.strides[-2] >= x.shape[-1] * size and x.strides[-2] % size == 0
    return x if fits else np.ascontiguousarray(x)


def _spread(x: Array, lead: tuple[int, ...]) -> Array:
    """x with its leading axes broadcast to ``lead``."""
    shape = (*lead, *x.shape[-2:])
    return x if x.shape == shape else np.broadcast_to(x, shape)


def _mask_view(mask: Array, sizes: Sizes) -> Array:
    """The mask with axes (n, h, g, i, j), of size 1 where it doesn't vary."""
    *lead, heads, i, j = mask_shape(mask, sizes)
    mask = np.broadcast_to(mask, (*lead, heads, i, j))
    return mask.reshape(math.prod(lead), *((1, 1) if heads == 1 else (sizes.heads, sizes.group)), i, j)


def mask_shape(mask: Array, sizes: Sizes) -> tuple[int, ...]:
    """The shape of the mask with all axes of the scores; the leading ones are either all broadcast or all 1."""
    *lead, heads, i, j = (1,) * (len(sizes.lead) + 3 - mask.ndim) + mask.shape
    return (*(lead if math.prod(lead) == 1 else sizes.lead), heads, i, j)


def cut(array: Array, index: tuple[slice, ...]) -> Array:
    """The part of an array at an index, with its axes of size 1 left alone."""
    return array[tuple(part if size > 1 else slice(None) for part, size in zip(index, array.shape, strict=True))]


def _split(n: int, most: int) -> list[slice]:
    """[0, n) in equal parts of at most ``most``, an even number of them where there are several."""
    parts = math.ceil(n / most)
    parts = min(n, parts + parts % 2) if parts > 1 else 1
    return [slice(n * a // parts, n * (a + 1) // parts) for a in range(parts)]


def scale_of(scale: float | None, q: Any) -> float:
    """The factor of the scores: the one given, or 1/√d."""
    return 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
