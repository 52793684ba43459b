"""Results that are kept as they come, so that a program goes on where it ended: a file with a line of JSON for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]  # what was measured, and under "found" what it gave


def read(path: Path) -> list[Record]:
    """The records of a file, the last of each thing that was measured; a line that was cut off doesn't count."""
    found: dict[str, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[json.dumps({name: value for name, value in record.items() if name != "found"}, sort_keys=True)] = record
    return list(found.values())


def add(path: Path, record: Record) -> None:
    """Put a record at the end of a file; several processes may do so at a time."""
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * cut_off + json.dumps(record) + "\n")
