"""Pooling over any number of axes: the largest element of each window, or their mean.

The kernels walk over the places of a window, a few, and look at that place of all windows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, array_module, array_of, cast_to, is_floating
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.kernels.grid import Grid, make_grid
from minigrad.machine.parallel import for_rows, scratch
from minigrad.messages.explain import describe
from minigrad.ops import argmax, pad, reshape, sliding_window_view, spread_out, sum, take_along_axis

NS = 2.0  # of an element at one place of a window

# ---- the grid -------------------------------------------------------------------------------------------------------


class Pooled(Grid):
    """A grid of windows that cover the last ``kernel`` axes of (…, length…)."""

    def after(self) -> list[int]:
        """How much padding the last window needs behind each axis; less than none, if it ends earlier."""
        fields = zip(self.sizes, self.out, self.stride, self.spans(), self.before, strict=True)
        return [(o - 1) * s + span - n - p for n, o, s, span, p in fields]

    def parts(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """For each place in a window: the elements of (rows, length…) there, and the windows that have one there."""
        for place in np.ndindex(self.kernel):
            inside: list[Any] = [slice(None)]
            windows: list[Any] = [slice(None)]
            for k, d, s, p, n, o in zip(
                place, self.dilation, self.stride, self.before, self.sizes, self.out, strict=True
            ):
                first = max(0, -((k * d - p) // s))  # window o is at element o·s + k·d - p
                last = min(o - 1, (n - 1 - k * d + p) // s)
                start = first * s + k * d - p
                stop = max(start, start + (last - first) * s + 1) if last >= first else start
                inside.append(slice(start, stop, s))
                windows.append(slice(first, max(first, last + 1)))
            yield tuple(inside), tuple(windows)


def _grid(x: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any, count: int) -> Pooled:
    if not count or np.ndim(x) <= count:
        raise ShapeError(f"an x with more axes than the window's {count}", f"shape {np.shape(x)}",
                         "axes of channels come before those of the window")  # fmt: skip
    kernel = spread_out(kernel_size, count, "kernel_size")
    pads = spread_out(padding, count, "padding", 0)
    if any(2 * p > k for p, k in zip(pads, kernel, strict=True)):
        raise ArgumentError("padding of at most half of the window", f"padding={padding}, kernel_size={kernel_size}",
                            "else a window would see padding alone")  # fmt: skip
    steps = spread_out(kernel if stride is None else stride, count, "stride")
    sizes = x.shape[-count:]
    room = [s - 1 if ceil_mode and n else 0 for n, s in zip(sizes, steps, strict=True)]  # for windows that end later
    grid = make_grid(sizes, kernel, steps, tuple((p, p + r) for p, r in zip(pads, room, strict=True)), dilation)
    begun = [-(-(n + p) // s) for n, p, s in zip(grid.sizes, pads, steps, strict=True)]  # windows in array or padding
    return Pooled(*grid._replace(out=tuple(map(min, grid.out, begun))) if ceil_mode else grid)


def _windows(x: Any, grid: Pooled, fill: Any) -> Any:
    """The windows of x, whose padding is ``fill``, with their places flat on a last axis."""
    count = len(grid.kernel)
    lead = x.ndim - count
    inside = (..., *(slice(n + min(0, after)) for n, after in zip(grid.sizes, grid.after(), strict=True)))
    widths = [*[[0, 0]] * lead, *([p, max(0, after)] for p, after in zip(grid.before, grid.after(), strict=True))]
    padded = pad(x[inside], widths, constant_values=fill)
    windows = sliding_window_view(padded, grid.kernel, tuple(range(lead, x.ndim)), grid.stride, grid.dilation)
    return reshape(windows, (*windows.shape[: x.ndim], math.prod(grid.kernel)))


def _axes(kernel_size: Any) -> int:
    return len(kernel_size) if isinstance(kernel_size, tuple | list) else 0


def _planes(x: Array, grid: Pooled) -> Array:
    """x as (rows, length…)."""
    return x.reshape(math.prod(x.shape[: x.ndim - len(grid.sizes)]), *grid.sizes)


# ---- the largest ----------------------------------------------------------------------------------------------------


def _torch_max(t: Any, x: Any, kernel_size: Any, *rest: Any, **named: Any) -> Any:
    return getattr(t.nn.functional, f"max_pool{len(kernel_size)}d")(x, kernel_size, *rest, **named)


_samples = [
    sample((2, 3, 7), kernel_size=[3], stride=2, padding=1),
    sample((2, 1, 4, 5), kernel_size=[2, 2]),
    sample((1, 2, 6, 7), kernel_size=[3, 2], stride=[2, 1], padding=[1, 0], dilation=[1, 2]),
    sample((2, 5, 6), kernel_size=[2, 3], stride=[2, 4], ceil_mode=True),
]


@fused(torch=_torch_max, numpy=False, samples=_samples)
def max_pool(
    x: Array, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Array:
    """The largest element of each window over the last axes of x, NaN where a window has one.

    x is (…, length…), kernel_size a list with the length of the window along each of the last axes, stride is the
    kernel_size by default. Padding counts for nothing. With ceil_mode a last window may end behind the padding. Of
    equal elements the first takes the whole gradient, as in torch.

    >>> print(max_pool(np.array([[3.0, 1.0, 2.0, 4.0]]), [2]))
    [[3. 4.]]
    """
    grid = _grid(x, kernel_size, stride, padding, dilation, ceil_mode, _axes(kernel_size))
    windows = _windows(x, grid, _lowest(x))
    places = array_of(argmax(windows, -1))[..., None]
    return reshape(take_along_axis(windows, places, -1), windows.shape[:-1])


def _lowest(x: Any) -> Any:
    """What no element is below; padding is never the first of a window's largest, but where all are this."""
    return -math.inf if is_floating(x.dtype) else np.iinfo(x.dtype).min if x.dtype.kind in "iu" else False


