"""Numbers that change between the forward and the backward pass: an error, or the right derivative; never another one.

The registry says what to try: each operation, on constants and on leaves, in the first and the second derivative, and
recomputed by a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.cases import DIFFERENTIABLE, Case, over

import minigrad as mg
from minigrad.errors import GraphError

Call = Callable[..., Any]


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    """The arrays in the arguments of a call, in their order."""
    if is_array(value):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(part)


def replaced(value: Any, parts: Iterator[Any]) -> Any:
    """The arguments with ``parts`` in the place of the arrays."""
    if is_array(value):
        return next(parts)
    if isinstance(value, dict):
        return {name: replaced(part, parts) for name, part in value.items()}
    return type(value)(replaced(part, parts) for part in value) if isinstance(value, list | tuple) else value


def other_numbers(array: np.ndarray) -> np.ndarray:
    """Numbers that may stand in the place of ``array``."""
    if array.dtype.kind == "f":
        return array * 0.5 + 0.125
    return np.where(array == array.min(), array.max(), array.min())


def first(call: Call, tensors: list[Any], change: Call) -> list[Any]:
    leaves = [t for t in tensors if t.requires_grad]
    out = call(*tensors)
    change()
    return gradients(out, leaves)


def checkpointed(call: Call, tensors: list[Any], change: Call) -> list[Any]:
    leaves = [t for t in tensors if t.requires_grad]
    results = mg.checkpoint(lambda *_: call(*tensors), *leaves)
    change()
    return gradients(results, leaves)


def second(call: Call, tensors: list[Any], change: Call) -> list[Any]:
    leaves = [t for t in tensors if t.requires_grad]
    upstream = mg.Tensor(0.75, requires_grad=True)
    found = gradients(call(*tensors), leaves, upstream, create=True)
    change()
    found = [g for g in found if g is not None and g.requires_grad]
    return gradients(found, [*leaves, upstream])


def gradients(outs: Any, leaves: list[Any], factor: Any = 1.0, create: bool = False) -> list[Any]:
    """The gradients of a weighted sum of all elements."""
    outs = [out for out in (outs if isinstance(outs, list | tuple) else [outs]) if out.requires_grad]
    if not outs:
        return []
    weights = [np.cos(np.arange(out.size)).reshape(out.shape).astype(out.dtype) for out in outs]
    ups = [mg.asarray(w) * factor for w in weights]
    return list(mg.grad(outs, leaves, ups, create_graph=create, allow_unused=True))


@over(DIFFERENTIABLE)
@pytest.mark.parametrize("way", [first, second, checkpointed])
def test_what_an_operation_was_given_changes(case: Case, way: Call) -> None:
    """Each array in turn, in place: as a constant, and as a leaf where it is of floating-point numbers."""
    args, kwargs = case.inputs()
    given = list(arrays_in((args, kwargs)))

    def call(*tensors: Any) -> Any:
        a, k = replaced((args, kwargs), iter(tensors))
        return case.operation(*a, **k)

    for changed, array in enumerate(given):
        for constant in (True, False):
            leaf = [a.dtype.kind == "f" and not (constant and k == changed) for k, a in enumerate(given)]
            if not any(leaf) or not (constant or leaf[changed]):
                continue
            right = way(call, [mg.Tensor(a, f) for a, f in zip(given, leaf, strict=True)], lambda: None)
            tensors = [mg.Tensor(a, f) for a, f in zip(given, leaf, strict=True)]

            def change(tensor: Any = tensors[changed], array: Any = array) -> None:
                tensor.data[...] = other_numbers(array)
                tensor.bump_version()

            try:
                found = way(call, tensors, change)
            except GraphError as error:
                assert "data changed since" in str(error)
                continue
            for a, b in zip(found, right, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-9, atol=1e-12, err_msg=f"array {changed}")
