"""What there is of GPUs."""

from __future__ import annotations

from minigrad.backend import gpu_count


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
