"""Adding rows of one array into places of another that may repeat: the gradient of a look-up."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import HALF, Array, array_module


def add_rows(shape: tuple[int, ...], dtype: Any, ids: Array, g: Array) -> Array:
    """Zeros of ``shape`` to whose rows ``ids`` (of any shape, negative counted from the end) the rows of ``g`` are added."""
    xp = array_module(g)
    wide = xp.zeros(shape, np.float32 if np.dtype(dtype).name in HALF else dtype)
    xp.add.at(wide, ids, g)
    return wide.astype(dtype, copy=False)
