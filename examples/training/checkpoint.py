"""Checkpoints: folders of arrays and facts that are written whole or not at all.

    OUT/step_00000250/model.safetensors       one file for each part that has arrays
                      optimizer.safetensors
                      meta.json               everything else: step, configuration, random states, ...
    OUT/latest                                the name of the newest folder; OUT/best that of the best one

A checkpoint is written to a hidden temporary folder, flushed to the disk and renamed. A kill at any moment loses no
checkpoint that was complete, and leaves at most one hidden folder, which ``tidy`` removes.

meta.json says the version of this format as ``format``. A newer version than FORMAT is refused; the oldest checkpoints
don't say one, and are read as before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import minigrad as mg
from minigrad.backend import is_array
from minigrad.errors import ArgumentError, DeviceError, FileFormatError, MiniGradError, OutOfMemoryError
from minigrad.files import atomic_write, is_temporary, read_json, remove, write_whole
from minigrad.serialize import load_shapes
from nn.checks import is_whole
from nn.parameter import hollow

FORMAT = 1
META = "meta.json"
DROPPED = ".dropped-"  # a folder that is being removed
STEP = r"step_(\d{8,})"
FILES = r"(latest|best|metrics\.jsonl|loss\.png|held_out\.json)"


# ---- one checkpoint --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk: its folder and what its meta.json says."""

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        """Updates of the weights up to here."""
        return int(self.meta["step"])

    def fact(self, name: str) -> Any:
        """What meta.json says under ``name``, which the program needs."""
        if name not in self.meta:
            raise FileFormatError(f"the facts of a checkpoint, with {name!r}", f"none in {self.path / META}")
        return self.meta[name]

    def load(self, part: str) -> dict[str, Any]:
        """The state dict that was saved under the name ``part``."""
        file = self.path / f"{part}.safetensors"
        there = file.is_file() or file.name in self.meta.get("files", [])  # the oldest checkpoints don't list them
        with understood(self.path):
            state: dict[str, Any] = dict(self.meta["parts"][part])
            for name, array in (mg.load(file) if there else {}).items():
                key, slash, inner = name.partition("/")
                if slash:
                    state[key][inner] = array
                else:
                    state[name] = array
        return state

    def empty_model(self, kind: Callable[..., Any], device: str) -> Any:
        """The model that the facts describe, without numbers: those of ``load("model")`` will be all that it holds."""
        with understood(self.path):
            arguments, held = self.fact("model"), load_shapes(self.path / "model.safetensors")
            if is_whole(layers := arguments["num_layers"], 1) and layers > len(held):
                raise FileFormatError(f"the weights of {layers} layers", f"{len(held)} arrays, in {self.path}")
            with hollow():
                model = kind(**arguments, device=device)
            known = {parameter.shape for parameter in model.parameters()}
            if odd := [f"{name} {shape}" for name, shape in held.items() if shape not in known]:
                raise FileFormatError("the weights that meta.json describes", f"{odd[0]} in {self.path}")
        return model

    def files(self) -> list[Path]:
        """meta.json and the files that it lists; one that is a link or no regular file is refused."""
        parts = [f"{part}.safetensors" for part in self.meta["parts"]]
        names = self.meta.get("files", [name for name in parts if (self.path / name).exists()])
        paths = [self.path / name for name in (META, *names)]
        for path in paths:
            if not (path.exists() and stat.S_ISREG(path.lstat().st_mode)):
                raise FileFormatError("a checkpoint of regular files", f"{path}, which is none")
        return paths


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Inside, what a stranger's checkpoint says is put to use; whatever doesn't fit becomes one FileFormatError."""
    try:
        yield
    except (DeviceError, FileFormatError, OutOfMemoryError):
        raise
    except MiniGradError as error:
        raise FileFormatError(error.expected, f"{error.got}, in {path}", error.hint) from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        what = f"nothing named {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise FileFormatError("the facts and arrays of a checkpoint", f"{what}, in {path}") from error


def _number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < 1e300)


def _is_whole(value: Any) -> bool:
    return is_whole(value, 0) and value < 1 << 53


def _names(values: Any, pattern: str) -> bool:
    return all(isinstance(value, str) and re.fullmatch(pattern, value) for value in values)


# What a program may rely on in a meta.json, where the name is there.
LEGAL: dict[str, Callable[[Any], bool]] = {
    "step": _is_whole,
    "best_step": lambda value: value is None or _is_whole(value),
    "seconds": lambda value: value is not None and _number(value),
    **dict.fromkeys(("val_loss", "first_loss", "best_loss"), _number),
    **dict.fromkeys(("config", "model", "corpus"), lambda value: isinstance(value, dict)),
    "last": lambda value: isinstance(value, dict) and all(map(_number, value.values())),
    "parts": lambda value: (
        isinstance(value, dict) and all(isinstance(part, dict) for part in value.values()) and _names(value, r"\w+")
    ),
    "files": lambda value: isinstance(value, list) and _names(value, r"\w+\.safetensors"),
    "compiled": lambda value: isinstance(value, bool),
    "prompt": lambda value: isinstance(value, list) and value != [] and all(map(_is_whole, value)),
}


def save_checkpoint(out: Path, step: int, states: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
    """Write the checkpoint of ``step`` into ``out`` and point ``out/latest`` to it; returns its folder.

    states are state dicts by the name of their part; they hold arrays, dicts of arrays, and facts for JSON. A complete
    checkpoint of the same step is left as it is.
    """
    folder = out / folder_name(step)
    if not is_complete(folder):
        with atomic_write(folder, folder=True) as temporary:
            _write(temporary, {**meta, "step": step}, states)
    point(out, "latest", folder.name)
    return folder


def _write(folder: Path, meta: dict[str, Any], states: Mapping[str, Mapping[str, Any]]) -> None:
    meta |= {"format": FORMAT, "parts": {}, "files": []}
    for part, state in states.items():
        arrays = {name: value for name, value in state.items() if is_array(value)}
        inner = {name: value for name, value in state.items() if isinstance(value, dict)}
        nested = [name for name, value in inner.items() if all(map(is_array, value.values()))]
        for name in nested:  # as in an optimizer's {"state": {"0.exp_avg": array}, "param_groups": [...]}
            arrays |= {f"{name}/{key}": array for key, array in inner[name].items()}
        facts = {name: {} if name in nested else value for name, value in state.items() if name not in arrays}
        meta["parts"][part] = facts
        if arrays or nested:
            mg.save(folder / f"{part}.safetensors", arrays)
            meta["files"].append(f"{part}.safetensors")
    (folder / META).write_text(json.dumps(meta, indent=1), "utf-8")


# ---- the checkpoints of a run ----------------------------------------------------------------------------------------


def folder_name(step: int) -> str:
    """The name of the folder for ``step``.

    >>> folder_name(250)
    'step_00000250'
    """
    return f"step_{step:08d}"


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds a checkpoint: meta.json is the last file written before the rename."""
    return (folder / META).is_file()


