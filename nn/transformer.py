"""TransformerLM: a LLaMA-style language model, and the block that it stacks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

from minigrad import checkpoint, no_grad, random
from minigrad.backend import DType
from minigrad.errors import ArgumentError, ShapeError
from minigrad.kernels.attention_patterns import BlockPattern
from minigrad.tensor import Tensor, TensorLike
from . import decoding
from . import functional as F
from .activation import Dropout
from .attention import MultiHeadAttention, check_sequences, head_sizes
from .cache import KVCache
from .checks import as_ids, check_sizes, warn
from .containers import ModuleList
from .feedforward import SwiGLU
from .kinds import feed_forward, norm_of, self_attention, shapes_of, turned_size, window_of
from .linear import Embedding, Linear, head_loss
from .linear_attention import LinearAttention
from .module import Module, is_plain
from .normalization import RMSNorm
from .positional import RotaryEmbedding


class TransformerBlock(Module):
    """``x + attn(ln1(x))``, then ``x + ffn(ln2(x))``: a pre-norm block, by default of causal attention and SwiGLU.

    dropout acts on attention weights and on both branches; window, pattern and qk_norm are those of MultiHeadAttention,
    attention_bias is its bias; recompute, ffn and norm are those of TransformerLM. linear are options of
    LinearAttention, which then takes its place. Xiong et al., "On Layer Normalization in the Transformer Architecture"
    (2020); Touvron et al., "LLaMA" (2023).

    >>> import minigrad as mg
    >>> TransformerBlock(16, num_heads=2)(mg.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        num_kv_heads: int | None = None,
        rope: Module | None = None,
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
        head_dim: int | None = None,
        window: int | None = None,
        pattern: BlockPattern | None = None,
        linear: Mapping[str, Any] | None = None,
        attention_bias: bool | str = False,
        qk_norm: bool = False,
        ffn: str = "swiglu",
        norm: str = "rms",
        recompute: str = "none",
        recompute_ffn: bool | None = None,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__()
        self.recompute = recompute_of(recompute, recompute_ffn)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        drawn = {**place, "generator": random.generator(generator)}
        shape: dict[str, Any] = {"window": window, "pattern": pattern, "rope": rope, "head_dim": head_dim}
        shape |= {"bias": attention_bias, "qk_norm": qk_norm, "norm_eps": norm_eps}
        self.ln1 = norm_of(norm)(d_model, norm_eps, **place)
        self.attn = self_attention(d_model, num_heads, num_kv_heads, linear, dropout=dropout, **shape, **drawn)
        self.ln2 = norm_of(norm)(d_model, norm_eps, **place)
        self.ffn: Any = feed_forward(ffn, d_model, d_ff, RECOMPUTED[self.recompute], **drawn)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        *,
        attn_mask: TensorLike | None = None,
        is_causal: bool = True,
        positions: TensorLike | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The block applied to ``x`` (..., T, d_model); the other arguments are those of MultiHeadAttention."""
        if cache is not None and self._is_quick(x, attn_mask, positions, cache):
            return decoding.position([self], x, attn_mask, positions, cache)
        check_sequences(x)
        options: dict[str, Any] = {
            "attn_mask": attn_mask,
            "is_causal": is_causal,
            "positions": positions,
            "cache": cache,
        }
        run = partial(self._run, options=options)
        return checkpoint(run, x) if self.recompute == "block" else run(x)

    def _run(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        x = x + self.dropout(self._attention(x, options))
        return x + self.dropout(self._feed_forward(x))

    def _attention(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        """``attn(ln1(x))``; where nothing watches, its product normalises the rows that it reads, and less is kept."""
        norm, attn = self.ln1, self.attn
        if not (layers := self._plain_projections(x)):
            return attn(norm(x), **options)
        q, k, v = (layer.weight for layer in layers)
        turns = attn.turns(x, options["positions"], options["cache"])
        if turns is not None:
            return attn.attend(*F.qkv_projection(x, q, k, v, norm.weight, norm.eps, *turns), turned=True, **options)
        products = F.qkv_projection(x, q, k, v, norm.weight, norm.eps)
        pairs = zip(products, (layer.bias for layer in layers), strict=True)
        return attn.attend(*(y if bias is None else y + bias.astype(y.dtype) for y, bias in pairs), **options)

    def _feed_forward(self, x: Tensor) -> Tensor:
        """``ffn(ln2(x))``, likewise."""
        norm, ffn = self.ln2, self.ffn
        out: Tensor
        if not (layers := self._plain_units(x)):
            out = ffn(norm(x))
        else:
            gate, up, down = (layer.weight for layer in layers)
            out = F.swiglu_ffn(x, gate, up, down, norm.weight, norm.eps, ffn.recompute)
        return out

    def _is_quick(self, x: Tensor, mask: Any, positions: Any, cache: KVCache) -> bool:
        """Whether ``decoding.position`` may do the block's work, since nothing watches what is in it."""
        plain = self._plain_projections(x) and self._plain_units(x)
        return bool(plain) and decoding.fits(self, x, mask, positions, cache)

    def _plain_projections(self, x: Tensor) -> list[Linear]:
        """The projections of x, empty if anything watches or changes one of them, or the norm before."""
        attn = self.attn
        plain = is_plain(attn, MultiHeadAttention) or is_plain(attn, LinearAttention)
        return _all_plain(self.ln1, [attn.q_proj, attn.k_proj, attn.v_proj], x) if plain else []

    def _plain_units(self, x: Tensor) -> list[Linear]:
        """The matrices of the feed-forward layer, likewise."""
        ffn = self.ffn
        layers = _all_plain(self.ln2, [ffn.w1, ffn.w3, ffn.w2], x) if is_plain(ffn, SwiGLU) else []
        return layers if all(layer.bias is None for layer in layers) else []


def _all_plain(norm: Any, layers: list[Linear], x: Tensor) -> list[Linear]:
    """The layers if all are such as ``__init__`` makes them, without hooks, and the norm too; else none."""
    plain = is_plain(norm, RMSNorm) and norm.normalized_shape == getattr(norm.weight, "shape", ()) == x.shape[-1:]
    return layers if plain and all(is_plain(layer, Linear) for layer in layers) else []


class TransformerLM(Module):
    """A decoder-only language model: token ids (batch, sequence) to the next token's logits (batch, sequence, vocab).

    Token embeddings, num_layers pre-norm blocks with rotary attention and SwiGLU, RMSNorm, a linear head; no biases
    unless asked for. That is a LLaMA; attention_bias, qk_norm, ffn, norm and positions make it another
    family of docs/models.md.

    - d_ff: width of the feed-forward layers, by default 8/3 d_model rounded up to a multiple of 64
    - num_kv_heads: heads of keys and values, fewer than num_heads for grouped-query attention
    - tie_embeddings: the head uses the embeddings' matrix, which then starts with σ = 1/√d_model
    - scale_embeddings: embeddings are multiplied by √d_model, and start with σ = 1/√d_model
    - head_bias: the head has a bias, ``lm_head.bias``
    - dropout: of the embeddings, attention weights and both branches of each block
    - rope_layout, rope_scaling: those of RotaryEmbedding; head_dim: d_model / num_heads if not given
    - attention_bias: of all four projections of attention, or "qkv", of those into heads; qk_norm: an RMSNorm of each
      head's queries and keys
    - ffn: "swiglu"; "geglu", :class:`GEGLU`; or "gelu", two matrices with biases and GELU (tanh) between, where d_ff is
      4 d_model by default
    - norm: "rms" or "layer"; positions: "rotary" or "learned", embeddings that are added to those of the tokens
    - attention: the kind of each layer, "full", "window", "blocks" or "linear", or a list of kinds; by default what
      window, pattern and linear say
    - window: in layers of that kind token i sees tokens j with ``i - window < j <= i``; or a list, None for the others.
      Where all layers have one, the model reads on past context_length, see :class:`KVCache`
    - pattern: the ``nn.BlockPattern`` of layers of the kind "blocks", or a list, as for window
    - linear: options of :class:`LinearAttention` in layers of the kind "linear", as ``{"feature_map": "taylor",
      "feature_dim": 16}``, or a list. Such layers have a state instead of keys, and read on as those with a window do
    - recompute: what the backward pass computes again instead of keeping it, with the same bits: "none"; "half", one of
      the two wide products of each feed-forward layer (on a GPU both); "ffn", both; "block", all of a block but its
      input. Their time and memory are in docs/performance.md
    - recompute_ffn: deprecated; True is recompute="ffn"
    - dtype, device, generator: of the parameters (float32, the CPU) and of the random numbers that they start from

    Keys of a LLaMA: ``token_embeddings.weight layers.N.ln1.weight layers.N.attn.{q,k,v,output}_proj.weight
    layers.N.ln2.weight layers.N.ffn.{w1,w2,w3}.weight ln_final.weight lm_head.weight``.

    >>> model = TransformerLM(65, context_length=16, d_model=32, num_layers=2, num_heads=4)
    >>> model([[1, 2, 3]]).shape
    (1, 3, 65)
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int | None = None,
        rope_theta: float = 10000.0,
        *,
        num_kv_heads: int | None = None,
        tie_embeddings: bool = False,
        scale_embeddings: bool = False,
        head_bias: bool = False,
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
        rope_layout: str = "interleaved",
        rope_scaling: Mapping[str, Any] | None = None,
        head_dim: int | None = None,
        attention: str | Sequence[str] | None = None,
        window: int | Sequence[int | None] | None = None,
        pattern: BlockPattern | Sequence[BlockPattern | None] | None = None,
        linear: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        attention_bias: bool | str = False,
        qk_norm: bool = False,
        ffn: str = "swiglu",
        norm: str = "rms",
        positions: str = "rotary",
        recompute: str = "none",
        recompute_ffn: bool | None = None,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, context_length=context_length, d_model=d_model, num_layers=num_layers)
        self.vocab_size, self.context_length = vocab_size, context_length
        traits: dict[str, Any] = {"attention_bias": attention_bias, "qk_norm": qk_norm, "ffn": ffn, "norm": norm}
        self.traits = {**traits, "positions": positions}
        self.embedding_scale = math.sqrt(d_model) if scale_embeddings else None
        size = head_sizes(d_model, num_heads, num_kv_heads, head_dim)[2]
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        drawn = {**place, "generator": random.generator(generator)}
        std = 1 / math.sqrt(d_model) if tie_embeddings or scale_embeddings else 1.0
        self.token_embeddings = Embedding(vocab_size, d_model, std=std, **drawn)
        if positions not in ("rotary", "learned"):
            raise ArgumentError("positions of 'rotary' or 'learned'", repr(positions), "'rotary' is usual")
        learned = positions == "learned"
        self.position_embeddings = Embedding(context_length, d_model, std=std, **drawn) if learned else None
        self.dropout = Dropout(dropout)
        shapes = shapes_of(num_layers, attention, window=window, pattern=pattern, linear=linear)
        endless = all(shape["window"] or shape["linear"] is not None for shape in shapes)
        turn: dict[str, Any] = {"theta": rope_theta, "layout": rope_layout, "scaling": rope_scaling, "endless": endless}
        turned = [None if learned else turned_size(size, shape["linear"]) for shape in shapes]
        ropes = {d: RotaryEmbedding(d, context_length, **turn) if d else None for d in dict.fromkeys(turned)}
        options: dict[str, Any] = {"num_kv_heads": num_kv_heads, "dropout": dropout, "norm_eps": norm_eps}
        options |= {"recompute": recompute_of(recompute, recompute_ffn), **traits, **drawn}
        self.layers = ModuleList(
            TransformerBlock(d_model, num_heads, d_ff, rope=ropes[d], head_dim=size, **shape, **options)
            for d, shape in zip(turned, shapes, strict=True)
        )
        self.ln_final = norm_of(norm)(d_model, norm_eps, **place)
        self.lm_head = Linear(d_model, vocab_size, head_bias, **drawn)
        if tie_embeddings:
            self.lm_head.weight = self.token_embeddings.weight

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer; None where it has none, 0 where a state stands for all keys."""
        return [window_of(getattr(layer, "attn", None)) for layer in self.layers]

    @property
    def endless(self) -> bool:
        """Whether it reads on past context_length: all layers have a window or a state, and no position is learned."""
        return None not in self.windows and self.position_embeddings is None

    def hidden(self, tokens: TensorLike, cache: KVCache | None = None) -> Tensor:
        """The input of the head: the normalized output (batch, sequence, d_model) of the last block.

        With a cache, tokens go on from those that it holds, and no graph is recorded.
        """
        device = self.token_embeddings.weight.device
        tokens = as_ids(tokens, device)
        if tokens.ndim == 0:
            raise ShapeError("tokens (batch, sequence)", "a single number", "a sequence of one token is [[token]]")
        before = 0 if cache is None else cache.length
        endless = self.endless or (cache is not None and cache.sinks)
        if before + tokens.shape[-1] > self.context_length and not endless:
            got = f"{tokens.shape[-1]}" + (f" after {before} in the cache" if before else "")
            hint = "take the last ones: tokens[:, -context_length:]"
            raise ShapeError(f"at most context_length = {self.context_length} tokens", got, hint)
        positions, mask = (None, None) if cache is None else cache.places(tokens.shape[-1], device)
        with unrecorded(cache):
            x = self.token_embeddings(tokens)
            if self.embedding_scale is not None:
                x = x * self.embedding_scale
            if self.position_embeddings is not None:
                if cache is not None and cache.sinks:
                    raise ArgumentError("no sinks with learned positions", f"{cache.sinks}", "rotary ones can be moved")
                places = range(before, before + tokens.shape[-1]) if positions is None else positions
                x = x + self.position_embeddings(places)
            x = self.dropout(x)
            x = self._through(x, mask, positions, cache)
            if cache is not None:
                cache.advance(tokens.shape[-1])
                return decoding.normalized(self.ln_final, x)
            normed: Tensor = self.ln_final(x)
            return normed

    def _through(self, x: Tensor, mask: Any, positions: Any, cache: KVCache | None) -> Tensor:
        """``x`` after all blocks; with a cache those that nothing watches may go together, see ``decoding``."""

        def is_quick(layer: Any) -> bool:
            plain = cache is not None and is_plain(layer, TransformerBlock)
            return plain and layer._is_quick(x, mask, positions, cache)

        for quick, layers in groupby(self.layers, is_quick):
            if quick:
                x = decoding.position([*layers], x, mask, positions, cache)
            else:
                for layer in layers:
                    x = layer(x, attn_mask=mask, positions=positions, cache=cache)
        return x

    def forward(self, tokens: TensorLike, cache: KVCache | None = None) -> Tensor:
        """Logits (batch, sequence, vocab) of the token that follows each token, given those before it."""
        with unrecorded(cache):
            return self.lm_head(self.hidden(tokens, cache))

    def next_logits(self, tokens: TensorLike, cache: KVCache | None = None) -> Tensor:
        """Logits (batch, vocab) of the token that follows the last one: the others aren't computed."""
        with unrecorded(cache):
            return decoding.logits(self.lm_head, self.hidden(tokens, cache)[..., -1, :])

    def loss(
        self,
        tokens: TensorLike,
        targets: TensorLike,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:
        """Cross-entropy in nats of ``targets``, the tokens that follow ``tokens``, both (batch, sequence).

        The mean over targets other than ignore_index. The same as ``F.cross_entropy(model(tokens), targets, …)``, but
        the logits never exist all at once, unless the head has hooks or was replaced.
        """
        targets = as_ids(targets, self.token_embeddings.weight.device)
        return head_loss(self.lm_head, self.hidden(tokens), targets, ignore_index, label_smoothing, reduction)


RECOMPUTED: dict[str, bool | str] = {"none": False, "half": "half", "ffn": True, "block": False}  # by SwiGLU


def recompute_of(recompute: str, recompute_ffn: bool | None) -> str:
    """What is computed again, from the option and the one that it replaced."""
    if recompute_ffn is not None:
        warn("recompute_ffn is deprecated: recompute='ffn' is what recompute_ffn=True was", DeprecationWarning)
    if recompute_ffn and recompute != "ffn":
        if recompute != "none":
            got = f"recompute={recompute!r} and recompute_ffn=True"
            raise ArgumentError("recompute alone", got, "recompute_ffn=True was recompute='ffn'")
        return "ffn"
    if not isinstance(recompute, str) or recompute not in RECOMPUTED:
        words = ", ".join(map(repr, RECOMPUTED))
        raise ArgumentError(f"recompute of {words}", repr(recompute), "'none' keeps all, and is fastest")
    return recompute


def unrecorded(cache: KVCache | None) -> AbstractContextManager[None]:
    """``no_grad`` where there is a cache, through which no gradient could flow."""
    return nullcontext() if cache is None else no_grad()
