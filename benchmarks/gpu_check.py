"""Everything that only a real GPU can show, in under five minutes, with what is installed there.

    python benchmarks/gpu_check.py             all checks; one table last, and $OUT/gpu_check.json
    python benchmarks/gpu_check.py --only compare kernels
    python benchmarks/gpu_check.py --floors    the least time of each kernel, computed; needs no GPU

Each check is a process of its own, with a limit: a crash of the GPU, an error or a hang costs the rest of one check.
What was found until then is in $OUT/gpu_check.jsonl, a line for each row, as soon as it is known.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np
from gpu.work import (
    ADAMW_BYTES,
    GPU_CONFIGS,
    STEPS,
    TINY,
    WEIGHTS,
    Kernel,
    Row,
    adamw,
    floors,
    kernels,
    leaves,
    minigrad_step,
    timed,
)
from harness.configs import CONFIGS, Config, batches

import minigrad as mg
from minigrad.backend import as_dtype, load_cupy, to_numpy
from minigrad.ops import _gemm

# ---- the checks ------------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """How a check is to run: at tiny sizes, until when on the clock of ``perf_counter``, and where files go."""

    quick: bool
    deadline: float
    folder: Path

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def rows(self, calls: Iterable[tuple[str, Callable[[], tuple[str, str]]]]) -> Iterator[Row]:
        """A row for each of (what, call), with the figure and verdict that the call gives; an error is a row too."""
        for what, call in calls:
            if self.left() < 5:
                yield what, "no time left", "-"
                continue
            try:
                yield (what, *call())
            except Exception as error:
                traceback.print_exc()
                yield what, short(error), "FAILED"
            gc.collect()
            with contextlib.suppress(Exception):  # after a crash of the GPU nothing works
                load_cupy().get_default_memory_pool().free_all_blocks()


def short(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' | '.join(str(error).splitlines())}"[:200]


def judged(worst: float, tolerance: float) -> tuple[str, str]:
    """Figure and verdict of an error."""
    return f"off by {worst:.1e}", "ok" if worst < tolerance else "FAILED"


def difference(ours: Any, exact: Any) -> float:
    """The largest difference over the largest value, which counts as 1 at least."""
    return float(np.abs(ours - exact).max() / max(1.0, np.abs(exact).max()))


def check_machine(task: Task) -> Iterator[Row]:
    """What is installed, and what of it is missing."""
    for name in ("cupy-cuda12x", "cupy-cuda13x", "torch", "triton", "ml_dtypes", "pytest", "hypothesis"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name), "-"
    for name in ("torch", "ml_dtypes", "pytest", "hypothesis", "tqdm", "safetensors"):
        if importlib.util.find_spec(name) is None:
            yield name, "not installed: what needs it fails or is skipped below", "-"
    runtime = load_cupy().cuda.runtime
    calls = {
        "GPU": lambda: runtime.getDeviceProperties(0)["name"].decode(),
        "CUDA of the driver and of CuPy": lambda: f"{runtime.driverGetVersion()}, {runtime.runtimeGetVersion()}",
        "memory free and in all": lambda: "{:,} and {:,} bytes".format(*load_cupy().cuda.Device().mem_info),
        "gemmStridedBatchedEx": lambda: "found" if _gemm._function(load_cupy()) else "unknown: cupy.matmul instead",
    }
    yield from task.rows((what, lambda call=call: (call(), "-")) for what, call in calls.items())


def check_compare(task: Task) -> Iterator[Row]:
    """Each kernel's result and gradients beside those of the CPU."""
    sizes = (2, 37, 48, 3, 100, 130)  # that fill no block
    yield from task.rows(
        (f"{kernel.name}, {name}", lambda k=kernel, n=name, t=tolerance: judged(compared(k, n), t))
        for name, tolerance in (("float32", 2e-5), ("float16", 1e-2), ("bfloat16", 8e-2))
        for kernel in kernels(*sizes)
    )


def compared(kernel: Kernel, dtype: str) -> float:
    """The worst difference between the GPU and the CPU."""
    found = []
    for device in ("cpu", "cuda"):
        args = leaves(kernel, as_dtype(dtype), device)
        out = kernel.call(*args)
        out.sum().backward()
        found.append([to_numpy(x).astype(np.float64) for x in (out.data, *(a.grad for a in args))])
    return max(difference(ours, exact) for exact, ours in zip(*found, strict=True))


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
        (f"{layout}, {name}", lambda n=name, a=args, t=tolerance: judged(multiplied(n, *a), t))
        for name, tolerance in PRODUCTS.items()
        for layout, args in LAYOUTS.items()
    )
    shape = (2, 2, 32, 16) if task.quick else (16, 12, 1024, 64)
    yield from task.rows((f"q kᵀ {shape}, {name}", lambda n=name: raced(shape, n)) for name in PRODUCTS)


def in_precision(name: str) -> Any:
    """The dtype of a precision, and TF32 allowed or not."""
    mg.cuda.allow_tf32(name == "tf32")
    return as_dtype("float32" if name == "tf32" else name)


