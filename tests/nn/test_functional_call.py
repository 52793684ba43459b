"""A module as a function of its parameters: every transform serves a whole model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import minigrad as mg
import nn
from minigrad.errors import CallError, StateError
from minigrad.trees import leaves

X = np.random.default_rng(0).normal(size=(4, 3))


@pytest.fixture
def model() -> nn.Module:
    mg.random.seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).to(dtype="float64")


def parameters(model: nn.Module) -> dict[str, Any]:
    return {name: p.data.copy() for name, p in model.named_parameters()}


def test_it_is_the_model_at_other_parameters(model: nn.Module) -> None:
    expected, own = model(X).numpy(), list(model.parameters())
    np.testing.assert_array_equal(nn.functional_call(model, parameters(model), X).numpy(), expected)
    doubled = {name: 2 * p for name, p in parameters(model).items()}
    assert not np.allclose(nn.functional_call(model, doubled, X).numpy(), expected)
    assert all(p is q for p, q in zip(model.parameters(), own, strict=True))
    np.testing.assert_array_equal(model(X).numpy(), expected)


def test_transforms_serve_a_whole_model(model: nn.Module) -> None:
    """Gradients are those of backward, and torch.func's; Hessian-vector products are those of differences."""
    loss = lambda p: (nn.functional_call(model, p, X) ** 2).sum()
    p = parameters(model)
    (model(X) ** 2).sum().backward()
    slope = mg.grad(loss)(p)
    for name, q in model.named_parameters():
        np.testing.assert_allclose(slope[name].numpy(), q.grad, rtol=1e-12, atol=1e-14)
    rng = np.random.default_rng(1)
    v = {name: rng.normal(size=a.shape) for name, a in p.items()}
    product = mg.hvp(loss, p, v)[1]
    forward = mg.jvp(mg.grad(loss), p, v)[1]
    up, down = (mg.grad(loss)({name: a + h * v[name] for name, a in p.items()}) for h in (1e-6, -1e-6))
    for name in p:
        np.testing.assert_allclose(product[name].numpy(), (up[name] - down[name]).numpy() / 2e-6, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(forward[name].numpy(), product[name].numpy(), rtol=1e-10, atol=1e-12)
    assert mg.gradcheck(lambda p, x: nn.functional_call(model, p, x), [p, X])

    twin = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2))
    theirs = torch.func.jacrev(lambda p: torch.func.functional_call(twin.double(), p, torch.from_numpy(X)))(
        {name: torch.from_numpy(mg.asarray(a).numpy()) for name, a in p.items()}
    )
    ours = mg.jacobian(lambda p: nn.functional_call(model, p, X), p)
    for name in p:
        np.testing.assert_allclose(ours[name].numpy(), theirs[name].numpy(), rtol=1e-10, atol=1e-12)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", np.ones(3))

    def forward(self, x: Any, fail: bool = False) -> Any:
        if fail:
            raise ValueError("mine")
        return self.second(self.first(x)) + self.shift


def test_tied_weights_and_buffers() -> None:
    model, w = Tied().to("float64"), np.random.default_rng(2).normal(size=(3, 3))
    expected = X @ w.T @ w.T
    for given in ({"first.weight": w}, {"second.weight": w}, {"first.weight": w, "second.weight": w.copy()}):
        np.testing.assert_allclose(nn.functional_call(model, given, X).numpy(), expected + 1, rtol=1e-6)
    np.testing.assert_allclose(
        nn.functional_call(model, {"first.weight": w, "shift": X[0]}, X).numpy(), expected + X[0]
    )
    slope = mg.grad(lambda w: nn.functional_call(model, {"second.weight": w}, X).sum())(w).numpy()
    ones = np.ones((4, 3))
    np.testing.assert_allclose(slope, ones.T @ (X @ w.T) + (ones @ w).T @ X)
    np.testing.assert_allclose(nn.functional_call(model, model.state_dict(), X).numpy(), model(X).numpy())
    with pytest.raises(StateError, match=r"first\.weight and second\.weight"):
        mg.grad(lambda p: nn.functional_call(model, p, X).sum())({"first.weight": w, "second.weight": w.copy()})


def test_wrong_names_are_told_at_once(model: nn.Module) -> None:
    given = parameters(model)
    given["0.wieght"] = given.pop("0.weight")
    given["3.bias"] = np.ones(7)
    with pytest.raises(StateError, match=r"missing: 0\.weight; unexpected: 0\.wieght; wrong shape: 3\.bias \(7,\)"):
        nn.functional_call(model, given, X)
    for bad in ((model, [1.0]), (lambda x: x, {})):
        with pytest.raises(CallError, match="named_parameters"):
            nn.functional_call(*bad, X)  # type: ignore[arg-type]


def test_the_module_gets_its_own_back_after_an_exception() -> None:
    model, seen = Tied(), []
    own = model.first.weight
    model.first.register_forward_hook(lambda module, inputs, out: seen.append(module.weight))
    with pytest.raises(ValueError, match="mine"):
        nn.functional_call(model, {"first.weight": np.eye(3)}, X, fail=True)
    assert model.first.weight is own is model.second.weight
    nn.functional_call(model, {"first.weight": np.eye(3)}, X)
    assert len(seen) == 1 and seen[0] is not own and model.first.weight is own


