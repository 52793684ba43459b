"""The feed-forward layers of a Transformer: two matrices with an activation between, or three with a gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from minigrad import checkpoint, random
from minigrad.backend import DType
from minigrad.errors import ArgumentError
from minigrad.kernels.swiglu_ffn import check_recompute
from minigrad.tensor import Tensor, TensorLike
from . import functional as F
from .activation import Dropout
from .checks import check_sizes
from .linear import Linear
from .module import Module

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": F.sigmoid,
}


def swiglu_width(d_model: int) -> int:
    """8/3 d_model rounded up to a multiple of 64: the size of the two-matrix layer of width 4 d_model, in three.

    >>> swiglu_width(128), swiglu_width(512)
    (384, 1408)
    """
    return -(-8 * d_model // 192) * 64


class SwiGLU(Module):
    """``w2(silu(w1 x) · w3 x)`` without biases, (..., d_model) to (..., d_model) through d_ff gated units.

    d_ff is by default 8/3 d_model rounded up to a multiple of 64. Shazeer, "GLU Variants Improve Transformer" (2020).
    With ``recompute`` True the backward pass computes w1 x and w3 x once more, and does not keep them: 2 d_ff numbers a
    row less, for two more products beside nine. "half" does that with w3 x alone. Their hooks run once more, too.

    >>> import minigrad as mg
    >>> SwiGLU(8)(mg.ones((2, 8))).shape
    (2, 8)
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        recompute: bool | str = False,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(d_model=d_model)
        check_recompute(recompute)
        self.recompute = recompute
        d_ff = swiglu_width(d_model) if d_ff is None else d_ff
        kinds: dict[str, Any] = {"dtype": dtype, "device": device, "generator": random.generator(generator)}
        self.w1 = Linear(d_model, d_ff, False, **kinds)
        self.w2 = Linear(d_ff, d_model, False, **kinds)
        self.w3 = Linear(d_model, d_ff, False, **kinds)

    def forward(self, x: TensorLike) -> Tensor:
        """``w2(silu(w1 x) · w3 x)``."""
        if self.recompute == "half":
            return self.w2(checkpoint(lambda gate, x: self._gated(gate, self.w3(x)), self.w1(x), x))
        return self.w2(checkpoint(self._units, x) if self.recompute else self._units(x))

    def _units(self, x: Any) -> Any:
        return self._gated(self.w1(x), self.w3(x))

    def _gated(self, gate: Any, up: Any) -> Any:
        return F.swiglu(gate, up)

    def extra_repr(self) -> str:
        return f"recompute={self.recompute!r}" if self.recompute else ""


class GEGLU(SwiGLU):
    """``w2(gelu(w1 x) · w3 x)`` without biases, GELU by its approximation with tanh; the arguments are SwiGLU's.

    Gemma's feed-forward layer. Shazeer, "GLU Variants Improve Transformer" (2020).

    >>> import minigrad as mg
    >>> GEGLU(8)(mg.ones((2, 8))).shape
    (2, 8)
    """

    def _gated(self, gate: Any, up: Any) -> Any:
        return F.gelu(gate, "tanh") * up


class FeedForward(Module):
    """``w2(dropout(activation(w1 x)))`` with biases, (..., d_model) to (..., d_model) through d_ff units.

    activation: "relu", "gelu", "gelu_tanh", "silu", "sigmoid", or a function. Vaswani et al., "Attention is all you
    need" (2017), eq. 2. With gated ``w2(dropout(activation(w1 x) · w3 x))``: "sigmoid" is then the GLU layer, "relu"
    ReGLU, "gelu" GEGLU, "silu" SwiGLU and ``lambda x: x`` Bilinear of Shazeer, "GLU Variants Improve Transformer"
    (2020).

    >>> import minigrad as mg
    >>> FeedForward(8, 32, "gelu")(mg.ones((2, 8))).shape
    (2, 8)
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str | Callable[[Any], Any] = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        *,
        gated: bool = False,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__()
        if not callable(activation) and activation not in ACTIVATIONS:
            hint = "such as 'gelu', or nn.functional.silu"
            raise ArgumentError(f"an activation of {sorted(ACTIVATIONS)}, or a function", repr(activation), hint)
        kinds: dict[str, Any] = {"dtype": dtype, "device": device, "generator": random.generator(generator)}
        self.w1 = Linear(d_model, d_ff, bias, **kinds)
        self.w2 = Linear(d_ff, d_model, bias, **kinds)
        self.w3 = Linear(d_model, d_ff, bias, **kinds) if gated else None
        self.activation = activation
        self.dropout = Dropout(dropout)

    def forward(self, x: TensorLike) -> Tensor:
        """``w2(dropout(activation(w1 x)))``, or ``w2(dropout(activation(w1 x) · w3 x))``."""
        activation = self.activation if callable(self.activation) else ACTIVATIONS[self.activation]
        units = activation(self.w1(x))
        return self.w2(self.dropout(units if self.w3 is None else units * self.w3(x)))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}" if isinstance(self.activation, str) else ""
