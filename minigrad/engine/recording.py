"""The mode of a computation: whether operations are recorded, and in which precision their products run.

It is one immutable object in a context variable, so each thread and each task of asyncio has a mode of its own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple, TypeVar

import numpy as np

from minigrad.backend import array_of, is_array, is_floating
from minigrad.errors import CallError
from minigrad.messages.explain import describe

F = TypeVar("F", bound=Callable[..., Any])


class Mode(NamedTuple):
    """What operations ask before they run."""

    recording: bool = True
    autocast: Any = None  # the half-precision dtype of products, where autocast is on
    scaled: bool = False  # whether the gradients that are computed are those of a loss times a large number
    blocks: tuple[tuple[Setting, Any], ...] = ()  # the blocks it was made by, each with the warnings to put back


current: ContextVar[Mode] = ContextVar("mode", default=Mode())  # noqa: B039
mode = current.get


class Setting:
    """Sets facts of the mode for a ``with`` block, a function, or the running parts of a generator or coroutine.

    The mode is what the open blocks say, the latest last. So blocks may close in any order, as those of generators do,
    and one object will do for any number of blocks. A ``quiet`` one silences NumPy's warnings of overflow.
    """

    quiet = False

    def __init__(self, **facts: Any) -> None:
        self.facts = facts

    def __enter__(self) -> None:
        warnings = np.seterr(over="ignore", invalid="ignore") if self.quiet else None
        _open([*mode().blocks, (self, warnings)])

    def __exit__(self, *_: object) -> None:
        blocks = list(mode().blocks)
        place = max((k for k, (setting, _) in enumerate(blocks) if setting is self), default=None)
        if place is None:
            return  # entered in another context, which holds that mode
        warnings = blocks.pop(place)[1]
        quiet = [k for k in range(place, len(blocks)) if blocks[k][1]]
        if warnings and quiet:  # the next one puts back what this one would
            blocks[quiet[0]] = blocks[quiet[0]][0], warnings
        elif warnings:
            np.seterr(**warnings)
        _open(blocks)

    def __call__(self, function: F) -> F:
        if inspect.isasyncgenfunction(function):
            got = f"{function.__qualname__}, an asynchronous generator"
            raise CallError("a function, a generator or a coroutine function", got, "use a with block inside of it")

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        def generate(*args: Any, **kwargs: Any) -> Any:
            return _steps(self, function(*args, **kwargs))

        async def wait(*args: Any, **kwargs: Any) -> Any:
            return await _steps(self, function(*args, **kwargs))

        awaited, generated = inspect.iscoroutinefunction(function), inspect.isgeneratorfunction(function)
        return functools.wraps(function)(wait if awaited else generate if generated else run)  # type: ignore[return-value]


def _open(blocks: Sequence[tuple[Setting, Any]]) -> None:
    """Make the mode that these blocks say."""
    facts: dict[str, Any] = {}
    for setting, _ in blocks:
        facts |= setting.facts
    current.set(Mode(**facts, blocks=tuple(blocks)))


@types.coroutine
def _steps(setting: Setting, body: Any) -> Any:
    """Run a generator or a coroutine step by step in a context of its own, in which ``setting`` holds."""
    context = copy_context()
    context.run(setting.__enter__)
    resume, message = body.send, None
    while True:
        try:
            item = context.run(resume, message)
        except StopIteration as stop:
            return stop.value
        try:
            resume, message = body.send, (yield item)
        except GeneratorExit:
            context.run(body.close)
            raise
        except BaseException as error:
            resume, message = body.throw, error


class _Recording(Setting):
    """Whether operations are recorded."""

    wanted = True

    def __init__(self, *given: Any) -> None:
        if given:
            name = type(self).__name__
            got = f"{name}({describe(given[0])})"
            raise CallError(f"{name}() without arguments", got, f"@{name}() with its parentheses")
        super().__init__(recording=self.wanted)


class no_grad(_Recording):
    """Record nothing inside: ``with no_grad():`` or ``@no_grad()``."""

    wanted = False


class enable_grad(_Recording):
    """Record inside, also within ``no_grad``: ``with enable_grad():`` or ``@enable_grad()``."""


class in_precision(Setting):
    """Inside, autocast rounds to ``dtype``, half precision; None is off.

    It is quiet where it is on: half precision overflows early, which is for :class:`optim.GradScaler` to find.
    """

    def __init__(self, dtype: Any) -> None:
        super().__init__(autocast=dtype)
        self.quiet = dtype is not None


class scaled_gradients(Setting):
    """Inside, gradients may overflow half precision: NumPy doesn't warn of it, GradScaler looks for it."""

    quiet = True

    def __init__(self) -> None:
        super().__init__(scaled=True)


def cast(values: Sequence[Any], precision: str) -> tuple[Any, ...]:
    """Arguments as autocast wants them: half precision for "low", else float32; float64 and integers stay."""
    dtype = mode().autocast if precision == "low" else np.dtype(np.float32)

    def one(value: Any) -> Any:
        if isinstance(value, list):
            return [one(part) for part in value]
        narrow = is_array(array_of(value)) and is_floating(value.dtype) and value.dtype.itemsize <= 4
        return value.astype(dtype) if narrow and value.dtype != dtype else value

    return tuple(one(value) for value in values)


def is_grad_enabled() -> bool:
    """Whether operations are recorded now, in this thread or task."""
    return mode().recording
