"""NCCL carries the arrays of GPUs, one GPU a rank, on a stream of its own; MPI finds the ranks and carries the rest.

What is begun waits on the GPU for the kernels before it, and the kernels behind it wait for it: the host waits for
nobody. NCCL itself doesn't notice that a rank is gone. Each update also exchanges counts over MPI, whose watch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minigrad.backend import Array, count_gpus, is_on_gpu, load_cupy, load_nccl
from minigrad.distributed.mpi import Mpi
from minigrad.errors import DeviceError, DTypeError

# fmt: off
DTYPES = {"int8": "NCCL_INT8", "uint8": "NCCL_UINT8", "int32": "NCCL_INT32", "uint32": "NCCL_UINT32",
          "int64": "NCCL_INT64", "uint64": "NCCL_UINT64", "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64"}
# fmt: on


def _place(array: Any) -> int:
    """The address of a contiguous array on the GPU."""
    return int(array.data.ptr)


class Nccl(Mpi):
    """The processes that one mpiexec started, each with a GPU; arrays on the CPU go over MPI.

    >>> issubclass(Nccl, Mpi)
    True
    """

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        problem = None
        try:
            self._cupy, self._nccl = load_cupy(), load_nccl()
            self._take_gpu(count_gpus())
        except DeviceError as error:
            problem = error.expected, error.got, error.hint
        if problems := list(filter(None, self._comm.allgather(problem))):  # one's problem is everybody's
            expected, got, hint = problems[0]
            raise DeviceError(expected, got, hint)
        where = self.names[self.rank].rpartition(" on ")[2], self._cupy.cuda.Device().pci_bus_id
        if len(set(self._comm.allgather(where))) < self.size:
            got = f"{count_gpus()} for {self.neighbours} ranks on one machine"
            raise DeviceError("a GPU of its own for every rank", got, "mpiexec -n with as many ranks as GPUs")
        unique = self._comm.bcast(self._nccl.get_unique_id() if self.rank == 0 else None)
        self._gpus: Any = self._nccl.NcclCommunicator(self.size, unique, self.rank)
        self._stream: Any = self._cupy.cuda.Stream(non_blocking=True)

    def _take_gpu(self, count: int) -> None:
        """Make the GPU current that has this rank's number on its machine, or the only one that it is shown."""
        if count > 1:
            self._cupy.cuda.Device(self.local_rank % count).use()

    def takes(self, device: str) -> bool:
        return True

    def _queued(self, call: Callable[[int], Any]) -> Any:
        """Queue a call behind what is queued on the current stream; an event behind it."""
        before, after = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        before.record()
        self._stream.wait_event(before)
        call(self._stream.ptr)
        after.record(self._stream)
        return after, ""

    def _broadcast(self, buffer: Array, root: int) -> Any:
        if not is_on_gpu(buffer):
            return super()._broadcast(buffer, root)
        place, count, kind = _place(buffer), buffer.nbytes, self._nccl.NCCL_UINT8
        return self._queued(lambda stream: self._gpus.broadcast(place, place, count, kind, root, stream))

    def _all_gather(self, part: Array, whole: Array) -> Any:
        if not is_on_gpu(part):
            return super()._all_gather(part, whole)
        source, target, count, kind = _place(part), _place(whole), part.nbytes, self._nccl.NCCL_UINT8
        return self._queued(lambda stream: self._gpus.allGather(source, target, count, kind, stream))

    def _all_to_all(self, parts: Array, received: Array) -> Any:
        if not is_on_gpu(parts):
            return super()._all_to_all(parts, received)
        count, kind = parts.nbytes // self.size, self._nccl.NCCL_UINT8

        def trade(stream: int) -> None:
            self._nccl.groupStart()
            for other in range(self.size):
                self._gpus.send(_place(parts) + other * count, count, kind, other, stream)
                self._gpus.recv(_place(received) + other * count, count, kind, other, stream)
            self._nccl.groupEnd()

        return self._queued(trade)

    def _all_reduce(self, buffer: Array, op: str) -> Any:
        if not is_on_gpu(buffer):
            return super()._all_reduce(buffer, op)
        if (name := DTYPES.get(buffer.dtype.name)) is None:
            raise DTypeError(f"a dtype that NCCL reduces ({', '.join(DTYPES)})", str(buffer.dtype), 'reduce="ordered"')
        place, kind, how = _place(buffer), getattr(self._nccl, name), getattr(self._nccl, f"NCCL_{op.upper()}")
        return self._queued(lambda stream: self._gpus.allReduce(place, place, buffer.size, kind, how, stream))

    def _done(self, begun: Any) -> bool:
        event, kind = begun
        return super()._done(begun) if kind else bool(event.done)

    def _end(self, begun: Any) -> None:
        event, kind = begun
        if kind:
            super()._end(begun)
        else:
            self._cupy.cuda.get_current_stream().wait_event(event)
