"""The engine makes operations on arrays differentiable and remembers them. ``backward.py`` then finds the gradients.

This file is the first half of a lecture, ``backward.py`` the second.

1. A **Node** remembers one operation: its primitive, its parents, and the few arrays that its derivative will read
   (the *residuals*).
2. A **Primitive** is a function on arrays with derivative rules. A rule's parameter names *are* its residuals::

       @elementwise()
       def multiply(x, y):
           return x * y

       multiply.defvjp(lambda g, y: g * y, lambda g, x: g * x)

   The first rule gives the gradient of ``x``. It reads ``g`` (the gradient of the result) and ``y``, so a node keeps
   ``y``, if ``x`` needs a gradient at all. A name may be an argument, ``out`` (the result), ``<arg>_shape``,
   ``<arg>_dtype``, ``<arg>_device``, or ``needs`` (which arguments with a rule need a gradient). Rules use operators
   and primitives alone, so the same rule runs on raw arrays and, for higher derivatives, on Tensors.

   A function of a list of arrays (``@primitive(sequence=True)``) has one rule, which returns a list of gradients. A
   function with several results returns a tuple; its rule gets the tuple of their gradients.

``registry.py`` lists every primitive. Results are Tensors. Their class is in ``tensor.py``, which imports this file and
sets ``core.Tensor``; no other module is tied back like this.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from numpy import ndarray

from minigrad.backend import cast_narrow, is_floating
from minigrad.engine.plan import DeclaredRule, Plan, Rule, argument_and_fact, is_legal, make_plan, names_read
from minigrad.engine.recording import F, current_mode
from minigrad.engine.registry import PLAIN, Operation, P, register
from minigrad.errors import CallError
from minigrad.messages.arguments import as_list, as_operand
from minigrad.messages.explain import FOREIGN, explanation, wrong_call
from minigrad.messages.graphs import changed, freed

observers: list[Observer] = []  # instruments at work, which the engine notifies of each operation
Tensor: Any = ()  # the class of all results; tensor.py sets it
node_ids = itertools.count()  # the order in which nodes are made


# ---- 1. the memory of an operation -----------------------------------------------------------------------------------


class Node:
    """One recorded operation. It holds arrays, and no Tensors but leaves, so a graph has no reference cycles.

    parents    for each argument that needs a gradient the edge that leads to it: the Node that made it, or the leaf
    residuals  the values that the rules will read, in the order of ``plan.names``
    versions   (counter, its value at recording, position or -1 for the result) of each Tensor among the residuals; the
               counter is a list of one number, which a Tensor and its views share, raised when the data is replaced
    _oldest    the least number of a leaf behind it; that is 0 unless a transform made the leaf
    """

    # fmt: off
    __slots__ = ("_hooks", "_oldest", "dtype", "note", "number", "parents", "plan", "primitive", "residuals", "shape",
                 "versions")
    # fmt: on
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @staticmethod
    def of(primitive: Any, plan: Any, parents: Any, residuals: Any, shape: Any, dtype: Any, versions: Any = ()) -> Any:
        """A new node: ``shape`` and ``dtype`` of the result are tuples where there are several."""
        node: Any = Node()  # a class with a constructor takes half as long again
        node.number = oldest = next(node_ids)
        for edge in parents:
            oldest = edge._oldest if edge._oldest < oldest else oldest
        node.primitive, node.plan, node.parents, node.residuals = primitive, plan, parents, residuals
        node.versions, node._oldest, node.shape, node.dtype = versions, oldest, shape, dtype
        node._hooks = node.note = None  # the note belongs to the observers
        return node

    def release(self) -> None:
        """Free everything that was kept. A later backward pass through this node is refused."""
        nothing: Any = None
        self.parents = self.residuals = self.versions = self.note = nothing

    def check(self) -> None:
        """Refuse to run on a freed graph, or on residuals that changed after they were recorded."""
        if self.parents is None:
            raise freed(self.primitive.label)
        for counter, count, position in self.versions:
            if counter[0] != count:
                raise changed(self._label(position), self.primitive.label, count, counter[0])

    def _label(self, position: int) -> str:
        """A name for the argument at ``position``: that of the leaf behind its views, and that of the parameter."""
        if position < 0:
            return "the result"
        edge = behind_views(self.parents[self.plan.wrt.index(position)] if position in self.plan.wrt else None)
        own = f"tensor {edge.name!r}, " if isinstance(edge, Tensor) and edge.name else ""
        return f"{own}{self.primitive.argument(position)}"


def behind_views(edge: Any) -> Any:
    """The leaf or the Node from which ``edge`` was made by views alone; itself where it is no view."""
    while isinstance(edge, Node) and edge.primitive.view and edge.parents:
        edge = edge.parents[0]
    return edge


# ---- observers -------------------------------------------------------------------------------------------------------


class Observer:
    """The events that an instrument can receive. Append it to ``observers``. It must not change what it is shown.

    Each event has just ended; ``started`` is the time when it began, on the clock of ``time.perf_counter``.
    """

    def read(self, values: Sequence[Any]) -> None:
        """These values, Tensors among them, were read: by the operation of the last ``forward``, or as numbers."""

    def forward(self, primitive: Any, arguments: list[Any], out: Any, result: Any, started: float) -> None:
        """An operation ran: its arguments and result as arrays, and the Tensor (or tuple) that it gave."""

    def backward(self, node: Node, g: Any, gradients: list[Any], started: float) -> None:
        """A node's rules ran: the gradient that came in, and those of ``node.parents``."""

    def definition(self, primitive: Any, started: float) -> None:
        """A fused operation ran as its definition, since no kernel takes its arguments. Its parts came before."""


