"""What ``gpu_check.py`` measures on a GPU: a call of each kernel, and a training step of minigrad and of torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from harness.configs import ADAMW, CONFIGS, MAX_NORM, Config, initial_weights

import minigrad as mg
import nn
import optim
from gpu.task import Row
from minigrad.backend import load_cupy
from nn import functional as F

COPY_RATE, PRODUCT_RATE = 4.3e12, 790e12  # bytes/s and bfloat16 FLOP/s, assumed for an H200
GPU_CONFIGS = {
    "cs336, B=128": Config(**{**vars(CONFIGS["cs336"]), "batch_size": 128}),
    "12 x 768, T=1024": Config(32000, 768, 12, 12, 2048, 1024, 16),
}
WEIGHTS, ADAMW_BYTES = 100_000_000, 28  # for one: it, its gradient and two moments are read, all but that written
TINY = Config(65, 32, 1, 2, 64, 16, 2)


# ---- kernels ---------------------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """A call at the size of the 12-layer model: its arrays, and what it must at least do."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]
    moved: float  # elements read and written, forward and backward
    flops: float = 0.0  # of its products, which in half precision are on tensor cores
    tf32: bool = True  # whether those of float32 are there too under ``allow_tf32``


def kernels(batch: int, length: int, d: int, heads: int, d_ff: int, vocab: int) -> list[Kernel]:
    """Each operation that has kernels of its own on a GPU, forward and backward."""
    n, size = batch * length, d // heads
    rows, ids = (batch, length, d), np.random.default_rng(0).integers(0, vocab, (batch, length))
    split = (batch, heads, length, size)
    angles = np.outer(np.arange(length), np.ones(size // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    rope = lambda x: F.apply_rope(x, mg.asarray(cos, device=x.device), mg.asarray(sin, device=x.device))
    head = lambda x, w: F.linear_cross_entropy(x, w, ids)
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    padding = np.arange(length) < np.linspace(length / 2, length, batch)[:, None, None, None]

    def attend_padded(q: Any, k: Any, v: Any) -> Any:
        mg.random.seed(0)  # the same weights are dropped on every device
        mask = mg.asarray(padding, device=q.device)
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=True, dropout_p=0.1)

    attend_linearly = lambda q, k, v: F.linear_attention(q, k, v, is_causal=True)
    project = lambda x, *weights: sum(F.qkv_projection(x, *weights))
    feed = lambda x, w1, w3, w2, w: F.swiglu_ffn(x, w1, w3, w2, w / d)  # float16 holds the gradients
    narrow = 5 * n * d + 4 * n * d_ff + 6 * d * d_ff
    products = 2 * n * heads * size * (length + 1) / 2  # one of the seven products of causal attention
    return [
        Kernel("rms_norm", (rows, (d,)), lambda x, w: F.rms_norm(x, None, w), 5 * n * d),
        Kernel("layer_norm", (rows, (d,), (d,)), lambda x, w, b: F.layer_norm(x, None, w, b), 5 * n * d),
        Kernel("swiglu", ((n, d_ff), (n, d_ff)), F.swiglu, 8 * n * d_ff),
        Kernel("silu", ((n, d_ff),), F.silu, 5 * n * d_ff),
        Kernel("gelu", ((n, d_ff),), F.gelu, 5 * n * d_ff),
        Kernel("relu", ((n, d_ff),), F.relu, 5 * n * d_ff),
        Kernel("dropout", (rows,), lambda x: F.dropout(x, 0.1, generator=0), 4 * n * d),
        Kernel("softmax", (rows,), F.softmax, 5 * n * d),
        Kernel("log_softmax", (rows,), F.log_softmax, 5 * n * d),
        Kernel("apply_rope", (split,), rope, 4 * n * d),
        Kernel("embedding", ((vocab, d),), lambda w: F.embedding(ids, w), 3 * n * d + vocab * d),
        Kernel("cross_entropy", ((n, vocab),), lambda x: F.cross_entropy(x, ids.reshape(-1)), 3 * n * vocab),
        Kernel("linear_cross_entropy", (rows, (vocab, d)), head, 2 * (n + vocab) * d, 6 * n * vocab * d),
        Kernel("attention", (split, split, split), attend, 12 * n * d, 7 * products, False),
        Kernel("attention with padding and dropout", (split,) * 3, attend_padded, 12 * n * d, 7 * products, False),
        Kernel("qkv_projection", (rows, *[(d, d)] * 3, (d,)), project, 9 * n * d + 6 * d * d, 18 * n * d * d),
        Kernel("swiglu_ffn", (rows, *[(d_ff, d)] * 2, (d, d_ff), (d,)), feed, narrow, 18 * n * d * d_ff),
        Kernel("linear_attention", (split,) * 3, attend_linearly, 12 * n * d, 12 * n * d * size),
        Kernel("linear", (rows, (d_ff, d)), F.linear, 3 * n * (d + d_ff), 6 * n * d * d_ff),
    ]


def floors() -> list[Row]:
    """The least time of each kernel in bfloat16, and of AdamW in float32, at the rates above.

    Beside its FLOP stands the share that is done on tensor cores, and the one of float32 under ``allow_tf32``.
    """
    work = [
        (kernel.name, 2 * kernel.moved, kernel.flops, kernel.tf32) for kernel in kernels(16, 1024, 768, 12, 2048, 32000)
    ]
    rows: list[Row] = []
    for name, moved, flops, tf32 in [*work, ("AdamW, 100 million weights", WEIGHTS * ADAMW_BYTES, 0.0, False)]:
        least = max(moved / COPY_RATE, flops / PRODUCT_RATE)
        share = f", on tensor cores 100 %, TF32 {100 * tf32} %" if flops else ""
        rows.append((name, f"{moved / 1e6:,.0f} MB, {flops / 1e9:,.0f} GFLOP{share}", f"{least * 1e6:,.0f} µs"))
    return rows


def adamw(weights: int, device: str) -> Callable[[], None]:
    """A step of AdamW on so many weights, in eight parameters."""
    parameters = [mg.zeros(weights // 8, device=device, requires_grad=True) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = mg.ones(weights // 8, device=device).data
    return optim.AdamW(parameters).step


def leaves(kernel: Kernel, dtype: Any, device: str) -> list[mg.Tensor]:
    """Random arguments of a kernel, the same on every device."""
    draw = np.random.default_rng(1).standard_normal
    return [mg.Tensor(draw(s), dtype=dtype, device=device, requires_grad=True) for s in kernel.shapes]


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of a call, without the first ones."""
    for _ in range(3):
        call()
    mg.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    mg.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def device_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Seconds that the device works on a call, by its events.

    The host needs longer to launch a small kernel than the device to run it. So the calls are queued behind copies
    that keep the device busy for as long as the host needs.
    """
    cupy = load_cupy()
    source, target = (cupy.zeros(1 << 26, np.uint8) for _ in range(2))
    copy = timed(lambda: cupy.copyto(target, source), 3)
    started = time.perf_counter()
    for _ in range(3):
        call()
    needed = (time.perf_counter() - started) / 3 * repeats
    mg.cuda.synchronize()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(min(1000, 1 + int(2 * needed / copy))):
        cupy.copyto(target, source)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / repeats


# ---- training steps --------------------------------------------------------------------------------------------------


def minigrad_step(config: Config, precision: str, device: str) -> Callable[..., Any]:
    """A step of minigrad; what it returns is the loss, on the device."""
    sizes = (config.vocab_size, config.context_length, config.d_model, config.num_layers, config.num_heads, config.d_ff)
    model = nn.TransformerLM(*sizes, device=device)
    model.load_state_dict(initial_weights(config))
    optimizer = optim.AdamW(model.parameters(), **ADAMW)

    def step(tokens: Any, targets: Any) -> Any:
        with mg.autocast("bfloat16" if precision == "bfloat16" else "float32"):
            loss = model.loss(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optim.clip_grad_norm(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss

    return step


def torch_step(config: Config, precision: str, device: str, compiled: bool = False) -> Callable[..., Any]:
    """The same of torch, eager or compiled."""
    import torch
    from engines.torch_lm import TransformerLM

    if not torch.cuda.is_available():
        raise ImportError("torch without CUDA")
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    model = TransformerLM(config, initial_weights(config), compiled).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    forward = torch.compile(model) if compiled else model

    def step(tokens: Any, targets: Any) -> Any:
        ids = [torch.from_numpy(array).to(device, non_blocking=True) for array in (tokens, targets)]
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = forward(*ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss

    return step


STEPS: dict[str, Callable[..., Any]] = {
    "minigrad": minigrad_step,
    "torch eager": torch_step,
    "torch.compile": partial(torch_step, compiled=True),
}
