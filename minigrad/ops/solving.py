"""Linear equations: solutions, inverses, determinants. Singular matrices raise a LinAlgError.

Formulas: M. B. Giles, "Collected matrix derivative results for forward and reverse mode algorithmic differentiation",
2008. With ``A x = b`` and the gradient g of x, that of b is ``y = A⁻ᵀ g`` and that of A is ``-y xᵀ``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import Array, array_module, array_of
from minigrad.engine.broadcast import unbroadcast
from minigrad.engine.core import primitive
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError, ShapeError
from minigrad.messages.explain import describe
from minigrad.ops._matrices import dominant, identity, lapack, mT, of_matrices
from minigrad.ops.linalg import matmul
from minigrad.ops.shape import expand_dims, moveaxis, normal_axis, reshape, squeeze, tril, triu

__all__ = ["inv", "slogdet", "solve", "solve_triangular", "tensorinv", "tensorsolve"]

BLOCK = 64  # the largest triangle that is solved as a whole; larger ones are halved, so that products do the work

_systems = [
    sample((3, 3), (3,)),
    sample((3, 3), (3, 2)),
    sample((2, 3, 3), (3,)),
    sample((2, 3, 3), (2, 3, 2)),
    sample((3, 3), (2, 3, 2)),
    sample((4, 1, 1), (1, 3)),
]


def as_columns(a: Array, b: Array) -> Array:
    """The right-hand sides ``b`` of equations with the matrices ``a`` as matrices (..., m, k), of one if it is 1-D."""
    if np.ndim(a) < 2 or np.ndim(b) < 1:
        got = f"{describe(a)} and {describe(b)}"
        raise ShapeError("matrices (..., m, n) and right-hand sides (m,) or (..., m, k)", got, "b may be one vector")
    columns = expand_dims(b, -1) if b.ndim == 1 else b
    if columns.shape[-2] != a.shape[-2]:
        hint = "a stack of vectors is b[..., None], solved and squeezed"
        raise ShapeError(f"right-hand sides with {a.shape[-2]} rows, as the matrices have", describe(b), hint)
    return columns


def in_step(a: Array, b: Array) -> tuple[Array, Array]:
    """Both stacks of matrices with the same leading axes, which CuPy asks for."""
    xp = array_module(a, b)
    if xp is np or a.shape[:-2] == b.shape[:-2]:
        return a, b
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return xp.broadcast_to(a, (*lead, *a.shape[-2:])), xp.broadcast_to(b, (*lead, *b.shape[-2:]))


# ---- equations ------------------------------------------------------------------------------------------------------


@primitive(stacks=True, part_of="solve", precision="wide", samples=_systems[1:2], domain=dominant, numpy="linalg.solve",
           torch="linalg.solve")  # fmt: skip
@lapack
def solve_columns(a: Array, b: Array) -> Array:
    """``A⁻¹ B`` for stacks of matrices."""
    return array_module(a, b).linalg.solve(*in_step(a, b))


@solve_columns.defjoint("a", "b")
def _solve_rule(g: Array, a: Array, out: Array, b_shape: Any) -> tuple[Array, Array]:
    y = solve_columns(mT(a), g)
    return unbroadcast(-matmul(y, mT(out)), a.shape), unbroadcast(y, b_shape)


@composite(samples=_systems, domain=dominant, numpy="linalg.solve")
def solve(a: Array, b: Array) -> Array:
    """The solution x of ``A x = b``, for stacks of matrices A (..., n, n), and b (n,) or (..., n, k).

    As in NumPy, a 1-D b is one vector for all matrices, any other a stack of matrices. A singular A raises LinAlgError.

    >>> print(solve(np.array([[2.0, 0.0], [0.0, 4.0]]), np.array([2.0, 2.0])))
    [1.  0.5]
    """
    columns = as_columns(a, b)
    x = solve_columns(a, columns)
    return squeeze(x, -1) if np.ndim(b) == 1 else x


@primitive(stacks=True, part_of="solve_triangular", precision="wide", samples=[
    sample((3, 3), (3, 2), True, False), sample((3, 3), (3, 2), False, True), sample((2, 3, 3), (3, 2), True, True)],
    domain=dominant, torch=False)  # fmt: skip
@lapack
def substitute(a: Array, b: Array, lower: bool, unit_diagonal: bool) -> Array:
    """The solution of equations with triangles, halves of which are solved one after the other."""
    xp, n = array_module(a, b), a.shape[-1]
    if n <= BLOCK:
        corner = (tril if lower else triu)(a)
        return xp.linalg.solve(*in_step(xp.where(identity(a), 1, corner) if unit_diagonal else corner, b))
    first, second = (slice(n // 2), slice(n // 2, n)) if lower else (slice(n // 2, n), slice(n // 2))
    solve_block = substitute.function
    x = solve_block(a[..., first, first], b[..., first, :], lower, unit_diagonal)
    rest = b[..., second, :] - matmul(a[..., second, first], x)
    y = solve_block(a[..., second, second], rest, lower, unit_diagonal)
    return xp.concatenate((x, y) if lower else (y, x), axis=-2)


@substitute.defjoint("a", "b")
def _substitute_rule(
    g: Array, a: Array, out: Array, b_shape: Any, lower: bool, unit_diagonal: bool
) -> tuple[Array, Array]:
    y = substitute(mT(a), g, not lower, unit_diagonal)
    part = (tril if lower else triu)(-matmul(y, mT(out)), (-1 if lower else 1) * unit_diagonal)
    return unbroadcast(part, a.shape), unbroadcast(y, b_shape)


@composite(
    samples=[*_systems, sample((3, 3), (3,), lower=True), sample((2, 3, 3), (3, 2), trans=1),
             sample((3, 3), (3, 2), unit_diagonal=True), sample((3, 3), (3, 2), trans="T", lower=True)],
    domain=dominant)  # fmt: skip
def solve_triangular(
    a: Array, b: Array, trans: int | str = 0, lower: bool = False, unit_diagonal: bool = False
) -> Array:
    """The solution x of ``A x = b``, or of ``Aᵀ x = b`` for ``trans=1``, where A is a triangle of ``a``.

    The other triangle isn't read; with ``unit_diagonal`` the diagonal counts as ones. Stacks as in ``solve``.

    >>> print(solve_triangular(np.array([[2.0, 1.0], [0.0, 4.0]]), np.array([4.0, 8.0])))
    [1. 2.]
    """
    if trans not in (0, 1, "N", "T"):
        raise ArgumentError("trans 0 or 1, or 'N' or 'T'", describe(trans), "1 solves with the transpose")
    columns, transposed = as_columns(a, b), trans in (1, "T")
    if a.shape[-1] != a.shape[-2]:
        raise ShapeError("square matrices (..., n, n)", describe(a), "lstsq takes others")
    x = substitute(mT(a) if transposed else a, columns, bool(lower) != transposed, bool(unit_diagonal))
    return squeeze(x, -1) if np.ndim(b) == 1 else x


# ---- inverses and determinants --------------------------------------------------------------------------------------

_square = [sample((3, 3)), sample((2, 3, 3)), sample((1, 1)), sample((2, 1, 4, 4))]


@primitive(stacks=True, precision="wide", samples=_square, domain=dominant, numpy="linalg.inv",
           torch="linalg.inv")  # fmt: skip
@lapack
def inv(x: Array) -> Array:
    """The inverses of matrices (..., n, n). ``solve(a, b)`` is faster and more exact than ``inv(a) @ b``.

    >>> print(inv(np.array([[2.0, 0.0], [0.0, 4.0]])))
    [[0.5  0.  ]
     [0.   0.25]]
    """
    return array_module(x).linalg.inv(x)


inv.defvjp(lambda g, out: -matmul(mT(out), matmul(g, mT(out))))


class SlogdetResult(NamedTuple):
    """The result of ``slogdet``, with NumPy's names."""

    sign: Any
    logabsdet: Any


