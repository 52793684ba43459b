"""What the instruments share: observers outside the engine, at work inside of a ``with`` block.

The engine notifies every observer of each operation and of each node of a backward pass (``core.Observer``). An
instrument writes what it must remember of a node into the node's ``note``, which dies with the graph.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from minigrad.backend import array_of, is_array
from minigrad.engine import core
from minigrad.engine.core import Node, Observer
from minigrad.errors import GraphError
from minigrad.messages.explain import OURS

Kind = TypeVar("Kind", bound="Instrument")


class Instrument(Observer):
    """An observer that works inside of ``with instrument:``."""

    def __enter__(self: Kind) -> Kind:
        if self in core.observers:
            hint = "make a second one"
            raise GraphError("an instrument that is not at work yet", f"{type(self).__name__} entered twice", hint)
        core.observers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        core.observers.remove(self)


def node_of(result: Any) -> Node | None:
    """The node that an operation's result, a Tensor or a tuple of them, was recorded as; None where none was."""
    if type(result) is not tuple:
        return result.node  # type: ignore[no-any-return]
    picks = [part.node for part in result if part.node is not None]
    return picks[0].parents[0] if picks else None


def argument_name(primitive: Any, position: int) -> str:
    """The name of an argument; those of a leading list are numbered: ``arrays[0]``, ``arrays[1]``."""
    return str(list(primitive.position)[position])


def arguments_by_name(primitive: Any, arguments: Sequence[Any]) -> dict[str, Any]:
    """The arguments of a call, those of a leading list one by one."""
    return dict(zip(primitive.position, arguments, strict=False))


def notes(node: Node) -> dict[Any, Any]:
    """What the instruments wrote on a node, each under a key of its own."""
    if node.note is None:
        node.note = {}
    return node.note  # type: ignore[no-any-return]


# ---- where the user called ------------------------------------------------------------------------------------------

_LAYERS = OURS[1]


class Line(NamedTuple):
    """A line of source that was running; its text is read only when it is shown."""

    file: str
    number: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.number).strip()
        return f"{self.file}:{self.number}" + (f": {text}" if text else "")


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame`` and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def calling_lines() -> tuple[Line | None, Line | None]:
    """The innermost running line of the user's code, and that of a layer of ``nn`` which it called, if one runs."""
    layer = None
    for frame in frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith(OURS):
            return Line(file, frame.f_lineno), layer
        if layer is None and file.startswith(_LAYERS):
            layer = Line(file, frame.f_lineno)
    return None, layer


# ---- arrays and the memory under them -------------------------------------------------------------------------------


def arrays_in(value: Any) -> Iterator[Any]:
    """The arrays in a residual or an argument: itself, that of a Tensor, or those in a list, tuple or dict."""
    value = array_of(value)
    if is_array(value):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(part)


def base_of(array: Any) -> Any:
    """The array that owns the memory of ``array``, which may be a view of it."""
    while array.base is not None:
        below = array.base if is_array(array.base) else getattr(array.base, "base", None)
        if not is_array(below):
            break
        array = below
    return array


# ---- how results are shown ------------------------------------------------------------------------------------------


def scaled(number: float, unit: str) -> str:
    """A quantity in three digits with a prefix of its unit.

    >>> scaled(1234567, "B"), scaled(0.00025, "s"), scaled(12, "B")
    ('1.23 MB', '250 µs', '12 B')
    """
    prefixes = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")]
    size, prefix = next((pair for pair in prefixes if abs(number) >= 0.9995 * pair[0]), (1.0, ""))
    value = number / size
    decimals = 0 if abs(value) >= 99.95 or value == int(value) else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{decimals}f} {prefix}{unit}"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of text in columns, the first ``left`` of them flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = "<" * left + ">" * (len(widths) - left)
    return "\n".join(
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)).rstrip()
        for row in rows
    )
