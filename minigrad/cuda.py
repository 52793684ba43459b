"""GPUs: how many there are, which one is current, and how exact their products are."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from minigrad.backend import check_device, gpu_count, load_cupy, use_device


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
