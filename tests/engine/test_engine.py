"""How the graph behaves: its life and death, modes, hooks, versions, protocols, and operations of one's own."""

import functools
import gc
import math
import operator
import sys
import threading
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch

import minigrad as mg
import nn
import optim
from minigrad.backend import is_array
from minigrad.engine.core import Node, Primitive, SequencePrimitive
from minigrad.engine.registry import Composite, sample
from minigrad.errors import CallError, DTypeError, GraphError, MiniGradError, ShapeError


def leaf(*values, **options):
    return mg.Tensor(values[0] if len(values) == 1 else list(values), requires_grad=True, **options)


def alive():
    """How many Nodes and Tensors exist."""
    return sum(type(obj) in (Node, mg.Tensor) for obj in gc.get_objects())


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def chain(x, depth):
    for _ in range(depth):
        x = x * 1.00001
    return x


# ---- deep graphs ----------------------------------------------------------------------------------------------------


def test_deep_graph(no_collector, depth=100_000):
    """Forward, backward and delete of a chain without recursion, and the memory of it is given back."""
    x = leaf(np.linspace(0.5, 1.5, 4))
    chain(x, 10_000).sum().backward()  # fills the free lists of the interpreter
    x.grad = None
    objects, blocks = alive(), sys.getallocatedblocks()
    y = chain(x, depth)
    grown = sys.getallocatedblocks() - blocks
    y.sum().backward()
    np.testing.assert_allclose(x.grad, 1.00001**depth, rtol=1e-9)
    del y
    assert alive() == objects
    assert sys.getallocatedblocks() - blocks < 5000 < 500_000 < grown


@pytest.mark.parametrize("use", ["never", "retained", "create_graph"])
def test_deep_graph_deleted_without_having_been_freed(no_collector, use):
    """The destructors of 20 000 nodes that each hold the next do not overflow the stack either."""
    x = leaf(0.5)
    before, limit = alive(), sys.getrecursionlimit()
    y = x
    for _ in range(20_000):
        y = mg.sin(y) + y
    if use == "retained":
        y.backward(retain_graph=True)
    if use == "create_graph":
        (g,) = mg.grad(y, x, create_graph=True)
        (gg,) = mg.grad(g, x, retain_graph=True)
        assert gg.shape == ()
        del g, gg
    del y
    assert alive() == before
    assert sys.getrecursionlimit() == limit


def test_27_results_die_at_once(no_collector):
    x = leaf(1.0, 2.0)

    def use(how):
        y = mg.exp(x)
        z = y.sum()
        reference = weakref.ref(y)
        if how == "backward":
            z.backward()
        if how == "create_graph":
            (g,) = mg.grad(z, x, create_graph=True)
            del g
        if how == "failed":
            with pytest.raises(GraphError):
                y.data = y.data + 1
                z = z + (y * y).sum()
                y.data = y.data + 1
                z.backward()
        del y, z
        return reference

    for how in ("forward", "backward", "create_graph", "failed"):
        assert use(how)() is None, how


def test_what_a_node_keeps_is_let_go_as_soon_as_it_was_used():
    """During the backward pass the results of later operations are gone already."""
    x = leaf(np.ones(1000))
    y = mg.exp(x)
    z = mg.exp(y)
    kept = weakref.ref(z.node.residuals[0])
    seen = []
    y.register_hook(lambda g: seen.append(kept() is None))
    total = z.sum()
    del z
    total.backward()
    assert seen == [True]


# ---- 24, 25, 26: adding up ------------------------------------------------------------------------------------------


def test_24_no_two_leaves_share_a_gradient():
    a, b = leaf(1.0, 2.0), leaf(1.0, 2.0)
    c = a + b
    (c + a).backward(np.ones(2))
    assert (a.grad.tolist(), b.grad.tolist()) == ([2, 2], [1, 1])
    a.grad *= 0
    assert b.grad.tolist() == [1, 1]


def test_25_a_leaf_is_an_object_not_a_value():
    w1, w2 = leaf(3.0), leaf(3.0)
    y = w1 * w2 + w1
    y.backward()
    assert (y.item(), w1.grad, w2.grad) == (12, 4, 3)


def test_26_backward_again():
    a = leaf(2.0)
    c = 4 * (3 * a)
    c.backward(retain_graph=True)
    c.backward()
    assert a.grad == 24
    with pytest.raises(RuntimeError, match="retain_graph"):
        c.backward()
    assert a.grad == 24


def test_an_upstream_gradient_is_borrowed_not_kept():
    x, g = leaf(1.0, 2.0), np.array([3.0, 4.0])
    (x + 0).backward(g)
    x.grad += 1
    assert g.tolist() == [3, 4]
    x.backward(g)  # a leaf may be differentiated itself
    assert x.grad.tolist() == [7, 9]
    assert g.tolist() == [3, 4]


def test_many_consumers_of_one_node_add_up():
    """The second gradient makes a sum of its own, later ones go into it in place; views and broadcast ones as well."""
    x = leaf(np.ones((2, 3)))
    y = x * 1
    total = y.sum() + (2 * y).sum() + y.T.sum() + y[0].sum() + (y + np.ones((4, 2, 3))).sum()
    total.backward()
    assert x.grad.tolist() == [[9] * 3, [8] * 3]


# ---- grad -----------------------------------------------------------------------------------------------------------


def test_grad_of_several_outputs_and_inputs():
    x, y = leaf(1.0, 2.0), leaf(3.0)
    gx, gy = mg.grad([x * y, y * y], [x, y], [np.array([1.0, 10.0]), np.array(2.0)])
    assert (gx.tolist(), gy.item()) == ([3, 30], 21 + 12)
    assert x.grad is None
    assert y.grad is None


def test_grad_of_an_intermediate_result():
    x = leaf(2.0)
    y = x * x
    z = y * y * x
    gx, gy = mg.grad(z, [x, y])
    assert (gx.item(), gy.item()) == (5 * 16, 2 * 4 * 2)


def test_grad_allow_unused():
    x, y, z = leaf(1.0), leaf(1.0), mg.Tensor(1.0)
    assert mg.grad(x * 2, [x, y], allow_unused=True)[1] is None
    with pytest.raises(GraphError, match="input 1"):
        mg.grad(x * 2, [x, y])
    with pytest.raises(GraphError, match="input 0"):
        mg.grad(x * 2, [z])


