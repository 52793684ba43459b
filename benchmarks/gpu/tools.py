"""What is installed, and what other programs find: the test suite and compute-sanitizer."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gpu.task import Row, Task
from minigrad.backend import load_cupy
from minigrad.ops import _gemm

ROOT = Path(__file__).resolve().parents[2]


def check_machine(task: Task) -> Iterator[Row]:
    """What is installed, and what of it is missing."""
    for name in ("cupy-cuda12x", "cupy-cuda13x", "torch", "triton", "ml_dtypes", "pytest", "hypothesis"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name), "-"
    for name in ("torch", "ml_dtypes", "pytest", "hypothesis", "tqdm", "safetensors"):
        if importlib.util.find_spec(name) is None:
            yield name, "not installed: what needs it fails or is skipped below", "-"
    runtime = load_cupy().cuda.runtime
    calls: dict[str, Callable[[], str]] = {
        "GPU": lambda: runtime.getDeviceProperties(0)["name"].decode(),
        "CUDA of the driver and of CuPy": lambda: f"{runtime.driverGetVersion()}, {runtime.runtimeGetVersion()}",
        "memory free and in all": lambda: "{:,} and {:,} bytes".format(*load_cupy().cuda.Device().mem_info),
        "gemmStridedBatchedEx": lambda: "found" if _gemm._function(load_cupy()) else "unknown: cupy.matmul instead",
    }

    def told(call: Callable[[], str]) -> Callable[[], tuple[str, str]]:
        return lambda: (call(), "-")

    yield from task.rows((what, told(call)) for what, call in calls.items())


OF_THE_HOST = {"test_compiled.py", "test_gpu_check.py", "test_simulated.py"}  # they launch nothing on a real GPU
DTYPES = {name: name for name in ("float32", "float64", "bfloat16")} | {"float16": "float16 and not bfloat16"}


def suite() -> dict[str, list[str]]:
    """What pytest is told, for each process: operations in one dtype, or a third of the other files of tests/gpu."""
    runs = {f"operations, {dtype}": ["test_registry_on_gpu.py", "-k", pattern] for dtype, pattern in DTYPES.items()}
    others = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")} - {"test_registry_on_gpu.py"}
    others -= OF_THE_HOST
    for third in (sorted(others)[k::3] for k in range(3)):
        runs[", ".join(name[5:-3].removesuffix("_on_gpu") for name in third)] = third
    return runs


def check_suite(task: Task) -> Iterator[Row]:
    """The tests of the GPU on the real one: several processes at once, since most of the time goes into compilers."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider"]
    command += ["-p", "no:benchmark", "--device", "cuda"]  # pytest-benchmark turns its warnings into errors
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        running = {}
        for k, (label, (name, *rest)) in enumerate(suite().items()):
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
    command = [
        tool,
        "--error-exitcode",
        "9",
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_check.py"),
        "--here",
        "--only",
        "compare",
    ]
    environment = {**os.environ, "OUT": tempfile.mkdtemp()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(1, task.left() - 5), env=environment)
    (task.folder / "gpu_check_sanitizer.log").write_text(done.stdout + done.stderr)
    found = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "Error:" in line]
    yield "compute-sanitizer", (found or ["said nothing"])[-1], "ok" if done.returncode == 0 else "FAILED"
