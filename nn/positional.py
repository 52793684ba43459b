"""Positions of tokens: sinusoids added to embeddings, and rotations of queries and keys (RoPE)."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from minigrad import asarray
from minigrad.backend import NDArray, accumulator, device_of, to_device
from minigrad.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError
from minigrad.tensor import Tensor, TensorLike
from . import functional as F
from .activation import Dropout
from .checks import check_sizes
from .module import Module

LAYOUTS = ("interleaved", "half")


class SinusoidalPositionalEncoding(Module):
    """Adds to each position its own sinusoids: ``x + P[:T]``, then dropout.

    ``P[t, 2k] = sin(t / 10000^(2k/d))`` and ``P[t, 2k+1] = cos(t / 10000^(2k/d))``, d = d_model, which may be odd. x is
    (..., T, d_model) with T at most max_len. Vaswani et al., "Attention is all you need" (2017), section 3.5.

    >>> import minigrad as mg
    >>> print(SinusoidalPositionalEncoding(4, max_len=2)(mg.zeros((2, 4))).data.round(4))
    [[0.     1.     0.     1.    ]
     [0.8415 0.5403 0.01   1.    ]]
    """

    def __init__(self, d_model: int, max_len: int = 5000, dropout: float = 0.0) -> None:
        super().__init__()
        check_sizes(d_model=d_model, max_len=max_len)
        self.d_model, self.max_len = d_model, max_len
        self._table = np.empty((0, 0))
        self.dropout = Dropout(dropout)

    def table(self, rows: int) -> NDArray:
        """The sinusoids (positions, d_model) of at least ``rows`` positions, made when a call first needs so many."""
        if len(self._table) < rows:
            positions = np.arange(min(max(2 * rows, 1024), self.max_len))
            angles = positions[:, None] / 10000 ** (np.arange(0, self.d_model, 2) / self.d_model)
            self._table = np.empty((len(positions), self.d_model))
            self._table[:, 0::2] = np.sin(angles)
            self._table[:, 1::2] = np.cos(angles[:, : self.d_model // 2])
        return self._table

    def forward(self, x: Tensor, positions: TensorLike | None = None) -> Tensor:
        """``dropout(x + P[positions])``; positions are integers (T,) or (..., T), 0 … T-1 if not given."""
        max_len, d_model = self.max_len, self.d_model
        if x.ndim < 2 or x.shape[-1] != d_model:
            hint = "features are on the last axis, positions before it"
            raise ShapeError(f"(..., T, {d_model})", f"shape {x.shape}", hint)
        positions = range(x.shape[-2]) if positions is None else positions
        if isinstance(positions, range) and positions.stop > max_len:
            hint = "make it with a larger max_len"
            raise ShapeError(f"at most max_len = {max_len} positions", f"{positions.stop}", hint)
        place = checked_positions(positions, x.shape[-2], "cpu", "max_len", max_len)
        table = self.table(place.stop if isinstance(place, slice) else max_len)
        return self.dropout(x + asarray(table[place], x.dtype, device_of(asarray(x).data)))

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, max_len={self.max_len}"


class RotaryEmbedding(Module):
    """Turns pairs of features by angles that grow with the position, so that q·k depends on the distance alone.

    The k-th pair (k = 1 … d_k/2) at position i turns by ``i · Θ^(-(2k-2)/d_k)``. layout "interleaved" pairs neighbours
    (2k-1, 2k), "half" pairs k with k + d_k/2 (as Hugging Face's LLaMA weights do). The tables of cosines and sines are
    computed in float64 and rounded once, to the dtype in which they are used; they are no part of the state dict.

    scaling is a ``rope_scaling`` of a Hugging Face configuration: ``{"rope_type": "linear", "factor": 2.0}``, or
    "llama3" with factor, low_freq_factor, high_freq_factor and original_max_position_embeddings. If endless, positions
    may lie beyond max_seq_len; those angles are computed anew in each call.

    Su et al., "RoFormer" (2021).

    >>> import minigrad as mg
    >>> rope = RotaryEmbedding(4, max_seq_len=8)
    >>> print(rope(mg.Tensor([[1.0, 0.0, 1.0, 0.0]]), [1]).data.round(4))
    [[0.5403 0.8415 1.     0.01  ]]
    """

    def __init__(
        self,
        d_k: int,
        max_seq_len: int,
        theta: float = 10000.0,
        layout: str = "interleaved",
        *,
        scaling: Mapping[str, Any] | None = None,
        endless: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(d_k=d_k, max_seq_len=max_seq_len)
        if d_k % 2:
            hint = "for a head: d_model / heads"
            raise ArgumentError("an even d_k, the features being turned in pairs", str(d_k), hint)
        if layout not in LAYOUTS:
            hint = "'interleaved' turns neighbours, 'half' those half a row apart"
            raise ArgumentError(f"a layout of {LAYOUTS}", repr(layout), hint)
        if not isinstance(theta, int | float | np.number) or not 0 < theta <= sys.float_info.max:
            raise ArgumentError("a positive theta", repr(theta), "10000 is usual")
        self.d_k, self.max_seq_len, self.theta, self.layout = d_k, max_seq_len, theta, layout
        self.endless, self.scaling = endless, None if scaling is None else dict(scaling)
        scaled_frequencies(np.ones(1), scaling)  # refuses a scaling that it doesn't know
        self._tables: dict[tuple[str, str], tuple[NDArray, NDArray]] = {}

    def forward(self, x: Tensor, positions: TensorLike | None = None) -> Tensor:
        """``x`` (..., T, d_k) turned by its positions: integers (T,), or of x's leading axes; 0 … T-1 if not given."""
        if x.ndim < 2 or x.shape[-1] != self.d_k:
            hint = "features are on the last axis, positions before it"
            raise ShapeError(f"(..., T, {self.d_k})", f"shape {x.shape}", hint)
        device = device_of(asarray(x).data)
        limit = sys.maxsize if self.endless else self.max_seq_len
        place = checked_positions(positions, x.shape[-2], "cpu" if self.endless else device, "max_seq_len", limit)
        cos, sin = self._turns(place, accumulator(x.dtype), device)
        turned: Tensor = F.apply_rope(x, cos, sin, self.layout)
        return turned

    def at(self, position: int, positions: Any, dtype: Any) -> tuple[NDArray, NDArray]:
        """Cosines and sines on the CPU of one position, or of ``positions`` (batch, 1) with an axis for the heads."""
        limit = sys.maxsize if self.endless else self.max_seq_len
        place = range(position, position + 1) if positions is None else asarray(positions).data[:, None]
        return self._turns(checked_positions(place, 1, "cpu", "max_seq_len", limit), dtype, "cpu")

    def _turns(self, place: Any, dtype: Any, device: str) -> tuple[NDArray, NDArray]:
        """Cosines and sines of positions, which are rows of the tables where those reach so far."""
        counted, far = isinstance(place, slice), self.max_seq_len
        stop = place.stop if counted else int(place.max(initial=0)) + 1 if self.endless else far
        if stop > far:
            return self._made(np.arange(place.start, stop) if counted else place, dtype, device)
        cos, sin = self.tables(dtype, device, stop)
        rows = place if counted else to_device(place, device)
        return cos[rows], sin[rows]

    def _made(self, positions: NDArray, dtype: Any, device: str) -> tuple[NDArray, NDArray]:
        frequencies = scaled_frequencies(self.theta ** (-np.arange(0, self.d_k, 2) / self.d_k), self.scaling)
        angles = positions[..., None] * frequencies
        cos, sin = (asarray(f(angles), dtype, device).data for f in (np.cos, np.sin))
        return cos, sin

    def tables(self, dtype: Any, device: str, rows: int) -> tuple[NDArray, NDArray]:
        """Cosines and sines (positions, d_k/2) of at least ``rows`` positions, made when a call first needs so many."""
        key = (dtype.name, device)
        if key not in self._tables or len(self._tables[key][0]) < rows:
            self._tables[key] = self._made(np.arange(min(max(2 * rows, 1024), self.max_seq_len)), dtype, device)
        return self._tables[key]

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        return f"{self.d_k}, max_seq_len={self.max_seq_len}, theta={self.theta}, layout={self.layout!r}{scaling}"


def checked_positions(positions: Any, length: int, device: str, name: str, limit: int) -> Any:
    """Rows of a table of ``limit`` rows for ``length`` positions: a slice for None or a range, else a checked array.

    >>> checked_positions(None, 3, "cpu", "max_len", 8)
    slice(0, 3, None)
    """
    positions = range(length) if positions is None else positions
    if isinstance(positions, range) and positions.step == 1:
        place: Any = slice(positions.start, positions.stop)
        count = len(positions)
        first, last = positions.start, positions.stop - 1
    else:
        place = asarray(positions).data
        if place.dtype.kind not in "iu":
            raise DTypeError("positions as integers", f"dtype {place.dtype}", "astype('int64') makes integers")
        count = place.shape[-1] if place.ndim else 0
        first, last = (int(place.min()), int(place.max())) if place.size else (0, 0)
    if count != length:
        raise ShapeError(f"{length} positions on the last axis", f"{count}", "one for each token")
    if first < 0 or last >= limit:
        got = f"position {first if first < 0 else last}"
        raise IndexRangeError(f"positions from 0, below {name} = {limit}", got, f"make it with a larger {name}")
    return place if isinstance(place, slice) else to_device(place, device)


def scaled_frequencies(frequencies: Any, scaling: Mapping[str, Any] | None) -> Any:
    """RoPE's frequencies stretched for longer contexts, as a ``rope_scaling`` of a Hugging Face configuration says.

    "linear" divides all by ``factor``: positions are interpolated. "llama3" does so for wavelengths longer than
    ``original_max_position_embeddings / low_freq_factor``, leaves alone those shorter than
    ``original… / high_freq_factor``, and blends in between. Others are refused by name.

    >>> print(scaled_frequencies(np.array([1.0, 0.5]), {"rope_type": "linear", "factor": 2.0}))
    [0.5  0.25]
    """
    if scaling is None:
        return frequencies
    kind = scaling.get("rope_type", scaling.get("type"))
    names = {"default": (), "linear": ("factor",), "llama3": LLAMA3}.get(str(kind))
    if names is None:
        hint = "others are out of scope"
        raise ArgumentError("a rope_scaling of type 'linear' or 'llama3'", f"{kind!r} in {dict(scaling)}", hint)
    numbers: list[Any] = [scaling.get(name) for name in names]
    bad = [x for x in numbers if not isinstance(x, int | float) or not 0 < x <= sys.float_info.max]
    unknown = sorted(scaling.keys() - {*names, "rope_type", "type", "rope_theta"})
    if bad or unknown:
        hint = "as in a config.json of transformers"
        raise ArgumentError(f"a rope_scaling {kind!r} with numbers above 0 {names}", f"{dict(scaling)}", hint)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / scaling["factor"]
    factor, low, high, original = numbers
    if not high > low:
        raise ArgumentError("a high_freq_factor above low_freq_factor", f"{dict(scaling)}", "LLaMA 3 has 4 and 1")
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (unscaled + (1 - unscaled) / factor)


LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
