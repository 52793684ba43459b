"""LoRA: the matrices of a trained model stay as they are, and a product of two small ones is learned beside them.

An adapted layer is the same object with another class. So what holds it, its names, its hooks and a weight that it
shares stay, fused kernels see that it isn't plain, and the way back is the class that it had.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np

from minigrad import random
from minigrad.backend import Array, array_module
from minigrad.errors import ArgumentError, NonFiniteError
from minigrad.messages.explain import describe
from minigrad.tensor import Tensor, TensorLike
from .. import functional as F
from ..checks import check_probability, check_sizes
from ..containers import ModuleDict
from ..linear import Linear
from ..module import Module
from ..parameter import Parameter, constant, truncated_normal

M = TypeVar("M", bound=Module)

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
        out_features, in_features = layer.weight.shape
        place: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.lora_A = truncated_normal((rank, in_features), 1 / math.sqrt(in_features), generator=generator, **place)
        self.lora_B = constant((out_features, rank), 0.0, **place)

    def forward(self, x: TensorLike) -> Tensor:
        """The change of the layer's result for ``x``; the scale meets the narrow product, (…, rank)."""
        x = F.dropout(x, self.dropout, self.training)
        return F.linear(F.linear(x, self.lora_A) * self.scale, self.lora_B)

    def added_to(self, weight: Parameter) -> Array:
        """``W + scale · B A``, formed in at least float32."""
        wide: Any = np.result_type(weight.dtype, np.float32)
        a, b, w = (p.data.astype(wide) for p in (self.lora_A, self.lora_B, weight))
        return (w + b @ a * self.scale).astype(weight.dtype)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}"


class LoRALinear(Linear):
    """A Linear with adapters, by name, of which one or none is active: ``y = x Wᵀ + b + change(x)``."""

    adapters: ModuleDict
    active: str

    @property
    def change(self) -> LowRank | None:
        """The active adapter, None where this layer has no part in it."""
        return vars(self.adapters).get(self.active)

    def forward(self, x: TensorLike) -> Tensor:
        """The Linear's result and the active adapter's change of it."""
        y = super().forward(x)
        return y if self.change is None else y + self.change(x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, active={self.active!r}"


@dataclass
class Aside:
    """What a layer that serves as a plain Linear has of its own, to be taken back."""

    weight: Parameter
    adapters: ModuleDict
    active: str


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
    if not isinstance(name, str) or not name.isidentifier() or hasattr(ModuleDict(), name):
        raise ArgumentError("a word as the adapter's name", repr(name), "such as 'default', or 'python_code'")
    _refuse_aside(model)
    if name in adapter_names(model):
        hint = f"another name, nn.set_adapter(model, {name!r}) to go on with it, nn.delete_adapter to begin anew"
        raise ArgumentError(f"a new name beside {adapter_names(model)}", repr(name), hint)
    if small := [
        f"{path or 'its'} {layer.weight.shape}" for path, layer in layers.items() if min(layer.weight.shape) < rank
    ]:
        hint = "at that rank B A is any matrix: take less"
        raise ArgumentError("a rank up to the smaller size of each layer", f"rank={rank}: {_few(small)}", hint)
    generator = random.generator(generator)
    settings = (int(rank), float(alpha), check_probability(dropout), bool(rank_stabilized), generator)
    made = {path: LowRank(layer, *settings) for path, layer in layers.items()}
    vars(model).setdefault("_trained_before", [n for n, p in model.named_parameters() if p.requires_grad])
    model.requires_grad_(False)
    for path, layer in layers.items():
        if not isinstance(layer, LoRALinear):
            layer.adapters = ModuleDict()
            layer.__class__ = LoRALinear
        layer.adapters[name] = made[path].train(layer.training)
    set_adapter(model, name)
    return model


def matching(model: Module, targets: str | Iterable[str]) -> dict[str, Linear]:
    """The Linear layers that one of the patterns matches, by their names; each must match one."""
    if not isinstance(model, Module):
        raise ArgumentError("a module to adapt", describe(model), "nn.lora(model, rank=8)")
    patterns = [targets] if isinstance(targets, str) else list(targets)
    layers = linear_layers(model)
    found = {pattern: [path for path in layers if _matches(path, pattern)] for pattern in patterns}
    absent = [pattern for pattern, paths in found.items() if not paths]
    if absent or not patterns:
        got = f"{_few(absent)} of no layer" if patterns else "no pattern"
        raise ArgumentError(f"patterns of names of Linear layers, such as {_few(list(layers))}", got, "'*' is all")
    return {path: layer for path, layer in layers.items() if any(path in paths for paths in found.values())}


def linear_layers(model: Module) -> dict[str, Linear]:
    """The layers that can be adapted, by their names: each Linear as it was made, adapted ones among them."""
    return {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, Linear) and type(layer) in (Linear, LoRALinear) and "forward" not in vars(layer)
    }


