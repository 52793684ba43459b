"""How large the engine may be, which is to be read in an evening, and the packages as a whole."""

from __future__ import annotations

from code_lines import table


def test_the_engine_can_be_read_in_an_evening() -> None:
    assert sum(count for name, count in table().items() if name.startswith("minigrad/engine/")) <= 750


def test_the_packages_grow_by_capabilities_alone() -> None:
    """10 152 lines stood here before the tree got its rooms; what came since has its own lines."""
    capabilities = {"minigrad/numpy_protocol.py", "minigrad/aliases.py"}
    capabilities |= {f"minigrad/kernels/{stem}.py" for stem in ("grid", "convolution", "pooling", "batch_norm")}
    capabilities |= {"minigrad/ops/windows.py"}
    capabilities |= {f"nn/{stem}.py" for stem in ("spatial", "convolution", "batch_norm", "batches", "summary")}
    assert sum(count for name, count in table().items() if name not in capabilities) < 10_152
