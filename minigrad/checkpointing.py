"""Recomputation in place of memory: ``checkpoint`` keeps the arguments of a function and runs it again when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from minigrad import captures, random
from minigrad.autocast import autocast
from minigrad.engine.backward import Pass, nodes_behind
from minigrad.engine.core import Node, attach, attach_several, behind_views, node_ids, notify, rewrap_value
from minigrad.engine.plan import Plan
from minigrad.engine.recording import current_mode, enable_grad, is_grad_enabled
from minigrad.errors import DTypeError, GraphError
from minigrad.instruments.observe import Instrument
from minigrad.messages.explain import describe, explained
from minigrad.tensor import RunsAgain, Tensor

Function = Callable[..., Any]
T = TypeVar("T")


def several(args: Any) -> tuple[Any, ...]:
    """The arguments of a function as a tuple: a list of them, or one alone."""
    return tuple(args) if isinstance(args, tuple | list) else (args,)


def alike(given: Any, results: Sequence[Any]) -> Any:
    """``results`` as a function gave them: in a list or tuple, named ones included, or one alone."""
    if not isinstance(given, tuple | list):
        return results[0]
    return type(given)(*results) if hasattr(given, "_fields") else type(given)(results)


Surrounding = Callable[[], AbstractContextManager[Any]]
_surroundings: ContextVar[tuple[Surrounding, ...]] = ContextVar("surroundings", default=())


@contextmanager
def within(surrounding: Surrounding) -> Iterator[None]:
    """Enter ``surrounding()``, also when a function that ``checkpoint`` runs inside of it runs once more."""
    token = _surroundings.set((*_surroundings.get(), surrounding))
    try:
        with surrounding():
            yield
    finally:
        _surroundings.reset(token)


class _Recompute:
    """The primitive of a checkpoint: its backward rule runs the function again and differentiates that.

    sources  for each argument the node that made it, with its version; that array is kept in place of the Tensor,
             which would keep its own history alive
    edges    what the results were made from, arguments or not
    drawn    the states of the generator before and after the function ran
    given    other generators that the function gave to draws, with their states then

    It runs in the precision and in the surroundings of now.
    """

    name = label = "checkpoint"
    view = elementwise = scales_losses = False
    flops = linear = None
    stacks, forward_rules = False, ()

    def __init__(
        self, fn: Function, sources: Sequence[Any], edges: list[Any], reads: Sequence[str], drawn: tuple[Any, Any],
        given: random.States,
    ) -> None:  # fmt: skip
        self.fn, self.sources, self.edges, self.reads, self.drawn = fn, sources, edges, reads, drawn
        self.given = given
        self.precision, self.surroundings = current_mode().autocast, _surroundings.get()
        self.position = {f"input {i}": i for i in range(len(edges))}

    def argument(self, position: int) -> str:
        """What a text calls a tensor that the function reads; these are counted after the edges."""
        return f"{self.reads[position - len(self.edges)]}, which the function reads,"

    def run_rules(self, node: Node, g: Any, create_graph: bool) -> list[Any]:
        """Gradients of the inputs and of what the function read from outside, in the order of the edges."""
        if captures.capturing() and self.drawn[0] != self.drawn[1]:
            hint = "dropout=0, or no recomputation of layers with dropout"
            raise captures.Refusal("random numbers that mg.checkpoint draws again", hint)
        start, now = next(node_ids), random.get_state()
        given = [source or a for (source, _), a in zip(self.sources, node.residuals, strict=True)]
        holders = [*self.edges, *(a for a in given if isinstance(a, Tensor | Node))]
        hooks = [len(holder._hooks or ()) for holder in holders]
        random.set_state(self.drawn[0])
        try:
            with enable_grad(), autocast(self.precision or "float32"), RunsAgain(again=True), ExitStack() as stack:
                stack.enter_context(random._put_back(self.given))
                for surrounding in self.surroundings:
                    stack.enter_context(within(surrounding))
                args = [rewrap_value(a, *source) for a, source in zip(node.residuals, self.sources, strict=True)]
                outs = several(self.fn(*args))
            self.compare(node, outs, start)
        finally:
            random.set_state(now)
            for holder, count in zip(holders, hooks, strict=True):
                del (holder._hooks or [])[count:]  # what this second run gave them, the first did
        gradients = g if isinstance(g, tuple) else (g,)
        work = Pass(create_graph=create_graph, retain_graph=create_graph, targets=set(self.edges), inner=True)
        work.run([(o.node, g) for o, g in zip(outs, gradients, strict=True) if _is_new(o, start)])
        return [work.found.get(edge) for edge in self.edges]

    def compare(self, node: Node, outs: Sequence[Any], start: int) -> None:
        """Refuse to go on where the function did something else than in the forward pass."""
        shapes = node.shape if type(node.dtype) is tuple else (node.shape,)
        found = tuple(o.shape for o in outs)
        missing = set(self.edges) - set(_sources([o.node or o for o in outs if o.requires_grad], start))
        if found != shapes:
            got = f"results of the shapes {found}, then {shapes}"
        elif any(isinstance(edge, Node) or edge.requires_grad for edge in missing):  # no leaf that was frozen since
            got = "results made from other tensors: a name stands for another one by now, or the function makes leaves"
        elif random.get_state() != self.drawn[1]:
            got = "other random numbers than then, as train() or eval() was called since"
        else:
            return
        hint = "run backward first; lambda x, w=w: … holds on to the w of now; make leaves outside of the function"
        raise GraphError("a function that does again what it did in the forward pass of 'checkpoint'", got, hint)


class _Reading(Instrument):
    """Notes the tensors older than ``start`` that this thread reads, with their versions, in a ``with`` block.

    A function that runs again must read the same numbers, also those that no derivative keeps. Leaves and constants
    are noted whatever their age.
    """

    def __init__(self, start: int) -> None:
        self.start, self.thread = start, threading.get_ident()
        self.versions: list[tuple[list[int], int]] = []
        self.names: list[str] = []
        self.seen: set[int] = set()

    def read(self, values: Sequence[Any]) -> None:
        if threading.get_ident() != self.thread:
            return
        for value in (part for v in values for part in (v if isinstance(v, tuple) else (v,))):
            if not isinstance(value, Tensor) or (value.node is not None and value.node.number > self.start):
                continue
            if id(value._version) not in self.seen:
                self.seen.add(id(value._version))
                self.versions.append((value._version, value._version[0]))
                self.names.append(_described(value))


@explained
def checkpoint(fn: Callable[..., T], *args: Any) -> T:
    """``fn(*args)``, of which nothing but the arguments is kept: the backward pass computes the rest once more.

    Costs a second forward pass of ``fn``, saves all that it would have kept. Gradients reach the arguments and every
    tensor that ``fn`` reads from outside, such as weights. Random numbers of ``minigrad.random`` are drawn again
    alike, those of a ``generator=`` too, running statistics move once, and products are rounded alike where
    ``autocast`` was on. A GraphError tells of tensors that changed since, of a function that does something else by
    now, of leaves that ``fn`` makes (those of the second run are others, and nothing tells them from a name that stands
    for another tensor by now), and of ``backward()`` in it, which would add gradients twice. What else ``fn`` does it
    does twice: it prints twice, and numbers that it draws from NumPy itself are others.

    >>> import minigrad as mg
    >>> x = mg.Tensor([1.0, 2.0], requires_grad=True)
    >>> checkpoint(lambda v: mg.exp(v * v), x).sum().backward(); print(x.grad.round(3))
    [  5.437 218.393]
    """
    if not is_grad_enabled():
        return fn(*args)
    before, started = random.get_state(), time.perf_counter()
    start = next(node_ids)
    with _Reading(start) as reading, RunsAgain(), random._noted() as given:
        out = fn(*args)
    outs = several(out)
    if not all(isinstance(o, Tensor) for o in outs):
        raise DTypeError("a function that returns Tensors", describe(out), "compute with minigrad's operations")
    edges = _sources([o.node for o in outs if _is_new(o, start)], start)
    if not edges:
        return out
    made = [isinstance(a, Tensor) and a.node is not None for a in args]
    sources = [(a.node, [a._version]) if m else (None, ()) for a, m in zip(args, made, strict=True)]
    node = Node.of(
        _Recompute(fn, sources, edges, reading.names, (before, random.get_state()), given),
        Plan(wrt=tuple(range(len(edges))), names=tuple(f"argument {i}" for i in range(len(args)))),
        tuple(edges),
        [a._data if m else a for a, m in zip(args, made, strict=True)],
        *((out.shape, out.dtype) if isinstance(out, Tensor) else zip(*((o.shape, o.dtype) for o in outs), strict=True)),
    )
    node.versions = [(*kept, len(edges) + k) for k, kept in enumerate(reading.versions)]
    results = [o.detach() for o in outs]
    if isinstance(out, Tensor):
        attach(results[0], node)
    else:
        attach_several(results, node)
    result: Any = alike(out, [r if _is_new(o, start) else o for r, o in zip(results, outs, strict=True)])
    _tell(node, result, started)
    return result  # type: ignore[no-any-return]


def runs_again() -> bool:
    """Whether a function of ``checkpoint`` runs for the second time: what it counts was counted."""
    return any(isinstance(setting, RunsAgain) and setting.again for setting in current_mode().blocks)


def _is_new(result: Tensor, start: int) -> bool:
    """Whether a function made this result itself, by operations: another one is given back as it is."""
    return result.node is not None and result.node.number > start


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


def _described(tensor: Tensor) -> str:
    """A tensor in the text of an error: the leaf behind views by its name, a result by what made it."""
    origin = behind_views(tensor.node or tensor)
    return f"{tensor._brief()} made by {origin.primitive.label!r}" if isinstance(origin, Node) else origin._brief()
