"""NCCL of the simulated GPU, as CuPy shows it: its functions on pointers, carried by MPI, which refuse what NCCL does.

Where the real library would wait for ever or write elsewhere, as with counts that differ from rank to rank, this one
says so: ``Refused``. Names, numbers and signatures are those of CuPy 14.2 with NCCL 2.32.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from support.simulated import cublas

available = True
TYPES = {0: "int8", 1: "uint8", 2: "int32", 3: "uint32", 4: "int64", 5: "uint64", 6: "float16", 7: "float32",
         8: "float64"}  # fmt: skip
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = (
    TYPES
)
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
OPERATIONS = {NCCL_SUM: np.add, NCCL_PROD: np.multiply, NCCL_MAX: np.maximum, NCCL_MIN: np.minimum}


class Refused(RuntimeError):
    """What the real library refuses, hangs at, or answers by a crash."""


def check(condition: bool, what: str) -> None:
    if not condition:
        raise Refused(what)


_group: list[Any] | None = None  # what is sent and received together


def get_unique_id() -> bytes:
    return bytes(np.random.default_rng().integers(0, 256, 128, np.uint8))


def groupStart() -> None:
    global _group
    check(_group is None, "a group in a group")
    _group = []


def groupEnd() -> None:
    """All of a group at once: with one of them after the other, each rank would wait for the other to receive."""
    global _group
    check(_group is not None, "the end of no group")
    calls, _group = _group or [], None
    sends = [call for call in calls if call[0] == "send"]
    receives = [call for call in calls if call[0] == "recv"]
    if calls:
        calls[0][1]._trade(sends, receives)


class NcclCommunicator:
    """One rank with the device that is current when it is made."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        from mpi4py import MPI

        from support.simulated import device

        self._state = device.state
        self._comm: Any = MPI.COMM_WORLD.Dup()
        self._device = device.state.current
        check(type(commId) is bytes and len(commId) == 128, "a commId that get_unique_id made")
        check(len(set(self._comm.allgather((commId, ndev)))) == 1, "ranks of one commId and one ndev")
        check(sorted(self._comm.allgather(rank)) == list(range(ndev)), "each rank once")
        check(len(set(self._comm.allgather(self._device))) == ndev, "Duplicate GPU detected")

    def _memory(self, pointer: int, count: int, datatype: int, stream: int) -> Any:
        check(all(type(value) is int for value in (pointer, count, datatype, stream)), "integers alone")
        check(datatype in TYPES, f"no ncclDataType_t: {datatype}")
        check(self._state.current == self._device, "a call on another device than the communicator's")
        check(stream != 0, "the default stream, on which the computation waits")
        dtype = np.dtype(TYPES[datatype])
        first, last = pointer, pointer + count * dtype.itemsize
        owners = [at for _, low, high, at in list(cublas.alive.values()) if low <= first and last <= high]
        check(bool(owners), f"an illegal memory access at {pointer:#x}: {count} numbers of {dtype}")
        check(self._device in owners, f"memory of another device than {self._device}")
        check(pointer % dtype.itemsize == 0, "an address that isn't aligned")
        return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype)

    def _together(self, *facts: Any) -> None:
        check(len(set(self._comm.allgather(facts))) == 1, f"the same call on every rank, not another than {facts}")

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        source, target = (self._memory(place, count, datatype, stream) for place in (sendbuf, recvbuf))
        check(op in OPERATIONS, f"no ncclRedOp_t: {op}")
        self._together("allReduce", count, datatype, op)
        first, *others = self._comm.allgather(np.array(source))
        for other in reversed(others):  # NCCL's order is its own
            first = OPERATIONS[op](first, other)
        target[...] = first

    def broadcast(self, sendbuff: int, recvbuf: int, count: int, datatype: int, root: int, stream: int) -> None:
        source, target = (self._memory(place, count, datatype, stream) for place in (sendbuff, recvbuf))
        self._together("broadcast", count, datatype, root)
        target[...] = self._comm.bcast(np.array(source), root)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        source = self._memory(sendbuf, count, datatype, stream)
        target = self._memory(recvbuf, count * self._comm.Get_size(), datatype, stream)
        self._together("allGather", count, datatype)
        target[...] = np.concatenate(self._comm.allgather(np.array(source)))

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        check(_group is not None, "send outside of a group, where ranks wait for each other")
        _group.append(("send", self, peer, self._memory(sendbuf, count, datatype, stream)))  # type: ignore[union-attr]

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        check(_group is not None, "recv outside of a group, where ranks wait for each other")
        _group.append(("recv", self, peer, self._memory(recvbuf, count, datatype, stream)))  # type: ignore[union-attr]

    def _trade(self, sends: list[Any], receives: list[Any]) -> None:
        given: list[Any] = [[] for _ in range(self._comm.Get_size())]
        for _, _, peer, source in sends:
            given[peer].append(np.array(source))
        came = self._comm.alltoall(given)
        for _, _, peer, target in receives:
            check(bool(came[peer]), f"nothing sent by rank {peer}")
            source = came[peer].pop(0)
            check(source.dtype == target.dtype and source.size == target.size, "as much as was sent")
            target[...] = source
        check(not any(came), "everything received that was sent")
