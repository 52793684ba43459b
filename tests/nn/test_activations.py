"""Activations and losses that are compositions: torch's values and gradients, at the kinks and far out too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import minigrad as mg
import nn.functional as F
from minigrad.errors import ArgumentError, ShapeError

RNG = np.random.default_rng(3)
FAR = np.array([-1e4, -800.0, -3.5, -0.7, -0.2, 0.1, 0.4, 1.7, 5.9, 6.5, 800.0, 1e4])
ACTIVATIONS: list[tuple[str, dict[str, Any]]] = [
    ("elu", {}), ("elu", {"alpha": 0.3}), ("celu", {}), ("celu", {"alpha": 2.0}), ("selu", {}), ("hardtanh", {}),
    ("hardtanh", {"min_val": -2.0, "max_val": 0.5}), ("relu6", {}), ("hardsigmoid", {}), ("hardswish", {}),
    ("mish", {}), ("softsign", {}), ("logsigmoid", {}), ("tanhshrink", {}), ("softshrink", {}),
    ("softshrink", {"lambd": 0.15}), ("hardshrink", {}), ("softplus", {}),
]  # fmt: skip


def both(name: str, arrays: Any, options: dict[str, Any], dtype: Any = np.float64) -> None:
    """Value and gradients for a random upstream gradient are torch's."""
    arrays = [np.asarray(a, dtype) for a in arrays]
    ours = [mg.Tensor(a, requires_grad=True) for a in arrays]
    theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
    named = {{"axis": "dim", "keepdims": "keepdim"}.get(key, key): value for key, value in options.items()}
    out, wanted = getattr(F, name)(*ours, **options), getattr(torch.nn.functional, name)(*theirs, **named)
    exact = dtype == np.float64 and name != "hardsigmoid"  # of which torch rounds 1/6 to float32
    digits = {"rtol": 1e-10, "atol": 1e-12} if exact else {"rtol": 1e-4, "atol": 1e-6}
    np.testing.assert_allclose(out.data, wanted.detach().numpy(), **digits)
    assert out.dtype == dtype
    up = np.random.default_rng(0).normal(size=out.shape).astype(dtype)
    out.backward(up)
    wanted.backward(torch.tensor(up))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.grad, b.grad.numpy(), **digits)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("name", "options"), ACTIVATIONS)
def test_activation(name: str, options: dict[str, Any], dtype: Any) -> None:
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        both(name, [FAR], options, dtype)


@pytest.mark.parametrize(("name", "options"), ACTIVATIONS)
def test_activation_has_two_derivatives(name: str, options: dict[str, Any]) -> None:
    x = np.array([-4.1, -1.3, -0.33, 0.21, 0.9, 2.6])
    assert mg.gradcheck(lambda v: getattr(F, name)(v, **options), [x])
    assert mg.gradgradcheck(lambda v: getattr(F, name)(v, **options), [x])


def test_nan_stays_and_lists_are_taken() -> None:
    for name, options in ACTIVATIONS:
        assert np.isnan(getattr(F, name)(np.array([np.nan]), **options)).all(), name
        assert getattr(F, name)([1.0, -1.0], **options).shape == (2,)


A, B, C = (RNG.normal(size=(4, 3)) for _ in range(3))
SIGNS = np.array([1.0, -1.0, -1.0, 1.0])
SHARES, COUNTS = RNG.uniform(0.05, 0.95, (4, 3)), RNG.poisson(2.0, (4, 3)).astype(float)
LOSSES: list[tuple[str, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = [  # name, differentiable, constant
    ("l1_loss", (A, B), (), {}),
    ("smooth_l1_loss", (A, B), (), {}), ("smooth_l1_loss", (A, B), (), {"beta": 0.4}),
    ("smooth_l1_loss", (A, B), (), {"beta": 0.0}),
    ("binary_cross_entropy", (SHARES, SHARES[::-1]), (), {}),
    ("poisson_nll_loss", (A,), (COUNTS,), {}), ("poisson_nll_loss", (SHARES,), (COUNTS,), {"log_input": False}),
    ("poisson_nll_loss", (A,), (COUNTS,), {"full": True}),
    ("gaussian_nll_loss", (A, B, SHARES), (), {}), ("gaussian_nll_loss", (A, B, SHARES), (), {"full": True}),
    ("soft_margin_loss", (A * 300,), (np.sign(B),), {}),
    ("hinge_embedding_loss", (A,), (np.sign(B),), {}), ("hinge_embedding_loss", (A,), (np.sign(B),), {"margin": 0.3}),
    ("margin_ranking_loss", (A, B), (np.sign(C),), {"margin": 0.2}),
    ("cosine_embedding_loss", (A, B), (SIGNS,), {}), ("cosine_embedding_loss", (A, B), (SIGNS,), {"margin": 0.1}),
    ("triplet_margin_loss", (A, B, C), (), {}), ("triplet_margin_loss", (A, B, C), (), {"swap": True, "p": 3.0}),
]  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss[0]}-{loss[3]}")
def test_loss(loss: Any, reduction: str) -> None:
    name, arrays, constants, options = loss
    ours = [mg.Tensor(a, requires_grad=True) for a in arrays]
    theirs = [torch.tensor(a.copy(), requires_grad=True) for a in arrays]
    out = getattr(F, name)(*ours, *constants, reduction=reduction, **options)
    fixed = [torch.tensor(c) for c in constants]
    wanted = getattr(torch.nn.functional, name)(*theirs, *fixed, reduction=reduction, **options)
    np.testing.assert_allclose(out.data, wanted.detach().numpy(), rtol=1e-10, atol=1e-12)
    out.sum().backward()
    wanted.sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.grad, b.grad.numpy(), rtol=1e-9, atol=1e-11)


