"""The encoder-decoder Transformer of "Attention is all you need", and the two layers that it stacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from minigrad import asarray, random
from minigrad.backend import DType, NDArray, made_on
from minigrad.errors import ArgumentError, ShapeError
from minigrad.kernels.attention_patterns import BlockPattern
from minigrad.tensor import Tensor, TensorLike
from .activation import Dropout
from .attention import MultiHeadAttention
from .cache import KVCache
from .checks import as_ids, check_sizes
from .containers import ModuleList
from .feedforward import FeedForward
from .kinds import self_attention, shapes_of
from .linear import Embedding, Linear, head_loss
from .masks import padding_mask
from .module import Module
from .normalization import LayerNorm
from .positional import SinusoidalPositionalEncoding
from .transformer import unrecorded

Activation: TypeAlias = str | Callable[[Any], Any]


class EncoderLayer(Module):
    """Self-attention, then a feed-forward layer, each a branch that is added to its input and normalized.

    Post-norm, as in the original: ``x = ln(x + dropout(branch(x)))``. With norm_first, pre-norm:
    ``x = x + dropout(branch(ln(x)))``. Attention and feed-forward have biases.

    - dropout: of both branches; attention_dropout, activation_dropout: of the attention weights, and of the units
      inside the feed-forward layer (torch's ``nn.TransformerEncoderLayer`` has its one rate in all four places)
    - activation: "relu", "gelu", "silu" or a function
    - window, pattern: of the self-attention, see MultiHeadAttention; with options of LinearAttention as ``linear`` that
      takes its place

    Vaswani et al., "Attention is all you need" (2017), section 3.1; Xiong et al., "On Layer Normalization in the
    Transformer Architecture" (2020), for pre-norm.

    >>> import minigrad as mg
    >>> EncoderLayer(16, num_heads=2, d_ff=32)(mg.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        *,
        norm_first: bool = False,
        norm_eps: float = 1e-5,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        window: int | None = None,
        pattern: BlockPattern | None = None,
        linear: Mapping[str, Any] | None = None,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        drawn = {**place, "generator": random.generator(generator)}
        self.norm_first = norm_first
        shape: dict[str, Any] = {"window": window, "pattern": pattern, "dropout": attention_dropout, "bias": True}
        self.self_attn = self_attention(d_model, num_heads, None, linear, **shape, **drawn)
        self.ffn = FeedForward(d_model, d_ff, activation, activation_dropout, **drawn)
        self.ln1, self.ln2 = (LayerNorm(d_model, norm_eps, **place) for _ in range(2))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, *, attn_mask: TensorLike | None = None, is_causal: bool = False) -> Tensor:
        """The layer applied to ``x`` (..., T, d_model); masks as in MultiHeadAttention."""
        x = self._add(x, self.ln1, lambda y: self.self_attn(y, attn_mask=attn_mask, is_causal=is_causal))
        return self._add(x, self.ln2, self.ffn)

    def _add(self, x: Tensor, norm: Callable[[Tensor], Tensor], branch: Callable[[Tensor], Tensor]) -> Tensor:
        """x with a branch added, normalized before or after."""
        if self.norm_first:
            return x + self.dropout(branch(norm(x)))
        return norm(x + self.dropout(branch(x)))

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"


class DecoderLayer(EncoderLayer):
    """Causal self-attention, attention to the output of an encoder, and a feed-forward layer.

    Each is a branch as in EncoderLayer, whose arguments these are; the norms are ln1, ln2 and ln3, in that order.

    >>> import minigrad as mg
    >>> DecoderLayer(16, num_heads=2, d_ff=32)(mg.ones((2, 5, 16)), mg.ones((2, 7, 16))).shape
    (2, 5, 16)
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        *,
        norm_first: bool = False,
        norm_eps: float = 1e-5,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        window: int | None = None,
        pattern: BlockPattern | None = None,
        linear: Mapping[str, Any] | None = None,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        drawn = {**place, "generator": random.generator(generator)}
        inner: dict[str, Any] = {"attention_dropout": attention_dropout, "activation_dropout": activation_dropout}
        inner |= {"window": window, "pattern": pattern, "linear": linear}
        super().__init__(
            d_model, num_heads, d_ff, dropout, activation, norm_first=norm_first, norm_eps=norm_eps, **inner, **drawn
        )
        self.cross_attn = MultiHeadAttention(d_model, num_heads, bias=True, dropout=attention_dropout, **drawn)
        self.ln3 = LayerNorm(d_model, norm_eps, **place)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        *,
        attn_mask: TensorLike | None = None,
        memory_mask: TensorLike | None = None,
        is_causal: bool = True,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The layer applied to ``x`` (..., T, d_model), which also attends to ``memory`` (..., S, d_model).

        attn_mask (..., heads, T, T) and memory_mask (..., heads, T, S) as in MultiHeadAttention.
        """
        x = self._add(x, self.ln1, lambda y: self.self_attn(y, attn_mask=attn_mask, is_causal=is_causal, cache=cache))
        x = self._add(x, self.ln2, lambda y: self.cross_attn(y, memory, attn_mask=memory_mask, cache=cache))
        return self._add(x, self.ln3, self.ffn)


class Transformer(Module):
    """The encoder-decoder: source ids (batch, S) and target ids (batch, T) to the next target token's logits.

    ``embeddings · √d_model + sinusoids`` into num_layers encoder layers; the decoder's layers see the target up to each
    position and all of the encoded source; a linear head gives logits (batch, T, tgt_vocab_size).

    - norm_first: pre-norm; final_norm: a LayerNorm after the last layer of encoder and decoder. By default it is there
      with pre-norm, which needs it, but not with post-norm, as in the original; torch always has it
    - pad_id: this token isn't attended to, and as a target it counts for nothing in ``loss``
    - share_embeddings: one matrix for source and target; tie_embeddings: the head uses the target's matrix (the
      original does both)
    - scale_embeddings: embeddings are multiplied by √d_model, and start with σ = 1/√d_model
    - head_bias: the head has a bias, ``lm_head.bias``
    - dropout: of embeddings and branches; activation, attention_dropout, activation_dropout: those of EncoderLayer
    - max_len: the longest source and target; num_decoder_layers: num_layers if not given
    - attention, window, pattern, linear: the kinds of self-attention as in TransformerLM, in encoder and decoder; the
      decoder sees the source in full. Linear attention with a decay is causal, and so not for an encoder
    - dtype, device, generator: of the parameters (float32, the CPU) and of the random numbers that they start from

    Keys: ``src_embeddings.weight tgt_embeddings.weight {encoder,decoder}.N.{self_attn,cross_attn}.{q,k,v,output}_proj
    {encoder,decoder}.N.ffn.{w1,w2} {encoder,decoder}.N.ln{1,2,3} {encoder,decoder}_norm lm_head.weight``.

    Vaswani et al., "Attention is all you need" (2017).

    >>> model = Transformer(11, 13, d_model=16, num_heads=2, num_layers=1, d_ff=32)
    >>> model([[1, 2, 3, 4]], [[1, 2]]).shape
    (1, 2, 13)
    """

    def __init__(
        self,
        src_vocab_size: int,
        tgt_vocab_size: int,
        d_model: int = 512,
        num_heads: int = 8,
        num_layers: int = 6,
        d_ff: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        *,
        norm_first: bool = False,
        final_norm: bool | None = None,
        pad_id: int | None = None,
        max_len: int = 5000,
        share_embeddings: bool = False,
        tie_embeddings: bool = False,
        scale_embeddings: bool = True,
        head_bias: bool = False,
        num_decoder_layers: int | None = None,
        attention: str | Sequence[str] | None = None,
        window: int | Sequence[int | None] | None = None,
        pattern: BlockPattern | Sequence[BlockPattern | None] | None = None,
        linear: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        norm_eps: float = 1e-5,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__()
        num_decoder_layers = num_layers if num_decoder_layers is None else num_decoder_layers
        check_sizes(num_layers=num_layers, num_decoder_layers=num_decoder_layers)
        if share_embeddings and src_vocab_size != tgt_vocab_size:
            got = f"src_vocab_size={src_vocab_size}, tgt_vocab_size={tgt_vocab_size}"
            raise ArgumentError("one vocabulary for share_embeddings", got, "give both the same size, or share nothing")
        self.vocab_size, self.context_length, self.pad_id = tgt_vocab_size, max_len, pad_id
        self.embedding_scale = math.sqrt(d_model) if scale_embeddings else 1.0
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        drawn = {**place, "generator": random.generator(generator)}
        std = 1 / math.sqrt(d_model) if scale_embeddings or tie_embeddings else 1.0
        self.src_embeddings = Embedding(src_vocab_size, d_model, std=std, **drawn)
        self.tgt_embeddings = Embedding(tgt_vocab_size, d_model, std=std, **drawn)
        self.positions = SinusoidalPositionalEncoding(d_model, max_len, dropout)
        options: dict[str, Any] = {
            "norm_first": norm_first,
            "norm_eps": norm_eps,
            "attention_dropout": attention_dropout,
            "activation_dropout": activation_dropout,
            **drawn,
        }
        sizes: Any = d_model, num_heads, d_ff, dropout, activation
        coders, decoders = (
            shapes_of(count, attention, window=window, pattern=pattern, linear=linear)
            for count in (num_layers, num_decoder_layers)
        )
        self.encoder = ModuleList(EncoderLayer(*sizes, **(shape | options)) for shape in coders)
        self.decoder = ModuleList(DecoderLayer(*sizes, **(shape | options)) for shape in decoders)
        final = norm_first if final_norm is None else final_norm
        self.encoder_norm, self.decoder_norm = (
            LayerNorm(d_model, norm_eps, **place) if final else None for _ in range(2)
        )
        self.lm_head = Linear(d_model, tgt_vocab_size, head_bias, **drawn)
        if share_embeddings:
            self.tgt_embeddings.weight = self.src_embeddings.weight
        if tie_embeddings:
            self.lm_head.weight = self.tgt_embeddings.weight

    # ---- the two halves ----

    def encode(self, source: TensorLike, source_mask: TensorLike | None = None) -> Tensor:
        """The memory (batch, S, d_model) of ``source`` (batch, S), for ``decode``.

        source_mask broadcasts to (batch, heads, S, S); by default all tokens but pad_id are seen.
        """
        source = self._ids(source, "source")
        x = self._embedded(source, self.src_embeddings)
        mask = self._mask(source_mask, self._padding(source))
        for layer in self.encoder:
            x = layer(x, attn_mask=mask)
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def decode(
        self,
        target: TensorLike,
        memory: Tensor,
        memory_mask: TensorLike | None = None,
        target_mask: TensorLike | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The input of the head: (batch, T, d_model) for ``target`` (batch, T), given the memory of its source.

        memory_mask broadcasts to (batch, heads, T, S), target_mask to (batch, heads, T, T); position i sees none after
        it anyway. With a cache, target goes on from the tokens that it holds, and no graph is recorded.
        """
        target = self._ids(target, "target")
        count = target.shape[-1]
        start = 0 if cache is None else cache.length
        places, padding = (None, None) if cache is None else cache.places(count, self.tgt_embeddings.weight.device)
        places = range(start, start + count) if places is None else places
        masks = {"attn_mask": self._mask(target_mask, padding), "memory_mask": self._mask(memory_mask)}
        with unrecorded(cache):
            x = self._embedded(target, self.tgt_embeddings, places)
            for layer in self.decoder:
                x = layer(x, memory, **masks, cache=cache)
            if cache is not None:
                cache.advance(count)
            return x if self.decoder_norm is None else self.decoder_norm(x)

    def _ids(self, ids: TensorLike, name: str) -> NDArray:
        ids = as_ids(ids, self.tgt_embeddings.weight.device)
        if ids.ndim == 0:
            raise ShapeError(f"{name} ids (batch, length)", "a single number", "a sequence of one token is [[token]]")
        return ids

    def _embedded(self, ids: NDArray, table: Embedding, positions: Any = None) -> Tensor:
        return self.positions(table(ids) * self.embedding_scale, positions)

    def _mask(self, mask: Any, otherwise: Any = None) -> Any:
        """A mask that was given, on the device of the model, or another."""
        return otherwise if mask is None else asarray(mask, device=self.tgt_embeddings.weight.device)

    def _padding(self, ids: Any) -> Any:
        pad_id = self.pad_id
        if pad_id is None:
            return None
        return made_on(self.tgt_embeddings.weight.device, lambda: padding_mask(ids, pad_id), ids)

    # ---- both together ----

    def hidden(
        self,
        source: TensorLike,
        target: TensorLike,
        source_mask: TensorLike | None = None,
        target_mask: TensorLike | None = None,
    ) -> Tensor:
        """The input of the head: (batch, T, d_model). source_mask, of keys alone, hides them from the target, too."""
        source = self._ids(source, "source")
        mask = self._mask(source_mask, self._padding(source))
        if mask is not None and (mask.ndim < 2 or mask.shape[-2] != 1):
            hint = "nn.padding_mask(source, pad_id) makes one; encode and decode take others"
            raise ShapeError("a source_mask (batch, 1, 1, S), of keys alone", f"shape {mask.shape}", hint)
        return self.decode(target, self.encode(source, mask), mask, target_mask)

    def forward(
        self,
        source: TensorLike,
        target: TensorLike,
        source_mask: TensorLike | None = None,
        target_mask: TensorLike | None = None,
    ) -> Tensor:
        """Logits (batch, T, tgt_vocab_size) of the token that follows each target token.

        source_mask (batch, 1, 1, S) says which source tokens are seen, by default all but pad_id; target_mask
        broadcasts to (batch, heads, T, T). ``encode`` and ``decode`` take masks of more kinds.
        """
        return self.lm_head(self.hidden(source, target, source_mask, target_mask))

    def loss(
        self,
        source: TensorLike,
        target: TensorLike,
        labels: TensorLike,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:
        """Cross-entropy in nats of ``labels``, the tokens that follow those of ``target``, both (batch, T).

        The mean over labels other than ignore_index (pad_id if not given), label smoothing included: with smoothing ε
        each counts ``(1 - ε)`` times its own loss and ε times the mean loss of all classes.
        """
        if ignore_index is None:
            ignore_index = -100 if self.pad_id is None else self.pad_id
        labels = as_ids(labels, self.tgt_embeddings.weight.device)
        return head_loss(self.lm_head, self.hidden(source, target), labels, ignore_index, label_smoothing, reduction)

    # ---- decoding ----

    def start(self, source: Any, max_length: int | None = None) -> KVCache:
        """An empty cache for targets of ``source`` (batch, S): encodes the source, once, and records no graph."""
        cache = KVCache(self, max_length)
        source = self._ids(source, "source")
        with unrecorded(cache):
            cache.memory_mask = self._padding(source)
            cache.memory = self.encode(source, cache.memory_mask).data
        return cache

    def next_logits(self, target: TensorLike, cache: KVCache) -> Tensor:
        """Logits (batch, vocab) of the token after the last of ``target``, which goes on from what the cache holds."""
        if cache.memory is None:
            raise ArgumentError("a cache that knows the source", repr(cache), "make it by model.start(source)")
        hidden = self.decode(target, cache.memory, cache.memory_mask, cache=cache)
        with unrecorded(cache):
            return self.lm_head(hidden[..., -1, :])
