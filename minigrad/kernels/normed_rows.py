"""Rows divided by their root mean square, a tile at a time: for ``rms_norm``, and for products that read such rows.

A product that normalises its rows itself keeps one number a row for the backward pass, and makes them anew there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend import Array, cast_to
from minigrad.errors import ShapeError
from minigrad.kernels.rows import as_matrix, total
from minigrad.machine.parallel import scratch
from minigrad.messages.arguments import check_eps

# ---- a tile ---------------------------------------------------------------------------------------------------------


def inverse_rms(x: Array, eps: float, out: Array) -> None:
    """``out = 1 / √(mean(x²) + eps)`` of each row."""
    np.vecdot(x, x, out=out)
    out /= max(x.shape[1], 1)
    out += eps
    np.sqrt(out, out=out)
    np.divide(1, out, out=out)


def normalize(x: Array, gain: Array | None, inverse: Array, out: Array) -> None:
    """``out = x · inverse · gain``."""
    np.multiply(x, inverse[:, None], out=out)
    if gain is not None:
        out *= gain


def pull_back(g: Array, x: Array, gain: Array, inverse: Array, out: Array | None) -> Array:
    """Write the gradient of x to ``out``, which may be ``g`` itself, and return that of the gain.

    With r = inverse: dx = r (g gain) - x r³ mean(g gain x), dgain = Σ_rows g x r.
    """
    gx = np.multiply(g, x, out=scratch(x.shape, x.dtype, "more rows"))
    share = inverse @ gx
    if out is not None:
        slope = gx @ gain
        slope *= inverse**3 / -max(x.shape[1], 1)
        np.multiply(g, gain, out=out)
        out *= inverse[:, None]
        out += np.multiply(x, slope[:, None], out=gx)
    return share


# ---- the rows of a product ------------------------------------------------------------------------------------------


class NormedRows:
    """The rows that a product reads: those of x, normalised if there is a gain.

    Tiles are [a, b). The forward pass takes ``tile``, which fills in ``inverse``, 1/rms of each row (empty without a
    gain). The backward pass is given that again: to the array that ``place`` gives it writes the rows by ``refill``,
    and by ``pull`` it turns their gradient into that of x.
    """

    def __init__(self, x: Any, gain: Array | None, work: Any, eps: float = 0.0, inverse: Array | None = None) -> None:
        self.rows = as_matrix(x, work)
        self.gain = None if gain is None else np.ascontiguousarray(gain, work)
        self.eps = eps
        self.inverse = np.empty(0 if gain is None else len(self.rows), work) if inverse is None else inverse
        self.shares: dict[int, Array] = {}  # of the tiles in the gradient of the gain

    def tile(self, a: int, b: int) -> Array:
        """The rows of a tile."""
        x = self.rows[a:b]
        if self.gain is None:
            return x
        out = scratch(x.shape, x.dtype, "normed rows")
        inverse_rms(x, self.eps, self.inverse[a:b])
        normalize(x, self.gain, self.inverse[a:b], out)
        return out

    def place(self, a: int, b: int) -> Array:
        """A scratch array for rows to be written to; without a gain the rows of x, which are what would be written."""
        x = self.rows[a:b]
        return x if self.gain is None else scratch(x.shape, x.dtype, "normed rows: place")

    def refill(self, a: int, b: int, out: Array) -> None:
        """Write the rows of a tile to ``out``, a part of a place."""
        if self.gain is not None:
            normalize(self.rows[a:b], self.gain, self.inverse[a:b], out)

    def pull(self, a: int, b: int, g: Array) -> None:
        """Turn the gradient of a tile's rows into that of x, in place."""
        if self.gain is not None:
            self.shares[a] = pull_back(g, self.rows[a:b], self.gain, self.inverse[a:b], g)

    def gain_gradient(self) -> Array:
        """The gradient of the gain, once all tiles were pulled."""
        assert self.gain is not None
        return total(self.shares, self.gain)


def check_gain(x: Any, gain: Any, eps: float) -> None:
    """Refuse a gain that isn't one number for each column of x."""
    check_eps(eps)
    if gain is not None and np.shape(gain) != np.shape(x)[-1:]:
        hint = "the weight of an nn.RMSNorm over the last axis, or None"
        raise ShapeError(f"a gain of shape {np.shape(x)[-1:]}", f"shape {np.shape(gain)}", hint)


def rounded_gradients(gradients: Sequence[Array | None], arguments: Sequence[Any]) -> tuple[Array | None, ...]:
    """Each gradient in the dtype of its argument."""
    pairs = zip(gradients, arguments, strict=True)
    return tuple(None if gradient is None else cast_to(gradient, like.dtype) for gradient, like in pairs)
