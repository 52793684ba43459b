"""Prefixes: keys and values that are learned, which each query of a trained model's attention sees beside its own.

They stand before the keys of the text and have no positions: those of the text count from 0, as they did, and a cache
holds the text alone. A query at position p, which rotary positions turn by R(p), scores a prefix's key k as R(p) q · k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from minigrad import asarray, broadcast_to, concatenate, random, where
from minigrad.backend import Array, array_module, array_of, device_of
from minigrad.errors import ArgumentError, DTypeError
from minigrad.kernels.attention_patterns import Pattern, pattern_of
from minigrad.messages.explain import describe
from minigrad.tensor import Tensor
from .. import functional as F
from ..attention import MultiHeadAttention
from ..cache import KVCache
from ..checks import check_sizes
from ..continuation import evaluating
from ..masks import token_ids
from ..module import Module
from ..parameter import truncated_normal
from ..positional import RotaryEmbedding, frequencies_of
from .adapted import Adapted, M, add, check_name, disable_adapters, matching, place_of

ATTENTION = "*attn"  # the attention layers, by our names
STD = 0.1  # of the numbers that a prefix starts from


class Prefix(Module):
    """Keys (num_kv_heads, length, key_dim) and values (num_kv_heads, length, head_dim) of one layer.

    They start as normals with σ = 0.1, cut at 3σ, unless they are loaded.
    """

    def __init__(self, layer: MultiHeadAttention, length: int, generator: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {**place_of(layer.k_proj), "generator": generator}
        self.keys = truncated_normal((layer.num_kv_heads, length, layer.key_dim), STD, **options)
        self.values = truncated_normal((layer.num_kv_heads, length, layer.head_dim), STD, **options)

    @property
    def length(self) -> int:
        """How many keys there are."""
        return int(self.keys.shape[1])

    def extra_repr(self) -> str:
        return f"length={self.length}"


class PrefixedAttention(Adapted, MultiHeadAttention):
    """A MultiHeadAttention whose queries also see the keys of the active prefix, all of them, whatever a mask hides."""

    plain = MultiHeadAttention

    def _attended(
        self, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, dropout_p: float, window: int | None, pattern: Any
    ) -> Tensor:
        if (prefix := self.change) is None:
            return super()._attended(q, k, v, mask, is_causal, dropout_p, window, pattern)
        seen = pattern_of(is_causal, window, pattern)
        mask, pattern = _beyond(prefix.length, q, k, seen, mask)
        k, v = _before(prefix.keys, k), None if v is None else _before(prefix.values, v)
        out: Tensor = super()._attended(q, k, v, mask, False, dropout_p, None, pattern)
        return out


def _before(first: Tensor, x: Any) -> Tensor:
    """``first`` (heads, n, d) and then ``x`` (..., heads, S, d), in its dtype."""
    first = first if first.dtype == x.dtype else first.astype(x.dtype)
    out: Tensor = concatenate([broadcast_to(first, (*x.shape[:-3], *first.shape)), x], axis=-2)
    return out


def _beyond(n: int, q: Any, k: Any, seen: Pattern, mask: Any) -> tuple[Any, Pattern | None]:
    """The mask and the pattern where ``n`` keys that all queries see come before those that these are about.

    A band that ends on the left, or a grid, becomes a mask: (T, n + S) numbers, which full attention never makes.
    """
    pattern: Pattern | None = seen._replace(start=seen.start + n)
    queries, keys, xp = q.shape[-2], k.shape[-2], array_module(k)
    there = partial(asarray, device=device_of(array_of(k)))
    mask = None if mask is None else there(mask)
    if seen.grid is not None or seen.left < np.inf:
        seen.check(queries, keys)
        allowed = seen.seen(queries, keys, xp)
        if mask is not None:
            allowed = mask.data & allowed if mask.dtype == bool else where(there(allowed), mask, -np.inf)
        mask, pattern = there(allowed), None
    if mask is None:
        return None, pattern
    mask = broadcast_to(mask, (*mask.shape[:-1], keys))
    first = xp.full((*mask.shape[:-1], n), mask.dtype == bool, mask.dtype)
    return concatenate([there(first), mask], axis=-1), pattern


def prefixes(
    model: M,
    length: int = 16,
    targets: str | Iterable[str] = ATTENTION,
    *,
    name: str = "default",
    tokens: Any = None,
    generator: Any = None,
) -> M:
    """Adapt attention layers of ``model`` in place by ``length`` keys and values each, which alone are trained.

    Every query sees them beside those of the text, also through masks and windows; positions of the text stay what they
    are, and a cache holds the text alone. All other parameters are frozen. The model is returned. No prefix leaves a
    model's results as they were, since what a query sees is shared out among more keys.

    - targets: patterns of names as for ``nn.lora``; by default all attention layers
    - name: of the prefix, as for ``nn.lora``: several adapters of any kind may be in a model, and one is active
    - tokens: ids (length,) of a text that they start from: its keys and values, as if the model had just read it. A
      model with rotary positions and full attention in all layers then goes on from this text
    - generator: for the normals, σ = 0.1, that they start from without

    They count as a query's own keys do in memory and time. Layers of linear attention have no keys, and none matches.
    Li and Liang, "Prefix-Tuning" (2021), who also train a network that makes them, to be thrown away afterwards.

    >>> import nn
    >>> model = nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2)
    >>> model = nn.prefixes(model, length=3, tokens=[1, 2, 3])
    >>> [(name, p.shape) for name, p in model.named_parameters() if p.requires_grad][0]
    ('layers.0.attn.adapters.default.keys', (2, 3, 8))
    """
    check_sizes(length=length)
    layers = matching(model, targets, PrefixedAttention)
    check_name(model, name)
    start = None if tokens is None else _read(model, tokens, length)
    generator = random.generator(generator)
    return adapt(model, layers, int(length), name, generator, start)


def adapt(
    model: M,
    layers: Mapping[str, Any],
    length: int,
    name: str,
    generator: Any = None,
    start: Mapping[str, tuple[Array, Array]] | None = None,
) -> M:
    """``prefixes`` of these layers of ``model``, with the keys and values of ``start`` by the layers' names."""
    made = {path: Prefix(layer, length, random.generator(generator)) for path, layer in layers.items()}
    for path, prefix in made.items():
        if start is not None:
            prefix.keys.data, prefix.values.data = start[path]
    return add(model, layers, PrefixedAttention, made, name)


