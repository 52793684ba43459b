"""Folders of pretrained models beside Hugging Face's transformers: logits both ways, and settings that are refused."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import minigrad as mg
import nn
from minigrad.errors import ArgumentError, FileFormatError

SIZES = {
    "vocab_size": 23,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TOKENS = np.random.default_rng(0).integers(23, size=(2, 50))


def logits_of(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.float().numpy()


def theirs(transformers, folder, kind="Llama", dtype=torch.float32, shard="5GB", **options):
    """A random model of transformers, far from its start, saved to the folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **{**(GPT2 if kind == "GPT2" else SIZES), "initializer_range": 0.3, **options}
    )
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(config).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def rope(transformers, theta=10000.0, **scaling):
    """RoPE's settings as the installed version of transformers takes them."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return {"rope_parameters": {"rope_theta": theta, "rope_type": "default", **scaling}}
    return {"rope_theta": theta, "rope_scaling": scaling or None}


@pytest.mark.parametrize(
    ("options", "turning"),
    [
        ({}, {}),
        ({"num_key_value_heads": 2, "rms_norm_eps": 0.01}, {"theta": 500.0}),
        ({"num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True}, {}),
        ({"num_hidden_layers": 1, "num_attention_heads": 2}, {"rope_type": "linear", "factor": 4.0}),
        ({"num_key_value_heads": 2}, {"theta": 500.0, **LLAMA3}),
        ({"kind": "Mistral", "num_key_value_heads": 2, "sliding_window": None}, {}),
        ({"kind": "Mistral", "num_key_value_heads": 2, "sliding_window": 1}, {}),
        ({"kind": "Mistral", "num_key_value_heads": 2, "sliding_window": 7}, {}),
        ({"kind": "Mistral", "num_key_value_heads": 2, "sliding_window": 49}, {"theta": 500.0}),
    ],
)
def test_loaded_logits_are_those_of_transformers(transformers, tmp_path, options, turning):
    model = theirs(transformers, tmp_path, **options, **rope(transformers, **turning))
    ours = nn.load_pretrained(tmp_path)
    assert not ours.training
    assert set(ours.windows) == {options.get("sliding_window")}
    expected = logits_of(model)
    assert np.abs(expected).max() > 1
    assert np.abs(ours(TOKENS).data - expected).max() < 1e-4


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GPT2 = {"vocab_size": 23, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
FAMILIES = {
    "llama, smol": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}, {"theta": 500.0}),
    "llama, biases": ("Llama", {"num_key_value_heads": 2, "attention_bias": True}, {}),
    "llama, yarn": ("Llama", {"num_key_value_heads": 2}, {"theta": 500.0, **YARN}),
    "mistral, yarn": ("Mistral", {"num_key_value_heads": 2}, {"beta_fast": 4.0, "truncate": False, **YARN}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}, {"theta": 500.0}),
    "qwen2, yarn": ("Qwen2", {"num_key_value_heads": 1}, {"mscale": 0.7, "mscale_all_dim": 0.3, **YARN}),
    "qwen2, windows": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        {},
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": True}, {}),
    "qwen3, biases": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 6, "attention_bias": True}, {}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "pad_token_id": 0, "sliding_window": 9}, {}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 10}, {}),
    "gpt2": ("GPT2", {"attn_pdrop": 0.3, "resid_pdrop": 0.2}, None),
    "gpt2, narrow": ("GPT2", {"n_inner": 20, "activation_function": "gelu_pytorch_tanh"}, None),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_comes_in_and_goes_out_with_the_logits_of_transformers(transformers, tmp_path, family):
    """Whole sequences, and those written token by token, through the block's own operations and through raw arrays."""
    kind, options, turning = FAMILIES[family]
    turning = {} if turning is None else rope(transformers, **turning)
    model = theirs(transformers, tmp_path / "start", kind=kind, **options, **turning)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):  # norms and biases start as ones and zeros
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    model.save_pretrained(tmp_path / "in", max_shard_size="9KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    ours, expected = nn.load_pretrained(tmp_path / "in"), logits_of(model)
    assert np.abs(expected).max() > 1
    assert np.abs(ours(TOKENS).data - expected).max() < 1e-4 * max(1, np.abs(expected).max() / 10)

    cache = nn.KVCache(ours)
    steps = [ours(TOKENS[:, i : i + 1], cache=cache).data for i in range(20)]
    assert np.abs(np.concatenate(steps, 1) - expected[:, :20]).max() < 1e-4 * max(1, np.abs(expected).max() / 10)

    like_llama = {"Mistral": "mistral", "Phi3": "phi3"}  # without a window, or split into parts
    nn.save_pretrained(ours, tmp_path / "out", model_type=like_llama.get(kind))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == model.config.model_type
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(back) is type(model)
    assert np.abs(logits_of(back) - expected).max() < 1e-4 * max(1, np.abs(expected).max() / 10)


def test_a_gpt2_without_its_head_and_with_old_masks(transformers, tmp_path):
    """The names of openai-community/gpt2: no prefix, and the masks as arrays."""
    model = theirs(transformers, tmp_path, kind="GPT2")
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / "model.safetensors")
    short = nn.load_pretrained(tmp_path, 50)
    assert short.context_length == 50
    assert np.abs(short(TOKENS).data - logits_of(model)).max() < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "qwen3, biases", "gemma", "gpt2"])
