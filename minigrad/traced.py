"""A function called on variables, with what came out of it: what every transform in ``functional.py`` begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad import ops
from minigrad.backend import Array, is_floating
from minigrad.checkpointing import Function, several
from minigrad.creation import asarray, zeros_like
from minigrad.engine.backward import gradients
from minigrad.engine.core import node_ids
from minigrad.engine.recording import Setting, is_grad_enabled
from minigrad.errors import ArgumentError, CallError, DTypeError, ShapeError
from minigrad.messages.arguments import as_int
from minigrad.messages.explain import describe
from minigrad.tensor import Tensor
from minigrad.trees import filled, is_leaf, leaves, parts

Argnums = int | tuple[int, ...] | None


_TRANSFORMING = Setting(recording=True, transforming=True)


class _Variable(Tensor):
    """A leaf that a transform made, and when: leaves made while its function runs are no outer graph of it."""

    __slots__ = ("_oldest",)

    def _fill(self, array: Array) -> None:
        super()._fill(array)
        self._oldest = next(node_ids)

    def _in_place(self, sign: str, made: Tensor) -> Tensor:
        return made  # the name belongs to the function, which may give it to another tensor


def _variable(value: Any, path: str) -> Tensor:
    """``value`` as something to differentiate by: a new leaf, or a new result of a tensor that is being recorded."""
    tensor = asarray(value)
    if tensor.requires_grad and is_grad_enabled():
        return ops.reshape(tensor, tensor.shape)
    if not is_floating(tensor.dtype):
        hint = "write 1.0 for 1; argnums= names the arguments to differentiate by"
        raise DTypeError("floating-point arguments to differentiate by", f"{describe(tensor)} as {path}", hint)
    leaf = _Variable.__new__(_Variable)
    leaf._fill(tensor.data)
    leaf._requires_grad, leaf._version = True, tensor._version
    return leaf


class Traced:
    """One call of a function on variables.

    args       the wanted arguments, as they were given
    variables  one for each of their leaves, in order
    out, outs  the result and its leaves; ``aux`` is what came beside it
    whole      whether nothing that a gradient flows to is older than the call: every leaf behind the results is a
               variable, or was made by a transform inside
    nested     whether an outer graph goes on through the results
    """

    def __init__(
        self, fn: Function, args: Sequence[Any], kwargs: Any = None, argnums: Argnums = None, has_aux: bool = False
    ) -> None:
        if not args:
            raise CallError("at least one argument to differentiate by", "none", "they follow the function: (fn, x)")
        self.single = isinstance(argnums, int) or (argnums is None and len(args) == 1)
        wanted = _places(argnums, len(args))
        self.args = tuple(args[i] for i in wanted)
        outer, start = is_grad_enabled(), next(node_ids)
        made = {i: _variables(args[i], f"argument {i}") for i in wanted}
        values = [_filled(a, made[i]) if i in made else asarray(a) if _is_number(a) else a for i, a in enumerate(args)]
        self.variables = [variable for i in wanted for variable in made[i]]
        with _TRANSFORMING:
            out = fn(*values, **(kwargs or {}))
        self.out: Any
        self.aux: Any
        self.out, self.aux = _pair(out) if has_aux else (out, None)
        self.outs = [_result(part) for _, part in _results(self.out)]
        self.whole = all(out.node is None or out.node._oldest >= start for out in self.outs)
        self.nested = outer and (not self.whole or any(v.node for v in self.variables))

    def grads(self, seeds: Sequence[Any], create: bool, retain: bool = False) -> list[Tensor]:
        """Gradients of the results with respect to the variables; zeros where nothing depends on one."""
        return grads(self.outs, self.variables, seeds, create, retain, self.whole)

    def detached(self) -> Any:
        """The result, cut off from the graph that served the transform, unless an outer one goes on."""
        return self.out if self.nested else filled(self.out, (out.detach() for out in self.outs))

    def with_aux(self, *results: Any, has_aux: bool) -> Any:
        """The results of a transform, and what the function gave besides, cut off likewise."""
        if not has_aux:
            return results if len(results) > 1 else results[0]
        aux = self.aux
        if not self.nested:
            aux = filled(aux, (v.detach() if isinstance(v, Tensor) else v for _, v in leaves(aux)))
        return (*results, aux)

    def in_form(self, found: Sequence[Any]) -> Any:
        """A derivative by each variable, in the form of the arguments."""
        rest = iter(found)
        whole = tuple(filled(arg, rest, lambda value: None) for arg in self.args)
        return whole[0] if self.single else whole

    def scalar(self) -> None:
        """Refuse a result that isn't a single number."""
        if not is_leaf(self.out) or self.outs[0].size != 1:
            hint = "call .sum() or .mean() at its end; has_aux=True lets it return a second thing"
            raise ShapeError("a function that returns a scalar", describe(self.out), hint)


def _places(argnums: Argnums, count: int) -> tuple[int, ...]:
    """Positions of the arguments to differentiate by, counted from the front; None is all of them."""
    if argnums is None:
        return tuple(range(count))
    wanted = [as_int(i, "argnums") for i in several(argnums)]
    if any(not -count <= i < count for i in wanted):
        raise ArgumentError(f"argnums among the {count} positional arguments", str(argnums), "the first is 0")
    return tuple(i % count for i in wanted)


def _variables(arg: Any, path: str) -> list[Tensor]:
    if not is_leaf(arg) and parts(arg) is None:
        return [_variable(arg, path)]  # which says what it isn't
    return [_variable(value, where) for where, value in leaves(arg, path)]


def _filled(arg: Any, variables: Sequence[Tensor]) -> Any:
    return filled(arg, iter(variables))


def _is_number(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic, float))


def _pair(out: Any) -> tuple[Any, Any]:
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise CallError("a function that returns a pair, as has_aux says", describe(out), "return result, aux")
    return out[0], out[1]


def _results(out: Any) -> list[tuple[str, Any]]:
    """The leaves of a result; what else stands in it has no derivative and belongs beside it."""
    found = None if isinstance(out, Tensor) else parts(out)
    if found is None:
        return [("", out)]
    return [pair for name, part in found for pair in _results(part)]


def _result(value: Any) -> Tensor:
    """A result as a Tensor. A number of Python is a constant; an array may have been computed beside the graph."""
    if type(value) in (int, float):  # which no number of NumPy is
        return asarray(value)
    if not isinstance(value, Tensor):
        hint = "compute with minigrad, not with .data or NumPy alone; has_aux=True is for what is not differentiated"
        raise DTypeError("a function that returns Tensors", describe(value), hint)
    return value


def grads(
    outs: Sequence[Any],
    variables: Sequence[Tensor],
    seeds: Sequence[Any],
    create: bool,
    retain: bool = False,
    whole: bool = False,
) -> list[Tensor]:
    """Gradients of results with respect to variables; zeros where nothing depends on one."""
    pairs = [(o, s) for o, s in zip(outs, seeds, strict=True) if o._requires_grad]
    found = gradients([o for o, _ in pairs], variables, [s for _, s in pairs], retain or create, create, whole)
    return [zeros_like(v) if f is None else f for f, v in zip(found, variables, strict=True)]
