"""Showing results: one kind of table, for the terminal and Markdown alike, and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def number(value: float | None, digits: int = 3) -> str:
    """``value`` with about three significant digits and no exponent; an empty cell for None."""
    if value is None:
        return ""
    size = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - size) if value else 0}f}"


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, columns aligned: the first to the left, the others to the right."""
    cells = [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        for row in (list(headers), rule, *cells)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def put(page: str, name: str, text: str) -> str:
    """The page with ``text`` in its place: between the comments ``<!-- name -->`` and ``<!-- end -->``."""
    start, end = f"<!-- {name} -->\n", "<!-- end -->"
    before, rest = page.split(start)
    return f"{before}{start}{text}\n{rest[rest.index(end) :]}"


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser for a benchmark's command line, with what every benchmark takes."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--json", type=Path, metavar="PATH", help="also write the results there")
    return result


def write_json(path: Path | None, results: Any) -> None:
    """Write ``results`` to ``path``, if one was given."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")
