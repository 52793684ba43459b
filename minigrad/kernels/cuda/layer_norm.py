"""Layer normalisation on a GPU. A block takes a row."""

from __future__ import annotations

from typing import Any

from minigrad.backend import Array
from minigrad.kernels.cuda.launching import Rows, fits, uniform
from minigrad.kernels.layer_norm import layer_norm
from minigrad.kernels.rows import normalized


def _forward(x: Array, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Array, dict[str, Any]]:
    rows = Rows(x, weight, bias, axes=len(normalized(x, normalized_shape, eps, weight=weight, bias=bias)))
    out = rows.xp.empty(x.shape, x.dtype)
    centre, rest, inverse = (rows.empty() for _ in range(3))
    rows.launch("norms", "layer_norm_forward", out, centre, rest, inverse, rows.width, eps)
    return out, {"centre": centre, "rest": rest, "inverse": inverse}


def _backward(
    g: Array, x: Array, normalized_shape: Any, weight: Any, bias: Any, centre: Array, rest: Array,
    inverse: Array, needs: tuple[bool, ...],
) -> tuple[Any, Any, Any]:  # fmt: skip
    rows = Rows(g, x, weight, axes=len(normalized(x, normalized_shape, weight=weight, bias=bias)))
    dx = rows.xp.empty(x.shape, x.dtype) if needs[0] else None
    shares = [rows.shares() if need else None for need in needs[1:]]
    args = (centre, rest, inverse, dx, *shares, rows.rows, rows.width)
    rows.launch("norms", "layer_norm_backward", *args, shared=True)
    return dx, rows.summed(shares[0], weight), rows.summed(shares[1], bias)


layer_norm.defgpu(
    _forward,
    _backward,
    lambda x, shape, weight, bias, eps: (
        uniform(x, weight, bias) and fits(x, normalized(x, shape, eps, weight=weight, bias=bias))
    ),
)
