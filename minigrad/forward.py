"""Forward mode: the graph of a function is recorded once, and its nodes are walked upwards with a tangent each.

The tangent of a result is ``Σ J t`` over the arguments. What is J t of a primitive?

- An *elementwise* one has a diagonal J: ``J t`` is its vector-Jacobian rule applied to t.
- A *linear* one is applied to the tangents themselves: ``jointly`` to all at once, ``each`` to one at a time.
- Where ``defjvp`` gave a rule, that rule; for a kernel its definition, walked in the same way.
- Else the reverse rule is taken twice: ``u -> uᵀ J`` is linear in u, and the gradient of ``uᵀ J t`` by u is ``J t``.

Many tangents go in one walk, in a stack, under the same facts as the rows of ``minigrad/rows.py``.

Rules and primitives run on Tensors where the products are to be differentiated again, on arrays where not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from minigrad import ops
from minigrad.backend import array_module, array_of, is_array
from minigrad.engine import core
from minigrad.engine.backward import SETTINGS, gradients, nodes_behind
from minigrad.engine.core import Node, rewrap_value
from minigrad.engine.fused import Fused
from minigrad.engine.plan import FACTS, argument_and_fact
from minigrad.engine.recording import Setting, enable_grad
from minigrad.instruments.observe import Instrument, node_of
from minigrad.rows import MATMUL, SHIFTED, left_products, right_products, stacked
from minigrad.tensor import Tensor


class Calls(Instrument):
    """Notes inside of a ``with`` block what linear operations, and those with a rule of ``defjvp``, were called on.

    A node keeps only what reverse rules read.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.arguments: dict[Node, list[Any]] = {}
        self.results: dict[Node, Any] = {}

    def forward(self, primitive: Any, arguments: list[Any], out: Any, result: Any, started: float) -> None:
        """Note the arguments and the result of an operation under its node."""
        node = node_of(result) if primitive.linear or primitive.forward_rules else None
        if node is not None and threading.get_ident() == self.thread:
            self.arguments[node], self.results[node] = arguments, out


def products(
    outs: Sequence[Any], tangents: Mapping[Any, Any], calls: Calls, create_graph: bool, count: int | None = None
) -> list[Any]:
    """``J t`` for each Tensor of ``outs``, from the tangents of edges; None where it depends on none of them.

    They are arrays, or with ``create_graph`` recorded Tensors. ``calls`` was at work when the graph was recorded. With
    ``count`` each tangent is a stack of so many, along a first axis, and so is each product.
    """
    roots = [out.node or out for out in outs]
    moved: dict[Any, Any] = {edge: t if create_graph else array_of(t) for edge, t in tangents.items()}
    with SETTINGS[create_graph]:
        for node in sorted(nodes_behind(roots, tangents.__contains__), key=lambda n: n.number):
            given = [moved.get(edge) for edge in node.parents or ()]
            if node.parents is None or any(t is not None for t in given):
                node.check()
                moved[node] = _Step(node, calls, create_graph, count).pushed(given)
    return [moved.get(root) for root in roots]


