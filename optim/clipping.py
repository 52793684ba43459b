"""Gradient clipping: one norm over all gradients, and one factor for all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from minigrad.backend import Array, NDArray, accumulator, array_module
from minigrad.errors import ArgumentError, NonFiniteError
from minigrad.machine import parallel
from minigrad.messages.explain import explained
from minigrad.tensor import Tensor
from . import gpu
from .groups import as_parameters, gradient_of, param_name
from .tiles import as_rows, map_tiles


@explained
def clip_grad_norm(params: Tensor | Iterable[Tensor], max_norm: float, error_if_nonfinite: bool = False) -> NDArray:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), in place, and return the norm that they had before.

    norm = √(Σ g²) over every entry of every gradient, in at least float32; squares that would overflow or vanish there
    are summed in float64. The order depends on shapes alone, so it is the same bits on any number of threads: a float64
    array of shape () on the gradients' device. Frozen parameters and those without a gradient don't count; a parameter
    listed twice counts once. Where the factor is 1 the gradients keep their bits.

    A norm that is not finite is returned as it is and every gradient stays as it was: no factor makes a direction of an
    infinity. With ``error_if_nonfinite`` a NonFiniteError names the first parameter at fault instead, and nothing is
    changed either (on a GPU that check waits for the device; nothing else does). From Pascanu et al. 2013, section 3.2.

    >>> import minigrad as mg
    >>> p = mg.Tensor([0.0, 0.0], requires_grad=True)
    >>> p.grad = np.array([3.0, 4.0])
    >>> print(clip_grad_norm([p], max_norm=1.0), p.grad.round(6))
    5.0 [0.6 0.8]
    """
    check_max_norm(max_norm)
    listed = [params] if isinstance(params, Tensor) else as_parameters(params)
    owners = {p: place for place, p in enumerate(listed) if p.requires_grad and p.grad is not None}
    grads = [as_rows(gradient_of(p, place)) for p, place in owners.items()]
    norm = gpu.norm(grads) if gpu.takes(grads) else combine([tile for tiles in _norms(grads) for tile in tiles])
    if error_if_nonfinite and not math.isfinite(norm):
        tiles = enumerate(_norms(grads))
        bad = next((i for i, norms in tiles if not all(map(math.isfinite, norms))), 0)  # or all of them together
        name = param_name(*list(owners.items())[bad])
        raise NonFiniteError("finite gradients", f"a norm of {float(norm)}, first at {name}", "mg.detect_anomaly()")
    scale_gradients(list(owners), norm, max_norm)
    return norm


def check_max_norm(max_norm: float) -> None:
    """Refuse a norm that no gradient can be scaled to."""
    if not max_norm >= 0:
        raise ArgumentError("max_norm >= 0", f"max_norm={max_norm}", "math.inf measures the norm alone")


def _norms(grads: Sequence[Array]) -> list[list[Array]]:
    """The norms of all tiles of each gradient."""
    with parallel.blas_threads(1):  # several would split a dot product, and its rounding, among them
        return map_tiles(lambda i, rows: _norm(grads[i][rows]), grads, element_ns=0.3)


def _norm(tile: Array) -> Array:
    """√(Σ x²), where Σ x² may leave the range of the dtype: then, and on a GPU always, from (x / max |x|)² in float64.

    On the CPU a dot product is tried first, the fastest pass there is; to look at its result costs nothing there.
    """
    xp = array_module(tile)
    if xp is np and tile.dtype.itemsize > 2:
        square = float(np.vdot(tile, tile))
        if 1e-20 < square < 1e30:
            return math.sqrt(square)
    x = tile.astype(np.float64)
    peak = xp.abs(x).max()
    peak = xp.where(xp.isfinite(peak) & (peak > 0), peak, 1.0)
    x /= peak
    x *= x
    return peak * xp.sqrt(x.sum())


def combine(norms: Sequence[Array]) -> Array:
    """The norm of a vector, from the norms of its parts."""
    if not norms:
        return np.zeros(())
    xp = array_module(*norms)
    return xp.asarray(_norm(xp.stack(norms)))


def scale_gradients(owners: Sequence[Tensor], norm: Array, max_norm: float) -> None:
    """Multiply the gradients by the clip factor, which is 1 where the norm is not finite."""
    xp = array_module(norm)
    with np.errstate(invalid="ignore", over="ignore"):  # inf / inf is computed, not chosen
        factor = xp.where(xp.isfinite(norm), xp.minimum(1.0, max_norm / (norm + 1e-6)), 1.0)
    if xp is np and factor == 1:  # asking a GPU means waiting for it; there a multiplication by 1 keeps every bit too
        return
    for param in owners:
        grad: Array = param.grad
        if not getattr(grad.flags, "writeable", True):
            param.grad = grad.copy()
    grads = [as_rows(param.grad) for param in owners]
    if gpu.takes(grads):
        gpu.scale(grads, factor)
        return
    whole = xp is np and factor < np.finfo(np.float32).tiny  # then float32 has not all of its digits
    dtypes = [np.dtype(np.float64) if whole else accumulator(grad.dtype) for grad in grads]
    factors = [factor.astype(dtype) for dtype in dtypes]  # a half-precision product is rounded once

    def scale(i: int, rows: slice) -> None:
        tile = grads[i][rows]
        xp.multiply(tile, factors[i], out=tile, casting="unsafe")

    map_tiles(scale, grads, element_ns=0.5)
