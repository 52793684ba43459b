"""Root-mean-square normalisation in one pass over cache-sized tiles, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, Shape, accumulator, cast_to
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.kernels.normed_rows import has_cubes, normalize_backward, normed, within_range
from minigrad.kernels.rows import as_matrix, dtypes, matrix_of, normalized, over_rows, total
from minigrad.ops import astype, mean, sqrt


def _torch(t: Any, x: Any, normalized_shape: Shape | None = None, weight: Any = None, eps: float = 1e-5) -> Any:
    return t.nn.functional.rms_norm(x, normalized_shape or x.shape[-1:], weight, eps)


@fused(
    precision="wide",
    torch=_torch,
    numpy=False,
    samples=[sample((2, 3)), sample((2, 3, 4), [3, 4], (3, 4)), sample((3, 5), None, (5,), 0.1)],
)
def rms_norm(x: Array, normalized_shape: Shape | None = None, weight: Array | None = None, eps: float = 1e-5) -> Array:
    """Divide each row by its root mean square: ``y = x / √(mean(x²) + eps) · weight``.

    x is (..., *normalized_shape). normalized_shape is an int or a tuple, by default the shape of the weight, else the
    last axis. A weight of None is 1. Half precision is computed in float32 and rounded once. Zhang and
    Sennrich, "Root Mean Square Layer Normalization" (2019). Shapes that don't fit raise a ShapeError.

    >>> print(rms_norm(np.array([3.0, 4.0, 0.0, 0.0]), eps=0.0))
    [1.2 1.6 0.  0. ]
    """
    axes = tuple(range(-len(normalized(x, normalized_shape, eps, weight=weight)), 0))
    wide = astype(x, accumulator(x.dtype))
    wide, eps = within_range(wide, axes, eps)
    y = wide / sqrt(mean(wide * wide, axes, True) + eps)
    return astype(y if weight is None else y * weight, dtypes(x, weight)[0])


@rms_norm.defforward
def _forward(x: Any, normalized_shape: Any, weight: Any, eps: float) -> tuple[Array, dict[str, Any]]:
    axes = len(normalized(x, normalized_shape, eps, weight=weight))
    dtype, work = dtypes(x, weight)
    rows, scale = as_matrix(x, work, axes), None if weight is None else as_matrix(weight, work, axes)[0]
    out, inverse = np.empty(np.shape(x), work), np.empty(len(rows), work)
    result = matrix_of(out, axes)

    def body(a: int, b: int) -> None:
        normed(rows[a:b], scale, eps, inverse[a:b], result[a:b])

    over_rows(body, rows, arrays=2, ns=1.0)
    return cast_to(out, dtype), {"inverse": inverse}


@rms_norm.defbackward("x", "weight")
def _backward(
    g: Any, x: Any, normalized_shape: Any, weight: Any, inverse: Any, needs: tuple[bool, bool]
) -> tuple[Any, Any]:
    axes = len(normalized(x, normalized_shape, weight=weight))
    work = inverse.dtype
    rows, up = as_matrix(x, work, axes), as_matrix(g, work, axes)
    scale = np.ones(rows.shape[1], work) if weight is None else as_matrix(weight, work, axes)[0]
    gx = np.empty(x.shape, work)
    result = matrix_of(gx, axes)
    shares: dict[int, Array] = {}
    in_range = has_cubes(inverse)

    def body(a: int, b: int) -> None:
        out = result[a:b] if needs[0] else None
        shares[a] = normalize_backward(up[a:b], rows[a:b], scale, inverse[a:b], out, in_range)

    over_rows(body, rows, arrays=4, ns=2.0)
    gweight = cast_to(total(shares, scale), weight.dtype).reshape(weight.shape) if needs[1] else None
    return cast_to(gx, x.dtype) if needs[0] else None, gweight
