"""Special functions under SciPy's names, differentiable: ``mg.special.gammaln(x)``.

They need SciPy (``pip install 'minigrad-numpy[scipy]'``), which is imported when one of them is called.

>>> import minigrad as mg
>>> x = mg.Tensor([0.5, 3.0], requires_grad=True)
>>> mg.special.gammaln(x).sum().backward()
>>> print(x.grad.round(4))
[-1.9635  0.9228]
"""

from minigrad.ops import special as _table
from minigrad.ops.special import *

__all__ = list(_table.__all__)
