"""Recomputation in place of memory: ``checkpoint`` keeps the arguments of a function and runs it again when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from minigrad import random
from minigrad.engine.backward import Pass, nodes_behind
from minigrad.engine.core import Node, attach, attach_several, connected, node_ids, notify
from minigrad.engine.plan import Plan
from minigrad.engine.recording import enable_grad, in_precision, is_grad_enabled, mode
from minigrad.errors import DTypeError
from minigrad.instruments.observe import Instrument
from minigrad.messages.explain import describe, explained
from minigrad.tensor import Tensor

Function = Callable[..., Any]
T = TypeVar("T")


def several(args: Any) -> tuple[Any, ...]:
    """The arguments of a function as a tuple: a list of them, or one alone."""
    return tuple(args) if isinstance(args, tuple | list) else (args,)


class _Recompute:
    """The primitive of a checkpoint: its backward rule runs the function again and differentiates that."""

    name = label = "checkpoint"
    view = elementwise = scales_losses = False
    flops = None

    def __init__(
        self, fn: Function, sources: Sequence[Any], edges: list[Any], reads: Sequence[str], state: dict[str, Any]
    ) -> None:
        self.fn, self.sources, self.edges, self.reads, self.state = fn, sources, edges, reads, state
        self.precision = mode().autocast
        self.position = {f"input {i}": i for i in range(len(edges))}

    def argument(self, position: int) -> str:
        """What a text calls a tensor that the function reads; these are counted after the edges."""
        return f"{self.reads[position - len(self.edges)]}, which the function reads,"

    def run_rules(self, node: Node, g: Any, create_graph: bool) -> list[Any]:
        """Gradients of the inputs and of what the function read from outside, in the order of the edges."""
        now = random.get_state()
        random.set_state(self.state)
        try:
            with enable_grad(), in_precision(self.precision):
                out = self.fn(*[_again(a, source) for a, source in zip(node.residuals, self.sources, strict=True)])
        finally:
            random.set_state(now)
        outs, gradients = several(out), g if isinstance(g, tuple) else (g,)
        work = Pass(create_graph=create_graph, retain_graph=create_graph, targets=set(self.edges), through=False)
        work.run([(o.node or o, s) for o, s in zip(outs, gradients, strict=True) if o.requires_grad])
        return [work.found.get(edge) for edge in self.edges]


class _Reading(Instrument):
    """Notes the leaves and constants that operations of this thread read, with their versions, in a ``with`` block.

    A function that runs again must read the same numbers, also those that no derivative keeps.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.versions: list[tuple[list[int], int]] = []
        self.names: list[str] = []
        self.seen: set[int] = set()

    def read(self, values: Sequence[Any]) -> None:
        if threading.get_ident() != self.thread:
            return
        for value in values:
            if isinstance(value, Tensor) and value.node is None and id(value._version) not in self.seen:
                self.seen.add(id(value._version))
                self.versions.append((value._version, value._version[0]))
                self.names.append(value._brief())


@explained
def checkpoint(fn: Callable[..., T], *args: Any) -> T:
    """``fn(*args)``, of which nothing but the arguments is kept: the backward pass computes the rest once more.

    Costs a second forward pass of ``fn``, saves all that it would have kept. Gradients reach the arguments and every
    tensor that ``fn`` reads from outside, such as weights. Random numbers of ``minigrad.random`` are drawn again
    alike, and products are rounded alike where ``autocast`` was on.

    >>> import minigrad as mg
    >>> x = mg.Tensor([1.0, 2.0], requires_grad=True)
    >>> checkpoint(lambda v: mg.exp(v * v), x).sum().backward(); print(x.grad.round(3))
    [  5.437 218.393]
    """
    if not is_grad_enabled():
        return fn(*args)
    state, started = random.get_state(), time.perf_counter()
    start = next(node_ids)
    with _Reading() as reading:
        out = fn(*args)
    outs = several(out)
    if not all(isinstance(o, Tensor) for o in outs):
        raise DTypeError("a function that returns Tensors", describe(out), "compute with minigrad's operations")
    edges = _sources([o.node or o for o in outs if o.requires_grad], start)
    if not edges:
        return out
    node = Node(
        _Recompute(fn, [a.node if isinstance(a, Tensor) else None for a in args], edges, reading.names, state),
        Plan(wrt=tuple(range(len(edges))), names=tuple(f"argument {i}" for i in range(len(args)))),
        tuple(edges),
        [a._data if isinstance(a, Tensor) and a.node is not None else a for a in args],
        (),
        None,
    )
    node.versions = [(*kept, len(edges) + k) for k, kept in enumerate(reading.versions)]
    results = [o.detach() for o in outs]
    if isinstance(out, Tensor):
        node.shape, node.dtype = out.shape, out.dtype
        attach(results[0], node)
    else:
        node.shape, node.dtype = tuple(r.shape for r in results), tuple(r.dtype for r in results)
        attach_several(results, node)
    result: Any = results[0] if isinstance(out, Tensor) else type(out)(results)  # type: ignore[call-arg]
    _tell(node, result, started)
    return result  # type: ignore[no-any-return]


def _tell(node: Node, result: Any, started: float) -> None:
    """Tell the observers of a checkpoint as of any operation."""
    result = result if isinstance(result, Tensor) else tuple(result)
    out = result._data if isinstance(result, Tensor) else tuple(part._data for part in result)
    notify("forward", node.primitive, node.residuals, out, result, started)


def _sources(roots: Sequence[Any], start: int) -> list[Any]:
    """The leaves, and the nodes older than ``start``, from which the gradient of a function's results comes."""

    def older(edge: Any) -> bool:
        return isinstance(edge, Tensor) or edge.number < start

    inside = nodes_behind(roots, older)
    return list(dict.fromkeys(e for edges in (roots, *(n.parents for n in inside)) for e in edges if older(e)))


def _again(kept: Any, source: Node | None) -> Any:
    """The same argument once more, from its array alone: to keep the Tensor would keep its own history alive."""
    return kept if source is None else connected(kept, source)
