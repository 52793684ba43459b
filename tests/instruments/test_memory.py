"""``memory_summary`` and ``track_memory``: every byte that a graph holds, counted once, at every moment."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minigrad as mg
import nn
import nn.functional as F
from minigrad.errors import DTypeError
from minigrad.instruments.memory import Held

N = 1000
KB = 8 * N  # bytes of N float64


def leaf(*shape: int) -> Any:
    return mg.Tensor(np.linspace(0.1, 1, int(np.prod(shape))).reshape(shape), requires_grad=True)


def held(result: Any) -> set[tuple[Any, ...]]:
    return {tuple(row) for row in mg.memory_summary(result).rows}


def transposed(x: Any, w: Any) -> Any:
    return mg.exp(x).reshape(10, 100) @ w.T  # the second factor is a view of a leaf, the first one of exp's result


def both(x: Any) -> Any:
    @mg.primitive
    def sine_cosine(x: Any) -> Any:
        return np.sin(x), np.cos(x)

    sine_cosine.defvjp(lambda g, out: g[0] * out[1] - g[1] * out[0])
    return sine_cosine(x)


# What is held, by the rules in minigrad/ops: exp reads its result, multiply both arguments, add nothing, sum nothing.
GRAPHS: dict[str, tuple[Callable[[], Any], set[tuple[Any, ...]]]] = {
    "nothing": (lambda: (leaf(N) + 1).sum(), set()),
    "one for each": (lambda: mg.exp(mg.exp(leaf(N))), {("exp", "out", 2, 2 * KB)}),
    "a leaf's data": (lambda: leaf(N) * leaf(N), set()),
    "one array in two nodes": (lambda: mg.square(mg.exp(leaf(N))), {("exp", "out", 1, KB)}),
    "views": (lambda: transposed(leaf(N), leaf(5, 100)), {("exp", "out", 1, KB)}),
    "a slice holds its whole": (lambda: mg.sin((leaf(N) + 0)[:10]), {("sin", "x", 1, KB)}),
    "a broadcast constant": (lambda: leaf(N) * mg.broadcast_to(mg.Tensor([2.0]), (N,)), {("multiply", "y", 1, 8)}),
    "a list": (lambda: mg.einsum("i,i->", mg.exp(leaf(N)), leaf(N)), {("exp", "out", 1, KB)}),
    "parts": (lambda: mg.split(mg.exp(leaf(N)), 2)[1] * 2.0, {("exp", "out", 1, KB)}),
    "several results": (lambda: sum(both(leaf(N))), {("sine_cosine", "out", 2, 2 * KB)}),
    "the arguments of a checkpoint": (
        lambda: mg.checkpoint(lambda x: mg.exp(mg.sin(x)), leaf(N) + 1), {("checkpoint", "argument 0", 1, KB)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_what_a_graph_holds(name: str) -> None:
    make, expected = GRAPHS[name]
    out = make()
    assert held(out) == expected
    with mg.track_memory() as memory:
        again = make()
    assert memory.current == sum(row[3] for row in expected)
    if name != "the arguments of a checkpoint":  # which held more on the way
        assert {tuple(row) for row in memory.rows} == expected and memory.peak == memory.current
    del again
    assert memory.current == 0
    out.sum().backward()
    assert held(out) == set()  # a backward pass frees it


def test_several_results_are_counted_together() -> None:
    x = leaf(N)
    shared = mg.exp(x)
    results = {"a": [mg.sin(shared)], "b": (mg.exp(shared), 2 * x)}
    summary = mg.memory_summary(results)
    assert summary.rows == [Held("exp", "out", 2, 2 * KB)]
    assert (summary.bytes, summary.leaves, summary.leaf_bytes, summary.grad_bytes) == (2 * KB, 1, KB, 0)
    mg.grad(shared.sum(), x, retain_graph=True)
    shared.sum().backward(retain_graph=True)
    assert mg.memory_summary(results).grad_bytes == KB
    with pytest.raises(DTypeError, match="Tensor, or a list"):
        mg.memory_summary(np.ones(3))


def test_the_sum_is_what_the_process_gets_back() -> None:
    """The allocator's own count, which knows nothing of nodes, before and after the graph of a model is gone."""
    mg.random.seed(0)
    model = nn.TransformerLM(64, 64, 64, 2, 4)
    tokens = np.random.default_rng(0).integers(0, 64, (4, 64))

    def forward() -> Any:
        return F.cross_entropy(model(tokens), tokens)

    forward()  # kernels keep their buffers from now on
    gc.collect()
    tracemalloc.start()
    try:
        loss = forward()
        expected = mg.memory_summary(loss).bytes
        full = tracemalloc.get_traced_memory()[0]
        del loss
        freed = full - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # what Python itself takes for nodes, plans and shapes comes to a few kB a node
    assert expected > 1_500_000 and expected <= freed < expected + 300_000


