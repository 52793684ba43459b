"""Rows divided by their root mean square, a tile at a time: for ``rms_norm``, and for products that read such rows.

A product that normalises the rows it reads keeps one number a row for the backward pass, and normalises again there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend import Array, array_module, array_of, cast_to
from minigrad.errors import ShapeError
from minigrad.kernels.rows import as_matrix, total
from minigrad.machine.loops import dot, loop
from minigrad.machine.parallel import scratch
from minigrad.messages.arguments import check_eps
from minigrad.ops.reduce import power_of_two

# By the bytes of a number: a mean of squares above LOWEST has lost no digit that counts. What is between 1 / LIMIT and
# LIMIT has a cube.
KINDS = list(map(np.finfo, ("longdouble", "float32", "float64")))  # where the first has 8 bytes it is the last
LOWEST: dict[int, Any] = {info.dtype.itemsize: info.tiny / info.eps for info in KINDS}
LIMIT: dict[int, Any] = {info.dtype.itemsize: info.dtype.type(2) ** (info.maxexp // 4) for info in KINDS}
for table in (LOWEST, LIMIT):
    table |= {size: float(number) for size, number in table.items() if size <= 8}  # Python's widen no array

FAINT, HUGE = LOWEST[4], 3e38  # of float32, for loops: beyond them they leave a row to NumPy

# ---- a tile ---------------------------------------------------------------------------------------------------------


def powers_for(size: Array) -> Array:
    """Powers of two that bring the largest numbers of rows, ``size``, near to 1."""
    return np.minimum(1 / power_of_two(size), LIMIT[size.dtype.itemsize] ** 3)


def within_range(x: Any, axes: tuple[int, ...], eps: float) -> tuple[Any, Any]:
    """``x`` and ``eps``, or x times a power of two for each row, and eps times its square, if squares leave the range.

    ``x / √(mean(x²) + eps)`` is the same. To look would be to wait for a GPU: there x is always multiplied.
    """
    raw = array_of(x)
    xp, limit, some = array_module(raw), LIMIT[raw.itemsize], eps > LOWEST[raw.itemsize]
    if not raw.size:
        return x, eps
    size = abs(raw).max(axis=axes, keepdims=True)
    if xp is np and size.max() <= limit and (some or size.min() >= 1 / limit):
        return x, eps
    with np.errstate(over="ignore"):
        scale = xp.where((size > limit) | (not some), powers_for(size), 1).astype(raw.dtype)
    return x * scale, eps * scale * scale


def inverse_rms(x: Array, eps: float, out: Array) -> None:
    """``out = 1 / √(mean(x²) + eps)`` of each row, of multiples of rows where squares leave the range of the dtype."""
    some, scale = eps > LOWEST[x.itemsize], None  # some: small squares vanish beside eps, and may underflow
    if not (_mean_square(x, eps, out) and (some or out.min() > LOWEST[x.itemsize])):
        with np.errstate(over="ignore", under="ignore"):
            scale = powers_for(np.abs(x).max(axis=1, initial=0))
            if some:
                scale = np.minimum(scale, 1)
        _mean_square(x * scale[:, None], eps * scale * scale, out)
    np.sqrt(out, out=out)
    np.divide(1, out, out=out)
    if scale is not None:
        with np.errstate(over="ignore"):  # see normalize
            out *= scale


def _mean_square(x: Array, eps: Any, out: Array) -> bool:
    """``out = mean(x²) + eps``; whether nothing overflowed. NumPy looks for that in any case."""
    fine = True
    try:
        with np.errstate(over="raise", under="ignore"):
            np.vecdot(x, x, out=out)
    except FloatingPointError:
        fine = False
    out /= max(x.shape[1], 1)
    out += eps
    return fine


def has_cubes(inverse: Array) -> bool:
    """Whether the cube of every number is in the range of the dtype."""
    limit = LIMIT[inverse.itemsize]
    return bool(1 / limit <= inverse.min(initial=limit) and inverse.max(initial=1 / limit) <= limit)


def _normed(x: Array, weight: Array | None, eps: float, inverse: Array, out: Array) -> None:
    inverse_rms(x, eps, inverse)
    normalize(x, weight, inverse, out, eps > LOWEST[x.itemsize])


@loop(_normed)
def normed(x: Array, weight: Array | None, eps: float, inverse: Array, out: Array) -> Any:
    """``out = x · inverse · weight`` with ``inverse = 1 / √(mean(x²) + eps)`` of each row; a weight of None is 1."""
    for i in range(len(x)):
        square = dot(x[i], x[i]) / np.float32(x.shape[1]) + eps
        if not (FAINT < square < HUGE):
            return False
        inverse[i] = 1.0 / np.sqrt(square)
        for j in range(x.shape[1]):
            y = x[i, j] * inverse[i]
            out[i, j] = y if weight is None else y * weight[j]
    return True


def _normalize(x: Array, weight: Array | None, inverse: Array, out: Array, finite: bool = False) -> None:
    """What normalize does.

    Without an eps the inverse of a row of the smallest numbers may be infinite, though x times it is finite. A caller
    that knows all tiles to have finite inverses says so by ``finite``: to look at each costs more, on two threads.
    """
    far = None if finite or np.fmax.reduce(inverse, initial=0) < np.inf else np.isinf(inverse)
    if far is not None:
        rows, inverse = x[far] * LIMIT[x.itemsize] ** 3, np.where(far, 1, inverse)
        rows /= np.sqrt(np.vecdot(rows, rows) / x.shape[1])[:, None]
    np.multiply(x, inverse[:, None], out=out)
    if far is not None:
        out[far] = rows
    if weight is not None:
        out *= weight


@loop(_normalize)
def normalize(x: Array, weight: Array | None, inverse: Array, out: Array, finite: bool = False) -> Any:
    """``out = x · inverse · weight``; a weight of None is 1. ``out`` may be x."""
    for i in range(len(x)):
        if not inverse[i] < HUGE:
            return False  # before a row is written, which may be one of x
    for i in range(len(x)):
        for j in range(x.shape[1]):
            y = x[i, j] * inverse[i]
            out[i, j] = y if weight is None else y * weight[j]
    return True


def normalize_backward(g: Array, x: Array, weight: Array, inverse: Array, out: Array | None, in_range: bool) -> Array:
    """Write the gradient of x to ``out``, which may be ``g`` itself, and return the gradient of the weight.

    With r = inverse: dx = r (g weight) - x r³ mean(g weight x), dweight = Σ_rows g x r. ``in_range``: see has_cubes.
    """
    share = np.empty_like(weight)
    if in_range:
        _backward_in_range(g, x, weight, inverse, out, share)
        return share
    scale, size = power_of_two(inverse), power_of_two(np.abs(weight).max(initial=0))  # the cube, or g x, may overflow
    _backward_in_range(g, x * scale[:, None], weight / size, inverse / scale, out, share)
    if out is not None:
        out *= (scale * size)[:, None]
    return share


def _backward_tile(g: Array, x: Array, weight: Array, inverse: Array, out: Array | None, share: Array) -> None:
    gx = np.multiply(g, x, out=scratch(x.shape, x.dtype, "more rows"))
    np.matmul(inverse, gx, out=share)
    if out is not None:
        slope = gx @ weight
        slope *= inverse**3 / -max(x.shape[1], 1)
        np.multiply(g, weight, out=out)
        out *= inverse[:, None]
        out += np.multiply(x, slope[:, None], out=gx)


@loop(_backward_tile)
def _backward_in_range(g: Array, x: Array, weight: Array, inverse: Array, out: Array | None, share: Array) -> None:
    share[:] = 0.0
    up, gx = np.empty_like(share), np.empty_like(share)  # a copy of the row of g: out may be g itself
    for i in range(len(x)):
        for j in range(x.shape[1]):
            up[j] = g[i, j]
        for j in range(x.shape[1]):
            gx[j] = up[j] * x[i, j]
        for j in range(x.shape[1]):
            share[j] += inverse[i] * gx[j]
        if out is not None:
            slope = dot(gx, weight) * (inverse[i] * inverse[i] * inverse[i]) / -np.float32(x.shape[1])
            for j in range(x.shape[1]):
                out[i, j] = up[j] * weight[j] * inverse[i] + x[i, j] * slope


# ---- the rows of a product ------------------------------------------------------------------------------------------


class NormedRows:
    """The rows that a product reads: the rows of x, normalised if there is a weight.

    A tile is the rows [a, b). The forward pass reads it by ``tile``, which fills in ``inverse``, 1/rms of each row
    (empty without a weight). The backward pass is given ``inverse`` again. There ``buffer`` is an array for rows,
    ``write`` writes a tile of them, and ``backward`` turns their gradient into the gradient of x.
    """

    def __init__(self, x: Any, weight: Array | None, work: Any, eps: float = 0.0, inverse: Array | None = None) -> None:
        self.rows = as_matrix(x, work)
        self.weight = None if weight is None else np.ascontiguousarray(weight, work)
        self.eps = eps
        self.inverse = np.empty(0 if weight is None else len(self.rows), work) if inverse is None else inverse
        self.in_range = eps > LOWEST[self.rows.itemsize] if inverse is None else has_cubes(inverse)
        self.shares: dict[int, Array] = {}  # what each tile adds to the gradient of the weight

    def tile(self, a: int, b: int) -> Array:
        """The rows of a tile."""
        x = self.rows[a:b]
        if self.weight is None:
            return x
        out = scratch(x.shape, x.dtype, "normed rows")
        normed(x, self.weight, self.eps, self.inverse[a:b], out)
        return out

    def buffer(self, a: int, b: int) -> Array:
        """A scratch array for these rows; without a weight the rows of x, since they are what would be written."""
        x = self.rows[a:b]
        return x if self.weight is None else scratch(x.shape, x.dtype, "normed rows: buffer")

    def write(self, a: int, b: int, out: Array) -> None:
        """Write the rows of a tile to ``out``, a part of a buffer."""
        if self.weight is not None:
            normalize(self.rows[a:b], self.weight, self.inverse[a:b], out, self.in_range)

    def backward(self, a: int, b: int, g: Array) -> None:
        """Turn the gradient of a tile's rows into the gradient of x, in place."""
        if self.weight is not None:
            tile = self.rows[a:b], self.weight, self.inverse[a:b]
            self.shares[a] = normalize_backward(g, *tile, g, self.in_range)

    def weight_gradient(self) -> Array:
        """The gradient of the weight, after ``backward`` of all tiles."""
        assert self.weight is not None
        return total(self.shares, self.weight)


def check_norm(x: Any, norm_weight: Any, eps: float) -> None:
    """Refuse a weight of the norm that isn't one number for each column of x."""
    check_eps(eps)
    if norm_weight is not None and np.shape(norm_weight) != np.shape(x)[-1:]:
        hint = "the weight of an nn.RMSNorm over the last axis, or None"
        raise ShapeError(f"a norm_weight of shape {np.shape(x)[-1:]}", f"shape {np.shape(norm_weight)}", hint)


def rounded_gradients(gradients: Sequence[Array | None], arguments: Sequence[Any]) -> tuple[Array | None, ...]:
    """Each gradient in the dtype of its argument."""
    pairs = zip(gradients, arguments, strict=True)
    return tuple(None if gradient is None else cast_to(gradient, like.dtype) for gradient, like in pairs)
