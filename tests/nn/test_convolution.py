"""Convolutions, pooling and their norms beside torch's: values, gradients, state dicts, statistics, refusals."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as TF

import minigrad as mg
import nn
import nn.functional as F
from minigrad.backend import to_numpy
from minigrad.errors import ArgumentError, DTypeError, MiniGradError, ShapeError
from minigrad.kernels.convolution import convolution
from minigrad.kernels.pooling import max_pool

D = torch.float64
D64 = {"dtype": "float64"}
rng = np.random.default_rng(11)
ROW, IMAGE = rng.standard_normal((3, 4, 9)), rng.standard_normal((3, 4, 7, 6))


def pair(name, *args, **options):
    """A layer of ours and torch's, for float64."""
    return getattr(nn, name)(*args, **options, **D64), getattr(torch.nn, name)(*args, **options, dtype=D)


@pytest.mark.parametrize(
    ("layers", "x"),
    [
        (pair("Conv1d", 4, 6, 3), ROW),
        (pair("Conv1d", 4, 6, 4, padding="same", dilation=2, groups=2, bias=False), ROW),
        (pair("Conv1d", 4, 6, 3, 2, 1), ROW[0]),
        (pair("Conv2d", 4, 6, 3, padding=1), IMAGE),
        (pair("Conv2d", 4, 6, (3, 2), (2, 1), (1, 0), (1, 2), 2), IMAGE),
        (pair("Conv2d", 4, 8, 3, groups=4), IMAGE),
        (pair("Conv2d", 4, 3, 1), IMAGE[0]),
        (pair("Conv2d", 4, 6, (2, 5), padding="same"), IMAGE),
        (pair("Conv2d", 4, 6, 3, padding="valid", stride=2), IMAGE),
        (pair("Conv2d", 4, 6, 3, stride=4, padding=3), IMAGE),
        (pair("Conv2d", 4, 2, 3, padding=(2, 1), padding_mode="reflect"), IMAGE),
        (pair("Conv2d", 4, 2, 3, padding=(2, 1), padding_mode="replicate"), IMAGE),
        (pair("Conv2d", 4, 2, 3, padding=(2, 1), padding_mode="circular"), IMAGE),
        (pair("Conv1d", 4, 2, 4, padding="same", padding_mode="circular"), ROW),
        (pair("ConvTranspose1d", 4, 6, 3, 2, 1, 1), ROW),
        (pair("ConvTranspose2d", 4, 6, 3, padding=1), IMAGE),
        (pair("ConvTranspose2d", 4, 6, (3, 2), (2, 3), (1, 0), (1, 2), 2, False, 2), IMAGE),
        (pair("GroupNorm", 2, 4), IMAGE),
        (pair("GroupNorm", 4, 4, eps=0.1), ROW),
    ],
    ids=lambda value: repr(value[0]) if isinstance(value, tuple) else "",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")  # torch's
def test_layer_is_that_of_torch(agree_with_torch, layers, x):
    assert set(layers[0].state_dict()) == set(layers[1].state_dict())
    agree_with_torch(*layers, x)


@pytest.mark.parametrize(
    ("ours", "theirs", "x"),
    [
        (nn.MaxPool1d(3, 2, 1), torch.nn.MaxPool1d(3, 2, 1), ROW),
        (nn.MaxPool2d(2), torch.nn.MaxPool2d(2), IMAGE),
        (nn.MaxPool2d(2), torch.nn.MaxPool2d(2), IMAGE[0]),
        (nn.MaxPool2d((3, 2), (1, 2), (1, 0), 2), torch.nn.MaxPool2d((3, 2), (1, 2), (1, 0), 2), IMAGE),
        (nn.MaxPool2d(3, 2, 1, ceil_mode=True), torch.nn.MaxPool2d(3, 2, 1, ceil_mode=True), IMAGE),
        (nn.MaxPool2d(2, 3), torch.nn.MaxPool2d(2, 3), np.round(IMAGE)),  # ties
        (nn.MaxPool2d(3, 1, 1), torch.nn.MaxPool2d(3, 1, 1), np.round(IMAGE)),
        (nn.AvgPool1d(3, 2, 1), torch.nn.AvgPool1d(3, 2, 1), ROW),
        (nn.AvgPool1d(4, count_include_pad=False, padding=2), torch.nn.AvgPool1d(4, None, 2, False, False), ROW),
        *[
            (nn.AvgPool2d((3, 2), (2, 3), 1, ceil, count), torch.nn.AvgPool2d((3, 2), (2, 3), 1, ceil, count), IMAGE)
            for ceil in (False, True)
            for count in (False, True)
        ],
        (nn.Flatten(), torch.nn.Flatten(), IMAGE),
        (nn.Flatten(0, 2), torch.nn.Flatten(0, 2), IMAGE),
        (nn.LeakyReLU(), torch.nn.LeakyReLU(), np.round(ROW)),
        (nn.LeakyReLU(0.3), torch.nn.LeakyReLU(0.3), ROW),
        (nn.Sigmoid(), torch.nn.Sigmoid(), ROW),
        (nn.Tanh(), torch.nn.Tanh(), ROW),
    ],
    ids=lambda value: repr(value) if isinstance(value, nn.Module) else "",
)
def test_layer_without_parameters_is_that_of_torch(agree_with_torch, ours, theirs, x):
    agree_with_torch(ours, theirs, x)


@pytest.mark.parametrize("length", range(1, 12))
@pytest.mark.parametrize("window", [1, 2, 3])
def test_pooling_with_ceil_mode_has_torchs_windows(length, window):
    """Every length, stride and padding: the last window begins within the array or its padding in front.

    The only window may span more than the array and its padding.
    """
    x = rng.standard_normal((1, 2, length))
    for stride in (1, 2, 3, 4):
        for padding in range(window // 2 + 1):
            for ceil_mode in (False, True):
                options = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode}
                for name, more in (("max_pool1d", {}), ("max_pool1d", {"dilation": 3}), ("avg_pool1d", {})):
                    ours, theirs = (functools.partial(getattr(f, name), **options, **more) for f in (F, TF))
                    try:
                        expected = theirs(torch.tensor(x), window)
                    except RuntimeError:
                        with pytest.raises(ShapeError):
                            ours(x, window)
                    else:
                        np.testing.assert_allclose(ours(x, window), expected, rtol=1e-12)


def test_a_nan_is_the_largest_and_gets_the_gradient():
    x = np.array([[[1.0, np.nan, 3.0, 2.0, 5.0, 4.0]]])
    ours, theirs = mg.Tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
    y, t = F.max_pool1d(ours, 3), TF.max_pool1d(theirs, 3)
    np.testing.assert_array_equal(y.data, t.detach().numpy())
    y.backward(np.ones(y.shape))
    t.backward(torch.ones(t.shape, dtype=D))
    np.testing.assert_array_equal(ours.grad, theirs.grad.numpy())


# ---- batch norm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "x", "options"),
    [
        ("BatchNorm1d", rng.standard_normal((5, 3)), {}),
        ("BatchNorm1d", 1e3 + rng.standard_normal((5, 3, 4)), {"eps": 0.1, "momentum": 0.3}),
        ("BatchNorm2d", rng.standard_normal((2, 3, 4, 5)), {"momentum": None}),
        ("BatchNorm2d", rng.standard_normal((2, 3, 4, 5)), {"affine": False}),
        ("BatchNorm2d", rng.standard_normal((2, 3, 4, 5)), {"track_running_stats": False}),
    ],
)
def test_batch_norm_is_that_of_torch(agree, agree_with_torch, name, x, options):
    """Three steps of training, then evaluation: results, gradients, running statistics and the state dict's keys."""
    ours, theirs = pair(name, 3, **options)
    for module in (ours, theirs):
        module.load_state_dict(
            {k: v if isinstance(module, nn.Module) else torch.tensor(to_numpy(v)) for k, v in ours.state_dict().items()}
        )
    if theirs.affine:
        theirs.weight.data, theirs.bias.data = (
            torch.tensor([0.5, 2.0, -1.0], dtype=D),
            torch.tensor([1.0, 0.0, 3.0], dtype=D),
        )
        ours.load_state_dict({k: v.numpy() for k, v in theirs.state_dict().items()})
    upstream = rng.standard_normal(x.shape)
    for step in range(4):
        if step == 3:
            ours.eval(), theirs.eval()
        a, b = mg.Tensor(x * (step + 1), requires_grad=True), torch.tensor(x * (step + 1), requires_grad=True)
        ours.zero_grad(), theirs.zero_grad()
        y, t = ours(a), theirs(b)
        y.backward(upstream)
        t.backward(torch.tensor(upstream))
        agree(y, t, 1e-9)
        agree(a.grad, b.grad, 1e-8)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            agree(mine.grad, other.grad, 1e-9)
        state = theirs.state_dict()
        assert set(ours.state_dict()) == set(state)
        for key, value in ours.state_dict().items():
            agree(value, state[key], 1e-12)


