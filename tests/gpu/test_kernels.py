"""Every CUDA kernel beside its NumPy pair: result and gradients, every dtype, shapes that fill no block or pack."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from support.simulated import kernels

import minigrad as mg
from minigrad.backend import accumulator, as_dtype
from minigrad.errors import DeviceError
from minigrad.kernels.attention import attention
from minigrad.kernels.attention_patterns import BlockPattern, Pattern
from minigrad.kernels.cross_entropy import cross_entropy
from minigrad.kernels.dropout import drop
from minigrad.kernels.embedding import embedding
from minigrad.kernels.gelu import gelu
from minigrad.kernels.layer_norm import layer_norm
from minigrad.kernels.linear import linear
from minigrad.kernels.linear_cross_entropy import linear_cross_entropy
from minigrad.kernels.qkv_projection import qkv_projection
from minigrad.kernels.relu import relu
from minigrad.kernels.rms_norm import rms_norm
from minigrad.kernels.rope import apply_rope
from minigrad.kernels.softmax import log_softmax, softmax
from minigrad.kernels.swiglu import silu, swiglu
from minigrad.kernels.swiglu_ffn import swiglu_ffn

DTYPES = ["float64", "float32", "float16", "bfloat16"]
ROUNDING = {"float64": 1e-13, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


class Case(NamedTuple):
    """A call: shapes become random arrays of the dtype, arrays stay; and the kernels that it must launch."""

    operation: Any
    args: tuple[Any, ...]
    kernels: tuple[str, ...]
    options: dict[str, Any] = {}  # noqa: RUF012 (never written to)


def both(name: str, stem: str = "") -> tuple[str, str]:
    return f"{stem or name}.cu: {name}_forward", f"{stem or name}.cu: {name}_backward"


def pair(stem: str, name: str) -> tuple[str, str]:
    return f"{stem}.cu: {name}", f"{stem}.cu: {name}_backward"


def drawn(*shape: int) -> Any:
    """A mask that is False in a quarter of its places."""
    return np.random.default_rng(4).random(shape) > 0.25


def projections(*args: Any) -> Any:
    """The three results side by side."""
    return mg.concatenate(list(qkv_projection(*args)), -1)


IDS = np.random.default_rng(3).integers(0, 40, (3, 7))
SOME = np.where(IDS % 5 == 0, -100, IDS)
ANGLES = np.linspace(-3, 3, 5 * 4).reshape(5, 4)
NORMS = {name: both(name, "norms") for name in ("rms_norm", "layer_norm")}
UNITS = ("joined_rows.cu: joined_swiglu", "joined_rows.cu: joined_swiglu_backward")
FLASH = tuple(f"attention.cu: attention_{name}" for name in ("forward", "row_dots", "backward_q", "backward_kv"))
CASES = [
    *[Case(rms_norm, (s, None, s[-1:]), NORMS["rms_norm"])
      for s in [(5, 8), (3, 7), (2, 3, 65), (700, 32), (1, 4000), (2, 4096)]],
    Case(rms_norm, ((4, 3, 8), [3, 8], (3, 8)), NORMS["rms_norm"]),
    Case(rms_norm, ((4, 24),), NORMS["rms_norm"]),
    *[Case(layer_norm, (s, None, s[-1:], s[-1:]), NORMS["layer_norm"]) for s in [(5, 8), (3, 7), (600, 33), (2, 3000)]],
    Case(layer_norm, ((4, 24), None, None, (24,)), NORMS["layer_norm"]),
    *[Case(op, (s, axis), pair("softmax", name)) for op, name in ((softmax, "softmax"), (log_softmax, "log_softmax"))
      for s, axis in [((3, 8), -1), ((2, 5, 7), 1), ((1, 5000), -1), ((300, 40), -1), ((6,), 0)]],
    *[Case(op, (s,), pair("elementwise", op.name)) for op in (relu, silu, gelu) for s in [(3, 8), (7,), (2, 3, 5), ()]],
    Case(gelu, ((70, 30), "tanh"), pair("elementwise", "gelu")),
    *[Case(swiglu_ffn, (x, (f, d), (f, d), (o, f), norm, 1e-5, recompute), UNITS)
      for x, d, f, o, norm, recompute in [
          ((3, 8), 8, 16, 8, (8,), False), ((2, 5, 7), 7, 11, 3, (7,), True), ((6,), 6, 8, 6, None, False)]],
    *[Case(projections, (x, (q, d), (k, d), (v, d), norm), ("joined_rows.cu: join",))
      for x, d, q, k, v, norm in [
          ((2, 3, 8), 8, 8, 8, 8, (8,)), ((5, 7), 7, 6, 3, 5, (7,)), ((9, 16), 16, 32, 8, 8, None)]],
    *[Case(swiglu, (s, s), pair("elementwise", "swiglu")) for s in [(3, 8), (7, 11), (50, 64)]],
    *[Case(cross_entropy, ((3, 7, 40), ids), both("cross_entropy"), options)
      for ids, options in [(IDS, {}), (SOME, {"reduction": "none"}), (SOME, {"label_smoothing": 0.1})]],
    Case(cross_entropy, ((2, 1001), np.array([0, 1000])), both("cross_entropy"), {"reduction": "sum"}),
    *[Case(linear_cross_entropy, ((3, 7, 16), (40, 16), SOME), both("cross_entropy"), options)
      for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.2})],
    *[Case(linear, args, ()) for args in [((3, 8), (5, 8)), ((2, 3, 8), (5, 8), (5,)), ((8,), (5, 8), (5,))]],
    *[Case(embedding, (IDS, (40, w)), both("embedding")) for w in (8, 5, 300)],
    Case(embedding, (IDS, (40, 8), -3), both("embedding")),
    *[Case(apply_rope, (s, np.cos(ANGLES), np.sin(ANGLES), layout), ("rope.cu: rope",))
      for s in [(5, 8), (2, 3, 5, 8), (2, 1, 2, 3, 5, 8)] for layout in ("interleaved", "half")],
    *[Case(attention, ((2, 4, n, d), (2, h, m, d), (2, h, m, d), None, causal, None, 0.0, 0, window), FLASH)
      for n, m, h, d, causal, window in [
          (5, 5, 4, 8, True, None), (33, 70, 2, 16, False, None), (40, 40, 1, 20, True, 9), (70, 33, 4, 64, True, None),
          (35, 35, 2, 128, True, None), (9, 33, 4, 80, False, 4), (3, 2, 2, 7, True, 1)]],
    Case(attention, ((6, 4), (7, 4), (7, 4)), FLASH),
    *[Case(attention, ((2, 4, n, 16), (2, 2, n, 16), (2, 2, n, 16), mask, causal, None, p, 7, window, pattern), FLASH)
      for n, mask, causal, p, window, pattern in [
          (150, None, False, 0.0, None, BlockPattern.local(150, 24, 0, 1, 1)),
          (100, drawn(2, 1, 1, 100), True, 0.2, None, Pattern(start=9, grid=BlockPattern.strided(130, 16, 3))),
          (70, None, True, 0.0, 50, BlockPattern(np.eye(3, dtype=bool)[::-1], 32)),
          (70, None, True, 0.0, 40, Pattern(start=9)), (40, None, True, 0.0, 9, Pattern(start=50))]],
    *[Case(attention, ((2, 4, n, 16), (2, h, m, 16), (2, h, m, 16), mask, causal, None, p, 7, None), FLASH)
      for n, m, h, mask, causal, p in [
          (33, 70, 2, None, False, 0.3), (40, 40, 4, None, True, 0.9), (33, 70, 2, drawn(2, 1, 1, 70), False, 0.0),
          (40, 40, 4, drawn(2, 4, 40, 40), True, 0.2), (9, 33, 2, drawn(9, 33), False, 0.0),
          (34, 6, 2, drawn(2, 1, 6, 34).swapaxes(2, 3), False, 0.0), (3, 4, 2, np.zeros((3, 4), bool), False, 0.5)]],
    Case(attention, ((2, 3, 2, 5, 16), (2, 3, 2, 6, 16), (2, 3, 2, 6, 16), drawn(3, 1, 5, 6)), FLASH),
    Case(attention, ((20, 128), (7, 128), (7, 128), drawn(1, 7), False, None, 0.1, 7, None), FLASH),
    *[Case(drop, (s, 0.3, 5), ("dropout.cu: dropout",)) for s in [(64, 40), (7,), (3, 5, 9), ()]],
]  # fmt: skip


def made(given: Any, dtype: Any, seed: int) -> Any:
    if isinstance(given, tuple) and all(isinstance(n, int) for n in given):
        return np.asarray(np.random.default_rng(seed).standard_normal(given)).astype(dtype)
    return given.astype(accumulator(dtype)) if isinstance(given, np.ndarray) and given.dtype.kind == "f" else given


def derived(case: Case, args: list[Any], upstream: Any = None) -> list[Any]:
    """The result and the gradients of the arrays made from shapes, as NumPy arrays."""
    leaves = [isinstance(shape, tuple) and hasattr(a, "dtype") for shape, a in zip(case.args, args, strict=True)]
    tensors = [mg.asarray(a) if leaf else a for a, leaf in zip(args, leaves, strict=True)]
    for tensor, leaf in zip(tensors, leaves, strict=True):
        if leaf:
            tensor.requires_grad = True
    out = case.operation(*tensors, **case.options)
    if upstream is None:
        upstream = np.random.default_rng(9).standard_normal(out.shape).astype(out.dtype)
    out.backward(mg.asarray(upstream, device=out.device).data)
    grads = [tensor.grad for tensor, leaf in zip(tensors, leaves, strict=True) if leaf]
    return [x if isinstance(x, np.ndarray) else x.get() for x in (out.data, *grads)]


def moved(args: list[Any], gpu: Any) -> list[Any]:
    """Arguments on the GPU; ids stay on the host, from where the kernels take them."""
    return [gpu.asarray(a) if isinstance(a, np.ndarray) and a.dtype.kind not in "iu" else a for a in args]


def check(ours: list[Any], theirs: list[Any], rounding: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_allclose(a, b, 0, rounding * max(1.0, np.abs(b).max(initial=0)))


def name(case: Case) -> str:
    sizes = ["x".join(map(str, a)) for a in case.args if isinstance(a, tuple)]
    return "-".join(
        [getattr(case.operation, "name", "projections"), *sizes[:2], *(f"{k}={v}" for k, v in case.options.items())]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_kernel_is_its_numpy_pair(case: Case, dtype: str, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with threads in the opposite order, bit for bit: there is no race."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    if dtype == "float64" and case.operation is attention:
        pytest.skip("attention on a GPU is for floats of at most 32 bits")
    args = [made(a, as_dtype(dtype), seed) for seed, a in enumerate(case.args)]
    theirs = derived(case, args)
    kernels.launched.clear()
    ours = derived(case, moved(args, gpu))
    check(ours, theirs, ROUNDING[dtype])
    assert set(case.kernels) <= set(kernels.launched) or "simulated" not in gpu.__version__
    monkeypatch.setattr(kernels, "order", 1)
    again = derived(case, moved(args, gpu))
    assert [a.tobytes() for a in ours] == [a.tobytes() for a in again]


@pytest.mark.parametrize(
    ("operation", "shapes", "dtype", "options", "marked"),
    [
        (attention, [(2, 5, 8)] * 3, "float32", {}, False),
        (attention, [(2, 5, 8)] * 3, "float32", {"mask": np.tri(5, dtype=bool), "dropout_p": 0.5}, False),
        (attention, [(2, 5, 8)] * 3, "float32", {"mask": np.tri(5, dtype=np.float32)}, True),
        (attention, [(2, 5, 8)] * 3, "float64", {}, True),
        (attention, [(2, 5, 130)] * 3, "float32", {}, True),
        (swiglu_ffn, [(4, 8), (6, 8), (6, 8), (8, 6)], "float32", {}, False),
        (qkv_projection, [(4, 8), (6, 8), (6, 8), (8, 8)], "float32", {}, False),
        (rms_norm, [(4, 8193)], "float32", {}, True),
        (swiglu, [(4, 8), (1, 8)], "float32", {}, True),
    ],
)
def test_a_profile_marks_what_no_kernel_takes(
    operation: Any, shapes: list[Any], dtype: str, options: dict[str, Any], marked: bool, gpu: Any
) -> None:
    args = [mg.Tensor(np.ones(shape), dtype=dtype, device="cuda") for shape in shapes]
    given = {key: gpu.asarray(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    with mg.profile() as p:
        operation(*args, **given)
    assert (f"{operation.name} (definition)" in {row.label for row in p.rows}) == marked


def test_attention_reads_and_writes_features_that_lie_apart(gpu: Any) -> None:
    """Views of (…, d, t) as (…, t, d): results and gradients lie elsewhere than the arguments."""
    arrays = np.random.default_rng(3).standard_normal((3, 2, 8, 5)).astype(np.float32)
    found = []
    for device in ("cpu", "cuda"):
        leaves = [mg.Tensor(array, device=device, requires_grad=True) for array in arrays]
        out = attention(*(leaf.swapaxes(-1, -2) for leaf in leaves), is_causal=True)
        (out * out).sum().backward()
        found.append([out.numpy(), *(mg.asarray(leaf.grad).numpy() for leaf in leaves)])
    for ours, cpus in zip(*found, strict=True):
        np.testing.assert_allclose(ours, cpus, atol=1e-5)


def test_a_mask_of_the_host_is_refused(gpu: Any) -> None:
    q = mg.ones((2, 5, 8), device="cuda")
    with pytest.raises(DeviceError, match=r"bool \(5, 5\) on cpu"):
        attention(q, q, q, mg.ones((5, 5), dtype=bool))
