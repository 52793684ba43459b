"""Mixed precision on the CPU and on the GPU: which dtypes meet where, beside torch's, and scaled losses."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

import minigrad as mg
import nn
import optim
from minigrad.backend import as_dtype, to_numpy
from minigrad.errors import ArgumentError, DTypeError, GraphError, StateError
from minigrad.kernels.linear_cross_entropy import linear_cross_entropy
from nn import functional as F

HALVES = ["float16", "bfloat16"]


@pytest.fixture(params=HALVES)
def half(request: pytest.FixtureRequest) -> Any:
    if request.param == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    return as_dtype(request.param)


def test_products_are_narrow_and_sums_are_wide(half: Any) -> None:
    x = mg.Tensor(np.random.default_rng(0).standard_normal((2, 3, 4, 4)), dtype="float32", requires_grad=True)
    with mg.autocast(half):
        products = [x @ x, F.linear(x, x[0, 0]), mg.einsum("abij,abjk->abik", x, x)]
        products.append(F.scaled_dot_product_attention(x, x, x))
        narrow = products[0]
        sums = [narrow.sum(), narrow.mean(), narrow.var(), narrow.norm(), narrow.logsumexp(), mg.softmax(narrow)]
        sums += [F.rms_norm(narrow), F.layer_norm(narrow), F.cross_entropy(narrow, np.zeros((2, 3, 4), np.int64))]
        assert (x + x).dtype == np.float32 and F.silu(narrow).dtype == half
        assert (x.astype("float64") @ x.astype("float64")).dtype == np.float64
        with mg.autocast("float32"):
            assert (x @ x).dtype == np.float32
    assert [p.dtype for p in products] == [half] * len(products)
    assert [s.dtype for s in sums] == [np.float32] * len(sums)
    assert (x @ x).dtype == np.float32
    (sums[0] + sums[-1]).backward()
    assert x.grad is not None and x.grad.dtype == np.float32


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_is_close_to_float32_and_to_torch_in_mixed_precision(device: str, half: Any, gpu: Any) -> None:
    """The gradients differ from those of float32 by roundings of half precision alone; their dtype is float32."""
    mg.random.seed(0)
    model = nn.TransformerLM(40, context_length=16, d_model=32, num_layers=2, num_heads=2, device=device)
    ids = np.random.default_rng(0).integers(0, 40, (2, 17))
    found = []
    for dtype in ("float32", half):
        model.zero_grad()
        with mg.autocast(dtype):
            loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found.append((loss.item(), {n: to_numpy(p.grad) for n, p in model.named_parameters() if p.grad is not None}))
    (exact, wide), (near, narrow) = found
    eps = float(np.finfo(np.float16).eps if half == np.float16 else 2.0**-7)
    assert near != exact and abs(near - exact) < 2 * eps * exact
    for name, g in wide.items():
        assert narrow[name].dtype == np.float32
        assert np.abs(narrow[name] - g).max() < 16 * eps * np.abs(g).max(), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_head_is_a_linear_layer_and_a_loss(device: str, reduction: str, half: Any, gpu: Any) -> None:
    """Its products are in half precision, on both devices, wherever the backward pass runs; the loss is in float32."""
    draw, ids = np.random.default_rng(0).standard_normal, np.arange(12).reshape(3, 4) % 5
    data = draw((3, 4, 8)), draw((5, 8))
    found = []
    for fused, dtype in ((True, half), (False, half), (False, "float32")):
        x, w = (mg.Tensor(a, dtype="float32", device=device, requires_grad=True) for a in data)
        with mg.autocast(dtype):
            loss = (
                linear_cross_entropy(x, w, ids, reduction=reduction)
                if fused
                else F.cross_entropy(F.linear(x, w), ids, reduction=reduction)
            )
        loss.sum().backward()
        assert loss.dtype == np.float32
        found.append([loss.numpy(), *(to_numpy(t.grad) for t in (x, w))])
    eps = float(np.finfo(np.float16).eps if half == np.float16 else 2.0**-7)
    ours, composed, exact = found
    np.testing.assert_allclose(ours[0], composed[0], rtol=1e-6)
    assert (ours[0] != exact[0]).all()
    for a, b in zip(ours[1:], composed[1:], strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, atol=2 * eps * np.abs(b).max())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_gradient_of_a_mean_over_many_rows_does_not_vanish_in_float16(device: str, gpu: Any) -> None:
    """A class that is no target gets some e⁻¹⁰ / 1024 of it from each row, which is 2⁻²⁴, where float16 ends."""
    draw = np.random.default_rng(0).standard_normal
    data, ids = (draw((1024, 2)), draw((1024, 2)) / 2), np.zeros(1024, np.int64)
    data[0][:, 0], data[1][0] = 1, (10, 0)
    found = []
    for dtype in ("float16", "float32"):
        x, w = (mg.Tensor(a, dtype="float32", device=device, requires_grad=True) for a in data)
        with mg.autocast(dtype):
            loss = linear_cross_entropy(x, w, ids)
        loss.backward(retain_graph=True)
        found.append(to_numpy(w.grad)[1:].copy())
        loss.backward()  # makes the gradient anew
        found.append(to_numpy(w.grad)[1:] / 2)
    for gradient in found:
        np.testing.assert_allclose(gradient, found[-1], atol=2.0**-9 * np.abs(found[-1]).max())


def test_a_checkpoint_computes_again_in_the_precision_of_the_first_time(half: Any) -> None:
    """In which block the backward pass runs changes no bit."""
    data = np.random.default_rng(0).standard_normal((3, 8, 8))
    w, x, v = (mg.Tensor(part, dtype="float32", requires_grad=True) for part in data)
    found = []
    ways = [(way, around) for way in (lambda f, x: f(x), mg.checkpoint) for around in ("float32", "float16")]
    for through, around in ways:
        w.grad = x.grad = v.grad = None
        with mg.autocast(half):
            out = through(lambda x: F.silu(x @ w) @ v, x)
        with mg.autocast(around):
            out.sum().backward()
            assert ((w @ w).dtype == np.float16) == (around == "float16")
        assert w.grad is not None and x.grad is not None and v.grad is not None
        found.append(w.grad.tobytes() + x.grad.tobytes() + v.grad.tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("way", ["with", "decorator", "checkpoint"])
def test_overflow_is_for_the_scaler_and_no_warning(way: str) -> None:
    """Warnings are errors here; elsewhere they are what they were."""
    mg.random.seed(0)
    model = nn.TransformerLM(40, context_length=8, d_model=16, num_layers=1, num_heads=2, dropout=0.1)
    ids = np.random.default_rng(0).integers(0, 40, (2, 9))
    optimizer, scaler = optim.SGD(model.parameters(), lr=0.1), optim.GradScaler(init_scale=2.0**60)

    x = mg.Tensor(np.full((2, 2), 1e4), dtype="float32", requires_grad=True)

    def loss_of() -> Any:
        return model.loss(ids[:, :-1], ids[:, 1:]) + mg.where(np.isfinite(x.data), 0, F.gelu(x @ x) * x).sum()

    if way == "decorator":
        loss = mg.autocast("float16")(loss_of)()
    else:
        with mg.autocast("float16"):
            loss = mg.checkpoint(loss_of) if way == "checkpoint" else loss_of()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.skipped == 1 and scaler.get_scale() == 2.0**59
    with pytest.warns(RuntimeWarning, match="overflow"):
        mg.exp(mg.Tensor([1e4], requires_grad=True)).sum().backward()


def test_one_autocast_serves_many_blocks_functions_and_threads(half: Any) -> None:
    """Within each other, after an error, in a generator, and in a thread that leaves while another is inside."""
    x, narrow = mg.ones((2, 2)), mg.autocast(half)
    inside, left = threading.Event(), threading.Event()
    found: list[Any] = []

    @narrow
    def product() -> Any:
        return (x @ x).dtype

    @narrow
    def products() -> Any:
        for _ in range(2):
            yield (x @ x).dtype

    def stay() -> None:
        with narrow:
            inside.set()
            left.wait()
            found.append((x @ x).dtype)
        found.append((x @ x).dtype)

    thread = threading.Thread(target=stay)
    with narrow:
        thread.start()
        inside.wait()
        with narrow, mg.autocast("float32"), pytest.raises(ZeroDivisionError), narrow:
            raise ZeroDivisionError
        assert (x @ x).dtype == half and product() == half
    left.set()
    thread.join()
    assert found == [half, np.float32]
    assert [((x @ x).dtype, dtype) for dtype in products()] == [(np.float32, half)] * 2


def test_a_product_is_that_of_torch(half: Any) -> None:
    a, b = (np.random.default_rng(k).standard_normal((8, 8)).astype(np.float32) for k in (0, 1))
    with mg.autocast(half):
        ours = mg.matmul(mg.Tensor(a), mg.Tensor(b)).astype("float32")
    with torch.autocast("cpu", getattr(torch, half.name)):
        theirs = (torch.tensor(a) @ torch.tensor(b)).float().numpy()
    np.testing.assert_allclose(ours.data, theirs, rtol=2.0**-7 if half != np.float16 else 2.0**-10, atol=1e-2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_scales_grow_fall_and_leave_steps_out(device: str, gpu: Any) -> None:
    w = mg.Tensor([1.0, 2.0], dtype="float32", device=device, requires_grad=True)
    optimizer = optim.AdamW([w], lr=0.1, weight_decay=0.0)
    scaler = optim.GradScaler(init_scale=4.0, growth_interval=2)
    scales, before = [], w.numpy().copy()
    for factor in (1.0, math.inf, 1.0, 1.0, math.nan):
        optimizer.zero_grad()
        scaler.scale((w * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 2.0, 2.0, 4.0, 2.0]
    assert scaler.skipped == 2
    assert int(optimizer.state_dict()["state"]["0.step"]) == 3
    np.testing.assert_allclose(w.numpy(), before - 0.3, rtol=1e-6)  # a constant gradient: each step moves by lr
    again = optim.GradScaler()
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == 2.0 and again.skipped == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_left_out_by_the_caller_counts(device: str, gpu: Any) -> None:
    """Its gradients are finite, but its loss was not: the scale is lowered, and nothing moves."""
    w = mg.Tensor([1.0], dtype="float32", device=device, requires_grad=True)
    optimizer, scaler = optim.AdamW([w], lr=0.1, weight_decay=0.0), optim.GradScaler(init_scale=4.0)
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer, where=np.bool_(False))
    scaler.update()
    assert (scaler.skipped, scaler.get_scale(), w.item()) == (1, 2.0, 1.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_power_of_two_changes_no_step(device: str, gpu: Any) -> None:
    results = []
    for enabled in (True, False):
        mg.random.seed(0)
        layer = nn.Linear(5, 3, device=device)
        optimizer, scaler = optim.AdamW(layer.parameters(), lr=0.1), optim.GradScaler(enabled=enabled)
        for k in range(3):
            x = mg.Tensor(np.random.default_rng(k).standard_normal((4, 5)), dtype="float32", device=device)
            optimizer.zero_grad()
            scaler.scale((layer(x) ** 2).mean()).backward()
            scaler.unscale_(optimizer)
            optim.clip_grad_norm(layer.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        results.append(layer.weight.numpy().tobytes())
    assert results[0] == results[1]


def test_a_second_step_before_an_update_is_refused() -> None:
    """Its gradients would be those of the scaled loss."""
    w = mg.Tensor([1.0], requires_grad=True)
    optimizer, scaler = optim.SGD([w], lr=0.5), optim.GradScaler()
    scaler.scale((w * w).sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(GraphError, match="one step"):
        scaler.step(optimizer)
    assert w.item() == 0.0
    del optimizer  # another one, maybe at the same address, is another one
    scaler.unscale_(optim.SGD([w], lr=0.5))


@pytest.mark.parametrize(("gradient", "scale"), [(1.0, 2.0**99), (math.inf, 2.0**-99)])
def test_a_scale_stays_a_number_however_long_it_grows_or_falls(gradient: float, scale: float) -> None:
    w = mg.Tensor([1.0], dtype="float32", requires_grad=True)
    optimizer, scaler = optim.SGD([w], lr=0.0), optim.GradScaler(init_scale=scale, growth_interval=1)
    for _ in range(3):
        w.grad = np.array([gradient], np.float32)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (2.0**100 if gradient == 1 else 2.0**-100)
    assert np.isfinite(scaler.scale((w * 0.5).sum()).item())


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: optim.GradScaler(init_scale=math.inf), ArgumentError),
        (lambda: optim.GradScaler(backoff_factor="a"), ArgumentError),  # type: ignore[arg-type]
        (lambda: optim.GradScaler(growth_interval=1.5), ArgumentError),  # type: ignore[arg-type]
        (lambda: optim.GradScaler().scale(1.0), DTypeError),  # type: ignore[arg-type]
        (lambda: optim.GradScaler().scale(mg.Tensor([1])), DTypeError),
        (lambda: optim.GradScaler().step(None), DTypeError),  # type: ignore[arg-type]
        (lambda: optim.GradScaler().unscale_([mg.ones(2)]), DTypeError),  # type: ignore[arg-type]
        (lambda: optim.GradScaler().load_state_dict({}), StateError),
        (lambda: optim.GradScaler().load_state_dict({"scale": -1, "good_steps": 0, "skipped": 0}), StateError),
        (lambda: optim.GradScaler().load_state_dict(None), StateError),  # type: ignore[arg-type]
    ],
)
def test_mistakes_with_a_scaler_are_explained(call: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"(?s)Expected: .*Got: "):
        call()


def test_scaling_waits_for_nothing(simulated: Any) -> None:
    w = mg.ones((4, 4), device="cuda", requires_grad=True)
    optimizer, scaler = optim.AdamW([w]), optim.GradScaler()
    before = simulated.synchronisations
    for _ in range(2):
        optimizer.zero_grad()
        with mg.autocast("float16"):
            loss = (w @ w).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optim.clip_grad_norm([w], 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert simulated.synchronisations == before
    with pytest.raises(RuntimeError, match="a second one"):
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