def multiplied(name: str, x_shape: Any, y_shape: Any, view_x: Any, view_y: Any) -> float:
    """How far off a product is."""
    dtype, draw = in_precision(name), np.random.default_rng(2).standard_normal
    hosts = [draw(shape).astype(dtype) for shape in (x_shape, y_shape)]
    exact = np.matmul(*(view(a.astype(np.float64)) for view, a in zip((view_x, view_y), hosts, strict=True)))
    x, y = (mg.asarray(a, device="cuda") for a in hosts)
    x, y = (a if view is np.asarray else view(a) for view, a in ((view_x, x), (view_y, y)))
    return difference(to_numpy(mg.matmul(x, y).data).astype(np.float64), exact)


def raced(shape: tuple[int, ...], name: str) -> tuple[str, str]:
    """The time of ``q kᵀ`` by strided calls and by CuPy."""
    dtype, draw = in_precision(name), np.random.default_rng(2).standard_normal
    q, k = (mg.asarray(draw(shape).astype(dtype), device="cuda").data for _ in range(2))
    ours, theirs = (timed(lambda f=f: f(q, k.swapaxes(-1, -2)), 5) for f in (mg.matmul, load_cupy().matmul))
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


def check_kernels(task: Task) -> Iterator[Row]:
    """Each kernel's rate beside that of a copy or a product, measured now."""
    copied, rate = copy_rate(1 << (16 if task.quick else 28)), product_rate(64 if task.quick else 8192)
    yield "copy", f"{copied / 1e12:.2f} TB/s", "-"
    yield "product, bfloat16", f"{rate / 1e12:.0f} TFLOP/s", "-"
    sizes = (2, 16, 32, 2, 64, 50) if task.quick else (16, 1024, 768, 12, 2048, 32000)
    yield from task.rows(
        (f"{kernel.name}, {name}", lambda k=kernel, d=name: achieved(k, as_dtype(d), copied, rate, task.quick))
        for name in ("bfloat16", "float32")
        for kernel in kernels(*sizes)
    )
    weights = 1 << 10 if task.quick else WEIGHTS
    yield from task.rows([("AdamW, float32", lambda: adamw_rate(weights, copied, 2 if task.quick else 10))])


def adamw_rate(weights: int, copied: float, repeats: int) -> tuple[str, str]:
    """The time and rate of an optimizer step, and its share of the rate of a copy."""
    seconds = timed(adamw(weights, "cuda"), repeats)
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
    seconds = timed(lambda: mg.grad(kernel.call(*args), args, upstream), 2 if quick else 10)
    rate = kernel.moved * dtype.itemsize / seconds
    share = max(rate / copied, kernel.flops / seconds / multiplied)
    return f"{seconds * 1e6:,.0f} µs, {rate / 1e12:.2f} TB/s", f"{share:.0%}"


def check_training(task: Task) -> Iterator[Row]:
    """A training step, in tokens a second, beside torch's."""
    yield from raced_steps(task, ["minigrad", "torch eager"], ["bfloat16", "tf32", "float32"])


def check_compiled(task: Task) -> Iterator[Row]:
    """The same with torch.compile, which takes its time to compile."""
    yield from raced_steps(task, ["torch.compile"], ["bfloat16", "tf32", "float32"])


