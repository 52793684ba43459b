"""GGUF files: read back by the package gguf, with logits computed anew from what they hold."""

from __future__ import annotations

import numpy as np
import pytest

import minigrad as mg
import nn
from minigrad.errors import ArgumentError, MissingFileError

gguf = pytest.importorskip("gguf")

SIZES = {"vocab_size": 40, "context_length": 16, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64}
TOKENS = np.random.default_rng(0).integers(40, size=(1, 12))
OPTIONS = [
    {},
    {"rope_layout": "half"},
    {"rope_layout": "half", "attention_bias": True, "num_kv_heads": 2},
    {"attention_bias": "qkv", "head_dim": 10, "rope_theta": 500.0},
    {"tie_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"scale_embeddings": True, "tie_embeddings": True},
]


def lm(**options):
    model = nn.TransformerLM(**{**SIZES, **options}, generator=1)
    rng = np.random.default_rng(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases far from their start
            parameter.data = rng.uniform(0.5, 1.5, parameter.shape).astype(np.float32)
    return model


def read(path):
    """The settings of a file, and its arrays as float32."""
    reader = gguf.GGUFReader(path)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    arrays = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    return facts, arrays, kinds


def logits(facts, arrays, tokens):
    """What llama.cpp's llama computes, in NumPy, with neighbours turned together."""
    say = lambda name, default=None: facts.get(f"llama.{name}", default)
    heads, shared, size = say("attention.head_count"), say("attention.head_count_kv"), say("attention.key_length")
    norm = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + say("attention.layer_norm_rms_epsilon")) * w
    layer = lambda x, name: x @ arrays[f"{name}.weight"].T + arrays.get(f"{name}.bias", 0)
    places = np.arange(len(tokens)) / say("rope.scaling.factor", 1.0)
    angles = places[:, None] * say("rope.freq_base") ** (-np.arange(0, size, 2) / size)
    turns = np.exp(1j * angles)[:, None]

    def turned(x):
        pairs = (x[..., ::2] + 1j * x[..., 1::2]) * turns
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    x = arrays["token_embd.weight"][tokens]
    for i in range(say("block_count")):
        n = norm(x, arrays[f"blk.{i}.attn_norm.weight"])
        q, k, v = (
            layer(n, f"blk.{i}.attn_{part}").reshape(len(tokens), count, size)
            for part, count in (("q", heads), ("k", shared), ("v", shared))
        )
        q, k, v = turned(q), turned(k).repeat(heads // shared, 1), v.repeat(heads // shared, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(size)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + layer(np.einsum("hij,jhd->ihd", weights, v).reshape(len(tokens), -1), f"blk.{i}.attn_output")
        n = norm(x, arrays[f"blk.{i}.ffn_norm.weight"])
        gate = layer(n, f"blk.{i}.ffn_gate")
        x = x + layer(gate / (1 + np.exp(-gate)) * layer(n, f"blk.{i}.ffn_up"), f"blk.{i}.ffn_down")
    x = norm(x, arrays["output_norm.weight"])
    return x @ arrays.get("output.weight", arrays["token_embd.weight"]).T


@pytest.mark.parametrize("weights", ["float32", "float16", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_logits_of_a_file_are_those_of_the_model(options, weights, tmp_path):
    model = lm(**options)
    nn.save_gguf(model, tmp_path / "m.gguf", weights=weights)
    facts, arrays, kinds = read(tmp_path / "m.gguf")
    found = logits(facts, arrays, TOKENS[0])
    if weights != "float32":
        if "scale_embeddings" in options:
            assert np.isfinite(found).all()  # the scaled embeddings are rounded there, so no model of ours is the twin
            return
        nn.quantize(model, weights)
    np.testing.assert_allclose(found, model(TOKENS).numpy()[0], rtol=1e-4, atol=1e-4)
    assert {kinds[name] for name in kinds if arrays[name].ndim == 1} == {"F32"}
    wide = {"float32": "F32", "float16": "F16"}.get(weights, weights.upper())
    assert kinds["blk.1.ffn_gate.weight"] == wide
    assert kinds["blk.1.attn_output.weight"] == ("F16" if options.get("head_dim") and weights[0] == "q" else wide)
    assert facts["general.architecture"] == "llama" and facts["llama.vocab_size"] == 40


@pytest.mark.parametrize("layout", ["q8_0", "q4_0", "q4_1", "float16"])
def test_a_quantized_model_is_written_as_it_is(layout, tmp_path):
    model = nn.quantize(lm(rope_layout="half"), layout)
    nn.save_gguf(model, tmp_path / "m.gguf", weights="float32")
    facts, arrays, kinds = read(tmp_path / "m.gguf")
    assert kinds["blk.0.attn_q.weight"] == {"float16": "F16"}.get(layout, layout.upper())
    np.testing.assert_allclose(logits(facts, arrays, TOKENS[0]), model(TOKENS).numpy()[0], rtol=1e-4, atol=1e-4)
    bytes_of = {t.name: t.data.view(np.uint8) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    np.testing.assert_array_equal(
        bytes_of["blk.1.ffn_down.weight"], mg.asarray(model.state_dict()["layers.1.ffn.w2.weight"]).numpy()
    )


LACKING = {
    "ffn='gelu'": {"ffn": "gelu"},
    "ffn='geglu'": {"ffn": "geglu"},
    "norm='layer'": {"norm": "layer"},
    "positions='learned'": {"positions": "learned"},
    "qk_norm=True": {"qk_norm": True},
    "windows of": {"window": 4},
    "linear attention": {"attention": ["full", "linear"]},
    "a pattern": {"pattern": nn.BlockPattern(np.tri(2, dtype=bool), 8)},
    "a bias of the head": {"head_bias": True},
    "rope_scaling 'llama3'": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("words", LACKING)
def test_what_llama_has_no_word_for_is_one_error_and_no_file(words, tmp_path):
    with pytest.raises(ArgumentError, match=words):
        nn.save_gguf(lm(**LACKING[words]), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_other_misuse_is_one_error_and_no_file(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(ArgumentError, match="merge_adapters"):
        nn.save_gguf(nn.lora(lm(), 2), path)
    merged = nn.lora(lm(), 2)
    nn.merge_adapters(merged)
    changed = lm()
    changed.layers[1].ffn.w1 = nn.Sequential(nn.Linear(32, 64))
    changed.layers[1].ffn.w1.out_features = 64
    with pytest.raises(ArgumentError, match=r"other classes: layers\.1\.ffn\.w1"):
        nn.save_gguf(changed, path)
    with pytest.raises(ArgumentError, match="a scale of quantized embeddings"):
        nn.save_gguf(nn.quantize(lm(scale_embeddings=True)), path)
    with pytest.raises(ArgumentError, match="'q5_0'"):
        nn.save_gguf(lm(), path, weights="q5_0")
    with pytest.raises(ArgumentError, match="a TransformerLM"):
        nn.save_gguf(nn.Linear(2, 2), path)
    with pytest.raises(MissingFileError, match="no folder"):
        nn.save_gguf(lm(), tmp_path / "absent" / "m.gguf")
    assert not list(tmp_path.iterdir())
    nn.save_gguf(merged, path)
    assert path.is_file()
