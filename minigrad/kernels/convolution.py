"""Convolutions over any number of axes: windows copied side by side, one matrix product for a tile of images.

The gradient of the input adds the windows back, which is what a transposed convolution does. The gradient of the weight
is a product with the same windows, copied again: nothing wide is kept.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from minigrad.backend import Array, cast_to
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.errors import ArgumentError, ShapeError
from minigrad.kernels.grid import Grid, images_last, make_grid, padding_pairs
from minigrad.kernels.products import MOST_PIECES, NS_PER_FLOP, add_product
from minigrad.kernels.rows import dtypes
from minigrad.machine.parallel import blas_threads, even_step, run, scratch
from minigrad.ops import (
    add_windows,
    matmul,
    pad,
    reshape,
    sliding_window_view,
    spread_out,
    swapaxes,
    transpose,
)

SHARES = 16 * 1024 * 1024  # numbers in all that threads hold of the weight's gradient before they are added up

# ---- convolution ----------------------------------------------------------------------------------------------------


def _torch(
    t: Any, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, *rest: Any, **named: Any
) -> Any:
    functions = t.nn.functional
    if isinstance(padding, tuple) and isinstance(padding[0], tuple):
        x = functions.pad(x, [n for pair in reversed(padding) for n in pair])
        padding = 0
    return getattr(functions, f"conv{x.ndim - 2}d")(x, weight, bias, stride, padding, *rest, **named)


_samples = [
    sample((2, 2, 5), (3, 2, 3), (3,), padding=1),
    sample((2, 4, 7), (2, 2, 2), None, stride=2, padding=((0, 1),), dilation=2, groups=2),
    sample((2, 2, 4, 5), (3, 2, 2, 3), (3,)),
    sample((2, 2, 5, 4), (4, 1, 3, 2), (4,), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
    sample((1, 1, 3, 3, 3), (2, 1, 2, 2, 2)),
]


def _flops(windows: int, weight: Array, bias: Any, out: Array, wrt: frozenset[str]) -> tuple[float, float]:
    """A product of each window with the weight; one more for each gradient. A bias is an addition for each result."""
    n, added = 2 * windows * math.prod(weight.shape[1:]), 0 if bias is None else out.size
    return n + added, n * len(wrt & {"x", "weight"}) + added * ("bias" in wrt)


def _flops_forward(x: Array, weight: Array, bias: Any, out: Array, wrt: frozenset[str]) -> tuple[float, float]:
    return _flops(out.size, weight, bias, out, wrt)


@fused(precision="low", torch=_torch, numpy=False, samples=_samples, flops=_flops_forward)
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Array:
    """Sum of each window of x, multiplied by each kernel of the weight, as deep learning calls a cross-correlation.

    x is (N, C, length…), the weight (O, C / groups, kernel…), the bias (O,) or None; the result is (N, O, windows…),
    with ``(length + padding - dilation · (kernel - 1) - 1) // stride + 1`` windows along each axis. One number stands
    for all axes; padding may be pairs (before, after). With groups, each O / groups of the results see C / groups of
    the channels alone. Half precision is multiplied in float32 and rounded once.

    >>> print(convolution(np.arange(5.0).reshape(1, 1, 5), np.array([[[1.0, 0.0, -1.0]]])))
    [[[-2. -2. -2.]]]
    """
    grid = _grid(x, weight, bias, stride, padding, dilation, groups)
    axes = tuple(range(2, x.ndim))
    widths = [(0, 0), (0, 0), *padding_pairs(padding, len(axes))]
    padded = pad(x, widths) if any(map(any, widths)) else x
    windows = sliding_window_view(padded, grid.kernel, axes, grid.stride, grid.dilation)
    kernels_first = transpose(windows, (0, 1, *(len(axes) + a for a in axes), *axes))
    columns = reshape(kernels_first, (len(x), groups, math.prod(weight.shape[1:]), math.prod(grid.out)))
    products = matmul(reshape(weight, _grouped(weight, groups)), columns)
    return _with_bias(reshape(products, (len(x), len(weight), *grid.out)), bias)


def _with_bias(y: Any, bias: Any) -> Any:
    return y if bias is None else y + reshape(bias, (-1, *[1] * (y.ndim - 2)))


def _grouped(weight: Any, groups: int) -> tuple[int, int, int]:
    """The shape of a weight as a matrix for each group."""
    return groups, weight.shape[0] // groups, math.prod(weight.shape[1:])


def _grid(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Grid:
    _check(x, weight, bias, groups, "O", "C")
    return make_grid(x.shape[2:], weight.shape[2:], stride, padding, dilation)


def _check(x: Any, weight: Any, bias: Any, groups: int, first: str, second: str) -> None:
    """Refuse shapes that don't fit; the weight is (first, second / groups, …): O and C, or of the transpose C and O."""
    wanted = f"x (N, C, length…) and weight ({first}, {second} / groups, kernel…)"
    if np.ndim(x) < 3 or np.ndim(weight) != np.ndim(x):
        raise ShapeError(wanted, f"{np.shape(x)} and {np.shape(weight)}", "x[None] makes a batch of one")
    if groups < 1:
        raise ArgumentError("groups, a whole number from 1", str(groups), "1 lets every result see every channel")
    lengths = {first: len(weight), second: weight.shape[1] * groups}
    if x.shape[1] != lengths["C"] or len(weight) % groups:
        got, hint = f"{x.shape} and {weight.shape}, groups={groups}", "the second axis of x counts channels"
        raise ShapeError(f"{wanted}, groups dividing {first}", got, hint)
    if bias is not None and np.shape(bias) != (lengths["O"],):
        hint = "one number for each output channel"
        raise ShapeError(f"a bias of shape ({lengths['O']},)", f"{np.shape(bias)}", hint)


