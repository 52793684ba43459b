"""Plain NumPy with a recorded Tensor: the right value and gradient, or a refusal; never a silent cut of the graph."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.errors import CallError, GraphError, MiniGradError

pytestmark = pytest.mark.cpu_only("about functions of NumPy itself")

X = np.array([0.7, 0.93, 0.4])


def recorded(x: Any = X) -> mg.Tensor:
    return mg.Tensor(x, requires_grad=True)


# ---- the forms in which people write NumPy --------------------------------------------------------------------------

A = np.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 3.0]])
FORMS: dict[str, Callable[[Any], Any]] = {
    "asarray": lambda x: np.asarray(x) * x,
    "array of elements": lambda x: np.array([x[0], x[1]]),
    "sum of a list": lambda x: np.sum([x[0], x[1]]),
    "mean of a list": lambda x: np.mean([x[0], x[1]]),
    "exp of a list": lambda x: np.exp([x[0], x[1]]),
    "dot of lists": lambda x: np.dot([x[0], x[1]], [x[1], x[2]]),
    "norm of a list": lambda x: np.linalg.norm([x[0], x[1]]),
    "r_": lambda x: np.r_[x, x],
    "c_": lambda x: np.c_[x, x],
    "full": lambda x: np.full(3, x[0]),
    "method of an array": lambda x: A.dot(x),
    "vectorize": lambda x: np.vectorize(lambda v: v * v)(x),
    "fromiter": lambda x: np.fromiter((v for v in x), dtype=float),
    "item by item": lambda x: [np.zeros(3).__setitem__(i, x[i]) for i in range(3)],
    "buffer": lambda x: np.zeros(3).__setitem__(slice(None), x),
    "einsum method": lambda x: np.add(np.ones(3), x, out=np.zeros(3)),
    "masked": lambda x: np.ma.masked_array(x, [True, False, False]),
    "polyval": lambda x: np.polynomial.Polynomial([1.0, 2.0])(np.asarray(x)),
    "random": lambda x: np.random.default_rng(0).normal(x),
    "apply_along_axis": lambda x: np.apply_along_axis(lambda v: v * 2, 0, x),
    "matmul method": lambda x: A @ np.array(x),
    "math.exp in a transform": lambda x: math.exp(x[0]),
    "float in a transform": lambda x: float(x[0]),
    "int in a transform": lambda x: int(x[0]),
    "complex in a transform": lambda x: complex(x[0]),
}


@pytest.mark.parametrize("form", FORMS)
def test_plain_numpy_in_a_differentiated_function_is_refused(form: str) -> None:
    with pytest.raises((MiniGradError, ValueError)) as caught:
        mg.value_and_grad(lambda x: mg.sum(x * 0 + FORMS[form](x)))(X)
    ours = caught.value if isinstance(caught.value, MiniGradError) else caught.value.__cause__  # NumPy says it its way
    assert isinstance(ours, GraphError | CallError)
    assert ours.hint


def test_the_numbers_are_there_for_whoever_means_them() -> None:
    x = recorded()
    assert type(x.numpy()) is np.ndarray
    assert np.asarray(x.detach()).tolist() == X.tolist()
    with mg.no_grad():
        assert np.array([x[0], x[1]]).tolist() == [0.7, 0.93]
        assert np.asarray(x).tolist() == X.tolist()
    assert np.asarray(mg.Tensor(X)).tolist() == X.tolist()
    assert float((x * x).sum()) == pytest.approx(0.49 + 0.8649 + 0.16)  # for a log, as in torch


def test_item_reads_a_number_inside_of_a_transform() -> None:
    value, slope = mg.value_and_grad(lambda x: (x * x[0].item()).sum())(X)
    np.testing.assert_allclose(slope.numpy(), [0.7, 0.7, 0.7])
    assert value.item() == pytest.approx(0.7 * 2.03)


# ---- every function of NumPy ----------------------------------------------------------------------------------------


def functions() -> Iterator[tuple[str, Any]]:
    """The public functions and ufuncs of NumPy and its linalg and fft, each once, with the name that a user writes."""
    seen: set[int] = set()
    for prefix, module in (("np", np), ("np.linalg", np.linalg), ("np.fft", np.fft), ("np.emath", np.emath)):
        for name in sorted(dir(module)):
            found = getattr(module, name) if name not in ("row_stack", "in1d", "trapz") else None
            kinds = types.FunctionType | types.BuiltinFunctionType | np.ufunc | type(np.sum)
            if not name.startswith("_") and isinstance(found, kinds) and id(found) not in seen:
                seen.add(id(found))
                yield f"{prefix}.{name}", found


# They read files, settings or memory; isfortran asks for .flags; fromiter calls float(), which has a form above.
SKIPPED = """save savez savez_compressed savetxt load loadtxt genfromtxt fromfile memmap info test show_config
show_runtime get_include seterr setbufsize set_printoptions seterrcall errstate printoptions einsum_path frombuffer
fromstring fromregex from_dlpack empty empty_like bmat require isfortran fromiter""".split()  # noqa: SIM905
M = np.array([[1.4, 0.23, 0.3], [0.2, 2.6, 0.1], [0.3, 0.1, 0.9]])
Y, B = X[::-1] * 1.1 + 0.013, X > 0.5
ARGUMENTS: list[tuple[Any, ...]] = [
    (X,), (X + 1,), (M,), (X, Y), (M, M.T * 1.07), (X, 1), (M, 1), (M, 1, 0), (M, (3, 3)), (X, 1, 0), (M, 0, 1),
    ([X, Y],), (X, [0, 2]), (M, [1, 2], 1), (B, X, Y), (X, Y - 1, Y + 1), (3, X), (X, 2, Y), (lambda v: v, 0, X),
    (X, B, 0.5), (M, np.array([[0], [1], [2]]), 1), (X, (2,)), (X, Y[:1], Y[1:2]), ("ij->i", M), (1.0, X), ([B], [X]),
    (X, lambda v: v, Y), (M[0, 0],), (M[0, 0], M[0, 1]), (X, "float64"), (X, Y, 2), (M, [2.0, 1.0, 0.5]),
]  # fmt: skip


def arrays_to(value: Any, made: Callable[[Any], Any]) -> Any:
    """``value`` with ``made`` of each floating-point array in it."""
    if isinstance(value, np.ndarray | np.float64) and value.dtype == np.float64:
        return made(np.asarray(value))
    return type(value)(arrays_to(part, made) for part in value) if isinstance(value, list | tuple) else value


def floats_in(value: Any) -> Iterator[Any]:
    """The floating-point arrays, NumPy numbers and Tensors in a result."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from floats_in(part)
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield from floats_in(list(value.flat))
    elif isinstance(value, float) or (isinstance(value, mg.Tensor | np.ndarray) and value.dtype.kind == "f"):
        yield value


