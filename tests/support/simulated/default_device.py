"""Makes the simulated GPU the default device, so that tests written for the CPU run on it.

What a test hands to an operation, a layer or a gradient as NumPy's is moved there; what the library hands on is not.
Test code may turn device arrays into NumPy's implicitly, so that it can compare them; the library may not.
"""

from __future__ import annotations

import doctest
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

import minigrad.random
import nn
import nn.functional
import nn.losses
from minigrad.backend import is_half, to_device
from minigrad.engine.core import Primitive, SequencePrimitive
from minigrad.engine.fused import Fused
from minigrad.engine.registry import Composite
from minigrad.instruments import observe
from minigrad.tensor import Tensor
from support.simulated import device

TESTS = tuple(str(Path(__file__).parents[3] / folder) for folder in ("tests", "docs"))
HERE = (str(Path(__file__).parent), str(Path(np.__file__).parent))
HANDING_ON = tuple(
    str(sys.modules[f"minigrad.{name}"].__file__)
    for name in ("engine.core", "messages.explain", "engine.fused", "engine.registry", "tensor", "numpy_protocol")
)
TAKING = ("minigrad.testing", "nn.functional", "nn.losses")  # whose functions are no operations themselves


def called_by_a_test(through: tuple[str, ...] = HERE) -> bool:
    """Whether the nearest frame outside of NumPy and of the simulated device is one of a test, or of its tools."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(through):
        frame = frame.f_back  # type: ignore[assignment]
    name = frame.f_code.co_filename
    return name.startswith((*TESTS, "<doctest")) or any(
        f"{os.sep}{part}{os.sep}" in name for part in ("pytest", "_pytest", "torch")
    )


def moved(value: Any) -> Any:
    """``value`` with the arrays in it on the default device."""
    if isinstance(value, np.ndarray) and (value.dtype.kind in "biuf" or is_half(value.dtype)):
        return to_device(value, "cuda:0")
    return type(value)(map(moved, value)) if type(value) in (list, tuple) else value


def taking(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which gets what a test hands in on the default device."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if called_by_a_test((*HERE, *HANDING_ON)):
            args, kwargs = moved(args), {key: moved(value) for key, value in kwargs.items()}
        return function(*args, **kwargs)

    return call


def make_default() -> None:
    """Install the device, for good, and create arrays on it where no device is named."""
    sys.modules.update(device.modules())
    tensor, creation = sys.modules["minigrad.tensor"], sys.modules["minigrad.creation"]
    plain_as_array, plain_check, plain_operand = tensor.as_array, tensor.check_device, tensor.as_operand

    def as_array(data: Any, dtype: Any, where: Any, copy: bool) -> Any:
        held = getattr(data, "_data", data)
        return plain_as_array(data, dtype, where or (None if isinstance(held, device.ndarray) else "cuda"), copy)

    def check_device(where: Any) -> str:
        return plain_check(where or "cuda")

    def operand(value: Any, what: str) -> Any:
        found = plain_operand(value, what)
        return moved(found) if called_by_a_test((*HERE, *HANDING_ON)) else found

    tensor.as_array = creation.as_array = as_array
    tensor.as_operand = operand
    creation.check_device = minigrad.random.check_device = check_device
    for kind in (Composite, Primitive, SequencePrimitive, Fused, nn.Module):
        kind.__call__ = taking(kind.__call__)  # type: ignore[method-assign]
    for operation in minigrad.REGISTRY.values():
        if isinstance(operation, Fused):
            operation.definition = taking(operation.definition)
    for module in (minigrad, nn.functional, nn.losses):
        for name, value in vars(module).items():
            if isinstance(value, FunctionType) and value.__module__ in TAKING:
                setattr(module, name, taking(value))
    plain_check_output = doctest.OutputChecker.check_output  # the examples print what lies on the CPU
    doctest.OutputChecker.check_output = lambda self, want, got, flags: plain_check_output(
        self, want, got.replace(", device='cuda:0'", ""), flags
    )
    Tensor.grad = Tensor.grad.setter(taking(Tensor.grad.fset))  # type: ignore
    observe.OURS += (HERE[0],)  # whose lines an error does not name
    device.lenient = called_by_a_test
