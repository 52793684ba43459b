"""Many gradients of one graph in a single backward pass: the rows of a Jacobian.

Each gradient gets one more axis in front, along which the rows lie. Rules of elementwise primitives broadcast over it
by themselves. Rules of a primitive that ``stacks`` run as if it had been called on a stack of equal arguments, which
are views: their shapes get the axis too, and axes are counted from the end. Products of matrices have rules of their
own here. A kernel's definition is differentiated in its place. Rules of other primitives run row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minigrad import ops
from minigrad.backend import array_module, array_of, is_array
from minigrad.engine import core
from minigrad.engine.backward import Pass, nodes_behind, with_zeros
from minigrad.engine.broadcast import unbroadcast
from minigrad.engine.core import Node
from minigrad.engine.fused import Fused
from minigrad.engine.plan import Plan, argument_and_fact
from minigrad.tensor import Tensor

MATMUL: Any = ops.matmul
LARGEST = 1 << 22  # numbers in the rows of one gradient: more rows than that go into another pass


def pull_rows(out: Any, variables: Sequence[Any], rows: Any, create_graph: bool) -> list[Any]:
    """For each variable its gradients for ``rows``, a stack of gradients of ``out``; None where it has no part in it.

    They are arrays, or with ``create_graph`` recorded Tensors. Nodes keep what they hold, for another pass.
    """
    edges = [v.node or v for v in variables]
    work = Rows(create_graph, True, set(edges), count=len(rows))
    work.run([(out.node or out, rows)])
    return [work.found.get(edge) for edge in edges]


def at_once(outs: Sequence[Any], hooks: bool) -> int:
    """How many rows or columns go into one pass; 1 where ``hooks`` of the graph wait for single gradients."""
    nodes = nodes_behind([out.node for out in outs], None)
    if hooks and any(edge._hooks for node in nodes for edge in (node, *(node.parents or ()))):
        return 1
    sizes = [math.prod(node.shape) for node in nodes if type(node.dtype) is not tuple]
    return max(1, LARGEST // int(max([1, *sizes])))


@dataclass(eq=False)
class Rows(Pass):
    """A backward pass of ``count`` gradients at once. It keeps the residuals, and owns no gradient."""

    count: int = 1

    def visit(self, node: Node, g: Any) -> None:
        """Run the rules of ``node`` for all rows and hand each gradient to its parent."""
        node.check()
        if type(g) is tuple:
            g = with_zeros(g, node, (self.count,))
        for edge, gradient in zip(node.parents, self.pulled(node, g), strict=True):
            if gradient is not None and (self.receivers is None or edge in self.receivers):
                whole = type(gradient) is tuple
                self.accumulate(edge, gradient if whole else self.fitted(gradient, edge, node.primitive.elementwise))

    def pulled(self, node: Node, g: Any) -> Sequence[Any]:
        """The gradients of the arguments in ``plan.wrt``, with an axis of rows in front of each."""
        primitive = node.primitive
        if isinstance(primitive, Fused):
            return self.by_definition(node, g)
        if primitive is MATMUL:
            return _products(g, node, primitive.rewrap(node) if self.create_graph else node.residuals)
        residuals = None
        if primitive.elementwise or primitive is core._pick or primitive.stacks:
            residuals = primitive.rewrap(node) if self.create_graph else node.residuals
            if primitive.stacks:
                residuals = _stacked(node, residuals, self.count)
        if residuals is None:
            return self.one_by_one(node, g)
        plan: Plan = node.plan
        return plan.gradients(g, residuals)

    def by_definition(self, node: Node, g: Any) -> list[Any]:
        """The gradients of a kernel, by differentiating its definition."""
        inputs, outs = node.primitive.expanded(node)
        work = Rows(self.create_graph, True, {x.node for x in inputs}, inner=True, count=self.count)
        parts = zip(outs, g if type(g) is tuple else (g,), strict=True)
        work.run([(out.node, up) for out, up in parts if isinstance(out, Tensor) and out.requires_grad])
        return [work.found.get(x.node) for x in inputs]

    def one_by_one(self, node: Node, g: Any) -> list[Any]:
        """The gradients of a primitive whose rules take no rows."""
        each = [tuple(part[k] for part in g) if type(g) is tuple else g[k] for k in range(self.count)]
        rows = [node.primitive.run_rules(node, part, self.create_graph) for part in each]
        return [None if found[0] is None else stacked(found) for found in zip(*rows, strict=True)]

    def fitted(self, g: Any, edge: Any, elementwise: bool) -> Any:
        """``g`` in the shape and dtype of ``edge``, with the axis of rows in front."""
        shape = (self.count, *edge.shape)
        if g.shape != shape:
            if elementwise:
                g = unbroadcast(g, (self.count, *(1,) * (g.ndim - len(shape)), *edge.shape))
            g = ops.reshape(g, shape)
        return g if g.dtype == edge.dtype else g.astype(edge.dtype)


def stacked(found: Sequence[Any]) -> Any:
    """Arrays or Tensors of one shape along a new first axis."""
    if any(isinstance(row, Tensor) for row in found):
        return ops.stack(list(found))
    return array_module(found[0]).stack(found)


# ---- stacks of arguments --------------------------------------------------------------------------------------------


def _stacked(node: Node, residuals: Sequence[Any], count: int) -> list[Any] | None:
    """What the node would have kept if called on a stack of ``count`` equal arguments; None where it can't be."""
    primitive, plan = node.primitive, node.plan
    ruled = {i for declared in primitive.rules for i in declared.positions}
    own = [np.ndim(value) for value, i in zip(residuals, plan.sources, strict=True) if i in ruled]
    ndim = max([len(edge.shape) for edge in node.parents] + own)

    def repeated(value: Any, ndim: int) -> Any:
        if not (is_array(array_of(value))):
            return value
        lead = (1,) * (1 + ndim - value.ndim)
        return ops.broadcast_to(ops.reshape(value, (*lead, *value.shape)), (count, *lead[1:], *value.shape))

    def of(name: str, source: int | None, value: Any) -> Any:
        if source == -1:
            return tuple(repeated(v, v.ndim) for v in value) if type(value) is tuple else repeated(value, value.ndim)
        argument, fact = argument_and_fact(name, primitive.position)
        if fact == "shape" and primitive.position[argument] in ruled:
            return (count, *(1,) * (ndim - len(value)), *value)
        if source in ruled:
            return repeated(value, ndim)
        return SHIFTED[name](value, node, ndim) if name in SHIFTED else value

    try:
        return [of(*facts) for facts in zip(plan.names, plan.sources, residuals, strict=True)]
    except LookupError:
        return None


