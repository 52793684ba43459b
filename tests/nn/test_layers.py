"""Layers beside torch's with the same weights: outputs and all gradients, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as TF

import minigrad as mg
import nn
import nn.functional as F
from minigrad.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError

D = torch.float64
D64 = {"dtype": "float64"}
X = np.random.default_rng(7).standard_normal((2, 3, 4))
IDS = np.array([[1, 4, 1], [0, 2, 4]])


@pytest.mark.parametrize(
    ("ours", "theirs", "x"),
    [
        (nn.Linear(4, 5, **D64), torch.nn.Linear(4, 5, dtype=D), X),
        (nn.Linear(4, 5, bias=False, **D64), torch.nn.Linear(4, 5, bias=False, dtype=D), X[0, 0]),
        (nn.Embedding(6, 3, **D64), torch.nn.Embedding(6, 3, dtype=D), IDS),
        (nn.Embedding(6, 3, padding_idx=-2, **D64), torch.nn.Embedding(6, 3, padding_idx=-2, dtype=D), IDS),
        (nn.LayerNorm(4, **D64), torch.nn.LayerNorm(4, dtype=D), X),
        (nn.LayerNorm((3, 4), 0.1, bias=False, **D64), torch.nn.LayerNorm((3, 4), 0.1, bias=False, dtype=D), X),
        (nn.LayerNorm(4, elementwise_affine=False), torch.nn.LayerNorm(4, elementwise_affine=False), X),
        (nn.RMSNorm(4, **D64), torch.nn.RMSNorm(4, eps=1e-5, dtype=D), X),
        (nn.RMSNorm((3, 4), eps=0.1, **D64), torch.nn.RMSNorm((3, 4), eps=0.1, dtype=D), X),
        (nn.ReLU(), torch.nn.ReLU(), np.round(X)),
        (nn.SiLU(), torch.nn.SiLU(), X),
        (nn.GELU(), torch.nn.GELU(), X),
        (nn.GELU("tanh"), torch.nn.GELU("tanh"), X),
        (nn.GLU(), torch.nn.GLU(), X),
        (nn.GLU(0), torch.nn.GLU(0), X),
        (
            nn.Sequential(nn.Linear(4, 3, **D64), nn.GELU(), nn.Linear(3, 1, **D64)),
            torch.nn.Sequential(torch.nn.Linear(4, 3, dtype=D), torch.nn.GELU(), torch.nn.Linear(3, 1, dtype=D)),
            X,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layer_is_that_of_torch(agree_with_torch, ours, theirs, x):
    agree_with_torch(ours, theirs, x)


class TorchFFN(torch.nn.Module):
    """Two or three matrices, as the layer's docstring writes them."""

    def __init__(self, gated, bias, activation):
        super().__init__()
        self.w1, self.w2 = torch.nn.Linear(4, 6, bias, dtype=D), torch.nn.Linear(6, 4, bias, dtype=D)
        if gated:
            self.w3 = torch.nn.Linear(4, 6, bias, dtype=D)
        self.gated, self.activation = gated, activation

    def forward(self, x):
        h = self.activation(self.w1(x))
        return self.w2(h * self.w3(x) if self.gated else h)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (nn.SwiGLU(4, 6, **D64), TorchFFN(True, False, TF.silu)),
        (nn.FeedForward(4, 6, "relu", **D64), TorchFFN(False, True, TF.relu)),
        (nn.FeedForward(4, 6, "gelu", bias=False, **D64), TorchFFN(False, False, TF.gelu)),
        (nn.FeedForward(4, 6, mg.tanh, **D64), TorchFFN(False, True, torch.tanh)),
        (nn.FeedForward(4, 6, "sigmoid", bias=False, gated=True, **D64), TorchFFN(True, False, torch.sigmoid)),
        (nn.FeedForward(4, 6, "gelu", gated=True, **D64), TorchFFN(True, True, TF.gelu)),
    ],
)
def test_feed_forward_is_that_of_torch(agree_with_torch, ours, theirs):
    agree_with_torch(ours, theirs, X)


@pytest.mark.parametrize(("d_model", "width"), [(128, 384), (512, 1408), (24, 64), (25, 128)])
def test_default_width_is_eight_thirds_rounded_up_to_64(d_model, width):
    assert nn.SwiGLU(d_model).w1.weight.shape == (width, d_model)


# ---- edge cases ------------------------------------------------------------------------------------------------------


def test_relu_hands_nan_on_and_has_no_gradient_at_zero():
    x = mg.Tensor([np.nan, -1.0, 0.0, 2.0], requires_grad=True)
    y = nn.ReLU()(x)
    y.backward(np.ones(4))
    np.testing.assert_array_equal(y.data, [np.nan, 0, 0, 2])
    np.testing.assert_array_equal(x.grad[1:], [0, 0, 1])


