"""Fused operations: a definition in primitives, and a hand-written pair of kernels that runs in its place."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import numpy as np

from minigrad import core
from minigrad.backend import array_module
from minigrad.backward import grad
from minigrad.core import Node, Primitive
from minigrad.explain import FOREIGN, is_clear
from minigrad.plan import Plan
from minigrad.recording import enable_grad

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


class Fused(Primitive[P]):
    """A primitive whose ``definition`` composes others, and whose first-order work is done by a pair of kernels.

    The definition is what the operation means: it is differentiated for higher orders, it is the oracle of the tests,
    and it runs where there is no kernel for the arrays. ``defforward`` gives the kernel on arrays, which returns the
    result and a dict of residuals of its own; ``defbackward`` the kernel that returns a tuple of gradients. A node
    keeps the arguments, since the definition may be asked for, and the residuals that the backward kernel names.
    """

    def __init__(self, function: Callable[P, Any], **facts: Any) -> None:
        super().__init__(function, **facts)
        self.definition: Callable[..., Any] = function
        self.kernel: Callable[..., Any] | None = None
        self.asks_needs = False  # whether the forward kernel wants to know which gradients will be asked for

    def defforward(self, kernel: F) -> F:
        """Decorate the forward kernel: arguments as arrays to ``(result, {name: residual})``.

        A kernel with a parameter ``needs`` (with a default for "none") is told which gradients will be asked for.
        """
        self.kernel, self.asks_needs = kernel, "needs" in inspect.signature(kernel).parameters
        return kernel

    def defbackward(self, *names: str) -> Callable[[F], F]:
        """Decorate the backward kernel, which returns the gradients of ``names``; ``needs`` says which are wanted."""
        return self.defjoint(*names)

    def _extras_allowed(self) -> bool:
        return True

    def kept_besides(self) -> tuple[str, ...]:
        return tuple(self.position)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        if self.kernel is None or not self.runs_on(args):
            return self._defined(args, kwargs)
        return super().__call__(*args, **kwargs)

    def _defined(self, args: Any, kwargs: Any) -> Any:
        started = time.perf_counter() if core.observers else 0.0
        out = self.definition(*args, **kwargs)
        for observer in tuple(core.observers):
            observer.definition(self, started)
        return out

    def runs_on(self, args: Sequence[Any]) -> bool:
        """Whether there is a kernel for these arguments; the NumPy pair takes what lies on the CPU."""
        return array_module(*[a._data if isinstance(a, core.Tensor) else a for a in args]) is np

    def _run(self, raw: list[Any], count: int, plan: Plan | None) -> tuple[Any, dict[str, Any]]:
        assert self.kernel is not None
        asked = {"needs": plan.needs} if plan and self.asks_needs else {}
        try:
            result: tuple[Any, dict[str, Any]] = self.kernel(*raw, **asked)
            return result
        except FOREIGN as error:
            if is_clear(self, error):
                raise
            raise self._told(raw, count, error) from None

    def pull(self, node: Node, g: Any, create_graph: bool) -> list[Any]:
        """Gradients by the backward kernel; by differentiating the definition where they must be differentiable."""
        if not create_graph:
            return super().pull(node, g, create_graph)
        lifted = dict(zip(node.plan.names, self.lift(node), strict=True))
        names = list(self.position)
        with enable_grad():
            inputs = [lifted[names[i]].reshape(node.parents[k].shape) for k, i in enumerate(node.plan.wrt)]
            lifted |= {names[i]: x for i, x in zip(node.plan.wrt, inputs, strict=True)}  # one node each, also if shared
            out = self.definition(*[lifted[name] for name in names])
        return list(grad(out, inputs, g, create_graph=True, allow_unused=True))


@overload
def fused(function: Callable[P, Any]) -> Fused[P]: ...
@overload
def fused(**facts: Any) -> Callable[[Callable[P, Any]], Fused[P]]: ...
def fused(function: Callable[..., Any] | None = None, **facts: Any) -> Any:
    """Make a definition in primitives a registered :class:`Fused`, to be given its kernels: ``@fused(torch=…)``."""
    if function is None:
        return lambda f: core.register(Fused(f, **facts))
    return core.register(Fused(function, **facts))
