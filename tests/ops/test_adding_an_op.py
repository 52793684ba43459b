"""docs/adding-an-op.md followed to the letter: in a copy of the project, with the tests that the registry then runs."""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-an-op.md"
TABLE = "minigrad/ops/elementwise.py"


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
        ignored = shutil.ignore_patterns("__pycache__", "*.txt")
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name, **({"ignore": ignored} if copy is shutil.copytree else {}))
    assert f"`{TABLE}`" in PAGE.read_text()
    table = folder / TABLE
    text = table.read_text().replace('"exp", "exp2",', '"exp", "exp2", "softsign",', 1)
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
