"""HIPS autograd: the model written with ``autograd.numpy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd import value_and_grad
from autograd.tracer import getval
from harness.configs import Config

from engines.numpy_adamw import AdamW
from engines.plain_transformer import Library, PlainTransformer


def softmax(x: Any) -> Any:
    """Softmax over the last axis; the shift is a constant, since the result doesn't depend on it."""
    e = anp.exp(x - np.max(getval(x), axis=-1, keepdims=True))
    return e / anp.sum(e, axis=-1, keepdims=True)


def silu(x: Any) -> Any:
    """``x · sigmoid(x)``."""
    return x / (1 + anp.exp(-x))


def cross_entropy(logits: Any, targets: np.ndarray) -> Any:
    """Mean of log Σ exp(logits) less the target's logit."""
    shifted = logits - np.max(getval(logits), axis=-1, keepdims=True)
    picked = shifted[np.arange(len(targets)), targets]
    return anp.mean(anp.log(anp.sum(anp.exp(shifted), axis=-1)) - picked)


def training_step(config: Config, weights: dict[str, np.ndarray]) -> Callable[[np.ndarray, np.ndarray], float]:
    """A function that trains the model on one batch and returns the loss."""
    model = PlainTransformer(Library(anp, softmax, silu, cross_entropy), config)
    optimizer = AdamW(weights)
    differentiate = value_and_grad(model.loss)

    def step(tokens: np.ndarray, targets: np.ndarray) -> float:
        loss, gradients = differentiate(weights, tokens, targets)
        optimizer.step(gradients)
        return float(loss)

    return step


def multiplier(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    """A function that multiplies the two matrices."""
    return lambda: a @ b
