"""Scaled dot-product attention in tiles: the T × T weights never exist, and the matrix products take most of the time.

Every row of scores becomes unnormalised weights ``E = exp(scores - shift)``. A node keeps two numbers of a row, shift
and ``total = Σ E`` (the log-sum-exp is ``shift + log total``). The backward pass makes E again from them, in tiles::

    out = E v / total                      ĝ = g / total       D = rowsum(ĝ ∘ out)
    dv = Eᵀ ĝ       ds = E ∘ (ĝ vᵀ - D)      dq = scale · ds k    dk = scale · dsᵀ q

shift is 0 for a row whose exponentials stay in a safe range, else the maximum of the row. So most tiles need neither
the maximum nor the subtraction, and sums over blocks of keys are plain sums. The tiles follow Dao et al.,
"FlashAttention" (2022); how they are cut is in ``attention_tiles.py``.

What a query does not see changes no bit of its row. Each row decides on its shift by its own scores. A tile is computed
in the fast way first, where a hidden number may show as NaN, since hidden weights are products with 0. Then the tile is
computed again in the careful way: hidden scores are -∞, and a weight of 0 takes nothing from a number that is not
finite. Both ways give the same bits where the fast one is right.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np

from minigrad.backend import Array, Seed, accumulator, array_module, array_of, cast_to, is_on_gpu
from minigrad.engine.broadcast import unbroadcast
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.kernels.attention_patterns import Block, BlockPattern, pairs, pattern_of
from minigrad.kernels.attention_tiles import (
    AttentionCall,
    Place,
    call_of,
    cut,
    dropout_mask,
    dropout_scale,
    mask_shape,
    scale_of,
    sizes_of,
)
from minigrad.kernels.products import add_product
from minigrad.kernels.rows import SAFE
from minigrad.kernels.softmax import softmax
from minigrad.machine.parallel import blas_threads, run, scratch
from minigrad.ops import astype, matmul, repeat, swapaxes, where

LARGE = math.log(SAFE)  # a row whose largest score is beyond needs a shift

# ---- the definition -------------------------------------------------------------------------------------------------


def _torch(t: Any, q: Any, k: Any, v: Any, mask: Any = None, is_causal: bool = False, scale: Any = None,
           dropout_p: float = 0.0, seed: int = 0, *shape: Any, **named: Any) -> Any:  # fmt: skip
    """The same in torch: its function takes a mask or is_causal, no window and no pattern."""
    seen = pattern_of(is_causal, *shape, **{"window": None, "pattern": None, **named}).seen(q.shape[-2], k.shape[-2])
    seen = t.ones(()).bool() if seen is None else t.from_numpy(seen)
    if mask is not None:
        seen = seen & mask if mask.dtype == t.bool else t.where(seen, mask, -math.inf)
    return t.nn.functional.scaled_dot_product_attention(
        q, k, v, seen, scale=scale, enable_gqa=q.ndim > 2 and q.shape[-3] > k.shape[-3]
    )


def _flops(
    q: Array, k: Array, v: Array, is_causal: bool, window: int | None, pattern: Any, out: Array, wrt: frozenset[str]
) -> tuple[float, float]:
    """For each pair of query and key that is allowed: two products forward; five backward, where all gradients are
    needed, of which the first makes the scores once more. A mask that is an array counts as if all of it were True.
    """
    (queries, d), (keys, d_v) = q.shape[-2:], v.shape[-2:]
    seen = pairs(pattern_of(is_causal, window, pattern), queries, keys) * (out.size // max(queries * d_v, 1))
    scores = wrt & {"q", "k"}
    back = d + d_v * ("v" in wrt) + d_v * bool(scores) + d * len(scores)
    return 2.0 * seen * (d + d_v), 2.0 * seen * back * bool(wrt)


@fused(precision="low", torch=_torch, numpy=False, flops=_flops, samples=[
    sample((2, 2, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3), is_causal=True),
    sample((4, 3, 2), (2, 5, 2), (2, 5, 4), scale=0.5, window=2),
    sample((1, 3, 2), (2, 1, 2, 2), (2, 2, 2), (3, 2)),
    sample((2, 5, 2), (2, 6, 2), (2, 6, 3), is_causal=True, pattern=BlockPattern(np.eye(3) + np.eye(3)[::-1] > 0, 2)),
    sample((3, 2), (2, 2), (2, 2), mask=np.array([[True, False], [False, False], [True, True]])),
])  # fmt: skip
def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Seed = 0,
    window: int | None = None,
    pattern: Any = None,
) -> Array:
    """Scaled dot-product attention: the mean of the values, weighted by how well their keys fit each query.

    ``out = softmax(scale · q kᵀ + mask) v``, eq. 1 of Vaswani et al., "Attention is all you need" (2017).

    q is (..., heads, L, d), k (..., heads, S, d), v (..., heads, S, d_v) and out (..., heads, L, d_v); leading axes
    broadcast. q may have a multiple of the heads of k and v, then neighbouring heads of q share theirs (grouped-query
    attention). Half precision is computed in float32. A row that sees no key gives 0, and its gradients are 0.

    What stands in keys and values that a query does not see, huge, infinite or NaN, changes no bit of its result or of
    its gradient. Second derivatives, and a mask of numbers that hides by -inf, want finite numbers there.

    Where scores leave the range of the dtype, the largest has all weight: they are computed in a wider dtype, by the
    kernels of a GPU from smaller factors.

    - mask: True where attention is allowed, or numbers added to the scores; broadcasts to (..., heads, L, S)
    - is_causal: query i sees keys j <= i only, counted from the top left corner
    - scale: 1/sqrt(d) if not given
    - dropout_p: the probability with which a weight is dropped; ``seed`` and place alone decide which ones
    - window: query i sees keys with ``|i - j| < window`` only, and the time is linear in L
    - pattern: which blocks of queries see which blocks of keys; the others cost nothing

    Raises a ShapeError, DTypeError or ArgumentError for arguments that don't fit.

    >>> q = k = np.array([[1.0], [2.0]])
    >>> print(attention(q, k, np.array([[3.0], [4.0]]), is_causal=True).round(4))
    [[3.    ]
     [3.8808]]
    """
    sizes, shape = sizes_of(q, k, v, mask), pattern_of(is_causal, window, pattern)
    shape.check(*sizes.scores[-2:])
    xp = array_module(q)
    dtype = np.result_type(q.dtype, k.dtype, v.dtype)
    wide = accumulator(dtype)
    if not is_on_gpu(array_of(q)) and _may_overflow(array_of(q), array_of(k), scale_of(scale, q)):
        wide = _wider(wide)
    q, k, v = (astype(x, wide) for x in (q, k, v))
    k, v = (repeat(x, sizes.group, axis=-3) if x.ndim > 2 and x.shape[-3] > 1 else x for x in (k, v))
    scores = matmul(q * scale_of(scale, q), swapaxes(k, -1, -2))
    if mask is not None:
        scores = where(mask, scores, -math.inf) if mask.dtype.kind == "b" else scores + mask
    queries, keys = sizes.scores[-2:]
    if (seen := shape.seen(queries, keys, xp)) is not None:
        scores = where(seen, scores, -math.inf)
    weights = softmax(scores)
    if dropout_p:
        rows = xp.arange(math.prod(sizes.scores[:-1])).reshape(sizes.scores[:-1])
        weights = weights * (dropout_mask(seed, rows, slice(0, sizes.scores[-1]), dropout_p) * dropout_scale(dropout_p))
    return astype(matmul(weights, v), dtype)


# ---- the kernels ----------------------------------------------------------------------------------------------------


@attention.defforward
def _forward(q: Array, k: Array, v: Array, mask: Any, *options: Any) -> tuple[Array, dict[str, Array]]:
    call, sizes = call_of(q, k, v, mask, options)
    out, view = _like(q, (*sizes.scores[:-1], v.shape[-1]), (*call.rows, v.shape[-1]), call.q.dtype)
    total, shift = np.empty(call.rows, call.q.dtype), np.zeros(call.rows, call.q.dtype)
    with blas_threads(1):
        run([partial(_forward_group, call, *at, view, total, shift) for at in call.groups()], call.nanoseconds(2))
    if (lost := shift == -np.inf).any():  # scores that leave the range of the dtype
        wide = _forward(*_widened(q, k, v), mask, *options)[0]
        with np.errstate(over="ignore"):
            np.copyto(view, wide.reshape(view.shape), where=lost[..., None], casting="same_kind")
        total[lost] = 0
    return cast_to(out, np.result_type(q, k, v)), {"total": total, "shift": shift}


def _widened(*arrays: Array) -> list[Array]:
    wide = _wider(accumulator(np.result_type(*arrays)))
    return [x.astype(wide) for x in arrays]


def _forward_group(call: AttentionCall, n: slice, h: slice, out: Array, total: Array, shift: Array) -> None:
    """The attention of some heads, written to ``out``, with ``total`` and ``shift`` of its rows."""
    keys, values = call.keys(n, h), call.v[n, h]
    careful = False
    with np.errstate(all="ignore"):
        for i, blocks in call.tiles():
            at = (n, h, slice(None), i)
            read = _stacked(call.q[at]), keys, values
            if not careful:
                sums, means = _forward_tile(call, at, blocks, read, None)
                careful = not _safe(sums, means, keys.shape[-1])  # this tile again, and those that follow at once
            if careful:
                sums, means, top = _forward_carefully(call, at, blocks, read)
                shift[at] = top.reshape(shift[at].shape)
            rows, target = total[at].shape, out[at]
            np.multiply(means.reshape(target.shape), _reciprocal(sums).reshape(*rows, 1), out=target)
            total[at] = sums.reshape(rows)


def _forward_tile(
    call: AttentionCall, at: Place, blocks: list[Block], read: tuple[Any, ...], shift: Array | None
) -> tuple[Array, Array]:
    """Σ E and E v of a tile's rows; in the careful way if there is a shift."""
    queries, keys, values = read
    sums = np.zeros(queries.shape[:-1], queries.dtype)
    means = (np.empty if blocks else np.zeros)((*sums.shape, values.shape[-1]), sums.dtype)
    for block in blocks:
        weights = call.exponentials(call.scores(at, block, queries, keys), block, shift, sums)
        if call.dropout_p:
            call.drop(at, block.j, weights)
        _add(means, weights, values[:, :, block.j], block is blocks[0], shift is not None)
    return sums, means