@convolution.defforward
def _forward(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[Array, dict[str, Any]]:
    grid = _grid(x, weight, bias, stride, padding, dilation, groups)
    dtype, work = dtypes(x, weight, bias)
    return cast_to(_correlate(x, weight, bias, grid, groups, work), dtype), {}


@convolution.defbackward("x", "weight", "bias")
def _backward(
    g: Any,
    x: Any,
    weight: Any,
    bias_dtype: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    needs: tuple[bool, bool, bool],
) -> tuple[Any, Any, Any]:
    grid = _grid(x, weight, None, stride, padding, dilation, groups)
    work = dtypes(g, x, weight)[1]
    gx = _input_gradient(g, weight, grid, groups, work) if needs[0] else None
    gweight = _weight_gradient(g, x, weight, grid, groups, work) if needs[1] else None
    gbias = cast_to(_channel_sums(g, work), bias_dtype) if needs[2] else None
    return _cast(gx, x), _cast(gweight, weight), gbias


def _cast(gradient: Array | None, like: Any) -> Array | None:
    return None if gradient is None else cast_to(gradient, like.dtype)


def _channel_sums(g: Array, work: Any) -> Array:
    return np.sum(g, axis=(0, *range(2, g.ndim)), dtype=work)


# ---- its transpose --------------------------------------------------------------------------------------------------


def _torch_transposed(t: Any, x: Any, *rest: Any, **named: Any) -> Any:
    return getattr(t.nn.functional, f"conv_transpose{x.ndim - 2}d")(x, *rest, **named)


_samples = [
    sample((2, 2, 3), (2, 3, 3), (3,), padding=1),
    sample((2, 4, 3), (4, 1, 2), None, stride=3, output_padding=1, groups=2, dilation=2),
    sample((2, 2, 2, 3), (2, 3, 2, 3), (3,), stride=2),
    sample((1, 2, 3, 2), (2, 1, 3, 2), (2,), stride=(2, 1), padding=(2, 1), groups=2, dilation=(1, 3),
           output_padding=(0, 2)),
]  # fmt: skip


def _flops_transposed(x: Array, weight: Array, bias: Any, out: Array, wrt: frozenset[str]) -> tuple[float, float]:
    return _flops(x.size, weight, bias, out, wrt)


@fused(precision="low", torch=_torch_transposed, numpy=False, samples=_samples, flops=_flops_transposed)
def transposed_convolution(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Array:
    """Each element of x, times the kernels of its channel, added up where their windows overlap.

    It is the linear map whose matrix is that of a :func:`convolution` transposed. x is (N, C, length…), the weight
    (C, O / groups, kernel…), the bias (O,) or None; the result is (N, O, …) of lengths
    ``(length - 1) · stride - 2 · padding + dilation · (kernel - 1) + output_padding + 1``.

    >>> print(transposed_convolution(np.array([[[1.0, 10.0]]]), np.array([[[1.0, 2.0]]]), stride=2))
    [[[ 1.  2. 10. 20.]]]
    """
    grid = _transposed_grid(x, weight, bias, stride, padding, output_padding, groups, dilation)
    (n, channels), count = x.shape[:2], x.ndim - 2
    axes = tuple(range(2, x.ndim))
    rows = reshape(x, (n, groups, channels // groups, math.prod(grid.out)))
    products = matmul(swapaxes(reshape(weight, _grouped(weight, groups)), 1, 2), rows)
    windows = reshape(products, (n, weight.shape[1] * groups, *grid.kernel, *grid.out))
    kernels_last = transpose(windows, (0, 1, *(a + count for a in axes), *axes))
    padded = (n, weight.shape[1] * groups, *(s + 2 * p for s, p in zip(grid.sizes, grid.before, strict=True)))
    y = add_windows(kernels_last, padded, axes, grid.stride, grid.dilation)
    inside = (..., *(slice(p, p + s) for s, p in zip(grid.sizes, grid.before, strict=True)))
    return _with_bias(y[inside], bias)


def _transposed_grid(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, output_padding: Any, groups: int, dilation: Any
) -> Grid:
    """The grid of the convolution that leads from the result to x."""
    _check(x, weight, bias, groups, "C", "O")
    count, kernel = x.ndim - 2, weight.shape[2:]
    steps, gaps = spread_out(stride, count, "stride"), spread_out(dilation, count, "dilation")
    pads, more = spread_out(padding, count, "padding", 0), spread_out(output_padding, count, "output_padding", 0)
    if any(extra >= max(s, d) for extra, s, d in zip(more, steps, gaps, strict=True)):
        got = f"output_padding={output_padding}, stride={stride}, dilation={dilation}"
        raise ArgumentError("output_padding below the stride or the dilation", got, "it chooses among few lengths")
    spans = zip(x.shape[2:], kernel, steps, pads, more, gaps, strict=True)
    sizes = tuple((n - 1) * s - 2 * p + d * (k - 1) + extra + 1 for n, k, s, p, extra, d in spans)
    if any(n < 1 for n in sizes):
        raise ShapeError("a result with elements", f"lengths {sizes}", "less padding cuts less off")
    return Grid(sizes, kernel, steps, pads, gaps, x.shape[2:])


@transposed_convolution.defforward
def _forward_transposed(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, output_padding: Any, groups: int, dilation: Any
) -> tuple[Array, dict[str, Any]]:
    grid = _transposed_grid(x, weight, bias, stride, padding, output_padding, groups, dilation)
    dtype, work = dtypes(x, weight, bias)
    out = _input_gradient(x, weight, grid, groups, work)
    if bias is not None:
        out += np.asarray(bias, work).reshape(-1, *[1] * (x.ndim - 2))
    return cast_to(out, dtype), {}


@transposed_convolution.defbackward("x", "weight", "bias")
def _backward_transposed(
    g: Any,
    x: Any,
    weight: Any,
    bias_dtype: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
    needs: tuple[bool, bool, bool],
) -> tuple[Any, Any, Any]:
    grid = _transposed_grid(x, weight, None, stride, padding, output_padding, groups, dilation)
    work = dtypes(g, x, weight)[1]
    gx = _correlate(g, weight, None, grid, groups, work) if needs[0] else None
    gweight = _weight_gradient(x, g, weight, grid, groups, work) if needs[1] else None
    gbias = cast_to(_channel_sums(g, work), bias_dtype) if needs[2] else None
    return _cast(gx, x), _cast(gweight, weight), gbias


# ---- the work, on tiles of images -----------------------------------------------------------------------------------


def _correlate(x: Array, weight: Array, bias: Array | None, grid: Grid, groups: int, work: Any) -> Array:
    """The convolution: for each tile ``weight @ columns``."""
    out = np.empty((len(x), len(weight), *grid.out), work)
    matrices: Array = np.ascontiguousarray(weight, work).reshape(_grouped(weight, groups))
    offset = None if bias is None else np.asarray(bias, work).reshape(-1, *[1] * (x.ndim - 1))
    at_once, rows_at_once = grid.tiles(len(x), x.shape[1])

    def body(image: int, row: int) -> None:
        images, rows = slice(image, image + at_once), slice(row, min(row + rows_at_once, grid.out[0]))
        columns = grid.columns(x, images, rows, work)
        columns = columns.reshape(groups, matrices.shape[2], columns.shape[1])
        y = scratch((*matrices.shape[:2], columns.shape[2]), work, "convolution: result")
        np.matmul(matrices, columns, out=y)
        target = images_last(out[images, :, rows])
        np.copyto(target, y.reshape(target.shape))
        if offset is not None:
            target += offset

    tiles = [(n, r) for n in range(0, len(x), at_once) for r in range(0, grid.out[0], rows_at_once)]
    _over([partial(body, *tile) for tile in tiles], 2 * out.size * matrices.shape[2])
    return out


def _input_gradient(g: Array, weight: Array, grid: Grid, groups: int, work: Any) -> Array:
    """The transpose of :func:`_correlate`: for each tile ``weightᵀ @ g``, added up where the windows overlap.

    Without strides it is a correlation itself, with the kernels turned around: copies of windows take a third of the
    time of sums.
    """
    if set(grid.stride) == {1}:
        kernels = np.reshape(weight, (groups, len(weight) // groups, *weight.shape[1:])).swapaxes(1, 2)
        turned = np.flip(kernels, tuple(range(3, kernels.ndim))).reshape(-1, len(weight) // groups, *grid.kernel)
        before = tuple(n - 1 - p for n, p in zip(grid.spans(), grid.before, strict=True))
        return _correlate(g, turned, None, grid._replace(sizes=grid.out, before=before, out=grid.sizes), groups, work)
    matrices: Array = np.ascontiguousarray(weight, work).reshape(_grouped(weight, groups)).swapaxes(1, 2)
    gx = np.zeros((len(g), weight.shape[1] * groups, *grid.sizes), work)
    at_once, rows_at_once = grid.tiles(len(g), gx.shape[1])

    def body(image: int) -> None:
        images = slice(image, image + at_once)
        for row in range(0, grid.out[0], rows_at_once):
            rows = slice(row, min(row + rows_at_once, grid.out[0]))
            up = _as_columns(g[images, :, rows], groups, work)
            spread = scratch((*matrices.shape[:2], up.shape[2]), work, "convolution: columns")
            grid.add_columns(np.matmul(matrices, up, out=spread), gx, images, rows)

    _over([partial(body, image) for image in range(0, len(g), at_once)], 2 * g.size * matrices.shape[1])
    return gx


def _weight_gradient(g: Array, x: Array, weight: Array, grid: Grid, groups: int, work: Any) -> Array:
    """Of each tile ``columns @ gᵀ``, which is half as fast the other way around, added up in pieces of the batch."""
    _, results, numbers = _grouped(weight, groups)
    at_once, rows_at_once = grid.tiles(len(g), x.shape[1])
    tiles = -(-len(g) // at_once)
    piece = at_once * even_step(tiles, tiles / max(1, min(MOST_PIECES, SHARES // max(1, weight.size))))
    shares = np.zeros((-(-len(g) // piece), groups, numbers, results), work)

    def body(first: int) -> None:
        fresh = True
        for image in range(first, min(first + piece, len(g)), at_once):
            images = slice(image, min(image + at_once, first + piece))
            for row in range(0, grid.out[0], rows_at_once):
                rows = slice(row, min(row + rows_at_once, grid.out[0]))
                up = _as_columns(g[images, :, rows], groups, work)
                columns = grid.columns(x, images, rows, work).reshape(groups, numbers, up.shape[2])
                add_product(shares[first // piece], columns, up.swapaxes(1, 2), fresh)
                fresh = False

    _over([partial(body, first) for first in range(0, len(g), piece)], 2 * g.size * numbers)
    return np.add.reduce(shares).swapaxes(1, 2).reshape(weight.shape)


def _as_columns(g: Array, groups: int, work: Any) -> Array:
    """A tile of gradients (n, O, windows…) as (groups, O / groups, windows · n)."""
    source = images_last(g)
    up = scratch(source.shape, work, "convolution: gradient")
    np.copyto(up, source, casting="unsafe")
    return up.reshape(groups, len(source) // groups, math.prod(source.shape[1:]))


def _over(tasks: list[Any], flops: float) -> None:
    """Run the tasks, which multiply on one thread of BLAS each."""
    with blas_threads(1):
        run(tasks, flops * NS_PER_FLOP)
