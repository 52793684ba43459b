"""The memory that a training step needs is compared with what there is before it begins: an overfull machine hangs."""

from __future__ import annotations

import os
from pathlib import Path

from minigrad.backend import load_cupy
from training.console import size
from training.flags import raise_any

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_of(device: str) -> int | None:
    """Bytes of memory that ``device`` (cpu or cuda) has, or this container may use; None where nothing tells."""
    if device != "cpu":
        return int(load_cupy().cuda.runtime.memGetInfo()[1])
    limits = []
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if CONTAINER_LIMIT.is_file() and (limit := CONTAINER_LIMIT.read_text().strip()).isdigit():
        limits.append(int(limit))
    return min(limits, default=None)


def check_memory(device: str, weights: int, activations: int, itemsize: int, flags: str) -> None:
    """Refuse a step that needs more than there is; ``flags`` are those that decide.

    weights and activations are counts of numbers of ``itemsize`` bytes: a weight is held four times (itself, its
    gradient and AdamW's two moments), an activation once, until the backward pass has used it.
    """
    needed, there = itemsize * (4 * weights + activations), memory_of(device)
    if there is not None and needed > there:
        got = f"one that needs about {size(needed)} ({size(4 * itemsize * weights)} of them for the weights)"
        raise_any([f"{flags}: expected a training step that fits into {size(there)} of memory, got {got}"])
