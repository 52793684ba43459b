"""Dropout on a GPU."""

from __future__ import annotations

from typing import Any

from minigrad.backend import Array, array_module
from minigrad.kernels.cuda.launching import THREADS, grid_for, launch, pack_of, seed_arguments


def dropped(x: Array, width: int, seed: Any, threshold: int, share: float) -> Array:
    """x, whose rows have ``width`` elements, with 0 where the hash is below the threshold, else times ``share``."""
    xp = array_module(x)
    x = xp.ascontiguousarray(x) if x.ndim else x
    out = xp.empty_like(x)
    pack = pack_of(width, x, out)
    args = (x.size, width, *seed_arguments(seed), threshold, share)
    launch("dropout.cu", "dropout", x, pack, grid_for(x.size, pack), THREADS, x, out, *args)
    return out
