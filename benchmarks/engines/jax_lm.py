"""JAX: the model and AdamW as one jitted function that gives its weights' and moments' memory away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness.configs import ADAMW, MAX_NORM, Config

from engines.plain_transformer import Library, PlainTransformer

Weights = dict[str, jax.Array]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of the targets."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1))


def adamw(weights: Weights, gradients: Weights, state: tuple[Weights, Weights, int]) -> tuple[Weights, Any]:
    """A step of AdamW with gradients that were clipped together."""
    first, second, count = state
    (beta1, beta2), lr, decay = ADAMW["betas"], ADAMW["lr"], ADAMW["weight_decay"]
    count += 1
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in gradients.values()))
    scale = jnp.minimum(1.0, MAX_NORM / (norm + 1e-6))
    gradients = {name: g * scale for name, g in gradients.items()}
    first = {name: beta1 * first[name] + (1 - beta1) * g for name, g in gradients.items()}
    second = {name: beta2 * second[name] + (1 - beta2) * g * g for name, g in gradients.items()}

    def moved(name: str) -> jax.Array:
        root = jnp.sqrt(second[name] / (1 - beta2**count)) + ADAMW["eps"]
        return weights[name] * (1 - lr * decay) - lr * first[name] / (1 - beta1**count) / root

    return {name: moved(name) for name in weights}, (first, second, count)


def training_step(config: Config, weights: dict[str, np.ndarray]) -> Callable[[np.ndarray, np.ndarray], float]:
    """A function that trains the model on one batch and returns the loss."""
    model = PlainTransformer(Library(jnp, jax.nn.softmax, jax.nn.silu, cross_entropy), config)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: Weights, state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Weights, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(model.loss)(weights, tokens, targets)
        return *adamw(weights, gradients, state), loss

    held = {name: jnp.asarray(w) for name, w in weights.items()}
    state = (
        {name: jnp.zeros_like(w) for name, w in held.items()},
        {name: jnp.zeros_like(w) for name, w in held.items()},
        0,
    )

    def step(tokens: np.ndarray, targets: np.ndarray) -> float:
        nonlocal held, state
        held, state, loss = update(held, state, tokens, targets)
        return float(loss)

    return step


def multiplier(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    """A function that multiplies the two matrices."""
    left, right = jnp.asarray(a), jnp.asarray(b)
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(left, right).block_until_ready()
