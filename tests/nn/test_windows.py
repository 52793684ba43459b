"""Windows and patterns of blocks as options of the model: beside dense masks, with a cache, and beyond the context."""

from __future__ import annotations

import numpy as np
import pytest

import minigrad as mg
import nn
import nn.functional as F
from minigrad.errors import ArgumentError, DTypeError, ShapeError

SIZES = {"vocab_size": 11, "context_length": 16, "d_model": 16, "num_layers": 3, "num_heads": 4, "d_ff": 24}
BLOCKS = nn.BlockPattern.local(60, 3, reach=0, drawn=3)
SHAPES = [
    {"window": 5},
    {"window": [5, None, 1]},
    {"window": 4, "attention": ["window", "full", "window"]},
    {"pattern": BLOCKS},
    {"pattern": BLOCKS, "window": 7, "attention": ["blocks", "window", "full"]},
]
ENDLESS = [{"window": 5}, {"window": [5, 3, 7]}, {"window": [16, 40, 1]}]


def language_model(**options):
    model = nn.TransformerLM(**{**SIZES, "dtype": "float64", "generator": 1, "num_kv_heads": 2, **options})
    for parameter in model.parameters():  # far from uniform
        parameter.data *= 1.5
    return model


def tokens_of(length, batch=2, seed=0):
    return np.random.default_rng(seed).integers(11, size=(batch, length))


def dense_masks(length, **options):
    """What each of the layers sees, written out."""
    i, j = np.indices((length, length))
    kinds = options.get("attention", [None] * 3)
    masks = []
    for layer, kind in enumerate(kinds):
        mask, window = i >= j, options.get("window")
        window = window[layer] if isinstance(window, list) else window
        if window and kind in (None, "window"):
            mask &= i - j < window
        if "pattern" in options and kind in (None, "blocks"):
            mask &= np.kron(BLOCKS.blocks, np.ones((3, 3), bool))[:length, :length]
        masks.append(mask)
    return masks


def with_masks(model, tokens, masks):
    x = model.token_embeddings(tokens)
    for layer, mask in zip(model.layers, masks, strict=True):
        x = layer(x, attn_mask=mask, is_causal=False)
    return model.lm_head(model.ln_final(x))


# ---- equalities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_a_model_is_that_of_dense_masks(options, agree):
    """Logits and all gradients."""
    tokens, results = tokens_of(14), []
    for shape in (options, {}):
        model = language_model(**shape)
        logits = with_masks(model, tokens, dense_masks(14, **options)) if not shape else model(tokens)
        F.cross_entropy(logits, tokens[:, ::-1]).backward()
        results.append([logits.data, *(p.grad for p in model.parameters())])
    for ours, dense in zip(*results, strict=True):
        agree(ours, dense)


def test_a_window_as_wide_as_the_text_is_none_bit_for_bit():
    tokens = tokens_of(16)
    for window in (16, 1000):
        ours, full = (m.loss(tokens, tokens) for m in (language_model(window=window), language_model()))
        assert ours.data == full.data


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_a_later_token_changes_nothing_earlier_and_none_beyond_a_window_matters(options):
    model, tokens = language_model(**options), tokens_of(16)
    before = model(tokens).data
    for place in (3, 9, 15):
        changed = tokens.copy()
        changed[0, place] = (changed[0, place] + 1) % 11
        after = model(changed).data
        np.testing.assert_array_equal(after[0, :place], before[0, :place])
        np.testing.assert_array_equal(after[1], before[1])
        assert (after[0, place] != before[0, place]).any()
        sees = np.linalg.multi_dot([mask.astype(int) for mask in dense_masks(16, **options)[::-1]]) > 0
        np.testing.assert_array_equal((after != before)[0].any(-1), sees[:, place])


