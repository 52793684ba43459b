"""Quantized layers: their matrices are blocks of small integers, which are multiplied a tile at a time.

A quantized layer is the same object with another class, so what holds it, its names and its hooks stay, and fused
kernels see that it isn't plain. Its ``weight`` is a buffer with the bytes of the blocks, which
``minigrad.kernels.quantized_blocks`` defines, and a state dict has these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

from minigrad import asarray
from minigrad.backend import Array, array_module, to_device
from minigrad.errors import ArgumentError, GraphError, NonFiniteError
from minigrad.kernels.embedding import check_range
from minigrad.kernels.quantized_blocks import LAYOUTS, block_product, decoded, encoded, scales
from minigrad.messages.explain import describe
from minigrad.tensor import Tensor, TensorLike
from ..adapting.adapted import AdaptedLinear, few, matches
from ..checks import as_ids
from ..linear import Embedding, Linear
from ..module import Module

M = TypeVar("M", bound=Module)
ROWS = 4096  # of a matrix that are encoded at a time


class Blocks(Tensor):
    """A matrix in blocks, (rows, bytes of a row) uint8, which has no gradient."""

    __slots__ = ()

    @property
    def requires_grad(self) -> bool:
        """Always False."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value:
            hint = "nn.lora(model) trains a low-rank change of it; train the weights before nn.quantize"
            raise GraphError("a weight that can be trained", "a quantized one, whose integers have no gradient", hint)


class Quantized(Module):
    """What quantized layers have: the layout of the blocks in their weight."""

    layout: str
    weight: Any

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layout={self.layout!r}"


class QuantizedLinear(Quantized, Linear):
    """A Linear with a matrix in blocks, which :func:`quantize` makes of one."""

    def forward(self, x: TensorLike) -> Tensor:
        """``x Wᵀ + b``, in the dtype of x."""
        y: Tensor = block_product(x, self.weight, self.layout)
        out: Tensor = y if self.bias is None else y + self.bias.astype(y.dtype)
        return out


class QuantizedEmbedding(Quantized, Embedding):
    """An Embedding with a table in blocks, which :func:`quantize` makes of one."""

    def forward(self, ids: TensorLike) -> Tensor:
        """The rows of ``ids``, float32; only these are made of blocks."""
        wanted = as_ids(ids, self.weight.device)
        check_range(wanted, self.num_embeddings, "id")
        blocks = self.weight.data[to_device(wanted.reshape(-1), self.weight.device)]
        return asarray(decoded(blocks, self.layout).reshape(*wanted.shape, self.embedding_dim))


class AdaptedQuantizedLinear(AdaptedLinear, QuantizedLinear):
    """A quantized Linear beside which an adapter is trained."""

    plain = QuantizedLinear


KINDS: dict[type[Module], type[Module]] = {Linear: QuantizedLinear, Embedding: QuantizedEmbedding}


