"""GPUs: how many there are, which one is current, and how exact their products are."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import numpy as np

from minigrad.backend import check_device, gpu_count, load_cupy, use_device
from minigrad.cuda_graphs import Graph

_P = ParamSpec("_P")
_T = TypeVar("_T")


def is_available() -> bool:
    """Whether a GPU can be used: CuPy is installed, a driver runs, and a device answers.

    >>> is_available() == (device_count() > 0)
    True
    """
    return gpu_count() > 0


def device_count() -> int:
    """The number of GPUs: 0 where CuPy, a driver or a device is missing.

    >>> device_count() >= 0
    True
    """
    return gpu_count()


def device(number: int) -> AbstractContextManager[Any]:
    """A ``with`` block in which GPU ``number`` is the current one: ``cuda`` means it, and operations run there.

    Operations take arrays of the current GPU. One process for each GPU is the simplest way to use several.
    """
    return use_device(check_device(f"cuda:{number}"))


def graph(step: Callable[_P, _T]) -> Graph[_P, _T]:
    """``step`` as a CUDA graph: captured once, then replayed by one call, so that the GPU doesn't wait for Python.

    ::

        @mg.cuda.graph
        def step(ids, targets):
            loss = model.loss(ids, targets)
            loss.backward()
            optim.clip_grad_norm(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for ids, targets in batches:      # NumPy arrays
            optimizer.param_groups[0]["lr"] = ...
            loss = step(ids, targets)

    The first call runs the step as it is, the second captures it, the others replay it: the same results, bit for bit
    where cuBLAS takes the same way. At each replay ids are checked and counted, and learning rates, step counts and the
    seeds of dropout are what an ordinary step would have. Python's own work in the step is not repeated.

    - arguments: arrays and Tensors, whose numbers may change, also in lists, tuples and dicts; floats, which the step
      gets as float32 arrays of shape (); all else stays as it was
    - results: Tensors and arrays of the GPU, as copies
    - optimizers: Adam and AdamW, by their kernel, with or without a GradScaler

    A DeviceError names the line of what can't be captured: what waits for the device (``item()``, ``print``), an
    upload of anything but an argument or a part of it, products of CuPy's own. The stream can be used on after it; call
    ``zero_grad()``. Another shape than at first is a ShapeError (``step.takes(...)`` tells, ``step.function(...)`` runs
    without the graph), weights that were replaced are a GraphError. ``zero_grad()`` belongs into the step.

    >>> @graph
    ... def double(x):
    ...     return x + x
    >>> double(np.ones(2)).tolist(), double.captured
    ([2.0, 2.0], False)
    """
    return Graph(step)


def synchronize() -> None:
    """Wait until the current GPU has finished its work."""
    load_cupy().cuda.Device().synchronize()


def allow_tf32(allow: bool = True) -> None:
    """Let float32 products round their factors to 10 bits: several times as fast, exact to 3 decimals.

    The default is the environment variable CUPY_TF32, which is usually off.
    """
    os.environ["CUPY_TF32"] = str(int(allow))  # read by CuPy at its first product, if that is still to come
    if is_available():
        products = load_cupy()._core._routines_linalg
        products.set_compute_type(np.float32, products.COMPUTE_TYPE_TF32 if allow else products.COMPUTE_TYPE_DEFAULT)


def tf32_allowed() -> bool:
    """Whether float32 products on a GPU may round their factors to 10 bits."""
    products = load_cupy()._core._routines_linalg
    return bool(products.get_compute_type(np.float32) == products.COMPUTE_TYPE_TF32)
