"""Mixed precision: products of matrices in half precision, what is summed over many numbers in float32."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from minigrad import ops
from minigrad.backend import DType, as_dtype, is_half
from minigrad.engine.core import Primitive
from minigrad.engine.recording import in_precision
from minigrad.engine.registry import REGISTRY
from minigrad.errors import CallError, DTypeError
from minigrad.kernels.attention import attention
from minigrad.kernels.cross_entropy import cross_entropy
from minigrad.kernels.layer_norm import layer_norm
from minigrad.kernels.linear import linear
from minigrad.kernels.linear_cross_entropy import linear_cross_entropy
from minigrad.kernels.qkv_projection import qkv_projection
from minigrad.kernels.rms_norm import rms_norm
from minigrad.kernels.softmax import log_softmax, softmax
from minigrad.kernels.swiglu_ffn import swiglu_ffn
from minigrad.messages.explain import describe

LOW: tuple[Primitive[Any], ...] = (
    ops.matmul,
    ops.linalg.einsum_explicit,
    linear,
    qkv_projection,
    swiglu_ffn,
    attention,
)
WIDE: tuple[Any, ...] = (
    *(ops.sum, ops.mean, ops.prod, ops.var, ops.std, ops.cumsum, ops.cumprod, ops.logsumexp),
    *(REGISTRY["root_sum_square"], REGISTRY["root_sum_power"], rms_norm, layer_norm, softmax, log_softmax),
    *(cross_entropy, linear_cross_entropy),
)
for _precision, _operations in (("low", LOW), ("wide", WIDE)):
    for _operation in _operations:
        _operation.precision = _precision
qkv_projection.wide_part = swiglu_ffn.wide_part = "gain"


class autocast(in_precision):
    """Products of matrices run in ``dtype``, float16 or bfloat16, and the rest in float32: in a ``with`` block, or a
    function decorated by ``@autocast(dtype)``.

    Cast are the arguments of ``linear``, ``qkv_projection``, ``swiglu_ffn``, ``matmul``, ``einsum`` and ``attention``
    to ``dtype`` (the products of ``linear_cross_entropy`` are in ``dtype`` too), and those of reductions, norms,
    softmax and losses to float32; gradients come back in the dtypes of the parameters, which stay float32. float64 is
    left alone; ``autocast("float32")`` changes nothing. A backward pass has the dtypes of its forward pass, wherever it
    runs. float16, whose smallest number is 6e-8, needs :class:`optim.GradScaler` besides. NumPy's warnings of overflow
    are silent inside, and in the backward pass of a loss that was scaled. Micikevicius et al., "Mixed Precision
    Training" (2018).

    >>> import minigrad as mg
    >>> x = mg.ones((2, 2), requires_grad=True)
    >>> with autocast("float16"):
    ...     y = x @ x
    >>> y.sum().backward(); print(y.dtype, x.grad.dtype)
    float16 float32
    """

    def __init__(self, dtype: DType) -> None:
        if inspect.isroutine(dtype):
            raise CallError("autocast(dtype)", f"autocast({describe(dtype)})", "@autocast('bfloat16') with its dtype")
        found = as_dtype(dtype)
        if not is_half(found) and found not in (np.float32, np.float64):
            hint = "the dtype of the products, not of the weights"
            raise DTypeError("'bfloat16' or 'float16', or 'float32' for none", str(found), hint)
        super().__init__(found if is_half(found) else None)
