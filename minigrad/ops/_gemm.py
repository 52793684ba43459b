"""Batched products of matrices on a GPU: cuBLAS reads transposed, sliced and broadcast operands without a copy.

``cupy.matmul`` copies such operands first, multiplies half precision in float32, and ignores TF32. The function of
cuBLAS is no public part of CuPy. So a test pins its arguments; if they differ, ``cupy.matmul`` does the work.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minigrad import captures
from minigrad.backend import Array, array_module, check_bfloat16, is_bfloat16
from minigrad.cuda import tf32_allowed

ARGUMENTS = (
    "handle transa transb m n k alpha A Atype lda strideA B Btype ldb strideB beta C Ctype ldc strideC "
    "batchCount computeType algo"
)
FLOAT, TF32, DOUBLE = 68, 77, 70  # cublasComputeType_t
DEFAULT = -1  # cublasGemmAlgo_t
CALLS = 8  # of cuBLAS for one product: more of them cost more than copies of the operands
SCALARS = [np.array([1, 0], dtype) for dtype in ("float32", "float64")]  # alpha and beta


class Kind(NamedTuple):
    """A dtype for cuBLAS: its cudaDataType_t, the type of its sums, and the addresses of a 1 and a 0 of that type."""

    data: int
    compute: int
    one: int
    zero: int


@functools.cache
def _kind(dtype: Any) -> Kind | None:
    """The kind of a dtype, None for one that cuBLAS doesn't multiply."""
    numbers: dict[Any, int] = {np.dtype(np.float32): 0, np.dtype(np.float64): 1, np.dtype(np.float16): 2}
    data = 14 if is_bfloat16(dtype) else numbers.get(dtype)
    if data is None:
        return None
    one = SCALARS[data == 1]
    return Kind(data, DOUBLE if data == 1 else FLOAT, one.ctypes.data, one.ctypes.data + one.itemsize)


@functools.cache
def _function(cupy: Any) -> Callable[..., None] | None:
    """``gemmStridedBatchedEx`` of CuPy, None where it isn't there or takes other arguments."""
    try:
        function = cupy.cuda.cublas.gemmStridedBatchedEx
    except (AttributeError, ImportError):
        return None
    return function if arguments(function.__doc__ or "") == ARGUMENTS else None


def arguments(signature: str) -> str:
    """The names of the arguments in a signature of C's kind.

    >>> arguments("f(int a, size_t b)")
    'a b'
    """
    return " ".join(re.findall(r"(\w+)\s*[,)]", signature.partition("\n")[0]))


def product(x: Array, y: Array) -> Array:
    """``x @ y`` of arrays on a GPU; half precision is summed in float32.

    Two matrices are left to CuPy, which passes transposes as flags to gemmEx; but not in a capture, where it refuses.
    """
    xp, dtype = array_module(x), np.result_type(x.dtype, y.dtype)
    if is_bfloat16(dtype):
        check_bfloat16(xp, xp.cuda.runtime.getDevice())
    kind, gemm, captured = _kind(dtype), _function(xp), captures.now.capture is not None
    if kind is None or gemm is None or min(x.ndim, y.ndim) == 0 or (max(x.ndim, y.ndim) <= 2 and not captured):
        return xp.matmul(x, y)
    a, b = x[None] if x.ndim == 1 else x, y[:, None] if y.ndim == 1 else y
    if a.shape[-1] != b.shape[-2]:
        return xp.matmul(x, y)  # which refuses them
    a, b = (_readable(operand.astype(dtype, copy=False)) for operand in (a, b))
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*lead, a.shape[-2], b.shape[-1])
    if not math.prod(shape) * a.shape[-1]:
        out = xp.zeros(shape, dtype)
    else:
        call = _fitting(a, b, lead) or _fitting(xp.ascontiguousarray(a), xp.ascontiguousarray(b), lead)
        if call is None:
            return xp.matmul(x, y)
        out = xp.empty(shape, dtype)
        call.run(gemm, kind, out)
    taken = tuple(axis for axis, operand in ((-1, y), (-2, x)) if operand.ndim == 1)
    return out.squeeze(taken) if taken else out


def multiply_into(out: Array, x: Array, y: Array, add: bool = False) -> Array:
    """``out = x y``, or ``out += x y``, of matrices on a GPU; out is contiguous, in their dtype or in float32."""
    xp, kind, gemm = array_module(out), _kind(x.dtype), _function(array_module(out))
    a, b = _readable(x), _readable(y)
    call = _fitting(a, b, ()) if x.size and y.size else None
    if call is None or kind is None or gemm is None:
        product = xp.matmul(x, y)
        out[...] = out + product if add else product
    else:
        call.run(gemm, kind, out, add)
    return out


