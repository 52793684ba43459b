"""Random programs, in which operations and mechanisms meet: minigrad's derivatives beside torch's, to the third order.

A program is a list of steps. Each step makes one value of those before it, or does something to the graph: a hook, a
checkpoint, a view, ``no_grad``. The same steps run in both libraries; torch runs what minigrad checkpoints as it is,
which means the same. Faults are where mechanisms meet, so each program crosses several. Numbers may change in place
after they were used: then there is an error, or the derivative at the old ones.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minigrad as mg
import nn
from minigrad.errors import GraphError

pytestmark = pytest.mark.cpu_only("compares with torch on the CPU")

SHAPES = [(2, 3), (3,), (), (2, 1)]


class Library(NamedTuple):
    """What the steps call, by names that mean the same in both libraries."""

    lib: Any
    layers: Any
    constant: Callable[[Any], Any]
    leaf: Callable[[Any], Any]
    checkpoint: Callable[..., Any]
    grad: Callable[..., Any]
    slope: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lib, name)


MADE: list[mg.Tensor] = []  # the constants of a program


def noted(a: Any) -> mg.Tensor:
    MADE.append(mg.Tensor(a))
    return MADE[-1]


def torch_slope(fn: Callable[[Any], Any], x: Any, way: int) -> Any:
    """The gradient of ``fn`` at x, or the product of its Hessian with ones, in the graph of x and what fn reads."""
    v = x * 1.0 if x.requires_grad else x.detach().requires_grad_()

    def gradient(out: Any) -> Any:
        found = torch.autograd.grad(out, v, create_graph=True, allow_unused=True)[0] if out.requires_grad else None
        return torch.zeros_like(v) if found is None else found

    first = gradient(fn(v))
    return first if way < 2 else gradient(first.sum())


def our_slope(fn: Callable[[Any], Any], x: Any, way: int) -> Any:
    if way == 0:
        return mg.value_and_grad(fn)(x)[1]
    return mg.vjp(fn, x)[1](1.0) if way == 1 else mg.hvp(fn, x, np.ones(x.shape))[1]


OURS = Library(
    mg,
    nn.functional,
    noted,
    lambda a: mg.Tensor(a, requires_grad=True),
    mg.checkpoint,
    lambda out, leaves, create: mg.grad(out, leaves, create_graph=create, allow_unused=True, retain_graph=True),
    our_slope,
)
TORCH = Library(
    torch,
    torch.nn.functional,
    lambda a: torch.tensor(a),
    lambda a: torch.tensor(a, requires_grad=True),
    lambda fn, *args: fn(*args),
    lambda out, leaves, create: torch.autograd.grad(
        out, leaves, create_graph=create, allow_unused=True, retain_graph=True
    ),
    torch_slope,
)


def axis_of(x: Any, pick: int) -> int:
    return pick % x.ndim


def masked(x: Any, lib: Library) -> Any:
    return lib.where(x > 0.1, x * x, 0.5 * x)


def layer_norm(lib: Library, x: Any) -> Any:
    """Torch's own loses digits where all elements of a row are equal."""
    if lib is OURS:
        return nn.functional.layer_norm(x, x.shape[-1:], None, None, 0.1)
    centred = x - x.mean(-1, True)
    return centred / torch.sqrt((centred * centred).mean(-1, True) + 0.1)


