"""SciPy's modules and CuPy's twins of them, imported at the first use, and the errors where one is absent."""

from __future__ import annotations

import importlib
from typing import Any

from minigrad.errors import DeviceError, MissingPackageError


def scipy_module(part: str = "special", on_gpu: bool = False) -> Any:
    """The module ``scipy.special``, CuPy's, or another ``part`` of SciPy."""
    name, work = f"{'cupyx.' * on_gpu}scipy.{part}", "the special functions" if part == "special" else "this function"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        hint = f"pip install -e '.[{'cuda' if on_gpu else 'scipy'}]' in the folder of minigrad"
        raise MissingPackageError(f"{name}, which computes {work}", str(error), hint) from error


def cupy_lacks(name: str, before: str = "") -> DeviceError:
    """The error for a function that CuPy hasn't, or hasn't ``before`` some version."""
    got = f"an array on a GPU: CuPy has no such function{before}"
    return DeviceError(f"arrays on the CPU for {name}", got, "x.to('cpu')")
