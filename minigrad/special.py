"""Special functions under SciPy's names, differentiable: ``mg.special.gammaln(x)``.

Values need SciPy (``pip install -e '.[scipy]'``), which is imported when one of these functions is called; derivatives
are minigrad's own. An argument without a closed derivative, such as the order of ``jn``, is refused when its gradient
is asked for, by name; so are, on a GPU, the functions that CuPy lacks: ``jn``, ``iv``, ``ive``, ``stdtr`` and
``gammasgn``.

>>> import minigrad as mg
>>> x = mg.Tensor([0.5, 3.0], requires_grad=True)
>>> mg.special.gammaln(x).sum().backward()
>>> print(x.grad.round(4))
[-1.9635  0.9228]
"""

from minigrad.ops import special as _table
from minigrad.ops.special import *

__all__ = list(_table.__all__)