def test_grad_retain_and_create():
    x = leaf(2.0)
    y = x**3
    (first,) = mg.grad(y, x, retain_graph=True)
    assert not first.requires_grad
    (first,) = mg.grad(y, x, create_graph=True)
    (second,) = mg.grad(first, x, create_graph=True)
    (third,) = mg.grad(second, x)
    assert (first.item(), second.item(), third.item()) == (12, 12, 6)
    mg.grad(y, x)  # create_graph retains; this call frees
    with pytest.raises(GraphError, match="retain_graph"):
        mg.grad(y, x)


def test_grad_goes_only_where_it_must():
    """A part of the graph that leads to no input is neither visited nor freed."""
    x, y = leaf(1.0), leaf(2.0)
    shared = mg.exp(y)
    visited = []
    shared.register_hook(visited.append)
    assert mg.grad(x * shared, x)[0].item() == np.exp(2.0)
    assert visited == []
    shared.backward()
    assert y.grad == np.exp(2.0)


def test_gradients_of_gradients_reach_the_upstream_gradient():
    x, g = leaf(1.0, 2.0), leaf(3.0, 4.0)
    (dx,) = mg.grad(x * x, x, g, create_graph=True)
    (dg,) = mg.grad(dx.sum(), g)
    assert dg.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: leaf(1.0, 2.0).backward(), r"scalar.*\n.*\(2,\).*\n.*sum"),
        (lambda: (leaf(1.0, 2.0) * 2).backward(np.ones(3)), r"\(2,\).*\n.*\(3,\)"),
        (lambda: mg.Tensor([1.0]).backward(), "requires_grad=True"),
        (lambda: mg.grad(3.0, leaf(1.0)), "Tensor"),
        (lambda: mg.grad(leaf(1.0) * 2, 3.0), "input 0"),
    ],
    ids=["no scalar", "other shape", "no history", "a number", "an input that is a number"],
)
def test_impossible_passes(call, words):
    with pytest.raises((MiniGradError, TypeError), match=words):
        call()


# ---- hooks ----------------------------------------------------------------------------------------------------------


def test_hooks_of_leaves_and_results():
    """Each sees the complete gradient once, may replace it, and can be taken away."""
    x = leaf(2.0)
    y = x * x
    z = y + y
    seen = []
    x.register_hook(lambda g: seen.append(("x", float(g))))
    handle = y.register_hook(lambda g: (seen.append(("y", float(g))), g * 10)[1])
    z.backward(retain_graph=True)
    assert seen == [("y", 2), ("x", 80)]
    assert x.grad == 80
    handle.remove()
    handle.remove()
    z.backward()
    assert seen[2:] == [("x", 8)]
    assert x.grad == 88


def test_hooks_under_create_graph_get_tensors():
    x = leaf(2.0)
    kinds = []
    x.register_hook(lambda g: kinds.append(type(g)))
    mg.grad(x * x, x, create_graph=True)
    assert kinds == [mg.Tensor]
    with pytest.raises(GraphError, match="requires_grad"):
        mg.Tensor(1.0).register_hook(print)


def outer_leaf(x):
    return x, lambda a: a * a, x


def outer_result(x):
    y = x * 1.0
    return y, lambda a: a * a, y


def closure_leaf(x):
    return x, lambda a: x * x + a * 0, mg.Tensor([1.0, 1.0])


def closure_result(x):
    y = x * 1.0
    return y, lambda a: y * y + a * 0, mg.Tensor([1.0, 1.0])


@pytest.mark.parametrize("make", [outer_leaf, outer_result, closure_leaf, closure_result])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_hooks_run_once_whatever_a_checkpoint_recomputes(make, depth):
    """d/dx x² is 2x, three times as much by the hook; d/dx of its square 4x³, with 3 for each derivative by x."""
    x, seen = leaf(1.0, 2.0), []
    hooked, function, given = make(x)
    hooked.register_hook(lambda g: (seen.append(1), g * 3)[1])
    for _ in range(depth):
        function = functools.partial(mg.checkpoint, function)
    function(given).sum().backward(retain_graph=True)
    assert (x.grad.tolist(), len(seen)) == ([6, 12], 1)
    (first,) = mg.grad(function(given).sum(), x, create_graph=True)
    assert (first.tolist(), len(seen)) == ([6, 12], 2)
    (second,) = mg.grad(first.sum(), x)  # 3 · d(2x)/dx, and the hook once more
    assert (second.tolist(), len(seen)) == ([18, 18], 3)


def test_a_hook_that_a_checkpointed_function_registers_counts_once():
    def function(a):
        a.register_hook(lambda g: g * 3)
        return a * a

    for x in (leaf(1.0, 2.0), leaf(1.0, 2.0) * 1.0):
        (g,) = mg.grad(mg.checkpoint(function, x).sum(), x)
        assert g.tolist() == [6, 12]


def test_what_a_checkpointed_function_gives_back_as_it_got_it_is_that_tensor():
    """So its hooks count, in the function too; as a result, an argument, a leaf, and through two checkpoints."""

    def function(a, w):
        a.register_hook(lambda g: g * 2)
        return a, w, w * w, c

    c = mg.Tensor([1.0, 1.0])
    for depth in (0, 1, 2):
        x, w = leaf(1.0, 2.0), leaf(3.0, 4.0)
        y, wrapped = x * 2.0, function
        for _ in range(depth):
            wrapped = functools.partial(mg.checkpoint, wrapped)
        same, weight, square, constant = wrapped(y, w)
        assert same is y and weight is w and constant is c
        same.register_hook(lambda g: g * 5)
        weight.register_hook(lambda g: g * 3)
        (same * same * weight * square).sum().backward()
        np.testing.assert_array_equal(x.grad, 2 * 2 * 5 * 2 * (2 * x.data) * w.data**3)  # of 4 x² w³
        np.testing.assert_array_equal(w.grad, 3 * 3 * w.data**2 * 4 * x.data**2)


