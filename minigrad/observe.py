"""What the instruments share: observers outside the engine, at work inside of a ``with`` block.

The engine tells every observer of each operation and of each node of a backward pass (``core.Observer``). What an
instrument has to remember of a node it writes on the node's ``note``, so that it dies with the graph.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from minigrad import core
from minigrad.core import Node, Observer
from minigrad.errors import GraphError

Kind = TypeVar("Kind", bound="Instrument")


class Instrument(Observer):
    """An observer that is at work inside of ``with instrument:``."""

    def __enter__(self: Kind) -> Kind:
        if self in core.observers:
            raise GraphError("an instrument that is not at work yet", f"{type(self).__name__} entered twice")
        core.observers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        core.observers.remove(self)


def raw(value: Any) -> Any:
    """The array of a Tensor; anything else as it is."""
    return value._data if isinstance(value, core.Tensor) else value


def node_of(result: Any) -> Node | None:
    """The node that an operation's result, a Tensor or a tuple of them, was recorded as; None where none was."""
    if type(result) is not tuple:
        return result._node  # type: ignore[no-any-return]
    picks = [part._node for part in result if part._node is not None]
    return picks[0].parents[0] if picks else None


def notes(node: Node) -> dict[str, Any]:
    """What the instruments wrote on a node, each under a key of its own."""
    if node.note is None:
        node.note = {}
    return node.note  # type: ignore[no-any-return]


# ---- where the user called ------------------------------------------------------------------------------------------

_ROOT = Path(__file__).resolve().parent.parent
_OURS = tuple(f"{_ROOT / package}{os.sep}" for package in ("minigrad", "nn", "optim"))
_LAYERS = _OURS[1]


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
        if not file.startswith(_OURS):
            return Line(file, frame.f_lineno), layer
        if layer is None and file.startswith(_LAYERS):
            layer = Line(file, frame.f_lineno)
    return None, layer
