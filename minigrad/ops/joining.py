"""NumPy's shorthands for joining, splitting and turning: compositions of ``concatenate``, ``split`` and ``flip``.

``from_nested`` makes one array of nested lists with arrays or Tensors in them, through which gradients flow. It is what
``mg.array`` does, and every operation that is given such a list in place of an array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend import Array, array_module, array_of, as_arrays, is_array, to_gpu_of_any
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError, ShapeError
from minigrad.messages.arguments import as_int, as_operand, normal_axis
from minigrad.messages.explain import describe
from minigrad.ops.index import take
from minigrad.ops.piecewise import astype, where
from minigrad.ops.shape import broadcast_to, concatenate, flip, moveaxis, ravel, reshape, split, stack

# fmt: off
__all__ = [
    "append", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_arrays", "c_", "column_stack", "dsplit", "dstack",
    "fliplr", "flipud", "hsplit", "hstack", "r_", "rollaxis", "select", "unstack", "vsplit", "vstack",
]
# fmt: on

# ---- nested lists ---------------------------------------------------------------------------------------------------


def from_nested(value: Any) -> Any:
    """Nested lists with arrays, Tensors and numbers in them, each list of one shape, as one array or Tensor.

    Python's numbers widen no array among them.

    >>> print(from_nested([[np.ones(2), np.zeros(2)], [np.zeros(2), np.ones(2)]]).shape)
    (2, 2, 2)
    """
    leaves: list[Any] = []

    def outer(part: Any) -> tuple[int, ...]:
        if not isinstance(part, list | tuple):
            leaves.append(as_operand(part, "an element of a list"))
            return ()
        mixed = any(isinstance(inner, list | tuple) for inner in part)  # then an array is the list of its rows
        shapes = {outer(list(inner) if mixed and getattr(inner, "ndim", None) else inner) for inner in part}
        if len(shapes) > 1:
            raise ShapeError("nested lists of equal lengths", describe(value), "pad the shorter ones")
        return (len(part), *(shapes.pop() if shapes else ()))

    shape = outer(value)
    inner = {np.shape(array_of(leaf)) for leaf in leaves}
    if len(inner) > 1:
        got = ", ".join(map(str, sorted(inner)))
        raise ShapeError("elements of one shape in a list", got, "concatenate joins arrays of different lengths")
    dtype = np.result_type(*{array.dtype if is_array(array) else array for array in map(array_of, leaves)})
    for leaf in leaves:
        if isinstance(leaf, int) and dtype.kind in "iu" and not np.iinfo(dtype).min <= leaf <= np.iinfo(dtype).max:
            raise ArgumentError(f"whole numbers that {dtype} holds", f"{leaf}", "float() or astype widens the others")
    whole = reshape(stack(leaves), (*shape, *inner.pop()))
    return whole if whole.dtype == dtype else astype(whole, dtype)


def _arrays(values: Sequence[Any], what: str) -> list[Any]:
    """The elements of a list, each with axes: numbers and lists as arrays."""
    operands = [as_operand(value, what) for value in values]
    return [value if hasattr(value, "ndim") else np.asarray(value) for value in operands]


# ---- at least so many axes ------------------------------------------------------------------------------------------


def _each(arrays: Sequence[Any], widened: Any) -> Any:
    found = [widened(x) for x in _arrays(arrays, "each argument")]
    return found[0] if len(found) == 1 else tuple(found)


@composite(samples=[sample(()), sample((2, 3))])
def atleast_1d(*arrays: Array) -> Any:
    """Each array with at least one axis; a tuple of several.

    >>> print(atleast_1d(3.0))
    [3.]
    """
    return _each(arrays, lambda x: reshape(x, (1,)) if x.ndim == 0 else x[...])


@composite(samples=[sample(()), sample((3,)), sample((2, 3, 2))])
def atleast_2d(*arrays: Array) -> Any:
    """Each array with at least two axes, new ones in front; a tuple of several.

    >>> atleast_2d(np.ones(3)).shape
    (1, 3)
    """
    return _each(arrays, lambda x: reshape(x, (1,) * (2 - x.ndim) + x.shape) if x.ndim < 2 else x[...])


@composite(samples=[sample(()), sample((3,)), sample((2, 3)), sample((1, 2, 3))])
def atleast_3d(*arrays: Array) -> Any:
    """Each array with at least three axes: (n,) becomes (1, n, 1), (m, n) becomes (m, n, 1); a tuple of several.

    >>> atleast_3d(np.ones(3)).shape
    (1, 3, 1)
    """
    return _each(arrays, lambda x: x[...] if x.ndim > 2 else reshape(x, ((1,) * (2 - x.ndim) + (*x.shape, 1, 1))[:3]))


# ---- joining --------------------------------------------------------------------------------------------------------

_flat = [sample([(2,), (3,)]), sample([(2, 3), (2, 1)]), sample([(), ()])]
_rows = [sample([(3,), (3,)]), sample([(2, 3), (1, 3)]), sample([(), ()])]


@composite(samples=_flat)
def hstack(arrays: Sequence[Array]) -> Array:
    """The arrays side by side: along the second axis, vectors along their only one.

    >>> print(hstack([np.array([1.0]), np.array([2.0, 3.0])]))
    [1. 2. 3.]
    """
    parts = [atleast_1d(x) for x in arrays]
    return concatenate(parts, 0 if parts and parts[0].ndim == 1 else 1)


@composite(samples=_rows)
def vstack(arrays: Sequence[Array]) -> Array:
    """The arrays one below the other, along the first axis; a vector is a row.

    >>> print(vstack([np.array([1.0, 2.0]), np.array([3.0, 4.0])]))
    [[1. 2.]
     [3. 4.]]
    """
    return concatenate([atleast_2d(x) for x in arrays], 0)


@composite(samples=[sample([(3,), (3,)]), sample([(2, 3), (2, 3)])])
def dstack(arrays: Sequence[Array]) -> Array:
    """The arrays one behind the other, along the third axis.

    >>> dstack([np.ones(3), np.ones(3)]).shape
    (1, 3, 2)
    """
    return concatenate([atleast_3d(x) for x in arrays], 2)


@composite(samples=[sample([(2,), (2,)]), sample([(2,), (2, 3)])])
def column_stack(arrays: Sequence[Array]) -> Array:
    """The columns of all arrays, side by side in a matrix; a vector is one column.

    >>> print(column_stack([np.array([1.0, 2.0]), np.array([3.0, 4.0])]))
    [[1. 3.]
     [2. 4.]]
    """
    parts = _arrays(arrays, "each of the arrays")
    return concatenate([reshape(x, (-1, 1)) if x.ndim < 2 else x for x in parts], 1)


@composite(torch=False, samples=[sample((2, 3), (2,)), sample((2, 3), (1, 3), axis=0), sample((2, 3), (2, 1), axis=-1)])
def append(x: Array, values: Array, axis: int | None = None) -> Array:
    """``x`` and behind it ``values``, along ``axis`` (both flattened for None).

    >>> print(append(np.array([1.0, 2.0]), 3.0))
    [1. 2. 3.]
    """
    if axis is None:
        return concatenate([ravel(part) for part in as_arrays(x, values)])
    return concatenate([x, values], axis)


@composite(samples=[sample((2, 1), (3,)), sample((2, 3))], torch=lambda t, *arrays: t.broadcast_tensors(*arrays))
def broadcast_arrays(*arrays: Array) -> tuple[Array, ...]:
    """The arrays broadcast to their common shape, as read-only views.

    >>> [x.shape for x in broadcast_arrays(np.ones((2, 1)), np.ones(3))]
    [(2, 3), (2, 3)]
    """
    shape = np.broadcast_shapes(*(np.shape(array_of(x)) for x in arrays))
    return tuple(broadcast_to(x, shape) for x in arrays)


# ---- splitting ------------------------------------------------------------------------------------------------------


def _split(x: Array, places: Any, axis: int) -> list[Array]:
    if x.ndim <= axis:
        raise ShapeError(f"an array with at least {axis + 1} axes", f"shape {x.shape}", "split takes any axis")
    pieces: list[Array] = split(x, places, axis)
    return pieces


@composite(torch=lambda t, x, indices_or_sections: t.hsplit(x, indices_or_sections),
           samples=[sample((4,), indices_or_sections=2), sample((2, 5), indices_or_sections=[1, 3])])  # fmt: skip
def hsplit(x: Array, indices_or_sections: Any) -> list[Array]:
    """Pieces of ``x`` along its second axis, of a vector along its only one; places as in ``split``.

    >>> [piece.tolist() for piece in hsplit(np.arange(4), 2)]
    [[0, 1], [2, 3]]
    """
    return _split(x, indices_or_sections, 0 if x.ndim == 1 else 1)


@composite(torch=lambda t, x, indices_or_sections: t.vsplit(x, indices_or_sections),
           samples=[sample((4, 2), indices_or_sections=2), sample((5, 2), indices_or_sections=[1, 3])])  # fmt: skip
def vsplit(x: Array, indices_or_sections: Any) -> list[Array]:
    """Pieces of ``x``, which has two axes or more, along the first; places as in ``split``.

    >>> [piece.shape for piece in vsplit(np.ones((4, 3)), 2)]
    [(2, 3), (2, 3)]
    """
    return _split(x, indices_or_sections, 0) if x.ndim > 1 else _split(x, indices_or_sections, 1)


@composite(torch=lambda t, x, indices_or_sections: t.dsplit(x, indices_or_sections),
           samples=[sample((2, 2, 4), indices_or_sections=2)])  # fmt: skip
def dsplit(x: Array, indices_or_sections: Any) -> list[Array]:
    """Pieces of ``x``, which has three axes or more, along the third; places as in ``split``.

    >>> [piece.shape for piece in dsplit(np.ones((1, 2, 4)), 2)]
    [(1, 2, 2), (1, 2, 2)]
    """
    return _split(x, indices_or_sections, 2)


@composite(numpy=lambda n, x, axis=0: list(n.moveaxis(x, axis, 0)), torch=lambda t, x, axis=0: t.unbind(x, axis),
           samples=[sample((2, 3)), sample((2, 3), axis=-1)])  # fmt: skip
def unstack(x: Array, axis: int = 0) -> tuple[Array, ...]:
    """The slices of ``x`` along ``axis``, without that axis: the inverse of ``stack``.

    >>> [part.tolist() for part in unstack(np.array([[1, 2], [3, 4]]), 1)]
    [[1, 3], [2, 4]]
    """
    rows = moveaxis(x, axis, 0)
    return tuple(rows[k] for k in range(rows.shape[0]))


# ---- turning --------------------------------------------------------------------------------------------------------


@composite(samples=[sample((3,)), sample((2, 3))])
def flipud(x: Array) -> Array:
    """``x`` in reverse order along its first axis.

    >>> print(flipud(np.array([1, 2, 3])))
    [3 2 1]
    """
    return flip(x, 0)


@composite(samples=[sample((2, 3)), sample((2, 3, 2))])
def fliplr(x: Array) -> Array:
    """``x`` in reverse order along its second axis.

    >>> print(fliplr(np.array([[1, 2], [3, 4]])))
    [[2 1]
     [4 3]]
    """
    return flip(x, 1)


@composite(torch=False, samples=[sample((2, 3, 4), axis=2), sample((2, 3, 4), axis=0, start=3),
                                 sample((2, 3, 4), axis=-1, start=-2)])  # fmt: skip
def rollaxis(x: Array, axis: int, start: int = 0) -> Array:
    """``x`` with ``axis`` moved back until it lies before ``start``; ``moveaxis`` says where it arrives.

    >>> rollaxis(np.ones((2, 3, 4)), 2).shape
    (4, 2, 3)
    """
    place, last = normal_axis(axis, x.ndim), as_int(start, "start")
    if not -x.ndim <= last <= x.ndim:
        raise np.exceptions.AxisError(last, x.ndim)
    last += x.ndim if last < 0 else 0
    return moveaxis(x, place, last - (place < last))


# ---- choosing -------------------------------------------------------------------------------------------------------

_first, _second = np.array([True, False, False]), np.array([[True, True, False], [False, True, False]])


@composite(torch=False, samples=[sample([_first, _second], [(3,), (2, 1)], 0.5), sample([_second], [(2, 3)], (3,))])
def select(condlist: Sequence[Array], choicelist: Sequence[Array], default: Array = 0) -> Array:
    """In each place the choice of the first condition that holds there, else ``default``; all of them broadcast.

    >>> x = np.array([-1.0, 0.5, 3.0])
    >>> print(select([x < 0, x < 1], [0.0, x], 1.0))
    [0.  0.5 1. ]
    """
    if len(condlist) != len(choicelist) or not len(condlist):
        got = f"{len(condlist)} and {len(choicelist)}"
        raise ArgumentError("as many conditions as choices, at least one", got, "default= is for where none holds")
    conditions = [as_operand(c, "each condition") for c in condlist]
    choices = [as_operand(c, "each choice") for c in choicelist]
    if any(np.result_type(array_of(c)).kind != "b" for c in conditions):
        raise ArgumentError("conditions that are booleans", ", ".join(map(describe, conditions)), "x != 0 makes one")
    result: Any = default
    for condition, choice in zip(conditions[::-1], choices[::-1], strict=True):
        result = where(condition, choice, result)
    return result


class Joiner:
    """``r_[…]`` or ``c_[…]`` with tensors among the parts, along the first axis or as columns; slices are ranges.

    >>> print(r_[np.array([1.0, 2.0]), 0, 3:5])
    [1. 2. 0. 3. 4.]
    """

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy

    def __getitem__(self, key: Any) -> Any:
        """NumPy joins the places of the elements in one long row, from which they then are taken."""
        places: list[Any] = []
        parts: list[Any] = []
        start = 0
        for part in key if isinstance(key, tuple) else (key,):
            if isinstance(part, str):
                if part in ("r", "c"):
                    raise ArgumentError("axes, such as '0,2'", repr(part), "it makes an np.matrix")
                places.append(part)
                continue
            parts.append(np.r_[part] if isinstance(part, slice) else as_operand(part, "a part"))
            shape = np.shape(array_of(parts[-1]))
            places.append(np.arange(start, start := start + math.prod(shape)).reshape(shape))
        try:
            joined = self._numpy[tuple(places)]
        except ValueError as error:
            got = f"{', '.join(map(describe, parts))}: {error}"
            raise ShapeError("parts that fit together", got, "'0,2' in front stands for axis 0, of 2 axes") from None
        parts = [to_gpu_of_any(x, parts) if isinstance(x, np.ndarray) else x for x in parts]
        row = concatenate([ravel(x) for x in as_arrays(*parts)])
        return take(row, array_module(array_of(row)).asarray(joined))


r_, c_ = Joiner(np.r_), Joiner(np.c_)
