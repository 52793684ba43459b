"""Cross-entropy on a GPU. A block takes a row."""

from __future__ import annotations

from typing import Any

from minigrad.backend import Array, array_module, is_floating
from minigrad.kernels.cross_entropy import Targets, cross_entropy
from minigrad.kernels.cuda.launching import Rows, uniform


def targets_like(targets: Targets, logits: Array) -> Targets:
    """Targets with ids on the device of the logits, -1 where a row doesn't count; ids of the host are uploaded."""
    ids = array_module(targets.ids).where(targets.counted, targets.ids, -1).astype("int64")
    return targets._replace(ids=array_module(logits).asarray(ids))


def reduced(losses: Array, targets: Targets, reduction: str) -> Array:
    """The result from the losses of the rows."""
    if reduction == "none":
        return losses.reshape(targets.shape).astype(targets.dtype)
    weight = losses.dtype.type(targets.weight)  # first, since the sum alone may overflow
    return (losses * weight).sum().astype(targets.dtype)


def scales(g: Array, targets: Targets, work: Any) -> Array:
    """The upstream gradient of each row's loss."""
    xp = array_module(g)
    return xp.ascontiguousarray(xp.broadcast_to(g.astype(work) * targets.weight, targets.shape)).reshape(-1)


def _forward(
    logits: Array, targets: Any, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[Array, dict[str, Any]]:
    labels = Targets.of(logits.shape, logits.dtype, targets, ignore_index, label_smoothing, reduction)
    labels, rows = targets_like(labels, logits), Rows(logits)
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
