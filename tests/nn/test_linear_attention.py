"""Linear attention as a layer and a kind of the model: beside the formula, with a cache, and beyond the context."""

from __future__ import annotations

import numpy as np
import pytest

import minigrad as mg
import nn
import nn.functional as F
from minigrad.errors import ArgumentError, DTypeError, ShapeError

SIZES = {"vocab_size": 11, "context_length": 16, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 24}
TAYLOR = {"feature_map": "taylor", "feature_dim": 2}
KINDS = [
    {"attention": "linear"},
    {"linear": {"rope_place": "after"}},
    {"linear": {"feature_map": "identity", "decay": [0.9, 0.99]}},
    {"attention": ["linear", "window"], "window": 5, "linear": {**TAYLOR, "rope_place": None}},
    {"attention": ["full", "linear"], "linear": TAYLOR},
]


def language_model(**options):
    return nn.TransformerLM(**{**SIZES, "dtype": "float64", "generator": 1, "num_kv_heads": 2, **options})


def tokens_of(length, batch=2, seed=0):
    return np.random.default_rng(seed).integers(11, size=(batch, length))


def turned(x):
    """RoPE of (heads, T, d), written out."""
    t, d = x.shape[-2:]
    angles = np.arange(t)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)
    z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def elu(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def taylor(q, k):
    return 1 + (s := q @ k.mT * q.shape[-1] ** -0.5) + s * s / 2


def projected(layer, x, heads, size):
    """q, k and v of x in heads (heads, T, size)."""
    projections = layer.q_proj, layer.k_proj, layer.v_proj
    return [p(mg.Tensor(x)).data.reshape(len(x), heads, size).swapaxes(0, 1) for p in projections]


ROPE_PLACES = {  # weights, and those that are summed, of queries and keys (heads, T, d)
    None: lambda q, k: [elu(q) @ elu(k).mT] * 2,
    "before": lambda q, k: [elu(turned(q)) @ elu(turned(k)).mT] * 2,
    "after": lambda q, k: [turned(elu(q)) @ turned(elu(k)).mT, elu(q) @ elu(k).mT],
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("place", ROPE_PLACES)
@pytest.mark.cpu_only("NumPy beside arrays of the default device")
def test_rope_before_and_after_the_map(place, causal, agree):
    rope = nn.RotaryEmbedding(4, 9)
    layer = nn.LinearAttention(16, 4, 2, rope=rope, rope_place=place, dtype="float64", generator=0)
    x = np.random.default_rng(1).standard_normal((9, 16))
    q, k, v = (
        p(mg.Tensor(x)).data.reshape(9, -1, 4).swapaxes(0, 1) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    k, v = np.repeat(k, 2, 0), np.repeat(v, 2, 0)
    weights, summed = (w * (np.tri(9) if causal else 1) for w in ROPE_PLACES[place](q, k))
    means = weights @ v / summed.sum(-1, keepdims=True)
    agree(layer(mg.Tensor(x), is_causal=causal), layer.output_proj(mg.Tensor(means.swapaxes(0, 1).reshape(9, 16))).data)


@pytest.mark.cpu_only("NumPy beside arrays of the default device")
def test_features_of_a_size_of_their_own(agree):
    layer = nn.LinearAttention(16, 2, **TAYLOR, dtype="float64", generator=0)
    assert [p.weight.shape for p in (layer.q_proj, layer.k_proj, layer.v_proj)] == [(4, 16), (4, 16), (16, 16)]
    x = np.random.default_rng(1).standard_normal((9, 16))
    q, k, v = (
        p(mg.Tensor(x)).data.reshape(9, 2, -1).swapaxes(0, 1) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    weights = taylor(q, k) * np.tri(9)
    means = weights / weights.sum(-1, keepdims=True) @ v
    agree(layer(mg.Tensor(x), is_causal=True), layer.output_proj(mg.Tensor(means.swapaxes(0, 1).reshape(9, 16))).data)
    agree(layer.weights(mg.Tensor(x), is_causal=True).data, weights / weights.sum(-1, keepdims=True))


@pytest.mark.cpu_only("NumPy beside arrays of the default device")
def test_retention_is_normalised_in_each_head(agree):
    decay = (0.9, 0.5)
    layer = nn.LinearAttention(16, 2, feature_map="identity", decay=decay, dtype="float64", generator=0)
    x = np.random.default_rng(1).standard_normal((9, 16))
    q, k, v = projected(layer, x, 2, 8)
    i, j = np.indices((9, 9))
    fading = np.array(decay)[:, None, None] ** np.where(j <= i, i - j, np.inf)
    sums = (q @ k.mT * 8**-0.5 * fading) @ v
    heads = sums / np.sqrt((sums**2).mean(-1, keepdims=True) + 1e-5)
    agree(layer(mg.Tensor(x), is_causal=True), layer.output_proj(mg.Tensor(heads.swapaxes(0, 1).reshape(9, 16))).data)


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_later_token_changes_nothing_earlier(options):
    model, tokens = language_model(**options), tokens_of(16)
    before = model(tokens).data
    for place in (0, 7, 15):
        changed = tokens.copy()
        changed[0, place] = (changed[0, place] + 1) % 11
        after = model(changed).data
        np.testing.assert_array_equal(after[0, :place], before[0, :place])
        np.testing.assert_array_equal(after[1], before[1])
        assert (after[0, place:] != before[0, place:]).any(-1).all() or "window" in str(options)


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.cpu_only("NumPy beside arrays of the default device")
def test_gradients_of_the_model(options):
    model, tokens = language_model(**options), tokens_of(6)
    model.loss(tokens, tokens[:, ::-1]).backward()
    draw, step = np.random.default_rng(3), 1e-6
    for parameter in model.parameters():
        direction = draw.standard_normal(parameter.shape)
        losses = []
        for sign in (1, -1, -1):
            parameter.data += sign * step * direction
            losses.append(model.loss(tokens, tokens[:, ::-1]).item())
        parameter.data += step * direction
        slope = (losses[0] - losses[2]) / (2 * step)
        assert slope == pytest.approx((parameter.grad * direction).sum(), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_half_precision(options, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    model, tokens = language_model(**options, dtype="float32"), tokens_of(14)
    full = model.loss(tokens, tokens).item()
    with mg.autocast(dtype):
        loss = model.loss(tokens, tokens)
    loss.backward()
    assert abs(loss.item() - full) < 0.05 * full
    assert all(np.isfinite(p.grad).all() and p.grad.dtype == np.float32 for p in model.parameters())


def test_a_model_is_saved_and_loaded(tmp_path):
    model, tokens = language_model(**KINDS[3]), tokens_of(9)
    mg.save(tmp_path / "model.safetensors", model.state_dict())
    other = language_model(**KINDS[3], generator=2)
    other.load_state_dict(mg.load(tmp_path / "model.safetensors"))
    np.testing.assert_array_equal(other(tokens).data, model(tokens).data)


def test_dropout_is_that_of_the_branches():
    model = language_model(attention="linear", dropout=0.5)
    assert model.layers[0].dropout.p == 0.5
    assert model.layers[0].attn.dropout == 0
    assert model.loss(tokens_of(9), tokens_of(9)).item() > 0


# ---- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_with_a_cache_as_without_one(options, agree):
    model = language_model(**options)
    assert model.endless == ("full" not in options.get("attention", ""))
    length = 57 if model.endless else 16
    tokens, cache, start = tokens_of(length), nn.KVCache(model), 0
    with mg.no_grad():
        whole = model(tokens).data
        for count in (3, 1, 4, 1, 1, 6, *[1] * 20, 9, *[1] * 12):
            if start + count <= length:
                agree(model(tokens[:, start : start + count], cache=cache), whole[:, start : start + count])
                start += count
    assert start == length == cache.length


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_texts_of_prompts_of_several_lengths(options):
    """Beyond the context, where the model is endless: each as if it were alone and read whole."""
    model = language_model(**options)
    more = 25 if model.endless else 6
    prompts = [tokens_of(n, 1, n)[0].tolist() for n in (1, 4, 9)]
    for prompt, text in zip(prompts, nn.generate(model, prompts, more, temperature=0), strict=True):
        expected = list(prompt)
        with mg.no_grad():
            for _ in range(more):
                expected.append(int(model.next_logits([expected]).data.argmax()))
        assert text.tolist() == expected


def test_beams_are_those_of_texts_read_whole():
    model = language_model(**KINDS[3])
    for beam in nn.beam_search(model, tokens_of(12, 1)[0], 9, 3):
        with mg.no_grad():
            logits = model(beam.tokens[None, :-1]).data[0, 11:]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total = np.take_along_axis(log_p, beam.tokens[12:, None], -1).sum()
        assert beam.log_probability == pytest.approx(total, rel=1e-10)


def test_the_memory_of_a_linear_model_is_constant():
    """2 layers of 2 heads of keys, 1 + d + d² = 7 features by 4 values and their sum."""
    model = language_model(attention="linear", linear=TAYLOR)
    cache = nn.KVCache(model)
    for token in range(40):
        model.next_logits([[token % 11]], cache)
        assert sum(state.size for state in cache._states.values()) == 2 * 2 * 7 * 5
        assert not cache._own


def test_a_call_that_fails_changes_nothing(agree):
    model, tokens = language_model(attention="linear"), tokens_of(12)
    cache = nn.KVCache(model)
    with mg.no_grad():
        whole = model(tokens).data
    for start in range(12):
        last, model.layers[1].forward = model.layers[1].forward, None
        with pytest.raises(TypeError):
            model(tokens[:, start : start + 2] * 0, cache=cache)
        model.layers[1].forward = last
        agree(model(tokens[:, start : start + 1], cache=cache), whole[:, start : start + 1])


# ---- the encoder-decoder ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"attention": "linear"}, {"attention": ["linear", "full"], "linear": TAYLOR}, {"window": 3},
    {"attention": ["window", "linear"], "window": 3},
], ids=str)  # fmt: skip
def test_an_encoder_decoder(options, agree):
    """Padding of the source counts for nothing, a later target changes nothing earlier, a cache changes nothing."""
    sizes = {"d_model": 16, "num_heads": 4, "num_layers": 2, "d_ff": 24, "dropout": 0.0, "max_len": 20}
    model = nn.Transformer(11, 11, **sizes, **options, pad_id=0, dtype="float64", generator=1)
    source, target = 1 + tokens_of(9) % 10, 1 + tokens_of(7, seed=1) % 10
    whole = model(source, target).data
    agree(model(np.pad(source, ((0, 0), (0, 4))), target).data, whole)
    changed = target.copy()
    changed[:, 5] = 1 + changed[:, 5] % 10
    np.testing.assert_array_equal(model(source, changed).data[:, :5], whole[:, :5])
    cache = model.start(source)
    for t in range(7):
        agree(model.next_logits(target[:, t : t + 1], cache).data, whole[:, t])
    model.loss(source, target, target).backward()
    assert all(
        np.isfinite(p.grad).all() and p.grad.any() for name, p in model.named_parameters() if "k_proj.b" not in name
    )


# ---- errors ----------------------------------------------------------------------------------------------------------

x = mg.ones((2, 5, 16))
layer = nn.LinearAttention(16, 2)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: language_model(attention="linear", linear={"feature_map": "relu"}), ArgumentError, "'elu[+]1'"),
        (lambda: language_model(attention="linear", linear={"feature_dim": 0}), ArgumentError, "feature_dim"),
        (lambda: language_model(attention="linear", linear={"decay": 0}), ArgumentError, "a decay above 0"),
        (lambda: language_model(attention="linear", linear={"decay": 1.01}), ArgumentError, "a decay above 0"),
        (lambda: language_model(attention="full", linear={}), ArgumentError, "takes the linear"),
        (lambda: language_model(attention="linear", window=3), ArgumentError, "takes the window"),
        (lambda: language_model(linear={"rope_place": "beside"}), ArgumentError, "rope_place"),
        (lambda: language_model(linear={**TAYLOR, "rope_place": "after"}), ArgumentError, "Taylor"),
        (lambda: nn.KVCache(language_model(attention="linear"), sinks=2), ArgumentError, "no sinks"),
        (lambda: nn.save_pretrained(language_model(attention="linear"), "nowhere"), ArgumentError, "linear attention"),
        (lambda: layer(x, x), ArgumentError, "no context"),
        (lambda: layer(x, attn_mask=np.zeros((5, 5))), DTypeError, "a boolean mask of keys alone"),
        (lambda: layer(x, attn_mask=nn.causal_mask(5)), ShapeError, "is_causal=True"),
        (lambda: layer(x, cache=nn.KVCache(None, 8)), ArgumentError, "is_causal=True with a cache"),
        (lambda: nn.LinearAttention(16, 2, decay=0.5)(x), ArgumentError, "is_causal=True beside a decay"),
    ],
)
def test_what_does_not_fit_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_functions_and_layers_have_one_list_of_feature_maps():
    for name in ("elu+1", "taylor", "identity"):
        assert F.linear_attention(*[np.ones((3, 2))] * 3, feature_map=name).shape == (3, 2)
        assert nn.LinearAttention(4, 2, feature_map=name).feature_map == name


@pytest.mark.parametrize("given", [{"window": 8}, {"pattern": nn.BlockPattern(np.ones((2, 2), bool), 4)}])
def test_a_window_or_a_pattern_of_linear_attention_is_refused_not_dropped(given):
    for make in (
        lambda: nn.LinearAttention(16, 4, **given),
        lambda: nn.TransformerBlock(16, 4, linear={}, **given),
        lambda: nn.TransformerLM(10, 8, 16, 1, 4, linear={}, **given),
    ):
        with pytest.raises(ArgumentError, match="without a window and a pattern"):
            make()
