"""LoRA: the matrices of a trained model stay as they are, and a product of two small ones is learned beside them.

How layers are adapted in place, and adapters switched, disabled and taken out, is in ``adapted.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from minigrad import random
from minigrad.backend import Array, array_module
from minigrad.errors import ArgumentError, NonFiniteError
from minigrad.tensor import Tensor, TensorLike
from .. import functional as F
from ..checks import check_probability, check_sizes
from ..linear import Linear
from ..module import Module
from ..parameter import Parameter, constant, truncated_normal
from .adapted import (
    AdaptedLinear,
    M,
    adapted_layers,
    add,
    check_name,
    few,
    layers_aside,
    matching,
    merged_layers,
    place_of,
    refuse_aside,
    set_aside,
    take_back,
)

BLOCKS = ("*attn.*", "*ffn.*")  # the layers of attention and the feed-forward layers, by our names


class LowRank(Module):
    """``scale · B A dropout(x)``, the change that one adapter makes to one layer; its settings are those of ``lora``.

    lora_A (rank, in_features) starts as normals with σ² = 1/in_features cut at 3σ, lora_B (out_features, rank) as 0.
    """

    def __init__(
        self, layer: Linear, rank: int, alpha: float, dropout: float, rank_stabilized: bool, generator: Any
    ) -> None:
        super().__init__()
        self.rank, self.alpha, self.dropout, self.rank_stabilized = rank, alpha, dropout, rank_stabilized
        self.scale = alpha / (math.sqrt(rank) if rank_stabilized else rank)
        out_features, in_features, place = layer.out_features, layer.in_features, place_of(layer)
        self.lora_A = truncated_normal((rank, in_features), 1 / math.sqrt(in_features), generator=generator, **place)
        self.lora_B = constant((out_features, rank), 0.0, **place)

    def forward(self, x: TensorLike, y: Tensor) -> Tensor:
        """The layer's result ``y`` for ``x``, changed; the scale meets the narrow product, (…, rank)."""
        x = F.dropout(x, self.dropout, self.training)
        return y + F.linear(F.linear(x, self.lora_A) * self.scale, self.lora_B)

    def added_to(self, weight: Parameter) -> Array:
        """``W + scale · B A``, formed in at least float32."""
        wide: Any = np.result_type(weight.dtype, np.float32)
        a, b, w = (p.data.astype(wide) for p in (self.lora_A, self.lora_B, weight))
        return (w + b @ a * self.scale).astype(weight.dtype)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}"


def lora(
    model: M,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Iterable[str] = BLOCKS,
    *,
    name: str = "default",
    dropout: float = 0.0,
    rank_stabilized: bool = False,
    generator: Any = None,
) -> M:
    """Adapt Linear layers of ``model`` in place by ``W + (alpha/rank) B A``, of which A and B alone are trained.

    B starts as zeros, so the model computes what it did. All its other parameters are frozen. The model is returned.

    - targets: patterns of names, as of files: "q_proj" is every layer of that name, "layers.0.*" all below, "*" all
      Linear layers; by default the layers of attention and the feed-forward layers
    - name: of the adapter; several may be in a model, and the newest is active, see ``set_adapter``
    - dropout: of the input of A, in training
    - rank_stabilized: alpha/√rank instead of alpha/rank (rsLoRA, Kalajdzievski 2023), so that the size of a change
      doesn't fall with the rank
    - generator: for A

    A layer counts that is a plain ``nn.Linear``. An ArgumentError tells of a pattern that matches none, a rank above
    the smaller size of a layer, and a name that is taken. Hu et al., "LoRA" (2021).

    >>> import nn
    >>> model = nn.lora(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 9)), rank=2, targets="0")
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['0.adapters.default.lora_A', '0.adapters.default.lora_B']
    """
    check_sizes(rank=rank)
    return adapt(model, matching(model, targets), name, rank, alpha, dropout, rank_stabilized, generator)


def adapt(
    model: M,
    layers: Mapping[str, Linear],
    name: str,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    rank_stabilized: bool = False,
    generator: Any = None,
) -> M:
    """``lora`` of these layers of ``model``."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | np.number) or not 0 < alpha < math.inf:
        raise ArgumentError("an alpha above 0", repr(alpha), "twice the rank is usual")
    check_name(model, name)
    shapes = {path: (layer.out_features, layer.in_features) for path, layer in layers.items()}
    if small := [f"{path or 'its'} {shape}" for path, shape in shapes.items() if min(shape) < rank]:
        hint = "at that rank B A is any matrix: take less"
        raise ArgumentError("a rank up to the smaller size of each layer", f"rank={rank}: {few(small)}", hint)
    generator = random.generator(generator)
    settings = (int(rank), float(alpha), check_probability(dropout), bool(rank_stabilized), generator)
    made = {path: LowRank(layer, *settings) for path, layer in layers.items()}
    return add(model, layers, AdaptedLinear, made, name)


# ---- merged into the weights -----------------------------------------------------------------------------------------


def merge_adapters(model: Module) -> None:
    """Put the active adapter into the weights, ``W + scale · B A``: plain layers, as fast as before, and as many names.

    ``unmerge_adapters`` takes it out again. The weights are then the same bits, since the base is kept. A head that
    shares the embeddings' matrix has one of its own meanwhile. A NaN or an infinity in a result is a NonFiniteError,
    and nothing is merged. Only LoRA can be merged: no matrix does what other adapters do.

    >>> import minigrad as mg
    >>> import nn
    >>> model = nn.lora(nn.Linear(4, 4), rank=1, targets="*")
    >>> merge_adapters(model)
    >>> sorted(model.state_dict())
    ['bias', 'weight']
    """
    refuse_aside(model)
    layers = adapted_layers(model)
    if not layers:
        raise ArgumentError("a model with adapters", f"a {type(model).__name__} without", "nn.lora(model) adds one")
    changes = {path: layer.change for path, layer in layers.items() if layer.change is not None}
    if others := sorted({type(change).__name__ for change in changes.values()} - {"LowRank"}):
        raise ArgumentError("an active adapter that is a LoRA", f"a {others[0]}", "no weights do what it does")
    if blocks := [path for path in changes if not isinstance(layers[path].weight, Parameter)]:
        got = f"quantized ones: {few(blocks)}"
        raise ArgumentError(
            "weights that an adapter can be added to", got, "merge before nn.quantize, or leave it beside"
        )
    merged = {path: change.added_to(layers[path].weight) for path, change in changes.items()}
    if wrong := [path for path, weight in merged.items() if not array_module(weight).isfinite(weight).all()]:
        got = f"a NaN or an infinity in {few(wrong)}"
        raise NonFiniteError("finite merged weights", got, "the adapter's training diverged: take an earlier state")
    for path, layer in layers.items():
        set_aside(layer, Parameter(merged[path], requires_grad=False) if path in merged else None)


def unmerge_adapters(model: Module) -> None:
    """Take the merged adapter out of the weights again; what was trained in them meanwhile is lost.

    >>> import nn
    >>> model = nn.lora(nn.Linear(4, 4), rank=1, targets="*")
    >>> before = model.weight.numpy()
    >>> merge_adapters(model)
    >>> unmerge_adapters(model)
    >>> bool((model.weight.data == before).all())
    True
    """
    if not merged_layers(model):
        raise ArgumentError("a model with merged adapters", "none is", "nn.merge_adapters(model) merges the active one")
    for layer in layers_aside(model):
        take_back(layer)
