"""CUDA kernels: the ``.cu`` beside a ``.py``, compiled at its first call for a dtype, and launched on CuPy's arrays.

A source is compiled behind ``common.cuh`` with ELEMENT, the type of the elements, and PACK, how many of them a load
moves. Kernels run on the current stream of the current device. Each argument is held to the type that the source
declares for it: a GPU would read other bytes without a word.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minigrad.backend import (
    Array,
    accumulator,
    array_module,
    bfloat16,
    check_bfloat16,
    device_of,
    is_array,
    is_bfloat16,
    is_on_gpu,
)
from minigrad.errors import DeviceError

THREADS = 256  # of a block
SUMS = 16  # numbers of a row for which a thread has sums in registers, in one of 2 THREADS at most
BLOCKS = 512  # that share out the rows where each keeps a sum of its own: few of them, and the same on every GPU
ELEMENTS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double", np.dtype(np.float16): "Half"}
NAMED: dict[Any, Callable[[], Any]] = {name: partial(np.dtype, dtype) for dtype, name in ELEMENTS.items()}
NAMED["Bfloat16"] = bfloat16
KERNELS = Path(__file__).parents[1]


def element(dtype: Any) -> str | None:
    """The name of a dtype in the sources, None for one that they don't know."""
    return ELEMENTS.get(dtype) or ("Bfloat16" if is_bfloat16(dtype) else None)


def uniform(*arrays: Array | None) -> bool:
    """Whether kernels take these arrays: on the GPU and of one dtype; None is left out."""
    given: list[Any] = [array for array in arrays if array is not None]
    if len({array.dtype for array in given}) != 1 or not all(map(is_on_gpu, given)):
        return False
    if is_bfloat16(given[0].dtype):
        check_bfloat16(array_module(given[0]), given[0].data.device_id)
    return element(given[0].dtype) is not None


def pack_of(length: int, *arrays: Array | None) -> int:
    """How many elements can be loaded at once: 16 bytes, if addresses and the length of a row allow it, else 1."""
    given: list[Any] = [array for array in arrays if array is not None]
    pack = 16 // int(given[0].itemsize)
    return pack if length % pack == 0 and all(array.data.ptr % 16 == 0 for array in given) else 1


