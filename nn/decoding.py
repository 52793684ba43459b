"""One more position of a model's blocks, with a cache: the same numbers as their operations, in a few calls.

A position of a small model is a few thousand multiplications, and each operation on Tensors costs more than they do. So
where nothing watches a block (:func:`fits`), a new position goes through it on raw arrays, in four steps, each of them
a loop where loops are compiled: :func:`project`, :func:`place`, :func:`attend`, :func:`finish`. Threads share out the
sequences, each of which goes through all blocks in one; or the rows of large matrices, if there are few sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from minigrad import asarray
from minigrad.backend import Array
from minigrad.engine import core
from minigrad.engine.recording import current_mode
from minigrad.kernels.normed_rows import normed
from minigrad.kernels.products import LINE, NS_PER_WEIGHT, few_products, few_rows, few_rows_ns
from minigrad.kernels.rope import turned
from minigrad.kernels.swiglu_ffn import units
from minigrad.machine.loops import dot, exp, is_compiled, loop, prefetch
from minigrad.machine.parallel import MIN_PARALLEL_NS, even_step, for_rows, run
from minigrad.tensor import Tensor
from .activation import Dropout
from .attention import MultiHeadAttention
from .linear import Linear
from .module import is_plain
from .normalization import RMSNorm
from .positional import RotaryEmbedding

KEY_NS = 0.5  # time of a feature of a key and its value on one core
SHARE = 8  # sequences of a thread: with fewer, reading the matrices takes longer than multiplying by them


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


def position(blocks: Sequence[Any], x: Tensor, mask: Any, positions: Any, cache: Any) -> Tensor:
    """``x`` (batch, 1, d_model) after the blocks, a position that follows those in the cache."""
    rows, turns = x.data[:, 0], dict[Any, Any]()
    steps = [_Step(block, rows, mask, positions, cache, turns) for block in blocks]
    out = np.empty_like(rows)

    def body(a: int, b: int) -> None:
        part = np.ascontiguousarray(rows[a:b])
        for step in steps:
            part = step(part, a, b)
        out[a:b] = part

    count = len(rows)
    whole = any(step.large for step in steps) or not is_compiled()  # BLAS would copy each matrix for each share
    share = count if whole else even_step(count, SHARE)
    work = few_rows_ns(count, sum(step.size for step in steps))
    if share == count or work < MIN_PARALLEL_NS:
        body(0, count)
    else:
        run([partial(body, a, min(a + share, count)) for a in range(0, count, share)], work)
    return asarray(out[:, None])


class _Step:
    """The way of rows through a block; their keys and values have a place in the cache."""

    def __init__(
        self, block: Any, rows: Array, mask: Any, positions: Any, cache: Any, turns: dict[Any, list[Any]]
    ) -> None:
        self.block, attn, ffn = block, block.attn, block.ffn
        layers = attn.q_proj, attn.k_proj, attn.v_proj, attn.output_proj, ffn.w1, ffn.w3, ffn.w2
        self.weights = [layer.weight.data for layer in layers]
        self.size = sum(w.size for w in self.weights)
        self.large = self.size * NS_PER_WEIGHT >= 2 * MIN_PARALLEL_NS
        shared, size = attn.num_kv_heads, attn.head_dim
        new = np.empty((len(rows), shared, 1, size), rows.dtype)
        rooms, self.first, self.stop = cache.hold(attn, new, new)
        self.keys, self.values = (room.reshape(-1, *room.shape[2:]) for room in rooms)
        self.seen = None if mask is None else np.repeat(mask[:, 0, 0, self.first - self.stop :], shared, axis=0)
        rope = attn.rope
        if rope is not None and rope not in turns:
            tables = rope.at(cache.length, positions, rows.dtype)
            turns[rope] = [np.ascontiguousarray(table).reshape(-1, size // 2) for table in tables]
        self.turn: list[Any] = turns.get(rope, [None, None])

    def __call__(self, x: Array, a: int, b: int) -> Array:
        """The rows x, those of the sequences [a, b), after the block."""
        block, attn, shared = self.block, self.block.attn, self.block.attn.num_kv_heads
        q, k, v, o, w1, w3, w2 = self.weights
        begin, end = (_project, _finish) if self.large else (project, finish)
        joined = np.empty((b - a, attn.num_heads + 2 * shared, attn.head_dim), x.dtype)
        begin(x, block.ln1.weight.data, block.ln1.eps, q, k, v, joined.reshape(b - a, -1))
        _add_traits(attn, joined)
        queries = np.empty(((b - a) * shared, attn.num_heads // shared, attn.head_dim), x.dtype)
        heads = slice(a * shared, b * shared)
        keys, values, seen = self.keys[heads], self.values[heads], None if self.seen is None else self.seen[heads]
        cos, sin = (table if table is None or len(table) == 1 else table[a:b] for table in self.turn)
        half = attn.rope is not None and attn.rope.layout == "half"
        place(joined, cos, sin, half, self.stop - 1, queries, keys, values)
        mixed, first, stop = np.empty_like(queries), self.first, self.stop

        def attended(i: int, j: int) -> None:
            attend(queries[i:j], keys[i:j], values[i:j], None if seen is None else seen[i:j], first, stop, mixed[i:j])

        numbers = 2 * (stop - first) * attn.head_dim
        for_rows(attended, len(queries), numbers * x.itemsize, KEY_NS * numbers * queries.shape[1])
        bias, out = attn.output_proj.bias, np.empty_like(x)
        x = x if bias is None else x + bias.data
        end(x, mixed.reshape(b - a, -1), o, block.ln2.weight.data, block.ln2.eps, w1, w3, w2, out)
        return out


def _add_traits(attn: Any, joined: Array) -> None:
    """Biases of the projections, and norms of the heads of queries and keys, in place."""
    heads, shared = attn.num_heads, attn.num_kv_heads
    q, k, v = joined[:, :heads], joined[:, heads : heads + shared], joined[:, heads + shared :]
    for part, layer, norm in (q, attn.q_proj, attn.q_norm), (k, attn.k_proj, attn.k_norm), (v, attn.v_proj, None):
        if layer.bias is not None:
            part += layer.bias.data.reshape(part.shape[1:])
        if norm is not None:
            part[:] = _normed(norm.weight.data, norm.eps, part.reshape(-1, part.shape[2])).reshape(part.shape)


def normalized(norm: Any, x: Tensor) -> Tensor:
    """``norm(x)`` of a position (batch, 1, d_model), by the loop alone where nothing watches it."""
    fit = type(x) is Tensor and x.shape[1:] == (1, *getattr(norm, "normalized_shape", ())) and is_quiet()
    if not (fit and is_plain(norm, RMSNorm) and _are_plain([norm.weight], x)):
        return norm(x)  # type: ignore[no-any-return]
    return asarray(_normed(norm.weight.data, norm.eps, x.data[:, 0])[:, None])


def logits(head: Any, x: Tensor) -> Tensor:
    """``head(x)`` of rows (batch, d_model), by the product that is fast for a few of them where nothing watches it."""
    weight: Any = getattr(head, "weight", None)
    fit = type(x) is Tensor and x.ndim == 2 and is_quiet()
    if not (fit and is_plain(head, Linear) and _are_plain([weight], x)):
        return head(x)  # type: ignore[no-any-return]
    out = np.empty((len(x), len(weight)), x.dtype)
    few_products(np.ascontiguousarray(x.data), out, weight.data)
    if head.bias is not None:
        out += head.bias.data
    return asarray(out)


def _are_plain(parameters: Iterable[Any], x: Tensor) -> bool:
    """Whether these are arrays of NumPy in the dtype of x, float32 or float64."""
    dtype = x.dtype
    for parameter in parameters:
        if type(data := parameter.data) is not np.ndarray or data.dtype != dtype:
            return False
    return dtype.char in "fd"


# ---- the steps ------------------------------------------------------------------------------------------------------


def _normed(weight: Array, eps: float, x: Array) -> Array:
    x, out = np.ascontiguousarray(x), np.empty(x.shape, x.dtype)
    normed(x, weight, eps, np.empty(len(x), x.dtype), out)
    return out


def _project(x: Array, norm: Array, eps: float, q: Array, k: Array, v: Array, out: Array) -> None:
    few_products(_normed(norm, eps, x), out, q, k, v)


@loop(_project)
def project(x: Array, norm: Array, eps: float, q: Array, k: Array, v: Array, out: Array) -> Any:
    """The three projections of the normalised rows x, beside each other."""
    n, inverse = np.empty_like(x), np.empty(len(x), np.float32)
    if not normed(x, norm, eps, inverse, n):
        return False
    few_rows(n, q, out, 0)
    few_rows(n, k, out, len(q))
    few_rows(n, v, out, len(q) + len(k))
    return True


def _place(x: Array, cos: Any, sin: Any, half: bool, at: int, queries: Array, keys: Array, values: Array) -> None:
    batch, size = len(x), x.shape[2]
    shared = len(keys) // batch
    pair, v = x[:, :-shared], x[:, -shared:]
    if cos is not None:
        pair = turned(pair[:, :, None], cos[:, None, None], sin[:, None, None], "half" if half else "interleaved")
        pair = pair.reshape(batch, -1, size)
    queries[:] = pair[:, :-shared].reshape(queries.shape)
    keys[:, at], values[:, at] = pair[:, -shared:].reshape(-1, size), v.reshape(-1, size)


@loop(_place)
def place(x: Array, cos: Any, sin: Any, half: bool, at: int, queries: Array, keys: Array, values: Array) -> None:
    """Turn the heads x of queries, keys and values (batch, heads, d), and put each where ``attend`` reads it.

    cos and sin are (1 or batch, d / 2), None for no turn; ``at`` is the place of the keys and values.
    """
    shared = len(keys) // len(x)
    heads, size = x.shape[1] - 2 * shared, x.shape[2]
    flat, pairs = queries.reshape(len(x) * heads, size), size // 2
    for i in range(len(x)):
        for h in range(heads + 2 * shared):
            if h < heads:
                target = flat[i * heads + h]
            elif h < heads + shared:
                target = keys[i * shared + h - heads, at]
            else:
                target = values[i * shared + h - heads - shared, at]
            if cos is None or h >= heads + shared:
                for d in range(size):
                    target[d] = x[i, h, d]
            else:
                row = i % len(cos)
                for j in range(pairs):
                    left, right = (j, j + pairs) if half else (2 * j, 2 * j + 1)
                    a, b, c, s = x[i, h, left], x[i, h, right], cos[row, j], sin[row, j]
                    target[left], target[right] = a * c - b * s, a * s + b * c


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
    scores, width, room = np.empty(stop - first, np.float32), q.shape[2], keys.shape[1] * q.shape[2]
    scale, all_keys, all_values = 1.0 / np.sqrt(np.float32(width)), keys.ravel(), values.ravel()
    for i in range(len(q)):
        for j in range(q.shape[1]):
            highest = np.float32(-3.4028234e38)
            for t in range(scores.size):
                for line in range(i * room + (first + t) * width, i * room + (first + t + 1) * width, LINE):
                    prefetch(all_values, line)
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
                for line in range((i + 1) * room + (first + t) * width, (i + 1) * room + (first + t + 1) * width, LINE):
                    prefetch(all_keys, line)
                for d in range(width):
                    out[i, j, d] += scores[t] * values[i, first + t, d]
            for d in range(width):
                out[i, j, d] /= max(total, np.float32(1.1754944e-38))


def _finish(
    x: Array, mixed: Array, o: Array, norm: Array, eps: float, w1: Array, w3: Array, w2: Array, out: Array
) -> None:
    few_products(mixed, out, o)
    x = x + out
    wide = np.empty((len(x), 2 * len(w1)), x.dtype)
    few_products(_normed(norm, eps, x), wide, w1, w3)
    gate, up = np.ascontiguousarray(wide[:, : len(w1)]), np.ascontiguousarray(wide[:, len(w1) :])
    h = np.empty_like(gate)
    units(gate, up, h)
    few_products(h, out, w2)
    out += x


@loop(_finish)
def finish(
    x: Array, mixed: Array, o: Array, norm: Array, eps: float, w1: Array, w3: Array, w2: Array, out: Array
) -> Any:
    """The rest of a block: x plus the projection of the heads' means, and plus the feed-forward layer of that."""
    rest, n, inverse = np.empty_like(x), np.empty_like(x), np.empty(len(x), np.float32)
    gate, up = np.empty((len(x), len(w1)), np.float32), np.empty((len(x), len(w1)), np.float32)
    few_rows(mixed, o, rest, 0)
    rest += x
    if not normed(rest, norm, eps, inverse, n):
        return False
    few_rows(n, w1, gate, 0)
    few_rows(n, w3, up, 0)
    units(gate, up, gate)
    few_rows(gate, w2, out, 0)
    out += rest
    return True
