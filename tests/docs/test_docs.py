"""The code in docs/ and README.md runs as it stands there, and prints what is written there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import code_lines
import pytest

import minigrad as mg
from minigrad.engine import backward, core
from minigrad.kernels.cuda.launching import DECLARED

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_CODE = [page for page in PAGES if ">>> " in page.read_text()]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_examples_of_a_page(page: Path) -> None:
    text = page.read_text().replace("```python\n", "").replace("```\n", "\n")
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
    assert runner.tries > 0


def test_the_table_of_cuda_kernels_names_all_of_them() -> None:
    sources = [source for folder in ("minigrad", "optim") for source in (ROOT / folder).rglob("*.cu")]
    kernels = {f"{source.name}: {name}" for source in sources for name, _ in DECLARED.findall(source.read_text())}
    table = re.findall(r"^(\w+\.cu: \w+) ", (ROOT / "docs" / "cuda.md").read_text(), re.MULTILINE)
    assert sorted(kernels) == table


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("[A-Z]*.md"))], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    """Links within the project, and paths of files that stand in code."""
    text = page.read_text()
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", re.sub("`[^`]*`", "", text)):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:minigrad|nn|optim|tests|docs|benchmarks|examples)/[\w/.-]+)`", text):
        assert (ROOT / path).exists() or "*" in path, path


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == pages


def test_the_first_evening_is_the_whole_engine() -> None:
    table = (ROOT / "README.md").read_text().split("The engine takes one evening")[1].split("\nA second evening")[0]
    files = {path.name for path in (ROOT / "minigrad" / "engine").glob("[a-z]*.py")}
    assert set(re.findall(r"(\w+\.py)\]", table.replace("minigrad/engine/", ""))) == files
    lines = sum(count for name, count in code_lines.table().items() if name.startswith("minigrad/engine/"))
    most = re.search(r"at most (\d+) lines", table)
    assert most is not None and lines <= int(most[1])


def test_how_it_works_names_what_is_there() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    methods = set(re.findall(r"`(Primitive|Pass|Tensor)\.(\w+)`", text))
    assert len(methods) >= 4
    for owner, method in methods:
        assert hasattr({"Primitive": core.Primitive, "Pass": backward.Pass, "Tensor": mg.Tensor}[owner], method), method
