"""Sequences of different lengths in one array, and masks: True where a query may look at a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad import asarray
from minigrad.backend import Array, to_numpy
from minigrad.errors import DTypeError, ShapeError
from minigrad.messages.explain import explained
from .checks import check_sizes


def token_ids(sequence: Any) -> Array:
    """One sequence (T,) or several (batch, T) of token ids as an int64 array on the CPU, checked.

    >>> token_ids([1, 2])
    array([1, 2])
    """
    tokens = to_numpy(asarray(sequence).data)
    if tokens.ndim not in (1, 2) or not tokens.size:
        hint = "begin with the token of a new line, say"
        raise ShapeError("token ids (T,) or (batch, T), at least one", f"shape {tokens.shape}", hint)
    if tokens.dtype.kind not in "iu":
        raise DTypeError("token ids as integers", f"dtype {tokens.dtype}", "encode text with the tokenizer first")
    return tokens.astype(np.int64)


@explained
def pad_sequences(sequences: Sequence[Any], pad_id: int, left: bool = False) -> Array:
    """Sequences of token ids of any lengths as one int64 array (batch, longest), filled up with ``pad_id``.

    >>> print(pad_sequences([[5, 7, 6], [8]], pad_id=0))
    [[5 7 6]
     [8 0 0]]
    """
    rows = [token_ids(sequence).reshape(-1) for sequence in sequences]
    padded = np.full((len(rows), max(map(len, rows), default=0)), pad_id, np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[slice(-len(row), None) if left else slice(len(row))] = row
    return padded


@explained
def padding_mask(tokens: Any, pad_id: int) -> Array:
    """True where a token isn't ``pad_id``: (batch, T) to (batch, 1, 1, T), which broadcasts to all heads and queries.

    >>> print(padding_mask([[5, 7, 0]], pad_id=0))
    [[[[ True  True False]]]]
    """
    tokens = asarray(tokens).data
    if tokens.dtype.kind not in "iu":
        raise DTypeError("token ids as integers", f"dtype {tokens.dtype}", "encode text with the tokenizer first")
    if tokens.ndim == 0:
        raise ShapeError("tokens (batch, T)", "a single number", "[[token]] is a batch of one")
    return (tokens != pad_id)[..., None, None, :]


@explained
def causal_mask(length: int) -> Array:
    """True where key j is not after query i, (length, length): the same as ``is_causal=True``, which is faster.

    >>> print(causal_mask(2))
    [[ True False]
     [ True  True]]
    """
    check_sizes(length=length)
    return np.tri(length, dtype=bool)
