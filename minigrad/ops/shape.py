"""Rearranging elements: reshaping, transposing, joining, splitting, repeating, padding. Their rules rearrange back."""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend import Array, ArrayLike, Axes, Shape, array_module, as_arrays
from minigrad.engine.core import elementwise, primitive
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError, AxisError, ShapeError
from minigrad.messages.arguments import as_int, as_shape
from minigrad.messages.arguments import normal_axis as normal_axis
from minigrad.ops.elementwise import multiply
from minigrad.ops.piecewise import where

# fmt: off
__all__ = [
    "array_split", "broadcast_to", "concatenate", "diag", "diagonal", "expand_dims", "flip", "kron", "meshgrid",
    "moveaxis", "pad", "permute_dims", "ravel", "repeat", "reshape", "roll", "rot90", "split", "squeeze", "stack",
    "swapaxes", "tile", "transpose", "tril", "triu",
]
# fmt: on

# ---- the same elements, another shape -------------------------------------------------------------------------------


@primitive(
    linear="jointly",
    stacks=True,
    view=True,
    samples=[sample((2, 3), shape=(3, 2)), sample((2, 6), shape=(-1, 2, 3)), sample((), shape=(1,))],
)
def reshape(x: Array, shape: Shape) -> Array:
    """The elements of ``x`` in row order in a new shape, of which one length may be -1 (whatever fits).

    >>> print(reshape(np.arange(4), (2, 2)))
    [[0 1]
     [2 3]]
    """
    return array_module(x).asarray(x).reshape(shape)


@primitive(
    linear="jointly",
    stacks=True,
    view=True,
    samples=[sample((2, 3)), sample((2, 3, 4), axes=(2, 0, 1)), sample((2, 3, 4), axes=(-1, 0, 1))],
)
def transpose(x: Array, axes: Sequence[int] | None = None) -> Array:
    """``x`` with its axes in the order ``axes``, by default reversed.

    >>> print(transpose(np.array([[1, 2], [3, 4]])))
    [[1 3]
     [2 4]]
    """
    return array_module(x).asarray(x).transpose(axes)


def _transpose_back(g: Array, axes: Any) -> Array:
    if axes is None:
        return transpose(g, None)
    inverse = [0] * len(axes)
    for place, axis in enumerate(axes):
        inverse[axis] = place
    return transpose(g, tuple(inverse))


@elementwise(view=True, samples=[sample((3, 1), shape=(2, 3, 4)), sample((), shape=(2,))])
def broadcast_to(x: Array, shape: Shape) -> Array:
    """``x`` repeated along new axes and axes of length 1 until it has ``shape``, as a read-only view.

    >>> print(broadcast_to(np.array([1, 2]), (2, 2)))
    [[1 2]
     [1 2]]
    """
    if np.ndim(x) == 0 and type(shape) is tuple and array_module(x) is np:  # NumPy's function takes 3 µs more
        x = np.asarray(x)
        out = np.ndarray(shape, x.dtype, x, strides=(0,) * len(shape))
        out.flags.writeable = False
        return out
    return array_module(x).broadcast_to(x, shape)


@primitive(
    linear="jointly",
    stacks=True,
    view=True,
    samples=[sample((2, 3), axis=0), sample((2, 3), axis=-1), sample((2, 3), axis=(0, 2))],
)
def expand_dims(x: Array, axis: Axes = 0) -> Array:
    """``x`` with axes of length 1 inserted at ``axis`` of the result.

    >>> expand_dims(np.ones(3), 0).shape
    (1, 3)
    """
    xp = array_module(x)
    if axis == -1 or axis == 0:  # NumPy's function takes 2 µs to find the place of any axis
        return xp.asarray(x)[(..., None) if axis else None]
    return xp.expand_dims(x, axis)


@primitive(
    linear="jointly",
    stacks=True,
    view=True,
    samples=[sample((1, 3, 1)), sample((1, 3, 1), axis=0), sample((1, 3, 1), axis=(0, -1))],
)
def squeeze(x: Array, axis: Axes = None) -> Array:
    """``x`` without its axes of length 1, or without those in ``axis``.

    >>> squeeze(np.ones((1, 3))).shape
    (3,)
    """
    return array_module(x).squeeze(x, axis)


