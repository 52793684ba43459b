"""One training run: where it lives, where it goes on, what it has seen, and when something is due.

A trainer opens its run with ``open_run``, hands over all that a checkpoint must hold, and asks at every step what is
due::

    run.attach(model=model, optimizer=optimizer, batches=batches)  # restores them where the run is a continued one
    with run.writing():
        while True:
            if run.evaluation_due:
                run.evaluated(evaluate(model))
            run.report()
            if run.checkpoint_due:
                run.save()
            if run.finished:
                return run.conclude()
            run.begin_update()
            ...
            run.end_update(loss=loss, lr=lr, grad_norm=norm, tokens=tokens)

``run.step`` counts the updates done. A run folder holds ``metrics.jsonl``, ``loss.png``, and the checkpoints that
``training.checkpoint`` writes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

import minigrad as mg
from minigrad.backend import array_module
from minigrad.distributed.current import are_several, launched_rank
from minigrad.errors import ArgumentError, DeviceError, FileFormatError, MissingPackageError, NonFiniteError, printable
from minigrad.files import write_whole
from training.checkpoint import (
    FILES,
    META,
    Checkpoint,
    copy_checkpoint,
    drop_checkpoints,
    folder_name,
    is_complete,
    open_checkpoint,
    point,
    save_checkpoint,
    steps_in,
    tidy,
    understood,
)
from training.console import StopSignals, Throughput, warn
from training.flags import FlagErrors, RunFlags, how_to_install, merge, parse, raise_any

METRICS, LOCK = "metrics.jsonl", ".lock"
KEYS = {"step", "train_loss", "val_loss", "perplexity", "lr", "grad_norm", "tokens_per_s", "seconds"}  # of each line
RUNS = "runs"  # where a run without --out-dir gets its folder

AnyRunFlags = TypeVar("AnyRunFlags", bound=RunFlags)


def open_run(
    config_class: type[AnyRunFlags], argv: Sequence[str] | None, program: str, description: str | None
) -> tuple[AnyRunFlags, Run]:
    """Read the flags, find the checkpoint to continue from, if any, and check both; nothing is written yet."""
    given, problems = parse(config_class, argv, program, description)
    begin_distributed(given)
    if given.get("device") == "auto":
        del given["device"]  # a continued run stays on its device, unless told another
    checkpoint = None
    try:
        checkpoint = _checkpoint_to_continue(given, program)
    except FileFormatError as error:
        problems.append(f"--resume: expected {error.expected}, got {error.got}")
    config, more = merge(config_class, given, checkpoint.fact("config") if checkpoint else None)
    run = (SilentRun if mg.distributed.rank() else Run)(config, checkpoint)
    run.about["program"] = program
    raise_any([*problems, *more, *([] if config.eval_only else run.folder_problems())])
    check_alike({**dataclasses.asdict(config), "step": run.step, "version": mg.__version__})
    if config.eval_only and not checkpoint:
        warn("--eval-only without a run to continue (--resume or --out-dir): these weights have learned nothing")
    return config, run


def begin_distributed(given: Mapping[str, Any]) -> None:
    """Find the other processes; all but the first print nothing from here on."""
    defaults = {field.name: field.default for field in dataclasses.fields(RunFlags)}
    device, backend, timeout = ({**defaults, **given}[name] for name in ("device", "distributed", "rank_timeout"))
    if backend == "auto" and device != "cpu" and are_several() and mg.cuda.is_available():
        backend = "nccl"
    try:
        ranks = mg.distributed.init(backend, timeout)
    except (MissingPackageError, DeviceError) as error:
        if launched_rank():  # all meet it, and the first says so
            raise SystemExit(2) from None
        raise FlagErrors([f"--distributed: expected {error.expected}, got {error.got}; {error.hint}"]) from None
    if ranks.rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the program ends)


def check_alike(facts: dict[str, Any]) -> None:
    """Refuse to go on where processes have other flags or another version, and wait until all have looked."""
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).digest()
    first, *others = mg.distributed.all_gather(np.frombuffer(digest, np.uint8)[None])
    if odd := [rank for rank, other in enumerate(others, start=1) if not np.array_equal(first, other)]:
        raise FlagErrors([f"rank {odd[0]}: expected the flags, version and checkpoint of rank 0, got others"])


def _checkpoint_to_continue(given: Mapping[str, Any], program: str) -> Checkpoint | None:
    resume, out = given.get("resume", "auto"), given.get("out_dir")
    if resume in ("auto", "never"):
        if resume == "never" or given.get("overwrite") or out is None or not steps_in(Path(out)):
            return None
        resume = out
    return open_checkpoint(Path(resume), program)


def fresh_folder(parent: Path) -> Path:
    """A new folder ``parent/<date-time>``, numbered where that is taken."""
    name = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1, 1000):
        folder = parent / (name if number == 1 else f"{name}_{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise ArgumentError("a free name for the run", f"1000 folders {parent / name}…", "--out-dir DIR")


def obstacle_to_writing(folder: Path) -> str:
    """Why ``folder`` can't be made or written, in words; empty where it can."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{folder}, since {there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{folder}, since {there} may not be written"


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Keep other programs from writing ``folder`` meanwhile; the system lets go of it when we die."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    never = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # through a link, or waiting for a FIFO's other end
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | never, 0o666)
    except OSError as error:
        got = f"{folder / LOCK} ({error.strerror})"
        raise ArgumentError("a lock file that can be written", got, "remove it, or take another folder") from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError("a run folder of its own", f"{folder}, which another program is writing") from None
        except OSError:  # a network drive without locks
            pass
        yield
    finally:
        os.close(file)


