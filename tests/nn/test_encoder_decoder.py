"""Transformer and its layers beside torch's with the same weights, forward and backward, padding included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as TF

import minigrad as mg
import nn
import optim
from minigrad.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError

D = torch.float64
PAD = 0
SIZES = {"src_vocab_size": 11, "tgt_vocab_size": 13, "d_model": 12, "num_heads": 3, "num_layers": 2, "d_ff": 20}
SOURCE = np.array([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0], [1, 2, 0, 0, 0]])
TARGET = np.array([[1, 5, 6, 7], [1, 12, 3, 0], [1, 0, 0, 0]])
LABELS = np.array([[5, 6, 7, 2], [12, 3, 2, 0], [2, 0, 0, 0]])


def make(**options):
    return nn.Transformer(**{**SIZES, "max_len": 9, "dropout": 0.0, "dtype": "float64", "generator": 1, **options})


def taken_over(theirs, ours):
    """Copy the weights of one of our layers into torch's; pairs of (our parameter, theirs, the part of it)."""
    pairs, d = [], 12
    attentions = [(ours.self_attn, theirs.self_attn)]
    norms = [(ours.ln1, theirs.norm1), (ours.ln2, theirs.norm2)]
    if hasattr(theirs, "multihead_attn"):
        attentions.append((ours.cross_attn, theirs.multihead_attn))
        norms.append((ours.ln3, theirs.norm3))
    for here, there in attentions:
        for i, projection in enumerate((here.q_proj, here.k_proj, here.v_proj)):
            part = slice(i * d, (i + 1) * d)
            pairs += [(projection.weight, there.in_proj_weight, part), (projection.bias, there.in_proj_bias, part)]
        norms.append((here.output_proj, there.out_proj))
    for here, there in [*norms, (ours.ffn.w1, theirs.linear1), (ours.ffn.w2, theirs.linear2)]:
        pairs += [(here.weight, there.weight, slice(None)), (here.bias, there.bias, slice(None))]
    with torch.no_grad():
        for here, there, part in pairs:
            here.data = np.random.default_rng(len(here.data)).standard_normal(here.shape) / 3
            there[part] = torch.tensor(here.numpy())
    return pairs


class TorchModel(torch.nn.Module):
    """Embeddings, sinusoids, torch's layers and a head, with the weights of one of ours."""

    def __init__(self, ours, activation, norm_first, final_norm):
        super().__init__()
        options = {"dropout": 0.0, "activation": activation, "batch_first": True, "norm_first": norm_first, "dtype": D}
        self.model = torch.nn.Transformer(12, 3, 2, 2, 20, **options)
        self.pairs = []
        for here, there in zip(
            [*ours.encoder, *ours.decoder], [*self.model.encoder.layers, *self.model.decoder.layers], strict=True
        ):
            self.pairs += taken_over(there, here)
        for half in ("encoder", "decoder"):
            if final_norm:
                there, here = getattr(self.model, half).norm, getattr(ours, f"{half}_norm")
                self.pairs += [(here.weight, there.weight, slice(None)), (here.bias, there.bias, slice(None))]
            else:
                getattr(self.model, half).norm = None
        self.tables = torch.nn.ParameterList(
            torch.tensor(table.weight.numpy()) for table in (ours.src_embeddings, ours.tgt_embeddings, ours.lm_head)
        )
        self.pairs += [
            (here.weight, there, slice(None))
            for here, there in zip((ours.src_embeddings, ours.tgt_embeddings, ours.lm_head), self.tables, strict=True)
        ]

    def forward(self, source, target):
        source, target = torch.tensor(source), torch.tensor(target)
        x, y = (
            TF.embedding(ids, table) * math.sqrt(12) + torch.tensor(sinusoids(ids.shape[1], 12))
            for ids, table in ((source, self.tables[0]), (target, self.tables[1]))
        )
        hidden = source == PAD
        causal = torch.ones(target.shape[1], target.shape[1]).triu(1).bool()
        out = self.model(
            x, y, tgt_mask=causal, src_key_padding_mask=hidden, memory_key_padding_mask=hidden,
            tgt_key_padding_mask=target == PAD,
        )  # fmt: skip
        return out @ self.tables[2].T


