"""Prefixes: beside a text that was read, a naive attention and finite differences; decoding, masks, both formats."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch

import minigrad as mg
import nn
import optim
from minigrad.errors import ArgumentError, DTypeError, FileFormatError
from nn.adapting.prefixes import PrefixedAttention

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(23, size=(2, 12))
START = RNG.integers(23, size=5)
SIZES = {"vocab_size": 23, "context_length": 24, "d_model": 24, "num_layers": 2, "num_heads": 4, "d_ff": 40}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 12}
MODELS = [
    {"num_kv_heads": 2},
    {"num_kv_heads": 1, "head_dim": 10, "tie_embeddings": True, "rope_layout": "half"},
    {"qk_norm": True, "attention_bias": "qkv", "rope_scaling": YARN, "rope_layout": "half"},
]


def made(**options):
    """A model far from its start, so that logits differ."""
    model = nn.TransformerLM(**{**SIZES, "num_kv_heads": 2, **options}, generator=1)
    for parameter in model.parameters():
        parameter.data *= 1.5
    return model.eval()


def filled(model, name="default", seed=5):
    """The model with large numbers in its prefix."""
    rng = np.random.default_rng(seed)
    for path, parameter in model.named_parameters():
        if f".adapters.{name}." in path:
            parameter.data = rng.standard_normal(parameter.shape).astype(parameter.dtype)
    return model


def bits(model):
    return {name: array.tobytes() for name, array in model.state_dict().items()}


@pytest.mark.parametrize("options", MODELS)
def test_a_prefix_of_tokens_is_the_text_that_was_read_before(options):
    """Rotary scores know distances alone, so the text may count from 0 whatever stands before it."""
    model = made(**options)
    whole = np.concatenate([np.tile(START, (2, 1)), TOKENS], axis=1)
    expected = model(whole).data[:, len(START) :]
    alone = model(TOKENS).data
    nn.prefixes(model, len(START), tokens=START)
    assert np.abs(expected - alone).max() > 0.1
    np.testing.assert_allclose(model(TOKENS).data, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.cpu_only("NumPy beside arrays of the default device")
@pytest.mark.parametrize(
    "kind",
    ["causal", "all", "window", "pattern", "booleans", "numbers", "context", "window booleans", "pattern numbers"],
)
def test_attention_over_a_prefix_is_that_of_the_formula(kind):
    """All queries see the prefix, whatever hides keys of the text from them."""
    t, n, d, groups = 7, 3, 4, 2
    options = {"window": 3} if "window" in kind else {}
    options |= {"pattern": nn.BlockPattern.local(8, 2)} if "pattern" in kind else {}
    causal = kind == "causal" or "window" in kind or "numbers" in kind
    attention = nn.MultiHeadAttention(16, 4, groups, dtype="float64", generator=0, **options)
    filled(nn.prefixes(attention, n, "*"))
    x, context = (np.random.default_rng(i).standard_normal((2, t, 16)) for i in range(2))
    source = context if kind == "context" else x
    q, k, v = (
        (y @ layer.weight.data.T).reshape(2, t, -1, d).swapaxes(1, 2)
        for y, layer in ((x, attention.q_proj), (source, attention.k_proj), (source, attention.v_proj))
    )
    prefix = attention.adapters["default"]
    k = np.concatenate([np.broadcast_to(prefix.keys.data, (2, groups, n, d)), k], axis=2).repeat(2, axis=1)
    v = np.concatenate([np.broadcast_to(prefix.values.data, (2, groups, n, d)), v], axis=2).repeat(2, axis=1)
    i, j = np.arange(t)[:, None], np.arange(t)
    mask = None
    allowed = np.ones((2, 1, t, t), bool)
    added = np.zeros((t, t))
    if causal:
        allowed &= j <= i
    if "window" in kind:
        allowed &= i - j < 3
    if "pattern" in kind:
        allowed &= abs(i // 2 - j // 2) <= 1
    if "booleans" in kind:
        mask = np.random.default_rng(2).random((2, 1, 1, t)) < 0.5
        mask[0] = False  # a sequence that is all padding sees the prefix alone
        allowed = allowed & mask
    if "numbers" in kind:
        mask = added = np.random.default_rng(2).standard_normal((t, t))
    scores = q @ k.swapaxes(2, 3) / 2
    scores[..., n:] = np.where(allowed, scores[..., n:] + added, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = (weights @ v).swapaxes(1, 2).reshape(2, t, -1) @ attention.output_proj.weight.data.T
    call = {"attn_mask": mask, "is_causal": causal}
    there = mg.Tensor(context) if kind == "context" else None
    np.testing.assert_allclose(attention(mg.Tensor(x), there, **call).data, expected, rtol=1e-10)
    np.testing.assert_allclose(attention.weights(mg.Tensor(x), there, **call).data, weights, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"window": 4}])
def test_gradients_by_finite_differences(options):
    attention = nn.MultiHeadAttention(8, 2, 1, dtype="float64", generator=0, **options)
    attention.rope = nn.RotaryEmbedding(4, 8)
    prefix = filled(nn.prefixes(attention, 3, "*")).adapters["default"]

    def loss(keys, values, x):
        state = dict(attention.named_parameters())
        state["adapters.default.keys"], state["adapters.default.values"] = keys, values
        return (nn.functional_call(attention, state, x, is_causal=True) ** 2).sum()

    x = np.random.default_rng(0).standard_normal((2, 6, 8))
    mg.gradcheck(loss, [prefix.keys.data, prefix.values.data, x])


@pytest.mark.parametrize("options", [{}, {"window": 6}, {"recompute": "block"}, {"positions": "learned"}])
def test_in_place_and_back(options):
    model = made(**options)
    model.ln_final.weight.requires_grad = False  # and stays so
    before, names, logits = bits(model), str(model), model(TOKENS).data
    filled(nn.prefixes(model, 4))
    changed = model(TOKENS).data
    assert np.abs(changed - logits).max() > 0.1
    with nn.disable_adapters(model):
        assert bits(model) == before and str(model) == names
        np.testing.assert_array_equal(model(TOKENS).data, logits)
    for other in (model, copy.deepcopy(model)):
        np.testing.assert_array_equal(other(TOKENS).data, changed)
    nn.delete_adapter(model)
    assert bits(model) == before and str(model) == names
    np.testing.assert_array_equal(model(TOKENS).data, logits)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["ln_final.weight"]


@pytest.mark.cpu_only("a pickle comes back to the CPU")
def test_a_pickle():
    model = filled(nn.prefixes(made(window=6), 4))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model))(TOKENS).data, model(TOKENS).data)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_prefix_alone_is_trained_beside_adapters_of_other_kinds(recompute):
    model = made(recompute=recompute)
    nn.lora(model, 2, name="a", generator=0)
    base = model(TOKENS).data
    nn.adapters(model, 4, name="b", generator=0)
    nn.prefixes(model, 4, name="c", generator=0)
    rest = {name: b for name, b in bits(model).items() if ".c." not in name}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 4
    optimizer, losses = optim.AdamW(trained, lr=0.1), []
    for _ in range(30):
        loss = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert {name: b for name, b in bits(model).items() if ".c." not in name} == rest
    nn.set_adapter(model, "a")
    np.testing.assert_allclose(model(TOKENS).data, base, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"attention": ["window", "full"], "window": 5}])
def test_decoding_heeds_a_prefix(options):
    """With a cache, in batches of different lengths, past the context, and in beam search."""
    model = filled(nn.prefixes(made(**options), 4))
    text = nn.generate(model, TOKENS[:1, :3], 8, temperature=0)
    for place in range(3, 11):
        assert text[0, place] == model(text[:, :place]).data[0, -1].argmax()
    prompts = [TOKENS[0, :7], TOKENS[1, :3]]
    for alone, together in zip(prompts, nn.generate(model, prompts, 6, temperature=0), strict=True):
        np.testing.assert_array_equal(nn.generate(model, alone, 6, temperature=0), together)
    assert nn.generate(model, TOKENS[0], 30, temperature=0).shape == (42,)
    best = nn.beam_search(model, TOKENS[0, :3], 2, beam_size=23)[0]
    log_p = np.log(np.asarray(mg.softmax(model(TOKENS[:1, :3]).data[0, -1])))
    pairs = np.array([
        log_p[first] + np.log(np.asarray(mg.softmax(model([[*TOKENS[0, :3], first]]).data[0, -1])))
        for first in range(23)
    ])  # fmt: skip
    assert np.array_equal(best.tokens[3:], np.unravel_index(pairs.argmax(), pairs.shape))
    assert best.log_probability == pytest.approx(pairs.max(), abs=1e-4)


def test_sinks_drop_positions_of_the_text_alone():
    kept = np.concatenate([TOKENS[:1, :2], TOKENS[:1, 6:12]], axis=1)
    one = filled(nn.prefixes(made(num_layers=1), 4))  # in one layer keys don't know what was dropped
    cache = nn.KVCache(one, 8, sinks=2)
    for place in range(12):
        logits = one(TOKENS[:1, place : place + 1], cache=cache).data
    np.testing.assert_allclose(logits[0, -1], one(kept).data[0, -1], rtol=1e-4, atol=1e-4)


def test_the_encoder_decoder_too():
    model = nn.Transformer(11, 11, 16, 2, 1, 32, dropout=0.0, generator=0).eval()
    before = model(TOKENS[:, :5] % 11, TOKENS[:, :4] % 11).data
    filled(nn.prefixes(model, 3, ("self_attn", "cross_attn")))
    after = model(TOKENS[:, :5] % 11, TOKENS[:, :4] % 11).data
    assert np.abs(after - before).max() > 0.01
    text = nn.generate(model, [1], 3, temperature=0, source=TOKENS[0, :5] % 11)
    assert text[-1] == model(TOKENS[:1, :5] % 11, text[None, :-1]).data[0, -1].argmax()
    nn.delete_adapter(model)
    np.testing.assert_array_equal(model(TOKENS[:, :5] % 11, TOKENS[:, :4] % 11).data, before)


def test_feed_forward_layers_stay_fused():
    model = nn.prefixes(made(), 3, "layers.0.attn")
    assert [bool(block._plain_projections(mg.ones((1, 2, 24)))) for block in model.layers] == [False, True]
    assert all(block._plain_units(mg.ones((1, 2, 24))) for block in model.layers)


def test_autocast():
    model = filled(nn.prefixes(made(), 3))
    with mg.autocast("bfloat16"):
        loss = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    loss.backward()
    assert abs(loss.item() - model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).item()) < 0.1
    assert all(p.grad.dtype == np.float32 for p in model.parameters() if p.requires_grad)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peft(transformers):
    return pytest.importorskip("peft", reason="peft is not installed")


def logits_of(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.float().numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [*MODELS[:2], {"rope_layout": "half", "qk_norm": True}])
def test_peft_reads_what_is_saved_with_the_same_logits(transformers, peft, tmp_path, options):
    model = made(**options)
    nn.save_pretrained(model, tmp_path / "base")
    filled(nn.prefixes(model, 5))
    nn.save_adapter(model, tmp_path / "prefix", base_model=str(tmp_path / "base"))
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    there = peft.PeftModel.from_pretrained(there, tmp_path / "prefix")
    expected = model(TOKENS).data
    assert np.abs(logits_of(there) - expected).max() < 1e-4
    again = nn.load_adapter(made(**options), tmp_path / "prefix")
    np.testing.assert_allclose(again(TOKENS).data, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", MODELS[:2])
@pytest.mark.parametrize("settings", [{}, {"prefix_projection": True, "encoder_hidden_size": 7}])
def test_what_peft_saved_is_read_with_the_same_logits(transformers, peft, tmp_path, options, settings):
    model = made(**options)
    nn.save_pretrained(model, tmp_path / "base")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, **settings)
    there = peft.get_peft_model(there, config)
    there.save_pretrained(tmp_path / "prefix")
    expected, base = logits_of(there), model(TOKENS).data
    assert np.abs(expected - base).max() > 0.05
    nn.load_adapter(model, tmp_path / "prefix")
    assert np.abs(model(TOKENS).data - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("options", "targets"), [({}, "layers.1.attn"), ({"window": 4}, "*attn"), ({"positions": "learned"}, "*attn")]
)
def test_what_peft_has_not_is_saved_in_a_format_of_our_own(tmp_path, options, targets):
    model = filled(nn.prefixes(made(**options), 3, targets))
    nn.save_adapter(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["method"] == "prefixes"
    again = nn.load_adapter(made(**options), tmp_path)
    assert bits(again) == bits(model)
    with pytest.raises(FileFormatError, match="this model"):
        nn.load_adapter(made(**{**options, "head_dim": 8}), tmp_path)


def of_another_length(config, arrays):
    config["num_virtual_tokens"] = 4


def of_more_layers(config, arrays):
    config["num_layers"] = 3


def with_more(config, arrays):
    arrays["x"] = np.ones(1)


def without_length(config, arrays):
    del config["num_virtual_tokens"]


@pytest.mark.parametrize("change", [of_another_length, of_more_layers, with_more, without_length])
def test_a_folder_that_contradicts_itself_is_refused(tmp_path, change):
    nn.save_adapter(nn.prefixes(made(), 3), tmp_path)
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    settings, arrays = json.loads(config.read_text()), mg.load(weights)
    change(settings, arrays)
    config.write_text(json.dumps(settings))
    mg.save(weights, arrays)
    with pytest.raises(FileFormatError):
        nn.load_adapter(made(), tmp_path)


@pytest.mark.parametrize(
    ("misuse", "word"),
    [
        (lambda tmp: nn.prefixes(made(), 0), "length"),
        (lambda tmp: nn.prefixes(made(), 3, "ffn"), "ffn"),
        (lambda tmp: nn.prefixes(nn.Linear(4, 4), 3), "MultiHeadAttention"),
        (lambda tmp: nn.prefixes(made(attention="linear"), 3), "none"),
        (lambda tmp: nn.prefixes(nn.prefixes(made(), 3), 3), "default"),
        (lambda tmp: nn.prefixes(made(), 3, tokens=[1, 2]), "tokens"),
        (lambda tmp: nn.prefixes(nn.MultiHeadAttention(8, 2), 2, "*", tokens=[1, 2]), "language model"),
        (lambda tmp: nn.merge_adapters(nn.prefixes(made(), 3)), "Prefix"),
        (lambda tmp: nn.load_adapter(made(positions="learned"), saved(tmp)), "rotary"),
    ],
)
def test_a_misuse_is_one_clear_error(misuse, word, tmp_path):
    with pytest.raises((ArgumentError, DTypeError), match=r"(?s)Expected.*Got") as caught:
        misuse(tmp_path)
    assert word in str(caught.value)


def saved(folder):
    nn.save_adapter(nn.prefixes(made(), 3), folder)
    return folder


def test_a_layer_has_the_class_that_it_had():
    model = nn.prefixes(made(), 2)
    assert {type(block.attn) for block in model.layers} == {PrefixedAttention}
    nn.delete_adapter(model)
    assert {type(block.attn) for block in model.layers} == {nn.MultiHeadAttention}
