"""Decompositions of matrices: Cholesky, QR, eigenvalues, singular values.

Formulas: M. Seeger, A. Hetzel, Z. Dai, N. Lawrence, "Auto-Differentiating Linear Algebra", 2017, for Cholesky, QR and
eigenvectors; J. Townsend, "Differentiating the Singular Value Decomposition", 2016; for eigenvalues and singular values
also M. B. Giles, 2008.

Eigenvectors and singular vectors are differentiable where their value stands apart from the others. To values that no
digit tells apart belongs a space, not vectors: a gradient that reaches such vectors raises LinAlgError, since 0 or a
quotient of rounding errors would be a wrong number. Functions of the values alone have their derivatives there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import Array, array_module, array_of
from minigrad.engine.core import primitive
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError, LinAlgError
from minigrad.messages.explain import describe
from minigrad.ops._matrices import dominant, identity, lapack, mT, of_columns, of_rows, rounding, to_triangle
from minigrad.ops._scipy import cupy_lacks
from minigrad.ops.linalg import matmul
from minigrad.ops.piecewise import where
from minigrad.ops.reduce import sum
from minigrad.ops.shape import pad, tril
from minigrad.ops.solving import solve_columns, substitute

__all__ = ["cholesky", "eig", "eigh", "eigvals", "eigvalsh", "qr", "svd", "svdvals"]

_square = [sample((3, 3)), sample((2, 3, 3)), sample((1, 1))]
_any = [sample((3, 3)), sample((4, 2)), sample((2, 3)), sample((2, 4, 3))]


# ---- Cholesky -------------------------------------------------------------------------------------------------------


@primitive(
    stacks=True,
    precision="wide",
    samples=[*_square, sample((3, 3), upper=True)],
    domain=dominant,
    numpy="linalg.cholesky",
)
@lapack
def cholesky(x: Array, upper: bool = False) -> Array:
    """The lower triangle L with positive diagonal and ``L Lᵀ = A``, or the upper one ``U = Lᵀ``, of stacks of matrices.

    A is symmetric and positive definite, else LinAlgError; only its lower triangle is read, or the upper one for
    ``upper``.

    >>> print(cholesky(np.array([[4.0, 2.0], [2.0, 10.0]])))
    [[2. 0.]
     [1. 3.]]
    """
    factor = array_module(x).linalg.cholesky(mT(x) if upper else x)
    return mT(factor) if upper else factor


def _cholesky_rule(g: Array, x: Array, out: Array, upper: bool) -> Array:
    """``L⁻ᵀ Φ(Lᵀ g) L⁻¹``, where Φ takes the lower triangle with half of the diagonal."""
    factor, g = (mT(out), mT(g)) if upper else (out, g)
    inner = tril(matmul(mT(factor), g)) * where(identity(factor), 0.5, 1).astype(x.dtype)
    left = substitute(mT(factor), inner, False, False)
    return to_triangle(substitute(mT(factor), mT(left), False, False), x, not upper)


cholesky.defvjp(_cholesky_rule)

# ---- QR -------------------------------------------------------------------------------------------------------------


class QRResult(NamedTuple):
    """The result of ``qr``, with NumPy's names."""

    Q: Any
    R: Any


@primitive(stacks=True, part_of="qr", precision="wide", samples=_any, domain=dominant, torch=False)
@lapack
def orthogonal_triangle(x: Array, complete: bool = False) -> tuple[Array, Array]:
    """The factors of ``qr``."""
    q, r = array_module(x).linalg.qr(x, "complete" if complete else "reduced")
    return q, r


def _qr_rule(g: Any, out: Any) -> Array:
    """For ``A = [A₁ A₂]`` with as many columns in A₁ as Q has: ``A₁ = Q R₁``, and ``R₂ = Qᵀ A₂`` of the rest.

    The gradient of A₁ is ``(gQ + Q sym(M)) R₁⁻ᵀ`` with ``M = R₁ gR₁ᵀ - gQᵀ Q``; sym mirrors the lower triangle.
    """
    (q, r), (gq, gr) = out, g
    k = min(q.shape[-2], r.shape[-1])
    _refuse_beyond(k, gq)
    q, gq, r, gr = q[..., :k], gq[..., :k], r[..., :k, :], gr[..., :k, :]
    r1, r2, gr1, gr2 = r[..., :k], r[..., k:], gr[..., :k], gr[..., k:]
    gq = gq + matmul(q, matmul(r2, mT(gr2)))
    lower = tril(matmul(r1, mT(gr1)) - matmul(mT(gq), q))
    mirrored = where(identity(lower), lower, lower + mT(lower))
    g1 = mT(substitute(r1, mT(gq + matmul(q, mirrored)), False, False))
    g2 = matmul(q, gr2)
    return pad(g1, [(0, 0)] * (g1.ndim - 1) + [(0, g2.shape[-1])]) + pad(g2, [(0, 0)] * (g2.ndim - 1) + [(k, 0)])


