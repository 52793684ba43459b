"""Errors from inside, of Python and NumPy, in terms of the call that caused them.

Nothing here runs before something failed: a call costs what it costs in plain Python.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from minigrad.backend import array_of, device_of, is_array
from minigrad.errors import (
    ArgumentError,
    AxisError,
    CallError,
    DeviceError,
    DTypeError,
    IndexRangeError,
    MiniGradError,
    OutOfMemoryError,
    ShapeError,
)
from minigrad.messages.habits import keyword_hint

F = TypeVar("F", bound=Callable[..., Any])

FOREIGN = (TypeError, ValueError, IndexError, AttributeError, ArithmeticError, MemoryError)  # what NumPy raises

# ---- what was called ------------------------------------------------------------------------------------------------


def describe(value: Any, limit: int = 40) -> str:
    """A value in the text of an error: dtype and shape of an array, else its repr, cut off.

    >>> describe(np.ones((2, 3))), describe("a"), describe(object)
    ('float64 (2, 3)', "'a'", "<class 'object'>")
    """
    array = array_of(value)
    if is_array(array):
        return f"{array.dtype} {array.shape}"
    kind = type(value)
    if inspect.isroutine(value):
        return f"{value.__name__}()"
    if isinstance(value, list | tuple) and any(is_array(array_of(part)) for part in value):
        ends = "[]" if isinstance(value, list) else "()"
        return ends[0] + ", ".join(describe(part) for part in value[:4]) + (", …" * (len(value) > 4)) + ends[1]
    if kind.__module__ != "builtins" and not isinstance(value, np.generic | np.dtype | slice | os.PathLike):
        return f"a {kind.__module__}.{kind.__qualname__}"
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def called(name: str, signature: inspect.Signature, arguments: Mapping[str, Any]) -> str:
    """A call as it might be written: required arguments in their places, others by name if they aren't the default."""
    if name == "getitem":
        return "{}[{}]".format(*map(describe, arguments.values()))
    parts = []
    for key, value in arguments.items():
        parameter = signature.parameters.get(key)
        if parameter is None or (parameter.default is not parameter.empty and parameter.default is not value):
            parts.append(f"{key}={describe(value)}")
        elif parameter.kind is parameter.VAR_POSITIONAL:
            parts += map(describe, value)
        elif parameter.default is parameter.empty:
            parts.append(describe(value))
    return f"{name}({', '.join(parts)})"


def spelled(function: Any) -> tuple[str, inspect.Signature]:
    """The name of a function or method as its caller writes it, and its signature without ``self`` and annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    name = getattr(function, "label", None) or function.__qualname__.rpartition("<locals>.")[2]
    return name.removesuffix(".__init__"), signature.replace(parameters=parameters, return_annotation=signature.empty)


def bound(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that fits the signature, by name."""
    return {k: v for k, v in inspect.signature(function).bind(*args, **kwargs).arguments.items() if k != "self"}


def wrong_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallError:
    """The error for a call that doesn't fit the signature of the function."""
    name, signature = spelled(function)
    args = args[len(args) and "self" in inspect.signature(function).parameters :]
    unknown = [key for key in kwargs if key not in signature.parameters]
    missing = ""
    if unknown:
        missing = keyword_hint(unknown[0], signature.parameters)
    else:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            missing = str(error)
    got = ", ".join([*map(describe, args), *(f"{key}={describe(value)}" for key, value in kwargs.items())])
    return CallError(f"{name}{signature}", f"{name}({got})", missing)


# ---- what went wrong ------------------------------------------------------------------------------------------------

