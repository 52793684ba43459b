"""``profile``: what is counted, against closed forms and brute force; no test looks at how long anything took."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minigrad as mg
import nn.functional as F
from minigrad.engine.fused import Fused
from minigrad.errors import CallError
from minigrad.instruments import profiling
from minigrad.instruments.profiling import Event
from minigrad.kernels.attention import attention
from minigrad.ops.running import linear_recurrence
from minigrad.testing import sample_inputs


def leaf(*shape: int, grad: bool = True) -> Any:
    return mg.Tensor(np.linspace(-1, 1, int(np.prod(shape))).reshape(shape), requires_grad=grad)


def measured(make: Callable[[], Any]) -> dict[str, tuple[int, Any, int]]:
    """Calls, FLOP and bytes by label of a computation and its backward pass."""
    with mg.profile() as p:
        out = make()
        out.backward(np.ones(out.shape))
    return {row.label: (row.calls, row.flop, row.bytes) for row in p.rows}


def flop(make: Callable[[], Any], name: str) -> tuple[Any, Any]:
    """FLOP of the forward and of the backward calls of one operation."""
    found = measured(make)
    return found[name][1], found[f"{name} backward"][1]


# ---- FLOP -----------------------------------------------------------------------------------------------------------


def multiplications(x: Any, y: Any) -> int:
    """2 for each product of numbers in ``x @ y``, counted one by one."""
    a = np.ones((1, *x)) if len(x) == 1 else np.ones(x)
    b = np.ones((*y, 1)) if len(y) == 1 else np.ones(y)
    return 2 * sum(a.shape[-1] for _ in np.ndindex((a @ b).shape))


@pytest.mark.parametrize(
    ("x", "y"),
    [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 1, 2, 3), (6, 3, 4))],
)
def test_matmul(x: Any, y: Any) -> None:
    n = multiplications(x, y)
    assert flop(lambda: leaf(*x) @ leaf(*y), "matmul") == (n, 2 * n)
    assert flop(lambda: leaf(*x, grad=False) @ leaf(*y), "matmul") == (n, n)


def test_linear_with_and_without_a_bias() -> None:
    n = 2 * (4 * 5) * 3 * 7
    assert flop(lambda: F.linear(leaf(4, 5, 3), leaf(7, 3)), "linear") == (n, 2 * n)
    assert flop(lambda: F.linear(leaf(4, 5, 3), leaf(7, 3), leaf(7)), "linear") == (n + 140, 2 * n + 140)
    assert flop(lambda: F.linear(leaf(4, 5, 3, grad=False), leaf(7, 3)), "linear") == (n, n)


@pytest.mark.cpu_only("what no kernel of the GPU takes in one piece")
def test_projections_and_the_feed_forward_layer_count_their_products() -> None:
    """d_in 3, rows 20: a product forward for each weight; backward one for its gradient, one for that of its rows."""
    n = 2 * 20 * 3
    weights = leaf(7, 3), leaf(5, 3), leaf(2, 3)
    made = lambda x, norm_weight: F.qkv_projection(x, *weights, norm_weight)[0].sum()
    assert flop(lambda: made(leaf(4, 5, 3), None), "qkv_projection") == (n * 14, 2 * n * 14)
    assert flop(lambda: made(leaf(4, 5, 3, grad=False), leaf(3)), "qkv_projection") == (n * 14, 2 * n * 14)
    assert flop(lambda: made(leaf(4, 5, 3, grad=False), None), "qkv_projection") == (n * 14, n * 14)
    up, down = 2 * n * 7, 2 * 20 * 7 * 6
    ffn = lambda x: F.swiglu_ffn(x, leaf(7, 3), leaf(7, 3), leaf(6, 7))
    assert flop(lambda: ffn(leaf(4, 5, 3)), "swiglu_ffn") == (up + down, 2 * (up + down))
    assert flop(lambda: ffn(leaf(4, 5, 3, grad=False)), "swiglu_ffn") == (up + down, up + 2 * down)
    again = lambda x: F.swiglu_ffn(x, leaf(7, 3), leaf(7, 3), leaf(6, 7), recompute=True)
    assert flop(lambda: again(leaf(4, 5, 3)), "swiglu_ffn") == (up + down, 3 * up + 2 * down)


@pytest.mark.cpu_only("what no kernel of the GPU takes in one piece")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (6, 4), (3, 7)])
def test_attention_counts_the_pairs_that_are_allowed(causal: bool, window: Any, queries: int, keys: int) -> None:
    pairs = 0
    for i, j in itertools.product(range(queries), range(keys)):
        seen = window is None or (i - j < window and j - i < window)
        pairs += seen and not (causal and j > i)
    d, d_v, matrices = 5, 2, 2 * 3
    q, k, v = leaf(2, 3, queries, d), leaf(2, 3, keys, d), leaf(2, 3, keys, d_v)
    found = flop(lambda: attention(q, k, v, is_causal=causal, window=window), "attention")
    # forward: q kᵀ and E v; backward: q kᵀ, g vᵀ, Eᵀ g, ds k, dsᵀ q
    assert found == (2 * pairs * matrices * (d + d_v), 2 * pairs * matrices * (3 * d + 2 * d_v))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_fused_loss_makes_its_gradients_where_its_kernel_does(reduction: str) -> None:
    n = 2 * 6 * 4 * 9  # one product of all rows with the weight
    targets = np.arange(6)
    expected = (3 * n, None) if reduction == "mean" else (n, 3 * n)
    made = lambda: F.linear_cross_entropy(leaf(6, 4), leaf(9, 4), targets, reduction=reduction)
    found = flop(made, "linear_cross_entropy")
    assert found[0] == expected[0] and (found[1] or None) == expected[1]


def test_einsum_and_elementwise() -> None:
    n = 2 * 2 * 3 * 4 * 5  # each of the products of i, j, k, b, and its addition
    made = lambda: mg.einsum("bij,bjk->bik", leaf(5, 2, 3), leaf(5, 3, 4))
    assert flop(made, "einsum") == (n, 2 * n)
    assert flop(lambda: leaf(3, 1) * leaf(4), "multiply") == (12, 24)
    assert flop(lambda: mg.sin(leaf(7)), "sin") == (7, 7)
    assert flop(lambda: leaf(2, 7).var(axis=1), "var") == (14, 14)
    assert flop(lambda: leaf(2, 7).sum(), "sum") == (14, 0)  # one number, broadcast
    assert flop(lambda: leaf(2, 7).reshape(7, 2), "reshape") == (0, 0)
    assert flop(lambda: mg.cumsum(leaf(7)), "cumsum") == (None, None)


def test_rope_and_a_recurrence() -> None:
    x, angles = leaf(5, 4, 6), np.zeros((4, 3))
    assert flop(lambda: F.apply_rope(x, angles, angles), "apply_rope") == (4 * 60 + 2 * 60, 360)  # of 60 pairs
    assert flop(lambda: linear_recurrence(leaf(3, 4), leaf(3, 4)), "linear_recurrence")[0] == 2 * 12


def test_a_formula_of_ones_own() -> None:
    def cube(x: Any, y: Any) -> Any:
        return x**3 + y

    def of(**facts: Any) -> Any:
        operation = mg.primitive(**facts)(cube).defvjp(lambda g, x: g * 3 * x**2, lambda g: g * 1)
        return flop(lambda: operation(leaf(5), leaf(5)), "cube")

    assert of(flops=lambda out: 3 * out.size) == (15, 30)
    assert of(flops=lambda x, out, wrt: (2 * x.size, 7 if wrt == {"x", "y"} else 0)) == (10, 7)
    assert of() == (None, None)
    with pytest.raises(CallError, match=r"flops of 'cube' with parameters among \['x', 'y', 'out', 'wrt'\]"):
        of(flops=lambda z: 1)


class Products(mg.Instrument):
    """The FLOP of plain matrix products that ran inside."""

    flop = 0

    def forward(self, primitive: Any, arguments: list[Any], out: Any, result: Any, started: float) -> None:
        if primitive.name == "matmul":
            self.flop += multiplications(arguments[0].shape, arguments[1].shape)


def definition_products(operation: Any, args: Any, kwargs: Any) -> int:
    """The FLOP of the matrix products in the definition of a fused operation, opened down to primitives."""
    with Products() as products, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fused, "__call__", lambda self, *args, **kwargs: self.definition(*args, **kwargs))
        operation(*[mg.Tensor(a) if isinstance(a, np.ndarray) else a for a in args], **kwargs)
    return products.flop


FUSED = [operation for operation in mg.REGISTRY.values() if isinstance(operation, Fused)]
CALLS = [(op, args, kwargs) for op in FUSED for args, kwargs in sample_inputs(op, rng=0)]
WHOLE = [call for call in CALLS if definition_products(*call) and not {"is_causal", "window"} & call[2].keys()]
WHOLE = [call for call in WHOLE if call[0].name != "linear_attention"]  # whose kernel has a state in place of weights


def test_every_fused_operation_that_multiplies_matrices_has_a_formula() -> None:
    found = {op.name for op, args, kwargs in CALLS if definition_products(op, args, kwargs)}
    assert {"linear", "qkv_projection", "swiglu_ffn", "attention", "linear_cross_entropy"} <= found
    assert {name for name in found if mg.REGISTRY[name].flops is None} == set()


@pytest.mark.cpu_only("what no kernel of the GPU takes in one piece")
@pytest.mark.parametrize(("operation", "args", "kwargs"), WHOLE, ids=lambda value: getattr(value, "name", ""))
def test_forward_formulas_count_the_products_of_the_definition(operation: Any, args: Any, kwargs: Any) -> None:
    """Outside of a recording a fused operation without hidden pairs computes what its definition does."""
    if operation.name == "attention":  # its kernel makes the scores of each matrix that it gives
        args = [np.broadcast_to(a, (*operation(*args, **kwargs).shape[:-2], *a.shape[-2:])) for a in args]
    expected = definition_products(operation, args, kwargs)
    with mg.profile() as p, mg.no_grad():
        out = operation(*[mg.Tensor(a) if isinstance(a, np.ndarray) else a for a in args], **kwargs)
    takes_bias = operation.name in ("linear", "convolution", "transposed_convolution")
    bias = out.size if takes_bias and len(args) > 2 and args[2] is not None else 0
    assert [row.flop for row in p.rows] == [expected + bias]


def test_linear_attention_counts_the_products_with_its_state() -> None:
    """Features of keys times values, and of queries times that: 5 keys, 7 queries, 4 features, 3 values."""
    q, k, v = (mg.ones(shape) for shape in ((7, 4), (5, 4), (5, 3)))
    with mg.profile() as p, mg.no_grad():
        F.linear_attention(q, k, v, feature_map="identity")
    assert [row.flop for row in p.rows] == [2 * 5 * 4 * 3 + 2 * 7 * 4 * 3]


# ---- calls and bytes ------------------------------------------------------------------------------------------------


def test_calls_and_bytes() -> None:
    found = measured(lambda: mg.exp(mg.exp(leaf(100).reshape(10, 10))).T)
    assert found["exp"][::2] == (2, 2 * 1600)  # each reads and writes 800 bytes
    assert found["exp backward"][::2] == (2, 2 * 2400)  # g and its result in, a gradient out
    assert found["reshape"][::2] == found["transpose"][::2] == found["transpose backward"][::2] == (1, 0)
    assert set(found) == {f"{name}{phase}" for name in ("exp", "reshape", "transpose") for phase in ("", " backward")}


def test_a_broadcast_view_is_read_once() -> None:
    found = measured(lambda: leaf(1, 3) * mg.Tensor(np.broadcast_to(np.ones(3), (1000, 3)).copy()))
    view = measured(lambda: mg.broadcast_to(leaf(1, 3), (1000, 3)) * 2)
    assert found["multiply"][2] == 24 + 24000 + 24000
    assert view["multiply"][2] == 24 + 24000


# ---- within one another ---------------------------------------------------------------------------------------------


def test_own_times_leave_out_what_ran_inside() -> None:
    def event(start: float, end: float, thread: int = 0) -> Event:
        return Event("op", "forward", False, start, end - start, 0, None, (), thread)

    # in the order in which they ended: a [0, 1], b [2, 3], around both c [0, 5]; alone d [6, 7] around e [6, 6.5]
    events = [event(0, 1), event(2, 3), event(0, 5), event(1, 9, thread=1), event(6, 6.5), event(6, 7)]
    assert profiling._own_times(events) == [1, 1, 3, 8, 0.5, 0.5]


def test_what_ran_as_its_definition_is_marked() -> None:
    @mg.fused
    def twice(x: Any) -> Any:
        return x + x

    calls = {row.label: row.calls for row in profiled(lambda: twice(leaf(3)))}
    assert calls == {"add": 1, "twice (definition)": 1, "add backward": 1}
    x = leaf(2, 3)
    with mg.profile() as p:
        mg.grad(mg.softmax(x)[0, 0], x, create_graph=True)
    labels = {row.label: row for row in p.rows}
    outer = labels["softmax backward (definition)"]
    assert outer.own < outer.seconds and "exp" in labels and "exp backward" in labels
    assert "softmax" in labels and "softmax (definition)" not in labels


def profiled(make: Callable[[], Any]) -> list[Any]:
    with mg.profile() as p:
        out = make()
        out.backward(np.ones(out.shape))
    return p.rows


def test_a_checkpoint_contains_its_operations() -> None:
    with mg.profile() as p:
        mg.checkpoint(lambda x: mg.sin(mg.exp(x)), leaf(100)).sum().backward()
    calls = {row.label: row.calls for row in p.rows}
    assert calls["exp"] == calls["sin"] == 2 and calls["exp backward"] == 1
    assert calls["checkpoint"] == calls["checkpoint backward"] == 1
    assert sum(row.own for row in p.rows) <= p.seconds


# ---- the table and the trace ----------------------------------------------------------------------------------------


def test_the_table() -> None:
    with mg.profile() as p:
        (leaf(20, 20) @ leaf(20, 20)).sum().backward()
    lines = str(p).splitlines()
    assert lines[0].split() == ["operation", "calls", "time", "own", "share", "bytes", "FLOP", "FLOP/s"]
    names = [line.split("  ")[0] for line in lines[1:-2]]
    assert sorted(names) == ["matmul", "matmul backward", "sum", "sum backward"]
    assert names == [row.label for row in p.rows] and [r.own for r in p.rows] == sorted(r.own for r in p.rows)[::-1]
    assert lines[-2].startswith("total") and "48.4 k" in lines[-2] and "between operations" in lines[-1]
    assert "total" in str(mg.profile())  # of nothing


def test_the_trace_is_one_that_perfetto_opens(tmp_path: Path) -> None:
    """The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, complete events."""
    with mg.profile() as p:
        x = leaf(4, 4)
        loss = mg.checkpoint(lambda x: mg.exp(x @ x), x).sum()
        mg.grad(loss, x, create_graph=True)
        thread = threading.Thread(target=lambda: mg.sin(leaf(3)))
        thread.start()
        thread.join()
    p.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    calls = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(calls) == len(p.events) and {event["ph"] for event in trace["traceEvents"]} == {"X", "M"}
    for call in calls:
        assert isinstance(call["name"], str) and call["cat"] in ("forward", "backward")
        assert call["ts"] >= 0 and call["dur"] >= 0 and isinstance(call["pid"], int)
    assert {call["name"] for call in calls if call["tid"] == 1} == {"sin"} and {c["tid"] for c in calls} == {0, 1}
    mine = [(call["ts"], call["ts"] + call["dur"]) for call in calls if call["tid"] == 0]
    for (a, b), (c, d) in itertools.combinations(mine, 2):  # the slices of a thread lie apart or within one another
        assert b <= c + 1e-3 or d <= a + 1e-3 or (a <= c + 1e-3 and d <= b + 1e-3) or (c <= a + 1e-3 and b <= d + 1e-3)
    exp = next(call for call in calls if call["name"] == "exp")
    assert exp["args"] == {"shapes": [[4, 4]], "bytes": 256, "FLOP": 16}
