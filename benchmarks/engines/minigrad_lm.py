"""minigrad: ``nn.TransformerLM`` and ``optim.AdamW`` as they come."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from harness.configs import ADAMW, MAX_NORM, NORM_EPS, ROPE_THETA, Config, batches, initial_weights

import minigrad as mg
import nn
import optim

Batch = tuple[np.ndarray, np.ndarray]


class TrainingStep:
    """Called with a batch, it trains the model on it and returns the loss."""

    def __init__(self, config: Config, weights: dict[str, np.ndarray], **options: Any) -> None:
        self.model = build_model(config, weights, **options)
        self.optimizer = optim.AdamW(self.model.parameters(), **ADAMW)

    def __call__(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        loss = self.differentiate(tokens, targets)
        self.update()
        return loss

    def differentiate(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """The loss, with its gradient left in the parameters."""
        loss = self.model.loss(tokens, targets)
        loss.backward()
        return float(loss.item())

    def update(self) -> None:
        """Clip the gradient, move the parameters, and let the gradient go."""
        optim.clip_grad_norm(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


def build_model(config: Config, weights: dict[str, np.ndarray], **options: Any) -> nn.TransformerLM:
    """The model with the given weights; ``options`` are more arguments of ``nn.TransformerLM``."""
    sizes = (config.vocab_size, config.context_length, config.d_model, config.num_layers, config.num_heads, config.d_ff)
    model = nn.TransformerLM(*sizes, ROPE_THETA, norm_eps=NORM_EPS, **options)
    model.load_state_dict(weights)
    return model


training_step = TrainingStep


def compile_step(config: Config, **options: Any) -> None:
    """Have the loops of a step compiled, by one of a narrow model: no array of it is large."""
    if getattr(mg, "is_compiled", bool)():  # an old checkout has none
        narrow = dataclasses.replace(config, d_model=8, num_layers=1, num_heads=2, d_ff=8, batch_size=1)
        TrainingStep(narrow, initial_weights(narrow), **options)(*next(batches(narrow)))


def multiplier(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    """A function that multiplies the two matrices."""
    return lambda: a @ b


def profile(step: TrainingStep, batches: list[Batch]) -> dict[str, float]:
    """The share of each operation in the time of a step, forward and backward apart, the largest first."""
    times: defaultdict[str, float] = defaultdict(float)
    with mg.profile() as profiled:
        for batch in batches:
            step.differentiate(*batch)
            start = time.perf_counter()
            step.update()
            times["clip and AdamW"] += time.perf_counter() - start
    for row in profiled.rows:
        times[row.label] += row.own
    times["recording and the rest"] = profiled.seconds - sum(times.values())
    largest_first = sorted(times.items(), key=lambda item: -item[1])
    return {label: seconds / profiled.seconds for label, seconds in largest_first}