def test_distances() -> None:
    for options in ({}, {"axis": 0}):
        both("cosine_similarity", [A, B], options)
    both("cosine_similarity", [A[:, None], B[None]], {"axis": 2})
    for options in ({}, {"p": 1.0}, {"keepdims": True}):
        both("pairwise_distance", [A, B], options)
    for options in ({}, {"axis": 0}, {"p": 3.0}, {"eps": 2.0}):
        both("normalize", [A], options)
    zero = mg.Tensor(np.zeros((1, 3)), requires_grad=True)
    F.cosine_similarity(zero, mg.asarray(A[:1])).sum().backward()
    F.normalize(zero).sum().backward()
    assert np.isfinite(zero.grad).all()


def test_margins_far_beyond_are_zero_and_nan_stays() -> None:
    """A comparison is False for NaN, and 0 times an infinite number is NaN."""
    at, sign = np.array([np.inf, np.nan]), np.array([-1.0, -1.0])
    np.testing.assert_array_equal(F.hinge_embedding_loss(at, sign, reduction="none"), [0, np.nan])
    np.testing.assert_array_equal(F.margin_ranking_loss(at, np.zeros(2), -sign, reduction="none"), [0, np.nan])
    rows = np.array([[np.nan, 3.0], [0.0, 2.0]])
    np.testing.assert_array_equal(F.normalize(rows), [[np.nan, np.nan], [0, 1]])
    np.testing.assert_array_equal(F.cosine_similarity(rows, np.ones((2, 2))), [np.nan, 2 / (2 * np.sqrt(2.0))])


def test_prelu() -> None:
    both("prelu", [A, np.array([0.3])], {})
    both("prelu", [A, np.array([0.3, 0.1, -0.2])], {})
    both("prelu", [RNG.normal(size=(2, 3, 4)), np.array([0.3, 0.1, -0.2])], {})
    with pytest.raises(ShapeError, match="each channel"):
        F.prelu(A, np.ones(2))


def test_wrong_arguments_are_refused() -> None:
    for call, kind in (
        (lambda: F.hardtanh(A, 1.0, 1.0), ArgumentError),
        (lambda: F.celu(A, 0.0), ArgumentError),
        (lambda: F.softshrink(A, -1.0), ArgumentError),
        (lambda: F.smooth_l1_loss(A, B, beta=-1.0), ArgumentError),
        (lambda: F.l1_loss(A, B[:2]), ShapeError),
        (lambda: F.binary_cross_entropy(A * 9, SHARES), ArgumentError),
        (lambda: F.gaussian_nll_loss(A, B, -SHARES), ArgumentError),
        (lambda: F.l1_loss(A, B, reduction="most"), ArgumentError),
    ):
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.hint


def test_binary_cross_entropy_at_certainty() -> None:
    """A logarithm of 0 counts as -100, as in torch, and has no slope."""
    p = mg.Tensor([0.0, 1.0, 1.0], requires_grad=True)
    out = F.binary_cross_entropy(p, np.array([1.0, 1.0, 0.0]), reduction="none")
    assert out.tolist() == [100.0, 0.0, 100.0]
    out.sum().backward()
    assert np.isfinite(p.grad).all()
