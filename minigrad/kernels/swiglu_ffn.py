"""The feed-forward layer of LLaMA in one: while a tile of rows is in the cache it goes through all three matrices.

The rows n are those of x, normalised on the way if a norm_weight is given. Four arrays are as wide as the hidden layer.
Two of them are kept for the backward pass, ``gate = n w1ᵀ`` and ``up = n w3ᵀ``, and it makes the gated units again, at
the cost of one exponential each. With ``recompute`` none is kept, and it computes these two products again, in the same
tiles. The gradients of gate and up exist for a chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend import Array, cast_to
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.errors import ShapeError
from minigrad.kernels.linear import linear
from minigrad.kernels.normed_rows import NormedRows, check_norm, rounded_gradients
from minigrad.kernels.products import TILE_NUMBERS, add_product, add_products, over_products, tile_rows
from minigrad.kernels.rms_norm import rms_norm
from minigrad.kernels.rows import as_matrix, dtypes, matrix_of
from minigrad.kernels.swiglu import logistic, swiglu
from minigrad.machine.loops import loop, sigmoid
from minigrad.machine.parallel import scratch

CHUNK = 4 * TILE_NUMBERS  # numbers of a hidden array whose gradients exist at once: for good products, in the L3 cache


def _torch(
    t: Any, x: Any, w1: Any, w3: Any, w2: Any, norm_weight: Any = None, eps: float = 1e-5, recompute: bool = False
) -> Any:
    linear = t.nn.functional.linear
    x = x if norm_weight is None else t.nn.functional.rms_norm(x, norm_weight.shape, norm_weight, eps)
    return linear(t.nn.functional.silu(linear(x, w1)) * linear(x, w3), w2)


_samples = [
    sample((2, 3), (5, 3), (5, 3), (3, 5)),
    sample((2, 2, 3), (4, 3), (4, 3), (2, 4), (3,), 0.1),
    sample((3,), *[(3, 3)] * 3),
    sample((2, 3), (5, 3), (5, 3), (3, 5), recompute=True),
]


def _flops(x: Array, w1: Array, out: Array, recompute: bool, wrt: frozenset[str]) -> tuple[float, float]:
    """Three products; then two for the gradients of each, where they are needed, and two that are done again."""
    wide, narrow = 2 * x.size * len(w1), 2 * out.size * len(w1)
    rows, units = bool(wrt & {"x", "norm_weight"}), bool(wrt & {"x", "norm_weight", "w1", "w3"})
    again = 2 * wide if recompute else 0
    back = again + wide * (("w1" in wrt) + ("w3" in wrt) + 2 * rows) + narrow * (("w2" in wrt) + units)
    return 2 * wide + narrow, back


@fused(precision="low", wide_part="norm_weight", torch=_torch, numpy=False, samples=_samples, flops=_flops)
def swiglu_ffn(
    x: Array, w1: Array, w3: Array, w2: Array, norm_weight: Array | None = None, eps: float = 1e-5,
    recompute: bool = False,
) -> Array:  # fmt: skip
    """``w2 (silu(w1 n) · w3 n)`` for each row, n being ``rms_norm(x, weight=norm_weight)``, or x without a norm_weight.

    A feed-forward layer of gated units. x is (..., d_in), w1 and w3 are (d_ff, d_in), w2 is (d_out, d_ff), norm_weight
    is (d_in,); the result is (..., d_out). Half precision is computed in float32 and rounded once. Raises a ShapeError
    for shapes that don't fit. Shazeer, "GLU Variants Improve Transformer" (2020), eq. 6.

    recompute: two arrays of d_ff numbers a row are not kept; the backward pass computes them again, in 11 products
    instead of 9 in all. Result and gradients are the same bits.

    >>> print(swiglu_ffn(np.array([1.0]), np.array([[2.0]]), np.array([[10.0]]), np.array([[1.0]])).round(3))
    [17.616]
    """
    check_ffn(x, w1, w3, w2, norm_weight, eps)
    n = x if norm_weight is None else rms_norm(x, None, norm_weight, eps)
    return linear(swiglu(linear(n, w1), linear(n, w3)), w2)


def check_ffn(x: Any, w1: Any, w3: Any, w2: Any, norm_weight: Any, eps: float) -> None:
    """Refuse shapes that don't fit."""
    shapes = [np.shape(w) for w in (w1, w3, w2)]
    fit = all(len(shape) == 2 for shape in shapes) and np.shape(x)[-1:] == shapes[0][1:]
    if not fit or shapes[0] != shapes[1] or shapes[2][1] != shapes[0][0]:
        got = f"{np.shape(x)}, {shapes[0]}, {shapes[1]} and {shapes[2]}"
        hint = "a weight is (outputs, inputs), as that of nn.Linear"
        raise ShapeError("x (..., d_in), w1 and w3 (d_ff, d_in), w2 (d_out, d_ff)", got, hint)
    check_norm(x, norm_weight, eps)


# ---- the units of a tile --------------------------------------------------------------------------------------------


def _units(gate: Array, up: Array, out: Array) -> None:
    logistic(gate, out=out)
    out *= gate
    out *= up


@loop(_units)
def units(gate: Array, up: Array, out: Array) -> None:
    """``out = silu(gate) up``."""
    x, y, h = gate.ravel(), up.ravel(), out.ravel()
    for i in range(h.size):
        h[i] = sigmoid(x[i]) * x[i] * y[i]


def _units_backward(dh: Array, gate: Array, up: Array, h: Array, dgate: Array, dup: Array) -> None:
    sigma = scratch(dh.shape, dh.dtype, "more rows")
    logistic(gate, out=sigma, rest=dgate)
    with np.errstate(under="ignore"):
        silu = np.multiply(gate, sigma, out=h)
        dgate *= silu
        dgate += sigma
        dgate *= np.multiply(dh, up, out=sigma)
        np.multiply(dh, silu, out=dup)
        h *= up


