"""Modules that hold others: in a list, in a dict, or one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from minigrad.errors import ArgumentError, DTypeError, IndexRangeError
from .module import Module, is_plain


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


class ModuleList(Module):
    """A list of modules whose parameters are found; it isn't called itself.

    >>> layers = ModuleList([Module(), Module()])
    >>> len(layers), [name for name, _ in layers.named_children()]
    (2, ['0', '1'])
    """

    _count: int | None = None  # of the modules, as long as their names are "0", "1", …

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        vars(self)["_count"] = 0
        self.extend(modules)

    def __setattr__(self, name: str, value: Any) -> None:
        change = isinstance(value, Module) - isinstance(vars(self).get(name), Module)
        super().__setattr__(name, value)
        if change:
            vars(self)["_count"] = int(name) + 1 if change > 0 and name == str(self._count) else None

    def __delattr__(self, name: str) -> None:
        if isinstance(vars(self).get(name), Module):
            vars(self)["_count"] = None
        super().__delattr__(name)

    def append(self, module: Module) -> None:
        """Add a module at the end."""
        self._set(len(self), module)

    def extend(self, modules: Iterable[Module]) -> None:
        """Add modules at the end, in their order."""
        if isinstance(modules, Module) and not isinstance(modules, ModuleList):
            raise DTypeError("a list of modules", type(modules).__name__, "put a single one into a list: [module]")
        for place, module in enumerate(modules, len(self)):
            self._set(place, module)

    def _set(self, place: int, module: Module) -> None:
        if not isinstance(module, Module):
            raise DTypeError("modules", f"{_kind(module)} at place {place}", self._hint(module))
        setattr(self, str(place), module)

    def _hint(self, value: Any) -> str:
        """What to do about a value that is no module."""
        kind = type(self).__name__
        if isinstance(value, type) and issubclass(value, Module):
            return f"{value.__name__}() makes one"
        if isinstance(value, Mapping):
            return f"nn.{kind}{'(*layers.values())' if kind == 'Sequential' else '(layers.values())'}, without names"
        if isinstance(value, Iterable) and not isinstance(value, str):
            return "nn.Sequential(*layers) takes them one by one" if kind == "Sequential" else "one list of modules"
        return "a function goes into the forward of an nn.Module"

    def _place(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexRangeError(f"an index into {len(self)} modules", str(index), "-1 is the last")
        return index % len(self)

    def __getitem__(self, index: Any) -> Any:
        if self._count is not None and not isinstance(index, slice):
            return vars(self)[str(self._place(index))]
        modules = [module for _, module in self.named_children()]
        return type(self)._of(modules[index]) if isinstance(index, slice) else modules[self._place(index)]

    @classmethod
    def _of(cls, modules: list[Module]) -> ModuleList:
        return cls(modules)

    def __setitem__(self, index: int, module: Module) -> None:
        self._set(self._place(index), module)

    def __len__(self) -> int:
        return sum(1 for _ in self.named_children()) if self._count is None else self._count

    def __iter__(self) -> Iterator[Any]:
        return (module for _, module in self.named_children())


class Sequential(ModuleList):
    """Modules applied one after the other, each to the result of the one before.

    >>> from nn.linear import Linear
    >>> import minigrad as mg
    >>> Sequential(Linear(2, 3), Linear(3, 1))(mg.ones((5, 2))).shape
    (5, 1)
    """

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    @classmethod
    def _of(cls, modules: list[Module]) -> Sequential:
        return cls(*modules)

    def forward(self, x: Any) -> Any:
        """The last module of … of the first module of ``x``."""
        levels = [iter(self)]
        while levels:  # one Sequential in another is no call in another
            module = next(levels[-1], None)
            if module is None:
                levels.pop()
            elif is_plain(module, Sequential):
                levels.append(iter(module))
            else:
                x = module(x)
        return x


class ModuleDict(Module):
    """A dict of modules whose parameters are found; it isn't called itself.

    >>> heads = ModuleDict({"a": Module()})
    >>> list(heads), "b" in heads
    (['a'], False)
    """

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        super().__init__()
        for name, module in (modules or {}).items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        if not isinstance(module, Module):
            hint = "a function goes into the forward of an nn.Module"
            raise DTypeError("modules", f"{_kind(module)} for {name!r}", hint)
        if "." in name or hasattr(type(self), name) or (name in vars(self) and name not in self):
            hint = "another name; its methods are attributes too"
            raise ArgumentError("a name without dots that is none of ModuleDict's own", repr(name), hint)
        setattr(self, name, module)

    def __getitem__(self, name: str) -> Any:
        return dict(self.named_children())[name]

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        """The names, in the order in which they were given."""
        return [name for name, _ in self.named_children()]

    def values(self) -> list[Module]:
        """The modules, in the order in which they were given."""
        return [module for _, module in self.named_children()]

    def items(self) -> list[tuple[str, Module]]:
        """Pairs of a name and its module."""
        return list(self.named_children())