def quantize(model: M, layout: str = "q8_0", targets: str | Iterable[str] = "*", *, odd_widths: str = "float16") -> M:
    """Put the matrices of the Linear and Embedding layers of ``model`` into blocks of 32 integers, in place.

    - layout: "q8_0", 8 bits a number and a scale for each block: 8.5 bits; "q4_0", 4.5 bits; "q4_1", 5 bits, with a
      lowest number for each block too; "float16", 16 bits. The bytes are those of GGUF, see :func:`save_gguf`
    - targets: patterns of names of layers, as of files: "layers.*", "q_proj", "*" for all
    - odd_widths: what becomes of a matrix whose width isn't a multiple of 32: "float16", or "refuse"

    Biases, norms and convolutions stay. A matrix that layers share stays shared. Its numbers are multiplied a tile at a
    time: a layer is never whole in float32. Gradients flow to a layer's input, so ``nn.lora`` trains on top of it; to
    ask for that of its weight is a GraphError. The state dict holds the bytes; ``load_state_dict`` of a model that was
    quantized alike reads them. The model is returned.

    An ArgumentError tells of patterns that match no layer, of adapted layers and odd widths, and a NonFiniteError of
    weights that no block can hold. Layouts: the files of llama.cpp; Dettmers et al., "8-bit Optimizers via Block-wise
    Quantization" (2022), on why blocks.

    >>> import nn
    >>> model = quantize(nn.Linear(64, 2), "q4_0")
    >>> model, model.state_dict()["weight"].nbytes
    (QuantizedLinear(in_features=64, out_features=2, bias=True, layout='q4_0'), 72)
    """
    if layout not in LAYOUTS:
        raise ArgumentError(f"a layout of {', '.join(map(repr, LAYOUTS))}", repr(layout), "'q8_0' loses least")
    if odd_widths not in ("float16", "refuse"):
        raise ArgumentError("odd_widths of 'float16' or 'refuse'", repr(odd_widths), "'float16' takes 16 bits a number")
    layers = _chosen(model, targets)
    weights = {id(layer.weight): layer.weight for layer in layers.values()}
    forms = {key: _layout_of(weight.shape[1], layout) for key, weight in weights.items()}
    odd = [f"{path} ({layer.weight.shape[1]})" for path, layer in layers.items() if forms[id(layer.weight)] != layout]
    if odd and odd_widths == "refuse":
        raise ArgumentError("widths that are multiples of 32", few(odd), "odd_widths='float16' keeps those in float16")
    _check_shared(model, layers, weights)
    made: dict[int, Blocks] = {}
    for key, weight in weights.items():
        path = next(path for path, layer in layers.items() if layer.weight is weight)
        made[key] = Blocks(_checked_blocks(weight.data, forms[key], path))
    for layer in layers.values():
        key = id(layer.weight)
        del layer.weight
        layer.register_buffer("weight", made[key])
        layer.layout = forms[key]
        layer.__class__ = KINDS[type(layer)]
    return model


def _layout_of(width: int, layout: str) -> str:
    return "float16" if width % LAYOUTS[layout].numbers else layout


def _chosen(model: Any, targets: str | Iterable[str]) -> dict[str, Any]:
    """The plain layers that one of the patterns matches, by their names; each must match one."""
    if not isinstance(model, Module):
        raise ArgumentError("a module to quantize", describe(model), "nn.quantize(model, 'q8_0')")
    patterns = [targets] if isinstance(targets, str) else list(targets)
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, tuple(KINDS))}
    found = {pattern: [path for path in layers if matches(path, pattern)] for pattern in patterns}
    absent = [pattern for pattern, paths in found.items() if not paths]
    if absent or not patterns:
        got = f"{few(absent)} of no layer" if patterns else "no pattern"
        raise ArgumentError(f"patterns of names of layers, such as {few(list(layers)) or 'none'}", got, "'*' is all")
    chosen = {path: layer for path, layer in layers.items() if any(path in paths for paths in found.values())}
    if other := [path for path, layer in chosen.items() if type(layer) not in KINDS]:
        got = f"{type(chosen[other[0]]).__name__} {few(other)}"
        raise ArgumentError("plain Linear and Embedding layers", got, "quantize once, and before adapters are added")
    return chosen


def _check_shared(model: Module, layers: dict[str, Any], weights: dict[int, Any]) -> None:
    """Refuse to quantize a matrix that a layer shares which isn't chosen."""
    own = set(map(id, layers.values()))
    for path, module in model.named_modules():
        if id(module) not in own and any(id(value) in weights for value in vars(module).values()):
            got = f"{path} shares a matrix with one of them"
            raise ArgumentError("all layers that share a matrix", got, f"targets with {path!r} too")


def _checked_blocks(weight: Array, layout: str, path: str) -> Array:
    """The blocks of a matrix, some rows at a time; a NonFiniteError where one has no finite scale."""
    xp = array_module(weight)
    parts = [encoded(weight[start : start + ROWS], layout) for start in range(0, len(weight), ROWS)]
    blocks = xp.concatenate(parts)
    if not (xp.isfinite(scales(blocks, layout)).all() and xp.isfinite(weight.astype(np.float32)).all()):
        got = f"a NaN, an infinity or a number out of range in {path or 'it'}"
        raise NonFiniteError(f"weights whose scales fit half precision in {layout}", got, "up to 65504 is safe")
    return blocks
