"""What the tests of the layers share: comparison with torch modules that have the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import minigrad as mg
import nn


@pytest.fixture(autouse=True)
def _seed() -> None:
    mg.random.seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _agree(ours: Any, theirs: Any, tolerance: float = 1e-11) -> None:
    """Largest error over largest value (or over 0.01: some gradients are 0 but for rounding)."""
    ours = np.asarray(ours.data if isinstance(ours, mg.Tensor) else ours)
    theirs = theirs.detach().numpy() if isinstance(theirs, torch.Tensor) else np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max(initial=0) <= tolerance * max(np.abs(theirs).max(initial=0), 0.01)


@pytest.fixture
def agree() -> Callable[..., None]:
    return _agree


def _agree_with_torch(ours: nn.Module, theirs: Any, *inputs: Any, **options: Any) -> None:
    """Outputs, and the gradients of the float inputs and all parameters, from the same random gradient of the output.

    ``theirs`` is a torch module with the keys of ours, whose weights are taken over.
    """
    weights = dict(theirs.named_parameters())
    ours.load_state_dict({name: w.detach().numpy() for name, w in weights.items()})
    floats = [x.dtype.kind == "f" for x in inputs]
    xs = [mg.Tensor(x, requires_grad=f) for x, f in zip(inputs, floats, strict=True)]
    ts = [torch.tensor(x, requires_grad=f) for x, f in zip(inputs, floats, strict=True)]
    y, t = ours(*xs, **options), theirs(*ts)
    _agree(y, t)
    upstream = np.random.default_rng(1).standard_normal(t.shape)
    y.backward(upstream)
    t.backward(torch.tensor(upstream))
    for x, tx in zip(xs, ts, strict=True):
        if x.requires_grad:
            _agree(x.grad, tx.grad)
    for name, parameter in ours.named_parameters():
        _agree(parameter.grad, weights[name].grad)


@pytest.fixture
def agree_with_torch() -> Callable[..., None]:
    return _agree_with_torch
