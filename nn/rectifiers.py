"""Activation functions written as compositions: bent and smoothed lines. What stands nowhere else is here.

Those that grow with e^x compute it where x is negative alone, so that nothing overflows on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np  # noqa: F401 (for the examples)

from minigrad import absolute, expm1, softplus, tanh, where
from minigrad.errors import ArgumentError, ShapeError
from minigrad.messages.explain import describe, explained
from minigrad.tensor import Operand, X
from .checks import as_operand


def _between(x: Any, low: float, high: float) -> Any:
    """``x`` cut off at two numbers, at which, as beyond them, its derivative is 0; NaN stays."""
    return where(x <= low, low, where(x >= high, high, x))


@explained
def elu(x: Operand[X], alpha: float = 1.0) -> X:
    """``x`` where it is above 0, else ``alpha (e^x - 1)``. Clevert et al. (2015).

    >>> print(elu(np.array([-1000.0, 2.0])))
    [-1.  2.]
    """
    array: Any = as_operand(x)
    above = array > 0
    return where(above, array, alpha * expm1(where(above, 0, array)))


@explained
def celu(x: Operand[X], alpha: float = 1.0) -> X:
    """``x`` where it is above 0, else ``alpha (e^(x / alpha) - 1)``: smooth for every alpha. Barron (2017).

    >>> print(celu(np.array([-1000.0, 2.0]), 0.5))
    [-0.5  2. ]
    """
    if not alpha:
        raise ArgumentError("alpha other than 0", repr(alpha), "relu is its limit")
    array: Any = as_operand(x)
    above = array > 0
    return where(above, array, alpha * expm1(where(above, 0, array) / alpha))


@explained
def selu(x: Operand[X]) -> X:
    """``1.0507 elu(x, 1.6733)``, which keeps mean 0 and variance 1 from layer to layer. Klambauer et al. (2017).

    >>> print(selu(np.array([-1000.0, 1.0])).round(4))
    [-1.7581  1.0507]
    """
    return elu(x, 1.6732632423543772848) * 1.0507009873554804934  # type: ignore[operator, return-value]


@explained
def hardtanh(x: Operand[X], min_val: float = -1.0, max_val: float = 1.0) -> X:
    """``x`` between min_val and max_val, beyond them these numbers; its derivative at them is 0.

    >>> print(hardtanh(np.array([-3.0, 0.5])))
    [-1.   0.5]
    """
    if not min_val < max_val:
        raise ArgumentError("min_val below max_val", f"{min_val} and {max_val}", "-1 and 1 are usual")
    return _between(as_operand(x), min_val, max_val)


@explained
def relu6(x: Operand[X]) -> X:
    """``x`` between 0 and 6, beyond them these numbers.

    >>> print(relu6(np.array([-3.0, 9.0])))
    [0. 6.]
    """
    return hardtanh(x, 0.0, 6.0)


@explained
def hardsigmoid(x: Operand[X]) -> X:
    """``(x + 3) / 6`` between 0 and 1: a sigmoid of three straight pieces.

    >>> print(hardsigmoid(np.array([-4.0, 0.0])))
    [0.  0.5]
    """
    array: Any = as_operand(x)
    return _between(array / 6 + 0.5, 0.0, 1.0)


@explained
def hardswish(x: Operand[X]) -> X:
    """``x · hardsigmoid(x)``. Howard et al., "Searching for MobileNetV3" (2019).

    >>> print(hardswish(np.array([-4.0, 3.0])))
    [-0.  3.]
    """
    array: Any = as_operand(x)
    return array * hardsigmoid(array)


@explained
def mish(x: Operand[X]) -> X:
    """``x tanh(ln(1 + e^x))``. Misra (2019).

    >>> print(mish(np.array([0.0, 1.0])).round(4))
    [0.     0.8651]
    """
    array: Any = as_operand(x)
    return array * tanh(softplus(array))


@explained
def softsign(x: Operand[X]) -> X:
    """``x / (1 + |x|)``.

    >>> print(softsign(np.array([-1.0, 3.0])))
    [-0.5   0.75]
    """
    array: Any = as_operand(x)
    return array / (1 + absolute(array))


@explained
def logsigmoid(x: Operand[X]) -> X:
    """``ln(1 / (1 + e^-x))``, without overflow.

    >>> print(logsigmoid(np.array([-1000.0, 0.0])).round(4))
    [-1.000e+03 -6.931e-01]
    """
    array: Any = as_operand(x)
    return -softplus(-array)


@explained
def tanhshrink(x: Operand[X]) -> X:
    """``x - tanh(x)``.

    >>> print(tanhshrink(np.array([0.0, 20.0])).round(4))
    [ 0. 19.]
    """
    array: Any = as_operand(x)
    return array - tanh(array)


@explained
def softshrink(x: Operand[X], lambd: float = 0.5) -> X:
    """``x`` moved towards 0 by lambd, and 0 where it is no farther from there.

    >>> print(softshrink(np.array([-2.0, 0.3, 1.0])))
    [-1.5  0.   0.5]
    """
    array: Any = as_operand(x)
    if not lambd >= 0:
        raise ArgumentError("lambd from 0", repr(lambd), "0.5 is usual")
    return where(array > lambd, array - lambd, where(array < -lambd, array + lambd, 0 * array))


@explained
def hardshrink(x: Operand[X], lambd: float = 0.5) -> X:
    """``x`` where it is farther from 0 than lambd, else 0.

    >>> print(hardshrink(np.array([-2.0, 0.3, 1.0])))
    [-2.  0.  1.]
    """
    array: Any = as_operand(x)
    return where(absolute(array) <= lambd, 0 * array, array)


@explained
def prelu(x: Operand[X], weight: Operand[X]) -> X:
    """``x`` where it is above 0, else ``weight · x``, with one weight, or one for each channel: the second axis of x.

    He et al., "Delving Deep into Rectifiers" (2015).

    >>> print(prelu(np.array([-2.0, 3.0]), np.array([0.25])))
    [-0.5  3. ]
    """
    array, slopes = as_operand(x), as_operand(weight)
    count = slopes.size if hasattr(slopes, "size") else 1
    if count > 1:
        if slopes.ndim != 1 or array.ndim < 2 or array.shape[1] != count:
            expected = "one weight, or a vector with one for each channel, the second axis of x"
            raise ShapeError(expected, f"weight {describe(slopes)}, x {describe(array)}", "(batch, channels, ...)")
        slopes = slopes.reshape((count,) + (1,) * (array.ndim - 2))
    elif hasattr(slopes, "reshape"):
        slopes = slopes.reshape(())
    return where(array > 0, array, slopes * array)
