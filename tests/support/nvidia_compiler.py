"""NVIDIA's own compiler, from wheels or a CUDA installation, on a machine without a GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

FLAGS = ["-std=c++17", "-default-device"]


class Report(NamedTuple):
    """What ptxas says of one kernel."""

    name: str
    registers: int
    spilled: int  # bytes that are stored to memory for want of registers
    shared: int  # bytes


def _wheel(*parts: str) -> Path | None:
    """A file of one of the nvidia-* wheels."""
    found = find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        for match in sorted(Path(folder).glob(str(Path(*parts)))):
            return match
    return None


NVRTC = _wheel("cuda_nvrtc", "lib", "libnvrtc.so.*")
PTXAS = _wheel("cuda_nvcc", "bin", "ptxas") or (Path(found) if (found := shutil.which("ptxas")) else None)


def to_ptx(code: str, options: Sequence[str], target: str) -> str:
    """PTX of CUDA source, by NVRTC; any error or warning raises a RuntimeError with the compiler's words."""
    library = ctypes.CDLL(str(NVRTC))
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None)
    flags = [*options, f"--gpu-architecture=compute_{target}", "-ftz=true"]  # as CuPy does
    texts = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
    status = library.nvrtcCompileProgram(program, len(flags), texts)
    log, ptx = (_text(library, program, kind) for kind in ("ProgramLog", "PTX"))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if status or log.strip():
        raise RuntimeError(log)
    return ptx


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, kind: str) -> str:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{kind}")(program, text)
    return text.value.decode()


def assemble(ptx: str, target: str) -> list[Report]:
    """Registers and spills of the kernels in PTX, by ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [str(PTXAS), "-v", "-Werror", f"-arch=sm_{target}", str(source), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True)
    if said.returncode:
        raise RuntimeError(said.stderr)
    pattern = r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers([^\n]*)"
    reports = []
    for name, spilled, registers, rest in re.findall(pattern, said.stderr, re.S):
        shared = re.search(r"(\d+) bytes smem", rest)
        reports.append(Report(name, int(registers), int(spilled), int(shared.group(1)) if shared else 0))
    return reports
