import itertools

import numpy as np
import pytest
import torch
from support.kernel_checks import check, check_threads, derived, error, many_rows, of_the_threads, random

import minigrad as mg
from minigrad.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError
from minigrad.kernels.cross_entropy import cross_entropy
from minigrad.kernels.linear_cross_entropy import linear_cross_entropy

INF = np.inf
OPTIONS = list(itertools.product(["mean", "sum", "none"], [0.0, 0.1]))
options = pytest.mark.parametrize(("reduction", "smoothing"), OPTIONS)


def twin(logits, targets, ignore_index=-100, label_smoothing=0.0, reduction="mean"):
    """torch's, with the classes on the last axis."""
    flat = targets.reshape(-1, targets.shape[-1]) if targets.is_floating_point() else targets.reshape(-1)
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), flat, None, None, ignore_index, None, reduction, label_smoothing
    )
    return loss.reshape(logits.shape[:-1]) if reduction == "none" else loss


def ids(shape, classes, ignored=None):
    generator = np.random.default_rng(3)
    targets = generator.integers(0, classes, shape)
    return targets if ignored is None else np.where(generator.random(shape) < 0.3, ignored, targets)


def soft(shape, classes):
    weights = np.random.default_rng(4).random((*shape, classes))
    return weights / weights.sum(-1, keepdims=True)


# ---- against torch --------------------------------------------------------------------------------------------------


@options
@pytest.mark.parametrize(
    ("shape", "classes"), [((), 5), ((7,), 2), ((3, 4), 65), many_rows((3000,), 67), ((3,), 40_000)]
)
@pytest.mark.parametrize("scale", [1, 100])
def test_classes(reduction, smoothing, shape, classes, scale):
    """At scale 100 the exponentials overflow unless the maximum is taken off."""
    targets = ids(shape, classes, -100 if shape else None)
    args = [*random((*shape, classes), scale=scale), targets, -100, smoothing, reduction]
    check(cross_entropy, twin, args, length=max(classes, targets.size), upstream_scale=targets.size)


@options
@pytest.mark.parametrize(("shape", "classes"), [((), 5), ((3, 4), 65), many_rows((700,), 67)])
def test_probabilities(reduction, smoothing, shape, classes):
    """Float targets are differentiable too."""
    rows = int(np.prod(shape))
    args = [*random((*shape, classes)), soft(shape, classes), -100, smoothing, reduction]
    check(cross_entropy, twin, args, length=max(classes, rows), upstream_scale=rows)


def linear_twin(x, weight, targets, *rest):
    return twin(x @ weight.T, targets, *rest)


@options
@pytest.mark.parametrize(("shape", "classes", "d"), [((3, 4), 65, 7), many_rows((200,), 67, 33)])
@pytest.mark.parametrize(("chunk", "slices"), [(1 << 26, 2048), (1 << 26, 20), (1 << 14, 20)])
def test_linear(reduction, smoothing, shape, classes, d, chunk, slices, monkeypatch):
    """Head and loss in one, in one chunk of rows and in many, the weight's gradient in one piece and in several."""
    monkeypatch.setattr("minigrad.kernels.linear_cross_entropy.MOST_BYTES", chunk)
    monkeypatch.setattr("minigrad.kernels.linear_cross_entropy.CLASSES", slices)
    rows = int(np.prod(shape))
    args = [*random((*shape, d), (classes, d)), ids(shape, classes, 2), 2, smoothing, reduction]
    check(linear_cross_entropy, linear_twin, args, length=max(classes, d, rows), upstream_scale=rows)


# ---- edges ----------------------------------------------------------------------------------------------------------


@options
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_all_ignored(dtype, reduction, smoothing):
    """Nothing counts: 0 and gradients of exactly 0, also where the logits are no numbers."""
    logits, x, weight = (a.astype(dtype) for a in random((2, 3, 5), (2, 3, 4), (5, 4)))
    logits[0, 0], logits[0, 1] = np.nan, -INF
    targets = np.full((2, 3), -100)
    calls = [(cross_entropy, [logits, targets]), (linear_cross_entropy, [x, weight, targets])]
    for operation, args in calls + [(operation.definition, args) for operation, args in calls[1:]]:
        value, grads = derived(operation, [*args, -100, smoothing, reduction])
        np.testing.assert_array_equal(value, np.zeros((2, 3) if reduction == "none" else ()))
        for g in grads:
            np.testing.assert_array_equal(g, np.zeros_like(g))


