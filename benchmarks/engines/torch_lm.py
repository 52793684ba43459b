"""PyTorch, eager or compiled: its own attention, RMSNorm, fused AdamW and clipping, in the fastest form that was found.

Queries, keys and values come from one product. Eager code rotates adjacent pairs as complex numbers, one product
forward and one backward, where real arithmetic needs four and a copy. The compiler fuses real arithmetic and leaves
complex numbers alone, so that it is given the former.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness.configs import ADAMW, MAX_NORM, NORM_EPS, Config, rope_tables
from torch import Tensor, nn


def rotate_complex(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: adjacent pairs of x (batch, T, heads, d) as complex numbers, times their turns (T, d/2, 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(turns)[:, None]).flatten(-2)


def rotate_real(x: Tensor, turns: Tensor) -> Tensor:
    """The same in real arithmetic."""
    (even, odd), (cos, sin) = x.unflatten(-1, (-1, 2)).unbind(-1), turns[:, None].unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Config, rotate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.num_heads, self.rotate = config.num_heads, rotate
        self.qkv_proj = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.output_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in self.qkv_proj(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in (self.rotate(q, turns), self.rotate(k, turns), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(out.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.w2 = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.w3 = nn.Linear(config.d_model, config.d_ff, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, config: Config, rotate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.ln1 = nn.RMSNorm(config.d_model, NORM_EPS)
        self.attn = Attention(config, rotate)
        self.ln2 = nn.RMSNorm(config.d_model, NORM_EPS)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x), turns)
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    """The language model with its loss, which starts from ``weights``."""

    def __init__(self, config: Config, weights: dict[str, np.ndarray], compiled: bool = False) -> None:
        super().__init__()
        rotate = rotate_real if compiled else rotate_complex
        self.token_embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, rotate) for _ in range(config.num_layers))
        self.ln_final = nn.RMSNorm(config.d_model, NORM_EPS)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        turns = torch.from_numpy(np.stack(rope_tables(config), -1))  # (context, head_dim/2, 2)
        self.register_buffer("turns", turns, persistent=False)
        self.load_state_dict(joined(weights))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        logits = self.lm_head(self.ln_final(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def joined(weights: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The weights with those of q, k and v as one matrix, under the names of the model here."""
    held = {name: torch.from_numpy(array) for name, array in weights.items()}
    for name in [name for name in held if name.endswith("attn.q_proj.weight")]:
        parts = [held.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        held[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return held


def training_step(
    config: Config, weights: dict[str, np.ndarray], compiled: bool = False
) -> Callable[[np.ndarray, np.ndarray], float]:
    """A function that trains the model on one batch and returns the loss."""
    model = TransformerLM(config, weights, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    forward = torch.compile(model) if compiled else model

    def step(tokens: np.ndarray, targets: np.ndarray) -> float:
        loss = forward(torch.from_numpy(tokens), torch.from_numpy(targets))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def multiplier(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    """A function that multiplies the two matrices."""
    left, right = torch.from_numpy(a), torch.from_numpy(b)
    return lambda: torch.mm(left, right)
