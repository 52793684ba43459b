import numpy as np
import pytest
import torch
from support.kernel_checks import check, check_threads, derived, many_rows, of_the_threads, random

from minigrad.errors import ShapeError
from minigrad.kernels import swiglu_ffn as module
from minigrad.kernels.swiglu_ffn import swiglu_ffn


def twin(x, w1, w3, w2, norm_weight=None, eps=1e-5):
    linear = torch.nn.functional.linear
    x = x if norm_weight is None else torch.nn.functional.rms_norm(x, norm_weight.shape, norm_weight, eps)
    return linear(torch.nn.functional.silu(linear(x, w1)) * linear(x, w3), w2)


def arguments(lead, d_in, d_ff, d_out, normed=False):
    *args, norm_weight = random((*lead, d_in), (d_ff, d_in), (d_ff, d_in), (d_out, d_ff), (d_in,))
    return [*args, norm_weight, 0.1] if normed else args


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), many_rows((5, 500))])
@pytest.mark.parametrize(("d_in", "d_ff", "d_out"), [(1, 1, 1), (5, 33, 3), (16, 65, 16)])
def test_is_torch(lead, d_in, d_ff, d_out, normed):
    """Also with several chunks and tiles, the last ones shorter."""
    check(swiglu_ffn, twin, arguments(lead, d_in, d_ff, d_out, normed), length=max(d_in, d_ff, *lead, 1) ** 2)


@pytest.mark.parametrize("wanted", range(5))
def test_one_gradient_alone(wanted, monkeypatch):
    """What isn't asked for isn't computed, and what is asked for is the same; over three chunks."""
    monkeypatch.setattr(module, "CHUNK", 20)
    args = arguments((10,), 3, 5, 2, normed=True)
    _, full = derived(swiglu_ffn, args)
    _, (alone,) = derived(lambda leaf: swiglu_ffn(*args[:wanted], leaf, *args[wanted + 1 :]), [args[wanted]])
    np.testing.assert_allclose(alone, full[wanted], rtol=1e-13)


@pytest.mark.cpu_only("a kernel that the CPU alone has")
def test_keeps_two_arrays_as_wide_as_the_hidden_layer():
    import minigrad as mg

    x, *weights = (mg.Tensor(a, requires_grad=True) for a in arguments((6,), 3, 5, 2, normed=True)[:-1])
    out = swiglu_ffn(x, *weights)
    arrays = [a for a in out.node.residuals if isinstance(a, np.ndarray)]
    made = [a.shape for a in arrays if all(a is not arg.data for arg in (x, *weights))]
    assert sorted(made) == [(6,), (6, 5), (6, 5)]  # 1/rms, gate and up
    with mg.no_grad():
        np.testing.assert_array_equal(swiglu_ffn(x, *weights).data, out.data)


@pytest.mark.parametrize("lead", [(), (7,), many_rows((5, 500)), many_rows((137,))])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("recompute", ["half", True])
def test_recomputed_it_is_the_same_bits(recompute, lead, normed, dtype, monkeypatch):
    """Also in many tiles and chunks, which are cut at the same rows forward and backward."""
    if lead == (137,):
        monkeypatch.setattr("minigrad.kernels.products.TILE_NUMBERS", 30 * 200)
        monkeypatch.setattr(module, "CHUNK", 70 * 200)
    args = [a.astype(dtype) if isinstance(a, np.ndarray) else a for a in arguments(lead, 64, 200, 64, normed)]
    value, grads = derived(swiglu_ffn, args)
    args += [] if normed else [None, 1e-5]
    again, repeated = derived(swiglu_ffn, [*args, recompute])
    for ours, theirs in zip([again, *repeated], [value, *grads], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.cpu_only("a kernel that the CPU alone has")
@pytest.mark.parametrize(("recompute", "wide"), [("half", 6 * 5), (True, 0)])
def test_recomputed_it_keeps_less(recompute, wide):
    import minigrad as mg

    x, *weights, norm_weight = (mg.Tensor(a, requires_grad=True) for a in arguments((6,), 3, 5, 2, normed=True)[:-1])
    out = swiglu_ffn(x, *weights, norm_weight, recompute=recompute)
    given = [arg.data for arg in (x, *weights, norm_weight)]
    made = [a for a in out.node.residuals if isinstance(a, np.ndarray) and all(a is not arg for arg in given)]
    assert sum(a.size for a in made) == 6 + wide  # 1/rms, and gate


@pytest.mark.parametrize(("lead", "d_in", "d_ff", "d_out"), [((0,), 3, 2, 4), ((2, 3), 0, 2, 4), ((2, 3), 3, 0, 4)])
def test_empty(lead, d_in, d_ff, d_out):
    value, grads = derived(swiglu_ffn, arguments(lead, d_in, d_ff, d_out, normed=True))
    shapes = [(*lead, d_out), (*lead, d_in), *[(d_ff, d_in)] * 2, (d_out, d_ff), (d_in,)]
    for array, shape in zip([value, *grads], shapes, strict=True):
        np.testing.assert_array_equal(array, np.zeros(shape))


def test_far_out():
    """Gates of ±1e4: σ is exactly 1 or 0, no floating-point exception on the way."""
    x, one = np.array([[-1e4], [1e4]]), np.ones((1, 1))
    with np.errstate(all="raise"):
        value, (gx, *_) = derived(swiglu_ffn, [x, one, one, one])
    np.testing.assert_array_equal(value, [[0], [1e8]])
    np.testing.assert_array_equal(gx, [[0], [2e4]])


@pytest.mark.cpu_only("a kernel that the CPU alone has")
def test_half_precision_is_computed_in_float32():
    args = [np.asarray(a, np.float16) for a in arguments((5,), 8, 16, 4, normed=True)[:-1]]
    wide = [a.astype(np.float64) for a in args]
    exact_value, exact = derived(swiglu_ffn, wide)
    value, grads = derived(swiglu_ffn, args)
    for ours, theirs in zip([value, *grads], [exact_value, *exact], strict=True):
        assert ours.dtype == np.float16
        np.testing.assert_allclose(ours, theirs, rtol=2**-10, atol=2**-12)


@of_the_threads
def test_threads():
    args = arguments((1500,), 64, 344, 64, normed=True)[:-1]
    check_threads(swiglu_ffn, [a.astype(np.float32) for a in args])


@pytest.mark.parametrize("wrong", range(4))
def test_shapes_that_do_not_fit(wrong):
    args = arguments((2,), 3, 5, 4)
    args[wrong] = np.ones((7, 8))
    with pytest.raises(ShapeError, match="w1 and w3"):
        swiglu_ffn(*args)


@pytest.mark.cpu_only("numbers that kernels of a GPU count as 0")
def test_each_gate_far_below_zero_has_its_own_exponential():
    """Where e^-x overflows σ is e^x, at its own place in a matrix: x silu(x), beside gates that are 0."""
    x = np.linspace(-105, 105, 211, dtype=np.float32)
    args = [x[:, None], np.float32([[0], [1]]), np.float32([[1], [1]]), np.float32([[0, 1]])]
    value, grads = derived(swiglu_ffn, args)
    x = x.astype(np.float64)
    sigma = 1 / (1 + np.exp(-x))
    slope = sigma * (1 + x / (1 + np.exp(x)))
    np.testing.assert_allclose(value[:, 0], x * x * sigma, rtol=1e-5, atol=1e-40)
    np.testing.assert_allclose(grads[0][:, 0], x * slope + x * sigma, rtol=1e-5, atol=1e-40)
