"""Embedding: rows of a table picked by id; its gradient sums the rows that share an id."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, array_of, to_device_of
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.errors import DTypeError, IndexRangeError, ShapeError
from minigrad.ops import stop_gradient, take, where
from minigrad.ops._rows import add_rows


def _torch(t: Any, ids: Any, weight: Any, padding_idx: int | None = None) -> Any:
    return t.nn.functional.embedding(t.as_tensor(ids), weight, padding_idx)


_ids = np.array([[0, 2, 2], [3, 0, 2]])


@fused(
    torch=_torch, numpy=False, samples=[sample(_ids, (4, 5)), sample(_ids, (4, 5), 1), sample(_ids[0, 0], (4, 5), -1)]
)
def embedding(ids: Array, weight: Array, padding_idx: int | None = None) -> Array:
    """Row ``weight[id]`` for each id; repeated ids add their gradients up.

    ids are integers in [0, V) of any shape, weight (V, d); the result is (*ids.shape, d). The row ``padding_idx``
    (counted from the end if negative) receives no gradient. A negative id, or one of V and more, raises an
    IndexRangeError: nothing wraps.

    >>> print(embedding(np.array([2, 0]), np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])))
    [[5. 6.]
     [1. 2.]]
    """
    check_embedding(ids, weight, padding_idx)
    rows = take(weight, ids, 0)
    if padding_idx is None:
        return rows
    padded = to_device_of(array_of(ids), array_of(weight)) == padding_idx % weight.shape[0]
    return where(padded[..., None], stop_gradient(rows), rows)


def check_embedding(ids: Any, weight: Any, padding_idx: int | None) -> None:
    """Refuse ids that are no rows of the weight, and a padding_idx that is none."""
    if ids.dtype.kind not in "iu":
        raise DTypeError("ids as integers", f"dtype {ids.dtype}", "convert with .astype('int64')")
    if weight.ndim != 2:
        raise ShapeError("a weight of shape (V, d)", f"shape {weight.shape}", "ids come first, then the table")
    check_range(ids, len(weight), "id")
    if padding_idx is not None and not -len(weight) <= padding_idx < len(weight):
        hint = "None trains every row"
        raise IndexRangeError(f"a padding_idx from {-len(weight)} to {len(weight) - 1}", str(padding_idx), hint)


def check_range(ids: Any, size: int, what: str) -> None:
    """Refuse ids outside of [0, size), naming the first."""
    ids = array_of(ids)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= size):
        wrong = ids[(ids < 0) | (ids >= size)].reshape(-1)[0]
        hint = "classes count from 0" if what == "class" else "nothing wraps"
        raise IndexRangeError(f"every {what} from 0 to {size - 1}, for {size} of them", f"{what} {int(wrong)}", hint)


@embedding.defforward
def _forward(ids: Any, weight: Any, padding_idx: int | None) -> tuple[Array, dict[str, Any]]:
    ids = np.asarray(ids)
    check_embedding(ids, weight, padding_idx)
    return weight.take(ids, axis=0, mode="clip"), {}  # the range is checked: clip only spares NumPy its own check


@embedding.defbackward("weight")
def _backward(g: Any, ids: Any, weight_shape: Any, weight_dtype: Any, padding_idx: int | None) -> tuple[Array]:
    gweight = add_rows(weight_shape, weight_dtype, np.asarray(ids), g)
    if padding_idx is not None:
        gweight[padding_idx] = 0
    return (gweight,)
