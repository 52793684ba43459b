"""Linear algebra where it is hard: values that repeat or vanish, one triangle, stacks, no elements, extreme sizes.

The rest is in the registry's tests.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import minigrad as mg
from minigrad.errors import LinAlgError, MiniGradError
from minigrad.ops import matrix_functions

L = mg.linalg
RNG = np.random.default_rng(5)
Q = np.linalg.qr(RNG.normal(size=(4, 4)))[0]
P = np.linalg.qr(RNG.normal(size=(4, 4)))[0]
G = RNG.normal(size=(4, 4))


def of_values(*values: float, columns: int = 4) -> Any:
    """A matrix with these singular values."""
    return Q[:, : len(values)] @ np.diag(values) @ P[:columns, : len(values)].T


def symmetric(*values: float) -> Any:
    return Q @ np.diag(values) @ Q.T


def check_both(fn: Callable[..., Any], *arrays: Any) -> None:
    """First and second derivatives are those of central differences."""
    assert mg.gradcheck(fn, arrays)
    assert mg.gradgradcheck(fn, arrays)


def leaf(x: Any) -> mg.Tensor:
    return mg.Tensor(x, requires_grad=True)


def gradient(fn: Callable[..., Any], x: Any) -> Any:
    return mg.grad(fn(t := leaf(x)), [t])[0].numpy()


def mirrored(x: Any) -> Any:
    return (x + x.swapaxes(-1, -2)) / 2


# ---- determinants ---------------------------------------------------------------------------------------------------

SPECTRA = [
    (3, 2, 1, 0.5),
    (3, 2, 1, 0),
    (3, 2, 0, 0),
    (3, 0, 0, 0),
    (0, 0, 0, 0),
    (2, 2, 2, 2),
    (2, 2, 1, 0),
    (2, 2, 0, 0),
]


@pytest.mark.parametrize("values", SPECTRA)
def test_determinant_of_any_rank(values: Any) -> None:
    check_both(L.det, of_values(*values))


def test_determinants_of_exactly_singular_integers() -> None:
    """The gradient is the matrix of cofactors, in closed form."""
    a = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    cofactors = [[-3, 6, -3], [6, -12, 6], [-3, 6, -3]]
    np.testing.assert_allclose(gradient(L.det, a), cofactors, atol=1e-13)


def test_logarithm_of_a_negative_determinant() -> None:
    a = of_values(3, 2, 1, 0.5)
    a = a if np.linalg.det(a) < 0 else a[[1, 0, 2, 3]]
    sign, logarithm = L.slogdet(leaf(a))
    assert float(sign) == -1
    assert float(logarithm) == pytest.approx(np.log(3))
    np.testing.assert_allclose(gradient(lambda x: L.slogdet(x)[1], a), np.linalg.inv(a).T)
    check_both(lambda x: L.slogdet(x).logabsdet, np.stack([a, 2 * a[::-1]]))


def test_determinants_beyond_the_range_of_their_dtype() -> None:
    a = np.eye(200) * 1e-3
    np.testing.assert_allclose(float(L.slogdet(a).logabsdet), 200 * np.log(1e-3))
    np.testing.assert_allclose(gradient(lambda x: L.slogdet(x)[1], a), np.eye(200) * 1e3)


# ---- equations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes", [((4, 4), (4,)), ((2, 1, 4, 4), (3, 4, 2)), ((4, 4), (2, 4, 1)), ((2, 4, 4), (4,))], ids=str
)
def test_solving_is_multiplying_by_the_inverse(shapes: Any) -> None:
    a = np.broadcast_to(G + 5 * np.eye(4), shapes[0]) + RNG.normal(size=shapes[0]) / 4
    b = RNG.normal(size=shapes[1])

    def both(solved: Callable[..., Any]) -> Any:
        x, y = leaf(a), leaf(b)
        out = solved(x, y)
        found = mg.grad((out**3).sum(), [x, y], create_graph=True)
        second = mg.grad(sum((g**2).sum() for g in found), [x, y])
        return [t.numpy() for t in (out, *found, *second)]

    def by_inverse(x: Any, y: Any) -> Any:
        return mg.matmul(L.inv(x), y)

    for ours, theirs in zip(both(L.solve), both(by_inverse), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("trans", [0, 1])
def test_large_triangles_are_solved_in_halves(lower: bool, trans: int) -> None:
    """Values and gradients are those of the whole, and nothing in the other triangle is read."""
    n = 150
    full = RNG.normal(size=(2, n, n)) / n + np.eye(n)
    part = np.tril(full) if lower else np.triu(full)
    junk = np.where(part == 0, np.nan, part)
    b = RNG.normal(size=(n, 3))
    x, y, z = leaf(junk), leaf(part), leaf(b)
    ours = L.solve_triangular(x, z, trans, lower)
    theirs = L.solve(y.swapaxes(-1, -2) if trans else y, b)
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-10)
    up = RNG.normal(size=ours.shape)
    ours.backward(up)
    theirs.backward(up)
    np.testing.assert_allclose(x.grad, (np.tril if lower else np.triu)(y.grad), rtol=1e-9, atol=1e-12)


def test_singular_matrices_raise_what_numpy_raises() -> None:
    singular = np.stack([np.eye(2), np.ones((2, 2))])
    b = np.ones((2, 1))
    calls: list[Callable[[Any], Any]] = [
        L.inv, lambda x: L.solve(x, b), lambda x: L.cholesky(-x), lambda x: L.matrix_power(x, -1),
        lambda x: L.solve_triangular(x - 1, b), lambda x: np.linalg.inv(x), lambda x: L.cond(x, 1),
    ]  # fmt: skip
    for call in calls:
        for x in (singular, leaf(singular)):
            if call is calls[-2] and not isinstance(x, mg.Tensor):
                continue
            with pytest.raises(np.linalg.LinAlgError) as caught:
                call(x)
            assert isinstance(caught.value, LinAlgError) and isinstance(caught.value, MiniGradError)
    with pytest.raises(LinAlgError):
        gradient(lambda x: L.slogdet(x).logabsdet.sum(), singular)


# ---- one triangle ---------------------------------------------------------------------------------------------------

FROM_TRIANGLE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cholesky": (L.cholesky, torch.linalg.cholesky),
    "cholesky upper": (lambda x: L.cholesky(x, upper=True), lambda x: torch.linalg.cholesky(x, upper=True)),
    "eigvalsh": (L.eigvalsh, torch.linalg.eigvalsh),
    "projector": (lambda x: (v := L.eigh(x, "U")[1][..., :2]) @ v.swapaxes(-1, -2),
                  lambda x: (v := torch.linalg.eigh(x)[1][..., :2]) @ v.mT),
}  # fmt: skip


@pytest.mark.parametrize("units", [0, 2], ids=["exactly", "to rounding"])
@pytest.mark.parametrize("name", FROM_TRIANGLE)
def test_the_gradient_of_a_symmetric_matrix_is_symmetric(name: str, units: int) -> None:
    """A product such as ``Q diag(λ) Qᵀ`` is symmetric but for its roundings."""
    ours, theirs = FROM_TRIANGLE[name]
    a = mirrored(np.stack([symmetric(1, 2, 3, 5), symmetric(4, 1, 2, 9)]))
    a[:, 1, 0] += units * np.finfo(a.dtype).eps
    assert (a == a.swapaxes(-1, -2)).all() == (units == 0)
    x, t = leaf(a), torch.tensor(a, requires_grad=True)
    out, wanted = ours(x), theirs(t)
    up = RNG.normal(size=out.shape)
    out.backward(up)
    wanted.backward(torch.tensor(up))
    np.testing.assert_allclose(out.numpy(), wanted.detach().numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(x.grad, t.grad.numpy(), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(x.grad, x.grad.swapaxes(-1, -2), rtol=1e-12)


@pytest.mark.parametrize("upper", [False, True])
def test_the_other_triangle_is_not_read(upper: bool) -> None:
    a = symmetric(1, 2, 3, 5)
    unread = np.tri(4, k=-1, dtype=bool) if upper else np.tri(4, k=-1, dtype=bool).T
    junk = np.where(unread, np.nan, a)
    for fn in (lambda x: L.cholesky(x, upper), lambda x: L.eigvalsh(x, "U" if upper else "L")):
        x = leaf(junk)
        out = fn(x)
        np.testing.assert_allclose(out.numpy(), fn(a), rtol=1e-12, atol=1e-14)
        out.sum().backward()
        assert np.isfinite(x.grad).all() and not x.grad[np.isnan(junk)].any()


# ---- values that repeat ---------------------------------------------------------------------------------------------

REPEATED = {"all": (2, 2, 2, 2), "two": (1, 2, 2, 5), "two pairs": (3, 3, 5, 5), "zeros": (0, 0, 0, 4)}


@pytest.mark.parametrize("values", REPEATED.values(), ids=REPEATED)
def test_functions_of_eigenvalues_that_repeat(values: Any) -> None:
    """``Σ f(λ)`` has the gradient ``V f'(λ) Vᵀ``, whichever vectors LAPACK picks."""
    a = symmetric(*values)
    wanted = Q @ np.diag(np.exp(values)) @ Q.T
    for fn in (lambda x: mg.exp(L.eigvalsh(x)).sum(), lambda x: mg.exp(L.eigh(x).eigenvalues).sum()):
        np.testing.assert_allclose(gradient(lambda x, fn=fn: fn(mirrored(x)), a), wanted, rtol=1e-12, atol=1e-12)
        assert mg.gradcheck(lambda x, fn=fn: fn(mirrored(x)), [a])


