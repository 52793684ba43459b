"""KVCache: keys and values of the tokens that a model has read, so that each next token costs one position, not all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from minigrad import asarray
from minigrad.backend import Array, array_module, to_device
from minigrad.errors import DTypeError, GraphError, ShapeError
from minigrad.messages.explain import describe, explained
from .checks import check_sizes

Pair: TypeAlias = tuple[Array, Array]  # keys and values of a layer, (batch, num_kv_heads, positions, head_dim)


class KVCache:
    """The memory of a model that decodes a batch of sequences token by token: ``model.next_logits(tokens, cache)``.

    Room for ``max_length`` positions (the model's context_length if not given) is allocated in each attention layer at
    the first call, which also settles the size of the batch. Memory: 2 · layers · batch · max_length · num_kv_heads ·
    head_dim numbers. ``reset()`` makes it empty again, for other sequences.

    Sequences of different lengths stand right-aligned: the first ``padding[i]`` positions of sequence i are no tokens.
    A decoder also attends to ``memory``, the output of an encoder, under its mask; see ``nn.Transformer.start``.

    >>> import nn
    >>> model = nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2)
    >>> cache = nn.KVCache(model)
    >>> _ = model([[1, 2, 3]], cache=cache); logits = model([[4]], cache=cache)
    >>> logits.shape, cache.length
    ((1, 1, 10), 4)
    """

    @explained
    def __init__(
        self, model: Any, max_length: int | None = None, *, memory: Any = None, memory_mask: Any = None
    ) -> None:
        if max_length is None and not hasattr(model, "context_length"):
            hint = "nn.TransformerLM is one; or give max_length"
            raise DTypeError("a language model with a context_length", describe(model), hint)
        self.max_length: int = model.context_length if max_length is None else max_length
        check_sizes(max_length=self.max_length)
        self.memory, self.memory_mask = memory, memory_mask
        self.reset()

    def reset(self, padding: Any = None) -> None:
        """Forget all positions, the size of the batch included; those to come begin with ``padding`` (batch,)."""
        self.length = 0  # positions that all layers hold
        self.padding = None if padding is None or not np.any(padding) else np.asarray(padding)
        self._own: dict[Any, Pair] = {}  # attention module -> room for max_length positions
        self._memory: dict[Any, Pair] = {}  # cross-attention module -> those of the memory
        self._source: Array | None = None  # which sequence each one came from, before ``select``

    def extend(self, attention: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Add keys and values (..., heads, T, d) of a layer, and return those of all positions, as views of the memory.

        They count once ``advance`` was called, after the last layer; a call that fails before that changes nothing.
        """
        _check_unrecorded(k, v)
        stop = self.length + k.shape[-2]
        if stop > self.max_length:
            got = f"{k.shape[-2]} positions after {self.length}"
            raise ShapeError(
                f"at most {self.max_length} positions in the cache", got, "reset() it, or make a longer one"
            )
        if attention not in self._own:
            self._own[attention] = self._room(k), self._room(v)
        result = []
        for room, new in zip(self._own[attention], (k, v), strict=True):
            if room.shape[:-2] != new.shape[:-2]:
                expected = f"sequences as before, keys (..., heads, T, d) with leading axes {room.shape[:-2]}"
                raise ShapeError(expected, f"{new.shape[:-2]}", "reset() the cache for another batch")
            room[..., self.length : stop, :] = asarray(new).data
            result.append(asarray(room[..., :stop, :]))
        return result[0], result[1]

    def _room(self, x: Any) -> Array:
        return array_module(x).empty((*x.shape[:-2], self.max_length, x.shape[-1]), x.dtype)

    def once(self, attention: Any, make: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Keys and values of the memory in a layer, which ``make`` computes at the first call alone."""
        if attention not in self._memory:
            k, v = make()
            _check_unrecorded(k, v)
            self._memory[attention] = asarray(k).data, asarray(v).data
        k, v = self._memory[attention]
        return asarray(k), asarray(v)

    def advance(self, count: int) -> None:
        """Count ``count`` positions as held, once every layer has added them."""
        self.length += count

    def places(self, count: int, device: str = "cpu") -> tuple[Any, Any]:
        """Positions (batch, count) of the next ``count`` tokens in their sequences, and a mask of the keys they see.

        The mask (batch, 1, 1, keys) is True where a key is a token. Both are None where no sequence is padded.
        """
        if self.padding is None:
            return None, None
        stop = self.length + count
        padding = self.padding[:, None]
        positions = np.maximum(np.arange(self.length, stop) - padding, 0)
        return positions, to_device((np.arange(stop) >= padding)[:, None, None, :], device)

    def select(self, rows: Any) -> None:
        """Go on with the sequences ``rows`` (indices into the batch): in another order, several times, or not at all.

        What belongs to the memory is moved only if the sequences have other sources afterwards.
        """
        rows = np.asarray(rows)
        source = np.arange(rows.max(initial=-1) + 1) if self._source is None else self._source
        self._own = {layer: (self._picked(k, rows), self._picked(v, rows)) for layer, (k, v) in self._own.items()}
        self.padding = None if self.padding is None else self.padding[rows]
        if self._source is None or not np.array_equal(source[rows], source):
            self._memory = {layer: (_taken(k, rows), _taken(v, rows)) for layer, (k, v) in self._memory.items()}
            self.memory, self.memory_mask = _taken(self.memory, rows), _taken(self.memory_mask, rows)
        self._source = source[rows]

    def _picked(self, room: Array, rows: Array) -> Array:
        """``room[rows]``: copies only the positions held, into the same memory where it fits."""
        held = _taken(room[..., : self.length, :], rows)
        if len(rows) != len(room):
            room = array_module(room).empty((len(rows), *room.shape[1:]), room.dtype)
        room[..., : self.length, :] = held
        return room

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}, max_length={self.max_length})"


def _check_unrecorded(k: Any, v: Any) -> None:
    if getattr(k, "requires_grad", False) or getattr(v, "requires_grad", False):
        raise GraphError("keys and values without a graph", "a cache while recording", "decode under no_grad()")


def _taken(x: Any, rows: Array) -> Any:
    return None if x is None else x[array_module(x).asarray(rows)]
