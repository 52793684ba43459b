"""Several processes that train one model: five exchanges of arrays, and what a data-parallel loop makes of them.

::

    mpiexec -n 4 python program.py

    mg.distributed.init()                                    finds the other ranks; alone it is one process of one
    mg.distributed.broadcast_model(model)                    all begin with the weights of rank 0
    for inputs, labels in my_part_of_the_batches:
        model.loss(inputs, labels).backward()                the mean over this rank's labels
        mg.distributed.average_gradients(model.parameters(), count=labels.size)
        optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

Every rank makes the same calls in the same order, as MPI asks for. ``communicator.py`` has the exchanges, ``mpi.py``
and ``nccl.py`` carry them, ``watch.py`` ends a wait without end, ``current.py`` finds out who is there,
``gradients.py``, ``overlap.py`` and ``replicas.py`` are for the loop; ``optim.ShardedOptimizer`` builds on them.
"""

from minigrad.distributed.communicator import Communicator, Reduction
from minigrad.distributed.current import (
    abort_on_error,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    get_communicator,
    init,
    long_work,
    rank,
    reduce_scatter,
    size,
)
from minigrad.distributed.gradients import average_gradients
from minigrad.distributed.overlap import Overlap
from minigrad.distributed.replicas import broadcast_model, check_replicas

# fmt: off
__all__ = [
    "Communicator", "Overlap", "Reduction", "abort_on_error", "all_gather", "all_reduce", "average_gradients",
    "barrier", "broadcast", "broadcast_model", "check_replicas", "get_communicator", "init", "long_work", "rank",
    "reduce_scatter", "size",
]
# fmt: on
