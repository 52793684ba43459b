"""A language model's head and its loss in one: the logits exist a chunk of rows at a time, in one buffer.

The forward pass makes the logits of a chunk of rows and reads the losses off them. If a gradient will be asked for, it
turns the logits, in place, into the gradient of the loss, and multiplies that into the gradients of x and the weight.
The backward pass then only scales them. That takes three matrix products; to keep no gradients would take four.

Under autocast factors and results of the products are rounded to half precision, as in ``linear``. Losses and sums are
not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, cast_to
from minigrad.engine.fused import fused
from minigrad.engine.recording import current_mode
from minigrad.engine.registry import sample
from minigrad.errors import DTypeError, ShapeError
from minigrad.kernels.cross_entropy import Targets, cross_entropy, reduced, row_gradients, row_losses
from minigrad.kernels.linear import linear
from minigrad.kernels.rows import as_matrix, dtypes, exponentials, over_rows
from minigrad.machine.parallel import even_step, scratch

# Each chunk but the first costs a pass over the weight's gradient. So the logits of a chunk take as much memory as that
# gradient, at least 16 MB or 256 rows, but never more than 64 MB.
MOST_BYTES, LEAST_BYTES, LEAST_ROWS = 64 << 20, 16 << 20, 256
CLASSES = 2048  # rows of the weight's gradient at a time: BLAS packs the transposed logits, 11 MB for 10 000 at once


def _torch(t: Any, x: Any, weight: Any, targets: Any, *rest: Any, **named: Any) -> Any:
    logits = (x @ weight.T).reshape(-1, weight.shape[0])
    loss = t.nn.functional.cross_entropy(logits, t.as_tensor(targets).reshape(-1), None, None, *rest, **named)
    return loss.reshape(x.shape[:-1]) if loss.ndim else loss


_ids = np.array([[0, 4, 2], [-100, 1, 1]])
_samples = [sample((2, 3, 4), (5, 4), _ids, label_smoothing=p, reduction=r) for p, r in ((0.0, "mean"), (0.1, "none"))]


def _flops(x: Array, weight: Array, reduction: str, wrt: frozenset[str]) -> tuple[float, float]:
    """The logits and both gradients are a product each. A reduced loss makes all three in the forward call."""
    n = 2 * x.size * len(weight)
    gradients = n * len(wrt)
    return (n, (n + gradients) * bool(wrt)) if reduction == "none" else (n + gradients, 0)


@fused(precision="wide", torch=_torch, numpy=False, samples=_samples, flops=_flops)
def linear_cross_entropy(
    x: Array,
    weight: Array,
    targets: Array,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Array:
    """``cross_entropy(linear(x, weight), targets)`` without ever holding all the logits.

    x (..., d), weight (V, d), targets class ids of shape (...); the rest as in ``cross_entropy``. Probabilities as
    targets raise a DTypeError: they are as large as the logits, which can then exist as well.

    >>> print(linear_cross_entropy(np.ones((2, 3)), np.zeros((4, 3)), np.array([1, 0])).round(4))
    1.3863
    """
    check_head(x, weight, targets)
    return cross_entropy(linear(x, weight), targets, ignore_index, label_smoothing, reduction)


class OneShot(list[Any]):
    """The gradients that the forward pass made, in a list of one: the first backward pass takes them and owns them."""

    def take(self) -> Any:
        """The gradients, or None if they were taken already."""
        return self.pop() if self else None


def check_head(x: Any, weight: Any, targets: Any) -> None:
    """Refuse shapes that don't fit, and targets that are no class ids."""
    if np.ndim(weight) != 2 or np.ndim(x) == 0 or x.shape[-1] != weight.shape[1]:
        hint = "the weight has a row for each class"
        raise ShapeError("x (..., d) and weight (V, d)", f"{np.shape(x)} and {np.shape(weight)}", hint)
    if targets.dtype.kind not in "iu":
        hint = "use cross_entropy(linear(x, weight), targets)"
        raise DTypeError("class ids as targets", f"dtype {targets.dtype}", hint)


@linear_cross_entropy.defforward
def _forward(
    x: Any, weight: Any, targets: Any, ignore_index: int, label_smoothing: float, reduction: str,
    needs: tuple[bool, bool] = (False, False),
) -> tuple[Array, dict[str, Any]]:  # fmt: skip
    x, weight, targets = np.asarray(x), np.asarray(weight), np.asarray(targets)
    check_head(x, weight, targets)
    shape, dtype = (*x.shape[:-1], len(weight)), dtypes(x, weight)[0]
    labels = Targets.of(shape, dtype, targets, ignore_index, label_smoothing, reduction)
    needs = needs if reduction != "none" else (False, False)  # the weights of single losses are not known yet
    half = half_for(dtype)
    losses, gradients = _for_one(x, weight, labels, needs, half)
    residuals = {"labels": labels, "gradients": OneShot([gradients] if any(needs) else []), "half": half}
    return cast_to(reduced(losses, labels, reduction), labels.dtype), residuals


