"""Gradient clipping against closed forms and PyTorch; zero, huge, tiny and non-finite norms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minigrad as mg
import optim
from minigrad.backend import is_array
from minigrad.errors import ArgumentError, DTypeError, NonFiniteError
from minigrad.machine import parallel


def with_gradients(*gradients, dtype="float64"):
    params = []
    for gradient in gradients:
        p = mg.Tensor(np.zeros(np.shape(gradient), dtype), requires_grad=True)
        p.grad = np.array(gradient, dtype)
        params.append(p)
    return params


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_closed_form(dtype):
    a, b = params = with_gradients([3.0], [[4.0]], dtype=dtype)
    norm = optim.clip_grad_norm((p for p in params), max_norm=1.0)
    assert is_array(norm) and norm.shape == ()
    assert norm == 5.0
    factor = 1 / (5 + 1e-6)
    assert a.grad.dtype == b.grad.dtype == dtype
    rtol = np.finfo(dtype).eps
    np.testing.assert_allclose([a.grad.item(), b.grad.item()], [3 * factor, 4 * factor], rtol=rtol)


@given(
    shapes=st.lists(st.sampled_from([(), (3,), (2, 5), (0,), (4, 1, 2)]), min_size=1, max_size=4),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    max_norm=st.floats(0, 20),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 99),
)
def test_follows_torch(shapes, scale, max_norm, dtype, seed):
    rng = np.random.default_rng(seed)
    gradients = [np.asarray(scale * rng.standard_normal(shape), dtype) for shape in shapes]
    params = with_gradients(*gradients, dtype=dtype)
    twins = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape in shapes]
    for twin, gradient in zip(twins, gradients, strict=True):
        twin.grad = torch.from_numpy(gradient.copy())
    norm = optim.clip_grad_norm(params, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(twins, max_norm)
    rtol = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(norm, expected.item(), rtol=rtol)
    # torch rounds the factor to the dtype: half of the smallest number, times g. Both round the result.
    least = float(np.finfo(dtype).smallest_subnormal)
    for p, twin, g in zip(params, twins, gradients, strict=True):
        atol = least * (1 + abs(g).max(initial=0) / 2)
        np.testing.assert_allclose(p.grad, twin.grad.numpy(), rtol=rtol, atol=atol)
    if float(norm) + 1e-6 <= max_norm:
        assert all(p.grad.tobytes() == g.tobytes() for p, g in zip(params, gradients, strict=True))


def test_frozen_missing_and_repeated_parameters_count_once_or_not_at_all():
    a, frozen, missing = with_gradients([3.0, 4.0], [100.0], [1.0])
    frozen.requires_grad, missing.grad = False, None
    assert optim.clip_grad_norm([a, frozen, missing, a], max_norm=2.5) == 5.0
    np.testing.assert_allclose(a.grad, [1.5, 2.0], rtol=1e-6)
    assert frozen.grad == 100.0
    assert optim.clip_grad_norm([missing], 1.0) == 0.0
    assert optim.clip_grad_norm([], 1.0).shape == ()
    np.testing.assert_allclose(optim.clip_grad_norm(a, math.inf), 2.5, rtol=1e-6)  # a single Tensor, no bound


def test_a_zero_norm_changes_nothing():
    (p,) = with_gradients([0.0, -0.0])
    assert optim.clip_grad_norm([p], 1.0) == 0.0
    assert p.grad.tobytes() == np.array([0.0, -0.0]).tobytes()


@pytest.mark.parametrize(
    ("dtype", "entry", "count"),
    [
        ("float16", 60000.0, 4),
        ("float16", 6e-8, 4),
        ("float32", 1e30, 9),
        ("float32", 1e-30, 9),
        ("float32", 3e38, 4),
        ("float64", 1e200, 4),
        ("float64", 1e-200, 4),
        ("float64", 5e-324, 4),
    ],
)
def test_squares_neither_overflow_nor_vanish(dtype, entry, count):
    entry = float(np.array(entry, dtype))
    a, b = params = with_gradients([entry] * (count - 1), entry, dtype=dtype)
    norm = optim.clip_grad_norm(params, max_norm=1.0)
    assert float(norm) == pytest.approx(math.sqrt(count) * entry, rel=1e-12)
    if entry > 1:
        np.testing.assert_allclose(a.grad.astype(float), 1 / math.sqrt(count), rtol=1e-3)
    else:
        assert (a.grad == entry).all()
    assert a.grad.dtype == b.grad.dtype == dtype


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("bad", "expected"), [(math.inf, "inf"), (-math.inf, "inf"), (math.nan, "nan")])
def test_a_norm_that_is_not_finite_is_returned_and_changes_nothing(bad, expected, dtype):
    params = with_gradients([3.0, 4.0], [bad, 1.0], [bad], dtype=dtype)
    params[1].name = "layers.0.weight"
    before = [p.grad.tobytes() for p in params]
    assert str(float(optim.clip_grad_norm(params, max_norm=1.0))) == expected
    assert [p.grad.tobytes() for p in params] == before
    with pytest.raises(NonFiniteError, match=r"norm of \w+, first at parameter 'layers.0.weight'"):
        optim.clip_grad_norm(params, max_norm=1.0, error_if_nonfinite=True)
    assert [p.grad.tobytes() for p in params] == before


def test_read_only_and_strided_gradients():
    params = with_gradients(np.zeros((2, 3)), np.zeros((3, 2)))
    params[0].grad = np.broadcast_to(2.0, (2, 3))
    params[1].grad = np.arange(6.0).reshape(2, 3).T
    norm = optim.clip_grad_norm(params, max_norm=1.0)
    assert float(norm) == pytest.approx(math.sqrt(6 * 4 + 55))
    np.testing.assert_allclose(params[0].grad, np.full((2, 3), 2 / norm), rtol=1e-6)
    np.testing.assert_allclose(params[1].grad, np.arange(6.0).reshape(2, 3).T / norm, rtol=1e-6)


@pytest.mark.cpu_only("threads of the CPU")
def test_the_same_bits_on_one_and_two_threads():
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(shape).astype("float32") for shape in ((900, 700), (5,), (300000,))]
    before = parallel.get_num_threads()
    try:
        bits = []
        for threads in (1, 2):
            parallel.set_num_threads(threads)
            params = with_gradients(*gradients, dtype="float32")
            norm = optim.clip_grad_norm(params, max_norm=1.0)
            bits.append([norm.tobytes(), *(p.grad.tobytes() for p in params)])
    finally:
        parallel.set_num_threads(before)
    assert bits[0] == bits[1]
    exact = math.sqrt(sum(float((g.astype(float) ** 2).sum()) for g in gradients))
    assert float(norm) == pytest.approx(exact, rel=1e-6)


def test_a_loss_scale_that_is_a_power_of_two_changes_no_weight():
    weights = []
    for scale in (1.0, 1024.0):
        (p,) = with_gradients([3.0 * scale, 4.0 * scale], dtype="float32")
        p.grad = p.grad / np.float32(scale)
        assert optim.clip_grad_norm([p], max_norm=1.0) == 5.0
        np.testing.assert_allclose(p.grad, [0.6, 0.8], rtol=1e-6)
        optim.AdamW([p]).step()
        weights.append(p.data.tobytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_bad_bound_is_refused(max_norm):
    with pytest.raises(ArgumentError, match="max_norm"):
        optim.clip_grad_norm(with_gradients([1.0]), max_norm)


def test_what_is_no_tensor_is_refused():
    with pytest.raises(DTypeError, match="ndarray at position 0"):
        optim.clip_grad_norm([np.ones(2)], 1.0)


def test_a_factor_below_the_numbers_of_float32_keeps_its_digits():
    p = mg.Tensor(np.zeros(10000, np.float32), requires_grad=True)
    p.grad = np.full(10000, 3e38, np.float32)
    assert optim.clip_grad_norm([p], 0.01) == pytest.approx(3e40, rel=1e-6)
    np.testing.assert_allclose(p.grad, 1e-4, 1e-6)


@pytest.mark.parametrize("max_norm", [1.54e-40, 3e-44, 1e-45])
@pytest.mark.cpu_only("numbers that kernels of a GPU count as 0")
def test_a_factor_that_is_no_normal_number_is_exact(max_norm):
    (p,) = with_gradients([3.0, 4.0, 50.0, -7e-3], dtype="float32")
    g = p.grad.astype(float)
    norm = float(optim.clip_grad_norm([p], max_norm))
    np.testing.assert_array_equal(p.grad, (g * (max_norm / (norm + 1e-6))).astype(np.float32))


def test_a_norm_that_no_gradient_alone_makes_infinite_is_told_too():
    params = [mg.Tensor(1.0, requires_grad=True) for _ in range(2)]
    for p in params:
        p.grad = np.array(1.7e308)
    with pytest.raises(NonFiniteError, match="first at"), np.errstate(over="ignore"):
        optim.clip_grad_norm(params, 1.0, error_if_nonfinite=True)
