"""The five exchanges of arrays between ranks, over whatever carries them; one process is the simplest carrier.

A carrier says how to send bytes to all, gather them from all, and trade them between all (``mpi.py`` does). Sums are
ours: the part of each rank is added up in the order of the ranks, and sent to all. So every rank has the same bits, and
so has every run with as many ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, array_of, is_floating, is_on_gpu
from minigrad.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from minigrad.messages.arguments import as_int
from minigrad.messages.explain import describe

OPERATIONS: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
WAIT = 2.0  # seconds in which all ranks find out about one and the same mistake


def check_reduce(reduce: str) -> None:
    """Refuse what is no way to sum over ranks."""
    if reduce not in ("ordered", "carrier"):
        raise ArgumentError('reduce="ordered" or "carrier"', repr(reduce), "ordered gives the same bits each time")


class Communicator:
    """The ranks that work together, and the exchanges between them; this one is a process alone.

    Every rank calls the same exchange with an array of the same shape and dtype. Arrays are NumPy's; results are new
    ones. Sums are formed in at least float32.

    >>> alone = Communicator()
    >>> alone.rank, alone.size, alone.all_reduce(np.array([1.0, 2.0]))
    (0, 1, array([1., 2.]))
    """

    rank, size = 0, 1

    # ---- what carries the bytes: all arrays are contiguous, and of as many bytes on every rank ----

    def _broadcast(self, buffer: Array, root: int) -> None:
        """Fill ``buffer`` with that of ``root``."""

    def _all_gather(self, part: Array, whole: Array) -> None:
        """Fill ``whole`` (size, …) with the parts of all ranks."""
        whole[0] = part

    def _all_to_all(self, parts: Array, received: Array) -> None:
        """Send row i of ``parts`` (size, …) to rank i, and fill ``received`` with what came from rank i in row i."""
        received[...] = parts

    def _all_reduce(self, buffer: Array, op: str) -> None:
        """Reduce ``buffer`` in place, in the carrier's own order."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def all_fail(self) -> bool:
        """Whether every rank calls this within WAIT seconds: then all met one mistake, and each can leave by itself."""
        return True

    def abort(self, status: int) -> None:
        """End every rank at once."""
        raise SystemExit(status)

    # ---- the exchanges ----

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """The array of the rank ``root``, on every rank."""
        if not 0 <= as_int(root, "root") < self.size:
            raise ArgumentError(f"a root from 0 to {self.size - 1}", repr(root), "ranks are counted from 0")
        result = np.array(_host(array), order="C")
        self._broadcast(result, root)
        return result

    def all_gather(self, array: Array) -> Array:
        """The arrays of all ranks, of shape (n, …), one after the other: (size · n, …)."""
        part = np.ascontiguousarray(_host(array))
        if np.ndim(array) == 0:
            raise ShapeError("an array with an axis along which to join", "a number", "array.reshape(1)")
        whole = np.empty((self.size, *part.shape), part.dtype)
        self._all_gather(part, whole)
        return whole.reshape(self.size * len(part), *part.shape[1:])

    def reduce_scatter(self, array: Array, op: str = "sum") -> Array:
        """This rank's rows of the sum over all ranks: of (size · n, …) rows rank · n to (rank + 1) · n."""
        given = _summable(array, op)
        if given.ndim == 0 or len(given) % self.size:
            got = f"shape {given.shape}"
            raise ShapeError(f"a first axis that {self.size} ranks share evenly", got, "pad it with zeros")
        parts = np.ascontiguousarray(given, accumulator(given.dtype))
        parts = parts.reshape(self.size, len(given) // self.size, *given.shape[1:])
        received = np.empty_like(parts)
        self._all_to_all(parts, received)
        total = received[0]
        for part in received[1:]:
            OPERATIONS[op](total, part, out=total)
        return _cast(total, given.dtype)

    def all_reduce(self, array: Array, op: str = "sum", reduce: str = "ordered") -> Array:
        """The sum over all ranks (or the "max", the "min"), on every rank: the same bits.

        With reduce="ordered" element by element in the order of the ranks, so that a run with as many ranks gives these
        bits again. "carrier" leaves the order, and whether every rank has the same last bit, to the carrier: MPI's own
        all-reduce, which is somewhat faster (docs/distributed.md).
        """
        given = _summable(array, op)
        check_reduce(reduce)
        flat = np.zeros(self.padded(given.size), accumulator(given.dtype))
        flat[: given.size] = given.ravel()
        if reduce == "ordered":
            flat = self.all_gather(self.reduce_scatter(flat, op))
        else:
            self._all_reduce(flat, op)
        return _cast(flat[: given.size].reshape(given.shape), given.dtype)

    def padded(self, length: int) -> int:
        """The least multiple of ``size`` from ``length`` on."""
        return math.ceil(length / self.size) * self.size


def gpu_error(what: str, got: str) -> DeviceError:
    """The error for numbers on a GPU: exchanges read the memory of the CPU."""
    hint = ".to('cpu') moves a tensor or a model, .get() an array; NCCL, which would carry them, is not built in"
    return DeviceError(f"{what} on the CPU for an exchange between ranks", got, hint)


def _host(array: Any) -> Any:
    array = array_of(array)
    if is_on_gpu(array):
        raise gpu_error("an array", "one on a GPU")
    found = np.asarray(array)
    if found.dtype.kind == "O":
        raise DTypeError("an array of numbers for an exchange between ranks", describe(array), "np.array makes one")
    return found


def _summable(array: Any, op: str) -> Any:
    if op not in OPERATIONS:
        raise ArgumentError(f"op, one of {', '.join(OPERATIONS)}", repr(op), "a mean is the sum divided by size()")
    found = _host(array)
    if found.dtype.kind not in "iu" and not is_floating(found.dtype):
        hint = "array.astype(int) counts booleans"
        raise DTypeError("integers or real numbers to reduce over ranks", str(found.dtype), hint)
    return found


def _cast(total: Any, dtype: Any) -> Any:
    with np.errstate(over="ignore", under="ignore"):
        return total.astype(dtype, copy=False)
