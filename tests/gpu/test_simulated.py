"""The simulated GPU itself: it has no name that CuPy lacks, and refuses what CuPy refuses."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support.simulated import cublas, device, streams

import minigrad as mg
from minigrad.errors import DeviceError, OutOfMemoryError

# The CuPy that is installed, asked in a process of its own: here the simulated module may stand in its place.
NAMES = """
import inspect, json, cupy, cupyx.scipy.special
def parameters(f):
    try:
        return list(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return None
print(json.dumps({
    "module": {n: parameters(getattr(cupy, n)) for n in dir(cupy)},
    "array": dir(cupy.ndarray), "cuda": dir(cupy.cuda), "device": dir(cupy.cuda.Device),
    "ufunc": cupy.add.__doc__.splitlines()[0], "pool": dir(cupy.cuda.MemoryPool),
    "stream": dir(cupy.cuda.Stream), "graph": dir(cupy.cuda.Graph), "event": dir(cupy.cuda.Event),
    "runtime": dir(cupy.cuda.runtime), "pinned": dir(cupy.cuda.PinnedMemoryPool),
    "pinned_mem": dir(cupy.cuda.PinnedMemoryPointer), "pinned_names": dir(cupy.cuda.pinned_memory),
    "raw": cupy.RawModule.__doc__,
    "products": dir(cupy._core._routines_linalg), "special": dir(cupyx.scipy.special),
    "linalg": {n: parameters(f) for n in dir(cupy.linalg) if callable(f := getattr(cupy.linalg, n))},
}))
"""


@pytest.fixture(scope="module")
def real() -> Any:
    import json

    pytest.importorskip("cupy", reason="the names are compared with those of the installed cupy")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", NAMES], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_every_name_is_one_of_cupy(real: Any) -> None:
    names = {name for name in vars(device.cupy) if not name.startswith("__")}
    assert names <= real["module"].keys()
    own = {"_of", "_view", "_host", "_device"}
    assert {n for n in vars(device.ndarray) if n not in dir(object)} - own - {"__weakref__", "__dict__"} <= set(
        real["array"]
    )
    later = {"cublas"}  # imported by CuPy when it is asked for; test_batched_products.py compares its function
    assert set(vars(device.cupy.cuda)) - later <= set(real["cuda"])
    assert {n for n in vars(cublas.Products) if not n.startswith("_")} - {"chosen"} <= set(real["products"])
    assert {n for n in vars(device.Device) if not n.startswith("_")} <= set(real["device"])
    assert {n for n in vars(streams.MemoryPool) if not n.startswith("_")} <= set(real["pool"])
    classes = {
        "stream": streams.Stream,
        "graph": streams.Graph,
        "event": streams.Event,
        "pinned": streams.PinnedMemoryPool,
    }
    for name, ours in classes.items():
        assert {n for n in vars(ours) if not n.startswith("_")} <= set(real[name]), name
    assert set(vars(device.cupy.cuda.runtime)) <= set(real["runtime"])
    assert vars(streams.alloc_pinned_memory(1)).keys() <= set(real["pinned_mem"])
    assert type(streams.alloc_pinned_memory(1).mem).__name__ in real["pinned_names"]
    assert set(device.SPECIAL.split()) <= set(real["special"]) and not {"iv", "ive", "jn", "stdtr"} & set(
        real["special"]
    )
    assert set(inspect.signature(device.RawModule).parameters) <= {"code", "options"} and "str code" in real["raw"]


def test_every_keyword_is_one_of_cupy(real: Any) -> None:
    for name, words in (device.FUNCTIONS | device.CREATORS).items():
        theirs = real["module"][name]
        if theirs is not None and not {"kwargs", "args"} & set(theirs):
            assert set(words.split()) <= set(theirs), name
    for name, words in device.LINALG.items():
        assert set(words.split()) <= set(real["linalg"][name]), name
    assert "where" not in real["ufunc"] and "casting" in real["ufunc"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: np.asarray(x), TypeError),
        (lambda x: x + np.ones(3), TypeError),
        (lambda x: np.ones(3) * x, TypeError),
        (lambda x: device.cupy.add(x, np.ones(3)), TypeError),
        (lambda x: device.cupy.concatenate([x, np.ones(3)]), TypeError),
        (lambda x: x.sum(where=x > 0), TypeError),
        (lambda x: device.cupy.max(x, initial=0), TypeError),
        (lambda x: device.cupy.add(x, x, where=x > 0), TypeError),
        (lambda x: device.cupy.vecdot, AttributeError),
        (lambda x: x.flags.writeable, AttributeError),
        (lambda x: device.cupy.add.at(x.astype("float16"), np.array([0]), 1.0), TypeError),
        (lambda x: device.cupy.asarray(np.ones(2, complex)), ValueError),
        (lambda x: np.linalg.norm(x), TypeError),
    ],
)
def test_it_refuses_what_cupy_refuses(call: Any, error: type[Exception], simulated: Any) -> None:
    with pytest.raises(error):
        call(device.cupy.ones(3))


def test_indices_wrap_and_waiting_is_counted(simulated: Any) -> None:
    x = device.cupy.arange(4)
    assert x[np.array([5])].get() == 1
    before = simulated.synchronisations
    y = (x * 2 + 1).sum()
    assert simulated.synchronisations == before
    assert float(y) == 16 and bool(y > 0) and y.item() == 16
    assert simulated.synchronisations == before + 3


def test_devices(simulated: Any) -> None:
    t = mg.Tensor([1.0, 2.0], device="cuda", requires_grad=True)
    assert t.device == "cuda:0" and mg.cuda.is_available() and mg.cuda.device_count() == 2
    assert t.to("cpu").device == "cpu" and t.to("cuda") is t
    other = t.to("cuda:1")
    assert other.device == "cuda:1"
    with pytest.raises(DeviceError, match="one of 2 GPUs"):
        t.to("cuda:2")
    with pytest.raises(DeviceError, match=r"in add\(.*\)\nGot: float64 \(2,\) on cuda:0 and float64 \(2,\) on cpu"):
        t + mg.Tensor([1.0, 2.0])
    with pytest.raises(DeviceError, match=r"on cuda:0 and float64 \(2,\) on cuda:1"):
        t + other
    (t * 2).sum().backward()
    assert t.grad is not None and t.grad.get().tolist() == [2.0, 2.0]
    with mg.cuda.device(1):
        assert mg.ones(3, device="cuda").device == "cuda:1"


def test_a_gradient_comes_back_to_the_device_of_its_leaf(simulated: Any) -> None:
    x = mg.Tensor([1.0, 2.0], requires_grad=True)
    (x.to("cuda") ** 2).sum().backward()
    assert isinstance(x.grad, np.ndarray) and x.grad.tolist() == [2.0, 4.0]


def test_a_full_device_is_explained_after_a_second_try(simulated: Any) -> None:
    mg.ones(3, device="cuda")
    simulated.limit, before = 1 << 20, simulated.freed
    with pytest.raises(OutOfMemoryError, match=r"4,194,304 bytes asked for; \d+ held by arrays"):
        mg.zeros((1024, 1024), device="cuda")
    assert simulated.freed == before + 1