orthogonal_triangle.defvjp(_qr_rule)


def _refuse_beyond(k: int, *gradients: Array) -> None:
    """Refuse a gradient of columns from k on, which only fill up a basis: the matrix doesn't say how."""
    if any((array_of(g)[..., k:] != 0).any() for g in gradients):
        hint = "mode='reduced', full_matrices=False leave them out"
        raise LinAlgError(f"a gradient of the first {k} vectors, which the matrix fixes", "one of those behind", hint)


@composite(samples=[*_any, sample((3, 2), mode="r")], domain=dominant,
           numpy="linalg.qr")  # fmt: skip
def qr(x: Array, mode: str = "reduced") -> Any:
    """``A = Q R`` of matrices (..., m, n): orthonormal columns Q (..., m, k), a triangle R (..., k, n), k = min(m, n).

    Mode "complete" fills Q up to (..., m, m), "r" gives R alone. Where the first k columns of A are linearly dependent,
    there is no derivative: LinAlgError.

    >>> q, r = qr(np.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> print(abs(r))
    [[3. 0.]
     [0. 2.]]
    """
    if mode not in ("reduced", "complete", "r"):
        raise ArgumentError("mode 'reduced', 'complete' or 'r'", describe(mode), "np.linalg.qr on arrays knows 'raw'")
    result = QRResult(*orthogonal_triangle(x, mode == "complete"))
    return result.R if mode == "r" else result


# ---- values that are apart ------------------------------------------------------------------------------------------


def _unit(values: Array) -> Array:
    """A power of two near the largest of ``values`` (..., n), as (..., 1): slopes in this unit can't overflow.

    An infinite one would make NaN of the gradient 0 of vectors that nobody used.
    """
    xp, raw = array_module(values), array_of(values)
    largest = abs(raw).max(-1, keepdims=True) if raw.size else raw[..., :1]
    return xp.ldexp(xp.ones_like(largest), xp.frexp(largest)[1] - 1)


def _slopes(values: Array, x: Array, *gradients: Array) -> Array:
    """``1 / (λⱼ - λᵢ)`` for vectors i and j, 0 on the diagonal and for two that no gradient reaches and none need.

    Refuses gradients (..., m, n) that reach a vector of two whose values no digit tells apart.
    """
    xp, raw = array_module(x), array_of(values)
    largest = abs(raw).max(-1, keepdims=True) if raw.size else raw[..., :1]
    gap = abs(of_columns(raw) - of_rows(raw))
    tied = gap <= of_rows(rounding(x) * largest)
    reached = xp.zeros(raw.shape, dtype=bool)
    for g in gradients:
        reached = reached | (array_of(g) != 0).any(-2)
    if (tied & ~identity(tied) & (of_columns(reached) | of_rows(reached))).any():
        raise LinAlgError(
            "eigenvalues or singular values that differ, for a gradient of their vectors",
            "two that no digit tells apart",
            "eigvalsh, svdvals, expm, pinv, det and norms have derivatives there",
        )
    return where(tied, 0, 1 / where(tied, 1, of_columns(values) - of_rows(values)))


# ---- symmetric matrices ---------------------------------------------------------------------------------------------


class EighResult(NamedTuple):
    """The result of ``eigh``, with NumPy's names."""

    eigenvalues: Any
    eigenvectors: Any


@primitive(part_of="eigh", precision="wide", samples=[*_square, sample((3, 3), False)], domain=dominant, stacks=True,
           torch=False)  # fmt: skip
@lapack
def eigen(x: Array, lower: bool = True) -> tuple[Array, Array]:
    """The results of ``eigh``."""
    values, vectors = array_module(x).linalg.eigh(x, "L" if lower else "U")
    return values, vectors


def _eigen_rule(g: Any, x: Array, out: Any, lower: bool) -> Array:
    """``V (diag(gλ) + F ∘ Vᵀ gV) Vᵀ`` with ``Fᵢⱼ = 1 / (λⱼ - λᵢ)``."""
    (values, v), (g_values, gv) = out, g
    unit = _unit(values)
    turned = _slopes(values / unit, x, gv) * matmul(mT(v), gv) / of_rows(unit)
    inner = where(identity(v), of_columns(g_values), turned)
    return to_triangle(matmul(matmul(v, inner), mT(v)), x, lower)


eigen.defvjp(_eigen_rule)


def _is_lower(UPLO: Any) -> bool:
    if UPLO not in ("L", "U", "l", "u"):
        raise ArgumentError("UPLO 'L' or 'U', the triangle to read", describe(UPLO), "'L' is NumPy's default")
    return UPLO in ("L", "l")