def steps_in(out: Path, complete: bool = True) -> list[int]:
    """The steps of the checkpoints in ``out``, in order; ``complete=False`` counts those without a meta.json too."""
    found = [(re.fullmatch(STEP, path.name), path) for path in out.glob("step_*")]
    return sorted(int(match[1]) for match, path in found if match and (is_complete(path) or not complete))


def open_checkpoint(path: Path, program: str | tuple[str, ...] | None = None) -> Checkpoint:
    """The checkpoint at ``path``: a step folder, or a run folder, of which the newest complete checkpoint is taken.

    Where ``program`` is given, or several, one that another program wrote is refused.
    """
    if not is_complete(path):
        steps = steps_in(path)
        if not steps:
            raise FileFormatError("a checkpoint (a run folder or a step_... folder)", f"none at {path}")
        path = path / folder_name(steps[-1])
    meta = read_json(path / META, "the facts of a checkpoint")
    if not {"step", "parts"} <= meta.keys():
        raise FileFormatError("the facts of a checkpoint, with 'step' and 'parts'", f"others in {path / META}")
    if wrong := [name for name, legal in LEGAL.items() if name in meta and not legal(meta[name])]:
        raise FileFormatError("the facts of a checkpoint", f"{wrong[0]}: {meta[wrong[0]]!r} in {path / META}")
    if not isinstance(version := meta.get("format", FORMAT), int) or version > FORMAT:
        got, hint = f"format {version!r} in {path / META}", "a newer minigrad wrote it, and can read it"
        raise FileFormatError(f"a checkpoint of a format up to {FORMAT}", got, hint)
    programs = (program,) if isinstance(program, str) else program
    if programs and meta.get("program") not in programs:
        raise FileFormatError(f"a run of {' or '.join(programs)}", f"{path} of {meta.get('program')}")
    return Checkpoint(path, meta)


