"""The program that a machine with a GPU will run, at tiny sizes on the simulated one."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu_check
from gpu.measured_kernels import kernels, leaves
from gpu.tools import OF_THE_HOST, suite

import minigrad as mg
from minigrad.engine.fused import Fused


def test_every_check_ends_well(
    simulated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    monkeypatch.setenv("OUT", str(tmp_path))
    checks = [name for name in gpu_check.CHECKS if name not in ("suite", "sanitizer")]  # which are programs of others
    assert gpu_check.main(["--here", "--quick", "--only", *checks]) == 0
    rows = gpu_check.collected(tmp_path)
    assert json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    assert not [row for row in rows if row[2] == "FAILED"] and len(rows) > 100 and "off by" in capsys.readouterr().out


def test_a_check_that_fails_or_hangs_leaves_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error in a row, an error in a check, a process that dies, and one that is stopped: the rest is told."""

    def check(task: gpu_check.Task) -> Any:
        yield "first", "1", "ok"
        yield from task.rows([("bad", lambda: 1 / 0), ("good", lambda: ("2", "ok"))])
        raise ValueError("all of it")

    monkeypatch.setitem(gpu_check.CHECKS, "losses", (check, 9.0))
    gpu_check.run_here("losses", argparse.Namespace(quick=True, seconds=1e6), tmp_path)
    dies = tmp_path / "dies.py"
    dies.write_text("import os, sys; sys.stdin.read() if 'kernels' in sys.argv else os.abort()")
    monkeypatch.setattr(gpu_check, "__file__", str(dies))
    gpu_check.run_apart("training", 60, True, tmp_path)
    read, write = os.pipe()  # what the second one waits for
    stdin = os.dup(0)
    os.dup2(read, 0)
    try:
        gpu_check.run_apart("kernels", 0.2, True, tmp_path)
    finally:
        os.dup2(stdin, 0)
        for each in (read, write, stdin):
            os.close(each)
    rows = {what: (figure, verdict) for what, figure, verdict in gpu_check.collected(tmp_path)}
    assert rows["first"] == ("1", "ok") and rows["good"] == ("2", "ok")
    assert rows["bad"] == ("ZeroDivisionError: division by zero", "FAILED")
    assert rows["losses"] == ("ValueError: all of it", "FAILED")
    assert rows["-- training"] == ("ended with code -6", "FAILED")
    assert rows["-- kernels"] == ("stopped: it did not end in time", "FAILED")


def test_every_operation_with_kernels_for_a_gpu_is_compared_and_timed() -> None:
    """Those with a ``defgpu``, and the two that call their launchers themselves."""
    with mg.profile() as p:
        for kernel in kernels(1, 2, 8, 2, 8, 5):
            kernel.call(*leaves(kernel, np.float32, "cpu"))
    wanted = {op.name for op in mg.REGISTRY.values() if isinstance(op, Fused) and op.gpu} | {"apply_rope", "drop"}
    assert wanted <= {event.operation for event in p.events}


def test_the_suite_is_every_file_of_tests_for_a_gpu() -> None:
    """No file is left out or run twice, but for the operations, which run in each dtype."""
    told = [name for files in suite().values() for name in files if name.endswith(".py")]
    here = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert {*told} == here - OF_THE_HOST
    assert len(told) == len({*told}) + 3


def test_floors_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The head of 16 384 rows and 32 000 classes moves three times its logits: 3 · 2 bytes · 524 million.

    Attention has seven products of 2 · 64 FLOP for 192 heads and 1024 · 1025 / 2 pairs.
    """
    assert gpu_check.main(["--floors"]) == 0
    told = capsys.readouterr().out
    assert "3,146 MB" in told and "90 GFLOP, on tensor cores 100 %, TF32 0 %" in told