def test_vectors_of_values_that_stand_apart_from_two_that_repeat() -> None:
    def top(x: Any) -> Any:
        v = L.eigh(mirrored(x)).eigenvectors[:, -1:]
        return v @ v.swapaxes(0, 1)

    assert mg.gradcheck(top, [symmetric(1, 2, 2, 5)])

    def first(x: Any) -> Any:
        u, s, vh = L.svd(x)
        return u[:, :1] @ vh[:1] * s[0]

    assert mg.gradcheck(first, [of_values(5, 2, 2, 1)])
    assert mg.gradcheck(first, [of_values(5, 2, 0, 0)])


@pytest.mark.parametrize(("dtype", "power"), [("d", 0.0), ("d", -1070.0), ("d", 1000.0), ("f", -145.0), ("f", 120.0)])
@pytest.mark.parametrize(
    "name", [pytest.param("eig", marks=pytest.mark.cpu_only("CuPy lacks it")), "eigh", "svd", "reduced"]
)
def test_values_have_the_same_slopes_at_every_size(name: str, dtype: str, power: float) -> None:
    """Eigenvalues and singular values are proportional to the matrix, so their derivatives don't change with its size.

    In numbers this small a quotient by the difference of two values is infinite, that nobody asked for here.
    """
    size = 2.0**power
    values = {
        "eig": lambda x: mg.linalg.eig(x)[0], "eigh": lambda x: mg.linalg.eigh(x)[0],
        "svd": lambda x: mg.linalg.svd(x)[1], "reduced": lambda x: mg.linalg.svd(x, full_matrices=False)[1],
    }[name]  # fmt: skip
    x = np.array([[4.0, 1, 0], [1, 5, 2], [0, 2, 6]])[: 2 if name == "reduced" else 3]
    largest, small = (gradient(lambda x: values(x).max(), (x * s).astype(dtype)) for s in (1.0, size))
    u, _, vh = np.linalg.svd(x)
    np.testing.assert_allclose(largest, np.outer(u[:, 0], vh[0]), rtol=1e-5)
    np.testing.assert_allclose(small, largest, rtol=0.2 if size < np.finfo(dtype).tiny else 1e-5)


