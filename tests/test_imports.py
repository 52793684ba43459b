"""Who may import whom: the order in which the engine is built, and in which it can be read."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    ["errors"],
    ["files", "captures"],
    ["backend"],
    ["messages"],
    ["machine", "cuda_graphs", "cuda"],
    ["engine"],
    ["ops"],
    ["kernels", "linalg"],
    ["tensor", "autocast", "numpy_protocol"],
    ["creation", "random", "serialize", "instruments", "special", "stats"],
    ["checkpointing", "distributed"],
    ["trees", "forward", "rows"],
    ["traced"],
    ["functional"],
    ["testing", "integrate"],
    ["bundled_packages"],
    ["nn", "optim"],
]
LAYER = {name: height for height, names in enumerate(LAYERS) for name in names}
ALIASES = {"minigrad/nn.py", "minigrad/optim.py"}  # of the packages, for people who have others of these names
BELOW = {"minigrad": {"minigrad"}, "nn": {"minigrad", "nn"}, "optim": {"minigrad", "optim"}}
AT_IMPORT = {*sys.stdlib_module_names, "numpy", "safetensors", "threadpoolctl"}
WHEN_USED = {  # and the one file that imports it
    "cupy": "minigrad/backend.py",
    "gguf": "nn/compressing/gguf.py",
    "ml_dtypes": "minigrad/backend.py",
    "mpi4py": "minigrad/distributed/mpi.py",
    "numba": "minigrad/machine/loops.py",
}
FILES = sorted(p.relative_to(ROOT) for folder in BELOW for p in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every module that a file imports, as a dotted name, and whether it does so inside of a function.

    What stands under TYPE_CHECKING is imported by nobody.
    """
    tree = ast.parse((ROOT / path).read_text())
    checked = [
        part for part in ast.walk(tree) if isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING"
    ]
    unread = {node for part in checked for statement in part.body for node in ast.walk(statement)}
    inside = {node for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            package = ".".join(path.parts[: -node.level])
            names = [f"{package}.{node.module or alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"minigrad.{a.name}" for a in node.names] if node.module == "minigrad" else [node.module]
        found += [(name, node in inside) for name in names if node not in unread]
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path: Path) -> None:
    """Packages import what is below them, parts of minigrad what is in their layer or below."""
    package, here = path.parts[0], path.with_suffix("").parts[1]
    for name, _ in imports(path):
        top, *rest = name.split(".")
        above = {"nn", "optim"} if path.as_posix() in ALIASES else set()
        assert top in BELOW[package] | AT_IMPORT | WHEN_USED.keys() | above, f"{path} imports {name}"
        if package == top == "minigrad" and rest and here != "__init__":
            assert LAYER[rest[0]] <= LAYER[here], f"{path} imports {name}, which is built on it"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_only_what_is_optional_is_imported_inside_a_function_and_only_by_one_file(path: Path) -> None:
    for name, inside in imports(path):
        owner = WHEN_USED.get(name.split(".")[0])
        assert inside == (owner is not None), f"{path} imports {name} {'inside' if inside else 'outside'} of a function"
        assert owner in (None, path.as_posix()), f"{path} imports {name}, which {owner} does for all"


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] != "minigrad"], ids=str)
def test_nn_and_optim_import_themselves_from_a_dot_on(path: Path) -> None:
    """By the full name they might get another distribution's package."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert not any(name.split(".")[0] == path.parts[0] for name in names), f"{path} imports {names}"


def test_no_circles_among_modules() -> None:
    files = {".".join(path.with_suffix("").parts): path for path in FILES}
    done: set[Path] = set()

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, f"a circle: {' -> '.join(map(str, (*above, path)))}"
        if path not in done:
            for name, _ in imports(path):
                if name in files:
                    visit(files[name], (*above, path))
            done.add(path)

    for path in FILES:
        visit(path, ())
