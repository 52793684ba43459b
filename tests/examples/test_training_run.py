"""The conduct of a run: what is due when, what a folder holds, going on, stopping. No model: a walk of random steps."""

import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.walk import Config, Trainer, metrics
from training import run as training_run
from training.checkpoint import open_checkpoint, steps_in
from training.console import StopSignals, Throughput, run_program, size
from training.run import Run, open_run

from minigrad.errors import ArgumentError

KEYS = ["step", "train_loss", "val_loss", "perplexity", "lr", "grad_norm", "tokens_per_s", "seconds"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


# ---- what is due -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iterations", "interval", "evaluated"),
    [(3, 2, [0, 2, 3]), (4, 2, [0, 2, 4]), (3, 0, [0, 3]), (0, 1, [0]), (2, 1, [0, 1, 2])],
)
def test_exactly_n_updates_and_every_evaluation_once(
    out: Path, iterations: int, interval: int, evaluated: Sequence[int]
) -> None:
    trainer = Trainer()
    assert trainer(f"--out-dir={out}", f"--max-iters={iterations}", f"--eval-interval={interval}") == 0
    assert trainer.updated == list(range(1, iterations + 1))
    assert trainer.evaluated == evaluated
    assert trainer.sampled == [iterations]
    assert open_checkpoint(out).step == iterations
    lines = metrics(out)
    assert [line["step"] for line in lines if line["val_loss"] is not None] == evaluated
    assert all(list(line) == KEYS for line in lines)
    assert lines[-1]["perplexity"] == pytest.approx(np.exp(lines[-1]["val_loss"]))


def test_intervals_of_log_checkpoints_and_samples(out: Path) -> None:
    trainer = Trainer(losses=lambda step: 1.0)
    intervals = ["--eval-interval=0", "--log-interval=3", "--checkpoint-interval=4", "--sample-every=5"]
    assert trainer(f"--out-dir={out}", "--max-iters=10", "--keep-checkpoints=9", *intervals) == 0
    assert [line["step"] for line in metrics(out)] == [0, 3, 6, 9, 10]
    assert steps_in(out) == [0, 4, 8, 10]
    assert trainer.sampled == [5, 10]


def test_the_best_checkpoint_stays_when_the_loss_rises(out: Path) -> None:
    losses = {0: 3.0, 1: 2.0, 2: 4.0, 3: 5.0, 4: 6.0}
    flags = (f"--out-dir={out}", "--eval-interval=1", "--checkpoint-interval=1")
    assert Trainer(losses.__getitem__)(*flags, "--max-iters=2") == 0
    assert Trainer(losses.__getitem__)(*flags, "--max-iters=4") == 0
    assert steps_in(out) == [1, 3, 4]
    assert (out / "best").read_text() == "step_00000001\n"
    assert (out / "latest").read_text() == "step_00000004\n"
    assert (open_checkpoint(out).meta["best_loss"], open_checkpoint(out).meta["best_step"]) == (2.0, 1)


# ---- going on --------------------------------------------------------------------------------------------------------


