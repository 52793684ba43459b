"""A step as a CUDA graph: captured once, and replayed by one call of the driver.

The first call of a :class:`Graph` runs the step on a stream, in a memory pool and with a handle of cuBLAS of its own:
all kernels are loaded then, and the moments of an optimizer exist. The second captures it there. From then on a call
fills the places of the arguments, does the host's part of the step (``captures.py``), and launches the graph on the
current stream.
"""

from __future__ import annotations

import functools
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from minigrad import captures
from minigrad.backend import allocate, array_of, gpu_count, is_array, is_on_gpu, load_cupy
from minigrad.captures import Capture, Refusal, Rehearsal
from minigrad.errors import DeviceError, ShapeError
from minigrad.machine.cublas import Products
from minigrad.messages.explain import is_of_user

P = ParamSpec("P")
T = TypeVar("T")

ALONE = "a step that the GPU does without the host, in mg.cuda.graph"
WAITS = "return the Tensor, and look at it after the call; item(), float(), print, if and comparisons of it wait"


class Graph(Generic[P, T]):
    """A step as :func:`minigrad.cuda.graph` makes it. ``function`` is the step as it was given."""

    def __init__(self, function: Callable[P, T]) -> None:
        self.function: Callable[P, T] = function
        self._run: Callable[..., Any] = function
        self._form: Any = None  # of the arguments, as the first call had them
        self._place: _Place | None = None
        self._recording: _Recording | None = None

    @property
    def captured(self) -> bool:
        """Whether calls are replays."""
        return self._recording is not None

    def takes(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Whether a call with these arguments has the form of the first one."""
        return self._form is None or self._form == _form(_joined(args, kwargs))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        given: Any = _joined(args, kwargs)
        form = _form(given)
        if self._form is None:
            result: Any = self._first(given)
            self._form = form
            return result  # type: ignore[no-any-return]
        if form != self._form:
            hint = "step.takes(…) tells; step.function(…) runs the step as it is; or make a graph for each form"
            raise ShapeError(f"arguments as captured: {_shown(self._form)}", f"{_shown(form)}{_caller()}", hint)
        if self._place is None:
            return self._run(*given)  # type: ignore[no-any-return]
        if self._recording is None:
            self._recording = _Recording(self._place, self._run, given)
        else:
            self._recording.refill(given)
        return self._recording.run()  # type: ignore[no-any-return]

    def _first(self, args: tuple[Any, ...]) -> Any:
        """Rehearse the step, on the stream and in the memory of the capture; without a GPU it just runs."""
        if not gpu_count():
            return self._run(*args)
        place = _Place(load_cupy())
        with place.at_work():
            rehearsal = Rehearsal(place.cupy, place.products)
            with captures.at_work(rehearsal):
                result = self._run(*_mapped(lambda value: _Argument(value).given(rehearsal), args))
        self._place = place
        return result


# ---- arguments and results -------------------------------------------------------------------------------------------


def _joined(args: Any, kwargs: Any) -> tuple[Any, ...]:
    if kwargs:
        raise ShapeError("arguments by their places", f"{sorted(kwargs)} by name", "step(ids, targets)")
    return tuple(args)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``change`` applied to what lists, tuples and dicts in it hold."""
    if isinstance(value, dict):
        return {key: _mapped(change, part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(change, part) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, part) for part in value)
    return change(value)


def _parts(value: Any) -> list[Any]:
    """All that lists, tuples and dicts in ``value`` hold, in the order of ``_mapped``."""
    found: list[Any] = []
    _mapped(found.append, value)
    return found


def _form(value: Any) -> Any:
    """What of an argument a graph can't change: the shapes, dtypes and places of arrays, and all that is no number."""

    def of(part: Any) -> Any:
        array = array_of(part)
        if is_array(array):
            return (array.dtype.name, array.shape, "on the GPU" if is_on_gpu(array) else "on the host")
        return float if isinstance(part, float | np.floating) else part

    return _mapped(of, value)


def _shown(form: Any) -> str:
    """A form in words."""

    def one(part: Any) -> str:
        if isinstance(part, tuple) and len(part) == 3 and part[2] in ("on the GPU", "on the host"):
            return f"{part[0]} {part[1]} {part[2]}"
        if isinstance(part, list | tuple):
            return ", ".join(map(one, part))
        return "a float" if part is float else repr(part)[:60]

    return one(form) or "none"


class _Argument:
    """Where an argument lies for the graph: ``held`` is what a call writes, and the step reads."""

    def __init__(self, value: Any) -> None:
        array = array_of(value)
        self.value, self.held = value, None
        if is_array(array):
            if getattr(value, "requires_grad", False):
                hint = "weights are read where they are, and need not be arguments"
                raise DeviceError(ALONE, f"an argument with requires_grad=True{_caller()}", hint)
            self.held = array.copy()
        elif isinstance(value, float | np.floating):
            self.held = np.array(value, np.float32)

    def given(self, capture: Capture) -> Any:
        """What the step gets."""
        if self.held is None:
            return self.value
        if isinstance(self.value, float | np.floating):
            return capture.fed(lambda: self.held)
        if not is_on_gpu(self.held):
            capture.arguments.append(self.held)
        return type(self.value)._wrap(self.held) if hasattr(self.value, "_data") else self.held

    def fill(self, value: Any) -> None:
        if self.held is not None:
            self.held[...] = array_of(value)


def _copied(result: Any) -> Any:
    """A result of the step, which the next replay would write over."""
    array = array_of(result)
    if not is_on_gpu(array):
        return result
    return array.copy() if array is result else type(result)._wrap(array.copy())


# ---- capture and replay ----------------------------------------------------------------------------------------------


class _Place:
    """Where a step is captured: a stream, a pool, and cuBLAS on them."""

    def __init__(self, cupy: Any) -> None:
        self.cupy, self.pool, self.kept = cupy, cupy.cuda.MemoryPool(), cupy.cuda.MemoryPool()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.lasting():
            self.products = Products(cupy, self.stream)

    def lasting(self) -> AbstractContextManager[Any]:
        """Let allocations have memory that no part of the step gives back."""
        return self.cupy.cuda.using_allocator(functools.partial(allocate, self.cupy, self.kept))  # type: ignore[no-any-return]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let operations run on the stream, after what is queued on the current one, in the memory of the pool."""
        before = self.cupy.cuda.get_current_stream()
        self.stream.wait_event(before.record())
        malloc = functools.partial(allocate, self.cupy, self.pool)
        try:
            self.products.begin()
            with self.cupy.cuda.using_allocator(malloc), self.stream:
                yield
        finally:
            before.wait_event(self.stream.record())


class _Recording:
    """A captured step."""

    def __init__(self, place: _Place, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._arguments = _mapped(_Argument, args)
        self._capture = Capture(place.cupy, place.products, place.lasting)
        with place.at_work():
            with _capturing(place, self._capture) as ended:
                result = function(*_mapped(lambda argument: argument.given(self._capture), self._arguments))
                self._result = _mapped(_detached, result)
            self._graph = ended[0]
        self._capture.fixed.upload()
        self._capture.fresh.upload()

    def refill(self, args: tuple[Any, ...]) -> None:
        """Make ready for a replay on other arguments."""
        for argument, value in zip(_parts(self._arguments), _parts(args), strict=True):
            argument.fill(value)
        self._capture.refresh()

    def run(self) -> Any:
        """Launch the graph on the current stream; results are copies."""
        self._graph.launch()
        return _mapped(_copied, self._result)


def _detached(result: Any) -> Any:
    """A result without its graph of operations."""
    return result if array_of(result) is result else type(result)._wrap(array_of(result))


@contextmanager
def _capturing(place: _Place, capture: Capture) -> Iterator[list[Any]]:
    """Capture the block; the list then holds the graph. After an error the stream can be used again."""
    ended: list[Any] = []
    place.stream.begin_capture()
    try:
        with captures.at_work(capture), _without_uploads(place.cupy):
            yield ended
    except BaseException as error:
        with suppress(Exception):  # of a capture that was broken off
            place.stream.end_capture()
        capture.undo()
        refused = _refused(error)
        if refused is None:
            raise
        raise refused from error
    try:
        ended.append(place.stream.end_capture())
    except Exception as error:
        capture.undo()
        raise DeviceError(ALONE, f"{error}, after an error that the step has caught", WAITS) from error


@contextmanager
def _without_uploads(cupy: Any) -> Iterator[None]:
    """Refuse uploads by CuPy's own functions, which go through pinned memory: a replay would read what is there then.

    Only where CuPy's own pool gives that memory, since CuPy doesn't tell which function does.
    """

    def refuse(size: int) -> Any:
        raise Refusal(f"an upload of {size:,} bytes", "make constants before, and give the step its NumPy arrays")

    pooled = type(cupy.cuda.alloc_pinned_memory(1).mem).__name__ == "PooledPinnedMemory"
    if pooled:
        cupy.cuda.set_pinned_memory_allocator(refuse)
    try:
        yield
    finally:
        if pooled:
            cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)


def _refused(error: BaseException) -> DeviceError | None:
    """What an error inside of a capture means; None for one that the step would have had without."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, Refusal):
            return DeviceError(ALONE, f"{cause.got}{_line(cause)}", cause.hint)
        if "StreamCapture" in text or "CapturedEvent" in text:
            return DeviceError(ALONE, f"a wait for the device{_line(cause)}", WAITS)
        if isinstance(cause, NotImplementedError) and "captur" in text:
            hint = "minigrad's own products can be captured, mg.linalg and CuPy's can't"
            return DeviceError(ALONE, f"{text}{_line(cause)}", hint)
        cause = cause.__cause__ or cause.__context__ or getattr(cause, "origin", None)
    return None


def _line(error: BaseException) -> str:
    """The innermost line of the user's code that led to an error: `` at file:line: text``."""
    places = [place for place in traceback.walk_tb(error.__traceback__) if is_of_user(place[0])]
    if not places:
        return ""
    file, number = places[-1][0].f_code.co_filename, places[-1][1]
    return f" at {file}:{number}: {linecache.getline(file, number).strip()}"


def _caller() -> str:
    """The line that called the graph."""
    frame = sys._getframe(1)
    while frame.f_back and not is_of_user(frame):
        frame = frame.f_back
    return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
