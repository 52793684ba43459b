"""Optimizers, learning-rate schedules and gradient clipping, on the raw arrays of parameters, in place.

>>> import minigrad as mg
>>> import optim
>>> x = mg.Tensor([3.0, -2.0], requires_grad=True)
>>> optimizer = optim.AdamW([x], lr=0.1, weight_decay=0.0)
>>> for step in range(1, 201):
...     optimizer.zero_grad()
...     ((x - 1) ** 2).sum().backward()
...     norm = optim.clip_grad_norm([x], max_norm=1.0)
...     for group in optimizer.param_groups:
...         group["lr"] = optim.cosine_schedule(step, max_lr=0.1, min_lr=0.0, warmup_steps=10, total_steps=200)
...     optimizer.step()
>>> bool(abs(x.data - 1).max() < 0.01)
True
"""

from minigrad.messages.habits import module_names
from .adam import Adam, AdamW
from .clipping import clip_grad_norm
from .groups import decay_groups
from .optimizer import Optimizer
from .scaler import GradScaler
from .schedules import cosine_schedule, noam_schedule, step_schedule
from .sgd import SGD
from .sharded import ShardedOptimizer

# fmt: off
__all__ = [
    "SGD", "Adam", "AdamW", "GradScaler", "Optimizer", "ShardedOptimizer", "clip_grad_norm", "cosine_schedule",
    "decay_groups", "noam_schedule", "step_schedule",
]
# fmt: on
__getattr__, __dir__ = module_names(globals())
