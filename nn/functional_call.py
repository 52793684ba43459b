"""A module as a function of its parameters, for transforms: ``functional_call(model, parameters, x)``."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from minigrad import Tensor, asarray
from minigrad.backend import is_array
from minigrad.checkpointing import within
from minigrad.errors import CallError, StateError
from minigrad.messages.explain import describe
from .module import HINTS, Module, _listed


def functional_call(module: Module, parameters: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """``module(*args, **kwargs)`` with ``parameters`` in the places of its own, by their names.

    All parameters must be there, a tied one under one of its names; buffers may be. Arrays are constants;
    gradients flow to Tensors. Names that are missing or unknown, and wrong shapes, are listed in one StateError.
    Afterwards the module has its own again, also if it failed. Calls of several threads for one module take turns;
    in another way no thread may use it meanwhile. What it assigns to its buffers is forgotten where they were given.

    >>> import minigrad as mg
    >>> import nn
    >>> model = nn.Linear(2, 1)
    >>> parameters = {name: p.astype("float64") for name, p in model.named_parameters()}
    >>> loss = lambda parameters, x: (functional_call(model, parameters, x) ** 2).sum()
    >>> sorted(mg.grad(loss)(parameters, np.ones((3, 2))))
    ['bias', 'weight']
    """
    if not isinstance(module, Module) or not isinstance(parameters, Mapping):
        got, hint = f"{describe(module)} and {describe(parameters)}", "dict(model.named_parameters()) is one"
        raise CallError("a module, and a dict of its parameters", got, hint)
    with _GUARD:
        turn = _TURNS.setdefault(module, threading.RLock())
    with turn:
        places = _places(module)
        given = _checked(module, parameters, places)
        with within(functools.partial(_in_place, turn, given, places)):
            return module(*args, **kwargs)


_GUARD = threading.Lock()
_TURNS: WeakKeyDictionary[Module, Any] = WeakKeyDictionary()  # a lock for each module that was called


@contextmanager
def _in_place(turn: Any, given: Mapping[str, Tensor], places: Mapping[str, Any]) -> Iterator[None]:
    """The given tensors in the places of a module's own, which come back afterwards; other threads wait."""
    with turn:
        before = [(attributes, key, attributes[key]) for name in given for attributes, key in places[name]]
        try:
            for name, value in given.items():
                for attributes, key in places[name]:
                    attributes[key] = value
            yield
        finally:
            for attributes, key, value in before:
                attributes[key] = value


def _places(module: Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """For each name of a parameter or buffer all attributes that hold that tensor, each as a dict and its key."""
    own = dict(module._named_tensors(True, lambda persistent: True))
    holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for part in module.modules():
        for key, value in vars(part).items():
            if isinstance(value, Tensor):
                holders.setdefault(id(value), []).append((vars(part), key))
    return {name: holders[id(tensor)] for name, tensor in own.items()}


def _checked(module: Module, parameters: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, Tensor]:
    """The given tensors by name, one name for each of the module's."""
    own = {name: attributes[key] for name, [(attributes, key), *_] in places.items()}
    first: dict[int, str] = {}
    faults: dict[str, list[str]] = {"missing": [], "unexpected": [name for name in parameters if name not in own]}
    twice, wrong = [], []
    for name in (name for name in parameters if name in own):
        before = first.setdefault(id(own[name]), name)
        if not _same(parameters[before], parameters[name]):
            twice.append(f"{before} and {name}")
        if np.shape(parameters[name]) != own[name].shape:
            wrong.append(f"{name} {np.shape(parameters[name])}, not {own[name].shape}")
    faults["missing"] = [name for name, p in module.named_parameters() if id(p) not in first]
    faults |= {"wrong shape": wrong, "different values of one tied parameter": twice}
    if kinds := [kind for kind, names in faults.items() if names]:
        got = "; ".join(f"{kind}: {_listed(faults[kind])}" for kind in kinds)
        every = "dict(model.named_parameters()) has all names; {**those, **yours} replaces some"
        hint = every if kinds[0] in ("missing", "unexpected") else HINTS[kinds[0]]
        raise StateError(f"the names and shapes of this {type(module).__name__}", got, hint)
    return {name: asarray(parameters[name]) for name in first.values()}


def _same(a: Any, b: Any) -> bool:
    """Whether two values for one tensor are one: equal arrays are, but not two Tensors, which have gradients each."""
    return a is b or (is_array(a) and is_array(b) and bool((a == b).all()))
