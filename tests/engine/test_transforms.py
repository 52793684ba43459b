"""Transforms of functions: their forms, containers, constants, orders and modes. Expected values are closed forms."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import minigrad as mg
from minigrad.errors import ArgumentError, CallError, DTypeError, GraphError, ShapeError
from minigrad.rows import Rows
from minigrad.trees import leaves

X, Y = np.array([1.0, 2.0, 3.0]), np.array([0.5, -1.0, 2.0])


def numbers(tree: Any) -> Any:
    """A container with NumPy's arrays in the places of Tensors."""
    if isinstance(tree, dict):
        return {key: numbers(part) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        return [numbers(part) for part in tree]
    return tree.numpy().tolist() if isinstance(tree, mg.Tensor) else tree


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Model:
    weight: Any
    layers: Any
    activation: str = "tanh"
    trained: bool = False


# ---- which arguments ------------------------------------------------------------------------------------------------


def product(x: Any, y: Any, power: int = 1, scale: Any = 1.0) -> Any:
    return (x * y**power * scale).sum()


def test_grad_of_a_function_and_of_tensors_go_by_one_name() -> None:
    assert numbers(mg.grad(product)(X, Y)) == Y.tolist()
    assert numbers(mg.grad(product, 1)(X, Y)) == X.tolist()
    x = mg.Tensor(X, requires_grad=True)
    assert numbers(mg.grad((x * Y).sum(), x)) == [Y.tolist()]
    assert x.grad is None and numbers(mg.grad(product)(x, Y)) == Y.tolist() and x.grad is None
    with pytest.raises(CallError, match=r"grad\(fn\)\(x, y\)"):
        mg.grad((x * Y).sum())


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [(0, Y), (1, X), (-1, X), (-2, Y), ((0,), [Y]), ((1, 0), [X, Y]), ((-1, 0, 0), [X, Y, Y])],
)
def test_argnums_count_from_either_end(argnums: Any, expected: Any) -> None:
    value, slope = mg.value_and_grad(product, argnums)(X, Y)
    assert numbers(slope) == numbers(mg.grad(product, argnums=argnums)(X, Y)) == np.array(expected).tolist()
    assert value.item() == (X * Y).sum() and isinstance(slope, tuple) == isinstance(argnums, tuple)
    assert numbers(mg.elementwise_grad(lambda x, y: x * y, argnums)(X, Y)) == np.array(expected).tolist()
    blocks = mg.jacobian(lambda x, y: (x * y).sum(), X, Y, argnums=argnums)
    assert numbers(blocks) == np.array(expected).tolist()
    assert numbers(mg.vjp(lambda x, y: (x * y).sum(), X, Y, argnums=argnums)[1](1.0)) == np.array(expected).tolist()


@pytest.mark.parametrize("argnums", [2, -3, (0, 2), 0.5, True, "x"])
def test_argnums_that_name_no_argument_are_refused(argnums: Any) -> None:
    with pytest.raises((ArgumentError, CallError), match="argnums"):
        mg.grad(product, argnums=argnums)(X, Y)


def test_integers_pass_through_and_are_refused_to_differentiate_by() -> None:
    assert numbers(mg.grad(product)(X, Y, 2)) == (Y**2).tolist()
    assert numbers(mg.grad(lambda x, i: x[i])(X, np.array(1))) == [0, 1, 0]
    for argnums in (2, (0, 2)):
        with pytest.raises(DTypeError, match=r"argnums= names"):
            mg.grad(product, argnums)(X, Y, 2)
    with pytest.raises(DTypeError, match=r"argument 0\['n'\]"):
        mg.grad(lambda p: p["w"] * p["n"])({"w": 1.0, "n": 2})
    assert numbers(mg.jacobian(lambda x, n: x * n, X, 3, argnums=0)) == (3 * np.eye(3)).tolist()
    assert numbers(mg.jvp(lambda x, n: x * n, (X, 3), (Y, None))[1]) == (3 * Y).tolist()


