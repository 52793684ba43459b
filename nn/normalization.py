"""RMSNorm and LayerNorm: rows brought to one scale, then multiplied by a learned gain."""

from __future__ import annotations

from typing import Any

from minigrad.backend import DType
from minigrad.errors import CallError
from minigrad.messages.arguments import check_eps
from minigrad.messages.explain import describe
from . import functional as F
from .checks import check_sizes
from .module import Module, is_plain
from .parameter import constant


def _shape(normalized_shape: Any) -> tuple[int, ...]:
    shape = (normalized_shape,) if hasattr(normalized_shape, "__index__") else tuple(normalized_shape)
    for size in shape or (0,):
        check_sizes(normalized_shape=size)
    return shape


class RMSNorm(Module):
    """``y = x / √(mean(x²) + eps) · g`` over the last axes, those of ``normalized_shape``.

    The gain g, ``weight``, has that shape and starts as ones. Squares and their mean are formed in at least float32.
    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

    >>> import minigrad as mg
    >>> print(RMSNorm(2, eps=0.0)(mg.Tensor([3.0, 4.0])).data.round(4))
    [0.8485 1.1314]
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, dtype: DType = None, device: str | None = None
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = _shape(normalized_shape), check_eps(eps)
        self.weight = constant(self.normalized_shape, 1.0, dtype, device)

    def forward(self, x: Any) -> Any:
        """``x`` normalized."""
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


def normed(norm: Any, x: Any) -> Any:
    """``norm(x)``, or x itself if norm is None.

    >>> normed(None, 3)
    3
    """
    if norm is not None and not isinstance(norm, Module):
        raise CallError("a layer as norm", describe(norm), "such as nn.RMSNorm(d_model), or None")
    return x if norm is None else norm(x)


def gain_of(norm: Any, x: Any) -> tuple[Any, dict[str, Any]]:
    """What an operation that can normalise its rows reads for ``norm(x)``: x, and the gain and eps that it then takes.

    Where the norm is more than a gain (hooks, a subclass, another kind) it is called here, and nothing is left to take.

    >>> import minigrad as mg
    >>> x = mg.ones((1, 2))
    >>> len(gain_of(RMSNorm(2), x)[1]), len(gain_of(LayerNorm(2), x)[1])
    (2, 0)
    """
    if isinstance(norm, Module) and is_plain(norm, RMSNorm):
        shape = getattr(norm.weight, "shape", ())
        if len(shape) == 1 and shape == norm.normalized_shape:
            return x, {"gain": norm.weight, "eps": norm.eps}
    return normed(norm, x), {}


class LayerNorm(Module):
    """``y = (x - mean) / √(variance + eps) · g + b`` over the last axes, those of ``normalized_shape``.

    ``weight`` g and ``bias`` b have that shape and start as 1 and 0; ``elementwise_affine=False`` leaves out both,
    ``bias=False`` the second. Ba, Kiros and Hinton, "Layer Normalization" (2016).

    >>> import minigrad as mg
    >>> print(LayerNorm(2, eps=0.0)(mg.Tensor([3.0, 5.0])).data)
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

    def forward(self, x: Any) -> Any:
        """``x`` normalized."""
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"
