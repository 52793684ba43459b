"""What a real loop meets, for test_loops.py: each case runs on every rank, beside one process that has it all."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from training import loop as training_loop
from worker import ROWS, Classifier, batch, parts

import minigrad as mg
import nn
import optim
from minigrad.distributed import gradients, overlap
from minigrad.errors import StateError

TIMEOUT = 1.5
CASES: dict[str, Callable[[int, int], None]] = {}


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[function.__name__] = function
    return function


def same_on_all(array: Any) -> bool:
    """Whether every rank has the same bits."""
    first, *others = mg.distributed.all_gather(np.array(array)[None])
    return all(np.array_equal(first, other, equal_nan=True) for other in others)


# ---- the backward pass and the exchange in one -----------------------------------------------------------------------


class Loop(Classifier):
    """The classifier with a part that is computed again in the backward pass, and a parameter of float64."""

    def __init__(self, dtype: str, seed: int) -> None:
        super().__init__(dtype, seed)
        self.inner = nn.Parameter(np.random.default_rng(seed + 1).normal(size=(4, 4)).astype(dtype))
        self.scale = nn.Parameter(np.ones((), "float64"))

    def loss(self, x: Any, y: Any) -> Any:
        h = mg.tanh(x @ self.first + self.shift + self.frozen) @ self.tied
        if (y == 0).any():
            h = h + self.rare * (y == 0)[:, None]
        logits = mg.functional.checkpoint(lambda h: mg.tanh(h @ self.out @ self.inner) @ self.inner, h)
        return nn.functional.cross_entropy(logits, y) * self.scale.astype(x.dtype)


def in_parts(model: Any, dtype: str, rank: int, size: int, last: Callable[[Any, int], Any]) -> int:
    """The gradients of this rank's rows in two micro-batches, of which ``last`` gets the second; the count."""
    x, y = batch(0, dtype)
    mine = parts(rank, size)
    count = sum(rows.stop - rows.start for rows in mine)
    losses = [lambda rows=rows: model.loss(x[rows], y[rows]) * ((rows.stop - rows.start) / count) for rows in mine]
    for loss in losses[:-1]:
        loss().backward()
    last(losses[-1]() if losses else None, count)
    return count


@case
def overlap_gives_the_bits_of_the_plain_exchange(rank: int, size: int) -> None:
    """Tied, frozen, unused and recomputed ones; micro-batches; an empty rank; hooks; one bucket and many."""
    sizes = gradients.BUCKET_BYTES, overlap.FIRST_BYTES
    for dtype, reduce in (("float32", "ordered"), ("float64", "carrier")):
        for most in (sizes, (64, 16)):
            gradients.BUCKET_BYTES, overlap.FIRST_BYTES = most
            plain, ours = Loop(dtype, 0), Loop(dtype, 0)
            for model in (plain, ours):
                model.out.register_hook(lambda g: 2 * g)
            beside = mg.distributed.Overlap(ours.parameters(), reduce)
            for _ in range(2):  # the second time in the order of completion
                plain.zero_grad()
                ours.zero_grad()
                count = in_parts(plain, dtype, rank, size, lambda loss, n: loss and loss.backward())
                mg.distributed.average_gradients(plain.parameters(), count, reduce)
                total: list[float] = []
                in_parts(ours, dtype, rank, size, lambda loss, n, t=total, b=beside: t.append(b.backward(loss, n)))
                assert total == [ROWS]
                for (name, a), (_, b) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
                    assert (a.grad is None) == (b.grad is None), name
                    if a.grad is not None:
                        assert np.array_equal(a.grad, b.grad) and a.grad.dtype == b.grad.dtype, (name, dtype, most)
                        assert same_on_all(b.grad)
            assert ours.unused.grad is None and ours.rare.grad is not None and ours.frozen.grad is None
    gradients.BUCKET_BYTES, overlap.FIRST_BYTES = sizes


@case
def exchanges_begin_while_the_pass_goes_on(rank: int, size: int) -> None:
    """Of a chain of eight layers in small buckets, half at least is sent before the first layer's rule has run."""
    sizes = gradients.BUCKET_BYTES, overlap.FIRST_BYTES
    gradients.BUCKET_BYTES, overlap.FIRST_BYTES = 1200, 100
    layers = [mg.Tensor(np.eye(16, dtype="float32"), requires_grad=True) for _ in range(8)]
    begun: list[int] = []
    ranks = mg.distributed.get_communicator()
    plain, beside = ranks.begin_all_reduce, mg.distributed.Overlap(layers)
    for turn in range(2):
        x = mg.Tensor(np.ones((4, 16), "float32"), requires_grad=True)
        x.register_hook(lambda g: begun.append(-1))
        y = x * 1.0
        y.register_hook(lambda g: begun.append(0))  # the pass is at the first layer
        for layer in layers:
            y = mg.tanh(y @ layer)
        ranks.begin_all_reduce = lambda *a, **k: begun.append(1) or plain(*a, **k)  # type: ignore[method-assign]
        begun.clear()
        beside.backward(y.sum())
        ranks.begin_all_reduce = plain  # type: ignore[method-assign]
        counts = begun[1:]  # of the count
        assert counts[: counts.index(0)].count(1) >= 7 + turn - 1, (turn, counts)
    gradients.BUCKET_BYTES, overlap.FIRST_BYTES = sizes


# ---- half precision --------------------------------------------------------------------------------------------------


