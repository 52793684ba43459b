"""Plans: which rules will run for the arguments that need a gradient, and what must be kept for them.

A plan is made once for each primitive and set of such arguments. A rule's parameter names say what it reads: an
argument, ``out``, ``needs``, or a fact of an argument such as ``x_shape``; what no rule reads is not kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from minigrad.backend import device_of

Rule: TypeAlias = Callable[..., Any]
Fetch: TypeAlias = Callable[[Any, Any, Any], Any]  # (arguments, result, extras of a kernel) to a residual


@dataclass(frozen=True)
class Plan:
    """For one set of arguments that need a gradient: what to keep, which rules to call, how to lift them to Tensors."""

    wrt: tuple[int, ...]  # positions of the arguments, in the order in which ``calls`` yields their gradients
    names: tuple[str, ...]  # of the residuals
    fetch: tuple[Fetch, ...] = ()  # how to get each of them
    calls: tuple[tuple[Rule, tuple[int, ...], tuple[int, ...] | None], ...] = ()  # rule, residuals, picks if joint
    watched: tuple[int, ...] = ()  # positions of the arguments that are residuals
    watches_out: bool = False
    rewraps: tuple[tuple[int, int], ...] = ()  # (residual, index into wrt): the residuals that are such arguments
    needs: tuple[bool, ...] = ()  # for each argument with a rule


def _itself(value: Any) -> Any:
    return value


def _dtype_of(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype


FACTS: dict[str, Callable[[Any], Any]] = {"shape": np.shape, "dtype": _dtype_of, "device": device_of}


def residual_names(rule: Rule) -> tuple[str, ...]:
    """What a rule reads besides the incoming gradient: the names of its parameters after the first."""
    return tuple(inspect.signature(rule).parameters)[1:]


def legal_names(arguments: Iterable[str]) -> set[str]:
    """What a rule of a function with these arguments may read."""
    names = list(arguments)
    return {"out", "needs", *names, *(f"{name}_{fact}" for name in names for fact in FACTS)}


def make_plan(primitive: Any, wanted: tuple[int, ...], count: int) -> Plan | None:
    """The plan of a primitive for gradients of the arguments at ``wanted``; None where none of them has a rule.

    In a primitive of a list, ``count`` long, the list stands expanded in front of the other arguments.
    """
    position, listed = primitive.position, primitive.sequence
    shift = count - 1 if listed else 0
    names: list[str] = []
    calls: list[Any] = []
    wrt: list[int] = []
    for positions, rule, joint in primitive.rules:
        places = range(count) if listed else positions
        picks = tuple(k for k, place in enumerate(places) if place in wanted)
        if picks:
            reads = residual_names(rule)
            names += [name for name in reads if name not in names]
            wrt += [places[k] for k in picks]
            calls.append((rule, tuple(names.index(name) for name in reads), picks if joint else None))
    if not wrt:
        return None
    names += [name for name in primitive.kept_besides() if name not in names]
    covered = range(count) if listed else [place for positions, _, _ in primitive.rules for place in positions]
    needs = tuple(place in wanted for place in covered)
    watched: list[int] = []
    for name in names:
        if name in position:
            watched += range(count) if listed and position[name] == 0 else [position[name] + shift]
    fetch = tuple(_fetch(name, position, count if listed else None, needs) for name in names)
    rewraps = [
        (k, wrt.index(position[name])) for k, name in enumerate(names) if not listed and position.get(name) in wrt
    ]
    return Plan(tuple(wrt), tuple(names), fetch, tuple(calls), tuple(watched), "out" in names, tuple(rewraps), needs)


def _fetch(name: str, position: dict[str, int], count: int | None, needs: tuple[bool, ...]) -> Fetch:
    """How the residual ``name`` is got; ``count`` is the length of the list that stands expanded in front, if any."""
    if name == "out":
        return lambda raw, out, extras: out
    if name == "needs":
        return lambda raw, out, extras: needs
    owner, _, fact = (name, "", "") if name in position else name.rpartition("_")
    if owner not in position or (fact and fact not in FACTS):
        return lambda raw, out, extras: extras[name]
    place, read = position[owner], FACTS.get(fact, _itself)
    if count is not None and place == 0:
        return lambda raw, out, extras: [read(value) for value in raw[:count]]
    place += 0 if count is None else count - 1
    return (lambda raw, out, extras: read(raw[place])) if fact else (lambda raw, out, extras: raw[place])