@pytest.mark.parametrize("result", [False, True])
def test_hooks_that_a_hook_removes_or_adds_count_from_the_next_pass_on(result):
    """As in torch."""

    def calls(x):
        y, seen = (x * 1.0 if result else x), []
        y.register_hook(lambda g: seen.append("first") or removed.remove())
        removed = y.register_hook(lambda g: seen.append("second"))
        y.register_hook(lambda g: seen.append("third") or (y.register_hook(lambda g: seen.append("new")), None)[1])
        for _ in range(3):
            (y * y).sum().backward(retain_graph=True)
        return seen

    ours = calls(leaf(1.0, 2.0))
    assert ours == calls(torch.tensor([1.0, 2.0], requires_grad=True))
    assert ours[:4] == ["first", "second", "third", "first"]


def test_hooks_may_write_into_what_they_get():
    """It is a copy: neither the other term of a sum nor the caller's array changes."""

    def double(g):
        g *= 2

    x, y, upstream = leaf(1.0, 2.0), leaf(1.0, 2.0), np.array([1.0, 1.0])
    inner = x * 1.0
    inner.register_hook(double)
    x.register_hook(double)
    (inner + y).backward(upstream)
    assert (x.grad.tolist(), y.grad.tolist(), upstream.tolist()) == ([4, 4], [1, 1], [1, 1])


def test_one_hook_registered_twice_is_removed_once_by_each_handle():
    x, seen = leaf(1.0), []
    first, second = x.register_hook(seen.append), x.register_hook(seen.append)
    first.remove()
    first.remove()
    (x * 1).backward()
    assert len(seen) == 1
    second.remove()
    (x * 1).backward()
    assert len(seen) == 1


def test_hooks_of_an_output_that_leads_to_no_input_stay_silent():
    x, y, seen = leaf(1.0), leaf(2.0), []
    y.register_hook(seen.append)
    aside = y * 2
    aside.register_hook(seen.append)
    assert mg.grad([x * 3, aside, y], [x])[0].item() == 3
    assert seen == []


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def read_as(name):
    return {
        "operation": lambda c: c * 1.0, "comparison": lambda c: mg.where(c > 0, c, -2.0 * c), "item": mg.Tensor.item,
        "float": float, "truth": lambda c: 2.0 if c else 3.0, "numpy": lambda c: c.numpy() * 2,
        "tolist": lambda c: c.tolist(), "array": lambda c: np.asarray(c) + 1, "view": lambda c: c.reshape(1)[0],
        "index": lambda c: mg.Tensor([5.0, 6.0])[(c > 0).astype("int64")],
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    "way", ["operation", "comparison", "item", "float", "truth", "numpy", "tolist", "array", "view", "index"]
)
def test_a_checkpoint_notices_a_constant_that_its_function_reads(way):
    x, c, read = leaf(1.0, 2.0), mg.Tensor(2.0), read_as(way)
    out = mg.checkpoint(lambda a: a * a * read(c), x).sum()
    c[...] = -3.0
    with pytest.raises(GraphError, match="which the function reads"):
        out.backward()
    assert x.grad is None


def test_a_checkpoint_notices_changes_of_recorded_tensors():
    """Of one in the closure, of an argument, and of a leaf of which the closure has a view; each is named."""
    x = leaf(1.0, 2.0)
    x.name = "weight"
    y, z, view = x * 3.0, x * 3.0, x.T
    for function, given, changed, words in (
        (lambda: mg.sin(y), (), y, "made by 'multiply'"),
        (mg.sin, (z,), z, "made by 'multiply'"),
        (lambda: view * view, (), x, "'weight'"),
    ):
        out = mg.checkpoint(function, *given).sum()
        changed.data -= 0.5
        with pytest.raises(GraphError, match=f"{words}.*which the function reads"):
            out.backward()


def test_a_checkpoint_whose_function_does_something_else_is_refused():
    x, ws = leaf(1.0, 2.0), [leaf(2.0), leaf(3.0)]
    outs = []
    for w in ws:
        outs.append(mg.checkpoint(lambda a: a * w, x).sum())  # noqa: B023 - the mistake
    with pytest.raises(GraphError, match="made from other tensors"):
        outs[0].backward()
    outs[1].backward()
    assert (x.grad.tolist(), ws[1].grad.tolist()) == ([3, 3], 3)
    drop = nn.Dropout(0.5)
    out = mg.checkpoint(drop, x).sum()
    drop.eval()
    with pytest.raises(GraphError, match="other random numbers"):
        out.backward()
    width = [2]
    out = mg.checkpoint(lambda a: a[: width[0]], x).sum()
    width[0] = 1
    with pytest.raises(GraphError, match="shapes"):
        out.backward()


class Pair(NamedTuple):
    square: mg.Tensor
    constant: mg.Tensor


OPTIONS = {
    "pad": lambda s: mg.pad(np.ones(3), 1, constant_values=s),
    "nan_to_num": lambda s: mg.nan_to_num(np.array([np.nan, np.inf]), nan=s, posinf=1.0),
    "nan_to_num posinf": lambda s: mg.nan_to_num(np.array([np.nan, np.inf]), posinf=s),
    "label smoothing": lambda s: nn.functional.cross_entropy(np.eye(2, 3), [0, 1], label_smoothing=s * 0.1),
    "scale": lambda s: nn.functional.scaled_dot_product_attention(*[np.eye(3)[None]] * 3, scale=s),
    "period": lambda s: mg.unwrap(np.array([0.0, 6.0]), period=s * 5),
    "a rule for another": lambda s: mg.primitive(scaled_by).defvjp(lambda g, by: g * by)(np.ones(3), s),
}


def scaled_by(x, by):
    return x * by


@pytest.mark.cpu_only("kernels of a GPU take such an argument as a number, which refuses a recorded one too")
@pytest.mark.parametrize("name", OPTIONS)
def test_no_derivative_is_lost_at_an_argument_without_a_rule(name):
    """All of these change with s, so a gradient of 0 or None would be wrong."""
    values = [np.asarray(mg.asarray(OPTIONS[name](mg.Tensor(s))).numpy()) for s in (0.9, 1.1)]
    assert not np.array_equal(*values)
    for differentiate in (lambda f: mg.grad(f)(1.0), lambda f: mg.jvp(f, 1.0, 1.0)):
        with pytest.raises(GraphError, match=r"(?s)by which it has none.*detach"):
            differentiate(lambda s: OPTIONS[name](s).sum())
    assert OPTIONS[name](mg.Tensor(1.0, requires_grad=True).detach()).size > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937])
