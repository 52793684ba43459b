"""A module that stands in for ``cupy``: arrays on a simulated GPU, refusing what CuPy refuses.

The numbers lie in the host's memory and NumPy computes with them, but through an array class of its own:

- no implicit conversion to NumPy, no mixing with NumPy's arrays, nor with those of another device;
- only names and keyword arguments that CuPy has (``test_simulated.py`` compares them with the installed package);
- an index out of range wraps silently;
- whatever waits for the device on real hardware is counted in ``synchronisations``.

``installed()`` puts the module in the place of CuPy. Raw kernels run through ``simulated.kernels``.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import minigrad.machine.cublas as raw
from minigrad.messages import explain
from support.simulated import cublas, kernels, nccl, streams
from support.simulated.streams import computed, perform

DEVICES = 2
# fmt: off
UFUNCS = {
    "abs", "add", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "cbrt", "ceil",
    "copysign", "cos", "cosh", "divide", "exp", "exp2", "expm1", "floor", "fmax", "fmin", "fmod", "hypot", "isfinite",
    "isinf", "isnan", "ldexp", "log", "log10", "log1p", "log2", "logaddexp", "logaddexp2", "maximum", "minimum",
    "multiply", "negative", "power", "remainder", "rint", "sign", "sin", "sinh", "sqrt", "square", "subtract", "tan",
    "tanh", "trunc", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "equal", "not_equal", "less",
    "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_not", "logical_xor",
    "invert", "left_shift", "right_shift", "floor_divide", "true_divide", "absolute", "positive",
}
# fmt: on
# Functions of arrays, and the arguments that CuPy's take: fewer than NumPy's.
FUNCTIONS = {
    "all": "a axis out keepdims",
    "any": "a axis out keepdims",
    "allclose": "a b rtol atol equal_nan",
    "argmax": "a axis dtype out keepdims",
    "argmin": "a axis dtype out keepdims",
    "argpartition": "a kth axis",
    "argsort": "a axis kind",
    "array_equal": "a1 a2 equal_nan",
    "bincount": "x weights minlength",
    "broadcast_arrays": "",
    "broadcast_to": "array shape",
    "clip": "a a_min a_max out",
    "concatenate": "tup axis out dtype casting",
    "copyto": "dst src casting where",
    "cumprod": "a axis dtype out",
    "cumsum": "a axis dtype out",
    "einsum": "optimize dtype",
    "empty_like": "prototype dtype order subok shape",
    "expand_dims": "a axis",
    "flip": "a axis",
    "frexp": "x",
    "full_like": "a fill_value dtype order subok shape",
    "matmul": "casting dtype out",
    "ndim": "a",
    "shape": "a",
    "size": "a axis",
    "max": "a axis out keepdims",
    "mean": "a axis dtype out keepdims",
    "min": "a axis out keepdims",
    "moveaxis": "a source destination",
    "nan_to_num": "x copy nan posinf neginf",
    "ones_like": "a dtype order subok shape",
    "pad": "array pad_width mode constant_values",
    "prod": "a axis dtype out keepdims",
    "ravel": "a order",
    "repeat": "a repeats axis",
    "reshape": "a newshape order",
    "round": "a decimals out",
    "searchsorted": "a v side sorter",
    "sort": "a axis kind",
    "squeeze": "a axis",
    "stack": "tup axis out dtype casting",
    "sum": "a axis dtype out keepdims",
    "take": "a indices axis out",
    "transpose": "a axes",
    "unwrap": "p discont axis period",
    "var": "a axis dtype out ddof keepdims",
    "where": "condition x y",
    "zeros_like": "a dtype order subok shape",
}
CREATORS = {
    "arange": "start stop step dtype",
    "empty": "shape dtype order",
    "eye": "N M k dtype order",
    "linspace": "start stop num endpoint retstep dtype axis",
    "full": "shape fill_value dtype order",
    "ones": "shape dtype order",
    "tri": "N M k dtype",
    "zeros": "shape dtype order",
}
LINALG = {
    "cholesky": "a",
    "det": "a",
    "eigh": "a UPLO",
    "eigvalsh": "a UPLO",
    "inv": "a",
    "qr": "a mode",
    "slogdet": "a",
    "solve": "a b",
    "svd": "a full_matrices compute_uv",
}
OTHERS = ["array", "asarray", "ascontiguousarray", "asnumpy", "cuda", "from_dlpack", "may_share_memory", "ndarray",
          "result_type", "RawModule", "get_default_memory_pool"]  # fmt: skip
SILENT = {
    *("broadcast_arrays", "broadcast_to", "empty", "empty_like", "expand_dims", "moveaxis", "ndim", "ravel", "reshape"),
    *("shape", "size", "squeeze", "transpose"),
}  # launch nothing
WAITING = {"allclose", "array_equal", "bincount"}  # give a Python bool, or need a number of the device


class State:
    """What the simulated driver knows."""

    current = 0  # the device
    synchronisations = 0
    freed = 0  # how often the pool was asked to give back what it does not use
    limit: int | None = None  # bytes that one allocation may ask for
    launches: Counter[str] = Counter()  # noqa: RUF012 (of kernels, by what they do; uploads are among them)


state = State()


def wait() -> None:
    """The host waits for the device, which a stream that is captured refuses."""
    if at_work := streams.recording():
        at_work.refuse()
    state.synchronisations += 1


def launch(what: str, *operands: Any) -> None:
    """A kernel is launched, or an array is uploaded."""
    state.launches[what] += 1
    if at_work := streams.recording():
        at_work.log.append((what, *map(at_work.shown, operands)))


def freed() -> None:
    state.freed += 1


cublas.launched = streams.launched = launch
streams.waited, streams.freed, streams.limit = wait, freed, lambda: state.limit


def lenient() -> bool:
    """Whether the caller may do what CuPy refuses; ``default_device`` allows it to tests."""
    return False


def host(value: Any) -> Any:
    """What NumPy computes with in place of an argument; arrays of the host and of other devices are refused."""
    if isinstance(value, ndarray):
        if value.device.id != state.current:
            raise ValueError(f"the array's device {value.device.id} is not the current device {state.current}")
        return value._host
    if isinstance(value, np.ndarray) and not lenient():
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, list | tuple):
        return type(value)(host(part) for part in value)
    return value


def device(value: Any) -> Any:
    """A result of NumPy's as an array of the current device."""
    if isinstance(value, np.ndarray | np.generic):
        return ndarray._of(np.asarray(value))
    if isinstance(value, list | tuple):
        return type(value)(device(part) for part in value)
    return value


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    hosts, named = [host(a) for a in args], {key: host(value) for key, value in kwargs.items()}
    return computed(lambda: function(*hosts, **named), *_arrays_in([*hosts, *named.values()]))