@max_pool.defforward
def _forward_max(
    x: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any
) -> tuple[Array, dict[str, Any]]:
    grid = _grid(x, kernel_size, stride, padding, dilation, ceil_mode, _axes(kernel_size))
    rows = _planes(x, grid)
    out = np.full((len(rows), *grid.out), _lowest(x), x.dtype)
    parts = list(grid.parts())

    def body(a: int, b: int) -> None:
        for inside, windows in parts:
            target = out[a:b][windows]
            np.maximum(target, rows[a:b][inside], out=target)

    _over_rows(body, rows, grid)
    return out.reshape(*x.shape[: x.ndim - len(grid.sizes)], *grid.out), {}


@max_pool.defbackward("x")
def _backward_max(
    g: Any, x: Any, out: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any
) -> tuple[Array]:
    """g goes to the first place that holds the window's largest. Its bits are kept or cleared: 0 · ∞ would be NaN."""
    grid = _grid(x, kernel_size, stride, padding, dilation, ceil_mode, _axes(kernel_size))
    rows, largest = _planes(x, grid), np.reshape(out, (-1, *grid.out))
    if np.isnan(np.sum(largest)):  # a NaN is the largest, but equal to nothing
        rows, largest = (np.where(np.isnan(a), np.inf, a).astype(a.dtype) for a in (rows, largest))
    bits = f"i{x.dtype.itemsize}" if x.dtype.itemsize <= 8 else None
    up = np.ascontiguousarray(g, x.dtype).reshape(largest.shape)
    up = up.view(bits) if bits else up
    gx = np.zeros(rows.shape, accumulator(x.dtype))
    parts = list(grid.parts())

    def body(a: int, b: int) -> None:
        left = scratch(largest[a:b].shape, np.dtype(bool), "pooling: left")
        left.fill(True)
        for inside, windows in parts:
            hit = rows[a:b][inside] == largest[a:b][windows]
            hit &= left[windows]
            left[windows] ^= hit
            if bits is None:  # no integer has as many bits
                gx[a:b][inside] += np.where(hit, up[a:b][windows], x.dtype.type(0))
                continue
            share = np.negative(hit, dtype=bits) if bits == "i1" else np.multiply(hit, -1, dtype=bits)
            share &= up[a:b][windows]
            gx[a:b][inside] += share.view(x.dtype)

    _over_rows(body, rows, grid)
    return (cast_to(gx.reshape(x.shape), x.dtype),)


