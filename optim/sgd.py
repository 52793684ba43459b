"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minigrad.backend import Array
from minigrad.errors import ArgumentError
from minigrad.tensor import Tensor
from .optimizer import Group, Optimizer, Update


class SGD(Optimizer):
    """Gradient descent: θ ← θ - lr · d, along the gradient or its running sum.

    ::

        g ← g + weight_decay · θ
        b ← momentum · b + (1 - dampening) · g        b = g in the first step
        d = g, with momentum b, with nesterov g + momentum · b

    Nesterov's form asks for a momentum and no dampening. From Sutskever et al. 2013, in PyTorch's variant: lr stands
    outside of b, so that a change of it acts at once.

    >>> import minigrad as mg
    >>> x = mg.Tensor(1.0, requires_grad=True)
    >>> optimizer = SGD([x], lr=0.25)
    >>> (x * x).backward()
    >>> optimizer.step(); print(x.data)
    0.5
    """

    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {"lr": lr, **options})

    def _check(self, options: Group) -> None:
        super()._check(options)
        if options["nesterov"] and (options["momentum"] == 0 or options["dampening"] != 0):
            got = f"momentum={options['momentum']}, dampening={options['dampening']}"
            raise ArgumentError("momentum > 0 and no dampening with nesterov=True", got, "momentum=0.9 is usual")

    def _moments_for(self, group: Group) -> tuple[str, ...]:
        return self.moments if group["momentum"] else ()

    def _update(self, group: Group, step: int) -> Update:
        lr, momentum, decay, nesterov = (group[name] for name in ("lr", "momentum", "weight_decay", "nesterov"))
        share = 1 - group["dampening"] if step > 1 else 1.0

        def move(w: Array, g: Array, *buffer: Array) -> None:
            if decay:
                g = g + decay * w
            direction: Any = g
            for b in buffer:
                b *= momentum
                b += share * g
                direction = g + momentum * b if nesterov else b
            w -= lr * direction

        return move