def _arrays_in(values: Any) -> list[Any]:
    return [a for value in values for a in (_arrays_in(value) if isinstance(value, list | tuple) else (value,))]


def _change(function: Any, *hosts: Any, **named: Any) -> None:
    """Call a function that writes to arrays, with what NumPy computes with in their places."""

    def effect() -> None:
        with np.errstate(all="ignore"):
            function(*hosts, **named)

    perform(effect)


class ndarray:
    """An array of the simulated device."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("make arrays with functions of the module")

    @classmethod
    def _of(cls, array: Any, owner: Any = None) -> ndarray:
        made = object.__new__(cls)
        at_work = streams.recording()
        if owner is None and (at_work or (state.limit is not None and array.nbytes > state.limit)):
            pool = streams.allocators[0](array.nbytes)
            if at_work:
                at_work.allocated(array, pool)
                weakref.finalize(made, pool._freed.append, array.nbytes)
        made._host, made._device, made.base = array, state.current, owner
        cublas.note(array, made._device)
        return made

    # what it is
    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    itemsize = property(lambda self: self._host.itemsize)
    nbytes = property(lambda self: self._host.nbytes)
    strides = property(lambda self: self._host.strides)
    device = property(lambda self: Device(self._device))
    T = property(lambda self: self._view(self._host.T))
    data = property(lambda self: types.SimpleNamespace(ptr=self._host.ctypes.data, device_id=self._device))

    @property
    def flags(self) -> Any:
        flags = self._host.flags
        extra = {"writeable": flags.writeable} if lenient() else {}
        return types.SimpleNamespace(
            c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous, owndata=self.base is None, **extra
        )

    def _view(self, array: Any) -> ndarray:
        """A result that may share the memory of this array."""
        shares = array.size and np.may_share_memory(array, self._host)
        return ndarray._of(array, (self if self.base is None else self.base) if shares else None)

    # what waits for the device
    def get(self) -> Any:
        wait()
        return self._host.copy()

    def item(self) -> Any:
        wait()
        return self._host.item()

    def tobytes(self, order: str = "C") -> bytes:
        return bytes(self.get().tobytes(order))

    def tolist(self) -> Any:
        wait()
        return self._host.tolist()

    def __bool__(self) -> bool:
        wait()
        return bool(self._host)

    def __float__(self) -> float:
        wait()
        return float(self._host)

    def __int__(self) -> int:
        wait()
        return int(self._host)

    def __repr__(self) -> str:
        return repr(self.get())

    def __str__(self) -> str:
        return str(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    # what is refused
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if not lenient():
            raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")
        return np.array(self._host, dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or ufunc.__name__ not in UFUNCS:
            return NotImplemented
        return getattr(cupy, ufunc.__name__)(*inputs, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        twin = getattr(cupy, function.__name__, None)
        if lenient():
            return _call(function, args, kwargs)
        return NotImplemented if twin is None else twin(*args, **kwargs)

    # places
    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, index: Any) -> ndarray:
        at = host(_indices(index))
        read = lambda: np.asarray(self._host[_wrapped(at, self.shape)])
        found = self._view(computed(read, self._host))
        if found.base is None and found.size:
            launch("getitem", self, at)
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        at, new = host(_indices(index)), host(value)
        launch("setitem", self, at, new)

        def write(target: Any, at: Any, new: Any) -> None:
            target[_wrapped(at, target.shape)] = new

        _change(write, self._host, at, new)

    # other arrays of the same numbers
    def astype(self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True) -> Any:
        if not copy and self.dtype == dtype:
            return self
        launch("astype", self, np.dtype(dtype))
        return device(_call(lambda x: x.astype(dtype, order), (self,), {}))

    def copy(self, order: str = "C") -> ndarray:
        launch("copy", self)
        return ndarray._of(computed(lambda: self._host.copy(order)))

    def fill(self, value: Any) -> None:
        launch("fill", self, value)
        _change(lambda target, value: target.fill(value), self._host, host(value))

    def view(self, dtype: Any) -> ndarray:
        return self._view(self._host.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        found = self._view(computed(lambda: self._host.reshape(*shape), self._host))
        if found.base is None and found.size:
            launch("copy")
        return found

    def transpose(self, *axes: Any) -> ndarray:
        return self._view(self._host.transpose(*axes))

    def swapaxes(self, a: int, b: int) -> ndarray:
        return self._view(self._host.swapaxes(a, b))

    def ravel(self) -> ndarray:
        return self._view(computed(self._host.ravel, self._host))

    def squeeze(self, axis: Any = None) -> ndarray:
        return self._view(self._host.squeeze(axis))

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        return self._host.__dlpack__(max_version=max_version) if max_version else self._host.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._device)

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()


def _indices(index: Any) -> Any:
    """An index; CuPy copies lists and the host's integer arrays in it to the device."""
    if isinstance(index, tuple):
        return tuple(_indices(part) for part in index)
    return device(np.asarray(index)) if isinstance(index, list | np.ndarray) else index


