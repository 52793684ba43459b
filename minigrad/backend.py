"""Where arrays live: NumPy on the CPU, CuPy on a GPU, and how to move between them.

The only module that imports CuPy, and only once a GPU is asked for. Everything else writes ``array_module(x).exp(x)``.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol, SupportsIndex, TypeAlias

import numpy as np

from minigrad import captures
from minigrad.errors import DeviceError, DTypeError, OutOfMemoryError

# Arrays as users see them: NumPy's; CuPy's, on a GPU, has the same methods. As functions on arrays see them: NumPy's,
# or CuPy's, which a type checker doesn't know.
NDArray: TypeAlias = "np.ndarray[tuple[Any, ...], np.dtype[Any]]"
Array: TypeAlias = "NDArray | Any"
ArrayLike: TypeAlias = "NDArray | GpuArray | np.generic | float | list[Any] | tuple[Any, ...] | range"
DType: TypeAlias = "str | type[Any] | np.dtype[Any] | None"  # what numpy.dtype() takes
Axes: TypeAlias = "int | tuple[int, ...] | None"
Seed: TypeAlias = "int | Any"  # a number, or the place of one on a GPU
Shape: TypeAlias = "SupportsIndex | Sequence[SupportsIndex]"


class GpuArray(Protocol):
    """An array of CuPy, as a type checker may know it."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Where the numbers lie."""

    def get(self) -> NDArray:
        """The numbers on the CPU."""


loaded: Any = sys.modules.get


def array_module(*arrays: Array) -> ModuleType:
    """The module, ``numpy`` or ``cupy``, whose functions work on ``arrays`` (or Tensors); ``numpy`` for plain numbers.

    >>> array_module(np.ones(3)).__name__
    'numpy'
    """
    cupy = loaded("cupy")
    if cupy is None or not any(isinstance(array_of(a), cupy.ndarray) for a in arrays):
        return np
    return cupy  # type: ignore[no-any-return]


def is_on_gpu(value: Any) -> bool:
    """Whether ``value`` is a ``cupy.ndarray``; all else is of the host, also the numbers that NumPy makes of arrays."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def is_array(value: Any) -> bool:
    """Whether ``value`` is an array of a device: a ``numpy.ndarray`` or a ``cupy.ndarray``, not a number."""
    return isinstance(value, np.ndarray) or is_on_gpu(value)


def array_of(value: Any) -> Any:
    """The array of a Tensor; anything else as it is.

    >>> array_of(2.0)
    2.0
    """
    return getattr(value, "_data", value)


# ---- dtypes ---------------------------------------------------------------------------------------------------------


def is_floating(dtype: Any) -> bool:
    """Whether a NumPy dtype is a real floating-point one, bfloat16 included."""
    return bool(dtype.kind == "f" or is_bfloat16(dtype))


def is_bfloat16(dtype: Any) -> bool:
    """Whether a NumPy dtype is bfloat16, which to NumPy is an unknown kind of two bytes."""
    return bool(dtype.kind == "V" and dtype.name == "bfloat16")


def is_half(dtype: Any) -> bool:
    """Whether a NumPy dtype is float16 or bfloat16. (Its name would tell too, but takes 5 µs to make.)"""
    return bool(dtype.itemsize == 2 and dtype.kind in "fV")


def accumulator(dtype: Any) -> Any:
    """The dtype in which sums over ``dtype`` are formed: float32 for half precision, else ``dtype`` itself.

    >>> accumulator(np.dtype("float16")).name, accumulator(np.dtype("float64")).name
    ('float32', 'float64')
    """
    return np.dtype(np.float32) if is_half(dtype) else dtype


def cast_to(x: Array, dtype: Any) -> Array:
    """``x`` in ``dtype``, itself where it is; what half precision can't hold becomes ∞ or 0, silently.

    >>> cast_to(np.array([1e6]), np.dtype("float16"))
    array([inf], dtype=float16)
    """
    if x.dtype == dtype:
        return x
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(dtype)


def cast_narrow(values: Iterable[Any], dtype: Any) -> tuple[Any, ...]:
    """The floating-point arrays and Tensors of at most float32 among ``values`` in ``dtype``, the others as they are.

    >>> cast_narrow((np.float32([1]), np.float64([1]), 1), np.dtype("float16"))
    (array([1.], dtype=float16), array([1.]), 1)
    """

    def one(value: Any) -> Any:
        narrow = is_array(array_of(value)) and is_floating(value.dtype) and value.dtype.itemsize <= 4
        return value.astype(dtype) if narrow and value.dtype != dtype else value

    return tuple(one(value) for value in values)


def as_dtype(dtype: DType) -> np.dtype[Any]:
    """``dtype`` (a name, a type, a dtype) as a real NumPy dtype; complex and object ones are refused."""
    if dtype == "bfloat16":
        dtype = bfloat16()
    try:
        found: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")  # kernels read bytes
    except (TypeError, ValueError):
        hint = "several lengths go in one tuple: zeros((2, 3))" if isinstance(dtype, int) else "np.float32 does too"
        raise DTypeError("a dtype such as 'float32'", repr(dtype), hint) from None
    if found.kind not in "biuf" and not is_bfloat16(found):
        raise DTypeError("booleans, integers or real floating-point numbers", str(found), complaint(found.kind))
    return found


def complaint(kind: str) -> str:
    """What to do about an array of a dtype that minigrad doesn't take."""
    if kind == "c":
        return "complex numbers are out of scope; keep real and imaginary parts as two tensors"
    return "make a rectangular array of numbers first"


