"""Arrays to and from safetensors files. Nothing is ever unpickled, and a file is whole or not there."""

from __future__ import annotations

import errno
import glob
import json
import math
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from minigrad.backend import Array, array_of, as_dtype, bfloat16, is_array, to_numpy
from minigrad.errors import ArgumentError, CallError, DTypeError, FileFormatError, MissingFileError, OutOfMemoryError
from minigrad.files import regular_file
from minigrad.messages.arguments import plain_array
from minigrad.messages.explain import describe, explained


@explained
def save(path: str | os.PathLike[str], arrays: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write named arrays or Tensors as a safetensors file: to a temporary name, flushed to disk, then renamed.

    An old file at ``path`` stays as it was until the new one is complete, and if anything fails; its permissions stay.
    metadata is text by its names, which ``load_metadata`` reads again.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.safetensors", {"x": np.ones(2)})
    ...     print(load(f"{folder}/a.safetensors")["x"])
    [1. 1.]

    A model and its optimizer in one file: arrays under a prefix, the rest of the optimizer's state as text.

    >>> import json, nn, optim
    >>> model = nn.Linear(2, 2)
    >>> optimizer = optim.AdamW(model.parameters())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = optimizer.state_dict()
    ...     arrays = {f"model.{name}": array for name, array in model.state_dict().items()}
    ...     arrays |= {f"optimizer.{name}": array for name, array in state["state"].items()}
    ...     save(f"{folder}/all.safetensors", arrays, {"groups": json.dumps(state["param_groups"])})
    ...     found = load(f"{folder}/all.safetensors")
    ...     groups = json.loads(load_metadata(f"{folder}/all.safetensors")["groups"])
    >>> parts = {"model": {}, "optimizer": {}}
    >>> for name, array in found.items():
    ...     part, _, rest = name.partition(".")
    ...     parts[part][rest] = array
    >>> _ = model.load_state_dict(parts["model"])
    >>> optimizer.load_state_dict({"state": parts["optimizer"], "param_groups": groups})
    """
    path = Path(os.path.realpath(checked_path(path)))  # a link stays one: the file that it points to is replaced
    plain, text = _plain(arrays), _text(metadata)
    if path.is_dir():
        raise ArgumentError("the path of a file", f"the folder {str(path)!r}", "name a file in it")
    if path.exists() and not path.is_file():
        raise ArgumentError("the path of a file", f"the device or FIFO {str(path)!r}", "name a regular file")
    if not path.parent.is_dir():
        raise MissingFileError("a folder to save in", f"no folder {str(path.parent)!r}", "os.makedirs makes it")
    with atomic_write(path) as temporary:
        try:
            safetensors.numpy.save_file(plain, temporary, metadata=text or None)
        except safetensors.SafetensorError as error:  # a full disk, say
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from None


def checked_path(path: Any, what: str = "a file", example: str = "model.safetensors") -> Any:
    """``path``, refused where it is none."""
    if not isinstance(path, str | os.PathLike):
        hint = "the path comes first: save(path, arrays)" if isinstance(path, Mapping) else f"such as {example!r}"
        raise CallError(f"the path of {what}", describe(path), hint)
    return path


def _plain(arrays: Any) -> dict[str, Any]:
    """The named arrays, contiguous and on the CPU, each of a dtype that the file can hold."""
    if not isinstance(arrays, Mapping):
        raise CallError("a dict of names and arrays", describe(arrays), "save(path, {'x': x})")
    plain = {}
    for name, value in arrays.items():
        array = plain_array(value) if isinstance(value, np.ndarray) else array_of(value)
        if not isinstance(name, str) or not is_array(array):
            hint = "keep other things in metadata, as text"
            raise ArgumentError("names with arrays or Tensors", f"{name!r}: {describe(value)}", hint)
        if as_dtype(array.dtype).itemsize > 8:
            raise DTypeError("arrays of at most 64 bits", f"{name!r}: {describe(array)}", "astype('float64') rounds")
        plain[name] = np.ascontiguousarray(to_numpy(array)).reshape(array.shape)
    return plain


def _text(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, Mapping | None):
        raise CallError("metadata as a dict of texts", describe(metadata), "json.dumps makes a text of anything")
    return {str(key): str(value) for key, value in (metadata or {}).items()}


# ---- files and folders that appear whole -----------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path, folder: bool = False) -> Iterator[Path]:
    """A temporary file (or folder) to write to; when the block ends it is flushed to the disk and renamed to ``path``.

    After a kill or an error ``path`` holds what it held before, or all of the new, never a part. A file keeps the
    permissions of the one that it replaces. No link is followed: where ``path`` is one, the link itself is replaced.
    """
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    remove(temporary)  # of an earlier process with our number, or a link that waits for us
    try:
        temporary.mkdir() if folder else temporary.touch(exist_ok=False)  # with the permissions that the umask leaves
        kept = path if path.exists() and not path.is_symlink() else temporary
        mode = stat.S_IMODE(kept.stat().st_mode)
        yield temporary
        os.chmod(temporary, mode)
        for written in [*temporary.rglob("*"), temporary]:
            flush_to_disk(written)
        os.replace(temporary, path)
    finally:
        remove(temporary)
    flush_to_disk(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write the file ``path`` by ``atomic_write``."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def is_temporary(name: str, of: str) -> bool:
    """Whether ``name`` is one that ``atomic_write`` gives to what it writes for a path with a name like ``of``."""
    return re.fullmatch(rf"\.{of}\.\d+\.\d+\.tmp", name) is not None


def _remove_abandoned(path: Path) -> None:
    """Remove what writers of ``path`` that were killed left behind: temporary files, unchanged for an hour."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.*.tmp"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > 3600:
                remove(left)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ---------------------------------------------------------------------------------------------------------


@explained
def load(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The named arrays of a safetensors file, on the CPU. Without the package ml_dtypes bfloat16 becomes float32.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.safetensors", {"x": np.arange(3)})
    ...     print(load(f"{folder}/a.safetensors")["x"])
    [0 1 2]
    """
    with _opened(path) as file:
        return {name: _array(file, path, name) for name in file.keys()}  # noqa: SIM118 (the file is no dict)


def load_shapes(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of a safetensors file by their names; the arrays aren't read."""
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _array(file: Any, path: str | os.PathLike[str], name: str) -> Array:
    stored = file.get_slice(name)
    kind, shape = stored.get_dtype(), stored.get_shape()
    try:  # the library would end in a panic
        np.empty(math.prod(shape) * (int(re.sub(r"\D", "", kind) or 8) // 8), np.uint8)
    except (MemoryError, ValueError):
        got = f"{name!r} {kind} {shape} in {str(path)!r}"
        raise OutOfMemoryError("memory for the arrays", got, "a machine with more of it") from None
    try:
        return _bfloat16_array(path, name) if kind == "BF16" else file.get_tensor(name)
    except (TypeError, AttributeError, ValueError, OverflowError, safetensors.SafetensorError):  # as NumPy complains
        hint = "what wrote the file can cast them"
        raise FileFormatError("arrays of dtypes that NumPy has, or bfloat16", f"{name!r} of {kind}", hint) from None


def _bfloat16_array(path: str | os.PathLike[str], name: str) -> Array:
    """An array that NumPy can't read by itself: its bits are the upper half of those of a float32."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        facts = json.loads(file.read(size))[name]
    start, stop = facts["data_offsets"]
    bits = np.fromfile(path, "<u2", (stop - start) // 2, offset=8 + size + start).reshape(facts["shape"])
    try:
        return bits.view(bfloat16())
    except DTypeError:  # ml_dtypes is not there
        return (bits.astype(np.uint32) << 16).view(np.float32)


@explained
def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The text that ``save`` stored beside the arrays."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def _opened(path: str | os.PathLike[str]) -> Any:
    regular_file(checked_path(path), "a safetensors file")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        hint = "save() writes such files"
        raise FileFormatError("a safetensors file", f"{str(path)!r}: {error}", hint) from None
