"""A new position through a block on raw arrays: the numbers of its own operations, and only where nothing watches."""

from __future__ import annotations

import numpy as np
import pytest

import minigrad as mg
import nn
from minigrad.machine import loops
from nn import decoding

pytestmark = pytest.mark.cpu_only("a GPU runs the block's operations")

KINDS = {
    "plain": {},
    "grouped queries": {"num_kv_heads": 2},
    "one head of keys, halves": {"num_kv_heads": 1, "rope_layout": "half"},
    "windows": {"window": [3, None], "num_kv_heads": 2},
    "endless": {"window": 5, "context_length": 16},
    "tied, wide heads": {"tie_embeddings": True, "scale_embeddings": True, "head_dim": 10},
    "float64": {"dtype": "float64"},
    "biases and norms of heads": {"attention_bias": True, "qk_norm": True, "num_kv_heads": 2},
    "stretched": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


def model_of(**options):
    sizes = {"vocab_size": 19, "context_length": 48, "d_model": 24, "num_layers": 2, "num_heads": 4, "d_ff": 40}
    model, draw = nn.TransformerLM(**{**sizes, "generator": 1, **options}).eval(), np.random.default_rng(5)
    with mg.no_grad():
        for vector in (p for p in model.parameters() if p.ndim == 1):  # biases start at 0, weights of norms at 1
            vector += draw.standard_normal(vector.shape).astype(vector.dtype) / 4
    return model


@pytest.fixture(params=["numpy", "compiled"])
def taken(request, monkeypatch):
    """How many blocks took the short way, on NumPy alone and with compiled loops."""
    before, calls, way = loops._state.wanted, [], decoding.position
    mg.set_compiled(False) if request.param == "numpy" else setattr(loops._state, "wanted", True)
    monkeypatch.setattr(decoding, "position", lambda blocks, *args: calls.extend(blocks) or way(blocks, *args))
    yield calls
    loops._state.wanted = before


def ordinary(monkeypatch, write):
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "fits", lambda *_: False)
        return write()


def logits_of(model, tokens, padding=None):
    """Logits (positions, batch, vocab) of all tokens (batch, T) but the first three, each read through the cache."""
    cache = nn.KVCache(model, max_length=None if model.endless else tokens.shape[1])
    cache.reset(padding)
    _ = model.next_logits(tokens[:, :3], cache)
    return np.array([model.next_logits(tokens[:, i : i + 1], cache).data for i in range(3, tokens.shape[1])])


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("padding", [None, [0, 2, 1]])
def test_positions_have_the_logits_of_the_blocks_operations(taken, monkeypatch, options, padding):
    model, tokens = model_of(**options), np.random.default_rng(2).integers(0, 19, (3, 20))
    found = logits_of(model, tokens, padding)
    assert len(taken) == 2 * 17
    expected = ordinary(monkeypatch, lambda: logits_of(model, tokens, padding))
    assert len(taken) == 2 * 17
    np.testing.assert_allclose(found, expected, rtol=0, atol=16 * np.finfo(found.dtype).eps * abs(expected).max())


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_texts_are_those_of_the_blocks_operations(taken, monkeypatch, options):
    model, prompts = model_of(**options), [[1, 2, 3, 4, 5], [6], [7, 8, 9]]

    def write():
        texts = nn.generate(model, prompts, 25, temperature=0), nn.beam_search(model, prompts[0], 8, beam_size=3)
        return [row.tolist() for row in texts[0]], [beam.tokens.tolist() for beam in texts[1]]

    found, count = write(), len(taken)
    assert count
    assert found == ordinary(monkeypatch, write)
    assert len(taken) == count


def test_a_position_equals_the_whole_text_without_a_cache(taken):
    model, tokens = model_of(dtype="float64", num_kv_heads=2), np.random.default_rng(3).integers(0, 19, (2, 9))
    with mg.no_grad():
        whole = model(tokens).data
    np.testing.assert_allclose(logits_of(model, tokens), whole[:, 3:].swapaxes(0, 1), rtol=1e-11)
    assert taken


@pytest.mark.parametrize("options", [{}, {"dtype": "float64"}, KINDS["biases and norms of heads"]])
@pytest.mark.parametrize(("small", "padded"), [(True, True), (True, False), (False, True)])
def test_threads_share_sequences_or_matrices_and_change_no_bit(taken, monkeypatch, options, small, padded):
    """As they do in wide models: sequences of usual matrices, else the rows of large ones."""
    model, tokens = model_of(**options), np.random.default_rng(4).integers(0, 19, (19, 6))
    padding = np.arange(19) % 3 if padded else None
    expected, threads, found = (
        ordinary(monkeypatch, lambda: logits_of(model, tokens, padding)),
        mg.get_num_threads(),
        [],
    )
    shared, run = [], decoding.run
    monkeypatch.setattr(decoding, "MIN_PARALLEL_NS", 1 if small else 0)
    monkeypatch.setattr(decoding, "NS_PER_WEIGHT", 0 if small else 1)
    monkeypatch.setattr(decoding, "run", lambda tasks, *_: shared.append(len(tasks)) or run(tasks))
    for count in (1, 2):
        mg.set_num_threads(count)
        found.append(logits_of(model, tokens, padding))
    mg.set_num_threads(threads)
    assert shared == ([3] * 6 if small and mg.is_compiled() else [])
    assert found[0].tobytes() == found[1].tobytes()
    tolerance = 32 * np.finfo(found[0].dtype).eps * abs(expected).max()
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=tolerance)


