"""What the products of normalised rows share on a GPU: rows in the dtype of the product, and matrices side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from minigrad.backend import Array, accumulator, array_module, cast_to
from minigrad.kernels.cuda.launching import THREADS, Rows, as_result, fits, grid_for, launch, pack_of, uniform
from minigrad.kernels.linear_cross_entropy import half_for
from minigrad.ops._gemm import multiply_into


class ProductRows(NamedTuple):
    """The rows of x (rows, d), normalised where there is a weight, in ``dtype``; and how to send a gradient back."""

    x: Array
    weight: Array | None
    dtype: Any

    @classmethod
    def of(cls, x: Array, weight: Array | None) -> ProductRows:
        """In half precision under autocast, which leaves x and the weight of the norm in float32."""
        dtype = x.dtype if weight is None else half_for(x.dtype) or x.dtype
        return cls(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight, dtype)

    def below(self, *matrices: Array) -> Array:
        """The matrices below each other, in the dtype of the product."""
        return joined(matrices, 1, self.dtype).reshape(-1, matrices[0].shape[1])

    def forward(self, eps: float) -> tuple[Array, Array]:
        """The rows, and the inverse of the root of their mean squares, empty where they aren't normalised."""
        rows = Rows(self.x, self.weight)
        if self.weight is None:
            return cast_to(self.x, self.dtype), rows.empty(0)
        out, inverse = rows.xp.empty(self.x.shape, self.dtype), rows.empty()
        rows.launch("norms", "rms_norm_forward", out, inverse, rows.width, eps, result=self.dtype)
        return out, inverse

    def again(self, inverse: Array) -> Array:
        """The rows once more, for the backward pass."""
        if self.weight is None:
            return cast_to(self.x, self.dtype)
        rows = Rows(self.x, self.weight)
        out = rows.xp.empty(self.x.shape, self.dtype)
        rows.launch("norms", "rms_norm_again", out, inverse, rows.width, result=self.dtype)
        return out

    def backward(self, g: Array, inverse: Array, needs: tuple[bool, bool]) -> tuple[Any, Any]:
        """The gradients of x and of the norm's weight from that of the rows."""
        if self.weight is None:
            return g, None
        rows = Rows(g, self.x, self.weight, like=self.x)
        dx = rows.xp.empty(self.x.shape, self.x.dtype) if needs[0] else None
        shares = rows.shares() if needs[1] else None
        args = (inverse, dx, shares, rows.rows, rows.width)
        rows.launch("norms", "rms_norm_backward", *args, shared=True, result=self.dtype)
        return dx, rows.summed(shares, self.weight)


def weight_gradient(weight: Array, g: Array, rows: Array) -> Array:
    """``gᵀ rows`` in the dtype of the weight, summed in float32 at least."""
    out = array_module(g).empty(weight.shape, accumulator(g.dtype))
    return multiply_into(out, g.T, rows).astype(weight.dtype, copy=False)


def takes(x: Any, matrices: Sequence[Any], weight: Any) -> bool:
    """Whether the kernels take x, the matrices and the norm's weight: of one dtype, on the GPU, no row too wide."""
    return bool(uniform(x, *matrices, weight) and x.size and (weight is None or fits(x, x.shape[-1:])))


def joined(arrays: Sequence[Array], rows: int, dtype: Any) -> Array:
    """Up to three arrays of ``rows`` rows, side by side in ``dtype``."""
    flat = [array.reshape(rows, -1) for array in arrays]
    widths = [array.shape[1] for array in flat]
    out = array_module(*flat).empty((rows, sum(widths)), dtype)
    flat = [a if a.strides[1] == a.itemsize else array_module(a).ascontiguousarray(a) for a in flat]
    steps = [array.strides[0] // array.itemsize for array in flat]
    pack = pack_of(math.gcd(*widths, *steps), *flat, out)
    none = 3 - len(flat)
    args = (*flat, *[None] * none, *[*widths, 0][:2], sum(widths), *steps, *[0] * none, out, out.size)
    defines = as_result(dtype, flat[0].dtype)
    launch("joined_rows.cu", "join", flat[0], pack, grid_for(out.size, pack), THREADS, *args, **defines)
    return out
