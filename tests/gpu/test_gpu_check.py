"""The program that a machine with a GPU will run, at tiny sizes on the simulated one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu_check


def test_every_check_ends_well(
    simulated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_check.main(["--quick", "--only", "compare", "losses", "kernels", "training"]) == 0
    rows = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    assert len(rows) > 60 and "off by" in capsys.readouterr().out


def test_floors_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The head of 16 384 rows and 32 000 classes moves three times its logits: 3 · 2 bytes · 524 million."""
    assert gpu_check.main(["--floors"]) == 0
    assert "3,146 MB" in capsys.readouterr().out