def raced_steps(task: Task, engines: list[str], precisions: list[str]) -> Iterator[Row]:
    """Tokens a second of each engine at each config."""
    configs = {"tiny": TINY} if task.quick else GPU_CONFIGS
    yield from task.rows(
        (f"{label}, {precision}, {engine}", lambda c=config, p=precision, e=engine: tokens_per_second(c, p, e, task))
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


SUITE = {
    "kernels, products": ["test_kernels.py", "test_batched_products.py", "test_optim_on_gpu.py"],
    "training, precision": ["test_training_on_gpu.py", "test_autocast.py", "test_arguments_on_gpu.py"],
    **{
        f"operations, {dtype}": ["test_registry_on_gpu.py", "-k", pattern]
        for dtype, pattern in (
            *(("float32", "float32"), ("float64", "float64")),
            *(("float16", "float16 and not bfloat16"), ("bfloat16", "bfloat16")),
        )
    },
}


def check_suite(task: Task) -> Iterator[Row]:
    """The tests of the GPU on the real one: several processes at once, since most of the time goes into compilers."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider"]
    command += ["-p", "no:benchmark", "--device", "cuda"]  # pytest-benchmark turns its warnings into errors
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        running = {}
        for k, (label, (name, *rest)) in enumerate(SUITE.items()):
            log = files.enter_context(open(Path(folder, f"{k}.log"), "w+"))
            arguments = [f"tests/gpu/{part}" if part.endswith(".py") else part for part in (name, *rest)]
            running[label] = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=log, stderr=log), log
        with open(task.folder / "gpu_check_suite.log", "w") as all_logs:
            for label, (process, log) in running.items():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(1.0, task.left() - 5))
                late = process.poll() is None
                process.kill()
                log.seek(0)
                text = log.read()
                all_logs.write(f"==== {label}\n{text}\n")
                last = (text.strip() or "no output").splitlines()[-1]
                yield label, f"stopped: {last}"[:120] if late else last, "ok" if process.poll() == 0 else "FAILED"


def check_sanitizer(task: Task) -> Iterator[Row]:
    """The comparison under compute-sanitizer, which sees every address."""
    tool = shutil.which("compute-sanitizer")
    if not tool:
        yield "compute-sanitizer", "not installed", "-"
        return
    command = [tool, "--error-exitcode", "9", sys.executable, __file__, "--here", "--only", "compare"]
    environment = {**os.environ, "OUT": tempfile.mkdtemp()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(1, task.left() - 5), env=environment)
    (task.folder / "gpu_check_sanitizer.log").write_text(done.stdout + done.stderr)
    found = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "Error:" in line]
    yield "compute-sanitizer", (found or ["said nothing"])[-1], "ok" if done.returncode == 0 else "FAILED"


CHECKS: dict[str, tuple[Callable[[Task], Iterator[Row]], float]] = {  # with their limits in seconds
    "machine": (check_machine, 25),
    "products": (check_products, 45),
    "compare": (check_compare, 60),
    "losses": (check_losses, 50),
    "kernels": (check_kernels, 60),
    "training": (check_training, 90),
    "suite": (check_suite, 100),
    "sanitizer": (check_sanitizer, 45),
    "compiled": (check_compiled, 120),
}


def run_here(name: str, flags: argparse.Namespace, folder: Path) -> None:
    """Run a check in this process, and write each row as soon as it is known."""
    started = time.perf_counter()
    with open(folder / "gpu_check.jsonl", "a") as file:

        def write(row: Row) -> None:
            print(*row, sep="  ", flush=True)
            file.write(json.dumps([name, *row]) + "\n")
            file.flush()

        try:
            for row in CHECKS[name][0](Task(flags.quick, started + flags.seconds, folder)):
                write(row)
        except Exception as error:  # the next check can still tell something
            traceback.print_exc()
            write((name, short(error), "FAILED"))
        write((f"-- {name}", f"{time.perf_counter() - started:.0f} s", ""))


def run_apart(name: str, seconds: float, quick: bool, folder: Path) -> None:
    """Run a check in a process of its own, and stop it a little after its time."""
    command = [sys.executable, __file__, "--here", "--only", name, "--seconds", str(seconds)]
    command += ["--quick"] if quick else []
    process = subprocess.Popen(command, start_new_session=True)
    ended = "stopped: it did not end in time"
    with contextlib.suppress(subprocess.TimeoutExpired):
        ended = f"ended with code {process.wait(seconds)}"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with all that it started
    process.wait()
    if process.returncode:
        note(folder, name, ended, "FAILED")


def note(folder: Path, name: str, what: str, verdict: str) -> None:
    """Write a row about a check as a whole."""
    with open(folder / "gpu_check.jsonl", "a") as file:
        file.write(json.dumps([name, f"-- {name}", what, verdict]) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run the checks, print the table, and return how many rows failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--seconds", type=float, default=290, help="in all (default: %(default)s)")
    parser.add_argument("--here", action="store_true", help="in this process, so that an error can end all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a test of this program")
    parser.add_argument("--floors", action="store_true", help="the least time of each kernel, and nothing else")
    flags = parser.parse_args(argv)
    if flags.floors:
        show(floors())
        return 0
    if flags.here and not mg.cuda.is_available():
        print("found no GPU", file=sys.stderr)
        return 1
    folder, end = Path(os.environ.get("OUT", ".")), time.perf_counter() + flags.seconds
    if not flags.here:
        (folder / "gpu_check.jsonl").unlink(missing_ok=True)
    for name in flags.only:
        if flags.here:
            run_here(name, flags, folder)
        elif end - time.perf_counter() > 10:
            limit = CHECKS[name][1] * max(1, flags.seconds / 290)
            run_apart(name, min(limit, end - time.perf_counter()), flags.quick, folder)
            collected(folder)
        else:
            note(folder, name, "left out: no time was left", "-")
    if flags.here:
        return 0
    rows = collected(folder)
    print()
    show(rows)
    return sum(verdict == "FAILED" for *_, verdict in rows)


def collected(folder: Path) -> list[Row]:
    """All rows so far, which are also written as one JSON file with the facts of the run."""
    file = folder / "gpu_check.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    facts = {"python": sys.version.split()[0], "numpy": np.__version__, "date": time.strftime("%Y-%m-%d")}
    rows = [(what, figure, verdict) for _, what, figure, verdict in lines]
    (folder / "gpu_check.json").write_text(json.dumps({"facts": facts, "rows": lines}, indent=1))
    return [("versions", str(facts), ""), *rows]


def show(rows: list[Row]) -> None:
    """Print rows in columns."""
    widths = [max(len(row[k]) for row in rows) for k in range(2)]
    for what, figure, verdict in rows:
        print(f"{what:{widths[0]}}  {figure:{widths[1]}}  {verdict}")


if __name__ == "__main__":
    sys.exit(main())
