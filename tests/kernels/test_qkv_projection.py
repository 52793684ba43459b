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


def twin(x, wq, wk, wv, norm_weight=None, eps=1e-5, angles=None):
    x = x if norm_weight is None else F.rms_norm(x, norm_weight.shape, norm_weight, eps)
    q, k, v = (F.linear(x, w) for w in (wq, wk, wv))
    if angles is not None:
        q, k = turned(q, angles), turned(k, angles)
    return torch.cat([q, k, v], -1)


def turned(x, angles):
    """Neighbours in each head as a plane that is turned by its angle (T, d/2), by the matrix of the turn."""
    cos, sin = np.cos(angles), np.sin(angles)
    turn = torch.tensor(np.array([[cos, -sin], [sin, cos]]), dtype=x.dtype)
    pairs = x.unflatten(-1, (-1, angles.shape[1], 2))
    return torch.einsum("ijtk,...thkj->...thki", turn, pairs).flatten(-3)


def joined_and_turned(*args, angles):
    dtype = args[0].dtype
    return joined(*args, np.cos(angles).astype(dtype), np.sin(angles).astype(dtype))


joined_and_turned.definition = lambda *args, angles: joined.definition(
    *args, np.cos(angles).astype(args[0].dtype), np.sin(angles).astype(args[0].dtype)
)


def arguments(lead, d_in, widths, normed):
    x, norm_weight, *weights = random((*lead, d_in), (d_in,), *((width, d_in) for width in widths))
    return [x, *weights, *([norm_weight, 0.1] if normed else [])]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), many_rows((3, 700))])
@pytest.mark.parametrize(("d_in", "widths"), [(1, (1, 1, 1)), (5, (5, 3, 2)), (33, (65, 16, 16))])
def test_is_torch(lead, d_in, widths, normed):
    """Also with fewer features of keys and values, and with several tiles, the last one shorter."""
    check(joined, twin, arguments(lead, d_in, widths, normed), length=max(d_in, *widths, *lead, 1) ** 2)


@pytest.mark.parametrize("lead", [(1, 1), (5,), (7, 3), (0, 3), many_rows((9, 100)), many_rows((2, 700))])
@pytest.mark.parametrize(("half", "heads"), [(1, (3, 3)), (4, (4, 2))])
def test_turned_heads_are_torch(lead, half, heads):
    """One sequence and many, in tiles that end within one; as many heads of keys, and fewer."""
    widths = [2 * half * n for n in (*heads, 1)]
    angles = rng(2).uniform(-3, 3, (lead[-1], half))
    operation = lambda *args: joined_and_turned(*args, angles=angles)
    operation.definition = lambda *args: joined_and_turned.definition(*args, angles=angles)
    reference = lambda *args: twin(*args, angles=angles)
    check(operation, reference, arguments(lead, 6, widths, normed=True), length=max(*widths, *lead, 1) ** 2)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 4])
def test_one_gradient_of_turned_heads_alone(wanted):
    args, angles = arguments((2, 5), 3, (8, 4, 2), normed=True), rng(2).uniform(-3, 3, (5, 2))
    _, full = derived(joined_and_turned, args, angles=angles)
    operation = lambda leaf: joined_and_turned(*args[:wanted], leaf, *args[wanted + 1 :], angles=angles)
    _, (alone,) = derived(operation, [args[wanted]])
    np.testing.assert_allclose(alone, full[wanted], rtol=1e-13)


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


@pytest.mark.parametrize(
    ("cos", "sin", "said"),
    [
        ((5, 2), (5, 1), r"sin \(5, 1\)"),
        ((4, 2), (4, 2), r"x \(2, 5, 3\), cos \(4, 2\)"),
        ((1, 5, 2), (1, 5, 2), r"cos \(1, 5, 2\)"),
        ((5, 2), None, r"sin \(\)"),
        ((5, 3), (5, 3), r"heads of 6 features.*Got: 8 and 4"),
    ],
)
def test_tables_that_do_not_fit(cos, sin, said):
    tables = [None if shape is None else np.ones(shape) for shape in (cos, sin)]
    with pytest.raises(ShapeError, match=f"(?s){said}"):
        qkv_projection(*arguments((2, 5), 3, (8, 4, 2), normed=True), *tables)


@of_the_threads
@pytest.mark.parametrize("turns", [False, True])
def test_threads(turns):
    args = arguments((20, 75), 64, (64, 32, 32), normed=True)
    tables = rng(2).standard_normal((2, 75, 8)) if turns else ()
    args = [a.astype(np.float32) if isinstance(a, np.ndarray) else a for a in [*args, *tables]]
    operation = lambda *leaves: joined(*leaves[:5], 0.1, *args[6:])
    check_threads(operation, args[:5])
