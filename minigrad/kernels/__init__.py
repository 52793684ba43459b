"""Fused operations: one stem each, with the definition, the NumPy pair, and the CUDA kernels in a ``.cu`` beside it.

The modules ``gpu_*`` launch those kernels; importing them makes them known to the operations.
"""

from minigrad.kernels.cuda import attention as gpu_attention
from minigrad.kernels.cuda import elementwise as gpu_elementwise
from minigrad.kernels.cuda import products as gpu_products
from minigrad.kernels.cuda import rows as gpu_rows

__all__ = ["gpu_attention", "gpu_elementwise", "gpu_products", "gpu_rows"]
