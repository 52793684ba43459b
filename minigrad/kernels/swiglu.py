"""SiLU and SwiGLU: the logistic function costs one exponential. A node keeps it, or the slope that it gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, cast_to
from minigrad.engine.fused import fused
from minigrad.kernels.rows import dtypes, over_elements
from minigrad.machine.loops import loop
from minigrad.machine.loops import sigmoid as one
from minigrad.machine.parallel import scratch
from minigrad.ops import sigmoid

HIGH = 5.5  # above it x σ (1 - σ) would be off by more than 4 units in the last place


def logistic(x: Array, out: Array, rest: Array | None = None, sign: int = 1) -> None:
    """``out = 1 / (1 + e^-x)``, in silence, and e^x where e^-x overflows: the processor tells of that at no cost.

    ``rest``, if it is given, becomes 1 - out with all its digits. Neither may be ``x``. For the sign -1, ``x`` holds
    -x, which saves a pass.
    """
    e, low = out if rest is None else rest, None
    with np.errstate(over="raise", under="ignore"):
        minus = np.negative(x, out=e) if sign > 0 else x
        try:
            np.exp(minus, out=e)
        except FloatingPointError:  # e is written all the same
            limits = np.finfo(x.dtype)
            low = np.flatnonzero(np.isinf(e) & (sign * x > math.log(limits.smallest_subnormal)))
        np.add(e, 1, out=out)
        np.divide(1, out, out=out)
        if rest is not None:
            if low is not None:  # no ∞ · 0: where out is 0, no matter what is beside it
                np.minimum(rest, limits.max, out=rest)
            rest *= out
        if low is not None and low.size:
            out.put(low, np.exp(sign * x.take(low)))
            if rest is not None:
                rest.put(low, 1)


def _flat(x: Any, shape: tuple[int, ...], work: Any) -> Array:
    return np.ascontiguousarray(np.broadcast_to(x, shape), work).reshape(-1)


@fused(elementwise=True, torch="nn.functional.silu", numpy=False)
def silu(x: Array) -> Array:
    """``x · σ(x)`` of each element, σ the logistic function; also called swish.

    Hendrycks and Gimpel (2016), Elfwing et al. (2017).

    >>> print(silu(np.array([-1e4, 0.0, 2.0])).round(4))
    [-0.      0.      1.7616]
    """
    return x * sigmoid(x)


def _silu(x: Array, out: Array, slope: Array | None) -> None:
    sigma = scratch(x.shape, x.dtype, "rows")
    logistic(x, sigma, slope)
    np.multiply(x, sigma, out=out)
    if slope is not None:
        with np.errstate(under="ignore"):
            slope *= x
            slope += 1
            slope *= sigma


@loop(_silu)
def silu_of(x: Array, out: Array, slope: Array | None) -> None:
    """x σ, and its slope σ (1 + x (1 - σ))."""
    for i in range(out.size):
        out[i] = x[i] * one(x[i])
        if slope is not None:
            slope[i] = one(x[i]) * (1.0 + x[i] * one(-x[i]))


@silu.defforward
def _silu_forward(x: Any, needs: tuple[bool, ...] = (False,)) -> tuple[Array, dict[str, Any]]:
    """The slope is made here, σ (1 + x (1 - σ)): 1 - σ costs nothing beside σ, and later another exponential."""
    dtype, work = dtypes(x)
    flat = _flat(x, np.shape(x), work)
    out, slopes = np.empty(np.shape(x), work), np.empty(flat.size, work) if any(needs) else None
    result = out.reshape(-1)

    def body(tile: slice) -> None:
        silu_of(flat[tile], result[tile], None if slopes is None else slopes[tile])

    over_elements(body, flat, arrays=4, ns=3.5)
    return cast_to(out, dtype), {"slopes": slopes}


@silu.defbackward("x")
def _silu_backward(g: Any, x: Any, slopes: Any) -> tuple[Array]:
    return (times_slopes(g, slopes, x.dtype),)


def times_slopes(g: Any, slopes: Array, dtype: Any) -> Array:
    """The gradient of an argument of this dtype, given the slope at each element."""
    gx, up = np.empty(g.shape, slopes.dtype), _flat(g, g.shape, slopes.dtype)
    result = gx.reshape(-1)
    over_elements(lambda tile: np.multiply(up[tile], slopes[tile], out=result[tile]), up, arrays=3, ns=0.3)
    return cast_to(gx, dtype)


def slope(x: Array, sigma: Array, silu: Array, out: Array) -> None:
    """The derivative of SiLU: σ + x σ (1 - σ), and σ (1 + x e^-x σ) where x would magnify the rounding of 1 - σ.

    ``out`` may be ``x``.
    """
    high: Any = None
    if np.fmax.reduce(x, axis=None, initial=0) > HIGH:
        high = np.flatnonzero(x > HIGH)  # some 20 times as fast as np.nonzero of a matrix
        far, one = x.take(high), sigma.take(high)
        exact = one * (1 + far * np.exp(-far) * one)
    np.subtract(1, sigma, out=out)
    out *= silu
    out += sigma
    if high is not None:
        out.put(high, exact)


def _torch(t: Any, gate: Any, up: Any) -> Any:
    return t.nn.functional.silu(gate) * up


@fused(elementwise=True, torch=_torch, numpy=False)
def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) · up`` of each pair: the gated unit of LLaMA's feed-forward layer.

    Shazeer, "GLU Variants Improve Transformer" (2020).

    >>> print(swiglu(np.array([0.0, 2.0]), np.array([5.0, 10.0])).round(3))
    [ 0.    17.616]
    """
    return gate * sigmoid(gate) * up