def test_rms_norm_of_half_precision_squares_in_single():
    x = mg.Tensor(np.array([[1000, -1000], [0, 0]], np.float16), requires_grad=True)
    y = nn.RMSNorm(2, dtype="float16")(x)
    y.backward(np.ones((2, 2), np.float16))
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y.data, [[1, -1], [0, 0]])
    np.testing.assert_array_equal(x.grad[1], np.float16([316.25, 316.25]))


@pytest.mark.parametrize("bad", [6, -1, -7])
def test_embedding_refuses_ids_out_of_range_and_names_them(bad):
    layer = nn.Embedding(6, 3)
    with pytest.raises(IndexError, match=rf"(?s)6.*{bad}"):
        layer(np.array([0, bad]))


def test_embedding_of_repeated_ids_adds_up_and_padding_stays_zero():
    layer = nn.Embedding(5, 2, padding_idx=1)
    layer([3, 3, 3, 1]).sum().backward()
    np.testing.assert_array_equal(layer.weight.grad, [[0, 0], [0, 0], [0, 0], [3, 3], [0, 0]])
    np.testing.assert_array_equal(layer.weight.data[1], [0, 0])


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: nn.Linear(4, 0), ArgumentError),
        (lambda: nn.Linear(4, 2.5), ArgumentError),
        (lambda: nn.Linear(4, 2, dtype="int64"), DTypeError),
        (lambda: nn.Linear(4, 2)(mg.ones((3, 5))), ShapeError),
        (lambda: nn.Embedding(4, 2, padding_idx=4), IndexRangeError),
        (lambda: nn.Embedding(4, 2)([0.5]), DTypeError),
        (lambda: nn.RMSNorm(4)(mg.ones((3, 5))), ShapeError),
        (lambda: nn.LayerNorm(()), ArgumentError),
        (lambda: nn.GLU()(mg.ones((3, 5))), ShapeError),
        (lambda: nn.GELU("erf")(mg.ones(3)), ArgumentError),
        (lambda: nn.FeedForward(4, 8, "relu6"), ArgumentError),
        (lambda: nn.SinusoidalPositionalEncoding(4, max_len=2)(mg.ones((3, 4))), ShapeError),
        (lambda: nn.SinusoidalPositionalEncoding(4)(mg.ones((3, 5))), ShapeError),
    ],
)
def test_bad_input_is_explained(call, kind):
    with pytest.raises(kind, match=r"(?s)Expected: .*Got: "):
        call()


# ---- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_model", [1, 5, 6])
def test_sinusoids(d_model):
    y = nn.SinusoidalPositionalEncoding(d_model, max_len=9)(mg.ones((2, 7, d_model), "float64"))
    expected = [
        [1 + (math.cos if i % 2 else math.sin)(t / 10000 ** ((i - i % 2) / d_model)) for i in range(d_model)]
        for t in range(7)
    ]
    np.testing.assert_allclose(y.data, np.broadcast_to(expected, y.shape), atol=1e-14)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_keeps_a_share_and_the_mean():
    x = mg.Tensor(np.ones(100_000), requires_grad=True)
    y = nn.Dropout(0.3)(x)
    kept = y.data != 0
    assert abs(kept.mean() - 0.7) < 5 * math.sqrt(0.21 / 100_000)  # five standard deviations
    np.testing.assert_allclose(y.data[kept], 1 / 0.7, rtol=1e-15)
    y.backward(np.ones(100_000))
    np.testing.assert_array_equal(x.grad, y.data)


@pytest.mark.parametrize("layer", [nn.Dropout(0.0), nn.Dropout(0.5).eval()])
def test_dropout_is_the_identity_without_drawing_where_it_does_nothing(layer):
    x, before = mg.ones(3), mg.random.get_state()
    assert layer(x) is x
    assert mg.random.get_state() == before


def test_dropout_of_everything_is_zero():
    x = mg.Tensor([1.0, -2.0], requires_grad=True)
    y = F.dropout(x, 1)
    y.sum().backward()
    np.testing.assert_array_equal(np.abs([y.data, x.grad]), np.zeros((2, 2)))


def test_dropout_is_reproducible_by_seed_state_and_generator():
    x = mg.ones((64, 64))
    mg.random.seed(3)
    first, state = F.dropout(x), mg.random.get_state()
    second = F.dropout(x)
    assert (first.data != second.data).any()
    mg.random.set_state(state)
    np.testing.assert_array_equal(F.dropout(x).data, second.data)
    mg.random.seed(3)
    np.testing.assert_array_equal(F.dropout(x).data, first.data)
    np.testing.assert_array_equal(F.dropout(x, generator=5).data, F.dropout(x, generator=5).data)


