"""Clipping and optimizers on the GPU beside the CPU's: one kernel over all parameters, nobody waits for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import minigrad as mg
import optim
from minigrad.backend import as_dtype, to_numpy

SHAPES = [(3, 5), (), (40, 1000), (7,), (0,), (2, 8)]
ROUNDING = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def parameters(dtype: str, device: str) -> list[mg.Tensor]:
    rng = np.random.default_rng(0)
    return [mg.Tensor(rng.standard_normal(s), dtype=dtype, device=device, requires_grad=True) for s in SHAPES]


def set_gradients(params: list[mg.Tensor], seed: int, scale: float = 1.0) -> None:
    rng = np.random.default_rng(seed)
    for p in params:
        p.grad = mg.Tensor(scale * rng.standard_normal(p.shape), dtype=p.dtype, device=p.device).data


def trained(kind: Any, dtype: str, device: str) -> tuple[list[Any], list[float], dict[str, Any]]:
    """Parameters, norms and the optimizer's state after five clipped steps, as NumPy arrays."""
    params, norms = parameters(dtype, device), []
    options = {"momentum": 0.9} if kind is optim.SGD else {}
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "lr": 0.02}]
    optimizer = kind(groups, lr=0.01, **options)
    for step in range(5):
        set_gradients(params, step, 10.0)
        norms.append(float(optim.clip_grad_norm(params, 1.0)))
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return [to_numpy(p.data) for p in params], norms, {k: to_numpy(v) for k, v in state.items()}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam, optim.SGD])
def test_steps_are_those_of_the_cpu(kind: Any, dtype: str, gpu: Any) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    as_dtype(dtype)
    (ours, norms, state), (theirs, expected, wanted) = (trained(kind, dtype, device) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(norms, expected, rtol=ROUNDING[dtype])
    assert state.keys() == wanted.keys()
    for a, b in [*zip(ours, theirs, strict=True), *((state[k], wanted[k]) for k in state)]:
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(float), b.astype(float), ROUNDING[dtype], ROUNDING[dtype])


def test_a_step_that_is_left_out_moves_and_counts_nothing(gpu: Any) -> None:
    """As if the skipped one had never been, and the host never waited."""
    results = []
    for skip in (True, False):
        params = parameters("float32", "cuda")
        optimizer = optim.AdamW(params, lr=0.01)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step(where=gpu.asarray(np.array(True)))
            if skip:
                set_gradients(params, 9)
                assert params[0].grad is not None
                params[0].grad[0, 0] = math.nan
                optimizer.step(where=gpu.isfinite(params[0].grad).all())
        results.append([to_numpy(p.data).tobytes() for p in params])
        assert int(optimizer.state_dict()["state"]["0.step"]) == 3
    assert results[0] == results[1]


def test_squares_beyond_float32_are_kept_where_a_state_has_them(gpu: Any) -> None:
    """Of a constant gradient each step is lr, whatever its size: also on a GPU that goes on from a state of the CPU."""
    gradient, weight, state = np.float32([1e25, 1, 2]), np.ones(3, np.float32), None
    for device in ("cpu", "cuda"):
        w = mg.Tensor(weight, device=device, requires_grad=True)
        optimizer = optim.AdamW([w], lr=0.1, weight_decay=0)
        if state:
            optimizer.load_state_dict(state)
        for _ in range(2):
            w.grad = mg.Tensor(gradient, device=device).data
            optimizer.step()
        weight, state = to_numpy(w.data).copy(), optimizer.state_dict()
    np.testing.assert_allclose(weight, 0.6, 1e-5)


def in_float64(gradients: list[Any], eps: float) -> Any:
    """Where AdamW's formula leads from 1 with lr=0.1 and no decay."""
    w, m, v = 1.0, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + eps)
    return w


