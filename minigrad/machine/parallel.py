"""Cache-sized tiles over one thread pool, for the NumPy kernels, beside the threads of BLAS.

NumPy releases the interpreter's lock inside its loops, so plain Python threads run kernels side by side. A kernel is a
loop over tiles that fit the L2 cache. The tiles run one after the other or over the pool, which changes the time but no
bit of the result: their boundaries depend on the shape alone, and BLAS works on one thread inside.

OpenBLAS has threads of its own. After a product they spin for some 30 ms, waiting for the next one, and take a core
from this pool. :func:`calm_openblas` lets them sleep instead.
"""

from __future__ import annotations

import contextvars
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import threadpoolctl

from minigrad.backend import Array
from minigrad.errors import ArgumentError
from minigrad.messages.arguments import as_int

TILE_BYTES = 512 * 1024  # what a tile touches: an L2 cache
MIN_PARALLEL_NS = 500_000  # below half a millisecond the hand-off (about 0.1 ms) eats the gain
NS_PER_BYTE = 0.1  # of a pass over memory, where the caller has no better estimate
MAX_VIEWS = 256  # of one scratch buffer
SPIN = "16"  # log2 of the processor cycles that an idle thread of OpenBLAS spins: 0.03 ms; its own default is 26

Task = Callable[[], object]


# ---- tiles and tasks ------------------------------------------------------------------------------------------------


def for_rows(body: Callable[[int, int], object], rows: int, row_bytes: float, row_ns: float = 0.0) -> None:
    """Call ``body(start, stop)`` on tiles of [0, rows), over the pool if the work is worth it.

    A tile holds as many rows as fit the cache, ``row_bytes`` being what one row touches. ``row_ns`` estimates the time
    of a row on one thread. Bodies write to disjoint places; an exception in one is raised here, after the others ended.

    >>> x, y = np.arange(6.0).reshape(3, 2), np.empty((3, 2))
    >>> for_rows(lambda start, stop: np.exp(x[start:stop], out=y[start:stop]), rows=3, row_bytes=32, row_ns=4)
    >>> bool((y == np.exp(x)).all())
    True
    """
    step = even_step(rows, TILE_BYTES / row_bytes if row_bytes else rows)
    tiles = [(start, min(start + step, rows)) for start in range(0, rows, step)]
    run([partial(body, *tile) for tile in tiles], rows * (row_ns or row_bytes * NS_PER_BYTE))


def even_step(rows: int, most: float) -> int:
    """The length of parts of ``rows``, as equal as can be: as few as have a length of up to ``most``, rounded up.

    >>> even_step(10, 4), even_step(10, 0.5), even_step(0, 4)
    (4, 1, 1)
    """
    parts = max(1, math.ceil(rows / most)) if most else max(1, rows)
    return max(1, math.ceil(rows / parts))


def run(tasks: Sequence[Task], work_ns: float = math.inf) -> None:
    """Run independent callables over the pool, the caller's thread among the workers, and wait for all of them.

    ``work_ns`` is their time on one core. They run one after the other if it is too short to be worth sharing, and
    inside of another such call. The first exception, in the order of the tasks, is raised here once all workers end.

    >>> done = []
    >>> run([lambda: done.append(1), lambda: done.append(2)])
    >>> sorted(done)
    [1, 2]
    """
    if work_ns < MIN_PARALLEL_NS or _mine.inside:
        for task in tasks:
            task()
        return
    with blas_threads(1):
        _Region(tasks).run(min(get_num_threads(), len(tasks)) - 1)


class _Mine(threading.local):
    """What belongs to each thread: whether it works on a region, and its scratch buffers by key."""

    def __init__(self) -> None:
        self.inside = False
        self.buffers: dict[str, dict[Any, Array]] = {}


class _Region:
    """Tasks that are worked on together: every worker takes the next one until none is left."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.numbers = itertools.count()  # next() on it is atomic
        self.errors: dict[int, BaseException] = {}

    def run(self, helpers: int) -> None:
        ends = [threading.Lock() for _ in range(helpers)]
        for end in ends:
            end.acquire()
            context = contextvars.copy_context()  # the caller's np.errstate holds in the workers too
            _pool.submit(partial(context.run, self.help, end))
        self.work()
        for end in ends:
            end.acquire()
        if self.errors:
            raise self.errors[min(self.errors)]

    def help(self, end: Any) -> None:
        try:
            self.work()
        finally:
            end.release()

    def work(self) -> None:
        _mine.inside = True
        try:
            for number in self.numbers:
                if number >= len(self.tasks) or self.errors:
                    break
                try:
                    self.tasks[number]()
                except BaseException as error:
                    self.errors[number] = error
        finally:
            _mine.inside = False


def scratch(shape: tuple[int, ...], dtype: Any, key: str) -> Array:
    """A buffer of this thread, its content undefined, which the next call with the same key uses again.

    >>> a = scratch((2, 3), np.float32, "example")
    >>> b = scratch((3,), np.float32, "example")
    >>> np.shares_memory(a, b)
    True
    """
    views = _mine.buffers.setdefault(key, {})
    if (shape, dtype) not in views:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = views.get("buffer")
        if buffer is None or buffer.nbytes < size or len(views) > MAX_VIEWS:
            views.clear()
            views["buffer"] = buffer = np.empty(size, np.uint8)
        views[shape, dtype] = buffer[:size].view(dtype).reshape(shape)
    return views[shape, dtype]


# ---- the pool -------------------------------------------------------------------------------------------------------


class _Pool:
    """Daemon threads, started when first needed, that wait on one queue."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Task] = SimpleQueue()
        self.workers = 0
        self.lock = threading.Lock()

    def submit(self, job: Task) -> None:
        with self.lock:
            if self.workers < get_num_threads() - 1:
                self.workers += 1
                threading.Thread(target=_serve, args=(self.jobs,), name=f"minigrad-{self.workers}", daemon=True).start()
        self.jobs.put(job)


