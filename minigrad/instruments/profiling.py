"""``profile``: how often each operation runs, how long it takes, and how much it reads, writes and computes.

Operations can run within others: in a definition, in a checkpoint that is computed again, in a derivative that is
recorded. A row gives the time with them, and the operation's own time without them. Only own times add up.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import device_of
from minigrad.engine import core
from minigrad.engine.core import Node
from minigrad.engine.fused import Fused
from minigrad.errors import CallError
from minigrad.instruments.observe import (
    Instrument,
    argument_name,
    arrays_in,
    base_of,
    node_of,
    notes,
    scaled,
    table,
)
from minigrad.tensor import Tensor

# ---- how much an operation computes ---------------------------------------------------------------------------------


def _work(primitive: Any, arguments: list[Any], out: Any, node: Node | None) -> tuple[float | None, float | None]:
    """The forward and the backward FLOP of a call; None where nothing is known of the operation.

    An operation may give a formula, ``flops``. Without one a view computes nothing, an elementwise operation 1 for each
    element of its result, and a reduction (an operation with ``keepdims``) 1 for each element that it reads.
    """
    wrt = node.plan.wrt if node is not None else ()
    flops: Any = None
    if primitive.flops is not None:
        flops = _by_formula(primitive, arguments, out, frozenset(argument_name(primitive, i) for i in wrt))
    elif primitive.view:
        flops = 0
    elif primitive.elementwise and type(out) is not tuple:
        flops = out.size
    elif "keepdims" in primitive.position:
        flops = np.size(arguments[0])
    if flops is None:
        return None, None
    return flops if isinstance(flops, tuple) else (flops, flops * len(wrt))


def _by_formula(primitive: Any, arguments: list[Any], out: Any, wrt: frozenset[str]) -> Any:
    """What ``flops`` of an operation returns, given those of the arguments, ``out`` and ``wrt`` that it names."""
    first, *others = primitive.parameters  # of which the first may be a list that the call flattened
    known: dict[str, Any] = {first: arguments[: len(arguments) - len(others)]}
    known |= {**dict(zip(primitive.names, arguments, strict=True)), "out": out, "wrt": wrt}
    names = list(inspect.signature(primitive.flops).parameters)
    if not set(names) <= set(known):
        expected = f"flops of {primitive.name!r} with parameters among {list(known)}"
        raise CallError(expected, f"{names}", "wrt is the set of the names of arguments whose gradients are wanted")
    return primitive.flops(*map(known.get, names))


# ---- how much it moves ----------------------------------------------------------------------------------------------


def _moved(read: Sequence[Any], written: Any) -> int:
    """Bytes of the arrays that a call reads and writes; 0 where all that it gives are views of what it got."""
    sources, results = list(arrays_in(read)), list(arrays_in(written))
    known = {id(base_of(array)) for array in sources}
    if all(id(base_of(array)) in known for array in results):
        return 0
    return sum(min(array.nbytes, base_of(array).nbytes) for array in (*sources, *results))


def _synchronize(arrays: Any) -> None:
    """Wait for a GPU, so that the time of an operation is that of its kernels and not of their launch."""
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

    ``str()`` gives a table, one row for each operation and phase, the longest first. ``rows`` has its numbers,
    ``events`` every single call. ``save_trace(path)`` writes a file for Perfetto (ui.perfetto.dev) or chrome://tracing.

    bytes   of the arrays that are read and written
    FLOP    by the formula of the operation, ``flops``; without one 1 for each element of an elementwise operation or a
            reduction, 0 for a view, and nothing for the rest
    FLOP/s  over an operation's own time

    A fused operation without a kernel for its arguments is marked ``(definition)``. Each call on a GPU is waited for.

    >>> import minigrad as mg
    >>> w = mg.Tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> with profile() as p:
    ...     mg.tanh(w @ w).sum().backward()
    >>> print([(row.calls, row.flop) for row in p.rows if row.label == "matmul backward"])
    [(1, 32)]
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
        _synchronize(out)
        seconds = time.perf_counter() - started
        node = node_of(result)
        flop, later = _work(primitive, arguments, out, node)
        if node is not None and later is not None:
            notes(node)["flop"] = later
        moved = _moved(arguments, out)
        self._add(Event(primitive.label, "forward", False, started, seconds, moved, flop, _shapes(arguments)))

    def backward(self, node: Node, g: Any, gradients: list[Any], started: float) -> None:
        """Note the call of a derivative."""
        _synchronize(gradients)
        seconds = time.perf_counter() - started
        recorded = any(isinstance(gradient, Tensor) for gradient in gradients)
        definition = recorded and isinstance(node.primitive, Fused)
        moved = _moved([g, *node.residuals], gradients)
        flop = None if definition else (node.note or {}).get("flop")
        flop = flop and flop * (moved > 0)  # a gradient that is passed on as it came costs nothing
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
    work = ("", "") if not row.flop else (scaled(row.flop, ""), scaled(row.flop / max(row.own, 1e-9), "FLOP/s"))
    share = f"{row.own / max(total, 1e-9):.1%}"
    times = scaled(row.seconds, "s"), scaled(row.own, "s")
    return row.label, str(row.calls), *times, share, scaled(row.bytes, "B"), *work
