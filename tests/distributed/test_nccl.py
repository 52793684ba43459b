"""Processes with a GPU each: NCCL through CuPy, on the simulated device; and what is said where it is absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.simulated import kernels

HERE = Path(__file__).parent
pytestmark = pytest.mark.cpu_only("starts processes of its own")


@pytest.mark.skipif(kernels.COMPILER is None, reason="the simulated GPU runs kernels with g++ or clang++")
def test_gpus_exchange_over_nccl_and_train_as_one_process(launch: Any) -> None:
    done = launch(2, HERE / "gpu_cases.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("through") == 2


def test_more_ranks_than_gpus_are_refused(launch: Any) -> None:
    program = """if True:
        from support.simulated import device
        import minigrad as mg
        with device.installed():
            mg.distributed.init("nccl")
    """
    done = launch(3, "-c", program)
    assert done.returncode != 0
    said = "Expected: a GPU of its own for every rank\nGot: 2 for 3 ranks on one machine\n"
    assert said in done.stderr and done.returncode != 0, done.stderr


def test_gpu_arrays_over_mpi_are_refused_with_the_way_out(launch: Any) -> None:
    program = """if True:
        from support.simulated import device
        import minigrad as mg
        with device.installed() as cupy:
            mg.distributed.init("mpi")
            weight = mg.Tensor([1.0], device="cuda", requires_grad=True)
            overlap = mg.distributed.Overlap([weight])
            for wrong in (lambda: mg.distributed.all_reduce(cupy.zeros(2)), lambda: overlap.backward(None)):
                try:
                    wrong()
                except mg.errors.DeviceError as error:
                    print('init("nccl")' in error.hint)
    """
    done = launch(2, "-c", program)
    assert done.stdout.split() == ["True"] * 4, (done.stdout, done.stderr)
