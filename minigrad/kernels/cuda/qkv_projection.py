"""Queries, keys and values on a GPU: one product with the three matrices below each other."""

from __future__ import annotations

from typing import Any

from minigrad.backend import Array, array_module
from minigrad.kernels.cuda.normed_rows import ProductRows, joined, takes, weight_gradient
from minigrad.kernels.qkv_projection import check_projections, qkv_projection
from minigrad.ops._gemm import multiply_into


def _forward(
    x: Array, wq: Array, wk: Array, wv: Array, norm_weight: Any, eps: float, cos: None, sin: None
) -> tuple[tuple[Array, ...], dict[str, Any]]:
    check_projections(x, wq, wk, wv, norm_weight, eps)
    product = ProductRows.of(x, norm_weight)
    n, inverse = product.forward(eps)
    weights = product.below(wq, wk, wv)
    out = multiply_into(array_module(x).empty((len(n), len(weights)), product.dtype), n, weights.T)
    ends = len(wq), len(wq) + len(wk)
    parts = out[:, : ends[0]], out[:, ends[0] : ends[1]], out[:, ends[1] :]
    return tuple(part.reshape(*x.shape[:-1], part.shape[1]) for part in parts), {"inverse": inverse}


def _backward(
    g: tuple[Array, ...], x: Array, wq: Array, wk: Array, wv: Array, norm_weight: Any, cos: None, sin: None,
    inverse: Array, needs: tuple[bool, ...],
) -> tuple[Any, ...]:  # fmt: skip
    product, xp = ProductRows.of(x, norm_weight), array_module(x)
    product = product._replace(dtype=g[0].dtype)
    up = joined(g, len(product.x), product.dtype)
    gx = gnorm = None
    if needs[0] or needs[4]:
        rows = multiply_into(xp.empty(product.x.shape, product.dtype), up, product.below(wq, wk, wv))
        gx, gnorm = product.backward(rows, inverse, (needs[0], needs[4]))
    gweights: list[Any] = [None] * 3
    n, start = product.again(inverse) if any(needs[1:4]) else None, 0
    for i, w in enumerate((wq, wk, wv)):  # in arrays of their own, which become .grad as they are
        if needs[1 + i]:
            gweights[i] = weight_gradient(w, up[:, start : start + len(w)], n)
        start += len(w)
    return None if gx is None else gx.reshape(x.shape), *gweights, gnorm, None, None


def _fits(x: Any, wq: Any, wk: Any, wv: Any, norm_weight: Any, eps: float, cos: Any, sin: Any) -> bool:
    """Without tables of turns: a card would gain nothing from them, and layers give it none."""
    return cos is None and takes(x, (wq, wk, wv), norm_weight)


qkv_projection.defgpu(_forward, _backward, _fits)
