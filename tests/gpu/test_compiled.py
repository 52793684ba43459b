"""Every kernel by NVIDIA's own compiler, with the options that CuPy gives it, and with warnings as errors.

``report.py`` prints registers and spills of each kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

SOURCES = sorted([*kernels.HERE.glob("*.cu"), *Path(optim.__file__).parent.glob("*.cu")])
TARGETS = ["75", "80", "89", "90", "120"]  # report.py takes them all
PACKS = {"rope.cu": 2, "attention.cu": 4}  # those that don't load 16 bytes at a time
HEADS, ALL_HEADS = (64, 128), range(16, 129, 16)
NARROW: list[Any] = [(("RESULT", name),) for name in ("Half", "Bfloat16")]  # results of float32
OTHERS: dict[str, list[Any]] = {
    "norms.cu": [(), *((("COLUMNS", n),) for n in (2, 4, 16)), *NARROW],
    "joined_rows.cu": [(), *NARROW],
    "multi_tensor.cu": [tuple(DEFINES.items())],
}
needs_nvrtc = pytest.mark.skipif(nvidia.NVRTC is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc-cu12")
needs_ptxas = pytest.mark.skipif(nvidia.PTXAS is None, reason="needs ptxas: pip install nvidia-cuda-nvcc-cu12")


def variants(path: Path, heads: Sequence[int] = HEADS) -> Iterator[tuple[Any, int, tuple[tuple[str, int | str], ...]]]:
    """The dtypes, packs and other choices for which a source is compiled."""
    options = [dict.fromkeys(("mask", "dropout", "grid"), bool(m)) for m in (0, 1)]
    attention = [tuple(sorted(defines(head, **chosen).items())) for head in heads for chosen in options]
    choices = attention if path.name == "attention.cu" else OTHERS.get(path.name, [()])
    for name in ("float32", "float64", "float16", "bfloat16"):
        if name == "bfloat16":
            pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
        dtype = as_dtype(name)
        if path.name == "attention.cu" and dtype == np.float64:
            continue
        for pack in sorted({1, PACKS.get(path.name, 16 // dtype.itemsize)}):
            for chosen in choices:
                columns = dict(chosen).get("COLUMNS", 0)
                fits = int(columns) * pack * accumulator(dtype).itemsize <= 4 * kernels.SUMS
                if fits and (chosen not in NARROW or dtype == np.float32):
                    yield dtype, pack, chosen


@needs_nvrtc
@needs_ptxas
@pytest.mark.parametrize("target", ["75", "90"])
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_it_compiles_without_warnings_and_spills(path: Path, target: str) -> None:
    for dtype, pack, chosen in variants(path):
        ptx = nvidia.to_ptx(kernels.source(path), kernels.options(dtype, pack, chosen), target)
        reports = nvidia.assemble(ptx, target)
        assert reports and all(report.spilled == 0 and report.shared <= 48 << 10 for report in reports)


@needs_nvrtc
def test_an_error_and_a_warning_are_noticed() -> None:
    for code in ("__global__ void f() { undefined(); }", "__global__ void f() { int unused; }"):
        with pytest.raises(RuntimeError, match=r"undefined|never referenced"):
            nvidia.to_ptx(code, ("-std=c++17",), "90")