@primitive(stacks=True, part_of="slogdet", precision="wide", samples=_square, domain=dominant, numpy="linalg.slogdet",
           torch=False)  # fmt: skip
@lapack
def sign_and_log(x: Array) -> tuple[Array, Array]:
    """The sign of the determinant, which has no slope, and the logarithm of its absolute value."""
    xp = array_module(x)
    sign, logarithm = xp.linalg.slogdet(x)
    return xp.asarray(sign), xp.asarray(logarithm)


sign_and_log.defvjp(lambda g, x: of_matrices(g[1]) * mT(inv(x)))


@composite(samples=_square, domain=dominant, numpy="linalg.slogdet", torch="linalg.slogdet")
def slogdet(x: Array) -> SlogdetResult:
    """Sign and ``ln |det A|`` of matrices (..., n, n), where the determinant may be beyond the range of its dtype.

    That of a singular matrix is (0, -∞); its gradient, which is infinite, raises LinAlgError.

    >>> sign, logabsdet = slogdet(np.array([[0.0, 1.0], [1.0, 0.0]]))
    >>> print(float(sign), float(logabsdet))
    -1.0 0.0
    """
    return SlogdetResult(*sign_and_log(x))


# ---- tensors as matrices --------------------------------------------------------------------------------------------


def _regular(x: Any) -> Any:
    """The domain for the tests: tensors that are ``dominant`` as matrices."""
    n = math.isqrt(x.size)
    return dominant(x.reshape(n, n)).reshape(x.shape) if n * n == x.size else x


