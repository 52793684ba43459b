"""What every rank does, for test_distributed.py: all cases in one program, whose results go into a file a rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import minigrad as mg
import nn
import optim
from minigrad.errors import StateError

ROWS, WIDTH, CLASSES = 7, 5, 4
DTYPES = ("float32", "float64")
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
}


class Classifier(nn.Module):
    """A tied matrix, a frozen one, one that only rows of class 0 use, one that nothing uses, and a buffer."""

    def __init__(self, dtype: str, seed: int) -> None:
        super().__init__()
        draw = np.random.default_rng(seed)
        parameter = lambda *shape: nn.Parameter(draw.normal(size=shape).astype(dtype))
        self.first, self.out = parameter(WIDTH, WIDTH), parameter(WIDTH, CLASSES)
        self.tied = self.first
        self.frozen, self.rare, self.unused = parameter(WIDTH), parameter(WIDTH), parameter(3)
        self.frozen.requires_grad = False
        self.register_buffer("shift", draw.normal(size=WIDTH).astype(dtype))

    def loss(self, x: Any, y: Any) -> Any:
        """The mean cross-entropy over the rows."""
        h = mg.tanh(x @ self.first + self.shift + self.frozen) @ self.tied
        if (y == 0).any():
            h = h + self.rare * mg.asarray((y == 0)[:, None]).to(self.rare.device)
        return nn.functional.cross_entropy(h @ self.out, y)


def batch(step: int, dtype: str) -> tuple[Any, Any]:
    """The global batch of a step: only its first two rows may be of class 0."""
    draw = np.random.default_rng(step)
    x, y = draw.normal(size=(ROWS, WIDTH)).astype(dtype), draw.integers(1, CLASSES, ROWS)
    y[0] = 0
    return x, y


def parts(rank: int, size: int) -> list[slice]:
    """The rows of each micro-batch of a rank: uneven, and with three ranks or four one has none."""
    ends = {1: [0, 7], 2: [0, 5, 7], 3: [0, 4, 7, 7], 4: [0, 3, 3, 5, 7]}[size]
    begin, end = ends[rank : rank + 2]
    middle = (begin + end + 1) // 2
    return [rows for rows in (slice(begin, middle), slice(middle, end)) if rows.stop > rows.start]


def gradients(model: Classifier, step: int, dtype: str, rank: int, size: int) -> int:
    """Add up this rank's gradients of the mean over its rows, two micro-batches; the number of rows."""
    x, y = batch(step, dtype)
    mine = parts(rank, size)
    count = sum(rows.stop - rows.start for rows in mine)
    for rows in mine:
        (model.loss(x[rows], y[rows]) * ((rows.stop - rows.start) / count)).backward()
    return count


def trained(model: Classifier, name: str, dtype: str, sharded: bool, reduce: str = "ordered", clip: float = 1e9) -> Any:
    """The model after three updates, and its optimizer, from the weights of seed 0."""
    rank, size = mg.distributed.rank(), mg.distributed.size()
    params = list(model.parameters())
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.02}]
    optimizer: Any = OPTIMIZERS[name](groups)
    optimizer = optim.ShardedOptimizer(optimizer) if sharded else optimizer
    for step in range(3):
        update(model, optimizer, step, dtype, rank, size, reduce, clip)
    return optimizer


def update(model: Any, optimizer: Any, step: int, dtype: str, rank: int, size: int, reduce: str, clip: float) -> None:
    count = gradients(model, step, dtype, rank, size)
    if isinstance(optimizer, optim.ShardedOptimizer):
        optimizer.step(count, clip)
    else:
        mg.distributed.average_gradients(model.parameters(), count, reduce)
        optim.clip_grad_norm(model.parameters(), clip)
        optimizer.step()
    optimizer.zero_grad()


def exchanges(rank: int, size: int) -> Iterator[tuple[str, Any]]:
    for dtype in ("float16", "bfloat16", "float32", "float64", "int64"):
        dt = mg.backend.as_dtype(dtype)
        for shape in ((), (0,), (3, 2), (2 * size,)):
            x = np.full(shape, rank + 1).astype(dt)
            for op in ("sum", "max", "min"):
                for reduce in ("ordered", "carrier"):
                    found = mg.distributed.all_reduce(x, op, reduce)
                    expected = {"sum": size * (size + 1) // 2, "max": size, "min": 1}[op]
                    assert found.dtype == dt and found.shape == shape, (dtype, shape, found)
                    assert (found.astype(float) == expected).all(), (dtype, shape, op, reduce, found)
            sent = mg.distributed.broadcast(x, root=size - 1)
            assert sent.dtype == dt and (sent.astype(float) == size).all()
        rows = np.arange(2 * size).astype(dt)
        assert mg.distributed.reduce_scatter(rows).astype(float).tolist() == [size * (2 * rank), size * (2 * rank + 1)]
        joined = mg.distributed.all_gather(np.full((2, 1), rank).astype(dt))
        assert joined[:, 0].astype(int).tolist() == [r for r in range(size) for _ in range(2)]
    mg.distributed.barrier()
    order = np.float32([1e8, 1.0, -1e8][rank])
    yield "order", mg.distributed.all_reduce(order)


def results(rank: int, size: int) -> Iterator[tuple[str, Any]]:
    yield from exchanges(rank, size)
    for dtype in DTYPES:
        model = Classifier(dtype, seed=rank)  # rank 0's is sent
        mg.distributed.broadcast_model(model)
        for reduce in ("ordered", "carrier"):
            count = gradients(model, 0, dtype, rank, size)
            total = mg.distributed.average_gradients(model.parameters(), count, reduce)
            assert total == ROWS
            for name, param in model.named_parameters():
                yield f"{dtype}.{reduce}.{name}", np.array(np.nan) if param.grad is None else param.grad
            model.zero_grad()
        for kind in OPTIMIZERS:
            for sharded in (False, True):
                for clip in (1e9, 0.5):
                    model = Classifier(dtype, seed=0)
                    optimizer = trained(model, kind, dtype, sharded, clip=clip)
                    mg.distributed.check_replicas(model)
                    way = f"{dtype}.{kind}.{'sharded' if sharded else 'whole'}.{clip}"
                    for name, array in model.state_dict().items():
                        yield f"{way}.{name}", array
                    for name, array in optimizer.state_dict()["state"].items():
                        yield f"{way}.state.{name}", array
                    if sharded and clip == 0.5:
                        held = sum(a.nbytes for s in optimizer._mine.state for a in s.values() if hasattr(a, "nbytes"))
                        yield f"{way}.held", np.array(held)
                        again = optim.ShardedOptimizer(OPTIMIZERS[kind](optimizer._whole.param_groups))
                        again.load_state_dict(optimizer.state_dict())
                        there, back = optimizer.state_dict()["state"], again.state_dict()["state"]
                        assert there.keys() == back.keys()
                        assert all(np.array_equal(there[name], back[name]) for name in there)
    model = Classifier("float32", seed=0)
    if rank == size - 1:
        model.shift.data[0] += 1
    try:
        mg.distributed.check_replicas(model)
    except StateError as error:
        yield "replicas", np.array(str(error))


def main(folder: str) -> None:
    ranks = mg.distributed.init()
    with mg.distributed.abort_on_error():
        np.savez(f"{folder}/rank{ranks.rank}.npz", **dict(results(ranks.rank, ranks.size)))


if __name__ == "__main__":
    main(sys.argv[1])
