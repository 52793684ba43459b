"""One more position of a block, with a cache: the same numbers as the block's operations, in fewer calls.

A position of a small model is a few thousand multiplications, and each operation on Tensors costs more than they do. So
where nothing watches a block (:func:`fits`), a new position goes through it on raw arrays. Products are ``W xᵀ``, which
BLAS does faster than ``x Wᵀ`` for a few rows: their results are (features, batch).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np

from minigrad import asarray
from minigrad.backend import Array
from minigrad.engine import core
from minigrad.engine.recording import current_mode
from minigrad.kernels.normed_rows import normed
from minigrad.kernels.products import NS_PER_FLOP, add_products
from minigrad.kernels.rope import turned
from minigrad.kernels.swiglu_ffn import units
from minigrad.machine.loops import dot, exp, loop
from minigrad.machine.parallel import MIN_PARALLEL_NS, blas_threads, for_rows
from minigrad.tensor import Tensor
from .activation import Dropout
from .attention import MultiHeadAttention
from .linear import Linear
from .module import is_plain
from .normalization import RMSNorm
from .positional import RotaryEmbedding

KEY_NS = 0.5  # time of a feature of a key and its value on one core


def is_quiet() -> bool:
    """Whether operations are neither recorded, nor observed, nor cast: then nobody can tell which of them ran."""
    mode = current_mode()
    return not (mode.recording or mode.autocast or mode.transforming or core.observers)


def fits(block: Any, x: Any, mask: Any, positions: Any, cache: Any) -> bool:
    """Whether an unwatched block may take ``x`` through :func:`position`: a position of each sequence, in plain layers.

    A cache with sinks turns all of its keys anew, a pattern skips some: both are left to the block's operations.
    """
    if type(x) is not Tensor or x.ndim != 3 or x.shape[1] != 1 or cache.sinks or not is_quiet():
        return False
    attn, ffn = block.attn, block.ffn
    if not (is_plain(attn, MultiHeadAttention) and is_plain(attn.output_proj, Linear)):
        return False
    norms = [norm for norm in (attn.q_norm, attn.k_norm) if norm is not None]
    matrices = attn.q_proj, attn.k_proj, attn.v_proj, attn.output_proj, ffn.w1, ffn.w2, ffn.w3
    biases = [layer.bias for layer in matrices if layer.bias is not None]
    return (
        _are_plain([*biases, *(layer.weight for layer in (*matrices, block.ln1, block.ln2, *norms))], x)
        and all(is_plain(norm, RMSNorm) and norm.weight.shape == (attn.head_dim,) for norm in norms)
        and is_plain(block.dropout, Dropout)
        and not (block.dropout.training and block.dropout.p)
        and not (attn.training and attn.dropout)
        and attn.pattern is None
        and attn.key_dim == attn.head_dim
        and (attn.rope is None or is_plain(attn.rope, RotaryEmbedding))
        and (mask is None or _hides_keys(mask, len(x), attn.window, cache.length + 1))
        and (positions is None or np.shape(positions) == (len(x), 1))
    )


def _hides_keys(mask: Any, batch: int, window: int | None, count: int) -> bool:
    """Whether a mask is (batch, 1, 1, keys) booleans, for at least the keys of a layer among ``count``."""
    fits = type(mask) is np.ndarray and mask.dtype == bool and mask.shape[:3] == (batch, 1, 1)
    return fits and mask.ndim == 4 and min(window or count, count) <= mask.shape[3] <= count


def position(block: Any, x: Tensor, mask: Any, positions: Any, cache: Any) -> Tensor:
    """The block applied to ``x`` (batch, 1, d_model), a position that follows those in the cache."""
    attn, ffn, rows = block.attn, block.ffn, x.data[:, 0]
    with blas_threads(1):
        n = _normed(block.ln1, rows).T
        heads = _attended(attn, products(n, attn.q_proj, attn.k_proj, attn.v_proj), mask, positions, cache)
        rows = rows + products(heads.T, attn.output_proj).T
        gate, up = products(_normed(block.ln2, rows).T, ffn.w1, ffn.w3).reshape(2, -1, len(rows))
        h = np.empty_like(gate)
        units(gate, up, h)
        rows = rows + products(h, ffn.w2).T
    return asarray(rows[:, None])


def logits(head: Any, x: Tensor) -> Tensor:
    """``head(x)`` of rows (batch, d_model), by the product that is fast for a few of them where nothing watches it."""
    weight = getattr(head, "weight", None)
    fit = type(x) is Tensor and x.ndim == 2 and is_quiet()
    if not (fit and is_plain(head, Linear) and _are_plain([weight], x)):
        return head(x)  # type: ignore[no-any-return]
    with blas_threads(1):
        return asarray(np.ascontiguousarray(products(x.data.T, head).T))


def _are_plain(parameters: Iterable[Any], x: Tensor) -> bool:
    """Whether these are arrays of NumPy in the dtype of x, float32 or float64."""
    return x.dtype.char in "fd" and all(type(p.data) is np.ndarray and p.dtype == x.dtype for p in parameters)


def _normed(norm: Any, x: Array) -> Array:
    out = np.empty(x.shape, x.dtype)
    normed(np.ascontiguousarray(x), norm.weight.data, norm.eps, np.empty(len(x), x.dtype), out)
    return out


def products(x: Array, *layers: Any) -> Array:
    """``W x + b`` of Linear layers, below each other: (their outputs, batch), of x (inputs, batch)."""
    weights = [layer.weight.data for layer in layers]
    ends = [*accumulate(map(len, weights))]
    out = np.empty((ends[-1], x.shape[1]), x.dtype)
    parts = [out[end - len(weight) : end] for end, weight in zip(ends, weights, strict=True)]
    if 2 * len(x) * out.size * NS_PER_FLOP < MIN_PARALLEL_NS:
        for part, weight in zip(parts, weights, strict=True):
            np.matmul(weight, x, out=part)
    else:
        add_products([(part, weight, x) for part, weight in zip(parts, weights, strict=True)], fresh=True)
    for part, layer in zip(parts, layers, strict=True):
        if layer.bias is not None:
            part += layer.bias.data[:, None]
    return out


def _attended(attn: Any, projections: Array, mask: Any, positions: Any, cache: Any) -> Array:
    """The heads' outputs (batch, heads · d) from the three projections (features, batch)."""
    batch, heads, shared, size = projections.shape[1], attn.num_heads, attn.num_kv_heads, attn.head_dim
    x = np.ascontiguousarray(projections.T).reshape(batch, -1, 1, size)
    pair, v = x[:, : heads + shared], x[:, heads + shared :]
    if attn.q_norm is not None:
        pair = np.concatenate(
            [
                _normed(norm, part.reshape(-1, size)).reshape(part.shape)
                for norm, part in ((attn.q_norm, pair[:, :heads]), (attn.k_norm, pair[:, heads:]))
            ],
            axis=1,
        )
    if attn.rope is not None:
        cos, sin = attn.rope.at(cache.length, positions, x.dtype)
        pair = turned(pair, cos, sin, attn.rope.layout)
    q, k = pair[:, :heads].reshape(batch * shared, heads // shared, size), pair[:, heads:]
    rooms, first, stop = cache.hold(attn, k, v)
    keys, values = (room.reshape(batch * shared, *room.shape[2:]) for room in rooms)
    seen = None if mask is None else np.repeat(mask[:, 0, 0, first - stop :], shared, axis=0)
    q, out = np.ascontiguousarray(q), np.empty(q.shape, q.dtype)

    def body(a: int, b: int) -> None:
        attend(q[a:b], keys[a:b], values[a:b], None if seen is None else seen[a:b], first, stop, out[a:b])

    numbers = 2 * (stop - first) * size
    for_rows(body, len(q), numbers * q.itemsize, KEY_NS * numbers * q.shape[1])
    return out.reshape(batch, heads * size)


def _attend(q: Array, keys: Array, values: Array, seen: Array | None, first: int, stop: int, out: Array) -> None:
    scores = np.matmul(q / np.sqrt(q.dtype.type(q.shape[2])), keys[:, first:stop].swapaxes(1, 2))
    if seen is not None:
        scores[np.broadcast_to(~seen[:, None], scores.shape)] = -np.inf
    with np.errstate(under="ignore"):
        scores -= np.maximum(scores.max(axis=2, keepdims=True), np.finfo(q.dtype).min)
        weights = np.exp(scores, out=scores)
        np.matmul(weights, values[:, first:stop], out=out)
        out /= np.maximum(weights.sum(axis=2, keepdims=True), np.finfo(q.dtype).tiny)


@loop(_attend)
def attend(q: Array, keys: Array, values: Array, seen: Array | None, first: int, stop: int, out: Array) -> None:
    """``softmax(q keysᵀ / √d) values`` over the positions from ``first`` to ``stop`` that are ``seen``.

    q and out are (n, queries, d), keys and values (n, room, d), seen (n, stop - first) or None for all. A query that
    sees nothing gets 0.
    """
    scores = np.empty(stop - first, np.float32)
    scale = 1.0 / np.sqrt(np.float32(q.shape[2]))
    for i in range(len(q)):
        for j in range(q.shape[1]):
            highest = np.float32(-3.4028234e38)
            for t in range(scores.size):
                scores[t] = scale * dot(q[i, j], keys[i, first + t])
                if seen is not None and not seen[i, t]:
                    scores[t] = -np.inf
                highest = max(highest, scores[t])
            total = np.float32(0)
            for t in range(scores.size):
                scores[t] = exp(scores[t] - highest)
            for t in range(scores.size):
                total += scores[t]
            out[i, j] = 0.0
            for t in range(scores.size):
                for d in range(q.shape[2]):
                    out[i, j, d] += scores[t] * values[i, first + t, d]
            for d in range(q.shape[2]):
                out[i, j, d] /= max(total, np.float32(1.1754944e-38))
