"""``detect_anomaly``: which operation made the first NaN or infinity, forward or backward, and where it was called."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import array_module, is_array, is_floating
from minigrad.backward import unbroadcast
from minigrad.core import Node, Primitive
from minigrad.errors import NonFiniteError
from minigrad.fused import Fused
from minigrad.observe import Instrument, Line, calling_lines, frames, node_of, notes, raw

# ---- numbers that are not finite ------------------------------------------------------------------------------------


class _Count(NamedTuple):
    """How many NaN and infinities there are among so many numbers."""

    nan: int = 0
    infinite: int = 0
    total: int = 0

    def plus(self, other: _Count) -> _Count:
        return _Count(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def bad(self) -> int:
        return self.nan + self.infinite

    def worse_than(self, before: _Count) -> bool:
        """Whether something went wrong here: non-finite numbers out of finite ones, or NaN out of none."""
        return self.nan > before.nan == 0 or self.infinite > before.bad == 0

    def as_input(self) -> str:
        return "into which infinite numbers went, but no NaN" if self.bad else "into which finite numbers went"

    def __str__(self) -> str:
        kinds = ((self.nan, "NaN"), (self.infinite, "infinite"))
        return " and ".join(f"{n} {kind}" for n, kind in kinds if n) + f" of {self.total} numbers"


def _count(value: Any) -> _Count:
    """The NaN and infinities in arrays, numbers, and nested sequences of them."""
    value = raw(value)
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
    """A forward call, as far as it is needed to tell of it later."""

    operation: str
    arguments: tuple[tuple[Any, ...], ...]  # name, dtype and shape of each array, name and value of each number
    line: Line | None
    layer: Line | None
    inside: str  # the operation whose derivative this call is a part of, or ""

    def __str__(self) -> str:
        arguments = (f"{name}: {' '.join(map(str, facts))}" for name, *facts in self.arguments)
        called = f"{self.operation}({', '.join(arguments)})"
        if self.inside:
            called += f" in the derivative of {self.inside}"
        place = f", called at {self.line}" if self.line else ""
        return called + place + (f" (through {self.layer})" if self.layer else "")


def _named(primitive: Any, arguments: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a call with their names; those of a leading list are numbered."""
    names = list(primitive.position)
    extra = len(arguments) - len(names) + 1 if primitive.sequence else 0
    if primitive.sequence:
        names[:1] = [f"{names[0]}[{i}]" for i in range(extra)]
    return zip(names, arguments, strict=True)


def _facts(primitive: Any, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    named = list(_named(primitive, arguments))
    arrays = [(name, a.dtype, a.shape) for name, a in named if is_array(a)]
    return (*arrays, *((name, a) for name, a in named if isinstance(a, int | float | np.generic)))


# ---- the instrument -------------------------------------------------------------------------------------------------

_PULLS = {Primitive.pull.__code__, Fused.pull.__code__}


def _differentiated() -> str:
    """The operation whose derivative is being computed by the code that runs now; "" outside of derivatives."""
    name = ""
    for frame in frames(sys._getframe(1)):
        if frame.f_code in _PULLS:
            name = frame.f_locals["node"].primitive.name
    return name


class detect_anomaly(Instrument):
    """Stop at the first operation that makes a NaN or an infinity, forward or backward, and say where it was called.

    At fault is the first operation whose inputs, constants included, are all finite and whose result is not: the -∞ of
    a mask is no fault, nor is what comes of it; a NaN is one also where it comes of infinities (∞ - ∞, 0 · ∞). In the
    backward pass it is the first node whose incoming gradient and residuals are finite and one of whose gradients is
    not. The NonFiniteError names the operation, its shapes and dtypes, and the line of the forward call.

    NumPy's warnings of overflow and invalid values are silent inside. Every number is looked at: expect each operation
    on small arrays to take several times as long, on large ones one pass over memory more.

    >>> import minigrad as mg
    >>> x = mg.Tensor([0.0, 4.0], requires_grad=True)
    >>> with mg.detect_anomaly():
    ...     y = mg.where(x == 0, 0, x * mg.sqrt(x))
    ...     try:
    ...         y.sum().backward()
    ...     except mg.errors.NonFiniteError as error:
    ...         print(error.expected)
    finite gradients from 'sqrt', into which finite numbers went
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

    def forward(self, primitive: Any, arguments: list[Any], out: Any, result: Any, seconds: float) -> None:
        """Judge a result, and leave on its node where the call came from."""
        node = node_of(result)
        found = _count(out)
        before = _count(arguments) if found.bad else found
        if node is None and not found.worse_than(before):
            return
        inside = _differentiated()
        call = _Call(primitive.name, _facts(primitive, arguments), *calling_lines(), inside)
        if node is not None:
            notes(node)["call"] = call
        if found.worse_than(before) and not inside:  # a derivative is judged by the gradients that come out of it
            raise NonFiniteError(
                f"a finite result of {primitive.name!r}, {before.as_input()}",
                f"{found} in the result of {call}",
                "look at the numbers that went in; clip or shift them, or compute in a stable form",
            )

    def backward(self, node: Node, g: Any, gradients: list[Any], seconds: float) -> None:
        """Judge the gradients that a node sends to its parents, as they will arrive there."""
        arrived = [_fitted(gradient, edge) for gradient, edge in zip(gradients, node.parents, strict=True)]
        found = [_count(gradient) for gradient in arrived]
        total = _sum(found)
        before = _count([g, *node.residuals]) if total.bad else total
        if not total.worse_than(before) or _differentiated():
            return
        worst = next(k for k, count in enumerate(found) if count.bad)
        call = (node.note or {}).get("call")
        hint = "a branch that 'where' did not take has a derivative too: docs/kinks.md has the recipe"
        if call is None:
            call = f"{node.primitive.name}, result {node.dtype} {node.shape}"
            hint = "put the forward pass into detect_anomaly() too, to see where it was called"
        raise NonFiniteError(
            f"finite gradients from {node.primitive.name!r}, {before.as_input()}",
            f"{found[worst]} in the gradient of {_argument(node, worst)} of {call}",
            hint,
        )


def _fitted(gradient: Any, edge: Any) -> Any:
    """A rule's gradient as it will arrive at ``edge``: broadcasting undone and cast, which can overflow too."""
    gradient = raw(gradient)
    if not is_array(gradient):
        return gradient
    if gradient.shape != edge.shape:
        gradient = unbroadcast(gradient, edge.shape)
    return gradient.astype(edge.dtype, copy=False)


def _argument(node: Node, k: int) -> str:
    """The name of the argument whose gradient is the k-th."""
    position = node.plan.wrt[k]
    names = list(node.primitive.position)
    return f"{names[0]}[{position}]" if node.primitive.sequence else names[position]
