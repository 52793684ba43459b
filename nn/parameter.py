"""Parameter: a tensor that a module learns, and the random numbers that it starts from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from minigrad import Tensor, random
from minigrad.backend import DType, array_module, as_dtype, is_array, is_floating
from minigrad.errors import ArgumentError, DTypeError
from minigrad.messages.explain import explained


class Parameter(Tensor):
    """A leaf tensor that a :class:`~nn.Module` registers when it is assigned to an attribute.

    data            numbers; lists and Python numbers become float32, arrays and Tensors keep their dtype (both copied)
    requires_grad   False freezes it

    >>> Parameter([1.0, 2.0])
    Parameter([1., 2.], dtype=float32, requires_grad=True)
    """

    __slots__ = ()

    @explained
    def __init__(self, data: Any, requires_grad: bool = True, dtype: DType = None, device: str | None = None) -> None:
        typed = isinstance(data, Tensor) or is_array(data)
        super().__init__(data, requires_grad, dtype if typed or dtype is not None else np.float32, device)


def parameter_dtype(dtype: DType) -> Any:
    """The dtype of a layer's parameters: float32 for None, else ``dtype``, which must be a floating-point one."""
    if dtype is None:
        return np.dtype(np.float32)
    found = as_dtype(dtype)
    if not is_floating(found):
        raise DTypeError("a floating-point dtype for parameters", str(found), "such as 'float32'")
    return found


_hollow: ContextVar[bool] = ContextVar("hollow", default=False)


@contextmanager
def hollow() -> Iterator[None]:
    """Inside, a layer's parameters have their shapes but a single number in memory, and no time is spent on drawing it.

    For a model whose state is loaded right after: sizes that a file claims cost nothing until they are compared.

    >>> import nn
    >>> with hollow():
    ...     nn.Linear(10**6, 10**6).weight.shape
    (1000000, 1000000)
    """
    token = _hollow.set(True)
    try:
        yield
    finally:
        _hollow.reset(token)


def _hollow_parameter(shape: Any, dtype: DType, device: str | None) -> Parameter:
    made = Parameter(np.zeros((), parameter_dtype(dtype)), device=device)
    shape = shape if isinstance(shape, tuple) else (shape,)
    try:
        made._data = array_module(made.data).lib.stride_tricks.as_strided(made.data, shape, (0,) * len(shape))
    except (ValueError, OverflowError):
        raise ArgumentError("a shape that an array can have", str(shape), "a smaller size") from None
    return made


def truncated_normal(
    shape: tuple[int, ...],
    std: float = 1.0,
    bound: float = 3.0,
    dtype: DType = None,
    device: str | None = None,
    generator: Any = None,
) -> Parameter:
    """A parameter of normal numbers with mean 0. Numbers beyond ``bound · std`` are drawn again.

    ``std`` is that of the uncut normal; at three sigmas the cut takes 1.3 % off it. The generator is a
    ``numpy.random.Generator`` or a seed, by default that of ``minigrad.random``.

    >>> bool((abs(truncated_normal((100,), std=2.0).data) <= 6).all())
    True
    """
    if _hollow.get():
        return _hollow_parameter(shape, dtype, device)
    draw = random.generator(generator).standard_normal
    numbers = draw(shape, np.float32)
    while (beyond := np.abs(numbers) > bound).any():
        numbers[beyond] = draw(int(beyond.sum()), np.float32)
    return Parameter(numbers * np.float32(std), dtype=parameter_dtype(dtype), device=device)


def matrix(
    out_features: int, in_features: int, dtype: DType = None, device: str | None = None, generator: Any = None
) -> Parameter:
    """A weight (out, in) with σ² = 2/(in + out) cut at 3σ, which keeps the variance of what flows either way.

    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks" (2010), eq. 12.

    >>> matrix(2, 3).shape
    (2, 3)
    """
    std = math.sqrt(2 / (in_features + out_features))
    return truncated_normal((out_features, in_features), std, dtype=dtype, device=device, generator=generator)


def constant(shape: Any, value: float, dtype: DType = None, device: str | None = None) -> Parameter:
    """A parameter with ``value`` everywhere.

    >>> constant(2, 1.0)
    Parameter([1., 1.], dtype=float32, requires_grad=True)
    """
    if _hollow.get():
        return _hollow_parameter(shape, dtype, device)
    return Parameter(np.full(shape, value, parameter_dtype(dtype)), device=device)
