"""Command-line flags as a dataclass: one field is one flag, with its default, its check and its help.

``flag`` declares a field, ``parse`` reads a command line into the flags that were given, and ``complete`` or ``merge``
fills in the rest, from the defaults or from the run that is continued. Dashes and underscores are the same
(``--max_iters``), and every mistake on a command line is reported, not only the first.

What all trainers take are fields of ``TrainingFlags``, below; a flag of one program is a field of its ``Config``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any, TypeVar

import minigrad as mg
from minigrad.errors import DeviceError

AnyFlags = TypeVar("AnyFlags", bound="Flags")


class FlagErrors(Exception):
    """All that is wrong with a command line, one sentence for each flag."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(*problems)
        self.problems = list(problems)


# ---- kinds of values -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of value that a flag takes: its name in the help, its description in errors, a conversion, a check."""

    metavar: str
    expected: str = "a value"
    convert: Callable[[str], Any] = str
    legal: Callable[[Any], bool] = lambda value: True

    def __call__(self, given: str) -> Any:
        try:
            value = self.convert(given)
        except ValueError:
            value = None
        if value is None or not self.legal(value):
            raise ValueError(f"expected {self.expected}, got {given!r}")
        return value

    def takes(self, value: Any) -> bool:
        """Whether ``value``, which a file holds, is one that a command line could have given."""
        kinds = {int: (int,), float: (int, float)}.get(self.convert, (str,))  # type: ignore[call-overload]
        try:
            return type(value) in kinds and bool(self.legal(value))
        except OverflowError:
            return False


def encodable(value: str) -> bool:
    """Whether the text is Unicode that can be written; what a terminal sends in another encoding is not."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def named(value: str) -> str:
    """A path that names something: an empty one, which a variable of a shell may leave, would be the folder of now."""
    if not value or "\0" in value:
        raise ValueError
    return value


text = Kind("TEXT", "text in the encoding of the terminal", legal=encodable)
path = Kind("PATH", "a path", convert=named)
kept_path = Kind("PATH", "a path", convert=lambda value: os.path.abspath(named(value)))  # known from elsewhere too

MOST = 1 << 53  # up to here each whole number is a float, and none overflows one


def integer(least: int, most: int = MOST) -> Kind:
    """Whole numbers from ``least`` to ``most``."""
    expected = f"a whole number from {least} to {'2^53' if most == MOST else most}"
    return Kind("N", expected, int, lambda value: least <= value <= most)


def number(expected: str, legal: Callable[[float], bool]) -> Kind:
    """Finite numbers that are ``legal``, described by ``expected``."""
    return Kind("X", expected, float, lambda value: math.isfinite(value) and legal(value))


def one_of(*names: str, role: str = "") -> Kind:
    """One of ``names``; ``role`` says what they are."""
    return Kind("{" + ",".join(names) + "}", " or ".join(names) + role, str, names.__contains__)


positive = number("a number above 0", lambda x: x > 0)
not_negative = number("a number of at least 0", lambda x: x >= 0)
fraction = number("a number from 0 up to, but not including, 1", lambda x: 0 <= x < 1)


def flag(default: Any, kind: Kind | None, help: str, *, on_resume: str = "fixed", many: bool = False) -> Any:
    """A dataclass field that is a command-line flag: ``kind`` converts and checks its value; None is a switch.

    on_resume says what becomes of the flag when a run is continued. A "fixed" one keeps its value and takes no other, a
    "changeable" one keeps it unless another is given, and a "transient" one counts for one program alone. A flag of
    ``many`` takes one value or more.
    """
    metadata = {"kind": kind, "help": help, "on_resume": on_resume, "many": many}
    return dataclasses.field(default=default, metadata=metadata)


changeable_flag = functools.partial(flag, on_resume="changeable")
transient_flag = functools.partial(flag, on_resume="transient")


DTYPE = one_of("float32", "float64", "float16", "bfloat16", role=", the types it trains in")


# ---- the flags that programs share -----------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class Flags:
    """What every program is told."""

    device: str = changeable_flag(
        "auto", one_of("auto", "cpu", "cuda"), "where to compute; auto takes the GPU where there is one"
    )

    def __post_init__(self) -> None:
        if self.device == "auto":
            self.device = "cuda" if mg.cuda.is_available() else "cpu"

    def check(self) -> list[str]:
        """What is wrong with the flags together, one sentence each; subclasses add theirs."""
        if self.device == "cuda":
            try:
                mg.backend.check_device("cuda")
            except DeviceError as error:
                found = f"found {' '.join(error.got.split())} ({error.hint})"
                return [f"--device: expected {error.expected}, {found}; or take --device cpu"]
        return []

    def check_new(self) -> list[str]:
        """What is wrong with them for a run that isn't continued; a checkpoint holds what such a run has read."""
        return []