def sinusoids(length, d):
    """The definition, number by number."""
    return np.array(
        [
            [(math.sin if i % 2 == 0 else math.cos)(t / 10000 ** ((i - i % 2) / d)) for i in range(d)]
            for t in range(length)
        ]
    )


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(("norm_first", "final_norm"), [(False, False), (False, True), (True, True), (True, False)])
def test_transformer_is_that_of_torch(agree, activation, norm_first, final_norm):
    ours = make(activation=activation, norm_first=norm_first, final_norm=final_norm, pad_id=PAD)
    theirs = TorchModel(ours, activation, norm_first, final_norm)
    counted = TARGET != PAD  # what stands at the padding doesn't matter
    logits, there = ours(SOURCE, TARGET, target_mask=nn.padding_mask(TARGET, PAD)), theirs(SOURCE, TARGET)
    agree(logits.data[counted], there.detach().numpy()[counted])
    agree(ours(SOURCE, TARGET).data[counted], there.detach().numpy()[counted])  # padding follows, so nothing sees it

    for smoothing in (0.0, 0.1):
        loss = TF.cross_entropy(
            theirs(SOURCE, TARGET).flatten(0, 1),
            torch.tensor(LABELS).flatten(),
            ignore_index=PAD,
            label_smoothing=smoothing,
        )
        ours.zero_grad()
        theirs.zero_grad()
        mine = ours.loss(SOURCE, TARGET, LABELS, label_smoothing=smoothing)
        agree(mine, loss)
        mine.backward()
        loss.backward()
        for here, there, part in theirs.pairs:
            agree(here.grad, there.grad[part])


def test_label_smoothing_leaves_padding_out():
    """By hand: each label that isn't padding counts (1 - ε) of its own loss and ε of the mean over all classes."""
    ours = make(pad_id=PAD)
    log_p = np.log(nn.next_token_probabilities(ours(SOURCE, TARGET)))
    losses = [
        -0.9 * log_p[b, t, LABELS[b, t]] - 0.1 * log_p[b, t].mean()
        for b in range(3)
        for t in range(4)
        if LABELS[b, t] != PAD
    ]
    assert len(losses) == 8
    loss = ours.loss(SOURCE, TARGET, LABELS, label_smoothing=0.1)
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-12)
    total = ours.loss(SOURCE, TARGET, LABELS, label_smoothing=0.1, reduction="sum")
    assert total.item() == pytest.approx(np.sum(losses), rel=1e-12)


@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_stand_alone_and_take_masks_of_both_kinds(agree, rng, norm_first):
    x, memory = (torch.tensor(rng.standard_normal((2, n, 12)), requires_grad=True) for n in (5, 7))
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": D}
    mask, extra = rng.random((5, 5)) < 0.7, rng.standard_normal((5, 7))
    np.fill_diagonal(mask, True)
    theirs = torch.nn.TransformerDecoderLayer(12, 3, 20, **options)
    ours = nn.DecoderLayer(12, 3, 20, 0.0, norm_first=norm_first, dtype="float64")
    pairs = taken_over(theirs, ours)
    a, b = (mg.Tensor(t.detach().numpy(), requires_grad=True) for t in (x, memory))
    y = ours(a, b, attn_mask=mask, is_causal=False, memory_mask=extra)
    t = theirs(x, memory, tgt_mask=torch.tensor(~mask), memory_mask=torch.tensor(extra))
    agree(y, t)
    g = rng.standard_normal(y.shape)
    y.backward(g)
    t.backward(torch.tensor(g))
    agree(a.grad, x.grad)
    agree(b.grad, memory.grad)
    for here, there, part in pairs:
        agree(here.grad, there.grad[part])

    theirs = torch.nn.TransformerEncoderLayer(12, 3, 20, **options)
    ours = nn.EncoderLayer(12, 3, 20, 0.0, norm_first=norm_first, dtype="float64")
    taken_over(theirs, ours)
    causal = torch.ones(5, 5).triu(1).bool()
    agree(ours(a.detach(), is_causal=True), theirs(x, src_mask=causal))
    agree(ours(a.detach(), attn_mask=nn.causal_mask(5)), theirs(x, src_mask=causal))