def _swiglu(x: Array, y: Array, sigma: Array, out: Array) -> None:
    logistic(x, sigma)
    np.multiply(x, sigma, out=out)
    out *= y


@loop(_swiglu)
def swiglu_of(x: Array, y: Array, sigma: Array, out: Array) -> None:
    """x σ y, and σ."""
    for i in range(out.size):
        sigma[i] = one(x[i])
        out[i] = x[i] * sigma[i] * y[i]


def _swiglu_slopes(g: Array, x: Array, y: Array, sigma: Array, dx: Array, dy: Array) -> None:
    with np.errstate(under="ignore"):
        silu = np.multiply(x, sigma, out=scratch(x.shape, x.dtype, "rows"))
        slope(x, sigma, silu, dx)
        np.multiply(g, silu, out=dy)
        dx *= np.multiply(g, y, out=silu)


@loop(_swiglu_slopes)
def swiglu_slopes(g: Array, x: Array, y: Array, sigma: Array, dx: Array, dy: Array) -> None:
    """The gradients of both; 1 - σ is made again, with all its digits."""
    for i in range(g.size):
        silu = x[i] * sigma[i]
        dx[i] = (sigma[i] + silu * one(-x[i])) * (g[i] * y[i])
        dy[i] = g[i] * silu


@swiglu.defforward
def _swiglu_forward(gate: Any, up: Any) -> tuple[Array, dict[str, Any]]:
    dtype, work = dtypes(gate, up)
    shape = np.broadcast_shapes(np.shape(gate), np.shape(up))
    x, y = _flat(gate, shape, work), _flat(up, shape, work)
    out, sigma = np.empty(shape, work), np.empty(x.size, work)
    result = out.reshape(-1)

    def body(tile: slice) -> None:
        swiglu_of(x[tile], y[tile], sigma[tile], result[tile])

    over_elements(body, x, arrays=4, ns=3.3)
    return cast_to(out, dtype), {"sigma": sigma}


@swiglu.defbackward("gate", "up")
def _swiglu_backward(g: Any, gate: Any, up: Any, sigma: Any, needs: tuple[bool, bool]) -> tuple[Any, Any]:
    """d gate = g · up · σ (1 + gate (1 - σ)), d up = g · silu(gate)."""
    work = sigma.dtype
    x, y, upstream = _flat(gate, g.shape, work), _flat(up, g.shape, work), _flat(g, g.shape, work)
    ggate, gup = np.empty(g.shape, work), np.empty(g.shape, work)
    dgate, dup = ggate.reshape(-1), gup.reshape(-1)

    def body(tile: slice) -> None:
        swiglu_slopes(upstream[tile], x[tile], y[tile], sigma[tile], dgate[tile], dup[tile])

    over_elements(body, x, arrays=7, ns=2.2)
    dtype = dtypes(gate, up)[0]
    return cast_to(ggate, dtype) if needs[0] else None, cast_to(gup, dtype) if needs[1] else None
