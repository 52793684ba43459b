"""tinygrad: its Tensor, optimizer and TinyJit, on its CPU device (which compiles with clang)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from harness.configs import ADAMW, MAX_NORM, NORM_EPS, Config, rope_tables
from tinygrad import Context, Tensor, TinyJit
from tinygrad.nn import Embedding
from tinygrad.nn.optim import AdamW


class TransformerLM:
    """The loss as a function of tokens and targets (batch, sequence)."""

    def __init__(self, config: Config, weights: dict[str, np.ndarray]) -> None:
        self.config = config
        self.weights = {name: Tensor(w).realize() for name, w in weights.items()}
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.embedding.weight = self.weights["token_embeddings.weight"]
        self.cos, self.sin = (Tensor(x).realize().is_param_(False) for x in rope_tables(config))

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x times the transposed weight."""
        return x.linear(self.weights[f"{name}.weight"].transpose())

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        """Rows divided by their root mean square, times a gain."""
        return x * (x.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * self.weights[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary positions: each adjacent pair of features turned by its angle."""
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        even, odd = pairs[..., 0], pairs[..., 1]
        return Tensor.stack(even * self.cos - odd * self.sin, even * self.sin + odd * self.cos, dim=-1).reshape(x.shape)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """Causal self-attention."""
        q, k, v = (
            self.linear(x, f"{name}.{kind}_proj").reshape(*x.shape[:2], self.config.num_heads, -1).transpose(1, 2)
            for kind in "qkv"
        )
        out = self.rotate(q).scaled_dot_product_attention(self.rotate(k), v, is_causal=True)
        return self.linear(out.transpose(1, 2).reshape(x.shape), f"{name}.output_proj")

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        """SwiGLU."""
        return self.linear(self.linear(x, f"{name}.w1").silu() * self.linear(x, f"{name}.w3"), f"{name}.w2")

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        x = self.embedding(tokens)
        for i in range(self.config.num_layers):
            x = x + self.attention(self.rms_norm(x, f"layers.{i}.ln1"), f"layers.{i}.attn")
            x = x + self.feed_forward(self.rms_norm(x, f"layers.{i}.ln2"), f"layers.{i}.ffn")
        logits = self.linear(self.rms_norm(x, "ln_final"), "lm_head")
        return logits.sparse_categorical_crossentropy(targets)


def clip(parameters: list[Tensor]) -> None:
    """Scale the gradients to a norm of at most 1."""
    norm = Tensor.stack(*(p.grad.square().sum() for p in parameters)).sum().sqrt()
    scale = (MAX_NORM / (norm + 1e-6)).minimum(1.0)
    for p in parameters:
        p.grad = p.grad * scale


def training_step(config: Config, weights: dict[str, np.ndarray]) -> Callable[[np.ndarray, np.ndarray], float]:
    """A function that trains the model on one batch and returns the loss."""
    model = TransformerLM(config, weights)
    parameters = list(model.weights.values())
    (beta1, beta2), lr, eps, decay = (ADAMW[name] for name in ("betas", "lr", "eps", "weight_decay"))
    optimizer = AdamW(parameters, lr, beta1, beta2, eps, decay)

    @TinyJit
    def update(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(tokens, targets)
        loss.backward()
        clip(parameters)
        return loss.realize(*optimizer.schedule_step())

    def step(tokens: np.ndarray, targets: np.ndarray) -> float:
        with Context(TRAINING=1):
            return update(*(Tensor(ids).is_param_(False).realize() for ids in (tokens, targets))).item()

    return step


def multiplier(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    """A function that multiplies the two matrices."""
    left, right = Tensor(a).realize(), Tensor(b).realize()
    multiply = TinyJit(lambda: (left @ right).realize())
    return lambda: multiply().numpy()