def test_sharing_and_sizes():
    shared = make(src_vocab_size=13, share_embeddings=True, tie_embeddings=True)
    assert shared.src_embeddings.weight is shared.tgt_embeddings.weight is shared.lm_head.weight
    assert len(list(shared.parameters())) == len(list(make().parameters())) - 2
    assert make(tie_embeddings=True).lm_head.weight.name == "tgt_embeddings.weight"
    assert make(tie_embeddings=True).src_embeddings.weight.shape == (11, 12)
    uneven = make(num_decoder_layers=1, d_model=9)  # an odd width has one sine more than cosines
    assert (len(uneven.encoder), len(uneven.decoder)) == (2, 1)
    assert uneven(SOURCE, TARGET).shape == (3, 4, 13)
    other = make(generator=7)
    assert not np.array_equal(other(SOURCE, TARGET).data, make()(SOURCE, TARGET).data)
    other.load_state_dict(make().state_dict())
    np.testing.assert_array_equal(other(SOURCE, TARGET).data, make()(SOURCE, TARGET).data)
    assert make(norm_first=True).encoder_norm is not None and make().encoder_norm is None


def test_padding_changes_nothing(agree):
    """A sequence alone, and beside longer ones."""
    ours = make(pad_id=PAD)
    together = ours(SOURCE, TARGET).data
    agree(ours(SOURCE[1:2, :3], TARGET[1:2, :3]), together[1:2, :3])
    agree(ours(SOURCE[2:, :2], TARGET[2:, :1]), together[2:, :1])
    without = make()(SOURCE, TARGET).data
    agree(without[0], together[0])
    assert np.abs(without[1] - together[1]).max() > 1e-3


def test_dropout_is_where_the_original_has_it(rng):
    """With p = 1 a branch is gone: post-norm then only normalizes, pre-norm is the identity."""
    x = mg.Tensor(rng.standard_normal((2, 5, 12)))
    np.testing.assert_array_equal(nn.EncoderLayer(12, 3, 20, 1.0, norm_first=True, dtype="float64")(x).data, x.data)
    post = nn.EncoderLayer(12, 3, 20, 1.0, dtype="float64")
    np.testing.assert_allclose(post(x).data, nn.LayerNorm(12, dtype="float64")(x).data, atol=1e-4)
    model = make(dropout=1.0, norm_first=True, final_norm=False)
    np.testing.assert_array_equal(model.hidden(SOURCE, TARGET).data, np.zeros((3, 4, 12)))
    assert (model.eval().hidden(SOURCE, TARGET).data != 0).any()
    inner = nn.EncoderLayer(12, 3, 20, 0.0, attention_dropout=1.0, activation_dropout=1.0, norm_first=True)
    inner = inner.to("float64")
    np.testing.assert_array_equal(inner(x).data, x.data)  # both biases start as 0


def test_it_learns_to_reverse():
    model = make(dtype="float32", pad_id=PAD, tie_embeddings=True)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(SOURCE, TARGET, LABELS)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_attention_weights_are_those_that_the_output_averages_with(agree, rng):
    attention = nn.MultiHeadAttention(12, 3, bias=True, dtype="float64")
    x, memory = (mg.Tensor(rng.standard_normal((2, n, 12))) for n in (4, 6))
    mask = nn.padding_mask([[1, 2, 3, 4, 5, 6], [1, 2, 3, 0, 0, 0]], PAD)
    weights = attention.weights(x, memory, attn_mask=mask)
    np.testing.assert_allclose(weights.data.sum(-1), np.ones((2, 3, 4)), rtol=1e-12)
    assert not weights.data[1, ..., 3:].any()
    values = (memory @ attention.v_proj.weight.T + attention.v_proj.bias).data.reshape(2, 6, 3, 4).swapaxes(1, 2)
    means = (weights.data @ values).swapaxes(1, 2).reshape(2, 4, 12)
    agree(attention(x, memory, attn_mask=mask), attention.output_proj(mg.Tensor(means)).data)


