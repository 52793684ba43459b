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
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np
from gpu.correctness import check_compare, check_losses, check_products
from gpu.measured_kernels import floors
from gpu.speed import check_compiled, check_graphs, check_kernels, check_training
from gpu.task import Row, Task, short
from gpu.tools import check_machine, check_sanitizer, check_suite

import minigrad as mg

CHECKS: dict[str, tuple[Callable[[Task], Iterator[Row]], float]] = {  # with their limits in seconds
    "machine": (check_machine, 25),
    "products": (check_products, 45),
    "compare": (check_compare, 60),
    "losses": (check_losses, 50),
    "kernels": (check_kernels, 60),
    "training": (check_training, 90),
    "graphs": (check_graphs, 40),
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
