"""Continuation: sequences that grow by a token at a time, the one path by which every way of decoding asks a model.

A model that decodes has ``context_length``, the most tokens that it reads at once, and ``next_logits(tokens, cache)``,
the logits (batch, vocab) of the token after ``tokens``, which go on from those in the cache. One that also reads a
source has ``start(source, max_length)``, which gives the cache. Where it also says its ``vocab_size``, a prompt's ids
are checked before anything is computed, those too that it will not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minigrad import asarray
from minigrad.backend import Array, to_numpy
from minigrad.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError
from minigrad.kernels.embedding import check_range
from minigrad.messages.explain import describe
from .cache import KVCache
from .checks import is_whole
from .masks import pad_sequences, token_ids
from .module import Module


class Continuation:
    """``tokens`` (batch, length), right-aligned: those of sequence i are ``tokens[i, start[i]:]``.

    ``next_logits`` reads what is new through the cache. Once a sequence fills the context, the last half of it
    (context_length // 2 tokens) is read afresh, and it goes on from there; the others keep all that they have. So each
    sequence is continued as if it were alone. A model that is endless, or has ``sinks``, reads nothing twice.
    """

    def __init__(self, model: Any, prompts: list[Array], new_tokens: int, source: Any = None, sinks: int = 0) -> None:
        if not hasattr(model, "next_logits"):
            hint = "nn.TransformerLM and nn.Transformer are"
            raise DTypeError("a model that is made for decoding, with next_logits", describe(model), hint)
        self.model = model
        self.tokens = pad_sequences(prompts, 0, left=True)
        if hasattr(model, "vocab_size"):
            check_range(self.tokens, model.vocab_size, "id")
        self.start = self.tokens.shape[1] - np.array([len(prompt) for prompt in prompts])
        self._window = self.start.copy()  # the first token of each that is in the cache
        room = self.tokens.shape[1] + new_tokens
        if sinks or not getattr(model, "endless", False):
            room = min(model.context_length, room)
        self._cache = KVCache(model, room, sinks=sinks) if source is None or sinks else model.start(source, room)
        self._rewind()

    def _rewind(self) -> None:
        """Empty the cache; of a sequence that is longer than it, the last half is to be read again."""
        length, most = self.tokens.shape[1], self._cache.max_length
        if self._cache.sinks:
            most = length
        self._window[length - self._window > most] = length - max(1, most // 2)
        first = int(self._window.min())
        self._cache.reset(self._window - first)
        self._unread = length - first

    def next_logits(self) -> Any:
        """Logits (batch, vocab) of the token that follows each sequence."""
        cache, length = self._cache, self.tokens.shape[1]
        if cache.length + self._unread > cache.max_length and not cache.sinks:
            self._rewind()
        while self._unread:
            count, first = self._unread, length - self._unread
            if cache.length + count > cache.max_length:  # there are sinks
                count = max(1, cache.max_length - cache.length)
            logits = self.model.next_logits(self.tokens[:, first : first + count], cache)
            self._unread -= count
        return logits

    def append(self, new: Array) -> None:
        """Each sequence goes on with its token of ``new`` (batch,)."""
        self.tokens = np.concatenate([self.tokens, new[:, None]], axis=1)
        self._unread += 1

    def select(self, rows: Array) -> None:
        """Go on with the sequences ``rows``: in another order, several times, or not at all."""
        self.tokens, self.start, self._window = self.tokens[rows], self.start[rows], self._window[rows]
        self._cache.select(rows)

    def seen(self, vocab_size: int) -> Array:
        """Which tokens each sequence has: (batch, vocab_size) booleans."""
        result = np.zeros((len(self.tokens), vocab_size), bool)
        rows, places = np.nonzero(np.arange(self.tokens.shape[1]) >= self.start[:, None])
        result[rows, self.tokens[rows, places]] = True
        return result

    def text(self, i: int) -> Array:
        """The tokens of sequence i."""
        return self.tokens[i, self.start[i] :]


# ---- what a caller gives ---------------------------------------------------------------------------------------------


def as_prompts(prompt: Any, model: Any, source: Any) -> tuple[list[Array], Any, int]:
    """Prompts as a list of sequences, the source as an array (batch, S), and what was given.

    That is 1 for one sequence (T,), 2 for several of one length (batch, T), 0 for several of different lengths. A
    source (batch, S) with one prompt is several: the prompt begins each of them.
    """
    ndim = 0 if _ragged(prompt) else token_ids(prompt).ndim
    prompts = [token_ids(row) for row in prompt] if ndim == 0 else list(np.atleast_2d(token_ids(prompt)))
    if (source is not None) != hasattr(model, "start"):
        expected = "no source, the model has no encoder" if source is not None else "source=…, ids for the encoder"
        hint = "nn.Transformer has an encoder, nn.TransformerLM has none"
        raise ArgumentError(expected, "one" if source is not None else "none", hint)
    if source is None:
        return prompts, None, ndim
    if _ragged(source):
        if getattr(model, "pad_id", None) is None:
            raise ShapeError("sources of one length", "several", "or a model with a pad_id, which fills them up")
        source = pad_sequences(source, model.pad_id)
    source = token_ids(source)
    if ndim == 1 and source.ndim == 2:
        prompts, ndim = prompts * len(source), 2
    source = np.atleast_2d(source)
    if len(source) != len(prompts):
        hint = "one prompt (T,) begins the targets of all"
        raise ShapeError(f"a source for each of {len(prompts)} prompts", f"{len(source)}", hint)
    return prompts, source, ndim


def _ragged(sequences: Any) -> bool:
    """Whether this is a list of sequences of different lengths."""
    if not isinstance(sequences, list | tuple):
        return False
    lengths = {np.shape(row if hasattr(row, "shape") else asarray(row).data) for row in sequences}
    return len(lengths) > 1 and all(len(shape) == 1 for shape in lengths)


def check_new_tokens(max_new_tokens: Any) -> None:
    """Refuse a number of tokens to write that is none."""
    if not is_whole(max_new_tokens, 0):
        hint = "the length of the prompt doesn't count"
        raise ArgumentError("max_new_tokens, a whole number from 0", repr(max_new_tokens), hint)


def as_stops(eos: Any) -> Array:
    """The tokens that end a text, integers (n,): of None, one id, or several.

    >>> as_stops(None), as_stops(3)
    (array([], dtype=int64), array([3]))
    """
    stops = np.zeros(0, np.int64) if eos is None else np.atleast_1d(to_numpy(asarray(eos).data))
    if stops.ndim != 1 or (stops.size and stops.dtype.kind not in "iu"):
        raise DTypeError("eos, the id of a token, or a list of ids", describe(eos), "None ends no text")
    return stops.astype(np.int64)


def check_stops(stops: Array, vocab_size: int) -> Array:
    """``stops``, refused where one isn't in the vocabulary."""
    if (stops < 0).any() or (stops >= vocab_size).any():
        raise IndexRangeError(f"an eos from 0 to {vocab_size - 1}", f"{stops.tolist()}", "None ends no text")
    return stops


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Evaluation mode for a ``with`` block; afterwards each module is in the mode that it was in."""
    if not isinstance(model, Module):
        raise DTypeError("a model, which is an nn.Module", describe(model), "nn.TransformerLM is one")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