def test_a_checkpoint_draws_again_from_the_generators_that_were_given(kind, depth):
    """The gradient of a product with random numbers is these numbers; the generators go on where they were."""

    def drawn(x, generators):
        dropped = nn.functional.dropout(mg.ones(x.shape, dtype="float64"), 0.5, generator=generators[0])
        return x * mg.random.uniform(size=x.shape, dtype="float64", generator=generators[1]) * dropped

    given, others = ([np.random.Generator(kind(seed)) for seed in (0, 1)] for _ in range(2))
    part = lambda x: drawn(x, given)
    x = mg.Tensor(np.ones(40), requires_grad=True)
    y = mg.checkpoint(part if depth == 1 else lambda x: mg.checkpoint(part, x), x)
    numbers = [generator.random() for generator in given]
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, y.data)
    np.testing.assert_array_equal(y.data, drawn(mg.ones(40, dtype="float64"), others).data)
    assert [generator.random() for generator in others] == numbers
    assert [generator.random() for generator in given] == [generator.random() for generator in others]


@pytest.mark.parametrize("kind", [tuple, list, lambda parts: Pair(*parts)])
def test_a_constant_among_a_checkpoints_results_stays_one(kind):
    x = leaf(1.0, 2.0)
    out = mg.checkpoint(lambda a: kind([a * a, mg.Tensor([7.0])]), x)
    assert type(out) is type(kind([1, 2]))
    assert (out[0].requires_grad, out[1].requires_grad, out[1].node) == (True, False, None)
    (out[0].sum() * out[1]).sum().backward()
    assert x.grad.tolist() == [14, 28]


@pytest.mark.parametrize("given", [lambda x: x, lambda x: x * 1.0])
def test_backward_in_a_checkpointed_function_is_refused(given):
    """It would add to .grad once more when the function runs again; what minigrad.grad gives does not."""
    x, w = leaf(1.0, 2.0), leaf(3.0)

    def adds(a):
        loss = (a * w).sum()
        loss.backward(retain_graph=True)
        return loss

    for function in (adds, functools.partial(mg.checkpoint, adds)):
        with pytest.raises(GraphError, match="runs twice"):
            mg.checkpoint(function, given(x))
    assert (x.grad, w.grad) == (None, None)
    mg.checkpoint(lambda a: a * mg.grad((a * a * w).sum(), w)[0], given(x)).sum().backward()
    assert x.grad.tolist() == [5, 5]  # the gradient, 1² + 2², is a constant
    adds(x)  # outside it goes on as ever
    assert w.grad == 3


def test_a_leaf_that_a_checkpointed_function_makes_is_refused():
    x = leaf(1.0, 2.0)
    out = mg.checkpoint(lambda a: a * leaf(2.0), x).sum()
    with pytest.raises(GraphError, match="make leaves outside of the function"):
        out.backward()


def test_a_leaf_that_was_frozen_since_gets_no_gradient():
    for wrap in (lambda f, *a: f(*a), mg.checkpoint):
        x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
        out = wrap(mg.multiply, x, y).sum()
        x.requires_grad = False
        out.backward()
        assert (x.grad, y.grad.tolist()) == (None, [1, 2])


def test_transforms_keep_named_results():
    out, pull = mg.vjp(lambda x: Pair(x * x, x + 1.0), np.array([1.0, 2.0]))
    assert type(out) is Pair and out.constant.tolist() == [2, 3]
    assert pull(Pair(np.ones(2), np.zeros(2))).tolist() == [2, 4]


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_transforms_nest(order):
    """x⁵ and its derivatives at 2; by value_and_grad, jvp and vjp in turns."""
    ways = [
        lambda f: lambda x: mg.value_and_grad(f)(x)[1],
        lambda f: lambda x: mg.jvp(f, x, mg.Tensor(1.0))[1],
        lambda f: lambda x: mg.vjp(f, x)[1](mg.Tensor(1.0)),
        lambda f: (
            lambda x: mg.hvp(lambda v: f(v) * v, x, mg.Tensor(0.5))[1] - 0.5 * x * mg.hvp(f, x, mg.Tensor(1.0))[1]
        ),
    ]  # the last: (f·x)'' / 2 - x f'' / 2 is f'
    for first in range(4):
        f = lambda x: x**5
        for k in range(order):
            f = ways[(first + k) % 4](f)
        expected = math.factorial(5) / math.factorial(5 - order) * 2.0 ** (5 - order)
        np.testing.assert_allclose(f(mg.Tensor(2.0)).item(), expected, rtol=1e-12)