@composite(samples=[sample((4, 2, 2), ind=1), sample((2, 3, 6))], domain=_regular,
           numpy="linalg.tensorinv", torch="linalg.tensorinv")  # fmt: skip
def tensorinv(x: Array, ind: int = 2) -> Array:
    """The inverse of ``x`` as a linear map from its axes behind the first ``ind`` to these: ``tensordot`` undoes it.

    >>> tensorinv(np.eye(6).reshape(2, 3, 6), 2).shape
    (6, 2, 3)
    """
    if not 0 < ind < x.ndim:
        raise ArgumentError(f"ind from 1 to {x.ndim - 1}, for {x.ndim} axes", str(ind), "it counts the first axes")
    first, rest = x.shape[:ind], x.shape[ind:]
    if math.prod(first) != math.prod(rest):
        raise ShapeError(f"as many elements in {first} as in {rest}", f"shape {x.shape}", "ind= says where to cut")
    return reshape(inv(reshape(x, (math.prod(first), math.prod(rest)))), (*rest, *first))


@composite(samples=[sample((2, 3, 6), (2, 3)), sample((2, 6, 3), (2, 3), axes=(1,))], domain=_regular,
           numpy="linalg.tensorsolve", torch=lambda t, a, b, axes=None: t.linalg.tensorsolve(a, b, axes))  # fmt: skip
def tensorsolve(a: Array, b: Array, axes: Any = None) -> Array:
    """The x with ``tensordot(a, x, x.ndim) = b``; ``axes`` of a are moved to its end first.

    >>> tensorsolve(np.eye(6).reshape(2, 3, 6), np.ones((2, 3))).shape
    (6,)
    """
    if axes is not None:
        moved = [normal_axis(axis, a.ndim) for axis in axes]
        a = moveaxis(a, moved, range(a.ndim - len(moved), a.ndim))
    shape = a.shape[np.ndim(array_of(b)) :]
    if math.prod(shape) ** 2 != math.prod(a.shape):
        raise ShapeError(
            "as many unknowns as equations", f"{describe(a)} and {describe(b)}", "axes= says which are last"
        )
    n = math.prod(shape)
    return reshape(solve(reshape(a, (n, n)), reshape(b, (n,))), shape)
