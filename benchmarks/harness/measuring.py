"""Instruments: peak memory of this process, the rate of matrix products, and what machine this is."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PRODUCT = 1024  # sgemm is timed on square matrices of this size
STATUS = Path("/proc/self/status")


def _status(field: str) -> float:
    """A field of /proc/self/status in MB; 0 where there is none."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), 0.0)


def resident_mb() -> float:
    """Memory that this process holds now, in MB (where /proc is missing: the most it ever held)."""
    return _status("VmRSS") or peak_mb()


def peak_mb() -> float:
    """The most memory that this process held since ``reset_peak``, in MB."""
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def reset_peak() -> None:
    """Let the peak start again from what is held now; without effect where the system can't."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def trim() -> None:
    """Give back to the system what malloc keeps of freed memory, so that none of it hides what comes; glibc's alone."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def held_mb(cache: Any) -> float:
    """What a KVCache has allocated in all layers, in MB."""

    def nbytes(held: Any) -> int:
        return sum(map(nbytes, held)) if isinstance(held, tuple) else getattr(held, "nbytes", 0)

    return nbytes((*cache._own.values(), *cache._states.values())) / 2**20


def median_seconds(call: Callable[[], object], seconds: float, least: int = 3) -> float:
    """The median time of a call that is repeated for about ``seconds``, after one that isn't counted."""
    call()
    times: list[float] = []
    while len(times) < least or sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def product_gflops(multiplier: Callable[[np.ndarray, np.ndarray], Callable[[], object]]) -> float:
    """GFLOP/s of float32 matrix products; ``multiplier(a, b)`` gives a function that computes a·b once and waits."""
    draw = np.random.default_rng(0).standard_normal
    a, b = (draw((PRODUCT, PRODUCT), np.float32) for _ in range(2))
    return 2e-9 * PRODUCT**3 / median_seconds(multiplier(a, b), seconds=0.2)


# ---- the machine -----------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """The processor, the cores in use, the memory and Python's version in a line."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    vectors = next((line.split() for line in lines if line.startswith("flags")), [])
    widest = next((flag for flag in ("avx512f", "avx2") if flag in vectors), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [name or "unknown processor", widest, f"{usable_cores()} cores", f"{memory:.0f} GB", platform.system()]
    return ", ".join([part for part in parts if part] + [f"Python {platform.python_version()}"])


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed version of each package that is installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


class OtherWork:
    """How much of the machine others used between making this and asking: a table from a busy machine is worth less."""

    def __init__(self) -> None:
        self.busy, self.total, self.own = self._ticks()

    @staticmethod
    def _ticks() -> tuple[float, float, float]:
        stat = Path("/proc/stat")
        fields = [int(x) for x in stat.read_text().splitlines()[0].split()[1:9]] if stat.exists() else [0] * 8
        idle = fields[3] + fields[4]
        own = sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")  # children count once they have ended
        return sum(fields) - idle, sum(fields), own

    def share(self) -> float | None:
        """The share of all cores' time that other processes took; None where the system doesn't say."""
        busy, total, own = self._ticks()
        if total == self.total:
            return None
        return max(0.0, (busy - self.busy - (own - self.own)) / (total - self.total))
