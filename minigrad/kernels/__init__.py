"""Fused operations: a definition and a pair of NumPy kernels each.

Their CUDA kernels stand in the ``.cu`` files beside them, those of gelu, relu, silu and swiglu in ``elementwise.cu``.
The modules in ``cuda`` launch them; to import one makes its kernels known to its operation. linear and
linear_cross_entropy need no ``.cu`` of their own, and qkv_projection and swiglu_ffn run their definition on a GPU.
"""

# ruff: noqa: F401
import minigrad.kernels.cuda.attention
import minigrad.kernels.cuda.cross_entropy
import minigrad.kernels.cuda.elementwise
import minigrad.kernels.cuda.embedding
import minigrad.kernels.cuda.layer_norm
import minigrad.kernels.cuda.linear
import minigrad.kernels.cuda.linear_cross_entropy
import minigrad.kernels.cuda.rms_norm
import minigrad.kernels.cuda.softmax
