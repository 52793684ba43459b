"""What operations on matrices share: how they reach LAPACK or cuSOLVER, transposes, the gradient of a triangle."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from minigrad.backend import Array, array_module, array_of, cast_to, is_array, is_bfloat16, is_half
from minigrad.ops.shape import expand_dims, swapaxes

F = TypeVar("F", bound=Callable[..., Any])


def lapack(function: F) -> F:
    """Decorate a function on matrices: its ``Array`` arguments reach it in one dtype, float32 or float64.

    Half precision is computed in float32 and rounded once, integers in float64. CuPy is made to look at what cuSOLVER
    reports, which waits for the GPU: without it, a factor of a matrix that has none would be a wrong number.
    """
    taken = [p.annotation == "Array" for p in inspect.signature(function).parameters.values()]

    @functools.wraps(function)
    def run(*values: Any) -> Any:
        xp = array_module(*values)
        arrays = [xp.asarray(v) for v, matrix in zip(values, taken, strict=True) if matrix]
        dtype = xp.result_type(*arrays)
        wide = np.float64 if dtype.kind in "biu" else np.float32 if is_half(dtype) else dtype
        given = (a.astype(wide, copy=False) for a in arrays)
        with _reporting(xp):
            out = function(*(next(given) if matrix else v for v, matrix in zip(values, taken, strict=True)))
        if not is_half(dtype):
            return out
        return tuple(_rounded(part, dtype) for part in out) if type(out) is tuple else _rounded(out, dtype)

    return run  # type: ignore[return-value]


def _rounded(part: Any, dtype: Any) -> Any:
    """A result in half precision, if it is a floating-point one."""
    part = part if is_array(part) else np.asarray(part)
    return cast_to(part, dtype) if part.dtype.kind == "f" else part


def _reporting(xp: Any) -> Any:
    """The context in which CuPy raises what cuSOLVER reports; NumPy always does."""
    cupyx = sys.modules.get("cupyx") if xp is not np else None
    return cupyx.errstate(linalg="raise") if cupyx else contextlib.nullcontext()


def dominant(x: Any) -> Any:
    """The domain of most operations on matrices, for the tests: 3, 6, 9, … added along the diagonals.

    They are invertible, positive definite in either triangle, and their eigenvalues and singular values are apart.

    >>> dominant(np.zeros((2, 2)))
    array([[3., 0.],
           [0., 6.]])
    """
    if x.ndim < 2:
        return x
    return (x + 3 * np.eye(*x.shape[-2:]) * np.arange(1, x.shape[-1] + 1)).astype(x.dtype)


def mT(x: Array) -> Array:
    """The transposes of the matrices of a stack."""
    return swapaxes(x, -1, -2)


def of_columns(x: Array) -> Array:
    """Numbers (..., n), one for each column, in a form that multiplies matrices (..., m, n)."""
    return expand_dims(x, -2)


def of_rows(x: Array) -> Array:
    """Numbers (..., m), one for each row, in a form that multiplies matrices (..., m, n)."""
    return expand_dims(x, -1)


def of_matrices(x: Array) -> Array:
    """Numbers (...), one for each matrix of a stack, in a form that multiplies them."""
    return expand_dims(x, (-2, -1))


def identity(x: Array) -> Array:
    """The identity matrix with the columns of ``x``, as booleans."""
    return array_module(x).eye(x.shape[-1], dtype=bool)


def rounding(x: Array) -> Any:
    """How far eigenvalues or singular values of ``x``, over the largest, may be off: n units in the last place."""
    dtype = array_of(x).dtype
    eps = 2.0**-7 if is_bfloat16(dtype) else float(np.finfo(dtype).eps)
    return eps * max(array_of(x).shape[-2:])


def to_triangle(g: Array, x: Array, lower: bool) -> Array:
    """The gradient of ``x``, of which one triangle is read as a symmetric matrix, from that of the symmetric matrix.

    In a matrix that is symmetric, to rounding, elements that mirror each other share it. In any other the one that is
    read has all.
    """
    xp, x = array_module(x), array_of(x)
    if not x.size:
        return g
    n = x.shape[-1]
    read = xp.tri(n, n, dtype=bool)
    with np.errstate(invalid="ignore"):  # infinities are apart
        apart = xp.abs(x - mT(x)).max((-2, -1), keepdims=True)
    symmetric = apart <= rounding(x) * xp.abs(x).max((-2, -1), keepdims=True)
    half = xp.where(identity(x), 0.5, read if lower else read.T)
    return (g + mT(g)) * xp.where(symmetric, 0.5, half).astype(x.dtype)