def _wrapped(index: Any, shape: Any) -> Any:
    """An index whose integer arrays wrap around their axes, as on a GPU."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, np.ndarray) and part.dtype == bool for part in parts):
        wait()  # for the number of results
    used = sum(part.ndim if isinstance(part, np.ndarray) and part.dtype == bool else 1
               for part in parts if part is not None and part is not ...)  # fmt: skip
    result, axis = [], 0
    for part in parts:
        if isinstance(part, np.ndarray) and part.dtype.kind in "iu" and part.size and shape[axis]:
            part = part.astype(np.int64) % shape[axis]
        result.append(part)
        if part is ...:
            axis += len(shape) - used
        elif part is not None:
            axis += part.ndim if isinstance(part, np.ndarray) and part.dtype == bool else 1
    return tuple(result)


def _function(name: str, allowed: set[str]) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        unknown = kwargs.keys() - allowed
        if unknown and not lenient():
            raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")
        if name in WAITING:
            wait()
        if name not in SILENT:
            launch(name, args, tuple(kwargs.items()))
        out = kwargs.pop("out", None)
        if name == "matmul":
            cublas.refuse_capture()
        run = cublas.product if name == "matmul" else getattr(np, name)
        if out is not None or name == "copyto":
            named = {key: host(value) for key, value in (kwargs | ({} if out is None else {"out": out})).items()}
            _change(run, *map(host, args), **named)
            return out
        if name.startswith("empty"):  # nothing is written
            return device(run(*map(host, args), **{key: host(value) for key, value in kwargs.items()}))
        result = _call(run, args, kwargs)
        views = next((a for a in args if isinstance(a, ndarray)), None)
        if isinstance(result, np.ndarray) and views is not None:
            return views._view(result)
        return device(result)

    function.__name__ = name
    return function


def _solver(name: str, allowed: set[str]) -> Any:
    """A function of ``linalg``. Unlike NumPy's, none broadcasts stacks, nor takes float16."""

    def function(*args: Any, **kwargs: Any) -> Any:
        unknown = kwargs.keys() - allowed
        if unknown:
            raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")
        if name == "solve" and args[0].shape[:-1] != args[1].shape[:-1]:
            raise ValueError("a must have (..., M, M) shape and b must have (..., M) or (..., M, K)")
        wait()  # for what cuSOLVER reports
        result = _call(getattr(np.linalg, name), args, kwargs)
        return device(tuple(result) if isinstance(result, tuple) else result)

    function.__name__ = name
    return function


