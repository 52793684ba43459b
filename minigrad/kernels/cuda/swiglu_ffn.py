"""The feed-forward layer on a GPU: one product for gate and up, whose matrices stand below each other."""

from __future__ import annotations

from typing import Any

from minigrad.backend import Array, array_module, cast_to
from minigrad.kernels.cuda.launching import THREADS, grid_for, launch, pack_of
from minigrad.kernels.cuda.normed_rows import ProductRows, takes, weight_gradient
from minigrad.kernels.swiglu_ffn import check_ffn, swiglu_ffn
from minigrad.ops._gemm import multiply_into


def _units(name: str, d_ff: int, *arrays: Array) -> None:
    """Launch a kernel on the units, of arrays as wide as d_ff or twice that."""
    pack, size = pack_of(d_ff, *arrays), arrays[0].shape[0] * d_ff
    if size:
        launch("joined_rows.cu", name, arrays[0], pack, grid_for(size, pack), THREADS, *arrays, d_ff, size)


def _forward(
    x: Array, w1: Array, w3: Array, w2: Array, norm_weight: Any, eps: float, recompute: bool | str,
    needs: tuple[bool, ...] = (False,) * 5,
) -> tuple[Array, dict[str, Any]]:  # fmt: skip
    check_ffn(x, w1, w3, w2, norm_weight, eps, recompute)
    product, xp = ProductRows.of(x, norm_weight), array_module(x)
    n, inverse = product.forward(eps)
    both = _gate_and_up(product, n, w1, w3)
    h = xp.empty((len(n), len(w1)), product.dtype)
    _units("joined_swiglu", len(w1), both, h)
    out = multiply_into(xp.empty((len(n), len(w2)), product.dtype), h, cast_to(w2, product.dtype).T)
    kept = both if any(needs) and not recompute else both[:0]
    return out.reshape(*x.shape[:-1], len(w2)), {"gate": kept, "up": None, "inverse": inverse}


def _gate_and_up(product: ProductRows, n: Array, w1: Array, w3: Array) -> Array:
    """Gate and up of each row side by side."""
    out = array_module(n).empty((len(n), 2 * len(w1)), product.dtype)
    return multiply_into(out, n, product.below(w1, w3).T)


def _backward(
    g: Array, x: Array, w1: Array, w3: Array, w2: Array, norm_weight: Any, gate: Array, up: None, inverse: Array,
    needs: tuple[bool, ...],
) -> tuple[Any, ...]:  # fmt: skip
    xp, both, d_ff = array_module(x), gate, len(w1)
    product = ProductRows.of(x, norm_weight)._replace(dtype=g.dtype)
    upstream = xp.ascontiguousarray(g.reshape(len(product.x), -1))
    n = product.again(inverse) if any(needs[1:3]) or not len(both) else None
    if not len(both):
        both = _gate_and_up(product, n, w1, w3)
    dh = multiply_into(xp.empty((len(upstream), d_ff), product.dtype), upstream, cast_to(w2, product.dtype))
    h, dboth = xp.empty_like(dh), xp.empty_like(both)
    _units("joined_swiglu_backward", d_ff, dh, both, h, dboth)
    gx = gnorm = None
    if needs[0] or needs[4]:
        rows = multiply_into(xp.empty(product.x.shape, product.dtype), dboth, product.below(w1, w3))
        gx, gnorm = product.backward(rows, inverse, (needs[0], needs[4]))
    products = (w1, dboth[:, :d_ff], n), (w3, dboth[:, d_ff:], n), (w2, upstream, h)
    gweights = [weight_gradient(*p) if need else None for p, need in zip(products, needs[1:4], strict=True)]
    return None if gx is None else gx.reshape(x.shape), *gweights, gnorm


swiglu_ffn.defgpu(
    _forward, _backward, lambda x, w1, w3, w2, norm_weight, eps, recompute: takes(x, (w1, w3, w2), norm_weight)
)
