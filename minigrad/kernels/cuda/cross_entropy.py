"""Cross-entropy on a GPU. A block takes a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad import captures
from minigrad.backend import Array, array_module, is_floating, is_on_gpu
from minigrad.kernels.cross_entropy import Targets, cross_entropy
from minigrad.kernels.cuda.launching import Rows, uniform


def targets_like(shape: tuple[int, ...], like: Array, targets: Any, *options: Any) -> Targets:
    """The targets of logits (..., V), checked, with ids on the device of ``like``, -1 where a row doesn't count.

    Ids of the host are uploaded. In a CUDA graph they are checked, counted and uploaded at each replay.
    """
    xp, found = array_module(like), Targets.of(shape, like.dtype, targets, *options)
    if is_on_gpu(targets):
        return found._replace(ids=xp.where(found.counted, found.ids, -1).astype("int64"))
    latest = [found]

    def look_again() -> None:
        latest[0] = Targets.of(shape, like.dtype, targets, *options)

    captures.again(look_again)
    ids = captures.uploaded(xp, lambda: np.where(latest[0].counted, latest[0].ids, -1).astype("int64"), targets)
    return found._replace(ids=ids, weight=captures.number(lambda: latest[0].weight, np.float64))


def reduced(losses: Array, targets: Targets, reduction: str) -> Array:
    """The result from the losses of the rows."""
    if reduction == "none":
        return losses.reshape(targets.shape).astype(targets.dtype)
    weighted = losses * weight_of(targets, losses.dtype)  # first, since the sum alone may overflow
    return weighted.sum().astype(targets.dtype)


def weight_of(targets: Targets, dtype: Any) -> Any:
    """The weight of a row in a dtype: a number, or its place in a CUDA graph."""
    return targets.weight.astype(dtype) if is_on_gpu(targets.weight) else dtype.type(targets.weight)


def scales(g: Array, targets: Targets, work: Any) -> Array:
    """The upstream gradient of each row's loss."""
    xp = array_module(g)
    return xp.ascontiguousarray(xp.broadcast_to(g.astype(work) * weight_of(targets, work), targets.shape)).reshape(-1)


def _forward(
    logits: Array, targets: Any, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[Array, dict[str, Any]]:
    labels, rows = targets_like(logits.shape, logits, targets, ignore_index, label_smoothing, reduction), Rows(logits)
    losses, shift, total = rows.empty(), rows.empty(), rows.empty()
    rows.launch("cross_entropy", "cross_entropy_forward", labels.ids, losses, shift, total, rows.width, label_smoothing)
    return reduced(losses, labels, reduction), {"labels": labels, "shift": shift, "total": total}


def _backward(
    g: Array, logits: Array, targets: Any, labels: Targets, shift: Array, total: Array, needs: tuple[bool, bool]
) -> tuple[Any, Any]:
    rows = Rows(logits)
    dx = rows.xp.empty(logits.shape, logits.dtype)
    args = (labels.ids, shift, total, scales(g, labels, rows.work), dx, rows.width, labels.smoothing)
    rows.launch("cross_entropy", "cross_entropy_backward", *args)
    return dx, None


def _fits(logits: Any, targets: Any, *_: Any) -> bool:
    return uniform(logits) and logits.ndim > 0 and logits.shape[-1] > 0 and not is_floating(targets.dtype)


cross_entropy.defgpu(_forward, _backward, _fits)
