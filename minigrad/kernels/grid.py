"""Where the windows of a convolution or of pooling lie, and a tile of images laid out so that windows are long copies.

Images stand last in a tile, (channels, length…, images): then neighbours in memory stay neighbours in every window,
whatever its stride, and one matrix product serves all images of the tile.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import Array
from minigrad.errors import ArgumentError, ShapeError
from minigrad.machine.parallel import even_step, scratch
from minigrad.messages.explain import describe
from minigrad.ops import spread_out

TILE_NUMBERS = 256 * 1024  # of the columns of a tile, 1 MB of float32: they stay in the cache for the product
TILE_IMAGES = 16  # at most: one more would fall out of the cache while images are laid last


class Grid(NamedTuple):
    """The windows over ``sizes``, of an array padded by ``before``: a number for each spatial axis in every field.

    Window o starts at the element ``o · stride - before`` and takes ``kernel`` elements ``dilation`` apart; there are
    ``out`` of them.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    dilation: tuple[int, ...]
    out: tuple[int, ...]

    def spans(self) -> list[int]:
        """How many elements of each axis lie between the first and the last of a window, both included."""
        return [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]

    def tiles(self, images: int, channels: int) -> tuple[int, int]:
        """How many images, and how many rows of windows, a tile has whose windows are copied."""
        numbers = max(1, channels * math.prod(self.kernel) * math.prod(self.out[1:]))
        at_once = even_step(images, max(1, min(TILE_IMAGES, TILE_NUMBERS // max(1, numbers * self.out[0]))))
        return at_once, even_step(self.out[0], TILE_NUMBERS / numbers)

    def covered(self, rows: slice) -> tuple[list[int], tuple[slice, ...], tuple[slice, ...]]:
        """What these rows of windows cover: lengths with padding, that part of (C, length…), its place in them."""
        windows = [(rows.start, rows.stop), *((0, n) for n in self.out[1:])]
        starts = [w[0] * s - p for w, s, p in zip(windows, self.stride, self.before, strict=True)]
        lengths = [(w[1] - w[0] - 1) * s + n for w, s, n in zip(windows, self.stride, self.spans(), strict=True)]
        inside = [
            (min(max(start, 0), size), min(max(start + length, 0), size))
            for start, length, size in zip(starts, lengths, self.sizes, strict=True)
        ]
        there = [slice(a - start, b - start) for (a, b), start in zip(inside, starts, strict=True)]
        return lengths, (slice(None), *(slice(*ends) for ends in inside)), (slice(None), *there)

    def windows(self, buffer: Array, rows: slice) -> Array:
        """The windows over a tile (channels, length…, images) as (channels, kernel…, windows…, images), a view."""
        channel, *steps, image = buffer.strides
        out = (rows.stop - rows.start, *self.out[1:])
        inner = [d * step for d, step in zip(self.dilation, steps, strict=True)]
        outer = [s * step for s, step in zip(self.stride, steps, strict=True)]
        shape = (buffer.shape[0], *self.kernel, *out, buffer.shape[-1])
        return np.ndarray(shape, buffer.dtype, buffer, 0, (channel, *inner, *outer, image))

    def columns(self, x: Array, images: slice, rows: slice, work: Any) -> Array:
        """The windows of a tile of x (N, C, length…) side by side: (C · kernel, windows · images)."""
        lengths, inside, there = self.covered(rows)
        part = images_last(x[images])[inside]
        buffer = scratch((x.shape[1], *lengths, part.shape[-1]), work, "convolution: padded")
        if buffer.shape != part.shape:
            buffer.fill(0)
        buffer[there] = part
        windows = self.windows(buffer, rows)
        if not windows.flags.c_contiguous:  # as those of length 1 may be
            copy = scratch(windows.shape, work, "convolution: columns")
            np.copyto(copy, windows)
            windows = copy
        split = 1 + len(self.kernel)
        return windows.reshape(math.prod(windows.shape[:split]), math.prod(windows.shape[split:]))

    def add_columns(self, columns: Array, out: Array, images: slice, rows: slice) -> None:
        """Add windows, as ``columns`` gives them, to the tile of ``out`` (N, C, length…) that they were cut from."""
        lengths, inside, there = self.covered(rows)
        target = images_last(out[images])[inside]
        buffer = scratch((out.shape[1], *lengths, target.shape[-1]), out.dtype, "convolution: padded")
        buffer.fill(0)
        windows = self.windows(buffer, rows)
        parts = columns.reshape(windows.shape)
        for place in np.ndindex(self.kernel):
            one = (slice(None), *place)
            windows[one] += parts[one]
        target += buffer[there]


def images_last(x: Array) -> Array:
    """(N, C, length…) as (C, length…, N), a view."""
    return x.transpose(*range(1, x.ndim), 0)


def make_grid(sizes: tuple[int, ...], kernel: Any, stride: Any, padding: Any, dilation: Any) -> Grid:
    """The grid of windows over ``sizes``; padding is a number, one for each axis, or pairs (before, after).

    >>> make_grid((5,), (3,), 2, 1, 1).out
    (3,)
    """
    count = len(sizes)
    kernel, stride, dilation = (
        spread_out(value, count, what)
        for value, what in ((kernel, "kernel_size"), (stride, "stride"), (dilation, "dilation"))
    )
    pads = padding_pairs(padding, count)
    lengths = [n + a + b for n, (a, b) in zip(sizes, pads, strict=True)]
    rooms = [n - d * (k - 1) - 1 for n, k, d in zip(lengths, kernel, dilation, strict=True)]
    if any(room < 0 for room in rooms):
        spans = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
        raise ShapeError(f"windows of at most {tuple(lengths)}, padding included", f"windows that span {spans}",
                         "padding= makes room for them")  # fmt: skip
    out = tuple(room // s + 1 for room, s in zip(rooms, stride, strict=True))
    return Grid(sizes, kernel, stride, tuple(a for a, _ in pads), dilation, out)


def padding_pairs(padding: Any, count: int) -> list[tuple[int, int]]:
    """(before, after) for each axis.

    >>> padding_pairs(1, 2), padding_pairs(((0, 1),), 1)
    ([(1, 1), (1, 1)], [(0, 1)])
    """
    if isinstance(padding, str):
        raise ArgumentError("padding as numbers", repr(padding), "the layers and nn.functional know 'same' and 'valid'")
    if isinstance(padding, tuple | list) and padding and all(isinstance(pair, tuple | list) for pair in padding):
        if len(padding) != count or any(len(pair) != 2 for pair in padding):
            raise ShapeError(f"{count} pairs (before, after)", describe(padding), "one pair for each axis")
        return [spread_out(pair, 2, "padding", 0) for pair in padding]  # type: ignore[misc]
    return [(n, n) for n in spread_out(padding, count, "padding", 0)]