# Each takes (library, x, y, a small whole number); y has been broadcast with x before where it matters.
Step = Callable[[Library, Any, Any, int], Any]
STEPS: dict[str, Step] = {
    "sin": lambda lib, x, y, k: lib.sin(x),
    "tanh": lambda lib, x, y, k: lib.tanh(x),
    "exp": lambda lib, x, y, k: lib.exp(x * 0.3),
    "softplus": lambda lib, x, y, k: lib.log1p(lib.exp(x)),
    "sigmoid": lambda lib, x, y, k: lib.sigmoid(x),
    "square": lambda lib, x, y, k: x * x,
    "power": lambda lib, x, y, k: (x * x + 1.0) ** (0.5 + k % 3),
    "divide": lambda lib, x, y, k: x / (y * y + 1.0),
    "multiply": lambda lib, x, y, k: x * y,
    "add": lambda lib, x, y, k: x + y,
    "subtract": lambda lib, x, y, k: 2.0 - x - y,
    "where": lambda lib, x, y, k: lib.where(x > y, lib.sin(x), y * x),
    "piecewise": lambda lib, x, y, k: masked(x, lib),
    "maximum": lambda lib, x, y, k: lib.maximum(x, y + 0.01),
    "sum": lambda lib, x, y, k: x.sum() if x.ndim == 0 else x.sum(axis_of(x, k)),
    "sum kept": lambda lib, x, y, k: x if x.ndim == 0 else x.sum(axis_of(x, k), True) + x,
    "mean": lambda lib, x, y, k: x.mean() * x,
    "prod": lambda lib, x, y, k: x if x.ndim == 0 else x.prod(axis_of(x, k)),
    "cumsum": lambda lib, x, y, k: x if x.ndim == 0 else lib.cumsum(x, axis_of(x, k)),
    "logsumexp": lambda lib, x, y, k: x if x.ndim == 0 else lib.logsumexp(x, axis_of(x, k)),
    "softmax": lambda lib, x, y, k: x if x.ndim == 0 else lib.softmax(x, axis_of(x, k)),
    "silu": lambda lib, x, y, k: lib.layers.silu(x),
    "gelu": lambda lib, x, y, k: lib.layers.gelu(x),
    "rms_norm": lambda lib, x, y, k: lib.layers.rms_norm(x, x.shape[-1:], None, 0.1) if x.ndim else x,
    "layer_norm": lambda lib, x, y, k: layer_norm(lib, x) if x.ndim else x,
    "linear": lambda lib, x, y, k: lib.layers.linear(x, lib.stack([x.reshape(-1)[: x.shape[-1]]])) if x.ndim else x,
    "flatten": lambda lib, x, y, k: x.reshape(-1),
    "transpose": lambda lib, x, y, k: x.swapaxes(0, -1) if x.ndim else x,
    "row": lambda lib, x, y, k: x[k % x.shape[0]] if x.ndim else x,
    "rows": lambda lib, x, y, k: x[np.array([0, -1, 0])] if x.ndim else x,
    "slice": lambda lib, x, y, k: x[: 1 + k % 2] if x.ndim else x,
    "new axis": lambda lib, x, y, k: x[None] if x.ndim < 3 else x,
    "join": lambda lib, x, y, k: lib.concatenate([x.reshape(-1), y.reshape(-1)]),
    "stack": lambda lib, x, y, k: lib.stack([x, x * y]) if x.ndim < 3 and x.shape == (x * y).shape else x,
    "outer": lambda lib, x, y, k: x.reshape(-1)[:3].reshape(-1, 1) @ y.reshape(-1)[:3].reshape(1, -1),
    "detach": lambda lib, x, y, k: x * y.detach(),
    "hook": lambda lib, x, y, k: hooked(x * y, 0.5 * k),
    "hook on what is there": lambda lib, x, y, k: hooked(x, 1.0 + k),
    "constant": lambda lib, x, y, k: x * lib.constant(np.full(x.shape, 0.5 + k)),
}


# Rules of these may read the result in one library and the argument in the other. A hook of the result itself would
# then see another gradient in the second derivative, so it is multiplied by 1.
READ_IN_RULES = {"sin", "tanh", "exp", "softplus", "sigmoid", "power", "divide", "prod", "logsumexp", "softmax"}
READ_IN_RULES |= {"silu", "gelu", "rms_norm", "layer_norm"}


def hooked(x: Any, factor: float) -> Any:
    """x, whose gradient is from now on multiplied by ``factor``."""
    if x.requires_grad:
        x.register_hook(lambda g: g * factor)
    return x


def broadcastable(x: Any, y: Any) -> bool:
    try:
        np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        return False
    return True


def run(lib: Library, program: Sequence[Any], values: list[Any]) -> list[Any]:
    """The values that a program makes after those given."""
    for name, i, j, k, inside in program:
        x, y = values[i % len(values)], values[j % len(values)]
        if not broadcastable(x, y):
            y = x
        if name == "checkpoint":

            def part(a: Any, inside: Any = inside, b: Any = y) -> Any:
                return run(lib, inside, [a, b])[-1]

            values = [*values, lib.checkpoint(part, x)]
        elif name == "several results":

            def parts(a: Any, inside: Any = inside, b: Any = y) -> Any:
                return (*run(lib, inside, [a, b])[-2:], lib.constant(np.full(a.shape, 0.7)))

            first, second, third = lib.checkpoint(parts, x)
            values = [*values, first, second.sum() * third]
        elif name == "slope":

            def number(a: Any, inside: Any = inside, b: Any = y) -> Any:
                return lib.tanh(run(lib, inside, [a, b])[-1] * 0.3).sum() + lib.sin(a).sum()

            values = [*values, lib.slope(number, x, k % 3)]
        elif name == "no_grad":
            with lib.no_grad():
                made = lib.sin(x)
            values = [*values, made * y]
        else:
            made = STEPS[name](lib, x, y, k)
            values = [*values, made * 1.0 if name in READ_IN_RULES else made]
        if values[-1].numel() > 200 if lib is TORCH else values[-1].size > 200:
            values[-1] = values[-1].reshape(-1)[:3]
    return values