def _method(name: str) -> Any:
    def method(self: ndarray, *args: Any, **kwargs: Any) -> Any:
        return getattr(cupy, name)(self, *args, **kwargs)

    return method


def _operator(name: str) -> Any:
    def operate(self: ndarray, *others: Any) -> Any:
        if any(type(other).__module__.startswith("minigrad") or hasattr(other, "_requires_grad") for other in others):
            return NotImplemented
        if plain != "matmul":
            launch(plain, self, others)
        result = _call(lambda x, *y: getattr(x, name)(*y), (self, *others), {})
        return result if result is NotImplemented else device(result)

    def in_place(self: ndarray, other: Any) -> Any:
        launch(plain, self, other)
        _change(lambda x, y: getattr(x, name)(y), host(self), host(other))
        return self

    plain = name.strip("_")
    if plain == "matmul":
        return lambda self, other: cupy.matmul(self, other)
    return in_place if plain.startswith("i") and plain not in ("invert",) else operate


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
for _name in [*BINARY, *(f"r{n}" for n in BINARY), *(f"i{n}" for n in BINARY if n != "matmul"),
              "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert"]:  # fmt: skip
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("all", "any", "argmax", "argmin", "argsort", "clip", "cumsum", "max", "mean", "min", "prod", "repeat",
              "round", "sum", "take", "var"):  # fmt: skip
    setattr(ndarray, _name, _method(_name))


class Ufunc:
    """A universal function: like NumPy's without ``where``; add, maximum and minimum have ``at``."""

    def __init__(self, name: str) -> None:
        self.name = self.__name__ = name
        self._run = _function(name, {"out", "casting", "dtype"})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def at(self, a: ndarray, index: Any, values: Any) -> None:
        """Unbuffered; with the dtypes for which there are atomic operations."""
        if self.name not in ("add", "maximum", "minimum") or a.dtype not in (np.float32, np.float64, np.int32,
                                                                            np.int64, np.uint64):  # fmt: skip
            raise TypeError(f"no {self.name}.at for {a.dtype}")
        run, at, new = getattr(np, self.name).at, host(_indices(index)), host(values)
        _change(lambda target: run(target, _wrapped(at, target.shape), new), a._host)