def _forward_carefully(
    call: AttentionCall, at: Place, blocks: list[Block], read: tuple[Any, ...]
) -> tuple[Array, Array, Array]:
    """Σ E, E v and the shift of a tile's rows; each row has a shift where its own scores or values ask for one.

    The others have the smallest number instead of 0. It changes no exponential, and tells the backward pass to be
    careful too. A row whose scores leave the range of the dtype is told by a shift of -inf.
    """
    queries, keys, _ = read
    top = np.full((*queries.shape[:-1], 1), -np.inf, queries.dtype)
    for block in blocks:
        scores = call.hide(call.scores(at, block, queries, keys), block)
        np.maximum(top, scores.max(-1, keepdims=True), out=top)
    none = np.finfo(top.dtype).tiny
    shift = np.where((np.abs(top) < LARGE) | (top == -np.inf), none, top)
    if not np.isfinite(top).all() and _may_overflow(queries, keys, 1.0):
        free, seen = (np.zeros_like(queries), np.zeros_like(keys)), np.full_like(top, -np.inf)
        for block in blocks:
            np.maximum(seen, call.hide(call.scores(at, block, *free), block).max(-1, keepdims=True), out=seen)
        shift[~np.isfinite(top) & (seen > -np.inf)] = -np.inf
    sums, means = _forward_tile(call, at, blocks, read, shift)
    overflow = ~np.isfinite(means).all(-1, keepdims=True) & (shift == none) & (top > -np.inf)
    if overflow.any():
        shift[overflow] = top[overflow]
        sums, means = _forward_tile(call, at, blocks, read, shift)
    return sums, means, shift