def _for_one(
    x: Any, weight: Any, targets: Targets, needs: tuple[bool, bool], half: Any
) -> tuple[Array, list[Array | None]]:
    """Losses, and the gradients for g = 1. Half precision can't hold the weight of a mean: it is multiplied in last."""
    scale = np.full(len(targets.ids), 1.0 if half else targets.weight)
    losses, *gradients = _one_pass(x, weight, targets, scale, needs, half)
    for gradient in gradients if half else ():
        if gradient is not None:
            gradient *= targets.weight
    return losses, gradients


def _one_pass(
    x: Any, weight: Any, targets: Targets, scale: Array, needs: tuple[bool, bool], half: Any
) -> tuple[Array, Array | None, Array | None]:
    """Losses of the rows, and the gradients of ``Σ scale · loss`` with respect to x and weight that are needed."""
    work = accumulator(targets.dtype)
    rows, table = (_as_in(half, as_matrix(a, work)) for a in (x, weight))
    scale = scale.astype(work, copy=False)
    losses = np.empty(len(rows), work)
    gx = np.empty(x.shape, work) if needs[0] else None
    new = np.empty if len(rows) else np.zeros  # the first chunk writes it
    gweight = new(table.shape, work) if needs[1] else None
    step = _rows_of_chunk(len(rows), table)
    buffer = np.empty((step, len(table)), work)
    for start in range(0, len(rows), step):
        chunk = slice(start, min(start + step, len(rows)))
        logits = _as_in(half, np.matmul(rows[chunk], table.T, out=buffer[: chunk.stop - start]))
        _to_gradients(logits, targets, chunk, losses, scale, any(needs))
        logits = _as_in(half, logits)
        if gx is not None:
            np.matmul(logits, table, out=as_matrix(gx, work)[chunk])
        if gweight is not None:
            _add_to_weight(gweight, logits, rows[chunk], half, fresh=start == 0)
    return losses, None if gx is None else _as_in(half, gx), gweight


def _rows_of_chunk(rows: int, table: Array) -> int:
    """How many rows have logits at once."""
    row = max(1, len(table) * table.itemsize)
    return even_step(rows, max(1, min(MOST_BYTES, max(LEAST_BYTES, LEAST_ROWS * row, table.nbytes)) // row))


def _add_to_weight(gweight: Array, logits: Array, rows: Array, half: Any, fresh: bool) -> None:
    """``gweight += logitsᵀ rows``, or written if it is fresh, for some classes at a time."""
    for start in range(0, len(gweight), CLASSES):
        classes = slice(start, start + CLASSES)
        out = gweight[classes]
        product = out if fresh else scratch(out.shape, out.dtype, "product")
        np.matmul(logits[:, classes].T, rows, out=product)
        if half is not None:
            product[...] = _as_in(half, product)
        if not fresh:
            out += product


def half_for(dtype: Any) -> Any:
    """The dtype of the products under autocast, None outside of it; float64 is left alone."""
    return current_mode().autocast if dtype.itemsize <= 4 else None


def _as_in(half: Any, x: Array) -> Array:
    """``x`` as it would be in half precision; itself where ``half`` is None."""
    return x if half is None else cast_to(x, half).astype(x.dtype)


def _to_gradients(logits: Array, targets: Targets, chunk: slice, losses: Array, scale: Array, wanted: bool) -> None:
    """Fill in the losses of a chunk; if gradients are wanted, turn its logits into their gradient, in place."""

    def body(a: int, b: int) -> None:
        tile, x = slice(chunk.start + a, chunk.start + b), logits[a:b]
        e = scratch(x.shape, x.dtype, "rows")
        shift, total = np.empty((2, b - a), x.dtype)
        exponentials(x, e, shift, total)
        losses[tile] = row_losses(x, targets, tile, None, shift, total)
        if wanted:
            row_gradients(e, targets, tile, None, total, scale[tile], x)

    over_rows(body, logits, arrays=2, ns=3.5)


@linear_cross_entropy.defbackward("x", "weight")
def _backward(
    g: Any, x: Any, weight: Any, labels: Targets, gradients: OneShot, half: Any, needs: tuple[bool, bool]
) -> tuple[Any, Any]:
    """The gradients that the forward pass made, times g; a second backward pass makes them again."""
    if np.ndim(g):
        scale = np.asarray(g).reshape(-1) * labels.weight
        gx, gweight = _one_pass(x, weight, labels, scale, needs, half)[1:]
    else:
        gx, gweight = gradients.take() or _for_one(x, weight, labels, needs, half)[1]
        for gradient in (gx, gweight):
            if gradient is not None and g != 1:
                gradient *= g
    return None if gx is None else cast_to(gx, x.dtype), None if gweight is None else cast_to(gweight, weight.dtype)
