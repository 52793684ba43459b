"""Errors from inside, of Python and NumPy, in terms of the public call that caused them.

A *boundary* is a function that the user calls: an operation, a function of the package, a method, a constructor. Each
explains what it meets, also what a boundary further inside has explained already. So the outermost one has the last
word, in the names and arguments that the user wrote. Nothing here runs before something failed.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from minigrad import errors
from minigrad.backend import array_of, device_of, is_array
from minigrad.errors import AxisError, CallError, DeviceError, DTypeError, IndexRangeError, MiniGradError, ShapeError
from minigrad.messages.habits import hints, keyword_hint

F = TypeVar("F", bound=Callable[..., Any])

# What NumPy raises, and the one kind of explanation that is none of these.
FOREIGN = (TypeError, ValueError, IndexError, AttributeError, ArithmeticError, MemoryError, DeviceError)
_ROOT = Path(__file__).parents[2]
OURS = tuple(f"{_ROOT / package}{os.sep}" for package in ("minigrad", "nn", "optim"))
LIBRARIES = {"numpy", "scipy", "cupy", "cupyx"}

# ---- the boundary ---------------------------------------------------------------------------------------------------


def explanation(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception, inside: bool = True
) -> Exception:
    """What a boundary raises that caught ``error`` from ``function(*args, **kwargs)``: the error in terms of this call.

    The error stays as it is if no boundary explained it and it is one of ours, or if a function of the user took part
    in what failed; without ``inside`` it stays unless the arguments don't fit the signature.
    """
    origin, frames = getattr(error, "origin", error), [frame for frame, _ in walk_tb(error.__traceback__)]
    if isinstance(origin, MiniGradError) or any(map(is_of_user, frames)):
        return error
    if not (inside or wrong_call(function, args, kwargs)):
        return error
    explained = explain_call(function, args, kwargs, origin)
    explained.layer = getattr(error, "layer", "")
    explained.origin, explained.__suppress_context__ = origin, True
    error.__traceback__ = None  # whose frames would keep the arrays alive
    return explained


def is_of_user(frame: FrameType) -> bool:
    """Whether it runs neither our code nor a library's, which has no path where it is compiled: a module names it."""
    module = str(frame.f_globals.get("__name__"))
    return not (frame.f_code.co_filename.startswith(OURS) or module.partition(".")[0] in LIBRARIES)


def explained(function: F, inside: bool = True) -> F:
    """Decorate a public function or method: what goes wrong is told in terms of its call.

    inside: whether that goes for errors from inside too, or for arguments that don't fit the signature alone
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except FOREIGN as error:
            raise explanation(function, args, kwargs, error, inside)  # noqa: B904

    return wrapped  # type: ignore[return-value]


def explain_methods(cls: type, names: Iterable[str]) -> None:
    """Decorate those of these methods that a class defines itself; of its constructor, errors from inside as well."""
    for name in names:
        if inspect.isfunction(method := vars(cls).get(name)):
            setattr(cls, name, explained(method, inside=name == "__init__"))


# ---- what was called ------------------------------------------------------------------------------------------------


def describe(value: Any) -> str:
    """A value in the text of an error: dtype and shape of an array, else its repr, cut off after 40 characters.

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
    return text if len(text) <= 40 else f"{text[:39]}…"


def as_written(function: Any, args: Sequence[Any]) -> tuple[str, inspect.Signature, Sequence[Any]]:
    """The name of a function or method as its caller writes it, its signature without annotations, and its arguments.

    A method goes by the class of the object it is called on, which may inherit it. ``self`` is left out.
    """
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    bound = int("self" in signature.parameters)
    name = getattr(function, "label", None) or function.__qualname__.rpartition("<locals>.")[2]
    word, owner = function.__name__, type(args[0] if args else None)
    if getattr(getattr(owner, word, None), "__wrapped__", None) is function:  # not a method that the user overrides
        name = f"{owner.__name__}.{word}"
    signature = signature.replace(parameters=parameters[bound:], return_annotation=signature.empty)
    return name.removesuffix(".__init__"), signature, args[bound:]


