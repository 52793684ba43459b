"""Batched products on the GPU: one call of cuBLAS, on operands where they lie, with the result of exact arithmetic."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.simulated import cublas

import minigrad as mg
from minigrad.backend import as_dtype, to_numpy
from minigrad.ops import _gemm

EPS = {"float64": 1e-14, "float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
swapped, flat = (lambda a: a.swapaxes(-1, -2)), (lambda a: a)
heads, turned = (lambda a: a.swapaxes(1, 2)), (lambda a: a.transpose(0, 2, 3, 1))
# Shapes of two arrays, the views of them that are multiplied, how many calls that takes, and whether one is copied.
LAYOUTS = {
    "plain": ((3, 4, 5), (3, 5, 6), flat, flat, 1, False),
    "transposed x": ((3, 5, 4), (3, 5, 6), swapped, flat, 1, False),
    "transposed y": ((3, 4, 5), (3, 6, 5), flat, swapped, 1, False),
    "transposed both": ((2, 3, 5, 4), (2, 3, 6, 5), swapped, swapped, 1, False),
    "y for all": ((2, 3, 4, 5), (1, 1, 5, 6), flat, flat, 1, False),
    "x a matrix": ((4, 5), (2, 3, 5, 6), flat, flat, 1, False),
    "x a transposed matrix": ((5, 4), (2, 3, 6, 5), swapped, swapped, 1, False),
    "y for half": ((2, 3, 4, 5), (3, 5, 6), flat, flat, 2, False),
    "outer": ((2, 1, 4, 5), (3, 5, 6), flat, flat, 2, False),
    "heads": ((2, 7, 3, 5), (2, 7, 3, 5), heads, turned, 2, False),
    "heads of one": ((1, 7, 3, 5), (1, 7, 3, 5), heads, turned, 1, False),
    "sliced heads": ((2, 5, 4, 6), (2, 5, 6, 4), lambda a: a[:, 1:3], lambda a: a[:, 1:3], 2, False),
    "sliced columns": ((3, 4, 9), (3, 5, 8), lambda a: a[..., 2:7], lambda a: a[..., 1:5], 1, False),
    "every other row": ((3, 8, 5), (3, 5, 6), lambda a: a[:, ::2], flat, 1, False),
    "every other column": ((3, 4, 10), (3, 5, 6), lambda a: a[..., ::2], flat, 1, True),
    "backwards": ((3, 4, 5), (3, 5, 6), lambda a: a[::-1, :, ::-1], flat, 1, True),
    "windows": ((3, 1, 5), (3, 5, 6), lambda a: mg.broadcast_to(a, (3, 4, 5)), flat, 1, True),
    "row times column": ((3, 1, 5), (3, 5, 1), flat, flat, 1, False),
    "column times row": ((3, 4, 1), (3, 1, 6), flat, flat, 1, False),
    "of ones": ((3, 1, 1), (3, 1, 1), swapped, flat, 1, False),
    "vector x": ((5,), (3, 5, 6), flat, flat, 1, False),
    "vector y": ((2, 3, 4, 5), (5,), flat, flat, 1, False),
    "no batch": ((0, 4, 5), (0, 5, 6), flat, flat, 0, False),
    "no rows": ((3, 0, 5), (3, 5, 6), flat, flat, 0, False),
    "nothing to sum": ((3, 4, 0), (3, 0, 6), flat, flat, 0, False),
    "every other matrix": ((9, 2, 2, 3), (5, 3, 2), lambda a: a[::2, 1], flat, 1, False),
    "too many calls": ((9, 1, 2, 3), (10, 3, 2), flat, flat, 0, False),  # cupy.matmul's, by pointers
}  # fmt: skip


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_is_that_of_float64(layout: str, dtype: str, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it reads its operands in place, unless cuBLAS can't."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    x_shape, y_shape, view_x, view_y, calls, copied = LAYOUTS[layout]
    draw = np.random.default_rng(0).standard_normal
    hosts = [draw(shape).astype(as_dtype(dtype)) for shape in (x_shape, y_shape)]
    x, y = (mg.asarray(h, device="cuda") for h in hosts)
    x, y = view_x(x), view_y(y)
    copies = count_copies(gpu, monkeypatch)
    cublas.calls.clear()
    ours = mg.matmul(x, y)
    wide = [view(mg.Tensor(h.astype(np.float64))).data for view, h in zip((view_x, view_y), hosts, strict=True)]
    exact = np.matmul(*wide)
    assert ours.shape == exact.shape and ours.dtype == dtype
    bound = EPS[dtype] * (np.abs(exact) + np.sqrt(x.shape[-1]) * (dtype in ("float32", "float64")) * 4)
    assert (np.abs(to_numpy(ours.data).astype(np.float64) - exact) <= bound + 2e-6 * (dtype != "float64")).all()
    if "simulated" in gpu.__version__:
        assert len(cublas.calls) == calls
        assert bool(copies) == copied


def count_copies(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    copies: list[Any] = []
    plain = gpu.ascontiguousarray

    def counting(a: Any) -> Any:
        made = plain(a)
        if made is not a:
            copies.append(a.shape)
        return made

    if "simulated" in gpu.__version__:
        monkeypatch.setattr(gpu, "ascontiguousarray", counting)
    return copies


def test_half_precision_is_summed_in_float32_and_gradients_are_products_too(gpu: Any) -> None:
    """4096 ones: summed in float16 they would end at 2048; each of the gradients is one more call."""
    x = mg.Tensor(np.ones((2, 3, 4096)), dtype="float16", device="cuda", requires_grad=True)
    y = mg.Tensor(np.ones((2, 4096, 2)), dtype="float16", device="cuda", requires_grad=True)
    cublas.calls.clear()
    out = x @ y
    out.backward(gpu.ones(out.shape, "float16"))
    assert out.numpy().min() == out.numpy().max() == 4096
    assert x.grad is not None and y.grad is not None
    assert to_numpy(x.grad).max() == 2 and to_numpy(y.grad).max() == 3
    if "simulated" in gpu.__version__:
        assert [(call["transa"], call["transb"]) for call in cublas.calls] == [(0, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize("shape", [(4, 8, 8), (8, 8)])
def test_tf32_is_a_choice_that_counts_at_once(shape: tuple[int, ...], gpu: Any) -> None:
    """1 + 2⁻¹² has 12 bits behind the point, of which TF32 keeps 10. For single matrices CuPy reads the choice."""
    x = mg.full(shape, 1 + 2**-12, dtype="float32", device="cuda")
    eye = mg.asarray(np.broadcast_to(np.eye(8, dtype=np.float32), shape), device="cuda")
    found = []
    try:
        for allow in (False, True, False):
            mg.cuda.allow_tf32(allow)
            found.append((x @ eye).numpy().max())
    finally:
        mg.cuda.allow_tf32(False)
    assert found[0] == found[2] == 1 + 2**-12
    assert found[1] == 1 or "simulated" not in gpu.__version__  # cuBLAS may, but need not round


def test_without_the_function_or_with_another_one_cupy_multiplies(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: Any) -> None:
        """gemmStridedBatchedEx(intptr_t handle, int m)"""

    assert _gemm._function(gpu) is not None
    x = mg.Tensor(np.arange(12.0).reshape(3, 2, 2), device="cuda")
    if "simulated" not in gpu.__version__:
        return
    for function in (None, other):
        _gemm._function.cache_clear()
        with monkeypatch.context() as patch:
            if function is None:
                patch.delattr(cublas, "gemmStridedBatchedEx")
            else:
                patch.setattr(cublas, "gemmStridedBatchedEx", function)
            assert (x @ x).numpy().tolist() == np.matmul(x.numpy(), x.numpy()).tolist()
    _gemm._function.cache_clear()
    assert not cublas.calls


def test_the_function_takes_these_arguments_in_the_installed_cupy() -> None:
    """Its module can't be imported without cuBLAS, but the signature stands in it as a text."""
    if find_spec("cupy_backends") is None:
        pytest.skip("asks the installed cupy")
    found = find_spec("cupy_backends.cuda.libs.cublas")
    assert found is not None and found.origin is not None
    text = re.search(rb"gemmStridedBatchedEx\([^)\0]+\)", Path(found.origin).read_bytes())
    assert text is not None
    kinds = [kind for kind, _ in re.findall(r"(\w[\w ]*) (\w+)[,)]", text.group().decode())]
    assert _gemm.arguments(text.group().decode()) == _gemm.ARGUMENTS == " ".join(cublas.NAMES)
    wide = {"handle": "intptr_t", **dict.fromkeys(["alpha", "A", "B", "beta", "C"], "size_t")}
    wide |= dict.fromkeys(["strideA", "strideB", "strideC"], "long long")
    assert kinds == [wide.get(name, "int") for name in cublas.NAMES]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lda", 1), ("strideC", 1), ("A", 64), ("computeType", 64)),
        *(("Btype", 2), ("m", 0), ("handle", 1), ("batchCount", 9)),
    ],
)
def test_the_simulated_function_refuses_what_cublas_refuses(name: str, value: int, simulated: Any) -> None:
    """Each from the arguments of a product that it takes, with one of them wrong."""
    x, y = (mg.Tensor(np.ones(shape), dtype="float32", device="cuda") for shape in ((3, 4, 5), (3, 5, 6)))
    cublas.calls.clear()
    assert (x @ y).shape == (3, 4, 6)
    out = np.zeros((3, 4, 6), np.float32)
    cublas.note(out, 0)
    right = cublas.calls[-1] | {"C": out.ctypes.data}
    cublas.gemmStridedBatchedEx(*right.values())
    assert (out == 5).all()
    with pytest.raises(cublas.CUBLASError):
        cublas.gemmStridedBatchedEx(*(right | {name: value}).values())
