"""How large the engine may be, which is to be read in an evening, and the packages as a whole."""

from __future__ import annotations

from code_lines import table


def test_the_engine_can_be_read_in_an_evening() -> None:
    assert sum(count for name, count in table().items() if name.startswith("minigrad/engine/")) <= 750


def test_the_packages_grow_by_capabilities_alone() -> None:
    """To be raised by hand, in the change that brings a capability; 10 152 before the modules got their folders."""
    assert sum(table().values()) < 22_600
