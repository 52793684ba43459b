"""KVCache: keys and values of the tokens that a model has read, so that each next token costs one position, not all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from minigrad import asarray
from minigrad.backend import Array, array_module, array_of, to_device
from minigrad.errors import ArgumentError, DTypeError, GraphError, ShapeError
from minigrad.messages.explain import describe, explained
from .checks import check_sizes

Pair: TypeAlias = tuple[Array, Array]  # keys and values of a layer, (batch, num_kv_heads, positions, head_dim)


class Held(NamedTuple):
    """Keys and values of a layer: those of the sinks, then of later positions but the first ``gone``."""

    rooms: tuple[Array, Array]  # (..., heads, size, d), with room to spare
    gone: int

    def upto(self, stop: int, gone: int, sinks: int) -> Pair:
        """Those of the positions before ``stop``, without the first ``gone`` that follow the sinks."""
        skip, stop = gone - self.gone, stop - self.gone
        if skip and sinks:
            parts = [[x[..., :sinks, :], x[..., sinks + skip : stop, :]] for x in self.rooms]
            k, v = (array_module(*pair).concatenate(pair, -2) for pair in parts)
        else:
            k, v = (x[..., skip:stop, :] for x in self.rooms)
        return k, v


class KVCache:
    """The memory of a model that decodes a batch of sequences token by token: ``model.next_logits(tokens, cache)``.

    Room for ``max_length`` positions (the model's context_length if not given) is allocated in each attention layer at
    the first call, which also settles the size of the batch. Memory: 2 · layers · batch · max_length · num_kv_heads ·
    head_dim numbers. ``reset()`` makes it empty again, for other sequences.

    A layer with a window drops keys that no query will see: it has room for two windows, however much it reads. Where
    all layers have one, max_length is endless if not given. With ``sinks`` any model reads on once the cache is full, a
    token at a time: the oldest position but the first ``sinks`` ones is dropped for it, and positions are counted
    within what is held. Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), who take 4.

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
        self, model: Any, max_length: int | None = None, *, sinks: int = 0, memory: Any = None, memory_mask: Any = None
    ) -> None:
        if max_length is None and not hasattr(model, "context_length"):
            hint = "nn.TransformerLM is one; or give max_length"
            raise DTypeError("a language model with a context_length", describe(model), hint)
        check_sizes(max_length=model.context_length if max_length is None else max_length)
        windows: list[Any] = getattr(model, "windows", [None])
        self._reach = math.inf if None in windows else max(1, *windows)  # how many keys the widest layer sees
        self.max_length: Any = max_length
        if max_length is None:
            self.max_length = math.inf if self._reach < math.inf and not sinks else model.context_length
        self.sinks = self._checked_sinks(sinks, model, windows) if sinks else 0
        self.memory, self.memory_mask = memory, memory_mask
        self.reset()

    def _checked_sinks(self, sinks: int, model: Any, windows: list[Any]) -> int:
        if not hasattr(model, "windows"):
            raise ArgumentError("sinks in a model with rope alone", describe(model), "nn.TransformerLM is one")
        if 0 in windows:
            raise ArgumentError("no sinks beside linear attention", f"sinks={sinks}", "a state drops no positions")
        check_sizes(sinks=sinks)
        self.max_length = min([self.max_length, *(sinks + window for window in windows if window)])
        if self.max_length <= sinks:
            raise ArgumentError(f"fewer sinks than max_length = {self.max_length}", f"sinks={sinks}", "4 is usual")
        return sinks

    def reset(self, padding: Any = None) -> None:
        """Forget all positions, the size of the batch included; those to come begin with ``padding`` (batch,)."""
        self.length = 0  # positions that all layers have read
        self.padding = None if padding is None or not np.any(padding) else np.asarray(padding)
        if self.sinks and self.padding is not None:
            raise ShapeError(
                "sequences of one length, in a cache with sinks", f"padding {padding}", "one after another"
            )
        self._own: dict[Any, Held] = {}  # by attention module
        self._states: dict[Any, Array] = {}  # those of linear attention, by module and name
        self._new_states: dict[Any, Array] = {}  # of positions that don't count yet
        self._memory: dict[Any, Pair] = {}  # cross-attention module -> those of the memory
        self._source: Array | None = None  # which sequence each one came from, before ``select``

    def extend(self, attention: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Add keys and values (..., heads, T, d) of a layer, and return those of all positions that the new ones see.

        They count once ``advance`` was called, after the last layer. A call that fails before that changes nothing:
        what is dropped depends on the positions that count alone.
        """
        _check_unrecorded(k, v)
        rooms, first, stop = self.hold(attention, k, v)
        for room, new in zip(rooms, (k, v), strict=True):
            room[..., stop - k.shape[-2] : stop, :] = array_of(new)
        held = self._own[attention]
        k, v = held.upto(stop + held.gone, first + held.gone, self.sinks)
        return asarray(k), asarray(v)

    def hold(self, attention: Any, k: Any, v: Any) -> tuple[tuple[Array, Array], int, int]:
        """Where keys and values such as these belong, for a caller that writes them there, as ``extend`` does.

        The rooms (..., heads, size, d) of a layer, and from where to where the new ones see, which are the last before
        ``stop``. The sinks, which stand before, are seen besides.
        """
        stop, window = self.length + k.shape[-2], self._window(attention, k.shape[-2])
        gone = int(max(0, self.length + 1 - window - self.sinks))
        held = self._own.get(attention)
        if held is not None and held.rooms[0].shape[:-2] != k.shape[:-2]:
            expected = f"sequences as before, keys (..., heads, T, d) with leading axes {held.rooms[0].shape[:-2]}"
            raise ShapeError(expected, f"{k.shape[:-2]}", "reset() the cache for another batch")
        if held is None or stop - held.gone > held.rooms[0].shape[-2]:
            size = max(stop - gone, int(min(self.max_length, self.sinks + 2 * window)))
            held = self._own[attention] = self._moved(held, k, v, size, gone)
        return held.rooms, gone - held.gone, stop - held.gone

    def _window(self, attention: Any, count: int) -> float:
        """How many positions a query of a layer sees, sinks not counted; refuses ``count`` new ones if too many."""
        window: Any = getattr(attention, "window", None) or math.inf
        full = self.length + count > self.max_length
        if full and (count > 1 if self.sinks else window > self.max_length):
            got, hint = f"{count} positions after {self.length}", "reset() it, or make a longer one"
            hint = "from then on one at a time" if self.sinks else hint
            raise ShapeError(f"at most {self.max_length} positions in the cache", got, hint)
        return float(self.max_length - self.sinks if self.sinks else window)

    def _moved(self, held: Held | None, k: Any, v: Any, size: int, gone: int) -> Held:
        """Room for ``size`` positions, with those that are held."""
        rooms = tuple(array_module(x).empty((*x.shape[:-2], size, x.shape[-1]), x.dtype) for x in (k, v))
        for room, old in zip(rooms, held.upto(self.length, gone, self.sinks) if held else (), strict=False):
            room[..., : old.shape[-2], :] = old
        return Held((rooms[0], rooms[1]), gone)

    def pair(self, attention: Any) -> Pair | None:
        """Keys and values (..., heads, positions, d) that a layer holds, None where it has none."""
        held = self._own.get(attention)
        return None if held is None else held.upto(self.length, held.gone, 0)

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
        self._states |= self._new_states

    def state(self, attention: Any, name: str) -> Array | None:
        """The state (batch, …) of linear attention after all positions, None at the beginning."""
        return self._states.get((attention, name))

    def keep(self, attention: Any, name: str, state: Array) -> None:
        """Set the state that a layer has after the new positions; it counts once ``advance`` was called."""
        old = self._states.get((attention, name))
        if old is not None and old.shape != state.shape:
            expected, got = f"sequences as before, a state {old.shape}", f"{state.shape}"
            raise ShapeError(expected, got, "reset() the cache for another batch")
        self._new_states[attention, name] = state

    def places(self, count: int, device: str = "cpu") -> tuple[Any, Any]:
        """Positions (batch, count) of the next ``count`` tokens in their sequences, and a mask of the keys they see.

        The mask (batch, 1, 1, keys) is True where a key is a token, from the first one on that some layer still sees.
        Both are None where no sequence is padded, the mask also where no layer sees padding.
        """
        if self.padding is None:
            return None, None
        stop, gone = self.length + count, int(max(0, self.length + 1 - self._reach))
        padding = self.padding[:, None]
        positions = np.maximum(np.arange(self.length, stop) - padding, 0)
        mask = (np.arange(gone, stop) >= padding)[:, None, None, :]
        return positions, None if mask.all() else to_device(mask, device)

    def select(self, rows: Any) -> None:
        """Go on with the sequences ``rows`` (indices into the batch): in another order, several times, or not at all.

        What belongs to the memory is moved only if the sequences have other sources afterwards.
        """
        rows = np.asarray(rows)
        source = np.arange(rows.max(initial=-1) + 1) if self._source is None else self._source
        for layer, held in self._own.items():
            k, v = (self._picked(room, rows, self.length - held.gone) for room in held.rooms)
            self._own[layer] = Held((k, v), held.gone)
        self._states = {key: _taken(state, rows) for key, state in self._states.items()}
        self._new_states = {}
        self.padding = None if self.padding is None else self.padding[rows]
        if self._source is None or not np.array_equal(source[rows], source):
            self._memory = {layer: (_taken(k, rows), _taken(v, rows)) for layer, (k, v) in self._memory.items()}
            self.memory, self.memory_mask = _taken(self.memory, rows), _taken(self.memory_mask, rows)
        self._source = source[rows]

    def _picked(self, room: Array, rows: Array, count: int) -> Array:
        """``room[rows]``: copies only the ``count`` positions held, into the same memory where it fits."""
        held = _taken(room[..., :count, :], rows)
        if len(rows) != len(room):
            room = array_module(room).empty((len(rows), *room.shape[1:]), room.dtype)
        room[..., :count, :] = held
        return room

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}, max_length={self.max_length})"


def _check_unrecorded(k: Any, v: Any) -> None:
    if getattr(k, "requires_grad", False) or getattr(v, "requires_grad", False):
        raise GraphError("keys and values without a graph", "a cache while recording", "decode under no_grad()")


def _taken(x: Any, rows: Array) -> Any:
    return None if x is None else x[array_module(x).asarray(rows)]
