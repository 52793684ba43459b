"""Choosing elements by index, adding into places, sorting.

An index that repeats a place adds the gradients up; out-of-range indices raise, on every device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, ArrayLike, array_module, array_of, is_array, is_half, is_on_gpu, to_device_of
from minigrad.engine.broadcast import unbroadcast
from minigrad.engine.core import primitive
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.messages.arguments import as_operand, plain_array
from minigrad.messages.explain import describe
from minigrad.ops._rows import add_rows
from minigrad.ops.piecewise import where
from minigrad.ops.shape import along, flip, normal_axis, ravel

# fmt: off
__all__ = [
    "argsort", "getitem", "partition", "put_along_axis", "scatter_add", "sort", "take", "take_along_axis", "topk",
]
# fmt: on


def plain_index(index: Any) -> Any:
    """An index with Tensors and lists in it replaced by arrays."""
    if isinstance(index, tuple):
        return tuple(plain_index(part) for part in index)
    if isinstance(index, list):
        return np.asarray(index, dtype=None if index else np.intp)
    return array_of(plain_array(index) if isinstance(index, np.ndarray) else index)


def placed(index: Any, x: Array) -> Any:
    """An index for ``x``. If x is on a GPU, arrays in the index are checked against its axes and moved there.

    CuPy would wrap indices out of range silently. The check of an array on the GPU waits for the GPU.
    """
    if not is_on_gpu(x):
        return index
    check_indices(x.shape, index)
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(to_device_of(part, x) if is_array(part) else part for part in parts)


def is_basic(index: Any) -> bool:
    """Whether an index is made of integers, slices, None and ``...`` alone, so that it names no element twice."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or isinstance(part, int | slice | np.integer) for part in parts)


_index_samples = [
    sample((4, 3), index=1),
    sample((4, 3), index=(slice(None, None, -2), None, 0)),
    sample((4, 3, 2), index=(..., slice(1, None))),
    sample((4, 3), index=np.array([0, 2, 0])),
    sample((4, 3), index=(np.array([[0], [2]]), np.array([1, 1]))),
    sample((4, 3), index=np.array([True, False, True, True])),
    sample((2, 3, 4), index=(np.array([0, 1, 1]), slice(None), np.array([3, 0, 0]))),
    sample((2, 3, 4), index=(slice(0, 1), np.array([[2, 2]]), slice(None, None, 2))),
]


@primitive(linear="jointly", stacks=True, view=True, samples=_index_samples)
def getitem(x: Array, index: Any) -> Array:
    """``x[index]`` with every index that NumPy takes; repeated places add their gradients up.

    >>> print(getitem(np.array([1.0, 2.0, 3.0]), [0, 0, 2]))
    [1. 1. 3.]
    """
    return x[placed(plain_index(index), x)]


def check_indices(shape: tuple[int, ...], index: Any) -> None:
    """Refuse integer arrays out of range, in NumPy's words, which a text for the user is then made of."""
    parts = index if isinstance(index, tuple) else (index,)
    axis = 0
    for part in parts:
        if is_array(part) and part.dtype.kind in "iu" and part.size:
            low, high = int(part.min()), int(part.max())
            if low < -shape[axis] or high >= shape[axis]:
                bad = low if low < -shape[axis] else high
                raise IndexError(f"index {bad} is out of bounds for axis {axis} with size {shape[axis]}")
        if part is ...:
            used = sum(p is not None and p is not ... for p in parts)
            axis += len(shape) - used
        elif part is not None:
            axis += part.ndim if is_array(part) and part.dtype.kind == "b" else 1


@primitive(
    linear="jointly",
    stacks=True,
    samples=[
        sample((2, 3), index=slice(1, None), shape=(3, 3)),
        sample((3, 2), index=np.array([0, 2, 0]), shape=(4, 2)),
        sample((2, 2), index=(np.array([[0], [0]]), np.array([1, 1])), shape=(2, 3)),
    ],
)
def add_at(g: Array, index: Any, shape: Any) -> Array:
    """Zeros of ``shape`` to whose places ``index`` the array ``g`` was added: the adjoint of ``getitem``.

    >>> print(add_at(np.array([1.0, 2.0, 4.0]), np.array([0, 0, 2]), (3,)))
    [3. 0. 4.]
    """
    index = plain_index(index)
    xp = array_module(g)
    if is_basic(index) or (is_array(index) and index.dtype.kind == "b"):
        out = xp.zeros(shape, g.dtype)
        out[placed(index, out)] = g
        return out
    if is_array(index) and index.dtype.kind in "iu" and len(shape) > 0:
        return add_rows(shape, g.dtype, to_device_of(index, g), g)
    wide = xp.zeros(shape, np.float32 if is_half(g.dtype) else g.dtype)
    xp.add.at(wide, placed(index, wide), g.astype(wide.dtype, copy=False))
    return wide.astype(g.dtype, copy=False)


