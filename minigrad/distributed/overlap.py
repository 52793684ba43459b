"""The exchange of gradients beside the backward pass that finds them: each bucket goes as soon as it is full."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from minigrad.backend import Array
from minigrad.distributed.communicator import Communicator, Reduction, check_reduce
from minigrad.distributed.current import get_communicator
from minigrad.distributed.gradients import FIRST_BYTES, Bucket, check_count, in_buckets, trained
from minigrad.engine import core
from minigrad.engine.backward import nodes_behind
from minigrad.engine.broadcast import unbroadcast
from minigrad.tensor import Tensor


class Overlap:
    """The backward pass and ``average_gradients`` in one: gradients travel while the pass goes on.

    ::

        overlap = mg.distributed.Overlap(model.parameters())
        for ...:
            overlap.backward(model.loss(inputs, labels), count=labels.size)
            optimizer.step()
            optimizer.zero_grad()

    Of several micro-batches the last one goes through it, the others before through ``loss.backward()``. Gradients are
    those of ``average_gradients``, to the last bit. A bucket of up to 25 MB, the first of 1 MB, is sent when all of its
    gradients are complete, in the order in which the first pass of rank 0 completed them. What the pass doesn't reach
    on this rank, and parameters with hooks, go at its end. Li et al. 2020, "PyTorch Distributed", section 3.2.

    MPI goes on with an exchange only while it is asked to, which happens after each operation of the pass; whether this
    gains time is a matter of the machine (docs/distributed.md).

    >>> import minigrad as mg
    >>> w = mg.Tensor([1.0, 2.0], requires_grad=True)
    >>> Overlap([w]).backward((w * w).mean(), count=2), w.grad
    (2.0, array([1., 2.]))
    """

    def __init__(
        self, params: Iterable[Tensor], reduce: str = "ordered", communicator: Communicator | None = None
    ) -> None:
        check_reduce(reduce)
        self._params, self._reduce = list(dict.fromkeys(params)), reduce
        self._ranks = communicator or get_communicator()
        self._place: dict[Tensor, int] = {}  # in the order of completion, once it is known

    def backward(self, loss: Tensor | None, count: float = 1.0) -> float:
        """Add the gradients of ``loss`` and average them over all labels; returns the number of these.

        count is that of ``average_gradients``, of all micro-batches together. A rank whose last micro-batch is empty
        gives None for the loss. Raises what ``loss.backward()`` and ``average_gradients`` raise.
        """
        check_count(count)
        tensors = trained(self._params)
        total = float(self._ranks.all_reduce(np.float64(count)))
        order = sorted(tensors, key=self._place.__getitem__) if self._place else tensors[::-1]
        sending = _Sending(in_buckets(order, self._ranks, FIRST_BYTES), self._ranks, self._reduce, count / (total or 1))
        with sending.watching(loss):
            if loss is not None:
                loss.backward()
        sending.finish()
        if not self._place:
            self._agree(sending.completed)
        return total

    def _agree(self, completed: Sequence[Tensor]) -> None:
        """Take the order in which rank 0 has completed its gradients; what it hasn't comes last."""
        place = {tensor: i for i, tensor in enumerate(completed)}
        mine = np.array([place.get(tensor, len(self._params)) for tensor in self._params], np.int64)
        self._place = dict(zip(self._params, map(int, self._ranks.broadcast(mine)), strict=True))


class _Sending(core.Observer):
    """The buckets of one pass; it watches the pass for gradients that are complete."""

    def __init__(self, buckets: Sequence[Bucket], ranks: Communicator, reduce: str, share: float) -> None:
        self._buckets, self._ranks, self._reduce, self._share = buckets, ranks, reduce, share
        self._bucket_of = {tensor: bucket for bucket in buckets for tensor in bucket.tensors}
        self._missing = {bucket: len(bucket.tensors) for bucket in buckets}
        self._reductions: list[Reduction] = []  # of the first buckets
        self._found: dict[Tensor, Array] = {}  # what the pass has for a leaf so far
        self.completed: list[Tensor] = []

    @contextmanager
    def watching(self, loss: Tensor | None) -> Iterator[None]:
        """Inside, send what a pass from ``loss`` completes."""
        self._nodes = nodes_behind([loss.node], None) if loss is not None and loss.node is not None else set()
        edges = itertools.chain.from_iterable(node.parents or () for node in self._nodes)
        self._uses = Counter(edge for edge in edges if edge in self._bucket_of)
        core.observers.append(self)
        try:
            yield
        finally:
            core.observers.remove(self)

    def backward(self, node: Any, g: Any, gradients: list[Any], started: float) -> None:
        """Take note of the gradients of leaves, of this pass alone: ``checkpoint`` runs others inside of it."""
        if node not in self._nodes:
            return
        for edge, found in zip(node.parents, gradients, strict=False):
            if edge not in self._uses:
                continue
            if found is not None:
                found = found if found.shape == edge.shape else unbroadcast(found, edge.shape)
                found = found.astype(edge.dtype, copy=False)
                before = self._found.get(edge)
                self._found[edge] = found if before is None else before + found
            self._uses[edge] -= 1
            if not self._uses[edge] and edge in self._found and not edge._hooks:
                self._complete(edge)
        self._move_on()

    def _complete(self, tensor: Tensor) -> None:
        self.completed.append(tensor)
        self._missing[self._bucket_of[tensor]] -= 1
        while (k := len(self._reductions)) < len(self._buckets) and not self._missing[self._buckets[k]]:
            self._send(self._buckets[k], [self._with_earlier(param) for param in self._buckets[k].tensors])

    def _with_earlier(self, tensor: Tensor) -> Array:
        found = self._found.pop(tensor)
        return found if tensor._grad is None else tensor._grad + found

    def _send(self, bucket: Bucket, arrays: Sequence[Array | None]) -> None:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            flat = bucket.pack(arrays, self._share) if self._share else bucket.pack([None] * len(arrays))
            self._reductions.append(self._ranks.begin_all_reduce(flat, reduce=self._reduce))

    def _move_on(self) -> None:
        """Poll in order: the second half of an exchange must begin in the same order on all ranks."""
        for reduction in self._reductions:
            if not reduction.poll():
                return

    def finish(self) -> None:
        """Send what is left, and put the sums where the gradients are."""
        for bucket in self._buckets[len(self._reductions) :]:
            self._move_on()
            self._send(bucket, [tensor.grad for tensor in bucket.tensors])
        sums = [reduction.wait() for reduction in self._reductions]
        tensors = [tensor for bucket in self._buckets for tensor in bucket.tensors]
        there = np.array([tensor.grad is not None for tensor in tensors], np.int64)
        owned = iter(self._ranks.all_reduce(there, "max"))
        if self._ranks.size == 1:
            return
        for bucket, flat in zip(self._buckets, sums, strict=True):
            for tensor, grad in zip(bucket.tensors, bucket.unpack(flat), strict=True):
                with np.errstate(over="ignore", under="ignore"):
                    tensor.grad = grad.astype(tensor.dtype, copy=False) if next(owned) else None
