"""The five exchanges of arrays between ranks, over whatever carries them; one process is the simplest carrier.

A carrier says how to send bytes to all, gather them from all, and trade them between all (``mpi.py`` and ``nccl.py``
do). Sums are ours: the part of each rank is added up in the order of the ranks, and sent to all. So every rank has the
same bits, and so has every run with as many ranks.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from minigrad.backend import Array, accumulator, array_module, array_of, is_floating, is_on_gpu
from minigrad.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from minigrad.messages.arguments import as_int
from minigrad.messages.explain import describe

OPERATIONS: dict[str, str] = {"sum": "add", "max": "maximum", "min": "minimum"}  # functions of NumPy and of CuPy
WAIT = 2.0  # seconds in which all ranks find out about one and the same mistake


def check_reduce(reduce: str) -> None:
    """Refuse what is no way to sum over ranks."""
    if reduce not in ("ordered", "carrier"):
        raise ArgumentError('reduce="ordered" or "carrier"', repr(reduce), "ordered gives the same bits each time")


class Communicator:
    """The ranks that work together, and the exchanges between them; this one is a process alone.

    Every rank calls the same exchange with an array of the same shape and dtype. Results are new arrays, where the
    given ones lie. Sums are formed in at least float32. ``sent`` counts the bytes that this rank gave to the others.

    >>> alone = Communicator()
    >>> alone.rank, alone.size, alone.all_reduce(np.array([1.0, 2.0]))
    (0, 1, array([1., 2.]))
    """

    rank, size = 0, 1
    names: Sequence[str] = ("rank 0 of 1",)  # of all ranks, with their processes
    sent = 0

    # ---- what carries the bytes: all arrays are contiguous, and of as many bytes on every rank. Each of these begins
    # ---- an exchange, and returns what ``_done`` and ``_end`` ask about it; None where it is over already

    def _broadcast(self, buffer: Array, root: int) -> Any:
        """Fill ``buffer`` with that of ``root``."""

    def _all_gather(self, part: Array, whole: Array) -> Any:
        """Fill ``whole`` (size, …) with the parts of all ranks."""
        whole[0] = part

    def _all_to_all(self, parts: Array, received: Array) -> Any:
        """Send row i of ``parts`` (size, …) to rank i, and fill ``received`` with what came from rank i in row i."""
        received[...] = parts

    def _all_reduce(self, buffer: Array, op: str) -> Any:
        """Reduce ``buffer`` in place, in the carrier's own order."""

    def _done(self, begun: Any) -> bool:
        """Whether what was begun is over; to ask moves it on."""
        return True

    def _end(self, begun: Any) -> None:
        """Wait for it."""

    def takes(self, device: str) -> bool:
        """Whether arrays of this device can be exchanged."""
        return True

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def long_work(self) -> AbstractContextManager[None]:
        """Inside, this rank is in no exchange for as long as it likes."""
        return nullcontext()

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
        given = self._taken(array)
        result = array_module(given).array(given, order="C")
        self._end(self._broadcast(result, root))
        self.sent += result.nbytes * (self.rank == root) * (self.size - 1)
        return result

    def all_gather(self, array: Array) -> Array:
        """The arrays of all ranks, of shape (n, …), one after the other: (size · n, …)."""
        given = self._taken(array)
        if np.ndim(array) == 0:
            raise ShapeError("an array with an axis along which to join", "a number", "array.reshape(1)")
        xp = array_module(given)
        part = xp.ascontiguousarray(given)
        whole = xp.empty((self.size, *part.shape), part.dtype)
        self._end(self._all_gather(part, whole))
        self.sent += part.nbytes * (self.size - 1)
        return whole.reshape(self.size * len(part), *part.shape[1:])

    def reduce_scatter(self, array: Array, op: str = "sum") -> Array:
        """This rank's rows of the sum over all ranks: of (size · n, …) rows rank · n to (rank + 1) · n."""
        given = self._summable(array, op)
        if given.ndim == 0 or len(given) % self.size:
            got = f"shape {given.shape}"
            raise ShapeError(f"a first axis that {self.size} ranks share evenly", got, "pad it with zeros")
        wide = array_module(given).ascontiguousarray(given, accumulator(given.dtype))
        total = Reduction(self, self._scatter(wide, op)).wait()
        return _cast(total, given.dtype)

    def all_reduce(self, array: Array, op: str = "sum", reduce: str = "ordered") -> Array:
        """The sum over all ranks (or the "max", the "min"), on every rank: the same bits.

        With reduce="ordered" element by element in the order of the ranks, so that a run with as many ranks gives these
        bits again. "carrier" leaves the order, and whether every rank has the same last bit, to the carrier: MPI's own
        all-reduce, or NCCL's, which is somewhat faster (docs/distributed.md).
        """
        return self.begin_all_reduce(array, op, reduce).wait()

    def begin_all_reduce(self, array: Array, op: str = "sum", reduce: str = "ordered") -> Reduction:
        """An ``all_reduce`` that goes on beside what the caller computes; ``wait()`` gives its result.

        Several may be under way, on every rank in the same order; of these only the oldest that isn't done is asked.
        """
        given = self._summable(array, op)
        check_reduce(reduce)
        flat = array_module(given).zeros(self.padded(given.size), accumulator(given.dtype))
        flat[: given.size] = given.ravel()
        return Reduction(self, self._steps(flat, op, reduce), given.shape, given.dtype)

    def _steps(self, flat: Array, op: str, reduce: str) -> Generator[Any, None, Array]:
        """All-reduce a whole share a rank; yields what must be over before it is asked to go on."""
        if reduce == "ordered":
            mine = yield from self._scatter(flat, op)
            whole = array_module(mine).empty((self.size, *mine.shape), mine.dtype)
            yield self._all_gather(mine, whole)
            flat = whole.reshape(-1)
        else:
            yield self._all_reduce(flat, op)
        self.sent += flat.nbytes // self.size * (self.size - 1)
        return flat

    def _scatter(self, wide: Array, op: str) -> Generator[Any, None, Array]:
        xp = array_module(wide)
        parts = wide.reshape(self.size, len(wide) // self.size, *wide.shape[1:])
        received = xp.empty_like(parts)
        yield self._all_to_all(parts, received)
        self.sent += parts.nbytes // self.size * (self.size - 1)
        total = received[0]
        for part in received[1:]:
            getattr(xp, OPERATIONS[op])(total, part, out=total)
        return total

    def padded(self, length: int) -> int:
        """The least multiple of ``size`` from ``length`` on."""
        return math.ceil(length / self.size) * self.size

    # ---- what can be exchanged ----

    def _taken(self, array: Any) -> Any:
        found = array_of(array)
        if is_on_gpu(found):
            if not self.takes("cuda"):
                hint = 'array.get(), or init("nccl"), which carries arrays from GPU to GPU'
                raise DeviceError("an array on the CPU for an exchange over MPI", "one on a GPU", hint)
            return found
        found = np.asarray(found)
        if found.dtype.kind == "O":
            raise DTypeError("an array of numbers for an exchange between ranks", describe(array), "np.array makes one")
        return found

    def _summable(self, array: Any, op: str) -> Any:
        if op not in OPERATIONS:
            raise ArgumentError(f"op, one of {', '.join(OPERATIONS)}", repr(op), "a mean is the sum divided by size()")
        found = self._taken(array)
        if found.dtype.kind not in "iu" and not is_floating(found.dtype):
            hint = "array.astype(int) counts booleans"
            raise DTypeError("integers or real numbers to reduce over ranks", str(found.dtype), hint)
        return found


class Reduction:
    """An all-reduce under way: ``poll`` moves it on and says whether it is done, ``wait`` gives the result.

    >>> Communicator().begin_all_reduce(np.ones(3)).wait()
    array([1., 1., 1.])
    """

    def __init__(self, ranks: Communicator, steps: Generator[Any, None, Array], shape: Any = None, dtype: Any = None):
        self._ranks, self._steps, self._shape, self._dtype = ranks, steps, shape, dtype
        self._result: Array | None = None
        self._begun: Any = None
        self._go_on()

    def _go_on(self) -> None:
        try:
            self._begun = next(self._steps)
        except StopIteration as end:
            self._result = end.value

    def poll(self) -> bool:
        """Go on as far as no other rank must be waited for; whether it is done."""
        while self._result is None and self._ranks._done(self._begun):
            self._go_on()
        return self._result is not None

    def wait(self) -> Array:
        """The sum, once all ranks have given their part."""
        while self._result is None:
            self._ranks._end(self._begun)
            self._go_on()
        if self._shape is None:
            return self._result
        found = self._result[: math.prod(self._shape)].reshape(self._shape)
        return _cast(found, self._dtype)


def _cast(total: Any, dtype: Any) -> Any:
    with np.errstate(over="ignore", under="ignore"):
        return total.astype(dtype, copy=False)
