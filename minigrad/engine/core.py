"""The engine: how an operation on arrays becomes differentiable, and what is remembered of it.

Read it as a lecture, before ``backward.py``, its second half.

1. **Node**: what is remembered of one operation: its primitive, its parents, and the few arrays that its derivative
   will read (the *residuals*).
2. **Primitive**: a function on arrays with derivative rules. A rule's parameter names *are* its residuals::

       @elementwise()
       def multiply(x, y):
           return x * y

       multiply.defvjp(lambda g, y: g * y, lambda g, x: g * x)

   The first rule, for ``x``, reads ``g`` (the gradient of the result) and ``y``; so ``y`` is kept, if ``x`` needs a
   gradient at all. A name may be an argument, ``out`` (the result), ``<arg>_shape``, ``<arg>_dtype``,
   ``<arg>_device``, or ``needs`` (for each argument with a rule: does it need a gradient). Rules are written with
   operators and primitives, so the same rule runs on raw arrays and, for higher derivatives, on Tensors.

   A function of a list of arrays (``sequence=True``) has one rule, which returns a list of gradients. A function with
   several results returns a tuple; its rule gets the tuple of their gradients.

Every primitive is entered into the registry of ``registry.py``. Results are Tensors; the class itself is in
``tensor.py``, which is built on this file and hands the class back through ``connect``. That knot is the only one.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from minigrad.backend import is_floating
from minigrad.engine.plan import Plan, Rule, legal_names, make_plan, residual_names
from minigrad.engine.recording import cast, mode
from minigrad.engine.registry import Operation, register
from minigrad.errors import CallError, GraphError, MiniGradError
from minigrad.messages.arguments import as_operand, as_operands
from minigrad.messages.explain import FOREIGN, explain, is_clear, wrong_call

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])

observers: list[Observer] = []  # instruments at work; the engine tells them of each operation
Tensor: Any = ()  # the class, once tensor.py is imported
PLAIN = frozenset({float, int, bool})  # what an operation takes without a look at it
node_ids = itertools.count()  # the order in which nodes are made


def connect(tensor_class: type) -> None:
    """Hand over the class of which all results are instances."""
    global Tensor
    Tensor = tensor_class


# ---- 1. what is remembered of an operation --------------------------------------------------------------------------


class Node:
    """One recorded operation. Holds arrays, never Tensors (leaves apart), so a graph has no reference cycles.

    parents    for each argument that needs a gradient: the Node that made it, or the leaf Tensor itself
    residuals  what the rules will read, in the order of ``plan.names``
    versions   (counter, its value at recording, position or -1 for the result) of each Tensor among the residuals
    """

    __slots__ = ("dtype", "hooks", "note", "number", "parents", "plan", "primitive", "residuals", "shape", "versions")

    def __init__(self, primitive: Any, plan: Any, parents: Any, residuals: Any, shape: Any, dtype: Any) -> None:
        self.number = next(node_ids)
        self.primitive = primitive
        self.plan = plan
        self.parents = parents
        self.residuals = residuals
        self.versions: Any = ()
        self.shape = shape  # of the result; a tuple of shapes where there are several
        self.dtype = dtype
        self.hooks: list[Callable[[Any], Any]] | None = None
        self.note: Any = None  # belongs to the observers

    def release(self) -> None:
        """Let go of all that was kept; a later backward pass through here is refused."""
        self.parents = self.residuals = self.versions = self.note = None

    def check(self) -> None:
        """Refuse to run on a freed graph, or on residuals that changed after they were recorded."""
        if self.parents is None:
            raise GraphError(
                "a graph that still holds what its derivatives read",
                f"a second backward pass through {self.primitive.label!r}, freed by the first",
                "call backward(retain_graph=True) the first time, or run the forward pass again",
            )
        for counter, count, position in self.versions:
            if counter[0] != count:
                raise GraphError(
                    f"{self._label(position)} as it was in the forward pass of {self.primitive.label!r}",
                    f"data changed since (version {counter[0]}, recorded at {count})",
                    "run backward before the optimizer step, load_state_dict or assignment to .data",
                )

    def _label(self, position: int) -> str:
        """What the user may call the argument at ``position``: the leaf's name, seen through views, and its own."""
        if position < 0:
            return "the result"
        edge = self.parents[self.plan.wrt.index(position)] if position in self.plan.wrt else None
        while isinstance(edge, Node) and edge.primitive.view and edge.parents:
            edge = edge.parents[0]
        own = f"tensor {edge.name!r}, " if isinstance(edge, Tensor) and edge.name else ""
        return f"{own}{self.primitive.argument(position)}"