@given(
    st.lists(st.tuples(st.sampled_from(["exp", "multiply", "add", "view", "drop"]), st.integers(0, 99)), max_size=25)
)
def test_the_tracker_agrees_with_a_count_of_what_is_alive(steps: list[tuple[str, int]]) -> None:
    """After each step of a random computation, the tracker's number is that of a summary of all living results."""
    x = leaf(N)
    alive: list[Any] = []
    highest = 0
    with mg.track_memory() as memory:
        for name, choice in steps:
            pool = [x, *alive]
            a, b = pool[choice % len(pool)], pool[choice // 7 % len(pool)]
            if name == "exp":
                alive.append(mg.exp(a * 0.0))
            elif name == "multiply":
                alive.append(a * b)
            elif name == "add":
                alive.append(a + b)
            elif name == "view":
                alive.append(a.reshape(10, 100).T.reshape(N))
            elif alive:
                alive.pop(choice % len(alive))
            del pool, a, b
            assert memory.current == mg.memory_summary(alive).bytes
            highest = max(highest, memory.current)
        assert memory.peak >= highest
        if alive:
            mg.stack(alive).sum().backward()
    assert memory.current == 0 or not alive
    assert sum(row.bytes for row in memory.rows) == memory.peak


def test_the_peak_is_that_of_the_moment_when_most_was_held() -> None:
    def layers(x: Any) -> Any:
        for _ in range(4):
            x = mg.exp(-x)
        return x

    x = leaf(N)
    with mg.track_memory() as plain:
        layers(layers(x)).sum().backward()
    with mg.track_memory() as saving:
        mg.checkpoint(layers, mg.checkpoint(layers, x)).sum().backward()
    assert plain.peak == 8 * KB  # the result of each exp
    # the argument of the second checkpoint, and the four results of the one that is being computed again
    assert saving.peak == 5 * KB
    assert [tuple(row) for row in saving.rows] == [("exp", "out", 4, 4 * KB), ("checkpoint", "argument 0", 1, KB)]
    assert plain.current == saving.current == 0
    assert max(plain.history) == plain.peak and plain.history[-1] < plain.peak


def test_a_retained_graph_goes_on_to_be_counted() -> None:
    with mg.track_memory() as memory:
        y = mg.exp(leaf(N)).sum()
        y.backward(retain_graph=True)
        assert memory.current == KB
        y.backward()
        assert memory.current == 0


def test_a_leaf_with_new_data_is_not_taken_for_the_old() -> None:
    x = leaf(N)
    with mg.track_memory() as memory:
        first = mg.sin(x)
        old = x.data
        x.data = np.ones(N)  # as an optimizer that works on copies does: now the graph alone holds the old array
        assert mg.memory_summary(first).bytes == KB
        second = mg.sin(mg.asarray(old) * mg.Tensor(1.0, requires_grad=True))
    assert memory.current == mg.memory_summary(second).bytes
    assert second.size == N


def test_tables() -> None:
    y = mg.exp(leaf(N)) * 2.5
    assert str(mg.memory_summary(y)).splitlines() == [
        "operation  residual  arrays  bytes",
        "exp        out            1   8 kB",
        "total                     1   8 kB",
        "nodes: 2, leaves: 1, with 8 kB of data and 0 B of gradients of their own",
    ]