def nothing(place: int, leaves: Sequence[Any]) -> None:
    """The change that a program undergoes where none is wanted."""


def derivatives(
    lib: Library, program: Any, arrays: Sequence[Any], order: int, change: Callable[..., None] = nothing
) -> list[Any]:
    """The program's value, and its derivatives by the leaves: that of a sum of cosines of the derivative before.

    The first comes twice, with a second output beside the first, and added to ``.grad`` by ``backward``. ``change`` is
    called before each derivative.
    """
    leaves = [lib.leaf(a) for a in arrays]
    made = run(lib, program, list(leaves))
    total = sum((lib.tanh(v * 0.1).sum() for v in made[len(leaves) :]), start=lib.sin(leaves[0]).sum())
    found, other = [total * 1.0], (made[-1] * 0.5).sum()
    for k in range(order):
        if not total.requires_grad:
            break
        change(k, leaves)
        if k == 0:
            outs = [total, other] if other.requires_grad else [total]
            found += [g for g in lib.grad(outs, leaves, False) if g is not None]
            total.backward(retain_graph=True)
            found += [lib.lib.asarray(leaf.grad) for leaf in leaves if leaf.grad is not None]
        gradients = lib.grad(total, leaves, k + 1 < order)
        found += [g for g in gradients if g is not None]
        total = sum((lib.cos(g * (0.3 + k)).sum() for g in gradients if g is not None), start=lib.constant(0.0))
    return found


MECHANISMS = ["checkpoint", "checkpoint", "several results", "slope", "no_grad", "hook", "detach", "constant"] * 3
INSIDE = [name for name in STEPS if name != "hook on what is there"]  # a function that runs again would hook again


NESTING = ("checkpoint", "several results", "slope", "no_grad")


def a_program(rng: random.Random, depth: int = 0) -> list[Any]:
    """Up to nine steps, half of them mechanisms; those of a checkpoint have programs of their own, two deep."""
    names = [*INSIDE, *MECHANISMS] if depth else [*STEPS, *MECHANISMS, *["hook on what is there"] * 3]
    names = [name for name in names if depth < 2 or name not in NESTING]
    return [
        (
            rng.choice(names),
            rng.randrange(8),
            rng.randrange(8),
            rng.randrange(4),
            a_program(rng, depth + 1) if depth < 2 else None,
        )
        for _ in range(rng.randint(1, 4 if depth else 9))
    ]


def disagreement(program: Any, seed: int, order: int) -> str:
    """What differs between the libraries, or what went wrong; empty if nothing."""
    rng = np.random.default_rng(seed)
    arrays = [rng.uniform(-1.5, 1.5, shape) for shape in SHAPES]
    theirs = derivatives(TORCH, program, arrays, order)
    MADE.clear()

    def change(place: int, leaves: Sequence[Any]) -> None:
        """In every other program, before one of the derivatives: constants, or a leaf, in one of two ways."""
        if seed % 2 and place == seed // 2 % order:
            for constant in MADE if seed % 3 else []:
                constant[...] = constant.data * 0.5 + 1.0
            leaves[seed % 4].data = leaves[seed % 4].data * (1.0 if seed % 3 else 0.9)

    try:
        ours = derivatives(OURS, program, arrays, order, change)
        for a, b in zip(ours, theirs, strict=True):
            expected = b.detach().numpy()
            scale = max(1.0, float(np.abs(expected).max(initial=0)))
            np.testing.assert_allclose(a.detach().numpy() / scale, expected / scale, rtol=1e-9, atol=1e-10)
    except GraphError as error:
        return "" if seed % 2 and "data changed since" in str(error) else f"GraphError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def smallest(program: list[Any], wrong: Callable[[list[Any]], str]) -> list[Any]:
    """The program without the steps that its fault doesn't need."""
    place = 0
    while place < len(program):
        shorter = program[:place] + program[place + 1 :]
        if shorter and wrong(shorter):
            program, place = shorter, 0
        else:
            place += 1
    return program


def check(seed: int, order: int) -> None:
    program = a_program(random.Random(seed))
    if disagreement(program, seed, order):
        program = smallest(program, lambda shorter: disagreement(shorter, seed, order))
        pytest.fail(f"{program}\n{disagreement(program, seed, order)}")


@pytest.mark.parametrize("order", [1, 2, 3])
def test_random_programs(order: int) -> None:
    for seed in range(order, 40 * order, order):
        check(seed, order)


@pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "deep", reason="minutes: HYPOTHESIS_PROFILE=deep")
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_many_random_programs(seed: int, order: int) -> None:
    check(seed, order)