def _wider(dtype: Any) -> Any:
    """A dtype of larger range, or the same where there is none."""
    return np.dtype(np.float64 if dtype.itemsize < 8 else np.longdouble)


def _may_overflow(q: Array, k: Array, scale: float) -> bool:
    """Whether scores of finite queries and keys may leave their dtype, and there is a wider one."""
    largest = [float(np.abs(x).max(where=np.isfinite(x), initial=0)) for x in (q, k)]
    info, wide = np.finfo(q.dtype), np.finfo(_wider(q.dtype))
    size = math.prod(largest) * max(abs(scale), 1) * q.shape[-1]
    return bool(info.maxexp < wide.maxexp and size > float(info.max))


def _safe(sums: Array, means: Array, keys: int) -> bool:
    """Whether no row needs a shift, whose sum of ``keys`` exponentials tells that, and the weighted values are finite.

    The largest exponential of a row is within [sum/keys, sum]; the 2 is for what was rounded.
    """
    return bool(sums.min() > 2 * keys / SAFE and sums.max() < SAFE / 2 and np.isfinite(means.sum()))


def _add(out: Array, weights: Array, x: Array, fresh: bool, careful: bool) -> None:
    """``out += weights x``, or ``out = weights x`` if it is fresh.

    If careful, a weight of 0 takes nothing from a number that is not finite, where 0 · ∞ would be NaN.
    """
    finite = np.isfinite(x) if careful else None
    if finite is None or finite.all():
        add_product(out, weights, x, fresh)
        return
    add_product(out, weights, np.where(finite, x, 0), fresh)
    for sign, number in itertools.product((1, -1), (np.inf, -np.inf, np.nan)):
        there = np.isnan(x) if np.isnan(number) else x == number
        if there.any():
            met = np.matmul((weights * sign > 0).astype(x.dtype), there.astype(x.dtype)) > 0
            out[met] += sign * number


