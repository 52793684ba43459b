"""What only some systems have, taken away: the fallbacks of docs/platforms.md, executed on whatever this machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minigrad.machine import allocator

ROOT = Path(__file__).parents[2]

WITHOUT = """
import os, runpy, sys
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None  # importing it fails, as on Windows
for name in ("sched_getaffinity", "sysconf", "register_at_fork", "fork"):
    if hasattr(os, name):
        delattr(os, name)
import ctypes
def no_library(name, *arguments, **options):
    if name is None:
        raise TypeError("the library of the process itself, as on Windows")
    return found(name, *arguments, **options)
found, ctypes.CDLL = ctypes.CDLL, no_library
"""

TRAIN = """
sys.argv = ["train_lm.py", "--max-iters", "4", "--eval-interval", "2", "--eval-iters", "1", "--n-layer", "1",
            "--n-embd", "32", "--out-dir", sys.argv[1], "--no-progress", *sys.argv[2:]]
sys.path[:0] = [{root!r}, {examples!r}]
runpy.run_path({examples!r} + "/train_lm.py", run_name="__main__")
"""


def program(tmp_path: Path, *code: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    script = tmp_path / "script.py"
    script.write_text("".join(code).format(root=str(ROOT), examples=str(ROOT / "examples")))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [sys.executable, str(script), *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


def test_training_and_resuming_without_what_windows_lacks(tmp_path: Path) -> None:
    """No locks, no number of usable cores, no size of the memory, no mallopt: the main job runs, and goes on."""
    run = program(tmp_path, WITHOUT, TRAIN)
    first = run("run")
    assert first.returncode == 0, first.stderr
    again = run("run", "--resume", "run", "--max-iters", "6")
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-2:] == [4, 6]
    assert sorted(path.parent.name for path in tmp_path.rglob("model.safetensors")) == [
        "step_00000004",
        "step_00000006",
    ]


MALLOPT = """
import sys
sys.path[:0] = [{root!r}]
import minigrad as mg
from minigrad.machine import allocator
x = mg.Tensor([1.0, 2.0], requires_grad=True)
(x * x).sum().backward()
assert x.grad.tolist() == [2.0, 4.0]
print(allocator.keep_freed_memory())
"""


def test_minigrad_works_where_nothing_is_asked_of_the_allocator(tmp_path: Path) -> None:
    done = program(tmp_path, WITHOUT, MALLOPT)()
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


class Musl:
    """A C library without glibc's functions, as on Alpine and macOS."""

    def __init__(self, name: Any) -> None:
        assert name is None


def glibc(calls: list[tuple[int, int]], granted: int) -> Callable[[Any], Any]:
    """A glibc that grants or refuses each call of mallopt."""

    def mallopt(parameter: int, value: int) -> int:
        calls.append((parameter, value))
        return granted

    return lambda name: SimpleNamespace(gnu_get_libc_version=None, mallopt=mallopt)


def test_mallopt_is_called_in_glibc_alone_and_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"):
        monkeypatch.delenv(name, raising=False)
    for granted in (1, 0):
        calls: list[tuple[int, int]] = []
        monkeypatch.setattr(allocator.ctypes, "CDLL", glibc(calls, granted))
        assert allocator.keep_freed_memory() is bool(granted)
        # M_MMAP_THRESHOLD is -3 and M_TRIM_THRESHOLD -1 in glibc's malloc.h; 32 MB is its largest threshold
        assert calls == [(-3, 32 * 2**20), (-1, 2**31 - 1)][: 1 + granted]
    monkeypatch.setattr(allocator.ctypes, "CDLL", Musl)
    assert allocator.keep_freed_memory() is False
