"""Positions of tokens: sinusoids added to embeddings, and rotations of queries and keys (RoPE)."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from minigrad import asarray, captures
from minigrad.backend import NDArray, accumulator, device_of, made_on, to_device
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
        device = device_of(asarray(x).data)
        rows = made_on(device, lambda: table[place]) if isinstance(place, slice) else table[place]
        return self.dropout(x + asarray(rows, x.dtype, device))

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, max_len={self.max_len}"


class RotaryEmbedding(Module):
    """Turns pairs of features by angles that grow with the position, so that q·k depends on the distance alone.

    The k-th pair (k = 1 … d_k/2) at position i turns by ``i · Θ^(-(2k-2)/d_k)``. layout "interleaved" pairs neighbours
    (2k-1, 2k), "half" pairs k with k + d_k/2 (as Hugging Face's LLaMA weights do). The tables of cosines and sines are
    computed in float64 and rounded once, to the dtype in which they are used; they are no part of the state dict.

    scaling is a ``rope_scaling`` of a Hugging Face configuration: ``{"rope_type": "linear", "factor": 2.0}``; "llama3"
    with factor, low_freq_factor, high_freq_factor and original_max_position_embeddings; or "yarn" with factor and
    original_max_position_embeddings, see ``frequencies_of``. If endless, positions
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
        check_scaling(scaling)
        if theta <= 1 and "yarn" in (self.scaling or {}).values():
            raise ArgumentError("a theta above 1 with yarn", repr(theta), "10000 is usual")
        self._tables: dict[tuple[str, str], tuple[NDArray, NDArray]] = {}

    def forward(self, x: Tensor, positions: TensorLike | None = None) -> Tensor:
        """``x`` (..., T, d_k) turned by its positions: integers (T,), or of x's leading axes; 0 … T-1 if not given."""
        if x.ndim < 2 or x.shape[-1] != self.d_k:
            hint = "features are on the last axis, positions before it"
            raise ShapeError(f"(..., T, {self.d_k})", f"shape {x.shape}", hint)
        cos, sin = self.turns(x, positions)
        turned: Tensor = F.apply_rope(x, cos, sin, self.layout)
        return turned

    def turns(self, x: Tensor, positions: TensorLike | None = None) -> tuple[NDArray, NDArray]:
        """Cosines and sines (..., T, d_k/2) for ``x`` (..., T, any), where it is; positions as in a call."""
        return self._turns(positions, x.shape[-2], accumulator(x.dtype), device_of(asarray(x).data))

    def at(self, position: int, positions: Any, dtype: Any) -> tuple[NDArray, NDArray]:
        """Cosines and sines on the CPU of one position, or of ``positions`` (batch, 1) with an axis for the heads."""
        place = range(position, position + 1) if positions is None else asarray(positions).data[:, None]
        return self._turns(place, 1, dtype, "cpu")

    def _turns(self, positions: Any, length: int, dtype: Any, device: str) -> tuple[NDArray, NDArray]:
        """Cosines and sines of positions, which are rows of the tables where those reach so far."""
        limit = sys.maxsize if self.endless else self.max_seq_len
        place = checked_positions(positions, length, "cpu" if self.endless else device, "max_seq_len", limit)
        counted, far = isinstance(place, slice), self.max_seq_len
        stop = place.stop if counted else int(place.max(initial=0)) + 1 if self.endless else far
        if stop > far:
            return self._made(np.arange(place.start, stop) if counted else place, dtype, device)
        cos, sin = self.tables(dtype, device, stop)
        rows = place if counted else to_device(place, device)
        return cos[rows], sin[rows]

    def _made(self, positions: NDArray, dtype: Any, device: str) -> tuple[NDArray, NDArray]:
        frequencies, length = frequencies_of(self.theta, self.d_k, self.scaling)
        angles = positions[..., None] * frequencies
        cos, sin = (asarray(length * f(angles), dtype, device).data for f in (np.cos, np.sin))
        return cos, sin

    def tables(self, dtype: Any, device: str, rows: int) -> tuple[NDArray, NDArray]:
        """Cosines and sines (positions, d_k/2) of at least ``rows`` positions, made when a call first needs so many."""
        key = (dtype.name, device)
        if key not in self._tables or len(self._tables[key][0]) < rows:
            self._tables[key] = self._made(np.arange(min(max(2 * rows, 1024), self.max_seq_len)), dtype, device)
        captures.keep(self._tables[key])  # which longer ones may replace
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


# The numbers that each kind of scaling needs, and those that it may have.
SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
}


