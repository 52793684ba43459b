"""RMS normalisation on a GPU. A block takes a row."""

from __future__ import annotations

from typing import Any

from minigrad.backend import Array
from minigrad.kernels.cuda.launching import Rows, fits, uniform
from minigrad.kernels.rms_norm import rms_norm
from minigrad.kernels.rows import normalized


def _forward(x: Array, normalized_shape: Any, weight: Any, eps: float) -> tuple[Array, dict[str, Any]]:
    rows = Rows(x, weight, axes=len(normalized(x, normalized_shape, eps, weight=weight)))
    out, inverse = rows.xp.empty(x.shape, x.dtype), rows.empty()
    rows.launch("norms", "rms_norm_forward", out, inverse, rows.width, eps)
    return out, {"inverse": inverse}


def _backward(
    g: Array, x: Array, normalized_shape: Any, weight: Any, inverse: Array, needs: tuple[bool, bool]
) -> tuple[Any, Any]:
    rows = Rows(g, x, weight, axes=len(normalized(x, normalized_shape, weight=weight)))
    dx = rows.xp.empty(x.shape, x.dtype) if needs[0] else None
    shares = rows.shares() if needs[1] else None
    rows.launch("norms", "rms_norm_backward", inverse, dx, shares, rows.rows, rows.width, shared=True)
    return dx, rows.summed(shares, weight)


rms_norm.defgpu(
    _forward,
    _backward,
    lambda x, shape, weight, eps: uniform(x, weight) and fits(x, normalized(x, shape, eps, weight=weight)),
)
