"""Rotary position embedding on a GPU."""

from __future__ import annotations

import math
from typing import Any

from minigrad.backend import Array, array_module
from minigrad.kernels.cuda.launching import THREADS, launch


def turned(x: Any, cos: Array, sin: Array, layout: str) -> Array:
    """The turn of x (..., t, d), in the memory order of x, so that views with transposed heads are read in place."""
    xp, half = array_module(x), x.shape[-1] // 2
    if x.ndim > 4 or x.strides[-1] != x.itemsize:
        x = xp.ascontiguousarray(x)
    out = xp.empty_like(x)
    if not x.size:
        return out
    tables = [xp.ascontiguousarray(xp.broadcast_to(table, (*table.shape[:-1], half))) for table in (cos, sin)]
    parts = [_four_axes(array, (*x.shape[:-1], array.shape[-1])) for array in (x, *tables, out)]
    strides = [array.strides[axis] // array.itemsize for array in parts for axis in range(3)]
    step, apart = (1, half) if layout == "half" else (2, 1)
    together = all(s % 2 == 0 for s in strides[:3] + strides[9:]) and x.data.ptr % (2 * x.itemsize) == 0
    n, h, t, _ = parts[0].shape
    args = [*parts, n * h, h, half, t * half, *strides, step, apart]
    grid = -(-t * half // THREADS), min(n * h, 65535)
    launch("rope.cu", "rope", x, 2 if together else 1, grid, THREADS, *args)
    return out


def _four_axes(array: Array, shape: tuple[int, ...]) -> Array:
    """``array`` broadcast to ``shape``, seen with axes (n, h, t, d)."""
    full = array_module(array).broadcast_to(array, shape)
    return full.reshape((1,) * (4 - len(shape)) + shape if len(shape) <= 4 else (math.prod(shape[:-3]), *shape[-3:]))
