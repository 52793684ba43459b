"""Clipping and Adam on a GPU: one kernel over all parameters, which the host does not wait for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minigrad import captures
from minigrad.backend import Array, accumulator, array_module
from minigrad.kernels.cuda.launching import THREADS, launch, uniform

SOURCE, CHUNK = Path(__file__).with_name("multi_tensor.cu"), 16384
ELEMENTS, WIDE = ("weight", "gradient"), ("mean", "square", "master")  # arrays of an entry: of the dtype, of its sums
FIELDS = {"ELEMENTS": ",".join(f"*{f}" for f in ELEMENTS), "WIDE": ",".join(f"*{f}" for f in WIDE)}
DEFINES: dict[str, int | str] = {"CHUNK": CHUNK, **FIELDS}


def takes(arrays: Sequence[Array]) -> bool:
    """Whether the kernels take these arrays: there are some, on one GPU, contiguous, of one dtype below float64."""
    return bool(arrays) and uniform(*arrays) and arrays[0].itemsize <= 4 and all(a.flags.c_contiguous for a in arrays)


@functools.lru_cache(maxsize=64)
def _chunks(xp: Any, device: int, sizes: tuple[int, ...]) -> Array:
    """For each block the number of its array, and where in it the block begins."""
    return xp.asarray(np.array([(i, start) for i, n in enumerate(sizes) for start in range(0, n, CHUNK)], np.int64))


def _launch(
    name: str, columns: dict[str, Sequence[Any]], *args: Any, numbers: Callable[[], Any] | None = None, **made: Any
) -> Any:
    """Launch a kernel over the arrays of ``columns``, which go into a table of pointers. Gives ``made`` its blocks.

    numbers: what a kernel reads behind the table, float64; a CUDA graph asks for them at each replay
    """
    arrays = next(iter(columns.values()))
    xp, sizes = array_module(*arrays), tuple(int(a.size) for a in arrays)
    chunks = captures.keep(_chunks(xp, xp.cuda.Device().id, sizes))
    rows = [[columns[f][i].data.ptr if f in columns else 0 for f in (*ELEMENTS, *WIDE)] for i in range(len(sizes))]
    table = np.array([[*row, n] for row, n in zip(rows, sizes, strict=True)], np.int64).ravel()
    aligned = all(array.data.ptr % 16 == 0 for column in columns.values() for array in column)
    pack = 16 // int(arrays[0].itemsize) if aligned else 1
    args = (*args, *(xp.empty(len(chunks), dtype) for dtype in made.values()))
    if numbers is None:
        entries = captures.uploaded_once(xp, table)
    else:
        entries = captures.uploaded(xp, lambda: np.concatenate([table, np.float64(numbers()).view(np.int64)]))
        args = (entries[len(table) :].view(np.float64), *args)
    if len(chunks):
        launch(SOURCE, name, arrays[0], pack, len(chunks), THREADS, entries, chunks, *args, **DEFINES)
    return args[-1] if made else None


def norm(gradients: Sequence[Array]) -> Array:
    """√(Σ g²) over all arrays, summed in float64, whose range no square of a float32 leaves."""
    sums = _launch("square_sums", {"gradient": gradients}, sums=np.float64)
    return array_module(sums).sqrt(sums.sum())


def scale(gradients: Sequence[Array], factor: Array) -> None:
    """Multiply all arrays by a float64 number on the device, in place."""
    _launch("scale", {"gradient": gradients}, factor)


def adam(
    group: dict[str, Any], weights: Sequence[Array], gradients: Sequence[Array], states: Sequence[dict[str, Any]],
    decoupled: bool, where: Array | None, skipped: Array,
) -> None:  # fmt: skip
    """One step of Adam on all weights of a group, unless ``where`` is False; ``skipped`` of their steps were none."""
    columns = {"weight": weights, "gradient": gradients}
    columns |= {"mean": [s["exp_avg"] for s in states], "square": [s["exp_avg_sq"] for s in states]}
    if accumulator(weights[0].dtype) != weights[0].dtype:
        columns["master"] = [s["master"] for s in states]

    def numbers() -> list[float]:
        return [group["lr"], *group["betas"], group["eps"], group["weight_decay"], *[s["step"] for s in states]]

    _launch("adam", columns, where, skipped, int(decoupled), numbers=numbers)


LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def squares(kept: Array) -> Array:
    """v, of which the kernel keeps -√v where it is no normal number of float32: then in float64. Asks the device."""
    if not bool((kept < 0).any()):
        return kept
    wide = kept.astype(np.float64)
    return array_module(wide).where(wide < 0, wide * wide, wide)


def kept(v: Array) -> Array:
    """The float64 array v as the kernel keeps it, from which ``squares`` makes the same numbers again."""
    xp = array_module(v)
    odd = xp.isfinite(v) & ((v > LARGEST) | ((v > 0) & (v < SMALLEST)))
    return xp.where(odd, -xp.sqrt(v), xp.where(odd, 0.0, v)).astype(np.float32)
