"""LoRA: the identity at its start, closed forms of its values and gradients, several adapters, merged and taken out."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

import minigrad as mg
import nn
import optim
from minigrad.engine import core
from minigrad.errors import ArgumentError, NonFiniteError

TOKENS = np.random.default_rng(0).integers(23, size=(2, 12))
SIZES = {"vocab_size": 23, "context_length": 16, "d_model": 24, "num_layers": 2, "num_heads": 4, "d_ff": 40}


def made(**options):
    """A model far from its start, so that logits differ."""
    model = nn.TransformerLM(**{**SIZES, "num_kv_heads": 2, **options}, generator=1)
    for parameter in model.parameters():
        parameter.data *= 1.5
    return model


def filled(model, name="default", seed=5):
    """The model with numbers in B, as after training."""
    rng = np.random.default_rng(seed)
    for path, parameter in model.named_parameters():
        if path.endswith(f".{name}.lora_B"):
            parameter.data = rng.standard_normal(parameter.shape).astype(parameter.dtype) / 4
    return model


def bits(model):
    return {name: array.tobytes() for name, array in model.state_dict().items()}


@pytest.mark.parametrize("targets", ["*", "q_proj", "ffn.*", ("layers.1.*", "lm_head"), "layers.0.attn.output_proj"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_start_is_the_identity_and_the_way_back_is_whole(targets, tied):
    model = made(tie_embeddings=tied)
    model.ln_final.weight.requires_grad = False  # and stays so
    before, names, logits = bits(model), str(model), model(TOKENS).data
    nn.lora(model, 3, targets=targets)
    np.testing.assert_allclose(model(TOKENS).data, logits, rtol=1e-5, atol=1e-5)
    filled(model)
    assert np.abs(model(TOKENS).data - logits).max() > 0.1
    with nn.disable_adapters(model):
        assert bits(model) == before and str(model) == names
        np.testing.assert_array_equal(model(TOKENS).data, logits)
        with nn.disable_adapters(model):
            np.testing.assert_array_equal(model(TOKENS).data, logits)
    assert np.abs(model(TOKENS).data - logits).max() > 0.1
    nn.delete_adapter(model)
    assert bits(model) == before and str(model) == names
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["ln_final.weight"]
    assert (model.lm_head.weight is model.token_embeddings.weight) == tied


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_adapted_layer_starts_with_the_same_bits(dtype):
    layer = nn.Linear(24, 40, dtype=dtype)
    x = mg.random.normal(size=(7, 24)).astype(dtype)
    before = layer(x).data
    nn.lora(layer, targets="*", dropout=0.5)
    np.testing.assert_array_equal(layer(x).data, before)
    assert layer(x).dtype == dtype


@pytest.mark.parametrize("rank_stabilized", [False, True])
@pytest.mark.cpu_only("NumPy beside arrays of the default device")
def test_values_gradients_and_merged_weights_are_those_of_the_formula(rank_stabilized):
    layer = filled(
        nn.lora(nn.Sequential(nn.Linear(6, 5, dtype="float64")), 3, 7.0, "*", rank_stabilized=rank_stabilized)
    )
    rng = np.random.default_rng(0)
    x, g = rng.standard_normal((4, 6)), rng.standard_normal((4, 5))
    w, bias = layer[0].weight.data, layer[0].bias.data
    a, b = (layer[0].adapters["default"].lora_A, layer[0].adapters["default"].lora_B)
    scale = 7 / math.sqrt(3) if rank_stabilized else 7 / 3
    y = layer(x)
    np.testing.assert_allclose(y.data, x @ (w + scale * b.data @ a.data).T + bias, rtol=1e-12)
    y.backward(g)
    np.testing.assert_allclose(b.grad, scale * g.T @ x @ a.data.T, rtol=1e-12)
    np.testing.assert_allclose(a.grad, scale * b.data.T @ g.T @ x, rtol=1e-12)
    assert layer[0].weight.grad is None and layer[0].bias.grad is None
    nn.merge_adapters(layer)
    np.testing.assert_allclose(layer[0].weight.data, w + scale * b.data @ a.data, rtol=1e-12)


@pytest.mark.cpu_only("NumPy beside arrays of the default device")
def test_dropout_meets_the_input_of_a_in_training_alone():
    layer = filled(nn.lora(nn.Sequential(nn.Linear(400, 3, dtype="float64")), 2, targets="*", dropout=0.25))
    x = np.ones((1, 400))
    adapter = layer[0].adapters["default"]
    change = layer(x).data - x @ layer[0].weight.data.T
    assert np.linalg.matrix_rank(np.vstack([adapter.lora_B.data.T, change]), tol=1e-9) == 2  # it is B of something
    kept = np.linalg.lstsq(adapter.lora_B.data * adapter.scale, change[0], rcond=None)[0]
    assert not np.allclose(kept, adapter.lora_A.data.sum(1))
    layer.eval()
    np.testing.assert_allclose(layer(x).data, x @ adapter.added_to(layer[0].weight).T, rtol=1e-9)


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": True, "recompute": "block"}, {"recompute": "ffn"}])
@pytest.mark.cpu_only("NumPy beside arrays of the default device")
def test_a_model_merged_and_unmerged(options):
    model = filled(nn.lora(made(**options), 3, targets="*"))
    adapted, before, logits = model(TOKENS).data, bits(model), model.eval()(TOKENS).data
    embeddings = model.token_embeddings.weight.data.copy()
    nn.merge_adapters(model)
    assert set(model.state_dict()) == set(made().state_dict())
    np.testing.assert_allclose(model(TOKENS).data, logits, rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(model.token_embeddings.weight.data, embeddings)
    twin = copy.deepcopy(model)
    for other in (model, twin, pickle.loads(pickle.dumps(model))):
        nn.unmerge_adapters(other)
        assert bits(other) == before
        np.testing.assert_array_equal(other(TOKENS).data, adapted)
        tied = other.lm_head.weight is other.token_embeddings.weight
        assert tied == options.get("tie_embeddings", False)


def test_a_merged_model_that_moves_takes_its_adapters_along():
    model = filled(nn.lora(made(), 3))
    nn.merge_adapters(model)
    model.to("float64")
    nn.unmerge_adapters(model)
    assert {str(p.dtype) for p in model.parameters()} == {"float64"}


def test_only_a_finite_adapter_is_merged_and_all_or_nothing():
    model = filled(nn.lora(made(), 3))
    before = bits(model)
    model.layers[1].ffn.w2.adapters["default"].lora_A.data[0, 0] = np.nan
    with pytest.raises(NonFiniteError, match=r"layers\.1\.ffn\.w2"):
        nn.merge_adapters(model)
    model.layers[1].ffn.w2.adapters["default"].lora_A.data = np.frombuffer(
        before["layers.1.ffn.w2.adapters.default.lora_A"], np.float32
    ).reshape(3, -1)
    assert bits(model) == before


def test_several_adapters_are_switched_and_trained_apart():
    model = made()
    base = model(TOKENS).data
    nn.lora(model, 2, targets="attn.*", name="a", generator=0)
    filled(model, "a")
    alone = model(TOKENS).data
    nn.lora(model, 3, targets=("q_proj", "ffn.*"), name="b", generator=1)
    np.testing.assert_allclose(model(TOKENS).data, base, rtol=1e-5, atol=1e-5)  # the newest, at its start
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, rest = optim.AdamW(trained, lr=0.01), {n: b for n, b in bits(model).items() if ".b." not in n}
    losses = []
    for _ in range(20):
        loss = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    assert {n: b for n, b in bits(model).items() if ".b." not in n} == rest
    nn.set_adapter(model, "a")
    np.testing.assert_allclose(model(TOKENS).data, alone, rtol=1e-5, atol=1e-5)
    assert all(".a." in name for name, p in model.named_parameters() if p.requires_grad)
    nn.delete_adapter(model, "b")
    np.testing.assert_allclose(model(TOKENS).data, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("targets", "fused"),
    [("layers.0.attn.q_proj", (1, 2)), ("layers.1.ffn.w2", (2, 1)), ("output_proj", (2, 2)), ("*", (0, 0))],
)
def test_fused_kernels_heed_an_adapted_layer_and_stay_for_the_others(targets, fused):
    model, names = filled(nn.lora(made(), 3, targets=targets)), []

    class Names(core.Observer):
        def forward(self, primitive, arguments, out, result, started):
            names.append(primitive.name)

        def definition(self, primitive, started):
            names.append(primitive.name)

    core.observers.append(watch := Names())
    logits = model(TOKENS).data
    core.observers.remove(watch)
    assert (names.count("qkv_projection"), names.count("swiglu_ffn")) == fused
    plain = made()
    state = plain.state_dict()
    for path, layer in model.named_modules():
        if hasattr(layer, "adapters"):
            a, b = (layer.adapters["default"].lora_A.data, layer.adapters["default"].lora_B.data)
            state[f"{path}.weight"] = state[f"{path}.weight"] + 16 / 3 * b @ a
    plain.load_state_dict(state)
    np.testing.assert_allclose(logits, plain(TOKENS).data, rtol=2e-4, atol=2e-4)


def test_decoding_heeds_an_adapted_layer():
    """Also where new positions are computed on raw arrays, with a cache."""
    model = filled(nn.lora(made(), 3, targets="*")).eval()
    merged = copy.deepcopy(model)
    nn.merge_adapters(merged)
    for other in (model, merged):
        text = nn.generate(other, TOKENS[:1, :3], 8, temperature=0)
        for place in range(3, 11):
            assert text[0, place] == model(text[:, :place]).data[0, -1].argmax()


@pytest.mark.parametrize("recompute", ["none", "half", "ffn", "block"])
def test_gradients_are_the_same_whatever_is_recomputed(recompute):
    found = []
    for option in ("none", recompute):
        model = filled(nn.lora(made(recompute=option, dropout=0.1), 3, targets="*", dropout=0.2, generator=0))
        mg.random.seed(3)
        model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_by_finite_differences():
    layer = filled(nn.lora(nn.Sequential(nn.Linear(4, 3, dtype="float64")), 2, targets="*"))
    adapter = layer[0].adapters["default"]

    def loss(a, b, x):
        state = {**dict(layer.named_parameters())}
        state["0.adapters.default.lora_A"], state["0.adapters.default.lora_B"] = a, b
        return (nn.functional_call(layer, state, x) ** 2).sum()

    mg.gradcheck(loss, [adapter.lora_A.data, adapter.lora_B.data, np.random.default_rng(0).standard_normal((2, 4))])


@pytest.mark.cpu_only("NumPy beside arrays of the default device")
def test_autocast_and_a_state_dict_that_comes_back():
    model = filled(nn.lora(made(), 3))
    again = nn.lora(made(), 3)
    assert again.load_state_dict(model.state_dict()) == ([], [])
    np.testing.assert_array_equal(again(TOKENS).data, model(TOKENS).data)
    with mg.autocast("bfloat16"):
        loss = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    loss.backward()
    assert abs(loss.item() - model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).item()) < 0.1
    assert all(p.grad.dtype == np.float32 for p in model.parameters() if p.requires_grad)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(other(TOKENS).data, model(TOKENS).data)


def test_a_layer_without_a_plain_forward_is_left_alone():
    """Its forward may do anything, and an adapter beside it would not be seen."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].forward = lambda x: x
    nn.lora(model, 1, targets="*")
    assert [name for name, _ in model.named_parameters() if "lora" in name] == [
        "1.adapters.default.lora_A",
        "1.adapters.default.lora_B",
    ]


