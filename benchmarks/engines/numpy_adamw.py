"""Clipping and AdamW on NumPy arrays, for engines without an optimizer of their own: autograd and MyGrad."""

from __future__ import annotations

import math

import numpy as np
from harness.configs import ADAMW, MAX_NORM


class AdamW:
    """Steps of AdamW on the arrays of a dict, in place, with gradients that were clipped together."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights
        self.first = {name: np.zeros_like(w) for name, w in weights.items()}
        self.second = {name: np.zeros_like(w) for name, w in weights.items()}
        self.count = 0

    def step(self, gradients: dict[str, np.ndarray]) -> None:
        """Scale the gradients to a norm of at most 1 and move each weight."""
        self.count += 1
        beta1, beta2 = ADAMW["betas"]
        norm = math.sqrt(sum(float(np.vdot(g, g)) for g in gradients.values()))
        scale = min(1.0, MAX_NORM / (norm + 1e-6))
        rate, root = ADAMW["lr"] / (1 - beta1**self.count), math.sqrt(1 - beta2**self.count)
        for name, w in self.weights.items():
            g, m, v = gradients[name] * scale, self.first[name], self.second[name]
            m += (1 - beta1) * (g - m)
            v += (1 - beta2) * (g * g - v)
            w *= 1 - ADAMW["lr"] * ADAMW["weight_decay"]
            w -= rate * m / (np.sqrt(v) / root + ADAMW["eps"])