# ---- memory and devices ---------------------------------------------------------------------------------------------


def set_allocator(function: Any = None) -> None:
    """What allocates from now on."""
    streams.allocators[0] = function or streams.pool.malloc


class Device:
    """A simulated GPU, and a ``with`` block in which it is the current one."""

    def __init__(self, number: int | None = None) -> None:
        self.id = state.current if number is None else number
        self._before: list[int] = []

    compute_capability, cublas_handle = "90", cublas.HANDLE
    attributes = {"MultiProcessorCount": 2}  # noqa: RUF012
    mem_info = (1 << 30, 2 << 30)

    def __enter__(self) -> Device:
        self._before.append(state.current)
        state.current = self.id
        return self

    def __exit__(self, *_: object) -> None:
        state.current = self._before.pop()

    def use(self) -> None:
        state.current = self.id

    @property
    def pci_bus_id(self) -> str:
        return f"0000:0{self.id}:00.0"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def synchronize(self) -> None:
        wait()


def array(obj: Any, dtype: Any = None, copy: bool = True, order: str = "K") -> ndarray:
    """A new array of the current device, from one of any device or of the host."""
    if isinstance(obj, list | tuple) and any(isinstance(part, ndarray) for part in obj):
        obj = [part._host for part in obj]
    launch("copy" if isinstance(obj, ndarray) else "upload", obj if isinstance(obj, ndarray) else None)
    if not isinstance(obj, ndarray) and np.ndim(obj):
        streams.alloc_pinned_memory(np.asarray(obj).nbytes)
    found = computed(lambda: np.array(obj._host if isinstance(obj, ndarray) else obj, dtype=dtype, order=order))
    if found.dtype.kind not in "biuf" and found.dtype.name != "bfloat16":
        raise ValueError(f"Unsupported dtype {found.dtype}")
    return ndarray._of(found)


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    """The array itself where device and dtype are right."""
    if isinstance(a, ndarray) and a._device == state.current and dtype in (None, a.dtype):
        return a
    return array(a, dtype)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    """The array itself where it lies in row order; at least one axis."""
    found = computed(lambda: np.ascontiguousarray(host(a), dtype), host(a))
    if found is not host(a):
        launch("copy", a)
    return a if found is host(a) else a._view(found)


def asnumpy(a: Any) -> Any:
    """A copy on the host."""
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def result_type(*parts: Any) -> Any:
    """The dtype of a result of these arrays, dtypes and numbers."""
    return np.result_type(*map(host, parts))


def may_share_memory(a: Any, b: Any) -> bool:
    """Whether two arrays overlap."""
    return bool(np.may_share_memory(host(a), host(b)))


def from_dlpack(source: Any) -> ndarray:
    """An array that shares the memory of another device array."""
    return ndarray._of(np.from_dlpack(_Exported(source)), source)


