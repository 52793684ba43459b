"""``profile``: how often each operation runs, how long it takes, and how much it reads, writes and computes.

Operations can run within others: those of a definition, of a checkpoint that is computed once more, of a derivative
that is recorded itself. Times are given with and without them; only the latter, an operation's own, add up.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import device_of
from minigrad.engine import core
from minigrad.engine.core import Node
from minigrad.engine.fused import Fused
from minigrad.instruments.observe import (
    Instrument,
    arguments_by_name,
    arrays_in,
    base_of,
    node_of,
    notes,
    scaled,
    table,
)
from minigrad.tensor import Tensor

# ---- how much an operation computes ---------------------------------------------------------------------------------

Work = tuple[float, float]  # floating-point operations of the forward and of the backward call
Formula = Callable[[dict[str, Any], Any, frozenset[str]], Work]
FLOPS: dict[str, Formula] = {}
"""For an operation's name, its work as a function of (arguments by name, result, arguments that need a gradient)."""


def _counts(function: Formula) -> Formula:
    FLOPS[function.__name__] = function
    return function


@_counts
def matmul(arguments: dict[str, Any], out: Any, needs: frozenset[str]) -> Work:
    """2 for each product that is summed; the same for each of the two gradients."""
    n = 2.0 * out.size * arguments["x"].shape[-1]
    return n, n * len(needs)


@_counts
def linear(arguments: dict[str, Any], out: Any, needs: frozenset[str]) -> Work:
    """That of its matrix product, and one addition for each result where there is a bias."""
    n = 2.0 * out.size * arguments["x"].shape[-1]
    bias = 0 if arguments["bias"] is None else out.size
    return n + bias, n * len(needs & {"x", "weight"}) + bias * ("bias" in needs)


@_counts
def qkv_projection(arguments: dict[str, Any], out: Any, needs: frozenset[str]) -> Work:
    """A product for each weight; then one for its gradient, and one for what it sends back to the rows."""
    products = {name: 2.0 * arguments["x"].size * len(arguments[name]) for name in ("wq", "wk", "wv")}
    rows = bool(needs & {"x", "norm_weight"})
    return sum(products.values()), sum(n * ((name in needs) + rows) for name, n in products.items())


@_counts
def swiglu_ffn(arguments: dict[str, Any], out: Any, needs: frozenset[str]) -> Work:
    """Three products; then two for the gradients of each, where they are needed, and two that are done again."""
    wide, narrow = 2.0 * arguments["x"].size * len(arguments["w1"]), 2.0 * out.size * len(arguments["w1"])
    rows, units = bool(needs & {"x", "norm_weight"}), bool(needs & {"x", "norm_weight", "w1", "w3"})
    again = 2 * wide if arguments["recompute"] else 0
    back = again + wide * (("w1" in needs) + ("w3" in needs) + 2 * rows) + narrow * (("w2" in needs) + units)
    return 2 * wide + narrow, back


@_counts
def einsum_explicit(arguments: dict[str, Any], out: Any, needs: frozenset[str]) -> Work:
    """A product of all operands, summed, for each combination of subscripts; the same for each gradient."""
    terms = arguments["subscripts"].split("->")[0].split(",")
    operands = [a for name, a in arguments.items() if name.startswith("operands[")]
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        sizes |= dict(zip(term, operand.shape, strict=True))
    n = float(len(operands) * np.prod(list(sizes.values()), dtype=float))
    return n, n * len(needs)