def bfloat16() -> Any:
    """The bfloat16 dtype, which the package ``ml_dtypes`` defines."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise DTypeError("a dtype of NumPy", "bfloat16", "pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


# ---- devices --------------------------------------------------------------------------------------------------------


def load_cupy() -> Any:
    """The module ``cupy``, imported at the first call; a DeviceError that says what is missing where it can't be."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        raise DeviceError("CuPy, which runs the GPU", str(error), "pip install -e '.[cuda]', of minigrad") from error
    except ImportError as error:
        raise DeviceError("a CuPy that can be imported", str(error), f"a library is missing: {_LIBRARIES}") from error
    if cupy.cuda.get_allocator() == cupy.get_default_memory_pool().malloc:  # not one that the user chose
        cupy.cuda.set_allocator(functools.partial(allocate, cupy, cupy.get_default_memory_pool()))
    return cupy


def load_nccl() -> Any:
    """CuPy's module of NCCL; a DeviceError that says how to get the library where it is absent."""
    load_cupy()
    with warnings.catch_warnings():  # CuPy warns where we raise
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    if not nccl.available:
        hint = "pip install nvidia-nccl-cu12 beside CuPy for CUDA 12, nvidia-nccl-cu13 for 13"
        raise DeviceError("NCCL, which exchanges arrays between GPUs", "no libnccl.so.2", hint)
    return nccl


_LIBRARIES = "pip install -e '.[cuda]' brings CUDA's for CUDA 12, '.[cuda13]' for 13"


def allocate(cupy: Any, pool: Any, size: int) -> Any:
    """Memory of a pool of CuPy's, which is tried twice; an error that gives the sizes where it is full again."""
    full = cupy.cuda.memory.OutOfMemoryError
    try:
        return pool.malloc(size)
    except full:
        pool.free_all_blocks()
    try:
        return pool.malloc(size)
    except full:
        free, total = cupy.cuda.Device().mem_info
        held = f"{pool.used_bytes():,} held by arrays, {free:,} of {total:,} free on the device"
        hint = "a smaller batch, or mg.checkpoint"
        raise OutOfMemoryError("room on the GPU", f"{size:,} bytes asked for; {held}", hint) from None


def gpu_count() -> int:
    """The number of GPUs that can be used; 0 where something is missing, which ``check_device`` tells."""
    try:
        return count_gpus()
    except DeviceError:
        return 0


def count_gpus() -> int:
    """The number of GPUs, at least 1; a DeviceError that says what is missing where none can be used."""
    cupy = load_cupy()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:
        raise _without_device(cupy.cuda.runtime, error) from error
    if count:
        _try_out(cupy)
    return count