def foreign(folder: Path) -> str:
    """What in ``folder`` says that no run may be written there, in words; empty where there is nothing.

    That is a file with the name of one of ours that isn't one, or the facts of a checkpoint, which is part of a run.
    """
    if is_complete(folder):
        return f"{folder / META}, which is a checkpoint's"
    there = [path for path in folder.glob("*") if re.fullmatch(FILES, path.name)]
    if (folder / LOCK).is_symlink() or (folder / LOCK).exists():
        there.append(folder / LOCK)
    if odd := [path for path in there if not stat.S_ISREG(path.lstat().st_mode)]:
        return f"{odd[0]}, which is no regular file"
    written = [path for path in there if path.name != LOCK and path.stat().st_size]
    ours = steps_in(folder) or any(line.keys() >= KEYS for line in read_metrics(folder / METRICS))
    return f"{written[0]}, which no run here has written" if written and not ours else ""


class Run:
    """The state of one training run and its folder; see the module's docstring for its use."""

    def __init__(self, config: RunFlags, checkpoint: Checkpoint | None) -> None:
        self.config, self.checkpoint = config, checkpoint
        meta = checkpoint.meta if checkpoint else {}
        self.step: int = meta.get("step", 0)
        self.seconds: float = meta.get("seconds", 0.0)  # of training, over all programs that continued it
        self.val_loss: float | None = meta.get("val_loss")  # at this step, where it was evaluated
        self.best_loss: float | None = meta.get("best_loss")
        self.best_step: int | None = meta.get("best_step")
        self.last: dict[str, Any] = meta.get("last", dict.fromkeys(("train_loss", "lr", "grad_norm")))
        self.about: dict[str, Any] = {}  # what else a checkpoint says: the trainer's own facts
        self.parts: dict[str, Any] = {}  # what a checkpoint holds: objects with state_dict and load_state_dict
        self.stop = StopSignals()
        self.first_loss: float | None = meta.get("first_loss")  # that of the first evaluation
        self.facts: Callable[[], Mapping[str, float]] = dict  # what else every line of the log says
        self._measures: dict[str, float] = {}  # what else the evaluation of this step found
        self._bad: Any = 0  # the first step that was not finite, on the device
        self._improved = self._warned = False
        self._throughput = Throughput()
        self._reported = self.step - 1 if checkpoint is None or self.evaluation_due else self.step
        home = checkpoint.path.parent if checkpoint else None
        self.folder: Path | None = Path(config.out_dir) if config.out_dir else home
        self._branches = home is not None and self.folder is not None and home.resolve() != self.folder.resolve()

    @property
    def compiled(self) -> bool:
        """Whether kernels run as compiled loops, whose results differ in their last bits."""
        return self.config.device == "cpu" and mg.is_compiled()

    @property
    def origin(self) -> str:
        """Where the run begins, in words."""
        return f"from {self.checkpoint.path}" if self.checkpoint else "from fresh weights"

    def fact(self, name: str) -> dict[str, Any]:
        """What the continued run says of itself under ``name``; nothing where none is continued."""
        return self.checkpoint.fact(name) if self.checkpoint else {}

    # -- the folder --

    def _stale(self) -> list[int]:
        """Steps of checkpoints in the folder, incomplete ones too, that are not this run's past."""
        steps = steps_in(self.folder, complete=False) if self.folder else []
        return steps if self._branches or not self.checkpoint else [step for step in steps if step > self.step]

    def folder_problems(self) -> list[str]:
        """What speaks against writing the folder: that it can't be, would overwrite unasked, or go back in time."""
        problems = []
        if self.checkpoint and self.config.max_iters < self.step:
            problems.append(f"--max-iters: {self.step} updates are done already, got {self.config.max_iters}")
        if obstacle := obstacle_to_writing(self.folder or Path(RUNS)):
            problems.append(f"--out-dir: can't write {obstacle}")
        elif self.folder and (found := foreign(self.folder)):
            problems.append(f"--out-dir: expected a run's folder, got one with {found}; take another folder")
        elif self._stale() and not self.config.overwrite:
            later = f"checkpoints after step {self.step}" if self.checkpoint and not self._branches else "a run"
            problems.append(f"--out-dir: {self.folder} holds {later}; --overwrite drops it, or take another folder")
        return problems

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make the folder and keep it for this program alone; inside, signals ask to stop instead of ending it."""
        try:
            self.folder = self.folder or fresh_folder(Path(RUNS))
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FlagErrors([f"--out-dir: {error.filename}: {error.strerror}"]) from None
        with lock(self.folder), self.stop:
            raise_any(self.folder_problems())  # another program may have written since they were looked for
            past = self._past()
            tidy(self.folder)
            drop_checkpoints(self.folder, self._stale())
            self._keep(*past)
            hidden = True if self.config.no_progress else None  # None: shown on a terminal only
            self._began = time.perf_counter() - self.seconds
            with (
                open(self.folder / METRICS, "a", encoding="utf-8") as self._metrics,
                tqdm(total=self.config.max_iters, initial=self.step, disable=hidden, dynamic_ncols=True) as self._bar,
            ):
                try:
                    yield
                except KeyboardInterrupt:
                    raise KeyboardInterrupt(self.saved()) from None
                except NonFiniteError as error:
                    expected = f"{error.expected} at step {self.step}"
                    raise NonFiniteError(expected, error.got, error.hint) from error
                except OSError as error:
                    error.filename = error.filename or str(self.folder)  # a full disk doesn't say where
                    raise

    def saved(self) -> str:
        """What is safe on the disk, in words, for whoever interrupts."""
        steps = steps_in(self.folder) if self.folder else []
        if not steps:
            return "nothing was saved"
        return f"the updates up to step {steps[-1]} are saved; to go on: --resume {self.folder}"

    def _past(self) -> tuple[list[dict[str, Any]], Path | None]:
        """What the run that is continued has of its past: lines of the log, and the best checkpoint; both checked."""
        if self.checkpoint is None:
            return [], None
        home = self.checkpoint.path.parent
        best = home / folder_name(self.best_step) if self.best_step is not None else None
        if best and best.is_dir() and self._branches:
            open_checkpoint(best).files()
        return read_metrics(home / METRICS), best if best and best.is_dir() else None

    def _keep(self, lines: list[dict[str, Any]], best: Path | None) -> None:
        """Make the folder say what was true at ``step``: no later lines, pointers that point."""
        assert self.folder
        kept = [line for line in lines if line["step"] <= self._reported]
        write_whole(self.folder / METRICS, "".join(json.dumps(line) + "\n" for line in kept).encode())
        if best:
            if self._branches:
                copy_checkpoint(best, self.folder)
            point(self.folder, "best", best.name)
        else:
            (self.folder / "best").unlink(missing_ok=True)
        if self.checkpoint and not self._branches:
            point(self.folder, "latest", self.checkpoint.path.name)

    # -- what is due --

    def _at(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    @property
    def finished(self) -> bool:
        """Whether the last update is done, patience has run out, or a signal asked to stop."""
        return self.step >= self.config.max_iters or self.out_of_patience or self.stop.received is not None

    @property
    def out_of_patience(self) -> bool:
        """Whether the evaluation of this step is the last of --patience in a row that found no better loss."""
        if not self.config.patience or self.val_loss is None or self.best_step is None:
            return False
        return self.step - self.best_step >= self.config.patience * self.config.eval_interval > 0

    @property
    def evaluation_due(self) -> bool:
        """At step 0, at each interval and after the last update, once each."""
        due = self._at(self.config.eval_interval) or self.step in (0, self.config.max_iters)
        return due and self.val_loss is None and self.stop.received is None

    @property
    def checkpoint_due(self) -> bool:
        """At each interval, at a new best loss, and at the end, whatever ends it."""
        return self.finished or self._improved or (self.step > 0 and self._at(self.config.checkpoint_interval))

    @property
    def sample_due(self) -> bool:
        """At each interval and after the last update, not after a signal."""
        last = self.step == self.config.max_iters or self.out_of_patience
        due = last or (self.step > 0 and self._at(self.config.sample_every))
        return due and self.stop.received is None

    # -- what happens --

    def begin_update(self) -> None:
        """The next update begins; ``step`` is its number, the first being 1."""
        self.step += 1
        self.val_loss, self._improved, self._measures = None, False, {}
        self._throughput.start()

    def end_update(self, loss: Any, lr: float, grad_norm: Any, tokens: int, good: Any = True) -> None:
        """The update is done, or was left out where it was not ``good``; a GPU is only asked where a line is due."""
        self.last = {"train_loss": loss, "lr": lr, "grad_norm": grad_norm}
        self._bad = first_bad(self._bad, self.step, good)
        if array_module(loss) is np or self._line_due:
            self._look()
            self._bar.set_postfix_str("loss " + show(self.last["train_loss"], ".4f"), refresh=False)
        self._throughput.stop(tokens)
        self._bar.update()

    def _look(self) -> None:
        """Read the numbers of the last update from the device, and whether one before it was not finite."""
        numbers = {name: None if value is None else float(value) for name, value in self.last.items()}
        self.last = {name: x if x is not None and math.isfinite(x) else None for name, x in numbers.items()}
        if int(self._bad):
            hint = "a lower --learning-rate, or --detect-anomaly, which names the operation"
            raise NonFiniteError(
                "a finite loss and gradient norm", f"NaN or infinity, first at step {int(self._bad)}", hint
            )

    def evaluated(self, loss: float, measures: Mapping[str, float] | None = None) -> None:
        """Take note of the validation loss, and of other measures by their names."""
        check_loss(loss)
        self.val_loss, self._measures = loss, dict(measures or {})
        self.first_loss = loss if self.first_loss is None else self.first_loss
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step, self._improved = loss, self.step, True

    @property
    def _line_due(self) -> bool:
        return self.val_loss is not None or self._at(self.config.log_interval) or self.finished

    def report(self) -> None:
        """Print and record the numbers of this step, where a line of the log is due."""
        if self.step == self._reported or not self._line_due:
            return
        self._look()
        self._reported = self.step
        self._look_for_divergence()
        more = {**self._measures, **self.facts()}
        ms, rate = self._throughput.take()
        record = {
            "step": self.step,
            "train_loss": self.last["train_loss"],
            "val_loss": self.val_loss,
            "perplexity": None if self.val_loss is None else perplexity(self.val_loss),
            "lr": self.last["lr"],
            "grad_norm": self.last["grad_norm"],
            "tokens_per_s": rate,
            "seconds": round(time.perf_counter() - self._began, 3),
            **more,
        }
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        self.print(progress_line(record, self.config.max_iters, ms, more))

    def _look_for_divergence(self) -> None:
        """Warn once where the loss is well above that of the fresh weights."""
        now = max((loss for loss in (self.last["train_loss"], self.val_loss) if loss is not None), default=-math.inf)
        if not self._warned and self.first_loss is not None and now > 1.1 * self.first_loss:
            self._warned = True
            self.print(
                f"warning: the loss, {now:.4f}, is well above that of the first weights, {self.first_loss:.4f}; "
                "most often the learning rate is too high"
            )

    def print(self, *lines: str) -> None:
        """Print lines without disturbing the progress bar."""
        with tqdm.external_write_mode():
            print(*map(printable, lines), sep="\n", flush=True)

    def attach(self, **parts: Any) -> None:
        """Name the objects that every checkpoint holds; those of a continued run get back the state they had."""
        self.parts = parts
        if self.checkpoint:
            with understood(self.checkpoint.path):
                for name, part in parts.items():
                    part.load_state_dict(self.checkpoint.load(name))
                mg.random.set_state(self.checkpoint.meta["random"])
            if self.checkpoint.meta.get("compiled", self.compiled) != self.compiled:
                ways = {True: "by compiled loops", False: "by NumPy alone"}
                now, then = ways[self.compiled], ways[not self.compiled]
                warn(f"this run goes on {now}; it was begun {then}, and its numbers will differ in their last bits")

    def save(self) -> None:
        """Write a checkpoint of this step, then drop those that are neither the best nor among the last."""
        assert self.folder
        self._look()
        os.fsync(self._metrics.fileno())
        self.seconds = time.perf_counter() - self._began
        meta = {"config": dataclasses.asdict(self.config), "random": mg.random.get_state(), **self.about}
        meta["compiled"] = self.compiled
        meta |= {
            name: getattr(self, name)
            for name in ("seconds", "val_loss", "first_loss", "best_loss", "best_step", "last")
        }
        states = {name: part.state_dict() for name, part in self.parts.items()}
        path = save_checkpoint(self.folder, self.step, states, meta)
        if self.best_step == self.step:
            point(self.folder, "best", path.name)
        steps = steps_in(self.folder)
        keep = {self.best_step, *steps[-self.config.keep_checkpoints :]}
        drop_checkpoints(self.folder, [step for step in steps if step not in keep])

    def conclude(self) -> int:
        """Save what isn't saved yet, draw the loss, say how the run ended, and return the exit status."""
        assert self.folder
        self.save()  # a signal may have come after the last look at checkpoint_due
        self._bar.close()
        note = draw_loss(self.folder)
        if self.stop.received:
            saved = self.folder / folder_name(self.step)
            self.print(f"stopped by {self.stop.received.name}, saved {saved}; to go on: --resume {self.folder}")
        else:
            if self.out_of_patience:
                self.print(f"stopped early: {self.config.patience} evaluations in a row without a better loss")
            best = f"best validation loss {self.best_loss:.4f} at step {self.best_step}"
            self.print(f"{self.step} updates in {self.seconds / 60:.1f} minutes, {best}, in {self.folder}{note}")
        return self.stop.exit_status


