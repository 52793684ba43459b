"""Each row of docs/from-autograd.md: both columns are run, in autograd and here, and compared."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import autograd
import autograd.differential_operators
import autograd.extend
import autograd.numpy
import numpy as np
import pytest
from autograd.test_util import check_grads
from autograd.tracer import getval

import minigrad as mg
from minigrad.errors import DTypeError, GraphError, LinAlgError
from minigrad.trees import leaves

PAGE = (Path(__file__).parents[2] / "docs" / "from-autograd.md").read_text()
X, Y = np.array([0.5, 1.0, -2.0]), np.array([1.5, 0.3, 2.0])
FUNCTIONS = """
def f(x): return np.sum(np.sin(x) * x**2)
def v(x): return np.tanh(x) * x[0] + np.sum(x * x)
def h(x, y): return np.sum(np.exp(x) * y**2)
def pair(x): return f(x), 2.0
def tree(p): return np.sum(p["a"] * p["b"][0]) * p["b"][1]
"""


def rows(title: str) -> list[list[str]]:
    """The cells of the table below a title."""
    table = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in re.findall(r"^\|.*\|$", table, re.M)[2:]
    ]


def names(module: Any, **more: Any) -> dict[str, Any]:
    space = {"np": module, "x": X, "y": Y, "u": np.array([1.0, -1.0, 0.5]), **more}
    exec(FUNCTIONS, space)
    return space


def numbers(value: Any) -> Iterator[Any]:
    """The arrays in a result, whatever holds them."""
    return (part.numpy() if isinstance(part, mg.Tensor) else np.asarray(part) for _, part in leaves(value))


@pytest.mark.cpu_only("arrays of NumPy beside Tensors of the default device")
@pytest.mark.parametrize(("theirs", "ours"), rows("Transforms"), ids=lambda cell: cell.split("`")[1])
def test_transforms(theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "funcsigs", inspect)  # which took its place; multigrad_dict still asks for it
    operators = {n: getattr(autograd.differential_operators, n) for n in dir(autograd.differential_operators)}
    expected = eval(theirs.strip("`"), names(autograd.numpy, **operators, check_grads=check_grads))
    calls = re.findall(r"`([^`]+)`", ours)
    assert calls
    for call in calls:
        found = eval(call, names(np, mg=mg))
        if expected is None:
            assert found is True
            continue
        pairs = list(zip(numbers(found), numbers(expected), strict=True))
        assert pairs
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
            assert a.shape == b.shape


@pytest.mark.cpu_only("SciPy's alone")
@pytest.mark.parametrize(("theirs", "ours"), rows("SciPy's functions"), ids=lambda cell: cell.split("`")[1])
def test_functions_of_scipy(theirs: str, ours: str) -> None:
    from autograd.scipy import integrate, linalg, signal, special, stats

    more = {"m": np.array([[4.0, 1.0, 0.5], [1.0, 5.0, 0.2], [0.5, 0.2, 6.0]]), "s": np.array([0.0, 0.5, 1.0])}
    space = names(autograd.numpy, integrate=integrate, linalg=linalg, signal=signal, special=special, stats=stats)
    space |= {"grad": autograd.grad, "jacobian": autograd.jacobian, "f": lambda y, t, c: t - c * y, **more}
    expected, found = eval(theirs.strip("`"), space), eval(ours.strip("`"), names(np, mg=mg) | space | {"mg": mg})
    for a, b in zip(numbers(found), [np.squeeze(expected)], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


# ---- what differs ---------------------------------------------------------------------------------------------------


def results() -> None:
    assert isinstance(autograd.grad(lambda x: x * x)(2.0), float)
    slope = mg.grad(lambda x: x * x)(2.0)
    assert isinstance(slope, mg.Tensor) and slope.item() == 4 == np.asarray(slope)


def list_of_numbers() -> None:
    assert isinstance(autograd.grad(lambda t: t[0] * t[1])([2.0, 3.0]), list)
    assert mg.grad(lambda t: t[0] * t[1])([2.0, 3.0]).tolist() == [3, 2]
    assert isinstance(mg.grad(lambda t: (t[0] * t[1]).sum())([X, Y]), list)


def integers() -> None:
    with pytest.raises(TypeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        autograd.grad(lambda x: x * x)(2)
    with pytest.raises(DTypeError, match="argnums"):
        mg.grad(lambda x: x * x)(2)
    assert mg.grad(lambda x, n: x**n)(3.0, 2).item() == 6


def constants() -> None:
    with pytest.warns(UserWarning, match="independent"):
        assert autograd.grad(lambda x: 5.0)(1.0) == 0
    assert mg.grad(lambda x: 5.0)(1.0).item() == 0


def arrays_from_beside() -> None:
    with pytest.warns(UserWarning, match="independent"):
        assert autograd.grad(lambda x: np.float64(5.0))(1.0) == 0
    with pytest.raises(DTypeError, match="NumPy alone"):
        mg.grad(lambda x: np.float64(5.0))(1.0)


def norm_at_zero() -> None:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert np.isnan(autograd.grad(autograd.numpy.linalg.norm)(np.zeros(2))).all()
    assert mg.grad(np.linalg.norm)(np.zeros(2)).tolist() == [0, 0]


def triangle() -> None:
    a = np.array([[2.0, 1.0], [1.0, 3.0]])
    (theirs,) = numbers(autograd.grad(lambda x: autograd.numpy.linalg.eigh(x)[0][1])(a))
    (ours,) = numbers(mg.grad(lambda x: np.linalg.eigh(x)[0][1])(a))
    assert theirs[0, 1] == 0 and ours[0, 1] == ours[1, 0] == pytest.approx(theirs[1, 0] / 2)


def complex_results() -> None:
    from autograd.scipy.linalg import sqrtm

    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    assert autograd.numpy.linalg.eig(turn)[0].dtype == sqrtm(-np.diag([1.0, 2.0])).dtype == complex
    for refused in (lambda: mg.linalg.eig(turn), lambda: mg.linalg.sqrtm(-np.diag([1.0, 2.0]))):
        with pytest.raises(LinAlgError, match="out of scope"):
            refused()


def cast_to_whole_numbers() -> None:
    theirs = autograd.grad(lambda x: autograd.numpy.sum(x[autograd.numpy.int64(x)]))(np.array([1.0, 0.0]))
    assert theirs.tolist() == [1, 1]
    assert mg.grad(lambda x: x[x.astype(np.int64)].sum())(np.array([1.0, 0.0])).tolist() == [1, 1]
    with pytest.raises(GraphError):
        mg.grad(lambda x: x[np.int64(x)].sum())(np.array([1.0, 0.0]))


def complex_numbers() -> None:
    assert autograd.holomorphic_grad(lambda z: z * z)(1j) == 2j
    with pytest.raises(DTypeError):
        mg.grad(lambda z: z * z)(1j)


def assignment() -> None:
    def write(x: Any) -> Any:
        y = x * 2
        y[0] = 1.0
        return y.sum()

    for transform, kind in ((autograd.grad, (TypeError, ValueError)), (mg.grad, GraphError)):
        with pytest.raises(kind):  # type: ignore[arg-type]
            transform(write)(X)


def printing() -> None:
    seen: list[str] = []
    autograd.grad(lambda x: (seen.append(repr(x)), x * x)[1])(2.0)
    mg.grad(lambda x: (seen.append(str(x.numpy())), x * x)[1])(2.0)
    assert "ArrayBox" in seen[0] and seen[1] == "2.0"


def flatten() -> None:
    from autograd.misc import flatten as theirs

    flat, back = theirs({"a": X, "b": Y})
    assert flat.shape == (6,) and (back(flat)["b"] == Y).all()
    assert set(mg.grad(lambda p: (p["a"] * p["b"]).sum())({"a": X, "b": Y})) == {"a", "b"}


def optimizers() -> None:
    from autograd.misc.optimizers import sgd

    import optim

    slope = lambda x: 2 * x
    theirs = sgd(lambda x, i: slope(x), X, num_iters=1, step_size=0.1, mass=0.0)
    p = mg.Tensor(X, requires_grad=True)
    (p * p).sum().backward()
    optim.SGD([p], lr=0.1).step()
    np.testing.assert_allclose(p.numpy(), theirs)


DIFFERENCES: dict[str, Callable[[], None]] = {
    "results": results,
    "a list of numbers": list_of_numbers,
    "integers": integers,
    "a function that doesn't depend on its argument": constants,
    "a function that returns an array of NumPy made beside the graph": arrays_from_beside,
    "`np.linalg.norm` at 0": norm_at_zero,
    "`eigh` of a symmetric matrix": triangle,
    "`eig` and `sqrtm` with complex results": complex_results,
    "`np.int64(x)` inside of a function": cast_to_whole_numbers,
    "complex numbers, `holomorphic_grad`, FFT": complex_numbers,
    "`x[i] = v`": assignment,
    "printing inside of a function": printing,
    "`misc.flatten`": flatten,
    "`misc.optimizers`": optimizers,
}


ON_THE_CPU = pytest.mark.cpu_only("what CuPy lacks")
DIFFERENT = [pytest.param(name, marks=ON_THE_CPU if "eig" in name else ()) for name, *_ in rows("What differs")]


@pytest.mark.parametrize("row", DIFFERENT)
def test_what_differs(row: str) -> None:
    DIFFERENCES[row]()


# ---- rules of one's own ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(mg.REGISTRY)
    yield
    for name in set(mg.REGISTRY) - set(before):
        del mg.REGISTRY[name]


def exponential(x: Any) -> Any:
    return np.exp(x)


def scaled(x: Any, y: Any) -> Any:
    return x * y


def total(x: Any) -> Any:
    return x.sum()


def theirs_of(function: Any, *rules: Any, **options: Any) -> Any:
    made = autograd.extend.primitive(function)
    autograd.extend.defvjp(made, *rules, **options)
    return made


def by_name_and_result() -> None:
    theirs = theirs_of(exponential, lambda ans, x: lambda g: g * ans)
    ours = mg.primitive(exponential).defvjp(lambda g, out: g * out)
    np.testing.assert_allclose(mg.elementwise_grad(ours)(X).numpy(), autograd.elementwise_grad(theirs)(X))


def broadcasting() -> None:
    from autograd.numpy.numpy_vjps import unbroadcast_f

    theirs = theirs_of(scaled, lambda ans, x, y: unbroadcast_f(x, lambda g: g * y), argnums=(0,))
    ours = mg.elementwise()(scaled).defvjp(lambda g, y: g * y)
    expected = autograd.grad(lambda x: autograd.numpy.sum(theirs(x, Y)))(2.0)
    assert mg.grad(lambda x: ours(x, Y).sum())(2.0).item() == expected == Y.sum()


def one_argument() -> None:
    theirs = theirs_of(scaled, lambda ans, x, y: lambda g: g * x, argnums=(1,))
    expected = autograd.grad(lambda y: autograd.numpy.sum(theirs(X, y)))(Y)
    recorded = mg.Tensor(X, requires_grad=True)
    for declare in (lambda f, rule: f.defvjp(None, rule), lambda f, rule: f.defvjp(y=rule)):
        ours = declare(mg.primitive(scaled), lambda g, x: g * x)
        np.testing.assert_allclose(mg.grad(lambda y, f=ours: f(X, y).sum())(Y).numpy(), expected)
        if ours.constants:  # None says that the derivative by x is 0
            assert not ours(recorded, Y).requires_grad
        else:
            with pytest.raises(GraphError, match="'x', by which it has none"):
                ours(recorded, Y)
    with pytest.raises(NotImplementedError, match="argnum"):
        autograd.grad(lambda x: autograd.numpy.sum(theirs(x, Y)))(X)


def shape() -> None:
    theirs = theirs_of(total, lambda ans, x: lambda g: g * np.ones(np.shape(x)))
    ours = mg.primitive(total).defvjp(lambda g, x_shape: mg.broadcast_to(g, x_shape))
    np.testing.assert_allclose(mg.grad(ours)(X).numpy(), autograd.grad(theirs)(X))


def several() -> None:
    theirs = autograd.extend.primitive(scaled)
    autograd.extend.defvjp_argnums(theirs, lambda nums, ans, args, kwargs: lambda g: [g * args[1 - k] for k in nums])
    ours = mg.primitive(scaled)
    ours.defjoint("x", "y")(lambda g, x, y: (g * y, g * x))
    expected = autograd.grad(lambda x, y: autograd.numpy.sum(theirs(x, y)), (0, 1))(X, Y)
    np.testing.assert_allclose(list(numbers(mg.grad(lambda x, y: ours(x, y).sum(), (0, 1))(X, Y))), expected)


def lists() -> None:
    joined = autograd.extend.primitive(lambda *arrays: sum(arrays))
    autograd.extend.defvjp_argnum(joined, lambda num, ans, args, kwargs: lambda g: g * (num + 1))

    def plus(arrays: Any) -> Any:
        return sum(arrays)

    ours = mg.primitive(sequence=True)(plus).defvjp(lambda g, arrays_shape: [g * (k + 1) for k in range(2)])
    expected = autograd.grad(lambda x, y: autograd.numpy.sum(joined(x, y)), (0, 1))(X, Y)
    np.testing.assert_allclose(list(numbers(mg.grad(lambda x, y: ours([x, y]).sum(), (0, 1))(X, Y))), expected)


def forward_rule() -> None:
    theirs = autograd.extend.primitive(exponential)
    autograd.extend.defjvp(theirs, lambda t, ans, x: t * ans)
    expected = autograd.differential_operators.make_jvp(theirs)(X)(Y)[1]
    ruled = mg.primitive(exponential).defvjp(lambda g, out: g * out).defjvp(lambda t, out: t * out)
    free = mg.elementwise()(exponential).defvjp(lambda g, out: g * out)
    for ours in (ruled, free):
        np.testing.assert_allclose(mg.jvp(ours, X, Y)[1].numpy(), expected)


def linear() -> None:
    theirs = autograd.extend.primitive(total)
    autograd.extend.def_linear(theirs)
    ours = mg.primitive(linear="jointly")(total).defvjp(lambda g, x_shape: mg.broadcast_to(g, x_shape))
    assert mg.jvp(ours, X, Y)[1].item() == autograd.differential_operators.make_jvp(theirs)(X)(Y)[1] == Y.sum()
    product = mg.primitive(linear="each")(scaled).defvjp(lambda g, y: g * y, lambda g, x: g * x)
    np.testing.assert_allclose(mg.jvp(product, (X, Y), (Y, X))[1].numpy(), Y * Y + X * X)


def without_derivative() -> None:
    theirs = autograd.extend.notrace_primitive(np.sign)
    ours = mg.primitive(lambda_named(np.sign))
    assert (autograd.grad(lambda x: autograd.numpy.sum(theirs(x) * x))(X) == np.sign(X)).all()
    assert mg.grad(lambda x: (ours(x) * x).sum())(X).tolist() == np.sign(X).tolist()


def lambda_named(ufunc: Any) -> Any:
    def signs(x: Any) -> Any:
        return ufunc(x)

    return signs


def values() -> None:
    assert autograd.grad(lambda x: x * getval(x))(3.0) == 3
    assert mg.grad(lambda x: x * mg.stop_gradient(x))(3.0).item() == mg.grad(lambda x: x * x.numpy())(3.0).item() == 3


RULES: dict[str, Callable[[], None]] = {
    "`@primitive`": by_name_and_result,
    "`defvjp(f, lambda ans, x: lambda g: g * ans)`": by_name_and_result,
    "`unbroadcast_f(x, lambda g: g * y)`": broadcasting,
    "`defvjp(f, …, argnums=(1,))`": one_argument,
    "`np.shape(x)` in a rule, which keeps x": shape,
    "`defvjp_argnums(f, …)`": several,
    "a function of a list, by `defvjp_argnum`": lists,
    "`defjvp(f, lambda t, ans, x: t * ans)`": forward_rule,
    '`def_linear(f)`, `defjvp(f, "same")`': linear,
    "`notrace_primitive`": without_derivative,
    "`getval(x)`": values,
}


@pytest.mark.parametrize("row", [row[0] for row in rows("Rules of your own")])
def test_rules(row: str) -> None:
    RULES[row]()