def test_masks_and_padded_sequences():
    np.testing.assert_array_equal(nn.pad_sequences([[5, 7, 6], [8]], 0), [[5, 7, 6], [8, 0, 0]])
    np.testing.assert_array_equal(nn.pad_sequences([[5, 7, 6], [8]], 9, left=True), [[5, 7, 6], [9, 9, 8]])
    np.testing.assert_array_equal(nn.causal_mask(3), [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    assert nn.padding_mask(SOURCE, PAD).shape == (3, 1, 1, 5)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: make(d_model=10), ArgumentError, "num_heads=3"),
        (lambda: make(activation="tanh"), ArgumentError, "tanh"),
        (lambda: make(share_embeddings=True), ArgumentError, "src_vocab_size=11"),
        (lambda: make(num_decoder_layers=0), ArgumentError, "num_decoder_layers"),
        (lambda: make()(np.ones((1, 10), int), [[1]]), ShapeError, "max_len = 9"),
        (lambda: make()([[1]], np.ones((1, 10), int)), ShapeError, "max_len = 9"),
        (lambda: make()(SOURCE, TARGET[:2]), ShapeError, "broadcast"),
        (lambda: make()([[11]], [[1]]), IndexRangeError, "11"),
        (lambda: make()([[1.0]], [[1]]), DTypeError, "float64"),
        (lambda: make()(3, [[1]]), ShapeError, "source"),
        (lambda: make()(SOURCE, TARGET, SOURCE != PAD), ShapeError, r"\(batch, 1, 1, S\)"),
        (lambda: make()(SOURCE, TARGET, nn.padding_mask(SOURCE[:, :4], PAD)), ShapeError, "mask"),
        (lambda: make().encode(SOURCE, np.ones((5, 5), int)), DTypeError, "mask"),
        (lambda: make().encode(SOURCE, np.ones((4, 5), bool)), ShapeError, "mask"),
        (lambda: make().next_logits([[1]], nn.KVCache(make())), ArgumentError, "start"),
        (lambda: nn.padding_mask([[0.5]], PAD), DTypeError, "integers"),
        (lambda: nn.causal_mask(0), ArgumentError, "length"),
        (lambda: nn.pad_sequences([[1], []], PAD), ShapeError, "at least one"),
    ],
)
def test_mistakes_are_explained(call, kind, text):
    with pytest.raises(kind, match=rf"(?s)Expected: .*{text}"):
        call()


@pytest.mark.parametrize("change", ["a hook", "a bias", "another module"])
def test_the_loss_is_that_of_the_logits_whatever_the_head(change):
    model = make(pad_id=PAD)
    if change == "a hook":
        model.lm_head.register_forward_hook(lambda module, inputs, output: output * 3)
    elif change == "a bias":
        model = make(pad_id=PAD, head_bias=True)
        model.lm_head.bias.data = np.arange(13.0)
    else:
        model.lm_head = nn.Sequential(nn.Linear(12, 5, dtype="float64"), nn.Linear(5, 13, dtype="float64"))
    expected = TF.cross_entropy(
        torch.tensor(model(SOURCE, TARGET).numpy()).reshape(-1, 13),
        torch.tensor(LABELS).reshape(-1),
        ignore_index=PAD,
        label_smoothing=0.1,
    )
    assert model.loss(SOURCE, TARGET, LABELS, label_smoothing=0.1).item() == pytest.approx(expected.item(), rel=1e-12)