@attention.defbackward("q", "k", "v", "mask")
def _backward(
    g: Array, q: Array, k: Array, v: Array, mask: Any, is_causal: Any, scale: Any, dropout_p: Any, seed: Any,
    window: Any, pattern: Any, out: Array, total: Array, shift: Array, needs: tuple[bool, ...]
) -> tuple[Array | None, ...]:  # fmt: skip
    options = is_causal, scale, dropout_p, seed, window, pattern
    call, sizes = call_of(q, k, v, mask, options)
    if (lost := shift == -np.inf).any():  # of those rows in a wider dtype, and of the others as if they were not there
        rows, zero = lost.reshape(sizes.scores[:-1])[..., None], np.zeros((), call.q.dtype)
        rest = np.where(lost, zero, total), np.where(lost, zero, shift)
        part = _backward(
            np.where(rows, zero, g),
            np.where(rows, zero, q),
            k,
            v,
            mask,
            *options,
            np.where(rows, zero, out),
            *rest,
            needs,
        )
        q2, k2, v2 = _widened(q, k, v)
        result, kept = _forward(q2, k2, v2, mask, *options)
        up = np.where(rows, g, zero).astype(q2.dtype)
        more = _backward(up, q2, k2, v2, mask, *options, result, kept["total"], kept["shift"], needs)
        pairs_of = zip(part, more, (q, k, v, mask), strict=True)
        return tuple(None if a is None else _fit(_fit(a, x) + _fit(b, x), x) for a, b, x in pairs_of)
    wide, lead = call.q.dtype, sizes.scores[:-2]
    lead_k = (*sizes.lead, sizes.heads) if lead else ()
    gq, gq_view = _like(q, (*lead, *q.shape[-2:]), call.q.shape, wide)
    gk, gk_view = _like(k, (*lead_k, *k.shape[-2:]), call.k.shape, wide)
    gv, gv_view = _like(v, (*lead_k, *v.shape[-2:]), call.v.shape, wide)
    gmask = np.zeros(call.mask.shape, wide) if needs[3] and call.mask is not None else None
    form = (*call.rows, v.shape[-1])
    read, write = (g.reshape(form), out.reshape(form), _reciprocal(total), shift), (gq_view, gk_view, gv_view, gmask)
    groups = call.groups()
    # A hidden number that does harm shows in the gradient of q; then all is computed again in the careful way. That way
    # is taken at once where a mask has a gradient: what was added to it can't be taken back.
    with blas_threads(1), np.errstate(all="ignore"):
        for careful in (gmask is not None, True):
            tasks = [partial(_backward_group, call, *at, read, write, careful) for at in groups]
            run(tasks, 0 if needs[3] else call.nanoseconds(5))  # one by one where all add to the gradient of one mask
            if careful or np.isfinite(gq.sum()):
                break
    if not groups:
        gk.fill(0)
        gv.fill(0)
    if gmask is not None:
        gmask = _fit(gmask.reshape(*mask_shape(mask, sizes)), mask)
    return _fit(gq, q), _fit(gk, k), _fit(gv, v), gmask


