"""Linear layers on a GPU: cuBLAS multiplies.

CuPy hands 2-D products to cuBLAS with transposed factors as flags, and half precision is accumulated in float32.
"""

from __future__ import annotations

from typing import Any

from minigrad.backend import Array, accumulator
from minigrad.kernels.cuda.launching import as_matrix, uniform
from minigrad.kernels.linear import check_linear, linear
from minigrad.ops._gemm import product


def _forward(x: Array, weight: Array, bias: Any) -> tuple[Array, dict[str, Any]]:
    check_linear(x, weight, bias)
    out = product(as_matrix(x), weight.T)
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], len(weight)), {}


def _backward(
    g: Array, x: Array, weight: Array, bias_dtype: Any, needs: tuple[bool, bool, bool]
) -> tuple[Any, Any, Any]:
    up = as_matrix(g)
    gx = product(up, weight).reshape(x.shape) if needs[0] else None
    gweight = product(up.T, as_matrix(x)) if needs[1] else None
    gbias = up.sum(axis=0, dtype=accumulator(up.dtype)).astype(bias_dtype) if needs[2] else None
    return gx, gweight, gbias


linear.defgpu(_forward, _backward, uniform)
