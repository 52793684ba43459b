"""Lines of code, comments, docstrings and blank lines apart: ``python tests/code_lines.py`` prints the table."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUMS = {
    "the engine": ("minigrad/engine/",),
    "backend and messages": ("minigrad/backend.py", "minigrad/messages/"),
    "all": ("",),
}


def code_lines(path: Path) -> int:
    """The number of lines on which a token of code stands."""
    source = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            prose |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def table() -> dict[str, int]:
    """Lines of code of each file of the three packages."""
    files = sorted(p for folder in ("minigrad", "nn", "optim") for p in (ROOT / folder).rglob("*.py"))
    return {str(p.relative_to(ROOT)): code_lines(p) for p in files}


def main() -> None:
    """Print the table and the sums: of the engine, of what it is built on, of all."""
    rows = table()
    for name, count in rows.items():
        print(f"{count:6} {name}")
    for what, parts in SUMS.items():
        print(f"{sum(count for name, count in rows.items() if name.startswith(parts)):6} in {what}")


if __name__ == "__main__":
    main()
