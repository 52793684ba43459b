"""The examples in the docstrings of the programs' modules are true."""

import doctest
import importlib
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "examples"
MODULES = sorted(
    ".".join(path.relative_to(PROGRAMS).with_suffix("").parts)
    for path in PROGRAMS.rglob("*.py")
    if path.parent.name != "data" and path.name not in ("__init__.py", "autograd_tour.py")
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0
