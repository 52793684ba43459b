"""Fused operations: one stem each, with the definition, the NumPy pair, and the CUDA kernels in a ``.cu`` beside it.

The modules ``gpu_*`` launch those kernels; importing them makes them known to the operations.
"""

from minigrad.kernels import gpu_attention, gpu_elementwise, gpu_products, gpu_rows

__all__ = ["gpu_attention", "gpu_elementwise", "gpu_products", "gpu_rows"]
