"""A plan says which rules will run for the arguments that need a gradient, and what a node must keep for them.

There is one plan for each primitive and set of such arguments. A rule's parameter names say what it reads: an
argument, ``out``, ``needs``, or a fact of an argument such as ``x_shape``. A node keeps nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from minigrad.backend import device_of
from minigrad.messages.graphs import refuse_lost

Rule: TypeAlias = Callable[..., Any]
# How to get a residual: the position of an argument, or a function of (arguments, result, extras of a kernel).
Fetch: TypeAlias = Any
# A rule, the places of its residuals (None: all), and which of its gradients are wanted, if it is joint. It is a plain
# tuple, since a NamedTuple is slower.
RuleCall: TypeAlias = tuple[Rule, tuple[int, ...] | None, tuple[int, ...] | None]


class DeclaredRule(NamedTuple):
    """A rule of a primitive, and the facts that were read off it once."""

    positions: tuple[int, ...]  # of the arguments whose gradients it returns
    rule: Rule
    reads: tuple[str, ...]  # the names of its residuals
    joint: bool  # whether it returns a tuple of gradients, or a single one


@dataclass(frozen=True)
class Plan:
    """What to keep, which rules to call, and what becomes a Tensor again, for one set of arguments with gradients."""

    wrt: tuple[int, ...]  # positions of the arguments, in the order in which ``calls`` yields their gradients
    names: tuple[str, ...]  # of the residuals
    fetch: tuple[Fetch, ...] = ()  # how to get each of them
    calls: tuple[RuleCall, ...] = ()
    watched: tuple[int, ...] = ()  # positions of the arguments that are residuals
    sources: tuple[int | None, ...] = ()  # for each residual the argument that it is; -1: the result; None: neither
    needs: tuple[bool, ...] = ()  # for each argument with a rule

    def gradients(self, g: Any, residuals: Sequence[Any]) -> list[Any]:
        """What the rules give for ``g``, the gradient of the result, in the order of ``wrt``."""
        found: list[Any] = []
        for rule, where, picks in self.calls:
            value = rule(g, *(residuals if where is None else map(residuals.__getitem__, where)))
            found += (value,) if picks is None else map(value.__getitem__, picks)
        return found


def _dtype_of(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype


FACTS: dict[str, Any] = {"shape": lambda x: getattr(x, "shape", ()), "dtype": _dtype_of, "device": device_of}


def names_read(rule: Rule) -> tuple[str, ...]:
    """What a rule reads besides the incoming gradient: the names of its parameters after the first."""
    return tuple(inspect.signature(rule).parameters)[1:]


def argument_and_fact(name: str, arguments: Collection[str]) -> tuple[str, str]:
    """What a residual is about: ``x_shape`` is ("x", "shape"), ``x`` is ("x", ""), any other name is ("", "")."""
    if name in arguments:
        return name, ""
    argument, _, fact = name.rpartition("_")
    return (argument, fact) if argument in arguments and fact in FACTS else ("", "")


def is_legal(name: str, arguments: Collection[str]) -> bool:
    """Whether a rule of a function with these arguments may read ``name``."""
    return name in ("out", "needs") or bool(argument_and_fact(name, arguments)[0])


def make_plan(primitive: Any, among: set[int]) -> Plan | None:
    """The plan of a primitive for gradients of the arguments at ``among``; None where these have no derivative."""
    position: dict[str, int] = primitive.position
    places: dict[str, int] = {}  # of the residuals, by name
    wrt: dict[int, int] = {}  # argument -> its place among the gradients
    calls: list[RuleCall] = []
    for positions, rule, reads, joint in primitive.rules:
        picks = tuple(k for k, i in enumerate(positions) if i in among)
        if picks:
            wrt |= {positions[k]: len(wrt) + n for n, k in enumerate(picks)}
            where = tuple(places.setdefault(name, len(places)) for name in reads)
            calls.append((rule, where, picks if joint else None))
    refuse_lost(primitive, among.difference(wrt))
    if not wrt:
        return None
    for name in primitive.names if primitive.keeps_arguments else ():
        places.setdefault(name, len(places))
    calls = [(rule, None if where == (*range(len(places)),) else where, picks) for rule, where, picks in calls]
    needs = tuple(i in among for declared in primitive.rules for i in declared.positions)
    fetch = tuple(_fetch(name, position, needs) for name in places)
    watched = tuple(position[name] for name in places if name in position)
    sources = tuple(-1 if name == "out" else position.get(name) for name in places)
    return Plan(tuple(wrt), tuple(places), fetch, tuple(calls), watched, sources, needs)


def _fetch(name: str, position: dict[str, int], needs: tuple[bool, ...]) -> Fetch:
    """How to get the residual ``name`` when an operation is recorded."""
    if name == "out":
        return lambda raw, out, extras: out
    if name == "needs":
        return lambda raw, out, extras: needs
    argument, fact = argument_and_fact(name, position)
    if not argument:
        return lambda raw, out, extras: extras[name]
    place, read = position[argument], FACTS.get(fact)
    return (lambda raw, out, extras: read(raw[place])) if read else place
