"""Fused operations: a definition and a pair of NumPy kernels each.

Their CUDA kernels stand in the ``.cu`` files beside them: ``elementwise.cu`` for gelu, relu, silu and swiglu,
``norms.cu`` for the norms of rows, ``joined_rows.cu`` for what qkv_projection and swiglu_ffn do beside products, three
files for attention. linear, linear_cross_entropy and linear_attention need none of their own. The modules in ``cuda``
launch them. Each is imported here, which makes its kernels known to its operation. Dropout and rope are primitives,
whose derivatives are themselves: they call their launchers.
"""

import importlib
import pkgutil

from minigrad.kernels import cuda

for launcher in pkgutil.iter_modules(cuda.__path__, f"{cuda.__name__}."):
    importlib.import_module(launcher.name)