def _held(index: Any, what: str) -> Any:
    """An index in which Tensors of a tuple are copied: of these no node would notice a change."""
    if not isinstance(index, tuple):
        return index
    return tuple(array_of(part).copy() if array_of(part) is not part else part for part in index)


getitem.checks["index"] = add_at.checks["index"] = _held
getitem.defvjp(lambda g, index, x_shape: add_at(g, index, x_shape))
add_at.defvjp(lambda g, index: getitem(g, index))


@composite(
    samples=[
        sample((4, 3), indices=np.array([0, 2, 0])),
        sample((4, 3), indices=np.array([[0, 2], [1, 1]]), axis=1),
        sample((4, 3), indices=-1, axis=0),
    ]
)
def take(x: Array, indices: ArrayLike, axis: int | None = None) -> Array:
    """``x`` at ``indices`` along ``axis`` (flattened for None); repeated places add their gradients up.

    >>> print(take(np.array([1.0, 2.0, 3.0]), [2, 0]))
    [3. 1.]
    """
    if axis is None or x.ndim == 0:
        x, axis = ravel(x), axis or 0
    kept = array_of(indices) is not indices and array_of(x) is not x
    chosen: Any = indices if kept else as_operand(plain_index(indices), "indices of take")
    if np.result_type(array_of(chosen)).kind not in "iu":
        raise DTypeError("integer indices", describe(chosen), "a boolean mask goes in x[mask]")
    axis = normal_axis(axis, x.ndim)
    return getitem(x, along(axis, x.ndim, chosen) if axis else chosen)


# ---- indices along one axis, one for each element of the result -----------------------------------------------------


