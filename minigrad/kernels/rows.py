"""Tools of the row-wise kernels: a tensor as a matrix, tiles of its rows, and exponentials that can't overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, array_of, is_array
from minigrad.errors import CallError, ShapeError
from minigrad.machine.loops import dot, exp, loop
from minigrad.machine.parallel import blas_threads, for_rows
from minigrad.messages.arguments import as_shape, check_eps
from minigrad.messages.explain import describe

TILE_SHARE = 1 / 4  # of their bytes that tiles are counted with: four times the usual tile is 10 to 25 % faster here
SAFE = 1e15  # a sum of exponentials within [1/SAFE, SAFE] lost nothing to overflow or underflow in float32


def dtypes(*arrays: Any) -> tuple[Any, Any]:
    """The dtype of a result of these arrays, and the one to compute it in: float32 for half precision."""
    dtype = np.result_type(*[getattr(array, "dtype", array) for array in arrays if array is not None])
    if dtype.char in "fd":
        return dtype, dtype
    if dtype.kind in "biu":
        dtype = np.dtype(np.float64)
    return dtype, accumulator(dtype)


def as_matrix(x: Any, dtype: Any, axes: int = 1) -> Array:
    """``x`` as a contiguous matrix of ``dtype`` whose rows span the last ``axes`` axes, copied only if need be."""
    x = np.ascontiguousarray(x, dtype)
    split = x.ndim - axes
    return x.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:]))


def matrix_of(out: Array, axes: int = 1) -> Array:
    """A new, contiguous ``out`` seen as :func:`as_matrix` sees its arguments, to be written to."""
    return as_matrix(out, out.dtype, axes)


def over_rows(body: Callable[[int, int], object], matrix: Array, arrays: int, ns: float) -> None:
    """Run ``body(start, stop)`` on tiles of rows that touch ``arrays`` of the size of ``matrix``, ``ns`` an element.

    Inside, BLAS runs on one thread, so that no sum depends on the number of threads.
    """
    rows, width = matrix.shape
    with blas_threads(1):
        for_rows(body, rows, arrays * width * matrix.itemsize * TILE_SHARE, ns * width)


def over_elements(body: Callable[[slice], object], flat: Array, arrays: int, ns: float) -> None:
    """Run ``body(tile)`` on slices of a flat array, of a thousand elements at least."""
    rows = -(-flat.size // 1024)
    for_rows(lambda a, b: body(slice(a * 1024, b * 1024)), rows, arrays * 1024 * flat.itemsize * TILE_SHARE, ns * 1024)


def total(parts: dict[int, Array], like: Array) -> Array:
    """The sum of the tiles' shares, in the order of their rows whichever thread was first; zeros of nothing."""
    out = np.zeros(like.shape, like.dtype)
    for start in sorted(parts):
        out += parts[start]
    return out


def _exponentials(x: Array, out: Array, shift: Array, sums: Array) -> None:
    """The sums tell: within safe bounds nothing overflowed and nothing that counts underflowed. So a tile of ordinary
    numbers is spared the maximum and the subtraction, half a nanosecond an element. In other tiles each row decides
    for itself: its numbers don't depend on its neighbours. A row of only -∞ has the sum 0.
    """
    ones = np.ones(x.shape[1], x.dtype)
    shift[...] = 0
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.exp(x, out=out)
        np.matmul(out, ones, out=sums)
        safe = (sums > 1 / SAFE) & (sums < SAFE)
    if not safe.all():
        np.max(x, axis=1, out=shift, initial=-math.inf)
        shift[safe | ~np.isfinite(shift)] = 0
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(x, shift[:, None], out=out)
            np.exp(out, out=out)
            np.matmul(out, ones, out=sums)


@loop(_exponentials)
def exponentials(x: Array, out: Array, shift: Array, sums: Array) -> None:
    """``out = e^(x - shift)`` and ``sums`` of its rows; shift is 0 where that is safe, else the maximum of the row."""
    ones, flat, made = np.ones(x.shape[1], np.float32), x.ravel(), out.ravel()
    for k in range(flat.size):  # not row by row: short rows would leave the vectors half empty
        made[k] = exp(flat[k])
    for i in range(len(x)):
        shift[i] = 0.0
        sums[i] = dot(out[i], ones)
        if not (1.0 / SAFE < sums[i] < SAFE):
            top = -math.inf
            for j in range(x.shape[1]):
                top = max(top, x[i, j])
            shift[i] = top if np.isfinite(top) else 0.0
            for j in range(x.shape[1]):
                out[i, j] = exp(x[i, j] - shift[i])
            sums[i] = dot(out[i], ones)


def _again(x: Array, shift: Array, out: Array) -> None:
    with np.errstate(under="ignore", over="ignore"):
        np.exp(x - shift[:, None] if shift.any() else x, out=out)


@loop(_again)
def again(x: Array, shift: Array, out: Array) -> None:
    """The exponentials of :func:`exponentials` once more, from the shift."""
    for i in range(len(x)):
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] - shift[i]
    made = out.ravel()
    for k in range(made.size):
        made[k] = exp(made[k])


def normalized(x: Any, normalized_shape: Any, eps: float = 0.0, **parameters: Any) -> tuple[int, ...]:
    """The last axes that a normalisation works over: those given, or as many as its parameters have, or one."""
    check_eps(eps)
    given = [(name, p) for name, p in parameters.items() if p is not None]
    if normalized_shape is None:
        normalized_shape = given[0][1].shape if given else np.shape(x)[-1:]
    if is_array(array_of(normalized_shape)):
        got, hint = describe(normalized_shape), "weight=… is an argument of its own"
        raise CallError("normalized_shape, the lengths of the last axes", got, hint)
    shape = as_shape(normalized_shape, "normalized_shape")
    if not shape or np.shape(x)[-len(shape) :] != shape:
        hint = "normalized_shape, or that of weight, is the end of the shape of x"
        raise ShapeError(f"an array whose last axes have the normalized shape {shape}", f"shape {np.shape(x)}", hint)
    for name, p in given:
        if np.shape(p) != shape:
            hint = "a number for each place of a row"
            raise ShapeError(f"a {name} of the normalized shape {shape}", f"{name} of shape {np.shape(p)}", hint)
    return shape
