"""Reading what a stranger wrote, and writing files and folders that appear whole or not at all.

Only regular files are opened, and JSON is read up to a sane size and depth.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minigrad.errors import FileFormatError, MissingFileError

MOST_JSON, DEEPEST_JSON = 1 << 28, 64  # bytes, levels


def regular_file(path: str | os.PathLike[str], expected: str, hint: str = "") -> Path:
    """``path``, refused where no regular file is there to read: a FIFO would wait for ever, a device might never end.

    ``expected`` says what the file should be. Links are followed.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # ValueError: a null byte
        absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = "" if absent else f" ({getattr(error, 'strerror', error)})"
        hint = hint or f"the working directory is {os.getcwd()!r}"
        raise MissingFileError(expected, f"no file {str(path)!r}{why}", hint) from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise MissingFileError(expected, f"no file {str(path)!r}, which is {what}", hint)
    return Path(path)


def read_json(path: Path, expected: str, hint: str = "") -> dict[str, Any]:
    """The JSON object of a regular file, of at most MOST_JSON bytes and DEEPEST_JSON levels."""
    if regular_file(path, expected, hint).stat().st_size > MOST_JSON:
        raise FileFormatError(expected, f"{str(path)!r} of more than {MOST_JSON} bytes", hint)
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"JSON in {path.name}", f"{error} in {str(path)!r}", hint) from None
    if not isinstance(found, dict):
        raise FileFormatError(f"a JSON object in {path.name}", f"{type(found).__name__} in {str(path)!r}", hint)
    level: list[Any] = [found]
    for _ in range(DEEPEST_JSON):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [part for parts in inner for part in parts if isinstance(part, dict | list)]
        if not level:
            return found
    raise FileFormatError(expected, f"{str(path)!r} nested more than {DEEPEST_JSON} levels deep", hint)


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
