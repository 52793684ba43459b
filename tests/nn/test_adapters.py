"""Adapters after layers: the identity at their start, closed forms, the way back, their own files, what is refused."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

import minigrad as mg
import nn
from minigrad.errors import ArgumentError, FileFormatError

TOKENS = np.random.default_rng(0).integers(23, size=(2, 12))
SIZES = {"vocab_size": 23, "context_length": 16, "d_model": 24, "num_layers": 2, "num_heads": 4, "d_ff": 40}
TORCH = {"gelu": torch.nn.functional.gelu, "relu": torch.relu, "silu": torch.nn.functional.silu}


def made(**options):
    """A model far from its start, so that logits differ."""
    model = nn.TransformerLM(**{**SIZES, **options}, generator=1)
    for parameter in model.parameters():
        parameter.data *= 1.5
    return model.eval()


def filled(model, seed=5):
    """The model with numbers in all that an adapter has, as after training."""
    rng = np.random.default_rng(seed)
    for path, parameter in model.named_parameters():
        if ".adapters." in path:
            parameter.data = (rng.standard_normal(parameter.shape) / 4).astype(parameter.dtype)
    return model


def bits(model):
    return {name: array.tobytes() for name, array in model.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": True, "ffn": "gelu"}, {"recompute": "ffn"}])
@pytest.mark.parametrize("targets", [None, "*", ("layers.1.*", "lm_head")])
def test_the_start_is_the_identity_and_the_way_back_is_whole(options, targets):
    model = made(**options)
    model.ln_final.weight.requires_grad = False  # and stays so
    before, names, logits = bits(model), str(model), model(TOKENS).data
    nn.adapters(model, 3, **({} if targets is None else {"targets": targets}))
    np.testing.assert_allclose(model(TOKENS).data, logits, rtol=1e-5, atol=1e-5)
    filled(model)
    assert np.abs(model(TOKENS).data - logits).max() > 0.1
    with nn.disable_adapters(model):
        assert bits(model) == before and str(model) == names
        np.testing.assert_array_equal(model(TOKENS).data, logits)
    nn.delete_adapter(model)
    assert bits(model) == before and str(model) == names
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["ln_final.weight"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_adapted_layer_starts_with_the_same_values(dtype):
    layer = nn.Linear(24, 40, dtype=dtype)
    x = mg.random.normal(size=(7, 24)).astype(dtype)
    before = layer(x).data
    nn.adapters(layer, 5, "*")
    np.testing.assert_array_equal(layer(x).data, before)
    assert layer(x).dtype == dtype


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
@pytest.mark.cpu_only("NumPy and torch beside arrays of the default device")
def test_values_and_gradients_are_those_of_torch(activation):
    layer = filled(nn.adapters(nn.Sequential(nn.Linear(6, 5, dtype="float64")), 3, "*", activation=activation))
    rng = np.random.default_rng(0)
    x, g = rng.standard_normal((4, 6)), rng.standard_normal((4, 5))
    adapter = layer[0].adapters["default"]
    ours = [adapter.down, adapter.down_bias, adapter.up, adapter.up_bias]
    theirs = [torch.tensor(p.data, requires_grad=True) for p in ours]
    down, down_bias, up, up_bias = theirs
    y = torch.tensor(x @ layer[0].weight.data.T + layer[0].bias.data)
    expected = y + TORCH[activation](y @ down.T + down_bias) @ up.T + up_bias
    expected.backward(torch.tensor(g))
    result = layer(x)
    result.backward(g)
    np.testing.assert_allclose(result.data, expected.detach().numpy(), rtol=1e-10)
    for p, t in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p.grad, t.grad.numpy(), rtol=1e-8, atol=1e-12)
    assert layer[0].weight.grad is None and layer[0].bias.grad is None


def test_gradients_by_finite_differences():
    layer = filled(nn.adapters(nn.Sequential(nn.Linear(4, 3, dtype="float64")), 2, "*"))
    names = [f"0.adapters.default.{name}" for name in ("down", "down_bias", "up", "up_bias")]

    def loss(x, *parts):
        state = {**dict(layer.named_parameters()), **dict(zip(names, parts, strict=True))}
        return (nn.functional_call(layer, state, x) ** 2).sum()

    state = layer.state_dict()
    mg.gradcheck(loss, [np.random.default_rng(0).standard_normal((2, 4)), *(state[name] for name in names)])


def test_attention_keeps_its_fused_projections():
    model, x = nn.adapters(made(), 3), mg.ones((1, 2, 24))
    assert all(block._plain_projections(x) and not block._plain_units(x) for block in model.layers)


def test_decoding_heeds_them():
    model = filled(nn.adapters(made(), 3))
    text = nn.generate(model, TOKENS[:1, :3], 8, temperature=0)
    for place in range(3, 11):
        assert text[0, place] == model(text[:, :place]).data[0, -1].argmax()


def test_a_folder_of_our_own_and_back(tmp_path):
    model = filled(nn.adapters(made(), 3, activation="silu"))
    nn.save_adapter(model, tmp_path)
    again = nn.load_adapter(made(), tmp_path, "other")
    np.testing.assert_array_equal(again(TOKENS).data, model(TOKENS).data)
    assert again.layers[0].ffn.w2.adapters["other"].activation == "silu"
    linear = filled(nn.adapters(nn.Linear(4, 3, generator=0), 2, "*"))
    nn.save_adapter(linear, tmp_path / "one")
    x = np.ones((1, 4), np.float32)
    np.testing.assert_array_equal(
        nn.load_adapter(nn.Linear(4, 3, generator=0), tmp_path / "one")(x).data, linear(x).data
    )


@pytest.mark.parametrize(
    "change",
    [
        {"size": 4}, {"size": 10**15}, {"size": "3"}, {"activation": "tan"}, {"a_setting_of_tomorrow": 1},
        {"method": "hypernetworks"}, {"peft_type": "IA3"},
    ],
)  # fmt: skip
def test_a_folder_that_contradicts_itself_is_refused(tmp_path, change):
    nn.save_adapter(nn.adapters(made(), 3), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    model = made()
    before = bits(model)
    with pytest.raises((ArgumentError, FileFormatError)):
        nn.load_adapter(model, tmp_path)
    assert bits(model) == before


@pytest.mark.parametrize("other", [{"d_model": 32}, {"num_layers": 1}])
def test_an_adapter_of_another_model_is_refused(tmp_path, other):
    nn.save_adapter(nn.adapters(made(), 3), tmp_path)
    with pytest.raises(FileFormatError, match="this model"):
        nn.load_adapter(made(**other), tmp_path)


@pytest.mark.parametrize(
    ("misuse", "word"),
    [
        (lambda: nn.adapters(nn.Linear(4, 6), 0, "*"), "size"),
        (lambda: nn.adapters(nn.Linear(4, 6), 2), "output_proj"),
        (lambda: nn.adapters(nn.Linear(4, 6), 2, "*", activation="tan"), "tan"),
        (lambda: nn.adapters(nn.adapters(nn.Linear(4, 6), 2, "*"), 2, "*"), "default"),
        (lambda: nn.merge_adapters(nn.adapters(nn.Linear(4, 6), 2, "*")), "Bottleneck"),
        (lambda: nn.adapters([], 2, "*"), "module"),
    ],
)
def test_a_misuse_is_one_clear_error(misuse, word):
    with pytest.raises(ArgumentError, match=r"(?s)Expected.*Got") as caught:
        misuse()
    assert word in str(caught.value)


def test_lora_and_adapters_share_a_layer():
    model = nn.adapters(nn.lora(made(), 2, targets="w2", name="a", generator=0), 2, name="b")
    filled(model)
    both = copy.deepcopy(model)
    nn.set_adapter(both, "a")
    nn.merge_adapters(both)
    alone = filled(nn.lora(made(), 2, targets="w2", name="a", generator=0))
    for name, parameter in alone.named_parameters():
        if ".adapters." in name:
            parameter.data = model.state_dict()[name]
    np.testing.assert_allclose(both(TOKENS).data, alone(TOKENS).data, rtol=1e-4, atol=1e-4)
