"""The registry lists every operation by name, with the facts that the generated tests and the texts of errors need.

An :class:`Operation` is a function on arrays or Tensors. A :class:`Composite` calls other operations. A ``Primitive``
(in ``core.py``, which imports this file) knows its derivatives itself.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import numpy as np

from minigrad.backend import is_array, to_gpu_of_any
from minigrad.errors import ArgumentError
from minigrad.messages.arguments import again_with_arrays, check_of
from minigrad.messages.explain import FOREIGN

P = ParamSpec("P")
Made = TypeVar("Made", bound="Operation[Any]")

NATIVE = [np.dtype(code) for code in "?bhilqBHILQefdg"]
PLAIN = frozenset({float, int, bool, slice, *NATIVE, *(d.type for d in NATIVE)})  # types and dtypes that need no check
REGISTRY: dict[str, Operation[Any]] = {}  # every operation by name; the tests are generated from it


class Sample(NamedTuple):
    """A call for the generated tests: shapes become random arrays, lists of shapes lists of them, the rest is as is."""

    arrays: tuple[Any, ...]
    params: dict[str, Any]


def sample(*arrays: Any, **params: Any) -> Sample:
    """A call of a primitive on arrays of these shapes, for the tests: ``sample((2, 3), axis=1)``."""
    return Sample(arrays, params)


class Operation(Generic[P]):
    """A public function on arrays or Tensors, with the facts that the generated tests need.

    torch, numpy  the twin in that library: a name or a function; None: the one of the same name, False: there is none,
                  though tests/support/twins.py may have a formula
    samples       calls to try; elementwise operations get theirs from ``domain``
    domain        the interval of random inputs, or a function that makes each of an array of numbers from -1 to 1
    kinks         points of the interval from which random inputs keep away; docs/kinks.md says what happens there
    part_of       the public operation that this one is a part of, which texts for the user then name
    flops         how much it computes, for ``profile``: a function of the arguments and of ``out``, by name
    precision     under autocast, of a primitive: "low" for products, "wide" for sums and what is made of them
    linear        of a primitive, in its arguments with rules: "jointly", as a sum is, or "each", as a product is
    stacks        whether a primitive maps stacks of its arguments to stacked results, with axes counted from the end
    """

    def __init__(
        self,
        function: Callable[P, Any],
        *,
        torch: Any = None,
        numpy: Any = None,
        samples: Sequence[Sample] = (),
        domain: tuple[float, float] | Callable[[Any], Any] = (-2.0, 2.0),
        kinks: Sequence[float] = (),
        part_of: str | None = None,
        flops: Callable[..., Any] | None = None,
        precision: str | None = None,
        linear: str | None = None,
        stacks: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)  # type: ignore[arg-type]
        self.function: Callable[..., Any] = function
        self.name: str = function.__name__
        self.label = part_of or self.name
        self.parameters = inspect.signature(function).parameters
        self.checks = {name: check for name, p in self.parameters.items() if (check := check_of(p.annotation))}
        self.torch, self.numpy, self.samples, self.domain, self.kinks = torch, numpy, samples, domain, kinks
        self.flops, self.precision, self.linear, self.stacks = flops, precision, linear, stacks

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.name}>"

    def checked(self, value: Any, name: str, others: Iterable[Any] = ()) -> Any:
        """An argument in the form that the function takes, a list beside the ``others``, or an error that names it."""
        check = self.checks.get(name)
        if check is None:
            return value
        found = check(value, f"{name!r} of {self.label}")
        return to_gpu_of_any(found, others) if isinstance(value, list | tuple | range) and is_array(found) else found


class Composite(Operation[P]):
    """A function written in terms of primitives; it needs no rule and is registered to be tested like one."""

    def __init__(self, function: Callable[P, Any], **facts: Any) -> None:
        super().__init__(function, **facts)
        self.names = [name for name, p in self.parameters.items() if p.kind is not p.KEYWORD_ONLY]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            others = (*args, *kwargs.values())
            if all(map(_is_plain, others)):
                return self.function(*args, **kwargs)
            places = itertools.chain(self.names, itertools.repeat(self.names[-1]))  # of which the last may be *arrays
            values = [self.checked(value, name, others) for name, value in zip(places, args, strict=False)]
            named: Any = {name: self.checked(value, name, others) for name, value in kwargs.items()}
            return self.function(*values, **named)
        except FOREIGN as error:
            return again_with_arrays(self, args, kwargs, error)


def _is_plain(value: Any) -> bool:
    """Whether no check of an argument changes or refuses ``value``."""
    return hasattr(value, "_data") or type(value) is int or (type(value) is np.ndarray and value.dtype in PLAIN)


_origin = operator.attrgetter("function.__module__", "function.__qualname__")


def register(made: Made) -> Made:
    """Enter an operation into the REGISTRY, under its name; only the same function, defined again, may replace one."""
    before = REGISTRY.get(made.name)
    if before is not None and _origin(before) != _origin(made):
        got = f"a second {made.name!r}, the first from {before.function.__module__}"
        raise ArgumentError("an operation with a new name", got, "rename it, or del minigrad.REGISTRY[name] first")
    REGISTRY[made.name] = made
    return made


def composite(**facts: Any) -> Callable[[Callable[P, Any]], Composite[P]]:
    """Register a function written in terms of primitives: ``@composite(samples=[...])``."""
    return lambda function: register(Composite(function, **facts))