def _matches(path: str, pattern: Any) -> bool:
    """Whether a pattern matches a dotted name, or the end of it from a dot on."""
    return fnmatchcase(path, str(pattern)) or fnmatchcase(path, f"*.{pattern}")


def _few(names: list[Any]) -> str:
    return ", ".join(str(name) or "the module itself" for name in names[:4]) + ", …" * (len(names) > 4)


# ---- several adapters ------------------------------------------------------------------------------------------------


def adapted_layers(model: Module) -> dict[str, LoRALinear]:
    """The layers with adapters by their names."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, LoRALinear)}


def adapter_names(model: Module) -> list[str]:
    """The names of a model's adapters."""
    return sorted({name for layer in adapted_layers(model).values() for name in layer.adapters})


def set_adapter(model: Module, name: str) -> None:
    """Make the adapter ``name`` the active one, in all layers, and the only one that is trained.

    Make the optimizer after it, from the parameters that take a gradient then.

    >>> import nn
    >>> model = nn.lora(nn.lora(nn.Linear(4, 4), rank=1, targets="*", name="a"), rank=2, targets="*", name="b")
    >>> set_adapter(model, "a")
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['adapters.a.lora_A', 'adapters.a.lora_B']
    """
    check_adapter(model, name)
    for layer in adapted_layers(model).values():
        layer.active = name
        for key, adapter in layer.adapters.items():
            adapter.requires_grad_(key == name)


def delete_adapter(model: Module, name: str = "default") -> None:
    """Take the adapter ``name`` out of the model. After the last one it is what it was, trained parameters included.

    The active one goes last.

    >>> import nn
    >>> model = nn.lora(nn.Linear(4, 4), rank=1, targets="*")
    >>> delete_adapter(model)
    >>> model
    Linear(in_features=4, out_features=4, bias=True)
    """
    check_adapter(model, name)
    layers, others = adapted_layers(model), [other for other in adapter_names(model) if other != name]
    if others and any(layer.active == name for layer in layers.values()):
        hint = f"nn.set_adapter(model, {others[0]!r}) first"
        raise ArgumentError("an adapter that isn't active, while there are others", repr(name), hint)
    for layer in layers.values():
        vars(layer.adapters).pop(name, None)
        if not len(layer.adapters):
            _plain(layer)
    for part in model.modules():
        if "_trained_before" in vars(part) and not adapted_layers(part):
            parameters = dict(part.named_parameters())
            for path in vars(part).pop("_trained_before"):
                parameters[path].requires_grad = True


def check_adapter(model: Module, name: str) -> None:
    """Refuse a name that no adapter has, and a model whose adapters are set aside."""
    _refuse_aside(model)
    if name not in (names := adapter_names(model)):
        raise ArgumentError(f"the name of an adapter, {names}", repr(name), "nn.lora(model, name=…) makes one")


