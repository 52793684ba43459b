"""Rules of elementwise functions that work in place, over cache-sized tiles, where plain arrays allow it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from minigrad.backend import Array
from minigrad.engine.plan import Rule
from minigrad.machine.parallel import TILE_BYTES, for_rows

TILE = 1 << 20  # bytes of an array below which tiles would cost more than they save
Body = Callable[..., object]


def in_place(body: Body) -> Callable[[Rule], Rule]:
    """Decorate a rule of ``(g, x)``: on arrays of one shape and dtype ``body(g, x, out)`` writes the gradient.

    A rule that reads more, as ``(g, x, out)`` does, hands that to the body too. Contiguous arrays are flat in the body,
    which may so be a compiled loop. Above the cache's size each array more costs as much as a pass over it. The rule
    itself is for Tensors, whose every step must be differentiable, for half
    precision, GPUs, and what else is rare.
    """

    def decorate(rule: Rule) -> Rule:
        @functools.wraps(rule)
        def choose(g: Array, x: Array, *more: Array) -> Array:
            plain = type(g) is type(x) is np.ndarray and g.dtype == x.dtype and g.shape == x.shape
            if not plain or g.dtype.char not in "fd":
                return rule(g, x, *more)
            out = np.empty_like(g)
            arrays = (g, x, *more, out)
            if (g.ndim != 1 or g.nbytes > TILE) and all(a.flags.c_contiguous for a in arrays):
                arrays = tuple([a.reshape(-1) for a in arrays])
                if g.nbytes > TILE:
                    _over_tiles(body, *arrays)
                    return out
            body(*arrays)
            return out

        return choose

    return decorate


def _over_tiles(body: Body, *arrays: Array) -> None:
    def rows(a: int, b: int) -> None:
        body(*[x[a * 1024 : b * 1024] for x in arrays])

    size, width = arrays[0].size, arrays[0].itemsize
    for_rows(rows, -(-size // 1024), 1024 * width * TILE_BYTES / TILE, 2048.0)