def threads_for(packs: int) -> int:
    """Threads of a block for a row of so many packs: whole warps, ``THREADS`` at most."""
    return min(THREADS, max(32, -(-packs // 32) * 32))


def grid_for(size: int, pack: int = 1) -> int:
    """Blocks for so many elements, a pack for each thread; beyond a million of them a thread takes several."""
    return min(-(-size // (pack * THREADS)), 1 << 20)


def seed_arguments(seed: Any) -> tuple[int, Array | None]:
    """A seed as the kernels take it: a number, or the place on the device of one that a CUDA graph replays."""
    return (0, seed) if is_array(seed) else (seed % 2**64, None)


def source(path: Path) -> str:
    """A ``.cu`` with what all of them share in front, and the files of ours that it includes."""
    text = re.sub(r'#include "(.+)"', lambda found: (KERNELS / found[1]).read_text(), path.read_text())
    return f'{(KERNELS / "common.cuh").read_text()}\n#line 1 "{path.name}"\n{text}'


def options(dtype: Any, pack: int, defines: tuple[tuple[str, int | str], ...] = ()) -> tuple[str, ...]:
    """The compiler's options for a dtype and a pack."""
    named = [("ELEMENT", element(dtype)), ("PACK", pack), ("THREADS", THREADS), *defines]
    return ("-std=c++17", *(f"-D{name}={value}" for name, value in named))


def as_result(dtype: Any, own: Any) -> dict[str, int | str]:
    """What a source is compiled with where its results are of another dtype than its elements."""
    return {} if dtype is None or dtype == own else {"RESULT": str(element(dtype))}


# ---- a prepared launch ----------------------------------------------------------------------------------------------

DECLARED = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(([^)]*)\)')
NUMBERS = {"bool": "bool", "float": "float32", "double": "float64"}
NUMBERS |= {"int": "int32", "long long": "int64", "unsigned int": "uint32", "unsigned long long": "uint64"}
TABLE = "int64"  # numbers and addresses, which a kernel reads as a struct


def parameters(code: str, name: str) -> tuple[str, ...]:
    """The types that a kernel declares for its arguments; a pointer ends in ``*``.

    >>> parameters('extern "C" __global__ void f(const T* x, long long n) {}', "f")
    ('T*', 'long long')
    """
    (declared,) = (found for kernel, found in DECLARED.findall(code) if kernel == name)
    types = [re.sub(r"\bconst\b|\w+$", "", parameter.strip()) for parameter in declared.split(",")]
    return tuple(" ".join(kind.replace("*", " * ").split()).replace(" *", "*") for kind in types)


class Kernel:
    """A kernel compiled for a dtype: it takes a grid, a block, and arguments of the types that its source declares."""

    def __init__(self, cupy: Any, path: Path, name: str, dtype: Any, *how: Any) -> None:
        self.name, self._runtime = f"{path.name}: {name}", cupy.cuda.runtime
        self._run = _module(cupy, path, dtype, *how).get_function(name)
        result = dict(how[1]).get("RESULT")
        own = {"T": dtype, "R": NAMED[result]() if result else dtype, "W": accumulator(dtype)}
        self._takes: list[tuple[Any, Callable[[Any], Any] | None]] = []  # the dtype, and for a number its maker
        for kind in parameters(source(path), name):
            word = kind.rstrip("*")
            found: Any = np.dtype(own[word] if word in own else NUMBERS.get(word, TABLE))
            self._takes.append((found, None if kind.endswith("*") else found.type))

    def __call__(self, grid: tuple[int, ...], block: int, args: tuple[Any, ...]) -> None:
        """Launch on the current stream; None is a null pointer."""
        device, values = self._runtime.getDevice(), []
        for (dtype, make), value in zip(self._takes, args, strict=True):
            if make is not None and not is_array(value):
                values.append(make(value))
            elif value is None and make is None:
                values.append(np.uint64(0))
            elif make is None and is_on_gpu(value) and value.dtype == dtype:
                if value.data.device_id != device:
                    got, hint = f"cuda:{device}, and an array on {device_of(value)}", "with mg.cuda.device(N): …"
                    raise DeviceError("the GPU of the arrays as the current one", got, hint)
                values.append(value)
            else:
                came = value.dtype if is_array(value) else type(value)
                raise AssertionError(f"{self.name} declares {dtype} for argument {len(values)}, and was given {came}")
        self._run(grid, (block,), values)


@functools.cache
def _module(cupy: Any, path: Path, dtype: Any, pack: int, defines: tuple[tuple[str, int | str], ...]) -> Any:
    return cupy.RawModule(code=source(path), options=options(dtype, pack, defines))


_kernel = functools.cache(Kernel)


def launch(
    path: str | Path, name: str, like: Array, pack: int, grid: int | tuple[int, ...], block: int, *args: Any,
    **defines: int | str,
) -> None:  # fmt: skip
    """Launch the kernel ``name`` of a source, for the dtype of ``like``; None stands for no array."""
    kernel = _kernel(array_module(like), KERNELS / path, name, like.dtype, pack, tuple(sorted(defines.items())))
    kernel((grid,) if isinstance(grid, int) else grid, block, args)


# ---- kernels on rows ------------------------------------------------------------------------------------------------


def as_matrix(x: Array) -> Array:
    """``x`` (..., d) as a contiguous matrix of rows."""
    return array_module(x).ascontiguousarray(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def fits(x: Array, shape: Any) -> bool:
    """Whether the threads of a block can have sums of all columns of rows of this shape."""
    return bool(math.prod(shape) <= 2 * THREADS * SUMS // (accumulator(x.dtype).itemsize // 4))


class Rows:
    """Contiguous arrays seen as matrices of the same shape, and how to launch a kernel on their rows."""

    def __init__(self, first: Array, *others: Array | None, axes: int = 1, like: Array | None = None) -> None:
        xp = array_module(first)
        self.like = first if like is None else like  # whose dtype is that of the elements
        self.arrays = [None if a is None else xp.ascontiguousarray(a) for a in (first, *others)]
        self.width = math.prod(first.shape[first.ndim - axes :])
        self.rows = math.prod(first.shape[: first.ndim - axes])
        self.blocks = min(self.rows, BLOCKS)
        self.xp, self.work = xp, accumulator(first.dtype)

    def empty(self, *shape: int) -> Array:
        """Numbers of the accumulator's type; of a shape (rows,) if none is given."""
        return self.xp.empty(shape or (self.rows,), self.work)

    def shares(self) -> Array:
        """A row for each of ``blocks`` blocks, in which it sums its part of a parameter's gradient."""
        return self.empty(self.blocks, self.width)

    def summed(self, shares: Array | None, like: Array | None) -> Array | None:
        """The gradient of a parameter from the shares of the blocks."""
        if shares is None or like is None:
            return None
        found = shares.sum(axis=0).astype(like.dtype, copy=False)
        return found if found.shape == like.shape else found.reshape(like.shape)

    def launch(self, stem: str, name: str, *args: Any, shared: bool = False, result: Any = None) -> None:
        """Launch ``name`` with all arrays, then ``args``; nothing happens where there is nothing to compute.

        result: the dtype of the arrays that the source declares as R, if it is another
        shared: whether ``blocks`` share the rows out, and a thread has the sums of its columns in registers
        """
        if self.rows and self.width:
            like = self.like
            vectors = [a for a in args if getattr(a, "dtype", None) == like.dtype and getattr(a, "ndim", 0)]
            pack = pack_of(self.width, like, *self.arrays, *vectors)
            packs = -(-self.width // pack)
            threads = threads_for(packs)
            if shared and self.width > SUMS * threads:
                threads *= 2
            columns = -(-packs // threads) if shared else 1
            grid = self.blocks if shared else self.rows
            defines = ({"COLUMNS": columns} if columns > 1 else {}) | as_result(result, like.dtype)
            launch(f"{stem}.cu", name, like, pack, grid, threads, *self.arrays, *args, **defines)
