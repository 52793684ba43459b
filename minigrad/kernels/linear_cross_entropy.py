"""A language model's head and its loss in one: the logits exist a chunk of rows at a time, in one buffer.

The forward pass makes the logits of a chunk of rows and reads the losses off them. If a gradient will be asked for, it
turns the logits, in place, into the gradient of the loss, and multiplies that into the gradients of x and the weight.
The backward pass then only scales them. That takes three matrix products; to keep no gradients would take four.

Under autocast factors and results of the products are rounded to half precision, as in ``linear``. Losses and sums are
not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    heads = Heads((x, weight), labels, _to_gradients, half_for(dtype))
    losses, gradients = heads.forward(needs if reduction != "none" else ())
    return cast_to(reduced(losses, labels, reduction), labels.dtype), {"heads": heads, "gradients": gradients}


class Heads(NamedTuple):
    """Products ``x weightᵀ`` of the same rows whose results, logits, exist a chunk of rows at a time; and their loss.

    - arguments: x (..., d) and weight (V, d) of each head, one head after the other
    - to_gradients: ``to_gradients(logits, targets, chunk, losses, scale, wanted)`` is given the logits of each head for
      a chunk of rows. It fills in the losses of these rows, and turns the logits of each head that is ``wanted`` into
      the gradient of Σ scale · loss, in place
    - half: the dtype of factors and products under autocast, None outside of it
    """

    arguments: tuple[Any, ...]
    targets: Targets
    to_gradients: Callable[[list[Array], Targets, slice, Array, Array, list[bool]], None]
    half: Any

    def forward(self, needs: Sequence[bool]) -> tuple[Array, OneShot]:
        """The losses, and the gradients for g = 1 that are needed, if any."""
        losses, gradients = self._for_one(needs or (False,) * len(self.arguments))
        return losses, OneShot([gradients] if any(needs) else [])

    def backward(self, g: Any, made: OneShot, needs: Sequence[bool]) -> tuple[Array | None, ...]:
        """The gradients that the forward pass made, times g; a second backward pass makes them again."""
        if np.ndim(g):
            gradients = self._one_pass(np.asarray(g).reshape(-1) * self.targets.weight, needs)[1]
        else:
            gradients = made.take() or self._for_one(needs)[1]
            for gradient in gradients:
                if gradient is not None and g != 1:
                    gradient *= g
        pairs = zip(gradients, self.arguments, strict=True)
        return tuple(None if gradient is None else cast_to(gradient, a.dtype) for gradient, a in pairs)

    def _for_one(self, needs: Sequence[bool]) -> tuple[Array, list[Array | None]]:
        """For g = 1. Half precision can't hold the weight of a mean: it is multiplied in last."""
        weight = self.targets.weight
        losses, gradients = self._one_pass(np.full(len(self.targets.ids), 1.0 if self.half else weight), needs)
        for gradient in gradients if self.half else ():
            if gradient is not None:
                gradient *= weight
        return losses, gradients

    def _one_pass(self, scale: Array, needs: Sequence[bool]) -> tuple[Array, list[Array | None]]:
        """Losses of the rows, and the gradients of ``Σ scale · loss`` with respect to the arguments that need one."""
        work, half = accumulator(self.targets.dtype), self.half
        rows, tables = ([_as_in(half, as_matrix(a, work)) for a in self.arguments[i::2]] for i in (0, 1))
        count, (classes, _) = len(scale), tables[0].shape
        losses, scale = np.empty(count, work), scale.astype(work, copy=False)
        new = np.empty if count else np.zeros  # the first chunk writes it
        gradients = [new(a.shape, work) if need else None for a, need in zip(self.arguments, needs, strict=True)]
        wanted = [gx is not None or gw is not None for gx, gw in zip(gradients[::2], gradients[1::2], strict=True)]
        step = _rows_of_chunk(count, tables[0])
        buffers = np.empty((len(rows), step, classes), work)
        for start in range(0, count, step):
            chunk = slice(start, min(start + step, count))
            logits = [
                _as_in(half, np.matmul(x[chunk], table.T, out=buffer[: chunk.stop - start]))
                for x, table, buffer in zip(rows, tables, buffers, strict=True)
            ]
            self.to_gradients(logits, self.targets, chunk, losses, scale, wanted)
            for i, (x, table) in enumerate(zip(rows, tables, strict=True)):
                gx, gweight = gradients[2 * i : 2 * i + 2]
                slopes = _as_in(half, logits[i]) if wanted[i] else logits[i]
                if gx is not None:
                    np.matmul(slopes, table, out=as_matrix(gx, work)[chunk])
                if gweight is not None:
                    _add_to_weight(gweight, slopes, x[chunk], half, fresh=start == 0)
        return losses, [g if g is None or i % 2 else _as_in(half, g) for i, g in enumerate(gradients)]


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


def _to_gradients(
    logits: list[Array], targets: Targets, chunk: slice, losses: Array, scale: Array, wanted: list[bool]
) -> None:
    """See :class:`Heads`."""
    (matrix,) = logits

    def body(a: int, b: int) -> None:
        tile, x = slice(chunk.start + a, chunk.start + b), matrix[a:b]
        e = scratch(x.shape, x.dtype, "rows")
        shift, total = np.empty((2, b - a), x.dtype)
        exponentials(x, e, shift, total)
        losses[tile] = row_losses(x, targets, tile, None, shift, total)
        if wanted[0]:
            row_gradients(e, targets, tile, None, total, scale[tile], x)

    over_rows(body, matrix, arrays=2, ns=3.5)


@linear_cross_entropy.defbackward("x", "weight")
def _backward(
    g: Any, x: Any, weight: Any, heads: Heads, gradients: OneShot, needs: tuple[bool, bool]
) -> tuple[Array | None, ...]:
    return heads.backward(g, gradients, needs)
