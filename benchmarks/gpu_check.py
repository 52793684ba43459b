"""Everything that only a real GPU can show, in under five minutes, with what is installed there.

    python benchmarks/gpu_check.py             all checks; one table last, and $OUT/gpu_check.json
    python benchmarks/gpu_check.py --only compare kernels
    python benchmarks/gpu_check.py --floors    the least time of each kernel, computed; needs no GPU

A check that fails says so in the table and the next one runs. torch is asked where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np
from harness.configs import ADAMW, CONFIGS, MAX_NORM, Config, batches, initial_weights

import minigrad as mg
import nn
import optim
from minigrad.backend import as_dtype, load_cupy, to_numpy
from nn import functional as F

COPY_RATE, PRODUCT_RATE = 4.3e12, 790e12  # bytes/s and bfloat16 FLOP/s that one H200 was measured at
GPU_CONFIGS = {
    "cs336, B=128": Config(**{**vars(CONFIGS["cs336"]), "batch_size": 128}),
    "12 x 768, T=1024": Config(32000, 768, 12, 12, 2048, 1024, 16),
}
TINY = Config(65, 32, 1, 2, 64, 16, 2)
Row = tuple[str, str, str]  # what was checked, the figure, and whether it is as it should be


# ---- kernels ---------------------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """A call at the size of the 12-layer model: its arrays, and what it must at least do."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]
    moved: float  # elements read and written, forward and backward
    flops: float = 0.0


def kernels(batch: int, length: int, d: int, heads: int, d_ff: int, vocab: int) -> list[Kernel]:
    """Each fused operation, forward and backward."""
    n, size = batch * length, d // heads
    rows, ids = (batch, length, d), np.random.default_rng(0).integers(0, vocab, (batch, length))
    split = (batch, heads, length, size)
    angles = np.outer(np.arange(length), np.ones(size // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    rope = lambda x: F.apply_rope(x, *(mg.asarray(t, device=x.device) for t in (cos, sin)))
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    products = 2 * n * heads * size * (length + 1) / 2  # one of the seven products of causal attention
    return [
        Kernel("rms_norm", (rows, (d,)), lambda x, w: F.rms_norm(x, None, w), 5 * n * d),
        Kernel("layer_norm", (rows, (d,), (d,)), lambda x, w, b: F.layer_norm(x, None, w, b), 5 * n * d),
        Kernel("swiglu", ((n, d_ff), (n, d_ff)), F.swiglu, 8 * n * d_ff),
        Kernel("gelu", ((n, d_ff),), F.gelu, 5 * n * d_ff),
        Kernel("softmax", (rows,), F.softmax, 5 * n * d),
        Kernel("log_softmax", (rows,), F.log_softmax, 5 * n * d),
        Kernel("apply_rope", (split,), rope, 4 * n * d),
        Kernel("embedding", ((vocab, d),), lambda w: F.embedding(ids, w), 3 * n * d + vocab * d),
        Kernel("cross_entropy", ((n, vocab),), lambda x: F.cross_entropy(x, ids.reshape(-1)), 3 * n * vocab),
        Kernel("attention", (split, split, split), attend, 12 * n * d, 7 * products),
        Kernel("linear", (rows, (d_ff, d)), F.linear, 3 * n * (d + d_ff), 6 * n * d * d_ff),
    ]


def floors() -> list[Row]:
    """The least time of each kernel in bfloat16, at the rates above."""
    rows: list[Row] = []
    for kernel in kernels(16, 1024, 768, 12, 2048, 32000):
        moved, flops = 2 * kernel.moved, kernel.flops
        least = max(moved / COPY_RATE, flops / PRODUCT_RATE)
        rows.append((kernel.name, f"{moved / 1e6:,.0f} MB, {flops / 1e9:,.0f} GFLOP", f"{least * 1e6:,.0f} µs"))
    return rows


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


# ---- the checks ------------------------------------------------------------------------------------------------------


def check_suite(quick: bool) -> Iterator[Row]:
    """The tests of the GPU on the real one."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--device", "cuda", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    yield "tests/gpu", last, "ok" if done.returncode == 0 else "FAILED"


def check_compare(quick: bool) -> Iterator[Row]:
    """Each kernel's result and gradients beside those of the CPU."""
    for name, tolerance in (("float32", 2e-5), ("float16", 1e-2), ("bfloat16", 8e-2)):
        for kernel in kernels(2, 37, 48, 3, 100, 130):  # sizes that fill no block
            found = []
            for device in ("cpu", "cuda"):
                args = leaves(kernel, as_dtype(name), device)
                out = kernel.call(*args)
                out.sum().backward()
                found.append([to_numpy(x).astype(np.float64) for x in (out.data, *(a.grad for a in args))])
            pairs = zip(*found, strict=True)
            worst = max(np.abs(a - b).max() / max(1.0, np.abs(a).max()) for a, b in pairs)
            yield f"{kernel.name}, {name}", f"off by {worst:.1e}", "ok" if worst < tolerance else "FAILED"


def check_sanitizer(quick: bool) -> Iterator[Row]:
    """The same under compute-sanitizer, which sees every address."""
    tool = shutil.which("compute-sanitizer")
    if not tool:
        yield "compute-sanitizer", "not installed", "-"
        return
    command = [tool, "--error-exitcode", "9", sys.executable, __file__, "--only", "compare"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    yield "compute-sanitizer", done.stdout.strip().splitlines()[-1], "ok" if done.returncode == 0 else "FAILED"


def check_losses(quick: bool) -> Iterator[Row]:
    """A small model's losses beside the CPU's, and the pool's size on the way."""
    config = TINY if quick else CONFIGS["nano"]
    steps = 3 if quick else 50
    curves = []
    for device in ("cpu", "cuda"):
        step, draw = minigrad_step(config, "float32", device), batches(config)
        curves.append([float(step(*next(draw)).item()) for _ in range(steps)])
    worst = max(abs(a - b) for a, b in zip(*curves, strict=True))
    yield f"{steps} losses beside the CPU's", f"off by {worst:.1e}", "ok" if worst < 2e-3 else "FAILED"
    pool, sizes = load_cupy().get_default_memory_pool(), []
    for _ in range(2):
        for _ in range(steps * 2):
            step(*next(draw))
        mg.cuda.synchronize()
        sizes.append(pool.total_bytes())
    flat = sizes[0] == sizes[1]
    yield f"memory over {4 * steps} steps", f"{sizes[0]:,} to {sizes[1]:,} bytes", "ok" if flat else "FAILED"


def check_kernels(quick: bool) -> Iterator[Row]:
    """Each kernel's rate beside that of a copy or a product, measured now."""
    cupy = load_cupy()
    n = 1 << (16 if quick else 28)
    source, target = cupy.zeros(n, np.float32), cupy.empty(n, np.float32)
    copied = 8 * n / timed(lambda: cupy.copyto(target, source), 3)
    side = 64 if quick else 8192
    a = mg.ones((side, side), dtype=as_dtype("bfloat16"), device="cuda").data
    multiplied = 2 * side**3 / timed(lambda: cupy.matmul(a, a), 3)
    yield "copy", f"{copied / 1e12:.2f} TB/s", "-"
    yield "product, bfloat16", f"{multiplied / 1e12:.0f} TFLOP/s", "-"
    sizes = (2, 16, 32, 2, 64, 50) if quick else (16, 1024, 768, 12, 2048, 32000)
    for name in ("float32", "bfloat16"):
        dtype = as_dtype(name)
        for kernel in kernels(*sizes):
            args = leaves(kernel, dtype, "cuda")
            upstream = mg.Tensor(np.ones(np.shape(kernel.call(*args))), dtype=dtype, device="cuda")
            seconds = timed(lambda k=kernel, a=args, g=upstream: mg.grad(k.call(*a), a, g), 2 if quick else 10)
            rate = kernel.moved * dtype.itemsize / seconds
            share = max(rate / copied, kernel.flops / seconds / multiplied)
            yield f"{kernel.name}, {name}", f"{seconds * 1e6:,.0f} µs, {rate / 1e12:.2f} TB/s", f"{share:.0%}"


def check_training(quick: bool) -> Iterator[Row]:
    """A training step, in tokens a second, beside torch's."""
    configs = {"tiny": TINY} if quick else GPU_CONFIGS
    for label, config in configs.items():
        for precision in ("float32", "tf32", "bfloat16"):
            mg.cuda.allow_tf32(precision == "tf32")
            for engine, make in STEPS.items():
                with contextlib.suppress(ImportError):
                    step, draw = make(config, precision, "cuda"), batches(config)
                    batch = next(draw)
                    rate = config.tokens / timed(lambda s=step, b=batch: s(*b), 2 if quick else 8)
                    yield f"{label}, {precision}, {engine}", f"{rate:,.0f} tokens/s", "-"


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
    model = TransformerLM(config).to(device)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in initial_weights(config).items()})
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
    "torch.compile": lambda *facts: torch_step(*facts, compiled=True),
}
CHECKS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "compare": check_compare,
    "losses": check_losses,
    "kernels": check_kernels,
    "training": check_training,
    "sanitizer": check_sanitizer,
    "suite": check_suite,
}