def adapted():
    return nn.lora(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), 2, targets="*")


def merged():
    model = adapted()
    nn.merge_adapters(model)
    return model


@pytest.mark.parametrize(
    ("misuse", "word"),
    [
        (lambda: nn.lora(adapted(), 2, targets="0"), "default"),
        (lambda: nn.lora(adapted(), 2, targets=["0", "k_proj"], name="b"), "k_proj"),
        (lambda: nn.lora(adapted(), 2, targets=[], name="b"), "no pattern"),
        (lambda: nn.lora(nn.Linear(4, 6), 5, targets="*"), "rank=5"),
        (lambda: nn.lora(nn.Linear(4, 6), 0, targets="*"), "rank"),
        (lambda: nn.lora(nn.Linear(4, 6), 2, 0, targets="*"), "alpha"),
        (lambda: nn.lora(nn.Linear(4, 6), 2, targets="*", name="a.b"), "a.b"),
        (lambda: nn.lora(nn.Linear(4, 6), 2, targets="*", name="forward"), "forward"),
        (lambda: nn.lora(nn.Linear(4, 6), 2, targets="*", dropout=1.5), "probability"),
        (lambda: nn.lora([nn.Linear(4, 6)], 2), "module"),
        (lambda: nn.set_adapter(adapted(), "b"), "'b'"),
        (lambda: nn.delete_adapter(nn.lora(adapted(), 1, targets="0", name="b"), "b"), "set_adapter"),
        (lambda: nn.merge_adapters(nn.Linear(4, 6)), "without"),
        (lambda: nn.merge_adapters(merged()), "merged"),
        (lambda: nn.lora(merged(), 1, targets="*", name="b"), "unmerge"),
        (lambda: nn.unmerge_adapters(adapted()), "merge_adapters"),
        (lambda: nn.disable_adapters(merged()).__enter__(), "unmerge"),
    ],
)
def test_a_misuse_is_one_clear_error(misuse, word):
    with pytest.raises(ArgumentError, match=r"(?s)Expected.*Got") as caught:
        misuse()
    assert word in str(caught.value)


def test_a_refused_adapter_changes_nothing():
    model = adapted()
    before = bits(model)
    for options in ({"rank": 5}, {"dropout": 2}, {"alpha": -1}, {"targets": "nowhere"}):
        with pytest.raises(ArgumentError):
            nn.lora(model, **{"rank": 2, "targets": "*", "name": "b", **options})
    assert bits(model) == before
