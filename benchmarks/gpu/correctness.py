"""Whether results, gradients, products and losses on the GPU are those of the CPU, and memory stays as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from harness.configs import CONFIGS, batches

import minigrad as mg
from gpu.measured_kernels import TINY, Kernel, kernels, leaves, minigrad_step, timed
from gpu.task import Row, Task, difference, judged
from minigrad.backend import as_dtype, load_cupy, to_numpy


def check_compare(task: Task) -> Iterator[Row]:
    """Each kernel's result and gradients beside those of the CPU."""
    sizes = (2, 37, 48, 3, 100, 130)  # that fill no block
    yield from task.rows(
        (f"{kernel.name}, {name}", partial(compared, kernel, name, tolerance))
        for name, tolerance in (("float32", 2e-5), ("float16", 1e-2), ("bfloat16", 8e-2))
        for kernel in kernels(*sizes)
    )


def compared(kernel: Kernel, dtype: str, tolerance: float) -> tuple[str, str]:
    """The worst difference between the GPU and the CPU."""
    found = []
    for device in ("cpu", "cuda"):
        args = leaves(kernel, as_dtype(dtype), device)
        out = kernel.call(*args)
        out.sum().backward()
        found.append([to_numpy(x).astype(np.float64) for x in (out.data, *(a.grad for a in args))])
    return judged(max(difference(ours, exact) for exact, ours in zip(*found, strict=True)), tolerance)


PRODUCTS = {"float64": 1e-13, "float32": 3e-6, "tf32": 3e-3, "float16": 2e-3, "bfloat16": 1.6e-2}

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any, Any]] = {
    "one product": ((96, 64), (64, 80), np.asarray, np.asarray),
    "plain": ((6, 96, 64), (6, 64, 80), np.asarray, np.asarray),
    "transposed": ((6, 64, 96), (6, 80, 64), lambda x: x.swapaxes(1, 2), lambda x: x.swapaxes(1, 2)),
    "heads": ((2, 96, 3, 64), (2, 80, 3, 64), lambda x: x.swapaxes(1, 2), lambda x: x.transpose(0, 2, 3, 1)),
    "broadcast": ((6, 95, 63), (1, 63, 81), np.asarray, np.asarray),
}


def check_products(task: Task) -> Iterator[Row]:
    """Products of matrices beside those of float64, and the time of batched ones beside cupy.matmul's."""
    yield from task.rows(
        (f"{layout}, {name}", partial(multiplied, name, tolerance, *args))
        for name, tolerance in PRODUCTS.items()
        for layout, args in LAYOUTS.items()
    )
    shape = (2, 2, 32, 16) if task.quick else (16, 12, 1024, 64)
    yield from task.rows((f"q kᵀ {shape}, {name}", partial(raced, shape, name)) for name in PRODUCTS)


def in_precision(name: str) -> Any:
    """The dtype of a precision, and TF32 allowed or not."""
    mg.cuda.allow_tf32(name == "tf32")
    return as_dtype("float32" if name == "tf32" else name)


def multiplied(name: str, tolerance: float, x_shape: Any, y_shape: Any, view_x: Any, view_y: Any) -> tuple[str, str]:
    """How far off a product is."""
    dtype, draw = in_precision(name), np.random.default_rng(2).standard_normal
    hosts = [draw(shape).astype(dtype) for shape in (x_shape, y_shape)]
    exact = np.matmul(*(view(a.astype(np.float64)) for view, a in zip((view_x, view_y), hosts, strict=True)))
    x, y = (mg.asarray(a, device="cuda") for a in hosts)
    x, y = (a if view is np.asarray else view(a) for view, a in ((view_x, x), (view_y, y)))
    return judged(difference(to_numpy(mg.matmul(x, y).data).astype(np.float64), exact), tolerance)


def raced(shape: tuple[int, ...], name: str) -> tuple[str, str]:
    """The time of ``q kᵀ`` by strided calls and by CuPy."""
    dtype, draw = in_precision(name), np.random.default_rng(2).standard_normal
    q, k = (mg.asarray(draw(shape).astype(dtype), device="cuda").data for _ in range(2))
    ours, theirs = (timed(partial(f, q, k.swapaxes(-1, -2)), 5) for f in (mg.matmul, load_cupy().matmul))
    flops = 2 * math.prod(shape) * shape[-2]
    return f"{ours * 1e6:,.0f} µs, {flops / ours / 1e12:.0f} TFLOP/s; cupy.matmul {theirs * 1e6:,.0f} µs", "-"


def check_losses(task: Task) -> Iterator[Row]:
    """A small model's losses beside the CPU's, and the pool's size on the way."""
    config, steps = (TINY, 3) if task.quick else (CONFIGS["nano"], 50)
    step, draw = minigrad_step(config, "float32", "cuda"), batches(config)

    def curve() -> tuple[str, str]:
        ours = [float(step(*next(draw)).item()) for _ in range(steps)]
        reference, same = minigrad_step(config, "float32", "cpu"), batches(config)
        theirs = [float(reference(*next(same)).item()) for _ in range(steps)]
        worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        return f"{ours[0]:.4f} to {ours[-1]:.4f}, {judged(worst, 2e-3)[0]}", judged(worst, 2e-3)[1]

    def memory() -> tuple[str, str]:
        pool, sizes = load_cupy().get_default_memory_pool(), []
        for _ in range(2):
            for _ in range(2 * steps):
                step(*next(draw))
            mg.cuda.synchronize()
            sizes.append(pool.total_bytes())
        return f"{sizes[0]:,} to {sizes[1]:,} bytes", "ok" if sizes[0] == sizes[1] else "FAILED"

    yield from task.rows([(f"{steps} losses beside the CPU's", curve), (f"memory over {4 * steps} steps", memory)])
