"""RMSNorm, LayerNorm and GroupNorm: rows, or groups of channels, of one scale, then multiplied by a learned weight.

Each example is normalised by itself. What the batch has a part in is in ``batch_norm.py``.
"""

from __future__ import annotations

from typing import Any

from minigrad.backend import DType
from minigrad.errors import ShapeError
from minigrad.messages.arguments import check_eps
from minigrad.tensor import Tensor, TensorLike
from . import functional as F
from .checks import check_sizes
from .module import Module
from .parameter import constant


def _shape(normalized_shape: Any) -> tuple[int, ...]:
    shape = (normalized_shape,) if hasattr(normalized_shape, "__index__") else tuple(normalized_shape)
    for size in shape or (0,):
        check_sizes(normalized_shape=size)
    return shape


class RMSNorm(Module):
    """``y = x / √(mean(x²) + eps) · g`` over the last axes, those of ``normalized_shape``.

    The ``weight`` g has that shape and starts as ones. Squares and their mean are formed in at least float32.
    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

    >>> import minigrad as mg
    >>> print(RMSNorm(2, eps=0.0)(mg.Tensor([3.0, 4.0], dtype="float32")).data.round(4))
    [0.8485 1.1314]
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, dtype: DType = None, device: str | None = None
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = _shape(normalized_shape), check_eps(eps)
        self.weight = constant(self.normalized_shape, 1.0, dtype, device)

    def forward(self, x: TensorLike) -> Tensor:
        """``x`` normalized."""
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class LayerNorm(Module):
    """``y = (x - mean) / √(variance + eps) · g + b`` over the last axes, those of ``normalized_shape``.

    ``weight`` g and ``bias`` b have that shape and start as 1 and 0; ``elementwise_affine=False`` leaves out both,
    ``bias=False`` the second. Ba, Kiros and Hinton, "Layer Normalization" (2016).

    >>> import minigrad as mg
    >>> print(LayerNorm(2, eps=0.0)(mg.Tensor([3.0, 5.0], dtype="float32")).data)
    [-1.  1.]
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        dtype: DType = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = _shape(normalized_shape), check_eps(eps)
        self.weight = constant(self.normalized_shape, 1.0, dtype, device) if elementwise_affine else None
        self.bias = constant(self.normalized_shape, 0.0, dtype, device) if elementwise_affine and bias else None

    def forward(self, x: TensorLike) -> Tensor:
        """``x`` normalized."""
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class GroupNorm(Module):
    """Mean 0 and variance 1 for each of ``num_groups`` groups of channels of (N, C, …), then ``· weight + bias``.

    weight and bias (num_channels,) start as 1 and 0. Wu and He, "Group Normalization" (2018).

    >>> import minigrad as mg
    >>> print(GroupNorm(2, 4, eps=0.0)(mg.Tensor([[1.0, 3.0, 0.0, 4.0]], dtype="float32")).data)
    [[-1.  1. -1.  1.]]
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        dtype: DType = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_groups=num_groups, num_channels=num_channels)
        if num_channels % num_groups:
            got, hint = f"num_groups={num_groups}, num_channels={num_channels}", "each group has as many channels"
            raise ShapeError("num_groups that divides num_channels", got, hint)
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, check_eps(eps)
        self.weight = constant(num_channels, 1.0, dtype, device) if affine else None
        self.bias = constant(num_channels, 0.0, dtype, device) if affine else None

    def forward(self, x: TensorLike) -> Tensor:
        """``x`` normalized."""
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.weight is not None}"
