"""cuBLAS of the simulated GPU: the one function that minigrad calls itself, on pointers, as strict as the real one."""

from __future__ import annotations

import ctypes
import re
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np

from minigrad.backend import as_dtype
from support.simulated import streams

HANDLE = 0xB1A5  # of the current device
alive: dict[int, tuple[Any, int, int, int]] = {}  # arrays, the first and last address of their memory, its device
launched: Any = lambda *what: None  # which ``device`` sets, to count it
calls: list[dict[str, Any]] = []  # the arguments of each call, by their names
TYPES = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}  # cudaDataType_t
COMPUTE = {0: (68, 77), 1: (70,), 2: (68,), 14: (68,)}  # the cublasComputeType_t that go with each


class CUBLASError(RuntimeError):
    """Raised where the real library gives a status other than success."""


def note(array: Any, device: int) -> None:
    """Let the memory of an array be read as long as it lives."""
    key, (low, high) = id(array), np.lib.array_utils.byte_bounds(array)
    alive[key] = weakref.ref(array, lambda _: alive.pop(key, None)), low, high, device


def check(condition: bool, what: str) -> None:
    if not condition:
        raise CUBLASError(f"CUBLAS_STATUS_INVALID_VALUE: {what}")


def to_tf32(x: Any) -> Any:
    """float32 numbers rounded to 10 bits behind the point."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x0FFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


def matrices(pointer: int, dtype: Any, rows: int, columns: int, ld: int, stride: int, batch: int, name: str) -> Any:
    """A batch of matrices (batch, rows, columns), each column by column, in the memory at a pointer."""
    check(ld >= max(1, rows), f"ld of {name} is {ld}, for {rows} rows")
    length = (batch - 1) * stride + (columns - 1) * ld + rows
    first, last = pointer, pointer + length * dtype.itemsize
    if not any(low <= first and last <= high for _, low, high, _ in list(alive.values())):
        raise CUBLASError(f"an illegal memory access: {name} at {pointer:#x}, {length} numbers of {dtype}")
    check(pointer % dtype.itemsize == 0, f"{name} is not aligned")
    memory = np.frombuffer((ctypes.c_char * (length * dtype.itemsize)).from_address(pointer), dtype)
    steps = (stride * dtype.itemsize, dtype.itemsize, ld * dtype.itemsize)
    return np.lib.stride_tricks.as_strided(memory, (batch, rows, columns), steps)


def gemmStridedBatchedEx(*args: Any) -> None:
    """gemmStridedBatchedEx(intptr_t handle, int transa, int transb, int m, int n, int k, size_t alpha, size_t A, int Atype, int lda, long long strideA, size_t B, int Btype, int ldb, long long strideB, size_t beta, size_t C, int Ctype, int ldc, long long strideC, int batchCount, int computeType, int algo)"""  # noqa: E501
    refuse_capture()
    multiply(*args)


def refuse_capture() -> None:
    """CuPy hands nothing to cuBLAS while the current stream is captured."""
    if streams.recording():
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")


def multiply(*args: Any) -> None:
    """The product of a call, checked."""
    assert len(args) == len(NAMES) and all(type(arg) is int for arg in args)
    shown = args
    if at_work := streams.recording():
        pointers = {NAMES.index(name) for name in ("A", "B", "C")}
        shown = tuple(at_work.place(arg) if k in pointers else arg for k, arg in enumerate(args))
    launched("gemm", *shown)
    calls.append(dict(zip(NAMES, args, strict=True)))
    a = SimpleNamespace(**calls[-1])
    check(a.handle == HANDLE, "handle")
    check(a.transa in (0, 1) and a.transb in (0, 1), "transposition")
    check(min(a.m, a.n, a.k, a.batchCount) >= 1, "sizes")
    check(max(abs(x) for x in (a.m, a.n, a.k, a.lda, a.ldb, a.ldc, a.batchCount)) < 1 << 31, "an int")
    check(a.Atype == a.Btype and a.Ctype in (a.Atype, 0) and a.computeType in COMPUTE[a.Atype], "types")
    check(a.Ctype == a.Atype or a.Atype != 1, "types")
    check(a.algo in (-1, 99), "algorithm")
    check(min(a.strideA, a.strideB) >= 0, "strides")
    check(a.batchCount == 1 or a.strideC >= a.ldc * (a.n - 1) + a.m, "results that overlap")
    dtype = as_dtype(TYPES[a.Atype])
    wide = ctypes.c_double if a.Atype == 1 else ctypes.c_float
    alpha, beta = (wide.from_address(pointer).value for pointer in (a.alpha, a.beta))
    check(alpha == 1 and beta in (0, 1), f"alpha and beta are {alpha} and {beta}")
    sizes = (a.k, a.m) if a.transa else (a.m, a.k), (a.n, a.k) if a.transb else (a.k, a.n)
    left = matrices(a.A, dtype, *sizes[0], a.lda, a.strideA, a.batchCount, "A")
    right = matrices(a.B, dtype, *sizes[1], a.ldb, a.strideB, a.batchCount, "B")
    result = as_dtype(TYPES[a.Ctype])
    out = matrices(a.C, result, a.m, a.n, a.ldc, a.strideC, a.batchCount, "C")
    left, right = (x.swapaxes(1, 2) if turned else x for x, turned in ((left, a.transa), (right, a.transb)))

    def effect() -> None:
        x, y = (side.swapaxes(1, 2) for side in (right, left))  # rows as NumPy has them: the bits are ``product``'s
        x, y = (side[0] for side in (x, y)) if a.batchCount == 1 else (x, y)
        x, y = (side.astype(np.float64 if a.Atype == 1 else np.float32, copy=a.Atype > 1) for side in (x, y))
        if a.computeType == 77:
            x, y = to_tf32(x), to_tf32(y)
        with np.errstate(all="ignore"):
            found = x @ y
            rows = out.swapaxes(1, 2)
            rows[...] = (found + (rows.astype(found.dtype) if beta else 0)).astype(result)

    streams.perform(effect)


class Library:
    """cuBLAS itself, as ctypes has it, with the functions that are called inside of a capture."""

    def __init__(self) -> None:
        self.stream, self.workspace = 0, (0, 0)

    def cublasCreate_v2(self, handle: int) -> int:
        ctypes.c_void_p.from_address(handle).value = HANDLE
        return 0

    def cublasSetStream_v2(self, handle: int, stream: int) -> int:
        self.stream, self.workspace = stream, (0, 0)
        return 0 if handle == HANDLE else 1

    def cublasSetWorkspace_v2(self, handle: int, pointer: int, size: int) -> int:
        self.workspace = pointer, size
        return 0 if handle == HANDLE and pointer % 16 == 0 else 7

    def cublasGemmStridedBatchedEx(self, *args: Any) -> int:
        if streams.get_current_stream().ptr != self.stream or not self.workspace[1]:
            return 1
        multiply(*args)
        return 0


NAMES = re.findall(r"(\w+)[,)]", gemmStridedBatchedEx.__doc__ or "")


class Products:
    """How float32 is multiplied, as CuPy's ``_core._routines_linalg`` keeps it."""

    COMPUTE_TYPE_DEFAULT, COMPUTE_TYPE_TF32 = 1, 7
    chosen = COMPUTE_TYPE_DEFAULT

    @classmethod
    def get_compute_type(cls, dtype: Any) -> int:
        return cls.chosen if np.dtype(dtype) == np.float32 else cls.COMPUTE_TYPE_DEFAULT

    @classmethod
    def set_compute_type(cls, dtype: Any, compute_type: int) -> None:
        assert np.dtype(dtype) == np.float32
        cls.chosen = compute_type


def product(x: Any, y: Any, out: Any = None) -> Any:
    """What ``cupy.matmul`` makes of x and y: with TF32 for matrices alone, and half precision summed in float32."""
    dtype = np.result_type(x, y)
    if dtype.itemsize > 2 or dtype.kind in "iu":
        rounds = Products.chosen == Products.COMPUTE_TYPE_TF32 and dtype == np.float32 and max(x.ndim, y.ndim) <= 2
        return np.matmul(*((to_tf32(a) if rounds else a) for a in (x, y)), out=out)
    return np.matmul(x.astype(np.float32), y.astype(np.float32)).astype(dtype)
