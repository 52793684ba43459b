"""What people type out of habit from torch, and what to type here. The hints themselves stand in ``hints.txt``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from minigrad.errors import AttributeHintError

_TEXT = Path(__file__).with_name("hints.txt").read_text("utf-8")


def hints(section: str) -> dict[str, str]:
    """A section of ``hints.txt``: the hint of each name.

    >>> hints("keywords")["dim"]
    'axis'
    """
    lines = _TEXT.partition(f"\n[{section}]\n")[2].partition("\n\n")[0].splitlines()
    rows = [line.partition(" = ") for line in lines if not line.startswith("#")]
    return {name: hint.replace("{}", name) for names, _, hint in rows for name in names.split(", ")}


NAMES, OUT_OF_SCOPE = hints("names of torch"), hints("out of scope")
KEYWORDS, INSTEAD = hints("keywords"), hints("keywords without a twin")


def keyword_hint(unknown: str, known: Collection[str]) -> str:
    """What to do about a keyword that a function with the arguments ``known`` doesn't have.

    >>> keyword_hint("dim", ["x", "axis"])
    'axis= takes the place of dim='
    >>> keyword_hint("weightdecay", ["lr", "weight_decay"])
    'weight_decay= may be what is meant'
    """
    if unknown in INSTEAD:
        return INSTEAD[unknown]
    if KEYWORDS.get(unknown) in known:
        return f"{KEYWORDS[unknown]}= takes the place of {unknown}="
    alike = get_close_matches(unknown, known, 1, 0.75)
    return f"{alike[0]}= may be what is meant" if alike else f"there is no {unknown}="


def unknown_name(label: str, name: str) -> AttributeHintError:
    """The error for a name that ``label`` hasn't: with our name for one of torch.

    >>> print(unknown_name("x", "view").hint)
    use reshape
    """
    return AttributeHintError(f"a name that {label} has", f".{name}", _name_hint(name))


MODULES = ("minigrad", "nn", "nn.functional", "optim", "minigrad.linalg", "minigrad.special")


def _name_hint(name: str) -> str:
    ours = {found: module for module in MODULES[::-1] for found in getattr(sys.modules.get(module), "__all__", ())}
    if name in ours:
        return f"use {ours[name]}.{name}"
    if use := _row(NAMES, name):
        return f"use {use}"
    if name.endswith("_") and not name.startswith("_"):
        return f"nothing works in place: x = x.{NAMES.get(name[:-1], name[:-1])}(…)"
    spelled, plain = {found.lower().replace("_", ""): found for found in ours}, name.lower().replace("_", "")
    if alike := spelled.get(plain) or spelled.get(plain.removesuffix("loss")):  # the function of a class, SmoothL1Loss
        return f"use {ours[alike]}.{alike}"
    if why := _row(OUT_OF_SCOPE, name):
        return f"out of scope: {why}"
    return f"np.{name} takes x.numpy(), without a gradient" if hasattr(np, name) else "dir() lists them"


def _row(table: dict[str, str], name: str) -> str | None:
    """The hint of a name, or of the first pattern that it fits."""
    fitting = (hint for pattern, hint in table.items() if "*" in pattern and fnmatchcase(name, pattern))
    return table.get(name) or next(fitting, None)


class RefusedName:
    """A class attribute that isn't there: to ask for it raises the error with the hint.

    A class with ``__getattr__`` could refuse every name, but Python would find all its attributes more slowly.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type) -> Any:
        raise unknown_name(kind.__name__, self.name)


def refuse_names(kind: type, others: Collection[str]) -> None:
    """Have ``kind`` refuse names of torch and ``others``, those of its own with ``_`` behind them too.

    They go to its base class, so that ``vars(kind)`` lists what there is.
    """
    there = dir(kind)
    in_place = {f"{name}_" for name in (*NAMES, *there) if not name.startswith("_")}
    for name in filter(str.isidentifier, in_place.union(NAMES, OUT_OF_SCOPE, others).difference(there)):
        setattr(kind.__bases__[0], name, RefusedName(name))


def module_names(module: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module with these globals: hints for names of torch, and no private ones."""

    def missing(name: str) -> Any:
        raise unknown_name(module["__name__"], name)

    return missing, lambda: sorted({*module["__all__"], *(name for name in module if name.startswith("__"))})
