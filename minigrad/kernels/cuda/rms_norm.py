"""RMS normalisation on a GPU. A block takes a row."""

from __future__ import annotations

from typing import Any

from minigrad.backend import Array
from minigrad.kernels.cuda.launching import Rows, uniform
from minigrad.kernels.rms_norm import rms_norm
from minigrad.kernels.rows import normalized


def _forward(x: Array, normalized_shape: Any, weight: Any, eps: float) -> tuple[Array, dict[str, Any]]:
    rows = Rows(x, weight, axes=len(normalized(x, normalized_shape, eps, weight=weight)))
    out, inverse = rows.xp.empty(x.shape, x.dtype), rows.empty()
    rows.launch("rms_norm", "forward", out, inverse, rows.width, float(eps))
    return out, {"inverse": inverse}


def _backward(
    g: Array, x: Array, normalized_shape: Any, weight: Any, inverse: Array, needs: tuple[bool, bool]
) -> tuple[Any, Any]:
    rows = Rows(g, x, weight, axes=len(normalized(x, normalized_shape, weight=weight)))
    dx = rows.xp.empty(x.shape, x.dtype) if needs[0] else None
    shares = rows.shares() if needs[1] else None
    rows.launch("rms_norm", "backward", inverse, dx, shares, rows.rows, rows.width, grid=rows.blocks)
    return dx, rows.summed(shares, weight)


rms_norm.defgpu(_forward, _backward, lambda x, shape, weight, eps: uniform(x, weight))
