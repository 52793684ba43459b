"""The row-wise operations on a GPU: normalisations, softmax and cross-entropy. A block takes a row."""

from __future__ import annotations

import math
from typing import Any

from minigrad.backend import Array, accumulator, array_module, is_floating
from minigrad.kernels.cross_entropy import Targets, cross_entropy
from minigrad.kernels.cuda.launching import BLOCKS, launch, pack_of, threads_for, uniform
from minigrad.kernels.layer_norm import layer_norm
from minigrad.kernels.rms_norm import rms_norm
from minigrad.kernels.rows import normalized
from minigrad.kernels.softmax import log_softmax, softmax
from minigrad.ops.shape import normal_axis


class Rows:
    """Contiguous arrays seen as matrices of the same shape, and how to launch a kernel on their rows."""

    def __init__(self, first: Array, *others: Array | None, axes: int = 1) -> None:
        xp = array_module(first)
        self.arrays = [None if a is None else xp.ascontiguousarray(a) for a in (first, *others)]
        self.width = math.prod(first.shape[first.ndim - axes :])
        self.rows = math.prod(first.shape[: first.ndim - axes])
        self.xp, self.work = xp, accumulator(first.dtype)

    def empty(self, *shape: int) -> Array:
        """Numbers of the accumulator's type; of a shape (rows,) if none is given."""
        return self.xp.empty(shape or (self.rows,), self.work)

    def launch(self, stem: str, name: str, *args: Any, grid: int | None = None) -> None:
        """Launch ``name`` with all arrays, then ``args``; nothing happens where there is nothing to compute."""
        if self.rows and self.width:
            like = self.arrays[0]
            assert like is not None
            vectors = [a for a in args if getattr(a, "dtype", None) == like.dtype and getattr(a, "ndim", 0)]
            pack = pack_of(self.width, *self.arrays, *vectors)
            threads = threads_for(-(-self.width // pack))
            launch(f"{stem}.cu", name, like, pack, grid or self.rows, threads, *self.arrays, *args)


# ---- normalisations -------------------------------------------------------------------------------------------------


def _rms_forward(x: Array, normalized_shape: Any, weight: Any, eps: float) -> tuple[Array, dict[str, Any]]:
    rows = Rows(x, weight, axes=len(normalized(x, normalized_shape, eps, weight=weight)))
    out, inverse = rows.xp.empty(x.shape, x.dtype), rows.empty()
    rows.launch("rms_norm", "forward", out, inverse, rows.width, float(eps))
    return out, {"inverse": inverse}


def _rms_backward(
    g: Array, x: Array, normalized_shape: Any, weight: Any, inverse: Array, needs: tuple[bool, bool]
) -> tuple[Any, Any]:
    rows = Rows(g, x, weight, axes=len(normalized(x, normalized_shape, weight=weight)))
    dx = rows.xp.empty(x.shape, x.dtype) if needs[0] else None
    grid = min(rows.rows, BLOCKS)
    shares = rows.empty(grid, rows.width) if needs[1] else None
    rows.launch("rms_norm", "backward", inverse, dx, shares, rows.rows, rows.width, grid=grid)
    return dx, _total(shares, weight)


def _total(shares: Array | None, like: Array | None) -> Array | None:
    """The gradient of a parameter from the shares of the blocks."""
    return None if shares is None or like is None else shares.sum(axis=0).astype(like.dtype).reshape(like.shape)


def _layer_forward(x: Array, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Array, dict[str, Any]]:
    rows = Rows(x, weight, bias, axes=len(normalized(x, normalized_shape, eps, weight=weight, bias=bias)))
    out = rows.xp.empty(x.shape, x.dtype)
    centre, rest, inverse = (rows.empty() for _ in range(3))
    rows.launch("layer_norm", "forward", out, centre, rest, inverse, rows.width, float(eps))
    return out, {"centre": centre, "rest": rest, "inverse": inverse}


def _layer_backward(
    g: Array, x: Array, normalized_shape: Any, weight: Any, bias: Any, centre: Array, rest: Array,
    inverse: Array, needs: tuple[bool, ...],
) -> tuple[Any, Any, Any]:  # fmt: skip
    rows = Rows(g, x, weight, axes=len(normalized(x, normalized_shape, weight=weight, bias=bias)))
    dx = rows.xp.empty(x.shape, x.dtype) if needs[0] else None
    grid = min(rows.rows, BLOCKS)
    shares, offsets = (rows.empty(grid, rows.width) if need else None for need in needs[1:])
    rows.launch("layer_norm", "backward", centre, rest, inverse, dx, shares, offsets, rows.rows, rows.width, grid=grid)
    return dx, _total(shares, weight), _total(offsets, bias)


rms_norm.defgpu(_rms_forward, _rms_backward, lambda x, shape, weight, eps: uniform(x, weight))
layer_norm.defgpu(_layer_forward, _layer_backward, lambda x, shape, weight, bias, eps: uniform(x, weight, bias))


# ---- softmax --------------------------------------------------------------------------------------------------------


def _along(name: str, *arrays: Array, axis: int) -> Array:
    """What the kernel ``name`` makes of arrays with ``axis`` as their last; ``axis`` is put back."""
    xp = array_module(*arrays)
    axis = normal_axis(axis, arrays[0].ndim)
    rows = Rows(*[xp.moveaxis(array, axis, -1) for array in arrays])
    out = xp.empty_like(rows.arrays[0])
    rows.launch("softmax", name, out, rows.width)
    return xp.ascontiguousarray(xp.moveaxis(out, -1, axis))


def _fits_floats(x: Any, axis: int) -> bool:
    return uniform(x) and x.ndim > 0


softmax.defgpu(
    lambda x, axis: (_along("softmax", x, axis=axis), {}),
    lambda g, out, x_dtype, axis: (_along("softmax_backward", g, out, axis=axis),),
    _fits_floats,
)
log_softmax.defgpu(
    lambda x, axis: (_along("log_softmax", x, axis=axis), {}),
    lambda g, out, x_dtype, axis: (_along("log_softmax_backward", g, out, axis=axis),),
    _fits_floats,
)


# ---- cross-entropy --------------------------------------------------------------------------------------------------


def goal_on_gpu(goal: Targets, logits: Array) -> Targets:
    """The goal with its ids beside the logits, -1 where a row doesn't count. Made on the host, they are uploaded."""
    xp = array_module(goal.ids)
    ids = xp.where(goal.counted, goal.ids, -1).astype("int64")
    return goal._replace(ids=array_module(logits).asarray(ids))


def reduced(losses: Array, goal: Targets, reduction: str) -> Array:
    """The result from the losses of the rows."""
    if reduction == "none":
        return losses.reshape(goal.shape).astype(goal.dtype)
    return (losses.sum() * goal.weight).astype(goal.dtype)


def scales(g: Array, goal: Targets, work: Any) -> Array:
    """The weight of each row's loss in what is differentiated."""
    xp = array_module(g)
    return xp.ascontiguousarray(xp.broadcast_to(g.astype(work) * goal.weight, goal.shape)).reshape(-1)


def _ce_forward(
    logits: Array, targets: Any, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[Array, dict[str, Any]]:
    goal = Targets.of(logits.shape, logits.dtype, targets, ignore_index, label_smoothing, reduction)
    goal, rows = goal_on_gpu(goal, logits), Rows(logits)
    losses, shift, total = rows.empty(), rows.empty(), rows.empty()
    rows.launch("cross_entropy", "forward", goal.ids, losses, shift, total, rows.width, float(label_smoothing))
    return reduced(losses, goal, reduction), {"goal": goal, "shift": shift, "total": total}


def _ce_backward(
    g: Array, logits: Array, targets: Any, goal: Targets, shift: Array, total: Array, needs: tuple[bool, bool]
) -> tuple[Any, Any]:
    rows = Rows(logits)
    dx = rows.xp.empty(logits.shape, logits.dtype)
    scale = scales(g, goal, rows.work)
    args = (goal.ids, shift, total, scale, dx, rows.width, float(goal.smoothing))
    rows.launch("cross_entropy", "backward", *args)
    return dx, None


def _fits_classes(logits: Any, targets: Any, *_: Any) -> bool:
    return uniform(logits) and logits.ndim > 0 and logits.shape[-1] > 0 and not is_floating(targets.dtype)


cross_entropy.defgpu(_ce_forward, _ce_backward, _fits_classes)
