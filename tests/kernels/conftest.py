"""Every test of a kernel runs twice: on NumPy alone, and with the loops that numba compiles."""

from collections.abc import Iterator

import pytest

import minigrad as mg
from minigrad.machine import loops


@pytest.fixture(
    autouse=True,
    params=["numpy", pytest.param("compiled", marks=pytest.mark.cpu_only("loops of the CPU"))],
)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    before = loops._state.wanted
    if request.param == "compiled":
        pytest.importorskip("numba", reason="numba is not installed")
    mg.set_compiled(request.param == "compiled")
    yield
    loops._state.wanted = before  # also where numba is absent
