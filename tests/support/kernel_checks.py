"""How a fused operation is held against its definition and against torch, and its threads against each other."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import minigrad as mg
from minigrad.machine.parallel import blas_threads

torch.set_num_threads(1)  # its workers would spin in wait, and take the core from ours

DTYPES = [np.float64, np.float32]
rng = np.random.default_rng
many_rows = lambda *case: pytest.param(*case, marks=pytest.mark.cpu_only("rows for several tiles of the CPU"))
of_the_threads = pytest.mark.cpu_only("threads of the CPU")


def random(*shapes, scale=1.0, seed=0):
    """Normal float64 arrays of these shapes."""
    generator = rng(seed)
    return [np.asarray(scale * generator.standard_normal(shape)) for shape in shapes]


def error(ours, theirs):
    """Largest error over largest value (over 0.01: some gradients are 0 but for rounding)."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max(initial=0) / max(np.abs(theirs).max(initial=0), 0.01)


def derived(operation, args, upstream=None, **params):
    """The result of ``operation`` and the gradients of its floating-point arrays, for a given upstream gradient."""
    leaves = [mg.Tensor(a, requires_grad=True) if is_floating(a) else a for a in args]
    out = operation(*leaves, **params)
    out.backward(np.ones(out.shape, out.dtype) if upstream is None else upstream.astype(out.dtype))
    return out.data, [leaf.grad for leaf in leaves if isinstance(leaf, mg.Tensor)]


def is_floating(value):
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def check(operation, twin, args, length=1, upstream_scale=1.0, **params):
    """Value and gradients beside torch in float64 and beside the definition, in both dtypes.

    ``length`` is how many numbers are summed: the error of float32 may grow with its root. ``upstream_scale`` brings
    small gradients to the order of 1.
    """
    for dtype in DTYPES:
        cast = [a.astype(dtype) if is_floating(a) else a for a in args]
        before = [np.copy(a) if isinstance(a, np.ndarray) else a for a in cast]
        upstream = upstream_scale * rng(1).standard_normal(np.shape(operation(*cast, **params)))
        value, grads = derived(operation, cast, upstream, **params)
        assert value.dtype == dtype
        assert all(g.dtype == dtype for g in grads)
        for a, b in zip(cast, before, strict=True):
            np.testing.assert_array_equal(a, b)  # no argument was written to
        limit = 1e-12 if dtype == np.float64 else 1e-6 * max(10, math.sqrt(length))
        expected, wanted = torch_derived(twin, cast, upstream.astype(dtype), **params)
        same, defined = derived(operation.definition, cast, upstream, **params)
        for ours, theirs in zip([value, *grads] * 2, [expected, *wanted, same, *defined], strict=True):
            assert error(ours, theirs) <= limit


def torch_derived(twin, args, upstream, **params):
    leaves = [
        torch.tensor(a.astype(np.float64), requires_grad=True) if is_floating(a)
        else torch.tensor(a) if isinstance(a, np.ndarray) else a
        for a in args
    ]  # fmt: skip
    out = twin(*leaves, **params)
    out.backward(torch.tensor(upstream.astype(np.float64)))
    grads = [leaf.grad.numpy() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return out.detach().numpy(), grads


def check_threads(operation, args, blas_alone=False, **params):
    """One and two threads give the same bits; the arrays must be large enough for the pool.

    ``blas_alone``: but for the matrix products of BLAS, whose rounding depends on its threads; they stay on one.
    """
    results, before = [], mg.get_num_threads()
    for threads in (1, 2, 2):
        mg.set_num_threads(threads)
        with blas_threads(1) if blas_alone else nullcontext():
            value, grads = derived(operation, args, **params)
        results.append([value, *grads])
    mg.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