def main(argv: list[str] | None = None) -> int:
    """Run the checks, print the table, and return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a test of this program")
    parser.add_argument("--floors", action="store_true", help="the least time of each kernel, and nothing else")
    flags = parser.parse_args(argv)
    if flags.floors:
        show(floors())
        return 0
    if not mg.cuda.is_available():
        print("found no GPU", file=sys.stderr)
        return 1
    rows: list[Row] = []
    for name in flags.only:
        started = time.perf_counter()
        try:
            for row in CHECKS[name](flags.quick):
                rows.append(row)
                print(*row, sep="  ", flush=True)
        except Exception as error:  # the next check can still tell something
            traceback.print_exc()
            rows.append((name, f"{type(error).__name__}: {error}".partition("\n")[0][:100], "FAILED"))
        rows.append((f"-- {name}", f"{time.perf_counter() - started:.0f} s", ""))
    facts = {"cupy": load_cupy().__version__, "numpy": np.__version__, "date": time.strftime("%Y-%m-%d")}
    folder = Path(os.environ.get("OUT", "."))
    (folder / "gpu_check.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1))
    print()
    show([("versions", str(facts), ""), *rows])
    return sum(verdict == "FAILED" for *_, verdict in rows)


def show(rows: list[Row]) -> None:
    """Print rows in columns."""
    widths = [max(len(row[k]) for row in rows) for k in range(2)]
    for what, figure, verdict in rows:
        print(f"{what:{widths[0]}}  {figure:{widths[1]}}  {verdict}")


if __name__ == "__main__":
    sys.exit(main())
