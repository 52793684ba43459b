"""``mg.linalg``: linear algebra on stacks of matrices, with NumPy's names and arguments.

>>> import minigrad as mg
>>> a = mg.Tensor([[2.0, 1.0], [1.0, 3.0]], requires_grad=True)
>>> mg.linalg.slogdet(a).logabsdet.backward()
>>> print(a.grad)
[[ 0.6 -0.2]
 [-0.2  0.4]]

Matrices are the last two axes. A matrix that is singular where it must not be raises ``minigrad.errors.LinAlgError``,
which is also a ``numpy.linalg.LinAlgError``. Half precision is computed in float32. docs/kinks.md tells what happens
where values repeat or vanish.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad import ops
from minigrad.backend import Array
from minigrad.errors import ArgumentError, ShapeError
from minigrad.messages.arguments import as_operand
from minigrad.messages.explain import describe, explained
from minigrad.messages.habits import module_names
from minigrad.ops import kron, matmul, tensordot
from minigrad.ops.decompositions import (
    EighResult,
    EigResult,
    QRResult,
    SVDResult,
    cholesky,
    eig,
    eigh,
    eigvals,
    eigvalsh,
    qr,
    svd,
    svdvals,
)
from minigrad.ops.linalg import cross, vecdot
from minigrad.ops.matrix_equations import solve_banded, solve_sylvester, sqrtm
from minigrad.ops.matrix_functions import (
    cond,
    det,
    expm,
    lstsq,
    matrix_norm,
    matrix_power,
    matrix_rank,
    matrix_transpose,
    multi_dot,
    pinv,
    vector_norm,
)
from minigrad.ops.solving import SlogdetResult, inv, slogdet, solve, solve_triangular, tensorinv, tensorsolve

# fmt: off
__all__ = [
    "EigResult", "EighResult", "QRResult", "SVDResult", "SlogdetResult", "cholesky", "cond", "cross", "det", "diagonal",
    "eig", "eigh", "eigvals", "eigvalsh", "expm", "inv", "kron", "lstsq", "matmul", "matrix_norm", "matrix_power",
    "matrix_rank", "matrix_transpose", "multi_dot", "norm", "outer", "pinv", "qr", "slogdet", "solve", "solve_banded",
    "solve_sylvester", "solve_triangular", "sqrtm", "svd", "svdvals", "tensordot", "tensorinv", "tensorsolve", "trace",
    "vecdot", "vector_norm",
]
# fmt: on


@explained
def norm(x: Array, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Array:
    """The norm of vectors along one ``axis``, or of matrices in two; with ``axis=None`` of all of x, which is either.

    ``ord=None`` is the root of the sum of squares. ``vector_norm`` and ``matrix_norm`` tell of the other orders.

    >>> print(float(norm(np.array([[3.0, 0.0], [0.0, 4.0]]), 2)))
    4.0
    """
    x = as_operand(x, "'x' of norm")
    x = x if hasattr(x, "ndim") else np.asarray(x)
    axes = tuple(range(x.ndim)) if axis is None else ops.shape.as_tuple(axis)
    if ord is None and axis is None:
        return vector_norm(x, None, keepdims)
    if len(axes) == 1:
        return vector_norm(x, axes, keepdims, 2 if ord is None else ord)
    if len(axes) != 2:
        got, hint = f"axis={axis} of {describe(x)}", "ord=None flattens"
        raise ArgumentError("one axis for a norm of vectors, two for one of matrices", got, hint)
    result = matrix_norm(ops.moveaxis(x, axes, (-2, -1)), False, "fro" if ord is None else ord)
    return ops.expand_dims(result, tuple(a % x.ndim for a in axes)) if keepdims else result


@explained
def trace(x: Array, offset: int = 0) -> Array:
    """The sums of the diagonals of matrices (..., m, n).

    >>> print(trace(np.ones((2, 3, 3))))
    [3. 3.]
    """
    return ops.trace(x, offset, -2, -1)


@explained
def diagonal(x: Array, offset: int = 0) -> Array:
    """The diagonals of matrices (..., m, n), along the last axis.

    >>> print(diagonal(np.array([[1.0, 2.0], [3.0, 4.0]])))
    [1. 4.]
    """
    return ops.diagonal(x, offset, -2, -1)


@explained
def outer(x: Array, y: Array) -> Array:
    """The products of every element of one vector with every element of another.

    >>> print(outer(np.array([1.0, 2.0]), np.array([1.0, 10.0])))
    [[ 1. 10.]
     [ 2. 20.]]
    """
    x, y = as_operand(x, "'x' of outer"), as_operand(y, "'y' of outer")
    if np.ndim(x) != 1 or np.ndim(y) != 1:
        raise ShapeError("two vectors", f"{describe(x)} and {describe(y)}", "minigrad.outer flattens")
    return ops.outer(x, y)


__getattr__, __dir__ = module_names(globals())