@pytest.mark.parametrize("shape", [(0, 3), (2, 3, 0)])
def test_an_empty_batch_moves_no_statistics(agree, shape):
    ours, theirs = pair("BatchNorm1d", 3)
    for norm, x in ((ours, mg.zeros(shape, dtype=float)), (theirs, torch.zeros(shape, dtype=D))):
        norm.running_mean[...], norm.running_var[...] = 1.0, 2.0
        assert norm(x).shape == shape
    agree(ours.running_mean, theirs.running_mean)
    agree(ours.running_var, theirs.running_var)


def test_batch_norm_in_evaluation_and_single_numbers():
    norm = nn.BatchNorm1d(2)
    with pytest.raises(ShapeError, match="more than one number"):
        norm(mg.ones((1, 2)))
    assert norm.eval()(mg.ones((1, 2))).shape == (1, 2)
    with pytest.raises(ShapeError, match=r"\(N, C\) or \(N, C, L\)"):
        norm(mg.ones((1, 2, 3, 4)))
    with pytest.raises(ShapeError, match="C = 2"):
        norm(mg.ones((4, 3)))


def test_statistics_in_arrays_move_in_place():
    mean, var = np.zeros(3), np.ones(3)
    x = rng.standard_normal((6, 3))
    t_mean, t_var = torch.zeros(3, dtype=D), torch.ones(3, dtype=D)
    F.batch_norm(x, mean, var, training=True, momentum=0.4)
    TF.batch_norm(torch.tensor(x), t_mean, t_var, training=True, momentum=0.4)
    np.testing.assert_allclose(mean, t_mean.numpy(), rtol=1e-12)
    np.testing.assert_allclose(var, t_var.numpy(), rtol=1e-12)


