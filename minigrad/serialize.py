"""Arrays to and from safetensors files. Nothing is ever unpickled, and a file is whole or not there."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from minigrad.backend import Array, array_of, as_dtype, bfloat16, is_array, to_numpy
from minigrad.errors import ArgumentError, CallError, DTypeError, FileFormatError, MissingFileError, OutOfMemoryError
from minigrad.files import atomic_write, regular_file
from minigrad.messages.arguments import plain_array
from minigrad.messages.explain import describe, explained

MOST_HEADER = 100_000_000  # bytes, as in the library


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
    if "\0" in str(checked_path(path)):
        raise ArgumentError("the path of a file", f"{str(path)!r}, with a null byte", "no file has such a name")
    path = Path(os.path.realpath(path))  # a link stays one: the file that it points to is replaced
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
        if name == "__metadata__":
            raise ArgumentError("names of arrays", f"{name!r}, which is that of the metadata", "another name")
        _check_text(name)
        if as_dtype(array.dtype).itemsize > 8:
            raise DTypeError("arrays of at most 64 bits", f"{name!r}: {describe(array)}", "astype('float64') rounds")
        plain[name] = np.ascontiguousarray(to_numpy(array)).reshape(array.shape)
    return plain


def _text(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, Mapping | None):
        raise CallError("metadata as a dict of texts", describe(metadata), "json.dumps makes a text of anything")
    text = {str(key): str(value) for key, value in (metadata or {}).items()}
    for part in (*text, *text.values()):
        _check_text(part)
    return text


def _check_text(text: str) -> None:
    """Refuse what no file can hold: halves of a character, as names of files in another encoding have."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got, hint = f"{text!r}, of which {text[error.start]!r} is none", "text.encode('utf-8', 'replace').decode()"
        raise ArgumentError("text of whole characters", got, hint) from None


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
    with _opened(path) as (file, entries, _):
        return {name: entry.read(file, name) for name, entry in entries.items()}


def load_shapes(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of a safetensors file by their names; the arrays aren't read."""
    with _opened(path) as (_, entries, _):
        return {name: entry.shape for name, entry in entries.items()}


@explained
def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The text that ``save`` stored beside the arrays."""
    with _opened(path) as (_, _, metadata):
        return metadata


KINDS = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "u2", "I16": "i2", "U32": "u4", "I32": "i4", "U64": "u8", "I64": "i8",
    "F16": "f2", "BF16": "u2", "F32": "f4", "F64": "f8", "C64": "c8",
}  # fmt: skip


class _Entry(NamedTuple):
    """Where in a file an array lies, and what it is."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self, file: Any, name: str) -> Array:
        """The array, read into memory of its own: a map of a file that shrinks meanwhile would end the process."""
        try:
            found = np.empty(self.shape, np.dtype(KINDS[self.kind]).newbyteorder("<"))
        except MemoryError:
            got = f"{name!r} {self.kind} {list(self.shape)} in {file.name!r}"
            raise OutOfMemoryError("memory for the arrays", got, "a machine with more of it") from None
        except (KeyError, ValueError):
            hint = "what wrote the file can cast them"
            got = f"{name!r} of {self.kind} {list(self.shape)}"
            raise FileFormatError("arrays of dtypes that NumPy has, or bfloat16", got, hint) from None
        file.seek(self.start)
        if file.readinto(found.reshape(-1).view(np.uint8)) != found.nbytes:
            raise _unreadable(file.name, f"it ends within {name!r}; did something write to it meanwhile?")
        found = found.astype(found.dtype.newbyteorder("="), copy=False)
        if self.kind != "BF16":
            return found
        try:
            return found.view(bfloat16())
        except DTypeError:  # ml_dtypes is not there; its bits are the upper half of those of a float32
            return (found.astype(np.uint32) << 16).view(np.float32)


def _unreadable(path: Any, why: object) -> FileFormatError:
    return FileFormatError("a safetensors file", f"{str(path)!r}: {why}", "save() writes such files")


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[Any, dict[str, _Entry], dict[str, str]]]:
    """A safetensors file, the arrays that its header tells of, in the order in which they lie there, and its text."""
    regular_file(checked_path(path), "a safetensors file")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
            entries, text = _header(file)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f"no {error} of an array in its header" if isinstance(error, KeyError) else error
            raise _unreadable(path, why) from None
        yield file, entries, text


def _header(file: Any) -> tuple[dict[str, _Entry], dict[str, str]]:
    """What a safetensors file says of itself, checked: its arrays lie one after the other and fill the file."""
    size, at = os.fstat(file.fileno()).st_size, 8 + int.from_bytes(file.read(8), "little")
    if not 8 < at <= min(size, MOST_HEADER):
        raise ValueError("it begins with no header")
    header = json.loads(file.read(at - 8).decode())
    text = header.pop("__metadata__", None) or {}
    if not all(isinstance(part, str) for part in text.values()):
        raise ValueError("its metadata is no text")
    found = {name: _entry(at, facts) for name, facts in header.items()}
    entries = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)))
    for name, entry in entries.items():
        if entry.start != at:
            raise ValueError(f"{name!r} lies at byte {entry.start}, not at {at}, where the one before ends")
        at = entry.stop
    if at != size:
        raise ValueError(f"arrays up to byte {at}, in a file of {size}")
    return entries, text


def _entry(begin: int, facts: dict[str, Any]) -> _Entry:
    """An array that the header tells of; its place is counted from byte ``begin``."""
    kind, shape, (start, stop) = facts["dtype"], tuple(facts["shape"]), facts["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, start, stop)):
        raise ValueError(f"no whole numbers from 0: shape {shape}, data_offsets {start}, {stop}")
    bits = re.search(r"\d+", kind)
    if math.prod(shape) * int(bits[0] if bits else 8) != 8 * (stop - start):  # BOOL has none
        raise ValueError(f"{stop - start} bytes for shape {shape} of {kind}")
    return _Entry(kind, shape, begin + start, begin + stop)