# What an error of NumPy says, the kind of ours, what was expected, and what to do.
KINDS: list[tuple[str, type[MiniGradError], str, str]] = [
    (r"does not match previous terms", ShapeError, "one length for each subscript",
     "a letter stands for the same length everywhere"),
    (r"core dimension|enough dimensions", ShapeError, "x (..., n, k) @ y (..., k, m), or vectors of length k",
     "swapaxes(-1, -2) transposes matrices; * multiplies elements"),
    (r"boolean index did not match", ShapeError, "a mask with the lengths of the axes that it picks from",
     "compare the array itself: x[x > 0]"),
    (r"remapped shapes.*requested shape", ShapeError, "a shape to which the array can be repeated: its axes, counted "
     "from the last, have that length or 1", "reshape or expand_dims adds axes of length 1"),
    (r"broadcast|shape mismatch", ShapeError, "shapes that broadcast: lengths, from the last axis on, equal or 1",
     "reshape or expand_dims adds axes of length 1"),
    (r"cannot reshape|unknown dimension", ShapeError, "a shape with as many elements, of which one length may be -1",
     "reshape(-1) makes one axis of all"),
    (r"axes don't match|repeated axis", AxisError, "every axis of the array once", "swapaxes exchanges two axes"),
    (r"duplicate value", AxisError, "different axes", "name each axis once"),
    (r"squeeze", ShapeError, "axes of length 1 to leave out", "squeeze() leaves out all of them"),
    (r"zero-size|empty sequence", ShapeError, "at least one element", "initial= is the result of none (max, min)"),
    (r"number of dimensions|array dimensions except", ShapeError,
     "arrays that are alike in every axis but the one along which they are joined", "minigrad.stack makes a new axis"),
    (r"array element with a sequence", ShapeError, "as many values as places", "x[0] = 1.0 sets one"),
    (r"zero-dimensional arrays cannot", ShapeError, "arrays with at least one axis", "minigrad.stack joins scalars"),
    (r"at least one array", ArgumentError, "at least one array", "the list is empty"),
    (r"too many indices", IndexRangeError, "at most as many indices as axes", "None adds an axis, ... skips some"),
    (r"arrays are valid indices", IndexRangeError, "integers, slices, None, ..., or arrays of integers or booleans",
     "astype('int64') makes integers"),
    (r"integer .* out of bounds for", ArgumentError, "a number that the dtype of the array holds",
     "astype a wider dtype first"),
    (r"negative dimensions|negative values", ArgumentError, "no negative lengths", "slices leave elements out"),
    (r"negative integer powers", DTypeError, "floating-point numbers for negative powers", "write 2.0 for 2"),
    (r"numpy boolean", DTypeError, "numbers; booleans have no difference", "~ and ^ work on booleans"),
    (r"ufunc '(invert|bitwise_\w+)' not", DTypeError, "booleans or integers for ~, &, | and ^",
     "compare first: (x > 0) & (y > 0)"),
    (r"not supported for the input types|contain a loop", DTypeError, "arrays of a dtype that the operation works on",
     "astype changes the dtype"),
    (r"as an integer|sequence of integers", CallError, "whole numbers where lengths, axes and counts are meant",
     "int() or // makes whole numbers"),
]  # fmt: skip


def explain(function: Any, arguments: Mapping[str, Any], error: Exception) -> MiniGradError:
    """An error from inside of NumPy or CuPy on the terms of the call ``function(**arguments)`` that caused it."""
    name, signature = spelled(function)
    return translate(called(name, signature, arguments), f"{name}{signature}", arguments.values(), error)


