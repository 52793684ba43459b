"""Numbers sampled along an axis: differences and slopes, areas, interpolation, angles, convolution. Compositions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend import Array, array_module, array_of, as_arrays
from minigrad.engine.core import primitive
from minigrad.engine.registry import composite, sample
from minigrad.errors import ArgumentError, ShapeError
from minigrad.messages.explain import describe
from minigrad.ops.elementwise import subtract
from minigrad.ops.linalg import matmul
from minigrad.ops.piecewise import astype, remainder, where
from minigrad.ops.reduce import sum
from minigrad.ops.shape import along, as_tuple, broadcast_to, concatenate, flip, normal_axis, pad_constant, reshape
from minigrad.ops.windows import sliding_window_view

__all__ = ["convolve", "correlate", "diff", "gradient", "interp", "trapezoid", "unwrap"]


def _part(x: Array, axis: int, start: int | None, stop: int | None) -> Array:
    """``x[start:stop]`` along an axis."""
    return x[along(axis, x.ndim, slice(start, stop))]


def _floating(x: Any) -> Any:
    """``x``, float64 of whole numbers: differences of unsigned ones, and sums of small ones, leave their range."""
    x = x if hasattr(x, "ndim") else np.asarray(x)
    return astype(x, np.dtype(np.float64)) if x.dtype.kind in "biu" else x


# ---- differences and slopes -----------------------------------------------------------------------------------------


@composite(samples=[sample((4,)), sample((2, 4), n=2), sample((4, 2), axis=0), sample((2, 3), 1, -1, (2, 1), (2, 2))])
def diff(x: Array, n: int = 1, axis: int = -1, prepend: Array | None = None, append: Array | None = None) -> Array:
    """``x[k + 1] - x[k]`` along ``axis``, n times over; ``prepend`` and ``append`` are put before and behind x first.

    >>> print(diff(np.array([1.0, 4.0, 9.0])))
    [3. 5.]
    """
    axis = normal_axis(axis, x.ndim)
    if n < 0:
        raise ArgumentError("n from 0", str(n), "cumsum is the inverse")
    if n == 0:
        return x

    def end(value: Any) -> Array:
        one = tuple(1 if a == axis else length for a, length in enumerate(x.shape))
        return broadcast_to(as_arrays(x, value)[1], one) if np.ndim(array_of(value)) == 0 else value

    if prepend is not None or append is not None:
        ends = [None if v is None else end(v) for v in (prepend, append)]
        x = concatenate([v for v in (ends[0], x, ends[1]) if v is not None], axis)
    for _ in range(n):
        first, second = _part(x, axis, None, -1), _part(x, axis, 1, None)
        x = first != second if x.dtype.kind == "b" else subtract(second, first)
    return x


def _numpy_gradient(n: Any, x: Any, *steps: Any, **options: Any) -> Any:
    found = n.gradient(x, *steps, **options)
    return found[0] if isinstance(found, tuple | list) and len(found) == 1 else found


def _torch_gradient(t: Any, x: Any, *steps: Any, axis: Any = None, edge_order: int = 1) -> Any:
    places = steps and np.ndim(steps[0]) and (t.as_tensor(steps[0], dtype=x.dtype),)
    axes = {} if axis is None else {"dim": axis}
    found = t.gradient(x, spacing=places or (steps[0] if steps else 1), **axes, edge_order=edge_order)
    return found[0] if len(found) == 1 else found


_uneven = np.array([0.0, 1.0, 1.5, 3.5])


@composite(
    numpy=_numpy_gradient,
    torch=_torch_gradient,
    samples=[sample((4,)), sample((3, 4)), sample((4, 2), 0.5, axis=0), sample((2, 5), edge_order=2, axis=1),
             sample((4,), _uneven), sample((4,), _uneven, edge_order=2)],
)  # fmt: skip
def gradient(x: Array, *steps: Array, axis: Any = None, edge_order: int = 1) -> Any:
    """The slopes of sampled functions: central differences inside, one-sided ones of ``edge_order`` 1 or 2 at the ends.

    steps: nothing (1), one distance for all axes, or for each axis a distance or the places of the samples. Of several
    axes the result is a list, one for each. ``minigrad.grad`` is the derivative of a function.

    >>> print(gradient(np.array([0.0, 1.0, 4.0, 9.0])))
    [1. 2. 4. 5.]
    """
    axes = [normal_axis(a, x.ndim) for a in (range(x.ndim) if axis is None else as_tuple(axis))]
    given = list(steps) * (len(axes) if len(steps) == 1 else 1) or [1.0] * len(axes)
    if len(given) != len(axes):
        raise ArgumentError(f"steps for {len(axes)} axes, or one for all", f"{len(given)}", "axis= chooses axes")
    if edge_order not in (1, 2):
        raise ArgumentError("edge_order 1 or 2", repr(edge_order), "2 uses one sample more")
    x = _floating(x)
    slopes = [_slope(x, a, h, edge_order) for a, h in zip(axes, given, strict=True)]
    return slopes[0] if len(slopes) == 1 else slopes


def _slope(x: Array, axis: int, steps: Any, edge_order: int) -> Array:
    """The slopes along one axis, at distances ``steps`` or at the places ``steps``."""
    n = x.shape[axis]
    if n <= edge_order:
        raise ShapeError(
            f"at least {edge_order + 1} samples along axis {axis}", f"shape {x.shape}", "a slope needs two"
        )
    rise = diff(x, axis=axis)
    if np.ndim(array_of(steps)) == 0:
        rates = rise / steps
        inner = subtract(_part(x, axis, 2, None), _part(x, axis, None, -2)) / (2 * steps)
        shares: Any = (0.5, 0.5)
    else:
        if np.shape(array_of(steps)) != (n,):
            expected = f"a distance, or {n} places along axis {axis}"
            raise ShapeError(expected, describe(steps), "one for each sample")
        apart = reshape(diff(_floating(steps)), tuple(n - 1 if a == axis else 1 for a in range(x.ndim)))
        rates = rise / apart
        left, right = _part(apart, axis, None, -1), _part(apart, axis, 1, None)
        share = left / (left + right)  # of the right rate: the nearer sample counts more
        inner = _part(rates, axis, None, -1) * (1 - share) + _part(rates, axis, 1, None) * share
        shares = (_part(share, axis, None, 1), 1 - _part(share, axis, -1, None))
    first, last = _part(rates, axis, None, 1), _part(rates, axis, -1, None)
    if edge_order == 2:  # the parabola through three samples
        first = first + (first - _part(rates, axis, 1, 2)) * shares[0]
        last = last + (last - _part(rates, axis, n - 3, n - 2)) * shares[1]
    return concatenate([first, inner, last], axis)


@composite(samples=[sample((4,)), sample((2, 4), dx=0.5), sample((4, 2), np.array([0.0, 1.0, 1.5, 3.0]), 1.0, 0),
                    sample((3, 4), (4,)), sample((2, 3), (2, 3))],
           torch=lambda t, y, x=None, dx=1.0, axis=-1: (
               t.trapezoid(y, dx=dx, dim=axis) if x is None else t.trapezoid(y, t.as_tensor(x, dtype=y.dtype), dim=axis)
           ))  # fmt: skip
def trapezoid(y: Array, x: Array | None = None, dx: Array = 1.0, axis: int = -1) -> Array:
    """The area under ``y`` along ``axis``, ``Σ (x[k+1] - x[k]) (y[k] + y[k+1]) / 2``, at places x or ``dx`` apart.

    Booleans and integers count as real numbers, where NumPy takes "or" of two booleans and small integers wrap.

    >>> print(trapezoid(np.array([1.0, 2.0, 3.0])))
    4.0
    """
    axis = normal_axis(axis, y.ndim)
    wide, y = dx, _floating(y)
    if x is not None:
        places = _floating(x)
        wide = diff(places, axis=-1 if places.ndim == 1 else axis)
        if places.ndim == 1:
            wide = reshape(wide, tuple(wide.shape[0] if a == axis else 1 for a in range(y.ndim)))
    return sum(wide * (_part(y, axis, 1, None) + _part(y, axis, None, -1)) / 2, axis)


# ---- interpolation --------------------------------------------------------------------------------------------------

_places = np.array([-1.5, -0.5, 0.25, 1.0])


@composite(torch=False, kinks=tuple(_places), samples=[
    sample((2, 3), _places, (4,)), sample((3,), _places, (4,), 0.5, 2.0), sample((3,), _places, (4,), period=3.0),
    sample(np.array([-0.7, 0.1]), (1,), (1,)),
])  # fmt: skip
def interp(
    x: Array, xp: Array, fp: Array, left: Array | None = None, right: Array | None = None, period: float | None = None
) -> Array:
    """At each x the piecewise linear function through the points (xp, fp), where xp increases.

    Below and above them it is ``left`` and ``right``, by default the first and the last fp. With a ``period`` it is
    periodic, and xp may come in any order. At a knot it has the slope of the piece that begins there.

    >>> print(interp(np.array([0.5, 9.0]), np.array([0.0, 1.0]), np.array([10.0, 20.0])))
    [15. 20.]
    """
    x, xp, fp = map(_floating, as_arrays(x, xp, fp))
    if xp.ndim != 1 or xp.shape != fp.shape or not xp.shape[0]:
        raise ShapeError("points as two vectors of one length", f"{describe(xp)} and {describe(fp)}", "xp, then fp")
    if period is not None:
        if not period:
            raise ArgumentError("a period other than 0", repr(period), "period=None is none")
        x, xp = remainder(x, abs(period)), remainder(xp, abs(period))
        order = array_module(array_of(xp)).argsort(array_of(xp))
        xp, fp = xp[order], fp[order]
        xp = concatenate([xp[-1:] - abs(period), xp, xp[:1] + abs(period)])
        fp = concatenate([fp[-1:], fp, fp[:1]])
    plain, knots = array_of(x), array_of(xp)
    numbers = array_module(knots, plain)
    n = knots.shape[0]
    place = numbers.searchsorted(knots, plain.reshape(-1), side="right").reshape(plain.shape)
    place = numbers.clip(place - 1, 0, max(n - 2, 0))
    below, above = fp[0] if left is None else left, fp[-1] if right is None else right
    if n > 1:
        start, height = xp[place], fp[place]
        x = where((plain < knots[0]) | (plain > knots[-1]), knots[place], x)  # not an infinite one, of slope NaN
        width = xp[place + 1] - start
        width = where(array_of(width) == 0, 1, width)  # equal knots at the end
        with np.errstate(invalid="ignore"):  # of infinite points
            rate = (fp[place + 1] - height) / width
            inside = height + (x - start) * rate
            broken = (array_of(inside) != array_of(inside)) & (plain == plain)
            if bool(broken.any()):  # they are seen from the other end of the piece
                other = where(plain == knots[place], height, fp[place + 1] + (x - xp[place + 1]) * rate)
                inside = where(broken, other, inside)
        inside = where(plain == knots[-1], fp[-1], inside)
    else:
        inside = where(plain == plain, fp[0], x)
    return where(plain < knots[0], below, where(plain > knots[-1], above, inside))


# ---- angles ---------------------------------------------------------------------------------------------------------


@primitive(torch=False, domain=(-9.0, 9.0), samples=[sample((5,)), sample((2, 4), axis=0),
                                                     sample((2, 4), discont=4.0, period=3.0)])  # fmt: skip
def unwrap(x: Array, discont: float | None = None, axis: int = -1, period: float = 2 * math.pi) -> Array:
    """Angles along ``axis`` without jumps by more than half a period: multiples of it are added, which are constants.

    Jumps up to ``discont`` stay, where that is more than half a period.

    >>> print(unwrap(np.array([0.0, 3.0, -3.0])).round(4))
    [0.     3.     3.2832]
    """
    return array_module(x).unwrap(x, discont, axis, period=period)


unwrap.defvjp(lambda g: g)

# ---- convolution ----------------------------------------------------------------------------------------------------

_pairs = [sample((5,), (3,), mode=m) for m in ("full", "same", "valid")]
_short = [sample((2,), (5,), mode=m) for m in ("full", "same", "valid")]


def _slide(x: Array, y: Array, mode: Any) -> Array:
    """``Σₙ x[n + k] y[n]`` for each k of the mode, x at least as long as y."""
    m = y.shape[0]
    if mode not in ("full", "same", "valid"):
        raise ArgumentError("mode full, same or valid", repr(mode), "they say how far the two overlap")
    before, after = {"full": (m - 1, m - 1), "same": (m // 2, m - 1 - m // 2), "valid": (0, 0)}[mode]
    padded = pad_constant(x, [[before, after]], 0) if mode != "valid" else x
    return matmul(sliding_window_view(padded, m), y)


def _check_vectors(x: Array, y: Array) -> None:
    if any(np.ndim(array_of(v)) != 1 for v in (x, y)) or not (x.shape[0] and y.shape[0]):
        got = f"{describe(x)} and {describe(y)}"
        raise ShapeError("two vectors with at least one element", got, "nn.functional.conv2d takes images")


@composite(torch=False, samples=[*_pairs, *_short, sample((4,), (4,), mode="same"), sample((5,), (2,), mode="same")])
def convolve(x: Array, y: Array, mode: str = "full") -> Array:
    """``Σₙ x[n] y[k - n]`` of two vectors, with zeros around them: n + m - 1 numbers.

    mode: "full", "same" (as many as the longer has, from the middle), "valid" (where they overlap wholly).

    >>> print(convolve(np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 0.5])))
    [0.  1.  2.5 4.  1.5]
    """
    x, y = (reshape(v, (1,)) if np.ndim(array_of(v)) == 0 else v for v in as_arrays(x, y))
    _check_vectors(x, y)
    longer, shorter = (x, y) if x.shape[0] >= y.shape[0] else (y, x)
    return _slide(longer, flip(shorter), mode)


@composite(torch=False, samples=[*_pairs, *_short, sample((4,), (4,), mode="same"), sample((5,), (2,), mode="same")])
def correlate(x: Array, y: Array, mode: str = "valid") -> Array:
    """``Σₙ x[n + k] y[n]`` of two vectors, with zeros around them; modes as in ``convolve``.

    >>> print(correlate(np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 0.5])))
    [3.5]
    """
    _check_vectors(x, y)
    return _slide(x, y, mode) if x.shape[0] >= y.shape[0] else flip(_slide(y, x, mode))
