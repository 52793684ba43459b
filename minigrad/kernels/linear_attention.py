"""Linear attention: weights ``φ(q) · φ(k)`` instead of exponentials, so that a state of constant size stands for keys.

The state ``S = Σ φ(k_j) (v_j, 1)ᵀ`` has as many rows as φ has features. A causal sequence is read in chunks of C.
Within a chunk the weights exist, C × C at a time; what lies before comes through the state, which goes on from chunk
to chunk::

    (num, den) = (φ(q) φ(k)ᵀ ∘ M) (v, 1) + Λq φ(q) S        out = num / den
    S ← γ^C S + (Λk φ(k))ᵀ (v, 1)

with a decay γ: ``M_ij = γ^(i-j)`` for j <= i, else 0, Λq = γ^(r+1) and Λk = γ^(C-1-r) for place r of a chunk. Without
one they are 1. A chunk as long as the sequence is the quadratic form, one of 1 the recurrent form. The backward pass
goes through the chunks twice: forward again for dq, with the states that it makes anew, then in reverse for dk and dv,
with the gradient of the state. It keeps one number a row, den.

All of it is products of the array library, on a GPU too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import Array, accumulator, array_module, cast_to
from minigrad.engine.broadcast import unbroadcast
from minigrad.engine.fused import fused
from minigrad.engine.registry import sample
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.kernels.attention_tiles import Sizes, sizes_of
from minigrad.kernels.products import NS_PER_FLOP
from minigrad.kernels.relu import relu
from minigrad.machine.parallel import blas_threads, run
from minigrad.messages.arguments import as_int
from minigrad.ops import astype, clip, concatenate, exp, matmul, repeat, reshape, sum, swapaxes, where

CHUNK = 64  # queries of a chunk, if nothing else is said
LOWEST = -40.0  # of x in elu(x) + 1: products of two such features stay above the smallest number of float32
LARGE = 16.0  # of q, k and v: products of smaller ones are far from overflow, where 0 · ∞ would be NaN
TILE = 1 << 16  # features of a block of chunks, over the heads that are worked on together: 256 kB of float32
TILE_ON_GPU = 1 << 24

# ---- feature maps ---------------------------------------------------------------------------------------------------


class FeatureMap(NamedTuple):
    """φ, for arrays and Tensors; the number of its features; and the gradient of x, from x and that of φ(x)."""

    of: Callable[[Any], Any]
    size: Callable[[int], int]
    backward: Callable[[Array, Array], Array]
    positive: bool  # whether the weights φ(q) · φ(k) are, so that their sum may divide


def _elu(x: Any) -> Any:
    return exp(clip(x, LOWEST, 0)) + relu(x)


def _elu_backward(x: Array, g: Array) -> Array:
    xp = array_module(x)
    return g * xp.where(x < LOWEST, 0, xp.exp(xp.minimum(x, 0)))


def _root(x: Any) -> float:
    """d^(-1/4): the product of two numbers times it is that of scores, over √d."""
    return float(max(x.shape[-1], 1) ** -0.25)


def _taylor(x: Any) -> Any:
    d = x.shape[-1]
    x = x * _root(x)
    squares = reshape(x, (*x.shape, 1)) * reshape(x, (*x.shape[:-1], 1, d)) * 0.5**0.5
    ones = array_module(x).ones((*x.shape[:-1], 1), x.dtype)
    return concatenate([ones, x, reshape(squares, (*x.shape[:-1], d * d))], -1)


def _taylor_backward(x: Array, g: Array) -> Array:
    d = x.shape[-1]
    squares, first = g[..., d + 1 :].reshape(*x.shape, d), (x * _root(x))[..., None]
    both = squares @ first + squares.swapaxes(-1, -2) @ first
    return (g[..., 1 : d + 1] + both[..., 0] * 0.5**0.5) * _root(x)


FEATURE_MAPS = {
    "elu+1": FeatureMap(_elu, lambda d: d, _elu_backward, True),
    "taylor": FeatureMap(_taylor, lambda d: 1 + d + d * d, _taylor_backward, True),
    "identity": FeatureMap(lambda x: x * _root(x), lambda d: d, lambda x, g: g * _root(x), False),
}


def feature_map_of(name: Any) -> FeatureMap:
    """The feature map of a name, or an error that lists them."""
    if not isinstance(name, str) or name not in FEATURE_MAPS:
        known = ", ".join(map(repr, FEATURE_MAPS))
        raise ArgumentError(f"a feature map, one of {known}", repr(name), "'elu+1' is that of Katharopoulos et al.")
    return FEATURE_MAPS[name]


def decays_of(decay: Any, heads: int) -> Any:
    """The decay of each head of keys, float64 (heads,); None where there is none."""
    if decay is None:
        return None
    values = np.asarray(decay, np.float64)
    if values.shape not in ((), (heads,)) or not ((values > 0) & (values <= 1)).all():
        raise ArgumentError(
            f"a decay above 0 and up to 1, or one for each of {heads} heads of keys", f"{decay}", "0.97, say"
        )
    return np.broadcast_to(values, (heads,))


# ---- the definition -------------------------------------------------------------------------------------------------


def _flops(
    q: Array, k: Array, v: Array, is_causal: bool, feature_map: str, chunk: int | None, out: Array, wrt: frozenset[str]
) -> tuple[float, float]:
    """For each query the products with a state and, if causal, those within its chunk; backward three times as many."""
    size, d_v = feature_map_of(feature_map).size(q.shape[-1]), v.shape[-1]
    within = min(chunk or CHUNK, k.shape[-2]) * (size + d_v) if is_causal else 0
    rows = out.size // max(1, d_v)
    forward = 2.0 * rows * (size * d_v + within) + 2.0 * size * v.size
    return forward, 3 * forward * bool(wrt)


@fused(precision="low", torch=False, numpy=False, flops=_flops, samples=[
    sample((2, 2, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3), is_causal=True, chunk=2),
    sample((4, 3, 2), (2, 5, 2), (2, 5, 4), np.arange(5)[None] > 0, feature_map="taylor"),
    sample((2, 4, 5, 2), (2, 1, 5, 2), (2, 2, 5, 3), is_causal=True, feature_map="identity", decay=(0.5, 0.9), chunk=3),
    sample((7, 2), (5, 2), (5, 2), is_causal=True, feature_map="taylor", chunk=2),
])  # fmt: skip
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    is_causal: bool = False,
    feature_map: str = "elu+1",
    decay: Any = None,
    chunk: int | None = None,
) -> Array:
    """``φ(q) Σ φ(k) vᵀ / φ(q) Σ φ(k)``: attention whose weights are products of features, in time linear in the length.

    q (..., heads, L, d), k (..., heads, S, d), v (..., heads, S, d_v) give (..., heads, L, d_v). Leading axes
    broadcast; q may have a multiple of the heads of k and v, neighbours share theirs (grouped-query attention). Half
    precision is computed in float32.

    - mask: of keys alone, booleans that broadcast to (..., heads, 1, S); a key under False counts for nothing
    - is_causal: query i sees keys j <= i only, counted from the top left corner
    - feature_map: "elu+1"; "taylor", the 1 + d + d² features whose products are 1 + s + s²/2 with s = q·k/√d;
      "identity", whose products are s
    - decay: γ in (0, 1], one or one for each head of keys: key j weighs γ^(i-j), in causal attention. Such weights, and
      those of "identity", are not divided by their sum
    - chunk: how many queries are read at once; it changes time and rounding alone

    The sum of weights is positive, so no ε is added: below x = -40 elu(x) + 1 stays at exp(-40), and 1 + s + s²/2 is at
    least 1/2 (float32 rounds it safely where the lengths of q and k multiply to less than 1 000 √d). A row that sees no
    key gives 0.
    What stands in a later key or value, huge, infinite or NaN, changes no bit of a causal row.

    Katharopoulos et al., "Transformers are RNNs" (2020); Arora et al., "Simple linear attention language models"
    (2024), for "taylor"; Sun et al., "Retentive Network" (2023), for "identity" with a decay.

    Raises a ShapeError, DTypeError or ArgumentError for arguments that don't fit.

    >>> q = k = np.array([[0.0], [1.0]])
    >>> print(linear_attention(q, k, np.array([[3.0], [6.0]]), is_causal=True))
    [[3.]
     [5.]]
    """
    sizes, phi, gamma = _checked(q, k, v, mask, is_causal, feature_map, decay, chunk)
    xp, dtype = array_module(q), np.result_type(q.dtype, k.dtype, v.dtype)
    wide = accumulator(dtype)
    q, k, v = phi.of(astype(q, wide)), phi.of(astype(k, wide)), astype(v, wide)
    if mask is not None:
        seen = reshape(mask, (-1, 1)) if mask.ndim < 2 else swapaxes(mask, -1, -2)
        k, v = where(seen, k, 0), where(seen, v, 0)
    k, v = (repeat(x, sizes.group, axis=-3) if x.ndim > 2 and x.shape[-3] > 1 else x for x in (k, v))
    weights = matmul(q, swapaxes(k, -1, -2))
    if is_causal:
        i, j = xp.arange(q.shape[-2])[:, None], xp.arange(k.shape[-2])
        weights = where(j <= i, weights, 0)
        if gamma is not None:
            fading = xp.asarray(gamma, wide)[:, None, None] ** xp.maximum(i - j, 0)
            weights = weights * (xp.repeat(fading, sizes.group, 0) if len(sizes.scores) > 2 else fading[0])
    out = matmul(weights, v)
    if phi.positive and gamma is None:
        total = sum(weights, -1, keepdims=True)
        out = out / where(total == 0, 1, total)
    return astype(out, dtype)


def _checked(
    q: Any, k: Any, v: Any, mask: Any, is_causal: bool, feature_map: Any, decay: Any, chunk: Any
) -> tuple[Sizes, FeatureMap, Any]:
    """Sizes, feature map and decays of a call; an error where something doesn't fit."""
    sizes, phi = sizes_of(q, k, v, None), feature_map_of(feature_map)
    gamma = decays_of(decay, sizes.heads)
    if gamma is not None and not is_causal:
        raise ArgumentError("is_causal=True beside a decay", "is_causal=False", "it fades what lies before a query")
    if chunk is not None and as_int(chunk, "chunk") < 1:
        raise ArgumentError("a chunk of at least 1 query, or None", f"chunk={chunk}", "None chooses one")
    if mask is not None:
        check_key_mask(mask, (*sizes.lead, sizes.heads, 1, k.shape[-2])[-max(len(sizes.scores), 2) :])
    return sizes, phi, gamma


