"""The code in docs/ and README.md runs as it stands there, and prints what is written there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

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
    kernels = {
        f"{source.name}: {name}"
        for source in sources
        for name in re.findall(r'^extern "C" __global__ void (\w+)', source.read_text(), re.MULTILINE)
    }
    table = re.findall(r"^(\w+\.cu: \w+) ", (ROOT / "docs" / "cuda.md").read_text(), re.MULTILINE)
    assert sorted(kernels) == table