def how_to_install(extra: str) -> str:
    """The command that installs what an optional part of the examples needs.

    >>> how_to_install("plot")
    "pip install -e '.[plot]' in the folder of minigrad"
    """
    return f"pip install -e '.[{extra}]' in the folder of minigrad"


@dataclasses.dataclass(kw_only=True)
class RunFlags(Flags):
    """How a run is conducted, whatever it trains."""

    out_dir: str | None = transient_flag(None, path, "folder of the run (default: a fresh runs/<date-time>)")
    resume: str = transient_flag(
        "auto", path, "auto: continue what --out-dir holds; never; or the folder to go on from"
    )
    overwrite: bool = transient_flag(False, None, "begin anew in an --out-dir that holds a run, and drop that run")
    eval_only: bool = transient_flag(False, None, "measure the run of --resume or --out-dir; train and write nothing")
    dtype: str = flag(
        "float32", DTYPE, "type of the numbers; float16, bfloat16: of matrix products, all else in float32"
    )
    seed: int = flag(1337, integer(0), "seed of the weights, the batches and the dropout")
    max_iters: int = changeable_flag(2000, integer(0), "updates of the weights, in all")
    eval_interval: int = changeable_flag(250, integer(0), "updates between evaluations; 0: first and last only")
    patience: int = changeable_flag(
        0, integer(0), "evaluations in a row without a better loss after which training stops; 0: never"
    )
    log_interval: int = changeable_flag(50, integer(1), "updates between lines of the log")
    checkpoint_interval: int = changeable_flag(500, integer(0), "updates between checkpoints; 0: best and last only")
    keep_checkpoints: int = changeable_flag(2, integer(1), "last checkpoints to keep, beside the best")
    sample_every: int = changeable_flag(0, integer(0), "updates between samples; 0: at the end only")
    distributed: str = transient_flag(
        "auto",
        one_of("auto", "mpi", "nccl", "none"),
        "other processes; auto takes those that mpiexec started beside this one, over NCCL where there are GPUs",
    )
    rank_timeout: float = transient_flag(
        600.0, positive, "seconds after which a process that is silent, in no exchange and no evaluation, ends all"
    )
    detect_anomaly: bool = transient_flag(False, None, "name the operation that makes the first NaN or infinity (slow)")
    no_cuda_graph: bool = transient_flag(False, None, "launch each kernel of an update on a GPU by itself")
    no_progress: bool = transient_flag(False, None, "no progress bar, plain lines only")

    @property
    def weights_dtype(self) -> str:
        """The dtype of weights, gradients and moments: with half-precision products they are float32."""
        return "float64" if self.dtype == "float64" else "float32"

    def check(self) -> list[str]:
        problems = super().check()
        if self.dtype == "bfloat16" and not find_spec("ml_dtypes"):
            problems.append("--dtype: bfloat16 needs the package ml_dtypes: pip install ml_dtypes")
        if self.patience and not self.eval_interval:
            problems.append("--patience: expected --eval-interval above 0 with it, got 0")
        if self.device == "cuda" and not mg.distributed.get_communicator().takes("cuda"):
            problems.append("--device: expected cpu for several processes over MPI, got cuda; see --distributed nccl")
        return problems


