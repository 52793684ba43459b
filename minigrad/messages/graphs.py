"""What the engine says of a graph that can't be differentiated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minigrad.errors import GraphError


def freed(operation: str) -> GraphError:
    """A node whose residuals are gone."""
    got = f"a second backward pass through {operation!r}, freed by the first"
    hint = "call backward(retain_graph=True) the first time, or run the forward pass again"
    return GraphError("a graph that still holds what its derivatives read", got, hint)


def changed(what: str, operation: str, then: int, now: int) -> GraphError:
    """A residual whose numbers are of another version."""
    hint = "run backward before the optimizer step, load_state_dict or assignment to .data"
    got = f"data changed since (version {now}, recorded at {then})"
    return GraphError(f"{what} as it was in the forward pass of {operation!r}", got, hint)


def refuse_lost(primitive: Any, positions: Iterable[int]) -> None:
    """Refuse recorded tensors for arguments without a rule: their derivative would be lost in silence.

    It is declared to be 0 where ``defvjp`` gave None, and where a primitive has no rules at all. A tensor as a shape is
    left to the function, which says what belongs there.
    """
    shapes = [name for name, parameter in primitive.parameters.items() if "Shape" in str(parameter.annotation)]
    lost = {primitive.names[i] for i in positions}.difference(getattr(primitive, "constants", ()), shapes)
    if lost and primitive.rules:
        hint = ".detach() gives its numbers; where its derivative matters, compute with operations that have it"
        got = f"a recorded tensor for {min(lost)!r}, by which it has none"
        raise GraphError(f"arguments by which {primitive.label!r} has a derivative", got, hint)
