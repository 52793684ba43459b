"""Files that a stranger made: only regular ones are opened, and JSON is read up to a sane size and depth."""

from __future__ import annotations

import json
import os
import stat
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
