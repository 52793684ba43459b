"""``odeint``: states and derivatives of equations whose solutions are known, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.linalg

import minigrad as mg
from minigrad.errors import ArgumentError, GraphError, ShapeError

pytestmark = pytest.mark.cpu_only("SciPy integrates on the CPU")
odeint = mg.integrate.odeint
TIGHT = {"rtol": 1e-11, "atol": 1e-11}
A = np.array([[-0.5, 2.0], [-1.0, 0.3]])
Y0 = np.array([1.0, -0.5])


def linear(y: Any, t: Any, a: Any) -> Any:
    return mg.matmul(a, y)


@pytest.mark.parametrize("times", [[0.0, 0.7, 1.5], [1.5, 0.2], [0.3, 0.3, 0.9], [2.0]], ids=str)
def test_the_matrix_exponential_solves_a_linear_equation(times: list[float]) -> None:
    """Value, gradients of every argument and of the times: those of ``exp((t - t₀) A) y₀``."""
    closed = lambda y0, t, a: mg.stack([mg.matmul(mg.linalg.expm(a * (s - t[0])), y0) for s in t])
    ours = lambda y0, t, a: odeint(linear, y0, t, (a,), **TIGHT)
    args, u = (Y0, np.array(times), A), np.random.default_rng(0).normal(size=(len(times), 2))
    (value, pull), (known, known_pull) = mg.vjp(ours, *args), mg.vjp(closed, *args)
    np.testing.assert_allclose(value.numpy(), known.numpy(), rtol=1e-9)
    for got, expected in zip(pull(u), known_pull(u), strict=True):
        np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-8, atol=1e-9)


def test_a_list_with_tensors_is_a_state() -> None:
    y = mg.Tensor(2.0, dtype="float64", requires_grad=True)
    end = odeint(lambda y, t: -y, [y, 1.0], [0.0, 1.5], **TIGHT)[-1]
    np.testing.assert_allclose(end.numpy(), [2 * np.exp(-1.5), np.exp(-1.5)], rtol=1e-9)
    np.testing.assert_allclose(mg.grad(end.sum(), y)[0].numpy(), np.exp(-1.5), rtol=1e-9)


def test_higher_derivatives() -> None:
    """The Hessian of ``y₀ e^(-k t)`` by k, y₀ and t."""

    def last(p: Any) -> Any:
        return odeint(lambda y, t, k: -k * y, p[:1], mg.stack([0.0, p[2]]), (p[1],), **TIGHT)[-1, 0]

    y0, k, t = p = np.array([1.3, 0.7, 0.9])
    e = np.exp(-k * t)
    expected = [[0, -t * e, -k * e], [-t * e, y0 * t**2 * e, y0 * (k * t - 1) * e],
                [-k * e, y0 * (k * t - 1) * e, y0 * k**2 * e]]  # fmt: skip
    np.testing.assert_allclose(mg.hessian(last, p).numpy(), expected, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(mg.jvp(last, p, [0.0, 1.0, 0.0])[1].item(), -y0 * t * e, rtol=1e-7)


def test_what_scipy_takes() -> None:
    """Lists as slopes, the time first, arguments in containers; with plain arrays a function need know NumPy alone."""
    t = np.linspace(0.0, 1.0, 3)
    known = scipy.integrate.odeint(lambda y, t: [y[1], -y[0] + t], [1.0, 0.0], t)
    np.testing.assert_allclose(odeint(lambda y, t: np.array([y[1], -y[0] + t]), [1.0, 0.0], t), known, rtol=1e-7)
    w = mg.Tensor([1.0, 2.0], requires_grad=True)

    def force(t: Any, y: Any, p: Any, name: Any) -> Any:
        assert name == "spring"
        return [y[1], -p["w"][0] * y[0] + t * p["w"][1] / p["k"]]

    out = odeint(force, [1.0, 0.0], t, ({"w": w, "k": 2}, "spring"), tfirst=True)
    np.testing.assert_allclose(out.numpy(), known, rtol=1e-6)
    out[-1, 0].backward()
    both = odeint(lambda y, t, w, k: -k * y * w[0], [1.0], t, (w, mg.Tensor(2.0)))[-1]
    np.testing.assert_allclose(both.numpy(), np.exp(-2.0), rtol=1e-6)  # a Tensor that isn't recorded keeps its place
    value = lambda w: scipy.integrate.odeint(lambda y, t: [y[1], -w[0] * y[0] + t * w[1] / 2], [1.0, 0.0], t, **TIGHT)
    step = 1e-5
    slopes = [(value(w.data + h) - value(w.data - h))[-1, 0] / (2 * step) for h in step * np.eye(2)]
    np.testing.assert_allclose(w.grad, slopes, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtypes(dtype: str) -> None:
    """Computed in float64, given in the dtype of y0; each gradient in that of its argument."""
    y0, a = mg.Tensor(Y0, dtype=dtype, requires_grad=True), mg.Tensor(A, requires_grad=True)
    out = odeint(linear, y0, np.array([0.0, 1.0]), (a,))
    assert out.dtype == dtype
    np.testing.assert_allclose(out.numpy()[-1], scipy.linalg.expm(A) @ Y0, rtol=2e-3)
    out.sum().backward()
    assert y0.grad.dtype == dtype and a.grad.dtype == "float64"
    np.testing.assert_allclose(y0.grad, 1 + scipy.linalg.expm(A).sum(0), rtol=2e-3)


def test_fast_decay_needs_times_in_between() -> None:
    """Of ``e^(-k t)``: run back it grows, by e^100 from one end to the other."""
    slope = lambda k, times: mg.grad(lambda k: odeint(lambda y, t, k: -k * y, np.ones(1), times, (k,)).sum())(k).item()
    times = np.linspace(0.0, 1.0, 101)
    np.testing.assert_allclose(slope(np.array(100.0), times), -(times * np.exp(-100 * times)).sum(), rtol=1e-5)
    with pytest.raises(ArgumentError, match="LSODA can follow"):
        slope(np.array(100.0), times[[0, -1]])


def test_refusals() -> None:
    t, w = np.array([0.0, 1.0]), mg.Tensor(2.0, requires_grad=True)
    with pytest.raises(GraphError, match="one that func reads from outside"):
        odeint(lambda y, t: -w * y, Y0, t)
    with mg.no_grad():
        odeint(lambda y, t: -w * y, Y0, t)
    with pytest.raises(ArgumentError, match="ascending or descending"):
        odeint(lambda y, t: -y, Y0, [0.0, 2.0, 1.0])
    with pytest.raises(ArgumentError, match="LSODA can follow"):
        odeint(lambda y, t: y * y, [1.0], [0.0, 2.0])  # 1 / (1 - t)
    with pytest.raises(ShapeError, match="slopes of shape"):
        odeint(lambda y, t: y[:1], Y0, t)
    for y0, times in [(np.eye(2), t), (Y0, np.eye(2)), (Y0, [])]:
        with pytest.raises(ShapeError, match="y0 of shape"):
            odeint(lambda y, t: -y, y0, times)
    with pytest.raises(ZeroDivisionError):
        odeint(lambda y, t: y / (1 // 0), Y0, t)
