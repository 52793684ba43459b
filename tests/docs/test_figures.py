"""The figures of speed in README.md and docs/performance.md are those of benchmarks/results.md; the tables of
docs/attention.md those of benchmarks/results/.

``python tests/docs/test_figures.py`` copies them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import attention
import attention_study

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results.md"
PAGES = [ROOT / "README.md", ROOT / "docs" / "performance.md"]
ROW = re.compile(r"^\| (\w+): (.*?) \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", re.MULTILINE)


def ratios() -> dict[str, tuple[float, float, float]]:
    """For each configuration torch's time over ours, on NumPy and with numba, and our memory on NumPy over torch's."""
    written = RESULTS.read_text().split("<!-- written by hand")[0]
    found = {}
    for section in written.split("\n## ")[1:]:
        table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
        rows = [[cell.strip() for cell in row] for row in table]
        engines = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
        cells = [("minigrad", "torch = 1"), ("minigrad+numba", "torch = 1"), ("minigrad", "memory")]
        speed, compiled, memory = (float(engines[name][column].rstrip("x")) for name, column in cells)
        found[section.split("\n")[0]] = (speed, compiled, memory)
    return found


def command() -> str:
    """The command of the tables, which stands at their head."""
    return re.search(r"^`(python benchmarks/compare\.py .*)`$", RESULTS.read_text(), re.MULTILINE)[1]  # type: ignore[index]


def copied(page: Path) -> str:
    """The page with the figures, and the command that gives them, as they are in the results."""
    now = ratios()
    numbers = {name: " | ".join(f"{number:.2f}" for number in row) for name, row in now.items()}
    text = ROW.sub(lambda m: f"| {m[1]}: {m[2]} | {numbers[m[1]]} |", page.read_text())
    return re.sub(r"^`python benchmarks/compare\.py .* --write`$", f"`{command()}`", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_figures_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert [row[0] for row in ROW.findall(text)] == list(ratios())
    assert f"`{command()}`" in text.splitlines()
    assert text == copied(page), "python tests/docs/test_figures.py copies them"


def test_the_tables_of_attention_are_those_of_the_results() -> None:
    text = attention.PAGE.read_text()
    for program in (attention, attention_study):
        assert text == program.page(program.read(program.RESULTS)), "python tests/docs/test_figures.py copies them"


if __name__ == "__main__":
    for program in (attention, attention_study):
        program.PAGE.write_text(program.page(program.read(program.RESULTS)))
    for page in PAGES:
        page.write_text(copied(page))
