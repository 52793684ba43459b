"""The stubs that tell an editor what operations take and give: ``python tests/support/signatures.py`` writes them.

An operation is a function on arrays, and so is its signature. A caller may pass a Tensor, a number or a list in place
of each array, and gets a Tensor where there is one among them. So ``Array`` of an argument is ``Operand[X]`` here, and
``X`` in the result; ``minigrad/tensor.py`` says what they mean.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from minigrad.engine.registry import REGISTRY

ROOT = Path(__file__).parent.parent.parent
WIDTH = 120
PUBLIC = {"Array": "Operand[X]", "ArrayLike": "Operand[X]"}
TOOLS = ("minigrad.errors", "minigrad.messages", "typing")  # what a module imports for itself
MARKS = {"*": inspect.Parameter.VAR_POSITIONAL, "**": inspect.Parameter.VAR_KEYWORD}
HEADER = '''"""What ``{name}`` exports, as a caller sees it. Written by tests/support/signatures.py."""

from collections.abc import Iterable, Sequence
from typing import Any

from minigrad.backend import Axes, DType, Seed, Shape
from minigrad.tensor import Operand, X
'''


def public(annotation: str) -> str:
    """What a caller may pass for an argument with this annotation."""
    words = re.sub(r"\w+", lambda word: PUBLIC.get(word[0], word[0]), annotation)
    return words.replace("Sequence[Operand", "Iterable[Operand")


def parameter(given: inspect.Parameter) -> str:
    mark = next((mark for mark, kind in MARKS.items() if given.kind is kind), "")
    default = "" if given.default is given.empty else f" = {given.default!r}".replace("'", '"')
    return f"{mark}{given.name}: {public(given.annotation)}{default}"


def signature(operation: Any, name: str) -> str:
    """The definition of a function of arrays in a stub, in the lines that ruff would make of it."""
    function = getattr(operation, "function", operation)
    parts = [parameter(given) for given in inspect.signature(function).parameters.values()]
    result = re.sub(r"\bArray\b", "X", function.__annotations__["return"])
    one = f"def {name}({', '.join(parts)}) -> {result}: ..."
    if len(one) <= WIDTH:
        return one
    two = f"    {', '.join(parts)}"
    inner = two if len(two) <= WIDTH else "".join(f"    {part},\n" for part in parts).rstrip("\n")
    return f"def {name}(\n{inner}\n) -> {result}: ..."


def stub(module: ModuleType) -> str:
    """The stub of a module that exports operations: their signatures, and the other names from where they are."""
    found = [(name, thing) for name, thing in sorted(vars(module).items()) if callable(thing) and name[0] != "_"]
    found = [(name, thing) for name, thing in found if not thing.__module__.startswith(TOOLS)]
    own = {name for name, thing in found if REGISTRY.get(name) is thing or thing.__module__ == module.__name__}
    other = [f"from {thing.__module__} import {thing.__name__} as {name}" for name, thing in found if name not in own]
    starred = [f"__all__ = {sorted(module.__all__)}".replace("'", '"'), ""] if hasattr(module, "__all__") else []
    lines = [signature(thing, name) for name, thing in found if name in own]
    return HEADER.format(name=module.__name__) + "\n".join([*sorted(other), "", *starred, *lines]) + "\n"


STUBS = {
    "minigrad.ops": "minigrad/ops/__init__.pyi",
    "minigrad.linalg": "minigrad/linalg.pyi",
    "minigrad.kernels.operations": "minigrad/kernels/operations.pyi",
}

if __name__ == "__main__":
    for name, place in STUBS.items():
        (ROOT / place).write_text(stub(importlib.import_module(name)))
