"""Module: a tree of layers that knows its parameters and buffers by their dotted names.

Everything is kept where Python keeps it, in the attributes: a parameter, a buffer or a child module *is* an attribute
of its kind. So there is one walk over the tree, and parameters, state dict, modes and moves are loops over it.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from minigrad import Tensor, asarray
from minigrad.backend import Array, array_module, as_dtype, check_device, is_array, is_floating, to_device
from minigrad.errors import (
    ArgumentError,
    AttributeHintError,
    CallError,
    DTypeError,
    GraphError,
    MiniGradError,
    StateError,
)
from minigrad.messages.explain import describe, explain_methods, explained
from minigrad.messages.habits import hints
from minigrad.tensor import Handle
from .checks import warn_of_width
from .parameter import Parameter

M = TypeVar("M", bound="Module")
P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class HasForward(Protocol[P, R]):
    """A module as its call sees it, which takes and gives what ``forward`` does."""

    _searched: bool
    _pre_hooks: list[Any]
    _hooks: list[Any]

    def _find_hidden(self) -> object: ...

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What the module computes."""


HABITS = hints("names of torch's modules")


class LoadResult(NamedTuple):
    """The names that ``load_state_dict`` found on one side only."""

    missing: list[str]
    unexpected: list[str]


class Module:
    """The base of all layers. Assign parameters and modules to attributes in ``__init__``, compute in ``forward``.

    >>> class Scale(Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.factor = Parameter(2.0)
    ...     def forward(self, x):
    ...         return self.factor * x
    >>> scale = Scale()
    >>> print(scale(Tensor([1, 2])).data, [name for name, _ in scale.named_parameters()])
    [2. 4.] ['factor']
    """

    training: bool
    _searched: bool = False  # whether a walk has been here
    _buffers: dict[str, bool]  # name -> whether it belongs into the state dict
    _hooks: list[Any]
    _pre_hooks: list[Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        explain_methods(cls, ["__init__", "forward"])  # a call with wrong arguments says what the layer takes

    @explained
    def __init__(self) -> None:
        vars(self).update(training=True, _buffers={}, _path="", _hooks=[], _pre_hooks=[])

    # ---- attributes ----

    def __setattr__(self, name: str, value: Any) -> None:
        if "_buffers" not in vars(self) and isinstance(value, Tensor | Module):
            raise self._not_ready(f"self.{name} = {type(value).__name__}(…) before it")
        self._check(name, value)
        if name in vars(self).get("_buffers", ()) and value is not None:
            value = asarray(value)
        object.__setattr__(self, name, value)
        if isinstance(value, Parameter) and value.name is None:  # a tied one keeps its first name
            value.name = self._path + name
        elif isinstance(value, Module):
            self._adopt(name, value)

    def __getattr__(self, name: str) -> Any:
        if "_buffers" not in vars(self):
            raise self._not_ready(f".{name} of a module without it")
        if name in HABITS:
            raise AttributeHintError("a name of minigrad's Module", f".{name}", f"use {HABITS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _not_ready(self, got: str) -> AttributeHintError:
        kind = type(self).__name__
        hint = f"make super().__init__() the first line of {kind}.__init__"
        return AttributeHintError(f"super().__init__() in {kind}.__init__", got, hint)

    def _check(self, name: str, value: Any) -> None:
        """Refuse assignments after which a parameter would silently not be learned, or a walk would never end."""
        before = vars(self).get(name)
        plain = is_array(value) or (isinstance(value, Tensor) and not isinstance(value, Parameter))
        if isinstance(before, Parameter) and plain:
            hint = f"self.{name}.data = … changes its numbers, nn.Parameter(…) replaces it"
            raise DTypeError(f"a Parameter for {name!r}", f"a {type(value).__name__} of shape {value.shape}", hint)
        if isinstance(value, CONTAINERS) and any(isinstance(part, Module | Parameter) for part in _kept_in(value)):
            raise _hidden(name, value)
        inside = value is self or self._path  # of another module: what is in none can't be below ``value``
        if isinstance(value, Module) and inside and any(module is self for module in value.modules()):
            hint = "assign it to a module above both"
            raise ArgumentError("a tree of modules", f"{name!r} contains the module that it is assigned to", hint)

    def _adopt(self, name: str, child: Module) -> None:
        """Name what is below ``child`` by its path from here. What lies deep is named at the first search, or
        n layers around each other would be named n times.
        """
        path = f"{self._path}{name}."
        deepest = path.count(".") + 32
        if _name(child._walk(path, deepest)) == deepest:
            vars(self)["_unnamed"] = True

    def register_buffer(self, name: str, value: Any, persistent: bool = True) -> None:
        """Keep ``value``, an array that isn't learned, as a Tensor that moves with the module.

        persistent: whether it belongs into the state dict.
        """
        if not (isinstance(name, str) and name.isidentifier()) or (hasattr(self, name) and name not in self._buffers):
            hint = "a word that the module doesn't use yet"
            raise ArgumentError("the name of a new attribute for a buffer", repr(name), hint)
        self._buffers[name] = persistent
        setattr(self, name, value)

    # ---- the walk over the tree ----

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The modules assigned to attributes of this one, with the attributes' names."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Module):
                yield name, value

    def _walk(self, prefix: str = "", deepest: int | None = None) -> Iterator[tuple[str, Module]]:
        """This module and all below it with their paths, a shared one under each; ``deepest`` dots at most."""
        waiting = [(prefix, self)]
        while waiting:
            prefix, module = waiting.pop()
            yield prefix, module
            if deepest is not None and prefix.count(".") >= deepest:
                continue
            below = [(f"{prefix}{name}.", child) for name, child in vars(module).items() if isinstance(child, Module)]
            waiting += below[::-1]

    def _find_hidden(self) -> list[tuple[str, Module]]:
        """The walk; modules and parameters that it doesn't reach, as in a list that grew later, are refused.

        Attributes alone may keep them. At the first search other tensors that learn are refused, too. What is an
        attribute of a module below this one may stand in a list besides, as may what this one is a part of. Called on a
        part of a model, it lets pass what is an attribute anywhere.
        """
        if vars(self).pop("_unnamed", False):
            _name(self._walk(self._path))
        known: set[int] = set()
        walk = list(self._walk())
        for _, module in walk:
            for name, value in _attributes(module):
                for part in _kept_in(value):
                    if isinstance(part, Tensor) and not isinstance(part, Parameter):
                        if not module._searched:
                            raise _hidden(name, value)
                        continue
                    known = known or set(map(id, _below(self)))
                    elsewhere = self._path and (part._path if isinstance(part, Module) else part.name)
                    if not (id(part) in known or elsewhere or any(p is self for p in _below(part))):
                        raise _hidden(name, value)
            vars(module)["_searched"] = True
        return walk

    def _named_tensors(self, parameters: bool, buffers: Callable[[bool], bool]) -> Iterator[tuple[str, Tensor]]:
        """Parameters, and the buffers whose persistence is wanted, under each of their names."""
        for prefix, module in self._walk():
            for name, value in list(vars(module).items()):
                if (parameters and isinstance(value, Parameter)) or (
                    name in module._buffers and value is not None and buffers(module._buffers[name])
                ):
                    yield prefix + name, value

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """This module, named "", and all below it, each once, as ``("layers.0.attn", module)``."""
        return _once((prefix[:-1], module) for prefix, module in self._walk())

    def modules(self) -> Iterator[Module]:
        """This module and all below it, each once."""
        return (module for _, module in self.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters, each once, as ``("layers.0.attn.q_proj.weight", parameter)``."""
        walk = self._find_hidden()
        named = (
            (prefix + name, value)
            for prefix, module in walk
            for name, value in list(vars(module).items())
            if isinstance(value, Parameter)
        )
        return _once(named)

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, each once, also where several layers share one."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """All buffers, each once, with their dotted names."""
        return _once(self._named_tensors(False, lambda persistent: True))

    def buffers(self) -> Iterator[Tensor]:
        """All buffers, each once."""
        return (buffer for _, buffer in self.named_buffers())

    # ---- saving and loading ----

    def state_dict(self) -> dict[str, Array]:
        """Copies of all parameters and persistent buffers as arrays, by name; a tied one under each of its names."""
        return {name: tensor.data.copy() for name, tensor in self._named_tensors(True, bool)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadResult:
        """Set parameters and buffers to the arrays of these names, cast to their dtypes; tied ones stay tied.

        Any array-like will do. A tied parameter needs one of its names only. All names that are missing, unexpected or
        of another shape are listed in one StateError, and nothing is changed; ``strict=False`` permits the first two
        and returns them.
        """
        if not isinstance(state_dict, Mapping):
            hint = "mg.load reads one from a file"
            raise CallError("a state dict, names and their arrays", describe(state_dict), hint)
        own = dict(self._named_tensors(True, bool))
        found = {id(own[name]) for name in state_dict if name in own}
        missing = [name for name, tensor in own.items() if id(tensor) not in found]
        unexpected = [name for name in state_dict if name not in own]
        pairs = [(name, own[name], state_dict[name]) for name in own if name in state_dict]
        wrong = [f"{n} {np.shape(value)}, not {t.shape}" for n, t, value in pairs if np.shape(value) != t.shape]
        faults = {"missing": missing, "unexpected": unexpected} if strict else {}
        faults |= {"wrong shape": wrong, "different values of one tied parameter": [] if wrong else _conflicts(pairs)}
        if kinds := [kind for kind, names in faults.items() if names]:
            got = "; ".join(f"{kind}: {_listed(faults[kind])}" for kind in kinds)
            raise StateError(f"the {len(own)} names and shapes of this {type(self).__name__}", got, HINTS[kinds[-1]])
        new = [(tensor, Tensor(value, dtype=tensor.dtype, device=tensor.device)) for _, tensor, value in pairs]
        for tensor, value in new:
            tensor.data = value
        return LoadResult(missing, unexpected)

    # ---- for all below ----

    def apply(self: M, function: Callable[[Module], Any]) -> M:
        """Call ``function`` with every module of the tree, children before their parents; returns the module."""
        found: list[Module] = []
        waiting: list[Module] = [self]
        while waiting:  # each before what is below it, from the last child to the first
            found.append(module := waiting.pop())
            waiting += [child for _, child in module.named_children()]
        for module in reversed(found):
            function(module)
        return self

    def train(self: M, mode: bool = True) -> M:
        """Switch to training mode, in which dropout is active; returns the module."""
        for module in self.modules():
            module.training = bool(mode)
        return self

    def eval(self: M) -> M:
        """Switch to evaluation mode: the same as ``train(False)``."""
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        """Freeze all parameters (False) or let them learn (True); returns the module."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, or with ``set_to_none=False`` make them zeros."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else array_module(parameter.grad).zeros_like(parameter.grad)

    def to(self: M, device: Any = None, dtype: Any = None) -> M:
        """Move all parameters and buffers to a device, cast the floating-point ones to a dtype, in place.

        ``to("cuda")``, ``to(dtype="float64")`` or ``to("float64")``. Optimizers keep hold of the same parameters.
        """
        if device is not None and not str(device).startswith(("cpu", "cuda")):
            device, dtype = None, device
        dtype = None if dtype is None else as_dtype(dtype)
        if dtype is not None and not is_floating(dtype):
            raise DTypeError("a floating-point dtype for the parameters", str(dtype), "such as 'float32' or 'bfloat16'")
        place = None if device is None else check_device(device)
        for _, tensor in _once(self._named_tensors(True, lambda persistent: True)):
            tensor._data = _converted(tensor.data, place, dtype)
            tensor.bump_version()
            tensor.grad = None if tensor.grad is None else _converted(tensor.grad, place, dtype)
        return self

    # ---- calling ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes; subclasses say so."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward()")

    def __call__(self: HasForward[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._searched:
            self._find_hidden()
        for hook in tuple(self._pre_hooks):
            changed = hook(self, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)  # type: ignore[assignment]
        try:
            output = self.forward(*args, **kwargs)
        except MiniGradError as error:
            if not error.layer and (path := vars(self)["_path"]):  # the innermost tells
                error.layer = f"{path[:-1]}, a {type(self).__name__}"
            raise
        if args and getattr(args[0], "dtype", None) == np.float64:
            warn_of_width(self, args[0], output)
        for hook in tuple(self._hooks):
            changed = hook(self, args, output)
            output = output if changed is None else changed
        return output

    def register_forward_pre_hook(self, hook: Callable[[Module, tuple[Any, ...]], Any]) -> Handle:
        """Call ``hook(module, inputs)`` before ``forward``; what it returns, if not None, are the inputs."""
        return _registered(self._pre_hooks, hook)

    def register_forward_hook(self, hook: Callable[[Module, tuple[Any, ...], Any], Any]) -> Handle:
        """Call ``hook(module, inputs, output)`` after ``forward``; what it returns, if not None, is the output."""
        return _registered(self._hooks, hook)

    # ---- copying ----

    def __getstate__(self) -> dict[str, Any]:
        """The attributes, and what lies deep below, deepest first: a pickle recurses from one to the next no deeper."""
        below = [module for path, module in self._walk() if path and path.count(".") % DEPTH == 0]
        return {"_deep": below[::-1], **vars(self)} if below else vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        vars(self).pop("_deep", None)

    def __deepcopy__(self: M, memo: dict[int, Any]) -> M:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        state: dict[Any, Any] = memo
        if state.setdefault("from", self) is self:
            for below in reversed(list(self.modules())):  # what is deepest first: no copy calls another
                copy.deepcopy(below, memo)
        for name, value in vars(self).items():
            try:
                vars(made)[name] = copy.deepcopy(value, memo)
            except GraphError as error:
                if "attribute" in str(error):
                    raise
                hint = f"self.{name} = ….detach() in forward(), or delete it before the copy"
                got = f"attribute {self._path + name!r} of {type(self).__name__} holds the result of a forward pass"
                raise GraphError("a module without results to copy", got, hint) from None
        if state["from"] is self:
            del state["from"]
        return made

    # ---- printing ----

    def extra_repr(self) -> str:
        """What stands between the parentheses of the repr; subclasses say so."""
        return ""

    def __repr__(self) -> str:
        return self._shown(LEVELS)

    def _shown(self, levels: int) -> str:
        """The text of the module, and of so many levels below."""
        extra, below = self.extra_repr(), [*self.named_children()]
        if not (below and levels):
            return f"{type(self).__name__}({'…' if below else extra})"
        plain = {name for name, child in below if type(child).__repr__ is Module.__repr__}
        children = [(name, c._shown(levels - 1) if name in plain else repr(c)) for name, c in below]
        lines = [extra] if extra else []
        for text, same in groupby(children, key=lambda child: child[1]):
            names = [name for name, _ in same]
            alike = len(names) > 1 and names[0].isdecimal()
            labels = [f"({names[0]}-{names[-1]}): {len(names)} x "] if alike else [f"({name}): " for name in names]
            lines += [label + text for label in labels]
        body = "\n".join(lines).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {body}\n)"


LEVELS = 50  # that a text shows
DEPTH = 32  # levels between modules that a pickle begins with
CONTAINERS = (list, tuple, dict, set, frozenset, deque, UserList)
PLAIN = {bool, int, float, str, type(None), Parameter}  # of most attributes: asked first, to be quick
EMPTIED = {dict, list}  # of hooks and buffers, which few modules have
LEAVES = {bool, int, float, str, bytes, type(None)}
HINTS = {
    **dict.fromkeys(("missing", "unexpected"), "strict=False permits names that are missing or unexpected"),
    "wrong shape": "make the module with the sizes that the arrays have",
    "different values of one tied parameter": "one of its names is enough",
}


def is_plain(layer: Module, kind: type[Module]) -> bool:
    """Whether a layer is of this very kind, without hooks or a forward of its own: nothing watches or changes it.

    >>> import nn
    >>> is_plain(nn.RMSNorm(2), nn.RMSNorm), is_plain(nn.RMSNorm(2), nn.Linear)
    (True, False)
    """
    return type(layer) is kind and "forward" not in vars(layer) and not (layer._hooks or layer._pre_hooks)


def _kept_in(value: Any) -> Iterator[Any]:
    """Modules, parameters and other tensors that learn in a container or plain object, and in those that lie in it."""
    stack, seen = [value], set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        parts = _parts(value)
        if not set(map(type, parts)) <= LEAVES:  # quick for a list of a million words
            yield from (part for part in parts if isinstance(part, Module | Parameter) or _learns(part))
            stack += [part for part in parts if type(part) not in LEAVES]


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.node is None


def _parts(value: Any) -> Any:
    """What lies in a container, an array of objects, a partial function, a method or an object of one's own class."""
    if isinstance(value, dict | UserDict | types.MappingProxyType):
        return [*value, *value.values()]
    if isinstance(value, CONTAINERS):
        return value
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype == object else ()
    kind = type(value)
    foreign = kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind is not types.SimpleNamespace
    if foreign or isinstance(value, Module | Tensor | type):
        return ()
    slots = [name for cls in kind.__mro__ for name in vars(cls).get("__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _name(walk: Iterator[tuple[str, Module]]) -> int:
    """Name modules and their parameters by the paths of a walk; returns the most dots in one."""
    named, dots = set(), 0
    for path, module in _once(walk):
        dots = max(dots, path.count("."))
        vars(module)["_path"] = path
        for key, value in vars(module).items():
            if isinstance(value, Parameter) and id(value) not in named:
                named.add(id(value))
                value.name = path + key
    return dots


def _attributes(module: Module) -> list[tuple[str, Any]]:
    """What a module keeps besides parts; at first also what its class keeps, in tuples, since no walk looks there."""
    held = [
        (name, v)
        for name, v in vars(module).items()
        if type(v) not in PLAIN and not isinstance(v, Module | Tensor) and not (type(v) in EMPTIED and not v)
    ]
    for cls in () if module._searched else type(module).__mro__[:-1]:
        held += [(name, (value,)) for name, value in vars(cls).items() if isinstance(value, Module | Parameter)]
    return held


def _below(value: Module | Parameter) -> list[Any]:
    """A parameter alone, or a module with all modules and parameters below it."""
    found, stack = [], [value]
    while stack:
        found.append(part := stack.pop())
        if isinstance(part, Module):
            stack += [child for child in vars(part).values() if isinstance(child, Module | Parameter)]
    return found


def _hidden(name: str, value: Any) -> DTypeError:
    kind = type(value).__name__
    hint = f"self.{name} = nn.ModuleList([...]) or nn.ModuleDict({{...}}), so that parameters() finds what is in it"
    return DTypeError("modules in an nn.ModuleList", f"a {kind} of them for {name!r}", hint)


def _once(pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The pairs whose second part did not come before."""
    seen = set()
    for name, value in pairs:
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _conflicts(pairs: list[tuple[str, Tensor, Any]]) -> list[str]:
    """Names that would give one tensor different values."""
    first: dict[int, tuple[str, Any]] = {}
    found = []
    for name, tensor, value in pairs:
        before, given = first.setdefault(id(tensor), (name, value))
        if given is not value and not np.array_equal(Tensor(given).numpy(), Tensor(value).numpy(), equal_nan=True):
            found.append(f"{before} and {name}")
    return found


def _listed(names: list[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more  # a dict that was given may have other keys


def _converted(array: Array, device: str | None, dtype: Any) -> Array:
    array = array if device is None else to_device(array, device)
    return array if dtype is None or not is_floating(array.dtype) else array.astype(dtype)


def _registered(hooks: list[Any], hook: Any) -> Handle:
    if not callable(hook):
        raise CallError("a function as hook", describe(hook), "module.register_forward_hook(lambda module, x, y: …)")
    hooks.append(hook)
    return Handle(hooks, hook)
