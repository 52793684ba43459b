"""Random tensors from an explicit generator, or from the default one that ``seed`` starts afresh.

Numbers are drawn on the host and moved, so that a seed means the same numbers on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from minigrad.backend import DType, as_dtype, check_device, to_device
from minigrad.errors import ArgumentError, CallError
from minigrad.messages.arguments import as_int, as_operand, as_shape
from minigrad.messages.explain import describe, explained
from minigrad.tensor import Tensor

_default = np.random.default_rng()


@explained
def seed(number: int) -> None:
    """Start the default generator afresh: the same seed gives the same numbers.

    >>> seed(1); a = normal(size=3); seed(1); b = normal(size=3); print(bool((a == b).all()))
    True
    """
    if not isinstance(number, int | np.integer) or number < 0:
        raise ArgumentError("a seed, a whole number from 0", repr(number), "seed(0)")
    _default.bit_generator.state = np.random.default_rng(int(number)).bit_generator.state


def generator(given: Any = None) -> np.random.Generator:
    """``given`` as a generator: a ``numpy.random.Generator``, a seed, or None for the default one."""
    if given is None:
        return _default
    if isinstance(given, np.random.Generator):
        for found in _watched.get():
            if id(given) not in found:
                found[id(given)] = (given, given.bit_generator.state)
        return given
    if isinstance(given, int | np.integer) and given >= 0:
        return np.random.default_rng(int(given))
    hint = "np.random.default_rng(0) makes one"
    raise CallError("a numpy.random.Generator, a seed from 0, or None", describe(given), hint)


States = dict[int, tuple[np.random.Generator, Any]]
_watched: ContextVar[tuple[States, ...]] = ContextVar("watched", default=())


@contextmanager
def _noted() -> Iterator[States]:
    """Inside, the generators that draws are given are noted by their ids, with the states in which they come."""
    found: States = {}
    token = _watched.set((*_watched.get(), found))
    try:
        yield found
    finally:
        _watched.reset(token)


@contextmanager
def _put_back(states: States) -> Iterator[None]:
    """Inside, generators go on from ``states``; afterwards from where they are now."""
    now = [(given, given.bit_generator.state) for given, _ in states.values()]
    try:
        for given, state in states.values():
            given.bit_generator.state = state
        yield
    finally:
        for given, state in now:
            given.bit_generator.state = state


def get_state() -> dict[str, Any]:
    """The state of the default generator, ready for JSON."""
    return dict(_default.bit_generator.state)


def set_state(state: dict[str, Any]) -> None:
    """Continue the default generator from a state that ``get_state`` gave."""
    try:
        _default.bit_generator.state = state
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError("a state from get_state()", str(error), "save it right after get_state()") from None


def _finish(array: Any, dtype: DType, device: str | None) -> Tensor:
    return Tensor._wrap(to_device(np.asarray(array, dtype=as_dtype(dtype)), check_device(device)))


@explained
def normal(
    loc: float = 0.0,
    scale: float = 1.0,
    size: Any = None,
    dtype: DType = "float32",
    device: str | None = None,
    generator: Any = None,
) -> Tensor:
    """Normal numbers with mean ``loc`` and standard deviation ``scale``, in the shape ``size``.

    >>> normal(size=(2, 3)).shape
    (2, 3)
    """
    _check_numbers(loc=loc, scale=scale)
    if not scale >= 0:
        raise ArgumentError("a scale of at least 0, the standard deviation", repr(scale), SIZE_HINT)
    return _finish(_pick(generator).normal(loc, scale, _size(size)), dtype, device)


@explained
def uniform(
    low: float = 0.0,
    high: float = 1.0,
    size: Any = None,
    dtype: DType = "float32",
    device: str | None = None,
    generator: Any = None,
) -> Tensor:
    """Uniform numbers from [low, high), in the shape ``size``.

    >>> uniform(size=(2, 3)).shape
    (2, 3)
    """
    _check_numbers(low=low, high=high)
    if not low <= high:
        raise ArgumentError("low up to high", f"low={low!r}, high={high!r}", SIZE_HINT)
    return _finish(_pick(generator).uniform(low, high, _size(size)), dtype, device)


@explained
def randint(
    low: int,
    high: int | None = None,
    size: Any = None,
    dtype: DType = "int64",
    device: str | None = None,
    generator: Any = None,
) -> Tensor:
    """Whole numbers from [low, high), or from [0, low) where only one is given, in the shape ``size``.

    >>> randint(5, size=(2, 3)).shape
    (2, 3)
    """
    first, last = (0, low) if high is None else (low, high)
    if not as_int(first, "low") < as_int(last, "high"):
        raise ArgumentError("low below high", f"low={first!r}, high={last!r}", SIZE_HINT)
    return _finish(_pick(generator).integers(first, last, _size(size)), dtype, device)


@explained
def permutation(x: Any, device: str | None = None, generator: Any = None) -> Tensor:
    """The numbers 0 … x-1, or the rows of ``x``, in random order.

    >>> sorted(permutation(3).tolist())
    [0, 1, 2]
    """
    rows = x.numpy() if isinstance(x, Tensor) else as_operand(x, "the rows")
    if np.ndim(rows) == 0 and as_int(rows, "the count of permutation") < 0:
        raise ArgumentError("a count from 0, or rows", repr(x), "permutation(3) orders 0, 1 and 2")
    shuffled = _pick(generator).permutation(rows)
    return _finish(shuffled, shuffled.dtype, device)


_pick = generator  # the draws have a parameter of this name


SIZE_HINT = "the shape goes in size=, as in NumPy"


def _check_numbers(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int | float | np.number):
            raise CallError(f"a number for {name}", repr(value), SIZE_HINT)


def _size(size: Any) -> Any:
    return None if size is None else as_shape(size, "size")