@composite(samples=[*_square, sample((3, 3), UPLO="U")], domain=dominant, numpy="linalg.eigh")
def eigh(x: Array, UPLO: str = "L") -> EighResult:
    """``A V = V diag(λ)`` of symmetric matrices: eigenvalues λ (..., n), ascending, and eigenvectors, the columns of V.

    Only the triangle ``UPLO``, "L" or "U", is read. The sign of each vector is LAPACK's.

    >>> values, vectors = eigh(np.array([[0.0, 1.0], [1.0, 0.0]]))
    >>> print(values)
    [-1.  1.]
    """
    return EighResult(*eigen(x, _is_lower(UPLO)))


@primitive(part_of="eigvalsh", precision="wide", samples=[sample((3, 3)), sample((3, 3), False)], domain=dominant,
           stacks=True, torch=False)  # fmt: skip
@lapack
def eigenvalues(x: Array, lower: bool = True) -> Array:
    """The result of ``eigvalsh``."""
    return array_module(x).linalg.eigvalsh(x, "L" if lower else "U")


def _eigenvalues_rule(g: Array, x: Array, lower: bool) -> Array:
    _, v = eigen(x, lower)
    return to_triangle(matmul(v * of_columns(g), mT(v)), x, lower)


eigenvalues.defvjp(_eigenvalues_rule)


@composite(samples=[*_square, sample((3, 3), UPLO="U")], domain=dominant, numpy="linalg.eigvalsh")
def eigvalsh(x: Array, UPLO: str = "L") -> Array:
    """The eigenvalues of symmetric matrices (..., n, n), ascending; of equal ones the sum is differentiable.

    >>> print(eigvalsh(np.array([[0.0, 1.0], [1.0, 0.0]])))
    [-1.  1.]
    """
    return eigenvalues(x, _is_lower(UPLO))


# ---- any square matrix ----------------------------------------------------------------------------------------------


class EigResult(NamedTuple):
    """The result of ``eig``, with NumPy's names."""

    eigenvalues: Any
    eigenvectors: Any


@primitive(part_of="eig", precision="wide", samples=_square, domain=dominant, stacks=True, torch=False)
@lapack
def real_eigen(x: Array) -> tuple[Array, Array]:
    """The results of ``eig``."""
    if array_module(x) is not np:
        raise cupy_lacks("eig", " before version 14")
    values, vectors = np.linalg.eig(x)
    if values.dtype.kind == "c" and values.imag.any():
        hint = "complex numbers are out of scope; eigh takes symmetric matrices, whose eigenvalues are real"
        raise LinAlgError("matrices with real eigenvalues", "complex ones", hint)
    return np.ascontiguousarray(values.real), np.ascontiguousarray(vectors.real)  # complex from NumPy 2.5 on


def _real_eigen_rule(g: Any, x: Array, out: Any) -> Array:
    """``V⁻ᵀ (diag(gλ) + F ∘ Vᵀ g') Vᵀ``, where g' is gV less its parts along the vectors, which keep the length 1."""
    (values, v), (g_values, gv) = out, g
    if v.shape[-1] and (svdvals(array_of(v))[..., -1] < rounding(x) ** 0.5).any():
        hint = "the derivatives of its eigenvalues are infinite"
        raise LinAlgError("a matrix with as many eigenvectors as rows, for a gradient", "a defective one", hint)
    gv = gv - v * of_columns(sum(v * gv, -2))
    unit = _unit(values)
    turned = _slopes(values / unit, x, gv) * matmul(mT(v), gv) / of_rows(unit)
    inner = where(identity(v), of_columns(g_values), turned)
    return solve_columns(mT(v), matmul(inner, mT(v)))


real_eigen.defvjp(_real_eigen_rule)


def _torch_eig(t: Any, x: Any) -> Any:
    values, vectors = t.linalg.eig(x)
    return values.real, vectors.real


@composite(
    samples=_square, domain=dominant, numpy=lambda n, x: tuple(part.real for part in n.linalg.eig(x)), torch=_torch_eig
)
def eig(x: Array) -> EigResult:
    """``A V = V diag(λ)`` of matrices (..., n, n) with real eigenvalues, and eigenvectors of length 1, V's columns.

    Order and signs are LAPACK's. Complex eigenvalues raise LinAlgError, and so does the gradient of a matrix that has
    fewer eigenvectors than rows. On the CPU alone. Formula: Giles, with the derivative of the length taken off.

    >>> values, vectors = eig(np.array([[2.0, 1.0], [0.0, 3.0]]))
    >>> print(values)
    [2. 3.]
    """
    return EigResult(*real_eigen(x))


@composite(samples=_square, domain=dominant, numpy=lambda n, x: n.linalg.eig(x).eigenvalues.real,
           torch=lambda t, x: t.linalg.eig(x)[0].real)  # fmt: skip
