"""Examples and targets in batches, shuffled by a generator that can be saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minigrad import random
from minigrad.backend import Array, array_of
from minigrad.errors import ShapeError
from minigrad.messages.arguments import from_lists
from minigrad.messages.explain import explained
from minigrad.tensor import TensorLike
from .checks import check_sizes


@explained
def batches(
    x: TensorLike,
    y: TensorLike,
    batch_size: int,
    generator: Any = None,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
) -> Iterator[tuple[Array, Array]]:
    """Pairs of ``batch_size`` examples of x and their targets in y, each once, in a random order: one epoch.

    x and y are arrays or Tensors of one length, of which arrays come; a last, shorter batch is left out by drop_last.
    generator: a ``numpy.random.Generator`` or a seed, by default that of ``minigrad.random``. The order is drawn when
    this is called, so a generator saved between epochs gives the same epochs again. ``shuffle=False`` keeps the order.

    >>> x = np.arange(5)
    >>> [a.tolist() for a, _ in batches(x, x, 2, shuffle=False)], [len(a) for a, _ in batches(x, x, 2, 0)]
    ([[0, 1], [2, 3], [4]], [2, 2, 1])
    """
    check_sizes(batch_size=batch_size)
    xs, ys = (_array(a) for a in (x, y))
    if np.ndim(xs) == 0 or np.shape(xs)[:1] != np.shape(ys)[:1]:
        got, hint = f"{np.shape(xs)} and {np.shape(ys)}", "the first axis counts examples"
        raise ShapeError("x and y with as many examples", got, hint)
    order = random.generator(generator).permutation(len(xs)) if shuffle else np.arange(len(xs))
    stop = len(xs) - len(xs) % batch_size if drop_last else len(xs)
    return ((xs[i], ys[i]) for i in (order[a : a + batch_size] for a in range(0, stop, batch_size)))


def _array(value: Any) -> Any:
    return from_lists(value) if isinstance(value, list | tuple) else array_of(value)
