"""Matrices as rows of quantized blocks, in the layouts of GGUF: 32 numbers share a scale, and each is a small integer.

The bytes are those of llama.cpp's files. A block begins with its scale d in half precision, then come

- q8_0: 32 integers q of 8 bits; a number is d q
- q4_0: 32 integers q of 4 bits; a number is d (q - 8)
- q4_1: its lowest number m in half precision, and 32 integers q of 4 bits; a number is d q + m

A byte of 4-bit integers holds number i of the block in its lower half and number i + 16 in its upper one. float16 is a
layout with one number a block. A matrix is (rows, bytes of a row), uint8.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import Array, array_module, cast_to
from minigrad.engine.core import primitive
from minigrad.engine.registry import sample
from minigrad.errors import ShapeError
from minigrad.kernels.products import over_products
from minigrad.kernels.rows import as_matrix, dtypes, matrix_of
from minigrad.machine.loops import loop
from minigrad.machine.parallel import even_step, scratch

BLOCK = 32  # numbers
TILE_NUMBERS = 64 * 1024  # that are floating-point at once on each thread, 256 KB; at most half of a matrix


class Layout(NamedTuple):
    """How many numbers a block holds, and in how many bytes."""

    numbers: int
    size: int

    def width(self, blocks: Array) -> int:
        """How many numbers a row of the matrix has."""
        return int(blocks.shape[1]) // self.size * self.numbers


LAYOUTS = {"q8_0": Layout(BLOCK, 34), "q4_0": Layout(BLOCK, 18), "q4_1": Layout(BLOCK, 20), "float16": Layout(1, 2)}


# ---- numbers to blocks -----------------------------------------------------------------------------------------------


def encoded(matrix: Array, layout: str) -> Array:
    """The blocks (rows, bytes) of a matrix whose width is a multiple of the layout's.

    The same bytes as llama.cpp's. What doesn't fit half precision gives an infinite scale.

    >>> encoded(np.ones((1, 32), np.float32), "q8_0")[0, 2:5]
    array([127, 127, 127], dtype=uint8)
    """
    xp, form = array_module(matrix), LAYOUTS[layout]
    x = xp.ascontiguousarray(matrix, np.float32)
    with np.errstate(all="ignore"):
        if layout == "float16":
            return xp.ascontiguousarray(x.astype(np.float16)).view(np.uint8)
        parts = _ENCODE[layout](xp, x.reshape(-1, BLOCK))
    return xp.concatenate(parts, axis=1).reshape(len(x), x.shape[1] // form.numbers * form.size)


def _encode_q8_0(xp: Any, x: Array) -> list[Array]:
    scale = xp.abs(x).max(axis=1, keepdims=True) / 127
    q = x * _inverse(xp, scale)
    whole = xp.trunc(q)
    q = whole + xp.trunc(2 * (q - whole))  # halves away from 0
    return [_half(scale), q.astype(np.int8).view(np.uint8)]


def _encode_q4_0(xp: Any, x: Array) -> list[Array]:
    largest = x[xp.arange(len(x)), xp.abs(x).argmax(axis=1)][:, None]
    scale = largest / -8  # so the number that is furthest from 0 is exact, whatever its sign
    return [_half(scale), _pairs(xp.trunc(x * _inverse(xp, scale) + np.float32(8.5)))]


def _encode_q4_1(xp: Any, x: Array) -> list[Array]:
    low = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - low) / 15
    return [_half(scale), _half(low), _pairs(xp.trunc((x - low) * _inverse(xp, scale) + np.float32(0.5)))]


_ENCODE: dict[str, Any] = {"q8_0": _encode_q8_0, "q4_0": _encode_q4_0, "q4_1": _encode_q4_1}


def _inverse(xp: Any, scale: Array) -> Array:
    return xp.where(scale == 0, np.float32(0), 1 / scale)


def _half(scale: Array) -> Array:
    return scale.astype(np.float16).view(np.uint8)


def _pairs(q: Array) -> Array:
    """Integers up to 15, two in a byte."""
    small = q.astype(np.uint8).clip(0, 15)
    return small[:, :16] | small[:, 16:] << np.uint8(4)


# ---- and back --------------------------------------------------------------------------------------------------------


def decoded(blocks: Array, layout: str) -> Array:
    """The numbers of rows of blocks (rows, bytes), float32 (rows, width).

    >>> print(decoded(encoded(np.ones((1, 32), np.float32), "q4_0"), "q4_0")[0, :3])
    [1. 1. 1.]
    """
    out = array_module(blocks).empty((len(blocks), LAYOUTS[layout].width(blocks)), np.float32)
    decode(blocks, layout, out)
    return out


def decode(blocks: Array, layout: str, out: Array) -> None:
    """``decoded`` into ``out``."""
    xp, form = array_module(blocks), LAYOUTS[layout]
    parts = xp.ascontiguousarray(blocks).reshape(len(blocks), -1, form.size)
    rows = out.reshape(*parts.shape[:2], form.numbers)
    scale = _halves(parts, 0)
    if layout == "float16":
        rows[...] = scale[..., None]
    elif layout == "q8_0":
        (_whole_bytes if xp is np else _bytes)(parts.view(np.int8), scale, rows)
    else:
        start, zero, low = (4, 0, _halves(parts, 2)) if layout == "q4_1" else (2, 8, None)
        (_half_bytes if xp is np else _nibbles)(parts, scale, low, start, zero, rows)


def scales(blocks: Array, layout: str) -> Array:
    """The numbers in half precision of all blocks: what is infinite or NaN there makes NaNs of a block."""
    form = LAYOUTS[layout]
    parts = blocks.reshape(len(blocks), -1, form.size)
    return array_module(blocks).stack([_halves(parts, at) for at in ((0, 2) if layout == "q4_1" else (0,))])


def _halves(parts: Array, start: int) -> Array:
    """The number of half precision that lies at a byte of each block, as float32."""
    two = array_module(parts).ascontiguousarray(parts[..., start : start + 2])
    return two.view(np.float16)[..., 0].astype(np.float32)


def _bytes(parts: Array, scale: Array, out: Array) -> None:
    array_module(parts).multiply(parts[..., 2:], scale[..., None], out=out)


@loop(_bytes)
def _whole_bytes(parts: Array, scale: Array, out: Array) -> None:
    for i in range(out.shape[0]):
        for b in range(out.shape[1]):
            for j in range(32):
                out[i, b, j] = scale[i, b] * parts[i, b, j + 2]


def _nibbles(parts: Array, scale: Array, low: Array | None, start: int, zero: int, out: Array) -> None:
    q = parts[..., start:]
    out[..., :16], out[..., 16:] = q & 15, q >> 4
    out -= zero
    out *= scale[..., None]
    if low is not None:
        out += low[..., None]


@loop(_nibbles)
def _half_bytes(parts: Array, scale: Array, low: Array | None, start: int, zero: int, out: Array) -> None:
    for i in range(out.shape[0]):
        for b in range(out.shape[1]):
            shift = np.float32(0) if low is None else low[i, b]
            for j in range(16):
                q = parts[i, b, start + j]
                out[i, b, j] = scale[i, b] * ((q & 15) - zero) + shift
                out[i, b, j + 16] = scale[i, b] * ((q >> 4) - zero) + shift


# ---- the product -----------------------------------------------------------------------------------------------------


def _torch(t: Any, x: Any, blocks: Any, layout: str, transposed: bool = False) -> Any:
    w = t.from_numpy(decoded(np.asarray(blocks), layout)).to(x.dtype)
    return x @ (w if transposed else w.T)


_weight = np.sin(np.arange(3 * 64, dtype=np.float32)).reshape(3, 64)
_samples = [
    sample((2, 2, 64), encoded(_weight, "q8_0"), layout="q8_0"),
    sample((64,), encoded(_weight, "q4_1"), layout="q4_1"),
    sample((2, 3), encoded(_weight, "q4_0"), layout="q4_0", transposed=True),
    sample((2, 2, 3), encoded(_weight[:, :5], "float16"), layout="float16", transposed=True),
]


def _flops(
    x: Array, out: Array, transposed: bool, blocks: Array, layout: str, wrt: frozenset[str]
) -> tuple[float, float]:
    n = 2 * (x.size // max(1, x.shape[-1])) * len(blocks) * LAYOUTS[layout].width(blocks)
    return n, n * len(wrt)


@primitive(linear="jointly", precision="low", torch=_torch, numpy=False, samples=_samples, flops=_flops)
def block_product(x: Array, blocks: Array, layout: str, transposed: bool = False) -> Array:
    """``x Wᵀ``, or ``x W`` if transposed, of a matrix W in blocks. A tile of W is floating-point at a time.

    x is (..., width), or (..., rows) if transposed; blocks are (rows, bytes of a row), of integers that have no
    gradient. Half precision is multiplied in float32 and rounded once. A shape that doesn't fit is a ShapeError.

    >>> print(block_product(np.ones(32), encoded(np.ones((2, 32)), "q4_0"), "q4_0"))
    [32. 32.]
    """
    form, xp = LAYOUTS[layout], array_module(x, blocks)
    shape = len(blocks), form.width(blocks)
    inner, outer = shape if transposed else shape[::-1]
    if x.ndim == 0 or x.shape[-1] != inner:
        raise ShapeError(f"x (..., {inner})", f"shape {x.shape}", "the last axis is that of the matrix")
    dtype, work = dtypes(x)
    out = xp.empty((*x.shape[:-1], outer), work)
    if xp is np:
        rows, result = as_matrix(x, work), matrix_of(out)
    else:
        rows, result = xp.ascontiguousarray(x, work).reshape(-1, inner), out.reshape(-1, outer)
    body = partial(_columns if transposed else _rows, rows, blocks, layout, result)
    count = shape[1] // form.numbers if transposed else shape[0]
    each = shape[0] * form.numbers if transposed else shape[1]  # numbers in a row, or in a column of blocks
    step = even_step(count, max(1, min(TILE_NUMBERS // max(1, each), count // 2)))
    if xp is np:
        over_products(body, count, rows, step=step)
    else:
        for start in range(0, count, step):
            body(start, min(start + step, count))
    return cast_to(out, dtype)


def _rows(x: Array, blocks: Array, layout: str, out: Array, start: int, stop: int) -> None:
    """The results that rows of the matrix make."""
    array_module(x).matmul(x, _tile(blocks[start:stop], layout, x.dtype).T, out=out[:, start:stop])


def _columns(x: Array, blocks: Array, layout: str, out: Array, start: int, stop: int) -> None:
    """The results that columns of blocks make."""
    numbers, size = LAYOUTS[layout]
    tile = _tile(blocks[:, start * size : stop * size], layout, x.dtype)
    array_module(x).matmul(x, tile, out=out[:, start * numbers : stop * numbers])


def _tile(blocks: Array, layout: str, dtype: Any) -> Array:
    if array_module(blocks) is not np:
        return decoded(blocks, layout).astype(dtype, copy=False)
    tile = scratch((len(blocks), LAYOUTS[layout].width(blocks)), np.float32, "blocks")
    decode(blocks, layout, tile)
    return tile.astype(dtype, copy=False)


block_product.defvjp(lambda g, blocks, layout, transposed: block_product(g, blocks, layout, not transposed))
