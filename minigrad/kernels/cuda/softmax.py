"""Softmax and its logarithm on a GPU. A block takes a row."""

from __future__ import annotations

from typing import Any

from minigrad.backend import Array, array_module
from minigrad.engine.fused import Fused
from minigrad.kernels.cuda.launching import Rows, uniform
from minigrad.kernels.softmax import log_softmax, softmax
from minigrad.ops.shape import normal_axis


def _along(name: str, *arrays: Array, axis: int) -> Array:
    """The result of the kernel ``name`` along ``axis``, which is the last one while it runs."""
    xp = array_module(*arrays)
    axis = normal_axis(axis, arrays[0].ndim)
    rows = Rows(*[xp.moveaxis(array, axis, -1) for array in arrays])
    out = xp.empty_like(rows.arrays[0])
    rows.launch("softmax", name, out, rows.width)
    return xp.ascontiguousarray(xp.moveaxis(out, -1, axis))


def _give_kernels(operation: Fused[Any]) -> None:
    """Those of ``softmax.cu`` that have the name of the operation."""
    operation.defgpu(
        lambda x, axis: (_along(operation.name, x, axis=axis), {}),
        lambda g, out, x_dtype, axis: (_along(f"{operation.name}_backward", g, out, axis=axis),),
        lambda x, axis: uniform(x) and x.ndim > 0,
    )


_give_kernels(softmax)
_give_kernels(log_softmax)