def test_interleaved_models_of_every_family_are_written_right(transformers, tmp_path, family):
    options = {
        "qwen2": {"attention_bias": "qkv", "num_kv_heads": 2, "window": [None, 7]},
        "qwen3, biases": {"attention_bias": True, "qk_norm": True, "head_dim": 10},
        "gemma": {"ffn": "geglu", "scale_embeddings": True, "tie_embeddings": True},
        "gpt2": {"attention_bias": True, "ffn": "gelu", "norm": "layer", "positions": "learned"},
    }[family]
    model = nn.TransformerLM(23, 64, 24, 2, 4, 40, **options, generator=1).eval()
    rng = np.random.default_rng(2)
    for parameter in model.parameters():
        parameter.data += 0.2 * rng.standard_normal(parameter.shape).astype(np.float32)
    nn.save_pretrained(model, tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert back.config.model_type == family.split(",")[0]
    assert np.abs(logits_of(back) - model(TOKENS).data).max() < 1e-4


def test_a_model_of_no_family_is_not_saved(tmp_path):
    model = nn.TransformerLM(23, 64, 24, 2, 4, 40, ffn="geglu", qk_norm=True)
    with pytest.raises(ArgumentError, match="geglu"):
        nn.save_pretrained(model, tmp_path / "new")
    plain = nn.TransformerLM(23, 64, 24, 2, 4, 40)
    with pytest.raises(ArgumentError, match="qk_norm"):
        nn.save_pretrained(plain, tmp_path / "new", model_type="qwen3")
    with pytest.raises(ArgumentError, match="scale_embeddings"):
        nn.save_pretrained(nn.TransformerLM(23, 64, 24, 2, 4, 40, ffn="geglu"), tmp_path / "new")
    with pytest.raises(ArgumentError, match="falcon"):
        nn.save_pretrained(plain, tmp_path / "new", model_type="falcon")
    plain.layers[0].ffn = nn.GEGLU(24, 40)  # the same names, another function
    with pytest.raises(ArgumentError, match=r"layers\.0\.ffn"):
        nn.save_pretrained(plain, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_shards_and_half_precision(transformers, tmp_path, monkeypatch):
    """bfloat16 is widened exactly, with and without the package that defines it."""
    theirs(transformers, tmp_path, dtype=torch.bfloat16, shard="5KB", num_key_value_heads=2)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = logits_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert np.abs(nn.load_pretrained(tmp_path)(TOKENS).data - expected).max() < 1e-4
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    assert np.abs(nn.load_pretrained(tmp_path)(TOKENS).data - expected).max() < 1e-4
    assert nn.load_pretrained(tmp_path, dtype="float64").lm_head.weight.dtype == np.float64


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2, "rope_layout": "half", "rope_theta": 500.0, "norm_eps": 0.01},
        {"head_dim": 10, "num_kv_heads": 1, "tie_embeddings": True},
        {"scale_embeddings": True, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"d_model": 50, "head_dim": 16, "num_kv_heads": 2, "rope_scaling": LLAMA3},  # 50 is no multiple of 4 heads
        {"scale_embeddings": True, "tie_embeddings": True, "rope_scaling": LLAMA3, "dropout": 0.1},
        {"window": 7, "num_kv_heads": 2},
    ],
)
def test_transformers_loads_what_is_saved_with_the_same_logits(transformers, tmp_path, options):
    sizes = {"vocab_size": 23, "context_length": 64, "d_model": 24, "num_layers": 2, "num_heads": 4, "d_ff": 40}
    model = nn.TransformerLM(**{**sizes, **options}, generator=1)
    for parameter in model.parameters():
        parameter.data *= 1.5
    nn.save_pretrained(model, tmp_path / "new" / "folder")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "folder")
    expected = model.eval()(TOKENS).data
    assert np.abs(logits_of(there) - expected).max() < 1e-4
    assert np.abs(nn.load_pretrained(tmp_path / "new" / "folder")(TOKENS).data - expected).max() < 1e-4

    prompt = torch.tensor(TOKENS[:1, :5])
    text = there.generate(prompt, max_new_tokens=40, do_sample=False)  # no token ends it
    np.testing.assert_array_equal(nn.generate(model, TOKENS[:1, :5], 40, temperature=0), text.numpy())


