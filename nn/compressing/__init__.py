"""Ways to make a trained model smaller, a file each."""

from .gguf import save_gguf
from .quantization import quantize

__all__ = ["quantize", "save_gguf"]
