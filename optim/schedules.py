"""Learning-rate schedules: functions of the number of the update, counted from 1 by a training loop.

::

    for step in range(1, total_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = cosine_schedule(step, max_lr, min_lr, warmup_steps, total_steps)
"""

from __future__ import annotations

import math
from numbers import Real

from minigrad.errors import ArgumentError
from minigrad.messages.explain import explained


@explained
def cosine_schedule(step: float, max_lr: float, min_lr: float, warmup_steps: float, total_steps: float) -> float:
    r"""Linear warm-up from 0 to ``max_lr``, then half a cosine down to ``min_lr``, which holds from ``total_steps`` on.

    step/warmup · max                                                  for step < warmup,
    min + ½ (1 + cos(π (step - warmup) / (total - warmup))) (max - min)   up to total,
    min                                                                from total on.

    Without warm-up step 0 has ``max_lr``. Where ``total_steps <= warmup_steps`` no cosine is left: ``min_lr`` follows
    the warm-up. Past the warm-up the rate never leaves [min_lr, max_lr]. An ArgumentError says which number can't be.
    From Loshchilov & Hutter 2017 (SGDR), with one period.

    >>> [round(cosine_schedule(step, 1.0, 0.1, 2, 6), 4) for step in range(8)]
    [0.0, 0.5, 1.0, 0.8682, 0.55, 0.2318, 0.1, 0.1]
    """
    _check_steps(step=step, warmup_steps=warmup_steps, total_steps=total_steps)
    if not 0 <= min_lr <= max_lr < math.inf:
        hint = "a tenth of max_lr is a usual min_lr"
        raise ArgumentError("0 <= min_lr <= max_lr, both finite", f"min_lr={min_lr}, max_lr={max_lr}", hint)
    if step < warmup_steps:
        return step / warmup_steps * max_lr
    if step >= total_steps:
        return min_lr
    angle = math.pi * (step - warmup_steps) / (total_steps - warmup_steps)
    rate = min_lr + 0.5 * (1 + math.cos(angle)) * (max_lr - min_lr)
    return min(max_lr, max(min_lr, rate))  # rounding may step over either by a last digit


@explained
def step_schedule(step: float, max_lr: float, step_size: float, gamma: float = 0.1) -> float:
    """``max_lr``, multiplied by ``gamma`` after every ``step_size`` steps: max_lr · gamma^⌊step / step_size⌋.

    ``step`` counts what has been done, updates or epochs, as often as torch's StepLR was stepped.

    >>> [round(step_schedule(epoch, 1.0, 2, 0.5), 4) for epoch in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    _check_steps(step=step, step_size=step_size)
    if not 0 <= max_lr < math.inf:
        raise ArgumentError("a finite max_lr >= 0", f"max_lr={max_lr}", "the rate of the first steps")
    if step_size == 0:
        raise ArgumentError("step_size above 0", "step_size=0", "so many steps have one rate")
    if not 0 <= gamma < math.inf:
        raise ArgumentError("a finite gamma >= 0", f"gamma={gamma}", "0.1 is usual")
    return float(max_lr * gamma ** (step // step_size))


@explained
def noam_schedule(step: float, d_model: int, warmup_steps: float = 4000, factor: float = 1.0) -> float:
    """Linear warm-up, then decay with the inverse square root of the step: the schedule of the first Transformer.

    factor · d_model^-½ · min(step^-½, step · warmup^-3/2), and 0 at step 0; its peak, at ``step = warmup_steps``, is
    factor / √(d_model · warmup). Without warm-up the decay starts at step 1. From Vaswani et al. 2017, section 5.3.

    >>> noam_schedule(0, 512), f"{noam_schedule(4000, 512):.3e}", f"{noam_schedule(16000, 512):.3e}"
    (0.0, '6.988e-04', '3.494e-04')
    """
    _check_steps(step=step, warmup_steps=warmup_steps)
    if not 1 <= d_model < math.inf:
        raise ArgumentError("d_model >= 1", f"d_model={d_model}", "the width of the model")
    if not 0 <= factor < math.inf:
        raise ArgumentError("a finite factor >= 0", f"factor={factor}", "1 is that of the paper")
    if step == 0:
        return 0.0
    scale = step**-0.5 if step >= warmup_steps else step * warmup_steps**-1.5
    return float(factor * d_model**-0.5 * scale)


def _check_steps(**steps: float) -> None:
    for name, value in steps.items():
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise ArgumentError(f"{name} >= 0", f"{name}={value!r}", "steps are numbers that count from 0")