@_counts
def attention(arguments: dict[str, Any], out: Any, needs: frozenset[str]) -> Work:
    """For each pair of query and key that is allowed: two matrix products forward; five backward, where all gradients
    are needed, of which the first makes the scores once more. Masks that are arrays are counted as if all were True.
    """
    queries, d = arguments["q"].shape[-2:]
    keys, d_v = arguments["v"].shape[-2:]
    window = arguments["window"]
    left = keys + queries if window is None else window - 1
    right = 0 if arguments["is_causal"] else left
    i = np.arange(queries)
    seen = np.minimum(i + right, keys - 1) - np.maximum(i - left, 0) + 1
    pairs = float(np.maximum(seen, 0).sum()) * (out.size // max(queries * d_v, 1))
    scores = needs & {"q", "k"}
    back = (d + d_v * ("v" in needs) + d_v * bool(scores) + d * len(scores)) if needs else 0
    return 2 * pairs * (d + d_v), 2 * pairs * back


@_counts
def linear_cross_entropy(arguments: dict[str, Any], out: Any, needs: frozenset[str]) -> Work:
    """The logits and both gradients are a matrix product each, all made in the forward call of a reduced loss."""
    n = 2.0 * arguments["x"].size * len(arguments["weight"])
    gradients = n * len(needs)
    return (n, n + gradients if needs else 0) if arguments["reduction"] == "none" else (n + gradients, 0)


def _work(primitive: Any, arguments: list[Any], out: Any, node: Node | None) -> tuple[float | None, float | None]:
    """The forward and the backward FLOP of a call; None where nothing is known of the operation."""
    named = arguments_by_name(primitive, arguments)
    names = list(named)
    needs = frozenset(names[i] for i in node.plan.wrt) if node is not None else frozenset()
    if primitive.name in FLOPS:
        return FLOPS[primitive.name](named, out, needs)
    if primitive.elementwise and type(out) is not tuple:
        return out.size, out.size * len(needs)
    return None, None


# ---- how much it moves ----------------------------------------------------------------------------------------------


def _moved(read: Sequence[Any], written: Any) -> int:
    """Bytes of the arrays that a call reads and writes; 0 where all that it gives are views of what it got."""
    sources, results = list(arrays_in(read)), list(arrays_in(written))
    known = {id(base_of(array)) for array in sources}
    if all(id(base_of(array)) in known for array in results):
        return 0
    return sum(min(array.nbytes, base_of(array).nbytes) for array in (*sources, *results))


def _wait(arrays: Any) -> None:
    """Let a GPU end its work, so that the time of an operation is not that of handing it over."""
    for array in arrays_in(arrays):
        if device_of(array) != "cpu":
            array.device.synchronize()
            return


# ---- the instrument -------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """One call, of an operation or of its derivative. Times in seconds, ``start`` on the clock of perf_counter."""

    operation: str
    phase: str  # "forward" or "backward"
    definition: bool  # whether it ran, or was differentiated, as its definition in other operations
    start: float
    seconds: float
    bytes: int
    flop: float | None
    shapes: tuple[tuple[int, ...], ...]
    thread: int = 0

    @property
    def label(self) -> str:
        """The operation, its phase, and whether it was its definition that ran."""
        phase = " backward" if self.phase == "backward" else ""
        return self.operation + phase + (" (definition)" if self.definition else "")


class Row(NamedTuple):
    """All calls of one operation in one phase. ``own`` is the time without that of operations within; FLOP or None."""

    label: str
    calls: int
    seconds: float
    own: float
    bytes: int
    flop: float | None


class profile(Instrument):
    """Measure every operation, forward and backward, that runs inside of a ``with`` block.

    ``str()`` gives a table, one row for each operation and phase, the longest first; ``rows`` its numbers; ``events``
    every single call; ``save_trace(path)`` a file that Perfetto (ui.perfetto.dev) and chrome://tracing show. bytes are
    those of the arrays read and written; FLOP are counted for matrix products, attention and elementwise operations
    (1 an element), and for others by a formula in ``FLOPS`` of this module. FLOP/s is over an operation's own time.
    A fused operation without a kernel for its arguments is marked ``(definition)``. A GPU is waited for after each.

    >>> import minigrad as mg
    >>> w = mg.Tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> with profile() as p:
    ...     mg.tanh(w @ w).sum().backward()
    >>> print([(row.calls, row.flop) for row in p.rows if row.label == "matmul backward"])
    [(1, 32.0)]
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.seconds = 0.0  # spent inside of the block so far

    def __enter__(self) -> profile:
        super().__enter__()
        core.observers.insert(0, core.observers.pop())  # first, so that no other instrument's time is measured
        self.seconds -= time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter()
        super().__exit__()

    def forward(self, primitive: Any, arguments: list[Any], out: Any, result: Any, started: float) -> None:
        """Note a call, and on its node what its derivative will compute."""
        _wait(out)
        seconds = time.perf_counter() - started
        node = node_of(result)
        flop, later = _work(primitive, arguments, out, node)
        if node is not None and later is not None:
            notes(node)["flop"] = later
        moved = _moved(arguments, out)
        self._add(Event(primitive.label, "forward", False, started, seconds, moved, flop, _shapes(arguments)))

    def backward(self, node: Node, g: Any, gradients: list[Any], started: float) -> None:
        """Note the call of a derivative."""
        _wait(gradients)
        seconds = time.perf_counter() - started
        recorded = any(isinstance(gradient, Tensor) for gradient in gradients)
        definition = recorded and isinstance(node.primitive, Fused)
        moved = _moved([g, *node.residuals], gradients)
        flop = (node.note or {}).get("flop") if moved and not definition else None
        self._add(Event(node.primitive.label, "backward", definition, started, seconds, moved, flop, _shapes([g])))

    def definition(self, primitive: Any, started: float) -> None:
        """Note that a fused operation was computed by others."""
        seconds = time.perf_counter() - started
        self._add(Event(primitive.label, "forward", True, started, seconds, 0, None, ()))

    def _add(self, event: Event) -> None:
        self.events.append(event._replace(thread=threading.get_ident()))

    @property
    def rows(self) -> list[Row]:
        """The calls by operation and phase, those with the longest own time first."""
        groups: dict[str, list[tuple[Event, float]]] = {}
        for event, own in zip(self.events, _own_times(self.events), strict=True):
            groups.setdefault(event.label, []).append((event, own))
        rows = []
        for label, pairs in groups.items():
            seconds, own = sum(event.seconds for event, _ in pairs), sum(own for _, own in pairs)
            flops = [event.flop for event, _ in pairs if event.flop is not None]
            moved = sum(event.bytes for event, _ in pairs)
            rows.append(Row(label, len(pairs), seconds, own, moved, sum(flops) if flops else None))
        return sorted(rows, key=lambda row: -row.own)

    def __str__(self) -> str:
        rows = self.rows
        own = sum(row.own for row in rows)
        total = Row("total", len(self.events), own, own, sum(r.bytes for r in rows), sum(r.flop or 0 for r in rows))
        head = ("operation", "calls", "time", "own", "share", "bytes", "FLOP", "FLOP/s")
        lines = [head, *(_cells(row, own) for row in (*rows, total))]
        between = max(0.0, self.seconds - own)
        return f"{table(lines)}\n{scaled(self.seconds, 's')} in all, {scaled(between, 's')} of it between operations"

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the calls as a trace in Chrome's format, JSON: one complete event for each, in microseconds."""
        first = min((event.start for event in self.events), default=0.0)
        threads = {thread: k for k, thread in enumerate(dict.fromkeys(event.thread for event in self.events))}
        process: dict[str, Any] = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "minigrad"}}
        calls = sorted(self.events, key=lambda event: (event.start, -event.seconds))
        trace = [process, *(_trace_event(event, first, threads[event.thread]) for event in calls)]
        Path(path).write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))


