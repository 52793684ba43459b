"""The backward pass visits nodes by descending creation number, without recursion, and frees each one after its use.

``backward`` adds gradients to the leaves, ``gradients`` returns them. Both run one :class:`Pass`.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minigrad.backend import array_module, array_of, is_array
from minigrad.engine import core
from minigrad.engine.broadcast import unbroadcast
from minigrad.engine.core import Node, Primitive
from minigrad.engine.recording import Setting
from minigrad.errors import DTypeError, GraphError, ShapeError
from minigrad.messages.arguments import as_operand
from minigrad.messages.explain import describe

SETTINGS = [Setting(recording=create_graph, autocast=None) for create_graph in (False, True)]
SCALED = Setting(scaled=True)  # gradients may overflow half precision from here on


@dataclass(eq=False)
class Pass:
    """One backward pass: gradients wait in ``pending`` until every consumer of their node has delivered.

    A node's consumers have higher creation numbers, so taking nodes from a heap by descending number meets each node
    after all of its consumers: a topological order without recursion or a search. The first gradient is *borrowed* (it
    may be a view, or shared with another node) and never written to; the sum with a second is *owned*, and later ones
    are added to it in place. Leaves receive theirs at the end, when nothing can fail any more.
    """

    create_graph: bool = False  # whether the pass is itself recorded
    retain_graph: bool = False  # whether nodes keep what their derivatives read
    targets: set[Any] | None = None  # edges whose gradients to find; None: all leaves, to add theirs to ``.grad``
    whole: bool = False  # whether the targets are all leaves, so that there is no need to search for the way to them
    inner: bool = False  # whether this is a part of another pass, which goes on at the targets and runs their hooks
    to_visit: set[Any] | None = None  # with targets: the nodes through which one can be reached; None: all that are met
    receivers: set[Any] | None = None  # those and the targets
    pending: dict[Any, Any] = field(default_factory=dict)
    owned: set[Any] = field(default_factory=set)
    heap: list[tuple[int, Node]] = field(default_factory=list)
    found: dict[Any, Any] = field(default_factory=dict)
    blocks: ExitStack = field(default_factory=ExitStack)  # settings from a node on until the end of the pass

    def run(self, roots: Sequence[tuple[Any, Any]]) -> None:
        """Send the gradients of ``roots``, pairs of an edge and its gradient, back to the leaves or the targets."""
        with SETTINGS[self.create_graph], self.blocks:
            if self.targets is not None and not self.whole:
                self.to_visit = _nodes_leading_to(self.targets, [edge for edge, _ in roots], self.inner)
                self.receivers = None if self.to_visit is None else self.to_visit | self.targets
            for edge, g in roots:
                if self.receivers is None or edge in self.receivers:
                    self.accumulate(edge, _as_tensor(g) if self.create_graph else array_of(g))
            while self.heap:
                node = heapq.heappop(self.heap)[1]
                g = self.pending.pop(node)
                self.owned.discard(node)
                if node._hooks:
                    g = self.run_hooks(node, g)
                if self.targets is not None and node in self.targets:
                    self.found[node] = g
                if self.to_visit is None or node in self.to_visit:
                    self.visit(node, g)
            leaves = {leaf: self.run_hooks(leaf, g) for leaf, g in self.pending.items() if leaf._requires_grad}
            if self.targets is not None:
                self.found |= leaves
                return
            # Nothing fails from here on, so a pass that broke off has changed no leaf. The price: where ``.grad`` is
            # there already, a second set of gradients is beside it until here. To add each as soon as it is complete
            # would spare that, but a later error couldn't take it away again exactly.
            for leaf, g in leaves.items():
                _add_to_leaf(leaf, g, fresh=leaf in self.owned and not leaf._hooks)

    def visit(self, node: Node, g: Any) -> None:
        """Run the rules of ``node`` and hand each gradient to its parent."""
        node.check()
        if node.primitive.scales_losses:
            self.blocks.enter_context(SCALED)
        started = time.perf_counter() if core.observers else 0.0
        if type(g) is tuple:
            g = with_zeros(g, node)
        gradients = node.primitive.run_rules(node, g, self.create_graph)
        residuals, parents = node.residuals, node.parents
        if core.observers:
            core.notify("backward", node, g, gradients, started)
        if not self.retain_graph:
            node.release()
        receivers, create = self.receivers, self.create_graph
        for k, edge in enumerate(parents):
            found = gradients[k]
            if found is None or not (receivers is None or edge in receivers):
                continue
            if type(found) is not tuple and (create or found.dtype is not edge.dtype or found.shape != edge.shape):
                found = self.match_shape(node.primitive, edge, found)
            if type(edge) is not Node and edge not in self.pending and _is_fresh(found, g, residuals, gradients[:k]):
                self.owned.add(edge)
            self.accumulate(edge, found)

    def match_shape(self, made_by: Primitive[Any], edge: Any, g: Any) -> Any:
        """``g`` in the shape and dtype of ``edge``: broadcasting is undone, any other difference refused."""
        g = _as_tensor(g) if self.create_graph else g
        if g.shape != edge.shape:
            if not made_by.elementwise:
                got, hint = f"{g.shape} from a rule of {made_by.name!r}", "a rule returns the shape of its argument"
                raise GraphError(f"a gradient of shape {edge.shape}", got, hint)
            g = unbroadcast(g, edge.shape)
        return g if g.dtype == edge.dtype else g.astype(edge.dtype)

    def run_hooks(self, edge: Any, g: Any) -> Any:
        """The complete gradient of ``edge`` as its hooks leave it, one after the other."""
        if not edge._hooks or (self.inner and edge in (self.targets or ())):
            return g
        g = g if self.create_graph else array_module(g).array(g)  # a copy, into which hooks may write
        for hook in tuple(edge._hooks):
            if (new := hook(g)) is not None:
                g = _gradient_like(new, "a gradient from a hook", g, "None leaves the gradient as it is")
        return g

    def accumulate(self, edge: Any, g: Any) -> None:
        """Add ``g`` to the gradient that waits at ``edge``."""
        before = self.pending.get(edge)
        if before is None:
            self.pending[edge] = g
            if type(edge) is Node:
                heapq.heappush(self.heap, (-edge.number, edge))
        elif type(g) is tuple:
            pairs = zip(before, g, strict=True)  # a part is None where nothing has come for it
            self.pending[edge] = tuple(a if b is None else b if a is None else a + b for a, b in pairs)
        elif edge in self.owned:
            before += g
        else:
            self.pending[edge] = before + g
            if not self.create_graph and g.shape != ():  # a sum of shape () is a NumPy number, which has no place
                self.owned.add(edge)


def _is_fresh(g: Any, incoming: Any, residuals: Any, earlier: Sequence[Any]) -> bool:
    """Whether nobody else can hold ``g``: it is no view, not the incoming gradient, no residual, no other gradient."""
    return is_array(g) and g.base is None and all(g is not other for other in (incoming, *(residuals or ()), *earlier))


def with_zeros(g: tuple[Any, ...], node: Node, rows: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """The gradients of several results, with zeros for those that nothing depends on; ``rows`` are axes in front."""
    xp = array_module(*[array_of(part) for part in g])
    parts = zip(g, node.shape, node.dtype, strict=True)
    return tuple(xp.zeros(rows + shape, dtype) if part is None else part for part, shape, dtype in parts)


def _gradient_like(g: Any, what: str, like: Any, hint: str) -> Any:
    """A gradient that the user gave, in the dtype of ``like``, whose shape it must have."""
    g = g if isinstance(g, core.Tensor) else as_operand(g, what)
    if np.shape(g) != like.shape:
        raise ShapeError(f"{what}, of shape {like.shape}", f"shape {np.shape(g)}", hint)
    if not isinstance(g, core.Tensor):
        return array_module(array_of(like)).asarray(g, dtype=like.dtype)
    return g if g.dtype == like.dtype else g.astype(like.dtype)


def _add_to_leaf(leaf: Any, g: Any, fresh: bool) -> None:
    """Add to ``leaf.grad``. That array belongs to the leaf alone, so a borrowed one is copied."""
    if leaf._grad is None:
        leaf._grad = g if fresh else array_module(g).array(g)
    else:
        leaf._grad += g


def nodes_behind(roots: Sequence[Any], stop: Callable[[Node], bool] | None) -> set[Node]:
    """All nodes that ``roots`` were made from, and the roots; the search ends at nodes where ``stop`` holds."""
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if isinstance(node, Node) and node not in found and not (stop and stop(node)):
            found.add(node)
            stack += node.parents or ()
    return found


def _nodes_leading_to(targets: set[Any], roots: Sequence[Any], inner: bool) -> set[Any] | None:
    """The nodes from which one of ``targets`` can be reached, None if those are all. The pass visits no others."""
    reachable = nodes_behind(roots, targets.__contains__ if inner else None)
    if not inner and targets | reachable >= {edge for n in reachable for edge in n.parents or (None,)}.union(roots):
        return None
    leading: set[Any] = set()
    for node in sorted(reachable, key=lambda n: n.number):
        if node.parents is None or not (targets.isdisjoint(node.parents) and leading.isdisjoint(node.parents)):
            leading.add(node)
    return leading


def _seed(out: Any, gradient: Any) -> Any:
    """The gradient from which a pass starts at ``out``: the one given, checked, or 1 for a single number."""
    if not isinstance(out, core.Tensor):
        raise DTypeError("a Tensor to differentiate", describe(out), "compute it with minigrad from Tensors")
    if not out._requires_grad:
        hint = "set requires_grad=True on a leaf, and compute outside of no_grad()"
        raise GraphError("a result of tensors with requires_grad=True", f"{out._brief()}, recorded nowhere", hint)
    if gradient is None:
        if out.size != 1:
            hint = "call .sum() or .mean() first, or pass the gradient of the result"
            raise ShapeError("a scalar, from which a gradient can start", f"shape {out.shape}", hint)
        return array_module(out._data).ones(out.shape, out.dtype)
    return _gradient_like(gradient, "the gradient of a result", out, "one number for each element of the result")


def backward(out: Any, gradient: Any = None, retain_graph: bool = False) -> None:
    """Add d(out)/d(leaf) to ``leaf.grad`` for every leaf that ``out`` was made from, as ``Tensor.backward`` does."""
    Pass(retain_graph=retain_graph).run([(out.node or out, _seed(out, gradient))])


def gradients(
    outputs: Sequence[Any], inputs: Sequence[Any], given: Sequence[Any], retain: bool, create: bool, whole: bool = False
) -> list[Any]:
    """For each input d(outputs)/d(input) as a Tensor, None where none depends on it; ``given`` are those of outputs."""
    edges, seeds = [tensor.node or tensor for tensor in inputs], list(map(_seed, outputs, given))
    work = Pass(create, retain, set(edges), whole)
    work.run([(out.node or out, seed) for out, seed in zip(outputs, seeds, strict=True)])
    found = map(work.found.get, edges)
    return [None if g is None else _as_tensor(g if create else array_module(g).array(g)) for g in found]


def _as_tensor(g: Any) -> Any:
    return g if isinstance(g, core.Tensor) else core.Tensor._wrap(g)
