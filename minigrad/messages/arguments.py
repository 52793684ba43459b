"""What may stand in the place of an argument: arrays, whole numbers, axes, shapes.

The annotation of a parameter says which: an operation checks what is called ``Array``, ``int``, ``Axes`` or ``Seed``.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from minigrad.backend import Array, Axes, array_of, complaint, is_array, is_bfloat16, is_on_gpu, to_gpu_of_any
from minigrad.errors import ArgumentError, CallError, DTypeError, MiniGradError, ShapeError
from minigrad.messages.explain import describe, explanation

Check: TypeAlias = Callable[[Any, str], Any]  # (value, what it is) to the value in the form that the function takes


def as_operand(value: Any, what: str) -> Any:
    """``value`` where an array is meant: a number, an array, a Tensor, or (as an array) nested lists of numbers.

    >>> as_operand([1.0, 2.0], "x"), as_operand(2, "x")
    (array([1., 2.]), 2)
    """
    if isinstance(value, np.ndarray):
        value = value if type(value) is np.ndarray else plain_array(value)
    elif isinstance(value, int | float) or hasattr(value, "_data"):
        return value
    elif isinstance(value, list | tuple | range):
        return from_lists(value) if (part := next(tensors_in(value), None)) is None else part._joined(value)
    elif not (is_array(value) or isinstance(value, np.generic)):
        raise DTypeError(f"a tensor, an array or numbers for {what}", describe(value), _stranger(value))
    if value.dtype.kind not in "biuf" and not is_bfloat16(value.dtype):
        raise DTypeError("booleans, integers or real numbers", describe(value), complaint(value.dtype.kind))
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))  # kernels read bytes


def as_floats(*values: Any) -> list[Any]:
    """The values with axes: numbers and nested lists in float64, on the GPU of any of them, others as they are.

    >>> as_floats([1, 2], 2)
    [array([1., 2.]), array(2.)]
    """
    found = [as_operand(v, "an argument") if next(tensors_in([v]), None) is not None else v for v in values]
    return [v if hasattr(v, "ndim") else to_gpu_of_any(np.asarray(v, np.float64), found) for v in found]


def again_with_arrays(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], error: Exception) -> Any:
    """The result for arrays in the places of numbers, of which ``operation`` has asked in vain for axes or a dtype.

    It is called where a call has failed, so that no other pays for it. Beside an array, which a number must not widen,
    and after any other ``error``, that is explained and raised.
    """
    named = [*zip(operation.names, args, strict=False), *kwargs.items()]
    arrays = {name for name, check in operation.checks.items() if check is as_operand}
    numbers = {name: np.asarray(v) for name, v in named if name in arrays and isinstance(v, int | float)}
    alone = numbers and not any(is_array(array_of(v)) for v in (*args, *kwargs.values()))
    if not (alone and isinstance(getattr(error, "origin", error), AttributeError)):
        raise explanation(operation, args, kwargs, error)
    places = (*operation.names, *[""] * len(args))
    given = [numbers.get(name, v) for name, v in zip(places, args, strict=False)]
    try:
        return operation(*given, **{name: numbers.get(name, v) for name, v in kwargs.items()})
    except MiniGradError as refused:
        raise refused from None


def plain_array(array: Any) -> Any:
    """An array of a subclass as a plain one: ``*`` of np.matrix is another product. Masks are refused, not lost.

    >>> plain_array(np.ones(2).view(np.memmap))
    array([1., 1.])
    """
    if isinstance(array, np.ma.MaskedArray):
        got, hint = f"a masked array of shape {array.shape}", "array.filled(0) is one; keep the mask beside it"
        raise DTypeError("a plain array", got, hint)
    return np.asarray(array)


def _stranger(value: Any) -> str:
    """What to do about something that is no array of ours."""
    if isinstance(value, complex):
        return complaint("c")
    if hasattr(value, "__dlpack__"):
        return "minigrad.from_dlpack shares its memory"
    return "np.asarray makes an array of numbers" if hasattr(value, "__array__") else "compute with numbers alone"


def from_lists(value: Any, dtype: Any = None) -> Any:
    """Nested lists of numbers as an array."""
    if any(tensor._requires_grad for tensor in tensors_in(value)):
        got, hint = "a list with recorded tensors in it", "minigrad.array makes one tensor of it, and keeps the graph"
        raise DTypeError("numbers, or nested lists of them", got, hint)
    for part in value:
        if isinstance(part, np.ma.MaskedArray):
            plain_array(part)
    try:
        array = np.array(value, dtype)
    except (ValueError, TypeError) as error:
        if "inhomogeneous" in str(error):
            raise ShapeError("nested lists of equal lengths", describe(value), "pad the shorter ones") from None
        raise DTypeError("numbers, or nested lists of them", describe(value), complaint("O")) from None
    if array.dtype.kind not in "biuf" and not is_bfloat16(array.dtype):
        raise DTypeError("numbers, or nested lists of them", describe(value), complaint(array.dtype.kind))
    return array


def tensors_in(values: Any) -> Iterator[Any]:
    """The Tensors in nested lists, tuples and dicts."""
    for part in values.values() if isinstance(values, dict) else values:
        if isinstance(part, list | tuple | dict):
            yield from tensors_in(part)
        elif hasattr(part, "_requires_grad"):
            yield part


def as_list(values: Any, what: str) -> list[Any]:
    """A list of what are arrays, tensors or numbers, which is left to who takes them one by one."""
    if not isinstance(values, Iterable) or isinstance(values, str | dict):
        raise CallError(f"a list of arrays for {what}", describe(values), "put a single one into a list: [x]")
    return list(values)


def as_int(value: Any, what: str) -> int:
    """A whole number: an int, or anything that can be an index; no boolean."""
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:
        pass
    hint = "int() cuts the fraction off" if isinstance(value, float | np.floating) else "such as 1"
    raise CallError(f"a whole number for {what}", describe(value), hint)


def as_seed(value: Any, what: str) -> Any:
    """A whole number, or the place of one on a GPU, which a CUDA graph reads there."""
    return value if is_on_gpu(value) and value.dtype == np.uint64 and value.ndim == 0 else as_int(value, what)


def as_axes(value: Any, what: str) -> Any:
    """An axis or several."""
    return tuple(as_int(axis, what) for axis in value) if isinstance(value, tuple | list) else as_int(value, what)


def normal_axis(axis: Any, ndim: int) -> int:
    """``axis`` counted from the front, checked.

    >>> normal_axis(-1, 3)
    2
    """
    place = as_int(axis, "an axis")
    if not -ndim <= place < ndim:
        raise np.exceptions.AxisError(place, ndim)  # told, as NumPy's own is, of the call that was given the axis
    return place % ndim


def as_shape(value: Any, what: str = "shape") -> tuple[int, ...]:
    """The lengths of axes: a whole number or a tuple of them, none negative.

    >>> as_shape(3), as_shape([2, 3])
    ((3,), (2, 3))
    """
    lengths = value if isinstance(value, tuple | list) else (value,)
    found = tuple(as_int(n, f"every length in {what}") for n in lengths)
    if any(n < 0 for n in found):
        raise ShapeError(f"lengths from 0 in {what}", describe(value), "-1 is for reshape alone")
    return found


def check_eps(eps: Any) -> float:
    """``eps``, which keeps a root or a quotient away from 0, as a float.

    >>> check_eps(1e-5)
    1e-05
    """
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.number) or not 0 <= eps <= sys.float_info.max:
        raise ArgumentError("eps, a finite number from 0", describe(eps), "1e-5 is usual")
    return float(eps)


def optional(check: Check) -> Check:
    """The same check, which lets None pass."""
    return lambda value, what: None if value is None else check(value, what)


CHECKS: dict[str, Check] = {
    "Array": as_operand,
    "Array | None": optional(as_operand),
    "Sequence[Array]": as_list,
    "int": as_int,
    "int | None": optional(as_int),
    "Seed": as_seed,
    "Axes": optional(as_axes),
    str(Array): as_operand,  # what the two aliases are where annotations are not left as text
    str(Axes): optional(as_axes),
}


def check_of(annotation: Any) -> Check | None:
    """The check that an annotation asks for, if any: text, as under ``from __future__ import annotations``, or not.

    >>> check_of("mg.backend.Array") is check_of("Array") is check_of(Array) is as_operand, check_of(int) is as_int
    (True, True)
    >>> check_of(Axes)((0, np.int64(1)), "axis"), check_of(float)
    ((0, 1), None)
    """
    return CHECKS.get(re.sub(r"\w+\.", "", str(getattr(annotation, "__name__", annotation))))