class _Step(NamedTuple):
    """How tangents pass one node: one tangent, or ``many`` in a stack."""

    node: Node
    calls: Calls
    create_graph: bool
    many: int | None

    def pushed(self, given: Sequence[Any]) -> Any:
        """The tangent of the result, a tuple where there are several, from those of the parents."""
        node, primitive = self.node, self.node.primitive
        if primitive is core._pick:
            return given[0][node.residuals[0]]
        if isinstance(primitive, Fused):
            return _by_definition(node, given, self.create_graph, self.many)
        if primitive.elementwise:
            spread = [None if t is None else self.spread(t, node.shape, node.dtype) for t in given]
            return self.in_shape(_sum(_elementwise(node, spread, self.create_graph)))
        if self.many is not None:
            found = _stack_of_linear(self, given)
            return self.one_by_one(given) if found is None else self.in_shape(found)
        known = node in self.calls.arguments
        if primitive.linear and known:
            return self.in_shape(_sum(_linear(self, given)))
        ruled = {declared.positions[0]: declared for declared in primitive.forward_rules if known}
        pairs = list(zip(node.plan.wrt, given, strict=True))
        total = [_by_rule(self, ruled[i], t) for i, t in pairs if i in ruled and t is not None]
        rest = [None if i in ruled else t for i, t in pairs]
        if any(t is not None for t in rest):
            total.append(_twice_reversed(node, rest, self.create_graph))
        return self.in_shape(_sum(iter(total)))

    def one_by_one(self, given: Sequence[Any]) -> Any:
        """The products with a stack of tangents, one after the other."""
        alone, whole = self._replace(many=None), type(self.node.dtype) is tuple
        found = [alone.pushed([None if t is None else t[k] for t in given]) for k in range(self.many or 0)]
        return tuple(stacked(rows) for rows in zip(*found, strict=True)) if whole else stacked(found)

    def in_shape(self, t: Any) -> Any:
        """``t`` in the shape and dtype of the node's result."""
        node = self.node
        if type(node.dtype) is tuple:
            return tuple(self.spread(part, *facts) for part, *facts in zip(t, node.shape, node.dtype, strict=True))
        return self.spread(t, node.shape, node.dtype)

    def spread(self, t: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """``t`` broadcast to this shape, which each element of a stack gets, and cast to the dtype."""
        if self.many is not None:
            missing = len(shape) + 1 - t.ndim
            shape = (self.many, *shape)
            t = ops.reshape(t, (t.shape[0], *(1,) * missing, *t.shape[1:])) if missing > 0 else t
        t = t if np.shape(t) == shape else ops.broadcast_to(t, shape)
        return t if t.dtype == dtype else t.astype(dtype)


def _sum(terms: Iterator[Any]) -> Any:
    total = next(terms)
    for term in terms:
        whole = type(term) is tuple
        total = tuple(a + b for a, b in zip(total, term, strict=True)) if whole else total + term
    return total


def _elementwise(node: Node, given: Sequence[Any], create_graph: bool) -> Iterator[Any]:
    """Each reverse rule applied to the tangent of its argument."""
    residuals, rest = node.primitive.rewrap(node) if create_graph else node.residuals, iter(given)
    for rule, where, picks in node.plan.calls:
        for k in (None,) if picks is None else picks:
            t = next(rest)
            if t is not None:
                found = rule(t, *(residuals if where is None else [residuals[k] for k in where]))
                yield found if k is None else found[k]


def _linear(step: _Step, given: Sequence[Any]) -> Iterator[Any]:
    """The primitive applied to the tangents, each in the place of its argument."""
    node, arguments = step.node, step.calls.arguments[step.node]
    tangents = dict(zip(node.plan.wrt, given, strict=True))
    moving = [i for i, t in tangents.items() if t is not None]
    if node.primitive.linear == "each":
        values = [_as_recorded(node, i, value) if step.create_graph else value for i, value in enumerate(arguments)]
        yield from (node.primitive(*[tangents[i] if k == i else v for k, v in enumerate(values)]) for i in moving)
        return
    ruled = {i for declared in node.primitive.rules for i in declared.positions}
    still = [v if i not in ruled else _zeros(v) if is_array(v) else 0.0 for i, v in enumerate(arguments)]
    yield node.primitive(*[tangents[i] if i in moving else v for i, v in enumerate(still)])


def _stack_of_linear(step: _Step, given: Sequence[Any]) -> Any:
    """A linear primitive applied to stacks of tangents; None where it isn't linear, or takes no stacks."""
    node, primitive = step.node, step.node.primitive
    if node not in step.calls.arguments:
        return None
    arguments = step.calls.arguments[node]
    if primitive is MATMUL:
        values = [_as_recorded(node, i, value) if step.create_graph else value for i, value in enumerate(arguments)]
        pairs = zip(node.plan.wrt, given, strict=True)
        sides = (left_products, right_products)
        return _sum(sides[i](t, values[1 - i], np.ndim(arguments[i])) for i, t in pairs if t is not None)
    if not (primitive.stacks and primitive.linear == "jointly"):
        return None
    ruled = {i for declared in primitive.rules for i in declared.positions}
    ndim = max(np.ndim(arguments[i]) for i in ruled)
    tangents = dict(zip(node.plan.wrt, given, strict=True))

    def stack_of(i: int, value: Any) -> Any:
        if i not in ruled:
            name = primitive.names[i]
            shifted = SHIFTED[name](value, node, ndim) if name in SHIFTED else value
            return (step.many, *node.shape) if name == "shape" else shifted
        t = tangents.get(i)
        return array_module(value).zeros((step.many, *np.shape(value)), node.dtype) if t is None else t

    try:
        return primitive(*[stack_of(i, value) for i, value in enumerate(arguments)])
    except LookupError:
        return None


def _as_recorded(node: Node, position: int, value: Any) -> Any:
    """An argument of a node as the Tensor that it was, if a gradient flows through it."""
    wrt = node.plan.wrt
    return rewrap_value(value, node.parents[wrt.index(position)], ()) if position in wrt else value


def _by_rule(step: _Step, declared: Any, t: Any) -> Any:
    """A rule of ``defjvp``, applied to the tangent of its argument and to what it reads."""
    node, calls, create_graph, _ = step
    arguments, positions = calls.arguments[node], node.primitive.position

    def value(name: str) -> Any:
        if name == "out":
            return rewrap_value(calls.results[node], node, ()) if create_graph else calls.results[node]
        argument, fact = argument_and_fact(name, positions)
        found = arguments[positions[argument]]
        if fact:
            return FACTS[fact](found)
        return _as_recorded(node, positions[argument], found) if create_graph else found

    return declared.rule(t, *map(value, declared.reads))


def _by_definition(node: Node, given: Sequence[Any], create_graph: bool, count: int | None) -> Any:
    """The definition of a kernel is recorded at its arguments and walked upwards."""
    with Setting(recording=True), Calls() as calls:
        inputs, outs = node.primitive.expanded(node)
        tangents = {x.node: t for x, t in zip(inputs, given, strict=True) if t is not None}
    found = products(outs, tangents, calls, create_graph, count)
    full = [_zeros(out, count) if t is None else t for t, out in zip(found, outs, strict=True)]
    return tuple(full) if type(node.dtype) is tuple else full[0]


def _twice_reversed(node: Node, given: Sequence[Any], create_graph: bool) -> Any:
    """The gradient of ``uᵀ J t`` by u, for a u that has no influence since ``uᵀ J`` is linear in it."""
    several = type(node.dtype) is tuple
    facts = list(zip(node.shape, node.dtype, strict=True)) if several else [(node.shape, node.dtype)]
    device = next(t for t in given if t is not None)
    u = [Tensor._wrap(array_module(array_of(device)).zeros(shape, dtype)) for shape, dtype in facts]
    for part in u:
        part.requires_grad = part.dtype.kind not in "biu"
    with enable_grad():
        pulled = node.primitive.run_rules(node, tuple(u) if several else u[0], True)
    pairs = [(p, t) for p, t in zip(pulled, given, strict=True) if t is not None and getattr(p, "requires_grad", False)]
    inputs = [part for part in u if part.requires_grad]
    found = gradients([p for p, _ in pairs], inputs, [t for _, t in pairs], True, create_graph)
    rest = iter(
        [_zeros(x) if f is None else f if create_graph else array_of(f) for f, x in zip(found, inputs, strict=True)]
    )
    full = [next(rest) if part.requires_grad else _zeros(part) for part in u]
    return tuple(full) if several else full[0]


def _zeros(like: Any, count: int | None = None) -> Any:
    lead = () if count is None else (count,)
    return array_module(array_of(like)).zeros((*lead, *like.shape), like.dtype)
