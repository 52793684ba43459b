"""Associative recall: pairs of a key and a value, then keys, each of which asks for its value."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

import minigrad as mg
from study.models import Kind, size, train

IGNORED = -100
LENGTH, VOCABULARY, PAIRS = 64, 64, (4, 8, 16)
WIDTH, LAYERS, BATCH, UPDATES = 64, 2, 32, 1500
SOLVED = 0.03  # a mean loss of the last 50 updates below which training ends
TESTED = 256  # sequences for each number of pairs


def recall_batch(
    generator: np.random.Generator, batch: int, length: int, pairs: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets (batch, length) of multi-query associative recall, Arora et al., "Zoology" (2023).

    A sequence begins with the pairs, ``k v k v …``: keys are different tokens of the lower half of the vocabulary
    (without 0), values different ones of the upper half. Every second place after them may ask: each key comes once
    more, sooner rather than later (a gap of n places has weight n^(-0.99)), and the target there is its value. Other
    places hold any token, and have no target (-100).
    """
    half, first, places = vocab_size // 2, 2 * pairs, (length - 2 * pairs) // 2

    def drawn(weights: np.ndarray) -> np.ndarray:
        """``pairs`` different places for each sequence, by weights: those of the shortest exponential times."""
        times = generator.exponential(size=(batch, len(weights))) / weights
        return np.argsort(times, axis=1)[:, :pairs]

    keys = 1 + drawn(np.ones(half - 1))
    values = half + drawn(np.ones(vocab_size - half))
    asked = first + 2 * drawn(np.arange(1, places + 1) ** -0.99)
    tokens = generator.integers(vocab_size, size=(batch, length))
    tokens[:, 0:first:2], tokens[:, 1:first:2] = keys, values
    targets = np.full((batch, length), IGNORED)
    np.put_along_axis(tokens, asked, keys, axis=1)
    np.put_along_axis(targets, asked, values, axis=1)
    return tokens, targets


def batches(generator: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches without end, with each number of pairs in turn."""
    for pairs in itertools.cycle(PAIRS):
        yield recall_batch(generator, BATCH, LENGTH, pairs, VOCABULARY)


def trial(kind: Kind, head_dim: int, rate: float, seed: int, quick: bool = False) -> dict[str, Any]:
    """Train a model, and give its accuracy for each number of pairs, on sequences that are the same for all."""
    updates, tested = (2, 2) if quick else (UPDATES, TESTED)
    sizes = {"vocab_size": VOCABULARY, "context_length": LENGTH, "d_model": WIDTH, "d_ff": WIDTH, "num_heads": 1}
    model = kind.model(LAYERS, LENGTH, head_dim=head_dim, generator=seed, **sizes)
    losses: list[float] = []
    for loss in train(model, batches(np.random.default_rng(seed)), updates, rate):
        losses.append(loss)
        if len(losses) >= 50 and statistics.fmean(losses[-50:]) < SOLVED:
            break
    accuracy = {}
    with mg.no_grad():
        for pairs in PAIRS:
            tokens, targets = recall_batch(np.random.default_rng(10**6), tested, LENGTH, pairs, VOCABULARY)
            right = model(tokens).numpy().argmax(-1) == targets
            accuracy[str(pairs)] = float(right[targets != IGNORED].mean())
    loss = statistics.fmean(losses[-50:])
    return {"accuracy": accuracy, "loss": loss, "updates": len(losses), **size(model, LENGTH)}
