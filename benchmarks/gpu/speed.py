"""How fast kernels, the optimizer and training steps are, beside a copy, a product and torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from harness.configs import Config, batches

import minigrad as mg
from gpu.measured_kernels import (
    ADAMW_BYTES,
    GPU_CONFIGS,
    STEPS,
    TINY,
    WEIGHTS,
    Kernel,
    adamw,
    device_seconds,
    kernels,
    leaves,
    minigrad_step,
    timed,
)
from gpu.task import Row, Task, judged
from minigrad.backend import as_dtype, load_cupy


def check_kernels(task: Task) -> Iterator[Row]:
    """Each kernel's rate beside that of a copy or a product, measured now."""
    copied, rate = copy_rate(1 << (16 if task.quick else 28)), product_rate(64 if task.quick else 8192)
    yield "copy", f"{copied / 1e12:.2f} TB/s", "-"
    yield "product, bfloat16", f"{rate / 1e12:.0f} TFLOP/s", "-"
    sizes = (2, 16, 32, 2, 64, 50) if task.quick else (16, 1024, 768, 12, 2048, 32000)
    yield from task.rows(
        (f"{kernel.name}, {name}", partial(achieved, kernel, as_dtype(name), copied, rate, task.quick))
        for name in ("bfloat16", "float32")
        for kernel in kernels(*sizes)
    )
    weights = 1 << 10 if task.quick else WEIGHTS
    yield from task.rows([("AdamW, float32", lambda: adamw_rate(weights, copied, 2 if task.quick else 10))])


def adamw_rate(weights: int, copied: float, repeats: int) -> tuple[str, str]:
    """The time and rate of an optimizer step, and its share of the rate of a copy."""
    seconds = device_seconds(adamw(weights, "cuda"), repeats)
    rate = weights * ADAMW_BYTES / seconds
    return f"{seconds * 1e6:,.0f} µs, {rate / 1e12:.2f} TB/s", f"{rate / copied:.0%}"


def copy_rate(n: int) -> float:
    """Bytes a second that a copy of n float32 numbers reads and writes."""
    source, target = (load_cupy().zeros(n, np.float32) for _ in range(2))
    return 8 * n / timed(lambda: load_cupy().copyto(target, source), 3)


def product_rate(side: int) -> float:
    """FLOP/s of a product of square matrices in bfloat16."""
    a = mg.Tensor(np.random.default_rng(0).standard_normal((side, side), np.float32), device="cuda")
    a = a.astype("bfloat16")
    return 2 * side**3 / timed(lambda: load_cupy().matmul(a.data, a.data), 3)


def achieved(kernel: Kernel, dtype: Any, copied: float, multiplied: float, quick: bool) -> tuple[str, str]:
    """The time and rate of a kernel, and its share of the rate that can be had."""
    args = leaves(kernel, dtype, "cuda")
    out = kernel.call(*args)
    upstream = mg.ones(out.shape, dtype=dtype, device="cuda")
    del out

    def forward_and_backward() -> None:
        for leaf in args:
            leaf.grad = None
        kernel.call(*args).backward(upstream)

    seconds = device_seconds(forward_and_backward, 2 if quick else 20)
    rate = kernel.moved * dtype.itemsize / seconds
    share = max(rate / copied, kernel.flops / seconds / multiplied)
    return f"{seconds * 1e6:,.0f} µs, {rate / 1e12:.2f} TB/s", f"{share:.0%}"


def check_training(task: Task) -> Iterator[Row]:
    """A training step, in tokens a second, beside torch's."""
    yield from raced_steps(task, ["minigrad", "torch eager"], ["bfloat16", "tf32", "float32"])


def check_graphs(task: Task) -> Iterator[Row]:
    """A training step as a CUDA graph beside the same, launched kernel by kernel: losses, and the time of a step."""
    configs = {"tiny": TINY} if task.quick else GPU_CONFIGS
    yield from task.rows(
        (f"CUDA graph, {label}, {precision}", partial(captured, config, precision, 2 if task.quick else 10))
        for precision in ("bfloat16", "float32")
        for label, config in configs.items()
    )


def captured(config: Config, precision: str, steps: int) -> tuple[str, str]:
    """Times of a step, ordinary and captured, and how far the losses are from each other."""
    losses, seconds = [], []
    for wrap in (lambda step: step, mg.cuda.graph):
        step, draw = wrap(minigrad_step(config, precision, "cuda")), batches(config)
        losses.append([float(step(*next(draw))) for _ in range(steps)])
        batch = next(draw)
        seconds.append(timed(partial(step, *batch), steps))
    worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
    figure, verdict = judged(worst, 5e-2 if precision == "bfloat16" else 2e-3)
    return f"{seconds[0] * 1e3:.2f} ms, captured {seconds[1] * 1e3:.2f} ms, {figure}", verdict


def check_compiled(task: Task) -> Iterator[Row]:
    """The same with torch.compile, which takes its time to compile."""
    yield from raced_steps(task, ["torch.compile"], ["bfloat16", "tf32", "float32"])


def raced_steps(task: Task, engines: list[str], precisions: list[str]) -> Iterator[Row]:
    """Tokens a second of each engine at each config."""
    configs = {"tiny": TINY} if task.quick else GPU_CONFIGS
    yield from task.rows(
        (f"{label}, {precision}, {engine}", partial(tokens_per_second, config, precision, engine, task))
        for precision in precisions
        for label, config in configs.items()
        for engine in engines
    )


def tokens_per_second(config: Config, precision: str, engine: str, task: Task) -> tuple[str, str]:
    """The rate of an engine's training step."""
    mg.cuda.allow_tf32(precision == "tf32")
    try:
        step, batch = STEPS[engine](config, precision, "cuda"), next(batches(config))
    except ImportError as error:
        return str(error), "-"
    rate = config.tokens / timed(lambda: step(*batch), 2 if task.quick else 6)
    return f"{rate:,.0f} tokens/s", "-"