def check_key_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Refuse a mask that says more than which keys count."""
    hint = (
        "hidden keys as nn.padding_mask has them; is_causal=True hides those to come; other masks need full attention"
    )
    expected = f"a boolean mask of keys alone in linear attention, which broadcasts to {shape}"
    if mask.dtype.kind != "b":
        raise DTypeError(expected, f"dtype {mask.dtype}", hint)
    padded = (1,) * (len(shape) - mask.ndim) + tuple(mask.shape)
    if len(padded) > len(shape) or any(size not in (1, n) for size, n in zip(padded, shape, strict=True)):
        raise ShapeError(expected, f"shape {mask.shape}", hint)


# ---- a call in one form ---------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """Arrays in one form, and what a block of chunks asks.

    Axes: n batch, h head of keys, g head of queries among those that share h, b chunk of a block, c place in a chunk.
    In a chunk the heads of q that share keys lie one below the other, in matrices of g·c rows.
    """

    q: Array  # (n, h, g, i, d)
    k: Array  # (n, h, j, d), as many as queries if causal
    v: Array  # (n, h, j, d_v)
    mask: Array | None  # (n, h, j, 1)
    phi: FeatureMap
    powers: Array | None  # (h, chunk + 1): γ^0, γ^1, …
    causal: bool
    chunk: int

    def __post_init__(self) -> None:
        self.xp = array_module(self.q)
        self.divides = self.phi.positive and self.powers is None
        self.careful = self.causal and not all(bool((abs(x) < LARGE).all()) for x in (self.q, self.k, self.v))
        places = self.xp.arange(self.chunk)[:, None] - self.xp.arange(self.chunk)
        self.hidden = places < 0
        self.fades = (places >= 0).astype(self.q.dtype)  # M: (c, c), or (h, 1, 1, c, c)
        if self.powers is not None:
            self.fades = (self.fades * self.powers[:, self.xp.maximum(places, 0)])[:, None, None]
        self.features = self.phi.size(self.q.shape[-1])
        n, h, g = self.q.shape[:3]
        most = TILE if self.xp is np else TILE_ON_GPU
        wide = max(1, self.chunk * self.features * g)  # features of a head in a chunk
        self.heads = h if self.xp is not np else max(1, min(h, most // wide, -(-n * h // 2)))
        self.block = self.chunk * max(1, most // (max(1, self.heads) * wide))

    def groups(self) -> list[tuple[slice, slice]]:
        """Batches and heads that are worked on together: all on a GPU, else what fits the cache, two at least."""
        n, h, g, i = self.q.shape[:4]
        if not n * h * g * i:
            return []
        if self.xp is not np:
            return [(slice(0, n), slice(0, h))]
        whole = h * max(i, self.chunk) * self.features * g  # features of a sequence; short ones share a group
        batches = max(1, min(TILE // max(1, whole), -(-n // 2)))
        return [(b, a) for b in _parts(0, n, batches) for a in _parts(0, h, self.heads)]

    def nanoseconds(self, products: int) -> float:
        """Estimated time on one core."""
        n, h, g, i, _ = self.q.shape
        return float(n * h * g * i * 2 * self.features * (self.v.shape[-1] + self.chunk) * products * NS_PER_FLOP)

    def blocks(self, length: int) -> list[tuple[slice, int]]:
        """Parts of a sequence, and the length of the chunks in them; the last chunk may be shorter."""
        if not self.causal:
            return [(part, part.stop - part.start) for part in _parts(0, length, self.block)]
        whole = length // self.chunk * self.chunk
        found = [(part, self.chunk) for part in _parts(0, whole, self.block)]
        return found + [(part, length - whole) for part in _parts(whole, length, self.chunk)]

    def new_state(self, n: slice, h: slice) -> Array:
        """Zeros (n, h, features, d_v), and one column more for the sum of weights."""
        shape = *self.k[n, h].shape[:2], self.features, self.v.shape[-1] + self.divides
        return self.xp.zeros(shape, self.q.dtype)

    def in_chunks(self, x: Array, c: int) -> Array:
        """A view of rows (n, h, g, i, d) as (n, h, b, g, c, d)."""
        n, h, g, i, d = x.shape
        return x.reshape(n, h, g, i // max(1, c), c, d).swapaxes(2, 3)

    def queries(self, n: slice, h: slice, i: slice, c: int) -> Array:
        """φ(q) (n, h, b, g·c, features)."""
        return self.stacked(self.phi.of(self.in_chunks(self.q[n, h, :, i], c)))

    def keys(self, n: slice, h: slice, j: slice, c: int) -> tuple[Array, Array]:
        """φ(k) (n, h, b, c, features), and (v, 1) (n, h, b, c, d_v + 1), or v; 0 where a key is hidden."""
        k, v = (self.in_chunks(x[n, h, None, j], c)[:, :, :, 0] for x in (self.k, self.v))
        k = self.phi.of(k)
        if self.divides:
            v = self.xp.concatenate([v, self.xp.ones((*v.shape[:-1], 1), v.dtype)], -1)
        if self.mask is not None:
            seen = self.mask[n, h, j].reshape(*k.shape[:-1], 1)
            k, v = self.xp.where(seen, k, 0), self.xp.where(seen, v, 0)
        return k, v

    def stacked(self, x: Array) -> Array:
        return x.reshape(*x.shape[:3], x.shape[3] * x.shape[4], x.shape[5])

    def unstacked(self, x: Array) -> Array:
        g = self.q.shape[2]
        return x.reshape(*x.shape[:3], g, x.shape[3] // g, x.shape[4])

    def within(self, weights: Array, h: slice) -> Array:
        """Weights ∘ M of chunks, in place: 0 for later keys, the decay for earlier ones."""
        tile = self.unstacked(weights)
        c = tile.shape[-1]
        if self.careful:
            self.xp.copyto(tile, 0, where=self.hidden[:c, :c])
        tile *= (self.fades if self.powers is None else self.fades[h])[..., :c, :c]
        return weights

    def fading(self, x: Array, h: slice) -> Array:
        """Λq x, for rows of queries: what a state before their chunk is worth to them."""
        if self.powers is None:
            return x
        tile = self.unstacked(x)
        return (tile * self.powers[h, None, None, 1 : tile.shape[-2] + 1, None]).reshape(x.shape)

    def remaining(self, x: Array, h: slice) -> Array:
        """Λk x, for rows of keys: what remains of them at the end of their chunk."""
        if self.powers is None:
            return x
        return x * self.powers[h, None, x.shape[-2] - 1 - self.xp.arange(x.shape[-2]), None]

    def through(self, state: Array, added: Array, h: slice, c: int, order: int = 1) -> tuple[Array, Array]:
        """States before each chunk of a block, and the one after it: ``S ← γ^C S + added``; order -1 goes backward."""
        states = self.xp.empty_like(added)
        for b in range(added.shape[2])[::order]:
            states[:, :, b] = state
            state = added[:, :, b] + (state if self.powers is None else state * self.powers[h, c, None, None])
        return states, state

    def product(self, weights: Array, x: Array) -> Array:
        """``weights x`` within chunks, where a later row of x that is not finite does no harm to earlier ones."""
        if not self.careful or (finite := self.xp.isfinite(x)).all():
            return self.xp.matmul(weights, x)
        tile = self.unstacked(self.xp.matmul(weights, self.xp.where(finite, x, 0)))
        tile += self.xp.cumsum(self.xp.where(finite, 0, x), -2)[:, :, :, None]
        return self.stacked(tile)


def _parts(start: int, stop: int, step: int) -> list[slice]:
    return [slice(a, min(a + step, stop)) for a in range(start, stop, step)]


def _call_of(q: Array, k: Array, v: Array, mask: Any, options: Sequence[Any]) -> tuple[_Call, Sizes]:
    is_causal, *_, chunk = options
    sizes, phi, gamma = _checked(q, k, v, mask, *options)
    xp, wide = array_module(q), accumulator(np.result_type(q.dtype, k.dtype, v.dtype))
    n, h, g, lead, count = math.prod(sizes.lead), sizes.heads, sizes.group, sizes.lead, k.shape[-2]
    q = _spread(xp, q.astype(wide, copy=False), (*lead, h * g)).reshape(n, h, g, *q.shape[-2:])
    k, v = (_spread(xp, x.astype(wide, copy=False), (*lead, h)).reshape(n, h, *x.shape[-2:]) for x in (k, v))
    if mask is not None:
        mask = xp.broadcast_to(mask, (*lead, h, 1, count)).reshape(n, h, count, 1)
    length = q.shape[3]
    if is_causal and count < length:  # hidden keys stand for those that there aren't
        mask = xp.ones((n, h, count, 1), bool) if mask is None else mask
        k, v, mask = (xp.concatenate([x, xp.zeros_like(x, shape=(n, h, length - count, x.shape[-1]))], 2)
                      for x in (k, v, mask))  # fmt: skip
    elif is_causal:
        k, v, mask = (None if x is None else x[:, :, :length] for x in (k, v, mask))
    chunk = min(int(chunk or CHUNK), max(1, length))
    powers = None if gamma is None else xp.asarray(gamma[:, None] ** np.arange(chunk + 1), wide)
    return _Call(q, k, v, mask, phi, powers, is_causal, chunk), sizes


def _spread(xp: Any, x: Array, lead: tuple[int, ...]) -> Array:
    shape = (*lead, *x.shape[-2:])
    return x if x.shape == shape else xp.broadcast_to(x, shape)


def _empty(call: _Call, *sizes: int) -> Array:
    """An array (n, heads…, length, d), in the memory order (n, length, heads…, d), which a layer merges as a view."""
    n, *heads, length, d = sizes
    array: Array = call.xp.moveaxis(call.xp.empty((n, length, *heads, d), call.q.dtype), 1, -2)
    return array


# ---- the kernels ----------------------------------------------------------------------------------------------------


def _forward(q: Array, k: Array, v: Array, mask: Any, *options: Any) -> tuple[Array, dict[str, Any]]:
    call, sizes = _call_of(q, k, v, mask, options)
    out, total = _results(call)
    with blas_threads(1):
        tasks = [partial(_forward_group, call, *at, out, total, call.new_state(*at)) for at in call.groups()]
        run(tasks, call.nanoseconds(1))
    result = out.reshape(*sizes.scores[:-1], v.shape[-1])
    return cast_to(result, np.result_type(q.dtype, k.dtype, v.dtype)), {"total": total}


def _results(call: _Call) -> tuple[Array, Array | None]:
    """Room for the result, and for the sums of weights where they divide."""
    total = call.xp.empty((*call.q.shape[:-1], 1), call.q.dtype) if call.divides else None
    return _empty(call, *call.q.shape[:-1], call.v.shape[-1]), total


def _forward_group(call: _Call, n: slice, h: slice, out: Array, total: Array | None, state: Array) -> Array:
    """Linear attention of some heads after ``state``, written to out and total; returns the state after all keys."""
    with np.errstate(all="ignore"):
        if not call.causal:
            state = _whole_state(call, n, h, state)
        for i, c in call.blocks(call.q.shape[3]):
            q = call.queries(n, h, i, c)
            if call.causal:
                k, v = call.keys(n, h, i, c)
                states, state = call.through(state, _added(call, h, k, v), h, c)
                sums = call.xp.matmul(call.fading(q, h), states)
                sums += call.product(call.within(q @ k.swapaxes(-1, -2), h), v)
            else:
                sums = q @ state[:, :, None]
            sums = call.unstacked(sums)
            if total is not None:
                call.in_chunks(total[n, h, :, i], c)[...] = sums[..., -1:]
                sums = _divided(call.xp, sums[..., :-1], sums[..., -1:])
            call.in_chunks(out[n, h, :, i], c)[...] = sums
    return state


def _added(call: _Call, h: slice, k: Array, v: Array) -> Array:
    """What each chunk adds to the state: (Λk φ(k))ᵀ (v, 1)."""
    added: Array = call.remaining(k, h).swapaxes(-1, -2) @ v
    return added


def _whole_state(call: _Call, n: slice, h: slice, state: Array) -> Array:
    """The state after all keys, where every query sees it."""
    for j, c in call.blocks(call.k.shape[2]):
        k, v = call.keys(n, h, j, c)
        state = state + (k.swapaxes(-1, -2) @ v)[:, :, 0]
    return state


def _divided(xp: Any, x: Array, total: Array) -> Array:
    """x / total, and 0 where total is 0: no key was seen."""
    none = total == 0
    if not none.any():
        quotient: Array = x / total
        return quotient
    masked: Array = xp.where(none, 0, x / xp.where(none, 1, total))
    return masked


def _backward(
    g: Array, q: Array, k: Array, v: Array, mask: Any, is_causal: Any, feature_map: Any, decay: Any, chunk: Any,
    out: Array, total: Any,
) -> tuple[Array, ...]:  # fmt: skip
    call, sizes = _call_of(q, k, v, mask, (is_causal, feature_map, decay, chunk))
    form = (*call.q.shape[:-1], v.shape[-1])
    read = g.reshape(form), out.reshape(form), total
    length = max(k.shape[-2], call.k.shape[2])
    gq, gk, gv = (_empty(call, *x.shape[:-2], size, x.shape[-1])
                  for x, size in ((call.q, q.shape[-2]), (call.k, length), (call.v, length)))  # fmt: skip
    unseen = call.k.shape[2] if call.groups() else 0  # keys after the last query
    gk[:, :, unseen:], gv[:, :, unseen:] = 0, 0
    body = _backward_causal if call.causal else _backward_whole
    with blas_threads(1):
        run([partial(body, call, *at, read, (gq, gk, gv)) for at in call.groups()], call.nanoseconds(4))
    gk, gv = (x[:, :, : k.shape[-2]] for x in (gk, gv))
    lead, heads = sizes.scores[:-2], (*sizes.lead, sizes.heads) if sizes.scores[:-2] else ()
    shapes = ((gq, lead, q), (gk, heads, k), (gv, heads, v))
    return tuple(
        cast_to(unbroadcast(x.reshape(*axes, *x.shape[-2:]), like.shape), like.dtype) for x, axes, like in shapes
    )


def _backward_causal(call: _Call, n: slice, h: slice, read: tuple[Any, ...], write: tuple[Array, ...]) -> None:
    """The gradients of some heads: dq in the order of the chunks, dk and dv against it."""
    state, blocks = call.new_state(n, h), call.blocks(call.q.shape[3])
    with np.errstate(all="ignore"):
        for i, c in blocks:
            (k, v), up = call.keys(n, h, i, c), _upstream(call, n, h, i, c, read)
            states, state = call.through(state, _added(call, h, k, v), h, c)
            dq = call.product(call.within(up @ v.swapaxes(-1, -2), h), k)
            dq += call.fading(up @ states.swapaxes(-1, -2), h)
            _write_queries(call, n, h, i, c, dq, write)
        state = call.xp.zeros_like(state)
        for i, c in reversed(blocks):
            q, (k, v), up = call.queries(n, h, i, c), call.keys(n, h, i, c), _upstream(call, n, h, i, c, read)
            states, state = call.through(state, call.fading(q, h).swapaxes(-1, -2) @ up, h, c, -1)
            dk = call.within(up @ v.swapaxes(-1, -2), h).swapaxes(-1, -2) @ q
            dk += call.remaining(v @ states.swapaxes(-1, -2), h)
            dv = call.within(q @ k.swapaxes(-1, -2), h).swapaxes(-1, -2) @ up + call.remaining(k @ states, h)
            _write_keys(call, n, h, i, dk, dv, write)


def _backward_whole(call: _Call, n: slice, h: slice, read: tuple[Any, ...], write: tuple[Array, ...]) -> None:
    """The same where every query sees every key, all through one state."""
    with np.errstate(all="ignore"):
        state = _whole_state(call, n, h, call.new_state(n, h))[:, :, None]
        gradient = call.xp.zeros_like(state)
        for i, c in call.blocks(call.q.shape[3]):
            q, up = call.queries(n, h, i, c), _upstream(call, n, h, i, c, read)
            gradient += q.swapaxes(-1, -2) @ up
            _write_queries(call, n, h, i, c, up @ state.swapaxes(-1, -2), write)
        for j, c in call.blocks(call.k.shape[2]):
            k, v = call.keys(n, h, j, c)
            _write_keys(call, n, h, j, v @ gradient.swapaxes(-1, -2), k @ gradient, write)


def _upstream(call: _Call, n: slice, h: slice, i: slice, c: int, read: tuple[Any, ...]) -> Array:
    """The gradient of (num, den): (g, -g·out) / den; or g, where nothing was divided."""
    g, out, total = (None if x is None else call.in_chunks(x[n, h, :, i], c) for x in read)
    assert g is not None
    g = g.astype(call.q.dtype, copy=False)
    if total is not None:
        dots = (g * out).sum(-1, keepdims=True)
        g = _divided(call.xp, call.xp.concatenate([g, -dots], -1), total)
    return call.stacked(g)


def _write_queries(call: _Call, n: slice, h: slice, i: slice, c: int, g: Array, write: tuple[Array, ...]) -> None:
    x = call.in_chunks(call.q[n, h, :, i], c)
    call.in_chunks(write[0][n, h, :, i], c)[...] = call.phi.backward(x, call.unstacked(g))


def _write_keys(call: _Call, n: slice, h: slice, j: slice, dk: Array, dv: Array, write: tuple[Array, ...]) -> None:
    _, gk, gv = write
    x = call.k[n, h, j]
    dk, dv = (y.reshape(*x.shape[:-1], y.shape[-1]) for y in (dk, dv[..., : gv.shape[-1]]))
    dk = call.phi.backward(x, dk)
    if call.mask is not None:
        seen = call.mask[n, h, j]
        dk, dv = call.xp.where(seen, dk, 0), call.xp.where(seen, dv, 0)
    gk[n, h, j], gv[n, h, j] = dk, dv


linear_attention.defforward(_forward)
linear_attention.defbackward("q", "k", "v")(_backward)
linear_attention.defgpu(_forward, _backward)


def continued(
    q: Array, k: Array, v: Array, mask: Any, state: Array | None, feature_map: str, decay: Any
) -> tuple[Array, Array]:
    """Causal linear attention of arrays that go on from ``state``, None at the beginning; and the state after them.

    The state is (..., heads of keys, features, d_v), and one column more, Σ φ(k), where the sum of weights divides. It
    has the size of no sequence. One row at a time is the recurrent form.
    """
    call, sizes = _call_of(q, k, v, mask, (True, feature_map, decay, None))
    out, total = _results(call)
    everything = slice(None), slice(None)
    start = call.new_state(*everything)
    start = start if state is None else state.reshape(start.shape)
    state = _forward_group(call, *everything, out, total, start)
    result = cast_to(out.reshape(*sizes.scores[:-1], v.shape[-1]), np.result_type(q.dtype, k.dtype, v.dtype))
    return result, state.reshape(*sizes.lead, sizes.heads, *state.shape[-2:])
