"""The cases of a real loop on 2 and 4 processes, all of a number in one launch; and ranks that are silent."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.cpu_only("starts processes of its own")
CASES = [
    node.name
    for node in ast.parse((HERE / "loop_cases.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(mark) == "case" for mark in node.decorator_list)
]


@pytest.fixture(scope="session")
def passed(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The cases that passed on so many ranks, and what the ranks said."""
    found: dict[int, tuple[list[str], str]] = {}

    def on(ranks: int) -> tuple[list[str], str]:
        if ranks not in found:
            folder = tmp_path_factory.mktemp(f"loops{ranks}")
            done = launch(ranks, HERE / "loop_cases.py", folder)
            found[ranks] = (folder / "passed").read_text().split() if (folder / "passed").exists() else [], done.stderr
        return found[ranks]

    return on


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_loop(passed: Any, ranks: int, name: str) -> None:
    """One case of loop_cases.py; where one fails, those behind it don't run."""
    names, said = passed(ranks)
    assert name in names, said


SILENT = """if True:
    import os, signal, sys, time
    import numpy as np
    import minigrad as mg
    mg.distributed.init(timeout=0.5)
    mg.distributed.barrier()
    if mg.distributed.rank() == 1:
        {act}
    mg.distributed.all_reduce(np.ones(3))
"""


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "no sign of life of rank 1 of 2 (process "),
        ("time.sleep(1000)", "no sign of life of rank 1 of 2 (process "),
        ("sys.exit(0)", "no sign of life of rank 1 of 2 (process "),
        ("mg.distributed.all_gather(np.ones(3))", "in exchange 2, all_gather"),
    ],
)
def test_a_rank_that_is_silent_ends_all_and_is_named(launch: Any, act: str, said: str) -> None:
    done = launch(2, "-c", SILENT.format(act=act))
    assert done.returncode != 0
    assert said in done.stderr and "all ranks end" in done.stderr, done.stderr