def test_keyword_arguments_are_passed_on() -> None:
    twice = {"scale": 2.0}
    assert numbers(mg.grad(product)(X, Y, **twice)) == (2 * Y).tolist()
    assert numbers(mg.grad(product)(X, y=Y)) == Y.tolist()
    assert numbers(mg.elementwise_grad(product)(X, Y, power=2)) == (Y**2).tolist()
    assert mg.vjp(product, X, Y, argnums=0, **twice)[0].item() == 2 * (X * Y).sum()
    assert mg.jvp(product, (X, Y), (X, None), **twice)[1].item() == 2 * (X * Y).sum()
    assert numbers(mg.hvp(product, (X, Y), (X, Y), **twice)[1]) == [(2 * Y).tolist(), (2 * X).tolist()]
    assert numbers(mg.jacobian(product)(X, Y, **twice)) == (2 * Y).tolist()
    assert numbers(mg.hessian(product, argnums=1)(X, Y, power=2)) == np.diag(2 * X).tolist()


def test_has_aux_hands_the_second_result_on() -> None:
    def fn(x: Any, aux: Any) -> Any:
        return (x**2).sum(), {"double": 2 * x, "text": aux}

    def is_aux(aux: Any) -> bool:
        return numbers(aux) == {"double": (2 * X).tolist(), "text": "kept"} and not aux["double"].requires_grad

    slope, aux = mg.grad(fn, has_aux=True)(X, "kept")
    assert numbers(slope) == (2 * X).tolist() and is_aux(aux)
    (value, aux), slope = mg.value_and_grad(fn, has_aux=True)(X, "kept")
    assert value.item() == 14 and numbers(slope) == (2 * X).tolist() and is_aux(aux)
    out, pull, aux = mg.vjp(fn, X, "kept", argnums=0, has_aux=True)
    assert out.item() == 14 and numbers(pull(1.0)) == (2 * X).tolist() and is_aux(aux)
    out, move, aux = mg.jvp(fn, (X, "kept"), (Y, None), has_aux=True)
    assert move.item() == 2 * (X * Y).sum() and is_aux(aux)
    block, aux = mg.jacobian(fn, argnums=0, has_aux=True)(X, "kept")
    assert numbers(block) == (2 * X).tolist() and is_aux(aux)
    with pytest.raises(CallError, match="has_aux"):
        mg.grad(lambda x: x, has_aux=True)(1.0)
    with pytest.raises(DTypeError, match="has_aux=True"):
        mg.grad(fn)(X, "kept")
    with pytest.raises(ShapeError, match="has_aux=True"):
        mg.grad(lambda x: (x.sum(), x))(X)


def test_counters_are_handed_on_and_filled() -> None:
    """Their ``update`` adds, where that of other dicts replaces."""
    _, aux = mg.grad(lambda x: ((x * x).sum(), Counter(tokens=3)), has_aux=True)(X)
    assert aux == Counter(tokens=3)
    slope = mg.grad(lambda p: p["w"] ** 2)(Counter(w=3.0))
    assert numbers(slope) == {"w": 6.0}


def test_a_tensor_changed_before_the_pullback_is_an_error() -> None:
    x = mg.tensor(X)
    _, pullback = mg.vjp(lambda v: v * v, x)
    x[0] = 100.0
    with pytest.raises(GraphError, match="data changed since"):
        pullback(np.ones(3))


@pytest.mark.parametrize("transform", [mg.grad, mg.hessian, lambda fn: lambda x: mg.jvp(fn, x, X)])
def test_a_backward_pass_inside_that_frees_the_graph_is_explained(transform: Any) -> None:
    def fn(x: Any) -> Any:
        y = (x * x).sum()
        y.backward()
        return y

    with pytest.raises(GraphError, match="retain_graph"):
        transform(fn)(X)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
def test_copies_of_a_variable_are_constants(copied: Any) -> None:
    """A pickled copy comes back on the CPU."""
    assert numbers(mg.grad(lambda x: (copied(x).to(x.device) * x).sum())(X)) == X.tolist()


def test_the_transformed_function_says_what_it_is() -> None:
    assert mg.grad(product).__name__ == "gradient of product"
    assert mg.hessian(product).__name__ == "Hessian of product"


# ---- containers -----------------------------------------------------------------------------------------------------

