"""Containers of arrays: dicts, lists, tuples, named ones too, and dataclasses, nested as one likes.

A *leaf* is a Tensor, an array or a number, or nested lists of numbers, which are an array everywhere in minigrad if all
rows have one length.
What else stands in a container, such as a string or None, belongs to its form.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from minigrad.backend import is_array
from minigrad.errors import ArgumentError
from minigrad.messages.explain import describe
from minigrad.tensor import Tensor

_LEAVES = (Tensor, np.ndarray, np.generic, float, int)  # a tuple: to make a union takes as long as to ask


def is_leaf(value: Any) -> bool:
    """Whether ``value`` is an array, or what is made one.

    >>> is_leaf(1.0), is_leaf([[1.0, 2.0]]), is_leaf((1.0, 2.0)), is_leaf("name"), is_leaf(True)
    (True, True, False, False, False)
    """
    return (isinstance(value, _LEAVES) and type(value) is not bool) or is_array(value) or _is_numbers(value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and _shape(value) is not None


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of nested lists of numbers, or of a number; None of anything else, such as rows of several lengths."""
    if not isinstance(value, list):
        return () if isinstance(value, int | float) else None
    rows = {_shape(row) for row in value}
    (row,) = rows if len(rows) == 1 else (None,)
    return None if row is None else (len(value), *row)


def parts(value: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, each part with the text that leads to it; None for what is no container."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", part) for name, part in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple) and not _is_numbers(value):
        return [(f"[{k}]", part) for k, part in enumerate(value)]
    return None


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a container in order, each with its path; of a leaf itself.

    >>> list(leaves({"w": np.float64(1.0), "layers": ["relu", (2.0, None)]}, "p"))
    [("p['w']", np.float64(1.0)), ("p['layers'][1][0]", 2.0)]
    """
    if is_leaf(tree):
        yield path, tree
    else:
        for name, part in parts(tree) or ():
            yield from leaves(part, path + name)


def filled(tree: Any, values: Iterator[Any], other: Callable[[Any], Any] = lambda value: value) -> Any:
    """A container like ``tree`` with ``values`` in the places of its leaves; ``other`` says what becomes of the rest.

    >>> filled({"w": 1.0, "layers": ["relu", (2.0, None)]}, iter("ab"))
    {'w': 'a', 'layers': ['relu', ('b', None)]}
    """
    if is_leaf(tree):
        return next(values)
    found = parts(tree)
    return other(tree) if found is None else _with(tree, [filled(part, values, other) for _, part in found])


def _with(tree: Any, new: list[Any]) -> Any:
    """A container of the same kind with other parts."""
    if isinstance(tree, tuple | list):
        return type(tree)(*new) if hasattr(tree, "_fields") else type(tree)(new)
    made = copy.copy(tree)
    if isinstance(tree, dict):
        for key, part in zip(tree, new, strict=True):  # update() of a Counter adds
            made[key] = part
    else:
        for field, part in zip(dataclasses.fields(tree), new, strict=True):
            object.__setattr__(made, field.name, part)  # also of a frozen one
    return made


def matched(tree: Any, given: Any, what: str) -> list[Any]:
    """What stands in ``given`` in the places of the leaves of ``tree``, or an error that names where it differs.

    >>> matched({"w": 1.0, "b": (2.0, None)}, {"b": [3.0, None], "w": 4.0}, "the tangent")
    [4.0, 3.0]
    """
    if is_leaf(tree):
        return [given]
    own = parts(tree)
    if own is None:
        return []
    theirs = parts(given)
    lists = isinstance(tree, list | tuple) and isinstance(given, list | tuple)
    if lists and theirs is None:  # a list of numbers
        theirs = [(f"[{k}]", part) for k, part in enumerate(given)]
    places = dict(theirs or ())
    if lists and len(own) == len(places):
        pairs = [(name, part, other) for (name, part), other in zip(own, places.values(), strict=True)]
    elif theirs is not None and not lists and {name for name, _ in own} == set(places):
        pairs = [(name, part, places[name]) for name, part in own]
    else:
        names = ", ".join(name.strip("[].") for name, _ in own) or "nothing"
        raise ArgumentError(f"{what}: a {type(tree).__name__} of {names}", describe(given), "in the form of the other")
    return [leaf for name, part, other in pairs for leaf in matched(part, other, what + name)]