@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan, "0.5", True])
def test_dropout_refuses_what_is_no_probability(p):
    for call in (
        lambda: nn.Dropout(p),
        lambda: F.dropout(mg.ones(2), p),
        lambda: nn.MultiHeadAttention(4, 2, dropout=p),
    ):
        with pytest.raises(ValueError, match="probability from 0 to 1"):
            call()


# ---- initial weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "std"),
    [
        (nn.Linear(300, 200, generator=1).weight, math.sqrt(2 / 500)),
        (nn.Embedding(300, 200, generator=1).weight, 1.0),
    ],
)
def test_initial_weights_are_normals_cut_at_three_sigmas(weight, std):
    x = weight.data / std
    assert weight.dtype == np.float32
    assert np.abs(x).max() <= 3.000001
    cut = math.erf(3 / math.sqrt(2))  # share of a normal within three sigmas
    variance = 1 - 6 * math.exp(-4.5) / (math.sqrt(2 * math.pi) * cut)
    assert abs(x.mean()) < 5 / math.sqrt(x.size)
    assert abs(x.var() - variance) < 5 * math.sqrt(2 / x.size)
    for bound in (1, 2.9):  # the shape in between: drawn again, not clipped
        share = math.erf(bound / math.sqrt(2)) / cut
        assert abs((np.abs(x) < bound).mean() - share) < 5 * math.sqrt(share * (1 - share) / x.size)


def test_initial_weights_follow_the_seed_and_differ_between_layers():
    mg.random.seed(5)
    a = nn.SwiGLU(8)
    mg.random.seed(5)
    b = nn.SwiGLU(8)
    c, d = nn.SwiGLU(8, generator=5), nn.SwiGLU(8, generator=np.random.default_rng(5))
    assert (a.w1.weight.data != a.w3.weight.data).any()
    for other in (b, c, d):
        for x, y in zip(a.parameters(), other.parameters(), strict=True):
            np.testing.assert_array_equal(x.data, y.data)


@pytest.mark.cpu_only("about arrays of NumPy")
def test_float64_data_before_float32_weights_give_a_warning_and_nothing_else_does() -> None:
    """NumPy's promotion makes the results float64, as an operation's are; that is said once, at the user's line."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    data = np.ones((5, 2))
    with pytest.warns(UserWarning, match=r"astype\('float32'\) keeps float32") as caught:
        out = model(data)
    assert out.dtype == np.float64
    assert [warning.filename for warning in caught] == [__file__]
    model(data.astype(np.float32)), model(data.tolist()), model(mg.Tensor(data, requires_grad=True))
    model.to("float64")(data)
    model.to("float16")(data.astype(np.float32))


class Scaled(nn.Module):
    """A module of a user's own, which may narrow its input itself."""

    def __init__(self, narrow: bool = False) -> None:
        super().__init__()
        self.scale, self.narrow = nn.Parameter([1.0] * 4), narrow

    def forward(self, x):
        return (x.astype("float32") if self.narrow else x) * self.scale


WITH_WEIGHTS = {
    "Linear": (lambda: nn.Linear(4, 2), (3, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 2, 1), (1, 4, 3)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 2, 1), (1, 4, 3, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (3, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (3, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (3, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (3, 4)),
    "SwiGLU": (lambda: nn.SwiGLU(4, 8), (3, 4)),
    "MultiHeadAttention": (lambda: nn.MultiHeadAttention(4, 2), (1, 3, 4)),
    "TransformerBlock": (lambda: nn.TransformerBlock(4, 2, 8), (1, 3, 4)),
    "Sequential": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), (3, 4)),
    "Sequential in another": (lambda: nn.Sequential(nn.Sequential(nn.Conv1d(4, 2, 1))), (1, 4, 3)),
    "a user's own": (Scaled, (3, 4)),
}


@pytest.mark.cpu_only("it asks for the line of the call, which belongs to whatever simulates a device there")
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_float64_data_before_float32_weights_are_warned_of(name):
    make, shape = WITH_WEIGHTS[name]
    with pytest.warns(UserWarning, match=r"float64 data.*astype\('float32'\)") as caught:
        assert make()(np.ones(shape)).dtype == np.float64
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.filterwarnings("error")
def test_float64_that_is_meant_is_not_warned_of():
    data = np.ones((3, 4))
    assert Scaled(narrow=True)(data).dtype == np.float32
    assert nn.LayerNorm(4).to(dtype="float64")(data).dtype == np.float64
    assert nn.Sequential(nn.ReLU())(data).dtype == np.float64
    assert mg.grad(lambda x: nn.LayerNorm(4)(x).sum())(data).dtype == np.float64