def test_a_transform_that_fails_inside_of_another_leaves_that_alone():
    def f(x):
        with pytest.raises(ZeroDivisionError):
            mg.hvp(lambda v: (v * v).sum() / (1 // 0), x, x)
        return x * mg.value_and_grad(lambda y: x * y)(1.0)[1]  # x, not 1: each derivative is by its own variable

    assert mg.value_and_grad(f)(3.0)[1].item() == 6
    assert mg.is_grad_enabled()


# ---- 28: modes ------------------------------------------------------------------------------------------------------


def test_28_no_grad_and_enable_grad_nest_and_end_with_an_exception():
    x = leaf(1.0)
    with pytest.raises(KeyError), mg.no_grad():
        assert not (x * 2).requires_grad
        with mg.enable_grad():
            assert (x * 2).requires_grad
        assert not mg.is_grad_enabled()
        raise KeyError
    assert mg.is_grad_enabled()


@pytest.mark.parametrize(
    "blocks", [(mg.no_grad, mg.no_grad), (mg.no_grad, mg.enable_grad), (mg.enable_grad, mg.no_grad)]
)
@pytest.mark.parametrize("first", [0, 1])
def test_blocks_that_overlap_leave_nothing_behind(blocks, first):
    """As those of two coroutines do; whichever ends first, the other holds on, and then the mode is as before."""
    opened = [block() for block in blocks]
    for block in opened:
        block.__enter__()
    opened[first].__exit__(None, None, None)
    assert mg.is_grad_enabled() == (blocks[1 - first] is mg.enable_grad)
    opened[1 - first].__exit__(None, None, None)
    assert mg.is_grad_enabled()


def test_28_decorated_functions_read_the_mode_when_called():
    depths = []

    @mg.no_grad()
    def dive(depth):
        depths.append(mg.is_grad_enabled())
        if depth == 3:
            raise ValueError("bottom")
        dive(depth + 1)

    with pytest.raises(ValueError, match="bottom"):
        dive(0)
    assert depths == [False] * 4
    assert mg.is_grad_enabled()
    with mg.no_grad():
        enabled = mg.enable_grad()(mg.is_grad_enabled)
    assert enabled()
    assert dive.__name__ == "dive"


def test_28_generators_run_in_their_mode_and_leave_the_callers():
    seen = []

    @mg.no_grad()
    def steps():
        try:
            for i in range(3):
                seen.append(mg.is_grad_enabled())
                try:
                    got = yield i
                except KeyError:
                    got = "thrown"
                seen.append((mg.is_grad_enabled(), got))
            return "end"
        finally:
            seen.append(("closed", mg.is_grad_enabled()))

    generator = steps()
    assert mg.is_grad_enabled()
    assert next(generator) == 0
    assert mg.is_grad_enabled()
    with mg.enable_grad():
        assert generator.send("sent") == 1
    assert generator.throw(KeyError) == 2
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == "end"
    assert seen == [False, (False, "sent"), False, (False, "thrown"), False, (False, None), ("closed", False)]
    unfinished = steps()
    next(unfinished)
    unfinished.close()
    assert seen[-1] == ("closed", False)
    seen.clear()
    dropped = steps()
    next(dropped)
    del dropped  # which closes it
    assert seen == [False, ("closed", False)]
    assert mg.is_grad_enabled()


def test_a_block_in_a_decorated_generator_stays_in_it():
    @mg.enable_grad()
    def steps():
        with mg.no_grad():
            yield mg.is_grad_enabled()
        yield mg.is_grad_enabled()

    generator = steps()
    assert next(generator) is False
    assert mg.is_grad_enabled()
    with mg.no_grad():
        assert next(generator) is True
    assert mg.is_grad_enabled()


@pytest.mark.parametrize("first", [0, 1])
def test_quiet_blocks_that_overlap_put_numpys_warnings_back(first):
    before = np.geterr()
    opened = [mg.autocast("float16"), mg.autocast("float16")]
    for block in opened:
        block.__enter__()
    opened[first].__exit__(None, None, None)
    assert np.geterr()["over"] == "ignore"
    opened[1 - first].__exit__(None, None, None)
    assert np.geterr() == before


def test_numpy_is_silent_about_overflow_of_half_precision_alone():
    before = np.geterr()
    x = leaf(1.0)
    with mg.autocast("float16"):
        with mg.no_grad():
            assert np.geterr() == {**before, "over": "ignore", "invalid": "ignore"}
        with mg.autocast("float32"):
            assert np.geterr() == before
        y = x * 2
        y.register_hook(lambda g: seen.append(np.geterr()))
        seen = []
        y.backward()  # of a loss that was not scaled: an overflow is nobody's but the user's to see
        assert seen == [before] and np.geterr()["over"] == "ignore"
    assert np.geterr() == before


def test_28_each_thread_has_its_own_mode():
    seen = []
    with mg.no_grad():
        thread = threading.Thread(target=lambda: seen.append(mg.is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_threads_differentiate_side_by_side():
    results = [None] * 8

    def work(i):
        x = leaf(np.full(50, float(i)))
        for _ in range(20):
            x.grad = None
            mg.exp(mg.sin(x) * x).sum().backward()
        results[i] = x.grad

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, g in enumerate(results):
        np.testing.assert_allclose(g, np.exp(np.sin(i) * i) * (np.sin(i) + i * np.cos(i)), rtol=1e-12)


# ---- 29: versions ---------------------------------------------------------------------------------------------------


def step(x):
    x.grad = np.ones_like(x.data)
    optim.SGD([x], lr=0.1).step()


def assign(x):
    x.data = x.data + 1


@pytest.mark.parametrize("change", [step, assign])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T, lambda x: x[1:], lambda x: x.reshape(-1)])
def test_29_a_change_between_forward_and_backward_is_named(change, view):
    x = leaf(np.ones((2, 2)))
    x.name = "weight"
    y = (view(x) * view(x)).sum()
    change(x)
    with pytest.raises(GraphError, match="weight"):
        y.backward()


def test_29_only_what_a_rule_saved_counts():
    x = leaf(np.ones((2, 2)))
    total = (x + x).sum() + x[np.array([0, 0])].sum()  # neither keeps x
    copied = x[:, [0, 1]]
    square = (copied * copied).sum()  # keeps the copy, not x
    assign(x)
    (total + square).backward()
    assert x.grad.tolist() == [[6, 6], [4, 4]]


def test_29_assigning_to_elements():
    x = leaf(1.0, 2.0)
    for target in (x, x * 1):
        with pytest.raises(GraphError, match=r"where.*scatter_add"):
            target[0] = 1
    plain = mg.Tensor([1.0, 2.0])
    y = (plain * x).sum()
    plain[0] = 5.0
    assert plain.tolist() == [5, 2]
    with pytest.raises(GraphError, match="'x'"):
        y.backward()


@pytest.mark.parametrize(
    "values",
    [lambda x: x, lambda x: x * 2, lambda x: [x[0], 1.0], lambda x: x[0]],
    ids=["leaf", "result", "list", "element"],
)
def test_29_recorded_values_are_not_assigned_to_a_constant(values):
    """The graph would be cut there: as for elements of an array of NumPy."""
    x, target = leaf(1.0, 2.0), mg.zeros(2)
    for assign in (
        lambda: target.__setitem__(..., values(x)),
        lambda: mg.grad(lambda v: fill(mg.zeros(2), values(v)))(x),
    ):
        with pytest.raises(GraphError, match=r"(?s)without a history to assign.*stack.*detach"):
            assign()
    assert target.tolist() == [0, 0]
    target[...] = x.detach()
    assert target.tolist() == [1, 2]
    with mg.no_grad():
        target[...] = x * 2
    assert target.tolist() == [2, 4]


def fill(target, values):
    target[...] = values
    return target.sum()


def test_29_augmented_assignment_makes_a_new_tensor():
    x = leaf(0.0, 1.0)
    z = y = mg.exp(x)
    z += 1
    z.sum().backward()
    np.testing.assert_allclose(x.grad, np.exp([0, 1]))
    assert y.tolist() == np.exp([0.0, 1.0]).tolist()
    assert z is not y


IN_PLACE = {
    "+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv, "**": operator.ipow,
    "%": operator.imod, "@": operator.imatmul,
}  # fmt: skip


@pytest.mark.parametrize("sign", IN_PLACE)
def test_29_leaves_change_in_place_under_no_grad_alone(sign):
    """Of the same object, in the same memory, noticed by graphs; without no_grad refused, and nothing changed."""
    change, start, other = IN_PLACE[sign], np.array([[1.5, 2.5], [0.5, 4.0]]), np.array([[2.0, 0.5], [1.0, 3.0]])
    x, expected = leaf(start), change(start.copy(), other)
    memory, seen, y = x.data, x.detach(), (x * x).sum()
    with pytest.raises(GraphError, match=r"no_grad\(\).*\n.*of a leaf"):
        change(x, other)
    assert x.tolist() == start.tolist()
    with mg.no_grad():
        z = change(x, other)
    assert z is x and x.data is memory and x.requires_grad and x.node is None
    assert x.tolist() == seen.tolist() == expected.tolist()
    with pytest.raises(GraphError, match="data changed since"):
        y.backward()
    (x * 3.0).sum().backward()
    assert x.grad.tolist() == [[3, 3], [3, 3]]


def test_29_a_step_of_descent_in_place():
    w = leaf(np.float32([1.0, 2.0]))
    for _ in range(2):
        (w * w).sum().backward()
        with mg.no_grad():
            w -= np.float64(0.25) * w.grad  # whatever its dtype
        w.grad = None
    assert w.tolist() == [0.25, 0.5] and w.dtype == np.float32 and w.requires_grad
    with pytest.raises(ShapeError, match=r"\(2,\).*\n.*\(3, 2\)"), mg.no_grad():
        w += np.ones((3, 2))
    assert w.tolist() == [0.25, 0.5]


def test_29_results_and_constants_rebind():
    x, total = leaf(1.0, 2.0), mg.Tensor(0.0)
    first = total
    for _ in range(3):
        total += (x * x).sum()
    total.backward()
    assert (x.grad.tolist(), first.item(), total.item()) == ([6, 12], 0, 15)
    kept = y = x * 2
    with mg.no_grad():
        y += 1
    assert (kept.tolist(), y.tolist()) == ([2, 4], [3, 5])


def test_29_a_function_may_rebind_its_argument_in_a_transform():
    def f(x):
        x *= x
        with mg.no_grad():
            y = x
            y += 1
        return x.sum()

    start = mg.Tensor([1.0, 2.0])
    assert mg.value_and_grad(f)(start)[1].tolist() == [2, 4]
    assert mg.hvp(f, start, np.ones(2))[1].tolist() == [2, 2]
    assert start.tolist() == [1, 2]


def test_29_what_create_graph_recorded_notices_changes():
    """Of constants, arguments and results, in place; the old numbers would do as well."""

    def constant(x, u):
        c = mg.Tensor([1.0, 2.0])
        return (x * c * u).sum(), c

    def argument(x, u):
        y = x * 3.0
        return (y * y * u).sum(), y

    def result(x, u):
        y = mg.exp(x)
        return (y * u).sum(), y

    for make in (constant, argument, result):
        x, u = leaf(1.0, 2.0), leaf(3.0, 4.0)
        out, changed = make(x, u)
        (g,) = mg.grad(out, x, create_graph=True)
        changed.data *= 2
        with pytest.raises(GraphError, match="data changed since"):
            g.sum().backward()


def test_several_results_that_a_rule_reads_are_watched():
    x = leaf(X)
    r, a = polar()(x, Y)
    r.data = r.data * 2
    with pytest.raises(GraphError, match="the result as it was in the forward pass of 'polar'"):
        a.sum().backward()


def test_29_a_result_changed_before_backward():
    x = leaf(1.0, 2.0)
    y = mg.exp(x)
    y.data = y.data * 2
    with pytest.raises(GraphError, match="result"):
        y.sum().backward()


def test_a_detached_tensor_shares_numbers_and_their_version():
    x = leaf(1.0, 2.0)
    y = (x * x).sum()
    x.detach().data = [5, 6]
    assert x.tolist() == [1, 2]  # data of its own from now on
    assert not x.detach().requires_grad
    with pytest.raises(GraphError):
        y.backward()


# ---- 23: NumPy, DLPack ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "gradient"),
    [
        (lambda t: np.ones(2) * t, [1, 1]),
        (lambda t: np.float64(2) * t, [2, 2]),
        (lambda t: np.ones((2, 2)) @ t, [2, 2]),
        (lambda t: np.ones(2) - t, [-1, -1]),
        (lambda t: np.array([2.0, 2.0]) ** t, 2 ** np.array([1, 2]) * np.log(2)),
        (lambda t: np.ones(2) / t, [-1, -0.25]),
        (lambda t: np.exp(t), np.exp([1, 2])),
        (lambda t: np.multiply(t, t), [2, 4]),
        (lambda t: np.add(1.0, t), [1, 1]),
        (lambda t: np.sum(t, axis=0), [1, 1]),
        (lambda t: np.mean(t), [0.5, 0.5]),
        (lambda t: np.concatenate([t, np.ones(1), t]), [2, 2]),
        (lambda t: np.stack([t, t])[0], [1, 1]),
        (lambda t: np.where(np.array([True, False]), t, 0.0), [1, 0]),
        (lambda t: np.linalg.norm(t), np.array([1, 2]) / np.sqrt(5)),
        (lambda t: np.einsum("i,i->", t, t), [2, 4]),
        (lambda t: np.reshape(t, (2, 1)), [1, 1]),
        (lambda t: np.maximum(t, 1.5), [0, 1]),
        (lambda t: np.clip(t, 0, 1.5), [1, 0]),
        (lambda t: np.var(t), [-0.5, 0.5]),
        (lambda t: np.split(t, 2)[1], [0, 1]),
        (lambda t: np.outer(t, np.ones(2)), [2, 2]),
        (lambda t: np.copy(t), [1, 1]),
    ],
)  # fmt: skip
def test_23_numpy_calls_are_recorded(fn, gradient):
    t = leaf(1.0, 2.0)
    out = fn(t)
    assert type(out) is mg.Tensor
    assert out.dtype == np.float64
    out.sum().backward()
    np.testing.assert_allclose(t.grad, gradient)


def test_23_numpy_looks_at_tensors_as_arrays():
    t = leaf(1.0, 2.0)
    assert np.shape(t) == (2,)
    assert np.allclose(t, [1, 2])
    assert np.equal(t, [1, 3]).tolist() == [True, False]
    assert np.isnan(t).tolist() == [False, False]
    assert np.result_type(t, np.float32) == np.float64


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda t: np.add(t, 1, out=np.zeros(2)), "add"),
        (lambda t: np.heaviside(t, 0.0), "heaviside"),
        (lambda t: np.fft.fft(t), "fft"),
    ],
)
def test_23_what_numpy_cannot_do_with_tensors_it_says(call, name):
    with pytest.raises(CallError, match=name):
        call(leaf(1.0, 2.0))


