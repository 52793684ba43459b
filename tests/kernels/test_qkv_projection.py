import numpy as np
import pytest
import torch
from support.kernel_checks import check, check_threads, derived, many_rows, of_the_threads, random, rng

import minigrad as mg
from minigrad.errors import ShapeError
from minigrad.kernels.qkv_projection import qkv_projection

F = torch.nn.functional


def joined(*args):
    """The three results side by side, as one array to differentiate."""
    return mg.concatenate(qkv_projection(*args), -1)


joined.definition = lambda *args: mg.concatenate(qkv_projection.definition(*args), -1)


def twin(x, wq, wk, wv, norm_weight=None, eps=1e-5):
    x = x if norm_weight is None else F.rms_norm(x, norm_weight.shape, norm_weight, eps)
    return torch.cat([F.linear(x, w) for w in (wq, wk, wv)], -1)


def arguments(lead, d_in, widths, normed):
    x, norm_weight, *weights = random((*lead, d_in), (d_in,), *((width, d_in) for width in widths))
    return [x, *weights, *([norm_weight, 0.1] if normed else [])]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), many_rows((3, 700))])
@pytest.mark.parametrize(("d_in", "widths"), [(1, (1, 1, 1)), (5, (5, 3, 2)), (33, (65, 16, 16))])
def test_is_torch(lead, d_in, widths, normed):
    """Also with fewer features of keys and values, and with several tiles, the last one shorter."""
    check(joined, twin, arguments(lead, d_in, widths, normed), length=max(d_in, *widths, *lead, 1) ** 2)


@pytest.mark.parametrize("wanted", range(5))
def test_one_gradient_alone(wanted):
    """What isn't asked for isn't computed, and what is asked for is the same."""
    args = arguments((10,), 3, (5, 2, 2), normed=True)
    _, full = derived(joined, args)
    _, (alone,) = derived(lambda leaf: joined(*args[:wanted], leaf, *args[wanted + 1 :]), [args[wanted]])
    np.testing.assert_allclose(alone, full[wanted], rtol=1e-13)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_results_of_which_some_are_not_used(used):
    """Those that nothing depends on send back zeros, or nothing where the definition runs."""
    args = arguments((4,), 3, (5, 2, 2), normed=True)
    upstream = [rng(1).standard_normal((4, width)) if place in used else None for place, width in enumerate((5, 2, 2))]

    def total(*leaves):
        parts = zip(qkv_projection(*leaves, *args[len(leaves) :]), upstream, strict=True)
        return sum(((part * mg.Tensor(g)).sum() for part, g in parts if g is not None), mg.Tensor(0.0))

    _, grads = derived(total, args)
    leaves = [torch.tensor(a, requires_grad=True) for a in args[:-1]]
    parts = zip(torch.split(twin(*leaves, 0.1), [5, 2, 2], -1), upstream, strict=True)
    sum((part * torch.tensor(g)).sum() for part, g in parts if g is not None).backward()
    for ours, leaf in zip(grads, leaves, strict=True):
        theirs = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        np.testing.assert_allclose(0 * theirs if ours is None else ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.cpu_only("a kernel that the CPU alone has")
def test_the_normalised_rows_are_not_kept():
    """One number a row is, beside the arguments."""
    args = [mg.Tensor(a, requires_grad=True) for a in arguments((6,), 3, (3, 3, 3), normed=True)[:-1]]
    q, _, _ = qkv_projection(*args)
    (node,) = q.node.parents  # q itself is a part of its result
    arrays = [a for a in node.residuals if isinstance(a, np.ndarray)]
    assert sorted(a.shape for a in arrays if all(a is not arg.data for arg in args)) == [(6,)]


@pytest.mark.parametrize(("lead", "d_in", "width"), [((0,), 3, 2), ((2, 3), 0, 2), ((2, 3), 3, 0)])
@pytest.mark.parametrize("normed", [False, True])
def test_empty(lead, d_in, width, normed):
    args = arguments(lead, d_in, (width,) * 3, normed)
    value, grads = derived(joined, args)
    np.testing.assert_array_equal(value, np.zeros((*lead, 3 * width)))
    for array, arg in zip(grads, args, strict=False):
        np.testing.assert_array_equal(array, np.zeros(arg.shape))


@pytest.mark.cpu_only("a kernel that the CPU alone has")
@pytest.mark.parametrize("normed", [False, True])
def test_half_precision_is_computed_in_float32(normed):
    args = [a.astype(np.float16) if isinstance(a, np.ndarray) else a for a in arguments((5,), 8, (8, 4, 4), normed)]
    wide = [a.astype(np.float64) if isinstance(a, np.ndarray) else a for a in args]
    exact_value, exact = derived(joined, wide)
    value, grads = derived(joined, args)
    for ours, theirs in zip([value, *grads], [exact_value, *exact], strict=True):
        assert ours.dtype == np.float16
        np.testing.assert_allclose(ours, theirs, rtol=2**-10, atol=2**-12)


def test_second_derivatives_are_those_of_the_definition():
    """Of three results at once."""
    args = arguments((4,), 3, (2, 2, 2), normed=True)
    found = []
    for call in (joined, joined.definition):
        leaves = [mg.Tensor(a, requires_grad=True) for a in args[:-1]]
        grads = mg.grad((call(*leaves, 0.1) ** 3).sum(), leaves, create_graph=True)
        found.append(mg.grad(sum((g * g).sum() for g in grads), leaves))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours.data, theirs.data, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("trained", [(1,), (2, 3), (0,), (4,)])
def test_second_derivatives_where_some_arguments_are_constants(trained):
    """Results that depend on none of the trained arguments have no part in them."""
    args, found = arguments((4,), 3, (2, 2, 2), normed=True), []
    for call in (joined, joined.definition):
        inputs = [mg.Tensor(a, requires_grad=place in trained) for place, a in enumerate(args[:-1])]
        leaves = [inputs[place] for place in trained]
        grads = mg.grad((call(*inputs, 0.1) ** 3).sum(), leaves, create_graph=True)
        found.append(mg.grad(sum((g * g).sum() for g in grads), leaves))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-11, atol=1e-12)