def _axis_from_end(axis: Any, node: Node, ndim: int) -> Any:
    """An axis of a stack, counted from the end; a single number has none."""
    n = max(ndim, len(node.shape)) if type(node.dtype) is not tuple else ndim
    if axis is None and "keepdims" not in node.primitive.position:
        raise LookupError  # it flattens
    if axis is None or n == 0:
        return tuple(range(-n, 0))
    return tuple(a % n - n for a in axis) if isinstance(axis, tuple) else axis % n - n


def _axes_behind_first(axes: Any, node: Node, ndim: int) -> Any:
    order = reversed(range(ndim)) if axes is None else (a % ndim for a in axes)
    return (0, *(a + 1 for a in order))


def _index_behind_first(index: Any, node: Node, ndim: int) -> Any:
    """An index that takes all of the first axis; where arrays in it are apart, NumPy moves their axes to the front."""
    parts = index if isinstance(index, tuple) else (index,)
    arrays = [k for k, part in enumerate(parts) if np.ndim(array_of(part)) or isinstance(part, bool | np.bool_)]
    if arrays and (arrays[-1] - arrays[0] >= len(arrays) or len(arrays) < sum(_counts(part) for part in parts)):
        raise LookupError
    return (slice(None), *parts)


def _counts(part: Any) -> bool:
    """Whether a part of an index belongs to its arrays, as numbers beside an array do."""
    return part is not None and part is not ... and not isinstance(part, slice)


SHIFTED: dict[str, Callable[[Any, Node, int], Any]] = {
    "axis": _axis_from_end,
    "axes": _axes_behind_first,
    "index": _index_behind_first,
}


# ---- products of matrices -------------------------------------------------------------------------------------------


def _products(g: Any, node: Node, residuals: Sequence[Any]) -> list[Any]:
    """The gradients of a matrix product for rows of gradients g."""
    values = dict(zip(node.plan.names, residuals, strict=True))
    return [_left(g, values["y"], edge.shape) if i == 0 else _right(g, values["x"], edge.shape)
            for i, edge in zip(node.plan.wrt, node.parents, strict=True)]  # fmt: skip


def _left(g: Any, y: Any, x_shape: tuple[int, ...]) -> Any:
    """g yᵀ for each row of g."""
    g = ops.expand_dims(g, -1) if y.ndim == 1 else g
    y = ops.expand_dims(y, -1) if y.ndim == 1 else y
    shape = (1, *x_shape) if len(x_shape) == 1 else x_shape
    if len(x_shape) == 1:
        g = ops.expand_dims(g, -2)
    return _without_repeats(ops.matmul(g, ops.swapaxes(y, -1, -2)), shape, x_shape)


def _right(g: Any, x: Any, y_shape: tuple[int, ...]) -> Any:
    """xᵀ g for each row of g."""
    if len(y_shape) == 1:  # a single product of matrices: the sum over all other axes of x
        count = math.prod(x.shape[:-1])
        return ops.matmul(ops.reshape(g, (g.shape[0], count)), ops.reshape(x, (count, x.shape[-1])))
    if x.ndim == 1:
        g, x = ops.expand_dims(g, -2), ops.expand_dims(x, 0)
    return _without_repeats(ops.matmul(ops.swapaxes(x, -1, -2), g), y_shape, y_shape)


def _without_repeats(g: Any, matrix: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """g, rows of stacks of matrices, summed over the axes along which an argument was repeated."""
    rows = g.shape[0]
    full = (rows, *(1,) * (g.ndim - 1 - len(matrix)), *matrix)
    return ops.reshape(g if g.shape == full else unbroadcast(g, full), (rows, *shape))


def left_products(t: Any, y: Any, ndim: int) -> Any:
    """``x @ y`` for each x of the stack t, which have ``ndim`` axes."""
    if ndim == 1 and y.ndim > 2:
        return ops.squeeze(ops.matmul(_with_axes(ops.expand_dims(t, -2), y.ndim + 1), y), -2)
    return ops.matmul(t if ndim == 1 else _with_axes(t, y.ndim + 1), y)


def right_products(t: Any, x: Any, ndim: int) -> Any:
    """``x @ y`` for each y of the stack t, which have ``ndim`` axes."""
    if ndim > 1:
        return ops.matmul(x, _with_axes(t, x.ndim + 1))
    count = math.prod(x.shape[:-1])
    rows = ops.matmul(t, ops.transpose(ops.reshape(x, (count, x.shape[-1])), (1, 0)))
    return ops.reshape(rows, (t.shape[0], *x.shape[:-1]))


def _with_axes(t: Any, ndim: int) -> Any:
    """A stack with axes of length 1 behind its first one, up to ``ndim`` in all."""
    missing = ndim - t.ndim
    return t if missing <= 0 else ops.reshape(t, (t.shape[0], *(1,) * missing, *t.shape[1:]))
