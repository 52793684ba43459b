"""Activations, flattening and dropout as modules: layers without parameters."""

from __future__ import annotations

import math
from typing import Any

from minigrad import tanh
from minigrad.errors import ArgumentError
from minigrad.messages.arguments import normal_axis
from minigrad.tensor import Tensor, TensorLike
from . import functional as F
from .checks import as_operand, check_probability
from .module import Module


class ReLU(Module):
    """``max(x, 0)`` of each element; its derivative at 0 is 0.

    >>> import minigrad as mg
    >>> print(ReLU()(mg.Tensor([-1.0, 2.0])).data)
    [0. 2.]
    """

    def forward(self, x: Tensor) -> Tensor:
        """``max(x, 0)``."""
        return F.relu(x)


class SiLU(Module):
    """``x · sigmoid(x)`` of each element, also called swish.

    >>> import minigrad as mg
    >>> print(SiLU()(mg.Tensor([0.0])).data)
    [0.]
    """

    def forward(self, x: Tensor) -> Tensor:
        """``x · sigmoid(x)``."""
        return F.silu(x)


class GELU(Module):
    """``x Φ(x)`` of each element, Φ the normal distribution function; ``approximate="tanh"`` for its old approximation.

    >>> import minigrad as mg
    >>> print(GELU()(mg.Tensor([1.0])).data.round(4))
    [0.8413]
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """``x Φ(x)``."""
        return F.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class LeakyReLU(Module):
    """``x`` where it is above 0, else ``negative_slope · x``; its derivative at 0 is ``negative_slope``.

    >>> import minigrad as mg
    >>> print(LeakyReLU(0.1)(mg.Tensor([-1.0, 2.0])).data)
    [-0.1  2. ]
    """

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x: TensorLike) -> Tensor:
        """``x``, the negative elements times the slope."""
        return F.leaky_relu(x, self.negative_slope)

    def extra_repr(self) -> str:
        return f"negative_slope={self.negative_slope}"


class Sigmoid(Module):
    """``1 / (1 + e^-x)`` of each element.

    >>> import minigrad as mg
    >>> print(Sigmoid()(mg.Tensor([0.0])).data)
    [0.5]
    """

    def forward(self, x: TensorLike) -> Tensor:
        """``1 / (1 + e^-x)``."""
        return F.sigmoid(x)


class Tanh(Module):
    """The hyperbolic tangent of each element.

    >>> import minigrad as mg
    >>> print(Tanh()(mg.Tensor([0.0])).data)
    [0.]
    """

    def forward(self, x: TensorLike) -> Tensor:
        """The hyperbolic tangent."""
        return tanh(x)


class GLU(Module):
    """``a · sigmoid(b)``, a and b the halves of the input along ``axis``: a gated linear unit.

    Dauphin et al., "Language Modeling with Gated Convolutional Networks" (2017).

    >>> import minigrad as mg
    >>> print(GLU()(mg.Tensor([4.0, 0.0])).data)
    [2.]
    """

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """``a · sigmoid(b)``."""
        return F.glu(x, self.axis)

    def extra_repr(self) -> str:
        return f"axis={self.axis}"


class Flatten(Module):
    """The axes from ``start_dim`` to ``end_dim`` as one: by default all but the batch's.

    >>> import minigrad as mg
    >>> Flatten()(mg.ones((2, 3, 4))).shape
    (2, 12)
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: TensorLike) -> Tensor:
        """``x`` with fewer axes."""
        whole: Any = as_operand(x)
        first, last = normal_axis(self.start_dim, whole.ndim), normal_axis(self.end_dim, whole.ndim)
        if first > last:
            raise ArgumentError("start_dim before end_dim", f"{first} and {last}", "axes count from 0")
        flat: Tensor = whole.reshape(
            (*whole.shape[:first], math.prod(whole.shape[first : last + 1]), *whole.shape[last + 1 :])
        )
        return flat

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Dropout(Module):
    """In training each element is 0 with probability ``p``, else multiplied by 1/(1-p); in evaluation the identity.

    Random numbers come from ``minigrad.random``: the same seed drops the same elements.
    Srivastava et al., "Dropout" (2014).

    >>> import minigrad as mg
    >>> x = mg.ones(1000)
    >>> Dropout(0.5).eval()(x) is x, sorted(set(Dropout(0.5)(x).tolist()))
    (True, [0.0, 2.0])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = check_probability(p)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` with elements dropped."""
        return F.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"