# ---- layers that serve as plain ones ---------------------------------------------------------------------------------


@contextmanager
def disable_adapters(model: Module) -> Iterator[None]:
    """Inside the ``with`` block the model is the one that was adapted: plain layers, the same bits.

    >>> import minigrad as mg
    >>> import nn
    >>> base = nn.Linear(4, 4)
    >>> with disable_adapters(nn.lora(base, rank=1, targets="*")):
    ...     print(base)
    Linear(in_features=4, out_features=4, bias=True)
    """
    if merged_layers(model):
        raise ArgumentError("adapters that are not merged", "merged ones", "nn.unmerge_adapters(model) first")
    layers = adapted_layers(model).values()
    for layer in layers:
        _set_aside(layer, layer.weight)
    try:
        yield
    finally:
        for layer in layers:
            _take_back(layer)


def merge_adapters(model: Module) -> None:
    """Put the active adapter into the weights, ``W + scale · B A``: plain layers, as fast as before, and as many names.

    ``unmerge_adapters`` takes it out again. The weights are then the same bits, since the base is kept. A head that
    shares the embeddings' matrix has one of its own meanwhile. A NaN or an infinity in a result is a NonFiniteError,
    and nothing is merged.

    >>> import minigrad as mg
    >>> import nn
    >>> model = nn.lora(nn.Linear(4, 4), rank=1, targets="*")
    >>> merge_adapters(model)
    >>> sorted(model.state_dict())
    ['bias', 'weight']
    """
    _refuse_aside(model)
    layers = adapted_layers(model)
    if not layers:
        raise ArgumentError("a model with adapters", f"a {type(model).__name__} without", "nn.lora(model) adds one")
    merged = {path: layer.change.added_to(layer.weight) for path, layer in layers.items() if layer.change is not None}
    if wrong := [path for path, weight in merged.items() if not array_module(weight).isfinite(weight).all()]:
        got = f"a NaN or an infinity in {_few(wrong)}"
        raise NonFiniteError("finite merged weights", got, "the adapter's training diverged: take an earlier state")
    for path, layer in layers.items():
        _set_aside(layer, Parameter(merged[path], requires_grad=False) if path in merged else layer.weight)


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
    for layer in _set_aside_layers(model):
        _take_back(layer)


def _set_aside_layers(model: Module) -> list[Linear]:
    return [layer for layer in model.modules() if isinstance(layer, Linear) and "aside" in vars(layer)]


def merged_layers(model: Module) -> list[Linear]:
    """The layers whose weight holds an adapter."""
    return [layer for layer in _set_aside_layers(model) if vars(layer)["aside"].weight is not layer.weight]


def _refuse_aside(model: Module) -> None:
    if merged_layers(model):
        raise ArgumentError("adapters that are not merged", "merged ones", "nn.unmerge_adapters(model) first")
    if _set_aside_layers(model):
        raise ArgumentError("adapters in use", "ones that nn.disable_adapters set aside", "after its `with` block")


def _plain(layer: Linear) -> None:
    del layer.adapters, layer.active
    layer.__class__ = Linear


def _set_aside(layer: LoRALinear, weight: Parameter) -> None:
    """Make the layer a plain Linear of ``weight``."""
    vars(layer)["aside"] = Aside(layer.weight, layer.adapters, layer.active)
    _plain(layer)
    layer.weight = weight


def _take_back(layer: Linear) -> None:
    """Make the layer an adapted one again, where the model is now, and of the dtype that it has."""
    aside, now = vars(layer).pop("aside"), layer.weight
    vars(layer).update(weight=aside.weight)
    layer.adapters, layer.active = aside.adapters, aside.active
    layer.__class__ = LoRALinear
    layer.adapters.train(layer.training)
    if any((p.device, p.dtype) != (now.device, now.dtype) for p in (aside.weight, *layer.adapters.parameters())):
        layer.to(now.device, now.dtype)
