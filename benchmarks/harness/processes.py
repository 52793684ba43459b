"""The processes of the engines, from the parent's side: started in the same environment, told to work one at a time."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from engines import ENGINES

from harness.configs import Config

LEAST_FREE_MB = 1024  # a worker is ended before the machine runs out of memory
MEMINFO = Path("/proc/meminfo")
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "MINIGRAD_NUM_THREADS",
)


class WorkerError(Exception):
    """Why a worker can't go on, in words for the table."""


class Worker:
    """A process with one engine and one config; ``ask`` has it carry out a command of ``worker.py``.

    threads: cores that it may use, for every engine alike; None for all of them and whatever the environment says.
    checkout: the folder whose packages it imports; None for those that are installed.
    """

    def __init__(
        self,
        engine: str,
        config: Config,
        weights: Path,
        threads: int | None,
        log: Path,
        checkout: Path | None = None,
    ) -> None:
        environment = dict(os.environ) | ENGINES[engine].environment
        if checkout is not None:
            environment["PYTHONPATH"] = str(checkout)
        if threads is not None:
            environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
        what = {"engine": engine, "config": astuple(config), "weights": str(weights)}
        command = [sys.executable, "-m", "harness.worker", json.dumps(what)]
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=Path(__file__).parent.parent,
                env=environment,
                preexec_fn=_pin_to(threads),
            )
        self.answers = selectors.DefaultSelector()
        assert self.process.stdout is not None
        self.answers.register(self.process.stdout, selectors.EVENT_READ)

    def start(self, timeout: float) -> None:
        """Wait until the model is built."""
        self._answer(timeout)

    def ask(self, do: str, timeout: float = 600, **arguments: Any) -> Any:
        """Have a command carried out, and wait for the reply."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"the process ended (see {self.log})") from None
        return self._answer(timeout)

    def _answer(self, timeout: float) -> Any:
        assert self.process.stdout is not None
        end = time.monotonic() + timeout
        while not self.answers.select(timeout=0.5):
            if time.monotonic() > end:
                self.close()
                raise WorkerError(f"no answer within {timeout:.0f} s")
            if _free_mb() < LEAST_FREE_MB:
                self.close()
                raise WorkerError("not enough memory")
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(f"the process ended (see {self.log})")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pin_to(threads: int | None) -> Callable[[], None] | None:
    """What a worker runs first: libraries size their thread pools by the cores that they may use."""
    if threads is None or not hasattr(os, "sched_setaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return lambda: os.sched_setaffinity(0, cores)


def _free_mb() -> float:
    if not MEMINFO.exists():
        return float("inf")
    fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / 1024
