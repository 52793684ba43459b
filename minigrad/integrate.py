"""Solutions of ordinary differential equations, SciPy's, differentiable in everything that they depend on.

>>> import minigrad as mg
>>> rate = mg.Tensor(2.0, requires_grad=True)
>>> y = mg.integrate.odeint(lambda y, t, rate: -rate * y, np.ones(1), np.array([0.0, 1.0]), (rate,))
>>> y[-1].sum().backward(); print(y.data[-1].round(4), rate.grad.round(4))  # e^-2, and -e^-2
[0.1353] -0.1353
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, array_module, array_of, cast_to, is_floating
from minigrad.creation import asarray
from minigrad.engine.core import primitive
from minigrad.engine.recording import enable_grad, is_grad_enabled
from minigrad.engine.registry import sample
from minigrad.errors import ArgumentError, GraphError, ShapeError
from minigrad.functional import vjp
from minigrad.messages.arguments import as_floats
from minigrad.messages.explain import describe, explained
from minigrad.ops import astype, concatenate, ravel, reshape, stack, sum, zeros_like
from minigrad.ops._scipy import cupy_lacks, scipy_module
from minigrad.tensor import Tensor
from minigrad.trees import filled, leaves

__all__ = ["odeint"]


def _logistic(y: Any, t: Any, theta: Any) -> Any:
    """A right-hand side for the tests."""
    return theta[:1] * t - theta[1] * y * y


@primitive(part_of="odeint", precision="wide", torch=False, numpy=False, samples=[
    sample((1,), np.array([0.1, 0.3]), (2,), _logistic, {"rtol": 1e-11, "atol": 1e-11})])  # fmt: skip
def trajectory(y0: Array, t: Array, theta: Array, func: Any, options: Any) -> Array:
    """The states (times, n) of ``y' = func(y, t, theta)`` at the times ``t``, from ``y0`` at the first of them.

    func     takes arrays, or Tensors to be differentiated, and gives as many numbers as y has
    options  of ``scipy.integrate.odeint``, which computes in float64
    """
    if array_module(y0, t, theta) is not np:
        raise cupy_lacks("odeint")
    start, times, theta = (np.asarray(x, np.float64) for x in (y0, t, theta))

    def slope(y: Array, s: float) -> Array:
        return array_of(func(y, s, theta))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is in the message, too
        states, info = scipy_module("integrate").odeint(slope, start, times, full_output=True, **options)
    if info["message"] not in ("Integration successful.", "Nothing was done; the integration time was 0."):
        hint = "mxstep= allows more steps, rtol= and atol= larger ones; a stiff equation may end in a singularity"
        raise ArgumentError("an equation that LSODA can follow to the last time", info["message"], hint)
    return cast_to(states, y0.dtype if is_floating(y0.dtype) else np.dtype(np.float64))


@trajectory.defjoint("y0", "t", "theta")
def _adjoint(
    g: Array, t: Array, theta: Array, out: Array, t_dtype: Any, theta_dtype: Any, func: Any, options: Any
) -> tuple[Array, Array, Array]:
    """The adjoint a(t) runs back in time: ``a' = -aᵀ ∂f/∂y``, and gᵢ is added to it at each time (Pontryagin, 1962).

    The gradient of theta is the integral of ``aᵀ ∂f/∂theta``; that of a time tᵢ is ``gᵢ f``, and of the first ``-a f``.
    The state runs back with a, from what the forward pass found at each time, so its errors don't add up.
    """
    n = out.shape[-1]

    def backward(state: Any, s: Any, theta: Any) -> Any:
        y, a = state[:n], state[n : 2 * n]
        slope, pull = vjp(lambda y, theta: func(y, s, theta), y, theta)
        return concatenate([slope, *pull(-a)])

    a, of_theta, of_times = zeros_like(out[0]), zeros_like(theta), []
    for i in range(t.shape[0] - 1, 0, -1):
        a = a + g[i]
        of_times.append(_product(g[i], func(out[i], t[i], theta)))
        state = concatenate([out[i], a, of_theta])
        state = trajectory(state, stack([t[i], t[i - 1]]), theta, backward, options)[1]
        a, of_theta = state[n : 2 * n], state[2 * n :]
    of_times.append(-_product(a, func(out[0], t[0], theta)))
    return a + g[0], astype(stack(of_times[::-1]), t_dtype), astype(of_theta, theta_dtype)


def _product(a: Array, slope: Any) -> Array:
    """``a f``, of arrays or of Tensors as ``a`` is: a right-hand side gives Tensors of both."""
    return sum(a * (slope if isinstance(a, Tensor) else array_of(slope)))


def _of_one_vector(func: Callable[..., Any], args: Any, tfirst: bool) -> tuple[Any, Callable[..., Any]]:
    """The recorded tensors in ``args`` as one vector, and ``func`` as a function of (y, t, that vector)."""
    values = [v for _, v in leaves(args)]
    recorded = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
    theta: Any = concatenate([ravel(v) for v in recorded]) if recorded else np.zeros(0)

    def slopes(y: Any, s: Any, theta: Any) -> Any:
        made, place = [], 0
        for v in recorded:
            made.append(reshape(theta[place : place + v.size], v.shape))
            place += v.size
        rest = iter(made)
        given = filled(args, (next(rest) if any(v is r for r in recorded) else v for v in values))
        slope = asarray(func(s, y, *given) if tfirst else func(y, s, *given))
        if slope.shape != y.shape:
            raise ShapeError(f"slopes of shape {y.shape}, as y has", describe(slope), "func(y, t, *args) gives y'")
        return slope

    return theta, slopes


def _start_and_times(y0: Any, t: Any) -> tuple[Any, Any]:
    """A state (n,) and times (k,) in order, as arrays or Tensors."""
    y0, t = as_floats(y0, t)
    y0 = reshape(y0, (1,)) if y0.ndim == 0 else y0
    if y0.ndim != 1 or t.ndim != 1 or not t.shape[0]:
        got = f"{describe(y0)} and {describe(t)}"
        raise ShapeError("y0 of shape (n,), and times (k,)", got, "ravel a larger state")
    times = array_of(t)
    if not ((times[1:] >= times[:-1]).all() or (times[1:] <= times[:-1]).all()):
        raise ArgumentError("times in order, ascending or descending", describe(t), "np.sort(t)")
    return y0, t


def _check_captured(slopes: Callable[..., Any], y0: Any, t: Any, theta: Any) -> None:
    """Refuse a right-hand side that reads a recorded tensor which ``args`` doesn't have: it would get no gradient."""
    if is_grad_enabled():
        with enable_grad():
            found = slopes(array_of(y0), array_of(t)[0], array_of(theta))
        if found.requires_grad:
            hint = "pass it: odeint(func, y0, t, (w,)), and func(y, t, w)"
            raise GraphError("recorded tensors as args of odeint", "one that func reads from outside", hint)


