"""Normalisation of each channel over the batch, a few channels at a time, which stay in the cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, array_of, cast_to, is_on_gpu
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.errors import ShapeError
from minigrad.kernels.layer_norm import centred
from minigrad.kernels.normed_rows import LOWEST, powers_for, within_range
from minigrad.kernels.rows import dtypes
from minigrad.machine.loops import LARGEST, dot, loop
from minigrad.machine.parallel import blas_threads, for_rows, scratch
from minigrad.messages.arguments import check_eps
from minigrad.ops import astype, mean, reshape, sqrt

FEW = 8  # places of a channel, below which a loop would jump about in memory, and the NumPy tile is faster
LOWEST_FLOAT = LOWEST[4]


def _torch(t: Any, x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    axes = (0, *range(2, x.ndim))
    y = t.nn.functional.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    return y, x.mean(axes), x.var(axes, unbiased=False)


_samples = [sample((4, 3)), sample((2, 3, 4), (3,), (3,)), sample((2, 2, 3, 2), None, (2,), 0.1)]


@fused(precision="wide", torch=_torch, numpy=False, samples=_samples)
def normalize_batch(
    x: Array, weight: Array | None = None, bias: Array | None = None, eps: float = 1e-5
) -> tuple[Array, Array, Array]:
    """``(x - mean) / √(var + eps) · weight + bias`` for each channel, and the means and variances themselves.

    x is (N, C, …), weight and bias are (C,) or None; mean and var, that of the population, are (C,), over all axes but
    the second. Half precision is computed in float32 and rounded once. Numbers whose squares leave the range of the
    dtype are normalised all the same; their variance is infinite or 0. Ioffe and Szegedy, "Batch Normalization" (2015).

    >>> y, means, variances = normalize_batch(np.array([[1.0], [3.0]]), eps=0.0)
    >>> print(y.T, means, variances)
    [[-1.  1.]] [2.] [1.]
    """
    _check(x, weight, bias, eps)
    axes, channels = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
    wide = astype(x, accumulator(x.dtype))
    raw, part = array_of(wide), 1.0
    if not is_on_gpu(raw) and np.fmax.reduce(abs(raw), axis=None, initial=0) > np.finfo(raw.dtype).max / 4:
        part = 0.25  # a difference may overflow
    centre = mean(wide * part, axes, True)
    centred = wide * part - centre
    rest = mean(centred, axes, True)  # the mean of numbers with a large offset is rounded
    centred = centred - rest
    near, least = within_range(centred, axes, eps * part * part)
    y = near / sqrt(mean(near * near, axes, True) + least)
    with np.errstate(over="ignore"):
        off = centred / part
        var = mean(off * off, axes, True)
        average = (centre + rest) / part
    y = y if weight is None else y * reshape(weight, channels)
    y = y if bias is None else y + reshape(bias, channels)
    dtype, narrow = dtypes(x, weight, bias)[0], (-1,)
    return astype(y, dtype), astype(reshape(average, narrow), x.dtype), astype(reshape(var, narrow), x.dtype)


def _check(x: Any, weight: Any, bias: Any, eps: Any) -> None:
    check_eps(eps)
    if np.ndim(x) < 2:
        raise ShapeError("x (N, C, …)", f"shape {np.shape(x)}", "the second axis counts channels")
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and np.shape(p) != x.shape[1:2]:
            raise ShapeError(f"a {name} of shape {x.shape[1:2]}", f"{np.shape(p)}", "one number for each channel")


@normalize_batch.defforward
def _forward(x: Any, weight: Any, bias: Any, eps: float) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
    _check(x, weight, bias, eps)
    dtype, work = dtypes(x, weight, bias)
    planes = _planes(x)
    channels = planes.shape[1]
    out = np.empty(planes.shape, work)
    centre, rest, var = np.zeros((3, channels), work)
    scale = np.ones(channels, work) if weight is None else np.asarray(weight, work)
    inverse = np.empty(channels, work)

    offset = np.zeros(channels, work) if bias is None else np.asarray(bias, work)

    def body(a: int, b: int) -> None:
        normalize(planes, scale, offset, float(eps), out, centre, rest, var, inverse, a, b)

    _over_channels(body, planes, work, arrays=3, ns=2.0)
    statistics = (cast_to(centre + rest, x.dtype), cast_to(var, x.dtype))
    return (cast_to(out.reshape(x.shape), dtype), *statistics), {"centre": centre, "rest": rest, "inverse": inverse}


def _normalize(
    planes: Array, scale: Array, offset: Array, eps: float, out: Array, centre: Array, rest: Array, var: Array,
    inverse: Array, a: int, b: int,
) -> None:  # fmt: skip
    at, y, work, power = slice(a, b), out[:, a:b], out.dtype, None
    some = eps > LOWEST[work.itemsize]  # small squares vanish beside eps
    with np.errstate(all="ignore"):
        _standardize(planes[:, at], work.type(eps), y, centre[at], rest[at], var[at], inverse[at])
    if y.size and not (var[at].max() < np.inf and (some or var[at].min() > LOWEST[work.itemsize])):
        with np.errstate(over="ignore", under="ignore"):
            power = powers_for(np.abs(planes[:, at]).max(axis=(0, 2)).astype(work))
            power = np.minimum(power, 1) if some else power
            scaled = planes[:, at] * power[:, None]
            _standardize(scaled, eps * power * power, y, centre[at], rest[at], var[at], inverse[at])
            for statistic in (centre, rest, var, var):
                statistic[at] /= power
    y *= (inverse[at] * scale[at])[:, None]
    if power is not None:
        with np.errstate(over="ignore"):  # without an eps
            inverse[at] *= power
    y += offset[at, None]


def _standardize(x: Array, eps: Any, y: Array, centre: Array, rest: Array, var: Array, inverse: Array) -> None:
    """The centred channels, and their statistics."""
    n = max(len(x) * x.shape[2], 1)
    np.divide(_sums(x, y.dtype), n, out=centre)
    np.subtract(x, centre[:, None], out=y)
    np.divide(_sums(y, y.dtype), n, out=rest)
    y -= rest[:, None]
    square = np.multiply(y, y, out=scratch(y.shape, y.dtype, "batch norm"))
    np.divide(_sums(square, y.dtype), n, out=var)
    np.divide(1, np.sqrt(var + eps), out=inverse)


@loop(_normalize)
def normalize(
    planes: Array, scale: Array, offset: Array, eps: float, out: Array, centre: Array, rest: Array, var: Array,
    inverse: Array, a: int, b: int,
) -> Any:  # fmt: skip
    """The channels from a to b of (N, C, places): what they are, and their statistics."""
    if out.shape[2] < FEW:
        return False
    ones, n = np.ones(out.shape[2], np.float32), np.float32(max(len(out) * out.shape[2], 1))
    for c in range(a, b):
        total = np.float32(0.0)
        for i in range(len(out)):
            total += dot(planes[i, c], ones)
        centre[c], left, squares = total / n, np.float32(0.0), np.float32(0.0)
        for i in range(len(out)):
            for j in range(ones.size):
                out[i, c, j] = planes[i, c, j] - centre[c]
            left += dot(out[i, c], ones)
        rest[c] = left / n
        for i in range(len(out)):
            for j in range(ones.size):
                out[i, c, j] -= rest[c]
            squares += dot(out[i, c], out[i, c])
        var[c] = squares / n
        if not (var[c] <= LARGEST and (var[c] > LOWEST_FLOAT or eps > LOWEST_FLOAT)):
            return False
        inverse[c] = 1.0 / np.sqrt(var[c] + eps)
        for i in range(len(out)):
            for j in range(ones.size):
                out[i, c, j] = out[i, c, j] * (inverse[c] * scale[c]) + offset[c]
    return True


@normalize_batch.defbackward("x", "weight", "bias")
def _backward(
    g: Any, x: Any, weight: Any, bias_dtype: Any, centre: Any, rest: Any, inverse: Any, needs: tuple[bool, ...]
) -> tuple[Any, Any, Any]:
    """With the normalised n, r = 1/std, and the gradients of y, mean and var: dw = Σ gy n, db = Σ gy, and

    dx = r w (gy - (db + n dw) / N) + (gmean + 2 gvar n / r) / N, N numbers in a channel.
    """
    up, of_mean, of_var = g
    work = inverse.dtype
    planes, up = _planes(x), _planes(up)
    scale = inverse if weight is None else inverse * np.asarray(weight, work)
    gweight, gbias = np.zeros((2, planes.shape[1]), work)
    gx = np.empty(planes.shape, work)

    of_mean, of_var = of_mean.astype(work, copy=False), of_var.astype(work, copy=False)

    def body(a: int, b: int) -> None:
        slopes(planes, up, centre, rest, inverse, scale, of_mean, of_var, gx, gweight, gbias, a, b)

    _over_channels(body, planes, work, arrays=4, ns=3.0)
    return (
        cast_to(gx.reshape(x.shape), x.dtype) if needs[0] else None,
        cast_to(gweight, weight.dtype) if needs[1] else None,
        cast_to(gbias, bias_dtype) if needs[2] else None,
    )


def _slopes(
    planes: Array, up: Array, centre: Array, rest: Array, inverse: Array, scale: Array, of_mean: Array, of_var: Array,
    gx: Array, gweight: Array, gbias: Array, a: int, b: int,
) -> None:  # fmt: skip
    y, dx, work, n = up[:, a:b], gx[:, a:b], gx.dtype, max(len(gx) * gx.shape[2], 1)
    normal = scratch(y.shape, work, "batch norm")
    part = centred(planes[:, a:b], centre[a:b, None], normal)
    normal -= rest[a:b, None] * part
    normal *= inverse[a:b, None] / part
    gbias[a:b] = _sums(y, work)
    gweight[a:b] = _sums(np.multiply(y, normal, out=dx), work)
    slope = -scale[a:b] * gweight[a:b]
    if of_var.any():
        slope += 2 * of_var[a:b] / inverse[a:b]
    np.multiply(y, scale[a:b, None], out=dx)
    normal *= (slope / n)[:, None]
    dx += normal
    dx += ((of_mean[a:b] - scale[a:b] * gbias[a:b]) / n)[:, None]


@loop(_slopes)
def slopes(
    planes: Array, up: Array, centre: Array, rest: Array, inverse: Array, scale: Array, of_mean: Array, of_var: Array,
    gx: Array, gweight: Array, gbias: Array, a: int, b: int,
) -> Any:  # fmt: skip
    """The gradients of the channels from a to b; ``scale`` is r w."""
    if gx.shape[2] < FEW:
        return False
    ones, n = np.ones(gx.shape[2], np.float32), np.float32(max(len(gx) * gx.shape[2], 1))
    for c in range(a, b):
        if not inverse[c] > 1e-19:  # numbers beyond 1e19: their differences may leave the range
            return False
        gbias[c], gweight[c] = 0.0, 0.0
        for i in range(len(gx)):
            for j in range(ones.size):
                gx[i, c, j] = (planes[i, c, j] - centre[c] - rest[c]) * inverse[c]
            gbias[c] += dot(up[i, c], ones)
            gweight[c] += dot(up[i, c], gx[i, c])
        slope = (2.0 * of_var[c] / inverse[c] - scale[c] * gweight[c]) / n
        offset = (of_mean[c] - scale[c] * gbias[c]) / n
        for i in range(len(gx)):
            for j in range(ones.size):
                gx[i, c, j] = up[i, c, j] * scale[c] + gx[i, c, j] * slope + offset
    return True


def _planes(x: Any) -> Array:
    """x as (N, C, places)."""
    return np.reshape(x, (*x.shape[:2], math.prod(x.shape[2:])))


def _sums(planes: Array, work: Any) -> Array:
    """The sum of each channel."""
    return np.add.reduce(np.add.reduce(planes, 2, work), 0)


def _over_channels(body: Any, planes: Array, work: Any, arrays: int, ns: float) -> None:
    """Run ``body(start, stop)`` on tiles of channels that touch ``arrays`` of the size of ``planes``."""
    numbers = planes.shape[0] * planes.shape[2]
    with blas_threads(1):
        for_rows(body, planes.shape[1], arrays * numbers * work.itemsize, ns * numbers)