class _Exported:
    """What a device array exports, as memory of the host, which it is."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __dlpack__(self, **options: Any) -> Any:
        return self._source.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class RawModule:
    """CUDA source, compiled as C++ for the host at the first call of a function."""

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        self.code, self.options = code, options

    def get_function(self, name: str) -> Any:
        run = kernels.load(self.code, self.options, name)

        def call(grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
            launch(name, tuple(grid), tuple(block), tuple(args))
            hosts = [value._host if isinstance(value, ndarray) else value for value in args]
            _change(lambda: run(grid, block, hosts))

        return call


def sliding_window_view(x: Any, window_shape: Any, axis: Any = None) -> ndarray:
    return x._view(np.lib.stride_tricks.sliding_window_view(x._host, window_shape, axis))


def as_strided(x: Any, shape: Any, strides: Any) -> ndarray:
    return x._view(np.lib.stride_tricks.as_strided(x._host, shape, strides))


def _module() -> Any:
    module: Any = types.ModuleType("cupy")
    for name in UFUNCS:
        setattr(module, name, Ufunc(name))
    for name, allowed in (FUNCTIONS | CREATORS).items():
        setattr(module, name, _function(name, set(allowed.split())))
    for made in (array, asarray, ascontiguousarray, asnumpy, from_dlpack, may_share_memory, ndarray, result_type,
                 RawModule):  # fmt: skip
        setattr(module, made.__name__, made)
    tricks = types.SimpleNamespace(as_strided=as_strided, sliding_window_view=sliding_window_view)
    module.lib = types.SimpleNamespace(stride_tricks=tricks)
    module.linalg = types.SimpleNamespace(**{name: _solver(name, set(takes.split())) for name, takes in LINALG.items()})
    module.get_default_memory_pool = lambda: streams.pool
    module.get_default_pinned_memory_pool = lambda: streams.pinned_pool
    module.cuda = types.SimpleNamespace(
        Device=Device,
        runtime=types.SimpleNamespace(
            getDeviceCount=lambda: DEVICES,
            getDevice=lambda: state.current,
            memGetInfo=lambda: (2**34, 2**34),
            getDeviceProperties=lambda device: {"name": b"simulated"},
            driverGetVersion=lambda: 0,
            runtimeGetVersion=lambda: 12000,
            CUDARuntimeError=streams.CUDARuntimeError,
        ),
        memory=types.SimpleNamespace(OutOfMemoryError=streams.OutOfMemoryError),
        get_allocator=lambda: streams.allocators[0],
        set_allocator=set_allocator,
        using_allocator=streams.using_allocator,
        MemoryPool=streams.MemoryPool,
        set_pinned_memory_allocator=streams.set_pinned_memory_allocator,
        alloc_pinned_memory=streams.alloc_pinned_memory,
        Stream=streams.Stream,
        Graph=streams.Graph,
        Event=streams.Event,
        get_current_stream=streams.get_current_stream,
        get_elapsed_time=lambda start, end: 1e3 * (end.at - start.at),
        cublas=cublas,
    )
    module._core = types.SimpleNamespace(_routines_linalg=cublas.Products)
    module.__version__ = "14.0.0 (simulated)"
    return module


cupy = _module()
explain.OURS += (str(Path(__file__).parent),)  # an error does not take its functions for the user's

library = cublas.Library()

SPECIAL = """
    beta betainc betaln digamma entr erf erfc erfcinv erfcx erfinv gamma gammainc gammaincc gammaln i0 i0e i1 i1e j0 j1
    log_ndtr logit ndtr ndtri rel_entr rgamma xlog1py xlogy y0 y1 yn zeta
"""


def special() -> Any:
    """``cupyx.scipy.special``: SciPy's functions, those that CuPy has."""
    import scipy.special

    module: Any = types.ModuleType("cupyx.scipy.special")
    for name in SPECIAL.split():
        run = getattr(scipy.special, name)
        setattr(module, name, lambda *args, run=run: device(_call(run, args, {})))
    return module


def modules() -> dict[str, Any]:
    """What stands for CuPy in ``sys.modules``; nothing real of it, which may have been imported, is left beside it."""
    cupyx: Any = types.ModuleType("cupyx")
    cupyx.errstate = lambda **_: contextlib.nullcontext()  # NumPy raises in any case
    raw.library = lambda cupy: library
    cuda: Any = types.ModuleType("cupy.cuda")
    cuda.nccl = nccl
    found = {"cupy": cupy, "cupyx": cupyx, "cupy.cuda": cuda}  # of cupy.cuda what is imported from it
    return {**found, "cupyx.scipy.special": special()} if find_spec("scipy") else found


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """Let ``import cupy`` find the simulated module inside of the block."""
    ours = modules()
    before = {name: sys.modules.pop(name) for name in ours if name in sys.modules}
    sys.modules.update(ours)
    state.synchronisations, state.current, state.limit = 0, 0, None
    streams.recordings.clear()
    cublas.calls.clear()
    cublas.Products.chosen = cublas.Products.COMPUTE_TYPE_DEFAULT
    try:
        yield cupy
    finally:
        for name in ours:
            del sys.modules[name]
        sys.modules.update(before)
