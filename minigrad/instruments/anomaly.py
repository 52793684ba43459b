"""``detect_anomaly`` finds the operation that made the first NaN or infinity, and the line that called it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import array_module, array_of, is_array, is_floating, is_half
from minigrad.engine.broadcast import unbroadcast
from minigrad.engine.core import Node, Primitive
from minigrad.engine.fused import Fused
from minigrad.engine.recording import current_mode
from minigrad.errors import NonFiniteError
from minigrad.instruments.observe import (
    Instrument,
    Line,
    argument_name,
    arguments_by_name,
    calling_lines,
    frames,
    node_of,
    notes,
)

# ---- numbers that are not finite ------------------------------------------------------------------------------------


class _Count(NamedTuple):
    """The counts of NaN, of infinities and of all numbers."""

    nan: int = 0
    infinite: int = 0
    total: int = 0

    def plus(self, other: _Count) -> _Count:
        return _Count(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def bad(self) -> int:
        return self.nan + self.infinite

    def is_fault(self, before: _Count) -> bool:
        """Whether an operation is at fault for such results: for NaN always, for infinities of finite inputs."""
        return self.nan > 0 or self.infinite > before.bad == 0

    def as_input(self) -> str:
        """How a message describes such inputs, none of which is NaN."""
        return "into which infinite numbers went" if self.bad else "into which finite numbers went"

    def __str__(self) -> str:
        kinds = ((self.nan, "NaN"), (self.infinite, "infinite"))
        return " and ".join(f"{n} {kind}" for n, kind in kinds if n) + f" of {self.total} numbers"


def _count(value: Any) -> _Count:
    """The NaN and infinities in arrays, numbers, and nested sequences of them."""
    value = array_of(value)
    if isinstance(value, list | tuple):
        return _sum(map(_count, value))
    if is_array(value) or isinstance(value, np.generic):
        if not is_floating(value.dtype):
            return _Count()
        xp = array_module(value)
        if bool(xp.isfinite(value).all()):
            return _Count(0, 0, value.size)
        nan = int(xp.isnan(value).sum())
        return _Count(nan, int((~xp.isfinite(value)).sum()) - nan, value.size)
    if isinstance(value, float):
        return _Count(int(math.isnan(value)), int(math.isinf(value)), 1)
    return _Count()


def _sum(counts: Iterable[_Count]) -> _Count:
    result = _Count()
    for count in counts:
        result = result.plus(count)
    return result


class _Call(NamedTuple):
    """What a message says of a forward call."""

    operation: str
    arguments: tuple[tuple[Any, ...], ...]  # of an array: name, dtype, shape, own name; of a number: name, value
    line: Line | None
    layer: Line | None
    inside: str  # the operation whose derivative this call is a part of, or ""

    def __str__(self) -> str:
        arguments = (f"{name}: {' '.join(map(str, facts)).rstrip()}" for name, *facts in self.arguments)
        called = f"{self.operation}({', '.join(arguments)})"
        if self.inside:
            called += f" in the derivative of {self.inside}"
        place = f", called at {self.line}" if self.line else ""
        return called + place + (f" (through {self.layer})" if self.layer else "")


def _facts(primitive: Any, arguments: Sequence[Any], node: Node | None) -> tuple[tuple[Any, ...], ...]:
    """The arrays among the arguments by dtype and shape, with the names of leaves; then the numbers."""
    named = arguments_by_name(primitive, arguments).items()
    edges = zip(node.plan.wrt, node.parents, strict=True) if node is not None else ()
    names = {argument_name(primitive, i): repr(edge.name) for i, edge in edges if getattr(edge, "name", None)}
    arrays = [(name, a.dtype, a.shape, names.get(name, "")) for name, a in named if is_array(a)]
    return (*arrays, *((name, a) for name, a in named if isinstance(a, int | float | np.generic)))


# ---- the instrument -------------------------------------------------------------------------------------------------

_RUN_RULES = {Primitive.run_rules.__code__, Fused.run_rules.__code__}


def _differentiated() -> str:
    """The operation whose derivative is being computed now; "" outside of derivatives."""
    name = ""
    for frame in frames(sys._getframe(1)):
        if frame.f_code in _RUN_RULES:
            name = frame.f_locals["node"].primitive.label
    return name


class _Fault(NamedTuple):
    """What an error would say of an infinity that has done no harm yet; an exception would keep arrays alive."""

    expected: str
    got: str
    call: str  # of the operation that made it

    def error(self, hint: str) -> NonFiniteError:
        return NonFiniteError(self.expected, self.got, hint)


class detect_anomaly(Instrument):
    """Stop where a NaN appears or an infinity reaches a loss or a leaf's gradient; say what made it, and where.

    A NaN always is a fault. An infinity is one only where it arrives: in what ``backward`` starts from, in the gradient
    of a leaf, or in a NaN. The error then names the operation that made it of finite numbers, constants included. So
    the infinite slope of ``sqrt(relu(x))`` at 0, which relu multiplies out, is no fault, nor are the -∞ of a mask and
    the infinities that follow from it. If a weight or data brought a NaN in, the error names that argument.
    Half-precision gradients of a loss that ``GradScaler`` scaled may overflow, since the scaler handles that. The
    NonFiniteError gives the operation, its shapes and dtypes, and the line of the forward call.

    NumPy's warnings of overflow and invalid values are off inside. Every number is checked: an operation on small
    arrays takes several times as long, one on large arrays a pass over memory longer.

    >>> import minigrad as mg
    >>> x = mg.Tensor([0.0, 4.0], requires_grad=True)
    >>> with mg.detect_anomaly():
    ...     y = mg.where(x == 0, 0, x * mg.sqrt(x))
    ...     try:
    ...         y.sum().backward()
    ...     except mg.errors.NonFiniteError as error:
    ...         print(error.expected)
    finite gradients of 'sqrt', into which finite numbers went
    """

    def __init__(self) -> None:
        self._silent: list[Any] = []

    def __enter__(self) -> detect_anomaly:
        super().__enter__()
        self._silent.append(np.errstate(all="ignore"))
        self._silent[-1].__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._silent.pop().__exit__()
        super().__exit__()

    def forward(self, primitive: Any, arguments: list[Any], out: Any, result: Any, started: float) -> None:
        """Refuse a NaN; note on a result's node where the call came from, and who made the infinities in it."""
        node, found = node_of(result), _count(out)
        if node is None and not found.nan:
            return
        inside = _differentiated()
        call = _Call(primitive.label, _facts(primitive, arguments, node), *calling_lines(), inside)
        note = notes(node) if node is not None else {}
        note["call"] = call
        if not found.bad or inside:  # a derivative is checked by the gradients that come out of it
            return
        into = {f"argument {name!r}": value for name, value in arguments_by_name(primitive, arguments).items()}
        origin = _noted("infinite", node.parents if node is not None else ())
        if found.is_fault(_count(arguments)):
            fault = _fault(f"a finite result of {primitive.label!r}", into, f"{found} in the result", str(call))
            if found.nan:
                raise fault.error(_of_input(into) or _made_by(origin) or HINTS["result"])
            origin = fault
        if origin is not None:
            note["infinite"] = origin

    def backward(self, node: Node, g: Any, gradients: list[Any], started: float) -> None:
        """Check the gradients that a node sends to its parents, as they will arrive there."""
        note, name = notes(node), node.primitive.label
        suspect, is_root = note.pop("slope", None), not note.pop("reached", False)
        behind = note.get("where", False) or name in ("where", "masked_fill")
        below = [notes(edge) if isinstance(edge, Node) else None for edge in node.parents]
        for kept in below:
            if kept is not None:
                kept.update(reached=True, where=kept.get("where", False) or behind)
        if _differentiated():
            return
        if is_root and "infinite" in note:
            raise note["infinite"].error(HINTS["result"])
        pairs = zip(gradients, node.parents, strict=True)
        found = [_Count() if _may_overflow(edge) else _count(_arriving(gradient, edge)) for gradient, edge in pairs]
        total = _sum(found)
        if not total.bad or (current_mode().scaled and _count(g).bad):  # it comes of an overflow
            return
        hint = HINTS["where"] if note.get("where") else HINTS["slope"]
        if total.is_fault(_count([g, *node.residuals])):
            worst = next(k for k, count in enumerate(found) if count.bad)
            call = note.get("call")
            if call is None:
                call = f"{node.primitive.label}, result {node.dtype} {node.shape}"
                hint = "put the forward pass into detect_anomaly() too, to see where it was called"
            into = {"its incoming gradient": g}
            into |= {f"{kept!r}, which it kept": a for kept, a in zip(node.plan.names, node.residuals, strict=False)}
            where = f"{found[worst]} in the gradient of {argument_name(node.primitive, node.plan.wrt[worst])!r}"
            fault = _fault(f"finite gradients of {name!r}", into, where, str(call))
            if total.nan:
                origin = suspect or note.get("infinite")
                if origin is not None and (origin is suspect or origin.call == str(call)):  # 0 · ∞
                    raise origin.error(hint)
                raise fault.error(_of_input(into) or _made_by(origin) or hint)
            suspect = suspect or fault
        for count, kept in zip(found, below, strict=True):
            if count.bad and suspect is not None:
                if kept is None:  # a leaf
                    raise suspect.error(hint)
                kept.setdefault("slope", suspect)


