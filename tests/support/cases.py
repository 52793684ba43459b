"""The cases that the registry's tests run over: every sample of every operation, and how results are compared.

Nothing here names an operation, apart from two lists of exceptions.
"""

import importlib
import pkgutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import minigrad as mg
import minigrad.kernels
import nn
from minigrad.engine.fused import Fused
from minigrad.engine.registry import Operation
from minigrad.testing import sample_inputs
from support.twins import twin

for package in (minigrad.kernels, nn):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

# Results are integers, booleans or constants: nothing to differentiate. The docstring of each says so.
WITHOUT_DERIVATIVE = {
    *("all", "any", "argmax", "argmin", "argsort", "count_nonzero", "isfinite", "isinf", "isnan", "stop_gradient"),
    "matrix_rank",
}
# Called by other operations and rules, whose arguments they may trust.
PARTS = {
    *("add_at", "clip_to_numbers", "einsum_explicit", "linear_recurrence", "pad_constant", "root_sum_power"),
    *("root_sum_square", "transfer", "gaussian", "normal_density", "normal_distribution", "one_minus_square"),
    *("over_cosh_square", "over_one_plus_square", "root_one_minus_square", "share"),
    *("add_windows", "bessel", "cbrt_slope", "decaying", "ive_slope", "polygamma_step", "scaled_tail", "sinc_slope"),
    *("solve_columns", "substitute", "sign_and_log", "orthogonal_triangle"),
    *("real_eigen", "solve_bands", "trajectory"),
    *("eigen", "eigenvalues", "singular", "cofactors", "least_squares", "nuclear", "polar"),
}
OPERATIONS = {k: op for k, op in sorted(mg.REGISTRY.items()) if op.function.__module__.startswith(("minigrad.", "nn."))}


@dataclass(frozen=True)
class Case:
    """One sample of one operation."""

    operation: Operation[Any]
    number: int

    def inputs(self, dtype: Any = np.float64) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with random arrays, the same at every call."""
        return sample_inputs(self.operation, zlib.crc32(self.operation.name.encode()), dtype)[self.number]

    def is_finite(self) -> bool:
        return all(np.isfinite(a).all() for a in opened(self.inputs()[0])[0])


def opened(args: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The floating-point arrays among ``args``, also in lists, and a function that puts others in their places."""

    def is_leaf(value: Any) -> bool:
        return isinstance(value, np.ndarray) and value.dtype.kind == "f"

    flat = [v for value in args for v in (value if isinstance(value, list) else [value]) if is_leaf(v)]

    def join(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        return [
            [next(rest) if is_leaf(v) else v for v in value] if isinstance(value, list)
            else next(rest) if is_leaf(value) else value
            for value in args
        ]  # fmt: skip

    return flat, join


def listed(value: Any) -> list[Any]:
    """A result as the list of the arrays in it."""
    return list(value) if isinstance(value, list | tuple) else [value]


def leaf(array: Any) -> mg.Tensor:
    """A Tensor that requires a gradient, on the memory of ``array``."""
    tensor = mg.asarray(array)
    tensor.requires_grad = True
    return tensor


def upstream(outs: Sequence[Any], seed: int = 7) -> list[Any]:
    """Random gradients of results."""
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=np.shape(out))).astype(out.dtype) for out in outs]


def differentiated(
    operation: Callable[..., Any], args: Any, kwargs: Any, layout: Any = lambda a: a
) -> tuple[list[Any], list[Any]]:
    """Results and gradients for random upstream gradients, as arrays; arrays go in as ``layout`` arranges them."""
    arrays, join = opened(args)
    leaves = [leaf(layout(a)) for a in arrays]
    outs = listed(operation(*join(leaves), **kwargs))
    recorded = [(out, layout(g)) for out, g in zip(outs, upstream(outs), strict=True) if out.requires_grad]
    found = mg.grad([o for o, _ in recorded], leaves, [g for _, g in recorded], allow_unused=True)
    grads = [np.zeros(x.shape, x.dtype) if g is None else g.data for x, g in zip(leaves, found, strict=True)]
    return [out.data for out in outs], grads


# How many roundings lie between two right ways to a number of a sample. The longest sums have 24 terms. To these
# roundings of either way come a product or two and one or two functions, which NumPy gives to 4 units.
ROUNDINGS = 64


def check_close(ours: Sequence[Any], theirs: Sequence[Any], roundings: int = ROUNDINGS) -> None:
    """The same shapes, dtypes and numbers, but for so many roundings of the largest of them (or of 1, if that is more).

    Terms of a sum may cancel, so what rounding leaves is measured against the terms, not against their sum.
    """
    for a, b in zip(ours, theirs, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if b.dtype.kind != "f":
            np.testing.assert_array_equal(a, b)
            continue
        largest = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0)))
        np.testing.assert_allclose(a, b, 0, roundings * float(np.finfo(b.dtype).eps) / 2 * largest)


CASES = [Case(op, k) for op in OPERATIONS.values() for k in range(len(sample_inputs(op, 0)))]
DIFFERENTIABLE = [case for case in CASES if case.operation.name not in WITHOUT_DERIVATIVE]
FINITE = [case for case in DIFFERENTIABLE if case.is_finite()]
IN_NUMPY, IN_TORCH = ([case for case in CASES if twin(case.operation, module)] for module in (np, torch))
WHOLE = [case for case in CASES if case.operation.name not in PARTS]
NUMPYS = [case for case in WHOLE if case in IN_NUMPY and case.operation.function.__module__.startswith("minigrad.ops")]
FUSED = [case for case in CASES if isinstance(case.operation, Fused)]


LACKING = {  # in CuPy: the function of SciPy that an operation calls
    "gammasgn": "gammasgn",
    "iv": "iv",
    "ive": "ive",
    "ive_slope": "ive",
    "jn": "jn",
    **dict.fromkeys(["eig", "eigvals", "real_eigen"], "eig"),
    **dict.fromkeys(["solve_banded", "solve_bands"], "solve_banded"),
    "solve_sylvester": "solve_sylvester",
    "sqrtm": "sqrtm",
    "trajectory": "odeint",
    **dict.fromkeys(["stdtr", "t.cdf", "t.sf", "t.logcdf", "t.logsf"], "stdtr"),
}


def over(cases: Sequence[Case]) -> Any:
    lacking = [[pytest.mark.cpu_only("CuPy has no such function")] * (c.operation.name in LACKING) for c in cases]
    names = [f"{case.operation.name}-{case.number}" for case in cases]
    return pytest.mark.parametrize(
        "case", [pytest.param(c, marks=m, id=n) for c, m, n in zip(cases, lacking, names, strict=True)]
    )


# ---- awkward inputs -------------------------------------------------------------------------------------------------


def scalars(arrays: Sequence[Any]) -> list[Any]:
    """The arrays cut to their first number, of shape ()."""
    return [a.reshape(-1)[:1].reshape(()) for a in arrays]


def emptied(arrays: Sequence[Any]) -> list[list[Any]]:
    """For each length among the shapes: the arrays with all axes of that length cut to length 0."""
    lengths = sorted({n for a in arrays for n in a.shape})
    return [[a[(..., *(slice(0 if m == n else None) for m in a.shape))] for a in arrays] for n in lengths]


LAYOUTS = [
    lambda a: np.flip(np.flip(a).copy()),
    lambda a: np.array(a.T, order="C").T,
    lambda a: np.repeat(a, 2, -1)[..., ::2] if a.ndim else a,
    lambda a: np.broadcast_to(a, a.shape),  # which can't be written to
]
