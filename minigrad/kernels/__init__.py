"""Fused operations: one stem each, with the definition, the NumPy pair, and the CUDA kernels in a ``.cu`` beside it.

The modules in ``cuda`` launch those kernels. To import one makes its kernels known to its operation.
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
