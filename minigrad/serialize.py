"""Arrays to and from safetensors files. Nothing is ever unpickled, and a file is whole or not there."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from minigrad.backend import Array, as_dtype, bfloat16, is_array, to_numpy
from minigrad.errors import ArgumentError, DTypeError, FileFormatError


def save(path: str | os.PathLike[str], arrays: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write named arrays or Tensors as a safetensors file: to a temporary name, flushed to disk, then renamed.

    An old file at ``path`` stays as it was until the new one is complete, and if anything fails.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.safetensors", {"x": np.ones(2)})
    ...     print(load(f"{folder}/a.safetensors")["x"])
    [1. 1.]
    """
    path = Path(path)
    plain = {}
    for name, value in arrays.items():
        array = getattr(value, "_data", value)
        if not isinstance(name, str) or not is_array(array):
            got = f"{name!r}: {type(value).__name__}"
            raise ArgumentError("names with arrays or Tensors", got, "keep other things in metadata, as text")
        as_dtype(array.dtype)
        plain[name] = np.ascontiguousarray(to_numpy(array)).reshape(array.shape)
    text = {str(key): str(value) for key, value in (metadata or {}).items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        safetensors.numpy.save_file(plain, temporary, metadata=text or None)
        flush_to_disk(temporary)
        os.replace(temporary, path)
        flush_to_disk(path.parent)
    except safetensors.SafetensorError as error:  # a full disk, say
        raise OSError(errno.EIO, str(error), str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _array(file: Any, path: str | os.PathLike[str], name: str) -> Array:
    kind = file.get_slice(name).get_dtype()
    if kind == "BF16":
        return _bfloat16_array(path, name)
    try:
        return file.get_tensor(name)
    except (TypeError, AttributeError):  # as NumPy complains
        raise FileFormatError("arrays of dtypes that NumPy has, or bfloat16", f"{name!r} of {kind}") from None


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


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The text that ``save`` stored beside the arrays."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def _opened(path: str | os.PathLike[str]) -> Any:
    if not Path(path).is_file():
        raise FileFormatError("a safetensors file", f"no file {str(path)!r}")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise FileFormatError("a safetensors file", f"{str(path)!r}: {error}") from None
