"""Linear layers and look-ups on a GPU: cuBLAS for the products of two matrices, kernels for the rest.

CuPy hands 2-D products to cuBLAS with transposed factors as flags, and half precision is accumulated in float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, array_module, to_device_of
from minigrad.kernels.cross_entropy import Targets
from minigrad.kernels.cuda.launching import launch, pack_of, threads_for, uniform
from minigrad.kernels.cuda.rows import Rows, goal_on_gpu, reduced, scales
from minigrad.kernels.embedding import _check as check_embedding
from minigrad.kernels.embedding import embedding
from minigrad.kernels.linear import _check as check_linear
from minigrad.kernels.linear import linear
from minigrad.kernels.linear_cross_entropy import _check as check_head
from minigrad.kernels.linear_cross_entropy import half_for, linear_cross_entropy

LOGITS_BYTES = 512 << 20  # of logits at a time


def _matrix(x: Array) -> Array:
    """``x`` (..., d) as a contiguous matrix of rows."""
    return array_module(x).ascontiguousarray(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


# ---- linear ---------------------------------------------------------------------------------------------------------


def _linear_forward(x: Array, weight: Array, bias: Any) -> tuple[Array, dict[str, Any]]:
    check_linear(x, weight, bias)
    out = array_module(x).matmul(_matrix(x), weight.T)
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], len(weight)), {}


def _linear_backward(
    g: Array, x: Array, weight: Array, bias_dtype: Any, needs: tuple[bool, bool, bool]
) -> tuple[Any, Any, Any]:
    xp, up = array_module(g), _matrix(g)
    gx = xp.matmul(up, weight).reshape(x.shape) if needs[0] else None
    gweight = xp.matmul(up.T, _matrix(x)) if needs[1] else None
    gbias = up.sum(axis=0, dtype=accumulator(up.dtype)).astype(bias_dtype) if needs[2] else None
    return gx, gweight, gbias


linear.defgpu(_linear_forward, _linear_backward, uniform)


# ---- the head of a language model and its loss ----------------------------------------------------------------------


def _head_forward(
    x: Array, weight: Array, targets: Any, ignore_index: int, label_smoothing: float, reduction: str,
    needs: tuple[bool, bool] = (False, False),
) -> tuple[Array, dict[str, Any]]:  # fmt: skip
    check_head(x, weight, targets)
    shape = (*x.shape[:-1], len(weight))
    goal = goal_on_gpu(Targets.of(shape, x.dtype, targets, ignore_index, label_smoothing, reduction), x)
    ready = needs if reduction != "none" else (False, False)
    half = half_for(x.dtype)
    losses, *gradients = _one_pass(x, weight, goal, _ones(goal, x), ready, half)
    residuals = {"goal": goal, "once": [gradients] if any(ready) else [], "half": half}
    return reduced(losses, goal, reduction), residuals


def _ones(goal: Targets, x: Array) -> Array:
    """A scale of 1 for each row: half precision could not hold that of a mean, which comes in at the end."""
    return array_module(x).ones(goal.ids.shape, accumulator(x.dtype))


def _one_pass(
    x: Array, weight: Array, goal: Targets, scale: Array, needs: tuple[bool, bool], half: Any
) -> tuple[Any, Any, Any]:
    """Losses of the rows, and the gradients of ``Σ scale · loss``; the logits exist a chunk at a time.

    Under autocast the products are in half precision; losses and sums are not.
    """
    xp, rows, work = array_module(x), _matrix(x), accumulator(x.dtype)
    if half:
        rows, weight = (array.astype(half, copy=False) for array in (rows, weight))
    losses = xp.empty(len(rows), work)
    gx = xp.empty(rows.shape, x.dtype) if needs[0] else None
    gweight = xp.zeros(weight.shape, work) if needs[1] else None
    step = max(4, LOGITS_BYTES // max(1, len(weight) * rows.itemsize) // 4 * 4)  # losses begin where packs may
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        logits = xp.matmul(rows[chunk], weight.T)
        matrix = Rows(logits)
        shift, total = matrix.empty(), matrix.empty()
        smoothing = float(goal.smoothing)
        ids = goal.ids[chunk]
        matrix.launch("cross_entropy", "forward", ids, losses[chunk], shift, total, matrix.width, smoothing)
        if any(needs):  # the gradient of the logits takes their place
            args = (ids, shift, total, scale[chunk], logits, matrix.width, smoothing)
            matrix.launch("cross_entropy", "backward", *args)
        if gx is not None:
            gx[chunk] = xp.matmul(logits, weight)
        if gweight is not None:
            gweight += xp.matmul(logits.T, rows[chunk])
    return losses, None if gx is None else gx.reshape(x.shape), gweight


def _head_backward(
    g: Array, x: Array, weight: Array, goal: Targets, once: Any, half: Any, needs: tuple[bool, bool]
) -> tuple[Any, Any]:
    work = accumulator(x.dtype)
    if g.ndim:
        _, *gradients = _one_pass(x, weight, goal, scales(g, goal, work), needs, half)
    else:  # on a GPU a multiplication costs less than to ask whether g is 1
        made = once.pop() if once else _one_pass(x, weight, goal, _ones(goal, x), needs, half)[1:]
        gradients = [None if a is None else a * (g.astype(work) * goal.weight) for a in made]
    gx, gweight = (
        None if a is None else a.astype(like.dtype, copy=False) for a, like in zip(gradients, (x, weight), strict=True)
    )
    return gx, gweight


linear_cross_entropy.defgpu(
    _head_forward, _head_backward, lambda x, weight, targets, *_: uniform(x, weight) and targets.dtype.kind in "iu"
)


# ---- embedding ------------------------------------------------------------------------------------------------------


def _embedding_forward(ids: Any, weight: Array, padding_idx: int | None) -> tuple[Array, dict[str, Any]]:
    check_embedding(ids, weight, padding_idx)
    xp, width = array_module(weight), weight.shape[1]
    weight = xp.ascontiguousarray(weight)
    places = _places(ids, weight)
    out = xp.empty((*ids.shape, width), weight.dtype)
    if out.size:
        pack = pack_of(width, weight, out)
        threads = threads_for(width // pack)
        launch("embedding.cu", "forward", weight, pack, ids.size, threads, weight, places, out, width)
    return out, {}


def _places(ids: Any, beside_what: Array) -> Array:
    """Ids as the kernels read them; those of the host are uploaded."""
    return to_device_of(ids.astype(np.int64, copy=False).reshape(-1), beside_what)


def _embedding_backward(
    g: Array, ids: Any, weight_shape: Any, weight_dtype: Any, padding_idx: int | None
) -> tuple[Array]:
    xp, (rows, width) = array_module(g), weight_shape
    g, places = xp.ascontiguousarray(g), _places(ids, g)
    order = xp.argsort(places, kind="stable")
    out = xp.empty(weight_shape, g.dtype)
    none = -1 if padding_idx is None else padding_idx % rows
    if out.size:
        pack = pack_of(width, g, out)
        args = (g, places[order], order, out, len(places), width, none)
        launch("embedding.cu", "backward", g, pack, rows, threads_for(width // pack), *args)
    return (out.astype(weight_dtype, copy=False),)


embedding.defgpu(_embedding_forward, _embedding_backward, lambda ids, weight, padding_idx: uniform(weight))
