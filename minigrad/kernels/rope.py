"""Rotary position embedding: each pair of features is a complex number, turned by an angle that grows with position.

The interleaved layout keeps the two parts of a pair next to each other, as complex numbers lie in memory: there the
kernel is one complex multiplication, at the speed of a copy. A turn is linear in x and undone by the opposite turn, so
its derivative is the operation itself with -sin, at every order, and nothing of x is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, array_module, is_floating
from minigrad.engine.broadcast import unbroadcast
from minigrad.engine.core import primitive
from minigrad.engine.registry import sample
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.kernels.cuda import rope as gpu_rope
from minigrad.machine import parallel
from minigrad.machine.loops import loop
from minigrad.machine.parallel import scratch
from minigrad.ops import astype

FEW = 1 << 14  # numbers of x: fewer are turned at once, without bringing axes into an order that makes loops long
ELEMENT_NS = {"interleaved": 0.3, "half": 1.5}  # time of an element on one core

_angles = np.linspace(-1.0, 1.0, 6).reshape(3, 2)


def _formula(xp: Any, x: Any, cos: Any, sin: Any, layout: str = "interleaved") -> Any:
    """The definition, in the functions of a module."""
    a, b = _pairs(x, layout)
    turned = a * cos - b * sin, a * sin + b * cos
    return xp.concatenate(turned, -1) if layout == "half" else xp.stack(turned, -1).reshape(x.shape)


def _pairs(x: Any, layout: str) -> tuple[Any, Any]:
    """The first and the second features of all pairs."""
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if layout == "half" else (x[..., ::2], x[..., 1::2])


@primitive(torch=_formula, numpy=_formula, flops=lambda x: 3 * x.size, samples=[
    sample((2, 3, 4), np.cos(_angles), np.sin(_angles)),
    sample((2, 3, 4), np.cos(_angles), np.sin(_angles), layout="half"),
    sample((2, 3, 4), (3, 2), (2, 1, 1)),
])  # fmt: skip
def apply_rope(x: Array, cos: Array, sin: Array, layout: str = "interleaved") -> Array:
    """Rotary position embedding: the k-th pair of features at position t, turned by an angle given by its cos and sin.

    ``(a, b) -> (a cos - b sin, a sin + b cos)``, the angle being t · Θ^(-2k/d) in Su et al., "RoFormer" (2021).

    x is (..., seq, d), the result too, in the dtype of x. cos and sin are (seq, d/2), or any shape that broadcasts to
    (..., seq, d/2). Pair k is the features (2k, 2k + 1) in the layout "interleaved", (k, k + d/2) in the layout "half".
    Half precision is computed in float32. Raises a ShapeError, DTypeError or ArgumentError for what doesn't fit.

    >>> x, angles = np.array([[1.0, 0.0, 1.0, 0.0]]), np.array([[1.0, 0.1]])
    >>> print(apply_rope(x, np.cos(angles), np.sin(angles)).round(3))
    [[0.54  0.841 0.995 0.1  ]]
    """
    _check(x, cos, sin, layout)
    wide = accumulator(x.dtype)
    cos, sin = cos.astype(wide, copy=False), sin.astype(wide, copy=False)
    if array_module(x) is not np:
        return gpu_rope.turned(x, cos, sin, layout)
    return turned(x.astype(wide, copy=False), cos, sin, layout).astype(x.dtype, copy=False)


def _cos_rule(g: Any, x: Any, cos_shape: Any, layout: str) -> Any:
    (ga, gb), (a, b) = _wide_pairs(g, layout), _wide_pairs(x, layout)
    return unbroadcast(ga * a + gb * b, cos_shape)


def _sin_rule(g: Any, x: Any, sin_shape: Any, layout: str) -> Any:
    (ga, gb), (a, b) = _wide_pairs(g, layout), _wide_pairs(x, layout)
    return unbroadcast(gb * a - ga * b, sin_shape)


def _wide_pairs(x: Any, layout: str) -> tuple[Any, Any]:
    return _pairs(astype(x, accumulator(x.dtype)), layout)


apply_rope.defvjp(lambda g, cos, sin, layout: apply_rope(g, cos, -sin, layout), _cos_rule, _sin_rule)


def _check(x: Any, cos: Any, sin: Any, layout: str) -> None:
    if layout not in ("interleaved", "half"):
        hint = "'interleaved' turns neighbours, 'half' those half a row apart"
        raise ArgumentError("layout 'interleaved' or 'half'", repr(layout), hint)
    if not all(is_floating(array.dtype) for array in (x, cos, sin)):
        hint = "astype('float32') first"
        raise DTypeError("floating-point x, cos and sin", f"{x.dtype}, {cos.dtype} and {sin.dtype}", hint)
    if x.ndim < 1 or x.shape[-1] % 2:
        raise ShapeError("x of shape (..., seq, d) with an even d", f"shape {x.shape}", "features are turned in pairs")
    full = (*x.shape[:-1], x.shape[-1] // 2)
    for name, table in (("cos", cos), ("sin", sin)):
        padded = (1,) * (len(full) - table.ndim) + table.shape
        if len(padded) > len(full) or any(size not in (1, n) for size, n in zip(padded, full, strict=True)):
            hint = "cut the tables to the positions of x: cos[start : start + seq]"
            raise ShapeError(f"{name} that broadcasts to {full}", f"{name} {table.shape}, x {x.shape}", hint)


# ---- the NumPy kernel -----------------------------------------------------------------------------------------------


def turned(x: Array, cos: Array, sin: Array, layout: str) -> Array:
    """The turn of x, in the memory order of x, so that views with transposed heads are read and written in place."""
    if x.ndim == 1:
        return turned(x[None], cos, sin, layout)[0]
    x = x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)
    out = np.empty_like(x)
    if not x.size:
        return out
    shape = cos.shape if cos.shape == sin.shape else np.broadcast_shapes(cos.shape, sin.shape)
    table = np.empty(shape, np.result_type(x.dtype, np.complex64))
    table.real, table.imag = cos, sin
    table = table.reshape((1,) * (x.ndim - table.ndim) + table.shape)
    source, target, table = (x, out, table) if x.size < FEW else _for_long_loops(x, out, table)
    turner: Any
    if layout == "interleaved":
        turner, tables, source, target = turn, [table], source.view(table.dtype), target.view(table.dtype)
    else:
        source, target = (array.reshape(*array.shape[:-1], 2, array.shape[-1] // 2) for array in (source, target))
        turner, tables = turn_halves, [table.real[..., None, :].copy(), np.stack((-table.imag, table.imag), axis=-2)]

    def body(a: int, b: int) -> None:
        turner(source[a:b], *[t[a:b] if len(t) > 1 else t for t in tables], target[a:b])

    rows = len(source)
    if x.size < FEW:
        body(0, rows)
    else:
        parallel.for_rows(body, rows, 3 * x.nbytes // rows, ELEMENT_NS[layout] * x.size / rows)
    return out


def _for_long_loops(x: Array, out: Array, table: Array) -> tuple[Array, Array, Array]:
    """All three, with their axes in the memory order of x and the table repeated along the inner axes."""
    order = sorted(range(x.ndim - 1), key=lambda axis: (x.shape[axis] > 1, -abs(x.strides[axis])))
    ones = (0,) * min(sum(size == 1 for size in x.shape[:-1]), x.ndim - 2)
    x, out, table = (array.transpose(*order, -1)[ones] for array in (x, out, table))
    return x, out, _repeated(table, x)


def _repeated(table: Array, x: Array) -> Array:
    """The table, repeated along the inner axes of x so that loops are long, unless that costs more than it saves."""
    first = next((axis for axis, size in enumerate(table.shape[:-1]) if size > 1), 0)
    shape = (*table.shape[:first], *x.shape[first:-1], table.shape[-1])
    full = np.broadcast_to(table, shape)
    return np.ascontiguousarray(full) if 8 * full.size <= x.size else table


class RowTurns:
    """The turn of heads that lie side by side in the rows of a matrix, row i at position i mod T; a tile at a time.

    cos and sin are (T, d/2), rows and width the shape of the matrix. The layout is "interleaved".
    """

    def __init__(self, cos: Array, sin: Array, rows: int, width: int, work: Any) -> None:
        table = np.empty((len(cos), 1, cos.shape[1]), np.result_type(work, np.complex64))
        table.real, table.imag = cos[:, None], sin[:, None]
        self.many = rows >= 4 * len(cos)  # sequences: then the table is as wide as the rows, for long loops
        self.table = np.repeat(table, width // (2 * cos.shape[1]), axis=1) if self.many else table

    def write(self, a: int, b: int, x: Array, out: Array) -> None:
        """``out = x`` turned, for the rows [a, b) of the matrix; out may be x."""
        length, _, half = self.table.shape
        x, out = (array.view(self.table.dtype).reshape(b - a, -1, half) for array in (x, out))
        row = a
        while row < b:
            at, count = row % length, (b - row) // length
            if count and self.many and not at:  # whole sequences
                stop = row + count * length
                parts = [array[row - a : stop - a].reshape(count, -1) for array in (x, out)]
                turn(parts[0], self.table.reshape(1, -1), parts[1])
            else:
                stop = min(b, row + length - at)
                turn(x[row - a : stop - a], self.table[at : at + stop - row], out[row - a : stop - a])
            row = stop


def _turn(x: Array, table: Array, out: Array) -> None:
    with np.errstate(all="ignore"):
        np.multiply(x, table, out=out)


@loop(_turn)
def turn(x: Array, table: Array, out: Array) -> Any:
    """``out = x · table`` for rows of complex numbers, where the table has one row or as many as x.

    A row of the table is as long as one of x, or as the vectors of its last axes, which then have the same factors.
    """
    axis = 1
    while axis < x.ndim and table.shape[axis] == 1:
        axis += 1
    for i in range(axis, x.ndim):
        if table.shape[i] != x.shape[i]:
            return False
    rows, numbers, turned, factors = len(table), x.ravel(), out.ravel(), table.ravel()
    width, length = numbers.size // len(x), factors.size // rows
    for i in range(len(x)):
        factor = factors[i % rows * length :]
        for start in range(i * width, (i + 1) * width, length):
            row, target = numbers[start:], turned[start:]
            for j in range(length):
                a, b, c, s = row[j].real, row[j].imag, factor[j].real, factor[j].imag
                target[j] = complex(a * c - b * s, a * s + b * c)
    return True


def _turn_halves(x: Array, cos: Array, sin: Array, out: Array) -> None:
    with np.errstate(all="ignore"):
        np.multiply(x, cos, out=out)
        out += np.multiply(x[..., ::-1, :], sin, out=scratch(out.shape, out.dtype, "rope product"))


@loop(_turn_halves)
def turn_halves(x: Array, cos: Array, sin: Array, out: Array) -> Any:
    """The same for vectors of two halves; their cosines and ``sin = (-sin, sin)`` are theirs, or one for a row."""
    half, numbers, turned, cosines, sines = x.shape[-1], x.ravel(), out.ravel(), cos.ravel(), sin.ravel()
    vectors = x[0].size // sin[0].size  # that share a cosine
    if not (vectors == 1 or sin[0].size == 2 * half):
        return False
    for start in range(0, numbers.size, 2 * half):
        at = start // (2 * half) // vectors * half % cosines.size
        a, b, c, s = numbers[start:], numbers[start + half :], cosines[at:], sines[2 * at + half :]
        left, right = turned[start:], turned[start + half :]
        for j in range(half):
            left[j], right[j] = a[j] * c[j] - b[j] * s[j], a[j] * s[j] + b[j] * c[j]
    return True