@pytest.mark.parametrize("way", ["kernel", "no kernel"])
@pytest.mark.parametrize(("eps", "least"), [(1e-8, 1.0), (0.0, 1e-35)])
def test_squares_beyond_float32_move_as_in_float64(eps: float, least: float, way: str, gpu: Any) -> None:
    """Sizes from 1e-35, which count where eps is 0, to 3e37; each entry's sink or rise by up to 12 orders at each step.

    A state that is saved after two steps holds the squares themselves, and goes on with the same bits.
    """
    rng, n = np.random.default_rng(0), 37
    size = np.exp(rng.uniform(math.log(least), math.log(3e37), n))
    gradients = [
        np.float32((size * 10 ** rng.uniform(-12, 0, n)).clip(least) * rng.choice([-1, 1], n)) for _ in range(5)
    ]
    weights = []
    for resumed in (False, True):
        w = mg.Tensor(np.ones(n, np.float32), device="cuda", requires_grad=True)
        other = mg.Tensor(1.0, dtype="float32" if way == "kernel" else "float64", device="cuda", requires_grad=True)
        optimizer = optim.AdamW([w, other], lr=0.1, eps=eps, weight_decay=0)
        for place, g in enumerate(gradients):
            w.grad, other.grad = (mg.Tensor(a, dtype=t.dtype, device="cuda").data for a, t in ((g, w), (1.0, other)))
            optimizer.step()
            if resumed and place == 1:
                state = optimizer.state_dict()
                v = sum(0.999 ** (1 - k) * 0.001 * np.float64(gradients[k]) ** 2 for k in range(2))
                np.testing.assert_allclose(to_numpy(state["state"]["0.exp_avg_sq"]), v, 1e-5, 0 if eps == 0 else 1e-38)
                optimizer = optim.AdamW([w, other], lr=0.1, eps=eps, weight_decay=0)
                optimizer.load_state_dict(state)
        weights.append(to_numpy(w.data))
    np.testing.assert_allclose(weights[0], in_float64([np.float64(g) for g in gradients], eps), 2e-5, 2e-6)
    if way == "kernel":
        assert weights[0].tobytes() == weights[1].tobytes()
    np.testing.assert_allclose(weights[0], weights[1], 1e-6)


def test_steps_left_out_do_not_count_where_the_kernel_stops(gpu: Any) -> None:
    """A second parameter, of another dtype, joins after a step that was left out: the first's third is its second."""
    w = mg.Tensor(np.ones(3, np.float32), device="cuda", requires_grad=True)
    other = mg.Tensor(1.0, dtype="float64", device="cuda", requires_grad=True)
    optimizer, gradients = optim.AdamW([w, other], lr=0.1, weight_decay=0), np.float32([1.0, 2.0, 1e25])
    for place, where in enumerate((True, False, True)):
        w.grad = mg.Tensor(gradients * (1 + place), device="cuda").data
        other.grad = mg.Tensor(1.0, dtype="float64", device="cuda").data if place == 2 else None
        optimizer.step(where=gpu.asarray(np.array(where)))
    expected = in_float64([np.float64(gradients), 3 * np.float64(gradients)], 1e-8)
    np.testing.assert_allclose(to_numpy(w.data), expected, 1e-5)


def test_clipping_and_adam_wait_for_nothing(simulated: Any) -> None:
    params = parameters("float32", "cuda")
    optimizer = optim.AdamW(params)
    set_gradients(params, 0)
    before = simulated.synchronisations
    norm = optim.clip_grad_norm(params, 1.0)
    optimizer.step(where=norm < 1e9)
    assert simulated.synchronisations == before
    assert float(norm) > 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(bad: float, gpu: Any) -> None:
    params = parameters("float32", "cuda")
    set_gradients(params, 0)
    assert params[3].grad is not None
    params[3].grad[0] = bad
    before = [to_numpy(p.grad).tobytes() for p in params]
    assert not math.isfinite(float(optim.clip_grad_norm(params, 1.0)))
    assert [to_numpy(p.grad).tobytes() for p in params] == before
    with pytest.raises(FloatingPointError, match="first at parameter 3"):
        optim.clip_grad_norm(params, 1.0, error_if_nonfinite=True)


def test_a_factor_too_small_for_float32_keeps_its_digits(gpu: Any) -> None:
    """1e-5 / 4e38 is no normal number of float32; the clipped gradients are."""
    p = mg.Tensor([0.0, 0.0], dtype="float32", device="cuda", requires_grad=True)
    p.grad = mg.Tensor([3e38, 2e38], dtype="float32", device="cuda").data
    optim.clip_grad_norm(p, 1e-5)
    np.testing.assert_allclose(to_numpy(p.grad), np.array([3.0, 2.0]) / math.sqrt(13) * 1e-5, rtol=1e-6)