def eigvals(x: Array) -> Array:
    """The eigenvalues (..., n) of matrices that have real ones; of equal ones the sum is differentiable.

    >>> print(eigvals(np.array([[2.0, 1.0], [0.0, 3.0]])))
    [2. 3.]
    """
    return real_eigen(x)[0]


# ---- singular values ------------------------------------------------------------------------------------------------


class SVDResult(NamedTuple):
    """The result of ``svd``, with NumPy's names."""

    U: Any
    S: Any
    Vh: Any


@primitive(stacks=True, part_of="svd", precision="wide", samples=_any, domain=dominant, torch=False)
@lapack
def singular(x: Array, full_matrices: bool = False) -> tuple[Array, Array, Array]:
    """The results of ``svd``."""
    u, s, vh = array_module(x).linalg.svd(x, full_matrices)
    return u, s, vh


def apart_from_zero(s: Array, x: Array) -> Array:
    """Which of the singular values of ``x`` are not 0, to the last digits of the largest."""
    raw = array_of(s)
    return raw > rounding(x) * raw[..., :1]


def _singular_rule(g: Any, x: Array, out: Any) -> Array:
    """``U (F∘(UᵀgU - gUᵀU) S + S F∘(VᵀgV - gVᵀV) + diag(gS)) Vᵀ`` with ``Fᵢⱼ = 1 / (sⱼ² - sᵢ²)``.

    If A isn't square, ``(1 - UUᵀ) gU S⁻¹ Vᵀ`` or ``U S⁻¹ gVᵀ (1 - VVᵀ)`` comes to it.
    """
    (u, s, vh), (gu, gs, gvh) = out, g
    k = s.shape[-1]
    _refuse_beyond(k, gu, mT(gvh))
    u, gu, v, gv = u[..., :k], gu[..., :k], mT(vh)[..., :k], mT(gvh)[..., :k]
    unit = _unit(s)
    scaled, nonzero = s / unit, apart_from_zero(s, x)
    slopes, total = _slopes(scaled, x, gu, gv), of_columns(scaled) + of_rows(scaled)
    slopes = slopes / where(array_of(slopes) == 0, 1, total)
    left, right = matmul(mT(u), gu), matmul(mT(v), gv)
    inner = slopes * (left - mT(left)) * of_columns(scaled) + of_rows(scaled) * slopes * (right - mT(right))
    inner = inner / of_rows(unit)
    inner = where(identity(inner), of_columns(where(nonzero, gs, 0)), inner)
    found = matmul(matmul(u, inner), mT(v))
    if u.shape[-2] > k:
        found = found + matmul(_over(gu - matmul(u, left), s, nonzero), mT(v))
    if v.shape[-2] > k:
        found = found + matmul(u, mT(_over(gv - matmul(v, right), s, nonzero)))
    return found


def _over(g: Array, s: Array, nonzero: Array) -> Array:
    """``g S⁻¹``; vectors of the singular value 0 have no derivative."""
    if (of_columns(~nonzero) & (array_of(g) != 0)).any():
        hint = "svdvals, pinv, det and norms have derivatives there"
        raise LinAlgError("singular values above 0, for a gradient of their vectors", "a matrix of lower rank", hint)
    return g / of_columns(where(nonzero, s, 1))


singular.defvjp(_singular_rule)


@composite(samples=[*[sample(*s.arrays, full_matrices=False) for s in _any], sample((3, 3))],
           domain=dominant, numpy="linalg.svd")  # fmt: skip
def svd(x: Array, full_matrices: bool = True) -> SVDResult:
    """``A = U diag(S) Vh`` of matrices (..., m, n): singular values (..., k), descending, k = min(m, n), and vectors.

    U is (..., m, m) and Vh (..., n, n), or (..., m, k) and (..., k, n) without ``full_matrices``; a gradient of what
    fills them up is refused. The signs of the vectors are LAPACK's.

    >>> u, s, vh = svd(np.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> print(s)
    [3. 2.]
    """
    return SVDResult(*singular(x, bool(full_matrices)))


@primitive(stacks=True, precision="wide", samples=_any, domain=dominant, numpy="linalg.svdvals", torch="linalg.svdvals")
@lapack
def svdvals(x: Array) -> Array:
    """The singular values (..., min(m, n)) of matrices, descending; where one is 0, it has the gradient 0.

    >>> print(svdvals(np.array([[0.0, 2.0], [3.0, 0.0]])))
    [3. 2.]
    """
    return array_module(x).linalg.svd(x, False, False)


def _svdvals_rule(g: Array, x: Array) -> Array:
    u, s, vh = singular(x)
    return matmul(u * of_columns(where(apart_from_zero(s, x), g, 0)), vh)


svdvals.defvjp(_svdvals_rule)
