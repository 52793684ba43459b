"""Equations that SciPy has and NumPy hasn't: Sylvester's, those with bands, and the square root of a matrix.

SciPy is imported when one of them is called. They run on the CPU alone, since CuPy has none of them. Formulas as in
``solving.py``: where a linear equation gives X and g is the gradient of X, the transposed equation with g gives y, the
gradient of the right-hand side, and products of y and X are the gradients of the matrices.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from minigrad.backend import Array, array_module
from minigrad.engine.broadcast import unbroadcast
from minigrad.engine.core import primitive
from minigrad.engine.registry import composite, sample
from minigrad.errors import LinAlgError, ShapeError
from minigrad.messages.arguments import as_floats, as_int
from minigrad.messages.explain import describe
from minigrad.ops._matrices import dominant, lapack, mT, rounding
from minigrad.ops._scipy import cupy_lacks, scipy_module
from minigrad.ops.linalg import matmul
from minigrad.ops.reduce import sum
from minigrad.ops.shape import expand_dims, pad_constant, squeeze, stack

__all__ = ["solve_banded", "solve_sylvester", "sqrtm"]


def _check_square(*matrices: Array) -> None:
    for x in matrices:
        if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
            raise LinAlgError("square matrices (..., n, n)", describe(x), "its last two axes are the matrix")


# ---- Sylvester's equation -------------------------------------------------------------------------------------------


@primitive(
    stacks=True,
    precision="wide",
    samples=[sample((3, 3), (2, 2), (3, 2)), sample((2, 3, 3), (3, 3), (3, 3)), sample((1, 1), (1, 1), (2, 1, 1))],
    domain=dominant,
    torch=False,
    numpy=False,
)
@lapack
def solve_sylvester(a: Array, b: Array, q: Array) -> Array:
    """The solution X of ``A X + X B = Q`` for matrices A (..., m, m), B (..., n, n), Q (..., m, n); on the CPU alone.

    Where A and -B have an eigenvalue in common there is none, or no single one: LinAlgError. Schur forms of both make
    it a triangular equation (R. H. Bartels, G. W. Stewart, "Solution of the matrix equation AX + XB = C", 1972).

    >>> print(solve_sylvester(np.diag([1.0, 2.0]), np.diag([1.0, 3.0]), np.array([[2.0, 4.0], [3.0, 5.0]])))
    [[1. 1.]
     [1. 1.]]
    """
    if array_module(a, b, q) is not np:
        raise cupy_lacks("solve_sylvester")
    _check_square(a, b)
    if q.ndim < 2 or q.shape[-2:] != (a.shape[-1], b.shape[-1]):
        got = f"{describe(q)} for {describe(a)} and {describe(b)}"
        raise ShapeError("q of shape (..., m, n) for a (..., m, m) and b (..., n, n)", got, "A X + X B = Q")
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2], q.shape[:-2])
    given = [np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b, q)]
    out = np.empty((*lead, *q.shape[-2:]), q.dtype)
    for i in np.ndindex(lead) if out.size else ():
        out[i] = _one_sylvester(*(x[i] for x in given))
    return out


def _one_sylvester(a: Array, b: Array, q: Array) -> Array:
    """The solution for one triple of matrices; NaN where one of them has a NaN or an infinity."""
    if not all(np.isfinite(x).all() for x in (a, b, q)):
        return np.full_like(q, np.nan)
    scipy = scipy_module("linalg")
    (r, u), (s, v) = scipy.schur(a), scipy.schur(b.T)
    y, scale, info = scipy.get_lapack_funcs("trsyl", (r, s, q))(r, s, u.T @ q @ v, tranb="T")
    if info:
        hint = "of sqrtm, the gradient at a singular matrix asks for it"
        raise LinAlgError("a and -b without a common eigenvalue", "two that no digit tells apart", hint)
    return u @ (y / scale) @ v.T


@solve_sylvester.defjoint("a", "b", "q")
def _sylvester_rule(g: Array, a: Array, b: Array, out: Array, q_shape: Any) -> tuple[Array, Array, Array]:
    y = solve_sylvester(mT(a), mT(b), g)
    ga, gb = -matmul(y, mT(out)), -matmul(mT(out), y)
    return unbroadcast(ga, a.shape), unbroadcast(gb, b.shape), unbroadcast(y, q_shape)


# ---- the square root ------------------------------------------------------------------------------------------------


@primitive(
    stacks=True,
    precision="wide",
    samples=[sample((3, 3)), sample((2, 3, 3)), sample((1, 1))],
    domain=dominant,
    torch=False,
    numpy=False,
)
@lapack
def sqrtm(x: Array) -> Array:
    """The S with ``S S = A`` of matrices (..., n, n), whose eigenvalues have no negative real part; on the CPU alone.

    A matrix whose root is complex, or that has none, raises LinAlgError; so does the gradient at a singular one. The
    derivative along E solves ``S X + X S = E`` (N. J. Higham, "Functions of Matrices", 2008, chapter 6).

    >>> print(sqrtm(np.array([[4.0, 5.0], [0.0, 9.0]])))
    [[2. 1.]
     [0. 3.]]
    """
    if array_module(x) is not np:
        raise cupy_lacks("sqrtm")
    _check_square(x)
    out = np.empty_like(x)
    for i in np.ndindex(x.shape[:-2]) if x.size else ():
        out[i] = _one_root(x[i])
    return out


def _one_root(x: Array) -> Array:
    if not np.isfinite(x).all():
        return np.full_like(x, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a singular matrix, which may have a root
        root = scipy_module("linalg").sqrtm(x)
    if root.dtype.kind == "c" and float(abs(root.imag).max()) ** 2 <= rounding(x) * float(abs(x).max()):
        root = root.real  # as of a 0 that became negative by rounding: its square is x to the last digits
    if root.dtype.kind == "c":
        hint = "complex numbers are out of scope; of a symmetric matrix, eigh tells the negative eigenvalues"
        raise LinAlgError("matrices with a real square root", "one whose root is complex", hint)
    if not np.isfinite(root).all():
        raise LinAlgError("matrices with a square root", "one that has none", "[[0, 1], [0, 0]] is such a matrix")
    return root


sqrtm.defvjp(lambda g, out: solve_sylvester(mT(out), mT(out), g))

# ---- matrices of bands ----------------------------------------------------------------------------------------------


def _banded_domain(x: Any) -> Any:
    """The domain for the tests: 3 is added to the middle row, the diagonal of as many bands below as above it."""
    x = x.copy()
    x[x.shape[0] // 2 : x.shape[0] // 2 + 1] += 3
    return x


@primitive(part_of="solve_banded", precision="wide", samples=[sample((3, 5), (5, 2), 1, 1)], domain=_banded_domain,
           torch=False, numpy=False)  # fmt: skip
@lapack
def solve_bands(ab: Array, b: Array, lower: int, upper: int) -> Array:
    """The solution X (n, k) of equations with the bands ``ab``."""
    if array_module(ab, b) is not np:
        raise cupy_lacks("solve_banded")
    if not b.size:
        return np.zeros_like(b)
    if b.shape[0] == 1:  # SciPy divides by the second row, and by 0
        return np.linalg.solve(ab[upper : upper + 1], b)
    return scipy_module("linalg").solve_banded((lower, upper), ab, b, check_finite=False)


@solve_bands.defjoint("ab", "b")
def _bands_rule(g: Array, ab: Array, out: Array, lower: int, upper: int) -> tuple[Array, Array]:
    """In ``ab`` the element (i, j) of the matrix stands at (upper + i - j, j); its gradient is ``-yᵢ xⱼ``."""
    rows = range(lower + upper + 1)
    transposed = stack([_shifted(ab[rows[-1] - r], r - lower) for r in rows])
    y = solve_bands(transposed, g, upper, lower)
    return stack([-sum(_shifted(mT(y), r - upper) * mT(out), 0) for r in rows]), y


def _shifted(x: Array, k: int) -> Array:
    """``x[..., j + k]`` at each place j of the last axis, 0 where there is none."""
    n = x.shape[-1]
    kept = x[..., min(max(k, 0), n) : max(n + min(k, 0), 0)]
    before, after = min(max(-k, 0), n), min(max(k, 0), n)
    return pad_constant(kept, [(0, 0)] * (x.ndim - 1) + [(before, after)], 0)


@composite(samples=[sample([1, 1], (3, 5), (5,)), sample([1, 1], (3, 5), (5, 2)), sample([2, 2], (5, 4), (4,)),
                    sample([0, 0], (1, 2), (2,))],
           domain=_banded_domain, torch=False, numpy=False)  # fmt: skip
def solve_banded(l_and_u: Any, ab: Array, b: Array) -> Array:
    """The solution of ``A x = b`` for an A of a few diagonals, in time proportional to its size; on the CPU alone.

    l_and_u  how many diagonals lie below the main one, and how many above
    ab       (l + u + 1, n): the highest diagonal first, element (i, j) of A in place (u + i - j, j); the corners that
             belong to no element are not read
    b        (n,) or (n, k)

    >>> ab = np.array([[0.0, 1.0, 1.0], [2.0, 2.0, 2.0]])  # 2 on the diagonal, 1 above it
    >>> print(solve_banded((0, 1), ab, np.array([3.0, 3.0, 2.0])))
    [1. 1. 1.]
    """
    ab, b = as_floats(ab, b)
    lower, upper = (as_int(n, "l_and_u") for n in l_and_u)
    if min(lower, upper) < 0 or b.ndim not in (1, 2) or ab.shape != (lower + upper + 1, b.shape[0]):
        got = f"l_and_u {tuple(l_and_u)}, ab {describe(ab)}, b {describe(b)}"
        raise ShapeError("ab of shape (l + u + 1, n), and b (n,) or (n, k)", got, "a row of ab is a diagonal")
    x = solve_bands(ab, expand_dims(b, 1) if b.ndim == 1 else b, lower, upper)
    return squeeze(x, 1) if b.ndim == 1 else x