def test_a_continued_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole_run, parts = tmp_path / "whole", tmp_path / "parts"
    assert Trainer()(f"--out-dir={whole_run}", "--max-iters=7", "--log-interval=1") == 0
    assert Trainer()(f"--out-dir={parts}", "--max-iters=4", "--log-interval=1") == 0
    later = Trainer()
    assert later(f"--out-dir={parts}", "--max-iters=7") == 0  # --log-interval is the run's own
    assert later.updated == [5, 6, 7]
    files = [folder / "step_00000007" / "walk.safetensors" for folder in (whole_run, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert [line["step"] for line in metrics(parts)] == list(range(8))
    assert metrics(parts)[-1]["seconds"] >= metrics(parts)[3]["seconds"]


def test_a_run_that_goes_on_with_or_without_compiled_loops_says_that_bits_will_differ(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, (compiled, told) in enumerate([(True, ""), (True, ""), (False, "compiled loops"), (True, "NumPy alone")]):
        monkeypatch.setattr("minigrad.is_compiled", lambda compiled=compiled: compiled)
        assert Trainer()(f"--out-dir={out}", f"--max-iters={step}") == 0
        assert open_checkpoint(out).meta["compiled"] is compiled
        warning = capsys.readouterr().err
        assert ("last bits" in warning) == bool(told)
        assert told in warning


def test_lines_after_the_checkpoint_are_dropped(out: Path) -> None:
    flags = (f"--out-dir={out}", "--eval-interval=0", "--log-interval=1", "--checkpoint-interval=2", "--max-iters=6")
    trainer = Trainer()
    trainer.during = lambda run: 1 // (6 - run.step)  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        trainer(*flags)
    assert [line["step"] for line in metrics(out)] == [0, 1, 2, 3, 4, 5]
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "tra')
    trainer = Trainer()
    assert trainer(*flags) == 0
    assert trainer.updated == [5, 6]
    assert [line["step"] for line in metrics(out)] == list(range(7))


def test_a_conflict_names_its_flag_and_changes_nothing(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Trainer()(f"--out-dir={out}", "--max-iters=2") == 0
    before = sorted(out.iterdir())
    assert Trainer()(f"--out-dir={out}", "--max-iters=4", "--width=4", "--seed=2") == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["--seed", "--width"]
    assert Trainer()(f"--out-dir={out}", "--max-iters=1") == 2
    assert "--max-iters: 2 updates are done already" in capsys.readouterr().err
    assert sorted(out.iterdir()) == before


def test_nothing_is_overwritten_unasked(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Trainer()(f"--out-dir={out}", "--max-iters=2") == 0
    assert Trainer()(f"--out-dir={out}", "--resume=never") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert open_checkpoint(out).step == 2
    (out / "notes.txt").write_text("mine")
    trainer = Trainer()
    assert trainer(f"--out-dir={out}", "--overwrite", "--max-iters=1") == 0
    assert trainer.updated == [1]
    assert steps_in(out) == [0, 1]
    assert [line["step"] for line in metrics(out)] == [0, 1]
    assert (out / "notes.txt").read_text() == "mine"


def test_a_run_that_another_program_began_meanwhile_is_not_dropped(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both looked into an empty folder; one was done before the other had read its data."""
    slow = Trainer()
    opened = open_run(Config, ["--no-progress", f"--out-dir={out}", "--max-iters=9"], "walk.py", "")
    assert Trainer()(f"--out-dir={out}", "--max-iters=2") == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert run_program("walk.py", lambda: slow.train(*opened)) == 2
    assert f"--out-dir: {out} holds a run; --overwrite drops it" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert slow.updated == []


def test_a_step_folder_without_its_facts_is_refused_before_the_run_reaches_it(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (f"--out-dir={out}", "--checkpoint-interval=2", "--eval-interval=0", "--keep-checkpoints=9")
    assert Trainer()(*flags, "--max-iters=4") == 0
    (out / "step_00000004" / "meta.json").unlink()
    trainer = Trainer()
    assert trainer(*flags, "--max-iters=6") == 2
    assert "holds checkpoints after step 2; --overwrite drops it" in capsys.readouterr().err
    assert trainer.updated == []
    assert trainer(f"--resume={out}", "--overwrite", "--max-iters=6") == 0
    assert trainer.updated == [3, 4, 5, 6]
    assert open_checkpoint(out / "step_00000004").step == 4


def test_going_back_needs_permission_or_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, branch = tmp_path / "run", tmp_path / "branch"
    rising = Trainer(losses=lambda step: 1.0 + step)
    common = ("--eval-interval=1", "--checkpoint-interval=1", "--keep-checkpoints=9", "--log-interval=1")
    assert rising(f"--out-dir={out}", "--max-iters=4", *common) == 0
    early = f"--resume={out / 'step_00000002'}"
    assert rising(early) == 2
    assert "checkpoints after step 2" in capsys.readouterr().err
    assert rising(early, f"--out-dir={branch}", "--max-iters=3") == 0
    assert steps_in(branch) == [0, 2, 3]  # the best came along
    assert [line["step"] for line in metrics(branch)] == [0, 1, 2, 3]
    assert steps_in(out) == [0, 1, 2, 3, 4]
    assert rising(early, "--overwrite", "--max-iters=3") == 0
    assert steps_in(out) == [0, 1, 2, 3]
    assert [line["step"] for line in metrics(out)] == [0, 1, 2, 3]


def test_flags_of_one_call_do_not_stick_to_the_run(tmp_path: Path) -> None:
    out, moved = tmp_path / "run", tmp_path / "moved"
    assert Trainer()(f"--out-dir={out}", "--overwrite", "--max-iters=2", "--checkpoint-interval=1") == 0
    assert Trainer()(f"--resume={out / 'step_00000001'}") == 2  # --overwrite was the other call's
    out.rename(moved)
    assert Trainer()(f"--resume={moved}", "--max-iters=3") == 0
    assert steps_in(moved)[-1] == 3
    assert not out.exists()


def test_a_missing_checkpoint_and_a_folder_in_use(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Trainer()(f"--resume={out}") == 2
    assert "none at" in capsys.readouterr().err
    trainer = Trainer()
    status = []
    trainer.during = lambda run: status.append(Trainer()(f"--out-dir={out}"))
    assert trainer(f"--out-dir={out}", "--max-iters=1", "--eval-interval=0") == 0
    assert status == [2]
    assert "another program is writing" in capsys.readouterr().err


def test_the_default_folder_is_a_fresh_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert Trainer()("--max-iters=0") == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


# ---- ending early ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends(out: Path, capsys: pytest.CaptureFixture[str], number: int, status: int) -> None:
    trainer = Trainer()
    trainer.during = lambda run: os.kill(os.getpid(), number) if run.step == 2 else None
    assert trainer(f"--out-dir={out}", "--max-iters=9", "--eval-interval=2") == status
    assert trainer.evaluated == [0]  # the evaluation of step 2 waits
    assert open_checkpoint(out).step == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert "step_00000002" in last
    assert "--resume" in last
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    later = Trainer()
    assert later("--resume", str(out)) == 0
    assert later.evaluated == [2, 4, 6, 8, 9]
    assert [line["step"] for line in metrics(out)] == [0, 2, 4, 6, 8, 9]


def test_the_first_signal_is_answered_and_a_second_ctrl_c_ends_at_once(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        assert "SIGTERM: this update is finished and saved first" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.exit_status == 143


def test_an_end_at_once_says_what_is_saved(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def twice(run: Run) -> None:
        for _ in range(2 if run.step == 3 else 0):
            os.kill(os.getpid(), signal.SIGINT)

    trainer = Trainer()
    trainer.during = twice
    assert trainer(f"--out-dir={out}", "--max-iters=9", "--checkpoint-interval=2") == 130
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"walk.py: interrupted, the updates up to step 2 are saved; to go on: --resume {out}"
    trainer.losses = lambda step: os.kill(os.getpid(), signal.SIGINT) or os.kill(os.getpid(), signal.SIGINT)  # type: ignore
    assert trainer(f"--out-dir={out.with_name('early')}") == 130
    assert capsys.readouterr().err.splitlines()[-1] == "walk.py: interrupted, nothing was saved"


def test_a_loss_that_grows_and_an_evaluation_of_fresh_weights_are_warned_of(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    growing = Trainer(losses=lambda step: 1.7 + step)
    assert growing(f"--out-dir={out}", "--max-iters=3", "--eval-interval=1") == 0
    shown = capsys.readouterr().out
    assert shown.count("warning: ") == 1
    assert "the loss, 2.7000, is well above that of the first weights, 1.7000" in shown
    assert growing(f"--out-dir={out}", "--max-iters=4", "--log-interval=1") == 0  # the first loss is not forgotten
    assert "of the first weights, 1.7000" in capsys.readouterr().out
    open_run(Config, ["--eval-only", f"--out-dir={out}"], "walk.py", "")
    assert capsys.readouterr().err == ""
    open_run(Config, ["--eval-only"], "walk.py", "")
    assert "these weights have learned nothing" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(losses=lambda step: 1.0 if step < 2 else float("nan"))
    assert trainer(f"--out-dir={out}", "--max-iters=4", "--eval-interval=2") == 1
    assert "step 2" in capsys.readouterr().err
    assert steps_in(out) == [0]


def test_a_full_disk_is_one_line(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trainer = Trainer()
    trainer.during = lambda run: monkeypatch.setattr(training_run, "save_checkpoint", full)
    assert trainer(f"--out-dir={out}", "--max-iters=1") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"walk.py: {out}: No space left on device"
    assert open_checkpoint(out).step == 0


def test_a_folder_that_cannot_be_written_is_refused_with_the_flags_and_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    trainer = Trainer()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        assert trainer("--width=0", f"--out-dir={folder}") == 2
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(": ")[1] for line in lines] == ["--width", "--out-dir"]
        assert lines[1].endswith(f"can't write {folder}, since {tmp_path / 'file'} is a file")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert trainer(f"--out-dir={tmp_path / 'new' / 'run'}") == 2
    assert f"since {tmp_path} may not be written" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(Path, "mkdir", refuse)  # what os.access didn't foresee
    assert trainer(f"--out-dir={tmp_path / 'new'}") == 2
    assert capsys.readouterr().err == f"walk.py: --out-dir: {tmp_path / 'new'}: Permission denied\n"
    assert trainer.evaluated == []


def refuse(path: Path, **_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_unforeseen_errors_keep_their_traceback_and_foreseen_ones_are_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ZeroDivisionError):
        run_program("p", lambda: 1 // 0)

    def refuse() -> int:
        raise ArgumentError("a text", "an\nempty file", "another")

    assert run_program("p", refuse) == 2
    assert capsys.readouterr().err == "p: expected a text, got an empty file. Hint: another\n"


# ---- what is shown ---------------------------------------------------------------------------------------------------


def test_throughput_is_tokens_over_the_time_of_updates() -> None:
    now = iter([0.0] + [30.0 + 0.1 * i for i in range(200)])  # a slow first update, then 0.1 s each
    meter = Throughput(clock=lambda: next(now))
    assert meter.take() == (None, None)
    for _ in range(101):
        meter.start()
        meter.stop(8 * 64)
    assert meter.take() == pytest.approx((100.0, 5120.0))
    assert meter.take() == (None, None)


def test_sizes_are_for_people() -> None:
    assert size(3.5 * 2**30) == "3.5 GiB"


def test_the_loss_is_drawn_and_without_matplotlib_a_line_says_how(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert Trainer()(f"--out-dir={out}", "--max-iters=2") == 0
    assert "pip install -e '.[plot]'" in capsys.readouterr().out
    assert not (out / "loss.png").exists()
    assert Trainer()(f"--out-dir={out.with_name('other')}", "--max-iters=2") == 0
    assert "pip install" not in capsys.readouterr().out  # once is enough
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert training_run.draw_loss(out) == ""
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
