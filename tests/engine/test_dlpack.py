"""Tensors to torch, JAX and CuPy and back, sharing memory: no number is copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import minigrad as mg
from minigrad.errors import ArgumentError

host_memory = pytest.mark.cpu_only("shares memory of the CPU")


@host_memory
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T, lambda x: x[1:, ::2], lambda x: x[0, 0], lambda x: x[:0]])
def test_views_are_shared_with_torch_both_ways(view):
    ours = view(mg.Tensor(np.arange(12.0).reshape(3, 4)))
    theirs = torch.from_dlpack(ours)
    assert theirs.data_ptr() == ours.data.ctypes.data or not ours.size
    np.testing.assert_array_equal(theirs.numpy(), ours.data)
    back = mg.from_dlpack(theirs)
    assert (back.data.ctypes.data, back.data.strides) == (ours.data.ctypes.data, ours.data.strides) or not ours.size


@host_memory
def test_what_one_writes_the_other_reads():
    weight = mg.Tensor(np.zeros((2, 2), np.float32), requires_grad=True)
    torch.from_dlpack(weight).fill_(3.0)
    np.testing.assert_array_equal(weight.data, np.full((2, 2), 3.0))
    theirs = torch.zeros(3)
    mg.from_dlpack(theirs).data[1] = 5
    assert theirs.tolist() == [0, 5, 0]


@host_memory
@pytest.mark.parametrize(
    ("share", "text"),
    [
        (lambda: torch.from_dlpack(mg.asarray(np.ones(4)[::-1])), r"(?s)strides.*copy\(\)"),
        (lambda: mg.from_dlpack(torch.ones(2, requires_grad=True)), "detach"),
        (lambda: mg.from_dlpack(torch.ones(2).bfloat16()), "dtype"),
    ],
)
def test_what_cannot_be_shared_is_said(share, text):
    with pytest.raises(ArgumentError, match=text):
        share()


@host_memory
def test_jax_shares_its_arrays():
    """Ours it takes over without a copy where they begin at a multiple of 64 bytes."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    theirs = jax.numpy.arange(6.0).reshape(2, 3)
    ours = mg.from_dlpack(theirs)
    assert ours.data.ctypes.data == theirs.unsafe_buffer_pointer() and not ours.data.flags.writeable
    room = np.zeros(64, np.float32)
    aligned = mg.asarray(room[-room.ctypes.data % 64 // 4 :][:16])
    assert jax.numpy.from_dlpack(aligned).unsafe_buffer_pointer() == aligned.data.ctypes.data


@pytest.mark.skipif(not mg.cuda.is_available(), reason="no GPU")
def test_cupy_and_torch_share_arrays_on_a_gpu():
    cupy = mg.backend.load_cupy()
    theirs = cupy.arange(6.0)
    ours = mg.from_dlpack(theirs)
    assert ours.device == "cuda:0" and ours.data.data.ptr == theirs.data.ptr
    assert cupy.from_dlpack(ours).data.ptr == theirs.data.ptr
    if torch.cuda.is_available():
        assert torch.from_dlpack(ours).data_ptr() == theirs.data.ptr
