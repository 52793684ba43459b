"""Dropout by a counter: a hash of seed and place decides what stays, so no mask is stored or sent to a GPU."""

from __future__ import annotations

import numpy as np

from minigrad.backend import Array, Seed, accumulator, array_module, cast_to
from minigrad.engine.core import primitive
from minigrad.engine.registry import sample
from minigrad.kernels.attention_tiles import drop_rows, dropout_mask, dropout_scale, threshold
from minigrad.kernels.cuda.dropout import dropped
from minigrad.kernels.cuda.launching import uniform
from minigrad.kernels.rows import over_rows


@primitive(linear="jointly", torch=False, samples=[sample((2, 3), p=0.5, seed=1), sample((2, 2, 5), p=0.2, seed=7)])
def drop(x: Array, p: float, seed: Seed) -> Array:
    """Each element 0 with probability ``p``, else multiplied by 1/(1-p). ``seed`` says which, on every device.

    >>> print(drop(np.ones(6), 0.5, 1))
    [2. 2. 0. 0. 2. 2.]
    """
    share = dropout_scale(p)
    width = max(1, x.shape[-1] if x.ndim else 1)
    if uniform(x) and x.size:
        return dropped(x, width, seed, threshold(p), share)
    rows, work = array_module(x).arange(x.size // width), accumulator(x.dtype)
    if array_module(x) is not np:
        mask = dropout_mask(seed, rows, slice(0, width), p).reshape(x.shape)
        return cast_to(x * (mask * work.type(share)), x.dtype)
    matrix, out = np.ascontiguousarray(x, work).reshape(-1, width), np.empty(x.shape, work)
    result = out.reshape(-1, width)
    over_rows(lambda a, b: drop_rows(matrix[a:b], seed, rows[a:b], slice(0, width), p, result[a:b]), matrix, 4, 1.5)
    return cast_to(out, x.dtype)


drop.defvjp(lambda g, p, seed: drop(g, p, seed))
