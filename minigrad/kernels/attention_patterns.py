"""Which query sees which key: all that full, causal, windowed and block-sparse attention differ in.

A tile of queries asks its pattern for blocks of keys that one of them sees, and in a block for the columns that only
some of them see. What is in no block costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import Array, NDArray
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.messages.arguments import as_int
from minigrad.messages.explain import explained


class BlockPattern:
    """Blocks of ``size`` queries and ``size`` keys that are seen or not, in the attention of a long sequence.

    ``blocks`` is (rows, columns) of booleans: where ``blocks[a, b]``, the queries ``a · size … (a + 1) · size - 1`` see
    the keys ``b · size … (b + 1) · size - 1``. The time of attention is that of the blocks which are True; those of 64
    or more are the fastest. ``a | b`` is the pattern of the blocks that are in one of two. A pattern may reach further
    than the sequence.

    >>> BlockPattern([[True, False], [True, True]], 64)
    BlockPattern(2 x 2 blocks of 64, 3 of them seen)
    """

    @explained
    def __init__(self, blocks: Any, size: int) -> None:
        table = np.array(blocks)
        if table.dtype != bool:
            raise DTypeError("booleans, True for blocks that are seen", f"dtype {table.dtype}", "blocks != 0, say")
        if table.ndim != 2:
            raise ShapeError("blocks (rows, columns)", f"shape {table.shape}", "one for each block of queries and keys")
        if as_int(size, "size") < 1:
            raise ArgumentError("a size of blocks from 1 on", f"size={size}", "64 or 128 are fast")
        table.flags.writeable = False
        self.blocks: NDArray = table
        self.size = int(size)

    @classmethod
    @explained
    def local(
        cls, length: int, size: int, reach: int = 1, first: int = 0, drawn: int = 0, seed: int = 0
    ) -> BlockPattern:
        """For ``length`` tokens, each block sees itself and ``reach`` blocks to either side, and others by choice.

        - first: so many blocks at the beginning see all, and are seen by all (they are global)
        - drawn: each block also sees so many others at random, the same ones for the same ``seed``

        With all three it is the pattern of Zaheer et al., "Big Bird" (2020); with the first two that of Beltagy et al.,
        "Longformer" (2020).

        >>> print(BlockPattern.local(256, 64, reach=0, first=1).blocks.astype(int))
        [[1 1 1 1]
         [1 1 0 0]
         [1 0 1 0]
         [1 0 0 1]]
        """
        a, b = _places(length, size)
        for name, value in {"reach": reach, "first": first, "drawn": drawn}.items():
            if as_int(value, name) < 0:
                raise ArgumentError(f"{name}, a number of blocks from 0 on", f"{name}={value}", "0 is none")
        seen = (abs(a - b) <= reach) | (a < first) | (b < first)
        draw = np.random.default_rng(seed)
        for row in seen:
            row[draw.permutation(np.flatnonzero(~row))[:drawn]] = True
        return cls(seen, size)

    @classmethod
    @explained
    def strided(cls, length: int, size: int, stride: int) -> BlockPattern:
        """For ``length`` tokens, each block sees the ``stride`` last ones, and of all others every ``stride``-th.

        Child et al., "Generating Long Sequences with Sparse Transformers" (2019), in blocks; to be used with is_causal.

        >>> print(BlockPattern.strided(384, 64, 3).blocks.astype(int)[5])
        [0 0 1 1 1 1]
        """
        if as_int(stride, "stride") < 1:
            raise ArgumentError("a stride from 1 on", f"stride={stride}", "the root of the number of blocks, say")
        a, b = _places(length, size)
        return cls((abs(a - b) < stride) | ((a - b) % stride == 0), size)

    def __or__(self, other: BlockPattern) -> BlockPattern:
        if not isinstance(other, BlockPattern):
            return NotImplemented
        if (self.size, self.blocks.shape) != (other.size, other.blocks.shape):
            raise ShapeError("patterns of the same blocks", f"{self!r} and {other!r}", "make both for one length")
        return BlockPattern(self.blocks | other.blocks, self.size)

    def __repr__(self) -> str:
        rows, columns = self.blocks.shape
        return f"BlockPattern({rows} x {columns} blocks of {self.size}, {int(self.blocks.sum())} of them seen)"


def _places(length: int, size: int) -> tuple[NDArray, NDArray]:
    """The numbers of blocks of queries (n, 1) and of keys (n,) that ``length`` tokens have."""
    for name, value in {"length": length, "size": size}.items():
        if as_int(value, name) < 1:
            raise ArgumentError(f"a {name} from 1 on", f"{name}={value}", "both count tokens")
    places = np.arange(-(-length // size))
    return places[:, None], places


class Block(NamedTuple):
    """Keys that the queries of a tile see. ``partial``: columns that only some rows see, 1 where a row does, else 0."""

    j: slice
    partial: tuple[tuple[slice, Array], ...]
    spans: Array | None  # (rows, 2): the columns that a row sees, from the first on and below the second; None: gaps


class Pattern(NamedTuple):
    """A band, and within it the blocks of a grid.

    Query i, at the place ``p = start + i`` among the keys, sees key j where ``p - left <= j <= p + right`` and
    ``grid.blocks[p // size, j // size]``.
    """

    left: float = math.inf
    right: float = math.inf
    start: int = 0  # keys before the first query
    grid: BlockPattern | None = None

    def check(self, queries: int, keys: int) -> None:
        """Refuse a grid that doesn't reach to the last query and the last key."""
        if self.grid is None:
            return
        (rows, columns), size, last = self.grid.blocks.shape, self.grid.size, self.start + queries
        if last > rows * size or keys > columns * size:
            expected = f"a pattern of {-(-last // size)} x {-(-keys // size)} blocks of {size}, or more"
            raise ShapeError(f"{expected}, for {last} queries and {keys} keys", f"{self.grid!r}", "make it longer")

    def seen(self, queries: int, keys: int, xp: Any = np) -> Any:
        """Which query sees which key: booleans (queries, keys), of the array module ``xp``; None where all see all."""
        if self.grid is None and self.left == self.right == math.inf:
            return None
        p, j = xp.arange(self.start, self.start + queries)[:, None], xp.arange(keys)
        seen = (p - self.left <= j) & (j <= p + self.right)
        if self.grid is not None:
            seen &= xp.asarray(self.grid.blocks)[p // self.grid.size, j // self.grid.size]
        return seen

    def spans(self, start: int, stop: int, keys: int) -> list[tuple[int, int]]:
        """Neighbouring keys, each time as (first, last + 1), that one of the queries from start to stop sees."""
        start, stop = start + self.start, stop + self.start
        first, last = int(max(0, start - self.left)), int(min(keys, stop + self.right))
        if self.grid is None:
            return [(first, last)] if first < last else []
        size = self.grid.size
        seen = self.grid.blocks[start // size : -(-stop // size)].any(0)
        borders = np.flatnonzero(np.diff(seen, prepend=False, append=False)) * size
        found = ((max(a, first), min(b, last)) for a, b in borders.reshape(-1, 2).tolist())
        return [(a, b) for a, b in found if a < b]

    def step(self, most: int) -> int:
        """How many queries make a tile: ``most``, or as many as share out a block of the grid."""
        return most if self.grid is None else max(1, self.grid.size // -(-self.grid.size // most))


def pattern_of(is_causal: bool, window: int | None, pattern: Pattern | BlockPattern | None) -> Pattern:
    """What is_causal, a window and a pattern say together."""
    if window is not None and as_int(window, "window") < 1:
        raise ArgumentError("a window of at least 1 key, or None", f"window={window}", "None looks at all keys")
    left = math.inf if window is None else window - 1
    right = 0 if is_causal else left
    if isinstance(pattern, Pattern):
        return Pattern(min(left, pattern.left), min(right, pattern.right), pattern.start, pattern.grid)
    if pattern is not None and not isinstance(pattern, BlockPattern):
        raise DTypeError("a pattern of blocks, or None", type(pattern).__name__, "nn.BlockPattern(blocks, size) is one")
    return Pattern(left, right, 0, pattern)


# ---- what a tile asks, and asks again in the next step ---------------------------------------------------------------


@lru_cache(maxsize=1024)
def blocks_of(pattern: Pattern, start: int, stop: int, keys: int, part: int) -> list[Block]:
    """The keys that the queries from start to stop see, in blocks of at most ``part``."""
    spans = pattern.spans(start, stop, keys)
    slices = [slice(j, min(j + part, last)) for first, last in spans for j in range(first, last, part)]
    found = [(j, tuple(_partial_columns(pattern, slice(start, stop), j))) for j in slices]
    return [Block(j, partial, _spans(stop - start, j.stop - j.start, partial)) for j, partial in found]


@lru_cache(maxsize=256)
def cost(pattern: Pattern, queries: int, keys: int, step: int) -> tuple[int, int]:
    """How many scores of a head are computed in tiles of ``step`` queries, and the longest span of keys."""
    spans = [span for i in range(0, queries, step) for span in pattern.spans(i, i + step, keys)]
    sizes = [last - first for first, last in spans]
    return sum(sizes) * step, max(sizes, default=0)


@lru_cache(maxsize=256)
def pairs(pattern: Pattern, queries: int, keys: int) -> int:
    """How many pairs there are of a query and a key that it sees."""
    total = 0
    for i in range(0, queries, 256):
        rows = min(256, queries - i)
        seen = pattern._replace(start=pattern.start + i).seen(rows, keys)
        total += rows * keys if seen is None else int(seen.sum())
    return total


def _partial_columns(pattern: Pattern, i: slice, j: slice) -> Iterator[tuple[slice, Array]]:
    """The columns of a block of keys that some of the queries i don't see: 1 where one does, 0 where not."""
    rows, i = i.stop - i.start, slice(i.start + pattern.start, i.stop + pattern.start)
    right, left = i.start + pattern.right, i.start - pattern.left  # the last and the first key of the first row
    start, stop = max(j.start, right + 1), min(j.stop, left + rows - 1)
    if start < j.stop:
        start -= (start - j.start) % 16  # full cache lines, and in a square block all of it, are multiplied faster
        yield slice(int(start) - j.start, None), _below(rows, j.stop - int(start), int(right - start))
    if stop > j.start:
        yield slice(0, int(stop) - j.start), 1 - _below(rows, int(stop) - j.start, int(left) - j.start - 1)
    if pattern.grid is not None:
        size, blocks = pattern.grid.size, pattern.grid.blocks
        parts = blocks[i.start // size : -(-i.stop // size), j.start // size : -(-j.stop // size)]
        if not parts.all():
            seen = parts.repeat(size, 0).repeat(size, 1)[i.start % size :, j.start % size :]
            yield slice(None), seen[:rows, : j.stop - j.start].astype(np.float32)


def _spans(rows: int, columns: int, partial: tuple[tuple[slice, Array], ...]) -> Array | None:
    """The first column that each row of a block sees and the one behind its last, or None where there are gaps."""
    seen = np.ones((rows, columns), bool)
    for part, sees in partial:
        seen[:, part] &= sees != 0
    first, count = seen.argmax(1), seen.sum(1)
    spans = np.stack([first, first + count], 1).astype(np.intp)
    places = np.arange(columns)
    return spans if (((spans[:, :1] <= places) & (places < spans[:, 1:])) == seen).all() else None


@lru_cache(maxsize=64)
def _below(rows: int, columns: int, k: int) -> Array:
    """1 where column <= row + k, else 0."""
    return np.tri(rows, columns, k, dtype=np.float32)
