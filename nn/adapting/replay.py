"""Replay: old examples among the new ones, from a reservoir that keeps a fair sample of all that it was shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minigrad import random
from minigrad.backend import Array
from minigrad.errors import ArgumentError, ShapeError, StateError
from minigrad.messages.explain import explained
from ..checks import check_probability, check_sizes


class Reservoir:
    """At most ``capacity`` examples, each that was ever shown being among them with the same chance.

    An example is a row of several arrays, such as inputs and labels. The n-th example takes a place at random with
    probability capacity/n, in the place of one that is there. Vitter, "Random sampling with a reservoir" (1985),
    algorithm R. ``state_dict`` has the examples too.

    - generator: for the places, and for what is drawn

    >>> import nn
    >>> reservoir = nn.Reservoir(3, generator=0)
    >>> reservoir.add(np.arange(10), np.arange(10) ** 2)
    >>> len(reservoir), reservoir.seen
    (3, 10)
    >>> inputs, labels = reservoir.draw(5)
    >>> bool((labels == inputs**2).all())
    True
    """

    @explained
    def __init__(self, capacity: int, generator: Any = None) -> None:
        check_sizes(capacity=capacity)
        self.capacity, self.seen = int(capacity), 0
        self.random = np.random.default_rng(random.generator(generator).integers(1 << 63))
        self.columns: list[Array] = []

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    def add(self, *columns: Any) -> None:
        """Show it examples: arrays of as many rows."""
        arrays = [np.asarray(column) for column in columns]
        if not arrays or not all(a.ndim and len(a) == len(arrays[0]) for a in arrays):
            raise ShapeError("arrays of as many rows", f"shapes {[a.shape for a in arrays]}", "a row is an example")
        if not self.columns:
            self.columns = [np.zeros((self.capacity, *a.shape[1:]), a.dtype) for a in arrays]
        _refuse_others(self.columns, arrays)
        for row in range(len(arrays[0])):
            place = self.seen if self.seen < self.capacity else int(self.random.integers(self.seen + 1))
            self.seen += 1
            if place < self.capacity:
                for kept, array in zip(self.columns, arrays, strict=True):
                    kept[place] = array[row]

    def draw(self, count: int) -> tuple[Array, ...]:
        """So many of the examples, each drawn from all: a batch may have one twice."""
        if not self.seen:
            raise ArgumentError("a reservoir with examples", "an empty one", "reservoir.add(inputs, labels)")
        rows = self.random.integers(len(self), size=count)
        return tuple(column[rows] for column in self.columns)

    @property
    def examples(self) -> tuple[Array, ...]:
        """All that it keeps, as one batch."""
        return tuple(column[: len(self)] for column in self.columns)

    def state_dict(self) -> dict[str, Any]:
        """The examples, how many were seen, and the random numbers."""
        examples = {str(i): column for i, column in enumerate(self.examples)}
        return {"examples": examples, "seen": self.seen, "random": self.random.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        examples, seen = state["examples"], int(state["seen"])
        arrays = [np.asarray(examples[str(i)]) for i in range(len(examples))]
        if any(len(a) != min(seen, self.capacity) for a in arrays):
            got = f"{[len(a) for a in arrays]} of {seen}"
            raise StateError(f"the examples of a reservoir of capacity {self.capacity}", got, "it must be as large")
        self.random.bit_generator.state = state["random"]
        self.seen, self.columns = seen, []
        for array in arrays:
            column = np.zeros((self.capacity, *array.shape[1:]), array.dtype)
            column[: len(array)] = array
            self.columns.append(column)


def _refuse_others(columns: list[Array], arrays: list[Array]) -> None:
    """Refuse rows of another form than those of the reservoir's columns."""
    own, given = ([(a.shape[1:], a.dtype.name) for a in several] for several in (columns, arrays))
    if own != given:
        raise ShapeError(f"rows as those in the reservoir, {own}", f"{given}", "a reservoir has one kind of rows")


class Replay:
    """Batches in which each row is, with probability ``share``, an example of the reservoir in the place of a new one.

    ``batches`` has ``draw()``, which gives arrays of as many rows. A batch stays as large as it was, so an update costs
    the same. ``state_dict`` is that of ``batches`` (if it has one), of the reservoir and of the choices: a run that
    goes on draws the same batches.

    >>> import nn
    >>> class Ones:
    ...     def draw(self):
    ...         return np.ones(4, int), np.ones(4, int)
    >>> old = nn.Reservoir(2, generator=0)
    >>> old.add(np.zeros(2, int), np.zeros(2, int))
    >>> nn.Replay(Ones(), old, share=1.0).draw()
    (array([0, 0, 0, 0]), array([0, 0, 0, 0]))
    """

    @explained
    def __init__(self, batches: Any, reservoir: Reservoir, share: float) -> None:
        self.batches, self.reservoir, self.share = batches, reservoir, check_probability(share)

    def draw(self) -> tuple[Array, ...]:
        """The next batch."""
        new = [np.array(column) for column in self.batches.draw()]
        old = np.flatnonzero(self.reservoir.random.random(len(new[0])) < self.share)
        if len(old):
            _refuse_others(self.reservoir.columns or new, new)
            for column, rows in zip(new, self.reservoir.draw(len(old)), strict=True):
                column[old] = rows
        return tuple(new)

    def state_dict(self) -> dict[str, Any]:
        """The state of the reservoir, and that of the batches as ``new``."""
        return {**self.reservoir.state_dict(), "new": self.batches.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.reservoir.load_state_dict(state)
        self.batches.load_state_dict(state["new"])
