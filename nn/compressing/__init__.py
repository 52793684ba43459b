"""Ways to make a trained model smaller, a file each, without a branch for them in the layers."""

from .distillation import distillation_loss
from .gguf import save_gguf
from .quantization import quantize

__all__ = ["distillation_loss", "quantize", "save_gguf"]
