"""Queries, keys and values in one: a tile of rows is normalised, multiplied and turned while it is in the cache."""

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
from minigrad.kernels.products import add_product, add_products, over_products
from minigrad.kernels.rms_norm import rms_norm
from minigrad.kernels.rope import RowTurns, apply_rope
from minigrad.kernels.rows import as_matrix, dtypes, matrix_of
from minigrad.ops import reshape, swapaxes


def _torch(
    t: Any, x: Any, wq: Any, wk: Any, wv: Any, norm_weight: Any = None, eps: float = 1e-5,
    cos: Any = None, sin: Any = None,
) -> Any:  # fmt: skip
    x = x if norm_weight is None else t.nn.functional.rms_norm(x, norm_weight.shape, norm_weight, eps)
    q, k, v = (t.nn.functional.linear(x, w) for w in (wq, wk, wv))
    if cos is None:
        return q, k, v
    turns = t.complex(cos, sin)[:, None]  # (T, 1, d/2)
    pairs = (t.view_as_complex(y.unflatten(-1, (-1, turns.shape[-1], 2))) for y in (q, k))
    return *(t.view_as_real(y * turns).flatten(-3) for y in pairs), v


_angles = np.linspace(-1.0, 1.0, 4).reshape(2, 2)
_samples = [
    sample((2, 3), (5, 3), (4, 3), (2, 3)),
    sample((2, 2, 3), *[(2, 3)] * 3, (3,), 0.1),
    sample((3, 2, 3), (8, 3), (4, 3), (5, 3), (3,), 0.1, np.cos(_angles), np.sin(_angles)),
]


def _flops(x: Array, wq: Array, wk: Array, wv: Array, wrt: frozenset[str]) -> tuple[float, float]:
    """A product for each weight; then one for its gradient, and one for what it sends back to the rows."""
    products = {name: 2 * x.size * len(w) for name, w in (("wq", wq), ("wk", wk), ("wv", wv))}
    rows = bool(wrt & {"x", "norm_weight"})
    return sum(products.values()), sum(n * ((name in wrt) + rows) for name, n in products.items())


