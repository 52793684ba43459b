"""KVCache: keys and values of the tokens that a model has read, so that each next token costs one position, not all."""

from __future__ import annotations

from typing import Any

from minigrad import asarray
from minigrad.backend import Array, array_module
from minigrad.errors import DTypeError, GraphError, ShapeError
from minigrad.explain import describe
from nn.checks import check_sizes


class KVCache:
    """What a model remembers of a batch of sequences while it decodes on: ``model(tokens, cache=cache)``.

    Room for ``max_length`` positions (the model's context_length if not given) is allocated in each attention layer at
    the first call, which also settles the size of the batch. Memory: 2 · layers · batch · max_length · num_kv_heads ·
    head_dim numbers. ``reset()`` makes it empty again, for other sequences.

    >>> import nn
    >>> model = nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2)
    >>> cache = nn.KVCache(model)
    >>> _ = model([[1, 2, 3]], cache=cache); logits = model([[4]], cache=cache)
    >>> logits.shape, cache.length
    ((1, 1, 10), 4)
    """

    def __init__(self, model: Any, max_length: int | None = None) -> None:
        if max_length is None and not hasattr(model, "context_length"):
            hint = "nn.TransformerLM is one; or give max_length"
            raise DTypeError("a language model with a context_length", describe(model), hint)
        self.max_length: int = model.context_length if max_length is None else max_length
        check_sizes(max_length=self.max_length)
        self.reset()

    def reset(self) -> None:
        """Forget everything, the size of the batch included."""
        self.length = 0  # positions that all layers hold
        self._arrays: dict[
            Any, tuple[Array, Array]
        ] = {}  # attention module -> (..., num_kv_heads, max_length, head_dim)

    def extend(self, attention: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Add new keys and values (..., heads, T, d) of a layer; those of all positions, as views of the memory.

        They count once ``advance`` was called, after the last layer; a call that fails before changes nothing.
        """
        if getattr(k, "requires_grad", False) or getattr(v, "requires_grad", False):
            raise GraphError("keys and values without a graph", "a cache while recording", "decode under no_grad()")
        stop = self.length + k.shape[-2]
        if stop > self.max_length:
            got = f"{k.shape[-2]} positions after {self.length}"
            raise ShapeError(
                f"at most {self.max_length} positions in the cache", got, "reset() it, or make a longer one"
            )
        if attention not in self._arrays:
            self._arrays[attention] = self._room(k), self._room(v)
        result = []
        for memory, new in zip(self._arrays[attention], (k, v), strict=True):
            if memory.shape[:-2] != new.shape[:-2]:
                expected = f"sequences as before, keys (..., heads, T, d) with leading axes {memory.shape[:-2]}"
                raise ShapeError(expected, f"{new.shape[:-2]}", "reset() the cache for another batch")
            memory[..., self.length : stop, :] = asarray(new).data
            result.append(asarray(memory[..., :stop, :]))
        return result[0], result[1]

    def _room(self, x: Any) -> Array:
        return array_module(x).empty((*x.shape[:-2], self.max_length, x.shape[-1]), x.dtype)

    def advance(self, count: int) -> None:
        """Count ``count`` positions as held, once every layer has added them."""
        self.length += count

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}, max_length={self.max_length})"
