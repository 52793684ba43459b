"""docs/sources.md: each row has a check here, which computes the formula, or the slip and what is right, by NumPy.

A check returns the figures that its row must show.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import minigrad as mg
import nn
import nn.functional as F
import optim
from minigrad.errors import ArgumentError, CallError, ShapeError

pytestmark = pytest.mark.cpu_only("figures of a page, computed by NumPy beside Tensors of the CPU")
PAGE = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()
ROWS: dict[str, str] = dict(re.findall(r"^\| \*\*(.+?)\*\* \|(.+)\|$", PAGE, re.MULTILINE))
CHECKS: dict[str, Callable[[], list[str]]] = {}
X = np.random.default_rng(0).standard_normal((2, 3, 8))


def row(name: str) -> Callable[[Callable[[], list[str] | None]], None]:
    def add(check: Callable[[], list[str] | None]) -> None:
        CHECKS[name] = lambda: check() or []

    return add


@pytest.mark.parametrize("name", sorted(ROWS))
def test_each_row_is_true(name: str) -> None:
    for figure in CHECKS[name]():
        assert figure in ROWS[name], figure


def test_each_check_has_a_row() -> None:
    assert ROWS.keys() == CHECKS.keys()
    assert len(ROWS) > 30


def same(ours: object, expected: object) -> None:
    np.testing.assert_allclose(getattr(ours, "data", ours), expected, rtol=1e-11, atol=1e-12)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v


def heads(x: np.ndarray, count: int) -> np.ndarray:
    return np.stack(np.split(x, count, -1), -3)


def matrices(module: nn.Module) -> list[np.ndarray]:
    return [p.data for name, p in module.named_parameters() if name.endswith("weight")]


# ---- the formulas ----------------------------------------------------------------------------------------------------


@row("attention")
def _() -> None:
    q, k, v = np.random.default_rng(1).standard_normal((3, 5, 4))
    same(F.scaled_dot_product_attention(q, k, v), attention(q, k, v))


@row("its scale")
def _() -> None:
    q, k = np.random.default_rng(1).standard_normal((2, 20000, 64))
    assert abs((q * k).sum(-1).var() / 64 - 1) < 0.05


@row("multi-head attention")
def _() -> None:
    layer = nn.MultiHeadAttention(8, 2, dtype="float64")
    q, k, v, o = matrices(layer)
    out = attention(heads(X @ q.T, 2), heads(X @ k.T, 2), heads(X @ v.T, 2))
    same(layer(mg.Tensor(X)), np.concatenate([out[:, 0], out[:, 1]], -1) @ o.T)


@row("grouped queries")
def _() -> None:
    layer = nn.MultiHeadAttention(8, 4, 2, dtype="float64")
    q, k, v, o = matrices(layer)
    k, v = (np.repeat(heads(X @ w.T, 2), 2, axis=1) for w in (k, v))
    out = attention(heads(X @ q.T, 4), k, v)
    same(layer(mg.Tensor(X)), np.concatenate([out[:, i] for i in range(4)], -1) @ o.T)


@row("sinusoids")
def _() -> None:
    table = nn.SinusoidalPositionalEncoding(8, max_len=40)(mg.zeros((40, 8), dtype="float64")).data
    for t, k in ((0, 0), (7, 1), (39, 3)):
        angle = t / 10000 ** (2 * k / 8)
        same(table[t, 2 * k : 2 * k + 2], [math.sin(angle), math.cos(angle)])


@row("a shift of sinusoids")
def _() -> None:
    table = nn.SinusoidalPositionalEncoding(8, max_len=100)(mg.zeros((100, 8), dtype="float64")).data
    for shift in (1, 17):
        shifts = np.zeros((8, 8))
        for k in range(4):
            c, s = np.cos(shift / 10000 ** (k / 4)), np.sin(shift / 10000 ** (k / 4))
            shifts[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] = [[c, s], [-s, c]]  # of (sin, cos)
        same(table[shift:], table[:-shift] @ shifts.T)


@row("RoPE")
def _() -> None:
    rope = nn.RotaryEmbedding(8, 50)
    turned = [rope(mg.Tensor(x[None]), [t]).data[0] for x, t in ((X[0, 0], 5), (X[0, 1], 9))]
    for k in range(4):
        z = complex(*X[0, 0, 2 * k : 2 * k + 2]) * np.exp(5j * 10000 ** (-k / 4))
        same(turned[0][2 * k : 2 * k + 2], [z.real, z.imag])
    again = [rope(mg.Tensor(x[None]), [t]).data[0] for x, t in ((X[0, 0], 35), (X[0, 1], 39))]
    same(turned[0] @ turned[1], again[0] @ again[1])


@row("LayerNorm")
def _() -> None:
    centred = X - X.mean(-1, keepdims=True)
    same(F.layer_norm(X), centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5))


@row("RMSNorm")
def _() -> None:
    same(F.rms_norm(X), X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-5))


@row("feed-forward layer")
def _() -> None:
    layer = nn.FeedForward(8, 12, dtype="float64")
    w1, w2 = matrices(layer)
    same(layer(mg.Tensor(X)), np.maximum(X @ w1.T, 0) @ w2.T)


@row("SwiGLU and its kin")
def _() -> None:
    swiglu = nn.SwiGLU(8, 12, dtype="float64")
    w1, w2, w3 = matrices(swiglu)
    same(swiglu(mg.Tensor(X)), (X @ w1.T * sigmoid(X @ w1.T) * (X @ w3.T)) @ w2.T)
    for name, activation in (("sigmoid", sigmoid), ("relu", lambda x: np.maximum(x, 0))):
        layer = nn.FeedForward(8, 12, name, bias=False, gated=True, dtype="float64")
        w1, w2, w3 = matrices(layer)
        same(layer(mg.Tensor(X)), (activation(X @ w1.T) * (X @ w3.T)) @ w2.T)


@row("GELU")
def _() -> None:
    same(F.gelu(X), [[[x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in line] for line in part] for part in X])


@row("pre-norm and post-norm")
def _() -> None:
    for first in (True, False):
        layer = nn.EncoderLayer(8, 2, 12, 0.0, norm_first=first, dtype="float64")
        x = mg.Tensor(X)
        if first:
            x = x + layer.self_attn(layer.ln1(x))
            x = x + layer.ffn(layer.ln2(x))
        else:
            x = layer.ln1(x + layer.self_attn(x))
            x = layer.ln2(x + layer.ffn(x))
        same(layer(mg.Tensor(X)), x.data)


@row("dropout")
def _() -> None:
    out = F.dropout(mg.ones(100_000), 0.25, True).data
    assert set(np.unique(out.round(6))) == {0.0, np.float32(4 / 3).round(6)}
    assert abs(out.mean() - 1) < 0.01


@row("label smoothing")
def _() -> None:
    q = np.full((2, 3, 8), 0.1 / 8)
    q[:, :, 2] += 0.9
    same(F.cross_entropy(X, np.full((2, 3), 2), label_smoothing=0.1), -(q * np.log(softmax(X))).sum(-1).mean())


@row("perplexity")
def _() -> None:
    model = nn.TransformerLM(7, 4, 8, 1, 2, dtype="float64")
    tokens = np.array([1, 5, 2, 6, 3])
    log_p = np.log(softmax(model(tokens[None, :-1]).data[0]))
    same(nn.perplexity(model, tokens), math.exp(-log_p[np.arange(4), tokens[1:]].mean()))


@row("first weights")
def _() -> list[str]:
    w = nn.Linear(300, 500, generator=1).weight.data
    sigma = math.sqrt(2 / 800)
    assert np.abs(w).max() <= 3 * sigma
    cut = math.exp(-4.5) / math.sqrt(2 * math.pi)
    expected = math.sqrt(1 - 6 * cut / math.erf(3 / math.sqrt(2)))  # of a normal cut at 3
    assert abs(w.std() / sigma - expected) < 0.005
    return [f"{expected:.3f} σ"]


@row("Adam")
def _() -> None:
    check_steps(optim.Adam, 0.0)


@row("AdamW")
def _() -> None:
    check_steps(optim.AdamW, 0.1)


def check_steps(kind: type[optim.Adam], decay: float) -> None:
    theta, m, v = 2.0, 0.0, 0.0
    p = mg.Tensor(np.array([theta]), requires_grad=True)
    optimizer = kind([p], lr=0.01, betas=(0.8, 0.9), eps=1e-2, weight_decay=decay)
    for t in range(1, 6):
        g = math.sin(t)
        theta *= 1 - 0.01 * decay
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        theta -= 0.01 * (m / (1 - 0.8**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-2)
        p.grad = np.array([g])
        optimizer.step()
    same(p, [theta])


@row("cosine schedule")
def _() -> None:
    same(optim.cosine_schedule(30, 1.0, 0.1, 10, 110), 0.1 + 0.45 * (1 + math.cos(math.pi * 0.2)))
    same(optim.cosine_schedule(5, 1.0, 0.1, 10, 110), 0.5)


@row("noam schedule")
def _() -> None:
    for step in (1, 3999, 4000, 9000):
        same(optim.noam_schedule(step, 512), 512**-0.5 * min(step**-0.5, step * 4000**-1.5))


@row("gradient clipping")
def _() -> None:
    p = mg.Tensor(np.zeros(2), requires_grad=True)
    p.grad = np.array([3.0, 4.0])
    same(optim.clip_grad_norm([p], 1.0), 5.0)
    same(p.grad, np.array([3.0, 4.0]) / (5 + 1e-6))


@row("linear attention")
def _() -> None:
    q, k, v = np.random.default_rng(1).standard_normal((3, 5, 4))
    features = [np.where(x > 0, x + 1, np.exp(x)) for x in (q, k)]
    weights = np.tril(features[0] @ features[1].T)
    same(F.linear_attention(q, k, v, is_causal=True), weights @ v / weights.sum(-1, keepdims=True))


def learned(module: nn.Module) -> list[np.ndarray]:
    """The parameters of an adapter, filled with numbers as after training."""
    rng = np.random.default_rng(3)
    found = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in found:
        parameter.data = rng.standard_normal(parameter.shape)
    return [parameter.data for parameter in found]


@row("LoRA")
def _() -> None:
    layer = nn.lora(nn.Linear(8, 5, dtype="float64"), rank=2, alpha=6, targets="*")
    w, before = layer.weight.data, layer(X).data
    same(before, X @ w.T)
    a, b = learned(layer)
    same(layer(X), X @ w.T + 3 * X @ a.T @ b.T)
    assert np.linalg.matrix_rank(b @ a) == 2


@row("adapters")
def _() -> None:
    layer = nn.adapters(nn.Linear(8, 5, dtype="float64"), 3, "*", activation="relu")
    y = X @ layer.weight.data.T
    same(layer(X), y)
    down, down_bias, up, up_bias = learned(layer)
    same(layer(X), y + np.maximum(y @ down.T + down_bias, 0) @ up.T + up_bias)


@row("EWC")
def _() -> None:
    """A bias alone: ∂ log p(y)/∂b_c = 1[c = y] - p_c, with the mean square p_c (1 - p_c), here of a fair coin 1/4."""
    coin = nn.Linear(1, 2)
    coin.load_state_dict({"weight": np.zeros((2, 1)), "bias": np.zeros(2)})
    fisher = nn.fisher(coin, [(np.zeros((3, 1), "float32"), np.zeros(3, int))])
    np.testing.assert_allclose(fisher["bias"], 1 / 4)
    term = nn.EWC(coin, 6.0, fisher)
    coin.bias.data += 2.0
    assert term().item() == 6 / 2 * 2 * (1 / 4) * 2.0**2


@row("prefixes")
def _() -> None:
    """Of one head, whose projections are the identity."""
    attention = nn.prefixes(nn.MultiHeadAttention(8, 1, dtype="float64"), 4, "*")
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj, attention.output_proj):
        layer.weight.data = np.eye(8)
    (keys,), (values,) = learned(attention)
    own, prefix = (np.exp(X @ np.swapaxes(k, -1, -2) / math.sqrt(8)) for k in (X, keys))
    share = prefix.sum(-1, keepdims=True) / (prefix.sum(-1, keepdims=True) + own.sum(-1, keepdims=True))
    of_text, of_prefix = own @ X / own.sum(-1, keepdims=True), prefix @ values / prefix.sum(-1, keepdims=True)
    same(attention(mg.Tensor(X)), (1 - share) * of_text + share * of_prefix)


# ---- the slips -------------------------------------------------------------------------------------------------------


@row("eps outside of the root")
def _() -> list[str]:
    x = np.array([3e-3, 4e-3])
    slip = x / (np.sqrt((x**2).mean()) + 1e-5)
    return [f"{F.rms_norm(x)[1]:.2f}", f"{slip[1]:.2f}"]


@row("AdamW's eps")
def _() -> list[str]:
    g = 1e-8
    p = mg.Tensor(np.zeros(1), requires_grad=True)
    p.grad = np.array([g])
    optim.AdamW([p], lr=1.0, weight_decay=0.0).step()
    m, v = 0.1 * g, 0.001 * g * g
    steps = [-p.data[0], math.sqrt(0.001) / 0.1 * m / (math.sqrt(v) + 1e-8)]
    return [f"{step:.2f} lr" for step in steps]


@row("the gate of GLU")
def _() -> list[str]:
    a, b = 4.0, 0.0
    return [f"{F.glu(np.array([a, b]))[0]:.0f}", f"{sigmoid(np.array(a)) * b:.0f}"]


@row("dropout as max_len")
def _() -> list[str]:
    with pytest.raises((ArgumentError, CallError), match="max_len"):
        nn.SinusoidalPositionalEncoding(8, 0.1)
    assert nn.SinusoidalPositionalEncoding(8, 100, 0.1).dropout.p == 0.1
    return ["max_len"]


@row("label smoothing that broadcasts")
def _() -> list[str]:
    log_p, ids = np.log(softmax(X[:, :2])), np.array([[0, 1], [2, 3]])  # (B, T, V) and (B, T), B = T
    own, mean = -np.take_along_axis(log_p, ids[..., None], -1), -log_p.mean(-1)
    right = 0.9 * own[..., 0] + 0.1 * mean
    same(F.cross_entropy(X[:, :2], ids, label_smoothing=0.1, reduction="none"), right)
    slip = 0.9 * own + 0.1 * mean  # (B, T, 1) + (B, T)
    assert slip.shape == (2, 2, 2)
    counted = np.array([[True, True], [True, False]])  # the last target is padding
    rows = 0.9 * own[counted] + 0.1 * mean[counted]  # (N, 1) + (N,)
    assert rows.shape == (3, 3)
    same(rows.mean(), right[counted].mean())
    first = slip.sum(axis=-1)[0, 0]  # a row's own loss is not what it was
    assert abs(first - right[0, 0]) > 0.1
    return ["(2, 2, 2)", "(3, 3)"]


@row("label smoothing of padding")
def _() -> list[str]:
    x, ids = np.array([[0.0, 0.0], [0.0, 0.0], [9.0, 0.0]]), np.array([0, 1, -100])
    log_p = np.log(softmax(x))
    own = -log_p[[0, 1], [0, 1]]
    slip = (0.9 * own.sum() - 0.1 * log_p.mean(-1).sum()) / 2
    return [f"{F.cross_entropy(x, ids, label_smoothing=0.1):.3f}", f"{slip:.3f}"]


@row("a mask without an axis of heads")
def _() -> list[str]:
    x = mg.Tensor(X)
    mask = np.tril(np.ones((2, 3, 3), bool))
    mask[1, :, 0] = False
    same(nn.MultiHeadAttention(8, 2)(x.astype("float32"), attn_mask=mask[:, None]).shape, (2, 3, 8))
    with pytest.raises(ShapeError, match="mask"):
        nn.MultiHeadAttention(8, 4, dtype="float64")(x, attn_mask=mask)
    two = nn.MultiHeadAttention(8, 2, dtype="float64")  # as many heads as sequences: nobody could tell
    per_head = np.stack([np.stack([mask[0], mask[1]])] * 2)
    same(two(x, attn_mask=mask), two(x, attn_mask=per_head).data)
    assert np.abs(two(x, attn_mask=mask).data - two(x, attn_mask=mask[:, None]).data).max() > 0.01
    return ["mask[:, None]"]


@row("a mask of −1e9")
def _() -> list[str]:
    v = np.array([[1.0], [3.0]])
    scores = np.zeros((1, 2)) - 1e9
    ours = F.scaled_dot_product_attention(np.zeros((1, 1)), np.zeros((2, 1)), v, np.zeros((1, 2), bool))
    with np.errstate(invalid="ignore", over="ignore"):
        assert np.isneginf(np.float16(-1e9))
        assert np.isnan(softmax(np.full((1, 2), -np.inf))).all()
    return [f"{(softmax(scores) @ v).item():.0f}", f"{ours.item():.0f}"]


@row("heads that are not transposed")
def _() -> list[str]:
    changed = X.copy()
    changed[:, 0] += 1.0
    split = [x.reshape(2, 3, 2, 4) for x in (X, changed)]  # (batch, positions, heads, d): heads attend to heads
    slip = [attention(x, x, x)[:, 2] for x in split]
    layer = nn.MultiHeadAttention(8, 2, dtype="float64")
    ours = [layer(mg.Tensor(x)).data[:, 2] for x in (X, changed)]
    assert np.abs(ours[0] - ours[1]).max() > 0.01
    return [f"by {np.abs(slip[0] - slip[1]).max():.0f}"]


@row("the output projection")
def _() -> list[str]:
    def count(module: nn.Module) -> int:
        return sum(p.size for p in module.parameters())

    assert count(nn.MultiHeadAttention(8, 2)) == 4 * 8 * 8
    return ["4 d²"]


@row("half a head in RoPE")
def _() -> list[str]:
    d = 8
    half = np.ones((5, d // 2)).reshape(5, d // 4, 2)
    frequencies = 10000.0 ** (-np.arange(0, d, 2) / d)
    with pytest.raises(ValueError, match="broadcast"):
        half[..., 0] * np.cos(np.arange(5)[:, None] * frequencies)
    turned = nn.RotaryEmbedding(d, 5)(mg.Tensor(np.ones((5, d)))).data[4]
    assert (np.abs(turned - 1) > 1e-3).all()
    return ["d/2 pairs"]


@row("scaling and tying of embeddings")
def _() -> list[str]:
    tokens = np.random.default_rng(1).integers(65, size=(8, 32))
    model = nn.TransformerLM(65, 32, 128, 1, 4, tie_embeddings=True, generator=3)
    right = float(model(tokens).data.std())
    model.token_embeddings.weight.data *= math.sqrt(128)  # the σ of a table in which tokens are only looked up
    slip = float(model(tokens).data.std())
    scaled = nn.TransformerLM(65, 32, 128, 1, 4, tie_embeddings=True, scale_embeddings=True, generator=3)
    assert abs(float((scaled.token_embeddings(tokens) * scaled.embedding_scale).data.std()) - 1) < 0.05
    return [f"{right:.1f}", f"{slip:.0f}"]


@row("raising the clipping threshold")
def _() -> list[str]:
    def descend(threshold: float) -> float:
        """Where 200 steps on x⁴ / 4 from x = 3 end; the gradient is x³."""
        p = mg.Tensor(np.array([3.0]), requires_grad=True)
        optimizer = optim.SGD([p], lr=0.4)
        for _ in range(200):
            p.grad = np.asarray(p.data) ** 3
            optim.clip_grad_norm([p], threshold)
            optimizer.step()
        return abs(p.data.item())

    ends = {threshold: descend(threshold) for threshold in (1.0, 100.0)}
    assert ends[1.0] < 0.1 < 3 < ends[100.0]
    return [f"{ends[1.0]:.2f}", f"{ends[100.0]:.0f}"]


@row("top-p that loses the token which crosses")
def _() -> list[str]:
    logits = np.log([0.5, 0.3, 0.2])
    kept = nn.next_token_probabilities(logits, top_p=0.6)
    same(logits, np.log([0.5, 0.3, 0.2]))
    same(kept, [0.625, 0.375, 0.0])
    return ["0.625, 0.375"]


@row("a cosine without an end")
def _() -> list[str]:
    with pytest.raises(ZeroDivisionError):
        math.cos(math.pi * (10 - 10) / (10 - 10))
    assert optim.cosine_schedule(10, 1.0, 0.1, 10, 10) == 0.1
    return ["0 / 0"]


@row("the mean of batch means")
def _() -> list[str]:
    losses = [[1.0] * 4, [3.0]]
    return [f"{math.exp(sum(map(sum, losses)) / 5):.2f}", f"{math.exp(np.mean([np.mean(x) for x in losses])):.2f}"]
