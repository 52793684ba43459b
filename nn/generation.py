"""Sampling from a language model: the next token's probabilities, and text token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minigrad import asarray, no_grad, random
from minigrad.backend import Array, to_numpy
from minigrad.errors import ArgumentError, DTypeError, NonFiniteError, ShapeError
from nn.cache import KVCache
from nn.module import Module


def next_token_probabilities(
    logits: Any, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Array:
    """Probabilities (..., V), float64, with which the next token is drawn, from logits (..., V).

    In this order: softmax(logits / temperature); the top_k likeliest tokens, renormalised; of these the likeliest whose
    probabilities reach top_p together (the one that crosses it is kept, so at least one), renormalised. Of equal tokens
    those with the lower ids come first. temperature 0 gives all to the likeliest token. None, a top_k of at least V and
    a top_p of 1 are off. The logits are left as they are.

    Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020), for top-p.

    >>> print(next_token_probabilities(np.log([0.4, 0.3, 0.2, 0.1]), top_k=2).round(3))
    [0.571 0.429 0.    0.   ]
    """
    _check_sampling(temperature, top_k, top_p)
    x = to_numpy(asarray(logits).data).astype(np.float64)
    if x.ndim == 0 or not x.shape[-1]:
        raise ShapeError("logits (..., V) of at least one token", f"shape {x.shape}")
    with np.errstate(invalid="ignore"):
        x -= x.max(axis=-1, keepdims=True)
    if np.isnan(x).any():  # NaN, +∞, or nothing but -∞
        raise NonFiniteError("finite logits, or -∞ for a token that is ruled out", "NaN, +∞, or only -∞ in a row")
    if temperature == 0:
        return (np.arange(x.shape[-1]) == x.argmax(axis=-1)[..., None]).astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp(x / temperature)
    order = np.argsort(-weights, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=-1)
    if top_k is not None:
        ranked[..., top_k:] = 0
    ranked /= ranked.sum(axis=-1, keepdims=True)
    if top_p is not None and top_p < 1:
        ranked[..., 1:][ranked.cumsum(axis=-1)[..., :-1] >= top_p] = 0
        ranked /= ranked.sum(axis=-1, keepdims=True)
    probabilities = np.empty_like(ranked)
    np.put_along_axis(probabilities, order, ranked, axis=-1)
    return probabilities


def _check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    if not isinstance(temperature, int | float | np.number) or not 0 <= temperature < math.inf:
        raise ArgumentError("a temperature from 0", repr(temperature), "0 takes the likeliest token each time")
    if top_k is not None and (isinstance(top_k, bool) or not hasattr(top_k, "__index__") or top_k < 1):
        raise ArgumentError("top_k, a whole number from 1, or None", repr(top_k))
    if top_p is not None and (not isinstance(top_p, int | float | np.number) or not 0 < top_p <= 1):
        raise ArgumentError("top_p above 0 and at most 1, or None", repr(top_p))


def generate(
    model: Any,
    prompt: Any,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | None = None,
    generator: Any = None,
) -> Array:
    """The prompt and up to ``max_new_tokens`` tokens that the model writes after it, as an int64 array.

    prompt is one sequence (T,) of at least one token, or several of the same length (batch, T); the result has as many
    axes. Each token is drawn from ``next_token_probabilities``; temperature 0 takes the likeliest, and no random number
    is drawn. A sequence ends with the token ``eos``; in a batch it is filled up with eos until all have ended.
    generator: a ``numpy.random.Generator`` or a seed, by default that of ``minigrad.random``.

    Keys and values are cached, so a token costs one position. Once the context is full, the last half of it
    (context_length // 2 tokens) is encoded afresh, and the text goes on from there. The model is in evaluation mode
    while it writes, and no graph is recorded.

    >>> import nn
    >>> model = nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2)
    >>> generate(model, [1, 2, 3], 20).shape
    (23,)
    """
    _check_sampling(temperature, top_k, top_p)
    tokens = _prompt(prompt)
    if not hasattr(max_new_tokens, "__index__") or max_new_tokens < 0:
        raise ArgumentError("max_new_tokens, a whole number from 0", repr(max_new_tokens))
    rows = np.atleast_2d(tokens)
    cache, draw = KVCache(model), random.generator(generator)
    ended = np.zeros(len(rows), bool)
    unread = rows.shape[1]
    with evaluating(model), no_grad():
        for _ in range(max_new_tokens):
            if cache.length + unread > cache.max_length:
                cache.reset()
                unread = max(1, cache.max_length // 2)
            logits = model.next_logits(rows[:, -unread:], cache)
            unread = 1
            new = _drawn(next_token_probabilities(logits, temperature, top_k, top_p), draw if temperature else None)
            if eos is not None:
                new = np.where(ended, eos, new)
                ended |= new == eos
            rows = np.concatenate([rows, new[:, None]], axis=1)
            if ended.all():
                break
    return rows if tokens.ndim == 2 else rows[0]


def _prompt(prompt: Any) -> Array:
    tokens = to_numpy(asarray(prompt).data)
    if tokens.ndim not in (1, 2) or not tokens.size:
        raise ShapeError("a prompt (T,) or (batch, T) of at least one token", f"shape {tokens.shape}")
    if tokens.dtype.kind not in "iu":
        raise DTypeError("token ids as integers", f"dtype {tokens.dtype}", "encode text with the tokenizer first")
    return tokens.astype(np.int64)


def _drawn(probabilities: Array, draw: np.random.Generator | None) -> Array:
    """A token of each row: where the running sum of the probabilities passes a uniform number, or the only one."""
    if draw is None:
        return probabilities.argmax(axis=-1)
    running = probabilities.cumsum(axis=-1)
    uniform = draw.random((len(probabilities), 1)) * running[:, -1:]
    return (running > uniform).argmax(axis=-1)


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Evaluation mode for a ``with`` block; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