def text_of_call(name: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """``name(*args, **kwargs)``, each argument described."""
    return f"{name}({', '.join([*map(describe, args), *(f'{k}={describe(value)}' for k, value in kwargs.items())])})"


def wrong_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The error for a call that doesn't fit the signature of the function; None where it does."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as misfit:
        name, signature, args = as_written(function, args)
        known = [k for k, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        unknown = [key for key in kwargs if key not in signature.parameters]
        hint = keyword_hint(unknown[0], known) if unknown else str(misfit)
        return CallError(f"{name}{signature}", text_of_call(name, args, kwargs), hint)
    return None


# ---- what went wrong ------------------------------------------------------------------------------------------------

# Pieces of NumPy's texts whose kind or words would mislead, and what to say for them; all others are quoted.
KINDS = hints("errors of NumPy")


def explain_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> MiniGradError:
    """``error``, raised inside of ``function(*args, **kwargs)``, in terms of that call."""
    wrong: CallError | None = wrong_call(function, args, kwargs)
    if wrong:
        return wrong
    name, signature, args = as_written(function, args)
    call, parameters = signature.bind(*args, **kwargs), signature.parameters
    given = {key: value for key, value in call.arguments.items() if value is not parameters[key].default}
    try:  # an argument that is at fault by itself
        for key in given.keys() & getattr(function, "checks", {}).keys():
            if parameters[key].kind is not inspect.Parameter.VAR_POSITIONAL:
                function.checked(given[key], key)
    except MiniGradError as fault:
        return fault.with_traceback(None)
    by_name = {key: value for key, value in given.items() if parameters[key].default is not inspect.Parameter.empty}
    call.arguments = {key: value for key, value in given.items() if key not in by_name}
    text = text_of_call(name, call.args, call.kwargs | by_name)
    if name == "getitem":
        text = "{}[{}]".format(*map(describe, call.args))
    return translate(text, f"{name}{signature}", given.values(), error)


def translate(call: str, takes: str, arguments: Iterable[Any], error: Exception) -> MiniGradError:
    """An error of NumPy or CuPy in our terms: ``call`` is what was written, ``takes`` what might have been."""
    values = [array_of(v) for value in arguments for v in (value if isinstance(value, list | tuple) else [value])]
    text = str(error)
    arrays = [value for value in values if is_array(value)]
    if len({device_of(array) for array in arrays}) > 1 and not isinstance(error, IndexError):  # that tells of numbers
        placed = " and ".join(f"{describe(array)} on {device_of(array)}" for array in arrays)
        return DeviceError(f"arrays of one device in {call}", placed, "move one with .to()")
    if isinstance(error, MemoryError):
        return errors.OutOfMemoryError("a result that fits into memory", f"{call}: {text}", "make it smaller")
    if isinstance(error, np.exceptions.AxisError) and error.ndim is not None:
        n, got = error.ndim, f"{error.axis}, in {call}"
        expected = f"an axis from {-n} to {n - 1}" if n else "an array with at least one axis"
        return AxisError(expected, got, f"the array has {n} {'axis' if n == 1 else 'axes'}, counted from 0")
    for piece, row in KINDS.items():
        if piece in text:
            kind, expected, hint = row.split(" -> ")
            return getattr(errors, kind)(expected, call, hint)  # type: ignore[no-any-return]
    if isinstance(error, IndexError):
        hint = "the first is 0, the last is -1; slices, None, ... and masks are indices too"
        return IndexRangeError("integers within the lengths of the axes", f"{call}: {text}", hint)
    other = DTypeError if isinstance(error, TypeError | AttributeError) else ShapeError
    return other(f"arguments that fit {takes}", f"{call}: {text}", "help() shows what it takes")
