"""RotaryEmbedding, MultiHeadAttention and scaled_dot_product_attention beside torch and written-out formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as TF

import minigrad as mg
import nn
import nn.functional as F
from minigrad.errors import ArgumentError, CallError, DTypeError, IndexRangeError, ShapeError
from nn.attention import merge_heads, split_heads

D = torch.float64


# ---- rotary embedding ------------------------------------------------------------------------------------------------


def rotated(x, positions, theta=10000.0, layout="interleaved", frequency=lambda f: f):
    """The definition, one complex multiplication a pair."""
    x, half = np.asarray(x), x.shape[-1] // 2
    f = np.array([frequency(theta ** (-2 * k / x.shape[-1])) for k in range(half)])
    turn = np.exp(1j * np.asarray(positions)[..., None] * f)
    a, b = (slice(0, None, 2), slice(1, None, 2)) if layout == "interleaved" else (slice(0, half), slice(half, None))
    z = (x[..., a] + 1j * x[..., b]) * turn
    out = np.empty(z.shape[:-1] + x.shape[-1:])
    out[..., a], out[..., b] = z.real, z.imag
    return out


@pytest.mark.parametrize(
    ("layout", "x", "expected"),
    [
        ("interleaved", [1, 0, 1, 0], [0.540302, 0.841471, 0.999950, 0.0099998]),
        ("half", [1, 1, 0, 0], [0.540302, 0.999950, 0.841471, 0.0099998]),
    ],
)
def test_rope_turns_each_pair_by_its_angle(layout, x, expected):
    rope = nn.RotaryEmbedding(4, 8, layout=layout)
    np.testing.assert_allclose(rope(mg.Tensor([x], dtype="float64"), [1]).data[0], expected, atol=1e-6)
    first = np.arange(8.0).reshape(1, 8)
    np.testing.assert_array_equal(nn.RotaryEmbedding(8, 8, layout=layout)(mg.Tensor(first)).data, first)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_is_a_rotation_and_its_gradient_turns_back(rng, layout):
    rope = nn.RotaryEmbedding(6, 40, 500.0, layout)
    x = mg.Tensor(rng.standard_normal((2, 3, 5, 6)), requires_grad=True)
    place = np.array([7, 0, 39, 3, 3])
    y = rope(x, place)
    np.testing.assert_allclose(y.data, rotated(x.data, place, 500.0, layout), atol=1e-13)
    np.testing.assert_allclose(np.linalg.norm(y.data, axis=-1), np.linalg.norm(x.data, axis=-1), rtol=1e-13)
    g = rng.standard_normal(x.shape)
    y.backward(g)
    np.testing.assert_allclose(x.grad, rotated(g, -place, 500.0, layout), atol=1e-13)
    per_row = rng.integers(40, size=(2, 5))
    y = rope(x, per_row[:, None])
    np.testing.assert_allclose(y.data, rotated(x.data, per_row[:, None], 500.0, layout), atol=1e-13)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_products_depend_on_the_distance_alone(rng, layout):
    rope = nn.RotaryEmbedding(8, 64, layout=layout)
    q, k = rng.standard_normal((2, 1, 8))

    def product(i, j):
        return (rope(mg.Tensor(q), [i]) * rope(mg.Tensor(k), [j])).sum().item()

    assert product(3, 11) == pytest.approx(product(40, 48), rel=1e-12)
    assert product(3, 11) != pytest.approx(product(3, 12), rel=1e-3)


def llama3(f, factor=8.0, low=1.0, high=4.0, original=256):
    """Case by case, as "Llama 3.1" stretches wavelengths."""
    wavelength = 2 * math.pi / f
    if wavelength < original / high:
        return f
    if wavelength > original / low:
        return f / factor
    share = (original / wavelength - low) / (high - low)
    return (1 - share) * f / factor + share * f


@pytest.mark.parametrize(
    ("scaling", "frequency"),
    [
        ({"rope_type": "linear", "factor": 4.0}, lambda f: f / 4),
        ({"type": "linear", "factor": 4}, lambda f: f / 4),
        ({"rope_type": "default"}, lambda f: f),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            llama3,
        ),
    ],
)
def test_rope_scaling(rng, scaling, frequency):
    x = rng.standard_normal((100, 64))
    rope = nn.RotaryEmbedding(64, 100, 500.0, "half", scaling=scaling)
    expected = rotated(x, np.arange(100), 500.0, "half", frequency)
    np.testing.assert_allclose(rope(mg.Tensor(x)).data, expected, atol=1e-13)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: nn.RotaryEmbedding(5, 8), ArgumentError, "even d_k"),
        (lambda: nn.RotaryEmbedding(4, 8, layout="neox"), ArgumentError, "neox"),
        (lambda: nn.RotaryEmbedding(4, 8, theta=0), ArgumentError, "theta"),
        (lambda: nn.RotaryEmbedding(4, 8, scaling={"rope_type": "yarn", "factor": 2.0}), ArgumentError, "yarn"),
        (lambda: nn.RotaryEmbedding(4, 8, scaling={"rope_type": "linear"}), ArgumentError, "factor"),
        (lambda: nn.RotaryEmbedding(4, 8, scaling={"type": "linear", "factor": 2, "x": 1}), ArgumentError, "x"),
        (lambda: nn.RotaryEmbedding(4, 8)(mg.ones((9, 4))), IndexRangeError, "max_seq_len = 8"),
        (lambda: nn.RotaryEmbedding(4, 8)(mg.ones((1, 4)), [8]), IndexRangeError, "position 8"),
        (lambda: nn.RotaryEmbedding(4, 8)(mg.ones((1, 4)), [-1]), IndexRangeError, "-1"),
        (lambda: nn.RotaryEmbedding(4, 8)(mg.ones((1, 4)), [0.5]), DTypeError, "integers"),
        (lambda: nn.RotaryEmbedding(4, 8)(mg.ones((2, 4)), [0]), ShapeError, "2 positions"),
        (lambda: nn.RotaryEmbedding(4, 8)(mg.ones((1, 6))), ShapeError, "4"),
    ],
)
def test_rope_mistakes_are_explained(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


# ---- scaled dot-product attention ------------------------------------------------------------------------------------

MASK = np.random.default_rng(1).random((2, 1, 5, 7)) < 0.7
MASK[..., 0] = True


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": MASK},
        {"attn_mask": MASK[0, 0]},
        {"attn_mask": np.random.default_rng(2).standard_normal((5, 7))},
    ],
)
def test_attention_is_that_of_torch(agree, rng, options):
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    xs = [mg.Tensor(a, requires_grad=True) for a in arrays]
    ts = [torch.tensor(a, requires_grad=True) for a in arrays]
    y = F.scaled_dot_product_attention(*xs, **options)
    theirs = {name: torch.tensor(o) if isinstance(o, np.ndarray) else o for name, o in options.items()}
    t = TF.scaled_dot_product_attention(ts[0], *[a.repeat_interleave(2, 1) for a in ts[1:]], **theirs)
    agree(y, t)
    g = rng.standard_normal(y.shape)
    y.backward(g)
    t.backward(torch.tensor(g))
    for x, tx in zip(xs, ts, strict=True):
        agree(x.grad, tx.grad)


def test_a_masked_row_gives_zero_and_finite_gradients():
    q, k, v = (mg.Tensor(a, requires_grad=True) for a in ([[1.0], [1.0]], [[0.0], [0.0]], [[2.0], [4.0]]))
    out = F.scaled_dot_product_attention(q, k, v, np.array([[False, False], [True, True]]))
    out.sum().backward()
    np.testing.assert_array_equal(out.data, [[0], [3]])
    np.testing.assert_array_equal(q.grad, [[0], [0]])
    np.testing.assert_allclose(k.grad, [[-0.5], [0.5]])
    np.testing.assert_allclose(v.grad, [[0.5], [0.5]])
    x = mg.Tensor([-np.inf, -np.inf], requires_grad=True)
    y = F.softmax(x)
    y.sum().backward()
    np.testing.assert_array_equal([y.data, x.grad], np.zeros((2, 2)))


def test_attention_dropout_has_the_mean_of_none_and_follows_the_seed(rng):
    q, k = (mg.Tensor(rng.standard_normal((4, 3, 8))) for _ in range(2))
    v = mg.Tensor(np.broadcast_to(np.eye(3), (4, 3, 3)))  # the weights themselves
    weights = F.scaled_dot_product_attention(q, k, v).data
    mg.random.seed(1)
    runs = np.array([F.scaled_dot_product_attention(q, k, v, dropout_p=0.25).data for _ in range(400)])
    assert set(np.unique((runs / weights).round(9)).tolist()) == {0.0, round(4 / 3, 9)}
    assert np.abs((runs == 0).mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / runs.size)
    mg.random.seed(1)
    np.testing.assert_array_equal(F.scaled_dot_product_attention(q, k, v, dropout_p=0.25).data, runs[0])
    before = mg.random.get_state()
    F.scaled_dot_product_attention(q, k, v)
    assert mg.random.get_state() == before


# ---- multi-head attention --------------------------------------------------------------------------------------------


class TorchAttention(torch.nn.Module):
    """Multi-head attention written out in torch."""

    def __init__(self, d_model, heads, kv_heads, head_dim, bias, layout=None, options=None):
        super().__init__()
        self.q_proj = torch.nn.Linear(d_model, heads * head_dim, bias, dtype=D)
        self.k_proj = torch.nn.Linear(d_model, kv_heads * head_dim, bias, dtype=D)
        self.v_proj = torch.nn.Linear(d_model, kv_heads * head_dim, bias, dtype=D)
        self.output_proj = torch.nn.Linear(heads * head_dim, d_model, bias, dtype=D)
        self.heads, self.kv_heads, self.layout, self.options = heads, kv_heads, layout, options or {}

    def forward(self, x, context=None):
        source = x if context is None else context
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        k, v = (
            project(source)
            .unflatten(-1, (self.kv_heads, -1))
            .transpose(-2, -3)
            .repeat_interleave(self.heads // self.kv_heads, -3)
            for project in (self.k_proj, self.v_proj)
        )
        if self.layout:
            q, k = self.turned(q), self.turned(k)
        out = TF.scaled_dot_product_attention(q, k, v, **self.options)
        return self.output_proj(out.transpose(-2, -3).flatten(-2))

    def turned(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half, dtype=D) / half)
        turn = torch.polar(torch.ones_like(angles), angles)
        if self.layout == "half":
            z = torch.complex(x[..., :half], x[..., half:]) * turn
            return torch.cat([z.real, z.imag], -1)
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * turn).flatten(-2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "bias", "layout", "options"),
    [
        (4, None, None, False, None, {}),
        (4, 2, None, True, None, {"is_causal": True}),
        (4, 1, 6, True, "half", {"is_causal": True}),
        (2, None, None, False, "interleaved", {"attn_mask": MASK[:, :, :5, :5]}),
        (1, 1, 3, False, None, {"attn_mask": np.random.default_rng(2).standard_normal((5, 5))}),
    ],
)
def test_multi_head_attention_is_that_of_torch(agree_with_torch, rng, heads, kv_heads, head_dim, bias, layout, options):
    rope = None
    if layout:
        rope = nn.RotaryEmbedding(head_dim or 8 // heads, 5, 100.0, layout)
    ours = nn.MultiHeadAttention(8, heads, kv_heads, bias, rope=rope, head_dim=head_dim, dtype="float64")
    theirs = {name: torch.tensor(o) if isinstance(o, np.ndarray) else o for name, o in options.items()}
    there = TorchAttention(8, heads, kv_heads or heads, head_dim or 8 // heads, bias, layout, theirs)
    agree_with_torch(ours, there, rng.standard_normal((2, 5, 8)), **options)


def test_cross_attention_is_that_of_torch(agree_with_torch, rng):
    ours = nn.MultiHeadAttention(8, 4, bias=True, dtype="float64")
    theirs = TorchAttention(8, 4, 4, 2, True)
    agree_with_torch(ours, theirs, rng.standard_normal((2, 5, 8)), rng.standard_normal((2, 7, 8)))


@pytest.mark.cpu_only("torch beside it")
def test_values_may_be_of_another_sequence_than_keys(agree, rng):
    ours = nn.MultiHeadAttention(8, 2, bias=True, dtype="float64", generator=1)
    theirs = torch.nn.MultiheadAttention(8, 2, dtype=D, batch_first=True)
    names = ("q_proj", "k_proj", "v_proj")
    with torch.no_grad():
        for kind, there in (("weight", theirs.in_proj_weight), ("bias", theirs.in_proj_bias)):
            there[:] = torch.tensor(np.concatenate([getattr(getattr(ours, name), kind).data for name in names]))
        theirs.out_proj.weight[:] = torch.tensor(ours.output_proj.weight.data)
    x, keys, values = rng.standard_normal((2, 5, 8)), *rng.standard_normal((2, 2, 7, 8))
    there = theirs(*map(torch.tensor, (x, keys, values)), need_weights=False)[0]
    agree(ours(mg.Tensor(x), mg.Tensor(keys), values=mg.Tensor(values)), there)
    for wrong in (mg.ones((2, 6, 8)), mg.ones((1, 7, 8))):
        with pytest.raises(ShapeError, match="a value for each key"):
            ours(mg.Tensor(x), mg.Tensor(keys), values=wrong)
    with pytest.raises(ShapeError, match="context None"):
        ours(mg.Tensor(x), values=mg.Tensor(values))


@pytest.mark.cpu_only("the memory order of a kernel of the CPU")
def test_heads_are_read_in_place(rng):
    """The heads' views of the projections, and the result for the output projection, are not copied."""
    x = mg.Tensor(rng.standard_normal((2, 5, 8)))
    attention = nn.MultiHeadAttention(8, 4, dtype="float64")
    heads = split_heads(attention.q_proj(x), 4)
    out = F.scaled_dot_product_attention(heads, heads, heads)
    assert np.shares_memory(out.data, merge_heads(out).data)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"d_model": 6, "num_heads": 4}, "d_model=6, num_heads=4"),
        ({"d_model": 8, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3"),
        ({"d_model": 8, "num_heads": 0}, "num_heads"),
    ],
)
def test_sizes_that_do_not_fit_are_explained(sizes, text):
    for make in (nn.MultiHeadAttention, nn.TransformerBlock):
        with pytest.raises(ValueError, match=text):
            make(**sizes)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [1, 3, 40, np.int64(1000)])
