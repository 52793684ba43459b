"""How a check runs, and how a row of its table comes about."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import load_cupy

Row = tuple[str, str, str]  # what was checked, the figure, and whether it is as it should be


class Task(NamedTuple):
    """How a check is to run: at tiny sizes, until when on the clock of ``perf_counter``, and where files go."""

    quick: bool
    deadline: float
    folder: Path

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def rows(self, calls: Iterable[tuple[str, Callable[[], tuple[str, str]]]]) -> Iterator[Row]:
        """A row for each of (what, call), with the figure and verdict that the call gives; an error is a row too."""
        for what, call in calls:
            if self.left() < 5:
                yield what, "no time left", "-"
                continue
            try:
                yield (what, *call())
            except Exception as error:
                traceback.print_exc()
                yield what, short(error), "FAILED"
            if not self.quick:
                gc.collect()
            with contextlib.suppress(Exception):  # after a crash of the GPU nothing works
                load_cupy().get_default_memory_pool().free_all_blocks()


def short(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' | '.join(str(error).splitlines())}"[:200]


def judged(worst: float, tolerance: float) -> tuple[str, str]:
    """Figure and verdict of an error."""
    return f"off by {worst:.1e}", "ok" if worst < tolerance else "FAILED"


def difference(ours: Any, exact: Any) -> float:
    """The largest difference over the largest value, which counts as 1 at least."""
    return float(np.abs(ours - exact).max() / max(1.0, np.abs(exact).max()))
