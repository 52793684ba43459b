"""Makes the simulated GPU the default device, so that tests written for the CPU run on it.

Test code may turn device arrays into NumPy's implicitly, so that it can compare them; the library may not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import minigrad.random
from simulated import device

TESTS = Path(__file__).parent.parent
HERE = (str(Path(__file__).parent), str(Path(np.__file__).parent))


def called_by_a_test() -> bool:
    """Whether the nearest frame outside of NumPy and of the simulated device is one of a test, or of its tools."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back  # type: ignore[assignment]
    name = frame.f_code.co_filename
    return name.startswith(str(TESTS)) or "pytest" in name or "torch" in name


def make_default() -> None:
    """Install the device, for good, and create arrays on it where no device is named."""
    sys.modules["cupy"] = device.cupy
    tensor, creation = sys.modules["minigrad.tensor"], sys.modules["minigrad.creation"]
    plain_as_array, plain_check = tensor.as_array, tensor.check_device

    def as_array(data: Any, dtype: Any, where: Any, copy: bool) -> Any:
        held = getattr(data, "_data", data)
        return plain_as_array(data, dtype, where or (None if isinstance(held, device.ndarray) else "cuda"), copy)

    def check_device(where: Any) -> str:
        return plain_check(where or "cuda")

    tensor.as_array = creation.as_array = as_array
    creation.check_device = minigrad.random.check_device = check_device
    device.lenient = called_by_a_test
