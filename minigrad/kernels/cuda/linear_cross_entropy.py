"""The head of a language model and its loss on a GPU: the logits exist a chunk of rows at a time."""

from __future__ import annotations

from typing import Any

from minigrad.backend import Array, accumulator, array_module
from minigrad.kernels.cross_entropy import Targets
from minigrad.kernels.cuda.cross_entropy import reduced, scales, targets_like, weight_of
from minigrad.kernels.cuda.launching import Rows, as_matrix, uniform
from minigrad.kernels.linear_cross_entropy import OneShot, check_head, half_for, linear_cross_entropy
from minigrad.ops._gemm import product

LOGITS_BYTES = 512 << 20  # of logits at a time


def _forward(
    x: Array, weight: Array, targets: Any, ignore_index: int, label_smoothing: float, reduction: str,
    needs: tuple[bool, bool] = (False, False),
) -> tuple[Array, dict[str, Any]]:  # fmt: skip
    check_head(x, weight, targets)
    shape = (*x.shape[:-1], len(weight))
    labels = targets_like(shape, x, targets, ignore_index, label_smoothing, reduction)
    needs = needs if reduction != "none" else (False, False)
    half = half_for(x.dtype)
    losses, *gradients = _one_pass(x, weight, labels, _ones(labels, x), needs, half)
    residuals = {"heads": (labels, half), "gradients": OneShot([gradients] if any(needs) else [])}
    return reduced(losses, labels, reduction), residuals


def _ones(targets: Targets, x: Array) -> Array:
    """A scale of 1 for each row. Half precision can't hold the weight of a mean: it is multiplied in last."""
    return array_module(x).ones(targets.ids.shape, accumulator(x.dtype))


def _one_pass(
    x: Array, weight: Array, targets: Targets, scale: Array, needs: tuple[bool, bool], half: Any
) -> tuple[Any, Any, Any]:
    """Losses of the rows, and the gradients of ``Σ scale · loss``; the logits exist a chunk at a time.

    Under autocast the products are in half precision; losses and sums are not.
    """
    xp, rows, work = array_module(x), as_matrix(x), accumulator(x.dtype)
    if half:
        rows, weight = (array.astype(half, copy=False) for array in (rows, weight))
    losses = xp.empty(len(rows), work)
    gx = xp.empty(rows.shape, x.dtype) if needs[0] else None
    gweight = xp.zeros(weight.shape, work) if needs[1] else None
    step = max(4, LOGITS_BYTES // max(1, len(weight) * rows.itemsize) // 4 * 4)  # losses begin where packs may
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        logits = product(rows[chunk], weight.T)
        matrix, ids, smoothing = Rows(logits), targets.ids[chunk], targets.smoothing
        shift, total = matrix.empty(), matrix.empty()
        matrix.launch(
            "cross_entropy", "cross_entropy_forward", ids, losses[chunk], shift, total, matrix.width, smoothing
        )
        if any(needs):  # the gradient of the logits takes their place
            args = (ids, shift, total, scale[chunk], logits, matrix.width, smoothing)
            matrix.launch("cross_entropy", "cross_entropy_backward", *args)
        if gx is not None:
            gx[chunk] = product(logits, weight)
        if gweight is not None:
            gweight += product(logits.T, rows[chunk])
    return losses, None if gx is None else gx.reshape(x.shape), gweight


def _backward(
    g: Array, x: Array, weight: Array, heads: tuple[Targets, Any], gradients: OneShot, needs: tuple[bool, bool]
) -> tuple[Any, ...]:
    work, (labels, half) = accumulator(x.dtype), heads
    if g.ndim:
        _, *scaled = _one_pass(x, weight, labels, scales(g, labels, work), needs, half)
    else:  # on a GPU a multiplication costs less than to ask whether g is 1
        made = gradients.take() or _one_pass(x, weight, labels, _ones(labels, x), needs, half)[1:]
        scaled = [None if a is None else a * (g.astype(work) * weight_of(labels, work)) for a in made]
    pairs = zip(scaled, (x, weight), strict=True)
    return tuple(None if a is None else a.astype(like.dtype, copy=False) for a, like in pairs)


linear_cross_entropy.defgpu(
    _forward, _backward, lambda x, weight, targets, *_: uniform(x, weight) and targets.dtype.kind in "iu"
)