def test_each_result_has_the_dtype_of_its_own_product():
    """As three linear layers would: float64 beside float32, and two kinds of half precision side by side."""
    pytest.importorskip("ml_dtypes")
    for kinds in (("float32", "float64", "float32", "float16"), ("float32", "float16", "bfloat16", "float32")):
        arrays = arguments((4,), 3, (2, 2, 2), normed=False)
        x, *weights = (mg.Tensor(a, dtype=kind) for a, kind in zip(arrays, kinds, strict=True))
        for out, w in zip(qkv_projection(x, *weights), weights, strict=True):
            assert out.dtype == np.result_type(x.dtype, w.dtype)
            theirs = x.astype("float64").numpy() @ w.astype("float64").numpy().T
            np.testing.assert_allclose(out.numpy(), theirs, rtol=1e-5, atol=1e-5)


def test_the_norm_stays_in_float32_under_autocast():
    """x that float16 can't hold is normalised first."""
    x, w, norm_weight = mg.Tensor([[1e5, 2e5, 3e5]]), mg.Tensor(np.eye(3)), mg.ones(3)
    with mg.autocast("float16"):
        q, _, _ = qkv_projection(x.astype("float32"), *[w.astype("float32")] * 3, norm_weight)
    assert q.dtype == np.float16
    np.testing.assert_allclose(q.astype("float64").numpy(), [np.array([1, 2, 3]) / np.sqrt(14 / 3)], rtol=2e-3)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([(2, 3), (4, 2), (4, 3), (4, 3)], r"Expected: x \(\.\.\., d_in\), wq .*Got: \(2, 3\), \(4, 2\), \(4, 3\) and"),
        ([(2, 3), (4, 3), (3,), (4, 3)], r"wk \(d_k, d_in\)"),
        ([(2, 3), (4, 3), (4, 3), (4, 3), (4,)], r"Expected: a norm_weight of shape \(3,\).*Got: shape \(4,\)"),
        ([(3,), (4, 3), (4, 3), (4, 3), (1, 3)], r"Expected: a norm_weight of shape \(3,\).*Got: shape \(1, 3\)"),
    ],
)
def test_mistakes_are_explained(shapes, said):
    with pytest.raises(ShapeError, match=f"(?s){said}"):
        qkv_projection(*map(np.ones, shapes))


@of_the_threads
def test_threads():
    args = arguments((1500,), 64, (64, 32, 32), normed=True)
    args = [a.astype(np.float32) if isinstance(a, np.ndarray) else a for a in args]
    check_threads(joined, args)