@fused(precision="low", wide_part="norm_weight", torch=_torch, numpy=False, samples=_samples, flops=_flops)
def qkv_projection(
    x: Array,
    wq: Array,
    wk: Array,
    wv: Array,
    norm_weight: Array | None = None,
    eps: float = 1e-5,
    cos: Array | None = None,
    sin: Array | None = None,
) -> tuple[Array, Array, Array]:
    """``n wqᵀ``, ``n wkᵀ`` and ``n wvᵀ``, n being ``rms_norm(x, weight=norm_weight)``, or x without a norm_weight.

    x is (..., d_in), the weights are (d_q, d_in), (d_k, d_in) and (d_v, d_in), norm_weight is (d_in,). The results are
    (..., d_q), (..., d_k) and (..., d_v), each in the dtype of its own product. Half precision is computed in float32
    and rounded once. With cos and sin, (T, d/2), x is (..., T, d_in), and the heads of d features that lie
    side by side in queries and keys are turned by :func:`apply_rope`, in its interleaved layout. Shapes that don't fit
    raise a ShapeError.

    >>> q, k, v = qkv_projection(np.array([1.0, 2.0]), np.eye(2), np.ones((1, 2)), np.zeros((1, 2)))
    >>> print(q, k, v)
    [1. 2.] [3.] [0.]
    """
    check_projections(x, wq, wk, wv, norm_weight, eps, cos, sin)
    n = x if norm_weight is None else rms_norm(x, None, norm_weight, eps)
    q, k, v = linear(n, wq), linear(n, wk), linear(n, wv)
    return (q, k, v) if cos is None else (_turned(q, cos, sin), _turned(k, cos, sin), v)


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    """Heads side by side, (..., T, heads · d), each turned by its position."""
    size = 2 * cos.shape[1]
    heads = swapaxes(reshape(x, (*x.shape[:-1], x.shape[-1] // size, size)), -2, -3)
    return reshape(swapaxes(apply_rope(heads, cos, sin), -2, -3), x.shape)


def check_projections(
    x: Any, wq: Any, wk: Any, wv: Any, norm_weight: Any, eps: float, cos: Any = None, sin: Any = None
) -> None:
    """Refuse shapes that don't fit."""
    shapes = [np.shape(w) for w in (wq, wk, wv)]
    if not all(len(shape) == 2 and np.shape(x)[-1:] == shape[1:] for shape in shapes):
        got = f"{np.shape(x)}, {shapes[0]}, {shapes[1]} and {shapes[2]}"
        hint = "a weight is (outputs, inputs), as that of nn.Linear"
        raise ShapeError("x (..., d_in), wq (d_q, d_in), wk (d_k, d_in), wv (d_v, d_in)", got, hint)
    check_norm(x, norm_weight, eps)
    if cos is not None or sin is not None:
        _check_tables(x, wq, wk, cos, sin)


def _check_tables(x: Any, wq: Any, wk: Any, cos: Any, sin: Any) -> None:
    """Refuse cosines and sines that aren't those of the positions of x, or of heads that don't divide the rows."""
    shape = np.shape(cos)
    if np.ndim(x) < 2 or len(shape) != 2 or np.shape(sin) != shape or shape[0] != np.shape(x)[-2] or not shape[1]:
        got = f"x {np.shape(x)}, cos {shape}, sin {np.shape(sin)}"
        raise ShapeError("x (..., T, d_in), cos and sin (T, d/2)", got, "a row of the tables for each position")
    if len(wq) % (2 * shape[1]) or len(wk) % (2 * shape[1]):
        got = f"{len(wq)} and {len(wk)}"
        raise ShapeError(f"queries and keys in heads of {2 * shape[1]} features", got, "cos and sin are (T, d/2)")


@qkv_projection.defforward
def _forward(
    x: Any, wq: Any, wk: Any, wv: Any, norm_weight: Any, eps: float, cos: Any, sin: Any
) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
    check_projections(x, wq, wk, wv, norm_weight, eps, cos, sin)
    kinds = [dtypes(x, norm_weight, w) for w in (wq, wk, wv)]  # of each result, and to compute it in
    work = np.result_type(*[wide for _, wide in kinds])
    source, weights = NormedRows(x, norm_weight, work, eps), [as_matrix(w, work) for w in (wq, wk, wv)]
    results = [np.empty((*np.shape(x)[:-1], len(w)), work) for w in weights]
    products = [(w.T, matrix_of(out)) for w, out in zip(weights, results, strict=True)]
    turns = turns_of([out for _, out in products], cos, sin)

    def body(a: int, b: int) -> None:
        n = source.tile(a, b)
        for w, out in products:
            np.matmul(n, w, out=out[a:b])
        for turn, (_, out) in zip(turns, products, strict=False):
            turn.write(a, b, out[a:b], out[a:b])

    over_products(body, len(source.rows), *weights)
    q, k, v = (cast_to(out, dtype) for out, (dtype, _) in zip(results, kinds, strict=True))
    return (q, k, v), {"inverse": source.inverse}


@qkv_projection.defbackward("x", "wq", "wk", "wv", "norm_weight", "cos", "sin")
def _backward(
    g: tuple[Any, ...], x: Any, wq: Any, wk: Any, wv: Any, norm_weight: Any, cos: Any, sin: Any, inverse: Any,
    needs: tuple[bool, ...],
) -> tuple[Array | None, ...]:  # fmt: skip
    """dn = Σ gᵢ wᵢ and dwᵢ = gᵢᵀ n over the three, those of queries and keys turned back."""
    work = inverse.dtype
    source, upstream = NormedRows(x, norm_weight, work, inverse=inverse), [as_matrix(part, work) for part in g]
    weights = [as_matrix(w, work) for w in (wq, wk, wv)]
    gx = np.empty(x.shape, work) if needs[0] or needs[4] else None
    result, n = None if gx is None else matrix_of(gx), source.buffer(0, len(source.rows))
    turns, given = turns_of(upstream, cos, None if sin is None else -sin), upstream
    upstream = [*(np.empty_like(up) for up, _ in zip(given, turns, strict=False)), *given[len(turns) :]]

    def body(a: int, b: int) -> None:
        for turn, up, back in zip(turns, given, upstream, strict=False):
            turn.write(a, b, up[a:b], back[a:b])
        source.write(a, b, n[a:b])
        if result is not None:
            for k, (up, w) in enumerate(zip(upstream, weights, strict=True)):
                add_product(result[a:b], up[a:b], w, fresh=k == 0)
            source.backward(a, b, result[a:b])

    if result is not None or norm_weight is not None or turns:
        over_products(body, len(source.rows), *weights)
    gweights = [np.empty(w.shape, work) if need else None for w, need in zip(weights, needs[1:4], strict=True)]
    products = zip(gweights, upstream, strict=True)
    add_products([(out, up.T, n) for out, up in products if out is not None], fresh=True)
    gtables = table_gradients(given[:2], n, weights[:2], cos.shape) if needs[5] or needs[6] else (None, None)
    gradients = (gx if needs[0] else None, *gweights, source.weight_gradient() if needs[4] else None, *gtables)
    return rounded_gradients(gradients, (x, wq, wk, wv, norm_weight, cos, sin))


def turns_of(matrices: Sequence[Array], cos: Any, sin: Any) -> list[RowTurns]:
    """The turns of the first two of three matrices, queries and keys; none without tables."""
    return [] if cos is None else [RowTurns(cos, sin, len(m), m.shape[1], m.dtype) for m in matrices[:2]]


def table_gradients(g: Sequence[Array], n: Array, weights: Sequence[Array], shape: tuple[int, int]) -> list[Array]:
    """The gradients (T, d/2) of cos and sin from those of the turned rows; the rows themselves are made again.

    With pairs as complex numbers, the sums of ``g conj(n wᵀ)`` over heads and sequences have them as their two parts.
    """
    pairs = np.result_type(n, np.complex64)
    found = np.zeros(shape, pairs)
    for up, w in zip(g, weights, strict=True):
        heads = -1 if up.size else 0, shape[0], w.shape[0] // (2 * shape[1]), shape[1]
        rows = np.conj(np.matmul(n, w.T).view(pairs))
        rows *= up.view(pairs)
        found += rows.reshape(heads).sum(axis=(0, 2))
    return [found.real, found.imag]
