"""MyGrad: the model written with its NumPy-like functions and its layers' softmax and cross-entropy.

Its guard against writes to arrays in use is off, as its documentation advises for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mygrad
import numpy as np
from harness.configs import Config
from mygrad.nnet import sigmoid, softmax, softmax_crossentropy

from engines.numpy_adamw import AdamW
from engines.plain_transformer import Library, PlainTransformer

mygrad.turn_memory_guarding_off()


def training_step(config: Config, weights: dict[str, np.ndarray]) -> Callable[[np.ndarray, np.ndarray], float]:
    """A function that trains the model on one batch and returns the loss."""
    model = PlainTransformer(Library(mygrad, softmax, lambda x: x * sigmoid(x), softmax_crossentropy), config)
    tensors = {name: mygrad.tensor(w, copy=False) for name, w in weights.items()}
    optimizer = AdamW(weights)

    def step(tokens: np.ndarray, targets: np.ndarray) -> float:
        loss = model.loss(tensors, tokens, targets)
        loss.backward()
        optimizer.step({name: tensor.grad for name, tensor in tensors.items()})
        for tensor in tensors.values():
            tensor.null_grad()
        return float(loss)

    return step


def multiplier(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    """A function that multiplies the two matrices."""
    return lambda: a @ b
