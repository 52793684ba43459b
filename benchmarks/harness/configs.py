"""The work: sizes of a LLaMA-style language model, its first weights, the tokens, and what a step costs in FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

ROPE_THETA = 10000.0
NORM_EPS = 1e-5
MAX_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class Config:
    """A model and the batch that it is trained on."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    context_length: int
    batch_size: int

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.d_model // self.num_heads

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch_size * self.context_length

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products of a step, forward and backward.

        A product with a weight of n entries takes 2n a token, attention 4 d a token and key that it sees, (T + 1)/2 of
        them on average under the causal mask; the backward pass takes twice the forward pass. Nothing else is counted,
        nor what an engine computes twice.
        """
        block = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff
        weights = 2 * (self.num_layers * block + self.d_model * self.vocab_size)
        attention = 4 * self.d_model * self.num_layers * (self.context_length + 1) / 2
        return 3 * self.tokens * (weights + attention)


CONFIGS = {
    "nano": Config(65, 128, 4, 4, 344, 64, 12),
    "small": Config(256, 256, 6, 8, 688, 256, 16),
    "cs336": Config(10000, 512, 4, 16, 1344, 256, 4),
    "long": Config(256, 256, 4, 8, 688, 2048, 1),
}


def initial_weights(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """The weights that every engine starts from, float32, under the names of ``nn.TransformerLM``'s state dict."""
    draw = np.random.default_rng(seed).standard_normal
    d = config.d_model

    def matrix(rows: int, columns: int) -> np.ndarray:
        scaled: np.ndarray = draw((rows, columns), np.float32) * np.float32((2 / (rows + columns)) ** 0.5)
        return scaled

    weights = {"token_embeddings.weight": draw((config.vocab_size, d), np.float32)}
    for i in range(config.num_layers):
        weights[f"layers.{i}.ln1.weight"] = np.ones(d, np.float32)
        for name in ("q", "k", "v", "output"):
            weights[f"layers.{i}.attn.{name}_proj.weight"] = matrix(d, d)
        weights[f"layers.{i}.ln2.weight"] = np.ones(d, np.float32)
        weights[f"layers.{i}.ffn.w1.weight"] = matrix(config.d_ff, d)
        weights[f"layers.{i}.ffn.w2.weight"] = matrix(d, config.d_ff)
        weights[f"layers.{i}.ffn.w3.weight"] = matrix(config.d_ff, d)
    weights["ln_final.weight"] = np.ones(d, np.float32)
    weights["lm_head.weight"] = matrix(config.vocab_size, d)
    return weights


def batches(config: Config, seed: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless pairs (tokens, targets), int64 (batch, sequence); targets are the tokens one place on.

    Token k has a probability in proportion to 1/(k + 3), much as the words of a text.
    """
    generator = np.random.default_rng(seed)
    running = np.cumsum(1 / np.arange(3, config.vocab_size + 3))
    while True:
        uniform = generator.random((config.batch_size, config.context_length + 1)) * running[-1]
        ids = np.searchsorted(running, uniform, side="right")
        yield np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def rope_tables(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines (context, head_dim/2), float32, of position times frequency θ^(-2k/d)."""
    frequencies = ROPE_THETA ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.outer(np.arange(config.context_length), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