def test_smoothing_leaves_ignored_rows_out():
    """Two rows, one ignored: mean and gradient are those of the other row alone, numerator and denominator."""
    (logits,) = random((2, 5))
    both, (gboth,) = derived(cross_entropy, [logits, np.array([1, 9]), 9, 0.1])
    one, (gone,) = derived(cross_entropy, [logits[:1], np.array([1]), 9, 0.1])
    assert both == one
    np.testing.assert_array_equal(gboth, np.concatenate([gone, np.zeros((1, 5))]))


def test_one_class():
    """There is nothing to learn: loss and gradient are 0, but for the rounding of ln e^x."""
    for dtype, small in ((np.float64, 1e-14), (np.float32, 1e-6)):
        value, (gx,) = derived(cross_entropy, [random((7, 1))[0].astype(dtype), np.zeros(7, int), -100, 0.0, "sum"])
        assert abs(value) < small
        assert np.abs(gx).max() < small


def test_uniform_logits():
    """ln V whatever the target and the smoothing; the gradient is (1/V - q) / rows."""
    for smoothing in (0.0, 0.3):
        value, (gx,) = derived(cross_entropy, [np.full((4, 8), 3.0), np.arange(4), -100, smoothing])
        np.testing.assert_allclose(value, np.log(8), rtol=1e-14)
        q = (1 - smoothing) * np.eye(4, 8) + smoothing / 8
        np.testing.assert_allclose(gx, (1 / 8 - q) / 4, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_masked_classes(dtype):
    """Logits of -∞ are classes that can't be; a row of only -∞ costs ∞ and moves nothing."""
    logits = np.array([[0.0, 0.0, -INF], [-INF, -INF, -INF], [0.0, -INF, 0.0]], dtype)
    with np.errstate(all="raise"):
        value, (gx,) = derived(cross_entropy, [logits, np.array([1, 0, 1]), -100, 0.0, "none"])
    np.testing.assert_allclose(value, [np.log(2), INF, INF], rtol=1e-6)
    np.testing.assert_array_equal(gx, [[0.5, -0.5, 0], [0, 0, 0], [0.5, -1, 0.5]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_where_the_target_is_nearly_sure(dtype):
    """Targets of a probability of 1 but for e^-2 to e^-15: p - 1 is minus what all others have, to some units."""
    (x,) = (a.astype(dtype) for a in random((14, 100)))
    x[:, 1] = np.log(100) + x.max(1) + np.arange(2, 16)
    _, (gx,) = derived(cross_entropy, [x, np.ones(14, int), -100, 0.0, "sum"])
    weights = np.exp(x.astype(np.longdouble))
    others = np.delete(weights, 1, 1).sum(1) / weights.sum(1)
    np.testing.assert_allclose(gx[:, 1], -others.astype(float), rtol=20 * np.finfo(dtype).eps)


def test_an_offset_changes_nothing():
    """Logits near 1000 keep their digits in float32."""
    (x,) = random((6, 50))
    x, targets = np.round(x * 64) / 64, ids((6,), 50)
    expected, (gexpected,) = derived(cross_entropy, [x, targets])
    for offset in (1024, -1024):
        value, (gx,) = derived(cross_entropy, [(x + offset).astype(np.float32), targets])
        assert error(value, expected) < 1e-6
        assert error(gx, gexpected) < 1e-6


def test_half_precision_in_float32():
    """The mean over 70 000 rows: count and sum leave the range of float16, the loss doesn't."""
    value, (gx,) = derived(cross_entropy, [np.zeros((70_000, 2), np.float16), np.zeros(70_000, np.uint8)])
    assert value == np.float16(np.log(2))
    assert gx.dtype == np.float16


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows(reduction):
    value, (gx,) = derived(cross_entropy, [np.zeros((0, 3)), np.zeros(0, int), -100, 0.0, reduction])
    np.testing.assert_array_equal(value, np.zeros(0 if reduction == "none" else ()))
    assert gx.shape == (0, 3)
    _, (gx, gw) = derived(
        linear_cross_entropy, [np.zeros((0, 4)), np.ones((3, 4)), np.zeros(0, int), -100, 0.0, reduction]
    )
    assert gx.shape == (0, 4)
    np.testing.assert_array_equal(gw, np.zeros((3, 4)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int8, np.int32])
def test_any_integers(dtype):
    """An ignore_index that the dtype can't hold ignores nothing."""
    (logits,) = random((4, 9))
    targets = np.array([0, 8, 3, 3])
    assert cross_entropy(logits, targets.astype(dtype)) == cross_entropy(logits, targets)


# ---- the gradients that the forward pass made -----------------------------------------------------------------------


def test_gradients_are_handed_over_once():
    """A second backward pass makes them anew; an upstream gradient scales them; no two passes share memory."""
    x, weight = (mg.Tensor(a, requires_grad=True) for a in random((6, 4), (5, 4)))
    loss = linear_cross_entropy(x, weight, ids((6,), 5))
    loss.backward(np.float64(3), retain_graph=True)
    first = [x.grad, weight.grad]
    x.grad = weight.grad = None
    loss.backward(np.float64(3))
    for a, b in zip(first, [x.grad, weight.grad], strict=True):
        assert error(a, b) < 1e-15
        assert not np.shares_memory(a, b)


def test_only_what_is_needed():
    x, weight = random((6, 4), (5, 4))
    targets = ids((6,), 5)
    _, (gx, gw) = derived(linear_cross_entropy, [x, weight, targets])
    for leaf, expected, call in [
        (mg.Tensor(x, requires_grad=True), gx, lambda t: linear_cross_entropy(t, weight, targets)),
        (mg.Tensor(weight, requires_grad=True), gw, lambda t: linear_cross_entropy(x, t, targets)),
    ]:
        call(leaf).backward()
        np.testing.assert_array_equal(leaf.grad, expected)


def test_second_order():
    """Hessian of the loss in the logits: diag(p) - p pᵀ."""
    (logits,) = random((5,))
    x = mg.Tensor(logits, requires_grad=True)
    (g,) = mg.grad(cross_entropy(x, np.array(2)), x, create_graph=True)
    hessian = np.stack([mg.grad(g[i], x, retain_graph=True)[0].data for i in range(5)])
    p = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(hessian, np.diag(p) - np.outer(p, p), atol=1e-15)


@of_the_threads
def test_threads():
    x, w = (a.astype(np.float32) for a in random((2048, 64), (256, 64)))
    targets = ids((2048,), 256, -100)
    check_threads(cross_entropy, [x @ w.T, targets, -100, 0.1])
    check_threads(linear_cross_entropy, [x, w, targets, -100, 0.1], blas_alone=True)


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [5, -1, 2**40])
def test_class_out_of_range(wrong):
    for call in (
        lambda: cross_entropy(np.zeros((2, 5)), np.array([0, wrong])),
        lambda: cross_entropy.definition(np.zeros((2, 5)), np.array([0, wrong])),
        lambda: linear_cross_entropy(np.zeros((2, 3)), np.zeros((5, 3)), np.array([0, wrong])),
    ):
        with pytest.raises(IndexRangeError, match=rf"(?s)class from 0 to 4.*class {wrong}\b"):
            call()


@pytest.mark.parametrize(
    ("args", "kind", "message"),
    [
        ((np.zeros((2, 5)), np.zeros(3, int)), ShapeError, "targets that fit logits"),
        ((np.zeros((2, 5)), np.zeros(2)), ShapeError, "class ids are integers"),
        ((np.zeros((2, 5)), np.zeros((2, 1), int)), ShapeError, "one class id for each row"),
        ((np.zeros(2, int), np.zeros((2, 5))), ShapeError, "logits come first"),
        ((np.zeros((2, 5)), np.zeros((5, 2))), ShapeError, "probabilities of all classes"),
        ((np.zeros((2, 2)), np.array([1, 2])), IndexRangeError, "classes count from 0"),
        ((np.zeros((2, 5)), np.zeros(2, bool)), DTypeError, "booleans"),
        ((np.zeros((2, 0)), np.zeros(2, int)), ShapeError, "at least one class"),
        ((np.zeros((2, 5)), np.zeros(2, int), -100, 0.0, "avg"), ArgumentError, "'avg'"),
        ((np.zeros((2, 5)), np.zeros(2, int), -100, 1.5), ArgumentError, "label_smoothing from 0 to 1"),
    ],
)
def test_errors(args, kind, message):
    with pytest.raises(kind, match=message):
        cross_entropy(*args)


def test_linear_errors():
    with pytest.raises(DTypeError, match="cross_entropy\\(linear"):
        linear_cross_entropy(np.zeros((2, 3)), np.zeros((5, 3)), np.zeros((2, 5)))
    with pytest.raises(ShapeError, match=r"weight \(V, d\)"):
        linear_cross_entropy(np.zeros((2, 3)), np.zeros((5, 4)), np.zeros(2, int))