@explained
def odeint(
    func: Callable[..., Any],
    y0: Any,
    t: Any,
    args: Any = (),
    *,
    rtol: float | None = None,
    atol: float | None = None,
    h0: float = 0.0,
    hmax: float = 0.0,
    mxstep: int = 0,
    tfirst: bool = False,
) -> Any:
    """The states (times, n) of ``y' = func(y, t, *args)`` at the times t, from y0 (n,) at the first of them.

    func     gives the n slopes; it gets arrays, and Tensors where its derivative is needed, so it uses functions that
             take both. Tensors from outside whose gradient is wanted are passed in ``args``, in containers if one likes
    t        the times, ascending or descending
    tfirst   whether it is ``func(t, y, *args)``
    options  tolerances 1.5e-8 by default, steps: as in SciPy, whose LSODA (``scipy.integrate.odeint``) computes in
             float64, on the CPU alone

    Gradients flow to y0, t and args by the adjoint equation, which costs about two more solutions for each time, and
    their derivatives likewise. They are as exact as the tolerances. Where LSODA gives up, ArgumentError; so it does on
    the way back through a decay by e^-100 between two times, which is growth then: more times in between help.

    >>> y = odeint(lambda y, t: -y, np.ones(1), np.array([0.0, 1.0]))
    >>> print(y[-1].round(6))
    [0.367879]
    """
    theta, slopes = _of_one_vector(func, args, tfirst)
    y0, t = _start_and_times(y0, t)
    _check_captured(slopes, y0, t, theta)
    options = {"rtol": rtol, "atol": atol, "h0": h0, "hmax": hmax, "mxstep": mxstep}
    return trajectory(y0, t, theta, slopes, options)
