"""Tests of what runs on a GPU. By default that is the simulated one; with ``--device cuda`` it is a real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.simulated import device, kernels

import minigrad as mg
from minigrad.backend import load_cupy


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module of the GPU's arrays."""
    if request.config.getoption("--device") == "cuda":
        assert mg.cuda.is_available(), "found no GPU"
        yield load_cupy()
    elif kernels.COMPILER is None:
        pytest.skip("the simulated GPU runs kernels with g++ or clang++, and found neither")
    else:
        with device.installed() as cupy:
            yield cupy


@pytest.fixture
def simulated(request: pytest.FixtureRequest, gpu: Any) -> Any:
    """What the simulated driver knows; a real one does not say."""
    if request.config.getoption("--device") == "cuda":
        pytest.skip("asks the simulated GPU")
    return device.state
