"""The process of one engine: it builds the model, then does what it is told, one line of JSON for each command.

    cd benchmarks && python -m harness.worker '{"engine": "torch", "config": [...], "weights": "/tmp/w.safetensors"}'

Commands come as lines on standard input; replies leave by what was standard output when the process started, so that a
library that prints disturbs nobody. The parent's side is ``processes.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from engines import ENGINES
from safetensors.numpy import load_file

from harness import measuring
from harness.configs import Config, batches


class Trainer:
    """An engine at work on one config. Each public method is a command; what it returns is the reply."""

    def __init__(self, engine: str, config: Config, weights: str) -> None:
        self.module, options = ENGINES[engine].load()
        imported_mb, start = measuring.resident_mb(), time.perf_counter()
        if compile_step := getattr(self.module, "compile_step", None):
            compile_step(config, **options)
            measuring.trim()
        self.compile_s = time.perf_counter() - start
        measuring.reset_peak()
        self.ready_mb = measuring.resident_mb()
        self.compiler_mb = self.ready_mb - imported_mb
        self.train = self.module.training_step(config, load_file(weights), **options)
        self.batches = batches(config)

    def origin(self) -> str:
        """The folder that minigrad was imported from, where the engine is minigrad, with numba or without."""
        return str(Path(sys.modules["minigrad"].__file__ or "").resolve().parent.parent)

    def first_step(self) -> dict[str, Any]:
        """One step, and its loss; the time includes that of the compiler, in the first one."""
        seconds, loss = self._step(*next(self.batches))
        seconds, self.compile_s = seconds + self.compile_s, 0.0
        return {"seconds": seconds, "loss": loss}

    def turn(self, seconds: float, least: int = 1) -> dict[str, Any]:
        """Steps for about ``seconds``, at least so many, after one that wakes threads and caches and doesn't count."""
        times: list[float] = []
        start = time.perf_counter()
        self._step(*next(self.batches))
        while len(times) < least or time.perf_counter() - start < seconds:
            times.append(self._step(*next(self.batches))[0])
        return {"seconds": times, "memory_mb": self.memory(), "compiler_mb": self.compiler_mb}

    def memory(self) -> float:
        """Peak memory above that after the import, and after what ``compile_step`` left, in MB."""
        return measuring.peak_mb() - self.ready_mb

    def trace_memory(self, steps: int) -> list[float]:
        """Memory above that at the start, in MB, after each of ``steps`` steps."""
        held: list[float] = []
        for _ in range(steps):
            self._step(*next(self.batches))
            held.append(measuring.resident_mb() - self.ready_mb)
        return held

    def product_gflops(self) -> float:
        """The rate of the engine's own matrix products."""
        return measuring.product_gflops(self.module.multiplier)

    def profile(self, steps: int) -> dict[str, float] | None:
        """The share of each operation in the time of a step, where the engine can tell."""
        profile = getattr(self.module, "profile", None)
        return profile and profile(self.train, [next(self.batches) for _ in range(steps)])

    def _step(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
        start = time.perf_counter()
        loss = self.train(tokens, targets)
        return time.perf_counter() - start, loss


def serve(make: Callable[..., Any], arguments: dict[str, Any], commands: Iterator[str], replies: Any) -> None:
    """Answer commands until there are no more, or one fails."""

    def reply(**message: Any) -> None:
        print(json.dumps(message), file=replies, flush=True)

    try:
        worker = make(**arguments)
        reply(value=None)
        for line in commands:
            command = json.loads(line)
            reply(value=getattr(worker, command.pop("do"))(**command))
    except Exception as error:
        traceback.print_exc()
        reply(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    what = json.loads(sys.argv[1])
    what["config"] = Config(*what["config"])
    serve(Trainer, what, iter(sys.stdin.readline, ""), replies)
