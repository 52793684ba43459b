"""The feed-forward layer of LLaMA in one: while a tile of rows is in the cache it goes through all three matrices.

Of the four arrays as wide as the hidden layer only two are kept for the backward pass, ``gate = x w1ᵀ`` and
``up = x w3ᵀ``; the gated units are made from them again, which costs one exponential each. Their gradients exist for
``CHUNK`` rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minigrad.backend import Array, rounded
from minigrad.errors import ShapeError
from minigrad.fused import fused
from minigrad.kernels.linear import linear
from minigrad.kernels.rows import as_matrix, dtypes, matrix_of
from minigrad.kernels.swiglu import logistic, slope, swiglu
from minigrad.parallel import TILE_BYTES, blas_threads, for_rows, scratch
from minigrad.registry import sample

CHUNK = 1024  # rows whose gradients exist at once: enough for good matrix products, few enough for the L3 cache
TILE_ROWS = 512  # of a tile: each product packs its matrix anew, so fewer are slower
NS_PER_FLOP = 1 / 60  # of a product on one thread


def _torch(t: Any, x: Any, w1: Any, w3: Any, w2: Any) -> Any:
    linear = t.nn.functional.linear
    return linear(t.nn.functional.silu(linear(x, w1)) * linear(x, w3), w2)


_samples = [
    sample((2, 3), (5, 3), (5, 3), (3, 5)),
    sample((2, 2, 3), (4, 3), (4, 3), (2, 4)),
    sample((3,), *[(3, 3)] * 3),
]


@fused(torch=_torch, numpy=False, samples=_samples)
def swiglu_ffn(x: Array, w1: Array, w3: Array, w2: Array) -> Array:
    """``w2 (silu(w1 x) · w3 x)`` for each row: a feed-forward layer of gated units.

    x (..., d_in), w1 and w3 (d_ff, d_in), w2 (d_out, d_ff); the result is (..., d_out). Half precision is computed in
    float32 and rounded once. Shapes that don't fit raise a ShapeError. Shazeer, "GLU Variants Improve Transformer"
    (2020), eq. 6.

    >>> print(swiglu_ffn(np.array([1.0]), np.array([[2.0]]), np.array([[10.0]]), np.array([[1.0]])).round(3))
    [17.616]
    """
    _check(x, w1, w3, w2)
    return linear(swiglu(linear(x, w1), linear(x, w3)), w2)


def _check(x: Any, w1: Any, w3: Any, w2: Any) -> None:
    shapes = [np.shape(w) for w in (w1, w3, w2)]
    fit = all(len(shape) == 2 for shape in shapes) and np.shape(x)[-1:] == shapes[0][1:]
    if not fit or shapes[0] != shapes[1] or shapes[2][1] != shapes[0][0]:
        got = f"{np.shape(x)}, {shapes[0]}, {shapes[1]} and {shapes[2]}"
        hint = "a weight is (outputs, inputs), as that of nn.Linear"
        raise ShapeError("x (..., d_in), w1 and w3 (d_ff, d_in), w2 (d_out, d_ff)", got, hint)


@swiglu_ffn.defforward
def _forward(x: Any, w1: Any, w3: Any, w2: Any, needs: tuple[bool, ...] = (False,) * 4) -> tuple[Array, dict[str, Any]]:
    _check(x, w1, w3, w2)
    dtype, work = dtypes(x, w1, w3, w2)
    rows, w1, w3, w2 = (as_matrix(a, work) for a in (x, w1, w3, w2))
    out, keep = np.empty((*np.shape(x)[:-1], len(w2)), work), any(needs)
    result = matrix_of(out)
    gate, up = kept = np.empty((2, len(rows) if keep else 0, len(w1)), work)

    def body(a: int, b: int) -> None:
        h = scratch((b - a, len(w1)), work, "rows")
        g, u = kept[:, a:b] if keep else scratch((2, b - a, len(w1)), work, "ffn gate and up")
        np.matmul(rows[a:b], w1.T, out=g)
        np.matmul(rows[a:b], w3.T, out=u)
        logistic(g, out=h)
        h *= g
        h *= u
        np.matmul(h, w2.T, out=result[a:b])

    _over_tiles(body, len(rows), w1, w2)
    return rounded(out, dtype), {"gate": gate, "up": up}


@swiglu_ffn.defbackward("x", "w1", "w3", "w2")
def _backward(
    g: Any, x: Any, w1: Any, w3: Any, w2: Any, gate: Any, up: Any, needs: tuple[bool, ...]
) -> tuple[Array | None, ...]:
    """With h = silu(gate) up and dh = g w2: dw2 = gᵀ h, dw1 = dgateᵀ x, dw3 = dupᵀ x, dx = dgate w1 + dup w3."""
    work = gate.dtype
    rows, upstream, *weights = (as_matrix(a, work) for a in (x, g, w1, w3, w2))
    new = np.empty if len(rows) else np.zeros  # the first chunk writes them
    gradients = [new(a.shape, work) if need else None for a, need in zip((x, w1, w3, w2), needs, strict=True)]
    gx = None if gradients[0] is None else matrix_of(gradients[0])
    for start in range(0, len(rows), CHUNK):
        chunk = slice(start, min(start + CHUNK, len(rows)))
        arrays = (rows[chunk], upstream[chunk], gate[chunk], up[chunk])
        _add_gradients(*arrays, weights, None if gx is None else gx[chunk], gradients[1:], fresh=start == 0)
    return tuple(
        None if a is None else rounded(a, like.dtype) for a, like in zip(gradients, (x, w1, w3, w2), strict=True)
    )


def _add_gradients(
    x: Array,
    g: Array,
    gate: Array,
    up: Array,
    weights: Sequence[Array],
    gx: Array | None,
    totals: Sequence[Array | None],
    fresh: bool,
) -> None:
    """Write the gradient of the rows x to gx, and those of the weights to totals, or add them if not ``fresh``."""
    w1, w3, w2 = weights
    hidden, dgate, dup = (scratch(gate.shape, gate.dtype, key) for key in ("ffn hidden", "ffn dgate", "ffn dup"))

    def body(a: int, b: int) -> None:
        dh, sigma = (scratch((b - a, len(w1)), gate.dtype, key) for key in ("rows", "ffn sigma"))
        tile_gate, tile_up, h, dg, du = gate[a:b], up[a:b], hidden[a:b], dgate[a:b], dup[a:b]
        np.matmul(g[a:b], w2, out=dh)
        logistic(tile_gate, out=sigma)
        with np.errstate(under="ignore"):
            silu = np.multiply(tile_gate, sigma, out=h)
            slope(tile_gate, sigma, silu, out=dg)
            np.multiply(dh, silu, out=du)
            dg *= np.multiply(dh, tile_up, out=dh)
            h *= tile_up
        if gx is not None:
            np.matmul(dg, w1, out=gx[a:b])
            gx[a:b] += np.matmul(du, w3, out=scratch((b - a, gx.shape[1]), gate.dtype, "ffn dx"))

    _over_tiles(body, len(x), w1, w2)
    for total, a, b in zip(totals, (dgate, dup, g), (x, x, hidden), strict=True):
        if total is not None and fresh:
            np.matmul(a.T, b, out=total)
        elif total is not None:
            total += np.matmul(a.T, b, out=scratch(total.shape, total.dtype, "ffn weight"))


def _over_tiles(body: Callable[[int, int], object], rows: int, w1: Array, w2: Array) -> None:
    """Run ``body`` on tiles of rows that are long enough for good matrix products, BLAS on one thread in each."""
    products = 2 * (2 * w1.size + w2.size)  # operations of a row
    with blas_threads(1):
        for_rows(body, rows, TILE_BYTES / TILE_ROWS, products * NS_PER_FLOP)