@np.errstate(all="ignore")
def _backward_group(
    call: AttentionCall, n: slice, h: slice, read: tuple[Array, ...], write: tuple[Any, ...], careful: bool
) -> None:
    """The gradients of some heads, from g, out, 1/total and shift; written to gq, gk and gv, added to gmask.

    With ĝ = g / total: dv = Eᵀ ĝ, ds = scale · E ∘ (ĝ vᵀ - rowsum(ĝ ∘ out)), dq = ds k, dk = dsᵀ q.
    """
    (g, out, inverse, shift), (gq, gk, gv, gmask) = read, write
    wide, k, v, keys = call.q.dtype, call.k[n, h], call.v[n, h], call.keys(n, h)
    factor = call.scale if gmask is None else 1.0  # the gradient of the mask has no scale
    values = scratch((*v.shape[:2], v.shape[3] + 1, v.shape[2]), wide, "attention values")  # factor · (v, 1)ᵀ
    np.multiply(v.swapaxes(-1, -2), factor, out=values[:, :, :-1])
    values[:, :, -1] = factor
    dk, dv = gk[n, h], gv[n, h]
    if several := call.step < call.rows[3]:
        dk, dv = scratch(k.shape, wide, "attention dk"), scratch(v.shape, wide, "attention dv")
    fresh = call.sees_all()
    if not fresh:
        dk.fill(0)
        dv.fill(0)
    for i, blocks in call.tiles():
        at = (n, h, slice(None), i)
        queries, top = _stacked(call.q[at]), _stacked(shift[at][..., None])
        top = top if top.any() else None
        up = _stacked(_upstream(g[at], inverse[at], out[at]))
        direct = len(blocks) == gq.shape[2] == 1
        dq = gq[n, h, 0, i] if direct else scratch(queries.shape, wide, "attention dq")
        for block in blocks:
            weights = call.scores(at, block, queries, keys)
            ds, remaining = scratch(weights.shape, wide, "more rows"), weights
            if call.dropout_p:  # ĝ vᵀ alone is dropped, then D is taken away
                np.matmul(up[..., :-1], values[:, :, :-1, block.j], out=ds)
                remaining = call.dropped_slopes(at, weights, ds, block, top, -factor * up[..., -1:])
            else:
                np.matmul(up, values[..., block.j], out=ds)
                call.slopes(weights, ds, block, top)
            if careful:
                call.clear(at, block, weights, remaining, ds)
            if gmask is not None:
                _add_sum(cut(gmask, (*at, block.j)), ds.reshape(*gq[at].shape[:-1], ds.shape[-1]))
                ds *= call.scale
            _add(dv[:, :, block.j], remaining.swapaxes(-1, -2), up[..., :-1], fresh, careful)
            _add(dk[:, :, block.j], ds.swapaxes(-1, -2), queries, fresh, careful)
            _add(dq, ds, k[:, :, block.j], block is blocks[0], careful)
        if not direct:
            gq[at] = dq.reshape(gq[at].shape) if blocks else 0
        fresh = False
    if several:
        gk[n, h], gv[n, h] = dk, dv


def _upstream(g: Array, inverse: Array, out: Array) -> Array:
    """(ĝ, -D) with D = rowsum(ĝ ∘ out): its product with (v, 1)ᵀ is ĝ vᵀ - D."""
    up = scratch((*g.shape[:-1], g.shape[-1] + 1), inverse.dtype, "attention g")
    np.multiply(g, inverse[..., None], out=up[..., :-1])
    np.multiply(np.vecdot(g, out, dtype=up.dtype), -inverse, out=up[..., -1])
    return up


def _add_sum(total: Array, x: Array) -> None:
    """total += x, summed over the axes that total has only one of."""
    total += x.sum(tuple(axis for axis, size in enumerate(total.shape) if size == 1), keepdims=True)


def _fit(gradient: Array, x: Array) -> Array:
    """A gradient summed over the axes along which x was broadcast, in the dtype of x."""
    return cast_to(gradient if gradient.shape == x.shape else unbroadcast(gradient, x.shape), x.dtype)


def _like(x: Array, shape: tuple[int, ...], form: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
    """An array in the memory order of x, so that a transposed q gives a transposed result; and its view in a form."""
    array = np.empty_like(x, dtype, shape=shape)
    view = array.reshape(form)
    if np.may_share_memory(array, view):
        return array, view
    array = np.empty(shape, dtype)
    return array, array.reshape(form)


def _stacked(tile: Array) -> Array:
    """A tile (n, h, g, i, d) as matrices (n, h, g·i, d)."""
    n, h, g, i, d = tile.shape
    return tile.reshape(n, h, g * i, d)


def _reciprocal(x: Array) -> Array:
    """1/x, and 1 where x is 0: it is multiplied by zeros there."""
    return np.divide(1, x + (x == 0))