def test_more_rules_than_arguments_are_refused():
    double = mg.Primitive(lambda x: 2 * x)
    with pytest.raises(CallError, match="one rule too many"):
        double.defvjp(lambda g: 2 * g, lambda g: g)


def test_signs_of_logic_take_lists_on_either_side():
    t = mg.Tensor([True, True, False])
    assert ([True, False, True] & t).tolist() == (t & [True, False, True]).tolist() == [True, False, False]
    assert ([False, False, False] | t).tolist() == [True, True, False]
    assert ([True, False, True] ^ t).tolist() == [False, True, True]


def test_23_arrays_changed_in_place_by_a_tensor_are_refused():
    a = np.zeros(2)
    with pytest.raises(CallError, match="in place"):
        a += leaf(1.0, 2.0)
    assert a.tolist() == [0, 0]


@pytest.mark.cpu_only("shares memory of the CPU")
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_dlpack_shares_memory_both_ways(dtype):
    ours = mg.Tensor([1, 2, 3], dtype=dtype)
    theirs = torch.from_dlpack(ours)
    theirs[0] = 7
    assert ours.tolist() == [7, 2, 3]
    back = mg.from_dlpack(torch.arange(3).to(getattr(torch, dtype)))
    assert (back.dtype, back.tolist()) == (dtype, [0, 1, 2])
    assert np.shares_memory(np.from_dlpack(ours), ours.data)
    array = np.arange(3).astype(dtype)
    assert np.shares_memory(mg.from_dlpack(array).data, array)
    with pytest.raises(DTypeError, match="__dlpack__"):
        mg.from_dlpack([1, 2])


