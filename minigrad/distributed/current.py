"""The communicator of this process, found by ``init``, and the functions that speak through it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real

from minigrad.backend import Array
from minigrad.distributed.communicator import Communicator
from minigrad.distributed.mpi import Mpi
from minigrad.distributed.nccl import Nccl
from minigrad.errors import ArgumentError
from minigrad.machine import parallel

STARTERS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")  # variables in which an mpiexec says how many processes it started
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")  # and which of them this one is
_current = Communicator()


def init(backend: str = "auto", timeout: float = 600.0) -> Communicator:
    """Find the other ranks; from here on the functions of this module speak to them.

    backend: "mpi" takes mpi4py and the MPI that it finds (``pip install -e '.[mpi]'`` brings both, on Windows mpi4py
    alone); "nccl" takes a GPU a rank too, the one of this machine that has the rank's number among the ranks of the
    machine, and NCCL for its arrays; "none" is this process alone; "auto" is "mpi" in a process that mpiexec started
    beside others, else "none". Every rank gets its share of the cores as threads, unless ``MINIGRAD_NUM_THREADS`` says
    how many.

    timeout: seconds for which a rank may be silent, which is in no exchange and not in ``long_work``. Whoever waits for
    it then ends all ranks, with a line that names it.

    Raises MissingPackageError where mpi4py or its MPI is absent, DeviceError where CuPy or NCCL is, and for more ranks
    than GPUs, and ArgumentError for another backend or timeout.

    >>> init("none").size
    1
    """
    global _current
    if backend not in ("auto", "mpi", "nccl", "none"):
        raise ArgumentError('a backend, "auto", "mpi", "nccl" or "none"', repr(backend), "auto asks mpiexec")
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout > 0:
        raise ArgumentError("timeout, seconds above 0", repr(timeout), "float('inf') waits without end")
    if backend == "none" or (backend == "auto" and not are_several()):
        _current = Communicator()
        return _current
    found = Nccl(float(timeout)) if backend == "nccl" else Mpi(float(timeout))
    if "MINIGRAD_NUM_THREADS" not in os.environ:
        share = max(1, (os.cpu_count() or 1) // found.neighbours)
        parallel.set_num_threads(min(share, parallel.get_num_threads()))
    _current = found
    return found


def are_several() -> bool:
    """Whether an mpiexec started this process beside others; asks the environment alone.

    >>> are_several()
    False
    """
    return any(os.environ.get(name, "1") not in ("", "1") for name in STARTERS)


def launched_rank() -> int:
    """The rank that an mpiexec gave this process; asks the environment alone.

    >>> launched_rank()
    0
    """
    return int(next((os.environ[name] for name in RANKS if name in os.environ), 0))


def get_communicator() -> Communicator:
    """The communicator that ``init`` found; one process alone before that."""
    return _current


def rank() -> int:
    """The number of this process, from 0 to ``size() - 1``."""
    return _current.rank


def size() -> int:
    """How many processes work together."""
    return _current.size


def all_reduce(array: Array, op: str = "sum", reduce: str = "ordered") -> Array:
    """:meth:`Communicator.all_reduce` of the communicator that ``init`` found.

    >>> all_reduce([1.0, 2.0]) / size()
    array([1., 2.])
    """
    return _current.all_reduce(array, op, reduce)


def broadcast(array: Array, root: int = 0) -> Array:
    """:meth:`Communicator.broadcast` of the communicator that ``init`` found.

    >>> broadcast([1.0, 2.0])
    array([1., 2.])
    """
    return _current.broadcast(array, root)


def reduce_scatter(array: Array, op: str = "sum") -> Array:
    """:meth:`Communicator.reduce_scatter` of the communicator that ``init`` found.

    >>> reduce_scatter([1.0, 2.0])
    array([1., 2.])
    """
    return _current.reduce_scatter(array, op)


def all_gather(array: Array) -> Array:
    """:meth:`Communicator.all_gather` of the communicator that ``init`` found.

    >>> all_gather([1.0, 2.0])
    array([1., 2.])
    """
    return _current.all_gather(array)


def barrier() -> None:
    """Wait until every rank is here.

    >>> barrier()
    """
    _current.barrier()


@contextmanager
def long_work() -> Iterator[None]:
    """Inside, this rank works for as long as it likes without an exchange, and is not silent: a thread says so.

    For what one rank alone does while the others wait, such as a sample or an evaluation.

    >>> with long_work():
    ...     best = max(range(1000))
    """
    with _current.long_work():
        yield


@contextmanager
def abort_on_error() -> Iterator[None]:
    """An exception inside ends every rank, after a traceback and a line that names the rank, and never a hang.

    Without this, the other ranks would wait in their next exchange until the timeout. Where all ranks fail alike, each
    raises.

    >>> with abort_on_error():
    ...     total = all_reduce([1.0])
    """
    try:
        yield
    except BaseException as error:
        leaving = isinstance(error, SystemExit) and not error.code
        if not leaving and not _current.all_fail():
            traceback.print_exc()
            first = str(error).partition("\n")[0]
            who = f"rank {rank()} of {size()} failed, and ends the others: {type(error).__name__}: {first}"
            print(who, file=sys.stderr, flush=True)
            _current.abort(1)
        raise
