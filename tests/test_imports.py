"""Who may import whom: the order in which the engine is built, and in which it can be read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    ["errors"],
    ["backend"],
    ["messages"],
    ["machine", "cuda"],
    ["engine"],
    ["ops"],
    ["kernels"],
    ["tensor", "autocast"],
    ["creation", "random", "serialize", "instruments"],
    ["checkpointing"],
    ["functional"],
    ["testing"],
    ["aliases"],
    ["nn", "optim"],
]
ALIASES = ("nn", "optim")  # of the packages, for people who have others of these names
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
STANDARD_OR_DECLARED = {"numpy", "safetensors", "threadpoolctl", "ml_dtypes", "graphviz"}


def imports(path: Path) -> list[tuple[str, ast.AST]]:
    """Every module that a file imports, anywhere in it, as dotted names."""
    found: list[tuple[str, ast.AST]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            package = ".".join(path.relative_to(ROOT).parts[: -node.level])
            found += [(f"{package}.{node.module}" if node.module else f"{package}.{a.name}", node) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"minigrad.{a.name}" for a in node.names] if node.module == "minigrad" else [node.module]
            found += [(name, node) for name in names]
    return found


FILES = sorted(p.relative_to(ROOT) for folder in ("minigrad", "nn", "optim") for p in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path: Path) -> None:
    package, here = path.parts[0], path.with_suffix("").parts[1]
    for name, node in imports(ROOT / path):
        parts = name.split(".")
        assert parts[0] not in ("torch", "tqdm", "examples", "hypothesis", "pytest"), f"{path} imports {name}"
        if package != "minigrad":
            assert parts[0] not in {"nn", "optim"} - {package}, f"{path} imports {name}"
            assert parts[0] != package or getattr(node, "level", 0), (
                f"{path} imports {name} by its full name, which may be another's"
            )
        else:
            assert parts[0] not in ("nn", "optim") or here in ALIASES, f"{path} imports {name}"
            if parts[0] == "minigrad" and len(parts) > 1 and here != "__init__":
                assert RANK[parts[1]] <= RANK[here], f"{path} imports {name}, which is built on it"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_only_backend_imports_cupy_and_nothing_imports_inside_a_function(path: Path) -> None:
    tree = ast.parse((ROOT / path).read_text())
    inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for name, node in imports(ROOT / path):
        assert name.split(".")[0] != "cupy" or path.name == "backend.py"
        optional = name.split(".")[0] in ("cupy", "ml_dtypes", "graphviz")
        same = next((n for n in inside if isinstance(n, type(node)) and n.lineno == node.lineno), None)  # type: ignore[attr-defined]
        assert same is None or optional, f"{path}:{node.lineno} imports {name} inside a function"  # type: ignore[attr-defined]


def test_no_circles_among_modules_of_one_layer() -> None:
    graph = {p: {n for n, _ in imports(ROOT / p) if n.startswith(str(p.parts[0]))} for p in FILES}
    dotted = {".".join(p.with_suffix("").parts): p for p in FILES}
    seen: dict[Path, int] = {}

    def visit(path: Path, stack: tuple[Path, ...]) -> None:
        assert path not in stack, f"a circle: {' -> '.join(map(str, (*stack, path)))}"
        if path not in seen:
            for name in graph[path]:
                if name in dotted:
                    visit(dotted[name], (*stack, path))
            seen[path] = 1

    for path in FILES:
        visit(path, ())
