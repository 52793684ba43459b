"""TransformerLM beside a compact LLaMA in torch with the same weights: logits, loss, all gradients; and its corners."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as TF

import minigrad as mg
import nn
import optim
from minigrad.engine import core
from minigrad.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError, StateError
from nn import functional as F

SIZES = {"vocab_size": 11, "context_length": 9, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 24}
TOKENS = np.random.default_rng(5).integers(11, size=(2, 8))
TARGETS = np.random.default_rng(6).integers(11, size=(2, 8))
TARGETS[0, 5:] = -100


def make(dtype="float64", **options):
    return nn.TransformerLM(**{**SIZES, "dtype": dtype, "generator": 1, **options})


def llama(w, tokens, heads=4, kv_heads=4, theta=10000.0, eps=1e-5, layout="interleaved", scale=1.0):
    """Logits of a LLaMA with the weights ``w``, written out in torch."""

    def rms_norm(x, g):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * g

    def turn(x):  # (B, h, T, d)
        t, half = x.shape[-2], x.shape[-1] // 2
        angles = torch.arange(t)[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
        c, s = angles.cos(), angles.sin()
        a, b = (x[..., 0::2], x[..., 1::2]) if layout == "interleaved" else (x[..., :half], x[..., half:])
        pair = a * c - b * s, a * s + b * c
        return torch.stack(pair, -1).flatten(-2) if layout == "interleaved" else torch.cat(pair, -1)

    def split(x, h):
        return x.unflatten(-1, (h, -1)).transpose(1, 2)

    x = w["token_embeddings.weight"][tokens] * scale
    for n in range(2):
        at = f"layers.{n}."
        y = rms_norm(x, w[at + "ln1.weight"])
        q, k, v = (
            split(y @ w[f"{at}attn.{p}_proj.weight"].T, h) for p, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        k, v = (turn(k).repeat_interleave(heads // kv_heads, 1), v.repeat_interleave(heads // kv_heads, 1))
        scores = turn(q) @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        x = x + y @ w[at + "attn.output_proj.weight"].T
        y = rms_norm(x, w[at + "ln2.weight"])
        y = TF.silu(y @ w[at + "ffn.w1.weight"].T) * (y @ w[at + "ffn.w3.weight"].T)
        x = x + y @ w[at + "ffn.w2.weight"].T
    return rms_norm(x, w["ln_final.weight"]) @ w["lm_head.weight"].T + w.get("lm_head.bias", 0.0)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, {}),
        ({"num_kv_heads": 2, "rope_layout": "half", "norm_eps": 0.1}, {"kv_heads": 2, "layout": "half", "eps": 0.1}),
        ({"head_dim": 6, "rope_theta": 100.0, "num_kv_heads": 1}, {"theta": 100.0, "kv_heads": 1}),
        ({"tie_embeddings": True, "scale_embeddings": True}, {"scale": 4.0}),
        ({"head_bias": True}, {}),
        ({"head_bias": True, "tie_embeddings": True}, {}),
    ],
)
def test_language_model_is_that_of_torch(agree, options, same):
    model = make(**options)
    if "head_bias" in options:
        model.lm_head.bias.data[:] = np.arange(11) / 10
    w = {name: torch.tensor(p.numpy(), requires_grad=True) for name, p in model.named_parameters()}
    theirs = {**w, "lm_head.weight": w["token_embeddings.weight"]} if "tie_embeddings" in options else w
    logits = llama(theirs, torch.tensor(TOKENS), **same)
    agree(model(TOKENS), logits)
    loss = TF.cross_entropy(logits.flatten(0, 1), torch.tensor(TARGETS).flatten(), label_smoothing=0.1)
    ours = model.loss(TOKENS, TARGETS, label_smoothing=0.1)
    agree(ours, loss)
    ours.backward()
    loss.backward()
    for name, parameter in model.named_parameters():
        agree(parameter.grad, w[name].grad)


@pytest.mark.parametrize("tied", [False, True])
def test_a_bias_of_the_head_is_saved_generated_with_and_asked_for(agree, tied, tmp_path):
    """What was saved without one still loads where none is asked for, and nowhere else."""
    model, other = (make(head_bias=True, tie_embeddings=tied, generator=seed) for seed in (1, 2))
    model.lm_head.bias.data[:] = np.arange(11) % 3
    mg.save(tmp_path / "model.safetensors", model.state_dict())
    other.load_state_dict(mg.load(tmp_path / "model.safetensors"))
    agree(other(TOKENS), model(TOKENS).data)
    agree(model.next_logits(TOKENS), model(TOKENS).data[:, -1])
    agree(model.next_logits(TOKENS[:, :1], nn.KVCache(model)), model(TOKENS[:, :1]).data[:, -1])
    with pytest.raises(ArgumentError, match=r"lm_head\.bias"):
        nn.save_llama(model, tmp_path / "llama")
    old = make(tie_embeddings=tied)
    assert model.state_dict().keys() - old.state_dict().keys() == {"lm_head.bias"}
    old.load_state_dict(make(tie_embeddings=tied, generator=3).state_dict())
    with pytest.raises(StateError, match=r"missing: lm_head\.bias"):
        model.load_state_dict(old.state_dict())


def test_second_derivatives_are_those_of_torch(agree):
    model = make(num_kv_heads=2)
    w = {name: torch.tensor(p.numpy(), requires_grad=True) for name, p in model.named_parameters()}
    logits = llama(w, torch.tensor(TOKENS), kv_heads=2)
    loss = TF.cross_entropy(logits.flatten(0, 1), torch.tensor(TARGETS).flatten())
    names = ["layers.0.attn.k_proj.weight", "layers.1.ffn.w1.weight", "ln_final.weight", "token_embeddings.weight"]
    theirs, ours = [w[name] for name in names], [dict(model.named_parameters())[name] for name in names]
    directions = [np.random.default_rng(3).standard_normal(p.shape) for p in ours]

    first = torch.autograd.grad(loss, theirs, create_graph=True)
    there = torch.autograd.grad(
        sum((g * torch.tensor(d)).sum() for g, d in zip(first, directions, strict=True)), theirs
    )
    first = mg.grad(model.loss(TOKENS, TARGETS), ours, create_graph=True)
    here = mg.grad(sum((g * d).sum() for g, d in zip(first, directions, strict=True)), ours)
    for a, b in zip(here, there, strict=True):
        agree(a, b)


def test_half_precision_is_close_to_single():
    single = make("float32")
    half = make("float16")
    assert half(TOKENS).dtype == np.float16
    np.testing.assert_allclose(half(TOKENS).data, single(TOKENS).data, atol=0.02)
    half.loss(TOKENS, TARGETS).backward()
    single.loss(TOKENS, TARGETS).backward()
    for p, q in zip(half.parameters(), single.parameters(), strict=True):
        assert p.grad.dtype == np.float16
        np.testing.assert_allclose(p.grad, q.grad, atol=0.02 * np.abs(q.grad).max())


@pytest.mark.cpu_only("how many operations have a kernel on the CPU")
def test_a_step_records_few_operations():
    class Count(core.Observer):
        recorded = 0

        def forward(self, primitive, arguments, out, result, seconds):
            self.recorded += 1

    def steps(layers):
        core.observers.append(count := Count())
        make(num_layers=layers).loss(TOKENS, TARGETS)
        core.observers.remove(count)
        return count.recorded

    assert steps(3) - steps(2) <= 19


def step_of(watched=False, **options):
    """The loss, the gradients, the random numbers that follow, and the bytes that the graph held."""
    mg.random.seed(3)
    model = make(**options)
    if watched:  # then a block is its layers one after the other
        model.layers[0].ffn.w2.register_forward_hook(lambda *_: None)
    with mg.track_memory() as memory:
        loss = model.loss(TOKENS, TARGETS)
        held = memory.current
    loss.backward()
    return [loss.data, *(p.grad for p in model.parameters()), np.asarray(mg.random.generator(None).random())], held


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"dropout": 0.3, "watched": True}, {"window": 3}])
@pytest.mark.parametrize("recompute", ["half", "ffn", "block"])
def test_what_is_computed_again_is_the_same_bits(recompute, options):
    """Loss, gradients and the random numbers that follow, whatever is kept; and less is."""
    options = {"dtype": "float32", **options}
    (whole, held), (again, less) = step_of(**options), step_of(recompute=recompute, **options)
    for ours, theirs in zip(again, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert less < held or (recompute != "block" and mg.cuda.is_available())


@pytest.mark.cpu_only("a GPU keeps the units of the feed-forward layers")
def test_what_each_word_of_recompute_does_not_hold():
    """One or both of the arrays of d_ff numbers a token; or everything of a block but its input."""
    held = {word: step_of(recompute=word)[1] for word in ("none", "half", "ffn", "block")}
    wide = SIZES["num_layers"] * SIZES["d_ff"] * TOKENS.size * 8
    assert held["none"] - held["half"] == held["half"] - held["ffn"] == wide
    inputs, around = (make(num_layers=n, recompute="block") for n in (5, 4)), []
    for model in inputs:
        with mg.track_memory() as memory:
            loss = model.loss(TOKENS, TARGETS)
            around.append(memory.current)
        del loss
    assert around[0] - around[1] == SIZES["d_model"] * TOKENS.size * 8


def test_a_model_that_computes_again_writes_the_same_tokens():
    """Decoding goes through a cache, and is what the logits of the whole say."""
    tokens = TOKENS[:, :3]
    for _ in range(5):
        tokens = np.concatenate([tokens, make()(tokens).data[:, -1:].argmax(-1)], 1)
    for word in ("none", "half", "ffn", "block"):
        np.testing.assert_array_equal(nn.generate(make(recompute=word), TOKENS[:, :3], 5, temperature=0.0), tokens)


def test_words_that_recompute_does_not_know():
    for wrong in ("all", True, None, ["ffn"]):
        for build, sizes in ((make, ()), (nn.TransformerBlock, (8, 2))):
            with pytest.raises(ArgumentError, match=r"recompute of 'none', 'half', 'ffn', 'block'"):
                build(*sizes, recompute=wrong)
    with pytest.raises(ArgumentError, match=r"recompute=False, 'half' or True"):
        nn.SwiGLU(4, recompute="ffn")
    with pytest.raises(ArgumentError, match=r"recompute=False, 'half' or True"):
        F.swiglu_ffn(*[mg.ones((2, 2))] * 4, recompute="ffn")


def test_the_name_that_recompute_had_before():
    with pytest.warns(DeprecationWarning, match="recompute='ffn'") as told:
        old = make(recompute_ffn=True)
    assert [warning.filename for warning in told] == [__file__]
    assert [layer.recompute for layer in old.layers] == ["ffn", "ffn"]
    with pytest.warns(DeprecationWarning, match="recompute='ffn'"):
        assert nn.TransformerBlock(8, 2, recompute_ffn=False).recompute == "none"
    with pytest.warns(DeprecationWarning), pytest.raises(ArgumentError, match="recompute alone"):
        make(recompute="block", recompute_ffn=True)


def test_keys_and_sizes_are_those_of_the_course():
    model = make("float32", num_kv_heads=2)
    shapes = {name: array.shape for name, array in model.state_dict().items()}
    block = {
        "ln1.weight": (16,),
        "attn.q_proj.weight": (16, 16),
        "attn.k_proj.weight": (8, 16),
        "attn.v_proj.weight": (8, 16),
        "attn.output_proj.weight": (16, 16),
        "ln2.weight": (16,),
        "ffn.w1.weight": (24, 16),
        "ffn.w2.weight": (16, 24),
        "ffn.w3.weight": (24, 16),
    }
    assert shapes == {
        "token_embeddings.weight": (11, 16),
        **{f"layers.{n}.{name}": shape for n in range(2) for name, shape in block.items()},
        "ln_final.weight": (16,),
        "lm_head.weight": (11, 16),
    }
    assert {p.name for p in model.parameters()} == set(shapes)
    assert {p.dtype for p in model.parameters()} == {np.dtype("float32")}


def test_tied_models_share_one_matrix_through_loading_and_steps():
    model = make(tie_embeddings=True)
    assert len(list(model.parameters())) == len(list(make().parameters())) - 1
    assert model.lm_head.weight is model.token_embeddings.weight
    assert model.lm_head.weight.name == "token_embeddings.weight"
    assert abs(make(tie_embeddings=True, vocab_size=3000).lm_head.weight.numpy().std() / 0.25 - 0.9866) < 0.01
    assert (
        abs(make(scale_embeddings=True, vocab_size=3000).token_embeddings.weight.numpy().std() / 0.25 - 0.9866) < 0.01
    )
    model.load_state_dict(make(tie_embeddings=True, generator=2).state_dict())
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    model.loss(TOKENS, TARGETS).backward()
    optimizer.step()
    assert model.lm_head.weight is model.token_embeddings.weight
    with pytest.raises(KeyError, match="one tied parameter"):
        model.load_state_dict(make().state_dict())


def test_the_future_does_not_matter():
    model, changed = make(), TOKENS.copy()
    changed[:, 5:] = 0
    np.testing.assert_array_equal(model(changed).data[:, :5], model(TOKENS).data[:, :5])


def test_it_learns_by_heart():
    model = make("float32")
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(TOKENS, TARGETS)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_dropout_is_active_in_training_alone_and_follows_the_seed():
    model = make(dropout=0.2)
    mg.random.seed(1)
    first = model.loss(TOKENS, TARGETS).item()
    second = model.loss(TOKENS, TARGETS).item()
    mg.random.seed(1)
    assert model.loss(TOKENS, TARGETS).item() == first != second
    plain = make()
    plain.load_state_dict(model.state_dict())
    assert model.eval().loss(TOKENS, TARGETS).item() == plain.loss(TOKENS, TARGETS).item()


def test_dropout_acts_on_the_embeddings_the_weights_and_both_branches():
    x = mg.Tensor(np.random.default_rng(1).standard_normal((2, 5, 16)))
    block = nn.TransformerBlock(16, 4, dropout=1.0, dtype="float64")
    block.attn.dropout = 0.0
    np.testing.assert_array_equal(block(x).data, x.data)
    np.testing.assert_array_equal(nn.MultiHeadAttention(16, 4, dropout=1.0, dtype="float64")(x).data, np.zeros(x.shape))
    assert not (block.eval()(x).data == x.data).any()
    model = make(dropout=1.0)
    np.testing.assert_array_equal(model.hidden(TOKENS).data, np.zeros((2, 8, 16)))


def test_tokens_of_any_kind_and_any_number_of_sequences():
    model = make()
    expected = model(TOKENS).data
    for tokens in (TOKENS.tolist(), TOKENS.astype(np.uint8), mg.Tensor(TOKENS), TOKENS.astype(np.int32)):
        np.testing.assert_array_equal(model(tokens).data, expected)
    np.testing.assert_allclose(model(TOKENS[0]).data, expected[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(model(TOKENS[None]).data, expected[None], rtol=1e-9, atol=1e-12)
    assert model(TOKENS[:, :0]).shape == (2, 0, 11)
    assert model.loss(TOKENS.astype(np.uint16), TOKENS.astype(np.uint16)).item() > 0


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: make(d_model=18), ArgumentError, "d_model=18, num_heads=4"),
        (lambda: make(d_model=12), ArgumentError, "even d_k"),
        (lambda: make(num_kv_heads=3), ArgumentError, "num_kv_heads=3"),
        (lambda: make(num_layers=0), ArgumentError, "num_layers"),
        (lambda: make("int32"), DTypeError, "int32"),
        (lambda: make(rope_scaling={"rope_type": "dynamic"}), ArgumentError, "dynamic"),
        (lambda: make()(np.zeros((1, 10), int)), ShapeError, "context_length = 9"),
        (lambda: make()([[11]]), IndexRangeError, "11"),
        (lambda: make()([[-1]]), IndexRangeError, "-1"),
        (lambda: make()([[1.0]]), DTypeError, "float64"),
        (lambda: make()(3), ShapeError, "single number"),
        (lambda: make().loss([[1, 2]], [[1, 11]]), IndexRangeError, "11"),
        (lambda: make().loss([[1, 2]], [[1]]), ShapeError, "targets"),
        (lambda: make().loss([[1, 2]], [[1.0, 2.0]]), DTypeError, "float64"),
    ],
)
def test_mistakes_are_explained(call, kind, text):
    with pytest.raises(kind, match=rf"(?s)Expected: .*{text}"):
        call()


FUSED = ["lm_head", *(f"layers.0.{name}" for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "ln1", "ln2"))]
FUSED += [f"layers.0.ffn.{name}" for name in ("w1", "w2", "w3")]


@pytest.mark.parametrize("name", FUSED)
def test_a_layer_inside_of_a_fused_operation_keeps_its_hooks(name):
    """A hook that doubles what a layer gives has the effect of a doubled weight, in the loss and its gradient."""
    hooked, doubled = (nn.TransformerLM(11, 8, 8, 1, 2, 16, generator=0) for _ in range(2))
    dict(hooked.named_modules())[name].register_forward_hook(lambda module, inputs, output: output * 2)
    dict(doubled.named_modules())[name].weight.data *= 2
    tokens = np.arange(8).reshape(2, 4)
    losses = [model.loss(tokens, tokens) for model in (hooked, doubled)]
    np.testing.assert_allclose(losses[0].item(), losses[1].item(), rtol=1e-6)
    for loss in losses:
        loss.backward()
    grads = [model.token_embeddings.weight.grad for model in (hooked, doubled)]
    np.testing.assert_allclose(*grads, rtol=1e-4, atol=1e-7)


class Squared(nn.RMSNorm):
    """A norm with ways of its own."""

    def forward(self, x):
        return super().forward(x) ** 2


def hooked(layer):
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return layer


def patched(layer):
    layer.forward = lambda *args, **named: 3 * type(layer).forward(layer, *args, **named)
    return layer


def without_weight(norm):
    norm.weight = None
    return norm


def nothing(block):
    return None


CHANGES = [  # the half that is watched or changed, and how
    ("", nothing),
    ("attn", lambda block: hooked(block.ln1)),
    ("attn", lambda block: hooked(block.attn)),
    ("attn", lambda block: hooked(block.attn.k_proj)),
    ("ffn", lambda block: hooked(block.ffn.w2)),
    ("ffn", lambda block: patched(block.ln2)),
    ("ffn", lambda block: patched(block.ffn)),
    ("ffn", lambda block: without_weight(block.ln2)),
    ("attn", lambda block: setattr(block, "ln1", Squared(8, dtype="float64"))),
    ("ffn", lambda block: setattr(block, "ln2", nn.LayerNorm(8, dtype="float64"))),
    ("ffn", lambda block: setattr(block, "ffn", nn.FeedForward(8, 12, dtype="float64", generator=1))),
    ("ffn", lambda block: setattr(block.ffn, "w1", nn.Linear(8, 12, bias=True, dtype="float64", generator=1))),
    ("", lambda block: setattr(block, "attn", nn.MultiHeadAttention(8, 4, bias=True, dtype="float64", generator=1))),
]


@pytest.mark.parametrize("recompute", ["none", "half", "ffn"])
@pytest.mark.parametrize(("half", "change"), CHANGES)
def test_a_block_is_its_layers_one_after_the_other_whichever_are_watched_or_replaced(half, change, recompute):
    """Only a half that nobody touched runs as fused operations; its values and gradients are those of the layers."""
    x, found, names = np.random.default_rng(0).standard_normal((2, 5, 8)), [], []

    class Names(core.Observer):
        def forward(self, primitive, arguments, out, result, started):
            names.append(primitive.name)

        def definition(self, primitive, started):  # what a GPU runs instead
            names.append(primitive.name)

    for whole in (True, False):
        block = nn.TransformerBlock(8, 4, 12, num_kv_heads=2, recompute=recompute, dtype="float64", generator=1)
        for norm in (block.ln1, block.ln2):
            norm.weight.data = np.linspace(0.5, 2, 8)
        change(block)
        leaf = mg.Tensor(x, requires_grad=True)
        core.observers.append(watch := Names())
        if whole:
            out = block(leaf)
            assert ("qkv_projection" in names, "swiglu_ffn" in names) == (half != "attn", half != "ffn")
        else:
            middle = leaf + block.attn(block.ln1(leaf), is_causal=True)
            out = middle + block.ffn(block.ln2(middle))
        core.observers.remove(watch)
        (out**2).sum().backward()
        found.append([out.numpy(), *(mg.asarray(p.grad).numpy() for p in (leaf, *block.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-11)


class Turned(nn.RotaryEmbedding):
    """A rope with ways of its own."""

    def forward(self, x, positions=None):
        return super().forward(-x, positions)


def rotary(kind=nn.RotaryEmbedding, layout="interleaved", attention=nn.MultiHeadAttention, **options):
    """A change that gives a block rotary attention."""

    def change(block):
        rope = kind(4, max_seq_len=32, layout=layout)
        block.attn = attention(8, 2, rope=rope, dtype="float64", generator=1, **options)

    return change


def also(change, *others):
    return lambda block: [each(block) for each in (change, *others)]


ROPES = [  # whether the product turns its results, the change, and the positions
    (True, rotary(), None),
    (True, rotary(num_kv_heads=1), [3, 9, 4, 0, 31]),
    (False, rotary(), [[3, 9, 4, 0, 31], [0, 1, 2, 3, 4]]),
    (False, rotary(layout="half"), None),
    (False, rotary(kind=Turned), None),
    (False, rotary(qk_norm=True), None),
    (True, rotary(attention=nn.LinearAttention, rope_place="before"), None),
    (False, rotary(attention=nn.LinearAttention, rope_place="after"), None),
    (False, also(rotary(), lambda block: hooked(block.attn.rope)), None),
    (False, also(rotary(), lambda block: patched(block.attn.rope)), None),
    (False, also(rotary(), lambda block: setattr(block.attn.v_proj, "bias", nn.Parameter(np.arange(8.0)))), None),
]


@pytest.mark.cpu_only("which has the product that turns its results")
@pytest.mark.parametrize(("fused", "change", "positions"), ROPES)
def test_queries_and_keys_are_turned_by_their_product_where_nothing_comes_between(fused, change, positions):
    x, found = np.random.default_rng(0).standard_normal((2, 5, 8)), []
    block = nn.TransformerBlock(8, 2, 12, dtype="float64", generator=1)
    change(block)
    for whole in (True, False):
        leaf = mg.Tensor(x, requires_grad=True)
        for p in block.parameters():
            p.grad = None
        with mg.profile() as profile:
            if whole:
                out = block(leaf, positions=positions)
            else:
                middle = leaf + block.attn(block.ln1(leaf), is_causal=True, positions=positions)
                out = middle + block.ffn(block.ln2(middle))
        assert ("apply_rope" in str(profile)) == (not (whole and fused))
        (out**2).sum().backward()
        found.append([out.numpy(), *(mg.asarray(p.grad).numpy() for p in (leaf, *block.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-11)


def test_the_layers_of_a_block_see_normalised_rows_and_may_be_others():
    """A hook on them gets what they did before the norm became a part of them; any layer may take their place."""
    block, seen = nn.TransformerBlock(8, 2), []
    x = mg.Tensor(10 * np.random.default_rng(0).standard_normal((2, 5, 8)), dtype="float32")
    plain = block(x).numpy()
    for layer in (block.attn, block.ffn):
        layer.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].numpy() ** 2).mean()))
    np.testing.assert_allclose(block(x).numpy(), plain, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(seen, 1, rtol=1e-3)
    block.ffn = nn.FeedForward(8, 12)
    block.attn = nn.Linear(8, 8)
    block.attn.forward = lambda x, **options: nn.Linear.forward(block.attn, x)
    middle = x + block.attn(block.ln1(x))
    expected = middle + block.ffn(block.ln2(middle))
    np.testing.assert_allclose(block(x).numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)


def test_norms_stay_in_float32_under_autocast():
    """Where float16 can't hold the residual stream: an embedding of 1e5 is normalised before it is cast."""
    model = nn.TransformerLM(11, 8, 8, 1, 2, 16, generator=0)
    model.token_embeddings.weight.data *= 1e5
    tokens = np.arange(8).reshape(2, 4)
    wide = model(tokens).data
    with mg.autocast("float16"):
        low = model(tokens)
    np.testing.assert_allclose(low.astype("float32").data, wide, atol=0.02 * np.abs(wide).max())


def test_a_layer_inside_of_a_fused_operation_can_be_replaced():
    """A subclass of Linear, and a Linear with a bias, do what they do."""

    class Negative(nn.Linear):
        def forward(self, x):
            return -super().forward(x)

    ffn = nn.SwiGLU(4, 6, generator=0)
    x = mg.Tensor(np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4))
    before = ffn(x).data
    negative = Negative(6, 4, bias=False)
    negative.weight = ffn.w2.weight
    biased = nn.Linear(6, 4)
    biased.weight, biased.bias.data = ffn.w2.weight, np.full(4, 3, np.float32)
    patched = nn.Linear(6, 4, bias=False)
    patched.weight = ffn.w2.weight
    patched.forward = lambda x: nn.Linear.forward(patched, x) * 2
    for layer, expected in [(negative, -before), (biased, before + 3), (patched, 2 * before)]:
        ffn.w2 = layer
        np.testing.assert_allclose(ffn(x).data, expected, rtol=1e-5)
