"""Queries, keys and values in one: a tile of rows is normalised and multiplied three times while it is in the cache."""

from __future__ import annotations

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
from minigrad.kernels.rows import as_matrix, dtypes, matrix_of


def _torch(t: Any, x: Any, wq: Any, wk: Any, wv: Any, norm_weight: Any = None, eps: float = 1e-5) -> Any:
    x = x if norm_weight is None else t.nn.functional.rms_norm(x, norm_weight.shape, norm_weight, eps)
    return tuple(t.nn.functional.linear(x, w) for w in (wq, wk, wv))


_samples = [sample((2, 3), (5, 3), (4, 3), (2, 3)), sample((2, 2, 3), *[(2, 3)] * 3, (3,), 0.1)]


def _flops(x: Array, wq: Array, wk: Array, wv: Array, wrt: frozenset[str]) -> tuple[float, float]:
    """A product for each weight; then one for its gradient, and one for what it sends back to the rows."""
    products = {name: 2 * x.size * len(w) for name, w in (("wq", wq), ("wk", wk), ("wv", wv))}
    rows = bool(wrt & {"x", "norm_weight"})
    return sum(products.values()), sum(n * ((name in wrt) + rows) for name, n in products.items())


@fused(precision="low", wide_part="norm_weight", torch=_torch, numpy=False, samples=_samples, flops=_flops)
def qkv_projection(
    x: Array, wq: Array, wk: Array, wv: Array, norm_weight: Array | None = None, eps: float = 1e-5
) -> tuple[Array, Array, Array]:
    """``n wqᵀ``, ``n wkᵀ`` and ``n wvᵀ``, n being ``rms_norm(x, weight=norm_weight)``, or x without a norm_weight.

    x is (..., d_in), the weights are (d_q, d_in), (d_k, d_in) and (d_v, d_in), norm_weight is (d_in,). The results are
    (..., d_q), (..., d_k) and (..., d_v), each in the dtype of its own product. Half precision is computed in float32
    and rounded once. Shapes that don't fit raise a ShapeError.

    >>> q, k, v = qkv_projection(np.array([1.0, 2.0]), np.eye(2), np.ones((1, 2)), np.zeros((1, 2)))
    >>> print(q, k, v)
    [1. 2.] [3.] [0.]
    """
    check_projections(x, wq, wk, wv, norm_weight, eps)
    n = x if norm_weight is None else rms_norm(x, None, norm_weight, eps)
    return linear(n, wq), linear(n, wk), linear(n, wv)


def check_projections(x: Any, wq: Any, wk: Any, wv: Any, norm_weight: Any, eps: float) -> None:
    """Refuse shapes that don't fit."""
    shapes = [np.shape(w) for w in (wq, wk, wv)]
    if not all(len(shape) == 2 and np.shape(x)[-1:] == shape[1:] for shape in shapes):
        got = f"{np.shape(x)}, {shapes[0]}, {shapes[1]} and {shapes[2]}"
        hint = "a weight is (outputs, inputs), as that of nn.Linear"
        raise ShapeError("x (..., d_in), wq (d_q, d_in), wk (d_k, d_in), wv (d_v, d_in)", got, hint)
    check_norm(x, norm_weight, eps)


@qkv_projection.defforward
def _forward(
    x: Any, wq: Any, wk: Any, wv: Any, norm_weight: Any, eps: float
) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
    check_projections(x, wq, wk, wv, norm_weight, eps)
    kinds = [dtypes(x, norm_weight, w) for w in (wq, wk, wv)]  # of each result, and to compute it in
    work = np.result_type(*[wide for _, wide in kinds])
    source, weights = NormedRows(x, norm_weight, work, eps), [as_matrix(w, work) for w in (wq, wk, wv)]
    results = [np.empty((*np.shape(x)[:-1], len(w)), work) for w in weights]
    products = [(w.T, matrix_of(out)) for w, out in zip(weights, results, strict=True)]

    def body(a: int, b: int) -> None:
        n = source.tile(a, b)
        for w, out in products:
            np.matmul(n, w, out=out[a:b])

    over_products(body, len(source.rows), *weights)
    q, k, v = (cast_to(out, dtype) for out, (dtype, _) in zip(results, kinds, strict=True))
    return (q, k, v), {"inverse": source.inverse}


@qkv_projection.defbackward("x", "wq", "wk", "wv", "norm_weight")
def _backward(
    g: tuple[Any, ...], x: Any, wq: Any, wk: Any, wv: Any, norm_weight: Any, inverse: Any, needs: tuple[bool, ...]
) -> tuple[Array | None, ...]:
    """dn = Σ gᵢ wᵢ and dwᵢ = gᵢᵀ n over the three."""
    work = inverse.dtype
    source, upstream = NormedRows(x, norm_weight, work, inverse=inverse), [as_matrix(part, work) for part in g]
    weights = [as_matrix(w, work) for w in (wq, wk, wv)]
    gx = np.empty(x.shape, work) if needs[0] or needs[4] else None
    result, n = None if gx is None else matrix_of(gx), source.buffer(0, len(source.rows))

    def body(a: int, b: int) -> None:
        source.write(a, b, n[a:b])
        if result is not None:
            for k, (up, w) in enumerate(zip(upstream, weights, strict=True)):
                add_product(result[a:b], up[a:b], w, fresh=k == 0)
            source.backward(a, b, result[a:b])

    if result is not None or norm_weight is not None:
        over_products(body, len(source.rows), *weights)
    gweights = [np.empty(w.shape, work) if need else None for w, need in zip(weights, needs[1:4], strict=True)]
    products = zip(gweights, upstream, strict=True)
    add_products([(out, up.T, n) for out, up in products if out is not None], fresh=True)
    gradients = (gx if needs[0] else None, *gweights, source.weight_gradient() if needs[4] else None)
    return rounded_gradients(gradients, (x, wq, wk, wv, norm_weight))
