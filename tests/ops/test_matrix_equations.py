"""Eigenvalues of any matrix, square roots, Sylvester's equation, bands: against dense closed forms, at the edge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.errors import LinAlgError, ShapeError

pytestmark = pytest.mark.cpu_only("CuPy has no such function")
L = mg.linalg
RNG = np.random.default_rng(7)
V = np.eye(4) + 0.3 * RNG.normal(size=(4, 4))


def of_eigenvalues(*values: float) -> Any:
    """A matrix, not symmetric, with these eigenvalues and the eigenvectors V."""
    n = len(values)
    return V[:n, :n] @ np.diag(values) @ np.linalg.inv(V[:n, :n])


def leaf(x: Any) -> mg.Tensor:
    return mg.Tensor(x, requires_grad=True)


def gradient(fn: Callable[..., Any], *arrays: Any) -> list[Any]:
    tensors = [leaf(a) for a in arrays]
    return [g.numpy() for g in mg.grad(fn(*tensors), tensors)]


def check_both(fn: Callable[..., Any], *arrays: Any) -> None:
    assert mg.gradcheck(fn, arrays)
    assert mg.gradgradcheck(fn, arrays)


# ---- eigenvalues ----------------------------------------------------------------------------------------------------


def test_eigenvalues_of_any_sign_and_scale() -> None:
    check_both(lambda x: L.eig(x).eigenvalues, of_eigenvalues(-1.0, 0.0, 2.0, 30.0))
    check_both(lambda x: L.eig(x)[1], of_eigenvalues(-1.0, 0.5, 2.0))


def test_equal_eigenvalues_have_the_derivative_of_their_sum() -> None:
    """The gradient of the sum of all is the identity, of the sum of squares 2 Aᵀ."""
    a = of_eigenvalues(2.0, 2.0, 2.0, -1.0)
    np.testing.assert_allclose(gradient(lambda x: L.eigvals(x).sum(), a)[0], np.eye(4), atol=1e-10)
    np.testing.assert_allclose(gradient(lambda x: (L.eigvals(x) ** 2).sum(), a)[0], 2 * a.T, atol=1e-9)
    np.testing.assert_array_equal(gradient(lambda x: L.eigvals(x).sum(), np.zeros((3, 3)))[0], np.eye(3))
    with pytest.raises(LinAlgError, match="that differ, for a gradient of their vectors"):
        gradient(lambda x: (L.eig(x)[1] * V).sum(), np.diag([2.0, 2.0, 2.0, 1.0]))


@pytest.mark.parametrize("size", [1.0, 1e-9, 0.0], ids=str)
def test_a_defective_matrix_has_no_derivative(size: float) -> None:
    """The two eigenvalues of [[1, 1], [h, 1]] are 1 ± √h."""
    x = np.array([[1.0, 1.0], [size**2, 1.0]])
    if size == 1.0:
        np.testing.assert_allclose(gradient(lambda x: L.eigvals(x).max(), x)[0], [[0.5, 0.5], [0.5, 0.5]], atol=1e-14)
        return
    L.eigvals(x)
    with pytest.raises(LinAlgError, match="a defective one"):
        gradient(lambda x: L.eigvals(x).max(), x)


def test_complex_results_are_refused_by_name() -> None:
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    for fn in (L.eig, L.eigvals, lambda x: np.linalg.eig(leaf(x))):
        with pytest.raises(LinAlgError, match="complex numbers are out of scope"):
            fn(np.stack([np.eye(2), turn]))
    with pytest.raises(LinAlgError, match=r"real square root\n.*root is complex"):
        L.sqrtm(-np.eye(2))


# ---- square roots ---------------------------------------------------------------------------------------------------


def test_the_root_of_a_symmetric_matrix_is_that_of_its_eigenvalues() -> None:
    def by_eigenvalues(x: Any) -> Any:
        values, vectors = L.eigh(x)
        return vectors * mg.sqrt(values) @ vectors.T

    a = V @ V.T + np.eye(4)
    u = RNG.normal(size=(4, 4))
    ours, theirs = (gradient(lambda x, fn=fn: (fn(x) * u).sum(), a)[0] for fn in (L.sqrtm, by_eigenvalues))
    np.testing.assert_allclose(L.sqrtm(a), by_eigenvalues(a), rtol=1e-12)
    np.testing.assert_allclose(ours + ours.T, theirs + theirs.T, rtol=1e-10)


def test_roots_of_matrices_that_are_not_symmetric() -> None:
    check_both(L.sqrtm, of_eigenvalues(0.5, 2.0, 2.0, 9.0))
    half_turn = np.array([[0.0, -4.0], [4.0, 0.0]])  # its eigenvalues are complex, its root is real
    np.testing.assert_allclose(L.sqrtm(half_turn), 2**0.5 * np.array([[1, -1], [1, 1]]), rtol=1e-14)
    check_both(L.sqrtm, half_turn)


def test_singular_matrices() -> None:
    """Some have a root, none has a derivative there, as the root of 0 has none."""
    for x in (np.zeros((2, 2)), np.diag([4.0, 0.0]), of_eigenvalues(2.0, 0.0, 1.0)):
        root = L.sqrtm(x)
        np.testing.assert_allclose(root @ root, x, atol=1e-8)
    for x in (np.zeros((2, 2)), np.diag([4.0, 0.0])):
        with pytest.raises(LinAlgError, match="without a common eigenvalue"):
            gradient(lambda x: L.sqrtm(x).sum(), x)
    with pytest.raises(LinAlgError, match="one that has none"):
        L.sqrtm(np.array([[0.0, 1.0], [0.0, 0.0]]))


# ---- Sylvester's equation -------------------------------------------------------------------------------------------


def test_sylvesters_equation_is_that_of_the_kronecker_products() -> None:
    """``(A ⊗ 1 + 1 ⊗ Bᵀ) vec X = vec Q``, solved densely; eigenvalues of all kinds, stacks broadcast."""
    turn = np.array([[1.0, -3.0], [2.0, 1.0]])
    for a, b in [(of_eigenvalues(1.0, 2.0, 5.0), turn), (-turn, -turn.T), (np.stack([V, 2 * V]), turn)]:
        m, n = a.shape[-1], 2
        q = RNG.normal(size=(m, n))

        def dense(a: Any, b: Any, q: Any, m: int = m) -> Any:
            system = mg.array([mg.kron(x, np.eye(2)) + mg.kron(np.eye(m), b.T) for x in a.reshape(-1, m, m)])
            return mg.linalg.solve(system, mg.reshape(q, (m * 2, 1))).reshape(*a.shape[:-2], m, 2)

        u = RNG.normal(size=(*a.shape[:-2], m, n))
        np.testing.assert_allclose(L.solve_sylvester(a, b, q), dense(a, b, q), rtol=1e-9, atol=1e-12)
        for ours, theirs in zip(*(gradient(lambda *z, fn=fn, u=u: (fn(*z) * u).sum(), a, b, q)
                                  for fn in (L.solve_sylvester, dense)), strict=True):  # fmt: skip
            np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10)


def test_sylvesters_equation_beyond_the_range_and_beside_nan() -> None:
    """``2 a x = q`` of 1e-200 and 1e200 overflows; one matrix of a stack that has a NaN leaves the others alone."""
    with np.errstate(over="ignore"):
        assert L.solve_sylvester(*(np.full((1, 1), v) for v in (1e-200, 1e-200, 1e200))) == np.inf
    found = L.solve_sylvester(np.array([[[1.0]], [[np.nan]], [[2.0]]]), np.ones((1, 1)), np.ones((1, 1)))
    np.testing.assert_allclose(found.ravel(), [0.5, np.nan, 1 / 3])


def test_sylvesters_equation_refuses() -> None:
    for a, b in [(np.eye(2), -np.eye(3)), (np.zeros((2, 2)), np.zeros((3, 3))), (np.diag([1.0, 1e9]), -np.eye(3))]:
        with pytest.raises(LinAlgError, match="two that no digit tells apart"):
            L.solve_sylvester(a, b, np.ones((2, 3)))
    with pytest.raises(ShapeError, match=r"A X . X B = Q"):
        L.solve_sylvester(np.eye(2), np.eye(3), np.ones((3, 2)))
    with pytest.raises(LinAlgError, match="square"):
        L.solve_sylvester(np.ones((2, 3)), np.eye(3), np.ones((2, 3)))


# ---- bands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lower", "upper"), [(0, 0), (0, 2), (3, 0), (1, 2), (2, 1), (4, 5)])
@pytest.mark.parametrize(("n", "columns"), [(5, ()), (5, (2,)), (1, ())], ids=["vector", "matrix", "number"])
def test_bands_are_those_of_the_dense_matrix(lower: int, upper: int, n: int, columns: Any) -> None:
    ab = RNG.normal(size=(lower + upper + 1, n))
    ab[upper] += 5
    b, u = RNG.normal(size=(n, *columns)), RNG.normal(size=(n, *columns))

    def dense(ab: Any, b: Any) -> Any:
        zero = ab[0, 0] * 0
        rows = [[ab[upper + i - j, j] if -upper <= i - j <= lower else zero for j in range(n)] for i in range(n)]
        return L.solve(mg.array(rows), b)

    ours = lambda ab, b: L.solve_banded((lower, upper), ab, b)
    np.testing.assert_allclose(ours(ab, b), dense(ab, b), rtol=1e-10)
    for found, known in zip(*(gradient(lambda *z, fn=fn: (fn(*z) * u).sum(), ab, b) for fn in (ours, dense)),
                            strict=True):  # fmt: skip
        np.testing.assert_allclose(found, known, rtol=1e-9, atol=1e-12)


def test_bands_refuse() -> None:
    for bands, ab, b in [((1, 1), np.ones((2, 3)), np.ones(3)), ((1, 1), np.ones((3, 3)), np.ones(2)),
                         ((-1, 3), np.ones((3, 3)), np.ones(3)), ((1, 1), np.ones(3), np.ones(3))]:  # fmt: skip
        with pytest.raises(ShapeError, match="ab of shape"):
            L.solve_banded(bands, ab, b)
    for n in (1, 3):
        with pytest.raises(LinAlgError):
            L.solve_banded((1, 1), np.zeros((3, n)), np.ones(n))


# ---- all of them ----------------------------------------------------------------------------------------------------

ALL: dict[str, Callable[[Any], Any]] = {
    "eigvals": L.eigvals, "sqrtm": L.sqrtm, "solve_sylvester": lambda x: L.solve_sylvester(x, x, x),
    "solve_banded": lambda x: L.solve_banded((1, 1), x, x[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_nan_is_handed_on_or_refused(name: str) -> None:
    for value in (np.nan, np.inf):
        x = np.diag([1.0, value, 2.0])
        with contextlib.suppress(LinAlgError):
            assert not np.isfinite(ALL[name](x)).all()


@pytest.mark.parametrize("name", ALL)
def test_half_precision_and_integers(name: str) -> None:
    x = np.array([[4, 1, 1], [1, 6, 0], [2, 1, 9]])
    expected = ALL[name](x.astype(np.float64))
    assert ALL[name](x).dtype == np.float64
    np.testing.assert_array_equal(ALL[name](x), expected)
    half = leaf(x.astype(np.float16))
    out = ALL[name](half)
    assert out.dtype == np.float16
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-3, atol=1e-3)
    out.sum().backward()
    assert half.grad.dtype == np.float16 and np.isfinite(half.grad).all()
