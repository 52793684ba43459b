"""The cache gives the logits of the full forward pass; sampling follows its probabilities; perplexity counts tokens."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

import minigrad as mg
import nn
from minigrad.errors import ArgumentError, DTypeError, NonFiniteError, ShapeError

SIZES = {"vocab_size": 11, "context_length": 12, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 24}
TOKENS = np.random.default_rng(5).integers(11, size=(3, 12))
SHARES = np.log([0.4, 0.3, 0.2, 0.1])


def make(**options):
    return nn.TransformerLM(**SIZES, dtype="float64", generator=1, **options)


# ---- cache -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [[12], [1] * 12, [5, 1, 4, 2]])
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "rope_layout": "half"}, {"num_kv_heads": 1}])
def test_cached_logits_are_those_of_the_full_forward_pass(agree, parts, options):
    model = make(**options)
    full, cache, start = model(TOKENS).data, nn.KVCache(model), 0
    for n in parts:
        logits = model(TOKENS[:, start : start + n], cache=cache)
        agree(logits, full[:, start : start + n])
        assert not logits.requires_grad
        start += n
        assert cache.length == start
    with pytest.raises(ShapeError, match=r"(?s)context_length = 12.*1 after 12"):
        model([[1]] * 3, cache=cache)
    cache.reset()
    agree(model.next_logits(TOKENS[0, :3], cache), full[0, 2])


def test_cache_explains_what_does_not_fit_and_stays_as_it_was(agree):
    model = make()
    cache = nn.KVCache(model, max_length=4)
    model(TOKENS[:, :2], cache=cache)
    with pytest.raises(ShapeError, match=r"sequences as before"):
        model(TOKENS[:2, :1], cache=cache)
    with pytest.raises(ShapeError, match="at most 4 positions"):
        model(TOKENS[:, :3], cache=cache)
    with pytest.raises(IndexError):
        model([[99]] * 3, cache=cache)
    agree(model(TOKENS[:, 2:4], cache=cache), model(TOKENS[:, :4]).data[:, 2:])
    assert repr(cache) == "KVCache(length=4, max_length=4)"


@mg.no_grad()
def test_attention_masks_join_with_the_causal_mask_of_a_cache(agree, rng):
    attention = nn.MultiHeadAttention(8, 2, dtype="float64")
    x = mg.Tensor(rng.standard_normal((2, 6, 8)))
    allowed = rng.random((6, 6)) < 0.7
    additive = rng.standard_normal((6, 6))
    for mask in (allowed, additive):
        full = attention(x, is_causal=True, attn_mask=mask).data
        cache = nn.KVCache(None, max_length=6)
        for part in (slice(0, 3), slice(3, 5), slice(5, 6)):
            out = attention(x[:, part], is_causal=True, attn_mask=mask[part, : part.stop], cache=cache)
            cache.advance(part.stop - part.start)
            agree(out, full[:, part])
    with mg.enable_grad(), pytest.raises(RuntimeError, match="no_grad"):
        attention(x, cache=nn.KVCache(None, max_length=6))


# ---- probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),  # 0.571 reaches 0.5
        ({"top_k": 2, "top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),  # the token that crosses is kept
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_p": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, np.array([16, 9, 4, 1]) / 30),
        ({"temperature": 0.5, "top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"temperature": 1e-320}, [1, 0, 0, 0]),
    ],
)
def test_probabilities_of_the_next_token(options, expected):
    order = np.array([2, 0, 3, 1])  # ids in some order, two rows, the input left alone
    logits = np.stack([SHARES[order], SHARES])
    before = logits.copy()
    p = nn.next_token_probabilities(logits, **options)
    np.testing.assert_allclose(p, [np.array(expected)[order], expected], atol=1e-15)
    np.testing.assert_array_equal(logits, before)


def test_ties_go_to_the_lower_ids():
    equal = np.zeros(4, np.float32)
    np.testing.assert_array_equal(nn.next_token_probabilities(equal, top_k=2), [0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(nn.next_token_probabilities(equal, top_p=0.5), [0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(nn.next_token_probabilities(equal, temperature=0), [1, 0, 0, 0])
    np.testing.assert_array_equal(nn.next_token_probabilities([1.0, 2.0, 2.0], 0), [0, 1, 0])
    np.testing.assert_array_equal(nn.next_token_probabilities(mg.Tensor([-np.inf, 2.0, 2.0])), [0, 0.5, 0.5])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": "0.9"},
    ],
)
def test_options_out_of_range_raise_value_error(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        nn.next_token_probabilities(SHARES, **options)
    with pytest.raises(ValueError, match=next(iter(options))):
        nn.generate(make(), [1], 1, **options)


@pytest.mark.parametrize("logits", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_logits_without_a_distribution_are_refused(logits):
    with pytest.raises(NonFiniteError):
        nn.next_token_probabilities(logits)


# ---- generate --------------------------------------------------------------------------------------------------------


def written(model, prompt, count):
    """Greedy decoding without a cache, by the documented rule for a full context."""
    tokens, first = list(prompt), 0
    for _ in range(count):
        if len(tokens) - first > model.context_length:
            first = len(tokens) - model.context_length // 2
        tokens.append(int(model(np.array([tokens[first:]])).data[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("length", [1, 7, 12, 13, 30])
def test_greedy_text_goes_on_beyond_the_context(length):
    model = make()
    prompt = np.random.default_rng(length).integers(11, size=length)
    state = mg.random.get_state()
    text = nn.generate(model, prompt, 25, temperature=0)
    assert text.dtype == np.int64
    assert text.tolist() == written(model, prompt, 25)
    assert mg.random.get_state() == state  # no number was drawn


def test_a_batch_is_written_as_its_rows():
    model = make()
    together = nn.generate(model, TOKENS[:, :3], 20, temperature=0)
    for row, text in zip(TOKENS[:, :3], together, strict=True):
        np.testing.assert_array_equal(nn.generate(model, row, 20, temperature=0), text)


class Fixed(nn.Module):
    """A model of next tokens that depend on the last one alone."""

    context_length = 64

    def __init__(self, table):
        super().__init__()
        self.table = np.asarray(table)

    def next_logits(self, tokens, cache):
        cache.advance(tokens.shape[1])
        return self.table[tokens[:, -1]]


def test_tokens_are_drawn_with_their_probabilities():
    n, model = 4000, Fixed(np.tile(SHARES, (4, 1)))
    for options in ({}, {"top_k": 3}, {"top_p": 0.5, "temperature": 2.0}):
        expected = nn.next_token_probabilities(SHARES, **options)
        drawn = nn.generate(model, np.zeros((n, 1), int), 1, generator=1, **options)[:, 1]
        share = np.bincount(drawn, minlength=4) / n
        assert (np.abs(share - expected) <= 5 * np.sqrt(expected * (1 - expected) / n)).all()


def test_the_same_generator_writes_the_same_text():
    model = make()
    texts = [nn.generate(model, [1, 2], 30, generator=g).tolist() for g in (7, 7, np.random.default_rng(7), 8)]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    mg.random.seed(7)
    assert nn.generate(model, [1, 2], 30).tolist() == texts[0]


def test_text_ends_with_the_end_token():
    chain = np.full((4, 4), -np.inf)
    chain[[0, 1, 2, 3], [1, 2, 3, 0]] = 0  # 0 → 1 → 2 → 3 → 0
    model = Fixed(chain)
    assert nn.generate(model, [0], 9, eos=2).tolist() == [0, 1, 2]
    assert nn.generate(model, [[0], [3], [2]], 9, eos=3).tolist() == [[0, 1, 2, 3, 3], [3, 0, 1, 2, 3], [2, 3, 3, 3, 3]]
    assert nn.generate(model, [0], 0).tolist() == [0]


def test_generating_leaves_modes_and_graph_alone():
    model = make(dropout=0.5)
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    a, b = (nn.generate(model, [1, 2], 8, temperature=0) for _ in range(2))
    np.testing.assert_array_equal(a, b)  # no dropout
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("prompt", "count", "kind"),
    [
        ([], 1, ShapeError),
        ([[[1]]], 1, ShapeError),
        ([0.5], 1, DTypeError),
        ([99], 1, IndexError),
        ([1], -1, ArgumentError),
        ([1], 1.5, ArgumentError),
    ],
)
def test_prompts_that_cannot_be_continued(prompt, count, kind):
    with pytest.raises(kind, match=r"(?s)Expected: .*Got: "):
        nn.generate(make(), prompt, count)


# ---- perplexity ------------------------------------------------------------------------------------------------------


def losses(model, text, window, stride):
    """The loss of each token but the first, read in the window that the definition puts it into."""
    found = {}
    for start in range(0, len(text), stride):
        part = text[start : start + window + 1]
        if len(part) < 2:
            break
        log_p = np.log(nn.next_token_probabilities(model(part[None, :-1])))[0]
        for i, token in enumerate(part[1:]):
            found.setdefault(start + i + 1, -log_p[i, token])
    return found


@pytest.mark.parametrize("length", [2, 12, 13, 14, 40])
@pytest.mark.parametrize(("window", "stride"), [(None, None), (5, None), (12, 4), (6, 5)])
def test_perplexity_counts_every_token_once(length, window, stride):
    model = make(dropout=0.5)
    text = np.random.default_rng(1).integers(11, size=length)
    model.eval()
    expected = losses(model, text, window or 12, stride or window or 12)
    model.train()
    assert len(expected) == length - 1
    total, count = nn.total_loss(model, text, window, stride, batch_size=3)
    assert count == length - 1
    assert total == pytest.approx(sum(expected.values()), rel=1e-10)
    value = nn.perplexity(model, np.stack([text, text]), window, stride)
    assert value == pytest.approx(math.exp(total / count), rel=1e-10)
    assert model.training


class Counted(nn.Module):
    """A model that takes one nat for every target."""

    context_length = 4

    def loss(self, inputs, targets, ignore_index, reduction):
        return float((targets != ignore_index).sum())


@pytest.mark.cpu_only("memory of the CPU")
def test_windows_are_made_batch_by_batch():
    """A hundred thousand of them take the memory of a batch."""
    text = np.zeros(100_000, np.int64)
    tracemalloc.start()
    try:
        assert nn.total_loss(Counted(), text, stride=1, batch_size=1000) == (99_999, 99_999)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: nn.perplexity(make(), [1]), ShapeError),
        (lambda: nn.perplexity(make(), [0.5, 1.5]), DTypeError),
        (lambda: nn.perplexity(make(), [1, 2, 3], stride=13), ArgumentError),
        (lambda: nn.perplexity(make(), [1, 2, 3], window=0), ArgumentError),
        (lambda: nn.perplexity(make(), [1, 2, 99]), IndexError),
    ],
)
def test_texts_that_cannot_be_measured(call, kind):
    with pytest.raises(kind, match=r"(?s)Expected: .*Got: "):
        call()
