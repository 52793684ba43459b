"""Layers that are adapted in place: adapters by name beside them, of which one or none is active, and the way back.

An adapted layer is the same object with another class. So what holds it, its names, its hooks and a weight that it
shares stay, fused kernels see that it isn't plain, and the way back is the class that it had. A way of adapting brings
a subclass of :class:`Adapted`, which says what an adapter changes, and a module for each adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeVar

from minigrad.backend import is_floating
from minigrad.errors import ArgumentError
from minigrad.messages.explain import describe
from minigrad.tensor import TensorLike
from ..containers import ModuleDict
from ..linear import Linear
from ..module import Module
from ..parameter import Parameter

M = TypeVar("M", bound=Module)


class Adapted(Module):
    """What all adapted layers have; a subclass is also one of ``plain``, the class that the layer had."""

    plain: ClassVar[type[Module]]
    adapters: ModuleDict
    active: str

    @property
    def change(self) -> Any:
        """The active adapter, None where this layer has no part in it."""
        return vars(self.adapters).get(self.active)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, active={self.active!r}"


class AdaptedLinear(Adapted, Linear):
    """A Linear whose result the active adapter changes: it is called with the input and the result."""

    plain = Linear

    def forward(self, x: TensorLike) -> Any:
        """The Linear's result, changed by the active adapter."""
        y = super().forward(x)
        return y if self.change is None else self.change(x, y)


@dataclass
class Aside:
    """What a layer that serves as a plain one has of its own, to be taken back."""

    kind: type[Adapted]
    adapters: ModuleDict
    active: str
    weight: Parameter | None  # of a Linear, in whose place that with the adapter merged in may be


# ---- which layers ----------------------------------------------------------------------------------------------------


def kinds_of(kind: type[Adapted]) -> dict[type[Module], type[Adapted]]:
    """The class of layers that ``kind`` adapts, and those of its subclasses, with the adapted class of each."""
    return {made.plain: made for made in (kind, *kind.__subclasses__())}


def place_of(layer: Any) -> dict[str, Any]:
    """The dtype and the device for what is learned beside a Linear: those of its weight, float32 where it is blocks."""
    weight = layer.weight
    return {"dtype": weight.dtype if is_floating(weight.dtype) else "float32", "device": weight.device}


def layers_for(model: Module, kind: type[Adapted]) -> dict[str, Any]:
    """The layers that ``kind`` can adapt, by their names: each as it was made, adapted ones among them."""
    kinds = kinds_of(kind)
    classes = {*kinds, *kinds.values()}
    return {
        path: layer for path, layer in model.named_modules() if type(layer) in classes and "forward" not in vars(layer)
    }


def matching(model: Module, targets: str | Iterable[str], kind: type[Adapted] = AdaptedLinear) -> dict[str, Any]:
    """The layers for ``kind`` that one of the patterns matches, by their names; each must match one."""
    if not isinstance(model, Module):
        raise ArgumentError("a module to adapt", describe(model), "nn.lora(model, rank=8)")
    patterns = [targets] if isinstance(targets, str) else list(targets)
    layers = layers_for(model, kind)
    found = {pattern: [path for path in layers if matches(path, pattern)] for pattern in patterns}
    absent = [pattern for pattern, paths in found.items() if not paths]
    if absent or not patterns:
        got = f"{few(absent)} of no layer" if patterns else "no pattern"
        there = f", such as {few(list(layers))}" if layers else ", of which there is none"
        raise ArgumentError(f"patterns of names of {kind.plain.__name__} layers{there}", got, "'*' is all")
    return {path: layer for path, layer in layers.items() if any(path in paths for paths in found.values())}


def matches(path: str, pattern: Any) -> bool:
    """Whether a pattern matches a dotted name, or the end of it from a dot on."""
    return fnmatchcase(path, str(pattern)) or fnmatchcase(path, f"*.{pattern}")


def few(names: list[Any]) -> str:
    """The first of some names of layers, in words."""
    return ", ".join(str(name) or "the module itself" for name in names[:4]) + ", …" * (len(names) > 4)


# ---- adapters by name ------------------------------------------------------------------------------------------------