def test_the_statistics_of_a_batch_are_differentiable():
    """Means and variances are results: a loss may use them, to second order."""
    from minigrad.kernels.batch_norm import normalize_batch

    x = rng.standard_normal((4, 2, 3))
    assert mg.gradcheck(lambda x: sum((part**2).sum() for part in normalize_batch(x)[1:]), [x])
    assert mg.gradgradcheck(lambda x: sum((part**3).sum() for part in normalize_batch(x)), [x])


# ---- second order, several tiles, threads, half precision -----------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
def test_a_penalty_on_the_gradient_is_torchs(agree, groups):
    """Gradients of |∂loss/∂x|² with respect to weight and bias, through convolution, pooling and their kinks."""
    x, w, b = rng.standard_normal((2, 4, 6, 6)), rng.standard_normal((4, 4 // groups, 3, 3)), rng.standard_normal(4)

    def penalty(library, convolve, pool, x, w, b, grad):
        y = pool(library.tanh(convolve(x, w, b, 1, 1, 1, groups)), 2)
        return (grad((y**2).sum(), x) ** 2).sum()

    ours = [mg.Tensor(a, requires_grad=True) for a in (x, w, b)]
    theirs = [torch.tensor(a, requires_grad=True) for a in (x, w, b)]
    penalty(mg, F.conv2d, F.max_pool2d, *ours, lambda y, x: mg.grad(y, x, create_graph=True)[0]).backward()
    penalty(
        torch, TF.conv2d, TF.max_pool2d, *theirs, lambda y, x: torch.autograd.grad(y, x, create_graph=True)[0]
    ).backward()
    for a, t in zip(ours, theirs, strict=True):
        agree(a.grad, t.grad)


@pytest.mark.cpu_only("about tiles and threads")
@pytest.mark.parametrize(
    ("shape", "kernels", "options"),
    [
        ((40, 3, 9, 9), (8, 3, 3, 3), {"padding": 1}),  # several tiles of images
        ((3, 8, 150, 90), (8, 8, 3, 3), {"padding": 1}),  # tiles of rows
        ((2, 16, 120, 120), (8, 8, 5, 3), {"stride": 2, "padding": (2, 1), "groups": 2}),
    ],
)
def test_tiles_and_threads(agree, shape, kernels, options):
    """What needs several tiles is torch's, and the same bits for one thread and two."""
    x, w = rng.standard_normal(shape), rng.standard_normal(kernels)
    b, t = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    out = TF.conv2d(b, t, **options)
    upstream = rng.standard_normal(out.shape)
    out.backward(torch.tensor(upstream))
    found, before = [], mg.get_num_threads()
    for threads in (1, 2):
        mg.set_num_threads(threads)
        leaves = [mg.Tensor(a, requires_grad=True) for a in (x, w)]
        y = F.conv2d(*leaves, **options)
        y.backward(upstream)
        found.append([y.data, *(leaf.grad for leaf in leaves)])
    mg.set_num_threads(before)
    for one, two, theirs in zip(*found, (out, b.grad, t.grad), strict=True):
        np.testing.assert_array_equal(one, two)
        agree(one, theirs)


def test_half_precision_is_multiplied_in_float32():
    """4000 products of ones: float16 could not count them one by one."""
    x, w = np.ones((1, 4000, 3), np.float16), np.full((1, 4000, 1), 1 / 2, np.float16)
    y = F.conv1d(x, w)
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y, np.full((1, 1, 3), 2000, np.float16))


def test_three_axes():
    x, w = rng.standard_normal((2, 2, 4, 5, 3)), rng.standard_normal((3, 2, 2, 2, 2))
    theirs = TF.conv3d(torch.tensor(x), torch.tensor(w), stride=(1, 2, 1), padding=1)
    np.testing.assert_allclose(convolution(x, w, None, (1, 2, 1), 1), theirs.numpy(), atol=1e-12)
    pooled = TF.max_pool3d(torch.tensor(x), 2).numpy()
    np.testing.assert_array_equal(max_pool(x, [2, 2, 2]), pooled)


# ---- starting, refusing ---------------------------------------------------------------------------------------------


def test_weights_start_with_their_variance():
    """σ² = 2 / (n + n'), with n = 8·9/2 numbers seen by a result and n' = 16·9/2 results changed by a number."""
    weight = nn.Conv2d(8, 16, 3, groups=2, generator=0).weight.data
    sigma = np.sqrt(2 / (8 * 9 / 2 + 16 * 9 / 2))
    assert np.std(weight) == pytest.approx(sigma * 0.9866, rel=0.1)  # the cut at 3σ takes 1.3 % off it
    assert np.abs(weight).max() <= 3 * sigma
    assert nn.ConvTranspose2d(8, 16, 3, generator=0).weight.shape == (8, 16, 3, 3)


ONES = np.ones((1, 2, 5))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: F.conv2d(ONES, np.ones((1, 2, 3, 3))), ShapeError, "2"),
        (lambda: F.conv1d(np.ones(5), np.ones((1, 1, 3))), ShapeError, "C, length"),
        (lambda: F.conv1d(ONES, np.ones((1, 3, 3))), ShapeError, "channels"),
        (lambda: F.conv1d(ONES, np.ones((3, 1, 3)), groups=2), ShapeError, "groups"),
        (lambda: F.conv1d(ONES, np.ones((1, 2, 6))), ShapeError, "at most"),
        (lambda: F.conv1d(ONES, np.ones((1, 2, 3)), np.ones(2)), ShapeError, "bias"),
        (lambda: F.conv1d(ONES, np.ones((1, 2, 3)), stride=0), ArgumentError, "stride"),
        (lambda: F.conv1d(ONES, np.ones((1, 2, 3)), padding=-1), ArgumentError, "padding"),
        (lambda: F.conv1d(ONES, np.ones((1, 2, 3)), padding="full"), ArgumentError, "'same'"),
        (lambda: nn.Conv1d(2, 2, 3, 2, "same"), ArgumentError, "'same' with stride 1"),
        (lambda: nn.Conv1d(2, 2, 3, padding_mode="mirror"), ArgumentError, "padding_mode"),
        (lambda: nn.Conv1d(3, 2, 3, groups=2), ShapeError, "groups"),
        (lambda: nn.Conv1d(0, 2, 3), ArgumentError, "in_channels"),
        (lambda: F.conv_transpose1d(ONES, np.ones((2, 1, 3)), output_padding=1), ArgumentError, "output_padding"),
        (lambda: F.conv_transpose1d(ONES, np.ones((3, 1, 3))), ShapeError, "C, O / groups"),
        (lambda: F.conv_transpose1d(ONES[..., :1], np.ones((2, 1, 1)), padding=1), ShapeError, "elements"),
        (lambda: F.max_pool1d(ONES, 3, padding=2), ArgumentError, "half of the window"),
        (lambda: F.max_pool1d(ONES, 9), ShapeError, "at most"),
        (lambda: F.max_pool2d(ONES[0], 2), ShapeError, "C, height, width"),
        (lambda: F.avg_pool1d(np.ones((1, 2, 5), int), 2), DTypeError, "means"),
        (lambda: F.group_norm(ONES, 3), ShapeError, "num_groups=3"),
        (lambda: nn.GroupNorm(3, 4), ShapeError, "divides"),
        (lambda: nn.BatchNorm1d(2, momentum=2), ArgumentError, "probability"),
        (lambda: nn.Flatten(2, 1)(ONES), ArgumentError, "start_dim"),
    ],
)  # fmt: skip
def test_mistakes_are_told(call, kind, text):
    with pytest.raises(kind, match=text) as caught:
        call()
    assert isinstance(caught.value, MiniGradError)
    assert "\nGot: " in str(caught.value)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_move_once_under_a_checkpoint(momentum):
    """As without it, whatever runs again for the gradient."""
    x = np.random.default_rng(0).normal(size=(5, 3))
    layers = [nn.BatchNorm1d(3, momentum=momentum, dtype="float64") for _ in range(3)]
    ways = [lambda f, x: f(x), mg.checkpoint, lambda f, x: mg.checkpoint(lambda x: mg.checkpoint(f, x) * 1.0, x)]
    for _ in range(2):
        for layer, way in zip(layers, ways, strict=True):
            (way(layer, mg.Tensor(x, requires_grad=True)) ** 3).sum().backward()
    plain, *others = (layer.state_dict() for layer in layers)
    assert plain["num_batches_tracked"] == 2
    for other in others:
        for name, value in plain.items():
            np.testing.assert_array_equal(other[name], value)
