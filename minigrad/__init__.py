"""minigrad: reverse-mode automatic differentiation from first principles, on NumPy or CuPy.

>>> import minigrad as mg
>>> x = mg.Tensor([1.0, 2.0, 3.0], requires_grad=True)
>>> y = (x**2).sum()
>>> y.backward()
>>> print(x.grad)
[2. 4. 6.]
"""

from minigrad import backend, errors, parallel, random
from minigrad.backward import grad
from minigrad.core import REGISTRY, primitive
from minigrad.errors import MiniGradError
from minigrad.fused import fused
from minigrad.ops import *
from minigrad.recording import enable_grad, is_grad_enabled, no_grad
from minigrad.serialize import load, save
from minigrad.tensor import Tensor, arange, asarray, eye, from_dlpack, full, ones, zeros

tensor = Tensor
__version__ = "0.1.0"
