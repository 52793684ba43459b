"""The gradient of all ranks' labels together, exchanged in buckets: few large messages, and little memory beside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, array_module
from minigrad.distributed.communicator import Communicator, check_reduce
from minigrad.distributed.current import get_communicator
from minigrad.errors import ArgumentError, DeviceError
from minigrad.tensor import Tensor

BUCKET_BYTES = 25 * 2**20
FIRST_BYTES = 2**20  # of the first one, so that the exchange begins early


@dataclass(eq=False)
class Bucket:
    """Tensors that travel together in one flat array, each from its place on, and zeros up to a whole share a rank."""

    tensors: list[Tensor]
    starts: list[int]
    length: int
    dtype: Any

    def pack(self, arrays: Sequence[Array | None], factor: float = 1.0) -> Array:
        """The arrays times ``factor``, one after the other, on the device of the tensors; zeros for None."""
        xp = array_module(self.tensors[0].data)
        flat = xp.zeros(self.length, self.dtype)
        for start, array in zip(self.starts, arrays, strict=True):
            if array is not None:
                out = flat[start : start + array.size].reshape(array.shape)
                xp.multiply(array, self.dtype.type(factor), out=out, casting="same_kind")
        return flat

    def unpack(self, flat: Array) -> list[Array]:
        """Views of ``flat`` in the shapes of the tensors."""
        places = zip(self.starts, self.tensors, strict=True)
        return [flat[start : start + tensor.size].reshape(tensor.shape) for start, tensor in places]


def in_buckets(tensors: Iterable[Tensor], ranks: Communicator, first: int = BUCKET_BYTES) -> list[Bucket]:
    """The tensors, in their order, in buckets of one dtype and up to ``BUCKET_BYTES``, the first one up to ``first``.

    A larger tensor is alone in its own.
    """
    found: list[Bucket] = []
    for tensor in tensors:
        if not ranks.takes(tensor.device.partition(":")[0]):
            hint = "model.to('cpu'), or init(\"nccl\"), which carries arrays from GPU to GPU"
            raise DeviceError("parameters on the CPU, for an exchange over MPI", f"one on {tensor.device}", hint)
        dtype = np.dtype(accumulator(tensor.dtype))
        last, most = (found[-1] if found else None), (first if len(found) < 2 else BUCKET_BYTES)
        same = last is not None and last.tensors[0].dtype == tensor.dtype and last.tensors[0].device == tensor.device
        if last is None or not same or (last.length + tensor.size) * dtype.itemsize > most:
            last = Bucket([], [], 0, dtype)
            found.append(last)
        last.tensors.append(tensor)
        last.starts.append(last.length)
        last.length += tensor.size
    for bucket in found:
        bucket.length = ranks.padded(bucket.length)
    return found


def check_count(count: float) -> None:
    """Refuse what is no number of labels."""
    if isinstance(count, bool) or not isinstance(count, Real) or not 0 <= count < math.inf:
        raise ArgumentError("count, a number of labels from 0", repr(count), "labels.size, or 1 to weigh ranks alike")


def share_of(count: float, tensors: Sequence[Tensor], ranks: Communicator) -> tuple[float, float, list[bool]]:
    """This rank's share of all labels, their number, and which tensors have a gradient on any rank."""
    check_count(count)
    mine = [tensor.grad is not None for tensor in tensors]
    total, *owners = ranks.all_reduce(np.array([count, *mine], np.float64))
    return count / (total or 1), float(total), [owner > 0 for owner in owners]


def trained(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that aren't frozen, each once: tied ones have one gradient."""
    return [param for param in dict.fromkeys(params) if param.requires_grad]


def average_gradients(
    params: Iterable[Tensor], count: float = 1.0, reduce: str = "ordered", communicator: Communicator | None = None
) -> float:
    """Make every rank's gradients those of the mean over the labels of all ranks; returns the number of these.

    ::

        g = Σᵣ nᵣ gᵣ / Σᵣ nᵣ          gᵣ: the gradient of the mean loss over the nᵣ = ``count`` labels of rank r

    Call it once an update, after the backward passes of all micro-batches, and before clipping. A rank with count 0
    gives nothing, whatever its gradients hold. A parameter that has a gradient on some ranks counts as 0 on the others,
    and gets one on all; without a gradient anywhere it stays without. Sums are formed in at least float32, so an
    overflow of one rank is one on all. reduce is that of ``all_reduce``. Li et al. 2020, "PyTorch Distributed", has
    the buckets; there the exchange goes on beside the backward pass, here it comes after it (``Overlap`` does that).

    Raises ArgumentError for a count below 0 or not finite. Every rank must give the same parameters in the same order.

    >>> import minigrad as mg
    >>> w = mg.Tensor([1.0, 2.0], requires_grad=True)
    >>> (w * w).mean().backward()
    >>> average_gradients([w], count=2), w.grad
    (2.0, array([1., 2.]))
    """
    ranks = communicator or get_communicator()
    check_reduce(reduce)
    tensors = trained(params)
    share, total, owned = share_of(count, tensors, ranks)
    if ranks.size == 1:
        return total
    there = [tensor for tensor, owner in zip(tensors, owned, strict=True) if owner]
    for bucket in in_buckets(reversed(there), ranks):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            flat = bucket.pack([tensor.grad if count else None for tensor in bucket.tensors], share)
            flat = ranks.all_reduce(flat, reduce=reduce)
            for tensor, grad in zip(bucket.tensors, bucket.unpack(flat), strict=True):
                tensor.grad = grad.astype(tensor.dtype, copy=False)
    return total
