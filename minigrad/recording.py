"""The mode of a thread: whether operations are recorded (``no_grad``, ``enable_grad``), and in which precision."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from minigrad.backend import is_array, is_floating, raw
from minigrad.errors import CallError
from minigrad.explain import describe

F = TypeVar("F", bound=Callable[..., Any])


class _Mode(threading.local):
    recording = True
    autocast: Any = None  # the half-precision dtype of products, where autocast is on


mode = _Mode()


class _Recording:
    """Sets the mode for a ``with`` block, a function, or the running parts of a generator; each thread has its own."""

    wanted = True

    def __init__(self, *given: Any) -> None:
        if given:
            name = type(self).__name__
            raise CallError(
                f"{name}() without arguments", f"{name}({describe(given[0])})", f"@{name}() with its parentheses"
            )
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(mode.recording)
        mode.recording = self.wanted

    def __exit__(self, *_: object) -> None:
        mode.recording = self._before.pop()

    def __call__(self, function: F) -> F:
        kind = type(self)
        if inspect.isasyncgenfunction(function):
            got = f"{function.__qualname__}, an asynchronous generator"
            raise CallError("a function, a generator or a coroutine function", got, "use a with block inside of it")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                return await _awaited(kind, function(*args, **kwargs))
        elif inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                return _generate(kind, function(*args, **kwargs))
        else:

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with kind():
                    return function(*args, **kwargs)

        return wrapped  # type: ignore[return-value]


def _generate(kind: type[_Recording], generator: Any) -> Any:
    """Run ``generator`` with the mode of ``kind`` inside its body, and the caller's mode between two items."""
    resume, message = generator.send, None
    try:
        while True:
            with kind():
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
        with kind():
            generator.close()


@types.coroutine
def _awaited(kind: type[_Recording], coroutine: Any) -> Any:
    """Run ``coroutine`` with the mode of ``kind``, and the caller's mode while it waits."""
    return (yield from _generate(kind, coroutine))


class no_grad(_Recording):
    """Record nothing inside: ``with no_grad():`` or ``@no_grad()``."""

    wanted = False


class enable_grad(_Recording):
    """Record inside, also within ``no_grad``: ``with enable_grad():`` or ``@enable_grad()``."""


@contextmanager
def in_precision(dtype: Any) -> Iterator[None]:
    """A ``with`` block of this thread in which autocast rounds to ``dtype``; None is off."""
    before, mode.autocast = mode.autocast, dtype
    try:
        yield
    finally:
        mode.autocast = before


def cast(values: Sequence[Any], precision: str) -> tuple[Any, ...]:
    """Arguments as autocast wants them: half precision for "low", else float32; float64 and integers stay."""
    dtype = mode.autocast if precision == "low" else np.dtype(np.float32)

    def one(value: Any) -> Any:
        if isinstance(value, list):
            return [one(part) for part in value]
        narrow = is_array(raw(value)) and is_floating(value.dtype) and value.dtype.itemsize <= 4
        return value.astype(dtype) if narrow and value.dtype != dtype else value

    return tuple(one(value) for value in values)


def is_grad_enabled() -> bool:
    """Whether operations of this thread are recorded now."""
    return mode.recording