def slopes(function: Any, arguments: Any, ups: list[Any]) -> list[Any]:
    """Central differences of ``Σ up · result`` by each floating-point array among the arguments."""
    arrays: list[Any] = []
    arrays_to(arguments, lambda a: arrays.append(a.copy()) or a)  # type: ignore[func-returns-value]

    def total() -> float:
        left = iter(arrays)
        results = floats_in(function(*arrays_to(arguments, lambda _: next(left).copy())))
        return math.fsum(float(np.sum(up * np.asarray(r))) for up, r in zip(ups, results, strict=True))

    found = []
    for array in arrays:
        slope = np.empty(array.shape)
        for place in np.ndindex(array.shape):
            kept, ends = array[place], []
            for step in (1e-6, -1e-6):
                array[place] = kept + step
                ends.append(total())
            array[place] = kept
            slope[place] = (ends[0] - ends[1]) / 2e-6
        found.append(slope)
    return found


@pytest.mark.parametrize(
    ("name", "function"), [pytest.param(n, f, id=n) for n, f in functions() if n.removeprefix("np.") not in SKIPPED]
)
@pytest.mark.filterwarnings("ignore")
def test_every_function_of_numpy_is_right_or_refused(name: str, function: Any) -> None:
    for arguments in ARGUMENTS:
        if name == "np.trapezoid" and any(part is B for part in arguments):
            continue  # NumPy adds and subtracts booleans by "or" and "xor", where ours are numbers
        try:
            plain = function(*arrays_to(arguments, np.copy))
        except Exception:  # no call of this function
            continue
        if not all(np.isfinite(part).all() for part in floats_in(plain)):
            continue
        tensors: list[mg.Tensor] = []

        def leaf(array: Any, tensors: list[mg.Tensor] = tensors) -> mg.Tensor:
            tensors.append(mg.Tensor(array, requires_grad=True))
            return tensors[-1]

        given = arrays_to(arguments, leaf)
        if not tensors:
            continue
        try:
            ours = function(*given)
        except MiniGradError as error:
            assert "np." in error.got or "NumPy function" not in error.expected, error
            continue
        expected, found = list(floats_in(plain)), list(floats_in(ours))
        assert len(found) == len(expected), f"{name}{arguments}"
        ups = [np.cos(np.arange(np.size(b)) + k).reshape(np.shape(b)) for k, b in enumerate(expected)]
        reached = []
        for a, b, up in zip(found, expected, ups, strict=True):
            np.testing.assert_allclose(getattr(a, "data", a), b, 1e-12, 1e-15, err_msg=f"{name}{arguments}")
            if isinstance(a, mg.Tensor) and a.requires_grad:
                reached.append((a, up))
        gradients = (
            mg.grad([a for a, _ in reached], tensors, [u for _, u in reached], allow_unused=True)
            if reached
            else [None] * len(tensors)
        )
        for got, want in zip(gradients, slopes(function, arguments, ups), strict=True):
            # A result that is no Tensor is right if no gradient flows through the function.
            np.testing.assert_allclose(0 if got is None else got.numpy(), want, atol=1e-6, err_msg=f"{name}{arguments}")