def test_probabilities_are_those_of_transformers(transformers):
    """Penalty, temperature, top-k, top-p and min-p, each alone and all together, in its order."""
    rng = np.random.default_rng(3)
    logits = 3 * rng.standard_normal((40, 30))
    tokens = rng.integers(30, size=(40, 8))
    seen = np.zeros((40, 30), bool)
    np.put_along_axis(seen, tokens, True, axis=1)
    for options in (
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.15, "repetition_penalty": 0.8},
    ):
        steps = {
            "repetition_penalty": transformers.RepetitionPenaltyLogitsProcessor,
            "temperature": transformers.TemperatureLogitsWarper,
            "top_k": transformers.TopKLogitsWarper,
            "top_p": transformers.TopPLogitsWarper,
            "min_p": transformers.MinPLogitsWarper,
        }
        scores = torch.tensor(logits)
        for name, step in steps.items():
            if name in options:
                scores = step(options[name])(torch.tensor(tokens), scores)
        ours = nn.next_token_probabilities(logits, **options, seen=seen)
        np.testing.assert_allclose(ours, scores.softmax(-1).numpy(), atol=1e-12)


# ---- what can't be loaded --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder that is right, to be made wrong."""
    nn.save_pretrained(nn.TransformerLM(23, 64, 24, 1, 4, 40, generator=1), tmp_path)
    return tmp_path


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in {**config, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return nn.load_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mlp_bias": True, "hidden_act": "gelu"}, r"hidden_act='gelu', mlp_bias=True"),
        ({"model_type": "mistral", "attention_bias": True}, r"attention_bias=True"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe"),
        ({"sliding_window": 8}, "sliding_window=8"),  # of a LLaMA, which has none
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"logit_scale": 0.5}, r"logit_scale=0.5(?s:.)*ignore=\['logit_scale'\]"),
    ],
)
def test_unsupported_settings_are_named(folder, changes, text):
    with pytest.raises(ArgumentError, match=text):
        configure(folder, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": "linear"},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        {"rope_theta": "x"},
        {"rope_theta": None},
        {"attention_dropout": "a"},
        {"attention_dropout": 2.0},
        {"sliding_window": "a"},
        {"model_type": "mistral", "sliding_window": "a"},
        {"model_type": "mistral", "sliding_window": 0},
        {"max_position_embeddings": "8"},
        {"vocab_size": None},
    ],
)
def test_settings_of_a_wrong_kind_are_refused(folder, changes):
    with pytest.raises((ArgumentError, FileFormatError)):
        configure(folder, **changes)


@pytest.mark.parametrize("weight_map", [None, [], {"lm_head.weight": 3}, {"lm_head.weight": ["a"]}])
def test_an_index_that_is_none_is_refused(folder, weight_map):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FileFormatError, match="weight_map"):
        nn.load_pretrained(folder)


