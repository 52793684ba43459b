"""The kinds of attention that are compared, and the training that all of them get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import nn
import optim
from minigrad.kernels.linear_attention import feature_map_of

RETENTION = {"feature_map": "identity", "decay": 1 - 2.0**-5}  # that of the first head of Sun et al. (2023)


class Kind(NamedTuple):
    """The attention of a model's layers, in turn, its options, and the sizes of a head that learn recall with it."""

    layers: tuple[str, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    heads: tuple[int, ...] = (16,)

    def model(self, num_layers: int, length: int, **options: Any) -> nn.TransformerLM:
        """A model that is trained on sequences of ``length`` tokens; a window is an eighth of it."""
        kinds = [self.layers[i % len(self.layers)] for i in range(num_layers)]
        window = length // 8 if "window" in kinds else None
        return nn.TransformerLM(attention=kinds, window=window, num_layers=num_layers, **self.options, **options)


TAYLOR_8, TAYLOR_16 = ({"linear": {"feature_map": "taylor", "feature_dim": size}} for size in (8, 16))
KINDS = {
    "full": Kind(("full",), heads=(8, 16, 32)),
    "window": Kind(("window",)),
    "linear": Kind(("linear",), heads=(8, 16, 32)),
    "taylor 8": Kind(("linear",), TAYLOR_8),
    "taylor 16": Kind(("linear",), TAYLOR_16),
    "retention": Kind(("linear",), {"linear": RETENTION}),
    "window + linear": Kind(("window", "linear"), heads=(8, 16, 32)),
    "full + linear": Kind(("full", "linear")),
    "linear + full": Kind(("linear", "full")),
    "window + taylor 16": Kind(("window", "linear"), TAYLOR_16),
}


def train(
    model: nn.TransformerLM, batches: Iterator[tuple[np.ndarray, np.ndarray]], updates: int, rate: float
) -> Iterator[float]:
    """The loss of each update: AdamW, a warm-up of a tenth and a cosine down to a tenth of the rate, clipped at 1."""
    optimizer = optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.1)
    for update in range(1, updates + 1):
        optimizer.param_groups[0]["lr"] = optim.cosine_schedule(update, rate, rate / 10, updates // 10, updates)
        loss = model.loss(*next(batches))
        loss.backward()
        optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.item())


def size(model: nn.TransformerLM, length: int) -> dict[str, int]:
    """The number of parameters, and that of the numbers from which all layers know ``length`` tokens of one text."""
    return {
        "parameters": sum(p.size for p in model.parameters()),
        "state": sum(state(layer.attn, length) for layer in model.layers),
    }


def state(attention: nn.MultiHeadAttention, length: int) -> int:
    """Numbers of a layer that a token after ``length`` ones reads: keys and values, or the sums that stand for them."""
    heads, values = attention.num_kv_heads, attention.head_dim
    if isinstance(attention, nn.LinearAttention):
        divisor = attention.decay is None
        return heads * feature_map_of(attention.feature_map).size(attention.key_dim) * (values + divisor)
    return heads * min(length, attention.window or length) * (attention.key_dim + values)
