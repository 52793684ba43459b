"""A machine that builds random graphs and misuses them, beside an engine that is too simple to be wrong.

It shares sub-expressions, views and leaves, runs backward again and again, changes data in between, computes under
``no_grad``, and assigns where it must not. What the engine then must do, it must do in every order of events.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from support import naive

import minigrad as mg
from minigrad.backend import is_array
from minigrad.errors import GraphError

# name: (ours, naive, does it save its input, does it save its result, is it a view)
UNARY = {
    "sin": (mg.sin, naive.sin, True, False, False),
    "tanh": (mg.tanh, naive.tanh, True, False, False),
    "sum": (mg.sum, naive.total, False, False, False),
    "transpose": (lambda x: x.T, naive.transpose, False, False, True),
    "reshape": (lambda x: x.reshape(-1), lambda x: naive.reshape(x, (-1,)), False, False, True),
    "last": (lambda x: x[-1], naive.last, False, False, True),
}
BINARY = {
    "add": (mg.add, naive.add),
    "subtract": (mg.subtract, naive.subtract),
    "multiply": (mg.multiply, naive.multiply),
}
SHAPES = [(), (3,), (2, 3), (2, 1)]


class Storage:
    """The memory that a tensor and its views share, and how often it was changed."""

    version = 0


class Pair:
    """A Tensor, its naive value, and what must be known to tell whether a backward pass through it may run."""

    def __init__(self, ours, value, parents=(), storage=None, saved=()):
        self.ours, self.value, self.parents = ours, value, [p for p in parents if p.ours.requires_grad]
        self.storage = storage or Storage()
        self.saved = [(s, s.version) for s in saved]
        self.freed = self.unknown = False  # unknown: a pass broke off somewhere behind here

    def behind(self):
        """The recorded operations that this was made from, this one included."""
        found, stack = [], [self]
        while stack:
            pair = stack.pop()
            if pair not in found and pair.ours.requires_grad:
                found.append(pair)
                stack += pair.parents
        return found

    def may_run(self):
        return not any(p.freed or any(s.version != v for s, v in p.saved) for p in self.behind() if p.parents)


class Graphs(RuleBasedStateMachine):
    pairs = Bundle("pairs")

    def __init__(self):
        super().__init__()
        self.leaves = []
        self.expected = {}  # of each leaf that has a gradient

    # -- growing --

    @initialize(target=pairs, shape=st.sampled_from(SHAPES))
    def first_leaf(self, shape):
        return self.leaf(shape, 0, True)

    @rule(
        target=pairs,
        shape=st.sampled_from(SHAPES),
        seed=st.integers(0, 99),
        wanted=st.sampled_from([True, True, True, False]),
    )
    def leaf(self, shape, seed, wanted):
        array = np.random.default_rng(seed).uniform(-1, 1, shape)
        pair = Pair(mg.Tensor(array, requires_grad=wanted), naive.Value(array))
        self.leaves.append(pair)
        return pair

    @rule(target=pairs, x=pairs, name=st.sampled_from(sorted(UNARY)), recording=st.booleans() | st.just(True))
    def unary(self, x, name, recording):
        ours, simple, saves, saves_out, view = UNARY[name]
        if name == "last":
            if not x.ours.ndim:
                return x
            view = x.ours.ndim > 1  # NumPy copies a single number
        with mg.enable_grad() if recording else mg.no_grad():
            out = ours(x.ours)
        value = simple(x.value) if recording else naive.Value(simple(x.value).array)
        pair = Pair(out, value, [x] if recording else [], x.storage if view else None, [x.storage] * saves)
        if saves_out:
            pair.saved.append((pair.storage, 0))
        return pair

    @rule(target=pairs, x=pairs, y=pairs, name=st.sampled_from(sorted(BINARY)))
    def binary(self, x, y, name):
        ours, simple = BINARY[name]
        if x.ours.shape and y.ours.shape and x.ours.shape[-1] != y.ours.shape[-1]:
            return x
        if (
            x.ours.ndim == y.ours.ndim == 2
            and 1 not in (x.ours.shape[0], y.ours.shape[0])
            and x.ours.shape != y.ours.shape
        ):
            return x
        saved = [y.storage] * x.ours.requires_grad + [x.storage] * y.ours.requires_grad
        out = ours(x.ours, y.ours)
        if np.abs(out.data).max(initial=0) > 1e3:
            return x
        return Pair(out, simple(x.value, y.value), [x, y], saved=saved if name == "multiply" else [])

    @rule(
        target=pairs,
        x=pairs,
        names=st.tuples(*[st.sampled_from(sorted(UNARY))] * 2),
        name=st.sampled_from(sorted(BINARY)),
    )
    def diamond(self, x, names, name):
        """Two ways from one node that meet again."""
        return self.binary(*(self.unary(x, each, True) for each in names), name)

    # -- using --

    @rule(root=pairs, seed=st.integers(0, 99), retain=st.booleans())
    def backward(self, root, seed, retain):
        if any(p.unknown for p in root.behind()):
            return
        g = np.random.default_rng(seed).normal(size=root.ours.shape)
        if not root.ours.requires_grad or not root.may_run():
            self.refused(root, lambda: root.ours.backward(g, retain_graph=retain))
            return
        root.ours.backward(g, retain_graph=retain)
        found = naive.gradients(root.value, naive.Value(g))
        for pair in root.behind():
            if not pair.parents:
                self.expected[pair] = self.expected.get(pair, 0) + found[pair.value].array
            pair.freed |= not retain

    def refused(self, root, call):
        """An error, and nothing is said about what a pass that broke off half-way left: start afresh."""
        with pytest.raises(GraphError):
            call()
        for pair in root.behind():
            pair.unknown = bool(pair.parents)
        for pair in self.leaves:
            pair.ours.grad = None
        self.expected.clear()

    @rule(root=pairs, data=st.data())
    def grad_of_grad(self, root, data):
        """First and second derivatives, which leave ``.grad`` and the graph as they were."""
        behind = [p for p in root.behind() if not p.parents and p is not root]
        if not behind or not root.may_run() or any(p.unknown for p in root.behind()):
            return
        leaf = data.draw(st.sampled_from(behind))
        simple = naive.gradients(root.value, naive.Value(np.ones(root.ours.shape)))[leaf.value]
        (g,) = mg.grad(root.ours, leaf.ours, np.ones(root.ours.shape), create_graph=True)
        np.testing.assert_allclose(g.data, simple.array, rtol=1e-9, atol=1e-12)
        if g.requires_grad:
            (gg,) = mg.grad(g, leaf.ours, np.ones(g.shape), allow_unused=True, retain_graph=True)
            second = naive.gradients(simple, naive.Value(np.ones(g.shape))).get(
                leaf.value, naive.Value(np.zeros(g.shape))
            )
            np.testing.assert_allclose(gg.data if gg is not None else 0 * g.data, second.array, rtol=1e-9, atol=1e-12)

    @rule()
    def zero_grad(self):
        for pair in self.leaves:
            pair.ours.grad = None
        self.expected.clear()

    # -- misusing --

    @rule(data=st.data(), seed=st.integers(0, 99))
    def change(self, data, seed):
        """An optimizer's step: new numbers for a leaf, which views of the old ones do not see."""
        leaf = data.draw(st.sampled_from(self.leaves))
        array = np.random.default_rng(seed).uniform(-1, 1, leaf.ours.shape)
        leaf.ours.data = array
        leaf.value.array = array
        leaf.storage.version += 1

    @rule(target=pairs, x=pairs)
    def assign(self, x):
        """To an element: refused where there is a history, noticed by all that share the memory where there is none."""
        if x.ours.requires_grad:
            before = x.ours.data.copy()
            with pytest.raises(GraphError, match=r"where.*scatter_add"):
                x.ours[...] = 0.5
            np.testing.assert_array_equal(x.ours.data, before)
        return x

    # -- what holds at any time --

    @invariant()
    def gradients_are_the_naive_ones(self):
        for pair in self.leaves:
            assert (pair.ours.grad is None) == (pair not in self.expected)
            if pair in self.expected:
                assert is_array(pair.ours.grad)
                assert pair.ours.grad.shape == pair.ours.shape
                np.testing.assert_allclose(pair.ours.grad, self.expected[pair], rtol=1e-9, atol=1e-10)

    @invariant()
    def no_gradient_is_shared(self):
        grads = [pair.ours.grad for pair in self.leaves if pair.ours.grad is not None]
        assert not any(np.may_share_memory(a, b) for i, a in enumerate(grads) for b in grads[:i])


TestGraphs = Graphs.TestCase
TestGraphs.settings = settings(max_examples=3 * settings.default.max_examples, stateful_step_count=50)