def _over_rows(body: Any, rows: Array, grid: Grid) -> None:
    """Run ``body(start, stop)`` on tiles of rows, which are read once for each place of a window."""
    numbers = math.prod(grid.sizes) + 2 * math.prod(grid.out)
    for_rows(body, len(rows), numbers * rows.itemsize, NS * math.prod(grid.out) * math.prod(grid.kernel))


# ---- the mean -------------------------------------------------------------------------------------------------------


def _torch_mean(t: Any, x: Any, kernel_size: Any, *rest: Any, **named: Any) -> Any:
    return getattr(t.nn.functional, f"avg_pool{len(kernel_size)}d")(x, kernel_size, *rest, **named)


_samples = [
    sample((2, 3, 7), kernel_size=[3], stride=2, padding=1),
    sample((2, 1, 4, 5), kernel_size=[2, 2]),
    sample((1, 2, 6, 7), kernel_size=[3, 2], stride=[2, 1], padding=[1, 0], count_include_pad=False),
    sample((2, 5, 6), kernel_size=[2, 3], stride=[2, 4], padding=[1, 1], ceil_mode=True),
]


@fused(precision="wide", torch=_torch_mean, numpy=False, samples=_samples)
def avg_pool(
    x: Array,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Array:
    """The mean of each window over the last axes of x; what a window counts beyond ``padding`` never counts.

    x is (…, length…), kernel_size a list with the length of the window along each of the last axes, stride is the
    kernel_size by default. Padding is of zeros; ``count_include_pad=False`` divides by the number of elements of x in
    the window. With ceil_mode a last window may end behind the padding. Half precision is summed in float32.

    >>> print(avg_pool(np.array([[3.0, 1.0, 2.0, 4.0]]), [2]))
    [[2. 3.]]
    """
    grid = _mean_grid(x, kernel_size, stride, padding, ceil_mode)
    xp, wide = array_module(array_of(x)), accumulator(x.dtype)
    shares = xp.asarray(_shares(grid, count_include_pad).astype(wide))
    total = sum(_windows(x.astype(wide), grid, 0), -1)
    return (total * shares).astype(x.dtype)


def _mean_grid(x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: Any) -> Pooled:
    if not is_floating(x.dtype):
        raise DTypeError("floating-point numbers to take means of", describe(x), "astype('float32') first")
    return _grid(x, kernel_size, stride, padding, 1, ceil_mode, _axes(kernel_size))


def _shares(grid: Pooled, count_include_pad: bool) -> Array:
    """1 over how many elements each window counts, in float64."""
    counts: Array = np.ones(())
    for n, k, s, p, o in zip(grid.sizes, grid.kernel, grid.stride, grid.before, grid.out, strict=True):
        starts = np.arange(o) * s - p
        first, last = (-p, n + p) if count_include_pad else (0, n)
        counts = np.multiply.outer(counts, np.minimum(starts + k, last) - np.maximum(starts, first))
    return 1 / counts


@avg_pool.defforward
def _forward_mean(
    x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: Any, count_include_pad: Any
) -> tuple[Array, dict[str, Any]]:
    grid = _mean_grid(x, kernel_size, stride, padding, ceil_mode)
    rows, wide = _planes(x, grid), accumulator(x.dtype)
    out = np.zeros((len(rows), *grid.out), wide)
    shares, parts = _shares(grid, count_include_pad).astype(wide), list(grid.parts())

    def body(a: int, b: int) -> None:
        for inside, windows in parts:
            out[a:b][windows] += rows[a:b][inside]
        out[a:b] *= shares

    _over_rows(body, rows, grid)
    return cast_to(out.reshape(*x.shape[: x.ndim - len(grid.sizes)], *grid.out), x.dtype), {}


@avg_pool.defbackward("x")
def _backward_mean(
    g: Any, x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: Any, count_include_pad: Any
) -> tuple[Array]:
    grid = _mean_grid(x, kernel_size, stride, padding, ceil_mode)
    wide = accumulator(x.dtype)
    up, gx = np.reshape(g, (-1, *grid.out)), np.zeros(_planes(x, grid).shape, wide)
    shares, parts = _shares(grid, count_include_pad).astype(wide), list(grid.parts())

    def body(a: int, b: int) -> None:
        share = up[a:b] * shares
        for inside, windows in parts:
            gx[a:b][inside] += share[windows]

    _over_rows(body, gx, grid)
    return (cast_to(gx.reshape(x.shape), x.dtype),)