# ---- who is told of operations ---------------------------------------------------------------------------------------


class Observer:
    """What an instrument may hear of. Append one to ``observers``; it must not change what it is shown.

    ``started`` is when what it is told of began, on the clock of ``time.perf_counter``; it has just ended.
    """

    def read(self, values: Sequence[Any]) -> None:
        """An operation, of which ``forward`` has told, ran on these values, Tensors among them."""

    def forward(self, primitive: Any, arguments: list[Any], out: Any, result: Any, started: float) -> None:
        """An operation ran: its arguments and result as arrays, and the Tensor (or tuple) that it gave."""

    def backward(self, node: Node, g: Any, gradients: list[Any], started: float) -> None:
        """A node's rules ran: the gradient that came in, and those of ``node.parents``."""

    def definition(self, primitive: Any, started: float) -> None:
        """A fused operation ran as its definition, since no kernel takes its arguments; its parts were told before."""


def notify(event: str, *facts: Any) -> None:
    """Call the method ``event`` of each observer; the list is copied, since one may come or go while it is told."""
    for observer in tuple(observers):
        getattr(observer, event)(*facts)


# ---- 2. primitives --------------------------------------------------------------------------------------------------


class Primitive(Operation[P]):
    """A function on arrays that knows its derivatives. With a Tensor among its arguments it records a Node.

    elementwise  its arguments are broadcast; the rules need not undo that
    view         its result may share memory with its first argument
    sequence     its first argument is a list of arrays, and its one rule returns a list of gradients
    precision    under autocast: "low" for products, "wide" for sums and what is made of them
    scales_losses  gradients behind it may overflow half precision, which GradScaler looks for
    """

    scales_losses = False

    def __init__(
        self,
        function: Callable[P, Any],
        *,
        elementwise: bool = False,
        view: bool = False,
        sequence: bool = False,
        precision: str | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(function, **facts)
        self.elementwise, self.view, self.sequence, self.precision = elementwise, view, sequence, precision
        parameters = self.parameters.values()
        if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
            raise CallError("plain parameters", f"{self.name}{inspect.signature(function)}", "no *args, / or *")
        self.position = {name: i for i, name in enumerate(self.parameters)}
        self.names = tuple(self.parameters)
        self.defaults = tuple(p.default for p in parameters)
        self.required = sum(p.default is p.empty for p in parameters)
        if sequence:
            self.checks[self.names[0]] = as_operands
        self.rules: list[tuple[tuple[int, ...], Rule, bool]] = []  # positions covered, rule, joint?
        self.plans: dict[Any, Plan | None] = {}

    def argument(self, position: int) -> str:
        """What a text calls the argument at ``position``, those of a leading list by its name."""
        return f"argument {self.names[0 if self.sequence else position]!r}"

    # -- declaring derivatives --

    def defvjp(self, *rules: Rule | None, **named: Rule) -> Primitive[P]:
        """Give the vector-Jacobian products of the leading arguments in order (None: no derivative), or by name."""
        names = list(self.position)
        for name, rule in [*zip(names, rules, strict=False), *named.items()]:
            if rule is not None:
                self._add_rule((name,), rule, joint=self.sequence)
        return self

    def defjoint(self, *names: str) -> Callable[[F], F]:
        """Decorate one rule that returns the gradients of several arguments, as a tuple in the order of ``names``."""

        def declare(rule: F) -> F:
            self._add_rule(names, rule, joint=True)
            return rule

        return declare

    def _add_rule(self, names: tuple[str, ...], rule: Rule, joint: bool) -> None:
        legal = legal_names(self.position)
        unknown = [name for name in residual_names(rule) if name not in legal]
        if (unknown and not self._extras_allowed()) or not set(names) <= set(self.position):
            hint = "the parameters of a rule, after the first, name what it reads"
            raise CallError(f"rules of {self.name!r} that read {sorted(legal)}", f"{unknown or names}", hint)
        for name in names:
            self.checks.setdefault(name, as_operand)
        self.rules.append((tuple(self.position[name] for name in names), rule, joint))
        self.plans.clear()

    def _extras_allowed(self) -> bool:
        return False

    # -- the forward call --

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        if self.precision and mode.autocast:
            args, kwargs = cast(self._bind(args, kwargs), self.precision), {}  # type: ignore[assignment]
        values: Any = args if not kwargs and len(args) == len(self.defaults) else self._bind(args, kwargs)
        count, optional = 0, self.required - self.sequence  # None may stand from there on
        if self.sequence:
            listed = self.checked(values[0], self.names[0])
            count = len(listed)
            values = (*listed, *values[1:])
        raw: list[Any] = []
        wrt: list[int] = []
        tensors = False
        for position, value in enumerate(values):
            if isinstance(value, Tensor):
                tensors = True
                raw.append(value._data)
                if value._requires_grad:
                    wrt.append(position)
            elif type(value) in PLAIN or position < count or (value is None and position - count >= optional):
                raw.append(value)
            else:
                raw.append(self.checked(value, self.names[position - count + 1 if count else position], values))
        started = time.perf_counter() if observers else 0.0
        plan = self._plan(tuple(wrt), count) if wrt and mode.recording else None
        try:
            out, extras = self._run(raw, count, plan)
        except FOREIGN as error:
            if is_clear(self, error):
                raise
            raise self._at_fault(raw, count, error) from None
        if not tensors:
            return out
        result = self._record(plan, values, raw, out, extras)
        if observers:
            notify("forward", self, raw, out, result, started)
            notify("read", values)
        return result

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        values = [*args, *self.defaults[len(args) :]]
        for name, value in kwargs.items():
            if self.position.get(name, -1) < len(args):
                raise wrong_call(self, args, kwargs)
            values[self.position[name]] = value
        if len(values) > len(self.defaults) or any(v is inspect.Parameter.empty for v in values[: self.required]):
            raise wrong_call(self, args, kwargs)
        return values

    def _at_fault(self, raw: list[Any], count: int, error: Exception) -> MiniGradError:
        """What the user is told of an error from inside: the argument at fault, or else the whole call."""
        values = [raw[:count], *raw[count:]] if self.sequence else raw
        arguments = dict(zip(self.names, values, strict=True))
        try:
            for name, value in arguments.items():
                if value is not self.parameters[name].default:
                    self.checked(value, name)
        except MiniGradError as fault:
            return fault.with_traceback(None)
        return explain(self, arguments, getattr(error, "source", None) or error)

    def _run(self, raw: list[Any], count: int, plan: Plan | None) -> tuple[Any, dict[str, Any]]:
        """The result on arrays, and what a kernel kept besides, by name."""
        return (self.function(raw[:count], *raw[count:]) if self.sequence else self.function(*raw)), {}

    def _record(self, plan: Plan | None, values: Any, raw: Any, out: Any, extras: Any) -> Any:
        """The result as a Tensor, with a Node where a plan says what to keep."""
        if type(out) is tuple:
            return self._record_several(plan, values, raw, out, extras)
        result = Tensor._wrap(out)
        out = result._data
        if self.view and isinstance(values[0], Tensor) and _is_view(out, raw[0]):
            result._version = values[0]._version
        if plan is not None and is_floating(out.dtype):
            node = self._make_node(plan, values, raw, out, extras, out.shape, out.dtype)
            attach(result, node)
            if plan.watches_out:
                node.versions.append((result._version, result._version[0], -1))
        return result

    def _record_several(self, plan: Plan | None, values: Any, raw: Any, out: Any, extras: Any) -> tuple[Any, ...]:
        results = tuple(Tensor._wrap(piece) for piece in out)
        if plan is not None:
            shapes, dtypes = tuple(r.shape for r in results), tuple(r.dtype for r in results)
            attach_several(results, self._make_node(plan, values, raw, out, extras, shapes, dtypes))
        return results

    def _make_node(self, plan: Plan, values: Any, raw: Any, out: Any, extras: Any, shape: Any, dtype: Any) -> Node:
        parents = tuple([values[i].node or values[i] for i in plan.wrt])
        node = Node(self, plan, parents, [fetch(raw, out, extras) for fetch in plan.fetch], shape, dtype)
        node.versions = [
            (values[i]._version, values[i]._version[0], i) for i in plan.watched if isinstance(values[i], Tensor)
        ]
        return node

    def _plan(self, wanted: tuple[int, ...], count: int) -> Plan | None:
        key = (wanted, count)
        if key not in self.plans:
            self.plans[key] = make_plan(self, wanted, count)
        return self.plans[key]

    def kept_besides(self) -> tuple[str, ...]:
        """Names that a node keeps even if no rule reads them."""
        return ()

    # -- the backward call --

    def run_rules(self, node: Node, g: Any, create_graph: bool) -> list[Any]:
        """The gradients of the arguments in ``plan.wrt``, from the gradient ``g`` of the result."""
        residuals = self.rewrap(node) if create_graph else node.residuals
        gradients: list[Any] = []
        for rule, where, picks in node.plan.calls:
            value = rule(g, *[residuals[k] for k in where])
            if picks is None:
                gradients.append(value)
            else:
                gradients += [value[k] for k in picks]
        return gradients

    def rewrap(self, node: Node) -> list[Any]:
        """The residuals with Tensors, connected to the graph, in place of the arrays through which a gradient flows."""
        residuals = list(node.residuals)
        for k, index in node.plan.rewraps:
            residuals[k] = connected(residuals[k], node.parents[index])
        for k, name in enumerate(node.plan.names):
            if name == "out":
                residuals[k] = _connected_result(residuals[k], node)
            elif self.sequence and self.position.get(name) == 0:
                edges = dict(zip(node.plan.wrt, node.parents, strict=True))
                residuals[k] = [connected(a, edges[i]) if i in edges else a for i, a in enumerate(residuals[k])]
        return residuals


# ---- results and the nodes behind them -------------------------------------------------------------------------------


def _is_view(out: Any, x: Any) -> bool:
    """Whether ``out``, the result of a view operation on ``x``, shares its memory: a view's base is what owns that."""
    return out is x or (out.base is not None and (out.base is x or out.base is x.base))


def attach(result: Any, node: Node) -> Any:
    """Make ``node`` the origin of the Tensor ``result``."""
    result.node, result._requires_grad = node, True
    return result


def attach_several(results: Sequence[Any], node: Node) -> None:
    """Make ``node`` the origin of several Tensors, each through a node that picks its place."""
    for place, result in enumerate(results):
        if is_floating(result.dtype):
            attach(result, Node(_pick, _pick_plan, (node,), [place, len(results)], result.shape, result.dtype))


def connected(array: Any, edge: Any) -> Any:
    """``array`` as the Tensor that ``edge``, a Node or a leaf, stands for."""
    return edge if isinstance(edge, Tensor) else attach(Tensor._wrap(array), edge)


def _connected_result(out: Any, node: Node) -> Any:
    """The result of ``node``, or the tuple of its results, as Tensors that stand for it in the graph."""
    if type(out) is not tuple:
        return connected(out, node)
    results = tuple(Tensor._wrap(piece) for piece in out)
    attach_several(results, node)
    return results


# ---- decorators that make and register a primitive -------------------------------------------------------------------


@overload
def primitive(function: Callable[P, Any]) -> Primitive[P]: ...
@overload
def primitive(**facts: Any) -> Callable[[Callable[P, Any]], Primitive[P]]: ...
def primitive(function: Callable[..., Any] | None = None, **facts: Any) -> Any:
    """Make a function on arrays a registered :class:`Primitive`: ``@primitive`` or ``@primitive(view=True, ...)``.

    >>> import minigrad as mg
    >>> @mg.primitive
    ... def cube(x):
    ...     return x**3
    >>> _ = cube.defvjp(lambda g, x: g * 3 * x**2)
    >>> x = mg.Tensor(2.0, requires_grad=True)
    >>> cube(x).backward(); print(x.grad)
    12.0
    """
    if function is None:
        return lambda f: register(Primitive(f, **facts))
    return register(Primitive(function, **facts))


def elementwise(**facts: Any) -> Callable[[Callable[P, Any]], Primitive[P]]:
    """A primitive that acts on each element after broadcasting its arguments, whose rules need not undo that."""
    return lambda function: register(Primitive(function, elementwise=True, **facts))


# ---- the operation that picks one of several results -----------------------------------------------------------------


_pick = Primitive(lambda results, place, count: results[place])
_pick.name = _pick.label = "pick"


def _pick_rule(g: Any, place: int, count: int) -> tuple[Any, ...]:
    """The gradient of a tuple of which one place was used; the places left None are filled in by the pass."""
    return tuple(g if k == place else None for k in range(count))


_pick_plan = Plan(wrt=(0,), names=("place", "count"), calls=((_pick_rule, (0, 1), None),))