def check_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Refuse a ``rope_scaling`` whose kind or settings are not known, by name.

    >>> check_scaling({"rope_type": "linear", "factor": 2.0})
    """
    if scaling is None:
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        kinds = ", ".join(repr(name) for name in SCALINGS if name != "default")
        raise ArgumentError(
            f"a rope_scaling of type {kinds}", f"{kind!r} in {dict(scaling)}", "others are out of scope"
        )
    needed, optional = SCALINGS[kind]
    numbers = [scaling.get(name) for name in needed] + [x for name in optional if (x := scaling.get(name)) is not None]
    bad = [x for x in numbers if not isinstance(x, int | float) or not 0 < x <= sys.float_info.max]
    known = {*needed, *optional, "rope_type", "type", "rope_theta"} | ({"truncate"} if kind == "yarn" else set())
    if bad or scaling.keys() - known or not isinstance(scaling.get("truncate", True), bool):
        hint = "as in a config.json of transformers"
        raise ArgumentError(f"a rope_scaling {kind!r} with numbers above 0 {needed}", f"{dict(scaling)}", hint)
    fast, slow = ("high_freq_factor", "low_freq_factor") if kind == "llama3" else ("beta_fast", "beta_slow")
    if (scaling.get(fast) or 32) <= (scaling.get(slow) or 1):
        hint = "LLaMA 3 has 4 and 1, yarn 32 and 1"
        raise ArgumentError(f"a {fast} above {slow}", f"{dict(scaling)}", hint)


def frequencies_of(theta: float, d_k: int, scaling: Mapping[str, Any] | None = None) -> tuple[NDArray, float]:
    """RoPE's frequencies (d_k/2,), and the length of its cosines and sines, as a ``rope_scaling`` stretches them.

    "linear" divides all by ``factor``: positions are interpolated. "llama3" does so for wavelengths longer than
    ``original_max_position_embeddings / low_freq_factor``, leaves alone those shorter than
    ``original… / high_freq_factor``, and blends in between, evenly in the number of turns within the original context.
    "yarn" blends between beta_slow and beta_fast turns, evenly in the number of the pair, whose bounds are rounded
    outwards unless ``truncate`` is False; queries and keys are made longer by attention_factor, 1 + 0.1 ln factor if
    not given (Peng et al., "YaRN", 2023). mscale and mscale_all_dim are weights of that ln, in a quotient.

    >>> print(frequencies_of(4.0, 4, {"rope_type": "linear", "factor": 2.0}))
    (array([0.5 , 0.25]), 1.0)
    """
    check_scaling(scaling)
    frequencies = theta ** (-np.arange(0, d_k, 2) / d_k)
    settings = {name: value for name, value in (scaling or {}).items() if value is not None}
    kind, factor = settings.get("rope_type", settings.get("type", "default")), settings.get("factor", 1.0)
    original, length = settings.get("original_max_position_embeddings", 1), 1.0
    if kind == "default":
        return frequencies, length
    kept: Any = 0.0  # how much of a frequency stays
    if kind == "llama3":
        low, high = settings["low_freq_factor"], settings["high_freq_factor"]
        turns = original * frequencies / (2 * math.pi)  # full turns within the original context
        kept = np.clip((turns - low) / (high - low), 0, 1)
    elif kind == "yarn":
        # the number of the pair that makes so many turns within the original context
        first, last = (
            d_k * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (settings.get("beta_fast", 32), settings.get("beta_slow", 1))
        )
        if settings.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, d_k - 1)
        kept = 1 - np.clip((np.arange(d_k // 2) - first) / (last - first or 0.001), 0, 1)
        length = settings.get("attention_factor") or _yarn_length(factor, settings)
    return frequencies * (kept + (1 - kept) / factor), length


def _yarn_length(factor: float, settings: Mapping[str, Any]) -> float:
    weights: list[Any] = [settings.get("mscale"), settings.get("mscale_all_dim")]
    above, below = (1 + 0.1 * weight * math.log(max(factor, 1)) for weight in (weights if all(weights) else [1, 0]))
    return float(above / below)