class SilentRun(Run):
    """The run as every process but the first has it: the same steps at the same time, with nothing written."""

    def folder_problems(self) -> list[str]:
        return []

    @contextmanager
    def writing(self) -> Iterator[None]:
        self._began = time.perf_counter() - self.seconds
        with self.stop, open(os.devnull, "w", encoding="utf-8") as self._metrics, tqdm(disable=True) as self._bar:
            yield

    def save(self) -> None:
        self._look()

    def conclude(self) -> int:
        return self.stop.exit_status


# ---- the log ---------------------------------------------------------------------------------------------------------


def progress_line(
    record: Mapping[str, Any], max_iters: int, ms: float | None, more: Mapping[str, float] | None = None
) -> str:
    """One line of the log for people; ``-`` for what wasn't measured, or was not finite in an update left out.

    >>> progress_line({"step": 5, "train_loss": 2.0, "val_loss": None, "lr": 1e-3, "grad_norm": 1.0}, 10, 70.0)
    'step 5/10 | loss 2.0000 | val - | lr 1.00e-03 | norm 1.00 | ms 70.0 | tok/s -'
    """
    columns = [
        f"step {record['step']}/{max_iters}",
        "loss " + show(record.get("train_loss"), ".4f"),
        "val " + show(record.get("val_loss"), ".4f"),
        "lr " + show(record.get("lr"), ".2e"),
        "norm " + show(record.get("grad_norm"), ".2f"),
        "ms " + show(ms, ".1f"),
        "tok/s " + show(record.get("tokens_per_s"), ",.0f"),
        *(
            f"{name.replace('_', ' ')} {value:{',' if isinstance(value, int) else '.4f'}}"
            for name, value in (more or {}).items()
        ),
    ]
    return " | ".join(columns)


