"""The mode of a computation: whether operations are recorded, and in which precision their products run.

It is one immutable object in a context variable, so each thread and each task of asyncio has a mode of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple, TypeVar

import numpy as np

from minigrad.errors import CallError
from minigrad.messages.explain import describe

F = TypeVar("F", bound=Callable[..., Any])


class Mode(NamedTuple):
    """What operations ask before they run."""

    recording: bool = True
    autocast: Any = None  # the half-precision dtype of products, where autocast is on
    transforming: bool = False  # whether a transform runs a function in order to differentiate it
    scaled: bool = False  # whether the gradients that are computed are those of a loss times a large number
    blocks: tuple[Setting, ...] = ()  # those that are open, the latest last
    warnings: Any = None  # in half precision: how NumPy warned outside of it, to be put back


mode_variable: ContextVar[Mode] = ContextVar("mode", default=Mode())  # noqa: B039
current_mode = mode_variable.get


class Setting:
    """Sets fields of the mode for a ``with`` block, a function, or the running parts of a generator or coroutine.

    The mode is what the open blocks say, the latest last. So blocks may close in any order, as those of generators do,
    and one object will do for any number of blocks.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __enter__(self) -> None:
        _open((*current_mode().blocks, self))

    def __exit__(self, *_: object) -> None:
        blocks = current_mode().blocks
        if self in blocks:  # else it was opened in another context
            latest = len(blocks) - blocks[::-1].index(self)
            _open(blocks[: latest - 1] + blocks[latest:])

    def __call__(self, function: F) -> F:
        if inspect.isasyncgenfunction(function):
            got = f"{function.__qualname__}, an asynchronous generator"
            raise CallError("a function, a generator or a coroutine function", got, "use a with block inside of it")

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        def generate(*args: Any, **kwargs: Any) -> Any:
            return (yield from _Steps(self, function(*args, **kwargs)))

        async def wait(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(self, function(*args, **kwargs))

        awaited, generated = inspect.iscoroutinefunction(function), inspect.isgeneratorfunction(function)
        return functools.wraps(function)(wait if awaited else generate if generated else run)  # type: ignore[return-value]


def _open(blocks: tuple[Setting, ...]) -> None:
    """Make the mode that these blocks say. NumPy is silent about overflow of half precision: GradScaler finds it."""
    mode, warnings = _said_by(blocks), current_mode().warnings
    if mode.autocast or mode.scaled:
        mode = mode._replace(warnings=warnings or np.seterr(over="ignore", invalid="ignore"))
    elif warnings:
        np.seterr(**warnings)
    mode_variable.set(mode)


@functools.lru_cache(64)  # the same few settings are opened for each pass
def _said_by(blocks: tuple[Setting, ...]) -> Mode:
    fields = {name: value for setting in blocks for name, value in setting.fields.items()}
    return Mode(**fields, blocks=blocks)


class _Steps(Generator[Any, Any, Any]):
    """A generator or a coroutine that runs step by step in a context of its own, in which ``setting`` holds."""

    def __init__(self, setting: Setting, body: Any) -> None:
        self.body, self.context = body, copy_context()
        self.context.run(setting.__enter__)

    def send(self, value: Any) -> Any:
        return self.context.run(self.body.send, value)

    def throw(self, *error: Any) -> Any:
        return self.context.run(self.body.throw, *error)

    __await__ = Generator.__iter__


class _Recording(Setting):
    """Whether operations are recorded."""

    wanted = True

    def __init__(self, *given: Any) -> None:
        if given:
            name, got = type(self).__name__, describe(given[0])
            raise CallError(f"{name}() without arguments", f"{name}({got})", f"@{name}() with its parentheses")
        super().__init__(recording=self.wanted)


class no_grad(_Recording):
    """Record nothing inside: ``with no_grad():`` or ``@no_grad()``."""

    wanted = False


class enable_grad(_Recording):
    """Record inside, also within ``no_grad``: ``with enable_grad():`` or ``@enable_grad()``."""


def is_grad_enabled() -> bool:
    """Whether operations are recorded now, in this thread or task."""
    return current_mode().recording