def _set(model, path, value):
    owner, _, name = path.rpartition(".")
    setattr(dict(model.named_modules())[owner], name, value)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("lm_head", nn.Linear(24, 23), r"lm_head\.bias"),
        ("layers.0.ffn", nn.FeedForward(24, 40), r"ffn\.w1\.bias"),
        ("ln_final", nn.LayerNorm(24), r"ln_final\.bias"),
        ("layers.1.ln2", nn.RMSNorm(24, 0.5), r"one eps"),
        ("layers.1.ffn", nn.SwiGLU(24, 64), r"one d_ff"),
    ],
)
def test_a_model_that_is_no_llama_any_more_is_not_saved(tmp_path, path, value, text):
    model = nn.TransformerLM(23, 64, 24, 2, 4, 40, generator=1)
    _set(model, path, value)
    with pytest.raises(ArgumentError, match=text):
        nn.save_pretrained(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_special_tokens_are_checked_before_anything_is_written(tmp_path):
    model = nn.TransformerLM(23, 64, 24, 1, 4, 40, generator=1)
    for wrong in (23, -1, "a", 1.5):
        with pytest.raises(ArgumentError, match="eos_token_id"):
            nn.save_pretrained(model, tmp_path / "new", eos_token_id=wrong)
    assert not (tmp_path / "new").exists()
    nn.save_pretrained(model, tmp_path / "new", eos_token_id=np.int64(3))
    assert json.loads((tmp_path / "new" / "config.json").read_text())["eos_token_id"] == 3


def test_a_window_wider_than_the_context_changes_nothing(folder):
    assert configure(folder, model_type="mistral", sliding_window=64).windows == [None]
    assert configure(folder, sliding_window="absent").windows == [None]  # then transformers takes 4096
    assert configure(folder, max_position_embeddings=5000).windows == [4096]
    assert configure(folder, sliding_window=20).windows == [20]


def test_settings_can_be_passed_over(folder):
    with pytest.raises(ArgumentError):
        configure(folder, logit_scale=0.5)
    assert nn.load_pretrained(folder, ignore=["logit_scale"])
    assert nn.load_pretrained(folder, 16, ignore=["logit_scale"]).context_length == 16
    with pytest.raises(ArgumentError, match="64"):
        nn.load_pretrained(folder, 65, ignore=["logit_scale"])


def test_weights_that_do_not_belong_are_named(folder):
    weights = load_file(folder / "model.safetensors")
    old = {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}  # harmless, of old versions
    save_file(old, folder / "model.safetensors")
    nn.load_pretrained(folder)
    norm = weights.pop("model.norm.weight")
    save_file({**weights, "model.norm.bias": norm}, folder / "model.safetensors")
    with pytest.raises(FileFormatError, match=r"missing: \['model.norm.weight'\], unexpected: \['model.norm.bias'\]"):
        nn.load_pretrained(folder)
    save_file({**weights, "model.norm.weight": norm[1:].clone()}, folder / "model.safetensors")
    with pytest.raises(FileFormatError, match=r"wrong shape: .*model\.norm\.weight \(23,\), not \(24,\)") as caught:
        nn.load_pretrained(folder)
    assert "strict" not in str(caught.value)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 2 * 10**7, "intermediate_size": 4 * 10**7},
        {"num_hidden_layers": 4000},
        {"num_hidden_layers": 10**12},
        {"vocab_size": 10**30},
        {"intermediate_size": 10**18},
        {"head_dim": 10**9},
    ],
)
def test_sizes_are_compared_with_the_weights_before_memory_is_taken(folder, sizes):
    tracemalloc.start()
    with pytest.raises((FileFormatError, ArgumentError)):
        configure(folder, **sizes)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_a_long_context_costs_nothing_before_it_is_used(folder):
    model = configure(folder, max_position_embeddings=10**12)
    assert model([[1, 2, 3]]).shape == (1, 3, 23)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["FIFO", "device", "folder", "deep"])
def test_only_regular_files_of_a_sane_depth_are_read(folder, name, kind):
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(folder / name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).write_text('{"model_type": ' + "[" * 10**6)
    with pytest.raises(FileFormatError):
        nn.load_pretrained(folder)


KINDS = [None, True, -1, 0, 1.5, 10**30, 10**400, "x", "", [], [8], {}, {"type": []}, float("nan")]


@pytest.mark.parametrize("value", KINDS, ids=lambda value: repr(value)[:30])
def test_any_setting_may_be_of_any_kind(folder, value):
    """Each is refused by one of our errors, or a model comes out that computes."""
    for name in [*json.loads((folder / "config.json").read_text()), "rope_parameters", "quantization_config"]:
        try:
            model = configure(folder, **{name: value})
        except (ArgumentError, FileFormatError):
            continue
        finally:
            nn.save_pretrained(nn.TransformerLM(23, 64, 24, 1, 4, 40, generator=1), folder)
        assert np.isfinite(model([[1, 2]]).data).all(), name


def test_nothing_is_unpickled(folder, tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / name).write_bytes(pickle.dumps(Trap()))
        with pytest.raises(FileFormatError):
            nn.load_pretrained(folder)
        with pytest.raises(FileFormatError):
            mg.load(folder / name)
    assert not (tmp_path / "sprung").exists()


def test_folders_that_are_none(folder, tmp_path):
    with pytest.raises(FileFormatError, match=r"config\.json"):
        nn.load_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileFormatError, match="hidden_size"):
        configure(folder, hidden_size="absent")
    (folder / "config.json").write_text("{")
    with pytest.raises(FileFormatError, match="JSON"):
        nn.load_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ArgumentError, match="shards"):
        nn.save_pretrained(nn.TransformerLM(23, 64, 24, 1, 4), folder)
    with pytest.raises(ArgumentError, match="Linear"):
        nn.save_pretrained(nn.Linear(2, 2), folder / "new")


def test_bfloat16_without_ml_dtypes(tmp_path, monkeypatch):
    """Its bits are the upper half of a float32's."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"a": torch.ones(5), "x": x, "b": torch.zeros(2, dtype=torch.float16)}, tmp_path / "x.safetensors")
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    found = mg.load(tmp_path / "x.safetensors")
    assert found["x"].dtype == np.float32 and found["b"].dtype == np.float16
    np.testing.assert_array_equal(found["x"], x.float().numpy())
    save_file({"x": x.to(torch.float8_e4m3fn)}, tmp_path / "x.safetensors")
    with pytest.raises(FileFormatError, match="F8_E4M3"):
        mg.load(tmp_path / "x.safetensors")
