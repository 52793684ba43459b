"""Dropout by a counter: what is kept is a hash of the seed and the place, so no mask is stored or sent to a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, array_module, cast_to
from minigrad.engine.core import primitive
from minigrad.engine.registry import sample
from minigrad.kernels.attention_tiles import kept, share_of, threshold
from minigrad.kernels.cuda.launching import THREADS, launch, pack_of, uniform


@primitive(torch=False, samples=[sample((2, 3), p=0.5, seed=1), sample((2, 2, 5), p=0.2, seed=7)])
def drop(x: Array, p: float, seed: int) -> Array:
    """Each element 0 with probability ``p``, else multiplied by 1/(1-p); which ones says ``seed``, on every device.

    >>> print(drop(np.ones(6), 0.5, 1))
    [2. 2. 0. 0. 2. 2.]
    """
    share = share_of(p)
    width = max(1, x.shape[-1] if x.ndim else 1)
    if uniform(x) and x.size:
        return _on_gpu(x, width, p, seed, share)
    rows = array_module(x).arange(x.size // width)
    mask = kept(seed, rows, slice(0, width), p).reshape(x.shape)
    return cast_to(x * (mask * accumulator(x.dtype).type(share)), x.dtype)


drop.defvjp(lambda g, p, seed: drop(g, p, seed))


def _on_gpu(x: Array, width: int, p: float, seed: int, share: float) -> Any:
    xp = array_module(x)
    x = xp.ascontiguousarray(x) if x.ndim else x
    out = xp.empty_like(x)
    pack = pack_of(width, x, out)
    grid = min(-(-x.size // (pack * THREADS)), 1 << 20)
    args = (x.size, width, np.uint64(seed % 2**64), np.uint32(threshold(p)), share)
    launch("dropout.cu", "dropout", x, pack, grid, THREADS, x, out, *args)
    return out
