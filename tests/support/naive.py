"""An engine too simple to be wrong: every value remembers its parents, and how a gradient is pulled back to each.

It frees nothing, checks nothing, adds nothing in place, and pulls with the same functions that it computes with, so its
gradients can be differentiated again. Values are NumPy arrays.
"""

import itertools

import numpy as np


class Value:
    """An array, and pairs (parent, function from the gradient of this to that of the parent)."""

    numbers = itertools.count()

    def __init__(self, array, *parents):
        self.array, self.parents, self.number = np.asarray(array, float), parents, next(Value.numbers)


def gradients(root, upstream):
    """The gradient of ``root`` with respect to every value that it was made from, itself included."""
    found, waiting = {root: upstream}, {root}
    while waiting:
        value = max(waiting, key=lambda v: v.number)  # all that was made from it came before
        waiting.remove(value)
        for parent, pull in value.parents:
            g = pull(found[value])
            found[parent] = add(found[parent], g) if parent in found else g
            waiting.add(parent)
    return found


def fit(g, like):
    """Sum ``g`` down to the shape of ``like``, which was broadcast."""
    lead = g.array.ndim - like.array.ndim
    axes = (*range(lead), *(i + lead for i, n in enumerate(like.array.shape) if n == 1 != g.array.shape[i + lead]))
    total = g.array.sum(axis=axes).reshape(like.array.shape)
    shape = g.array.shape
    kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
    return Value(total, (g, lambda h: spread(reshape(h, kept), shape)))


def spread(x, shape):
    return Value(np.broadcast_to(x.array, shape), (x, lambda g: fit(g, x)))


def add(x, y):
    return Value(x.array + y.array, (x, lambda g: fit(g, x)), (y, lambda g: fit(g, y)))


def multiply(x, y):
    return Value(x.array * y.array, (x, lambda g: fit(multiply(g, y), x)), (y, lambda g: fit(multiply(g, x), y)))


def subtract(x, y):
    return add(x, multiply(y, Value(-1)))


def sin(x):
    return Value(np.sin(x.array), (x, lambda g: multiply(g, cos(x))))


def cos(x):
    return Value(np.cos(x.array), (x, lambda g: multiply(multiply(g, sin(x)), Value(-1))))


def tanh(x):
    out = Value(np.tanh(x.array), (x, lambda g: multiply(g, subtract(Value(1), multiply(out, out)))))
    return out


def total(x):
    return Value(x.array.sum(), (x, lambda g: spread(g, x.array.shape)))


def reshape(x, shape):
    return Value(x.array.reshape(shape), (x, lambda g: reshape(g, x.array.shape)))


def transpose(x):
    return Value(x.array.T, (x, transpose))


def last(x):
    """The last place of the first axis."""
    return Value(x.array[-1], (x, lambda g: into_last(g, x.array.shape)))


def into_last(x, shape):
    array = np.zeros(shape)
    array[-1] = x.array
    return Value(array, (x, last))
