"""The sharded optimizer in one process, where a shard is the whole: what its buckets and its checks do."""

from __future__ import annotations

import math

import numpy as np
import pytest

import minigrad as mg
import optim
from minigrad.distributed.communicator import Communicator
from minigrad.errors import ArgumentError


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "float16"), ("float64", "float16", "float32")])
@pytest.mark.cpu_only("ranks exchange arrays of the CPU")
def test_parameters_of_several_dtypes_keep_their_digits_and_their_masters(dtypes: tuple[str, ...]) -> None:
    """Half precision and float32 are summed in one dtype, but a bucket of both would round the weights of float32."""
    found = []
    for sharded in (True, False):
        params = [mg.Tensor(np.linspace(0.1, 1.1, 5), dtype=dtype, requires_grad=True) for dtype in dtypes]
        optimizer = optim.AdamW(params, lr=1e-3)
        stepped = optim.ShardedOptimizer(optimizer) if sharded else optimizer
        for step in range(3):
            for param in params:
                param.grad = np.full(5, 0.3 + step).astype(param.dtype)
            stepped.step()
        found.append(([param.numpy() for param in params], stepped.state_dict()["state"]))
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert found[0][1].keys() == found[1][1].keys()
    for name, mine in found[0][1].items():
        np.testing.assert_equal(mine, found[1][1][name])


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
@pytest.mark.cpu_only("ranks exchange arrays of the CPU")
def test_a_norm_that_nothing_can_be_scaled_to_is_refused(max_norm: float) -> None:
    param = mg.Tensor([1.0], requires_grad=True)
    param.grad = np.ones(1)
    optimizer = optim.ShardedOptimizer(optim.SGD([param], lr=0.1))
    with pytest.raises(ArgumentError, match="max_norm >= 0"):
        optimizer.step(max_norm=max_norm)
    assert param.numpy() == 1


def test_a_wrong_way_to_sum_is_refused_on_one_rank_too() -> None:
    param = mg.Tensor([1.0], requires_grad=True)
    with pytest.raises(ArgumentError, match="ordered"):
        mg.distributed.average_gradients([param], reduce="fast", communicator=Communicator())