def test_an_operation_may_give_a_python_number() -> None:
    @mg.primitive
    def how_many(x):
        return len(x)

    del mg.REGISTRY["how_many"]
    assert how_many(mg.Tensor([1.0, 2.0], requires_grad=True)).data == np.asarray(2)


# ---- operations of one's own ----------------------------------------------------------------------------------------


def polar():
    """A primitive with two results, (√(x² + y²), angle), whose rules read them."""

    def polar(x, y):
        return np.hypot(x, y), np.arctan2(y, x)

    made = Primitive(polar)

    @made.defjoint("x", "y")
    def rule(g, x, y, out):
        r = out[0]
        return g[0] * x / r - g[1] * y / (r * r), g[0] * y / r + g[1] * x / (r * r)

    return made


X, Y = np.random.default_rng(0).uniform(0.5, 2, (2, 3))


def test_several_results():
    """Any of them may be used, once or often, and what is not used counts as 0; to second order, through ``out``."""
    made = polar()
    for use in (lambda r, a: r, lambda r, a: a, lambda r, a: r * a + r, lambda r, a: (r * 0.5, a, a)):
        assert mg.gradcheck(lambda x, y, use=use: use(*made(x, y)), (X, Y))
        assert mg.gradgradcheck(lambda x, y, use=use: use(*made(x, y)), (X, Y))
    r, a = made(X, Y)
    assert is_array(r)
    x = leaf(X)
    r, a = made(x, Y)
    r.sum().backward(retain_graph=True)
    a.sum().backward()
    np.testing.assert_allclose(x.grad, X / np.hypot(X, Y) - Y / (X * X + Y * Y))
    with pytest.raises(GraphError, match="polar"):
        r.sum().backward()


def test_an_integer_among_several_results_is_a_constant():
    def largest(x):
        return x.max(), x.argmax()

    made = Primitive(largest).defvjp(lambda g, x, out: g[0] * (x == out[0]))
    value, place = made(leaf(1.0, 3.0, 2.0))
    assert value.requires_grad
    assert not place.requires_grad
    value.backward()
    assert mg.gradcheck(made, np.array([1.0, 3.0, 2.0]))


def weighted():
    """A primitive of a list: Σ k·aₖ² with k from 1, times a number."""

    def weighted(arrays, factor=1.0):
        return factor * sum((k + 1) * a * a for k, a in enumerate(arrays))

    return SequencePrimitive(weighted).defvjp(
        lambda g, arrays, factor: [factor * g * 2 * (k + 1) * a for k, a in enumerate(arrays)]
    )


def test_primitives_of_a_list():
    made = weighted()
    assert mg.gradgradcheck(lambda *a: made(list(a)), (X, Y, X + Y))
    assert mg.gradgradcheck(lambda *a: made(list(a), factor=3.0), (X,))
    x, y = leaf(X), mg.Tensor(Y)
    out = made([x, Y, y, x], 2.0)  # arrays, constants, one Tensor twice
    out.sum().backward()
    np.testing.assert_allclose(x.grad, 2 * 2 * 5 * X)
    assert is_array(made([X, Y]))
    assert not made([y, Y]).requires_grad


