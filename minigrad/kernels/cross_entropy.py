"""Cross-entropy of logits, row by row over cache-sized tiles: no array of log-probabilities ever exists.

The forward pass keeps two numbers of a row, ``shift`` and ``total = Σ e^(x - shift)``. The backward pass makes the
exponentials again, straight into the gradient.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import Array, accumulator, array_module, array_of, cast_to, to_device_of
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.kernels.embedding import check_range
from minigrad.kernels.rows import again, as_matrix, dtypes, exponentials, matrix_of, over_rows
from minigrad.kernels.softmax import PEAK, log_softmax
from minigrad.machine.loops import dot, loop
from minigrad.machine.parallel import scratch
from minigrad.ops import astype, mean, sum, take_along_axis, where


def _torch(t: Any, logits: Any, targets: Any, *rest: Any, **named: Any) -> Any:
    targets = t.as_tensor(targets)
    flat = targets.reshape(-1, *targets.shape[logits.ndim - 1 :])
    loss = t.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), flat, None, None, *rest, **named)
    return loss.reshape(logits.shape[:-1]) if loss.ndim else loss


_ids = np.array([[0, 4, 2], [-100, 1, 1]])
_samples = [sample((2, 3, 5), _ids), sample((2, 3, 5), _ids, label_smoothing=0.1, reduction="none")]


@fused(precision="wide", torch=_torch, numpy=False, samples=[*_samples, sample((2, 3, 5), (2, 3, 5), reduction="sum")])
def cross_entropy(
    logits: Array, targets: Array, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Array:
    """Cross-entropy in nats of softmax(logits) against targets: ``-Σ_c q_c log softmax(x)_c`` of each row.

    logits are (..., V), classes on the last axis. targets are class ids of shape (...), where ignore_index counts for
    nothing, or floats of shape (..., V), the probabilities q themselves. label_smoothing ε replaces q by
    (1 - ε) q + ε/V. reduction is the "mean" over the rows that count (0 if none does), "sum" or "none". A class outside
    of 0 … V-1 raises an IndexRangeError.

    >>> print(cross_entropy(np.zeros((2, 4)), np.array([1, -100])).round(4))
    1.3863
    """
    labels = Targets.of(logits.shape, dtypes(logits)[0], targets, ignore_index, label_smoothing, reduction)
    ids, counted = (to_device_of(part, array_of(logits)).reshape(labels.shape) for part in (labels.ids, labels.counted))
    log_p = log_softmax(astype(logits, accumulator(logits.dtype)))
    rows = -sum(targets * log_p, -1) if labels.soft else -take_along_axis(log_p, ids[..., None], -1)[..., 0]
    if label_smoothing:
        rows = (1 - label_smoothing) * rows - label_smoothing * mean(log_p, -1)
    rows = where(counted, rows, 0)
    if reduction != "none":
        rows = sum(rows) if reduction == "sum" else sum(rows * labels.weight)
    return astype(rows, labels.dtype)


class Targets(NamedTuple):
    """The targets of a cross-entropy, checked, and how much each row weighs."""

    ids: Array  # (rows,); 0 where a row doesn't count
    counted: Array  # (rows,), whether a row counts
    soft: bool  # targets are probabilities
    smoothing: float
    weight: Any  # of each row in the result, a float: 1 / (rows that count) for the mean, else 1
    shape: tuple[int, ...]  # of the rows
    dtype: Any  # of the result

    @classmethod
    def of(
        cls, logits: tuple[int, ...], dtype: Any, targets: Any, ignore_index: int, smoothing: float, reduction: str
    ) -> Targets:
        """The targets of a call whose logits have the shape (..., V) and this dtype; an error says what doesn't fit."""
        if reduction not in ("mean", "sum", "none"):
            raise ArgumentError("reduction='mean', 'sum' or 'none'", repr(reduction), "'none' gives every loss")
        if not 0 <= smoothing <= 1:
            raise ArgumentError("a label_smoothing from 0 to 1", repr(smoothing), "0 is off, 0.1 is usual")
        if not logits or not logits[-1]:
            hint = "classes are on the last axis"
            raise ShapeError("logits (..., V) with at least one class", f"shape {logits}", hint)
        targets, shape, classes = array_of(targets), logits[:-1], logits[-1]
        soft = targets.dtype.kind not in "biu"
        if targets.dtype.kind == "b":
            raise DTypeError("class ids or probabilities as targets", "booleans", "astype('int64') makes class ids")
        if targets.shape != (logits if soft else shape):
            hint = "classes are on the last axis of the logits; float targets are probabilities of all classes"
            if soft and targets.shape == shape:
                hint = "class ids are integers: targets.astype('int64')"
            elif targets.shape == (*shape, 1):
                hint = "one class id for each row: targets[..., 0]"
            elif targets.ndim > len(logits):
                hint = "logits come first, then targets"
            raise ShapeError(f"targets that fit logits of shape {logits}", f"{targets.dtype} {targets.shape}", hint)
        xp = array_module(targets)
        counted = xp.ones(shape, bool) if soft else targets != ignore_index
        ids = xp.zeros(shape, np.int64) if soft else targets * counted
        check_range(ids, classes, "class")
        count = int(counted.sum()) if reduction == "mean" else 1
        dtype = np.result_type(dtype, targets.dtype) if soft else dtype
        weight = 1 / count if count else 0.0
        return cls(ids.reshape(-1), counted.reshape(-1), soft, smoothing, weight, shape, dtype)


