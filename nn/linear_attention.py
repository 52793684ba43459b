"""Linear attention as a layer: the place of MultiHeadAttention in a model, with a state instead of keys and values."""

from __future__ import annotations

from typing import Any

from minigrad import asarray, where
from minigrad.backend import NDArray, array_module
from minigrad.errors import ArgumentError
from minigrad.kernels.linear_attention import continued, decays_of, feature_map_of
from minigrad.tensor import Tensor, TensorLike
from . import functional as F
from .attention import MultiHeadAttention, check_sequences, merge_heads, places_of, split_heads
from .cache import KVCache
from .checks import check_sizes
from .module import Module


class LinearAttention(MultiHeadAttention):
    """Attention by features of queries and keys, ``φ(q) Σ φ(k) vᵀ / φ(q) Σ φ(k)``, in time linear in the length.

    The layers and arguments are those of MultiHeadAttention. In a cache it has a state of heads of keys · features ·
    (head_dim + 1) numbers, however much it reads.

    - feature_map, decay: those of :func:`nn.functional.linear_attention`. Heads with a decay are not divided by a sum
      of weights but by their root mean square, as in retention
    - feature_dim: the size of queries and keys in a head, by default head_dim; Taylor's map makes 1 + d + d² features
      of it, so that 16 is usual
    - rope_place: "before" turns queries and keys before the map; "after" turns the features of "elu+1" and "identity",
      in the weights but not in their sum (Su et al., 2021), which leaves weights that may be negative; None turns none

    There are no weights to drop, and no context: it is attention within one sequence. Masks hide keys alone.

    >>> import minigrad as mg
    >>> LinearAttention(16, num_heads=4, feature_map="taylor", feature_dim=2)(mg.ones((2, 5, 16)), is_causal=True).shape
    (2, 5, 16)
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool | str = False,
        rope: Module | None = None,
        *,
        head_dim: int | None = None,
        feature_map: str = "elu+1",
        feature_dim: int | None = None,
        decay: Any = None,
        rope_place: str | None = "before",
        **options: Any,
    ) -> None:
        if feature_dim is not None:
            check_sizes(feature_dim=feature_dim)
        if ignored := [name for name in ("window", "pattern") if options.get(name) is not None]:
            hint = "a decay fades what is far away"
            raise ArgumentError("linear attention without a window and a pattern", " and ".join(ignored), hint)
        super().__init__(
            d_model, num_heads, num_kv_heads, bias, rope=rope, head_dim=head_dim, key_dim=feature_dim, **options
        )
        feature_map_of(feature_map)
        if rope_place not in ("before", "after", None):
            raise ArgumentError(
                "a rope_place 'before' or 'after' the map, or None", repr(rope_place), "None turns none"
            )
        if rope_place == "after" and feature_map == "taylor":
            hint = "1 + d + d² of them are no pairs"
            raise ArgumentError("rope_place='before' or None with Taylor's features", "'after'", hint)
        decays = decays_of(decay, self.num_kv_heads)
        self.feature_map, self.rope_place = feature_map, rope_place
        self.decay = None if decays is None else tuple(decays.tolist())
        self.rope = None if rope_place is None else rope

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
        """Attention of the positions of ``x`` (..., T, d_model) to each other; arguments as in MultiHeadAttention.

        - attn_mask: booleans (..., 1, 1, T), of keys alone; with a cache those of all positions, or of x
        - cache: holds the state after earlier positions; x must then be read causally
        """
        check_sequences(x, context)
        if context is not None or values is not None:
            raise ArgumentError("no context in linear attention", "one", "it is attention within one sequence")
        return self.attend(
            self.q_proj(x), self.k_proj(x), self.v_proj(x),
            attn_mask=attn_mask, is_causal=is_causal, positions=positions, cache=cache,
        )  # fmt: skip

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
        """``forward`` from the three projections of x on, each (..., T, heads · size), ``turned`` already or not."""
        values = split_heads(v, self.num_kv_heads)
        heads = self._means(q, k, values, attn_mask, is_causal, positions, cache, turned)
        if self.decay is not None:
            heads = F.rms_norm(heads, heads.shape[-1:])
        return self.output_proj(merge_heads(heads))

    def turns(self, x: Tensor, positions: Any, cache: KVCache | None) -> tuple[NDArray, NDArray] | None:
        """Those of MultiHeadAttention, where rope comes before the map."""
        return super().turns(x, positions, cache) if self.rope_place == "before" else None

    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        attn_mask: TensorLike | None = None,
        is_causal: bool = False,
        positions: TensorLike | None = None,
    ) -> Tensor:
        """The weight of each key for each position of ``x``, (..., heads, T, T); the arguments are those of forward."""
        check_sequences(x)
        values: NDArray = array_module(x).eye(x.shape[-2], dtype=x.dtype)[None]
        q, k = self.q_proj(x), self.k_proj(x)
        weights: Tensor = self._means(q, k, values, attn_mask, is_causal, positions, None)
        return weights

    def _means(
        self, q: Any, k: Any, values: Any, mask: Any, is_causal: bool, positions: Any, cache: KVCache | None,
        turned: bool = False,
    ) -> Any:  # fmt: skip
        """Weighted means of the values in each head, from projections of queries and keys."""
        if cache is not None and not is_causal:
            raise ArgumentError("is_causal=True with a cache", "is_causal=False", "a state has no later positions")
        q, k, place = self._queries(q), self._keys(k), None
        if self.rope is not None:
            place = places_of(positions, cache, q.shape[-2])
        if mask is not None:
            mask = asarray(mask)
            mask = mask[..., -k.shape[-2] :] if cache is not None and mask.ndim else mask

        def attended(q: Any, k: Any, v: Any, feature_map: str, part: str) -> Any:
            if cache is None:
                return F.linear_attention(q, k, v, mask, is_causal, feature_map, self.decay)
            q, k, v, hidden = (None if x is None else asarray(x).data for x in (q, k, v, mask))
            out, state = continued(q, k, v, hidden, cache.state(self, part), feature_map, self.decay)
            cache.keep(self, part, state)
            return asarray(out)

        if self.rope is None or turned:
            return attended(q, k, values, self.feature_map, "state")
        if self.rope_place == "before":
            return attended(self.rope(q, place), self.rope(k, place), values, self.feature_map, "state")
        phi = feature_map_of(self.feature_map)
        q, k = phi.of(q), phi.of(k)
        means = attended(self.rope(q, place), self.rope(k, place), values, "identity", "state")
        if not phi.positive or self.decay is not None:
            return means
        ones = array_module(k).ones((*k.shape[:-1], 1), k.dtype)
        total = attended(q, k, ones, "identity", "sum")
        return means / where(total == 0, 1, total)

    def extra_repr(self) -> str:
        size = "" if self.key_dim == self.head_dim else f", feature_dim={self.key_dim}"
        fading = "" if self.decay is None else f", decay={self.decay}"
        return f"{super().extra_repr()}, feature_map={self.feature_map!r}{size}{fading}"
