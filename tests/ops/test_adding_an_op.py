"""docs/adding-an-op.md followed to the letter: in a copy of the project, with the tests that the registry then runs."""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minigrad as mg

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-an-op.md"
TABLE = "minigrad/ops/more_elementwise.py"


def code(page: Path) -> list[str]:
    """The statements of a page's examples, without their prompts."""
    return [example.source for example in doctest.DocTestParser().get_examples(page.read_text())]


def the_op(page: Path) -> str:
    """From the decorator to the rule: what the page types."""
    statements = code(page)
    stop = next(i for i, source in enumerate(statements) if "softsign.defvjp" in source)
    start = max(i for i in range(stop) if "@mg.elementwise" in statements[i])
    return "\n".join(statements[start : stop + 1])


def copied(folder: Path) -> Path:
    """A copy of the project, the op appended to its table and named in ``__all__``, as steps 1 and 3 say."""
    for name in ("minigrad", "nn", "optim", "tests", "examples", "pyproject.toml"):
        ignored = shutil.ignore_patterns("__pycache__", "data")
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name, **({"ignore": ignored} if copy is shutil.copytree else {}))
    assert f"`{TABLE}`" in PAGE.read_text()
    table = folder / TABLE
    text = table.read_text().replace('"sinc"]', '"sinc", "softsign"]', 1)
    assert '"softsign"' in text
    table.write_text(f"{text}\n\n{the_op(PAGE).replace('mg.', '')}")
    return folder


def registry_tests(folder: Path) -> str:
    """What the command of the page prints, run in ``folder``."""
    (command,) = re.findall(r"^pytest (.*softsign)$", PAGE.read_text(), re.MULTILINE)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    arguments = [sys.executable, "-m", "pytest", *command.split(), "-q", "-p", "no:cacheprovider"]
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True).stdout


def test_the_registry_tests_the_op_that_the_page_adds(tmp_path: Path) -> None:
    """The command of the page finds the op's tests, of every kind, and they pass."""
    out = registry_tests(copied(tmp_path))
    passed = re.search(r"^(\d+) passed, \d+ deselected", out, re.MULTILINE)
    assert passed is not None and int(passed[1]) >= 20, out


def test_the_readme_shows_the_same_op() -> None:
    """One body: the README leaves out nothing but the example in the docstring."""
    page = re.sub(r"\.\n\n    >>> .*?\n    \"\"\"", '."""', the_op(PAGE), flags=re.DOTALL)
    assert the_op(ROOT / "README.md") == page


def test_arguments_are_checked_by_annotations_however_they_are_written() -> None:
    """The page's ``half_sum``, with annotations that are objects, text, and text that names a module."""
    ends = ["(x: mg.backend.Array, axis: int)", "(x: 'mg.backend.Array', axis: 'int')", "(x: 'Array', axis: int)"]
    for place, signature in enumerate(ends):
        name, names = f"half_sum_{place}", {"mg": mg}
        source = f"def {name}{signature}:\n    return 0.5 * x.sum(axis=axis)"
        exec(compile(source, "half_sum", "exec", dont_inherit=True), names)
        op = mg.primitive(torch=False, numpy=False, samples=[mg.sample((2, 3), axis=1)])(names[name])
        try:
            np.testing.assert_array_equal(op([[1.0, 2.0], [4.0, 6.0]], axis=1), [1.5, 5.0])
            with pytest.raises(mg.errors.CallError, match=f"a whole number for 'axis' of {name}"):
                op(np.ones((2, 3)), axis="1")
        finally:
            del mg.REGISTRY[name]
