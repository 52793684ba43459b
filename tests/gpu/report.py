"""A table of all CUDA kernels: what NVIDIA's compiler says of each, and how far off it is when the CPU executes it.

    python tests/gpu/report.py

Registers and spilled bytes are the most of any dtype and variant, of all sizes of heads too, for five generations of
GPUs. A case is a call with its backward pass; an error is the largest difference from the NumPy pair over the largest
value (at least 1), the worst of all results that the kernel had a part in. It takes about half an hour of one core.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
from gpu.test_compiled import ALL_HEADS, SOURCES, TARGETS, variants
from gpu.test_kernels import CASES, DTYPES, derived, made, moved
from gpu.test_optim_on_gpu import trained
from support import nvidia_compiler as nvidia
from support.simulated import device, kernels

import optim
from minigrad.backend import as_dtype
from minigrad.kernels.attention import attention
from minigrad.kernels.cuda import launching as gpu


def executed() -> dict[str, dict[str, list[float]]]:
    """For each kernel and dtype the errors of the cases in which it ran, on the CPU through the shim."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with device.installed() as cupy:
        for dtype, pairs in results(cupy):
            worst = max(difference(a, b) for a, b in pairs)
            for name in kernels.launched:
                errors[name][dtype].append(worst)
    return errors


def results(cupy: Any) -> Iterator[tuple[str, Iterator[tuple[Any, Any]]]]:
    """The results of each case on both devices; ``launched`` then holds the kernels that ran."""
    for dtype in DTYPES:
        for case in CASES:
            if dtype != "float64" or case.operation is not attention:
                args = [made(a, as_dtype(dtype), seed) for seed, a in enumerate(case.args)]
                kernels.launched.clear()
                yield dtype, zip(derived(case, moved(args, cupy)), derived(case, args), strict=True)
        kernels.launched.clear()
        yield dtype, zip(*(trained(optim.AdamW, dtype, where)[0] for where in ("cuda", "cpu")), strict=True)


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference over the largest value, which counts as 1 at least."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return float(np.abs(ours - theirs).max(initial=0) / max(1.0, np.abs(theirs).max(initial=0)))


def compiled() -> dict[str, dict[str, tuple[int, int]]]:
    """For each kernel and target the most registers, and bytes spilled, of any variant."""
    found: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    if nvidia.NVRTC is None or nvidia.PTXAS is None:
        print("NVRTC or ptxas is missing: no registers", file=sys.stderr)
        return found
    for path in SOURCES:
        for dtype, pack, defines in variants(path, ALL_HEADS):
            for target in TARGETS:
                ptx = nvidia.to_ptx(gpu.source(path), gpu.options(dtype, pack, defines), target)
                for report in nvidia.assemble(ptx, target):
                    row = found[f"{path.name}: {report.name}"]
                    before = row.get(target, (0, 0))
                    row[target] = max(before[0], report.registers), max(before[1], report.spilled)
    return found


def main() -> None:
    """Print the table."""
    errors, facts = executed(), compiled()
    heads = "".join(f"{dtype:>10}" for dtype in DTYPES)
    print(f"{'kernel':42}{'registers':>20}{'spilled':>11}{'cases':>7}   worst error {heads.lstrip()}")
    for name in sorted({*errors, *facts}):
        registers, spilled = (
            "/".join(str(facts[name][target][k]) for target in TARGETS) if name in facts else "-" for k in (0, 1)
        )
        found = errors[name]
        worst = "".join(f"{max(found[dtype]):10.1e}" if found[dtype] else f"{'-':>10}" for dtype in DTYPES)
        print(f"{name:42}{registers:>20}{spilled:>11}{sum(map(len, found.values())):7}           {worst}")
    ran = sum(map(bool, errors.values()))
    print(f"{ran} kernels executed, {len(facts)} compiled for sm_{', '.join(TARGETS)}")


if __name__ == "__main__":
    main()