def _grid(indices: Array, axis: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The full index that ``indices`` along ``axis`` stand for, the other axes counting through."""
    xp = array_module(indices)
    axis = normal_axis(axis, len(shape))
    if np.result_type(indices).kind not in "iu":
        raise DTypeError("integer indices", describe(indices), "a boolean mask goes in x[mask]")
    if np.ndim(indices) != len(shape):
        hint = "an index for each element of the result; take() picks whole rows"
        raise ShapeError(f"indices with {len(shape)} axes, as many as the array has", describe(indices), hint)
    grid = [xp.arange(n).reshape([-1 if k == a else 1 for k in range(len(shape))]) for a, n in enumerate(shape)]
    grid[axis] = indices
    return tuple(grid)


_along = np.array([[2, 0, 2], [1, 1, 0]])


@primitive(
    linear="jointly",
    samples=[
        sample((2, 3), _along, axis=1),
        sample((3, 3), _along, axis=0),
        sample((2, 3), np.array([[1], [0]]), axis=-1),
    ],
)
def take_along_axis(x: Array, indices: Array, axis: int = -1) -> Array:
    """``x`` at ``indices`` along ``axis``, an index for each element of the result, as ``argsort`` gives them.

    >>> print(take_along_axis(np.array([[3.0, 1.0]]), np.array([[1, 0]]), -1))
    [[1. 3.]]
    """
    return getitem(x, _grid(indices, axis, x.shape))


def _take_along_back(g: Array, indices: Array, x_shape: Any, axis: int) -> Array:
    return add_at(g, _grid(indices, axis, x_shape), x_shape)


take_along_axis.defvjp(_take_along_back)


@primitive(
    linear="jointly",
    samples=[
        sample((2, 3), _along, (2, 3), axis=1),
        sample((3, 3), _along, (2, 3), axis=0),
        sample((2, 3), _along, (), axis=1),
    ],
)
def scatter_add(x: Array, indices: Array, values: Array, axis: int = -1) -> Array:
    """A copy of ``x`` to which ``values`` are added at ``indices`` along ``axis``; repeated places add up.

    >>> print(scatter_add(np.zeros((1, 2)), np.array([[0, 0]]), np.array([[1.0, 2.0]]), 1))
    [[3. 0.]]
    """
    xp = array_module(x, values)
    grid = _grid(indices, axis, x.shape)
    values = xp.broadcast_to(
        xp.asarray(values, dtype=xp.result_type(x, values)), np.broadcast_shapes(*map(np.shape, grid))
    )
    return x + add_at(values, grid, x.shape)


scatter_add.defvjp(
    lambda g: g,
    None,
    lambda g, indices, values_shape, axis: unbroadcast(take_along_axis(g, indices, axis), values_shape),
)


@primitive(
    linear="jointly",
    samples=[sample((2, 3), np.array([[2, 0], [1, 0]]), (2, 2), axis=1), sample((2,), np.array([0, 0]), (2,), axis=0)],
)
def put_along_axis(x: Array, indices: Array, values: Array, axis: int = -1) -> Array:
    """A copy of ``x`` with ``values`` at ``indices`` along ``axis``; of repeated places the last value stays.

    >>> print(put_along_axis(np.zeros(2), np.array([0, 0]), np.array([1.0, 2.0]), 0))
    [2. 0.]
    """
    xp = array_module(x, values)
    out = xp.array(x, dtype=xp.result_type(x, values))
    return _last_of(out, placed(_grid(indices, axis, out.shape), out)[axis], values, axis)


def _last_of(out: Array, indices: Array, values: Array, axis: int) -> Array:
    """Write the values that stay, each to a place of its own, so that the order of writing can't matter."""
    xp, stays = array_module(out), _stays(indices, axis, out.shape)
    grid = xp.broadcast_arrays(*_grid(indices, axis, out.shape))
    out[tuple(part[stays] for part in grid)] = xp.broadcast_to(values, stays.shape)[stays]
    return out


def _stays(indices: Array, axis: int, shape: tuple[int, ...]) -> Array:
    """Which of the values put at ``indices`` stay: at each place the last one, whose number is the largest."""
    xp = array_module(indices)
    number = xp.arange(indices.size).reshape(indices.shape)
    owner = xp.full(shape, -1)
    grid = _grid(indices, axis, shape)
    xp.maximum.at(owner, grid, number)
    return owner[grid] == number


def _put_back_x(g: Array, indices: Array, axis: int) -> Array:
    return put_along_axis(g, indices, 0.0, axis)


def _put_back_values(g: Array, indices: Array, values_shape: Any, x_shape: Any, axis: int) -> Array:
    stays = _stays(to_device_of(indices, array_of(g)), axis, x_shape)
    return unbroadcast(where(stays, take_along_axis(g, indices, axis), 0), values_shape)


put_along_axis.defvjp(_put_back_x, None, _put_back_values)

# ---- sorting --------------------------------------------------------------------------------------------------------


@primitive(samples=[sample((2, 4)), sample((2, 4), axis=0)])
def argsort(x: Array, axis: int = -1) -> Array:
    """The indices that sort ``x`` along ``axis``, equal elements in their order, NaN last; without a derivative.

    >>> print(argsort(np.array([3.0, 1.0, 2.0])))
    [1 2 0]
    """
    return array_module(x).argsort(x, axis=axis, kind="stable")


@composite(samples=[sample((2, 4)), sample((2, 4), axis=0)])
def sort(x: Array, axis: int = -1) -> Array:
    """The elements in ascending order along ``axis``; each gradient goes back to where its element came from.

    >>> print(sort(np.array([3.0, 1.0, 2.0])))
    [1. 2. 3.]
    """
    return take_along_axis(x, argsort(x, axis), axis)


@composite(torch=False, samples=[sample((2, 3), kth=1), sample((4, 2), kth=(1, 2), axis=0)])
def partition(x: Array, kth: Any, axis: int = -1) -> Array:
    """The elements with the ``kth`` smallest in its place along ``axis``, the smaller ones before it, in any order.

    >>> print(partition(np.array([3.0, 1.0, 2.0]), 1))
    [1. 2. 3.]
    """
    indices = array_module(array_of(x)).argpartition(array_of(x), kth, axis=axis)
    return take_along_axis(x, indices, axis)


@composite(
    samples=[sample((2, 4), k=2), sample((4, 3), k=3, axis=0)],
)
def topk(x: Array, k: int, axis: int = -1) -> tuple[Array, Array]:
    """The ``k`` largest elements along ``axis`` in descending order, and their indices; the lower index first at a tie.

    >>> values, indices = topk(np.array([1.0, 3.0, 3.0]), 2)
    >>> print(values, indices)
    [3. 3.] [1 2]
    """
    n = x.shape[normal_axis(axis, x.ndim)]
    if not 0 <= k <= n:
        raise ArgumentError(f"k from 0 to {n}, the length of axis {axis}", str(k), "argsort gives the order of all")
    descending = n - 1 - flip(argsort(flip(x, axis), axis), axis)
    indices = descending[along(axis, x.ndim, slice(0, k))]
    return take_along_axis(x, indices, axis), indices