@case
def an_overflow_on_one_rank_skips_the_step_on_all(rank: int, size: int) -> None:
    for way in ("plain", "overlap"):
        w = mg.Tensor(np.ones(3, "float32"), requires_grad=True)
        optimizer, scaler = optim.SGD([w], lr=1.0), optim.GradScaler(init_scale=8.0)
        beside = mg.distributed.Overlap([w])
        for step, worst in enumerate((np.inf, 1.0)):
            factor = np.float32(worst if rank == size - 1 else 1.0)
            with np.errstate(all="ignore"):
                loss = scaler.scale((w * factor).sum())
                if way == "plain":
                    loss.backward()
                    mg.distributed.average_gradients([w])
                else:
                    beside.backward(loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 4.0 and scaler.skipped == 1, (way, step)
            assert w.data.tolist() == ([1.0] * 3 if step == 0 else [0.0] * 3)


@case
def half_precision_is_summed_in_float32(rank: int, size: int) -> None:
    """1 and 2048 parts of 2⁻¹²: float16 would lose each small one beside the large one, and overflow at 65504."""
    for dtype in ("float16", "bfloat16"):
        w = mg.Tensor(np.zeros(2), dtype=dtype, requires_grad=True)
        w.grad = np.array([1.0 if rank == 0 else 2.0**-12, 60000.0]).astype(w.dtype)
        mg.distributed.average_gradients([w])
        exact = (1 + (size - 1) * 2.0**-12) / size
        large = float(np.float64(w.dtype.type(60000.0)))
        assert w.grad.dtype == w.dtype
        assert w.grad[0] == w.dtype.type(np.float32(exact)) and float(w.grad[1]) == large, (dtype, w.grad)
    total = mg.distributed.all_reduce(np.float16(2048 if rank == 0 else 1))  # from where on float16 has even numbers
    assert total == np.float16(2048 + size - 1)
    w = mg.Tensor(np.zeros(1, "float16"), requires_grad=True)
    w.grad = np.float16([np.inf if rank == 0 else 1.0])
    mg.distributed.average_gradients([w])
    assert np.isinf(w.grad).all()


# ---- the rest of a loop ----------------------------------------------------------------------------------------------


@case
def all_have_no_labels(rank: int, size: int) -> None:
    w = mg.Tensor([1.0], requires_grad=True)
    w.grad = np.array([np.nan])
    assert mg.distributed.average_gradients([w], count=0) == 0 and w.grad.tolist() == [0.0]
    assert mg.distributed.Overlap([w]).backward(None, count=0) == 0 and w.grad.tolist() == [0.0]


@case
def dropout_differs_from_rank_to_rank_and_comes_again(rank: int, size: int) -> None:
    config, shown = types.SimpleNamespace(seed=3), []
    run = types.SimpleNamespace(step=5, print=lambda *lines: shown.extend(lines))
    drawn, task = [], types.SimpleNamespace(model=nn.Linear(2, 2))
    for _ in range(2):
        mg.random.seed(3)
        training_loop.begin_together(config, run, task)
        drawn.append(nn.functional.dropout(mg.ones(64), 0.5).numpy())
    mg.random.seed(3)
    assert np.array_equal(*drawn)
    assert rank or np.array_equal(drawn[0], nn.functional.dropout(mg.ones(64), 0.5).numpy()), "that of one process"
    of_all = mg.distributed.all_gather(drawn[0][None])
    assert len(np.unique(of_all, axis=0)) == size
    assert all(f"rank {r} of {size} (process " in line for r, line in enumerate(shown[1 : size + 1]))


@case
def a_buffer_is_sent_and_compared(rank: int, size: int) -> None:
    norm = nn.BatchNorm2d(3)
    norm(mg.Tensor(np.random.default_rng(rank).normal(size=(4, 3, 2, 2)).astype("float32")))  # its own running mean
    try:
        mg.distributed.check_replicas(norm)
        raise AssertionError("buffers that differ were taken")
    except StateError as error:
        assert error.expected == f"the same bits of weights and buffers on all {size} ranks"
        assert error.got == f"others than rank 0 has, on rank {', '.join(map(str, range(1, size)))}"
    mg.distributed.broadcast_model(norm)
    mg.distributed.check_replicas(norm)


@case
def work_is_shared_out_in_order(rank: int, size: int) -> None:
    for n in (0, 1, 2, 3, 7):
        mine: list[int] = []
        found = training_loop.shared_out(
            lambda items, mine=mine: mine.extend(items) or [[i * i, "ä"] for i in items], range(n)
        )
        assert found == [[i * i, "ä"] for i in range(n)] and mine == list(range(rank, n, size))


@case
def long_work_is_no_silence(rank: int, size: int) -> None:
    """One rank is in no exchange for longer than the timeout, and says so."""
    if rank == size - 1:
        with mg.distributed.long_work():
            time.sleep(2 * TIMEOUT)
    mg.distributed.barrier()


@case
def bytes_are_counted(rank: int, size: int) -> None:
    """Ordered: (N − 1)/N of the sum's bytes twice, of 12 float64; a gather gives all to N − 1 others."""
    ranks = mg.distributed.get_communicator()
    for exchange, wanted in [
        (lambda: ranks.all_reduce(np.ones(12)), 2 * 96 * (size - 1) / size),
        (lambda: ranks.all_gather(np.ones(12)), 96 * (size - 1)),
        (lambda: ranks.reduce_scatter(np.ones(12)), 96 * (size - 1) / size),
        (lambda: ranks.broadcast(np.ones(12)), 96 * (size - 1) * (rank == 0)),
    ]:
        before = ranks.sent
        exchange()
        assert ranks.sent - before == wanted


def main(folder: str) -> None:
    ranks = mg.distributed.init("mpi", timeout=TIMEOUT)
    with mg.distributed.abort_on_error():
        for name, run in CASES.items():
            run(ranks.rank, ranks.size)
            if ranks.rank == 0:
                with open(f"{folder}/passed", "a") as passed:
                    passed.write(f"{name}\n")


if __name__ == "__main__":
    main(sys.argv[1])