@pytest.mark.parametrize("gap", [0.0, 1e-15])
def test_vectors_of_values_that_repeat_are_refused(gap: float) -> None:
    """A root by eigenvectors would have a gradient of rounding errors, or of zeros, where the true one is finite."""

    def root(x: Any) -> Any:
        values, v = L.eigh(mirrored(x))
        return (v * mg.sqrt(values)) @ v.swapaxes(-1, -2)

    def by_singular_values(x: Any) -> Any:
        u, s, vh = L.svd(x)
        return (u * mg.sqrt(s)) @ vh

    for fn in (root, by_singular_values):
        fn(leaf(symmetric(1, 2, 2 + gap, 5)))
        with pytest.raises(LinAlgError, match="differ"):
            gradient(lambda x, fn=fn: fn(x).sum(), symmetric(1, 2, 2 + gap, 5))
        assert mg.gradcheck(fn, [symmetric(1, 2, 2.01, 5)])
    check_both(root, symmetric(1, 2, 3, 5))


@pytest.mark.parametrize("values", [(2, 2, 2, 2), (3, 2, 2, 1), (3, 2, 1, 0.5), (2, 2, 2), (3, 3, 1)])
@pytest.mark.parametrize("wide", [False, True])
def test_sum_of_singular_values_that_repeat(values: Any, wide: bool) -> None:
    a = of_values(*values, columns=len(values))
    check_both(lambda x: L.matrix_norm(x, ord="nuc"), a.T if wide else a)
    if len(values) == 4:
        np.testing.assert_allclose(gradient(lambda x: L.svdvals(x).sum(), a), Q @ P.T, atol=1e-12)
    assert mg.gradcheck(lambda x: (L.svdvals(x) ** 3).sum(), [a])