TREES: dict[str, tuple[Any, Any, Any]] = {  # a container, its use, and the gradient
    "dict": ({"a": X, "b": 2.0}, lambda t: (t["a"] * t["b"]).sum(), {"a": [2, 2, 2], "b": 6}),
    "ordered": (OrderedDict(b=2.0, a=X), lambda t: (t["a"] * t["b"]).sum(), {"a": [2, 2, 2], "b": 6}),
    "tuple": ((X, 2.0), lambda t: (t[0] * t[1]).sum(), [[2, 2, 2], 6]),
    "list": ([X, 2.0], lambda t: (t[0] * t[1]).sum(), [[2, 2, 2], 6]),
    "named": (Pair(X, 2.0), lambda t: (t.first * t.second).sum(), [[2, 2, 2], 6]),
    "nested": ({"l": [{"w": X}, (2.0, None)], "s": "x"}, lambda t: (t["l"][0]["w"] * t["l"][1][0]).sum(),
               {"l": [{"w": [2, 2, 2]}, [6, None]], "s": None}),
    "list of numbers": ([1.0, 2.0, 3.0], lambda t: (t**2).sum(), [2, 4, 6]),
    "empty": ({"a": X, "none": []}, lambda t: t["a"].sum(), {"a": [1, 1, 1], "none": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_containers_are_arguments_and_gradients(name: str) -> None:
    tree, fn, expected = TREES[name]
    for slope in (mg.grad(fn)(tree), mg.vjp(fn, tree)[1](1.0), mg.elementwise_grad(fn)(tree), mg.jacobian(fn, tree)):
        assert numbers(slope) == expected
        assert type(slope) is (mg.Tensor if name == "list of numbers" else type(tree))
    given = [tree] if isinstance(tree, list | tuple) else tree
    _, product = mg.jvp(fn, given, mg.grad(fn)(tree) if given is tree else [mg.grad(fn)(tree)])
    squares = sum(float((leaf.numpy() ** 2).sum()) for _, leaf in leaves(mg.grad(fn)(tree)))
    np.testing.assert_allclose(product.item(), squares)
    assert mg.gradcheck(fn, [tree]) if name != "list of numbers" else True


def test_dataclasses_keep_their_other_fields() -> None:
    model = Model(X, [{"w": Y}, 2.0])
    slope = mg.grad(lambda m: (m.weight * m.layers[0]["w"] * m.layers[1]).sum())(model)
    assert isinstance(slope, Model) and slope.activation is None and slope.trained is None
    assert numbers(slope.weight) == (2 * Y).tolist()
    assert numbers(slope.layers) == [{"w": (2 * X).tolist()}, (X * Y).sum()]
    assert model.activation == "tanh" and model.weight is X


@pytest.mark.parametrize("rows", [[[1.0], 2.0, 1.5], [[1.0], [2.0, 3.0]], [[[1.0, 2.0]], [3.0]], [[], [1.0]]], ids=str)
def test_rows_of_several_lengths_are_containers(rows: Any) -> None:
    """Lists of numbers are an array if they have the form of one."""
    squares = lambda p: sum(mg.sum(v * v) for _, v in leaves(p))
    assert numbers(mg.grad(squares)(rows)) == [numbers(mg.grad(squares)(row)) if row else row for row in rows]
    assert mg.jvp(squares, (rows,), (rows,))[1].item() == sum(2 * np.sum(np.square(row)) for row in rows)


def test_a_truth_value_has_no_derivative() -> None:
    for transform in (mg.grad, mg.value_and_grad, mg.elementwise_grad, mg.jacobian):
        with pytest.raises(DTypeError, match="a function that returns Tensors"):
            transform(lambda x: np.allclose(x, x))(X)


def test_results_may_be_containers() -> None:
    def fn(x: Any, p: Any) -> Any:
        return {"square": x * x, "both": (x.sum() * p["b"], 1.0)}

    p = {"b": 3.0}
    out, pull = mg.vjp(fn, X, p)
    assert numbers(out) == {"square": (X * X).tolist(), "both": [18.0, 1.0]}
    assert numbers(pull({"both": (1.0, 5.0), "square": Y})) == [(2 * X * Y + 3).tolist(), {"b": 6}]
    _, product = mg.jvp(fn, (X, p), (Y, {"b": 1.0}))
    assert numbers(product) == {"square": (2 * X * Y).tolist(), "both": [3 * Y.sum() + 6, 0.0]}
    for mode in ("forward", "reverse"):
        blocks = mg.jacobian(fn, X, p, mode=mode)
        assert numbers(blocks["square"]) == [np.diag(2 * X).tolist(), {"b": [0, 0, 0]}]
        assert numbers(blocks["both"]) == [[[3, 3, 3], {"b": 6}], [[0, 0, 0], {"b": 0}]]


def test_hessian_of_containers_has_a_container_in_each_place() -> None:
    blocks = mg.hessian(lambda p: (p["a"] ** 2 * p["b"]).sum(), {"a": X, "b": 2.0})
    assert numbers(blocks["a"]["a"]) == np.diag([4.0] * 3).tolist()
    assert numbers(blocks["a"]["b"]) == numbers(blocks["b"]["a"]) == (2 * X).tolist() and blocks["b"]["b"].item() == 0
    _, product = mg.hvp(lambda p: (p["a"] ** 2 * p["b"]).sum(), {"a": X, "b": 2.0}, {"b": 1.0, "a": Y})
    assert numbers(product) == {"a": (4 * Y + 2 * X).tolist(), "b": (2 * X * Y).sum()}


@pytest.mark.parametrize("given", [{"a": X}, {"a": X, "c": 1.0}, [X, 1.0], X, {"a": X, "b": [1.0, 2.0]}])
def test_a_tangent_of_another_form_is_refused(given: Any) -> None:
    with pytest.raises((ArgumentError, ShapeError), match="vector"):
        mg.jvp(lambda p: p["a"] * p["b"], {"a": X, "b": 2.0}, given)


def test_the_vector_of_a_list_of_numbers_may_hold_tensors() -> None:
    """And a gradient flows to them: the product is linear in the vector."""
    cubic = lambda t: (t[0] ** 2 * t[1]).sum()
    v = mg.Tensor([2.0, 3.0], requires_grad=True)
    products = {
        "jvp": (mg.jvp(cubic, ([1.0, 2.0],), ([v[0], v[1]],))[1], [4.0, 1.0]),
        "hvp": (mg.hvp(cubic, ([1.0, 2.0],), ([v[0], v[1]],))[1].sum(), [6.0, 2.0]),
        "vjp": (mg.vjp(lambda t: t**2, [1.0, 2.0])[1]([v[0], v[1]]).sum(), [2.0, 4.0]),
    }
    for name, (product, slopes) in products.items():
        np.testing.assert_allclose(product.item(), np.dot(slopes, v.numpy()), err_msg=name)
        assert mg.grad(product, v)[0].tolist() == slopes, name


# ---- constants ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [lambda x: 5.0, lambda x: mg.ones(()), lambda x: mg.stop_gradient(x).sum()])
def test_constant_functions_have_the_gradient_zero(fn: Any) -> None:
    zeros = [0.0] * 3
    assert numbers(mg.grad(fn)(X)) == numbers(mg.elementwise_grad(fn)(X)) == numbers(mg.vjp(fn, X)[1](1.0)) == zeros
    assert mg.jvp(fn, X, Y)[1].item() == 0 and numbers(mg.hvp(fn, X, Y)[1]) == zeros
    assert numbers(mg.jacobian(fn, X)) == numbers(mg.jacobian(fn, X, mode="forward")) == zeros
    assert numbers(mg.hessian(fn, X)) == [zeros] * 3
    assert mg.value_and_grad(fn)(X)[0].size == 1


@pytest.mark.parametrize("fn", [lambda x: x.data, lambda x: x.data.sum(), lambda x: np.float32(1)])
def test_arrays_that_may_come_from_beside_the_graph_are_refused(fn: Any) -> None:
    with pytest.raises(DTypeError, match="NumPy alone"):
        mg.elementwise_grad(fn)(X)


# ---- modes and orders -----------------------------------------------------------------------------------------------


def mixed(x: Any) -> Any:
    """A function with operations of every kind: elementwise, linear, products, rules of one's own, several results."""
    a = mg.tanh(x @ np.arange(12.0).reshape(3, 4) / 9)
    b = mg.concatenate([a[1:], mg.cumsum(x)])
    return mg.softmax(b) * mg.stack([*mg.split(b, 3), b[:2]]).reshape(-1)[: b.size].max() + mg.sort(b).std()


@pytest.mark.parametrize("mode", ["forward", "reverse", None])
def test_jacobian_in_either_mode(mode: Any) -> None:
    rows = [mg.grad(lambda x, k=k: mixed(x)[k])(X).numpy() for k in range(6)]
    np.testing.assert_allclose(mg.jacobian(mixed, X, mode=mode).numpy(), rows, rtol=1e-12, atol=1e-15)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ArgumentError, match="forward"):
        mg.jacobian(mixed, X, mode="both")


@pytest.mark.parametrize(("shape", "passes"), [((2, 100), "reverse"), ((100, 2), "forward"), ((3, 3), "reverse")])
def test_jacobian_takes_the_mode_with_fewer_passes(monkeypatch: Any, shape: Any, passes: str) -> None:
    taken = []
    run = Rows.run
    monkeypatch.setattr(Rows, "run", lambda self, roots: (taken.append("reverse"), run(self, roots))[1])
    w = np.random.default_rng(0).normal(size=shape)
    found = mg.jacobian(lambda x: w @ x, np.ones(shape[1]))
    np.testing.assert_allclose(found.numpy(), w)
    assert ("reverse" in taken) == (passes == "reverse") and len(taken) <= 1  # all rows at once


WAYS = {
    "grad": lambda f: mg.grad(f),
    "forward": lambda f: lambda x: mg.jvp(f, x, 1.0)[1],
    "reverse": lambda f: lambda x: mg.vjp(f, x)[1](1.0),
    "rows": lambda f: lambda x: mg.jacobian(f, x, mode="reverse"),
    "columns": lambda f: lambda x: mg.jacobian(f, x, mode="forward"),
    "elementwise": lambda f: mg.elementwise_grad(f),
}


@pytest.mark.parametrize("ways", list(itertools.product(WAYS, repeat=3)), ids="-".join)
def test_all_orders_of_forward_and_reverse(ways: tuple[str, str, str]) -> None:
    """The third derivative of x⁵ e^(x/2) at 2, each order by a way of its own."""
    f: Any = lambda x: x**5 * mg.exp(x / 2)
    for way in ways:
        f = WAYS[way](f)
    expected = np.e * (60 * 4 + 3 / 2 * 20 * 8 + 3 / 4 * 5 * 16 + 32 / 8)
    np.testing.assert_allclose(f(2.0).item(), expected, rtol=1e-13)


def test_hvp_is_forward_over_reverse() -> None:
    loss = lambda x: (mixed(x) ** 2).sum()
    h = mg.hessian(loss, X).numpy()
    np.testing.assert_allclose(mg.jvp(mg.grad(loss), X, Y)[1].numpy(), h @ Y, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(mg.hvp(loss, X, Y)[1].numpy(), h @ Y, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(
        mg.jacobian(mg.grad(loss), X, mode="forward").numpy(), h, rtol=1e-11, atol=1e-13
    )  # fmt: skip
    assert mg.gradcheck(lambda x: mg.jvp(mixed, x, Y)[1], X) and mg.gradcheck(lambda t: mg.jvp(mixed, X, t)[1], Y)


def test_perturbations_are_not_confused() -> None:
    """d/dx x · d/dy (x + y): each tangent belongs to its own variable."""
    derivative = lambda f, x: mg.jvp(f, x, 1.0)[1]
    assert derivative(lambda x: x * derivative(lambda y: x + y, 1.0), 1.0).item() == 1
    assert derivative(lambda x: x * derivative(lambda y: x * y, 2.0), 3.0).item() == 6


def test_forward_mode_of_what_is_recorded_outside() -> None:
    """A tensor that the function reads belongs to an outer graph, which goes on through the product."""
    w = mg.Tensor(Y, requires_grad=True)
    product = mg.jvp(lambda x: (w * w * x).sum(), X, X)[1]
    product.backward()
    assert w.grad is not None and w.grad.tolist() == (2 * Y * X).tolist()
    with mg.no_grad():
        assert not mg.jvp(lambda x: (w * x).sum(), X, X)[1].requires_grad


def test_forward_mode_through_checkpoints_hooks_and_precision() -> None:
    expected = mg.jvp(lambda x: mg.tanh(x) * x, X, Y)[1].numpy()
    np.testing.assert_allclose(mg.jvp(lambda x: mg.checkpoint(lambda v: mg.tanh(v) * v, x), X, Y)[1].numpy(), expected)

    def hooked(x: Any) -> Any:
        y = mg.tanh(x)
        y.register_hook(lambda g: 2 * g)  # of gradients, which forward mode has none of
        return y * x

    np.testing.assert_allclose(mg.jvp(hooked, X, Y)[1].numpy(), expected)
    both = mg.jacobian(hooked, X, mode="reverse").numpy()
    np.testing.assert_allclose(both, np.diag(np.tanh(X) + 2 * X * (1 - np.tanh(X) ** 2)))
    half = mg.jvp(lambda x: mg.matmul(x.astype("float16"), np.ones(3, "float16")), X, Y)[1]
    assert half.dtype == np.float16 and half.item() == 1.5


def test_rules_of_ones_own() -> None:
    """``defjvp`` is used where it is given, and for its argument alone."""
    calls = []

    @mg.primitive(torch=False, numpy=False)
    def weighted(x: mg.backend.Array, y: mg.backend.Array, k: int) -> mg.backend.Array:
        return k * (x * x).sum() * y

    weighted.defvjp(
        lambda g, x, y, k: (g * y).sum() * (2 * k) * x,
        lambda g, x, k: g * (k * (x * x).sum()),
    )
    weighted.defjvp(lambda t, x, y, k: (calls.append("x"), (x * t).sum() * (2 * k) * y)[1])
    try:
        found = mg.jvp(lambda x, y: weighted(x, y, 3), (X, Y), (Y, X))[1].numpy()
        np.testing.assert_allclose(found, 6 * (X * Y).sum() * Y + 3 * (X * X).sum() * X)
        assert calls == ["x"]
        assert mg.gradcheck(lambda x, y: mg.jvp(lambda x, y: weighted(x, y, 3), (x, y), (Y, X))[1], [X, Y])
        with pytest.raises(CallError, match="rules of 'weighted'"):
            weighted.defjvp(lambda t, z: t)
    finally:
        del mg.REGISTRY["weighted"]


# ---- rows in one pass -----------------------------------------------------------------------------------------------


def test_many_rows_and_columns_go_in_several_passes(monkeypatch: Any) -> None:
    whole = mg.jacobian(mixed, X).numpy()
    monkeypatch.setattr("minigrad.rows.LARGEST", 24)
    for mode in ("forward", "reverse"):
        np.testing.assert_allclose(mg.jacobian(mixed, X, mode=mode).numpy(), whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("left", "right"),
    [((3,), (3,)), ((3,), (3, 2)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3,)), ((3,), (5, 3, 2)),
     ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)), ((5, 2, 3), (5, 3, 4)), ((1, 2, 3), (5, 3, 4)), ((0, 3), (3,)),
     ((5, 1, 2, 3), (2, 3, 4)), ((2, 0), (0, 3))],
)  # fmt: skip
def test_rows_and_columns_of_products(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """The Jacobians of matmul by both factors in both modes, against the product with each unit array."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=left), rng.normal(size=right)
    by_x = np.array([x_unit.reshape(left) @ y for x_unit in np.eye(x.size)]).reshape(x.size, *(x @ y).shape)
    by_y = np.array([x @ y_unit.reshape(right) for y_unit in np.eye(y.size)]).reshape(y.size, *(x @ y).shape)
    for mode in ("forward", "reverse"):
        blocks = mg.jacobian(lambda x, y: x @ y, x, y, mode=mode)
        for block, expected, shape in zip(blocks, (by_x, by_y), (left, right), strict=True):
            assert block.shape == (x @ y).shape + shape
            np.testing.assert_allclose(block.numpy(), np.moveaxis(expected, 0, -1).reshape(block.shape), atol=1e-12)


@pytest.mark.parametrize(
    "index",
    [1, slice(1, 3), (slice(None), 0), (..., None, 1), np.array([0, 2, 0]), (np.array([0, 2]), slice(1, None)),
     (slice(None), np.array([[0, 1]])), (np.array([0, 1]), np.array([1, 0])), (np.array([0, 1]), slice(None), 1),
     (0, slice(None), np.array([0, 1])), np.array([True, False, True, False])],
    ids=str,
)  # fmt: skip
def test_rows_of_indexing(index: Any) -> None:
    x = (
        np.arange(24.0).reshape(4, 3, 2)
        if isinstance(index, tuple) and len(index) > 2
        else np.arange(12.0).reshape(4, 3)
    )
    expected = np.array([unit.reshape(x.shape)[index] for unit in np.eye(x.size)])
    block = mg.jacobian(lambda x: x[index], x, mode="reverse")
    np.testing.assert_array_equal(block.numpy().reshape(-1, x.size), expected.reshape(x.size, -1).T)