# ---- NumPy's own signatures -----------------------------------------------------------------------------------------

S = (np.arange(24.0) * 7 % 24 / 5 + 0.33).reshape(2, 3, 4)
CALLS: dict[str, Callable[[Any], Any]] = {
    "sum in places": lambda t: np.sum(t, 0, None),
    "sum initial": lambda t: np.sum(t, axis=1, initial=3.0),
    "sum dtype": lambda t: np.sum(t, dtype="float32"),
    "sum keepdims where": lambda t: np.sum(t, axis=(0, 2), keepdims=True, where=S > 1),
    "prod initial": lambda t: np.prod(t, axis=1, initial=2.0),
    "max initial": lambda t: np.max(t, axis=1, initial=2.0),
    "var correction": lambda t: np.var(t, axis=1, correction=1),
    "std in places": lambda t: np.std(t, 1, None, None, 1),
    "sort of all": lambda t: np.sort(t, None),
    "sort kind": lambda t: np.sort(t, 1, "stable"),
    "add.reduce": lambda t: np.add.reduce(t),
    "add.reduce axis": lambda t: np.add.reduce(t, axis=1),
    "add.reduce of all": lambda t: np.add.reduce(t, axis=None),
    "multiply.reduce": lambda t: np.multiply.reduce(t, 2),
    "maximum.reduce": lambda t: np.maximum.reduce(t),
    "add.accumulate": lambda t: np.add.accumulate(t),
    "add.outer": lambda t: np.add.outer(t, t[0, 0]),
    "multiply.outer": lambda t: np.multiply.outer(np.ones(2), t),
    "einsum lists": lambda t: np.einsum(t, [0, 1, 2], t, [0, 3, 2], [0, 1, 3]),
    "einsum optimize": lambda t: np.einsum("ijk,ilk->ijl", t, t, optimize=True),
    "clip by old names": lambda t: np.clip(t, a_min=1.0, a_max=3.0),
    "take_along_axis of all": lambda t: np.take_along_axis(t, np.array([3, 1]), axis=None),
    "linalg.trace": lambda t: np.linalg.trace(t),
    "linalg.diagonal": lambda t: np.linalg.diagonal(t, offset=1),
    "norm of matrices": lambda t: np.linalg.norm(t, "fro", axis=(1, 2)),
    "norm 1 of matrices": lambda t: np.linalg.norm(t, 1, axis=(0, 2)),
    "norm inf of matrices": lambda t: np.linalg.norm(t[0], np.inf, keepdims=True),
    "norm 2 of matrices": lambda t: np.linalg.norm(t, 2, axis=(2, 0), keepdims=True),
    "norm nuc of matrices": lambda t: np.linalg.norm(t[1], "nuc"),
    "matrix_norm": lambda t: np.linalg.matrix_norm(t, ord=-2, keepdims=True),
    "vector_norm": lambda t: np.linalg.vector_norm(t, axis=(0, 1), ord=3),
    "solve": lambda t: np.linalg.solve(t[:, :, :3] + 4 * np.eye(3), t[0]),
    "solve of constants": lambda t: np.linalg.solve(S[0, :, :3] + np.eye(3), t[0]),
    "lstsq": lambda t: np.linalg.lstsq(t[0].T, t[1].T, rcond=None)[0],
    "lstsq residuals": lambda t: np.linalg.lstsq(t[0].T, t[1].T)[1],
    "pinv": lambda t: np.linalg.pinv(t, rtol=1e-9),
    "cholesky": lambda t: np.linalg.cholesky(t[:, :, :3] + 40 * np.eye(3), upper=True),
    "qr": lambda t: np.linalg.qr(t + np.eye(3, 4), "r"),
    "qr by name": lambda t: np.linalg.qr(t[0].T).Q,
    "eigh by name": lambda t: np.linalg.eigh(t[0, :, :3], "U").eigenvectors,
    "eigvalsh": lambda t: np.linalg.eigvalsh(t[:, :, :3], UPLO="U"),
    "svd in places": lambda t: np.linalg.svd(t, False, False),
    "svd by name": lambda t: np.linalg.svd(t, full_matrices=False).Vh,
    "slogdet by name": lambda t: np.linalg.slogdet(t[:, :, :3] + 4 * np.eye(3)).logabsdet,
    "matrix_power": lambda t: np.linalg.matrix_power(t[:, :, :3] + 4 * np.eye(3), -2),
    "multi_dot": lambda t: np.linalg.multi_dot([t[0], t[1].T, t[0]]),
    "cond": lambda t: np.linalg.cond(t[:, :, :3] + 4 * np.eye(3), "fro"),
    "outer": lambda t: np.linalg.outer(t[0, 0], t[0, 1]),
    "norm of all": lambda t: np.linalg.norm(t, keepdims=True),
    "norm of vectors": lambda t: np.linalg.norm(t, 3, 1, True),
    "reshape order": lambda t: np.reshape(t, (6, 4), "C"),
    "rint": lambda t: np.rint(t),
    "positive": lambda t: np.positive(t),
    "ufunc dtype": lambda t: np.exp(t, dtype="float32"),
    "concatenate dtype": lambda t: np.concatenate([t, t], 1, dtype="float32"),
    "roll, two axes": lambda t: np.roll(t, (1, 2), (0, 1)),
    "full_like": lambda t: np.full_like(t, 2.0, dtype="float32"),
    "ones_like": lambda t: np.ones_like(t, dtype="int64", shape=(2,)),
}