def notify(event: str, *details: Any) -> None:
    """Call the method ``event`` of each observer. The list is copied, since an event may add or remove one."""
    for observer in tuple(observers):
        getattr(observer, event)(*details)


# ---- 2. primitives --------------------------------------------------------------------------------------------------


class Primitive(Operation[P]):
    """A function on arrays that knows its derivatives. With a Tensor among its arguments it records a Node.

    elementwise      its arguments are broadcast; the backward pass undoes that, the rules need not
    view             its result may share memory with its first argument
    scales_losses    gradients behind it may overflow half precision, which GradScaler looks for
    keeps_arguments  a node keeps all arguments, and rules may read what the function kept besides
    """

    _run: Any  # of (arrays, plan), where ``keeps_arguments``: the result, and by name what a kernel kept besides

    def __init__(self, function: Callable[P, Any], elementwise: bool = False, view: bool = False, **facts: Any) -> None:
        super().__init__(function, **facts)
        self.elementwise, self.view, self.scales_losses, self.keeps_arguments = elementwise, view, False, False
        parameters = self.parameters.values()
        if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
            raise CallError("plain parameters", f"{self.name}{inspect.signature(function)}", "no *args, / or *")
        self._take({p.name: p.default for p in parameters})

    def _take(self, arguments: Mapping[str, Any]) -> None:
        """Note the names of the arguments and their defaults."""
        self.names, self.defaults = tuple(arguments), tuple(arguments.values())
        self.position, self.most = {name: i for i, name in enumerate(arguments)}, len(arguments)
        self.required = sum(default is inspect.Parameter.empty for default in self.defaults)
        self.rules: list[DeclaredRule] = []
        self.forward_rules: list[DeclaredRule] = []
        self.plans: dict[Any, Any] = {}

    def argument(self, position: int) -> str:
        """The name of the argument at ``position`` in the text of an error."""
        return f"argument {self.names[position]!r}"

    # -- declaring derivatives --

    def defvjp(self, *rules: Rule | None, **named: Rule) -> Primitive[P]:
        """Give the vector-Jacobian products of the leading arguments in order, or by name; None: the derivative is 0.

        A recorded tensor for an argument without a rule is refused, so that no derivative is lost.
        """
        self.constants = {name for name, rule in zip(self.names, rules, strict=False) if rule is None}
        return self._add_rules(self.rules, rules, named)

    def defjvp(self, *rules: Rule | None, **named: Rule) -> Primitive[P]:
        """Give Jacobian-vector products: a rule's first parameter is its argument's tangent; the products are summed.

        Elementwise and linear primitives need no such rule. Forward mode works without it elsewhere too, slowly.
        """
        return self._add_rules(self.forward_rules, rules, named)

    def defjoint(self, *names: str) -> Callable[[F], F]:
        """Decorate one rule that returns the gradients of several arguments, as a tuple in the order of ``names``."""

        def declare(rule: F) -> F:
            self._add_rule(self.rules, names, rule, joint=True)
            return rule

        return declare

    def _add_rules(self, among: list[DeclaredRule], rules: Any, named: Any) -> Primitive[P]:
        places = (*self.names, *["one rule too many"] * len(rules))  # which is the name of no argument
        for name, rule in [*zip(places, rules, strict=False), *named.items()]:
            if rule is not None:
                self._add_rule(among, (name,), rule)
        return self

    def _add_rule(self, among: list[DeclaredRule], names: tuple[str, ...], rule: Rule, joint: bool = False) -> None:
        reads = names_read(rule)
        unknown = [name for name in reads if not is_legal(name, self.position)]
        if (unknown and not self.keeps_arguments) or not set(names) <= set(self.position):
            legal = f"{sorted(self.names)}, their _shape, _dtype or _device, out or needs"
            hint = "the parameters of a rule, after the first, name what it reads"
            raise CallError(f"rules of {self.name!r} that read {legal}", f"{unknown or names}", hint)
        for name in names:
            self.checks.setdefault(name, as_operand)
        among.append(DeclaredRule(tuple(self.position[name] for name in names), rule, reads, joint))
        self.plans.clear()

    # -- the forward call --

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        if self.precision and current_mode().autocast:
            args, kwargs = self._cast(self._bind(args, kwargs)), {}  # type: ignore[assignment]
        values: Any = args if not kwargs and len(args) == self.most else self._bind(args, kwargs)
        raw, wrt, tensors = [*values], 0, False  # wrt has a bit for each argument that needs a gradient
        for i, value in enumerate(values):
            if (kind := type(value)) is not Tensor and (kind in PLAIN or (kind is ndarray and value.dtype in PLAIN)):
                continue
            if isinstance(value, Tensor):
                tensors, raw[i] = True, value._data
                if value._requires_grad:
                    wrt |= 1 << i
            else:
                raw[i] = array = self._checked_at(i, values)
                if isinstance(array, Tensor):  # made of a list with Tensors in it
                    return self(*values[:i], array, *values[i + 1 :])  # type: ignore[call-arg]
        plan: Plan | None = None
        if wrt and current_mode().recording and (plan := self.plans.get(wrt, False)) is False:
            plan = self.plans[wrt] = make_plan(self, {i for i in range(len(values)) if wrt >> i & 1})
        started = time.perf_counter() if observers else 0.0
        try:
            out, extras = self._run(raw, plan) if self.keeps_arguments else (self.function(*raw), None)
        except FOREIGN as error:
            raise explanation(self, values, {}, error)  # noqa: B904
        if not tensors:
            return out
        result = self._record(plan, values, raw, out, extras)
        if observers:
            notify("forward", self, raw, out, result, started)
            notify("read", values)
        return result

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """All arguments in their order, defaults included; an error where the call doesn't fit the signature."""
        n = len(args)
        if self.required <= n <= len(self.names) and not kwargs:
            return args + self.defaults[n:]
        values = [*args, *map(kwargs.get, self.names[n:], self.defaults[n:])]
        unknown = any(self.position.get(name, -1) < n for name in kwargs)
        if unknown or n > len(self.names) or any(v is inspect.Parameter.empty for v in values[n : self.required]):
            raise wrong_call(self, args, kwargs)
        return values

    def _checked_at(self, i: int, values: Sequence[Any]) -> Any:
        """An argument in the form that the function takes; None stays where the argument may be left out."""
        return None if values[i] is None and i >= self.required else self.checked(values[i], self.names[i], values)

    def _cast(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments in the precision that autocast gives them; float64 and integers stay."""
        return cast_narrow(values, current_mode().autocast if self.precision == "low" else "float32")

    def _record(self, plan: Plan | None, values: Any, raw: Any, out: Any, extras: Any) -> Any:
        """The result as a Tensor, with a Node where a plan says what to keep."""
        several = type(out) is tuple
        result: Any = tuple(map(Tensor._wrap, out)) if several else Tensor._wrap(out)
        out = out if several else result._data
        if self.view and not several and isinstance(values[0], Tensor) and _is_view(out, raw[0]):
            result._version = values[0]._version
        if plan is None or not (several or out.dtype.kind == "f" or is_floating(out.dtype)):
            return result
        parents, residuals, versions = [], [], []  # filled by loops, which take less time than comprehensions
        for i in plan.wrt:
            parents.append(values[i].node or values[i])
        for fetch in plan.fetch:
            residuals.append(raw[fetch] if type(fetch) is int else fetch(raw, out, extras))
        for i in plan.watched:
            if isinstance(x := values[i], Tensor):
                versions.append((counter := x._version, counter[0], i))
        if -1 in plan.sources:
            versions += [(r._version, r._version[0], -1) for r in (result if several else (result,))]
        shape, dtype = zip(*((r.shape, r.dtype) for r in result), strict=True) if several else (out.shape, out.dtype)
        node = Node.of(self, plan, parents, residuals, shape, dtype, versions)
        return attach_several(result, node) if several else attach(result, node)

    # -- the backward call --

    def run_rules(self, node: Node, g: Any, create_graph: bool) -> list[Any]:
        """The gradients of the arguments in ``plan.wrt``, from the gradient ``g`` of the result."""
        plan: Plan = node.plan
        return plan.gradients(g, self.rewrap(node) if create_graph else node.residuals)

    def rewrap(self, node: Node) -> list[Any]:
        """The residuals; arrays through which a gradient flows become Tensors again, connected to the graph."""
        origins = {**dict(zip(node.plan.wrt, node.parents, strict=True)), -1: node}
        return [
            rewrap_value(value, origins.get(i), [counter for counter, _, position in node.versions if position == i])
            for value, i in zip(node.residuals, node.plan.sources, strict=True)
        ]


class SequencePrimitive(Primitive[P]):
    """A primitive whose first argument is a list of arrays. Its one rule returns a list of gradients.

    A call flattens the list: it runs a plain primitive with the arguments ``arrays[0]``, ``arrays[1]``, … and the
    others, which is made once for each length. So nodes, plans and instruments know of no lists.
    """

    def __init__(self, function: Callable[P, Any], **facts: Any) -> None:
        super().__init__(function, **facts)
        self.checks[self.names[0]] = as_list

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        arrays, *others = self._bind(args, kwargs)
        arrays = self.checked(arrays, self.names[0])
        try:
            return self._of_length(len(arrays))(*arrays, *others)
        except FOREIGN as error:
            raise explanation(self, (arrays, *others), {}, error)  # noqa: B904

    def _of_length(self, count: int) -> Primitive[...]:
        """The plain primitive for lists of this length; up to 64 of them are kept."""
        if count in self.plans:
            return self.plans[count]  # type: ignore[no-any-return]
        if len(self.plans) == 64:  # a loop may stack lists of every length up to 1000
            self.plans.clear()
        first, *others = self.names
        parts = [f"{first}[{i}]" for i in range(count)]
        self.plans[count] = flat = Primitive.__new__(Primitive)
        vars(flat).update(vars(self))
        flat.function = lambda *values: self.function(list(values[:count]), *values[count:])
        flat.checks = self.checks | dict.fromkeys(parts, as_operand)
        flat._take(dict.fromkeys(parts, inspect.Parameter.empty) | dict(zip(others, self.defaults[1:], strict=True)))
        flat.rules = [_flat_rule(declared, first, parts) for declared in self.rules]
        return flat


def _flat_rule(declared: DeclaredRule, first: str, parts: Sequence[str]) -> DeclaredRule:
    """The rule of the plain primitive: it reads of each of ``parts`` what the given one reads of the list ``first``."""
    lists = {name: bool(argument_and_fact(name, (first,))[0]) for name in declared.reads}
    groups = [[name.replace(first, p, 1) for p in parts] if of_list else [name] for name, of_list in lists.items()]

    def rule(g: Any, *residuals: Any) -> Any:
        rest = iter(residuals)
        return declared.rule(g, *[[next(rest) for _ in parts] if of_list else next(rest) for of_list in lists.values()])

    return DeclaredRule(tuple(range(len(parts))), rule, tuple(itertools.chain(*groups)), joint=True)


# ---- the operation that picks one of several results -----------------------------------------------------------------


_pick = Primitive(lambda results, place, count: results[place])
_pick.name = _pick.label = "pick"


def _pick_rule(g: Any, place: int, count: int) -> tuple[Any, ...]:
    """The gradient of a tuple of which one place was used. The pass fills in the places that are None."""
    return tuple(g if k == place else None for k in range(count))


_pick_plan = Plan(wrt=(0,), names=("place", "count"), calls=((_pick_rule, (0, 1), None),), sources=(None, None))


# ---- results and the nodes behind them -------------------------------------------------------------------------------


def _is_view(out: Any, x: Any) -> bool:
    """Whether ``out``, made from ``x``, shares its memory; the bases of a view lead to its owner."""
    base = out
    while not (base is None or base is x or base is x.base):
        base = getattr(base, "base", None)  # windows are views of an object of NumPy's, which has x as its base
    return base is not None


def attach(result: Any, node: Node) -> Any:
    """Make ``node`` the origin of the Tensor ``result``."""
    result.node, result._requires_grad = node, True
    return result


def attach_several(results: Sequence[Any], node: Node) -> tuple[Any, ...]:
    """Make ``node`` the origin of several Tensors, each through a node that picks its place."""
    for place, result in enumerate(results):
        if is_floating(result.dtype):
            attach(result, Node.of(_pick, _pick_plan, (node,), [place, len(results)], result.shape, result.dtype))
    return tuple(results)


def rewrap_value(value: Any, edge: Any, counters: Sequence[Any]) -> Any:
    """What a node kept, as the Tensor, or the tuple of them, that it was: made by ``edge``, with its version."""
    if isinstance(edge, Tensor):
        return edge
    if edge is None and not counters:
        return value
    if type(value) is tuple:
        return attach_several([rewrap_value(piece, None, [c]) for piece, c in zip(value, counters, strict=True)], edge)
    tensor = Tensor._wrap(value)
    tensor._version = counters[0] if counters else tensor._version
    return tensor if edge is None else attach(tensor, edge)


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
    kind = SequencePrimitive if facts.pop("sequence", False) else Primitive
    return register(kind(function, **facts)) if function else lambda f: register(kind(f, **facts))


def elementwise(**facts: Any) -> Callable[[Callable[P, Any]], Primitive[P]]:
    """A primitive that broadcasts its arguments and acts on each element. Its rules need not undo the broadcast."""
    return lambda function: register(Primitive(function, elementwise=True, **facts))
