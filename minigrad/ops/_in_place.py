"""Rules of elementwise functions that work in place, over cache-sized tiles, where plain arrays allow it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from minigrad.backend import Array
from minigrad.engine.plan import Rule
from minigrad.machine.parallel import for_rows

ONE_TILE = 32768  # numbers below which tiles would cost more than they save
Body = Callable[[Array, Array, Array], object]


def in_place(body: Body) -> Callable[[Rule], Rule]:
    """Decorate a rule of ``(g, x)``: on arrays of one shape and dtype ``body(g, x, out)`` writes the gradient.

    Above the cache's size each array more costs as much as a pass over it. The rule itself is for Tensors, whose every
    step must be differentiable, for half precision, GPUs, and what else is rare.
    """

    def decorate(rule: Rule) -> Rule:
        @functools.wraps(rule)
        def choose(g: Array, x: Array) -> Array:
            plain = type(g) is type(x) is np.ndarray and g.shape == x.shape and g.dtype == x.dtype
            if not (plain and g.dtype.char in "fd" and g.flags.c_contiguous and x.flags.c_contiguous):
                return rule(g, x)
            out = np.empty_like(g)
            if g.size <= ONE_TILE:
                body(g, x, out)
            else:
                _over_tiles(body, g.reshape(-1), x.reshape(-1), out.reshape(-1))
            return out

        return choose

    return decorate


def _over_tiles(body: Body, g: Array, x: Array, out: Array) -> None:
    def rows(a: int, b: int) -> None:
        tile = slice(a * 1024, b * 1024)
        body(g[tile], x[tile], out[tile])

    for_rows(rows, -(-g.size // 1024), 1024 * g.itemsize, 2048.0)
