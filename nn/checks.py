"""What layers check before they start: sizes, probabilities, and ids of any form."""

from __future__ import annotations

import operator
import sys
import warnings
from typing import Any

import numpy as np

from minigrad import asarray
from minigrad.backend import NDArray, device_of, to_device
from minigrad.errors import ArgumentError
from minigrad.messages.explain import OURS
from minigrad.tensor import TensorLike


def is_whole(value: Any, least: int) -> bool:
    """Whether ``value`` is a whole number from ``least`` on; no boolean, and no array of several.

    >>> is_whole(np.int64(3), 1), is_whole(0, 1), is_whole(2.0, 1), is_whole(True, 1)
    (True, False, False, False)
    """
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False


def check_sizes(**sizes: Any) -> None:
    """Refuse sizes, given by name, that are not whole numbers from 1."""
    for name, value in sizes.items():
        if not is_whole(value, 1):
            raise ArgumentError(f"{name}, a whole number from 1", repr(value), "sizes count elements")


def check_probability(p: Any) -> float:
    """``p`` as a float, refused outside of [0, 1].

    >>> check_probability(0.1)
    0.1
    """
    if isinstance(p, bool) or not isinstance(p, int | float | np.number) or not 0 <= p <= 1:
        raise ArgumentError("a probability from 0 to 1", repr(p), "0 is off")
    return float(p)


def warn_of_width(module: Any, x: Any, output: Any) -> None:
    """Warn of float64 data that made the results of a float32 module float64, by NumPy's promotion, from there on.

    The call of a module says so, and for all modules in one of ours that one alone; Python shows it once for each line.
    What takes a gradient is left alone: who differentiates in float64 means it.
    """
    if getattr(x, "requires_grad", False) or getattr(output, "dtype", None) != np.float64:
        return
    call = frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
        if frame.f_code is call.f_code:
            return
    first = next(iter(module.parameters()), None)
    if first is not None and first.dtype == np.float32:
        hint = "x.astype('float32') keeps float32, model.to('float64') says that float64 is meant"
        warn(f"float64 data make a float32 model compute in float64, at half the speed: {hint}", UserWarning)


def warn(text: str, kind: type[Warning]) -> None:
    """Warn of the user's line that led here."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, kind, stacklevel=depth)


def as_operand(x: Any) -> Any:
    """Nested lists and numbers as an array; arrays and Tensors as they are.

    >>> as_operand([1.0, 2.0])
    array([1., 2.])
    """
    return x if hasattr(x, "dtype") else asarray(x).data


def as_ids(ids: TensorLike, device: str) -> NDArray:
    """Token ids (an array, a Tensor, nested lists) as an array on the host or on ``device``.

    Ids on the host stay there: an operation checks their range before it uploads them, without asking the GPU.

    >>> print(as_ids([[1, 2]], "cpu"))
    [[1 2]]
    """
    array = asarray(ids).data
    return array if device_of(array) == "cpu" else to_device(array, device)