@primitive(
    linear="jointly",
    stacks=True,
    view=True,
    samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=(0, 1))],
)
def flip(x: Array, axis: Axes = None) -> Array:
    """``x`` in reverse order along ``axis``, by default along all.

    >>> print(flip(np.array([1, 2, 3])))
    [3 2 1]
    """
    return array_module(x).flip(x, axis)


reshape.defvjp(lambda g, x_shape: reshape(g, x_shape))
transpose.defvjp(_transpose_back)
broadcast_to.defvjp(lambda g: g)
expand_dims.defvjp(lambda g, x_shape: reshape(g, x_shape))
squeeze.defvjp(lambda g, x_shape: reshape(g, x_shape))
flip.defvjp(lambda g, axis: flip(g, axis))


@composite(samples=[sample((2, 3))])
def ravel(x: Array) -> Array:
    """The elements of ``x`` in row order along one axis.

    >>> print(ravel(np.ones((2, 2))))
    [1. 1. 1. 1.]
    """
    return reshape(x, (-1,))


@composite(samples=[sample((2, 3, 4), axes=(2, 0, 1))])
def permute_dims(x: Array, axes: Sequence[int]) -> Array:
    """``x`` with its axes in the order ``axes``: ``transpose`` by its name in the array API standard.

    >>> permute_dims(np.ones((2, 3)), (1, 0)).shape
    (3, 2)
    """
    return transpose(x, axes)


@composite(samples=[sample((2, 3, 4), axis1=0, axis2=-1)])
def swapaxes(x: Array, axis1: int, axis2: int) -> Array:
    """``x`` with two axes exchanged.

    >>> swapaxes(np.ones((2, 3, 4)), 0, 2).shape
    (4, 3, 2)
    """
    order = list(range(x.ndim))
    first, second = normal_axis(axis1, x.ndim), normal_axis(axis2, x.ndim)
    order[first], order[second] = second, first
    return transpose(x, tuple(order))


@composite(samples=[sample((2, 3, 4), source=0, destination=-1), sample((2, 3, 4), source=(0, 1), destination=(2, 0))])
def moveaxis(x: Array, source: Shape, destination: Shape) -> Array:
    """``x`` with the axes ``source`` moved to the places ``destination``, the others in their order.

    >>> moveaxis(np.ones((2, 3, 4)), 0, -1).shape
    (3, 4, 2)
    """
    moved = [normal_axis(a, x.ndim) for a in as_tuple(source)]
    places = [normal_axis(a, x.ndim) for a in as_tuple(destination)]
    if len(moved) != len(places) or len({*moved}) < len(moved) or len({*places}) < len(places):
        raise ArgumentError(
            "as many destinations as sources, each once", f"{source} and {destination}", "the others keep their order"
        )
    order = [a for a in range(x.ndim) if a not in moved]
    for place, axis in sorted(zip(places, moved, strict=True)):
        order.insert(place, axis)
    return transpose(x, tuple(order))


