"""Functions of matrices made of solutions and decompositions: determinant, pseudoinverse, powers, exponential, norms.

Their rules are closed forms, and hold where singular values repeat or vanish, as far as there is a derivative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend import Array, Axes, array_module, array_of
from minigrad.engine.broadcast import unbroadcast
from minigrad.engine.core import primitive
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError, LinAlgError, ShapeError
from minigrad.messages.explain import describe
from minigrad.ops._matrices import dominant, identity, lapack, mT, of_columns, of_matrices, of_rows, rounding
from minigrad.ops.decompositions import apart_from_zero, singular, svdvals
from minigrad.ops.linalg import dot, matmul
from minigrad.ops.piecewise import absolute, astype, where
from minigrad.ops.reduce import max as largest
from minigrad.ops.reduce import min as smallest
from minigrad.ops.reduce import norm, power_of_two, sum
from minigrad.ops.running import prod
from minigrad.ops.shape import broadcast_to, concatenate, diagonal, expand_dims, squeeze
from minigrad.ops.solving import as_columns, inv

# fmt: off
__all__ = [
    "cond", "det", "expm", "lstsq", "matrix_norm", "matrix_power", "matrix_rank", "matrix_transpose", "multi_dot",
    "pinv", "vector_norm",
]
# fmt: on

_square = [sample((3, 3)), sample((2, 3, 3)), sample((1, 1))]
_any = [sample((3, 3)), sample((4, 2)), sample((2, 3)), sample((2, 4, 3))]

# ---- determinant ----------------------------------------------------------------------------------------------------


@primitive(stacks=True, precision="wide", samples=_square, domain=dominant, numpy="linalg.det",
           torch="linalg.det")  # fmt: skip
@lapack
def det(x: Array) -> Array:
    """The determinants of matrices (..., n, n). The gradient is that of the cofactors, for singular matrices too.

    >>> print(float(det(np.array([[2.0, 1.0], [0.0, 3.0]]))))
    6.0
    """
    return array_module(x).asarray(array_module(x).linalg.det(x))


@primitive(stacks=True, part_of="det", precision="wide", samples=_square, domain=dominant, torch=False)
@lapack
def cofactors(x: Array) -> Array:
    """The transpose of the adjugate, ``det(A) A⁻ᵀ`` where that exists: ``det(UV) U diag(Πⱼ₍ⱼ≠ᵢ₎ sⱼ) Vᵀ`` everywhere."""
    u, s, vh = array_module(x).linalg.svd(x)
    others = array_module(x).where(identity(x), 1, of_columns(s)).prod(-1)
    return matmul(u * of_columns(_handedness(u, vh) * others), vh)


def _handedness(u: Array, vh: Array) -> Array:
    """``det(U) det(V)``, which is 1 or -1."""
    return array_module(u).sign(det(matmul(array_of(u), array_of(vh))))[..., None]


def _cofactors_rule(g: Array, x: Array) -> Array:
    """``±U (diag(P h) - P ∘ Hᵀ) Vᵀ`` with ``H = Uᵀ g V``, h its diagonal, Pᵢⱼ the product of all s but sᵢ and sⱼ.

    The second derivative of the determinant, written out for a diagonal matrix. P takes n³ numbers on the way.
    """
    u, s, vh = singular(x)
    eye = identity(s)
    left_out = expand_dims(eye, -2) | expand_dims(eye, -3)  # (i, j, k): whether k is i or j
    pairs = where(eye, 0, prod(where(left_out, 1, expand_dims(s, (-2, -3))), -1))
    h = matmul(matmul(mT(u), g), mT(vh))
    straight = sum(pairs * of_columns(diagonal(h, 0, -2, -1)), -1)
    inner = where(eye, of_columns(straight), -pairs * mT(h))
    return matmul(matmul(u, inner), vh) * expand_dims(_handedness(u, vh), -1)


det.defvjp(lambda g, x: of_matrices(g) * cofactors(x))
cofactors.defvjp(_cofactors_rule)

# ---- pseudoinverse and least squares --------------------------------------------------------------------------------


def _pseudo(x: Array, rcond: float | None) -> tuple[Array, Array, Array]:
    """U, V and the reciprocals of the singular values above ``rcond`` times the largest, 0 in place of the others."""
    xp = array_module(x)
    u, s, vh = xp.linalg.svd(x, False)
    kept = s > (rounding(x) if rcond is None else rcond) * s[..., :1]
    return u, mT(vh), xp.where(kept, 1 / xp.where(kept, s, 1), 0).astype(x.dtype)


@primitive(stacks=True, precision="wide", samples=_any, domain=dominant, numpy="linalg.pinv",
           torch="linalg.pinv")  # fmt: skip
@lapack
def pinv(x: Array, rcond: float | None = None) -> Array:
    """The pseudoinverses (..., n, m) of matrices (..., m, n): ``V S⁻¹ Uᵀ`` of the singular values that are not 0.

    0 are those up to ``rcond`` times the largest, by default max(m, n) units in the last place. The gradient is that
    along matrices of the same rank (Golub & Pereyra, 1973): at a lower rank pinv jumps in all other directions.

    >>> print(pinv(np.array([[2.0, 0.0], [0.0, 0.0]])))
    [[0.5 0. ]
     [0.  0. ]]
    """
    u, v, reciprocal = _pseudo(x, rcond)
    return matmul(v * of_columns(reciprocal), mT(u))


def _pinv_rule(g: Array, x: Array, out: Array) -> Array:
    """``-Pᵀ g Pᵀ + (1 - A P) gᵀ P Pᵀ + Pᵀ P gᵀ (1 - P A)`` with P the pseudoinverse."""
    p, pt, gt = out, mT(out), mT(g)
    left, right = matmul(gt, matmul(p, pt)), matmul(matmul(pt, p), gt)
    off_columns = left - matmul(x, matmul(p, left))
    off_rows = right - matmul(matmul(right, p), x)
    return off_columns + off_rows - matmul(pt, matmul(g, pt))


pinv.defvjp(_pinv_rule)


@primitive(stacks=True, part_of="lstsq", precision="wide", samples=[sample((4, 2), (4, 2)), sample((2, 3), (2, 2)),
           sample((2, 3, 3), (3, 2))], domain=dominant, torch=False)  # fmt: skip
@lapack
def least_squares(a: Array, b: Array, rcond: float | None = None) -> Array:
    """The shortest X with the smallest ``‖A X - B‖``."""
    u, v, reciprocal = _pseudo(a, rcond)
    return matmul(v, of_rows(reciprocal) * matmul(mT(u), b))


@least_squares.defjoint("a", "b")
def _least_squares_rule(
    g: Array, a: Array, b: Array, out: Array, b_shape: Any, rcond: float | None
) -> tuple[Array, Array]:
    """The derivative of ``P B`` as that of the pseudoinverse P, each product with P or Pᵀ a least-squares problem."""
    y = least_squares(mT(a), g, rcond)
    ga = matmul(b - matmul(a, out), mT(least_squares(a, y, rcond))) - matmul(y, mT(out))
    ga = ga + matmul(least_squares(mT(a), out, rcond), mT(g - matmul(mT(a), y)))
    return unbroadcast(ga, a.shape), unbroadcast(y, b_shape)


@composite(samples=[sample((4, 2), (4,)), sample((4, 2), (4, 2)), sample((2, 3), (2,)), sample((3, 3), (3,))],
           domain=dominant, torch=False)  # fmt: skip
def lstsq(a: Array, b: Array, rcond: float | None = None) -> tuple[Array, Array, Array, Array]:
    """The x with the smallest ``‖A x - b‖``, the shortest of several; ``‖A x - b‖²``, rank and singular values of A.

    A is (..., m, n), b (m,) or (..., m, k). As in NumPy the second result is empty if m ≤ n or a rank is below n.
    Singular values up to ``rcond`` times the largest count as 0; a rcond outside of (0, 1) is the machine's precision.
    The gradient is as that of ``pinv``: at a rank below min(m, n) along matrices of the same rank.

    >>> x, squares, rank, values = lstsq(np.array([[1.0], [1.0]]), np.array([1.0, 3.0]))
    >>> print(x, squares, int(rank))
    [2.] [2.] 1
    """
    columns = as_columns(a, b)
    if rcond is not None and not 0 < rcond < 1:  # as in LAPACK
        rcond = float(np.finfo(array_of(a).dtype).eps) if a.dtype.kind == "f" else None
    x = least_squares(a, columns, rcond)
    values = svdvals(a)
    rank = matrix_rank(a, rcond)
    m, n = a.shape[-2:]
    squares = sum((columns - matmul(a, x)) ** 2, -2)
    if m <= n or (array_of(rank) < n).any():
        squares = squares[..., :0] if squares.ndim == 1 else squares[..., :0].reshape(0)
    return squeeze(x, -1) if b.ndim == 1 else x, squares, rank, values


@primitive(samples=[sample((3, 3)), sample((2, 4, 3))], domain=dominant, torch="linalg.matrix_rank")
@lapack
def matrix_rank(x: Array, rtol: float | None = None) -> Array:
    """How many singular values are above ``rtol`` (max(m, n) units) times the largest; without a derivative.

    >>> print(int(matrix_rank(np.ones((3, 3)))))
    1
    """
    if x.ndim < 2:
        return array_module(x).asarray((x != 0).any().astype(int))
    s = array_module(x).linalg.svd(x, False, False)
    return array_module(x).asarray((s > (rounding(x) if rtol is None else rtol) * s[..., :1]).sum(-1))


# ---- powers, products and the exponential ---------------------------------------------------------------------------


@composite(samples=[sample((3, 3), n=n) for n in (0, 1, 2, 5, -1, -3)], domain=dominant,
           numpy="linalg.matrix_power", torch="linalg.matrix_power")  # fmt: skip
def matrix_power(x: Array, n: int) -> Array:
    """The product ``A A … A`` of n square matrices; of inverses for negative n, and the identity for 0.

    >>> print(matrix_power(np.array([[1.0, 1.0], [0.0, 1.0]]), 5))
    [[1. 5.]
     [0. 1.]]
    """
    if np.ndim(x) < 2 or x.shape[-1] != x.shape[-2]:
        raise LinAlgError("square matrices (..., n, n)", describe(x), "powers multiply a matrix by itself")
    if n == 0:
        return where(array_module(x).zeros(x.shape, dtype=bool), x, identity(x).astype(x.dtype))
    if n < 0:
        return matrix_power(inv(x), -n)
    if n == 1:
        return x * 1
    half = matrix_power(x, n // 2)
    square = matmul(half, half) if n > 3 else matmul(x, x)
    return matmul(square, x) if n % 2 else square


@composite(samples=[sample([(2, 3), (3, 4), (4, 2)]), sample([(3,), (3, 2), (2, 2), (2,)]), sample([(2, 3), (3, 2)])],
           numpy="linalg.multi_dot", torch=False)  # fmt: skip
def multi_dot(arrays: Sequence[Array]) -> Array:
    """The product of matrices in the cheapest order; the first and the last may be vectors.

    >>> multi_dot([np.ones((2, 3)), np.ones((3, 4)), np.ones(4)]).shape
    (2,)
    """
    if len(arrays) == 2:
        return dot(*arrays)
    ends = [arrays[0], arrays[-1]] if len(arrays) > 1 else []
    if not ends or any(np.ndim(a) != 2 for a in arrays[1:-1]) or any(np.ndim(a) not in (1, 2) for a in ends):
        raise ShapeError("at least two matrices", describe(arrays), "the first and the last may be vectors")
    first = expand_dims(arrays[0], 0) if arrays[0].ndim == 1 else arrays[0]
    last = expand_dims(arrays[-1], -1) if arrays[-1].ndim == 1 else arrays[-1]
    product = _chain([first, *arrays[1:-1], last])
    lost = tuple(axis for axis, end in zip((-2, -1), ends, strict=True) if end.ndim == 1)
    return squeeze(product, lost) if lost else product


def _chain(matrices: Sequence[Array]) -> Array:
    """The product in the order with the fewest multiplications, found from the short runs of matrices to the long."""
    sizes = [m.shape[0] for m in matrices] + [matrices[-1].shape[1]]
    count, best = len(matrices), {(i, i): (0, i) for i in range(len(matrices))}
    for i, j in ((i, i + run) for run in range(1, count) for i in range(count - run)):
        costs = ((best[i, k][0] + best[k + 1, j][0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j))
        best[i, j] = min(costs)

    return _product(matrices, best, 0, count - 1)


def _product(matrices: Sequence[Array], best: Any, i: int, j: int) -> Array:
    k = best[i, j][1]
    return matrices[i] if i == j else matmul(_product(matrices, best, i, k), _product(matrices, best, k + 1, j))


PADE = [math.factorial(26 - k) * math.factorial(13) / (math.factorial(26) * math.factorial(k) * math.factorial(13 - k))
        for k in range(14)]  # fmt: skip
"""Of the numerator of the Padé approximant of e^x of degree 13; the denominator has them with signs that alternate."""
REACH = 5.37  # the norm up to which it is exact to the last digit of float64


@primitive(
    stacks=True, precision="wide", samples=[*_square, sample((2, 1, 2, 2))], numpy=False, torch="linalg.matrix_exp"
)
@lapack
def expm(x: Array) -> Array:
    """The exponential ``Σ Aᵏ / k!`` of matrices (..., n, n).

    Scaling and squaring (N. J. Higham, "The scaling and squaring method for the matrix exponential revisited", 2005):
    a Padé approximant of ``A / 2ˢ``, squared s times. Its gradient takes an exponential of twice the size.

    >>> print(expm(np.array([[0.0, 1.0], [0.0, 0.0]])))
    [[1. 1.]
     [0. 1.]]
    """
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise LinAlgError("square matrices (..., n, n)", describe(x), "minigrad.exp is that of the elements")
    xp = array_module(x)
    size = abs(x).sum(-2).max(-1) if x.size else xp.zeros(x.shape[:-2], x.dtype)
    halvings = xp.maximum(xp.frexp(xp.where(xp.isfinite(size), size, 0) / REACH)[1], 0)
    result = _pade(x * xp.ldexp(xp.ones_like(size), -halvings)[..., None, None])
    for k in range(int(halvings.max()) if halvings.size else 0):
        result = xp.where((k < halvings)[..., None, None], matmul(result, result), result)
    return result


def _pade(x: Array) -> Array:
    """The approximant ``(V - U)⁻¹ (V + U)``, U the odd and V the even terms."""
    xp = array_module(x)
    eye = identity(x).astype(x.dtype)
    x2 = matmul(x, x)
    x4 = matmul(x2, x2)
    x6 = matmul(x4, x2)
    powers = (eye, x2, x4, x6)

    def terms(first: int) -> Array:
        low = [PADE[first + 2 * k] * p for k, p in enumerate(powers)]
        high = [PADE[first + 6 + 2 * k] * p for k, p in enumerate(powers) if k]
        return low[0] + low[1] + low[2] + low[3] + matmul(x6, high[0] + high[1] + high[2])

    odd, even = matmul(x, terms(1)), terms(0)
    return xp.linalg.solve(even - odd, even + odd)


def _expm_rule(g: Array, x: Array) -> Array:
    """The upper right block of ``exp [[Aᵀ, g], [0, Aᵀ]]``, which is the derivative of exp at Aᵀ along g.

    It is linear in g, which is brought to the size of 1 so that it doesn't add to the norm.
    """
    raw = array_of(g)
    scale = power_of_two(abs(raw).max((-2, -1), keepdims=True)) if raw.size else 1
    xt, n = broadcast_to(mT(x), g.shape), x.shape[-1]
    top = concatenate([xt, g / scale], axis=-1)
    bottom = concatenate([xt * 0, xt], axis=-1)
    return expm(concatenate([top, bottom], axis=-2))[..., :n, n:] * scale


expm.defvjp(_expm_rule)

# ---- norms ----------------------------------------------------------------------------------------------------------


@composite(samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=(0, 1), keepdims=True, ord=3),
                    sample((2, 3), axis=-1, ord=math.inf)],
           numpy="linalg.vector_norm", kinks=(0,))  # fmt: skip
def vector_norm(x: Array, axis: Axes = None, keepdims: bool = False, ord: float = 2) -> Array:
    """The norm ``(Σ |x|^p)^(1/p)`` over ``axis``, by default of all elements: ``norm`` with the array API's arguments.

    >>> print(float(vector_norm(np.array([3.0, 4.0]))))
    5.0
    """
    return norm(x, ord, axis, keepdims)


@primitive(stacks=True, part_of="matrix_norm", precision="wide", samples=_any, domain=dominant, torch=False)
@lapack
def nuclear(x: Array) -> Array:
    """The sums of the singular values."""
    return array_module(x).asarray(array_module(x).linalg.svd(x, False, False).sum(-1))


@primitive(stacks=True, part_of="matrix_norm", precision="wide", samples=_any, domain=dominant, torch=False)
@lapack
def polar(x: Array) -> Array:
    """``U Vᵀ`` of the singular values that are not 0: the gradient of their sum."""
    u, s, vh = array_module(x).linalg.svd(x, False)
    return matmul(u * of_columns(apart_from_zero(s, x)), vh)


def _polar_rule(g: Array, x: Array) -> Array:
    """``U ((H - Hᵀ) / (sᵢ + sⱼ)) Vᵀ`` with ``H = Uᵀ g V``, and ``(1 - UUᵀ) g V S⁻¹ Vᵀ``, ``U S⁻¹ Uᵀ g (1 - VVᵀ)``."""
    u, s, vh = singular(x)
    nonzero = apart_from_zero(s, x)
    reciprocal = where(nonzero, 1 / where(nonzero, s, 1), 0)
    u, vh = where(of_columns(nonzero), u, 0), where(of_rows(nonzero), vh, 0)
    v = mT(vh)
    both = of_columns(nonzero) & of_rows(nonzero)
    gv, ug = matmul(g, v), matmul(mT(u), g)
    h = matmul(ug, v)
    inner = where(both, (h - mT(h)) / where(both, of_columns(s) + of_rows(s), 1), 0)
    tall = matmul((gv - matmul(u, h)) * of_columns(reciprocal), vh)
    wide = matmul(u, of_rows(reciprocal) * (ug - matmul(h, vh)))
    return matmul(matmul(u, inner), vh) + tall + wide


nuclear.defvjp(lambda g, x: of_matrices(g) * polar(x))
polar.defvjp(_polar_rule)

_orders = ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf)


@composite(samples=[*[sample((4, 3), ord=p) for p in _orders], sample((2, 3, 4), ord=2, keepdims=True)], kinks=(0,),
           domain=dominant)  # fmt: skip
def matrix_norm(x: Array, keepdims: bool = False, ord: Any = "fro") -> Array:
    """The norm of matrices (..., m, n) of one of eight orders.

    "fro" is the root of the sum of squares, "nuc" the sum of the singular values, 2 and -2 the largest and smallest of
    them, 1 and -1 the largest and smallest sum of a column of ``|A|``, inf and -inf of a row.

    >>> print(float(matrix_norm(np.array([[3.0, 0.0], [0.0, 4.0]]), ord="nuc")))
    7.0
    """
    if np.ndim(x) < 2:
        raise ShapeError("matrices (..., m, n)", describe(x), "vector_norm takes vectors")
    x = astype(x, np.dtype(np.float64)) if x.dtype.kind in "biu" else x
    if ord == "fro":
        result = norm(x, 2, (-2, -1))
    elif ord == "nuc":
        result = nuclear(x)
    elif ord in (2, -2):
        result = _extreme(svdvals(x), ord)
    elif ord in (1, -1, math.inf, -math.inf):
        result = _extreme(sum(absolute(x), -2 if abs(ord) == 1 else -1), ord)
    else:
        hint = "vector_norm takes any number"
        raise ArgumentError("an order 'fro', 'nuc', 1, -1, 2, -2, inf or -inf of matrices", describe(ord), hint)
    return of_matrices(result) if keepdims else result


def _extreme(values: Array, ord: float) -> Array:
    """The largest of positive numbers, 0 of none, or the smallest for a negative order; ties share the gradient."""
    return largest(values, -1, initial=0) if ord > 0 else smallest(values, -1)


@composite(samples=[sample((3, 3)), sample((4, 2)), *[sample((2, 3, 3), p=p) for p in _orders[:6]]],
           kinks=(0,), domain=dominant, numpy="linalg.cond")  # fmt: skip
def cond(x: Array, p: Any = None) -> Array:
    """How far errors grow in the solution of equations: ``‖A‖ ‖A⁻¹‖`` in the norm of order ``p``, None is 2.

    Of a singular matrix it is infinite for p = 2, and any other order raises LinAlgError.

    >>> print(float(cond(np.array([[4.0, 0.0], [0.0, 2.0]]))))
    2.0
    """
    if 0 in np.shape(x)[-2:]:
        raise LinAlgError("matrices with elements", describe(x), "of none there is no condition")
    if p in (None, 2, -2):
        values = svdvals(x)
        first, last = values[..., 0], values[..., -1]
        above, below = (last, first) if p == -2 else (first, last)
        return where(below == 0, math.inf, above / where(below == 0, 1, below))
    return matrix_norm(x, ord=p) * matrix_norm(inv(x), ord=p)


@composite(samples=[sample((2, 3)), sample((2, 3, 4))], numpy="linalg.matrix_transpose", torch=False)
def matrix_transpose(x: Array) -> Array:
    """The transposes of matrices (..., m, n): the last two axes exchanged.

    >>> matrix_transpose(np.ones((2, 3, 4))).shape
    (2, 4, 3)
    """
    if np.ndim(x) < 2:
        raise ShapeError("matrices (..., m, n)", describe(x), "expand_dims makes one of a vector")
    return mT(x)