def translate(call: str, takes: str, arguments: Iterable[Any], error: Exception) -> MiniGradError:
    """An error of NumPy or CuPy in our terms: ``call`` is what was written, ``takes`` what might have been."""
    values = [array_of(v) for value in arguments for v in (value if isinstance(value, list | tuple) else [value])]
    devices, text = sorted({device_of(value) for value in values if is_array(value)}), str(error)
    if len(devices) > 1 and not isinstance(error, IndexError):  # which tells of numbers, wherever they lie
        placed = " and ".join(f"{describe(value)} on {device_of(value)}" for value in values if is_array(value))
        ours: MiniGradError = DeviceError(f"arrays of one device in {call}", placed, "move one with .to()")
    elif isinstance(error, MemoryError):
        ours = OutOfMemoryError("a result that fits into memory", f"{call}: {text}", "make it smaller")
    elif isinstance(error, np.exceptions.AxisError) and error.axis is not None and error.ndim is not None:
        ours = axis_error(error.axis, error.ndim, call)
    elif found := re.search(r"index (-?\d+) is out of bounds for (?:axis (\d+) with )?size (\d+)", text):
        index, axis, size = found.groups()
        hint = "the first is 0, the last is -1" if int(size) else "there is nothing to pick"
        expected = (
            f"an index from -{size} to {int(size) - 1} on axis {axis or 0}" if int(size) else "an axis with elements"
        )
        ours = IndexRangeError(expected, f"{index}, in {call}", hint)
    else:
        fallback = DTypeError if isinstance(error, TypeError | AttributeError) else ShapeError
        unknown = ("", fallback, f"arguments that fit {takes}", "")
        pattern, kind, expected, hint = next((row for row in KINDS if re.search(row[0], text)), unknown)
        ours = kind(expected, call if pattern else f"{call}: {text}", hint or "help() shows what it takes")
    ours.source = error.with_traceback(None)  # whose frames would keep the arrays alive
    return ours


def axis_error(axis: int, ndim: int, where: str = "") -> AxisError:
    """The error for an axis that an array with ``ndim`` axes doesn't have."""
    got = f"{axis}, in {where}" if where else str(axis)
    if not ndim:
        error = AxisError("an array with at least one axis", f"axis {got}", "a single number has no axes")
    else:
        counted = f"the array has {ndim} axes, counted from 0" if ndim > 1 else "the array has one axis"
        error = AxisError(f"an axis from {-ndim} to {ndim - 1}", got, counted)
    error.source = np.exceptions.AxisError(axis, ndim)  # to be told again of the call that was given the axis
    return error


# ---- whose error it is ----------------------------------------------------------------------------------------------

_ROOT = Path(__file__).parents[2]
OURS = tuple(f"{_ROOT / package}{os.sep}" for package in ("minigrad", "nn", "optim"))


def is_from_inside(trace: TracebackType | None) -> bool:
    """Whether no function of the user took part in what ``trace`` shows: then there is a call of his to explain."""
    libraries = [sys.modules[name] for name in ("numpy", "cupy") if name in sys.modules]
    inside = (*OURS, *(f"{Path(str(library.__file__)).parent}{os.sep}" for library in libraries))
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(inside):
            return False
        trace = trace.tb_next
    return True


def is_clear(function: Any, error: Exception) -> bool:
    """Whether ``error``, raised by a call of ``function`` in the frame that asks, is one of ours or of the user's own.

    A TypeError that no deeper frame raised is Python's refusal to make the call. What an operation inside said of
    NumPy's error is said again of the whole call (but not of a method, which says no more than its function).
    """
    inner = error.__traceback__ and error.__traceback__.tb_next
    if inner is None:
        return type(error) is not TypeError
    if isinstance(error, MiniGradError) and (error.source is None or "self" in inspect.signature(function).parameters):
        return True
    return not is_from_inside(inner)


def in_our_terms(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> MiniGradError:
    """``error``, which is not clear by itself, on the terms of the call that raised it."""
    if error.__traceback__ is None or error.__traceback__.tb_next is None:
        return wrong_call(function, args, kwargs)
    source = error.source if isinstance(error, MiniGradError) else error
    return explain(function, bound(function, args, kwargs), source or error)


def explained(function: F) -> F:
    """Decorate a public function or method: what goes wrong inside is told in terms of the call of it."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (*FOREIGN, MiniGradError) as error:
            if is_clear(function, error):
                raise
            raise in_our_terms(function, args, kwargs, error) from None  # kept in no variable: that would be a cycle

    return wrapped  # type: ignore[return-value]
