"""The language model as one formula on arrays, for engines that differentiate NumPy's functions: autograd, MyGrad, JAX.

Activations are (batch · sequence, width) all along, so that a projection is one large matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness.configs import NORM_EPS, Config, rope_tables


@dataclass(frozen=True)
class Library:
    """A library's functions: ``xp`` under NumPy's names, and its best of the three that NumPy lacks."""

    xp: Any
    softmax: Callable[[Any], Any]  # over the last axis
    silu: Callable[[Any], Any]
    cross_entropy: Callable[[Any, Any], Any]  # mean over rows of logits (n, V) and targets (n,)


class PlainTransformer:
    """The loss as a function of the weights, a dict under the names of ``nn.TransformerLM``'s state dict."""

    def __init__(self, library: Library, config: Config) -> None:
        self.library, self.xp, self.config = library, library.xp, config
        self.cos, self.sin = rope_tables(config)
        length = config.context_length
        self.mask = np.triu(np.full((length, length), -np.inf, np.float32), 1)

    def loss(self, weights: dict[str, Any], tokens: Any, targets: Any) -> Any:
        """Mean cross-entropy of targets given tokens, both (batch, sequence)."""
        x = weights["token_embeddings.weight"][tokens.reshape(-1)]
        for i in range(self.config.num_layers):
            layer = {name: weights[f"layers.{i}.{name}.weight"] for name in LAYER}
            x = x + self.attention(self.rms_norm(x, layer["ln1"]), layer)
            x = x + self.feed_forward(self.rms_norm(x, layer["ln2"]), layer)
        logits = self.rms_norm(x, weights["ln_final.weight"]) @ weights["lm_head.weight"].T
        return self.library.cross_entropy(logits, targets.reshape(-1))

    def rms_norm(self, x: Any, gain: Any) -> Any:
        """Rows divided by their root mean square, times a gain."""
        return x / self.xp.sqrt(self.xp.mean(x * x, axis=-1, keepdims=True) + NORM_EPS) * gain

    def attention(self, x: Any, layer: dict[str, Any]) -> Any:
        """Causal self-attention with rotary positions."""
        c = self.config
        q, k, v = (self.heads(x @ layer[f"attn.{name}_proj"].T) for name in "qkv")
        scores = self.rotate(q) @ self.xp.swapaxes(self.rotate(k), -1, -2) * (1 / math.sqrt(c.head_dim)) + self.mask
        out = self.library.softmax(scores) @ v
        out = self.xp.reshape(self.xp.swapaxes(out, 1, 2), (c.tokens, c.d_model))
        return out @ layer["attn.output_proj"].T

    def heads(self, x: Any) -> Any:
        """(batch · sequence, width) as (batch, heads, sequence, head_dim)."""
        c = self.config
        return self.xp.swapaxes(self.xp.reshape(x, (c.batch_size, c.context_length, c.num_heads, c.head_dim)), 1, 2)

    def rotate(self, x: Any) -> Any:
        """Rotary positions: each adjacent pair of features turned by its angle."""
        even, odd = x[..., 0::2], x[..., 1::2]
        pairs = [even * self.cos - odd * self.sin, even * self.sin + odd * self.cos]
        return self.xp.reshape(self.xp.stack(pairs, axis=-1), x.shape)

    def feed_forward(self, x: Any, layer: dict[str, Any]) -> Any:
        """SwiGLU."""
        return (self.library.silu(x @ layer["ffn.w1"].T) * (x @ layer["ffn.w3"].T)) @ layer["ffn.w2"].T


LAYER = (
    "ln1",
    "attn.q_proj",
    "attn.k_proj",
    "attn.v_proj",
    "attn.output_proj",
    "ln2",
    "ffn.w1",
    "ffn.w2",
    "ffn.w3",
)
