"""Mixed precision: products of matrices in half precision, sums over many numbers in float32."""

from __future__ import annotations

import inspect

import numpy as np

from minigrad.backend import DType, as_dtype, is_half
from minigrad.engine.recording import Setting
from minigrad.errors import CallError, DTypeError
from minigrad.messages.explain import describe


class autocast(Setting):
    """Products of matrices run in ``dtype``, float16 or bfloat16, and the rest in float32: in a ``with`` block, or a
    function decorated by ``@autocast(dtype)``.

    An operation declares its precision where it is defined. ``linear``, ``qkv_projection``, ``swiglu_ffn``, ``matmul``,
    ``einsum`` and ``attention`` get their arguments in ``dtype``; the products of ``linear_cross_entropy`` are in
    ``dtype`` too. Reductions, norms, softmax and losses get theirs in float32. Parameters and their gradients stay
    float32. float64 is left alone; ``autocast("float32")`` changes nothing. A backward pass has the dtypes of its
    forward pass, wherever it runs. The smallest number of float16 is 6e-8, so it needs :class:`optim.GradScaler` too.
    NumPy's warnings of overflow are silent in the forward pass, and in the backward pass of a loss that was scaled.
    Micikevicius et al., "Mixed Precision Training" (2018).

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
        half = found if is_half(found) else None
        super().__init__(autocast=half)
