"""Adapters: a small network after a layer of a trained model, which learns what to add to the layer's result."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from minigrad import random
from minigrad.errors import ArgumentError
from minigrad.tensor import Tensor, TensorLike
from .. import functional as F
from ..checks import check_sizes
from ..feedforward import ACTIVATIONS
from ..linear import Linear
from ..module import Module
from ..parameter import constant, truncated_normal
from .adapted import AdaptedLinear, M, add, check_name, matching, place_of

ENDS = ("*attn.output_proj", "*ffn.w2")  # the layers that attention and a feed-forward layer end with, by our names


class Bottleneck(Module):
    """``y + U f(D y + d) + u``, a network of ``size`` units after a layer whose result is ``y``; f is ``activation``.

    down (size, out_features) starts as normals with σ² = 1/out_features cut at 3σ; down_bias (size,), up (out_features,
    size) and up_bias (out_features,) as 0.
    """

    def __init__(self, layer: Linear, size: int, activation: str, generator: Any) -> None:
        super().__init__()
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise ArgumentError(f"an activation of {sorted(ACTIVATIONS)}", repr(activation), "'gelu' is usual")
        self.size, self.activation = size, activation
        width, place = layer.out_features, place_of(layer)
        self.down = truncated_normal((size, width), 1 / math.sqrt(width), generator=generator, **place)
        self.down_bias = constant(size, 0.0, **place)
        self.up = constant((width, size), 0.0, **place)
        self.up_bias = constant(width, 0.0, **place)

    def forward(self, x: TensorLike, y: Tensor) -> Tensor:
        """The layer's result ``y``, changed; its input ``x`` isn't asked."""
        units = ACTIVATIONS[self.activation](F.linear(y, self.down, self.down_bias))
        out: Tensor = y + F.linear(units, self.up, self.up_bias)
        return out

    def extra_repr(self) -> str:
        return f"size={self.size}, activation={self.activation!r}"


def adapters(
    model: M,
    size: int = 16,
    targets: str | Iterable[str] = ENDS,
    *,
    name: str = "default",
    activation: str = "gelu",
    generator: Any = None,
) -> M:
    """Adapt ``model`` in place by ``y + U f(D y + d) + u`` after Linear layers; U, D, u and d alone are trained.

    U and u start as zeros, so the model computes what it did. All its other parameters are frozen. The model is
    returned. D has ``size`` rows.

    - targets: patterns of names as for ``nn.lora``; by default the layers with which attention and the feed-forward
      layers end, before their results are added to the residual stream
    - name: of the adapter, as for ``nn.lora``: several of any kind may be in a model, and one is active
    - activation: f, "relu", "gelu", "gelu_tanh", "silu" or "sigmoid"
    - generator: for D

    Unlike LoRA it can't be merged into the weights. An ArgumentError tells of a pattern that matches no layer, and of a
    name that is taken. Houlsby et al., "Parameter-Efficient Transfer Learning for NLP" (2019), who train the norms'
    weights too.

    >>> import nn
    >>> model = nn.adapters(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 9)), size=4, targets="0")
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad][:2]
    ['0.adapters.default.down', '0.adapters.default.down_bias']
    """
    check_sizes(size=size)
    layers = matching(model, targets)
    check_name(model, name)
    generator = random.generator(generator)
    made = {path: Bottleneck(layer, int(size), activation, generator) for path, layer in layers.items()}
    return add(model, layers, AdaptedLinear, made, name)
