"""Activations and dropout as modules: layers without parameters."""

from __future__ import annotations

from minigrad.tensor import Tensor
from . import functional as F
from .checks import check_probability
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
