"""The engines that are compared: one file each, with the same model, loss, clipping and optimizer.

A file holds

- ``training_step(config, weights, **options)``: a function of tokens and targets, int64 (batch, sequence), that does
  one step (forward, cross-entropy, backward, clip to norm 1, AdamW) and returns the loss as a Python float
- ``multiplier(a, b)``: a function that computes the matrix product of two NumPy arrays once, for the rate of sgemm
- ``compile_step(config, **options)``, if it has a compiler whose memory can be told apart: compiles what a step needs
- ``profile(step, batches)``, if the engine can tell: the share of each operation in the time of a step
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Engine:
    """Where an engine is found, and what it needs."""

    file: str
    package: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)  # of its process
    configs: tuple[str, ...] | None = None  # where it is measured; None: everywhere

    def installed(self) -> bool:
        """Whether its package can be imported."""
        return importlib.util.find_spec(self.package) is not None

    def load(self) -> tuple[Any, dict[str, Any]]:
        """Its module and the options of ``training_step``."""
        return importlib.import_module(f"engines.{self.file}"), self.options


# What minigrad asks of glibc's malloc for its own process (minigrad/machine/allocator.py): to keep freed memory.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}

NUMPY = {"MINIGRAD_COMPILED": "0"}  # whether or not numba is installed

ENGINES = {
    "minigrad": Engine("minigrad_lm", "minigrad", environment=NUMPY),
    "minigrad+recompute": Engine("minigrad_lm", "minigrad", {"recompute": "ffn"}, NUMPY, configs=("cs336",)),
    "minigrad+numba": Engine("minigrad_lm", "numba"),
    **{
        f"minigrad+numba+{part}": Engine("minigrad_lm", "numba", {"recompute": part})
        for part in ("half", "ffn", "block")
    },
    "torch": Engine("torch_lm", "torch"),
    "torch+malloc": Engine("torch_lm", "torch", environment=MALLOC),
    "torch.compile": Engine("torch_lm", "torch", {"compiled": True}),
    "jax": Engine("jax_lm", "jax"),
    "tinygrad": Engine("tinygrad_lm", "tinygrad"),
    "autograd": Engine("autograd_lm", "autograd"),
    "mygrad": Engine("mygrad_lm", "mygrad"),
}
