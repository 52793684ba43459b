"""Real processes: programs under mpiexec, skipped where no MPI is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def mpiexec() -> list[str]:
    """The command that starts ranks: the one beside this Python, else that on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None or find_spec("mpi4py") is None:
        pytest.skip("no MPI is installed: pip install -e '.[mpi]' brings one")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60).stdout
    return [found, "--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version else [found]


@pytest.fixture(scope="session")
def launch(mpiexec: list[str]) -> Launch:
    """Run a Python program on so many ranks."""

    def run(ranks: int, *program: Any, **more: Any) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "examples", ROOT / "tests"))),
            "MINIGRAD_NUM_THREADS": "1",
            "MINIGRAD_COMPILED": "0",  # a small model would be compiled for longer than it is trained
        }
        command = [*mpiexec, "-n", str(ranks), sys.executable, *map(str, program)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, **more)

    return run
