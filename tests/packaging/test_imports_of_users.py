"""What ``import minigrad, nn, optim`` loads, and that ``minigrad.nn`` is ``nn`` in a checkout too."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import minigrad.nn
import minigrad.optim
import nn
import optim

ROOT = Path(__file__).parents[2]
HEAVY = [
    "torch", "scipy", "cupy", "tqdm", "matplotlib", "numba", "mpi4py", "transformers", "tokenizers", "jax", "pandas",
    "graphviz", "hypothesis", "pytest", "unittest", "asyncio", "http", "multiprocessing", "sqlite3", "xml", "ssl",
]  # fmt: skip


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after ``statement``."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_importing_loads_nothing_heavy() -> None:
    """A budget in modules, not in seconds: NumPy, safetensors and threadpoolctl are what the packages may load."""
    before = loaded_by("import numpy, numpy.random, numpy.linalg, safetensors.numpy, threadpoolctl")
    added = loaded_by("import minigrad, nn, optim") - before
    ours = {name for name in added if name.split(".")[0] in ("minigrad", "nn", "optim")}
    assert {name.split(".")[0] for name in added - ours} <= sys.stdlib_module_names | {"numpy"}
    assert not {name.split(".")[0] for name in added} & set(HEAVY)
    assert len(added - ours) <= 40, sorted(added - ours)


def test_minigrad_alone_loads_neither_nn_nor_optim() -> None:
    assert not {name.split(".")[0] for name in loaded_by("import minigrad")} & {"nn", "optim"}


@pytest.mark.parametrize("first", ["nn", "minigrad.nn"])
def test_the_alias_is_the_package_whichever_comes_first(first: str) -> None:
    second = "minigrad.nn" if first == "nn" else "nn"
    check = "import minigrad.nn.linear as a, nn.linear as b; assert a is b and minigrad.nn is nn"
    assert "nn" in loaded_by(f"import {first}, {second}; import minigrad, nn; {check}")


def test_every_module_has_its_alias() -> None:
    """None is loaded a second time under the longer name, so that each class exists once."""
    for package in (nn, optim):
        for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            assert importlib.import_module(f"minigrad.{name}") is importlib.import_module(name)
    assert minigrad.nn is nn and minigrad.optim is optim
    assert type(pickle.loads(pickle.dumps(minigrad.nn.Linear(1, 1)))) is nn.Linear