def show(value: float | None, form: str) -> str:
    """The number in a format; ``-`` for None."""
    return "-" if value is None else format(value, form)


def perplexity(loss: float) -> float:
    """exp(loss), for a loss in nats; JSON has no infinity, so a finite number in any case."""
    return math.exp(min(loss, 700.0))


def check_loss(loss: float) -> None:
    """Refuse a loss of an evaluation that is not finite."""
    if not math.isfinite(loss):
        hint = "a lower --learning-rate, or --detect-anomaly to see where it begins"
        raise NonFiniteError("a finite loss of the evaluation", str(loss), hint)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that a kill cut off, or that is none of ours, is left out."""
    lines = []
    if path.is_file():
        for text in path.read_text("utf-8", errors="replace").split("\n"):
            with suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict) and type(line.get("step")) is int and all(map(_plottable, line.values())):
                    lines.append(line)
    return lines


def _plottable(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < 1e300)


def draw_loss(folder: Path) -> str:
    """Draw ``folder/loss.png`` from its metrics; without matplotlib, the first run beside others says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        others = [path for path in folder.absolute().parent.glob(f"*/{METRICS}") if path.parent.name != folder.name]
        return "" if others else f" (for a picture of the loss: {how_to_install('plot')})"
    lines = read_metrics(folder / METRICS)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="updates", ylabel="loss (nats a token)")
    for key, label, style in (("train_loss", "training", "-"), ("val_loss", "validation", "o-")):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        axes.plot([step for step, _ in points], [loss for _, loss in points], style, label=label, markersize=3)
    axes.legend()
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_whole(folder / "loss.png", picture.getvalue())
    return ""


def first_bad(before: Any, step: int, good: Any) -> Any:
    """The first step that was not ``good``, 0 so far; a number where ``good`` is, on the host or on a GPU."""
    return array_module(good).where((before > 0) | good, before, step)
