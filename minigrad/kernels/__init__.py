"""Fused operations: a definition and a pair of NumPy kernels each.

Their CUDA kernels stand in the ``.cu`` files beside them, those of gelu, relu, silu and swiglu in ``elementwise.cu``.
The modules in ``cuda`` launch them. Each is imported here, which makes its kernels known to its operation. linear and
linear_cross_entropy need no ``.cu`` of their own, and qkv_projection and swiglu_ffn run their definition on a GPU.
Dropout and rope are primitives, whose derivatives are themselves: they call their launchers.
"""

import importlib
import pkgutil

from minigrad.kernels import cuda

for launcher in pkgutil.iter_modules(cuda.__path__, f"{cuda.__name__}."):
    importlib.import_module(launcher.name)
