"""MPI carries the exchanges, through mpi4py's calls on buffers. The only module that imports mpi4py.

Every exchange is begun without blocking and then asked again and again whether it is over: so a wait has an end
(``watch.py``), leaves the core to others, and hears Ctrl-C. MPI goes on with what was begun only while it is asked.
"""

from __future__ import annotations

import atexit
import os
import platform
import time
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from minigrad.backend import Array
from minigrad.distributed import witness
from minigrad.distributed.communicator import WAIT, Communicator
from minigrad.distributed.watch import Watch
from minigrad.errors import MissingPackageError


class Mpi(Communicator):
    """All processes that one mpiexec started.

    >>> issubclass(Mpi, Communicator)
    True
    """

    def __init__(self, timeout: float) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without an MPI
            first = str(error).partition("\n")[0]
            hint = "pip install -e '.[mpi]', of minigrad"
            raise MissingPackageError("mpi4py and an MPI, to work with other processes", first, hint) from None
        self._comm: Any = MPI.COMM_WORLD
        self._gathers: Any = MPI.COMM_WORLD.Dup()  # what is begun on one communicator must have the same order on all
        self._failures: Any = MPI.COMM_WORLD.Dup()  # a rank that failed is not where the others are
        self._operations = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
        self._in_place = MPI.IN_PLACE
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.neighbours: int = node.Get_size()  # ranks on this machine, itself counted
        self.local_rank: int = node.Get_rank()  # and which of them this is
        me = f"rank {self.rank} of {self.size} (process {os.getpid()} on {platform.node()})"
        self.names = self._comm.allgather(me)  # for the eyes of whoever looks for a rank that failed
        neighbours = dict(node.allgather((os.getpid(), me)))
        self._witness: str = node.bcast(witness.call(neighbours) if self.local_rank == 0 else "")
        atexit.register(witness.tell, self._witness, str(os.getpid()).encode())
        node.Free()
        self.watch = Watch(MPI.COMM_WORLD.Dup(), timeout, MPI.Query_thread() == MPI.THREAD_MULTIPLE, self)

    def _broadcast(self, buffer: Array, root: int) -> Any:
        return self._comm.Ibcast(_bytes(buffer), root).Test, "broadcast"

    def _all_gather(self, part: Array, whole: Array) -> Any:
        return self._gathers.Iallgather(_bytes(part), _bytes(whole)).Test, "all_gather"

    def _all_to_all(self, parts: Array, received: Array) -> Any:
        return self._comm.Ialltoall(_bytes(parts), _bytes(received)).Test, "all_to_all"

    def _all_reduce(self, buffer: Array, op: str) -> Any:
        return self._comm.Iallreduce(self._in_place, buffer, self._operations[op]).Test, "all_reduce"

    def _done(self, begun: Any) -> bool:
        return bool(begun[0]())

    def _end(self, begun: Any) -> None:
        self.watch.wait(*begun)

    def takes(self, device: str) -> bool:
        return device == "cpu"

    def barrier(self) -> None:
        self._end((self._comm.Ibarrier().Test, "barrier"))

    def long_work(self) -> AbstractContextManager[None]:
        """Give signs of life while this rank is in no exchange."""
        return self.watch.long_work()

    def all_fail(self) -> bool:
        everyone, until = self._failures.Ibarrier(), time.monotonic() + WAIT
        while not (done := everyone.Test()) and time.monotonic() < until:
            time.sleep(0.01)
        return bool(done)

    def abort(self, status: int) -> None:
        witness.tell(self._witness, witness.ALL)
        self._comm.Abort(status)


def _bytes(array: Array) -> Array:
    """The memory of a contiguous array: moving it needs no dtype, and MPI knows neither float16 nor bfloat16."""
    return array.reshape(-1).view(np.uint8)
