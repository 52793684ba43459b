"""GELU, exact or by its tanh approximation. A node keeps the slope, which shares its exponential with the value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, cast_to
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.errors import ArgumentError
from minigrad.kernels.rows import dtypes, over_elements
from minigrad.kernels.swiglu import logistic, times_slopes
from minigrad.machine.loops import exp, loop
from minigrad.machine.loops import sigmoid as sigmoid_of
from minigrad.machine.parallel import scratch
from minigrad.ops import clip, sigmoid
from minigrad.ops._erf import _MILLS_SINGLE as MILLS
from minigrad.ops._erf import gaussian_of, normal_by
from minigrad.ops.elementwise import normal_distribution

SLOPE, CUBIC = math.sqrt(2 / math.pi), 0.044715  # Φ(x) ≈ (1 + tanh(SLOPE (x + CUBIC x³))) / 2
TURN, BEND, BEND3 = 2 * SLOPE, 2 * SLOPE * CUBIC, 6 * SLOPE * CUBIC
DENSITY = 1 / math.sqrt(2 * math.pi)
FLAT = 30.0  # beyond ±FLAT that is 0 or 1 to the last digit; the square of a larger x might overflow


def _torch(t: Any, x: Any, approximate: str = "none") -> Any:
    return t.nn.functional.gelu(x, approximate=approximate)


@fused(elementwise=True, torch=_torch, numpy=False, samples=[sample((2, 3)), sample((2, 3), "tanh")])
def gelu(x: Array, approximate: str = "none") -> Array:
    """Gaussian error linear unit ``x Φ(x)``, Φ the distribution function of the standard normal.

    approximate="none" is exact, ``Φ(x) = (1 + erf(x/√2)) / 2``; "tanh" is ``(1 + tanh(√(2/π) (x + 0.044715 x³))) / 2``.
    Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016). Another name raises an ArgumentError.

    >>> print(gelu(np.array([-1e4, 0.0, 1.0])).round(4))
    [-0.      0.      0.8413]
    """
    if is_exact(approximate):
        return x * normal_distribution(x)
    near = clip(x, -FLAT, FLAT)
    return x * sigmoid(near * (2 * SLOPE + (2 * SLOPE * CUBIC) * (near * near)))


def is_exact(approximate: str) -> bool:
    """Whether Φ is exact; an error for a name that there isn't."""
    if approximate not in ("none", "tanh"):
        hint = "'none' is exact, 'tanh' the form of GPT-2"
        raise ArgumentError("approximate='none' or 'tanh'", repr(approximate), hint)
    return approximate == "none"


@gelu.defforward
def _forward(x: Any, approximate: str, needs: tuple[bool, ...] = (False,)) -> tuple[Array, dict[str, Any]]:
    """x Φ and, while its exponential is at hand, the slope Φ + x Φ'."""
    make = exactly if is_exact(approximate) else by_tanh
    dtype, work = dtypes(x)
    flat = np.ascontiguousarray(x, work).reshape(-1)
    out, slopes = np.empty(np.shape(x), work), np.empty(flat.size, work) if any(needs) else None
    result = out.reshape(-1)

    def body(tile: slice) -> None:
        with np.errstate(over="ignore", under="ignore"):
            make(flat[tile], result[tile], None if slopes is None else slopes[tile])

    over_elements(body, flat, arrays=4, ns=6.0)
    return cast_to(out, dtype), {"slopes": slopes}


def _exactly(x: Array, out: Array, slope: Array | None) -> None:
    """x Φ(x), and its slope; Φ' is e^(-x²/2) / √(2π)."""
    gaussian = gaussian_of(x)
    if slope is not None:
        np.multiply(gaussian, x, out=slope)
        slope *= DENSITY
    phi = normal_by(gaussian, x)
    np.multiply(x, phi, out=out)
    if slope is not None:
        slope += phi


@loop(_exactly)
def exactly(x: Array, out: Array, slope: Array | None) -> None:
    """The same; Φ(-|x|) is e^(-x²/2) times Mills' ratio."""
    above, below = MILLS
    for i in range(out.size):
        gaussian, t = exp(-0.5 * (x[i] * x[i])), min(abs(x[i]), 15.0)
        top = (((above[4] * t + above[3]) * t + above[2]) * t + above[1]) * t + above[0]
        base = ((((below[5] * t + below[4]) * t + below[3]) * t + below[2]) * t + below[1]) * t + below[0]
        tail = gaussian * (top / base)
        phi = 1.0 - tail if x[i] >= 0.0 else tail
        out[i] = x[i] * phi
        if slope is not None:
            slope[i] = phi + x[i] * gaussian * DENSITY


def _by_tanh(x: Array, out: Array, slope: Array | None) -> None:
    """The same with Φ ≈ (1 + tanh u) / 2 = σ(2 u), at half the cost; Φ' is σ (1 - σ) 2 u', in which x σ is at hand."""
    square, minus, phi = (scratch(x.shape, x.dtype, key) for key in ("square", "inner", "rows"))
    try:
        with np.errstate(over="raise"):
            np.multiply(x, x, out=square)
    except FloatingPointError:  # square is written all the same
        np.minimum(square, FLAT * FLAT, out=square)
    np.multiply(square, -BEND, out=minus)
    minus -= TURN
    minus *= x
    logistic(minus, phi, slope, sign=-1)
    np.multiply(x, phi, out=out)
    if slope is not None:
        slope *= out
        square *= BEND3
        square += TURN
        slope *= square
        slope += phi


@loop(_by_tanh)
def by_tanh(x: Array, out: Array, slope: Array | None) -> None:
    """The same."""
    for i in range(out.size):
        square = min(x[i] * x[i], FLAT * FLAT)
        inner = (BEND * square + TURN) * x[i]
        out[i] = x[i] * sigmoid_of(inner)
        if slope is not None:
            slope[i] = sigmoid_of(-inner) * out[i] * (BEND3 * square + TURN) + sigmoid_of(inner)


@gelu.defbackward("x")
def _backward(g: Any, x: Any, approximate: str, slopes: Any) -> tuple[Array]:
    return (times_slopes(g, slopes, x.dtype),)
