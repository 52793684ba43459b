"""A fused operation is a definition in primitives, and a hand-written pair of kernels that runs in its place."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np

from minigrad.backend import array_module, array_of
from minigrad.engine import core
from minigrad.engine.backward import Pass
from minigrad.engine.core import Node, Primitive
from minigrad.engine.plan import Plan
from minigrad.engine.recording import F, current_mode, enable_grad
from minigrad.engine.registry import P, register
from minigrad.messages.explain import FOREIGN, explanation

Kernel: TypeAlias = Callable[..., Any]


class GpuPair(NamedTuple):
    """The kernels for arrays on a GPU; they have the parameters and the residuals of the NumPy pair."""

    forward: Kernel
    backward: Kernel
    fits: Callable[..., bool]  # whether they take these arguments


class Fused(Primitive[P]):
    """A primitive whose ``definition`` composes others, and whose first-order work is done by a pair of kernels.

    The definition says what the operation means. It is differentiated for higher orders, it is the oracle of the
    tests, and it runs where no kernel takes the arrays. ``defforward`` gives the kernel on arrays, which returns the
    result and a dict of its own residuals. ``defbackward`` gives the kernel that returns a tuple of gradients. A node
    keeps the arguments, since the definition may be needed, and the residuals that the backward kernel names.
    ``defgpu`` gives a second pair for arrays on a GPU.

    wide_part  an argument that asks for a part which autocast keeps in float32: with it the definition runs there, and
               each of its parts has its own precision; the pair of a GPU takes all as it is, and does the same
    """

    def __init__(self, function: Callable[P, Any], wide_part: str | None = None, **facts: Any) -> None:
        super().__init__(function, **facts)
        self.wide_part, self.keeps_arguments = wide_part, True
        self.definition: Kernel = function
        self.kernel: Kernel | None = None
        self.gpu: Any = None  # a GpuPair, where there is one
        self.asks_needs = False  # whether the forward kernel wants to know which gradients will be asked for

    def defforward(self, kernel: F) -> F:
        """Decorate the forward kernel: arguments as arrays to ``(result, {name: residual})``.

        A kernel with a parameter ``needs`` (with a default for "none") is told which gradients will be asked for.
        """
        self.kernel, self.asks_needs = kernel, "needs" in inspect.signature(kernel).parameters
        return kernel

    def defbackward(self, *names: str) -> Callable[[F], F]:
        """Decorate the backward kernel, which returns the gradients of ``names``; ``needs`` says which are wanted."""

        def declare(kernel: F) -> F:
            @functools.wraps(kernel)  # with its signature, which names the residuals
            def rule(g: Any, *residuals: Any) -> Any:
                return (kernel if array_module(g, *residuals) is np else self.gpu.backward)(g, *residuals)

            self.defjoint(*names)(rule)
            return kernel

        return declare

    def defgpu(self, forward: Kernel, backward: Kernel, fits: Callable[..., bool] = lambda *_: True) -> None:
        """Give the kernels for arrays on a GPU, and which arguments they take; others are left to the definition."""
        self.gpu = GpuPair(forward, backward, fits)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        on_gpu = array_module(*args, *kwargs.values()) is not np
        if self.precision and current_mode().autocast:
            values = self._bind(args, kwargs)
            args, kwargs = self._cast(values), {}  # type: ignore[assignment]
            if args is values and not on_gpu:
                return self._run_definition(*args)
        if on_gpu:  # whose kernels take all arguments in one form
            values = self._bind(args, kwargs)
            args, kwargs = tuple(self._checked_at(i, values) for i in range(len(values))), {}  # type: ignore[assignment]
        if self.kernel is None or (on_gpu and not (self.gpu and self.gpu.fits(*map(array_of, args)))):
            return self._run_definition(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _cast(self, values: Any) -> Any:
        """The values themselves where their parts have precisions of their own."""
        in_parts = self.wide_part and values[self.position[self.wide_part]] is not None
        return values if in_parts else super()._cast(values)

    def _run_definition(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter() if core.observers else 0.0
        try:
            out = self.definition(*args, **kwargs)
        except FOREIGN as error:
            raise explanation(self, args, kwargs, error)  # noqa: B904
        core.notify("definition", self, started)
        return out

    def _run(self, raw: list[Any], plan: Plan | None) -> Any:
        kernel: Any = self.gpu.forward if self.gpu and array_module(*raw) is not np else self.kernel
        return kernel(*raw, **({"needs": plan.needs} if plan and self.asks_needs else {}))

    def run_rules(self, node: Node, g: Any, create_graph: bool) -> list[Any]:
        """Gradients by the backward kernel; by differentiating the definition where they must be differentiable."""
        if not create_graph:
            return super().run_rules(node, g, create_graph)
        inputs, outs = self.expanded(node)
        pairs = zip(outs, g, strict=True) if type(g) is tuple else [(outs[0], g)]
        work = Pass(create_graph=True, retain_graph=True, targets={x.node for x in inputs}, inner=True)
        work.run([(part.node, up) for part, up in pairs if isinstance(part, core.Tensor) and part.requires_grad])
        return [work.found.get(x.node) for x in inputs]

    def expanded(self, node: Node) -> tuple[list[Any], tuple[Any, ...]]:
        """A graph of the definition for one of a kernel: its inputs, in the order of ``plan.wrt``, and its results."""
        wanted = [self.names[i] for i in node.plan.wrt]
        values = dict(zip(node.plan.names, self.rewrap(node), strict=True))
        with enable_grad():
            inputs = [values[name].reshape(edge.shape) for name, edge in zip(wanted, node.parents, strict=True)]
            values |= zip(wanted, inputs, strict=True)  # a node for each, also where one Tensor stands in two places
            out = self.definition(*[values[name] for name in self.names])
        return inputs, out if type(out) is tuple else (out,)


@overload
def fused(function: Callable[P, Any]) -> Fused[P]: ...
@overload
def fused(**facts: Any) -> Callable[[Callable[P, Any]], Fused[P]]: ...
def fused(function: Callable[..., Any] | None = None, **facts: Any) -> Any:
    """Make a definition in primitives a registered :class:`Fused`, to be given its kernels: ``@fused(torch=…)``."""
    return register(Fused(function, **facts)) if function else lambda f: register(Fused(f, **facts))