def check_name(model: Module, name: Any) -> None:
    """Refuse what can't be the name of a new adapter of the model."""
    if not isinstance(name, str) or not name.isidentifier() or hasattr(ModuleDict(), name):
        raise ArgumentError("a word as the adapter's name", repr(name), "such as 'default', or 'python_code'")
    refuse_aside(model)
    if name in adapter_names(model):
        hint = f"another name, nn.set_adapter(model, {name!r}) to go on with it, nn.delete_adapter to begin anew"
        raise ArgumentError(f"a new name beside {adapter_names(model)}", repr(name), hint)


def add(model: M, layers: Mapping[str, Any], kind: type[Adapted], made: Mapping[str, Module], name: str) -> M:
    """Give each of the layers its adapter of ``made``, freeze all else, and make ``name`` the active one."""
    vars(model).setdefault("_trained_before", [n for n, p in model.named_parameters() if p.requires_grad])
    model.requires_grad_(False)
    for path, layer in layers.items():
        if not isinstance(layer, kind):
            layer.adapters = ModuleDict()
            layer.__class__ = kinds_of(kind)[type(layer)]
        layer.adapters[name] = made[path].train(layer.training)
    set_adapter(model, name)
    return model


def adapted_layers(model: Module) -> dict[str, Any]:
    """The layers with adapters by their names."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, Adapted)}


def adapter_of(model: Module, name: str) -> dict[str, Any]:
    """The parts of the adapter ``name``, by the names of their layers."""
    return {path: layer.adapters[name] for path, layer in adapted_layers(model).items() if name in layer.adapters}


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
            _make_plain(layer)
    for part in model.modules():
        if "_trained_before" in vars(part) and not adapted_layers(part):
            parameters = dict(part.named_parameters())
            for path in vars(part).pop("_trained_before"):
                parameters[path].requires_grad = True


def check_adapter(model: Module, name: str) -> None:
    """Refuse a name that no adapter has, and a model whose adapters are set aside."""
    refuse_aside(model)
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
    refuse_merged(model)
    layers = adapted_layers(model).values()
    for layer in layers:
        set_aside(layer)
    try:
        yield
    finally:
        for layer in layers:
            take_back(layer)


def layers_aside(model: Module) -> list[Any]:
    """The layers that serve as plain ones."""
    return [layer for layer in model.modules() if "aside" in vars(layer)]


def merged_layers(model: Module) -> list[Any]:
    """The layers whose weight holds an adapter."""
    return [layer for layer in layers_aside(model) if vars(layer)["aside"].weight is not getattr(layer, "weight", None)]


def refuse_merged(model: Module) -> None:
    """Refuse a model with an adapter in its weights."""
    if merged_layers(model):
        raise ArgumentError("adapters that are not merged", "merged ones", "nn.unmerge_adapters(model) first")


def refuse_aside(model: Module) -> None:
    """Refuse a model with adapters that are merged or disabled."""
    refuse_merged(model)
    if layers_aside(model):
        raise ArgumentError("adapters in use", "ones that nn.disable_adapters set aside", "after its `with` block")


def _make_plain(layer: Any) -> None:
    kind = type(layer).plain
    del layer.adapters, layer.active
    layer.__class__ = kind


def set_aside(layer: Any, weight: Parameter | None = None) -> None:
    """Make the layer a plain one, of another weight if there is one."""
    own = getattr(layer, "weight", None)
    vars(layer)["aside"] = Aside(type(layer), layer.adapters, layer.active, own)
    _make_plain(layer)
    if weight is not None:
        layer.weight = weight


def take_back(layer: Any) -> None:
    """Make the layer an adapted one again, where the model is now, and of the dtype that it has."""
    aside, now = vars(layer).pop("aside"), next(layer.parameters(), None)  # none in a layer of blocks without bias
    if aside.weight is not None:
        vars(layer).update(weight=aside.weight)
    layer.adapters, layer.active = aside.adapters, aside.active
    layer.__class__ = aside.kind
    layer.adapters.train(layer.training)
    if now is not None and any((p.device, p.dtype) != (now.device, now.dtype) for p in layer.parameters()):
        layer.to(now.device, now.dtype)
