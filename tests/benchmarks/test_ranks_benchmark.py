"""benchmarks/distributed.py: two ranks make the steps of one process, and its bytes are those of the gradients."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "distributed.py"
pytestmark = pytest.mark.cpu_only("starts processes of its own")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("MINIGRAD_COMPILED", "0")
    spec = importlib.util.spec_from_file_location("ranks_benchmark", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not (find_spec("mpi4py") and (shutil.which(module.launched()) or Path(module.launched()).exists())):
        pytest.skip("no MPI is installed: pip install -e '.[mpi]' brings one")
    return module


def test_two_ranks_make_the_steps_of_one_process(benchmark: Any) -> None:
    found = {}
    for way in ("one process, 1 thread", "2 ranks, overlap"):
        ranks = benchmark.Ranks(way, "nano", 0)
        found[way] = ranks.ask(2)
        ranks.close()
    one, two = found.values()
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5) and len(two["ms"]) == 2
    config = benchmark.CONFIGS["nano"]
    block = 4 * config.d_model**2 + 3 * config.d_model * config.d_ff + 2 * config.d_model
    weights = config.num_layers * block + config.d_model * (2 * config.vocab_size + 1)
    assert one["sent_mb"] == 0
    assert two["sent_mb"] * 2**20 == pytest.approx(4 * weights, rel=1e-3)  # half of it to the other, twice
    assert two["waited_ms"] > 0 and two["memory_mb"] > 0
