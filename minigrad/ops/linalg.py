"""Products of vectors, matrices and tensors. Half precision is multiplied in float32 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend import Array, array_module, array_of, as_arrays, is_half
from minigrad.engine.broadcast import unbroadcast
from minigrad.engine.core import primitive
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError, ShapeError
from minigrad.messages.arguments import as_int, as_operand
from minigrad.ops._gemm import product
from minigrad.ops.elementwise import multiply
from minigrad.ops.reduce import sum
from minigrad.ops.shape import (
    as_tuple,
    broadcast_to,
    diagonal,
    expand_dims,
    moveaxis,
    normal_axis,
    ravel,
    reshape,
    roll,
    swapaxes,
    transpose,
)

# fmt: off
__all__ = [
    "cross", "dot", "einsum", "inner", "matmul", "outer", "tensordot", "trace", "vdot", "vecdot",
]
# fmt: on

_products = [
    sample((3,), (3,)),
    sample((3,), (3, 2)),
    sample((2, 3), (3,)),
    sample((2, 3), (3, 4)),
    sample((2, 2, 3), (3, 4)),
    sample((2, 2, 3), (3,)),
    sample((3,), (2, 3, 4)),
    sample((2, 1, 2, 3), (3, 3, 2)),
]


@primitive(linear="each", precision="low", samples=_products, flops=lambda x, out: 2 * out.size * x.shape[-1])
def matmul(x: Array, y: Array) -> Array:
    """Matrix product ``x @ y`` over the last two axes, the others broadcast; 1-D arrays are a row and a column.

    >>> print(matmul(np.array([1.0, 2.0]), np.array([[1.0, 2.0], [3.0, 4.0]])))
    [ 7. 10.]
    """
    xp = array_module(x, y)
    x, y = xp.asarray(x), xp.asarray(y)
    if xp is np and 2 in (x.dtype.itemsize, y.dtype.itemsize) and (is_half(x.dtype) or is_half(y.dtype)):
        narrow = np.result_type(x.dtype, y.dtype)
        with np.errstate(over="ignore"):
            wide = np.result_type(narrow, np.float32)
            return np.asarray(np.matmul(x.astype(wide), y.astype(wide))).astype(narrow)
    times = np.matmul if xp is np else product
    if x.ndim > 2 and y.ndim == 2:  # one large product instead of many small ones
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        return times(rows, y).reshape(*x.shape[:-1], y.shape[-1])
    return times(x, y)


def _matmul_left(g: Array, y: Array, x_shape: Any) -> Array:
    """g yᵀ, summed over broadcast axes; a vector x is a row, a vector y a column."""
    if y.ndim == 1:
        return expand_dims(g, -1) * y  # g has the axes of x but the last
    if len(x_shape) == 1 and y.ndim == 2:
        return matmul(y, g)
    g = expand_dims(g, -2) if len(x_shape) == 1 else g
    found = matmul(g, y.T if y.ndim == 2 else swapaxes(y, -1, -2))
    return found if found.shape == x_shape else unbroadcast(found, x_shape)


def _matmul_right(g: Array, x: Array, y_shape: Any) -> Array:
    """xᵀ g, summed over broadcast axes; where y is one matrix, as one product over all rows of x."""
    if x.ndim == 1:
        return expand_dims(x, -1) * expand_dims(g, -2) if len(y_shape) > 1 else g * x
    if len(y_shape) <= 2 and x.ndim > 2:
        rows = math.prod(x.shape[:-1])
        x, g = reshape(x, (rows, x.shape[-1])), reshape(g, (rows, *y_shape[1:]))
    if len(y_shape) == 1:
        return matmul(g, x)
    found = matmul(x.T if x.ndim == 2 else swapaxes(x, -1, -2), g)
    return found if found.shape == y_shape else unbroadcast(found, y_shape)


matmul.defvjp(_matmul_left, _matmul_right)


@composite(samples=[sample((3,), (3,)), sample((2, 3), (3, 4)), sample((), (2, 3)), sample((2, 2, 3), (4, 3, 2))])
def dot(x: Array, y: Array) -> Array:
    """Inner product of vectors, matrix product of matrices; beyond, over the last axis of x and the last but one of y.

    >>> print(float(dot(np.array([1.0, 2.0]), np.array([3.0, 4.0]))))
    11.0
    """
    if not (getattr(x, "ndim", 0) and getattr(y, "ndim", 0)):  # np.ndim of a Tensor takes 3 µs
        return multiply(x, y)
    if y.ndim <= 2:
        return matmul(x, y)
    return tensordot(x, y, ([-1], [-2]))


@composite(samples=[sample((2, 3), (2, 3))])
def vdot(x: Array, y: Array) -> Array:
    """Inner product of two arrays as flat vectors.

    >>> print(float(vdot(np.ones((2, 2)), np.ones((2, 2)))))
    4.0
    """
    return matmul(ravel(x), ravel(y))


@composite(
    samples=[sample((2, 3), (2, 3)), sample((2, 3), (2,), axis=0), sample((4,), (3, 4))],
    numpy=lambda n, x, y, axis=-1: n.sum(n.moveaxis(x, axis, -1) * n.moveaxis(y, axis, -1), -1),
    torch=lambda t, x, y, axis=-1: (x.movedim(axis, -1) * y.movedim(axis, -1)).sum(-1),
)
def vecdot(x: Array, y: Array, axis: int = -1) -> Array:
    """The dot products ``Σ x y`` of vectors along ``axis`` of both; the other axes are broadcast.

    >>> print(vecdot(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1.0, 10.0])))
    [21. 43.]
    """
    x, y = (v if axis == -1 else moveaxis(v, axis, -1) for v in (x, y))
    if x.shape[-1:] != y.shape[-1:] or not x.ndim:
        raise ShapeError(f"vectors of one length along axis {axis}", f"shapes {x.shape} and {y.shape}", "as in dot")
    return sum(multiply(x, y), -1)


def _torch_cross(t: Any, x: Any, y: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: Any = None) -> Any:
    axisa, axisb, axisc = (axisa, axisb, axisc) if axis is None else (axis, axis, axis)
    rows = t.broadcast_tensors(x.movedim(axisa, -1), y.movedim(axisb, -1))
    return t.linalg.cross(*rows, dim=-1).movedim(-1, axisc)


@composite(samples=[sample((3,), (3,)), sample((2, 3), (3,)), sample((3, 2), (3, 2), axis=0),
                    sample((3, 2), (2, 3), axisa=0, axisc=0)], torch=_torch_cross)  # fmt: skip
def cross(x: Array, y: Array, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Array:
    """The cross products ``x × y`` of vectors of three components; the other axes are broadcast.

    axisa, axisb, axisc: where the components lie in x, in y and in the result; ``axis`` stands for all three.

    >>> print(cross(np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0])))
    [0. 0. 1.]
    """
    axisa, axisb, axisc = (axisa, axisb, axisc) if axis is None else (axis, axis, axis)
    x, y = moveaxis(x, axisa, -1), moveaxis(y, axisb, -1)
    for v in (x, y):
        if v.shape[-1] != 3:
            raise ShapeError("vectors of three components", f"{v.shape[-1]}", "of two: x[0] * y[1] - x[1] * y[0]")
    product = roll(multiply(x, roll(y, -1, -1)) - multiply(roll(x, -1, -1), y), -1, -1)
    return moveaxis(product, -1, axisc)


@composite(samples=[sample((3,), (3,)), sample((2, 3), (4, 3))])
def inner(x: Array, y: Array) -> Array:
    """Inner products over the last axes of both.

    >>> print(float(inner(np.array([1.0, 2.0]), np.array([3.0, 4.0]))))
    11.0
    """
    return multiply(x, y) if np.ndim(x) == 0 or np.ndim(y) == 0 else tensordot(x, y, ([-1], [-1]))


@composite(samples=[sample((3,), (2,)), sample((2, 2), (3,))])
def outer(x: Array, y: Array) -> Array:
    """The product of every element of ``x`` (flattened) with every element of ``y``.

    >>> print(outer(np.array([1.0, 2.0]), np.array([1.0, 10.0])))
    [[ 1. 10.]
     [ 2. 20.]]
    """
    x, y = as_arrays(x, y)
    return multiply(expand_dims(ravel(x), 1), expand_dims(ravel(y), 0))


@composite(samples=[sample((3, 4)), sample((2, 3, 4), offset=1, axis1=1, axis2=2)])
def trace(x: Array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """The sum of the diagonal of the planes of two axes.

    >>> print(float(trace(np.eye(3))))
    3.0
    """
    return sum(diagonal(x, offset, axis1, axis2), axis=-1)


@composite(
    samples=[
        sample((2, 3, 4), (3, 4, 2)),
        sample((2, 3), (3, 2), axes=1),
        sample((2, 3), (2, 3), axes=([0, 1], [0, 1])),
        sample((2,), (3,), axes=0),
    ]
)
def tensordot(x: Array, y: Array, axes: Any = 2) -> Array:
    """Sum of products over pairs of axes: the last ``axes`` of x with the first of y, or two lists of axes.

    >>> tensordot(np.ones((2, 3)), np.ones((3, 4)), 1).shape
    (2, 4)
    """
    x, y = as_arrays(x, y)
    if np.ndim(axes) == 0:
        axes = as_int(axes, "the number of axes")
        if not 0 <= axes <= min(x.ndim, y.ndim):
            got = f"{axes}, for {x.ndim} and {y.ndim}"
            raise ArgumentError("a number of axes that both arrays have", got, "axes=0 gives every product")
        axes = (list(range(x.ndim - axes, x.ndim)), list(range(axes)))
    left = [normal_axis(a, x.ndim) for a in as_tuple(axes[0])]
    right = [normal_axis(a, y.ndim) for a in as_tuple(axes[1])]
    if [x.shape[a] for a in left] != [y.shape[a] for a in right]:
        got, hint = f"axes {axes} of shapes {x.shape} and {y.shape}", "axes=1 pairs the last of x with the first of y"
        raise ShapeError("pairs of axes of equal length", got, hint)
    free_x = [a for a in range(x.ndim) if a not in left]
    free_y = [a for a in range(y.ndim) if a not in right]
    summed = math.prod(x.shape[a] for a in left)
    rows = math.prod(x.shape[a] for a in free_x)
    columns = math.prod(y.shape[a] for a in free_y)
    a = reshape(transpose(x, tuple(free_x + left)), (rows, summed))
    b = reshape(transpose(y, tuple(right + free_y)), (summed, columns))
    return reshape(matmul(a, b), tuple(x.shape[i] for i in free_x) + tuple(y.shape[i] for i in free_y))


# ---- einsum ---------------------------------------------------------------------------------------------------------


def _einsum_flops(operands: Sequence[Array], subscripts: str) -> float:
    """A product of all operands, summed, for each combination of subscripts."""
    terms = subscripts.split("->")[0].split(",")
    sizes = {c: n for term, a in zip(terms, operands, strict=True) for c, n in zip(term, a.shape, strict=True)}
    return float(len(operands) * math.prod(sizes.values()))


@primitive(
    linear="each",
    part_of="einsum",
    sequence=True,
    precision="low",
    samples=[sample([(2, 3), (3, 2)], "ij,jk->ki"), sample([(2, 2, 3), (3,)], "iij,k->ji")],
    flops=_einsum_flops,
)
def einsum_explicit(operands: Sequence[Array], subscripts: str) -> Array:
    """``einsum`` with every subscript spelled out, an output, and no ellipsis."""
    xp = array_module(*operands)
    dtype = xp.result_type(*operands)
    if is_half(dtype):
        wide = xp.einsum(subscripts, *[a.astype(np.float32) for a in operands], optimize=True)
        with np.errstate(over="ignore"):
            return wide.astype(dtype)
    return xp.array(xp.einsum(subscripts, *operands, optimize=len(operands) > 1))


def _einsum_rule(g: Array, operands: Any, subscripts: str, needs: tuple[bool, ...]) -> list[Any]:
    inputs, out = subscripts.split("->")
    terms = inputs.split(",")
    return [_einsum_back(k, g, operands, terms, out) if need else None for k, need in enumerate(needs)]


def _einsum_back(k: int, g: Array, operands: Any, terms: list[str], out: str) -> Array:
    """The gradient of operand k: the einsum of g and the others to its subscripts, repeated ones on the diagonal.

    A subscript that stands in this operand alone was summed over: its axis receives the same gradient everywhere.
    """
    own = "".join(dict.fromkeys(terms[k]))  # each subscript once
    sizes = dict(zip(terms[k], operands[k].shape, strict=True))
    others = [(term, a) for i, (term, a) in enumerate(zip(terms, operands, strict=True)) if i != k]
    known = [c for c in own if c in out or any(c in term for term, _ in others)]
    factors = ",".join([out, *[term for term, _ in others]])
    part = einsum_explicit([g, *[a for _, a in others]], f"{factors}->{''.join(known)}")
    for axis, c in enumerate(own):
        if c not in known:
            part = expand_dims(part, axis)
    lengths = [sizes[c] for c in own]
    full = tuple(
        n if c not in known or part.shape[i] == 1 else part.shape[i]
        for i, (c, n) in enumerate(zip(own, lengths, strict=True))
    )
    part = unbroadcast(broadcast_to(part, full), tuple(lengths))
    return part if own == terms[k] else _on_diagonal(part, own, terms[k])


def _on_diagonal(part: Array, own: str, term: str) -> Array:
    """``part`` where the axes that share a subscript have equal indices, zeros elsewhere."""
    for place, c in enumerate(term):
        if term.index(c) == place:
            continue
        axis = own.index(c)
        n = part.shape[axis]
        eye = array_module(part).eye(n, dtype=part.dtype)
        part = multiply(expand_dims(part, -1), reshape(eye, (*(n if i == axis else 1 for i in range(part.ndim)), n)))
    order, extra = [], len(own)
    for place, c in enumerate(term):
        order.append(own.index(c) if term.index(c) == place else extra)
        extra += term.index(c) != place
    return transpose(part, tuple(order))


einsum_explicit.defvjp(_einsum_rule)


@composite(
    samples=[
        sample("ij,jk->ik", (2, 3), (3, 4)),
        sample("ii->", (3, 3)),
        sample("iij->ij", (2, 2, 3)),
        sample("ij,k->i", (2, 3), (2,)),
        sample("ji", (2, 3)),
        sample("...ij,...jk->...ik", (2, 1, 2, 3), (3, 3, 2)),
        sample("ij,jk,kl->il", (2, 3), (3, 2), (2, 2)),
        sample("i,i", (3,), (3,)),
        sample("bij->b", (2, 3, 2)),
    ]
)
def einsum(subscripts: str | Array, *operands: Array | Sequence[int]) -> Array:
    """Sum of products by named axes, as NumPy writes it: ``"ij,jk->ik"``; repeated names, ``...`` and implicit outputs.

    NumPy's other form, arrays each followed by the list of its axes' numbers, is ``einsum(x, [0, 1], y, [1, 2])``.

    >>> print(float(einsum("ii->", np.eye(3))))
    3.0
    """
    if not isinstance(subscripts, str):
        if not operands or not isinstance(operands[0], list | tuple):
            got = type(subscripts).__name__
            raise ArgumentError("subscripts as a string first, such as 'ij,jk->ik'", got, "einsum('ij,jk->ik', x, y)")
        return einsum(*_spelled((subscripts, *operands)))
    arrays = [as_operand(a, "each operand of einsum") for a in operands]
    return einsum_explicit(arrays, explicit_subscripts(subscripts, [np.ndim(array_of(a)) for a in arrays]))


def _spelled(operands: Sequence[Any]) -> list[Any]:
    """Subscripts and arrays of arrays each followed by the list of its axes, and perhaps the list of the result's.

    >>> _spelled((1.0, [0, ...], 2.0, [1], [1, 0, ...]))
    ['a...,b->ba...', 1.0, 2.0]
    """

    def word(axes: Any) -> str:
        return "".join("..." if a is Ellipsis else chr(97 + as_int(a, "the number of an axis")) for a in axes)

    pairs = len(operands) // 2 * 2
    arrow = "->" + word(operands[-1]) if len(operands) % 2 else ""
    return [",".join(map(word, operands[1:pairs:2])) + arrow, *operands[0:pairs:2]]


def explicit_subscripts(subscripts: str, ndims: Sequence[int]) -> str:
    """``subscripts`` with an output, and letters in place of each ``...``.

    >>> explicit_subscripts("...i,i", [2, 1])
    'ai,i->a'
    """
    inputs, arrow, out = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ndims):
        raise ArgumentError(
            f"{len(terms)} operands for {subscripts!r}", str(len(ndims)), "commas separate the operands"
        )
    for term in (*terms, out):
        if not term.replace("...", "", 1).isalpha() and term not in ("", "..."):
            got, hint = f"{term!r} in {subscripts!r}", "'ij,jk->ik' multiplies matrices"
            raise ArgumentError("subscripts of letters, and ... at most once in each", got, hint)
    letters = [c for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in subscripts]
    spread = [n - len(term.replace("...", "")) if "..." in term else 0 for term, n in zip(terms, ndims, strict=True)]
    most = max(spread)
    if min(spread) < 0 or most > len(letters):
        got = f"operands with {list(ndims)} axes"
        raise ShapeError(f"operands with at least as many axes as {subscripts!r} names", got, "a letter for each axis")
    for term, n in zip(terms, ndims, strict=True):
        if "..." not in term and len(term) != n:
            expected, hint = (
                f"an operand with {len(term)} axes for {term!r} of {subscripts!r}",
                "... stands for any others",
            )
            raise ShapeError(expected, f"{n} axes", hint)
    around = "".join(letters[:most])
    filled = [term.replace("...", around[most - n :]) for term, n in zip(terms, spread, strict=True)]
    if not arrow:
        named = sorted(c for c in set("".join(terms)) if c.isalpha() and "".join(terms).count(c) == 1)
        out = ("..." if most else "") + "".join(named)
    out = out.replace("...", around)
    if len(set(out)) < len(out) or not set(out) <= set("".join(filled)):
        expected = f"each output subscript once, and among the inputs, in {subscripts!r}"
        raise ArgumentError(expected, repr(out), "what the output leaves out is summed over")
    return ",".join(filled) + "->" + out
