"""What every instrument keeps to, also one that is added: it works beside others and leaves no trace of itself."""

from __future__ import annotations

import doctest
import gc
import importlib
import pkgutil
import weakref
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad import instruments
from minigrad.engine import core
from minigrad.errors import GraphError
from minigrad.instruments.observe import Instrument

MODULES = [module.name for module in pkgutil.iter_modules(instruments.__path__, "minigrad.instruments.")]
for module in MODULES:
    importlib.import_module(module)
INSTRUMENTS = [tool for tool in Instrument.__subclasses__() if tool.__module__ in MODULES and tool.__name__[0] != "_"]


def leaf(values: Any, dtype: Any = np.float64, name: str | None = None) -> Any:
    t = mg.Tensor(values, requires_grad=True, dtype=dtype)
    t.name = name
    return t


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_an_instrument_is_gone_after_its_block(instrument: Any) -> None:
    tool = instrument()
    with pytest.raises(ZeroDivisionError), tool:
        assert core.observers == [tool]
        with pytest.raises(GraphError, match="entered twice"):
            tool.__enter__()
        raise ZeroDivisionError
    assert core.observers == []
    with tool:  # and can be used again
        mg.exp(leaf([1.0]))


def test_instruments_work_side_by_side() -> None:
    with mg.profile() as p, mg.detect_anomaly(), mg.track_memory() as memory, mg.track_memory() as again:
        mg.exp(leaf([1.0, 2.0])).sum().backward()
    assert [event.operation for event in p.events] == ["exp", "sum", "sum", "exp"]
    assert memory.peak == again.peak == 16


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_a_watched_graph_dies_by_reference_counting(instrument: Any, backward: bool) -> None:
    gc.disable()
    try:
        with instrument():
            x = leaf([1.0, 2.0])
            y = mg.exp(x)
            z = mg.split(y, 2)[0].sum()
            if backward:
                z.backward()
            alive = weakref.ref(y), weakref.ref(z), weakref.ref(y.data)
            del y, z
            assert [r() for r in alive] == [None, None, None]
    finally:
        gc.enable()