def test_weights_to_look_at_have_the_window():
    x = mg.random.normal(size=(2, 9, 16))
    layer = nn.MultiHeadAttention(16, 4, window=3)
    weights = layer.weights(x, is_causal=True).data
    i, j = np.indices((9, 9))
    np.testing.assert_array_equal(weights[0, 0] > 0, (j <= i) & (i - j < 3))
    np.testing.assert_allclose(weights.sum(-1), np.ones((2, 4, 9)), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", SHAPES[::2], ids=str)
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


# ---- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [*SHAPES, *ENDLESS, {}], ids=str)
def test_with_a_cache_as_without_one(options, agree):
    """Read in pieces of several sizes; endless models beyond their context, where positions of rope have no table."""
    model = language_model(**options)
    length = 57 if model.endless else 16
    tokens = tokens_of(length)
    cache, start = nn.KVCache(model), 0
    with mg.no_grad():
        whole = model(tokens).data
        for count in (3, 1, 4, 1, 1, 6, *[1] * 20, 9, *[1] * 12):
            if start + count <= length:
                agree(model(tokens[:, start : start + count], cache=cache), whole[:, start : start + count])
                start += count
    assert start == length == cache.length


@pytest.mark.parametrize("options", ENDLESS, ids=str)
def test_texts_beyond_the_context(options):
    """Of prompts of all lengths, each as if it were alone and read whole."""
    model = language_model(**options)
    prompts = [tokens_of(n, 1, n)[0].tolist() for n in (1, 4, 9, 30)]
    for prompt, text in zip(prompts, nn.generate(model, prompts, 25, temperature=0), strict=True):
        expected = list(prompt)
        with mg.no_grad():
            for _ in range(25):
                expected.append(int(model.next_logits([expected]).data.argmax()))
        assert text.tolist() == expected


def test_beams_beyond_the_context_are_those_of_texts_read_whole():
    model = language_model(window=5)
    for beam in nn.beam_search(model, tokens_of(12, 1)[0], 25, 3):
        with mg.no_grad():
            logits = model(beam.tokens[None, :-1]).data[0, 11:]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total = np.take_along_axis(log_p, beam.tokens[12:, None], -1).sum()
        assert beam.log_probability == pytest.approx(total, rel=1e-10)


def test_the_memory_of_a_windowed_model_is_constant():
    model, sizes = language_model(window=[5, 3, 7]), set()
    cache = nn.KVCache(model)
    for token in range(60):
        model.next_logits([[token % 11]], cache)
        sizes.add(sum(room.shape[-2] for held in cache._own.values() for room in held.rooms))
    assert sizes == {2 * (10 + 6 + 14)}
    model.next_logits(tokens_of(50, 1), cache)
    for token in range(20):
        model.next_logits([[token % 11]], cache)
    assert {sum(room.shape[-2] for held in cache._own.values() for room in held.rooms)} == sizes


def test_a_call_that_fails_changes_nothing(agree):
    """Also where a layer has moved what it holds."""
    model, tokens = language_model(window=3), tokens_of(30)
    cache = nn.KVCache(model)
    with mg.no_grad():
        whole = model(tokens).data
    for start in range(29):
        last, model.layers[2].forward = model.layers[2].forward, None
        with pytest.raises(TypeError):
            model(tokens[:, start : start + 2] * 0, cache=cache)
        model.layers[2].forward = last
        agree(model(tokens[:, start : start + 1], cache=cache), whole[:, start : start + 1])


# ---- attention sinks -------------------------------------------------------------------------------------------------


def streamed(model, tokens, sinks, most):
    """Token by token, as the paper says it: keys of the first ``sinks`` and the last positions, counted among them."""
    held = [[] for _ in model.layers]
    for token in tokens:
        x = model.token_embeddings([[token]])
        for layer, kept in zip(model.layers, held, strict=True):
            attn, h = layer.attn, layer.ln1(x)
            kept.append([p(h).data.reshape(-1, 4) for p in (attn.k_proj, attn.v_proj)])
            if len(kept) > most:
                del kept[sinks]
            k, v = (np.stack(part, 1) for part in zip(*kept, strict=True))
            k = np.repeat(attn.rope(mg.Tensor(k)).data, 2, 0)
            q = attn.rope(mg.Tensor(attn.q_proj(h).data.reshape(4, 1, 4)), [len(kept) - 1]).data
            scores = (q @ k.swapaxes(1, 2)) / 2
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mean = weights / weights.sum(-1, keepdims=True) @ np.repeat(v, 2, 0)
            x = x + attn.output_proj(mg.Tensor(mean.reshape(1, 1, 16)))
            x = x + layer.ffn(layer.ln2(x))
        yield model.lm_head(model.ln_final(x)).data[0, -1]


@pytest.mark.parametrize(("options", "most"), [({}, 16), ({}, 9), ({"window": 6}, 8), ({"window": [6, None, 4]}, 6)])
def test_sinks_are_those_of_the_paper(options, most, agree):
    model, tokens = language_model(**options), tokens_of(25, 1)[0]
    cache = nn.KVCache(model, most if not options else None, sinks=2)
    assert cache.max_length == most
    with mg.no_grad():
        for n, expected in enumerate(streamed(model, tokens, 2, most)):
            if n == 4:
                agree(model.next_logits(tokens[None, :5], cache).data[0], expected)
            if n > 4:
                agree(model.next_logits(tokens[None, n : n + 1], cache).data[0], expected)
    assert all(room.shape[-2] == most for held in cache._own.values() for room in held.rooms)


def test_texts_with_sinks():
    """Also of a prompt that is longer than the context."""
    model = language_model()
    for length in (12, 16, 30):
        expected = tokens_of(length, 1)[0].tolist()
        text = nn.generate(model, expected, 9, temperature=0, sinks=3)
        for n in range(length, length + 9):
            *_, logits = streamed(model, text[:n], 3, 16)
            assert text[n] == logits.argmax()


# ---- errors ----------------------------------------------------------------------------------------------------------

x = mg.ones((2, 5, 16))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: language_model(window=0), ArgumentError, "window, a whole number from 1"),
        (lambda: language_model(window=[3, 4]), ArgumentError, "3 layers"),
        (lambda: language_model(attention="linearly"), ArgumentError, "'linearly'"),
        (lambda: language_model(attention="window"), ArgumentError, "window=None in layer 0"),
        (lambda: language_model(attention="full", window=4), ArgumentError, "takes the window"),
        (lambda: language_model(attention=["full", "blocks", "full"]), ArgumentError, "pattern=None in layer 1"),
        (lambda: language_model(attention=["full"] * 3, window=[None, 3, None]), ArgumentError, "layer 1"),
        (lambda: language_model(pattern=np.ones((4, 4), bool)), DTypeError, "nn.BlockPattern"),
        (lambda: language_model(pattern=nn.BlockPattern([[True]], 4))([[1] * 5]), ShapeError, "2 x 2 blocks of 4"),
        (lambda: nn.MultiHeadAttention(16, 2, window=3)(x, x), ArgumentError, "no window"),
        (lambda: language_model()([[1] * 17]), ShapeError, "context_length = 16"),
        (lambda: nn.KVCache(language_model(), sinks=16), ArgumentError, "fewer sinks"),
        (lambda: nn.KVCache(language_model(), sinks=-1), ArgumentError, "sinks"),
        (lambda: nn.KVCache(language_model(), sinks=2).reset(padding=[0, 1]), ShapeError, "one length"),
        (lambda: nn.generate(language_model(), [[1], [2, 3]], 3, sinks=2), ShapeError, "one length"),
        (lambda: language_model()([[1] * 17], nn.KVCache(language_model(), sinks=2)), ShapeError, "at most 16"),
        (lambda: nn.generate(nn.Transformer(9, 9, 8, 2, 1), [1], 3, source=[1], sinks=2), ArgumentError, "rope"),
        (
            lambda: nn.MultiHeadAttention(16, 4)(x, attn_mask=np.ones((5, 5), bool), cache=sunk()),
            ArgumentError,
            "sinks",
        ),
    ],
)
def test_mistakes_are_explained(call, kind, words):
    with mg.no_grad(), pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)


def sunk():
    return nn.KVCache(language_model(), sinks=2)
