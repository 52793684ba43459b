"""What users call, as a golden file: a name or an argument that goes or changes is seen here first.

``public_api.txt`` has a line for each public name of ``minigrad``, ``nn``, ``nn.functional`` and ``optim``, with its
arguments, and for each public method. ``python tests/packaging/test_public_api.py`` writes it anew; the change then
belongs into CHANGELOG.md.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("public_api.txt")
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import minigrad as mg  # noqa: E402
import nn  # noqa: E402
import optim  # noqa: E402

MODULES = {
    "mg": mg, "mg.cuda": mg.cuda, "mg.functional": mg.functional, "mg.linalg": mg.linalg,
    "mg.random": mg.random, "mg.special": mg.special, "mg.stats": mg.stats,
    "nn": nn, "nn.functional": nn.functional, "optim": optim,
}  # fmt: skip


def public(module: ModuleType) -> list[str]:
    """The public names of a module: those of ``__all__``, or what it defines itself."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return sorted(name for name in getattr(module, "__all__", own) if not name.startswith("_"))


PUBLIC = {value for module in MODULES.values() for name in public(module) if callable(value := getattr(module, name))}


def arguments(value: Any) -> str:
    """The arguments of a call without annotations, which type checkers compare better."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return re.sub(r"<(\w+) ([\w.]+)[^>]*>", r"<\1 \2>", text)


def lines() -> Iterator[str]:
    """The lines of the golden file."""
    for prefix, module in MODULES.items():
        for name in public(module):
            value = getattr(module, name)
            if not callable(value):
                yield f"{prefix}.{name}"
                continue
            yield f"{prefix}.{name}{arguments(value)}"
            if isinstance(value, type) and value.__name__ == name:
                yield from members(f"{prefix}.{name}", value)


def members(prefix: str, kind: type) -> Iterator[str]:
    """The public methods and properties of a class, but for those of a public class that it is derived from.

    What is refused with a hint, as a name of torch, is none.
    """
    for name in sorted(name for name in dir(kind) if not name.startswith("_") and hasattr(kind, name)):
        owner = next(base for base in kind.__mro__ if name in vars(base))
        ours = owner.__module__.split(".")[0] in ("minigrad", "nn", "optim")
        if ours and (owner is kind or owner not in PUBLIC):
            value = getattr(kind, name)
            if callable(value):
                yield f"{prefix}.{name}{arguments(value)}"
            elif isinstance(value, property):
                yield f"{prefix}.{name}"


def test_the_public_names_and_their_arguments_are_those_of_the_golden_file() -> None:
    """Seen as two sets of lines, so that a failure shows what came and what went."""
    now, golden = list(lines()), GOLDEN.read_text().splitlines()
    hint = "python tests/packaging/test_public_api.py writes the file anew; tell of it in CHANGELOG.md"
    assert set(now) - set(golden) == set() and set(golden) - set(now) == set(), hint
    assert len(now) == len(set(now)) > 400


def test_every_public_name_is_documented() -> None:
    """A function or class of ours says in a first sentence what it is; what is an alias says so by what it names."""
    silent = [
        f"{prefix}.{name}"
        for prefix, module in MODULES.items()
        for name in public(module)
        if callable(value := getattr(module, name))
        and not re.match(r"\S.*?\.(\s|$)", inspect.getdoc(value) or "", re.DOTALL)
    ]
    assert silent == []


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{line}\n" for line in lines()))