@pytest.mark.parametrize("call", CALLS)
def test_numpys_own_signatures(call: str) -> None:
    t = recorded(S)
    ours, theirs = CALLS[call](t), CALLS[call](S)
    assert isinstance(ours, mg.Tensor)
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-6 if theirs.dtype == np.float32 else 1e-12)
    if ours.requires_grad and ours.dtype == np.float64:
        up = np.cos(np.arange(theirs.size)).reshape(theirs.shape)
        ours.backward(up)
        np.testing.assert_allclose(t.grad, slopes(CALLS[call], (S,), [up])[0], atol=1e-6)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda t: np.linalg.pinv(t, hermitian=True), "np.linalg.pinv"),
        (lambda t: np.put_along_axis(t, np.array([[0]]), 1.0, 0), "np.put_along_axis"),
        (lambda t: np.copyto(t, 1.0), "np.copyto"),
        (lambda t: np.copyto(np.zeros((3, 3)), t), "np.copyto"),
        (lambda t: np.ravel(t, "F"), "order='F'"),
        (lambda t: np.sum(t, out=np.zeros(())), "out="),
        (lambda t: np.fft.fft(t), "np.fft.fft"),
        (lambda t: np.add.at(t, 0, 1.0), "np.add.at"),
        (lambda t: np.add.reduceat(t, [0, 1]), "np.add.reduceat"),
        (lambda t: np.logaddexp.reduce(t), "np.logaddexp.reduce"),
        (lambda t: np.heaviside(t, 0.0), "np.heaviside"),
    ],
)
def test_refusals_give_the_full_name(call: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(CallError) as caught:
        call(recorded(M))
    assert name in str(caught.value)


def test_without_a_graph_numpy_sees_arrays() -> None:
    t = mg.Tensor(M)
    assert np.linalg.svd(t)[1].tolist() == np.linalg.svd(M)[1].tolist()
    assert type(np.atleast_1d(t)) is np.ndarray
    buffer = np.zeros((3, 3))
    buffer += t
    buffer[0] = t[1]
    assert buffer[0].tolist() == M[1].tolist()
    with mg.no_grad():
        assert np.median(recorded(M)) == np.median(M)


# ---- SciPy ----------------------------------------------------------------------------------------------------------


def rosenbrock(x: Any) -> Any:
    return (100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2).sum()


@pytest.fixture(scope="module")
def scipy() -> Any:
    optimize = pytest.importorskip("scipy.optimize")
    return types.SimpleNamespace(optimize=optimize, integrate=pytest.importorskip("scipy.integrate"))


METHODS = {
    **dict.fromkeys(["CG", "BFGS", "L-BFGS-B", "TNC", "SLSQP", "trust-constr"], ""),
    **dict.fromkeys(["Newton-CG", "trust-ncg", "trust-krylov"], "hessp"),
    **dict.fromkeys(["dogleg", "trust-exact"], "hess"),
}


@pytest.mark.parametrize("method", METHODS)
def test_scipy_minimizes(scipy: Any, method: str) -> None:
    """With our derivatives as with SciPy's own closed forms of the same function."""
    opt, start = scipy.optimize, np.array([1.1, 1.2, 1.43])
    ours: dict[str, Any] = {
        "hessp": lambda x, v: mg.hvp(rosenbrock, x, v)[1],
        "hess": lambda x: mg.hessian(rosenbrock, x),
    }
    theirs: dict[str, Any] = {"hessp": opt.rosen_hess_prod, "hess": opt.rosen_hess}
    second = METHODS[method]
    kinds = {"method": method, "options": {"maxfun" if method == "TNC" else "maxiter": 40}}
    found = opt.minimize(
        mg.value_and_grad(rosenbrock), start, jac=True, **kinds, **({second: ours[second]} if second else {})
    )
    wanted = opt.minimize(opt.rosen, start, jac=opt.rosen_der, **kinds, **({second: theirs[second]} if second else {}))
    np.testing.assert_allclose(found.x, wanted.x, atol=1e-4)  # TNC stops a digit earlier or later
    assert found.fun < 0.1 * opt.rosen(start)


def test_scipy_finds_roots_and_fits(scipy: Any) -> None:
    def residuals(x: Any) -> Any:
        return mg.stack([x[0] ** 2 + x[1] - 3.0, x[0] - x[1] ** 2 + 1.0])

    def slope(x: Any) -> Any:
        return mg.jacobian(residuals, x)

    for found in (
        scipy.optimize.root(residuals, np.array([1.0, 1.0]), jac=slope),
        scipy.optimize.least_squares(residuals, np.array([1.0, 1.0]), jac=slope),
    ):
        assert np.abs(np.asarray(residuals(mg.Tensor(found.x)))).max() < 1e-8
    times = np.linspace(0.0, 3.0, 20)

    def decay(t: Any, a: Any, b: Any) -> Any:
        return a * mg.exp(-b * t)

    parameters, _ = scipy.optimize.curve_fit(
        lambda t, a, b: np.asarray(decay(t, a, b)),
        times,
        2.0 * np.exp(-0.7 * times),
        p0=(1.0, 1.0),
        jac=lambda t, a, b: mg.stack(mg.jacobian(lambda p, q: decay(mg.Tensor(t), p, q), a, b), 1),
    )
    np.testing.assert_allclose(parameters, [2.0, 0.7], rtol=1e-6)


def test_scipy_integrates(scipy: Any) -> None:
    """Callbacks that compute with Tensors: scipy turns their results into arrays."""
    area, _ = scipy.integrate.quad(lambda t: mg.exp(-mg.Tensor(t)), 0.0, 1.0)
    assert area == pytest.approx(1 - math.exp(-1))
    path = scipy.integrate.odeint(lambda y, t: -mg.Tensor(y), np.array([1.0]), [0.0, 1.0])
    assert path[-1, 0] == pytest.approx(math.exp(-1), rel=1e-6)


def test_ufuncs_of_scipy_run_ours() -> None:
    """Code that is written for SciPy records, with keywords and beside arrays; what we lack is refused by its name."""
    special = pytest.importorskip("scipy.special")
    x = recorded()
    for theirs, ours in (
        (special.gammaln, mg.special.gammaln),
        (special.psi, mg.special.digamma),
        (special.expit, mg.sigmoid),
        (special.erf, mg.erf),
        (lambda x: special.xlogy(X, x), lambda x: mg.special.xlogy(X, x)),
        (lambda x: special.jv(2, x), lambda x: mg.special.jn(2, x)),
        (lambda x: special.zeta(2.5, x), lambda x: mg.special.zeta(2.5, x)),
    ):
        found, wanted = theirs(x), ours(x)
        assert found.requires_grad and found.node.primitive is wanted.node.primitive
        np.testing.assert_array_equal(found.data, wanted.data)
    with pytest.raises(CallError, match="wrightomega"):
        special.wrightomega(x)
    with pytest.raises(GraphError, match="a NumPy array made of"):
        special.polygamma(1, x)  # no ufunc: mg.special.polygamma
    assert special.gammaln(mg.Tensor(X)).tolist() == special.gammaln(X).tolist()


def test_the_walk_finds_numpys_functions() -> None:
    assert len(list(itertools.islice(functions(), 400))) > 300
