"""Errors from inside, of Python and NumPy, in terms of the public call that caused them.

A *boundary* is a function that the user calls: an operation, a function of the package, a method, a constructor. Where
boundaries call each other, the outermost one explains, in the names and arguments that the user wrote. Nothing here
runs before something failed.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType
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
    LinAlgError,
    MiniGradError,
    OutOfMemoryError,
    ShapeError,
)
from minigrad.messages.habits import keyword_hint

F = TypeVar("F", bound=Callable[..., Any])

FOREIGN = (TypeError, ValueError, IndexError, AttributeError, ArithmeticError, MemoryError)  # what NumPy raises

# ---- the boundary ---------------------------------------------------------------------------------------------------

BOUNDARIES: set[CodeType] = set()
_ROOT = Path(__file__).parents[2]
OURS = tuple(f"{_ROOT / package}{os.sep}" for package in ("minigrad", "nn", "optim"))


def boundary(function: F) -> F:
    """Decorate a function that raises what ``told`` makes of an error."""
    BOUNDARIES.add(function.__code__)
    return function


def told(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> Exception:
    """What the boundary that caught ``error`` raises: an explanation of ``function(*args, **kwargs)``, or the error.

    The error stays as it is if it is one of ours, if a function of the user took part in what failed, or if another of
    our boundaries made this call for him.
    """
    libraries = [sys.modules[name] for name in ("numpy", "scipy", "cupy") if name in sys.modules]
    inside = (*OURS, *(f"{Path(str(library.__file__)).parent}{os.sep}" for library in libraries))

    def is_inside(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(inside)

    if isinstance(error, MiniGradError) or not all(is_inside(frame) for frame, _ in walk_tb(error.__traceback__)):
        return error
    callers = takewhile(is_inside, (frame for frame, _ in walk_stack(sys._getframe(1).f_back)))
    if any(frame.f_code in BOUNDARIES for frame in callers):
        return error
    explained = explanation(function, args, kwargs, error)
    explained.__suppress_context__ = True
    return explained


def explained(function: F) -> F:
    """Decorate a public function or method: what goes wrong inside is told in terms of the call of it."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except FOREIGN as error:
            raise told(function, args, kwargs, error)  # noqa: B904

    return boundary(wrapped)  # type: ignore[return-value]


def called_by_name(method: F) -> F:
    """Decorate a method by which an operation is called: what goes wrong inside is told in terms of the operation."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except FOREIGN as error:
            raise told(self, args, kwargs, error)  # noqa: B904

    return boundary(wrapped)  # type: ignore[return-value]


def fitting(method: F) -> F:
    """Decorate a method: a call with wrong arguments is told; errors from inside are left to what it calls."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except TypeError:
            if misfit(method, args, kwargs):
                raise wrong_call(method, args, kwargs) from None
            raise

    return wrapped  # type: ignore[return-value]


def explain_methods(cls: type, names: Iterable[str]) -> None:
    """Decorate those of these methods that a class defines itself; its constructor is a boundary."""
    for name in names:
        if inspect.isfunction(method := vars(cls).get(name)):
            setattr(cls, name, (explained if name == "__init__" else fitting)(method))


# ---- what was called ------------------------------------------------------------------------------------------------