# ---- lower rank -----------------------------------------------------------------------------------------------------

LEFT, RIGHT = RNG.normal(size=(2, 5, 2)), RNG.normal(size=(2, 2, 4))
B = RNG.normal(size=(5, 3))
OF_LOWER_RANK: dict[str, Callable[[Any], Any]] = {
    "pinv": L.pinv,
    "transposed": lambda x: L.pinv(x.swapaxes(-1, -2)),
    "lstsq": lambda x: L.lstsq(x, B)[0],
    "nuc": lambda x: L.matrix_norm(x, ord="nuc"),
}


@pytest.mark.parametrize("name", OF_LOWER_RANK)
def test_along_matrices_of_the_same_rank(name: str) -> None:
    """Products of factors with two columns and rows have rank 2, however the factors move."""
    check_both(lambda a, b: OF_LOWER_RANK[name](a @ b), LEFT[0], RIGHT[0])
    assert mg.gradcheck(lambda a, b: OF_LOWER_RANK[name](a @ b), [LEFT, RIGHT])


def test_lstsq_gives_what_numpy_gives() -> None:
    b = RNG.normal(size=5)
    for a in (LEFT[0], LEFT[0].T, LEFT[0] @ RIGHT[0], np.zeros((5, 2)), np.zeros((0, 2)), np.zeros((5, 0))):
        right = b[: len(a)]
        for rcond in (None, -1, 0.3):
            for ours, theirs in zip(L.lstsq(a, right, rcond), np.linalg.lstsq(a, right, rcond), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-14)
                assert np.shape(ours) == np.shape(theirs)


def test_least_squares_of_two_right_hand_sides_and_a_stack() -> None:
    check_both(lambda a, b: L.lstsq(a, b)[0], LEFT, B)
    check_both(lambda a, b: L.lstsq(a, b)[1], LEFT[0], B)
    check_both(lambda a: L.lstsq(a, np.ones(2))[0], RIGHT[0])


# ---- QR -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5), (2, 4, 2), (1, 3), (3, 1)], ids=str)
def test_qr_up_to_the_signs(shape: Any) -> None:
    a = RNG.normal(size=shape)
    check_both(lambda x: L.qr(x)[1] ** 2, a)
    check_both(lambda x: (q := L.qr(x)[0]) @ q.swapaxes(-1, -2), a)


