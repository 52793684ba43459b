"""Ways to make a trained model smaller, a file each, without a branch for them in the layers."""

from .distillation import distillation_loss

__all__ = ["distillation_loss"]
