"""Loss scaling: gradients of float16 kept above its smallest number, and steps left out where they overflow."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from minigrad import captures
from minigrad.backend import Array, array_module, is_floating
from minigrad.engine.core import Primitive
from minigrad.errors import ArgumentError, DTypeError, GraphError, StateError
from minigrad.messages.explain import describe, explained
from minigrad.tensor import Tensor
from . import gpu
from .optimizer import Optimizer

SMALLEST, LARGEST = 2.0**-100, 2.0**100  # of scales: they and their inverses are numbers of float32


def scale_loss(loss: Any, scale: Any) -> Any:
    """What ``GradScaler.scale`` computes."""
    return loss * scale


scaled = Primitive(scale_loss, elementwise=True).defvjp(lambda g, scale: g * scale)
scaled.scales_losses = True


class GradScaler:
    """Multiplies the loss by a large number, and divides the gradients by it again, as in PyTorch.

    ::

        for ...:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)                        only needed for clipping
            optim.clip_grad_norm(model.parameters(), 1.0)
            scaler.step(optimizer)                            moves nothing where a gradient is not finite
            scaler.update()

    A step with a gradient that is not finite is left out, ``skipped`` counts it, and ``update`` multiplies the scale by
    backoff_factor; after growth_interval good steps in a row it multiplies it by growth_factor. Scales stay within
    2^±100. All that is chosen on the device of the gradients: on a GPU nobody waits. ``enabled=False`` makes every
    method do what it would do without a scaler. Micikevicius et al., "Mixed Precision Training" (2018).

    >>> import minigrad as mg
    >>> from optim import SGD
    >>> w, scaler = mg.Tensor([1.0], requires_grad=True), GradScaler(init_scale=1024.0)
    >>> optimizer = SGD([w], lr=0.5)
    >>> scaler.scale((w * w).sum()).backward(); print(w.grad)
    [2048.]
    >>> scaler.step(optimizer); scaler.update(); print(w.data, scaler.get_scale(), scaler.skipped)
    [0.] 1024.0 0
    """

    @explained
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        factors = init_scale, growth_factor, backoff_factor
        finite = all(isinstance(x, int | float | np.number) and np.isfinite(x) for x in factors)
        if not finite or not (init_scale > 0 and growth_factor >= 1 and 0 < backoff_factor <= 1):
            expected = "finite numbers init_scale > 0, growth_factor >= 1 and 0 < backoff_factor <= 1"
            raise ArgumentError(expected, ", ".join(map(repr, factors)), "the defaults are 65536, 2 and 0.5")
        if isinstance(growth_interval, bool) or not hasattr(growth_interval, "__index__") or growth_interval < 1:
            raise ArgumentError("growth_interval, a whole number from 1", repr(growth_interval), "it counts good steps")
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.enabled = enabled
        self._state: Array = np.array([init_scale, 0.0, 0.0])  # scale, good steps in a row, steps left out
        self._finite: dict[Optimizer, Array] = {}  # of those whose gradients were divided: may it step
        self._stepped: set[Optimizer] = set()  # since the last update

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in at least float32."""
        if not self.enabled:
            return loss
        if not isinstance(loss, Tensor) or not is_floating(loss.dtype):
            hint = "what the model's loss returned, before .item()"
            raise DTypeError("a loss, a floating-point Tensor", describe(loss), hint)
        self._state = array_module(loss.data).asarray(self._state)
        result: Tensor = scaled(loss, self._state[0].astype(np.result_type(loss.dtype, np.float32)))
        return result

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, once between two updates."""
        if not self.enabled:
            return
        _check_optimizer(optimizer)
        if optimizer in self._finite:
            raise GraphError("one unscale_ between two updates", "a second one", "call update() after each step()")
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads: list[Array] = [p.grad for p in params if p.grad is not None]
        captures.undone(functools.partial(self._finite.pop, optimizer, None))
        factor = 1 / self._state[0]
        if gpu.takes(grads):
            gpu.scale(grads, factor)
            self._finite[optimizer] = array_module(factor).isfinite(gpu.norm(grads))
            return
        xp = array_module(factor, *grads)
        finite = xp.asarray(np.True_)
        for param, grad in zip(params, grads, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                param.grad = (grad * factor).astype(grad.dtype)
            finite = finite & xp.isfinite(param.grad).all()
        self._finite[optimizer] = finite

    def step(self, optimizer: Optimizer, where: Any = None) -> None:
        """The optimizer's step, left out where a gradient is not finite, or ``where`` is False; one between updates."""
        if not self.enabled:
            optimizer.step(where)
            return
        _check_optimizer(optimizer)
        if optimizer in self._stepped:
            got = "a second one"
            raise GraphError("one step of an optimizer between two updates", got, "call update() after each step()")
        if optimizer not in self._finite:
            self.unscale_(optimizer)
        if where is not None:
            self._finite[optimizer] = self._finite[optimizer] & where
        captures.undone(functools.partial(self._stepped.discard, optimizer))
        optimizer.step(self._finite[optimizer])
        self._stepped.add(optimizer)

    def update(self) -> None:
        """Choose the next scale from what the steps since the last update met."""
        if not self.enabled or not self._finite:
            return
        xp = array_module(self._state)
        finite = xp.stack([xp.asarray(part) for part in self._finite.values()]).all()
        self._finite.clear()
        self._stepped.clear()
        scale, run, skipped = self._state
        run = xp.where(finite, run + 1, 0.0)
        grown = run == self.growth_interval
        factor = xp.where(finite, xp.where(grown, self.growth_factor, 1.0), self.backoff_factor)
        scale = (scale * factor).clip(SMALLEST, LARGEST)
        found = xp.stack([scale, xp.where(grown, 0.0, run), skipped + ~finite])
        if captures.now.capture is None:
            self._state = found
        else:  # the next replay reads what this one leaves
            self._state[...] = found

    def get_scale(self) -> float:
        """The scale; waits for the device."""
        return float(self._state[0]) if self.enabled else 1.0

    @property
    def skipped(self) -> int:
        """How many steps were left out so far; waits for the device."""
        return int(self._state[2])

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on, ready for JSON."""
        names = ("scale", "good_steps", "skipped")
        return dict(zip(names, self._state.tolist(), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        try:
            found = np.array([float(state[name]) for name in ("scale", "good_steps", "skipped")])
        except (KeyError, TypeError, ValueError):
            found = np.zeros(3)
        if not (np.isfinite(found).all() and found[0] > 0):
            got, hint = describe(state), "scaler.state_dict() gives one"
            raise StateError("numbers 'scale' above 0, 'good_steps' and 'skipped'", got, hint)
        self._state = found


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise DTypeError("an optimizer", describe(optimizer), "such as optim.AdamW(model.parameters())")
