"""The linear layer: one large matrix product over all rows, and two for the gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, cast_to
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.errors import ShapeError
from minigrad.kernels.rows import as_matrix, dtypes, matrix_of, over_rows, total
from minigrad.ops import matmul, transpose

_samples = [sample((2, 3), (4, 3)), sample((2, 2, 3), (4, 3), (4,)), sample((3,), (4, 3), (4,))]


def _flops(x: Array, bias: Any, out: Array, wrt: frozenset[str]) -> tuple[float, float]:
    """One product; one more for each gradient. A bias is an addition for each result."""
    n, added = 2 * out.size * x.shape[-1], 0 if bias is None else out.size
    return n + added, n * len(wrt & {"x", "weight"}) + added * ("bias" in wrt)


@fused(precision="low", torch="nn.functional.linear", numpy=False, samples=_samples, flops=_flops)
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """``x Wᵀ + b`` over the last axis of x.

    x is (..., d_in), the weight W (d_out, d_in), the bias b (d_out,) or None; the result is (..., d_out). Half
    precision is multiplied in float32 and rounded once. Shapes that don't fit raise a ShapeError.

    >>> print(linear(np.array([1.0, 2.0]), np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 3.0]])))
    [1. 3. 6.]
    """
    check_linear(x, weight, bias)
    y = matmul(x, transpose(weight))
    return y if bias is None else y + bias


def check_linear(x: Any, weight: Any, bias: Any) -> None:
    """Refuse a weight or a bias that doesn't fit."""
    if np.ndim(weight) != 2 or np.ndim(x) == 0 or x.shape[-1] != weight.shape[1]:
        got, hint = f"{np.shape(x)} and {np.shape(weight)}", "the last axis of both is d_in"
        raise ShapeError("x (..., d_in) and weight (d_out, d_in)", got, hint)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"a bias of shape ({weight.shape[0]},)", f"{bias.shape}", "one number for each output")


@linear.defforward
def _forward(x: Any, weight: Any, bias: Any) -> tuple[Array, dict[str, Any]]:
    x, weight = np.asarray(x), np.asarray(weight)
    check_linear(x, weight, bias)
    dtype, work = dtypes(x, weight, bias)
    out = np.empty((*x.shape[:-1], len(weight)), work)
    rows = matrix_of(out)
    np.matmul(as_matrix(x, work), as_matrix(weight, work).T, out=rows)
    if bias is not None:
        wide = bias.astype(work, copy=False)

        def body(a: int, b: int) -> None:
            rows[a:b] += wide

        over_rows(body, rows, arrays=1, ns=0.4)
    return cast_to(out, dtype), {}


@linear.defbackward("x", "weight", "bias")
def _backward(g: Any, x: Any, weight: Any, bias_dtype: Any, needs: tuple[bool, bool, bool]) -> tuple[Any, Any, Any]:
    """dx = g W, dW = gᵀ x, db = Σ g."""
    work = dtypes(g, x, weight)[1]
    rows, up = as_matrix(x, work), as_matrix(g, work)
    gx = gweight = gbias = None
    if needs[0]:
        gx = np.empty(x.shape, work)
        np.matmul(up, as_matrix(weight, work), out=matrix_of(gx))
        gx = cast_to(gx, x.dtype)
    if needs[1]:
        gweight = cast_to(np.matmul(up.T, rows), weight.dtype)
    if needs[2]:
        gbias = cast_to(column_sums(up), bias_dtype)
    return gx, gweight, gbias


def column_sums(matrix: Array) -> Array:
    """The sum of all rows, tile by tile."""
    shares: dict[int, Array] = {}

    def body(a: int, b: int) -> None:
        shares[a] = np.ones(b - a, matrix.dtype) @ matrix[a:b]

    over_rows(body, matrix, arrays=1, ns=0.15)
    return total(shares, np.empty(matrix.shape[1:], matrix.dtype))
