"""MPI carries the exchanges, through mpi4py's calls on buffers. The only module that imports mpi4py."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from minigrad.backend import Array
from minigrad.distributed.communicator import WAIT, Communicator
from minigrad.errors import MissingPackageError


class Mpi(Communicator):
    """All processes that one mpiexec started.

    >>> issubclass(Mpi, Communicator)
    True
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without an MPI
            first = str(error).partition("\n")[0]
            hint = "pip install -e '.[mpi]', of minigrad"
            raise MissingPackageError("mpi4py and an MPI, to work with other processes", first, hint) from None
        self._comm: Any = MPI.COMM_WORLD
        self._failures: Any = MPI.COMM_WORLD.Dup()  # a rank that failed is not where the others are
        self._operations = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
        self._in_place = MPI.IN_PLACE
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.neighbours: int = node.Get_size()  # ranks on this machine, itself counted
        node.Free()

    def _broadcast(self, buffer: Array, root: int) -> None:
        self._comm.Bcast(_bytes(buffer), root)

    def _all_gather(self, part: Array, whole: Array) -> None:
        self._comm.Allgather(_bytes(part), _bytes(whole))

    def _all_to_all(self, parts: Array, received: Array) -> None:
        self._comm.Alltoall(_bytes(parts), _bytes(received))

    def _all_reduce(self, buffer: Array, op: str) -> None:
        self._comm.Allreduce(self._in_place, buffer, self._operations[op])

    def barrier(self) -> None:
        self._comm.Barrier()

    def all_fail(self) -> bool:
        everyone, until = self._failures.Ibarrier(), time.monotonic() + WAIT
        while not (done := everyone.Test()) and time.monotonic() < until:
            time.sleep(0.01)
        return bool(done)

    def abort(self, status: int) -> None:
        self._comm.Abort(status)


def _bytes(array: Array) -> Array:
    """The memory of a contiguous array: moving it needs no dtype, and MPI knows neither float16 nor bfloat16."""
    return array.reshape(-1).view(np.uint8)