def describe(value: Any, limit: int = 40) -> str:
    """A value in the text of an error: dtype and shape of an array, else its repr, cut off.

    >>> describe(np.ones((2, 3))), describe("a"), describe(object)
    ('float64 (2, 3)', "'a'", "<class 'object'>")
    """
    array, kind = array_of(value), type(value)
    if is_array(array):
        return f"{array.dtype} {array.shape}"
    if inspect.isroutine(value):
        return f"{value.__name__}()"
    if isinstance(value, list | tuple) and any(is_array(array_of(part)) for part in value):
        inner = ", ".join([*map(describe, value[:4]), *["…"] * (len(value) > 4)])
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if kind.__module__ != "builtins" and not isinstance(value, np.generic | np.dtype | slice | os.PathLike):
        return f"a {kind.__module__}.{kind.__qualname__}"
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def spelled(function: Any) -> tuple[str, inspect.Signature]:
    """The name of a function or method as its caller writes it, and its signature without ``self`` and annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    name = getattr(function, "label", None) or function.__qualname__.rpartition("<locals>.")[2]
    return name.removesuffix(".__init__"), signature.replace(parameters=parameters, return_annotation=signature.empty)


def called(name: str, parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> str:
    """A call as it might be written: required arguments in their places, others by name."""
    parts: list[str] = []
    for key, value in arguments.items():
        parameter = parameters[key]
        if parameter.kind is parameter.VAR_POSITIONAL:
            parts += map(describe, value)
        else:
            parts.append(describe(value) if parameter.default is parameter.empty else f"{key}={describe(value)}")
    return f"{parts[0]}[{parts[1]}]" if name == "getitem" else f"{name}({', '.join(parts)})"


def misfit(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What Python has against calling ``function`` so; "" where the arguments fit."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def wrong_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallError:
    """The error for a call that doesn't fit the signature of the function."""
    name, signature = spelled(function)
    unknown = [key for key in kwargs if key not in signature.parameters]
    by_name = [key for key, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    hint = keyword_hint(unknown[0], by_name) if unknown else misfit(function, args, kwargs)
    shown = args[len(args) and "self" in inspect.signature(function).parameters :]
    got = ", ".join([*map(describe, shown), *(f"{key}={describe(value)}" for key, value in kwargs.items())])
    return CallError(f"{name}{signature}", f"{name}({got})", hint)


# ---- what went wrong ------------------------------------------------------------------------------------------------

# Words of NumPy's error, the kind of ours, what was expected, and what to do. They stand for errors of NumPy whose kind
# or words would mislead; all others are quoted.
KINDS: list[tuple[str, type[MiniGradError], str, str]] = [
    ("Singular matrix", LinAlgError, "matrices that have an inverse", "lstsq and pinv take any matrix"),
    ("ositive definite|potrf", LinAlgError, "symmetric matrices whose eigenvalues are all above 0",
     "x + 1e-6 * minigrad.eye(n) moves them up"),
    ("converge", LinAlgError, "matrices of finite numbers", "np.isfinite(x.numpy()).all() tells"),
    ("must be square", LinAlgError, "square matrices (..., n, n)", "lstsq, pinv and svd take others"),
    ("two-dimensional", LinAlgError, "matrices (..., m, n)", "expand_dims makes one of a vector"),
    ("in cuSOLVER|in cuBLAS", LinAlgError, "matrices that have an inverse", "lstsq and pinv take any matrix"),
    ("gufunc", ShapeError, "x (..., n, k) @ y (..., k, m), or vectors of length k",
     "swapaxes(-1, -2) transposes matrices; * multiplies elements"),
    ("boolean index", ShapeError, "a mask with the lengths of the axes that it picks from",
     "compare the array itself: x[x > 0]"),
    ("broadcast", ShapeError, "shapes that broadcast: lengths, from the last axis on, equal or 1",
     "reshape or expand_dims adds axes of length 1"),
    ("axes don't match|repeated axis", AxisError, "every axis of the array once", "swapaxes exchanges two axes"),
    ("duplicate value", AxisError, "different axes", "name each axis once"),
    ("zero-size|empty sequence", ShapeError, "at least one element", "initial= is the result of none (max, min)"),
    ("element with a sequence", ShapeError, "as many values as places", "x[0] = 1.0 sets one"),
    ("at least one array", ArgumentError, "at least one array", "the list is empty"),
    ("Python integer", ArgumentError, "a number that the dtype of the array holds", "astype a wider dtype first"),
    ("integer powers", DTypeError, "floating-point numbers for negative powers", "write 2.0 for 2"),
    ("negative dimensions|negative values", ArgumentError, "no negative lengths", "slices leave elements out"),
    ("'invert'|'bitwise", DTypeError, "booleans or integers for ~, &, | and ^", "compare first: (x > 0) & (y > 0)"),
    ("as an integer|sequence of integers", CallError, "whole numbers where lengths, axes and counts are meant",
     "int() or // makes whole numbers"),
]  # fmt: skip


def explanation(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> MiniGradError:
    """``error``, raised inside of ``function(*args, **kwargs)``, in terms of that call."""
    if misfit(function, args, kwargs):
        return wrong_call(function, args, kwargs)
    whole, (name, signature) = inspect.signature(function), spelled(function)
    parameters, given = whole.parameters, whole.bind(*args, **kwargs).arguments
    arguments = {k: v for k, v in given.items() if k != "self" and v is not parameters[k].default}
    try:  # an argument that is at fault by itself
        for key in arguments.keys() & getattr(function, "checks", {}).keys():
            if parameters[key].kind is not inspect.Parameter.VAR_POSITIONAL:
                function.checked(arguments[key], key)
    except MiniGradError as fault:
        return fault.with_traceback(None)
    return translate(called(name, parameters, arguments), f"{name}{signature}", arguments.values(), error)


def translate(call: str, takes: str, arguments: Iterable[Any], error: Exception) -> MiniGradError:
    """An error of NumPy or CuPy in our terms: ``call`` is what was written, ``takes`` what might have been."""
    values = [array_of(v) for value in arguments for v in (value if isinstance(value, list | tuple) else [value])]
    text = str(error)
    error.__traceback__ = None  # whose frames would keep the arrays alive
    arrays = [value for value in values if is_array(value)]
    if len({device_of(array) for array in arrays}) > 1 and not isinstance(error, IndexError):  # that tells of numbers
        placed = " and ".join(f"{describe(array)} on {device_of(array)}" for array in arrays)
        return DeviceError(f"arrays of one device in {call}", placed, "move one with .to()")
    if isinstance(error, MemoryError):
        return OutOfMemoryError("a result that fits into memory", f"{call}: {text}", "make it smaller")
    if isinstance(error, np.exceptions.AxisError) and error.ndim is not None:
        n, got = error.ndim, f"{error.axis}, in {call}"
        expected = f"an axis from {-n} to {n - 1}" if n else "an array with at least one axis"
        return AxisError(expected, got, f"the array has {n} {'axis' if n == 1 else 'axes'}, counted from 0")
    for words, kind, expected, hint in KINDS:
        if any(part in text for part in words.split("|")):
            return kind(expected, call, hint)
    if isinstance(error, IndexError):
        hint = "the first is 0, the last is -1; slices, None, ... and masks are indices too"
        return IndexRangeError("integers within the lengths of the axes", f"{call}: {text}", hint)
    kind = DTypeError if isinstance(error, TypeError | AttributeError) else ShapeError
    return kind(f"arguments that fit {takes}", f"{call}: {text}", "help() shows what it takes")
