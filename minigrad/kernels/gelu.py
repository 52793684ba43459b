"""GELU, exact by the error function or by its tanh approximation. A node keeps Φ for the backward pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, cast_to
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.errors import ArgumentError
from minigrad.kernels.rows import dtypes, over_elements
from minigrad.kernels.swiglu import logistic
from minigrad.machine.parallel import scratch
from minigrad.ops import clip, sigmoid
from minigrad.ops._erf import normal
from minigrad.ops.elementwise import normal_distribution

SLOPE, CUBIC = math.sqrt(2 / math.pi), 0.044715  # Φ(x) ≈ (1 + tanh(SLOPE (x + CUBIC x³))) / 2
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
    return x * sigmoid(2 * SLOPE * (near + CUBIC * (near * near * near)))


def is_exact(approximate: str) -> bool:
    """Whether Φ is exact; an error for a name that there isn't."""
    if approximate not in ("none", "tanh"):
        hint = "'none' is exact, 'tanh' the form of GPT-2"
        raise ArgumentError("approximate='none' or 'tanh'", repr(approximate), hint)
    return approximate == "none"


@gelu.defforward
def _forward(x: Any, approximate: str) -> tuple[Array, dict[str, Any]]:
    exact = is_exact(approximate)
    dtype, work = dtypes(x)
    flat = np.ascontiguousarray(x, work).reshape(-1)
    out, phi = np.empty(np.shape(x), work), np.empty(flat.size, work)
    result = out.reshape(-1)

    def body(tile: slice) -> None:
        (_normal_by_mills if exact else _normal_by_tanh)(flat[tile], phi[tile])
        np.multiply(flat[tile], phi[tile], out=result[tile])

    over_elements(body, flat, arrays=4, ns=6.0)
    return cast_to(out, dtype), {"phi": phi}


def _normal_by_mills(x: Array, out: Array) -> None:
    """Φ(x), with all digits of its lower tail."""
    np.copyto(out, normal(x))


def _normal_by_tanh(x: Array, out: Array) -> None:
    """The tanh approximation of Φ, as a logistic function: (1 + tanh u) / 2 = σ(2 u), at half the cost."""
    with np.errstate(over="ignore", under="ignore"):
        inner = np.multiply(x, x, out=scratch(x.shape, x.dtype, "rows"))
        inner *= 2 * SLOPE * CUBIC
        inner += 2 * SLOPE
        inner *= x
    logistic(inner, out)


@gelu.defbackward("x")
def _backward(g: Any, x: Any, approximate: str, phi: Any) -> tuple[Array]:
    """g (Φ + x Φ'), where Φ' is e^(-x²/2) / √(2π), or the derivative of σ(2 u), which is σ (1 - σ) 2 u'."""
    work = phi.dtype
    flat, up = (np.ascontiguousarray(a, work).reshape(-1) for a in (x, g))
    gx = np.empty(x.shape, work)
    result = gx.reshape(-1)

    def body(tile: slice) -> None:
        r, dx = flat[tile], result[tile]
        with np.errstate(over="ignore", under="ignore"):
            np.multiply(r, r, out=dx)
            if approximate == "none":
                dx *= -0.5
                np.exp(dx, out=dx)
                dx *= 1 / math.sqrt(2 * math.pi)
            else:
                np.minimum(dx, FLAT * FLAT, out=dx)
                dx *= 6 * SLOPE * CUBIC
                dx += 2 * SLOPE
                density = np.subtract(1, phi[tile], out=scratch(r.shape, work, "rows"))
                density *= phi[tile]
                dx *= density
            dx *= r
            dx += phi[tile]
            dx *= up[tile]

    over_elements(body, flat, arrays=5, ns=4.0)
    return (cast_to(gx, x.dtype),)