HINTS = {
    "result": "look at the numbers that went in; clip or shift them, or compute in a stable form",
    "slope": "the derivative is infinite there: clip or shift what goes in, away from that place (docs/kinks.md)",
    "where": "a branch that 'where' did not take has a derivative too: docs/kinks.md has the recipe",
}


def _fault(expected: str, into: dict[str, Any], found: str, call: str) -> _Fault:
    """What to say of ``found`` in a result. If an input had NaN already, that input is named."""
    for name, value in into.items():
        count = _count(value)
        if count.nan:
            return _Fault(f"{expected}, into which no NaN should go", f"{count} in {name} of {call}", call)
    return _Fault(f"{expected}, {_count(list(into.values())).as_input()}", f"{found} of {call}", call)


def _of_input(into: dict[str, Any]) -> str:
    """The hint where NaN came in."""
    bad = any(_count(value).nan for value in into.values())
    return "a weight or data that hold NaN: look at what made them; here they are only used" if bad else ""


def _made_by(origin: _Fault | None) -> str:
    return f"the infinite numbers were made by {origin.call}" if origin is not None else ""


def _noted(key: str, edges: Iterable[Any]) -> Any:
    """What was noted under a key on the first of these edges that has it."""
    return next((edge.note[key] for edge in edges if isinstance(edge, Node) and key in (edge.note or ())), None)


def _may_overflow(edge: Any) -> bool:
    """Whether the gradient of ``edge`` may overflow, since GradScaler handles that."""
    return current_mode().scaled and type(edge.dtype) is not tuple and is_half(edge.dtype)


def _arriving(gradient: Any, edge: Any) -> Any:
    """A rule's gradient as it arrives at ``edge``: summed over broadcast axes and cast, which can overflow too."""
    gradient = array_of(gradient)
    if not is_array(gradient):
        return gradient
    if gradient.shape != edge.shape:
        gradient = unbroadcast(gradient, edge.shape)
    return gradient.astype(edge.dtype, copy=False)
