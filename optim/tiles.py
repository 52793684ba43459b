"""One pass over many arrays: every array cut into tiles that stay in the cache, all tiles in one parallel region.

A step of an optimizer makes a dozen passes over each parameter. Done array by array, each pass would fetch the arrays
from memory again; done tile by tile, all but the first find them in the cache. And one region for all parameters costs
one hand-off between threads, where a region for each would cost a hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from minigrad.backend import Array, array_module
from minigrad.machine import parallel

T = TypeVar("T")

# Elements of a tile. Smaller ones fit a lower cache, but then two threads spend their time on handing over the
# interpreter's lock: AdamW on 35M float32 parameters, 2 cores, takes 190, 104, 80, 74 ms with 16K, 32K, 64K, 128K.
TILE = 128 * 1024
SHARED = TILE // 2  # elements from which a tile is worth a second thread


def map_tiles(body: Callable[[int, slice], T], arrays: Sequence[Array], element_ns: float) -> list[list[T]]:
    """Call ``body(i, rows)`` for every tile ``arrays[i][rows]`` and return what it gave, in order, for each array.

    Tiles are slices of the first axis, so arrays need not be contiguous, and depend on shapes alone: results that are
    combined in order are the same bits on any number of threads. ``element_ns`` estimates the time an element takes on
    one thread. An array on a GPU is one tile, since there a kernel is its own parallel region.

    >>> map_tiles(lambda i, rows: (i, rows), [np.ones((5, 2**16)), np.ones(3)], 1.0)
    [[(0, slice(0, 2, None)), (0, slice(2, 4, None)), (0, slice(4, 5, None))], [(1, slice(0, 3, None))]]
    """
    cuts = [_tiles(array) for array in arrays]
    results: list[list[T]] = [[None] * len(tiles) for tiles in cuts]  # type: ignore[list-item]
    alone: list[tuple[int, int]] = []
    shared: list[tuple[int, int]] = []
    for i, (array, tiles) in enumerate(zip(arrays, cuts, strict=True)):
        large = array_module(array) is np and array.size >= SHARED * len(tiles)
        (shared if large else alone).extend((i, k) for k in range(len(tiles)))

    def run(places: Sequence[tuple[int, int]]) -> None:
        for i, k in places:
            results[i][k] = body(i, cuts[i][k])

    run(alone)
    parallel.for_rows(lambda start, stop: run(shared[start:stop]), len(shared), parallel.TILE_BYTES, TILE * element_ns)
    return results


def _tiles(array: Array) -> list[slice]:
    """Slices of the first axis, of about ``TILE`` elements each."""
    if array.size == 0:
        return []
    if array_module(array) is not np:
        return [slice(None)]
    rows = len(array)
    if array.size <= TILE:
        return [slice(0, rows)]
    step = max(1, TILE * rows // array.size)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def as_rows(array: Array) -> Array:
    """The array with a first axis to cut: one of shape () as a view of shape (1,)."""
    return array if array.ndim else array.reshape(1)
