"""The mode of a thread: whether operations are recorded (``no_grad``, ``enable_grad``), and in which precision."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from minigrad.backend import array_of, is_array, is_floating
from minigrad.errors import CallError
from minigrad.messages.explain import describe

F = TypeVar("F", bound=Callable[..., Any])


class _Mode(threading.local):
    recording = True
    autocast: Any = None  # the half-precision dtype of products, where autocast is on
    scaled = False  # whether the gradients that are computed are those of a loss times a large number

    def __init__(self) -> None:
        self.blocks: list[tuple[Setting, Any]] = []  # that this thread is in, each with what it will put back


mode = _Mode()
QUIET: Any = {"over": "ignore", "invalid": "ignore"}


class Setting:
    """Sets the mode for a ``with`` block, a function, or the running parts of a generator; each thread has its own.

    One object will do for any number of blocks, within each other and in several threads: the thread knows of them.
    """

    def put(self) -> Any:
        """Set the mode, and return what it was before."""
        raise NotImplementedError

    def put_back(self, before: Any) -> None:
        """Set the mode to what it was."""
        raise NotImplementedError

    def __enter__(self) -> None:
        mode.blocks.append((self, self.put()))

    def __exit__(self, *_: object) -> None:
        place = max(k for k, (block, _) in enumerate(mode.blocks) if block is self)
        before = mode.blocks.pop(place)[1]
        for k, (later, _) in enumerate(mode.blocks[place:], place):  # blocks of coroutines may overlap
            if type(later).put_back is type(self).put_back:  # then the next one puts back what this one would
                mode.blocks[k] = later, before
                return
        self.put_back(before)

    def __call__(self, function: F) -> F:
        if inspect.isasyncgenfunction(function):
            got = f"{function.__qualname__}, an asynchronous generator"
            raise CallError("a function, a generator or a coroutine function", got, "use a with block inside of it")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                return await _awaited(self, function(*args, **kwargs))
        elif inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                return _generate(self, function(*args, **kwargs))
        else:

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

        return wrapped  # type: ignore[return-value]


def _generate(setting: Setting, generator: Any) -> Any:
    """Run ``generator`` with ``setting`` inside its body, and the caller's mode between two items."""
    resume, message = generator.send, None
    try:
        while True:
            with setting:
                item = resume(message)
            try:
                resume, message = generator.send, (yield item)
            except GeneratorExit:
                raise
            except BaseException as error:
                resume, message = generator.throw, error
    except StopIteration as stop:
        return stop.value
    finally:
        with setting:
            generator.close()


@types.coroutine
def _awaited(setting: Setting, coroutine: Any) -> Any:
    """Run ``coroutine`` with ``setting``, and the caller's mode while it waits."""
    return (yield from _generate(setting, coroutine))


class _Recording(Setting):
    """Whether operations are recorded."""

    wanted = True

    def __init__(self, *given: Any) -> None:
        if given:
            name = type(self).__name__
            raise CallError(
                f"{name}() without arguments", f"{name}({describe(given[0])})", f"@{name}() with its parentheses"
            )

    def put(self) -> bool:
        before, mode.recording = mode.recording, self.wanted
        return before

    def put_back(self, before: bool) -> None:
        mode.recording = before


class no_grad(_Recording):
    """Record nothing inside: ``with no_grad():`` or ``@no_grad()``."""

    wanted = False


class enable_grad(_Recording):
    """Record inside, also within ``no_grad``: ``with enable_grad():`` or ``@enable_grad()``."""


class in_precision(Setting):
    """Inside, autocast rounds to ``dtype``, half precision; None is off.

    NumPy's warnings of overflow and invalid values are silent where it is on: half precision overflows early, which is
    for :class:`optim.GradScaler` to find.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def put(self) -> Any:
        before, mode.autocast = mode.autocast, self.dtype
        return before, np.seterr(**QUIET) if self.dtype else None

    def put_back(self, before: Any) -> None:
        mode.autocast, warnings = before
        if warnings:
            np.seterr(**warnings)


class scaled_gradients(Setting):
    """Inside, gradients may overflow half precision: NumPy's warnings of that are silent, GradScaler looks for it."""

    def put(self) -> Any:
        before, mode.scaled = mode.scaled, True
        return before, np.seterr(**QUIET)

    def put_back(self, before: Any) -> None:
        mode.scaled, warnings = before
        np.seterr(**warnings)


def cast(values: Sequence[Any], precision: str) -> tuple[Any, ...]:
    """Arguments as autocast wants them: half precision for "low", else float32; float64 and integers stay."""
    dtype = mode.autocast if precision == "low" else np.dtype(np.float32)

    def one(value: Any) -> Any:
        if isinstance(value, list):
            return [one(part) for part in value]
        narrow = is_array(array_of(value)) and is_floating(value.dtype) and value.dtype.itemsize <= 4
        return value.astype(dtype) if narrow and value.dtype != dtype else value

    return tuple(one(value) for value in values)


def is_grad_enabled() -> bool:
    """Whether operations of this thread are recorded now."""
    return mode.recording
