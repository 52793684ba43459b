"""Multi-head attention: projections into heads, attention in each of them, and a projection back."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad import asarray, primitive, random, reshape, swapaxes
from minigrad.backend import Array, DType, NDArray, array_module
from minigrad.engine.registry import sample
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.kernels.attention_patterns import BlockPattern, Pattern
from minigrad.messages.explain import describe
from minigrad.tensor import Tensor, TensorLike
from . import functional as F
from .cache import KVCache
from .checks import check_probability, check_sizes
from .linear import Linear
from .module import Module, is_plain
from .normalization import RMSNorm
from .positional import RotaryEmbedding


@primitive(view=True, torch=False, numpy=False, samples=[sample((2, 3, 8), heads=4), sample((3, 6), heads=1)])
def split_heads(x: Array, heads: int) -> Array:
    """(..., T, heads · d) to (..., heads, T, d), as a view: the kernels read transposed heads in place.

    >>> split_heads(np.ones((5, 8)), 2).shape
    (2, 5, 4)
    """
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).swapaxes(-2, -3)


@primitive(view=True, torch=False, numpy=False, samples=[sample((2, 4, 3, 2)), sample((1, 3, 6))])
def merge_heads(x: Array) -> Array:
    """(..., heads, T, d) to (..., T, heads · d), as a view where x has the memory order that ``split_heads`` gives.

    >>> merge_heads(np.ones((2, 5, 4))).shape
    (5, 8)
    """
    x = x.swapaxes(-2, -3)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


split_heads.defvjp(lambda g: merge_heads(g))
merge_heads.defvjp(
    lambda g, x_shape: swapaxes(reshape(g, (*x_shape[:-3], x_shape[-2], x_shape[-3], x_shape[-1])), -2, -3)
)


class MultiHeadAttention(Module):
    """``output_proj(concat(head_1, …, head_h))``, each head attention over projections of its own.

    q_proj, k_proj, v_proj take (..., d_model) to heads of head_dim features (d_model / num_heads if not given), queries
    and keys to key_dim, if that is another. With
    num_kv_heads < num_heads neighbouring heads share keys and values (grouped-query attention, Ainslie et al. 2023).
    dropout drops attention weights in training. rope, a RotaryEmbedding, turns queries and keys. With bias all four
    projections have one, with "qkv" those into heads alone. Vaswani et al., "Attention is all you need" (2017), section
    3.2.2. With qk_norm an RMSNorm, of ``norm_eps``, follows the projections to queries and keys in each head (Henry et
    al., "Query-Key Normalization", 2020, with another norm).

    Two options make long sequences cheaper, where no context is given: with a window position i sees positions j with
    ``|i - j| < window`` alone, with a pattern, an ``nn.BlockPattern``, those in its blocks.

    >>> import minigrad as mg
    >>> MultiHeadAttention(16, num_heads=4, num_kv_heads=2)(mg.ones((2, 5, 16)), is_causal=True).shape
    (2, 5, 16)
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool | str = False,
        dropout: float = 0.0,
        rope: Module | None = None,
        *,
        head_dim: int | None = None,
        key_dim: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        window: int | None = None,
        pattern: BlockPattern | None = None,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__()
        if window is not None:
            check_sizes(window=window)
        if not isinstance(pattern, BlockPattern | None):
            raise DTypeError("an nn.BlockPattern as pattern", describe(pattern), "a mask is an argument of the call")
        if bias not in (False, True, "qkv"):
            raise ArgumentError("a bias of False, True or 'qkv'", repr(bias), "'qkv' leaves out that of output_proj")
        self.window, self.pattern = window, pattern
        self.num_heads, self.num_kv_heads, self.head_dim = head_sizes(d_model, num_heads, num_kv_heads, head_dim)
        self.key_dim = self.head_dim if key_dim is None else key_dim
        self.dropout = check_probability(dropout)
        wide, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        kinds: dict[str, Any] = {"dtype": dtype, "device": device, "generator": random.generator(generator)}
        self.q_proj = Linear(d_model, self.num_heads * self.key_dim, bool(bias), **kinds)
        self.k_proj = Linear(d_model, self.num_kv_heads * self.key_dim, bool(bias), **kinds)
        self.v_proj = Linear(d_model, narrow, bool(bias), **kinds)
        self.output_proj = Linear(wide, d_model, bias is True, **kinds)
        norm: dict[str, Any] = {"eps": norm_eps, "dtype": dtype, "device": device}
        self.q_norm = RMSNorm(self.key_dim, **norm) if qk_norm else None
        self.k_norm = RMSNorm(self.key_dim, **norm) if qk_norm else None
        self.rope = rope

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        values: Tensor | None = None,
        attn_mask: TensorLike | None = None,
        is_causal: bool = False,
        positions: TensorLike | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attention of the positions of ``x`` (..., T, d_model) to each other, or to ``context`` (..., S, d_model).

        - values: (..., S, d_model), what is read where the keys are those of context; by default context too
        - attn_mask: True where attention is allowed, or numbers added to the scores; broadcasts to (..., heads, T, S)
        - is_causal: position i sees positions up to i alone
        - positions: of x, for rope: integers (T,) or (..., T); by default they count on from the cache, or from 0
        - cache: holds keys and values of earlier positions, and takes those of x; x sees all of them that a window
          leaves. With a context: holds the context's keys and values, which the first call computes
        """
        q, k, v = self._heads(x, context, positions, cache, values)
        return self._output(q, k, v, attn_mask, is_causal, None if context is not None else cache)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attn_mask: TensorLike | None = None,
        is_causal: bool = False,
        positions: TensorLike | None = None,
        cache: KVCache | None = None,
        turned: bool = False,
    ) -> Tensor:
        """``forward`` from the three projections of x on, each (..., T, heads · head_dim).

        turned: whether queries and keys are turned by rope already, see ``turns``
        """
        q, k, v = self._own_heads(q, k, v, positions, cache, turned)
        return self._output(q, k, v, attn_mask, is_causal, cache)

    def turns(self, x: Tensor, positions: Any, cache: KVCache | None) -> tuple[NDArray, NDArray] | None:
        """Cosines and sines (T, key_dim/2) for a product that turns all queries and keys of x at once.

        None where nothing is turned or something watches it, where something comes between a product and its turn,
        where each sequence has positions of its own, and on a GPU, whose product can't do it.
        """
        rope: Any = self.rope
        if rope is None or not is_plain(rope, RotaryEmbedding) or array_module(x) is not np:
            return None
        projections = self.q_proj, self.k_proj, self.v_proj
        between = self.q_norm is not None or any(layer.bias is not None for layer in projections)
        if between or (rope.layout, rope.d_k) != ("interleaved", self.key_dim) or np.ndim(positions) > 1:
            return None
        if cache is not None and cache.sinks:
            return None
        turns: tuple[NDArray, NDArray] = rope.turns(x, places_of(positions, cache, x.shape[-2]))
        return turns

    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        attn_mask: TensorLike | None = None,
        is_causal: bool = False,
        positions: TensorLike | None = None,
    ) -> Tensor:
        """How much each position of ``x`` attends to each key: (..., heads, T, S), rows that sum to 1, without dropout.

        To look at; ``forward`` never makes them. The arguments are those of ``forward``.
        """
        q, k, _ = self._heads(x, context, positions, None)
        return self._attended(q, k, None, attn_mask, is_causal, 0.0, self.window, self.pattern)

    def _heads(
        self, x: Any, context: Any, positions: Any, cache: KVCache | None, values: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x; keys and values of the context, or of the cache and x."""
        check_sequences(x, context, values)
        if values is not None and np.shape(values)[:-1] != np.shape(context)[:-1]:
            got = f"values {np.shape(values)}, context {'None' if context is None else np.shape(context)}"
            raise ShapeError("a value for each key of the context", got, "attention(x, keys, values=values)")
        if context is None:
            return self._own_heads(self.q_proj(x), self.k_proj(x), self.v_proj(x), positions, cache)
        if self.window is not None or self.pattern is not None:
            got = f"window={self.window}, pattern={self.pattern}"
            raise ArgumentError("no window and no pattern where there is a context", got, "they are of one sequence")

        def keys_and_values() -> tuple[Any, Any]:
            k, v = self.k_proj(context), self.v_proj(context if values is None else values)
            return self._turned(self._keys(k), None), split_heads(v, self.num_kv_heads)

        q = self._turned(self._queries(self.q_proj(x)), places_of(positions, cache, x.shape[-2]))
        return q, *(keys_and_values() if cache is None else cache.once(self, keys_and_values))

    def _own_heads(
        self, q: Any, k: Any, v: Any, positions: Any, cache: KVCache | None, turned: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The projections of one sequence in heads; keys and values follow those in the cache."""
        q, k, v = self._queries(q), self._keys(k), split_heads(v, self.num_kv_heads)
        if turned:
            return q, *((k, v) if cache is None else cache.extend(self, k, v))
        if cache is not None and cache.sinks:
            k, v = cache.extend(self, k, v)
            place = range(k.shape[-2])  # counted within the cache
            return self._turned(q, place[len(place) - q.shape[-2] :]), self._turned(k, place), v
        place = places_of(positions, cache, q.shape[-2])
        k = self._turned(k, place)
        k, v = (k, v) if cache is None else cache.extend(self, k, v)
        return self._turned(q, place), k, v

    def _queries(self, x: Any) -> Any:
        """The projection to queries in heads, each normalised where there is a norm."""
        x = split_heads(x, self.num_heads)
        return x if self.q_norm is None else self.q_norm(x)

    def _keys(self, x: Any) -> Any:
        """``_queries`` of keys."""
        x = split_heads(x, self.num_kv_heads)
        return x if self.k_norm is None else self.k_norm(x)

    def _turned(self, x: Any, place: Any) -> Any:
        """Heads turned by their positions where there is a rope."""
        return x if self.rope is None else self.rope(x, place)

    def _output(self, q: Any, k: Any, v: Any, attn_mask: Any, is_causal: bool, cache: KVCache | None) -> Tensor:
        """Attention in each head, and the projection of all of them back to d_model."""
        window: int | None = self.window
        pattern: Any = self.pattern
        if cache is not None:  # its keys come first
            pattern = Pattern(start=k.shape[-2] - q.shape[-2], grid=self.pattern)
            if cache.sinks:
                window = None  # it holds no keys beyond
                if attn_mask is not None:
                    raise ArgumentError("no mask beside a cache with sinks", "one", "it drops keys, the mask doesn't")
            elif self.window is not None and attn_mask is not None:
                attn_mask = asarray(attn_mask)[..., -k.shape[-2] :]
        dropout_p = self.dropout if self.training else 0.0
        heads = self._attended(q, k, v, attn_mask, is_causal, dropout_p, window, pattern)
        return self.output_proj(merge_heads(heads))

    def _attended(
        self, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, dropout_p: float, window: int | None, pattern: Any
    ) -> Tensor:
        """Attention in each head, (..., heads, T, d); without values the weights of the keys, (..., heads, T, S)."""
        if v is None:
            v = array_module(k).eye(k.shape[-2], dtype=k.dtype)[None]  # means of these values are the weights
        shape: dict[str, Any] = {"window": window, "pattern": pattern}
        out: Tensor = F.scaled_dot_product_attention(q, k, v, mask, is_causal, dropout_p, **shape)
        return out

    def extra_repr(self) -> str:
        shared = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        shape = "".join(f", {name}={x}" for name in ("window", "pattern") if (x := getattr(self, name)) is not None)
        return f"num_heads={self.num_heads}{shared}, head_dim={self.head_dim}, dropout={self.dropout}{shape}"


def check_sequences(*sequences: Any) -> None:
    """Refuse what has no axis of positions."""
    for x in sequences:
        if x is not None and np.ndim(x) < 2:
            raise ShapeError("sequences (..., T, d_model)", f"shape {np.shape(x)}", "x[None] adds an axis of positions")


def head_sizes(d_model: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None) -> tuple[int, int, int]:
    """Numbers of heads of queries, of keys and values, and the size of a head, or an error that says what doesn't fit.

    >>> head_sizes(512, 8, None, None)
    (8, 8, 64)
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_sizes(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if num_heads % num_kv_heads:
        got = f"num_heads={num_heads}, num_kv_heads={num_kv_heads}"
        hint = "each head of keys serves as many queries"
        raise ArgumentError("num_heads that is a multiple of num_kv_heads", got, hint)
    if head_dim is None:
        if d_model % num_heads:
            got = f"d_model={d_model}, num_heads={num_heads}"
            raise ArgumentError("a d_model that divides into num_heads", got, "or give head_dim")
        head_dim = d_model // num_heads
    check_sizes(head_dim=head_dim)
    return num_heads, num_kv_heads, head_dim


def places_of(positions: Any, cache: KVCache | None, length: int) -> Any:
    """Positions in the form that rope takes, with an axis for the heads; by default they follow those in the cache."""
    if positions is not None:
        positions = asarray(positions).data
        return positions if positions.ndim == 1 else positions[..., None, :]
    start = 0 if cache is None else cache.length
    return range(start, start + length)
