"""Runs CUDA kernels on the CPU: the ``.cu`` is compiled as C++ behind ``cuda_shim.h``, where threads are fibers."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minigrad.kernels.cuda.launching import DECLARED

SHIM = Path(__file__).with_name("cuda_shim.h")
COMPILER = shutil.which("g++") or shutil.which("clang++")


@functools.cache
def folder() -> Path:
    """Where compiled kernels are kept until the process ends, or for good where ``MINIGRAD_SHIM_CACHE`` says."""
    kept = os.environ.get("MINIGRAD_SHIM_CACHE")
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
        return Path(kept)
    _temporary.append(tempfile.TemporaryDirectory(prefix="minigrad-kernels-"))
    return Path(_temporary[0].name)


_temporary: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def compiled(code: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """The kernels of a source as a library with an ordinary function ``run_<name>`` for each."""
    assert COMPILER, "needs g++ or clang++"
    source = f'#include "{SHIM}"\n#line 1 "kernel.cu"\n{code}\n' + "\n".join(map(_entry, DECLARED.findall(code)))
    double = "-DELEMENT=double" in options  # whose small numbers are kept
    defines = [option for option in (*options, f"-DFLUSH={int(not double)}") if option.startswith("-D")]
    key = hashlib.sha256(repr((source, defines, SHIM.read_text())).encode()).hexdigest()[:24]
    library = folder() / f"{key}.so"
    if not library.exists():
        text = library.with_suffix(f".{os.getpid()}.cpp")
        text.write_text(source)
        made = library.with_suffix(f".{os.getpid()}.tmp")
        command = [
            COMPILER,
            "-std=c++17",
            "-O2",
            "-fPIC",
            "-shared",
            "-w",
            "-ffp-contract=off",
            "-U_FORTIFY_SOURCE",
            *defines,
        ]
        subprocess.run([*command, str(text), "-o", str(made)], check=True)
        text.unlink()
        made.rename(library)
    return ctypes.CDLL(str(library))


def _entry(kernel: tuple[str, str]) -> str:
    """A function that launches a kernel with arguments taken from an array of pointers to them."""
    name, parameters = kernel
    types = [re.sub(r"\b(__restrict__|\w+)\s*$", "", p.strip()).strip() for p in parameters.split(",")]
    types = [re.sub(r"__restrict__", "", t).strip() for t in types]
    arguments = ", ".join(f"*({t}*)args[{k}]" for k, t in enumerate(types))
    return f'extern "C" void run_{name}(const unsigned* shape, int order, void** args) {{\n' \
           f"  shim::launch(shape, order, FLUSH, [&] {{ {name}({arguments}); }});\n}}"  # fmt: skip


launched: Counter[str] = Counter()  # how often each kernel ran, by "file.cu: name"
order = 0  # in which the threads of a block take turns: 0 ascending, 1 descending; the results must not differ


def load(code: str, options: Sequence[str], name: str) -> Callable[[Any, Any, Any], None]:
    """The kernel ``name`` as a function of grid, block and arguments (NumPy arrays and scalars of exact types)."""
    function = getattr(compiled(code, tuple(options)), f"run_{name}")

    files = re.findall(r'#line 1 "(.*)"', code)

    def run(grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
        boxes = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in args]
        kept = [box if isinstance(box, ctypes.c_void_p) else np.atleast_1d(box) for box in boxes]
        for box in kept:
            assert isinstance(box, ctypes.c_void_p) or box.dtype.itemsize in (1, 4, 8), "scalars need a type of C's"
        pointers = (ctypes.c_void_p * len(kept))(
            *[ctypes.addressof(b) if isinstance(b, ctypes.c_void_p) else b.ctypes.data for b in kept]
        )
        if files:  # a kernel of ours, not the one that tries the device out
            launched[f"{files[-1]}: {name}"] += 1
        shape = (ctypes.c_uint * 6)(*[*grid, 1, 1][:3], *[*block, 1, 1][:3])
        function(shape, order, pointers)

    return run
