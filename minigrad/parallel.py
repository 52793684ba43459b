"""Cache-sized tiles over one thread pool, for the NumPy kernels.

NumPy lets go of the interpreter's lock inside its loops, so plain Python threads run kernels side by side. A kernel is
written once, as a loop over tiles that fit the L2 cache; whether the tiles run one after the other or over the pool
only changes the time, never a bit of the result: their boundaries depend on the shape alone.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import threadpoolctl
from numpy.typing import DTypeLike

from minigrad.backend import Array
from minigrad.errors import ArgumentError

TILE_BYTES = 512 * 1024  # what a tile touches: half of an L2 cache of 1 MB
MIN_PARALLEL_NS = 500_000  # below half a millisecond the hand-off (about 0.1 ms) eats the gain
MAX_VIEWS = 256  # of one scratch buffer
NS_PER_BYTE = 0.1  # a pass over memory, where the caller has no better estimate


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def for_rows(body: Callable[[int, int], object], rows: int, row_bytes: float, row_ns: float = 0.0) -> None:
    """Call ``body(start, stop)`` on tiles of [0, rows), over the pool if the work is worth it.

    A tile holds as many rows as fit the cache, ``row_bytes`` being what one row touches. ``row_ns`` estimates the time
    of a row on one thread. Bodies write to disjoint places; an exception in one is raised here, after the others ended.

    >>> import numpy as np
    >>> x, y = np.arange(6.0).reshape(3, 2), np.empty((3, 2))
    >>> for_rows(lambda start, stop: np.exp(x[start:stop], out=y[start:stop]), rows=3, row_bytes=32, row_ns=4)
    >>> bool((y == np.exp(x)).all())
    True
    """
    step = tile_rows(rows, row_bytes)
    tiles = [(start, min(start + step, rows)) for start in range(0, rows, step)]
    run([partial(body, *tile) for tile in tiles], rows * (row_ns or row_bytes * NS_PER_BYTE))


def tile_rows(rows: int, row_bytes: float) -> int:
    """Rows of a tile: as many as fit the cache, evenly spread, at least one."""
    tiles = max(1, math.ceil(rows * row_bytes / TILE_BYTES))
    return max(1, math.ceil(rows / tiles))


def run(tasks: Sequence[Callable[[], object]], work_ns: float = math.inf) -> None:
    """Run independent callables over the pool, the caller's thread among the workers, and wait for all of them.

    One after the other where ``work_ns``, the time that they take on one core, is too short to be worth sharing.

    >>> done = []
    >>> run([lambda: done.append(1), lambda: done.append(2)])
    >>> sorted(done)
    [1, 2]
    """
    if work_ns < MIN_PARALLEL_NS or _local.__dict__.get("inside"):
        for task in tasks:
            task()
        return
    with blas_threads(1):
        _Region(tasks).run(min(get_num_threads(), len(tasks)) - 1)


class _Region:
    """One parallel region: every worker takes the next task until none is left."""

    def __init__(self, tasks: Sequence[Callable[[], object]]) -> None:
        self.tasks = tasks
        self.next = itertools.count()  # next() on it is atomic
        self.errors: list[BaseException] = []

    def run(self, helpers: int) -> None:
        ends = [threading.Lock() for _ in range(helpers)]
        for end in ends:
            end.acquire()
            _submit(lambda end=end: self._work(end))
        self._work(None)
        for end in ends:
            end.acquire()
        if self.errors:
            raise self.errors[0]

    def _work(self, end: Any) -> None:
        outer, _local.inside = _local.__dict__.get("inside", False), True
        try:
            for i in self.next:
                if i >= len(self.tasks) or self.errors:
                    break
                self.tasks[i]()
        except BaseException as error:
            self.errors.append(error)
        finally:
            _local.inside = outer
            if end is not None:
                end.release()


# The pool: threads are made when first needed and wait on one queue.

_local = threading.local()
_num_threads: int | None = None


def _reset() -> None:
    """Forget the pool: a forked child has none of its parent's threads."""
    global _queue, _workers, _lock, _blas
    import queue

    _queue, _workers, _lock = queue.SimpleQueue(), 0, threading.Lock()
    _blas = _Blas()


def _submit(job: Callable[[], None]) -> None:
    global _workers
    with _lock:
        if _workers < get_num_threads() - 1:
            _workers += 1
            threading.Thread(target=_serve, args=(_queue,), daemon=True, name=f"minigrad-{_workers}").start()
    _queue.put(job)


def _serve(jobs: Any) -> None:
    while True:
        jobs.get()()


def get_num_threads() -> int:
    """Threads of the kernels: ``MINIGRAD_NUM_THREADS``, else the cores this process may use.

    >>> get_num_threads() >= 1
    True
    """
    global _num_threads
    if _num_threads is None:
        set_num_threads(int(os.environ.get("MINIGRAD_NUM_THREADS") or _usable_cores()))
    assert _num_threads is not None
    return _num_threads


def set_num_threads(n: int) -> None:
    """Let the kernels use n threads, the caller's included.

    >>> before = get_num_threads()
    >>> set_num_threads(2)
    >>> get_num_threads()
    2
    >>> set_num_threads(before)
    """
    global _num_threads
    if not isinstance(n, int) or n < 1:
        raise ArgumentError("a number of threads of at least 1", repr(n))
    _num_threads = n


def scratch(shape: tuple[int, ...], dtype: DTypeLike, key: str) -> Array:
    """A buffer of this thread, uninitialised, reused by the next call with the same key.

    >>> a = scratch((2, 3), np.float32, "example")
    >>> b = scratch((3,), np.float32, "example")
    >>> np.shares_memory(a, b)
    True
    """
    views = _local.__dict__.setdefault(key, {})
    if (shape, dtype) not in views:
        kind = np.dtype(dtype)
        base = views.get("base")
        nbytes = math.prod(shape) * kind.itemsize
        if base is None or base.nbytes < nbytes or len(views) > MAX_VIEWS:
            views.clear()
            views["base"] = base = np.empty(nbytes, np.uint8)
        views[shape, dtype] = base[:nbytes].view(kind).reshape(shape)
    return views[shape, dtype]


class _Blas:
    """Handles of the BLAS libraries that are loaded, and how many regions hold their number of threads down."""

    def __init__(self) -> None:
        self.libraries = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
        self.depth = 0
        self.before: list[int] = []


@contextmanager
def blas_threads(n: int) -> Iterator[None]:
    """Set the threads of BLAS for a region; regions of several threads overlap, the last to leave restores.

    >>> with blas_threads(1):
    ...     product = np.ones((2, 2)) @ np.ones((2, 2))
    """
    with _lock:
        if _blas.depth == 0:
            _blas.before = [library.get_num_threads() for library in _blas.libraries]
            for library in _blas.libraries:
                library.set_num_threads(n)
        _blas.depth += 1
    try:
        yield
    finally:
        with _lock:
            _blas.depth -= 1
            if _blas.depth == 0:
                for library, before in zip(_blas.libraries, _blas.before, strict=True):
                    library.set_num_threads(before)


_reset()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)