def _without_device(runtime: Any, error: Exception) -> DeviceError:
    """What keeps CUDA from finding a device: no driver, an old one, or no card."""
    found, needed = (number // 10 for number in (runtime.driverGetVersion(), runtime.runtimeGetVersion()))
    driver, library = (f"{number // 100}.{number % 100}" for number in (found, needed))
    if not found:
        return DeviceError("a driver of NVIDIA", str(error), "install it; nvidia-smi shows it")
    if found // 100 < needed // 100:
        hint = f"update the driver, or install the CuPy of its CUDA: cupy-cuda{found // 100}x"
        return DeviceError(f"a driver for CUDA {library}, of which CuPy is", f"one for {driver}: {error}", hint)
    if found < needed:
        return DeviceError(f"a driver for CUDA {library}", f"one for {driver}: {error}", "update the driver")
    return DeviceError("an NVIDIA GPU", str(error), "nvidia-smi lists them; CUDA_VISIBLE_DEVICES may hide them")


@functools.cache
def _try_out(cupy: Any) -> None:
    """A tiny product and a tiny kernel: they need cuBLAS, NVRTC and CUDA's headers, which CuPy alone doesn't bring."""
    try:
        cupy.matmul(cupy.ones((2, 2), np.float32), cupy.ones((2, 2), np.float32))
        source = 'extern "C" __global__ void nothing(int n) {}'
        cupy.RawModule(code=source).get_function("nothing")((1,), (1,), [np.int32(0)])
    except Exception as error:
        raise DeviceError("a GPU that multiplies and runs a kernel", str(error), _LIBRARIES) from error


@functools.cache
def check_bfloat16(cupy: Any, device: int) -> None:
    """Refuse bfloat16 on a GPU that would emulate its products, and where CuPy can't convert it."""
    capability = str(cupy.cuda.Device(device).compute_capability)
    if int(capability) < 80:
        got, hint = f"{capability[:-1]}.{capability[-1]}, of cuda:{device}", "use float16 and optim.GradScaler"
        raise DeviceError("compute capability 8.0 or more for bfloat16", got, hint)
    if np.lib.NumpyVersion(np.__version__) < "2.1.2":
        raise DeviceError("NumPy 2.1.2 or newer for bfloat16 on a GPU", np.__version__, "update NumPy, or use float16")


def check_device(device: str | None) -> str:
    """``device`` in its full form, ``cpu`` or ``cuda:N``; None is ``cpu``, ``cuda`` the current GPU.

    >>> check_device(None)
    'cpu'
    """
    if device is None or device == "cpu":
        return "cpu"
    kind, _, number = str(device).partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise DeviceError("a device 'cpu', 'cuda' or 'cuda:N'", repr(device), "'cpu' is always there")
    count = count_gpus()
    if int(number or 0) >= count:
        raise DeviceError(f"one of {count} GPUs", repr(device), "use device='cpu'")
    return f"cuda:{int(number) if number else load_cupy().cuda.Device().id}"


def device_of(array: Any) -> str:
    """The device that holds ``array``: ``cpu`` or ``cuda:N``."""
    return f"cuda:{array.device.id}" if is_on_gpu(array) else "cpu"


@contextmanager
def use_device(device: str) -> Iterator[ModuleType]:
    """Make ``device`` the current one for new arrays; gives its array module."""
    if device == "cpu":
        yield np
    else:
        cupy = load_cupy()
        with cupy.cuda.Device(int(device[5:])):
            yield cupy


def to_device(array: Array, device: str) -> Array:
    """``array`` on ``device`` (a full name); the array itself where it is there already.

    To a GPU CuPy copies through a pinned buffer, and nobody waits: the copy is queued on the current stream.
    """
    if device_of(array) == device:
        return array
    if device == "cpu":
        return to_numpy(array)
    with use_device(device) as xp:
        if isinstance(array, np.ndarray) and array.ndim:  # CuPy makes a launch of a number, and an upload of all else
            return captures.uploaded(xp, lambda: array, array)
        return xp.asarray(array)


def made_on(device: str, make: Callable[[], Array], source: Any = None) -> Array:
    """``make()`` on ``device``. A CUDA graph makes it anew at each replay from ``source``; without one it keeps it."""
    if device == "cpu" or is_on_gpu(source):
        return to_device(make(), device)
    with use_device(device) as xp:
        return captures.uploaded_once(xp, make()) if source is None else captures.uploaded(xp, make, source)


def to_device_of(array: Array, other: Array) -> Array:
    """``array``, or an array of the number that it is, on the device of ``other``."""
    return to_device(array if is_array(array) else np.asarray(array), device_of(other))


def to_gpu_of_any(array: Array, others: Iterable[Any]) -> Array:
    """``array``, made of plain numbers, on the GPU of the first of ``others`` that lies on one, else as it is."""
    gpus = filter(is_on_gpu, map(array_of, others))
    return next((to_device(array, device_of(other)) for other in gpus), array)


def as_arrays(*values: Any) -> tuple[Any, ...]:
    """The values, numbers among them as arrays of shape (), in the dtype that NumPy gives them beside the others.

    >>> [x.dtype.name for x in as_arrays(np.float32([1.0]), 2.0)]
    ['float32', 'float32']
    """
    numbers = [isinstance(v, int | float) for v in values]
    if not any(numbers):
        return values
    xp, beside = array_module(*values), [v if n else v.dtype for v, n in zip(values, numbers, strict=True)]
    return tuple(xp.asarray(v, np.result_type(*beside, v)) if n else v for v, n in zip(values, numbers, strict=True))


def to_numpy(array: Any) -> NDArray:
    """``array`` as a NumPy array, copied only from a GPU."""
    return array.get() if is_on_gpu(array) else np.asarray(array)
