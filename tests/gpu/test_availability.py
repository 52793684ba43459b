"""What keeps a GPU from being used, each cause in words of its own, and what is refused where a GPU is there."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad import backend
from minigrad.errors import DeviceError
from minigrad.kernels.cuda.launching import Kernel, launch, parameters
from nn import functional as F


class CudaError(RuntimeError):
    """What CuPy raises."""


def fake(driver: int, runtime: int, text: str = "", count: int = 0, **names: Any) -> Any:
    """A CuPy whose CUDA has these versions; with a text, the search for devices fails."""

    def get_device_count() -> int:
        if text:
            raise CudaError(text)
        return count

    facts = {"getDeviceCount": get_device_count, "getDevice": lambda: 0}
    versions = {"driverGetVersion": lambda: driver, "runtimeGetVersion": lambda: runtime}
    pool = types.SimpleNamespace(malloc=lambda size: size)
    cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(**facts, **versions),
        get_allocator=lambda: cuda.allocator,
        set_allocator=lambda function: setattr(cuda, "allocator", function),
        allocator=pool.malloc,
    )
    module = types.ModuleType("cupy")
    vars(module).update(cuda=cuda, get_default_memory_pool=lambda: pool, ndarray=type("ndarray", (), {}), **names)
    return module


INSUFFICIENT = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"
CAUSES = {
    "no CuPy": (None, "CuPy, which runs the GPU", r"\[cuda\]"),
    "no driver": (fake(0, 12090, INSUFFICIENT), "a driver of NVIDIA", "nvidia-smi"),
    "another CUDA": (fake(12080, 13000, INSUFFICIENT), r"a driver for CUDA 13\.0, of which CuPy is", "cupy-cuda12x"),
    "old driver": (fake(12010, 12090, INSUFFICIENT), r"a driver for CUDA 12\.9\nGot: one for 12\.1", "update"),
    "no card": (fake(12090, 12090, "cudaErrorNoDevice: no CUDA-capable device"), "an NVIDIA GPU", "CUDA_VISIBLE"),
    "no cuBLAS": (fake(12090, 12090, count=1), "multiplies and runs a kernel", r"\[cuda\]"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_a_sentence_of_its_own(monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    cupy, expected, hint = CAUSES[cause]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert not mg.cuda.is_available() and mg.cuda.device_count() == 0
    with pytest.raises(DeviceError, match=rf"(?s)Expected: [^\n]*{expected}.*Hint: .*{hint}") as caught:
        mg.zeros(3, device="cuda")
    assert cupy is None or cause == "no cuBLAS" or "cudaError" in caught.value.got


def test_the_first_use_multiplies_and_runs_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    module = types.SimpleNamespace(get_function=lambda name: lambda *_: ran.append(name))
    names = {"matmul": lambda a, b: ran.append("product"), "ones": lambda *_: None, "RawModule": lambda code: module}
    monkeypatch.setitem(sys.modules, "cupy", fake(12090, 12090, count=2, **names))
    assert mg.cuda.device_count() == 2 and mg.cuda.is_available() and ran == ["product", "nothing"]


def test_an_allocator_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake(12090, 12090, "no device")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    mg.cuda.is_available()
    assert cupy.cuda.allocator.func is backend.allocate  # in place of CuPy's own
    cupy.cuda.allocator = chosen = object()
    mg.cuda.is_available()
    assert cupy.cuda.allocator is chosen


def test_bfloat16_is_refused_where_it_would_be_emulated(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = mg.ones((2, 2), device="cuda", dtype="bfloat16")
    (x @ x).numpy()
    backend.check_bfloat16.cache_clear()
    monkeypatch.setattr(type(x.data.device), "compute_capability", "75")
    for use in (lambda: x @ x, lambda: mg.matmul(x[None], x), lambda: F.softmax(x)):
        with pytest.raises(DeviceError, match=r"(?s)8\.0 or more for bfloat16\nGot: 7\.5, of cuda:0\n.*float16"):
            use()
    backend.check_bfloat16.cache_clear()


# ---- launches -------------------------------------------------------------------------------------------------------

SOURCE = """extern "C" __global__ void __launch_bounds__(512) f(const T* __restrict__ x, W *total,
    unsigned long long seed, int n, const long long* const ids, float by) {}"""


def test_the_types_of_a_declaration() -> None:
    types_ = parameters(SOURCE.replace("__restrict__ ", ""), "f")
    assert types_ == ("T*", "W*", "unsigned long long", "int", "long long*", "float")


def test_arguments_are_held_to_the_declaration(simulated: Any) -> None:
    """A pointer to other numbers, a missing argument, a number for a pointer: an error before the launch."""
    x, y = (mg.ones(4, device="cuda", dtype="float32").data for _ in range(2))
    launch("elementwise.cu", "relu", x, 1, 1, 32, x, y, 4)
    wrong: list[tuple[Any, ...]] = [(x, y.astype("float64"), 4), (x, 4, y), (x, np.ones(4, np.float32), 4)]
    for args in wrong:
        with pytest.raises(AssertionError, match="relu declares"):
            launch("elementwise.cu", "relu", x, 1, 1, 32, *args)
    with pytest.raises(ValueError, match="zip"):
        launch("elementwise.cu", "relu", x, 1, 1, 32, x, y)
    with pytest.raises(OverflowError):
        launch("elementwise.cu", "gelu", x, 1, 1, 32, x, y, 4, 1 << 40)


def test_a_launch_refuses_an_array_of_another_gpu(simulated: Any) -> None:
    with mg.cuda.device(1):
        x = mg.ones((4, 4), device="cuda")
    with pytest.raises(DeviceError, match=r"(?s)current one\nGot: cuda:0, and an array on cuda:1.*mg\.cuda\.device"):
        launch("elementwise.cu", "relu", x.data, 1, 1, 32, x.data, x.data, 16)
    with mg.cuda.device(1):
        assert F.relu(x).device == "cuda:1"


def test_kernels_flush_small_float32_numbers_as_cupy_has_them_compiled(simulated: Any) -> None:
    """1e-40 is 0 to a kernel that computes in float32; the one in float64 keeps 1e-310."""
    for dtype, small, result in (("float32", 1e-40, 0.0), ("float64", 1e-310, 1e-310)):
        x = mg.array([small, 1.0], dtype=dtype, device="cuda")
        np.testing.assert_array_equal(F.silu(x + 0).numpy()[0] > 0, result > 0)


def test_kernel_is_prepared_once(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = mg.ones((4, 8), device="cuda", dtype="float32")
    F.softmax(x)
    monkeypatch.setattr(Kernel, "__init__", None)
    F.softmax(x * 2)
