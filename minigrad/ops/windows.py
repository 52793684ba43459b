"""Windows that slide over an array, a view that defines convolutions and pooling, and their sum, which is its rule."""

from __future__ import annotations

import itertools
from typing import Any

from minigrad.backend import Array, Axes, accumulator, array_module, cast_to
from minigrad.engine.core import primitive
from minigrad.engine.registry import sample
from minigrad.errors import ArgumentError, ShapeError
from minigrad.messages.arguments import as_int, normal_axis

__all__ = ["sliding_window_view"]


def spread_out(value: Any, count: int, what: str, least: int = 1) -> tuple[int, ...]:
    """A whole number for each of ``count`` axes: a single one stands for all of them.

    >>> spread_out(2, 3, "stride"), spread_out((1, 2), 2, "stride")
    ((2, 2, 2), (1, 2))
    """
    given = tuple(value) if isinstance(value, tuple | list) else (value,)
    numbers = tuple(as_int(n, what) for n in given)
    if len(numbers) not in (1, count):
        raise ShapeError(f"{what}: one number, or {count}", f"{len(numbers)} numbers", "one for each axis, in order")
    if any(n < least for n in numbers):
        raise ArgumentError(f"{what} from {least} on", repr(value), "it counts elements")
    return numbers * count if len(numbers) == 1 else numbers


def _torch(t: Any, x: Any, window_shape: Any, axis: Any = None, stride: Any = 1, dilation: Any = 1) -> Any:
    """Index arrays for the elements of each window, one axis after the other."""
    axes = list(range(x.ndim)) if axis is None else [axis] if isinstance(axis, int) else list(axis)
    sizes, steps, gaps = (
        list(v) if isinstance(v, tuple) else [v] * len(axes) for v in (window_shape, stride, dilation)
    )
    axes = [a % x.ndim for a in axes]
    for a, n, s, d in zip(axes, sizes, steps, gaps, strict=True):
        starts = t.arange(0, x.shape[a] - d * (n - 1), s)
        places = starts[:, None] + d * t.arange(n)
        x = x.index_select(a, places.reshape(-1)).unflatten(a, places.shape).movedim(a + 1, -1)
    return x


_samples = [
    sample((5,), window_shape=3),
    sample((2, 5), window_shape=2, axis=-1, stride=2),
    sample((4, 5), window_shape=(2, 3)),
    sample((2, 5, 6), window_shape=(2, 3), axis=(1, 2), stride=(2, 1), dilation=(1, 2)),
]


@primitive(linear="jointly", view=True, torch=_torch, numpy=False, samples=_samples)
def sliding_window_view(x: Array, window_shape: Any, axis: Axes = None, stride: Any = 1, dilation: Any = 1) -> Array:
    """All windows of ``window_shape`` over the axes ``axis`` (all, if None) of x, as a read-only view.

    The axes become numbers of windows, ``(n - dilation·(window - 1) - 1) // stride + 1`` of them, and the places in a
    window are new axes at the end: NumPy's function, whose windows may stand ``stride`` apart here and take each
    ``dilation``-th element. One number stands for all axes.

    >>> import numpy as np
    >>> print(sliding_window_view(np.arange(5), 2, stride=2))
    [[0 1]
     [2 3]]
    """
    axes, sizes, steps, gaps = _geometry(x.ndim, window_shape, axis, stride, dilation)
    spans = tuple(d * (n - 1) + 1 for n, d in zip(sizes, gaps, strict=True))
    if any(span > x.shape[a] for a, span in zip(axes, spans, strict=True)):
        lengths = tuple(x.shape[a] for a in axes)
        raise ShapeError(f"windows of at most {lengths}", f"windows that span {spans}", "pad makes room for them")
    index: list[Any] = [slice(None)] * x.ndim + [slice(None, None, d) for d in gaps]
    for a, s in zip(axes, steps, strict=True):
        index[a] = slice(None, None, s)
    return array_module(x).lib.stride_tricks.sliding_window_view(x, spans, axes)[tuple(index)]


def _torch_add(t: Any, windows: Any, shape: Any, axis: Any, stride: Any, dilation: Any) -> Any:
    places = stride[0] * t.arange(windows.shape[0])[:, None] + dilation[0] * t.arange(windows.shape[-1])
    out = t.zeros(shape, dtype=windows.dtype)
    return out.index_add(0, places.reshape(-1), windows.movedim(-1, 1).reshape(-1, *shape[1:]))


_samples = [
    sample((3, 2), shape=(6,), axis=(0,), stride=(1,), dilation=(2,)),
    sample((2, 3, 3), shape=(6, 3), axis=(0,), stride=(2,), dilation=(1,)),
]


@primitive(linear="jointly", part_of="sliding_window_view", torch=_torch_add, numpy=False, samples=_samples)
def add_windows(windows: Array, shape: Any, axis: Any, stride: Any, dilation: Any) -> Array:
    """Zeros of ``shape`` to which every window is added in its place; half precision is summed in float32."""
    xp, ndim = array_module(windows), len(shape)
    out = xp.zeros(shape, accumulator(windows.dtype))
    for place in itertools.product(*map(range, windows.shape[ndim:])):
        to: list[Any] = [slice(None)] * ndim
        for a, k, s, d in zip(axis, place, stride, dilation, strict=True):
            to[a] = slice(k * d, k * d + s * (windows.shape[a] - 1) + 1, s)
        origin: Any = (..., *place)
        out[tuple(to)] += windows[origin]
    return cast_to(out, windows.dtype)


def _geometry(ndim: int, window_shape: Any, axis: Any, stride: Any, dilation: Any) -> tuple[tuple[int, ...], ...]:
    """Axes, and for each of them the length of the window, its stride and its dilation."""
    axes = range(ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    places = tuple(normal_axis(a, ndim) for a in axes)
    if len({*places}) < len(places):
        raise ArgumentError("each axis once", f"axis={axis}", "a window has one length along an axis")
    numbers = ((window_shape, "window_shape"), (stride, "stride"), (dilation, "dilation"))
    return (places, *(spread_out(value, len(places), what) for value, what in numbers))


def _add_back(g: Array, x_shape: Any, window_shape: Any, axis: Any, stride: Any, dilation: Any) -> Array:
    axes, _, steps, gaps = _geometry(len(x_shape), window_shape, axis, stride, dilation)
    return add_windows(g, x_shape, axes, steps, gaps)


def _cut_again(g: Array, windows_shape: Any, shape: Any, axis: Any, stride: Any, dilation: Any) -> Array:
    ndim = len(shape)
    found = sliding_window_view(g, windows_shape[ndim:], axis, stride, dilation)
    return found[tuple(slice(n) for n in windows_shape[:ndim])]  # a longer shape may have room for more windows


sliding_window_view.defvjp(_add_back)
add_windows.defvjp(_cut_again)
