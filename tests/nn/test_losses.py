"""Losses beside torch's, with gradients in float targets too, and at their corners."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as TF

import minigrad as mg
import nn.functional as F
from minigrad.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError

RNG = np.random.default_rng(3)
X = RNG.standard_normal((4, 5))
P = RNG.dirichlet(np.ones(5), 4)
LOG_Q = np.log(RNG.dirichlet(np.ones(5), 4))
W = RNG.uniform(0.5, 2, 5)
IDS = np.array([0, 4, -100, 2])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("ours", "theirs", "inputs"),
    [
        (F.mse_loss, TF.mse_loss, (X, P)),
        (F.huber_loss, TF.huber_loss, (3 * X, P)),
        (
            lambda x, t, reduction: F.huber_loss(x, t, reduction, 0.25),
            lambda x, t, reduction: TF.huber_loss(x, t, reduction, 0.25),
            (X, P),
        ),
        (F.binary_cross_entropy_with_logits, TF.binary_cross_entropy_with_logits, (30 * X, P)),
        (
            lambda x, t, reduction: F.binary_cross_entropy_with_logits(x, t, W, reduction, 2 * W),
            lambda x, t, reduction: TF.binary_cross_entropy_with_logits(
                x, t, torch.tensor(W), reduction=reduction, pos_weight=torch.tensor(2 * W)
            ),
            (X, P),
        ),
        (F.cross_entropy, TF.cross_entropy, (X, P)),
    ],
)
def test_loss_is_that_of_torch_with_gradients_in_both(agree, ours, theirs, inputs, reduction):
    compare(agree, ours, theirs, inputs, reduction)


@pytest.mark.parametrize("reduction", ["batchmean", "sum", "none"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_is_that_of_torch_with_gradients_in_both(agree, log_target, reduction):
    def ours(x, t, reduction):
        return F.kl_div(x, t, reduction, log_target)

    def theirs(x, t, reduction):
        return TF.kl_div(x, t, reduction=reduction, log_target=log_target)

    compare(agree, ours, theirs, (LOG_Q, np.log(P) if log_target else P), reduction)


def test_kl_div_mean_is_over_elements(agree):  # torch says so too, with a warning
    agree(F.kl_div(LOG_Q, P), F.kl_div(LOG_Q, P, "none").mean())


def compare(agree, ours, theirs, inputs, reduction):
    xs = [mg.Tensor(x, requires_grad=True) for x in inputs]
    ts = [torch.tensor(x, requires_grad=True) for x in inputs]
    y, t = ours(*xs, reduction=reduction), theirs(*ts, reduction=reduction)
    agree(y, t)
    y.sum().backward()
    t.sum().backward()
    for x, tx in zip(xs, ts, strict=True):
        agree(x.grad, tx.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ids", [IDS, np.full(4, -100)])
@pytest.mark.parametrize("smoothing", [None, 0.0, 0.1])
def test_class_losses_leave_out_ignored_targets(agree, ids, reduction, smoothing):
    """nll_loss (no smoothing) and cross_entropy; where nothing counts, the loss and its gradient are exactly 0."""
    logits = mg.Tensor(X, requires_grad=True)
    there = torch.tensor(X, requires_grad=True)
    if smoothing is None:
        y = F.nll_loss(F.log_softmax(logits, -1), ids, reduction=reduction)
        t = TF.nll_loss(TF.log_softmax(there, -1), torch.tensor(ids), reduction=reduction)
    else:
        options = {"label_smoothing": smoothing, "reduction": reduction}
        y = F.cross_entropy(logits, ids, **options)
        t = TF.cross_entropy(there, torch.tensor(ids), **options)
    y.sum().backward()
    t.sum().backward()
    if (ids == -100).all():
        np.testing.assert_array_equal(y.data, np.zeros(y.shape))
        np.testing.assert_array_equal(logits.grad, np.zeros(X.shape))
    else:
        agree(y, t)
        agree(logits.grad, there.grad)


def test_nll_loss_takes_leading_axes():
    log_p = np.log(np.array([[[0.25, 0.75], [0.5, 0.5]]]))
    np.testing.assert_allclose(F.nll_loss(log_p, [[1, 0]], reduction="none"), -np.log([[0.75, 0.5]]))


def test_losses_are_finite_at_the_corners():
    x = mg.Tensor([-1e4, 1e4, 0.0], requires_grad=True)
    loss = F.binary_cross_entropy_with_logits(x, np.array([0.0, 1.0, 1.0]), reduction="sum")
    loss.backward()
    np.testing.assert_allclose(loss.data, np.log(2))
    np.testing.assert_allclose(x.grad, [0, 0, -0.5])
    q, p = mg.Tensor([-np.inf, np.log(0.5)], requires_grad=True), mg.Tensor([0.0, 1.0], requires_grad=True)
    loss = F.kl_div(q, p, reduction="sum")
    loss.backward()
    np.testing.assert_allclose(loss.data, np.log(2))
    np.testing.assert_allclose(q.grad, [0, -1])
    np.testing.assert_allclose(p.grad, [0, 1 + np.log(2)])


def test_second_derivatives():
    assert mg.gradgradcheck(lambda x, t: F.binary_cross_entropy_with_logits(x, t), [X, P])
    assert mg.gradgradcheck(lambda x, t: F.kl_div(x, t), [LOG_Q, P])


def test_lists_are_taken_as_arrays():
    assert F.mse_loss([1.0, 3.0], [1, 1]) == 2
    assert F.nll_loss([[-1.0, -2.0]], [1]) == 2
    assert F.relu([-1.0, 2.0]).tolist() == [0, 2]


def test_one_hot_is_that_of_torch():
    ids = np.array([[0, 2], [1, 0]])
    for count in (None, 5):
        theirs = TF.one_hot(torch.tensor(ids), -1 if count is None else count).numpy()
        np.testing.assert_array_equal(F.one_hot(ids, count).data, theirs)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: F.mse_loss(mg.ones((3, 1)), mg.ones(3)), ShapeError),
        (lambda: F.mse_loss(mg.ones(3), mg.ones(3), "average"), ArgumentError),
        (lambda: F.nll_loss(mg.ones((3, 2)), [0, 1, 2]), IndexRangeError),
        (lambda: F.nll_loss(mg.ones((3, 2)), [0, -1, 1]), IndexRangeError),
        (lambda: F.nll_loss(mg.ones((3, 2)), [0, 1]), ShapeError),
        (lambda: F.nll_loss(mg.ones((3, 2)), [0.0, 1.0, 1.0]), DTypeError),
        (lambda: F.one_hot([0, 3], 3), IndexRangeError),
        (lambda: F.one_hot([-1]), IndexRangeError),
    ],
)
def test_bad_input_is_explained(call, kind):
    with pytest.raises(kind, match=r"(?s)Expected: .*Got: "):
        call()


@pytest.mark.cpu_only("a GPU doesn't look for a sum that left the range: docs/cuda.md")
def test_means_of_losses_whose_sum_overflows():
    """float32 ends at 3.4e38."""
    x = mg.Tensor(np.array([2e19, 0, 0, 0], np.float32), requires_grad=True)
    loss = F.mse_loss(x, np.zeros(4, np.float32))
    loss.backward()
    np.testing.assert_allclose([loss.item(), x.grad[0]], [1e38, 1e19], 1e-6)

    log_p = mg.Tensor(np.array([[-3e38, 0], [-3e38, 0]], np.float32), requires_grad=True)
    loss = F.nll_loss(log_p, np.array([0, 0]))
    loss.backward()
    np.testing.assert_allclose(loss.item(), 3e38, 1e-6)
    np.testing.assert_array_equal(log_p.grad, [[-0.5, 0], [-0.5, 0]])

    x = mg.Tensor(np.full(4, 3e38, np.float32), requires_grad=True)
    loss = F.binary_cross_entropy_with_logits(x, np.zeros(4, np.float32))
    loss.backward()
    np.testing.assert_allclose(loss.item(), 3e38, 1e-6)
    np.testing.assert_array_equal(x.grad, 0.25)

    log_q = mg.Tensor(np.full((2, 1), -3e38, np.float32), requires_grad=True)
    loss = F.kl_div(log_q, np.ones((2, 1), np.float32), reduction="batchmean")
    loss.backward()
    np.testing.assert_allclose(loss.item(), 3e38, 1e-6)
    np.testing.assert_array_equal(log_q.grad, -0.5)


def test_huber_loss_at_delta_has_one_slope_and_refuses_others():
    x = mg.Tensor([2.0, -2.0, 0.0], requires_grad=True)
    loss = F.huber_loss(x, np.zeros(3), "none", 2.0)
    loss.sum().backward()
    np.testing.assert_array_equal(loss.data, [2.0, 2.0, 0.0])
    np.testing.assert_array_equal(x.grad, [2.0, -2.0, 0.0])
    with pytest.raises(ArgumentError, match="delta"):
        F.huber_loss(X, P, delta=0)
