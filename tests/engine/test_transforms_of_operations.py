"""What transforms do with each registered operation: forward mode, and rows of gradients in one pass.

Nothing here names an operation. The facts that its table declares, ``linear`` and ``stacks``, are tested by what is
computed with them. ``HYPOTHESIS_PROFILE=deep`` differentiates forward mode on every sample, else on one an operation.
"""

from typing import Any

import numpy as np
from hypothesis import settings
from support.cases import DIFFERENTIABLE, FINITE, check_close, leaf, listed, opened, over, upstream

import minigrad as mg
from minigrad.forward import Calls, products
from minigrad.rows import pull_rows


def function_of(case) -> tuple[Any, list[Any]]:
    """The operation as a function of its floating-point arrays, with one result or a tuple of them; the arrays."""
    args, kwargs = case.inputs()
    arrays, join = opened(args)

    def function(*tensors):
        outs = [out for out in listed(case.operation(*join(tensors), **kwargs)) if out.dtype.kind == "f"]
        return outs[0] if len(outs) == 1 else tuple(outs)

    return function, arrays


def differences(function, arrays, tangents) -> list[Any]:
    """Central differences along the tangents."""
    step = 1e-6
    up, down = (listed(function(*map(mg.asarray, moved))) for moved in (
        [a + step * t for a, t in zip(arrays, tangents, strict=True)],
        [a - step * t for a, t in zip(arrays, tangents, strict=True)],
    ))  # fmt: skip
    return [(a.numpy() - b.numpy()) / (2 * step) for a, b in zip(up, down, strict=True)]


def twice_reversed(function, arrays, tangents) -> list[Any]:
    """``J t`` as the gradient of ``uᵀ J t`` by u."""
    leaves = [leaf(a) for a in arrays]
    outs = [out for out in listed(function(*leaves)) if out.requires_grad]
    u = [leaf(np.zeros(out.shape)) for out in outs]
    pulled = mg.grad(outs, leaves, u, create_graph=True, allow_unused=True)
    pairs = [(p, t) for p, t in zip(pulled, tangents, strict=True) if p is not None and p.requires_grad]
    found = mg.grad([p for p, _ in pairs], u, [t for _, t in pairs], allow_unused=True) if pairs else [None] * len(u)
    return [np.zeros(v.shape) if f is None else f.numpy() for f, v in zip(found, u, strict=True)]


@over(FINITE)
def test_forward_mode(case):
    """``J t`` is what central differences give, and to rounding the reverse rule taken twice; recorded or not."""
    function, arrays = function_of(case)
    tangents = upstream(arrays)
    out, product = mg.jvp(function, arrays, tangents)
    check_close([o.numpy() for o in listed(out)], [o.numpy() for o in listed(function(*map(mg.asarray, arrays)))], 0)
    found = [p.numpy() for p in listed(product)]
    for ours, theirs in zip(found, differences(function, arrays, tangents), strict=True):
        np.testing.assert_allclose(ours, theirs, 5e-4, 1e-6 * max(1.0, float(np.abs(theirs).max(initial=0))))
    check_close(found, twice_reversed(function, arrays, tangents), roundings=512)
    recorded = mg.jvp(function, [leaf(a) for a in arrays], [leaf(t) for t in tangents])[1]
    check_close([p.numpy() for p in listed(recorded)], found)
    for k in range(len(arrays)):  # and along one argument alone
        alone = [t if i == k else None for i, t in enumerate(tangents)]
        zeros = [t if i == k else t * 0 for i, t in enumerate(tangents)]
        ours = [p.numpy() for p in listed(mg.jvp(function, arrays, alone)[1])]
        check_close(ours, [p.numpy() for p in listed(mg.jvp(function, arrays, zeros)[1])])


@over(FINITE)
def test_stacks_of_tangents(case):
    """A stack of tangents in one walk gives the stack of what each gives alone; by all arguments, and by one.

    On arrays, and recorded.
    """
    function, arrays = function_of(case)
    leaves = [leaf(a) for a in arrays]
    with Calls() as calls:
        outs = listed(function(*leaves))
    stacks = [np.stack([upstream(arrays, seed)[k] for seed in range(3)]) for k in range(len(arrays))]
    for wanted in {tuple(range(len(arrays))), *((k,) for k in range(len(arrays)))}:
        each = [products(outs, {leaves[k]: mg.asarray(stacks[k][n]) for k in wanted}, calls, False) for n in range(3)]
        for create_graph in (False, True):
            found = products(outs, {leaves[k]: mg.asarray(stacks[k]) for k in wanted}, calls, create_graph, 3)
            check_stacks(found, each, outs)


def check_stacks(found, each, like):
    """What a transform found in one pass is the stack of what each of three gave; None for nothing."""
    for k, (ours, x) in enumerate(zip(found, like, strict=True)):
        rows = [row[k] for row in each]
        if ours is None:
            assert all(row is None or not mg.asarray(row).numpy().any() for row in rows)
        else:
            check_close([mg.asarray(ours).numpy()], [np.stack([mg.asarray(row).numpy() for row in rows])])
            assert ours.shape == (3, *x.shape)


ONE_EACH = list({case.operation.name: case for case in reversed(FINITE)}.values())


@over(FINITE if settings.default.max_examples > 1000 else ONE_EACH)
def test_gradient_of_forward_mode(case):
    """``J t`` can be differentiated, by the point and by the tangent."""
    function, arrays = function_of(case)
    tangents = upstream(arrays)
    n = len(arrays)
    assert mg.gradcheck(lambda *both: mg.jvp(function, both[:n], both[n:])[1], [*arrays, *tangents])


@over(DIFFERENTIABLE)
def test_rows_of_gradients(case):
    """A stack of gradients in one pass gives the stack of what each gives alone: on arrays, and recorded."""
    function, arrays = function_of(case)
    leaves = [leaf(a) for a in arrays]
    for out in listed(function(*leaves)):
        if not out.requires_grad:
            continue
        rows = mg.asarray(np.stack([upstream([out], seed)[0] for seed in range(3)]), device=out.device).data
        each = [mg.grad(out, leaves, row, retain_graph=True, allow_unused=True) for row in rows]
        for create_graph in (False, True):
            check_stacks(pull_rows(out, leaves, rows, create_graph), each, leaves)