def test_a_basis_that_is_filled_up_has_no_gradient() -> None:
    a = RNG.normal(size=(5, 2))
    for whole, part in [
        (lambda x: L.qr(x, "complete")[0][:, :2], lambda x: L.qr(x)[0]),
        (lambda x: L.qr(x, "complete")[1][:2], lambda x: L.qr(x, "r")),
        (lambda x: L.svd(x)[0][:, :2], lambda x: L.svd(x, full_matrices=False)[0]),
        (lambda x: L.svd(x.T)[2][:2], lambda x: L.svd(x.T, full_matrices=False).Vh),
    ]:
        np.testing.assert_allclose(whole(a), part(a))
        np.testing.assert_allclose(
            gradient(lambda x, f=whole: (f(x) ** 3).sum(), a), gradient(lambda x, f=part: (f(x) ** 3).sum(), a)
        )
    for fn in (lambda x: L.qr(x, "complete")[0], lambda x: L.svd(x)[0], lambda x: L.svd(x.T)[2]):
        with pytest.raises(LinAlgError, match="first 2 vectors"):
            gradient(lambda x, fn=fn: fn(x).sum(), a)
    with pytest.raises(LinAlgError):
        gradient(lambda x: L.qr(x)[0].sum(), np.zeros((3, 2)))


# ---- the exponential ------------------------------------------------------------------------------------------------


def test_exponential_of_a_rotation_by_a_large_angle() -> None:
    for angle in (0.1, 3.0, 100.0, 1e4):
        turn = np.array([[0.0, -angle], [angle, 0.0]])
        wanted = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        np.testing.assert_allclose(L.expm(turn), wanted, atol=1e-15 * max(10, angle**1.2))


def test_exponentials_of_a_stack_of_all_sizes() -> None:
    """Each is that of the matrix alone, and torch's; of a diagonal matrix it is exact."""
    stack = G * np.array([1e-9, 1e-2, 1.0, 4.0])[:, None, None]
    np.testing.assert_allclose(L.expm(stack), torch.matrix_exp(torch.tensor(stack)).numpy(), rtol=1e-12, atol=1e-12)
    for one, all_ in zip(stack, L.expm(stack), strict=True):
        np.testing.assert_array_equal(L.expm(one), all_)
    np.testing.assert_allclose(L.expm(np.diag([700.0, -700.0, 0.0])), np.diag(np.exp([700.0, -700.0, 0.0])), rtol=1e-12)
    assert np.isnan(L.expm(np.full((2, 2), np.nan))).all()


@pytest.mark.parametrize(
    "a", [np.zeros((3, 3)), np.eye(3), np.eye(3, k=1), 3 * G[:3, :3], of_values(2, 2, 2, 2)], ids=range(5)
)
def test_derivatives_of_the_exponential(a: Any) -> None:
    """At 0, of a nilpotent matrix, of eigenvalues that repeat and of a large one: no eigenvectors are asked."""
    check_both(L.expm, a)


def test_a_gradient_of_any_size_loses_no_digit() -> None:
    def scaled(size: float) -> Any:
        x = leaf(G)
        L.expm(x).backward(size * Q)
        return x.grad / size

    for size in (1e-200, 1e-3, 1e3, 1e200):
        np.testing.assert_allclose(scaled(size), scaled(1.0), rtol=1e-12)


# ---- norms, powers, products ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [None, "fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [(0, 1), (2, 0), (-1, -3)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_norms_of_matrices_in_any_two_axes(order: Any, axis: Any, keepdims: bool) -> None:
    x = RNG.normal(size=(2, 3, 4))
    ours = L.norm(x, order, axis, keepdims)
    theirs = np.linalg.norm(x, order, axis, keepdims)
    np.testing.assert_allclose(ours, theirs, rtol=1e-13)
    assert ours.shape == theirs.shape
    check_both(lambda t: L.norm(t, order, axis, keepdims), x)


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, -1, np.inf, -np.inf])
def test_norms_of_vectors(order: Any) -> None:
    x = RNG.normal(size=(2, 3))
    np.testing.assert_allclose(L.norm(x, order, 1), np.linalg.norm(x, order, 1), rtol=1e-13)
    check_both(lambda t: L.norm(t, order, axis=0), x)
    np.testing.assert_allclose(L.norm(x[0], order), np.linalg.norm(x[0], order), rtol=1e-13)


