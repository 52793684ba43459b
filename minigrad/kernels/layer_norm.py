"""Layer normalisation over cache-sized tiles, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, Shape, accumulator, array_of, cast_to, is_on_gpu
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.kernels.normed_rows import FAINT, HUGE, inverse_rms, normalize, within_range
from minigrad.kernels.rows import as_matrix, dtypes, matrix_of, normalized, over_rows, total
from minigrad.machine.loops import dot, loop
from minigrad.machine.parallel import scratch
from minigrad.ops import astype, mean, sqrt


def _torch(t: Any, x: Any, normalized_shape: Shape | None = None, *rest: Any, **named: Any) -> Any:
    return t.nn.functional.layer_norm(x, normalized_shape or x.shape[-1:], *rest, **named)


_samples = [sample((2, 3)), sample((2, 3, 4), [3, 4], (3, 4), (3, 4)), sample((3, 5), None, (5,), None, 0.1)]


@fused(precision="wide", torch=_torch, numpy=False, samples=_samples)
def layer_norm(
    x: Array,
    normalized_shape: Shape | None = None,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
) -> Array:
    """Shift and scale each row to mean 0 and variance 1: ``y = (x - mean) / √(var + eps) · weight + bias``.

    x is (..., *normalized_shape). normalized_shape is an int or a tuple, by default the shape of weight or bias, else
    the last axis. A weight of None is 1, a bias of None is 0. The variance is that of the population, formed from the
    centred row. Half precision is computed in float32 and rounded once. Ba, Kiros and Hinton, "Layer
    Normalization" (2016). Shapes that don't fit raise a ShapeError.

    >>> print(layer_norm(np.array([1.0, 3.0]), eps=0.0))
    [-1.  1.]
    """
    axes = tuple(range(-len(normalized(x, normalized_shape, eps, weight=weight, bias=bias)), 0))
    wide = astype(x, accumulator(x.dtype))
    raw = array_of(wide)
    most = 0 if is_on_gpu(raw) else np.fmax.reduce(abs(raw), axis=None, initial=0)
    if most > np.finfo(raw.dtype).max / 4:  # a difference may overflow
        wide, eps = wide * 0.25, eps / 16
    off = wide - mean(wide, axes, True)
    off = off - mean(off, axes, True)  # the mean of numbers with a large offset is rounded
    off, eps = within_range(off, axes, eps)
    y = off / sqrt(mean(off * off, axes, True) + eps)
    y = y if weight is None else y * weight
    return astype(y if bias is None else y + bias, dtypes(x, weight, bias)[0])


def centred(x: Array, centre: Array, out: Array) -> float:
    """``out = part · (x - centre)``, and the part: 1, or a quarter where a difference overflows."""
    try:  # NumPy looks for an overflow in any case
        with np.errstate(over="raise"):
            np.subtract(x, centre, out=out)
        return 1.0
    except FloatingPointError:
        np.multiply(x, 0.25, out=out)
        out -= 0.25 * centre
        return 0.25


def _standardize(
    x: Array, weight: Any, bias: Any, eps: float, average: Array, centre: Array, rest: Array, inverse: Array, out: Array
) -> None:
    np.matmul(x, average, out=centre)
    part = centred(x, centre[:, None], out)
    np.matmul(out, average, out=rest)
    out -= rest[:, None]
    inverse_rms(out, eps * part * part, inverse)
    normalize(out, weight, inverse, out)
    rest /= part
    inverse *= part
    if bias is not None:
        out += bias


@loop(_standardize)
def standardize(
    x: Array, weight: Any, bias: Any, eps: float, average: Array, centre: Array, rest: Array, inverse: Array, out: Array
) -> Any:
    """Rows centred twice, since the mean of numbers with a large offset is rounded, and divided by their deviation."""
    for i in range(len(x)):
        centre[i] = dot(x[i], average)
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] - centre[i]
        rest[i] = dot(out[i], average)
        for j in range(x.shape[1]):
            out[i, j] -= rest[i]
        square = dot(out[i], out[i]) / np.float32(x.shape[1]) + eps
        if not (FAINT < square < HUGE):
            return False
        inverse[i] = 1.0 / np.sqrt(square)
        for j in range(x.shape[1]):
            y = out[i, j] * inverse[i]
            y = y if weight is None else y * weight[j]
            out[i, j] = y if bias is None else y + bias[j]
    return True


@layer_norm.defforward
def _forward(x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Array, dict[str, Any]]:
    axes = len(normalized(x, normalized_shape, eps, weight=weight, bias=bias))
    dtype, work = dtypes(x, weight, bias)
    rows = as_matrix(x, work, axes)
    scale, offset = (None if p is None else as_matrix(p, work, axes)[0] for p in (weight, bias))
    out = np.empty(np.shape(x), work)
    centre, rest, inverse = np.empty((3, len(rows)), work)
    result = matrix_of(out, axes)
    average = np.full(rows.shape[1], 1 / max(rows.shape[1], 1), work)

    def body(a: int, b: int) -> None:
        standardize(rows[a:b], scale, offset, eps, average, centre[a:b], rest[a:b], inverse[a:b], result[a:b])

    over_rows(body, rows, arrays=2, ns=1.7)
    return cast_to(out, dtype), {"centre": centre, "rest": rest, "inverse": inverse}


def _standardize_backward(
    x: Array, g: Array, weight: Array, average: Array, centre: Array, rest: Array, inverse: Array, out: Array,
    dweight: Array, dbias: Array,
) -> None:  # fmt: skip
    n, ones = scratch(x.shape, x.dtype, "rows"), np.ones(len(x), x.dtype)
    part = centred(x, centre[:, None], n)
    n -= rest[:, None] * part
    n *= inverse[:, None] / part
    gn = np.multiply(g, n, out=out)
    np.matmul(ones, gn, out=dweight)
    np.matmul(ones, g, out=dbias)
    n *= (gn @ average)[:, None]
    np.multiply(g, weight, out=out)
    out -= (g @ average)[:, None]
    out -= n
    out *= inverse[:, None]


@loop(_standardize_backward)
def standardize_backward(
    x: Array, g: Array, weight: Array, average: Array, centre: Array, rest: Array, inverse: Array, out: Array,
    dweight: Array, dbias: Array,
) -> Any:  # fmt: skip
    """The gradient of rows, and what they add to those of weight and bias; ``average`` is weight / width."""
    dweight[:], dbias[:] = 0.0, 0.0
    n, gn = np.empty_like(dweight), np.empty_like(dweight)
    for i in range(len(x)):
        for j in range(x.shape[1]):
            n[j] = (x[i, j] - centre[i] - rest[i]) * inverse[i]
            gn[j] = g[i, j] * n[j]
        if not dot(n, n) < HUGE:
            return False
        for j in range(x.shape[1]):
            dweight[j] += gn[j]
            dbias[j] += g[i, j]
        slope, mean = dot(gn, average), dot(g[i], average)
        for j in range(x.shape[1]):
            out[i, j] = (g[i, j] * weight[j] - mean - n[j] * slope) * inverse[i]
    return True


@layer_norm.defbackward("x", "weight", "bias")
def _backward(
    g: Any,
    x: Any,
    normalized_shape: Any,
    weight: Any,
    bias: Any,
    centre: Any,
    rest: Any,
    inverse: Any,
    needs: tuple[bool, ...],
) -> tuple[Any, Any, Any]:
    """With n the normalised row and r = 1/std: dx = r (g w - mean(g w) - n mean(g w n)), dw = Σ g n, db = Σ g."""
    axes = len(normalized(x, normalized_shape, weight=weight, bias=bias))
    work = inverse.dtype
    rows, up = as_matrix(x, work, axes), as_matrix(g, work, axes)
    scale = np.ones(rows.shape[1], work) if weight is None else as_matrix(weight, work, axes)[0]
    average = scale / max(rows.shape[1], 1)
    gx = np.empty(x.shape, work)
    result = matrix_of(gx, axes)
    shares: tuple[dict[int, Array], dict[int, Array]] = {}, {}

    def body(a: int, b: int) -> None:
        shares[0][a], shares[1][a] = share = np.empty((2, len(scale)), work)
        tile = rows[a:b], up[a:b], scale, average, centre[a:b], rest[a:b], inverse[a:b], result[a:b]
        standardize_backward(*tile, share[0], share[1])

    over_rows(body, rows, arrays=4, ns=3.2)
    gweight = cast_to(total(shares[0], scale), weight.dtype).reshape(weight.shape) if needs[1] else None
    gbias = cast_to(total(shares[1], scale), bias.dtype).reshape(bias.shape) if needs[2] else None
    return cast_to(gx, x.dtype) if needs[0] else None, gweight, gbias
