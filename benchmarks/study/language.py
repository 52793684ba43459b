"""Language modelling on the trainers' ten plays: validation loss, with a longer context, and where a bigram repeats."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from text.corpus import SHAKESPEARE, Corpus, RandomBlocks, read_corpus

import minigrad as mg
import nn
from study.models import Kind, size, train

LENGTH, LONGER, VOCABULARY = 256, (512, 1024), 512
HEAD = 32
WIDTH, LAYERS, HEADS, BATCH, UPDATES = 64, 2, 2, 8, 1000
RARE = 20  # bigrams that come at most so often in the training text
PARTS = ("loss", "repeats", "rare repeats", "others")  # of the validation tokens: all, those that repeat a bigram …


@functools.cache
def corpus() -> Corpus:
    """The ten plays in tokens of a byte-pair encoding: of their bytes 41 % repeat a bigram, of these 16 %."""
    return read_corpus([SHAKESPEARE], "bpe", VOCABULARY)


def repeats(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Which targets (batch, T) follow their token as they did before: the bigram stands earlier in the sequence.

    >>> repeats(np.array([[1, 2, 1, 2, 1]]), np.array([[2, 1, 2, 3, 2]]))
    array([[False, False,  True, False,  True]])
    """
    bigrams = inputs * (targets.max() + 1) + targets
    same = bigrams[:, :, None] == bigrams[:, None, :]
    return np.asarray(np.tril(same, -1).any(axis=-1))


@functools.cache
def common() -> np.ndarray:
    """The bigrams that come more than RARE times in the training text, as numbers ``first · VOCABULARY + second``."""
    tokens = corpus().training.astype(np.int64)
    bigrams, counts = np.unique(tokens[:-1] * VOCABULARY + tokens[1:], return_counts=True)
    return np.asarray(bigrams[counts > RARE])


def losses_apart(model: nn.TransformerLM, batches: int = 0) -> dict[str, float]:
    """The mean loss of all validation tokens, of those that repeat a bigram, also a rare one, and of the others."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in PARTS}
    for inputs, targets in nn.sliding_windows(corpus().validation, LENGTH, LENGTH, 8, batches):
        counted = targets >= 0
        again = repeats(inputs, targets) & counted
        rare = again & ~np.isin(inputs * VOCABULARY + targets, common())
        with mg.no_grad():
            losses = model.loss(inputs, targets, reduction="none").numpy().reshape(targets.shape)
        for name, chosen in zip(PARTS, (counted, again, rare, counted & ~again), strict=True):
            parts[name].append(losses[chosen])
    return {name: float(np.concatenate(found).mean()) for name, found in parts.items()}


def batches(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of the training text without end."""
    blocks = RandomBlocks(corpus().training, BATCH, LENGTH, seed)
    while True:
        yield blocks.draw()


def trial(kind: Kind, head_dim: int, rate: float, seed: int, quick: bool = False) -> dict[str, Any]:
    """Train a model, and give its losses in nats a token; "longer" has those with contexts of more tokens."""
    sizes = {"vocab_size": VOCABULARY, "context_length": max(LONGER), "d_model": WIDTH, "num_heads": HEADS}
    model = kind.model(LAYERS, LENGTH, head_dim=head_dim, generator=seed, **sizes)
    *_, last = train(model, batches(seed), 2 if quick else UPDATES, rate)
    model.eval()
    validation = corpus().validation[: 2 * max(LONGER) if quick else None]
    longer = {}
    for length in LONGER:
        total, count = nn.total_loss(model, validation, length)
        longer[str(length)] = total / count
    return {**losses_apart(model, 1 if quick else 0), "longer": longer, "training": last, **size(model, LENGTH)}