@pytest.mark.parametrize("n", range(-4, 12))
def test_powers(n: int) -> None:
    a = G / 3 + np.eye(4)
    np.testing.assert_allclose(L.matrix_power(a, n), np.linalg.matrix_power(a, n), rtol=1e-10, atol=1e-12)
    assert mg.gradcheck(lambda x: L.matrix_power(x, n), [a])


def test_the_cheapest_order_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by hand: ((10 x 100)(100 x 5))(5 x 50) takes 7500 multiplications, the other order 75 000."""
    a, b, c = (RNG.normal(size=s) for s in ((10, 100), (100, 5), (5, 50)))
    sizes: list[Any] = []
    monkeypatch.setattr(matrix_functions, "matmul", lambda x, y: sizes.append((x.shape, y.shape)) or x @ y)
    L.multi_dot([a, b, c])
    assert sizes == [((10, 100), (100, 5)), ((10, 5), (5, 50))]
    sizes.clear()
    arrays = [RNG.normal(size=s) for s in ((30, 35), (35, 15), (15, 5), (5, 10), (10, 20), (20, 25))]
    np.testing.assert_allclose(L.multi_dot(arrays), functools.reduce(operator.matmul, arrays), rtol=1e-10)
    assert sum(x[0] * x[1] * y[1] for x, y in sizes) == 15_125  # Cormen et al., section 15.2


# ---- dtypes and shapes ----------------------------------------------------------------------------------------------


def test_half_precision_is_computed_in_float32() -> None:
    a = (G + 5 * np.eye(4)).astype(np.float16)
    np.testing.assert_array_equal(L.inv(a), np.linalg.inv(a.astype(np.float32)).astype(np.float16))
    assert [part.dtype for part in L.svd(a)] == [np.float16] * 3
    assert L.solve(a, np.ones(4, np.float32)).dtype == np.float32
    assert L.expm(a).dtype == np.float16
    assert L.inv(np.eye(2, dtype=int)).dtype == np.float64
    with mg.autocast("float16"):
        assert L.inv(mg.Tensor(a)).dtype == np.float32


EMPTY: dict[str, Callable[[Any], Any]] = {
    "det": L.det, "inv": L.inv, "slogdet": lambda x: L.slogdet(x)[1], "cholesky": L.cholesky, "pinv": L.pinv,
    "qr": lambda x: L.qr(x)[1], "eigh": lambda x: L.eigh(x)[1], "eigvalsh": L.eigvalsh, "svd": lambda x: L.svd(x)[0],
    "expm": L.expm, "power": lambda x: L.matrix_power(x, 3), "nuc": lambda x: L.matrix_norm(x, ord="nuc"),
    "solve": lambda x: L.solve(x, x), "triangular": lambda x: L.solve_triangular(x, x),
    "lstsq": lambda x: L.lstsq(x, x)[0],
}  # fmt: skip
OF_NOTHING = {"det": 1.0, "slogdet": 0.0, "nuc": 0.0}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("shape", [(0, 0), (0, 3, 3), (2, 0, 0)], ids=str)
def test_no_elements(name: str, shape: Any) -> None:
    x = leaf(np.zeros(shape))
    out = EMPTY[name](x)
    (out * 2).sum().backward()
    assert x.grad.shape == shape
    np.testing.assert_array_equal(out.numpy(), np.full(out.shape, OF_NOTHING.get(name, 0.0)))


def test_one_by_one() -> None:
    x = np.array([[2.0]])
    for fn, slope in [
        (L.det, 1), (L.inv, -0.25), (lambda t: L.slogdet(t)[1], 0.5), (L.cholesky, 2**-1.5), (L.pinv, -0.25),
        (L.eigvalsh, 1), (L.svdvals, 1), (L.expm, np.exp(2)), (lambda t: L.matrix_power(t, 3), 12), (L.cond, 0),
    ]:  # fmt: skip
        np.testing.assert_allclose(gradient(lambda t, fn=fn: fn(t).sum(), x), [[slope]], atol=1e-14)