def open_newest(path: str | None, program: str | tuple[str, ...], runs: Path = Path("runs")) -> Checkpoint:
    """The checkpoint of ``program``, or of one of them, at ``path``, else that of a run in ``runs`` that saved last."""
    if path is not None:
        return open_checkpoint(Path(path), program)
    pointers = [pointer for pointer in runs.glob("*/latest") if pointer.is_file()]
    pointers.sort(key=lambda pointer: pointer.stat().st_mtime, reverse=True)
    for pointer in pointers:
        with suppress(FileFormatError):
            return open_checkpoint(pointer.parent, program)
    name = program if isinstance(program, str) else program[0]
    raise ArgumentError(
        f"a model that {name} has trained", f"no run of it in {runs}/", "train one first, or name it by --checkpoint"
    )


def averaged(checkpoint: Checkpoint, part: str = "model", share: float = 0.1) -> tuple[dict[str, Any], list[int]]:
    """The mean of the arrays of ``part`` over the last checkpoints of a run, and the steps of these.

    Last are those of the last ``share`` of the updates up to ``checkpoint``. Late in a training the weights wander
    about a good place, and their mean is nearer to it than each (Polyak & Juditsky 1992).
    """
    out, last = checkpoint.path.parent, checkpoint.step
    steps = [step for step in steps_in(out) if (1 - share) * last <= step < last]
    if checkpoint.path.name != folder_name(last):  # a copy, beside which another run may lie
        steps = []
    checkpoints = [*(open_checkpoint(out / folder_name(step)) for step in steps), checkpoint]
    with understood(checkpoint.path):
        newest = checkpoint.load(part)
        total = {name: np.zeros(array.shape) for name, array in newest.items()}
        for each in checkpoints:
            arrays = each.load(part)
            if {name: array.shape for name, array in arrays.items()} != {name: a.shape for name, a in newest.items()}:
                raise FileFormatError(f"the arrays of {checkpoint.path}", f"others in {each.path}")
            for name, array in arrays.items():
                total[name] += array.astype("float64") / len(checkpoints)
        mean = {name: total[name].astype(array.dtype) for name, array in newest.items()}
    return mean, [*steps, last]


def point(out: Path, pointer: str, name: str) -> None:
    """Let the text file ``out/pointer`` (``latest`` or ``best``) hold ``name``."""
    write_whole(out / pointer, f"{name}\n".encode())


def copy_checkpoint(source: Path, out: Path) -> None:
    """Copy the checkpoint in ``source``, and nothing else, into the run folder ``out``, whole or not at all."""
    if not is_complete(out / source.name):
        with atomic_write(out / source.name, folder=True) as temporary:
            for file in open_checkpoint(source).files():
                shutil.copyfile(file, temporary / file.name)


def tidy(out: Path) -> None:
    """Remove what a killed program left half written or half removed in the run folder ``out``."""
    for path in out.glob(".*"):
        if is_temporary(path.name, f"({FILES}|{STEP})") or re.fullmatch(rf"\.(dropped|partial)-{STEP}", path.name):
            remove(path)


def drop_checkpoints(out: Path, steps: Iterable[int]) -> None:
    """Remove the checkpoints of ``steps``: each leaves its name at once, and then its files go."""
    for step in steps:
        folder = out / folder_name(step)
        dropped = out / (DROPPED + folder.name)
        os.rename(folder, dropped)
        remove(dropped)
