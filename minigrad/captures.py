"""What a CUDA graph must get from the host: arrays that are made anew before each replay, and what the host counts.

While a step is captured nothing is computed, so nothing can be uploaded, and a number in a launch stays what it is.
Code that would upload hands over a function that makes the array: it gets a place on the device, which every replay
fills again. Outside of a capture it is an upload as ever. ``cuda_graphs.py`` captures and replays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

ROOM, ALIGNED = 1 << 20, 256  # bytes of a block of places, and where a place may begin
Action = Callable[[], Any]


class Refusal(RuntimeError):
    """Something that a capture can't hold; ``cuda_graphs.py`` adds the line that asked for it."""

    def __init__(self, got: str, hint: str) -> None:
        self.got, self.hint = got, hint
        super().__init__(got)


class Places:
    """Places for arrays on the device, each with a twin on the host; a copy for each block fills them all.

    They are filled before a replay, so that no other part of the step may have their memory: ``lasting`` is a block in
    which allocations get memory of their own.
    """

    def __init__(self, xp: Any, lasting: Callable[[], AbstractContextManager[Any]]) -> None:
        self.xp, self.lasting = xp, lasting
        self.blocks: list[list[Any]] = []  # bytes of the host, of the device, and how many are in use

    def add(self, array: Any) -> tuple[Any, Any]:
        """A place on the host that holds ``array``, and its twin."""
        size = -(-array.nbytes // ALIGNED) * ALIGNED
        if not self.blocks or self.blocks[-1][2] + size > self.blocks[-1][0].size:
            room = max(ROOM, size)
            with self.lasting():
                self.blocks.append([np.zeros(room, np.uint8), self.xp.empty(room, np.uint8), 0])
        *twins, used = self.blocks[-1]
        self.blocks[-1][2] += size
        here, there = (b[used : used + array.nbytes].view(array.dtype).reshape(array.shape) for b in twins)
        here[...] = array
        return here, there

    def upload(self) -> None:
        """Bring the device what the host holds."""
        for here, there, used in self.blocks:
            there[:used] = self.xp.asarray(here[:used])


class Capture:
    """A step that is being captured, and what comes before a replay of it.

    arguments  the host's arrays that the step is given: every replay has other numbers in them
    products   cuBLAS on the stream of the capture
    """

    def __init__(
        self, xp: Any, products: Any, lasting: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.xp, self.products = xp, products
        self.arguments: list[Any] = []
        self.fixed, self.fresh = Places(xp, lasting), Places(xp, lasting)  # uploaded once, and before every replay
        self.actions: list[Action] = []  # of the host before a replay, in the order of the step
        self.undoing: list[Action] = []  # what takes back the counts of a capture that failed
        self.kept: list[Any] = []  # arrays whose addresses the graph has

    def fed(self, make: Callable[[], Any]) -> Any:
        """An array on the device that holds ``make()`` of each replay."""
        here, there = self.fresh.add(make())

        def again() -> None:
            here[...] = make()

        self.actions.append(again)
        return there

    def settled(self, array: Any) -> Any:
        """An array on the device that holds ``array`` for good."""
        return self.fixed.add(array)[1]

    def takes(self, array: Any) -> bool:
        """Whether an array of the host is an argument, or a part of one."""
        return any(np.may_share_memory(array, argument) for argument in self.arguments)

    def refresh(self) -> None:
        """Do the host's part of a step: an error leaves the device as it was."""
        for action in self.actions:
            action()
        self.fresh.upload()

    def undo(self) -> None:
        """Take back what the host counted."""
        for action in reversed(self.undoing):
            action()


class Rehearsal(Capture):
    """A step that runs once as it will be captured, so that all kernels are loaded and memory is there."""

    def fed(self, make: Callable[[], Any]) -> Any:
        return self.xp.asarray(make())

    def settled(self, array: Any) -> Any:
        return self.xp.asarray(array)

    def takes(self, array: Any) -> bool:
        return True


class _Thread(threading.local):
    capture: Capture | None = None


now = _Thread()  # ``now.capture`` is that of this thread, or its rehearsal


def capturing() -> bool:
    """Whether this thread captures a step, and doesn't rehearse it."""
    return now.capture is not None and not isinstance(now.capture, Rehearsal)


@contextmanager
def at_work(capture: Capture) -> Iterator[None]:
    """Let ``capture`` be that of this thread."""
    now.capture = capture
    try:
        yield
    finally:
        now.capture = None


def uploaded(xp: Any, make: Callable[[], Any], source: Any = None) -> Any:
    """``make()`` on the device; in a capture what it makes anew at each replay.

    source: the array of the host that it reads, which in a capture must be an argument of the step, or a part of one
    """
    capture = now.capture
    if capture is None:
        return xp.asarray(make())
    if source is not None and not capture.takes(source):
        hint = "give the step its NumPy arrays as arguments, and take parts of them alone; make others before"
        raise Refusal(f"an upload of {source.dtype} {source.shape}, which every replay would repeat", hint)
    return capture.fed(make)


def uploaded_once(xp: Any, array: Any) -> Any:
    """``array`` on the device; in a capture it stays what it is."""
    capture = now.capture
    return xp.asarray(array) if capture is None else capture.settled(array)


def number(make: Callable[[], Any], dtype: Any) -> Any:
    """``make()``, a number; in a capture an array of shape () on the device, made anew at each replay."""
    return make() if now.capture is None else now.capture.fed(lambda: np.asarray(make(), dtype))


def again(action: Action) -> None:
    """Let the host do ``action``, which it has just done, before each replay too."""
    if now.capture is not None:
        now.capture.actions.append(action)


def undone(action: Action) -> None:
    """Let ``action`` take back what the host does, if the capture fails."""
    if now.capture is not None:
        now.capture.undoing.append(action)


def keep(array: Any) -> Any:
    """``array``, which lives as long as a graph that is being captured."""
    if now.capture is not None:
        now.capture.kept.append(array)
    return array
