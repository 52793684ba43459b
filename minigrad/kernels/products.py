"""Matrix products inside of kernels: over tiles of rows, or in pieces, each on one thread of BLAS.

So their rounding doesn't depend on the number of threads, and a kernel does its other work on a tile while that is in
the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from minigrad.backend import Array
from minigrad.machine.loops import dot, helper, loop, prefetch
from minigrad.machine.parallel import MIN_PARALLEL_NS, blas_threads, even_step, run, scratch

TILE_ROWS = 512  # of a tile that is multiplied, at most: each product packs its matrix anew, so fewer are slower
TILE_NUMBERS = 360 * 1024  # of a tile in its widest array, 1.4 MB of float32: each thread has some of them
PIECE_ROWS, MOST_PIECES = 256, 16  # of a product without tiles: at least two pieces, whatever the number of threads
NS_PER_FLOP = 1 / 60  # of a matrix product on one thread
LINE = 16  # numbers of a cache line
NS_PER_WEIGHT = 0.1  # of reading a matrix on one thread


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


# ---- a few rows -----------------------------------------------------------------------------------------------------


def few_rows_ns(rows: int, weights: int) -> float:
    """The time of a product of so many rows by so many weights on one thread: of the sums, or of reading."""
    return weights * max(NS_PER_WEIGHT, 2 * rows * NS_PER_FLOP)


def _few_rows(x: Array, w: Array, out: Array, column: int) -> None:
    out[:, column : column + len(w)] = np.matmul(w, x.T).T  # BLAS is slower at x wᵀ


@loop(_few_rows)
def few_rows(x: Array, w: Array, out: Array, column: int) -> None:
    """``x wᵀ``, for a few rows x, to the columns of ``out`` from ``column`` on.

    BLAS copies a matrix before it multiplies, which pays off where many rows are multiplied. Here sixteen sums stay in
    registers, of four rows of x and four of w; while these are multiplied the next four of w are fetched.
    """
    numbers, size, passes = w.ravel(), 4 * w.shape[1], len(x) // 4
    for i in range(0, len(w) - 3, 4):
        for p in range(passes):
            following = i // 4 * size + size
            for ahead in range(following + p * size // passes, following + (p + 1) * size // passes, LINE):
                prefetch(numbers, ahead)
            _sixteen(x, 4 * p, w, i, out, column)
        for b in range(4 * passes, len(x)):
            _four(x[b], w, i, out[b], column)
    for i in range(len(w) - len(w) % 4, len(w)):
        for b in range(len(x)):
            out[b, column + i] = dot(w[i], x[b])


@helper("reassoc", "nsz")
def _sixteen(x: Array, b: int, w: Array, i: int, out: Array, column: int) -> None:
    p0 = p1 = p2 = p3 = q0 = q1 = q2 = q3 = np.float32(0)
    r0 = r1 = r2 = r3 = s0 = s1 = s2 = s3 = np.float32(0)
    for k in range(w.shape[1]):
        w0, w1, w2, w3 = w[i, k], w[i + 1, k], w[i + 2, k], w[i + 3, k]
        p, q, r, s = x[b, k], x[b + 1, k], x[b + 2, k], x[b + 3, k]
        p0, p1, p2, p3 = p0 + w0 * p, p1 + w1 * p, p2 + w2 * p, p3 + w3 * p
        q0, q1, q2, q3 = q0 + w0 * q, q1 + w1 * q, q2 + w2 * q, q3 + w3 * q
        r0, r1, r2, r3 = r0 + w0 * r, r1 + w1 * r, r2 + w2 * r, r3 + w3 * r
        s0, s1, s2, s3 = s0 + w0 * s, s1 + w1 * s, s2 + w2 * s, s3 + w3 * s
    i += column
    out[b, i], out[b, i + 1], out[b, i + 2], out[b, i + 3] = p0, p1, p2, p3
    out[b + 1, i], out[b + 1, i + 1], out[b + 1, i + 2], out[b + 1, i + 3] = q0, q1, q2, q3
    out[b + 2, i], out[b + 2, i + 1], out[b + 2, i + 2], out[b + 2, i + 3] = r0, r1, r2, r3
    out[b + 3, i], out[b + 3, i + 1], out[b + 3, i + 2], out[b + 3, i + 3] = s0, s1, s2, s3


@helper("reassoc", "nsz")
def _four(x: Array, w: Array, i: int, out: Array, column: int) -> None:
    s0 = s1 = s2 = s3 = np.float32(0)
    for k in range(w.shape[1]):
        s0, s1, s2, s3 = s0 + w[i, k] * x[k], s1 + w[i + 1, k] * x[k], s2 + w[i + 2, k] * x[k], s3 + w[i + 3, k] * x[k]
    i += column
    out[i], out[i + 1], out[i + 2], out[i + 3] = s0, s1, s2, s3


def few_products(x: Array, out: Array, *weights: Array) -> None:
    """``out = x wᵀ`` of a few rows, for each w, beside each other; threads take pieces of large matrices."""
    work_ns = few_rows_ns(len(x), sum(w.size for w in weights))
    tasks, column = [], 0
    for w in weights:
        piece = len(w) if work_ns < MIN_PARALLEL_NS else max(PIECE_ROWS, even_step(len(w), len(w) / MOST_PIECES))
        tasks += [partial(few_rows, x, w[i : i + piece], out, column + i) for i in range(0, len(w), piece)]
        column += len(w)
    with blas_threads(1):
        run(tasks, work_ns)