def test_calls_nest(model: nn.Module) -> None:
    def inner(p: Any) -> Any:
        updated = {name: a - 0.1 * g for (name, a), g in zip(p.items(), mg.grad(loss)(p).values(), strict=True)}
        return loss(updated)

    loss = lambda p: (nn.functional_call(model, p, X) ** 2).mean()
    assert mg.gradcheck(inner, parameters(model))


@pytest.mark.parametrize("key", [1, None, ("weight",)])
def test_names_that_are_no_strings_are_listed_too(key: Any) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(StateError, match="unexpected"):
        nn.functional_call(model, {**dict(model.named_parameters()), key: 1.0}, np.ones((1, 2)))
    with pytest.raises(StateError, match="unexpected"):
        model.load_state_dict({**model.state_dict(), key: 1.0})


@pytest.mark.parametrize("transform", ["grad", "hvp", "jacobian", "jvp"])
def test_a_checkpoint_inside_runs_again_with_the_given_parameters(transform: str) -> None:
    """What is recomputed is the module at the given parameters; its own are there again before, between and after."""

    class Recomputed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return mg.checkpoint(self.inner, mg.asarray(x))

    mg.random.seed(0)
    plain = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).to(dtype="float64")
    recomputed, own = Recomputed(Recomputed(plain)), list(plain.parameters())
    rng = np.random.default_rng(1)
    given = {name: rng.normal(size=p.shape) for name, p in plain.named_parameters()}
    v = {name: rng.normal(size=p.shape) for name, p in plain.named_parameters()}

    def derivative(model: nn.Module, prefix: str) -> Any:
        def out(p: Any) -> Any:
            return nn.functional_call(model, {prefix + name: a for name, a in p.items()}, X) ** 2

        loss = lambda p: (out(p) + out({name: 2 * a for name, a in p.items()})).sum()
        if transform in ("grad", "jacobian"):
            return mg.grad(loss)(given) if transform == "grad" else mg.jacobian(out, given)
        return mg.hvp(loss, given, v)[1] if transform == "hvp" else mg.jvp(out, given, v)[1]

    found, expected = derivative(recomputed, "inner.inner."), derivative(plain, "")
    for ours, theirs in zip(*([t.numpy() for _, t in leaves(d)] for d in (found, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    assert all(p is q for p, q in zip(plain.parameters(), own, strict=True))


def test_a_checkpoint_within_two_calls_runs_again_with_the_parameters_of_both() -> None:
    first, second = (nn.Linear(1, 1, bias=False).to(dtype="float64") for _ in range(2))
    x, given = np.ones((1, 1)), {"weight": np.array([[3.0]])}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = first

        def forward(self, other: Any) -> Any:
            return nn.functional_call(Inner(), {"second.weight": other["weight"]})

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = second

        def forward(self) -> Any:
            return mg.checkpoint(lambda x: first(second(x)) ** 2, mg.asarray(x))

    slopes = mg.grad(lambda p, q: nn.functional_call(Outer(), {"first.weight": p["weight"]}, q).sum(), argnums=(0, 1))
    p, q = slopes(given, {"weight": np.array([[5.0]])})  # of (3 * 5)²
    assert (p["weight"].item(), q["weight"].item()) == (2 * 3 * 25, 2 * 9 * 5)


def test_swiglu_that_recomputes_is_a_function_of_its_parameters() -> None:
    layers = [nn.SwiGLU(4, 6, recompute=flag).to(dtype="float64") for flag in (False, True)]
    p = {name: np.random.default_rng(2).normal(size=q.shape) for name, q in layers[0].named_parameters()}
    x = np.random.default_rng(3).normal(size=(2, 4))
    slopes = [mg.grad(lambda p, m=m: nn.functional_call(m, p, x).sum())(p) for m in layers]
    for name in p:
        np.testing.assert_allclose(slopes[1][name].numpy(), slopes[0][name].numpy(), rtol=1e-12)


@pytest.mark.parametrize("again", [False, True], ids=["forward", "run again"])
def test_threads_take_turns_on_one_module(again: bool) -> None:
    """Each is in the middle of its call while others ask for the module, forward or when it runs again."""
    waiting, inside = threading.Event(), [0, 0]

    class Slow(nn.Linear):
        def forward(self, x: Any) -> Any:
            inside[0] += 1
            inside[1] = max(inside)
            waiting.wait(0.02)
            out = super().forward(x)
            inside[0] -= 1
            return out

    model = Slow(1, 1, bias=False).to(dtype="float64")
    recompute = mg.checkpoint if again else lambda fn, x: fn(x)

    def slope(factor: float) -> float:
        loss = lambda p: recompute(lambda x: nn.functional_call(model, p, x) ** 2, mg.ones((1, 1))).sum()
        return float(mg.grad(loss)({"weight": np.array([[factor]])})["weight"].item())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(slope, [1.0, 2.0, 3.0, 4.0])) == [2.0, 4.0, 6.0, 8.0]
    assert inside == [0, 1]
