"""What may stand beside an array on the GPU: nested lists, and ids of the host; whose range is checked all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minigrad as mg
import nn.functional as F
from minigrad.distributed.gradients import in_buckets
from minigrad.errors import DeviceError, IndexRangeError

X = np.arange(1.0, 13.0).reshape(3, 4) / 20
IDS = np.array([0, 3, 1])
TABLE = np.linspace(-1, 1, 20).reshape(5, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, here: x * [1.0, 2.0, 3.0, 4.0],
        lambda x, here: [1.0, 2.0, 3.0, 4.0] / x,
        lambda x, here: mg.where([[True], [False], [True]], x, 0.5),
        lambda x, here: mg.kron(x, [[1.0, 2.0]]),
        lambda x, here: x.masked_fill([True, False, False, True], 0.0) * (x == [0.05, 0.3, 0.35, 0.6]),
        lambda x, here: F.linear([[1.0, 2.0, 3.0, 4.0]], x),
        lambda x, here: F.linear(x, weight=here(TABLE)),
        lambda x, here: F.linear([[1.0, 2.0, 3.0, 4.0]], weight=x),
        lambda x, here: mg.kron([[1.0, 2.0]], y=x),
        lambda x, here: mg.add(x, (1.0, 2.0, 3.0, 4.0)),
        lambda x, here: F.cross_entropy(x, IDS.tolist()),
        lambda x, here: F.linear_cross_entropy(x, here(TABLE), IDS.tolist()),
        lambda x, here: F.nll_loss(x, IDS),
        lambda x, here: F.nll_loss(x, IDS.tolist(), ignore_index=3),
        lambda x, here: mg.take_along_axis(x, IDS[:, None], 1),
        lambda x, here: mg.put_along_axis(x, IDS[:, None], x[:, :1], 1),
        lambda x, here: mg.scatter_add(x, IDS[:, None], 2.0, 1),
    ],
)
def test_values_and_gradients_are_the_cpus(call: Any, gpu: Any) -> None:
    found = []
    for device in ("cpu", "cuda"):
        x = mg.Tensor(X, requires_grad=True, device=device)
        out = call(x, lambda array, device=device: mg.Tensor(array, device=device))
        assert out.device == x.device
        out.sum().backward()
        found.append((out.numpy(), mg.asarray(x.grad).numpy()))
    for ours, cpus in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(ours, cpus, rtol=1e-12)


def test_values_of_the_host_are_assigned(gpu: Any) -> None:
    t = mg.zeros(4, device="cuda")
    t[:1], t[1:3], t[np.array([-1])] = [7.0], np.array([8.0, 9.0]), 1
    assert t.tolist() == [7, 8, 9, 1]


@pytest.mark.parametrize("where", [np.array, lambda ids: mg.Tensor(ids, device="cuda")])
def test_places_out_of_range_are_refused(where: Any, gpu: Any) -> None:
    t = mg.zeros((3, 4), device="cuda")
    with pytest.raises(IndexRangeError, match="index 3 is out of bounds for axis 0 with size 3"):
        t[where([0, 3])] = 1.0
    with pytest.raises(IndexRangeError, match="index 4 is out of bounds for axis 1 with size 4"):
        mg.put_along_axis(t, where([[0], [4], [1]]), 1.0, 1)
    assert not t.numpy().any()


def test_arrays_of_the_host_are_not_moved_silently(gpu: Any) -> None:
    with pytest.raises(DeviceError, match=r"float64 .* on cpu"):
        mg.Tensor(X, device="cuda") * X


class OverMemory(mg.distributed.Communicator):
    """One that, as MPI, reads the memory of the CPU."""

    def takes(self, device: str) -> bool:
        return device == "cpu"


def test_ranks_over_mpi_exchange_no_arrays_of_a_gpu(gpu: Any) -> None:
    """Neither an array nor the gradients of parameters, and both say why."""
    weight = mg.Tensor(X, device="cuda", requires_grad=True)
    with pytest.raises(DeviceError, match=r"(?s)an array on the CPU.*one on a GPU.*nccl"):
        OverMemory().all_reduce(weight)
    with pytest.raises(DeviceError, match=r"(?s)parameters on the CPU.*one on cuda:0.*nccl"):
        in_buckets([weight], OverMemory())


def test_the_second_gradient_of_a_scalar_and_rows_without_elements(gpu: Any) -> None:
    scale = mg.Tensor(2.0, requires_grad=True, device="cuda")
    for _ in range(2):
        (scale * scale).backward()
    assert scale.grad is not None and scale.grad.get() == 8
    rows = mg.zeros((4, 0), device="cuda", requires_grad=True)
    rows[np.array([0, 2, 0])].sum().backward()
    assert rows.grad is not None and rows.grad.shape == (4, 0)


def test_second_derivatives_are_checked_on_the_device(gpu: Any) -> None:
    assert mg.gradgradcheck(mg.hypot, (mg.Tensor(X, device="cuda"), mg.Tensor(X + 1, device="cuda")))
