"""cuBLAS without CuPy, for the one place where CuPy refuses it: inside of a capture.

CuPy takes no product while a stream is captured. cuBLAS does, once it is given a workspace: one that it allocates
itself might be gone at a replay. The library is the one that CuPy has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from minigrad.errors import DeviceError

WORKSPACE = 32 << 20  # bytes: what NVIDIA advises for Hopper, and more than earlier generations need
INT, LONG, POINTER = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
MATRIX = (POINTER, INT, INT, LONG)  # address, type, leading dimension, stride
FUNCTIONS = {
    "cublasCreate_v2": (POINTER,),
    "cublasSetStream_v2": (POINTER, POINTER),
    "cublasSetWorkspace_v2": (POINTER, POINTER, ctypes.c_size_t),
    "cublasGemmStridedBatchedEx": (
        *(POINTER, INT, INT, INT, INT, INT, POINTER),
        *(*MATRIX, *MATRIX, POINTER, *MATRIX),
        *(INT, INT, INT),
    ),
}


@functools.cache
def library(cupy: Any) -> Any:
    """cuBLAS of CuPy's CUDA, each function with the types of its arguments."""
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    name = f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}"
    try:
        found = ctypes.CDLL(name)
        for function, takes in FUNCTIONS.items():
            getattr(found, function).argtypes = takes
    except (OSError, AttributeError) as error:
        raise DeviceError(f"{name}, for products in a CUDA graph", str(error), "pip install -e '.[cuda]'") from error
    return found


@functools.cache
def _handle(cupy: Any, device: int) -> int:
    """A handle of the current device, apart from that of CuPy."""
    handle = ctypes.c_void_p()
    _call(library(cupy), "cublasCreate_v2", ctypes.addressof(handle))
    return handle.value or 0


def _call(found: Any, function: str, *args: Any) -> None:
    status = getattr(found, function)(*args)
    if status:
        raise DeviceError(f"{function} without an error", f"status {status} of cuBLAS", "")


class Products:
    """Products of matrices on one stream, with a workspace that lives as long as this."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._library, self.handle = library(cupy), _handle(cupy, cupy.cuda.runtime.getDevice())
        self._stream, self._workspace = stream, cupy.empty(WORKSPACE, "uint8")

    def begin(self) -> None:
        """Let the handle, which all have, work on this stream, with this workspace."""
        _call(self._library, "cublasSetStream_v2", self.handle, self._stream.ptr)  # which takes the workspace away
        _call(self._library, "cublasSetWorkspace_v2", self.handle, self._workspace.data.ptr, WORKSPACE)

    def gemm(self, *args: Any) -> None:
        """``gemmStridedBatchedEx`` of CuPy."""
        _call(self._library, "cublasGemmStridedBatchedEx", *args)
