"""CUDA kernels: the ``.cu`` beside a ``.py``, compiled at its first call for a dtype, and launched on CuPy's arrays.

A source is compiled behind ``common.cuh`` with ELEMENT, the type of the elements, and PACK, how many of them a load
moves. Kernels run on the current stream of the current device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, array_module, is_bfloat16, is_on_gpu

THREADS = 256  # of a block
BLOCKS = 512  # that share out the rows where each keeps a sum of its own: few of them, and the same on every GPU
ELEMENTS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double", np.dtype(np.float16): "Half"}
HERE = Path(__file__).parents[1]


def element(dtype: Any) -> str | None:
    """The name of a dtype in the sources, None for one that they don't know."""
    return ELEMENTS.get(dtype) or ("Bfloat16" if is_bfloat16(dtype) else None)


def uniform(*arrays: Array | None) -> bool:
    """Whether kernels take these arrays: on the GPU and of one dtype; None is left out."""
    given: list[Any] = [array for array in arrays if array is not None]
    same = len({array.dtype for array in given}) == 1 and all(map(is_on_gpu, given))
    return same and element(given[0].dtype) is not None


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


def source(path: Path) -> str:
    """A ``.cu`` with what all of them share in front."""
    return f'{(HERE / "common.cuh").read_text()}\n#line 1 "{path.name}"\n{path.read_text()}'


def options(dtype: Any, pack: int, defines: Sequence[tuple[str, int]] = ()) -> tuple[str, ...]:
    """The compiler's options for a dtype and a pack."""
    named = [("ELEMENT", element(dtype)), ("PACK", pack), *defines]
    return ("-std=c++17", *(f"-D{name}={value}" for name, value in named))


@functools.cache
def _module(cupy: Any, path: Path, dtype: Any, pack: int, defines: Sequence[tuple[str, int]]) -> Any:
    return cupy.RawModule(code=source(path), options=options(dtype, pack, defines))


@functools.cache
def _kernel(name: str, *key: Any) -> Any:
    return _module(*key).get_function(name)


def launch(
    path: str | Path, name: str, like: Array, pack: int, grid: int | tuple[int, ...], block: int, *args: Any,
    **defines: int,
) -> None:  # fmt: skip
    """Launch the kernel ``name`` of a source, for the dtype of ``like``.

    Of the arguments a Python int is a ``long long``, a float a number of the accumulator's type, None a null pointer.
    """
    wide = np.float64 if like.dtype == np.float64 else np.float32
    kinds: dict[type, Any] = {int: np.int64, float: wide, bool: np.int32}
    values = [np.uint64(0) if a is None else kinds[type(a)](a) if type(a) in kinds else a for a in args]
    kernel = _kernel(name, array_module(like), HERE / path, like.dtype, pack, tuple(sorted(defines.items())))
    kernel((grid,) if isinstance(grid, int) else grid, (block,), values)


# ---- kernels on rows ------------------------------------------------------------------------------------------------


def as_matrix(x: Array) -> Array:
    """``x`` (..., d) as a contiguous matrix of rows."""
    return array_module(x).ascontiguousarray(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


class Rows:
    """Contiguous arrays seen as matrices of the same shape, and how to launch a kernel on their rows."""

    def __init__(self, first: Array, *others: Array | None, axes: int = 1) -> None:
        xp = array_module(first)
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
        return None if shares is None or like is None else shares.sum(axis=0).astype(like.dtype).reshape(like.shape)

    def launch(self, stem: str, name: str, *args: Any, grid: int | None = None) -> None:
        """Launch ``name`` with all arrays, then ``args``; nothing happens where there is nothing to compute."""
        if self.rows and self.width:
            like = self.arrays[0]
            assert like is not None
            vectors = [a for a in args if getattr(a, "dtype", None) == like.dtype and getattr(a, "ndim", 0)]
            pack = pack_of(self.width, *self.arrays, *vectors)
            threads = threads_for(-(-self.width // pack))
            launch(f"{stem}.cu", name, like, pack, grid or self.rows, threads, *self.arrays, *args)