def watched(model, seen):
    """What makes a model's first block run its operations, by name; a hook writes to ``seen``."""
    block = model.layers[0]
    return {
        "hook on a layer": lambda: block.ffn.w2.register_forward_hook(lambda *_: seen.append(1)),
        "hook on the output": lambda: block.attn.output_proj.register_forward_hook(lambda *_: seen.append(1)),
        "hook on the rope": lambda: block.attn.rope.register_forward_hook(lambda *_: seen.append(1)),
        "hook on dropout": lambda: block.dropout.register_forward_hook(lambda *_: seen.append(1)),
        "another layer": lambda: setattr(block.attn, "output_proj", nn.Sequential(block.attn.output_proj)),
        "narrow keys": lambda: setattr(block, "attn", nn.MultiHeadAttention(24, 4, key_dim=4, generator=1)),
        "a bias": lambda: setattr(block.ffn, "w2", nn.Linear(40, 24, generator=1)),
    }


@pytest.mark.parametrize("name", watched(model_of(), []))
def test_what_is_watched_or_replaced_runs_its_own_operations(taken, name):
    seen: list[int] = []
    model, tokens = model_of(), np.ones((1, 6), int)
    watched(model, seen)[name]()
    logits_of(model, tokens)
    assert len(taken) == (0 if "rope" in name else 3)  # the rope is that of both blocks
    assert bool(seen) == name.startswith("hook")


def test_modes_that_change_or_see_operations_keep_them(taken):
    model, tokens = model_of(), np.ones((1, 6), int)
    with mg.autocast("float16"):
        logits_of(model, tokens)
    with mg.profile() as profile:
        logits_of(model, tokens)
    assert "qkv_projection" in str(profile)
    model.layers[0].dropout.p = model.layers[1].attn.dropout = 0.5
    logits_of(model.train(), tokens)
    cache = nn.KVCache(model.eval(), sinks=1)
    _ = model.next_logits([[1]], cache), model.next_logits([[1]], cache)
    assert not taken


def test_a_hook_on_the_head_sees_each_position(taken):
    model, seen = model_of(), []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    logits_of(model, np.ones((2, 6), int))
    assert len(seen) == 4


def attended(q, keys, values, seen, first, stop):
    """The definition, a query at a time, in float64."""
    out = np.zeros(q.shape)
    for i, j in np.ndindex(q.shape[:2]):
        places = [t for t in range(first, stop) if seen is None or seen[i, t - first]]
        scores = np.array([q[i, j].astype(float) @ keys[i, t] for t in places]) / np.sqrt(q.shape[2])
        if places:
            weights = np.exp(scores - scores.max())
            out[i, j] = weights @ values[i, places].astype(float) / weights.sum()
    return out


@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_single_queries(taken, scale, masked):
    rng = np.random.default_rng(4)
    q, keys, values = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 2, 5), (3, 9, 5), (3, 9, 5)))
    q *= scale
    seen = rng.random((3, 6)) < 0.5 if masked else None
    if masked:
        seen[1] = False
    out = np.empty_like(q)
    decoding.attend(q, keys, values, seen, 2, 8, out)
    np.testing.assert_allclose(out, attended(q, keys, values, seen, 2, 8), rtol=1e-4, atol=1e-5)


def test_wrong_tokens_after_a_position_are_refused(taken):
    model = model_of(context_length=4)
    cache = nn.KVCache(model)
    _ = model.next_logits([[1, 2, 3]], cache), model.next_logits([[1]], cache)
    with pytest.raises(mg.errors.ShapeError):
        model.next_logits([[1]], cache)
    with pytest.raises(mg.errors.ShapeError, match="leading axes"):
        cache.reset()
        _ = model.next_logits([[1]], cache), model.next_logits([[1], [1]], cache)


def test_norms_of_queries_and_keys_are_seen_by_the_raw_path():
    """A hook on one of them runs at each step; a norm of another kind takes its own path."""
    model = nn.TransformerLM(11, 16, 16, 1, 2, qk_norm=True, attention_bias="qkv", generator=1).eval()
    attn, calls = model.layers[0].attn, []
    attn.q_norm.register_forward_hook(lambda *_: calls.append(1))
    cache = nn.KVCache(model)
    model([[1]], cache=cache), model([[2]], cache=cache)
    assert len(calls) == 2
    attn.k_norm = nn.LayerNorm(8)
    cache, tokens = nn.KVCache(model), [[1, 2, 3]]
    steps = [model([[token]], cache=cache).data[:, 0] for token in tokens[0]]
    np.testing.assert_allclose(np.stack(steps, 1), model(tokens).data, atol=1e-5)
