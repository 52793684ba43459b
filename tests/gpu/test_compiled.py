"""Every kernel by NVIDIA's own compiler, with the options that CuPy gives it, and with warnings as errors.

``report.py`` prints registers and spills of each kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import nvidia_compiler as nvidia

import optim
from minigrad.backend import accumulator, as_dtype
from minigrad.kernels.cuda import launching as kernels
from minigrad.kernels.cuda.attention import defines
from optim.gpu import DEFINES

SOURCES = sorted([*kernels.KERNELS.glob("*.cu"), *Path(optim.__file__).parent.glob("*.cu")])
TARGETS = ["75", "80", "89", "90", "120"]  # report.py takes them all
PACKS = {"rope.cu": 2, "attention.cu": 4}  # those that don't load 16 bytes at a time
HALVES = ["float16", "bfloat16"]
ATTENTION = {"attention.cu": ["float32"], "attention_mma.cu": HALVES, "row_dots.cu": ["float32", *HALVES]}
HEADS = (64, 128)
NARROW: list[Any] = [(("RESULT", name),) for name in ("Half", "Bfloat16")]  # results of float32
OTHERS: dict[str, list[Any]] = {
    "norms.cu": [(), *((("COLUMNS", n),) for n in (2, 4, 16)), *NARROW],
    "joined_rows.cu": [(), *NARROW],
    "multi_tensor.cu": [tuple(DEFINES.items())],
}
needs_nvrtc = pytest.mark.skipif(nvidia.NVRTC is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc-cu12")
needs_nvdisasm = pytest.mark.skipif(nvidia.NVDISASM is None, reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm")
needs_ptxas = pytest.mark.skipif(nvidia.PTXAS is None, reason="needs ptxas: pip install nvidia-cuda-nvcc-cu12")


def variants(
    path: Path, target: str, thorough: bool = False
) -> Iterator[tuple[Any, int, tuple[tuple[str, int | str], ...]]]:
    """The dtypes, packs and other choices for which a source is compiled; thorough: all sizes of heads too."""
    for name in ATTENTION.get(path.name, ["float32", "float64", "float16", "bfloat16"]):
        if name == "bfloat16":
            pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
            if path.name in ATTENTION and target == "75":
                continue  # the backend refuses it
        dtype = as_dtype(name)
        for pack in sorted({1, PACKS.get(path.name, 16 // dtype.itemsize)}):
            choices = OTHERS.get(path.name, [()])
            for chosen in attention(dtype, pack, thorough) if path.name in ATTENTION else choices:
                columns = dict(chosen).get("COLUMNS", 0)
                fits = int(columns) * pack * accumulator(dtype).itemsize <= 4 * kernels.SUMS
                if fits and (chosen not in NARROW or dtype == np.float32):
                    yield dtype, pack, chosen


def attention(dtype: Any, pack: int, thorough: bool) -> Iterator[tuple[tuple[str, int | str], ...]]:
    """Sizes of heads, with mask, dropout and grid, or with none of them: by single loads and by wide ones."""
    for head, there in itertools.product(range(16, 129, 16) if thorough else HEADS, (False, True)):
        if thorough or there == (pack == 1):
            chosen = defines(head, dtype.itemsize, mask=there, dropout=there, grid=there)
            yield tuple(sorted(chosen.items()))


@needs_nvrtc
@needs_ptxas
@pytest.mark.parametrize("target", ["75", "90"])
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_it_compiles_without_warnings_and_spills(path: Path, target: str) -> None:
    for dtype, pack, chosen in variants(path, target):
        ptx = nvidia.to_ptx(kernels.source(path), kernels.options(dtype, pack, chosen), target)
        reports = nvidia.assemble(ptx, target)
        assert reports and all(report.spilled == 0 and report.shared <= 48 << 10 for report in reports)


@needs_nvrtc
@needs_ptxas
@needs_nvdisasm
@pytest.mark.parametrize("target", ["75", "80", "90"])
@pytest.mark.parametrize("head", HEADS)
def test_attention_of_half_precision_multiplies_on_tensor_cores(head: int, target: str) -> None:
    """All products of a step: 2, 3 and 4 of a warp's 16 rows with the places of a step, 2 FLOP for each feature."""
    path, dtype = kernels.KERNELS / "attention_mma.cu", as_dtype("float16")
    chosen = tuple(sorted(defines(head, 2, mask=False, dropout=False, grid=False).items()))
    found = nvidia.instructions(nvidia.to_ptx(kernels.source(path), kernels.options(dtype, 8, chosen), target), target)
    of_one = 2 * 16 * 8 * (8 if target == "75" else 16)  # FLOP of m16n8k8 and of m16n8k16
    products = [("forward", 2, 64), ("backward_q", 3, 32), ("backward_kv", 4, 32 if head < 128 else 16)]
    for name, count, step in products:
        assert found[f"attention_mma_{name}"]["HMMA"] * of_one == count * 2 * 16 * step * head


@needs_nvrtc
def test_an_error_and_a_warning_are_noticed() -> None:
    for code in ("__global__ void f() { undefined(); }", "__global__ void f() { int unused; }"):
        with pytest.raises(RuntimeError, match=r"undefined|never referenced"):
            nvidia.to_ptx(code, ("-std=c++17",), "90")