def test_a_window_is_the_dense_mask_of_the_keys_around_each_query(rng, window, is_causal):
    """Values and gradients beside torch with the mask written out; 90 queries are more than one tile."""
    q, k, v = (rng.standard_normal((2, 4, 90, 8)), *rng.standard_normal((2, 2, 2, 90, 8)))
    ours = [mg.Tensor(x, requires_grad=True) for x in (q, k, v)]
    theirs = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    mask = [[abs(i - j) < window and (j <= i or not is_causal) for j in range(90)] for i in range(90)]
    out = F.scaled_dot_product_attention(*ours, is_causal=is_causal, window=window)
    wanted = TF.scaled_dot_product_attention(*theirs, torch.tensor(mask), enable_gqa=True)
    np.testing.assert_allclose(out.numpy(), wanted.detach().numpy(), atol=1e-13)
    (out**2).sum().backward()
    (wanted**2).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mg.asarray(x.grad).numpy(), y.grad.numpy(), atol=1e-12)


@pytest.mark.parametrize(
    ("window", "kind"), [(0, ArgumentError), (-3, ArgumentError), (2.5, CallError), (True, CallError)]
)
def test_a_window_that_is_no_number_of_keys_is_refused(window, kind):
    for x in (np.ones((3, 2)), mg.ones((3, 2), requires_grad=True)):
        with pytest.raises(kind, match="window"):
            F.scaled_dot_product_attention(x, x, x, window=window)
