"""``mpiexec -n N python examples/train_lm.py``: the run of one process, whatever N, also where N changes under way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / "examples" / "train_lm.py"
SMALL = [
    "--n-embd", "16", "--n-layer", "1", "--n-head", "2", "--block-size", "16", "--batch-size", "6",
    "--gradient-accumulation-steps", "2", "--learning-rate", "0.01", "--warmup-iters", "1", "--lr-decay-iters", "6",
    "--eval-interval", "2", "--eval-iters", "3", "--log-interval", "1", "--sample-tokens", "3", "--no-progress",
]  # fmt: skip


def log(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_losses_are_those_of_one_process_and_a_run_goes_on_with_other_ranks(launch: Any, tmp_path: Path) -> None:
    """Three ranks for four updates, then two for two more, beside one process for six."""
    alone = launch(1, TRAINER, *SMALL, "--max-iters", "6", "--out-dir", tmp_path / "one")
    assert alone.returncode == 0, alone.stderr
    for ranks, updates in ((3, 4), (2, 6)):
        done = launch(ranks, TRAINER, *SMALL, "--max-iters", str(updates), "--out-dir", tmp_path / "several")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"step {updates}/{updates} |") == 1, "rank 0 alone prints"
        assert f"{ranks} processes of 1 threads" in done.stdout
    one, several = log(tmp_path / "one"), log(tmp_path / "several")
    assert [line["step"] for line in several] == [line["step"] for line in one] == list(range(7))
    for a, b in zip(one, several, strict=True):
        for name in ("train_loss", "val_loss", "grad_norm", "lr"):
            assert b[name] == (None if a[name] is None else pytest.approx(a[name], rel=1e-6)), (a["step"], name)


def test_a_bad_flag_is_one_line_and_status_2(launch: Any, tmp_path: Path) -> None:
    done = launch(2, TRAINER, *SMALL, "--batch-size", "5", "--out-dir", tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["train_lm.py: --batch-size: expected a multiple of the 2 processes, got 5"]


def test_sigterm_to_mpiexec_saves_and_stops(mpiexec: list[str], tmp_path: Path) -> None:
    if len(mpiexec) > 1:
        pytest.skip("Open MPI's mpiexec ends its processes a second after SIGTERM")
    command = [*mpiexec, "-n", "2", sys.executable, str(TRAINER), *SMALL, "--max-iters", "1000000"]
    command += ["--out-dir", str(tmp_path), "--eval-interval", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MINIGRAD_NUM_THREADS": "1", "MINIGRAD_COMPILED": "0"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        until = time.monotonic() + 100
        metrics = tmp_path / "metrics.jsonl"
        while time.monotonic() < until and run.poll() is None and not (metrics.exists() and len(log(tmp_path)) > 3):
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=60)
    assert "stopped by SIGTERM, saved" in out, err
    steps = [int(path.name.removeprefix("step_")) for path in tmp_path.glob("step_*")]
    assert max(steps) == log(tmp_path)[-1]["step"] >= 3
