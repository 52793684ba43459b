"""N ranks are one process at the same global batch: gradients, updates, sharded states; over real processes."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minigrad as mg
import optim
from minigrad.distributed import Communicator
from minigrad.errors import ArgumentError, DTypeError, ShapeError

HERE = Path(__file__).parent
pytestmark = pytest.mark.cpu_only("starts processes of its own")
spec = spec_from_file_location("distributed_worker", HERE / "worker.py")
assert spec and spec.loader
worker = module_from_spec(spec)
spec.loader.exec_module(worker)
CLOSE = {"float32": 1e-6, "float64": 1e-12}
RANKS = (1, 2, 3)


@pytest.fixture(scope="session")
def found(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank of 1, 2 and 3 computed."""
    results = {}
    for ranks in RANKS:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        done = launch(ranks, HERE / "worker.py", folder)
        assert done.returncode == 0, done.stderr
        results[ranks] = [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(ranks)]
    return results


def close(a: Any, b: Any, dtype: str) -> bool:
    """Whether two arrays agree to the dtype's promise, relative to the largest number."""
    return bool(np.abs(a - b).max(initial=0) <= CLOSE[dtype] * max(1.0, np.abs(b).max(initial=0)))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", worker.DTYPES)
def test_gradients_are_those_of_one_process(found: Any, ranks: int, dtype: str) -> None:
    """Uneven parts, an empty one, micro-batches, tied, frozen and unused parameters, another start on every rank."""
    alone = worker.Classifier(dtype, seed=0)
    alone.loss(*worker.batch(0, dtype)).backward()
    for name, param in alone.named_parameters():
        for reduce in ("ordered", "carrier"):
            for rank in found[ranks]:
                got = rank[f"{dtype}.{reduce}.{name}"]
                if param.grad is None:
                    assert np.isnan(got).all(), name
                else:
                    assert close(got, param.grad, dtype), (name, reduce)
    assert alone.unused.grad is None and alone.frozen.grad is None and alone.rare.grad is not None


def reference(kind: str, dtype: str, clip: float) -> Any:
    """One process that trains on the whole batch, with no exchange anywhere."""
    model = worker.Classifier(dtype, seed=0)
    params = list(model.parameters())
    optimizer = worker.OPTIMIZERS[kind]([{"params": params[:1]}, {"params": params[1:], "lr": 0.02}])
    for step in range(3):
        model.loss(*worker.batch(step, dtype)).backward()
        optim.clip_grad_norm(params, clip)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", worker.DTYPES)
@pytest.mark.parametrize("kind", worker.OPTIMIZERS)
@pytest.mark.parametrize("clip", [1e9, 0.5])
def test_three_updates_are_those_of_one_process(found: Any, ranks: int, dtype: str, kind: str, clip: float) -> None:
    model, optimizer = reference(kind, dtype, clip)
    expected = {**model.state_dict(), **{f"state.{n}": a for n, a in optimizer.state_dict()["state"].items()}}
    for rank in found[ranks]:
        for way in ("whole", "sharded"):
            start = f"{dtype}.{kind}.{way}.{clip}."
            got = {k.removeprefix(start): a for k, a in rank.items() if k.startswith(start) and not k.endswith("held")}
            assert got.keys() == expected.keys()
            for name, array in expected.items():
                assert close(got[name], array, dtype), name


@pytest.mark.parametrize("ranks", RANKS)
def test_replicas_have_the_same_bits_and_shards_those_of_the_whole_optimizer(found: Any, ranks: int) -> None:
    first = found[ranks][0]
    for rank in found[ranks]:
        for name in first:
            if "held" not in name and name != "replicas":
                assert np.array_equal(rank[name], first[name], equal_nan=True), name
            if ".sharded.1000000000.0." in name:
                assert np.array_equal(rank[name], rank[name.replace("sharded", "whole")]), name


def test_a_shard_holds_its_part_of_the_moments(found: Any) -> None:
    """8 bytes a float32 parameter of AdamW become 8 / N: here of 25 + 20 + 5 + 5 + 3 entries that are padded to N."""
    trained = 25 + 20 + 5
    for ranks in RANKS:
        held = [int(rank["float32.adamw.sharded.0.5.held"]) for rank in found[ranks]]
        assert sum(held) == 8 * trained
        assert max(held) <= 8 * (-(-25 // ranks) + -(-33 // ranks))


def test_sums_are_in_the_order_of_the_ranks(found: Any) -> None:
    assert float(found[3][0]["order"]) == float(np.float32(1e8) + np.float32(1.0)) - 1e8
    assert float(found[2][0]["order"]) == float(np.float32(1e8) + np.float32(1.0))


def test_a_replica_that_differs_is_named(found: Any) -> None:
    for ranks in (2, 3):
        for rank in found[ranks]:
            assert f"on rank {ranks - 1}" in str(rank["replicas"])


def test_a_rank_that_raises_ends_all_and_is_named(launch: Any) -> None:
    program = """if True:
        import minigrad as mg, numpy as np
        mg.distributed.init()
        with mg.distributed.abort_on_error():
            if mg.distributed.rank() == 1:
                raise ValueError("no such thing")
            mg.distributed.all_reduce(np.ones(3))
    """
    done = launch(3, "-c", program)
    assert done.returncode != 0
    assert "rank 1 of 3 failed, and ends the others: ValueError: no such thing" in done.stderr


def test_a_rank_that_is_killed_ends_all(launch: Any) -> None:
    program = """if True:
        import os, signal
        import minigrad as mg
        mg.distributed.init()
        if mg.distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mg.distributed.barrier()
    """
    done = launch(2, "-c", program)  # which gives up after two minutes
    assert done.returncode != 0
    assert re.search(r"rank 1 of 2 \(process \d+ on .*\): ended without a word, killed or crashed", done.stderr)


def test_nothing_of_mpi_is_imported_unasked() -> None:
    import subprocess
    import sys

    code = "import sys, minigrad, optim; minigrad.distributed.init(); assert 'mpi4py' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE.parents[1])


def test_one_process_changes_no_gradient() -> None:
    w = mg.Tensor([1.0, 2.0], requires_grad=True)
    (w * w).sum().backward()
    grad = w.grad
    assert mg.distributed.average_gradients([w], count=3) == 3
    assert w.grad is grad


def test_what_cannot_be_exchanged_is_refused() -> None:
    alone = Communicator()
    for wrong, error in [
        (lambda: alone.all_reduce(np.ones(2), op="mean"), ArgumentError),
        (lambda: alone.all_reduce(np.ones(2), reduce="fast"), ArgumentError),
        (lambda: alone.all_reduce(np.array([True])), DTypeError),
        (lambda: alone.broadcast(np.array(["a", None], dtype=object)), DTypeError),
        (lambda: alone.broadcast(np.ones(2), root=1), ArgumentError),
        (lambda: alone.all_gather(np.float32(1)), ShapeError),
        (lambda: alone.reduce_scatter(np.float32(1)), ShapeError),
        (lambda: mg.distributed.init("mpi", timeout=0), ArgumentError),
        (lambda: mg.distributed.Overlap([], reduce="fast"), ArgumentError),
        (lambda: mg.distributed.Overlap([]).backward(None, count=-1), ArgumentError),
        (lambda: mg.distributed.init("gloo"), ArgumentError),
        (lambda: mg.distributed.average_gradients([], count=-1), ArgumentError),
        (lambda: mg.distributed.average_gradients([], count=float("nan")), ArgumentError),
        (lambda: optim.ShardedOptimizer([]), ArgumentError),
    ]:
        with pytest.raises(error):
            wrong()
