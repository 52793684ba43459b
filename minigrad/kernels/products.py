"""Matrix products inside of kernels: over tiles of rows, or in pieces, each on one thread of BLAS.

So their rounding doesn't depend on the number of threads, and a kernel does its other work on a tile while that is in
the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from minigrad.backend import Array
from minigrad.machine.parallel import blas_threads, even_step, run, scratch

TILE_ROWS = 512  # of a tile that is multiplied, at most: each product packs its matrix anew, so fewer are slower
TILE_NUMBERS = 360 * 1024  # of a tile in its widest array, 1.4 MB of float32: each thread has some of them
PIECE_ROWS, MOST_PIECES = 256, 16  # of a product without tiles: at least two pieces, whatever the number of threads
NS_PER_FLOP = 1 / 60  # of a matrix product on one thread


def tile_rows(rows: int, *weights: Array) -> int:
    """How many rows a tile has, if it is multiplied by the weights."""
    widest = max(1, *(max(weight.shape) for weight in weights))
    return even_step(rows, max(1, min(TILE_ROWS, TILE_NUMBERS // widest)))


def over_products(body: Callable[[int, int], object], rows: int, *weights: Array, step: int = 0) -> None:
    """Run ``body(start, stop)``, which multiplies by the weights, on tiles of ``step`` or :func:`tile_rows` rows."""
    step = step or tile_rows(rows, *weights)
    tasks = [partial(body, start, min(start + step, rows)) for start in range(0, rows, step)]
    with blas_threads(1):
        run(tasks, 2 * rows * sum(weight.size for weight in weights) * NS_PER_FLOP)


def add_product(out: Array, a: Array, b: Array, fresh: bool) -> None:
    """``out += a b``, or ``out = a b`` if it is fresh."""
    product = np.matmul(a, b, out=out if fresh else scratch(out.shape, out.dtype, "product"))
    if not fresh:
        out += product


def add_products(products: Sequence[tuple[Array, Array, Array]], fresh: bool) -> None:
    """``out += a b``, or ``out = a b`` if they are fresh, for each (out, a, b); threads take pieces of their rows."""
    tasks, work_ns = [], 0.0
    for out, a, b in products:
        rows, inner = a.shape
        work_ns += 2 * rows * inner * b.shape[1] * NS_PER_FLOP
        step = max(1, -(-rows // max(2, min(MOST_PIECES, rows // PIECE_ROWS))))
        tasks += [partial(add_product, out[i : i + step], a[i : i + step], b, fresh) for i in range(0, rows, step)]
    with blas_threads(1):
        run(tasks, work_ns)