@cross_entropy.defforward
def _forward(
    logits: Any, targets: Any, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[Array, dict[str, Any]]:
    logits, targets = np.asarray(logits), np.asarray(targets)
    labels = Targets.of(logits.shape, dtypes(logits)[0], targets, ignore_index, label_smoothing, reduction)
    work = accumulator(labels.dtype)
    rows = as_matrix(logits, work)
    q = as_matrix(targets, work) if labels.soft else None
    shift, total, losses = np.empty((3, len(rows)), work)

    def body(a: int, b: int) -> None:
        x = rows[a:b]
        exponentials(x, scratch(x.shape, work, "rows"), shift[a:b], total[a:b])
        losses[a:b] = row_losses(x, labels, slice(a, b), q, shift[a:b], total[a:b])

    over_rows(body, rows, arrays=2, ns=3.0)
    return cast_to(reduced(losses, labels, reduction), labels.dtype), {"labels": labels, "shift": shift, "total": total}


def row_losses(x: Array, targets: Targets, tile: slice, q: Array | None, shift: Array, total: Array) -> Array:
    """The losses of a tile of logits ``x``, whose exponentials sum to ``total``: log total - (picked - shift)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if q is None:
            picked, mass = x.reshape(-1)[_places(x, targets.ids[tile])], x.dtype.type(1)
        else:
            picked, mass = np.vecdot(q[tile], x), q[tile].sum(axis=1)
        keep, smoothing = 1 - targets.smoothing, targets.smoothing
        picked, mass = picked * keep, mass * keep
        if smoothing:
            picked += smoothing * x.mean(axis=1)
            mass += smoothing
        loss = mass * np.log(total) - (picked - mass * shift)
        loss[total == 0] = math.inf
    loss[~targets.counted[tile]] = 0
    return loss


def reduced(losses: Array, targets: Targets, reduction: str) -> Array:
    """The result from the losses of the rows."""
    if reduction == "none":
        return losses.reshape(targets.shape)
    weight = losses.dtype.type(targets.weight)
    try:  # NumPy looks for an overflow in any case
        with np.errstate(over="raise"):
            return np.asarray(losses.sum() * weight)
    except FloatingPointError:
        return np.asarray((losses * weight).sum())


def row_gradients(
    e: Array, targets: Targets, tile: slice, q: Array | None, total: Array, scale: Array, out: Array
) -> None:
    """Turn exponentials ``e`` of a tile, with row sums ``total``, into ``out``, which may be e: scale · (softmax - q).

    A row that doesn't count gets 0, and so does one of only -∞. Where the target has a probability above 0.9, p - 1
    would be noise: it is minus what all others have. Nothing but ``out`` is of use afterwards.
    """
    q = None if q is None else q[tile]
    gradients(e, targets.ids[tile], targets.counted[tile], float(targets.smoothing), q, total, scale, out)


def _gradients(
    e: Array, ids: Array, counted: Array, smoothing: float, q: Array | None, total: Array, scale: Array, out: Array
) -> None:
    dead, keep = ~counted | (total == 0), 1 - smoothing
    scale = np.where(dead, 0, scale)
    mass = 1 if q is None else keep * q.sum(axis=1) + smoothing
    factor = scale * mass / np.where(dead, 1, total)
    with np.errstate(under="ignore"):
        if q is None:
            entries, places = e.reshape(-1), _places(e, ids)
            target = entries[places]
            slopes = target * factor - scale * keep
            if not smoothing and (sure := target > PEAK * total).any():
                entries[places] = 0
                slopes[sure] = -((e @ np.ones(e.shape[1], e.dtype)) * factor)[sure]
            np.multiply(e, factor[:, None], out=out).reshape(-1)[places] = slopes
        else:
            np.multiply(e, factor[:, None], out=out)
            out -= q * (scale * keep)[:, None]
        if smoothing:
            out -= (scale * (smoothing / e.shape[1]))[:, None]
    out[dead] = 0


@loop(_gradients)
def gradients(
    e: Array, ids: Array, counted: Array, smoothing: float, q: Any, total: Array, scale: Array, out: Array
) -> None:
    """The same in one pass over a row."""
    ones = np.ones(e.shape[1], np.float32)
    for i in range(len(e)):
        if not counted[i] or total[i] == 0.0:
            out[i] = 0.0
            continue
        factor, keep, even = scale[i] / total[i], scale[i] * (1.0 - smoothing), scale[i] * smoothing / ones.size
        if q is None:
            target, at = e[i, ids[i]], ids[i]
            slope = target * factor - keep
            if smoothing == 0.0 and target > PEAK * total[i]:
                e[i, at] = 0.0
                slope = -dot(e[i], ones) * factor
            for j in range(ones.size):
                out[i, j] = e[i, j] * factor - even
            out[i, at] = slope - even
        else:
            factor *= (1.0 - smoothing) * dot(q[i], ones) + smoothing
            for j in range(ones.size):
                out[i, j] = e[i, j] * factor - q[i, j] * keep - even


def _places(rows: Array, ids: Array) -> Array:
    """Where in the flat array of ``rows`` the entries ``ids`` are, one in each."""
    return np.arange(0, rows.size, rows.shape[1]) + ids


@cross_entropy.defbackward("logits", "targets")
def _backward(
    g: Any, logits: Any, targets: Any, labels: Targets, shift: Any, total: Any, needs: tuple[bool, bool]
) -> tuple[Any, Any]:
    """g (softmax - q) for the logits, -g (1 - ε) log softmax for probabilities."""
    work = total.dtype
    rows = as_matrix(logits, work)
    q = as_matrix(targets, work) if labels.soft else None
    scale = np.ascontiguousarray(np.broadcast_to(g, labels.shape), work).reshape(-1) * work.type(labels.weight)
    gx = np.empty(logits.shape, work) if needs[0] else None
    gq = np.empty(logits.shape, work) if needs[1] else None
    result, result_q = (None if out is None else matrix_of(out) for out in (gx, gq))

    def body(a: int, b: int) -> None:
        tile, x = slice(a, b), rows[a:b]
        if result is not None:
            again(x, shift[tile], result[tile])
            row_gradients(result[tile], labels, tile, q, total[tile], scale[tile], result[tile])
        if result_q is not None:
            offset = np.log(np.where(total[tile] == 0, 1, total[tile])) + shift[tile]
            np.subtract(offset[:, None], x, out=result_q[tile])
            result_q[tile] *= (scale[tile] * (1 - labels.smoothing))[:, None]
            result_q[tile][total[tile] == 0] = 0

    over_rows(body, rows, arrays=2, ns=3.3)
    return (
        None if gx is None else cast_to(gx, logits.dtype),
        None if gq is None else cast_to(gq, targets.dtype),
    )