class _Call(NamedTuple):
    """A product as cuBLAS takes it. Its matrices lie column by column: there, C = xyᵀ = yᵀ xᵀ."""

    x: Any  # arrays of CuPy
    y: Any
    layouts: tuple[tuple[int, int], tuple[int, int]]  # of y and x: whether it is transposed, and its leading dimension
    axes: list[tuple[int, ...]]  # size, and steps of x, y and the result; the first is the batch of a call

    def run(self, gemm: Callable[..., None], kind: Kind, out: Any, add: bool = False) -> None:
        """Write the product to ``out``, or add it, in a call for each index of all axes but the first."""
        (op_y, ld_y), (op_x, ld_x) = self.layouts
        (batch, step_x, step_y, step_out), *others = self.axes
        (m, k), n = self.x.shape[-2:], self.y.shape[-1]
        capture = captures.now.capture
        handle = capture.products.handle if capture else array_module(out).cuda.Device().cublas_handle
        gemm = capture.products.gemm if capture else gemm
        beta, kind_out = kind.one if add else kind.zero, _kind(out.dtype) or kind
        compute = TF32 if kind.data == 0 and tf32_allowed() else kind.compute
        for index in itertools.product(*(range(size) for size, *_ in others)):
            moves = [sum(i * axis[part] for i, axis in zip(index, others, strict=True)) for part in (1, 2, 3)]
            at_x, at_y, at_out = (
                a.data.ptr + move * a.itemsize for a, move in zip((self.x, self.y, out), moves, strict=True)
            )
            gemm(
                handle, op_y, op_x, n, m, k, kind.one, at_y, kind.data, ld_y, step_y, at_x, kind.data, ld_x, step_x,
                beta, at_out, kind_out.data, n, step_out, batch, compute, DEFAULT,
            )  # fmt: skip


def _readable(x: Array) -> Array:
    """``x``, copied where cuBLAS can't read its matrices."""
    return x if _layout(x) else array_module(x).ascontiguousarray(x)


def _fitting(x: Array, y: Array, lead: tuple[int, ...]) -> _Call | None:
    """The product in a few calls of cuBLAS, without a copy of x or y; None where that is impossible."""
    layouts = _layout(y) or (0, 0), _layout(x) or (0, 0)
    size = x.shape[-2] * y.shape[-1]
    steps_out = [size * math.prod(lead[axis + 1 :]) for axis in range(len(lead))]
    axes = _merged(lead, _steps(x, lead), _steps(y, lead), steps_out)
    axes.sort(key=lambda axis: -axis[0])
    calls = math.prod(size for size, *_ in axes[1:])
    numbers = (*x.shape[-2:], y.shape[-1], axes[0][0], layouts[0][1], layouts[1][1])
    small = calls <= CALLS and max(numbers) < 1 << 31 and min(min(axis) for axis in axes) >= 0
    return _Call(x, y, layouts, axes) if small else None


def _layout(x: Array) -> tuple[int, int] | None:
    """Whether the matrices of x are transposed, and the distance of their rows (or columns); None if neither fits."""
    shape, steps = x.shape[-2:], [step // x.itemsize for step in x.strides[-2:]]
    for transposed, (far, near) in enumerate(((0, 1), (1, 0))):
        dense = steps[near] == 1 or shape[near] == 1
        if dense and (shape[far] == 1 or steps[far] >= shape[near]):
            return transposed, shape[near] if shape[far] == 1 else steps[far]
    return None


def _steps(x: Array, lead: tuple[int, ...]) -> list[int]:
    """How many elements lie between the matrices along each leading axis, 0 where x is broadcast."""
    own = [0 if size == 1 else step // x.itemsize for size, step in zip(x.shape[:-2], x.strides[:-2], strict=True)]
    return [0] * (len(lead) - len(own)) + own


def _merged(sizes: Sequence[int], *steps: Sequence[int]) -> list[tuple[int, ...]]:
    """Axes as (size, steps …). Neighbours are merged if one step serves both, in every operand."""
    axes: list[tuple[int, ...]] = []
    for size, *inner in zip(sizes, *steps, strict=True):
        if axes and all(outer == size * step for outer, step in zip(axes[-1][1:], inner, strict=True)):
            axes[-1] = (axes[-1][0] * size, *inner)
        elif size > 1:
            axes.append((size, *inner))
    return axes or [(1, *[0] * len(steps))]
