"""What all tests share: hypothesis profiles, and a seal on global state, so that no test can influence another.

``HYPOTHESIS_PROFILE`` chooses ``dev`` (the default), ``ci`` (more cases, always the same), ``few`` (for a slow device,
the same too) or ``deep`` (many).
"""

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from support.simulated.default_device import make_default

import minigrad as mg
from minigrad.engine import core
from minigrad.engine.recording import mode_variable
from minigrad.machine import loops

settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("few", max_examples=10, deadline=None, derandomize=True)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", choices=["cpu", "simulated", "cuda"],
        help="where tensors are made: by default the CPU; tests/gpu runs on the simulated GPU, or on a real one",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_only(reason): about memory, threads or kernels of the CPU")
    if config.getoption("--device") == "simulated":
        make_default()


def pytest_collection_finish() -> None:
    """Leave some fifteen thousand tests out of each garbage collection, of which many tests ask for one."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "simulated":
        for item in items:
            for mark in item.iter_markers("cpu_only"):
                item.add_marker(pytest.mark.skip(reason=f"on the CPU only: {mark.args[0]}"))
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="names its devices itself: run without --device simulated"))


def _modes() -> dict[str, Any]:
    """The settings of this thread and process that a computation depends on."""
    return {
        "mode": core.current_mode(),
        "observers": list(core.observers),
        "threads": mg.get_num_threads(),
        "compiled": mg.is_compiled(),  # where numba is absent there is nothing to change
        "errstate": np.geterr(),
    }


@pytest.fixture(scope="session")
def transformers() -> Any:
    """Hugging Face's transformers, which is optional; it asks no server meanwhile."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(autouse=True)
def sealed() -> Iterator[None]:
    """Fails a test that leaves a mode changed; puts back the random state and the REGISTRY."""
    modes, registry, random = _modes(), dict(mg.REGISTRY), mg.random.get_state()
    wanted = loops._state.wanted
    yield
    left = _modes()
    mg.random.set_state(random)
    mg.REGISTRY.clear()
    mg.REGISTRY.update(registry)
    core.observers[:] = modes["observers"]
    mode_variable.set(modes["mode"])
    mg.set_num_threads(modes["threads"])
    loops._state.wanted = wanted
    np.seterr(**modes["errstate"])
    assert left == modes, "the test left a mode of the process changed"
