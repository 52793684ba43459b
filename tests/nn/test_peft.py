"""Adapters in PEFT's folders: logits both ways, with permuted, shared and grouped heads, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import minigrad as mg
import nn
from minigrad.errors import ArgumentError, FileFormatError

TOKENS = np.random.default_rng(0).integers(23, size=(2, 12))
SIZES = {"vocab_size": 23, "context_length": 64, "d_model": 24, "num_layers": 2, "num_heads": 4, "d_ff": 40}
MODELS = [
    {"num_kv_heads": 2},  # rotary positions of neighbouring pairs
    {"num_kv_heads": 2, "rope_layout": "half"},
    {"num_kv_heads": 1, "head_dim": 10, "tie_embeddings": True},
]


@pytest.fixture(scope="module")
def peft(transformers):
    return pytest.importorskip("peft", reason="peft is not installed")


def made(**options):
    model = nn.TransformerLM(**{**SIZES, **options}, generator=1)
    for parameter in model.parameters():
        parameter.data *= 1.5
    return model.eval()


def filled(model, seed=5):
    rng = np.random.default_rng(seed)
    for path, parameter in model.named_parameters():
        if path.endswith("lora_B"):
            parameter.data = (rng.standard_normal(parameter.shape) / 4).astype(parameter.dtype)
    return model


def logits_of(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.float().numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", MODELS)
@pytest.mark.parametrize(
    ("targets", "rank_stabilized"), [(("attn.*", "ffn.*"), False), ("layers.1.attn.?_proj", True), ("*", False)]
)
def test_peft_reads_what_is_saved_with_the_same_logits(transformers, peft, tmp_path, options, targets, rank_stabilized):
    model = made(**options)
    nn.save_llama(model, tmp_path / "base")
    base = model(TOKENS).data
    filled(nn.lora(model, 3, 5.0, targets, rank_stabilized=rank_stabilized))
    nn.save_adapter(model, tmp_path / "adapter", base_model=str(tmp_path / "base"))
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    there = peft.PeftModel.from_pretrained(there, tmp_path / "adapter")
    expected = model(TOKENS).data
    assert np.abs(expected - base).max() > 0.1
    assert np.abs(logits_of(there) - expected).max() < 1e-4
    again = nn.load_adapter(made(**options), tmp_path / "adapter")
    np.testing.assert_array_equal(again(TOKENS).data, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "k_proj", "down_proj"], "use_rslora": True},
        {"target_modules": r"model\.layers\.1\.self_attn\.[qv]_proj"},
        {"target_modules": "all-linear", "lora_dropout": 0.1},
        {"target_modules": ["model.layers.0.mlp.up_proj", "lm_head"]},
    ],
)
def test_what_peft_saved_is_read_with_the_same_logits(transformers, peft, tmp_path, options, settings):
    model = made(**options)
    nn.save_llama(model, tmp_path / "base")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    there = peft.get_peft_model(there, peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **settings))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in there.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.25)
    there.save_pretrained(tmp_path / "adapter")
    expected, base = logits_of(there), model(TOKENS).data
    assert np.abs(expected - base).max() > 0.1
    nn.load_adapter(model, tmp_path / "adapter")
    assert np.abs(model(TOKENS).data - expected).max() < 1e-4


@pytest.fixture
def folder(tmp_path):
    nn.save_adapter(filled(nn.lora(made(), 3, targets="q_proj")), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "settings",
    [
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"layers_to_transform": [0]},
        {"fan_in_fan_out": True},
        {"trainable_token_indices": [1]},
        {"init_lora_weights": "pissa"},
        {"a_setting_of_tomorrow": 3},
        {"peft_type": "IA3"},
    ],
)
def test_settings_without_a_counterpart_are_refused_by_name(folder, settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    model = made()
    with pytest.raises(ArgumentError) as caught:
        nn.load_adapter(model, folder)
    assert next(iter(settings)) in str(caught.value)
    assert not [name for name in model.state_dict() if "lora" in name]


@pytest.mark.parametrize("off", [{"use_dora": False, "rank_pattern": {}, "a_setting_of_tomorrow": None}])
def test_settings_that_are_off_say_nothing(folder, off):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **off}))
    expected = filled(nn.lora(made(), 3, targets="q_proj"))(TOKENS).data
    assert np.isfinite(expected).all()
    nn.load_adapter(made(), folder)


def of_another_rank(config, arrays):
    config["r"] = 4


def of_fewer_layers(config, arrays):
    for half in "AB":
        del arrays[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight"]


def of_one_half(config, arrays):
    del arrays["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]


def with_more(config, arrays):
    arrays["base_model.model.model.embed_tokens.weight"] = np.ones((2, 2), np.float32)


def without_any(config, arrays):
    arrays.clear()
    arrays["x"] = np.ones(1)


def without_rank(config, arrays):
    del config["r"]


@pytest.mark.parametrize(
    "change", [of_another_rank, of_fewer_layers, of_one_half, with_more, without_any, without_rank]
)
def test_a_folder_that_contradicts_itself_is_refused(folder, change):
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    settings, arrays = json.loads(config.read_text()), mg.load(weights)
    change(settings, arrays)
    config.write_text(json.dumps(settings))
    mg.save(weights, arrays)
    model = made()
    with pytest.raises(FileFormatError):
        nn.load_adapter(model, folder)
    assert not [name for name in model.state_dict() if "lora" in name]


@pytest.mark.parametrize("other", [{"d_model": 32}, {"num_layers": 1}, {"head_dim": 4}])
def test_an_adapter_of_another_model_is_refused(folder, other):
    with pytest.raises(FileFormatError, match="this model"):
        nn.load_adapter(made(**other), folder)


def test_other_models_keep_their_names(tmp_path):
    def mlp():
        return nn.Sequential(nn.Linear(4, 8, generator=0), nn.Tanh(), nn.Linear(8, 3, generator=1))

    model = filled(nn.lora(mlp(), 2, targets=("0", "2"), name="code"))
    nn.save_adapter(model, tmp_path, "code")
    assert sorted(mg.load(tmp_path / "adapter_model.safetensors"))[0] == "base_model.model.0.lora_A.weight"
    x = np.ones((1, 4), np.float32)
    np.testing.assert_array_equal(nn.load_adapter(mlp(), tmp_path)(x).data, model(x).data)
