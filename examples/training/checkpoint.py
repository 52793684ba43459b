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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minigrad as mg
from minigrad.backend import is_array
from minigrad.errors import ArgumentError, FileFormatError
from minigrad.serialize import atomic_write, is_temporary, write_whole

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

    def load(self, part: str) -> dict[str, Any]:
        """The state dict that was saved under the name ``part``."""
        file = self.path / f"{part}.safetensors"
        state: dict[str, Any] = dict(self.meta["parts"][part])
        there = file.is_file() or file.name in self.meta.get("files", [])  # the oldest checkpoints don't list them
        for name, array in (mg.load(file) if there else {}).items():
            key, slash, inner = name.partition("/")
            if slash:
                state[key][inner] = array
            else:
                state[name] = array
        return state


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


def open_checkpoint(path: Path, program: str | None = None) -> Checkpoint:
    """The checkpoint at ``path``: a step folder, or a run folder, of which the newest complete checkpoint is taken.

    Where ``program`` is given, one that another program wrote is refused.
    """
    if not is_complete(path):
        steps = steps_in(path)
        if not steps:
            raise FileFormatError("a checkpoint (a run folder or a step_... folder)", f"none at {path}")
        path = path / folder_name(steps[-1])
    try:
        meta = json.loads((path / META).read_text("utf-8"))
    except ValueError as error:
        raise FileFormatError(f"JSON in {path / META}", str(error)) from None
    if not isinstance(meta, dict) or not {"step", "parts"} <= meta.keys():
        raise FileFormatError("the facts of a checkpoint, with 'step' and 'parts'", f"others in {path / META}")
    if not isinstance(version := meta.get("format", FORMAT), int) or version > FORMAT:
        got, hint = f"format {version!r} in {path / META}", "a newer minigrad wrote it, and can read it"
        raise FileFormatError(f"a checkpoint of a format up to {FORMAT}", got, hint)
    if program is not None and meta.get("program") != program:
        raise FileFormatError(f"a run of {program}", f"{path} of {meta.get('program')}")
    return Checkpoint(path, meta)


def open_newest(path: str | None, program: str, runs: Path = Path("runs")) -> Checkpoint:
    """The checkpoint of ``program`` at ``path``, else that of its run in ``runs`` that saved one last."""
    if path is not None:
        return open_checkpoint(Path(path), program)
    pointers = sorted(runs.glob("*/latest"), key=lambda pointer: pointer.stat().st_mtime, reverse=True)
    for pointer in pointers:
        with suppress(FileFormatError):
            return open_checkpoint(pointer.parent, program)
    raise ArgumentError(
        f"a model that {program} has trained", f"no run of it in {runs}/", "train one first, or name it by --checkpoint"
    )


def averaged(checkpoint: Checkpoint, part: str = "model", share: float = 0.1) -> tuple[dict[str, Any], list[int]]:
    """The mean of the arrays of ``part`` over the last checkpoints of a run, and the steps of these.

    Last are those of the last ``share`` of the updates up to ``checkpoint``. Late in a training the weights wander
    about a good place, and their mean is nearer to it than each (Polyak & Juditsky 1992).
    """
    out, last = checkpoint.path.parent, checkpoint.step
    steps = [step for step in steps_in(out) if (1 - share) * last <= step <= last]
    total: dict[str, Any] = {}
    for step in steps:
        for name, array in open_checkpoint(out / folder_name(step)).load(part).items():
            total[name] = total.get(name, 0.0) + array.astype("float64") / len(steps)
    return {name: total[name].astype(array.dtype) for name, array in checkpoint.load(part).items()}, steps


def point(out: Path, pointer: str, name: str) -> None:
    """Let the text file ``out/pointer`` (``latest`` or ``best``) hold ``name``."""
    write_whole(out / pointer, f"{name}\n".encode())


def copy_checkpoint(source: Path, out: Path) -> None:
    """Copy the step folder ``source`` into the run folder ``out``, whole or not at all."""
    if not is_complete(out / source.name):
        with atomic_write(out / source.name, folder=True) as temporary:
            shutil.copytree(source, temporary, dirs_exist_ok=True)


def tidy(out: Path) -> None:
    """Remove what a killed program left half written or half removed in the run folder ``out``."""
    for path in out.glob(".*"):
        if is_temporary(path.name, FILES):
            path.unlink()
        elif is_temporary(path.name, STEP) or re.fullmatch(rf"\.(dropped|partial)-{STEP}", path.name):
            shutil.rmtree(path)


def drop_checkpoints(out: Path, steps: Iterable[int]) -> None:
    """Remove the checkpoints of ``steps``: each leaves its name at once, and then its files go."""
    for step in steps:
        folder = out / folder_name(step)
        dropped = out / (DROPPED + folder.name)
        os.rename(folder, dropped)
        shutil.rmtree(dropped)