@loop(_units_backward)
def units_backward(dh: Array, gate: Array, up: Array, h: Array, dgate: Array, dup: Array) -> None:
    """The units h again, and the gradients of gate and up; silu'(x) = σ + silu(x) (1 - σ)."""
    d, x, y, h, dx, dy = dh.ravel(), gate.ravel(), up.ravel(), h.ravel(), dgate.ravel(), dup.ravel()
    for i in range(h.size):
        silu = x[i] * sigmoid(x[i])
        dx[i] = (sigmoid(x[i]) + silu * sigmoid(-x[i])) * (d[i] * y[i])
        dy[i] = d[i] * silu
        h[i] = silu * y[i]


# ---- all tiles ------------------------------------------------------------------------------------------------------


@swiglu_ffn.defforward
def _forward(
    x: Any, w1: Any, w3: Any, w2: Any, norm_weight: Any, eps: float, recompute: bool,
    needs: tuple[bool, ...] = (False,) * 5,
) -> tuple[Array, dict[str, Any]]:  # fmt: skip
    check_ffn(x, w1, w3, w2, norm_weight, eps)
    dtype, work = dtypes(x, w1, w3, w2, norm_weight)
    source, (w1, w3, w2) = NormedRows(x, norm_weight, work, eps), (as_matrix(w, work) for w in (w1, w3, w2))
    out, keep = np.empty((*np.shape(x)[:-1], len(w2)), work), any(needs) and not recompute
    result = matrix_of(out)
    gate, up = hidden = np.empty((2, len(source.rows) if keep else 0, len(w1)), work)

    def body(a: int, b: int) -> None:
        n, h = source.tile(a, b), scratch((b - a, len(w1)), work, "rows")
        g, u = hidden[:, a:b] if keep else scratch((2, *h.shape), work, "gate and up")
        units(np.matmul(n, w1.T, out=g), np.matmul(n, w3.T, out=u), h)
        np.matmul(h, w2.T, out=result[a:b])

    over_products(body, len(source.rows), w1, w3, w2)
    return cast_to(out, dtype), {"gate": gate, "up": up, "inverse": source.inverse}


@swiglu_ffn.defbackward("x", "w1", "w3", "w2", "norm_weight")
def _backward(
    g: Any, x: Any, w1: Any, w3: Any, w2: Any, norm_weight: Any, gate: Any, up: Any, inverse: Any,
    needs: tuple[bool, ...],
) -> tuple[Array | None, ...]:  # fmt: skip
    """With h = silu(gate) up: dw2 = gᵀ h, dw1 = dgateᵀ n, dw3 = dupᵀ n. With recompute gate and up are empty."""
    work = gate.dtype
    source, upstream = NormedRows(x, norm_weight, work, inverse=inverse), as_matrix(g, work)
    gx = np.empty(x.shape, work) if needs[0] or needs[4] else None
    new = np.empty if len(upstream) else np.zeros  # the first chunk writes them
    weights = [new(w.shape, work) if need else None for w, need in zip((w1, w3, w2), needs[1:4], strict=True)]
    tile = tile_rows(len(upstream), w1, w3, w2)
    step = tile * max(1, CHUNK // max(1, len(w1)) // tile)
    for start in range(0, len(upstream), step):
        chunk = slice(start, min(start + step, len(upstream)))
        n, h, dgate, dup = _through_units(source, chunk, tile, upstream, gate, up, (w1, w3, w2), gx)
        products = zip(weights, (dgate.T, dup.T, upstream[chunk].T), (n, n, h), strict=True)
        add_products([(out, a, b) for out, a, b in products if out is not None], fresh=start == 0)
    gradients = (gx if needs[0] else None, *weights, source.weight_gradient() if needs[4] else None)
    return rounded_gradients(gradients, (x, w1, w3, w2, norm_weight))


def _through_units(
    source: NormedRows, chunk: slice, step: int, g: Array, gate: Array, up: Array, weights: Sequence[Any],
    gx: Array | None,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """n, h and the gradients of gate and up for a chunk of rows, in tiles of ``step``; writes the gradient of x to gx.

    dh = g w2, dup = dh silu(gate), dgate = dh up silu'(gate), dn = dgate w1 + dup w3.
    """
    work, start = gate.dtype, chunk.start
    w1, w3, w2 = (as_matrix(w, work) for w in weights)
    shape = (chunk.stop - start, len(w1))
    n, result = source.buffer(start, chunk.stop), None if gx is None else matrix_of(gx)
    hidden, dgate, dup = np.empty((3, *shape), work)

    def gate_and_up(a: int, b: int) -> tuple[Array, Array]:
        if len(gate):
            return gate[start + a : start + b], up[start + a : start + b]
        x, y = scratch((2, b - a, len(w1)), work, "gate and up")
        return np.matmul(n[a:b], w1.T, out=x), np.matmul(n[a:b], w3.T, out=y)

    def body(a: int, b: int) -> None:
        tile, dg, du = slice(start + a, start + b), dgate[a:b], dup[a:b]
        source.write(tile.start, tile.stop, n[a:b])
        dh = np.matmul(g[tile], w2, out=scratch(dg.shape, work, "rows"))
        units_backward(dh, *gate_and_up(a, b), hidden[a:b], dg, du)
        if result is not None:
            dx = result[tile]
            np.matmul(dg, w1, out=dx)
            add_product(dx, du, w3, fresh=False)
            source.backward(tile.start, tile.stop, dx)

    over_products(body, shape[0], w1, w3, w2, step=step)
    return n, hidden, dgate, dup