def _serve(jobs: SimpleQueue[Task]) -> None:
    while True:
        jobs.get()()


def get_num_threads() -> int:
    """How many threads the kernels use: ``MINIGRAD_NUM_THREADS``, else the cores that this process may use.

    >>> get_num_threads() >= 1
    True
    """
    return _threads


def set_num_threads(n: int) -> None:
    """Let the kernels, and the matrix products of BLAS, use n threads, the caller's included.

    >>> before = get_num_threads()
    >>> set_num_threads(2)
    >>> get_num_threads()
    2
    >>> set_num_threads(before)
    """
    global _threads
    if as_int(n, "the number of threads") < 1:
        raise ArgumentError("a number of threads of at least 1", repr(n), "1 is the caller's alone")
    _threads = int(n)
    _blas.set(_threads)


def _default_threads() -> int:
    """The number of threads at import; where the environment names it, BLAS gets it too."""
    wish = os.environ.get("MINIGRAD_NUM_THREADS")
    if wish is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not wish.isdigit() or int(wish) < 1:
        raise ArgumentError(
            "MINIGRAD_NUM_THREADS to be a number of at least 1", repr(wish), "unset it to use every core"
        )
    _blas.set(int(wish))
    return int(wish)


# ---- BLAS -----------------------------------------------------------------------------------------------------------


class _Blas:
    """The BLAS libraries of this process, and how many regions hold their number of threads down."""

    def __init__(self) -> None:
        self.libraries = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
        self.controls = [_control(library) for library in self.libraries]
        self.lock = threading.Lock()
        self.regions = 0
        self.before: list[int] = []

    def set(self, n: int) -> None:
        for _, set_threads in self.controls:
            set_threads(n)

    def enter(self, n: int) -> None:
        with self.lock:
            if not self.regions:
                self.before = [get_threads() for get_threads, _ in self.controls]
                self.set(n)
            self.regions += 1

    def leave(self) -> None:
        with self.lock:
            self.regions -= 1
            if not self.regions:
                for (_, set_threads), n in zip(self.controls, self.before, strict=True):
                    set_threads(n)


def _control(library: Any) -> tuple[Callable[[], int], Callable[[int], object]]:
    """The functions of a library that get and set its number of threads.

    OpenBLAS's own are taken, under the names of its builds: threadpoolctl's take ten times as long, and since 3.8 they
    heed only the first thread that calls them.
    """
    if library.internal_api == "openblas" and library.threading_layer != "openmp":
        for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64")):
            names = [f"{prefix}openblas_{verb}_num_threads{suffix}" for verb in ("get", "set")]
            if all(hasattr(library.dynlib, name) for name in names):
                get_threads, set_threads = (getattr(library.dynlib, name) for name in names)
                return get_threads, set_threads
    return library.get_num_threads, library.set_num_threads


@contextmanager
def blas_threads(n: int) -> Iterator[None]:
    """Let BLAS use n threads inside; where regions overlap, in one thread or several, the first one's n stays.

    >>> with blas_threads(1):
    ...     product = np.ones((2, 2)) @ np.ones((2, 2))
    """
    _blas.enter(n)
    try:
        yield
    finally:
        _blas.leave()


def calm_openblas() -> bool:
    """Let idle threads of OpenBLAS sleep almost at once; whether that was done.

    OpenBLAS reads ``OPENBLAS_THREAD_TIMEOUT`` when NumPy is imported, usually before us. Two functions of its own read
    the environment again and end its threads; the next product starts new ones. ``os.fork()`` does the same. It is
    unsafe while another thread is inside of BLAS. So nothing is done beside other threads, nor if the user has set the
    variable (26 is the library's default), nor in builds of BLAS without these functions.
    """
    name = "OPENBLAS_THREAD_TIMEOUT"
    alone = all(thread.daemon or thread is threading.main_thread() for thread in threading.enumerate())
    if name in os.environ or not alone:
        return False
    done = False
    for library in [library.dynlib for library in _blas.libraries]:
        if hasattr(library, "openblas_read_env") and hasattr(library, "blas_thread_shutdown_"):
            os.environ[name] = SPIN
            library.openblas_read_env()
            del os.environ[name]
            library.blas_thread_shutdown_()
            done = True
    return done


def _forked() -> None:
    """In a forked child: forget the parent's threads, and the regions that they were in."""
    global _pool
    _pool = _Pool()
    _blas.lock = threading.Lock()
    if _blas.regions:
        _blas.regions = 1
        _blas.leave()


_mine = _Mine()
_pool = _Pool()
_blas = _Blas()
_threads = _default_threads()
calm_openblas()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