@dataclasses.dataclass(kw_only=True)
class TrainingFlags(RunFlags):
    """How the weights are updated, whatever is trained."""

    batch_size: int = flag(12, integer(1), "examples in a micro-batch, of all processes together")
    gradient_accumulation_steps: int = flag(1, integer(1), "micro-batches whose gradients make one update")
    learning_rate: float = flag(1e-3, positive, "highest learning rate, reached after the warm-up")
    min_lr: float | None = flag(
        None, not_negative, "learning rate when its cosine decay ends (default: a tenth of --learning-rate)"
    )
    warmup_iters: int = flag(100, integer(0), "updates in which the learning rate rises from 0")
    schedule: str = flag(
        "cosine", one_of("cosine", "noam"), "decay after the warm-up: a cosine with an end, or 1/√update without one"
    )
    lr_decay_iters: int | None = flag(
        None, integer(1), "update at which the decay ends (default: --max-iters when the run begins)"
    )
    beta1: float = flag(0.9, fraction, "AdamW's β1: how long it remembers gradients")
    beta2: float = flag(0.99, fraction, "AdamW's β2: how long it remembers squared gradients")
    weight_decay: float = flag(0.1, not_negative, "AdamW's weight decay, of matrices alone")
    grad_clip: float = flag(1.0, not_negative, "norm to which longer gradients are shortened; 0 is off")
    overlap: bool = transient_flag(
        False, None, "of several processes: exchange gradients beside the backward pass, not after it"
    )
    label_smoothing: float = flag(
        0.0, fraction, "share of the probability that goes to all classes alike in training; evaluations have none"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "cosine":
            self.lr_decay_iters = self.lr_decay_iters or self.max_iters or None  # kept when the run is continued
            self.min_lr = self.learning_rate / 10 if self.min_lr is None else self.min_lr

    def check(self) -> list[str]:
        problems = super().check()
        if self.batch_size % (ranks := mg.distributed.size()):
            problems.append(f"--batch-size: expected a multiple of the {ranks} processes, got {self.batch_size}")
        if self.schedule == "noam":
            ends = [spelling(name) for name in ("min_lr", "lr_decay_iters") if getattr(self, name) is not None]
            problems += [f"{name}: expected none with --schedule noam, whose decay has no end" for name in ends]
        elif self.min_lr is not None and self.min_lr > self.learning_rate:
            problems.append(f"--min-lr: expected at most --learning-rate {self.learning_rate:g}, got {self.min_lr:g}")
        return problems


def with_defaults(config_class: type[AnyFlags], **defaults: Any) -> type[AnyFlags]:
    """The same flags with other defaults.

    >>> with_defaults(RunFlags, max_iters=7)().max_iters
    7
    """
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    changed = [
        (name, fields[name].type, dataclasses.field(default=value, metadata=fields[name].metadata))
        for name, value in defaults.items()
    ]
    return dataclasses.make_dataclass(config_class.__name__, changed, bases=(config_class,), kw_only=True)


# ---- reading a command line ------------------------------------------------------------------------------------------


def spelling(field: str) -> str:
    """``max_iters`` as it is typed: ``--max-iters``."""
    return "--" + field.replace("_", "-")


def help_text(config_class: type, program: str, description: str | None) -> str:
    """What --help shows: the first two paragraphs of ``description``, and every flag.

    description is the docstring of the program, or None, as ``python -OO`` leaves of it; it begins with what the
    program does, and examples. The flags of a class stand together under its docstring, the program's own first.
    """
    parser = argparse.ArgumentParser(
        program,
        usage="%(prog)s [FLAG [VALUE]] ...",
        description="\n\n".join((description or "").split("\n\n")[:2]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    owners = {name: owner for owner in config_class.__mro__ for name in inspect.get_annotations(owner)}
    groups = {
        owner: parser.add_argument_group(_title(owner)) for owner in config_class.__mro__ if owner in owners.values()
    }
    for field in dataclasses.fields(config_class):
        group = groups[owners[field.name]]
        kind, help = field.metadata["kind"], field.metadata["help"].replace("%", "%%")
        if kind is None:
            group.add_argument(spelling(field.name), action="store_true", help=help)
            continue
        help += "" if field.default is None else f" (default: {field.default})"
        nargs = "+" if field.metadata["many"] else None
        group.add_argument(spelling(field.name), help=help, metavar=kind.metavar, nargs=nargs)
    return parser.format_help()


def _title(owner: type) -> str:
    return (owner.__doc__ or "").partition("\n")[0].rstrip(".")


def parse(
    config_class: type, argv: Sequence[str] | None, program: str, description: str | None
) -> tuple[dict[str, Any], list[str]]:
    """The flags given in ``argv``, by field name, and what is wrong with the others, for ``complete``."""
    fields = {spelling(field.name): field for field in dataclasses.fields(config_class)}
    given: dict[str, Any] = {}
    problems: list[str] = []
    unknown: list[str] = []
    (_, stray), *groups = _by_flag(sys.argv[1:] if argv is None else argv)
    for name, values in groups:
        if name == "--help" or not name.startswith("--"):
            print(help_text(config_class, program, description), end="")
            raise SystemExit(0)
        if name not in fields:  # its values are no second mistake
            close = get_close_matches(name, fields, 1, cutoff=0.75)
            unknown.append(f"{name}: no such flag" + (f"; did you mean {close[0]}?" if close else "; see --help"))
            continue
        field = fields[name]
        most = len(values) if field.metadata["many"] else int(field.metadata["kind"] is not None)
        stray += values[most:]
        try:
            given[field.name] = _value(field, values[:most])
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return given, [*problems, *unknown, *(f"{token!r}: a value without a flag" for token in stray)]


def _value(field: dataclasses.Field[Any], values: Sequence[str]) -> Any:
    kind = field.metadata["kind"]
    if kind is None:
        return True
    if not values:
        raise ValueError(f"expected {kind.expected}, got none")
    read = [kind(value) for value in values]
    return read if field.metadata["many"] else read[0]


def _by_flag(tokens: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the tokens up to the next one, its values; first, under "", those before any flag.

    >>> _by_flag(["--max_iters=5", "--data", "a", "b"])
    [('', []), ('--max-iters', ['5']), ('--data', ['a', 'b'])]
    """
    groups: list[tuple[str, list[str]]] = [("", [])]
    for token in tokens:
        if token.startswith(("--", "-h")):
            name, equals, value = token.partition("=")
            groups.append((name.replace("_", "-"), [value] if equals else []))
        else:
            groups[-1][1].append(token)
    return groups


def complete(config_class: type[AnyFlags], given: Mapping[str, Any], problems: Sequence[str] = ()) -> AnyFlags:
    """The whole configuration: what was given, else the defaults; FlagErrors if there are ``problems``, old or new."""
    config, more = merge(config_class, given)
    raise_any([*problems, *more])
    return config


def raise_any(problems: Sequence[str]) -> None:
    """Raise FlagErrors with the problems, where there are any."""
    if problems:
        raise FlagErrors(problems)


def _fits(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a stored value is one that the flag can have."""
    kind = field.metadata["kind"]
    if value is None or kind is None:
        return value is field.default or isinstance(value, bool)
    values = value if field.metadata["many"] else [value]
    return isinstance(values, list | tuple) and len(values) > 0 and all(map(kind.takes, values))


def merge(
    config_class: type[AnyFlags], given: Mapping[str, Any], stored: Mapping[str, Any] | None = None
) -> tuple[AnyFlags, list[str]]:
    """What was given, else what the continued run has (``stored``), else the defaults; and what is wrong with it.

    Wrong is where ``given`` contradicts ``stored`` in a flag that a continued run must keep, and where flags don't fit
    each other.
    """
    fields = dataclasses.fields(config_class)
    before: dict[str, Any] = {field.name: field.default for field in fields}
    if stored is not None:
        kept = [field.name for field in fields if field.metadata["on_resume"] != "transient"]
        before |= {name: stored[name] for name in kept if name in stored}
        unfit = [field.name for field in fields if not _fits(field, before[field.name])]
        raise_any([f"{spelling(name)}: the run that is continued has {before[name]!r}" for name in unfit])
    config = config_class(**(before | dict(given)))
    if stored is None:
        return config, [*config.check(), *config.check_new()]
    was = config_class(**before)
    conflicts = [
        f"{spelling(field.name)}: the run that is continued has {before[field.name]!r}, got {given[field.name]!r}"
        for field in fields
        if field.metadata["on_resume"] == "fixed"
        and field.name in given
        and getattr(config, field.name) != getattr(was, field.name)  # paths are the same however they are written
    ]
    return config, [*conflicts, *config.check()]