@composite(
    samples=[sample((2, 3)), sample((2, 3, 4), k=3, axes=(1, 2)), sample((2, 3), k=2), sample((2, 3), k=-1)],
)
def rot90(x: Array, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Array:
    """``x`` turned by ``k`` quarter turns from the first towards the second of ``axes``.

    >>> print(rot90(np.array([[1, 2], [3, 4]])))
    [[2 4]
     [1 3]]
    """
    first, second = (normal_axis(a, x.ndim) for a in axes)
    if first == second:
        raise AxisError("two different axes", str(axes), "a plane has two")
    k %= 4
    if k == 0:
        return x[...]
    if k == 2:
        return flip(x, (first, second))
    return swapaxes(flip(x, second), *axes) if k == 1 else flip(swapaxes(x, *axes), second)


# ---- joining and splitting ------------------------------------------------------------------------------------------


@primitive(
    linear="jointly",
    stacks=True,
    sequence=True,
    samples=[sample([(2, 3), (1, 3)]), sample([(2, 3), (2, 1), (2, 2)], axis=-1)],
)
def concatenate(arrays: Sequence[Array], axis: int | None = 0) -> Array:
    """The arrays one after the other along ``axis`` (flattened first for None).

    >>> print(concatenate([np.array([1.0]), np.array([2.0, 3.0])]))
    [1. 2. 3.]
    """
    return array_module(*arrays).concatenate(arrays, axis=axis)


def _concatenate_rule(g: Array, arrays_shape: Any, axis: int | None) -> list[Array]:
    lengths = [math.prod(s) if axis is None else s[axis] for s in arrays_shape]
    stops = np.cumsum(lengths).tolist()
    pieces = [g[along(axis or 0, g.ndim, slice(b - n, b))] for n, b in zip(lengths, stops, strict=True)]
    return [reshape(piece, s) for piece, s in zip(pieces, arrays_shape, strict=True)] if axis is None else pieces


concatenate.defvjp(_concatenate_rule)


@primitive(
    linear="jointly", stacks=True, sequence=True, samples=[sample([(2, 3), (2, 3)]), sample([(2, 3), (2, 3)], axis=-1)]
)
def stack(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Arrays of one shape side by side along a new ``axis``.

    >>> stack([np.ones(3), np.zeros(3)]).shape
    (2, 3)
    """
    if len({np.shape(a) for a in arrays}) > 1:
        got, hint = ", ".join(str(np.shape(a)) for a in arrays), "concatenate joins arrays of different lengths"
        raise ShapeError("arrays of one shape to stack", got, hint)
    if not arrays:
        raise ArgumentError("at least one array to stack", "none", "the list is empty")
    return array_module(*arrays).stack(arrays, axis=axis)


stack.defvjp(lambda g, axis: [g[along(axis, g.ndim, k)] for k in range(g.shape[axis])])


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Several numbers as they are, a single one as a tuple of it."""
    return tuple(value) if np.ndim(value) else (value,)


def along(axis: int, ndim: int, index: Any) -> tuple[Any, ...]:
    """The index that applies ``index`` along ``axis`` and takes everything along the others."""
    return (*[slice(None)] * (axis % ndim), index)


@composite(samples=[sample((2, 6), indices_or_sections=3, axis=1), sample((5, 2), indices_or_sections=[1, 3])])
def split(x: Array, indices_or_sections: Any, axis: int = 0) -> list[Array]:
    """Pieces of ``x`` along ``axis``: so many equal ones, or cut at the given places. (NumPy's meaning, not torch's.)

    >>> [piece.tolist() for piece in split(np.arange(4), 2)]
    [[0, 1], [2, 3]]
    """
    n = x.shape[normal_axis(axis, x.ndim)]
    if np.ndim(indices_or_sections) == 0 and n % _pieces(indices_or_sections):
        hint = "array_split allows unequal pieces"
        raise ShapeError(f"a length that divides into {indices_or_sections} equal pieces", f"{n}", hint)
    pieces: list[Array] = array_split(x, indices_or_sections, axis)
    return pieces


@composite(samples=[sample((2, 5), indices_or_sections=3, axis=1), sample((5, 2), indices_or_sections=[1, 3])])
def array_split(x: Array, indices_or_sections: Any, axis: int = 0) -> list[Array]:
    """Pieces of ``x`` along ``axis`` as ``split`` gives, which may differ in length by one.

    >>> [piece.tolist() for piece in array_split(np.arange(3), 2)]
    [[0, 1], [2]]
    """
    axis = normal_axis(axis, x.ndim)
    n = x.shape[axis]
    if np.ndim(indices_or_sections) == 0:
        count = _pieces(indices_or_sections)
        each, longer = divmod(n, count)
        cuts = np.cumsum([0] + [each + (k < longer) for k in range(count)]).tolist()
    else:
        cuts = [0, *[as_int(place, "every place to cut at") for place in indices_or_sections], n]
    return [x[along(axis, x.ndim, slice(a, b))] for a, b in itertools.pairwise(cuts)]


def _pieces(count: Any) -> int:
    number: int = as_int(count, "the number of pieces")
    if number < 1:
        raise ArgumentError("at least one piece", str(number), "a list cuts at the places in it")
    return number


# ---- repeating and padding ------------------------------------------------------------------------------------------


@composite(samples=[sample((2, 3), reps=2), sample((2, 3), reps=(2, 1, 2)), sample((3,), reps=(2, 2))])
def tile(x: Array, reps: Shape) -> Array:
    """Copies of the whole of ``x`` side by side, ``reps`` of them along each axis.

    >>> print(tile(np.array([1, 2]), 2))
    [1 2 1 2]
    """
    counts = list(as_shape(as_tuple(reps), "reps"))
    ndim = builtins.max(x.ndim, len(counts))
    counts = [1] * (ndim - len(counts)) + counts
    shape = (1,) * (ndim - x.ndim) + x.shape
    apart = [n for length in shape for n in (1, length)]
    repeated = [n for count, length in zip(counts, shape, strict=True) for n in (count, length)]
    whole = tuple(count * length for count, length in zip(counts, shape, strict=True))
    return reshape(broadcast_to(reshape(x, tuple(apart)), tuple(repeated)), whole)


@composite(
    samples=[sample((2, 3), repeats=2), sample((2, 3), repeats=2, axis=1), sample((2, 3), repeats=[1, 0, 3], axis=1)]
)
def repeat(x: Array, repeats: ArrayLike, axis: int | None = None) -> Array:
    """Each element ``repeats`` times in place, along ``axis`` or flattened. (torch's ``repeat`` is ``tile``.)

    >>> print(repeat(np.array([1, 2]), 2))
    [1 1 2 2]
    """
    if axis is None:
        x, axis = ravel(x), 0
    counts = [as_int(n, "every number of repeats") for n in as_tuple(repeats)]
    places = np.repeat(np.arange(x.shape[normal_axis(axis, x.ndim)]), counts)
    return x[along(axis, x.ndim, places)]


@composite(
    samples=[sample((2, 3), shift=1, axis=1), sample((2, 3), shift=(1, -1), axis=(0, 1)), sample((2, 3), shift=2)]
)
def roll(x: Array, shift: Shape, axis: Axes = None) -> Array:
    """``x`` moved by ``shift`` places along ``axis`` (flattened for None), around the end.

    >>> print(roll(np.array([1, 2, 3]), 1))
    [3 1 2]
    """
    if axis is None:
        return reshape(roll(ravel(x), shift, 0), x.shape)
    shifts, axes = np.broadcast_arrays([as_int(n, "every shift") for n in as_tuple(shift)], as_tuple(axis))
    for by, a in zip(shifts.tolist(), axes.tolist(), strict=True):
        n = x.shape[normal_axis(a, x.ndim)]
        cut = n - by % n if n else 0
        x = concatenate([x[along(a, x.ndim, slice(cut, None))], x[along(a, x.ndim, slice(None, cut))]], a)
    return x


@primitive(part_of="pad", samples=[sample((2, 3), widths=[[1, 0], [0, 2]], value=3.0)])
def pad_constant(x: Array, widths: Any, value: Any) -> Array:
    """``x`` with ``value`` around it, (before, after) elements along each axis."""
    return array_module(x).pad(x, widths, mode="constant", constant_values=value)


pad_constant.defvjp(
    lambda g, x_shape, widths: g[tuple(slice(b, b + n) for (b, _), n in zip(widths, x_shape, strict=True))]
).defjvp(lambda t, widths: pad_constant(t, widths, 0))


@composite(
    samples=[
        sample((2, 3), pad_width=1),
        sample((2, 3), pad_width=((1, 0), (0, 2)), constant_values=3.0),
        *[sample((3, 4), pad_width=((1, 2), (2, 1)), mode=m) for m in ("edge", "reflect", "symmetric", "wrap")],
    ]
)
def pad(x: Array, pad_width: int | Sequence[Any], mode: str = "constant", constant_values: float = 0) -> Array:
    """``x`` with ``pad_width`` = (before, after) elements added along each axis.

    mode: ``constant``, or ``edge``, ``reflect``, ``symmetric``, ``wrap``, which repeat elements of ``x``.

    >>> print(pad(np.array([1, 2]), 1))
    [0 1 2 0]
    """
    widths = [[as_int(n, "every width") for n in pair] for pair in np.broadcast_to(pad_width, (x.ndim, 2)).tolist()]
    if x.ndim == 0:
        return reshape(x, ())
    if mode == "constant":
        return pad_constant(x, widths, constant_values)
    if mode not in ("edge", "reflect", "symmetric", "wrap"):
        raise ArgumentError("a mode constant, edge, reflect, symmetric or wrap", repr(mode), "constant pads with zeros")
    for axis, width in enumerate(widths):
        places = np.pad(np.arange(x.shape[axis]), width, mode=mode)  # type: ignore[call-overload]
        x = x[along(axis, x.ndim, places)]
    return x


@composite(samples=[sample((2,), (3,)), sample((2,), (3,), (4,), indexing="ij"), sample((2,))])
def meshgrid(*arrays: Array, indexing: str = "xy") -> list[Array]:
    """Coordinate grids: each 1-D array repeated along the axes of the others.

    >>> [grid.shape for grid in meshgrid(np.ones(2), np.ones(3))]
    [(3, 2), (3, 2)]
    """
    if indexing not in ("xy", "ij"):
        raise ArgumentError("indexing 'xy' or 'ij'", repr(indexing), "'ij' keeps the order of the axes")
    arrays = tuple(as_arrays(a)[0] for a in arrays)
    n = len(arrays)
    place = list(range(n))
    if indexing == "xy" and n > 1:
        place[:2] = [1, 0]
    shape = [0] * n
    for array, axis in zip(arrays, place, strict=True):
        shape[axis] = array.size
    shapes = [
        tuple(array.size if k == axis else 1 for k in range(n)) for array, axis in zip(arrays, place, strict=True)
    ]
    return [broadcast_to(reshape(a, s), tuple(shape)) for a, s in zip(arrays, shapes, strict=True)]


# ---- triangles and diagonals ----------------------------------------------------------------------------------------


@composite(samples=[sample((3, 4)), sample((2, 3, 4), k=-1)])
def tril(x: Array, k: int = 0) -> Array:
    """The lower triangle of the last two axes, up to the ``k``-th diagonal; zeros above.

    >>> print(tril(np.ones((2, 2))))
    [[1. 0.]
     [1. 1.]]
    """
    return where(array_module(x).tri(*x.shape[-2:], k=k, dtype=bool), x, 0)


@composite(samples=[sample((3, 4)), sample((2, 3, 4), k=1)])
def triu(x: Array, k: int = 0) -> Array:
    """The upper triangle of the last two axes, from the ``k``-th diagonal; zeros below.

    >>> print(triu(np.ones((2, 2))))
    [[1. 1.]
     [0. 1.]]
    """
    return where(array_module(x).tri(*x.shape[-2:], k=k - 1, dtype=bool), 0, x)


@composite(
    samples=[
        sample((3, 4)),
        sample((2, 3, 4), offset=1, axis1=1, axis2=2),
        sample((4, 2, 3), offset=-1, axis1=0, axis2=-1),
    ]
)
def diagonal(x: Array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """The diagonals of the planes of two axes, along a last axis.

    >>> print(diagonal(np.array([[1, 2], [3, 4]])))
    [1 4]
    """
    if normal_axis(axis1, x.ndim) == normal_axis(axis2, x.ndim):
        raise AxisError("two different axes", f"{axis1} and {axis2}", "a plane has two")
    x = moveaxis(x, (axis1, axis2), (-2, -1))
    first, second = builtins.max(0, -offset), builtins.max(0, offset)
    places = np.arange(builtins.max(0, builtins.min(x.shape[-2] - first, x.shape[-1] - second)))
    return x[..., places + first, places + second]


@composite(samples=[sample((3,)), sample((3,), k=1), sample((2,), k=-2), sample((3, 4)), sample((3, 4), k=-1)])
def diag(x: Array, k: int = 0) -> Array:
    """The ``k``-th diagonal of a matrix, or the matrix with a given diagonal.

    >>> print(diag(np.array([1, 2])))
    [[1 0]
     [0 2]]
    """
    if x.ndim == 2:
        return diagonal(x, k)
    if x.ndim != 1:
        raise ShapeError("one or two axes", f"shape {x.shape}", "diagonal takes any planes")
    n = x.shape[0]
    widths = [(builtins.max(0, -k), builtins.max(0, k)), (builtins.max(0, k), builtins.max(0, -k))]
    square = where(array_module(x).eye(n, dtype=bool), reshape(x, (n, 1)), 0)
    return pad_constant(square, widths, 0) if k else square


@composite(samples=[sample((2, 3), (3, 2)), sample((3,), (2, 2))])
def kron(x: Array, y: Array) -> Array:
    """Kronecker product: ``y`` scaled by each element of ``x``, laid out in blocks.

    >>> print(kron(np.array([1, 10]), np.array([1, 2])))
    [ 1  2 10 20]
    """
    x, y = as_arrays(x, y)
    ndim = builtins.max(x.ndim, y.ndim)
    a, b = (1,) * (ndim - x.ndim) + x.shape, (1,) * (ndim - y.ndim) + y.shape
    left = reshape(x, tuple(n for length in a for n in (length, 1)))
    right = reshape(y, tuple(n for length in b for n in (1, length)))
    return reshape(multiply(left, right), tuple(m * n for m, n in zip(a, b, strict=True)))
