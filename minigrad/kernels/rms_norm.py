"""Root-mean-square normalisation in one pass over cache-sized tiles, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, rounded
from minigrad.fused import fused
from minigrad.kernels.rows import as_matrix, dtypes, matrix_of, normalized, over_rows, total
from minigrad.ops import astype, mean, sqrt
from minigrad.parallel import scratch
from minigrad.registry import sample


def _torch(t: Any, x: Any, normalized_shape: Any = None, weight: Any = None, eps: float = 1e-5) -> Any:
    return t.nn.functional.rms_norm(x, normalized_shape or x.shape[-1:], weight, eps)


@fused(
    torch=_torch,
    numpy=False,
    samples=[sample((2, 3)), sample((2, 3, 4), [3, 4], (3, 4)), sample((3, 5), None, (5,), 0.1)],
)
def rms_norm(x: Array, normalized_shape: Any = None, weight: Array | None = None, eps: float = 1e-5) -> Array:
    """Divide each row by its root mean square: ``y = x / √(mean(x²) + eps) · weight``.

    x (..., *normalized_shape); normalized_shape, an int or a tuple, is by default that of the weight, else the last
    axis. weight has the normalized shape; None is 1. Half precision is computed in float32 and rounded once. Zhang and
    Sennrich, "Root Mean Square Layer Normalization" (2019). Shapes that don't fit raise a ShapeError.

    >>> print(rms_norm(np.array([3.0, 4.0, 0.0, 0.0]), eps=0.0))
    [1.2 1.6 0.  0. ]
    """
    axes = tuple(range(-len(normalized(x, normalized_shape, eps, weight=weight)), 0))
    wide = astype(x, accumulator(x.dtype))
    y = wide / sqrt(mean(wide * wide, axes, True) + eps)
    return astype(y if weight is None else y * weight, dtypes(x, weight)[0])


@rms_norm.defforward
def _forward(x: Any, normalized_shape: Any, weight: Any, eps: float) -> tuple[Array, dict[str, Any]]:
    axes = len(normalized(x, normalized_shape, eps, weight=weight))
    dtype, work = dtypes(x, weight)
    rows = as_matrix(x, work, axes)
    scale = None if weight is None else as_matrix(weight, work, axes)[0]
    out = np.empty(np.shape(x), work)
    inverse = np.empty(len(rows), work)
    result = matrix_of(out, axes)

    def body(a: int, b: int) -> None:
        r, y, inv = rows[a:b], result[a:b], inverse[a:b]
        np.vecdot(r, r, out=inv)
        inv /= max(r.shape[1], 1)
        inv += eps
        np.sqrt(inv, out=inv)
        np.divide(1, inv, out=inv)
        np.multiply(r, inv[:, None], out=y)
        if scale is not None:
            y *= scale

    over_rows(body, rows, arrays=2, ns=1.0)
    return rounded(out, dtype), {"inverse": inverse}


@rms_norm.defbackward("x", "weight")
def _backward(
    g: Any, x: Any, normalized_shape: Any, weight: Any, inverse: Any, needs: tuple[bool, bool]
) -> tuple[Any, Any]:
    """With r = 1/rms: dx = r (g w) - x r³ mean(g w x), dw = Σ_rows g x r."""
    axes = len(normalized(x, normalized_shape, weight=weight))
    work = inverse.dtype
    rows, up = as_matrix(x, work, axes), as_matrix(g, work, axes)
    scale = np.ones(rows.shape[1], work) if weight is None else as_matrix(weight, work, axes)[0]
    gx = np.empty(x.shape, work)
    result = matrix_of(gx, axes)
    shares: dict[int, Array] = {}

    def body(a: int, b: int) -> None:
        r, u, dx, inv = rows[a:b], up[a:b], result[a:b], inverse[a:b]
        ux = np.multiply(u, r, out=scratch(r.shape, work, "rows"))
        if needs[1]:
            shares[a] = inv @ ux
        if needs[0]:
            slope = ux @ scale
            slope *= inv**3 / -max(r.shape[1], 1)
            np.multiply(u, scale, out=dx)
            dx *= inv[:, None]
            dx += np.multiply(r, slope[:, None], out=ux)

    over_rows(body, rows, arrays=4, ns=2.0)
    gweight = rounded(total(shares, scale), weight.dtype).reshape(weight.shape) if needs[1] else None
    return rounded(gx, x.dtype) if needs[0] else None, gweight
