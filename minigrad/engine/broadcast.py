"""How the gradient of a broadcast argument gets the argument's shape back."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import is_array, is_half


def unbroadcast(g: Any, shape: tuple[int, ...]) -> Any:
    """Sum ``g`` over the axes along which an argument of ``shape`` was repeated; half precision sums in float32.

    >>> unbroadcast(np.ones((2, 3)), (3,))
    array([2., 2., 2.])
    """
    lead = g.ndim - len(shape)
    axes = (*range(lead), *(i + lead for i, n in enumerate(shape) if n == 1 and g.shape[i + lead] != 1))
    if is_array(g) and is_half(g.dtype):
        return g.sum(axis=axes, dtype=np.float32).astype(g.dtype).reshape(shape)
    return g.sum(axis=axes).reshape(shape)