def test_a_node_of_a_list_has_an_argument_for_each_part():
    x, y = leaf(X), mg.Tensor(Y)
    node = weighted()([x, y, x]).node
    assert node.primitive.names == ("arrays[0]", "arrays[1]", "arrays[2]", "factor")
    assert node.plan.names == node.primitive.names
    assert node.parents == [x, x]


def test_a_change_by_hand_is_noted():
    x, w = leaf(X), mg.Tensor(Y)
    out = (x * w).sum()
    w.data[...] = 0
    w.bump_version()
    with pytest.raises(GraphError, match="data changed since"):
        out.backward()
    assert type(w.size) is int


def softcap():
    """A fused x ↦ c tanh(x / c) · w with kernels, and how often each ran."""
    calls = []

    def softcap(x, w=None, cap=2.0):
        y = mg.tanh(x / cap) * cap
        return y if w is None else y * w

    made = mg.fused(torch=False, samples=[sample((2, 3))])(softcap)

    @made.defforward
    def forward(x, w, cap):
        calls.append("forward")
        t = np.tanh(x / cap)
        return t * cap * (1 if w is None else w), {"t": t}

    @made.defbackward("x", "w")
    def backward(g, t, w, cap, needs):
        calls.append(f"backward {needs}")
        return g * (1 - t * t) * (1 if w is None else w), g * t * cap if needs[1] else None

    made.defgpu(forward, backward)
    return made, calls


def test_fused_operation():
    """Kernels at first order, the definition at higher ones; absent arguments and shared ones included."""
    made, calls = softcap()
    x, w = leaf(X), leaf(Y)
    made(x, w, 3.0).sum().backward()
    assert calls == ["forward", "backward (True, True)"]
    definition = [leaf(X), leaf(Y)]
    made.definition(*definition, 3.0).sum().backward()
    np.testing.assert_allclose(x.grad, definition[0].grad)
    np.testing.assert_allclose(w.grad, definition[1].grad)
    made(x).sum().backward()
    assert calls[-1] == "backward (True, False)"
    for fn, inputs in (
        (made, (X, Y)),
        (made, (X,)),
        (lambda x: made(x, x, 1.5), (X,)),
        (lambda x: made(x * 2, x), (X,)),
    ):
        assert mg.gradcheck(fn, inputs)
        assert mg.gradgradcheck(fn, inputs)
    assert is_array(made(X, Y))
    np.testing.assert_allclose(made(X, cap=1.0), np.tanh(X))


def test_fused_kernels_that_are_wrong_are_caught():
    made, _ = softcap()
    forward, backward = made.kernel, made.gpu.backward

    def wrong(*args):
        return forward(*args)[0], {"t": forward(*args)[1]["t"] * 1.001}

    made.kernel = wrong
    made.defgpu(wrong, backward)
    with pytest.raises(mg.errors.GradientError, match=r"argument 0 \('x'\)"):
        mg.gradcheck(made, (X, Y))


def test_custom_primitive_is_registered_and_checked():
    @mg.primitive
    def cube(x):
        return x**3

    cube.defvjp(lambda g, x: g * 3 * x**2)
    assert mg.REGISTRY["cube"] is cube
    assert mg.gradcheck(cube, X)
    assert mg.gradgradcheck(cube, X)
    assert repr(cube) == "<primitive cube>"


def test_residual_names_are_checked_at_declaration():
    def scale(x, factor):
        return x * factor

    made = Primitive(scale)
    with pytest.raises(CallError, match=r"'scale'.*factor.*out.*\n.*'weight'"):
        made.defvjp(lambda g, weight: g * weight)
    with pytest.raises(CallError):
        made.defvjp(nonsense=lambda g: g)
    made.defvjp(lambda g, factor, x_shape, x_dtype, x_device, needs, out: g * factor)
    assert mg.gradcheck(lambda x: made(x, 3.0), X)
    with pytest.raises(CallError, match="plain parameters"):
        Primitive(lambda *arrays: arrays)


def test_rules_keep_only_what_they_name_and_only_for_arguments_that_need_it():
    x, y = leaf(X), leaf(Y)
    assert mg.add(x, y).node.residuals == []
    assert [r is a.data for r, a in zip(mg.multiply(x, y).node.residuals, (y, x), strict=True)] == [True, True]
    (kept,) = mg.multiply(x, y.data).node.residuals
    assert kept is y.data
    out = mg.exp(x)
    assert out.node.residuals[0] is out.data


def test_a_rule_that_gives_the_wrong_shape_is_named():
    wrong = Primitive(lambda x: x * 2)
    wrong.name = "wrong"
    wrong.defvjp(lambda g: g[:1])
    with pytest.raises(GraphError, match=r"\(3,\).*\n.*\(1,\) from a rule of 'wrong'"):
        wrong(leaf(X)).sum().backward()


def test_errors_of_users_functions_are_their_own():
    def fussy(x):
        raise ValueError("too short")

    for made in (Primitive(fussy), Composite(fussy)):
        with pytest.raises(ValueError, match=r"^too short$"):
            made(leaf(X))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda x: mg.sum(x, dim=0), CallError, "axis="),
        (lambda x: mg.stack([x], dim=0), CallError, "axis="),
        (lambda x: mg.sum(), CallError, "sum"),
        (lambda x: mg.sum(x, 0, x=x), CallError, "sum"),
        (lambda x: mg.multiply(x, x, x), CallError, "multiply"),
        (lambda x: x + np.ones(4), ShapeError, "add"),
        (lambda x: x @ np.ones(4), ShapeError, "matmul"),
        (lambda x: mg.concatenate([x, np.ones((2, 2))]), ShapeError, "concatenate"),
        (lambda x: mg.repeat(x, [1, 2]), ShapeError, "repeat"),
        (lambda x: mg.swapaxes("ab", 0, 1), DTypeError, "swapaxes"),
        (lambda x: x.sum(axis=3), IndexError, "sum"),
        (lambda x: x.reshape(5), ShapeError, "reshape"),
        (lambda x: x + "a", TypeError, "add"),
    ],
)
def test_misuse_is_explained(call, kind, words):
    with pytest.raises(kind, match=words) as error:
        call(leaf(X))
    assert isinstance(error.value, MiniGradError)
    assert str(error.value).startswith("Expected: ")
