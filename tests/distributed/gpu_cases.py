"""GPU arrays over NCCL, for test_nccl.py: on the simulated device, with a simulated NCCL as strict as the real one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from support.simulated import device, nccl
from worker import OPTIMIZERS, ROWS, Classifier, batch, gradients

import minigrad as mg
import optim
from minigrad.backend import to_numpy
from minigrad.errors import DTypeError


def exchanges(cupy: Any, rank: int, size: int) -> None:
    """Every exchange of every dtype; rows of a matrix that lies in column order, too."""
    for dtype in ("float16", "bfloat16", "float32", "float64", "int64", "int32"):
        dt = mg.backend.as_dtype(dtype)
        for shape in ((), (0,), (3, 2), (2 * size,)):
            x = cupy.asarray(np.full(shape, rank + 1).astype(dt))
            for op, expected in (("sum", size * (size + 1) // 2), ("max", size), ("min", 1)):
                for reduce in ("ordered", "carrier"):
                    found = mg.distributed.all_reduce(x, op, reduce)
                    assert isinstance(found, cupy.ndarray) and found.dtype == dt and found.shape == shape
                    assert (found.get().astype(float) == expected).all(), (dtype, shape, op, reduce)
            assert (mg.distributed.broadcast(x, size - 1).get().astype(float) == size).all()
        rows = cupy.asarray(np.arange(2 * size).astype(dt))
        assert mg.distributed.reduce_scatter(rows).get().astype(float).tolist() == [
            size * 2 * rank,
            size * (2 * rank + 1),
        ]
    columns = cupy.asarray(np.arange(6.0).reshape(2, 3) + rank).T
    assert np.array_equal(mg.distributed.all_gather(columns).get()[:3], np.arange(6.0).reshape(2, 3).T)
    assert np.array_equal(
        mg.distributed.all_reduce(columns).get(), sum(np.arange(6.0).reshape(2, 3) + r for r in range(size)).T
    )
    assert mg.distributed.all_reduce(np.ones(2)).tolist() == [size] * 2, "the host's arrays go over MPI"


def training(rank: int, size: int) -> None:
    """Gradients, and three updates each way, are those of one process on the CPU; the host waits for no exchange."""
    alone = Classifier("float64", seed=0)
    optimizer = OPTIMIZERS["adamw"](alone.parameters())
    for step in range(3):
        alone.loss(*batch(step, "float64")).backward()
        optim.clip_grad_norm(alone.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for way in ("plain", "overlap", "sharded"):
        model = Classifier("float64", seed=rank).to("cuda")
        assert model.first.device == f"cuda:{rank}"
        mg.distributed.broadcast_model(model)
        ours: Any = OPTIMIZERS["adamw"](model.parameters())
        beside = mg.distributed.Overlap(model.parameters())
        ours = optim.ShardedOptimizer(ours) if way == "sharded" else ours
        for step in range(3):
            if way == "overlap":
                x, y = batch(step, "float64")
                mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
                assert (
                    beside.backward(model.loss(mg.asarray(x[mine]).to("cuda"), y[mine]), mine.stop - mine.start) == ROWS
                )
            else:
                count = gradients(OnGpu(model), step, "float64", rank, size)
                before = device.state.synchronisations
                if way == "plain":
                    assert mg.distributed.average_gradients(model.parameters(), count) == ROWS
                    assert device.state.synchronisations == before
            if way == "sharded":
                ours.step(count, max_norm=0.5)
            else:
                optim.clip_grad_norm(model.parameters(), 0.5)
                ours.step()
            ours.zero_grad()
        mg.distributed.check_replicas(model)
        for (name, a), (_, b) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
            assert np.abs(to_numpy(a.data) - b.data).max() < 1e-12, (way, name)
        states = ours.state_dict()["state"], optimizer.state_dict()["state"]
        assert states[0].keys() == states[1].keys()


class OnGpu:
    """A model of the GPU that is given arrays of the host."""

    def __init__(self, model: Any) -> None:
        self.loss = lambda x, y: model.loss(mg.asarray(x).to("cuda"), y)


def refused(cupy: Any, rank: int, size: int) -> None:
    """The simulated NCCL is as strict as the real one: each of these would hang or crash there."""
    ranks = mg.distributed.get_communicator()
    good, stream = cupy.zeros(4, np.float32), 2
    there = good.data.ptr
    with cupy.cuda.Device(1 - rank):
        elsewhere = cupy.zeros(4, np.float32)
    host = np.zeros(4, np.float32)
    for call, said in [
        (lambda c: c.allReduce(there, there, 4, 99, 0, stream), "ncclDataType_t"),
        (lambda c: c.allReduce(there, there, 4, 7, 9, stream), "ncclRedOp_t"),
        (lambda c: c.allReduce(there, there, 5, 7, 0, stream), "illegal memory"),
        (lambda c: c.allReduce(host.ctypes.data, there, 4, 7, 0, stream), "illegal memory"),
        (lambda c: c.allReduce(elsewhere.data.ptr, there, 4, 7, 0, stream), "another device"),
        (lambda c: c.allReduce(there, there, 4 - rank, 7, 0, stream), "the same call"),
        (lambda c: c.allReduce(there, there, 4, 7, 0, 0), "default stream"),
        (lambda c: c.send(there, 4, 7, 1 - rank, stream), "outside of a group"),
        (lambda c: nccl.NcclCommunicator(size, ranks._comm.bcast(nccl.get_unique_id()), 0), "each rank once"),
    ]:
        try:
            call(ranks._gpus)  # type: ignore[attr-defined]
        except nccl.Refused as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"not refused: {said}")
    try:
        mg.distributed.all_reduce(cupy.zeros(3, np.int16), reduce="carrier")
    except DTypeError as error:
        assert error.hint == 'reduce="ordered"'


def main() -> None:
    with device.installed() as cupy:
        ranks = mg.distributed.init("nccl", timeout=20)
        with mg.distributed.abort_on_error():
            assert cupy.cuda.Device().id == ranks.rank
            exchanges(cupy, ranks.rank, ranks.size)
            refused(cupy, ranks.rank, ranks.size)
            training(ranks.rank, ranks.size)
            print("through")


if __name__ == "__main__":
    sys.exit(main())
