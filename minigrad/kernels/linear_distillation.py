"""A student's head and its loss against a teacher in one: both sets of logits exist a chunk of rows at a time.

As in ``linear_cross_entropy``, whose chunks these are, the forward pass turns the logits of a chunk into the gradient
of the loss, and the backward pass scales what that became.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, cast_to
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.errors import ArgumentError, ShapeError
from minigrad.kernels.cross_entropy import Targets, cross_entropy, reduced, row_gradients, row_losses
from minigrad.kernels.linear import linear
from minigrad.kernels.linear_cross_entropy import Heads, OneShot, check_head, half_for
from minigrad.kernels.rows import dtypes, exponentials, over_rows
from minigrad.kernels.softmax import log_softmax
from minigrad.machine.parallel import scratch
from minigrad.messages.explain import describe
from minigrad.ops import astype, exp, sum, where

Needs = tuple[bool, bool, bool, bool]


def _torch(
    t: Any, x: Any, weight: Any, teacher_x: Any, teacher_weight: Any, targets: Any, temperature: float = 2.0,
    mix: float = 0.5, ignore_index: int = -100, reduction: str = "mean",
) -> Any:  # fmt: skip
    logits, teacher = ((a @ w.T).reshape(-1, len(w)) for a, w in ((x, weight), (teacher_x, teacher_weight)))
    ids, F = t.as_tensor(targets).reshape(-1), t.nn.functional
    log_q, log_p = F.log_softmax(logits / temperature, -1), F.log_softmax(teacher / temperature, -1)
    apart = temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    rows = mix * apart + (1 - mix) * F.cross_entropy(logits, ids, ignore_index=ignore_index, reduction="none")
    rows = t.where(ids != ignore_index, rows, 0)
    if reduction == "none":
        return rows.reshape(x.shape[:-1])
    return rows.sum() / ((ids != ignore_index).sum() if reduction == "mean" else 1)


_ids = np.array([[0, 4, 2], [-100, 1, 1]])
_samples = [
    sample((2, 3, 4), (5, 4), (2, 3, 6), (5, 6), _ids),
    sample((2, 3, 4), (5, 4), (2, 3, 2), (5, 2), _ids, temperature=3.0, mix=0.9, reduction="none"),
]


def _flops(
    x: Array, weight: Array, teacher_x: Array, teacher_weight: Array, reduction: str, wrt: frozenset[str]
) -> tuple[float, float]:
    """The two products that make logits, and one for each gradient, all in the forward call of a reduced loss."""
    student, teacher = 2 * x.size * len(weight), 2 * teacher_x.size * len(teacher_weight)
    logits = student + teacher
    gradients = student * len(wrt & {"x", "weight"}) + teacher * len(wrt & {"teacher_x", "teacher_weight"})
    return (logits, (logits + gradients) * bool(wrt)) if reduction == "none" else (logits + gradients, 0)


@fused(precision="wide", torch=_torch, numpy=False, samples=_samples, flops=_flops)
def linear_distillation(
    x: Array,
    weight: Array,
    teacher_x: Array,
    teacher_weight: Array,
    targets: Array,
    temperature: float = 2.0,
    mix: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Array:
    """``m τ² KL(p ‖ q) + (1 - m) cross_entropy(z, targets)`` of each row, without ever holding all the logits.

    z = ``linear(x, weight)`` are the student's logits, q = softmax(z/τ), and p = softmax(``linear(teacher_x,
    teacher_weight)`` / τ) what the teacher thinks. KL = Σ_c p_c log(p_c / q_c), in nats. The factor τ² keeps the
    gradient, m τ (q - p), in the order of that of cross-entropy (Hinton et al., "Distilling the Knowledge in a Neural
    Network", 2015).

    - x (..., d), weight (V, d), teacher_x (..., d'), teacher_weight (V, d'); targets class ids (...), as in
      ``linear_cross_entropy``, where ignore_index counts for nothing, in neither part
    - temperature: τ, positive; mix: m, from 0 to 1
    - reduction: the "mean" over the rows that count, "sum" or "none"

    The teacher's arguments have gradients too; a teacher that is not trained has arrays, or runs under ``no_grad``.
    Raises a ShapeError, DTypeError or ArgumentError for arguments that don't fit.

    >>> x, weight = np.ones((2, 3)), np.zeros((4, 3))
    >>> print(linear_distillation(x, weight, x, weight, np.array([1, 0]), mix=0.5).round(4))
    0.6931
    """
    check_pair(x, weight, teacher_x, teacher_weight, targets, temperature, mix)
    logits, teacher = linear(x, weight), linear(teacher_x, teacher_weight)
    dtype = dtypes(x, weight, teacher_x, teacher_weight)[0]
    labels = Targets.of(logits.shape, dtype, targets, ignore_index, 0.0, reduction)
    wide = accumulator(labels.dtype)
    log_q, log_p = (log_softmax(astype(z, wide) / temperature) for z in (logits, teacher))
    apart = sum(exp(log_p) * (log_p - log_q), -1) * temperature**2
    given = cross_entropy(astype(logits, wide), targets, ignore_index, 0.0, "none")
    rows = where(targets != ignore_index, mix * apart + (1 - mix) * given, 0)
    if reduction != "none":
        rows = sum(rows) if reduction == "sum" else sum(rows * labels.weight)
    return astype(rows, labels.dtype)


def check_pair(
    x: Any, weight: Any, teacher_x: Any, teacher_weight: Any, targets: Any, temperature: Any, mix: Any
) -> None:
    """Refuse heads that don't fit each other, and numbers that can be no temperature and no share."""
    check_head(x, weight, targets)
    check_head(teacher_x, teacher_weight, targets)
    if len(weight) != len(teacher_weight):
        got = f"{len(weight)} and {len(teacher_weight)}"
        raise ShapeError("a student and a teacher with one vocabulary", got, "the same tokenizer trains both")
    if teacher_x.shape[:-1] != x.shape[:-1]:
        got = f"{x.shape} and {teacher_x.shape}"
        raise ShapeError("x (..., d) and teacher_x (..., d') of the same rows", got, "both read the same tokens")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < np.inf:
        raise ArgumentError("a positive, finite temperature", describe(temperature), "2 is usual; 1 leaves p as it is")
    if isinstance(mix, bool) or not isinstance(mix, int | float) or not 0 <= mix <= 1:
        raise ArgumentError("a mix from 0 to 1", describe(mix), "1 is the teacher alone, 0 the targets alone")


@linear_distillation.defforward
def _forward(
    x: Any, weight: Any, teacher_x: Any, teacher_weight: Any, targets: Any, temperature: float, mix: float,
    ignore_index: int, reduction: str, needs: Needs = (False,) * 4,
) -> tuple[Array, dict[str, Any]]:  # fmt: skip
    x, weight, teacher_x, teacher_weight, targets = map(np.asarray, (x, weight, teacher_x, teacher_weight, targets))
    check_pair(x, weight, teacher_x, teacher_weight, targets, temperature, mix)
    dtype = dtypes(x, weight, teacher_x, teacher_weight)[0]
    labels = Targets.of((*x.shape[:-1], len(weight)), dtype, targets, ignore_index, 0.0, reduction)
    to_gradients = partial(_to_gradients, float(temperature), float(mix))
    heads = Heads((x, weight, teacher_x, teacher_weight), labels, to_gradients, half_for(dtype))
    losses, gradients = heads.forward(needs if reduction != "none" else ())
    return cast_to(reduced(losses, labels, reduction), labels.dtype), {"heads": heads, "gradients": gradients}


def _to_gradients(
    temperature: float, mix: float, logits: list[Array], targets: Targets, chunk: slice, losses: Array, scale: Array,
    wanted: list[bool],
) -> None:  # fmt: skip
    """See :class:`Heads`: the student's logits become (1 - m) (softmax - y) + m τ (q - p), times scale."""
    student, teacher = logits

    def body(a: int, b: int) -> None:
        tile, x, y = slice(chunk.start + a, chunk.start + b), student[a:b], teacher[a:b]
        e, q, p, apart = scratch((4, *x.shape), x.dtype, "four rows")
        counted, (shift, total) = targets.counted[tile], np.empty((2, b - a), x.dtype)
        with np.errstate(under="ignore"):
            log_ratio = _cooled(y, temperature, p, e) - _cooled(x, temperature, q, e)  # of the sums of exponentials
            np.subtract(y, x, out=apart)
            apart /= temperature
            apart -= log_ratio[:, None]  # log p - log q
            divergence = np.vecdot(p, apart)
        exponentials(x, e, shift, total)
        losses[tile] = (1 - mix) * row_losses(x, targets, tile, None, shift, total)
        losses[tile] += np.where(counted, mix * temperature**2 * divergence, 0)
        slope = np.where(counted, mix * temperature * scale[tile], 0)[:, None]
        with np.errstate(under="ignore"):
            if wanted[1]:
                apart -= divergence[:, None]
                np.multiply(np.multiply(apart, p, out=apart), slope, out=y)
            if wanted[0]:
                row_gradients(e, targets, tile, None, total, (1 - mix) * scale[tile], x)
                q -= p
                x += np.multiply(q, slope, out=q)

    over_rows(body, student, arrays=5, ns=12.0)


def _cooled(x: Array, temperature: float, out: Array, buffer: Array) -> Array:
    """``out = softmax(x / τ)``, and the logarithms of the sums of exponentials."""
    shift, total = np.empty((2, len(x)), x.dtype)
    exponentials(np.divide(x, temperature, out=buffer), out, shift, total)
    out /= total[:, None]
    logarithm: Array = np.log(total) + shift
    return logarithm


@linear_distillation.defbackward("x", "weight", "teacher_x", "teacher_weight")
def _backward(
    g: Any, x: Any, weight: Any, teacher_x: Any, teacher_weight: Any, heads: Heads, gradients: OneShot, needs: Needs
) -> tuple[Array | None, ...]:
    return heads.backward(g, gradients, needs)