def _trace_event(event: Event, first: float, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.label,
        "cat": event.phase,
        "ts": (event.start - first) * 1e6,
        "dur": event.seconds * 1e6,
        "pid": 0,
        "tid": thread,
        "args": {"shapes": [list(shape) for shape in event.shapes], "bytes": event.bytes, "FLOP": event.flop},
    }


def _shapes(arguments: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape for array in arrays_in(arguments))


def _own_times(events: Sequence[Event]) -> list[float]:
    """For each event, in the order in which they ended, its time without that of the events inside of it."""
    ended: dict[int, list[Event]] = {}  # of each thread: events that no later one has contained so far
    own = []
    for event in events:
        earlier = ended.setdefault(event.thread, [])
        within = 0.0
        while earlier and earlier[-1].start >= event.start:
            within += earlier.pop().seconds
        own.append(max(0.0, event.seconds - within))
        earlier.append(event)
    return own


def _cells(row: Row, total: float) -> tuple[str, ...]:
    work = ("", "") if row.flop is None else (scaled(row.flop, ""), scaled(row.flop / max(row.own, 1e-9), "FLOP/s"))
    share = f"{row.own / max(total, 1e-9):.1%}"
    times = scaled(row.seconds, "s"), scaled(row.own, "s")
    return row.label, str(row.calls), *times, share, scaled(row.bytes, "B"), *work