def _read(model: Any, tokens: Any, length: int) -> dict[str, tuple[Array, Array]]:
    """Keys and values of each attention layer for ids (length,), turned to where they stand just before a text."""
    if not hasattr(model, "next_logits") or hasattr(model, "start"):
        raise DTypeError("a language model that reads tokens", describe(model), "tokens=None starts from normals")
    ids = token_ids(tokens)
    if ids.shape != (length,):
        raise ArgumentError(f"tokens ({length},), as many as length", f"shape {ids.shape}", "or another length")
    with evaluating(model), disable_adapters(model):
        cache = KVCache(model)
        model.next_logits(ids[None], cache)
        found = {}
        for path, layer in model.named_modules():
            if isinstance(layer, MultiHeadAttention) and (pair := cache.pair(layer)) is not None:
                k, v = (x[0].copy() for x in pair)
                found[path] = (turned_by(layer.rope, k, -length), v)
    return found


def turned_by(rope: Any, keys: Array, places: int) -> Array:
    """Keys (..., n, d) turned on by as many positions; without a rope they stay."""
    if rope is None:
        return keys
    if not isinstance(rope, RotaryEmbedding):
        raise DTypeError("an nn.RotaryEmbedding as rope", describe(rope), "how far another turns isn't known")
    xp = array_module(keys)
    angles = places * frequencies_of(rope.theta, rope.d_k, rope.scaling)[0][None]
    return array_of(F.apply_rope(keys, xp.asarray(np.cos(angles)), xp.asarray(np.sin(angles)), rope.layout))
