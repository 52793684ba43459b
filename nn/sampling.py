"""The next token: its probabilities from a model's logits, and a draw from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad import asarray
from minigrad.backend import Array, to_numpy
from minigrad.errors import ArgumentError, NonFiniteError, ShapeError
from minigrad.messages.explain import explained
from .checks import is_whole

LARGEST = 1e300  # logit that a penalty gives, so that differences are numbers


@explained
def next_token_probabilities(
    logits: Any,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seen: Any = None,
) -> Array:
    """Probabilities (..., V), float64, with which the next token is drawn, from logits (..., V).

    In this order, that of Hugging Face's transformers, each step renormalised:

    - repetition_penalty r: logits of tokens that are ``seen``, a boolean array (..., V), are divided by r where
      positive and multiplied by r where negative; r > 1 makes these tokens rarer (Keskar et al., "CTRL", 2019)
    - softmax(logits / temperature); temperature 0 gives all to the likeliest token
    - the top_k likeliest tokens. Of equal ones those with the lower ids come first, so exactly top_k are kept
      (transformers keeps all that equal the last one)
    - of these the likeliest whose probabilities reach top_p together, the one that crosses it included, so at least one
      (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020)
    - of these all with at least min_p times the probability of the likeliest (Nguyen et al., "Min-p Sampling", 2024)

    None, a penalty of 1, a top_k of at least V, a top_p of 1 and a min_p of 0 are off. The logits are left as they are.

    >>> print(next_token_probabilities(np.log([0.4, 0.3, 0.2, 0.1]), top_k=2).round(3))
    [0.571 0.429 0.    0.   ]
    """
    check_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    x = _shifted(_penalized(logits, repetition_penalty, seen))
    if temperature == 0:
        return (np.arange(x.shape[-1]) == x.argmax(axis=-1)[..., None]).astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp(x / temperature)
    if top_k is not None or (top_p is not None and top_p < 1):
        weights = _likeliest(weights, top_k, 1.0 if top_p is None else top_p)
    if min_p:
        weights[weights < min_p * weights.max(axis=-1, keepdims=True)] = 0
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def _penalized(logits: Any, penalty: float, seen: Any) -> Array:
    """The logits as float64, those of tokens seen brought down."""
    x = to_numpy(asarray(logits).data).astype(np.float64)
    if x.ndim == 0 or not x.shape[-1]:
        hint = "a number for each token of the vocabulary"
        raise ShapeError("logits (..., V) of at least one token", f"shape {x.shape}", hint)
    if penalty != 1:
        if seen is None:
            hint = "True where a text has the token"
            raise ArgumentError("seen, a boolean array (..., V), with a repetition_penalty", "None", hint)
        with np.errstate(over="ignore", under="ignore"):
            moved = np.where(x > 0, x / penalty, x * penalty).clip(-LARGEST, LARGEST)
        x = np.where(np.asarray(seen) & np.isfinite(x), moved, x)
    return x


def _shifted(x: Array) -> Array:
    """Logits with their maximum at 0."""
    with np.errstate(invalid="ignore"):
        x -= x.max(axis=-1, keepdims=True)
    if np.isnan(x).any():  # NaN, +∞, or nothing but -∞
        raise _not_finite()
    return x


def _not_finite() -> NonFiniteError:
    expected = "finite logits, or -∞ for a token that is ruled out"
    return NonFiniteError(expected, "NaN, +∞, or only -∞ in a row", "did the training diverge?")


def _likeliest(weights: Array, top_k: int | None, top_p: float) -> Array:
    """The weights with all but the top_k largest, and of these all but the top_p share, set to 0."""
    order = np.argsort(-weights, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=-1)
    if top_k is not None:
        ranked[..., top_k:] = 0
    if top_p < 1:
        ranked /= ranked.sum(axis=-1, keepdims=True)
        ranked[..., 1:][ranked.cumsum(axis=-1)[..., :-1] >= top_p] = 0
    result = np.empty_like(ranked)
    np.put_along_axis(result, order, ranked, axis=-1)
    return result


def log_probabilities(logits: Any) -> Array:
    """Log-softmax (..., V) of logits (..., V), float64: -∞ for a token that is ruled out.

    >>> print(log_probabilities(np.log([3.0, 1.0])).round(4))
    [-0.2877 -1.3863]
    """
    x = _shifted(_penalized(logits, 1.0, None))
    with np.errstate(under="ignore"):
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def check_sampling(temperature: Any, top_k: Any, top_p: Any, min_p: Any, repetition_penalty: Any) -> None:
    """Refuse options of sampling that are out of range."""
    number = int | float | np.number
    if not isinstance(temperature, number) or not 0 <= temperature < math.inf:
        raise ArgumentError("a temperature from 0", repr(temperature), "0 takes the likeliest token each time")
    if top_k is not None and not is_whole(top_k, 1):
        raise ArgumentError("top_k, a whole number from 1, or None", repr(top_k), "None keeps all tokens")
    if top_p is not None and (not isinstance(top_p, number) or not 0 < top_p <= 1):
        raise ArgumentError("top_p above 0 and at most 1, or None", repr(top_p), "None keeps all tokens")
    if min_p is not None and (not isinstance(min_p, number) or not 0 <= min_p <= 1):
        raise ArgumentError("min_p from 0 to 1, or None", repr(min_p), "None keeps all tokens")
    if not isinstance(repetition_penalty, number) or not 0 < repetition_penalty < math.inf:
        raise ArgumentError("a repetition_penalty above 0", repr(repetition_penalty), "1 is off, 1.2 is strong")


def likeliest(logits: Any, penalty: float = 1.0, seen: Any = None) -> Array:
    """The likeliest token of each row, the lowest id of equal ones: the one that temperature 0 leaves."""
    raw = to_numpy(asarray(logits).data)
    x = raw if penalty == 1 and raw.ndim and raw.shape[-1] else _penalized(logits, penalty, seen)
    if not np.isfinite(x.max(axis=-1)).all():
        raise _not_finite()
    return x.argmax(axis=-1)


def drawn(probabilities: Array, draw: np.random.Generator) -> Array:
    """A token of each row: where the running sum of its probabilities passes a uniform number.

    >>> print(drawn(np.array([[0.0, 1.0], [1.0, 0.0]]), np.random.default_rng(0)))
    [1 0]
    """
    running = probabilities.cumsum(axis=-1)
    uniform = draw.random((len(probabilities), 1)) * running[:, -1:]
    return (running > uniform).argmax(axis=-1)
