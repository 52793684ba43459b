"""Streams, graphs and memory pools of the simulated GPU.

While the current stream is captured nothing is computed: work is noted, and done at each launch of the graph, on the
numbers that are there then. Until then results are NaN. What CUDA and CuPy refuse inside of a capture is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Effect = Callable[[], Any]
_pointers = itertools.count(1 << 20, 16)


class CUDARuntimeError(RuntimeError):
    """Raised where a call of the driver fails."""


class Recording:
    """What was launched on a stream since its capture began.

    log  for each launch its name and operands: arrays by place (that of memory which was allocated since is a number
         and an offset), shape and strides; numbers as they are
    """

    def __init__(self, stream: Stream) -> None:
        self.stream, self.broken = stream, False
        self.effects: list[Effect] = []
        self.log: list[tuple[Any, ...]] = []
        self.made: list[Any] = []  # arrays that were allocated since, which stay
        self.reused: list[Any] = []  # those for which a pool had memory that was freed

    def allocated(self, array: Any, pool: MemoryPool) -> None:
        root = root_of(array)
        self.made.append(root)
        if pool._freed:  # then this may be memory that an earlier part of the step writes to
            self.reused.append(root)

    def place(self, pointer: int) -> tuple[Any, ...]:
        """An address, of memory allocated since the beginning as the number of its allocation and an offset."""
        for k, root in enumerate(self.made):
            if root.ctypes.data <= pointer < root.ctypes.data + max(1, root.nbytes):
                return "made", k, pointer - root.ctypes.data
        return "before", pointer

    def shown(self, value: Any) -> Any:
        """An operand as the log has it."""
        value = getattr(value, "_host", value)
        if isinstance(value, np.ndarray):
            return *self.place(value.ctypes.data), value.shape, value.strides, value.dtype.name
        if isinstance(value, list | tuple):
            return tuple(map(self.shown, value))
        return repr(value)

    def check(self) -> None:
        if self.broken:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated: operation failed due to a previous error")

    def refuse(self) -> None:
        """A wait: the driver refuses it, and the capture is lost."""
        self.broken = True
        raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing")


def root_of(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


current: list[Stream] = []  # streams made current, the innermost last
recordings: list[Recording] = []  # of captures that have begun and not ended


def recording() -> Recording | None:
    """That of the current stream, if it is captured."""
    return next((r for r in recordings if current and r.stream is current[-1]), None)


def perform(effect: Effect) -> None:
    """Do something to arrays, or note it."""
    at_work = recording()
    if at_work is None:
        effect()
    else:
        at_work.check()
        at_work.effects.append(effect)


def computed(run: Callable[[], Any], *sources: Any) -> Any:
    """The result of ``run``. In a capture its views of ``sources`` stay, and new arrays are filled at each launch."""
    with np.errstate(all="ignore"):  # a GPU doesn't warn
        result = run()
    at_work = recording()
    if at_work is None or result is NotImplemented:
        return result
    at_work.check()
    if isinstance(result, list | tuple):
        return type(result)(_filled(at_work, part, sources, lambda k=k: run()[k]) for k, part in enumerate(result))
    return _filled(at_work, result, sources, run)


def _filled(at_work: Recording, result: Any, sources: Any, run: Callable[[], Any]) -> Any:
    if not isinstance(result, np.ndarray | np.generic):
        return result
    if any(np.may_share_memory(result, source) for source in sources if isinstance(source, np.ndarray)):
        return result
    made = np.array(result, copy=True, order="K")

    def fill() -> None:
        made[...] = run()

    at_work.effects.append(fill)
    if made.dtype.kind == "f":
        made.fill(np.nan)
    return made


class Event:
    """A moment on a stream, which here is that of its recording."""

    done = True  # what was launched is over

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        waited()


class Graph:
    """A captured graph: ``launch`` does the work once more."""

    def __init__(self, at_work: Recording) -> None:
        self.recording = at_work

    def launch(self, stream: Any = None) -> None:
        launched("graph")
        for root in self.recording.reused:
            root.reshape(-1).view(np.uint8).fill(255)
        with np.errstate(all="ignore"):
            for effect in self.recording.effects:
                effect()

    def upload(self, stream: Any = None) -> None:
        pass


launched: Any = lambda *what: None  # which ``device`` sets, to count it
waited: Any = lambda: None


class Stream:
    """A stream, and a ``with`` block in which it is the current one."""

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None
    ) -> None:
        self.ptr, self.is_non_blocking = 0 if null else next(_pointers), non_blocking

    def __enter__(self) -> Stream:
        current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        current.pop()

    def begin_capture(self, mode: Any = None) -> None:
        if not self.ptr or self.is_capturing():
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: operation not permitted")
        recordings.append(Recording(self))

    def end_capture(self) -> Graph:
        found = next((r for r in recordings if r.stream is self), None)
        if found is None:
            raise CUDARuntimeError("cudaErrorIllegalState: the operation cannot be performed in the present state")
        recordings.remove(found)
        found.check()
        return Graph(found)

    def is_capturing(self) -> bool:
        return any(r.stream is self for r in recordings)

    def record(self, event: Any = None) -> Any:
        return Event() if event is None else event

    def wait_event(self, event: Any) -> None:
        assert isinstance(event, Event)

    def synchronize(self) -> None:
        if self.is_capturing():
            next(r for r in recordings if r.stream is self).refuse()
        waited()


null_stream = Stream(null=True)


def get_current_stream(device_id: Any = None) -> Stream:
    return current[-1] if current else null_stream


class OutOfMemoryError(MemoryError):
    """Raised by a pool where a device is full."""


class MemoryPool:
    """A pool of memory. The default one is no place for what a graph needs: others would get that memory too."""

    def __init__(self, allocator: Any = None) -> None:
        self._freed: list[int] = []  # the sizes of what came back

    def malloc(self, size: int) -> Any:
        if limit() is not None and size > limit():
            raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes")
        if self is pool and recording():
            raise RuntimeError("memory of a captured step outside of a pool of its own")
        return self

    def free_all_blocks(self, stream: Any = None) -> None:
        if recording():
            recording().refuse()
        freed()

    def used_bytes(self) -> int:
        return 0

    def total_bytes(self) -> int:
        return 0


limit: Any = lambda: None  # which ``device`` sets
freed: Any = lambda: None


@contextlib.contextmanager
def using_allocator(function: Any = None) -> Iterator[None]:
    """What allocates inside of the block."""
    before = allocators[0]
    allocators[0] = function
    try:
        yield
    finally:
        allocators[0] = before


class PooledPinnedMemory:
    """Page-locked memory of the pool."""


class PinnedMemoryPointer:
    def __init__(self, mem: Any, ptr: int = 0) -> None:
        self.mem, self.ptr = mem, ptr


class PinnedMemoryPool:
    def malloc(self, size: int) -> PinnedMemoryPointer:
        return PinnedMemoryPointer(PooledPinnedMemory())


pool, pinned_pool = MemoryPool(), PinnedMemoryPool()
allocators: list[Any] = [pool.malloc]
pinned_allocators: list[Any] = [pinned_pool.malloc]


def set_pinned_memory_allocator(function: Any = None) -> None:
    pinned_allocators[0] = function


def alloc_pinned_memory(size: int) -> Any:
    return pinned_allocators[0](size)
