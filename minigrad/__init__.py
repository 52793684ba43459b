"""minigrad: reverse-mode automatic differentiation from first principles, on NumPy or CuPy.

>>> import minigrad as mg
>>> x = mg.Tensor([1.0, 2.0, 3.0], requires_grad=True)
>>> y = (x**2).sum()
>>> y.backward()
>>> print(x.grad)
[2. 4. 6.]
"""

from minigrad import backend, cuda, distributed, errors, functional, integrate, linalg, ops, random, special, stats
from minigrad.autocast import autocast
from minigrad.checkpointing import checkpoint
from minigrad.creation import (
    arange,
    array,
    asarray,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from minigrad.engine.core import Observer, Primitive, elementwise, primitive
from minigrad.engine.fused import fused
from minigrad.engine.recording import enable_grad, is_grad_enabled, no_grad
from minigrad.engine.registry import REGISTRY, sample
from minigrad.errors import MiniGradError
from minigrad.functional import elementwise_grad, grad, hessian, hvp, jacobian, jvp, value_and_grad, vjp
from minigrad.instruments.anomaly import detect_anomaly
from minigrad.instruments.drawing import draw
from minigrad.instruments.memory import memory_summary, track_memory
from minigrad.instruments.observe import Instrument
from minigrad.instruments.profiling import profile
from minigrad.kernels.operations import log_softmax, softmax
from minigrad.linalg import matrix_transpose
from minigrad.machine import allocator, parallel
from minigrad.machine.loops import is_compiled, set_compiled
from minigrad.machine.parallel import get_num_threads, set_num_threads
from minigrad.messages.habits import module_names
from minigrad.ops import *
from minigrad.serialize import load, load_metadata, save
from minigrad.special import i0
from minigrad.tensor import Tensor
from minigrad.testing import gradcheck, gradgradcheck

tensor = Tensor
allocator.keep_freed_memory()
abs = ops.absolute
__version__ = "0.1.0"

# fmt: off
__all__ = [
    "REGISTRY", "Instrument", "MiniGradError", "Observer", "Primitive", "Tensor", "abs", "arange", "array", "asarray",
    "autocast", "backend", "checkpoint", "cuda", "detect_anomaly", "distributed", "draw", "elementwise",
    "elementwise_grad", "enable_grad", "errors",
    "eye", "from_dlpack", "full", "full_like", "functional", "fused", "get_num_threads", "grad", "gradcheck",
    "gradgradcheck", "hessian", "hvp", "i0", "integrate", "is_compiled", "is_grad_enabled", "jacobian", "jvp", "linalg",
    "linspace", "load", "load_metadata", "log_softmax", "matrix_transpose", "memory_summary", "no_grad", "ones",
    "ones_like", "parallel", "primitive", "profile", "random", "sample", "save", "set_compiled", "set_num_threads",
    "softmax", "special", "stats", "tensor", "track_memory", "value_and_grad", "vjp", "zeros", "zeros_like",
]
# fmt: on
__all__ += ops.__all__

__getattr__, __dir__ = module_names(globals())
