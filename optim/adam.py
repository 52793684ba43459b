"""Adam and AdamW: steps of about lr for every entry, whatever the scale of its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from minigrad import captures
from minigrad.backend import Array, accumulator, array_module, is_on_gpu
from minigrad.errors import ArgumentError
from minigrad.machine.loops import loop
from minigrad.tensor import Tensor
from . import gpu
from .optimizer import Group, Optimizer, OutOfRange, Update

# For a number of 4 or 8 bytes: an eps beside which the root of a square too small for it doesn't count.
FAINT = {info.dtype.itemsize: math.sqrt(info.tiny) / float(info.eps) for info in map(np.finfo, ("float32", "float64"))}

FAINT_EPS, LARGEST = FAINT[4], 1e19  # of float32, for the loop: what is beyond them is left to NumPy


class Adam(Optimizer):
    """Adam: the mean gradient over its root mean square, both running and corrected for their start at 0.

    ::

        g ← g + weight_decay · θ                       AdamW: θ ← (1 - lr · weight_decay) θ
        m ← β₁ m + (1 - β₁) g                          m̂ = m / (1 - β₁ᵗ)
        v ← β₂ v + (1 - β₂) g²                         v̂ = v / (1 - β₂ᵗ)
        θ ← θ - lr · m̂ / (√v̂ + eps)

    t counts the parameter's own updates, from 1. With ``eps=0`` an entry whose gradient was always 0 becomes NaN. From
    Kingma & Ba 2015; weight decay enters the moments here, :class:`AdamW` keeps it out of them.

    >>> import minigrad as mg
    >>> x = mg.Tensor(1.0, requires_grad=True)
    >>> optimizer = Adam([x], lr=0.1)
    >>> (1000 * x).backward()
    >>> optimizer.step(); print(x.data.round(6))
    0.9
    """

    moments = ("exp_avg", "exp_avg_sq")
    decoupled = False  # weight decay acts on θ itself, beside the gradient's step

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _check(self, options: Group) -> None:
        super()._check(options)
        try:
            first, second = (float(beta) for beta in options["betas"])
        except (TypeError, ValueError):
            hint = "(0.9, 0.999) is usual"
            raise ArgumentError("a pair of numbers as betas", f"betas={options['betas']!r}", hint) from None
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ArgumentError("0 <= beta < 1 for both betas", f"betas={options['betas']!r}", "(0.9, 0.999) is usual")
        options["betas"] = (first, second)

    def _update(self, group: Group, step: int) -> Update:
        lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        # lr · m̂ / (√v̂ + eps) = rate · m / (√v + eps · root), which saves two passes
        root = math.sqrt(1 - beta2**step)
        rate = lr * root / (1 - beta1**step)

        coupled = decay and not self.decoupled
        keep = 1 - lr * decay if decay and self.decoupled else 1.0

        def move(w: Array, g: Array, m: Array, v: Array, begun: bool = False) -> None:
            g = g if g.dtype == v.dtype else g.astype(v.dtype)
            g = g + w * decay if coupled else g
            adam(w, g, m, v, keep, beta1, 1 - beta1, beta2, 1 - beta2, eps * root, rate, begun)

        return move

    def _move_on_gpu(self, active: list[tuple[int, Group, Tensor]], where: Any) -> bool:
        wide = any(self.state[place].get("exp_avg_sq", param.data).itemsize == 8 for place, _, param in active)
        if wide or not gpu.takes([a for _, _, param in active for a in (param.data, param.grad)]):
            self._leave_kernel()
            return False
        xp = array_module(active[0][2].data)
        if self._skipped is None:
            self._skipped = captures.uploaded_once(xp, np.zeros((), np.int64))
        where = None if where is None else xp.asarray(where, np.bool_)
        for group in self.param_groups:
            mine = [(place, param) for place, owner, param in active if owner is group]
            states = [self._counted(place, group, param) for place, param in mine]
            weights, gradients = [param.data for _, param in mine], [param.grad for _, param in mine]
            if mine:
                gpu.adam(group, weights, gradients, states, self.decoupled, where, self._skipped)
        if where is not None:
            self._skipped += ~where
        return True

    def _leave_kernel(self) -> None:
        """Make the state that of the general update, where the kernel had it."""
        skipped, self._skipped = 0 if self._skipped is None else int(self._skipped), None
        for state in self.state:
            if "step" in state:
                state["step"] -= skipped
                state["exp_avg_sq"] = self._saved("exp_avg_sq", state["exp_avg_sq"])

    def _saved(self, name: str, value: Array) -> Array:
        kept = name == "exp_avg_sq" and is_on_gpu(value) and value.itemsize == 4
        return gpu.squares(value) if kept else value

    def _loaded_state(self, arrays: Mapping[str, Array], groups: list[Group]) -> list[dict[str, Any]]:
        state = super()._loaded_state(arrays, groups)
        params = [param for group in groups for param in group["params"]]
        for found, param in zip(state, params, strict=True):
            v = found.get("exp_avg_sq")
            if v is not None and v.itemsize == 8 and accumulator(param.dtype).itemsize == 4 and is_on_gpu(v):
                found["exp_avg_sq"] = gpu.kept(v)
        return state


def _adam(
    w: Array, g: Array, m: Array, v: Array, keep: float, beta1: float, rest1: float, beta2: float, rest2: float,
    eps: float, rate: float, begun: bool,
) -> None:  # fmt: skip
    xp = array_module(w)
    s = xp.empty_like(v)  # the only temporary
    if not begun:
        if keep != 1:
            w *= keep
        m *= beta1
        m += xp.multiply(g, rest1, out=s)
    try:  # NumPy looks for overflow in any case
        with np.errstate(over="raise", under="raise" if eps < FAINT.get(v.itemsize, 0) else "ignore"):
            xp.multiply(g, g, out=s)
            s *= rest2
    except FloatingPointError:
        raise OutOfRange from None
    if xp is not np and v.itemsize == 4:  # arrays that the kernel doesn't take: the host looks, and waits
        faint = eps < FAINT[4] and (s < np.finfo(np.float32).tiny) & (g != 0)
        if bool((~xp.isfinite(s) & xp.isfinite(g) | faint).any()):
            raise OutOfRange
    v *= beta2
    v += s
    xp.sqrt(v, out=s)
    s += eps
    xp.divide(m, s, out=s)
    s *= rate
    w -= s


@loop(_adam)
def adam(
    w: Array, g: Array, m: Array, v: Array, keep: float, beta1: float, rest1: float, beta2: float, rest2: float,
    eps: float, rate: float, begun: bool,
) -> Any:  # fmt: skip
    """A tile's step: w keeps the share ``keep``, and moves by rate · m / (√v + eps)."""
    weight, slope, mean, square = w.ravel(), g.ravel(), m.ravel(), v.ravel()
    strange = begun or eps < FAINT_EPS
    for i in range(slope.size):
        strange |= not abs(slope[i]) < LARGEST
    if strange:
        return False
    for i in range(slope.size):
        mean[i] = beta1 * mean[i] + rest1 * slope[i]
        square[i] = beta2 * square[i] + rest2 * (slope[i] * slope[i])
        weight[i] = keep * weight[i] - rate * (mean[i] / (np.sqrt(square[i]) + eps))
    return True


class AdamW(Adam):
    """Adam with decoupled weight decay: θ ← (1 - lr · weight_decay) θ, then Adam's step with none in its moments.

    Decay first, then m̂ / (√v̂ + eps), as in PyTorch. Give matrices alone a decay with :func:`optim.decay_groups`. From
    Loshchilov & Hutter 2019.

    >>> import minigrad as mg
    >>> x = mg.Tensor(1.0, requires_grad=True)
    >>> optimizer = AdamW([x], lr=0.1, weight_decay=0.5)
    >>> (0 * x).backward()
    >>> optimizer.step(); print(x.data)
    0.95
    """

    decoupled = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)
