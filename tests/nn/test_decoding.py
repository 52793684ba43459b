"""Decoding of both kinds of models: the cache, prompts of different lengths, penalties, and beam search."""

from __future__ import annotations

import math

import numpy as np
import pytest

import minigrad as mg
import nn
from minigrad.errors import ArgumentError, CallError, DTypeError, IndexRangeError, ShapeError

PAD, EOS, VOCAB = 0, 2, 7


def language_model(**options):
    sizes = {"vocab_size": VOCAB, "context_length": 12, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 24}
    return nn.TransformerLM(**{**sizes, "dtype": "float64", "generator": 1, "num_kv_heads": 2, **options})


def translator(**options):
    sizes = {"d_model": 12, "num_heads": 3, "num_layers": 2, "d_ff": 20, "max_len": 12, "pad_id": PAD, "dropout": 0.3}
    model = nn.Transformer(VOCAB, VOCAB, **{**sizes, "dtype": "float64", "generator": 1, **options})
    for parameter in model.parameters():  # far from uniform
        parameter.data *= 2
    return model


def logits_of(model, tokens, source=None):
    """Logits (vocab,) of the next token, from the whole text so far."""
    tokens = np.array([tokens])
    inputs = (tokens,) if source is None else (np.array([source]), tokens)
    with mg.no_grad():
        return model(*inputs).data[0, -1]


def greedy(model, prompt, count, source=None):
    """Without a cache, alone, by the documented rule for a full context."""
    tokens, first = list(prompt), 0
    for _ in range(count):
        if len(tokens) - first > model.context_length:
            first = len(tokens) - model.context_length // 2
        tokens.append(int(logits_of(model, tokens[first:], source).argmax()))
    return tokens


def random_sequences(count, most, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, size=rng.integers(1, most + 1)).tolist() for _ in range(count)]


# ---- the cache, and different lengths --------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "count"), [(100, 5), (16, 17)])
def test_prompts_of_all_lengths_are_continued_as_if_each_were_alone(prompts, count):
    model, prompts = language_model(), random_sequences(prompts, 15, seed=1)
    texts = nn.generate(model, prompts, count, temperature=0)
    assert [text.tolist() for text in texts] == [greedy(model, prompt, count) for prompt in prompts]


@pytest.mark.parametrize(("norm_first", "pairs", "count"), [(False, 100, 4), (True, 16, 9)])
def test_sources_of_all_lengths_are_translated_as_if_each_were_alone(norm_first, pairs, count):
    model = translator(norm_first=norm_first)
    prompts, sources = random_sequences(pairs, 5, seed=1), random_sequences(pairs, 9, seed=2)
    texts = nn.generate(model, prompts, count, temperature=0, source=sources)
    assert model.training
    model.eval()
    expected = [greedy(model, prompt, count, source) for prompt, source in zip(prompts, sources, strict=True)]
    assert [text.tolist() for text in texts] == expected
    assert len({tuple(text[len(p) :]) for text, p in zip(expected, prompts, strict=True)}) > 9  # it does depend


def test_one_prompt_begins_the_target_of_each_source():
    model, sources = translator(), random_sequences(4, 6, seed=3)
    padded = nn.pad_sequences(sources, PAD)
    together = nn.generate(model, [1], 6, temperature=0, source=padded)
    assert together.shape == (4, 7)
    np.testing.assert_array_equal(nn.generate(model, [1], 6, temperature=0, source=sources), together)
    np.testing.assert_array_equal(nn.generate(model, [[1]] * 4, 6, temperature=0, source=padded), together)
    for source, row in zip(sources, together, strict=True):
        np.testing.assert_array_equal(nn.generate(model, [1], 6, temperature=0, source=source), row)


def test_texts_of_different_lengths_end_after_their_own_eos():
    model, prompts = language_model(), random_sequences(40, 6, seed=1)
    texts = nn.generate(model, prompts, 8, temperature=0, eos=[EOS, 5])
    for prompt, text in zip(prompts, texts, strict=True):
        whole = greedy(model, prompt, 8)
        ends = [i + 1 for i in range(len(prompt), len(whole)) if whole[i] in (EOS, 5)]
        assert text.tolist() == whole[: ends[0] if ends else len(whole)]
    assert len({len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)}) > 2


def test_cached_logits_of_the_decoder_are_those_of_the_whole_target(agree):
    model = translator().eval()
    source = nn.pad_sequences(random_sequences(3, 7, seed=5), PAD)
    target = np.random.default_rng(1).integers(VOCAB, size=(3, 12))
    full, cache, start = model(source, target).data, model.start(source), 0
    for n in (1, 4, 1, 2):
        agree(model.next_logits(target[:, start : start + n], cache), full[:, start + n - 1])
        start += n
    with mg.no_grad():
        agree(model.lm_head(model.decode(target[:, 8:], cache.memory, cache.memory_mask, cache=cache)), full[:, 8:])
    assert cache.length == 12


def test_a_cache_goes_on_with_other_rows(agree):
    model = language_model()
    tokens = np.random.default_rng(1).integers(VOCAB, size=(4, 9))
    cache = nn.KVCache(model)
    cache.reset(padding=[0, 2, 1, 3])
    model.next_logits(tokens[:, :6], cache)
    for rows in ([2, 2, 0, 3, 1], [4, 3, 2, 1, 0], [0, 3]):  # more, as many, fewer
        cache.select(rows)
        tokens = tokens[rows]
        padding = cache.padding
        n = cache.length + 1
        logits = model.next_logits(tokens[:, n - 1 : n], cache)
        for row, text, skipped in zip(logits.data, tokens, padding, strict=True):
            agree(row, logits_of(model, text[skipped:n]))


def test_a_callback_that_returns_true_ends_the_texts():
    whole = nn.generate(language_model(), [1, 3], 9, temperature=0)
    seen = []
    stopped = nn.generate(
        language_model(), [1, 3], 9, temperature=0, callback=lambda token: seen.append(token) or len(seen) == 4
    )
    assert stopped.tolist() == whole[:6].tolist()
    ragged = nn.generate(language_model(), [[1, 3], [4]], 9, temperature=0, callback=lambda tokens: True)
    assert [len(text) for text in ragged] == [3, 2]


def test_the_callback_gets_each_token_as_it_comes():
    model, found = language_model(), []
    text = nn.generate(model, [1, 3], 9, temperature=0, callback=found.append)
    assert found == text[2:].tolist() and type(found[0]) is int
    found = []
    texts = nn.generate(model, [[1, 3], [4, 5]], 9, temperature=0, callback=found.append)
    np.testing.assert_array_equal(np.stack(found, axis=1), texts[:, 2:])


# ---- probabilities ---------------------------------------------------------------------------------------------------

SHARES = np.log([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"min_p": 0.5}, [4 / 9, 3 / 9, 2 / 9, 0]),  # 0.2 is at least 0.5 · 0.4
        ({"min_p": 0.51}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        ({"min_p": 0.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"min_p": 0.3, "temperature": 0.5}, np.array([16, 9, 0, 0]) / 25),  # of 16, 9, 4, 1
        ({"min_p": 0.3, "top_k": 3}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"repetition_penalty": 1.0}, [0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_probabilities_of_the_next_token(options, expected):
    shifted = SHARES + math.log(2.5)  # the likeliest has logit 0, so float rounding can't decide 0.5 · 0.4
    np.testing.assert_allclose(nn.next_token_probabilities(shifted, **options), expected, atol=1e-15)


def test_repetition_penalty_brings_tokens_down_on_both_sides_of_zero():
    logits = np.array([[2.0, -1.0, 0.5, 0.0], [2.0, -1.0, 0.5, 0.0]])
    seen = np.array([[True, True, False, True], [False] * 4])
    p = nn.next_token_probabilities(logits, repetition_penalty=2.0, seen=seen)
    for row, expected in zip(p, ([1.0, -2.0, 0.5, 0.0], logits[1]), strict=True):
        np.testing.assert_allclose(row, np.exp(expected) / np.exp(expected).sum(), rtol=1e-14)
    with pytest.raises(ArgumentError, match="seen"):
        nn.next_token_probabilities(logits, repetition_penalty=2.0)


def test_a_text_with_repetition_penalty_counts_its_own_tokens_alone():
    """Those of its prompt too, but not the padding before a short one."""
    model, prompts = language_model(), [[3], [1, 4, 5]]
    texts = nn.generate(model, prompts, 6, temperature=0, repetition_penalty=1.5)
    for prompt, text in zip(prompts, texts, strict=True):
        expected = list(prompt)
        for _ in range(6):
            x = logits_of(model, expected)
            for token in set(expected):
                x[token] = x[token] / 1.5 if x[token] > 0 else x[token] * 1.5
            expected.append(int(x.argmax()))
        assert text.tolist() == expected


# ---- beam search -----------------------------------------------------------------------------------------------------


def exhaustive(model, prompt, count, alpha, eos, source=None):
    """Every text that ends with eos, or at ``count`` tokens, with its log-probability and score; best first."""
    found = []

    def extend(new, total):
        if new and (new[-1] == eos or len(new) == count):
            found.append(([*prompt, *new], total, total / ((5 + len(new)) / 6) ** alpha))
            return
        logits = np.asarray(logits_of(model, [*prompt, *new], source))
        log_p = logits - logits.max()
        log_p -= math.log(np.exp(log_p).sum())
        for token in range(VOCAB):
            extend([*new, token], total + log_p[token])

    extend([], 0.0)
    return sorted(found, key=lambda row: -row[2])


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0, -1.0])
@pytest.mark.parametrize("eos", [EOS, None])
@pytest.mark.parametrize("kind", ["language model", "translator"])
def test_a_beam_that_is_wide_enough_finds_the_best_text(kind, alpha, eos):
    """Wide enough for all unfinished texts of two of three tokens."""
    model, source = (language_model(), None) if kind == "language model" else (translator().eval(), [3, 4, 6])
    if kind == "language model":
        model.lm_head.weight.data *= 3
    expected = exhaustive(model, [1, 3], 3, alpha, eos, source)
    beams = nn.beam_search(model, [1, 3], 3, VOCAB**2, length_penalty=alpha, eos=eos, source=source)
    assert len(beams) == VOCAB**2
    for beam, (tokens, total, score) in zip(beams[:20], expected, strict=False):
        assert beam.tokens.tolist() == tokens
        assert beam.log_probability == pytest.approx(total, rel=1e-10)
        assert beam.score == pytest.approx(score, rel=1e-10)


def test_a_beam_of_one_is_greedy_and_a_wider_one_is_no_worse():
    model = language_model()
    for prompt in random_sequences(10, 5, seed=4):
        scores = []
        for size in (1, 3, 9):
            best = nn.beam_search(model, prompt, 5, size)[0]
            scores.append(best.log_probability)
            text, total = best.tokens.tolist(), 0.0
            for n in range(len(prompt), len(text)):
                total += math.log(nn.next_token_probabilities(logits_of(model, text[:n]))[text[n]])
            assert best.log_probability == pytest.approx(total, rel=1e-10)
            if size == 1:
                assert text == greedy(model, prompt, 5)
        assert scores[0] <= scores[2] + 1e-12


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_prompts_are_searched_together_as_if_each_were_alone(alpha):
    options = {"beam_size": 3, "length_penalty": alpha, "eos": EOS}
    model, prompts = language_model(), random_sequences(12, 14, seed=6)
    together = nn.beam_search(model, prompts, 6, **options)
    for prompt, beams in zip(prompts, together, strict=True):
        alone = nn.beam_search(model, prompt, 6, **options)
        assert [beam.tokens.tolist() for beam in beams] == [beam.tokens.tolist() for beam in alone]
        np.testing.assert_allclose([beam.score for beam in beams], [beam.score for beam in alone], rtol=1e-10)

    model, sources = translator(), random_sequences(12, 9, seed=7)
    together = nn.beam_search(model, [1], 6, source=sources, **options)
    for source, beams in zip(sources, together, strict=True):
        alone = nn.beam_search(model, [1], 6, source=source, **options)
        assert [beam.tokens.tolist() for beam in beams] == [beam.tokens.tolist() for beam in alone]
    assert model.training


@pytest.mark.parametrize("write", [nn.generate, nn.beam_search])
@pytest.mark.parametrize(
    ("eos", "kind"), [(7, IndexRangeError), (-1, IndexRangeError), (1.5, DTypeError), ("a", DTypeError)]
)
def test_an_eos_that_never_comes_is_refused(write, eos, kind):
    for wrong in (eos, [1, eos]):
        with pytest.raises(kind):
            write(language_model(), [1], 3, eos=wrong)


@pytest.mark.parametrize("penalty", [1e-320, 1e308])
def test_a_huge_penalty_rules_in_or_out(penalty):
    """Whatever its size: of the logits 2, -2, 1 those of the seen tokens go beyond all others."""
    p = nn.next_token_probabilities([2.0, -2.0, 1.0], repetition_penalty=penalty, seen=[True, True, False])
    np.testing.assert_allclose(p, [1, 0, 0] if penalty < 1 else [np.exp(0) / (1 + np.e), 0, np.e / (1 + np.e)])


def test_nothing_to_write_is_the_prompt():
    (beam,) = nn.beam_search(language_model(), [1, 2], 0)
    assert (beam.tokens.tolist(), beam.log_probability, beam.score) == ([1, 2], 0.0, 0.0)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: nn.beam_search(language_model(), [1], 3, 0), ArgumentError, "beam_size"),
        (lambda: nn.beam_search(language_model(), [1], -3), ArgumentError, "max_new_tokens"),
        (lambda: nn.beam_search(language_model(), [1], 3, eos=7), IndexRangeError, "eos from 0 to 6"),
        (lambda: nn.beam_search(language_model(), [1], 3, length_penalty=math.inf), ArgumentError, "length_penalty"),
        (lambda: nn.generate(language_model(), [[1], []], 3), ShapeError, "at least one"),
        (lambda: nn.generate(language_model(), [[1], [0.5, 1.0]], 3), DTypeError, "integers"),
        (lambda: nn.generate(language_model(), [1], 3, min_p=1.5), ArgumentError, "min_p"),
        (lambda: nn.generate(language_model(), [1], 3, repetition_penalty=0), ArgumentError, "repetition_penalty"),
        (lambda: nn.generate(language_model(), [1], 3, source=[1]), ArgumentError, "no encoder"),
        (lambda: nn.beam_search(language_model(), [1], 3, length_penalty=1e6), ArgumentError, "length_penalty"),
        (lambda: nn.beam_search(language_model(), [1], 3, length_penalty=None), ArgumentError, "length_penalty"),
        (lambda: nn.generate(language_model(), [1], np.array([1, 2])), ArgumentError, "max_new_tokens"),
        (lambda: nn.generate(language_model(), [1], True), ArgumentError, "max_new_tokens"),
        (lambda: nn.generate(language_model(), [1], 3, callback=3), CallError, "callback"),
        (lambda: nn.generate(nn.Linear(2, 2), [1], 3), DTypeError, "next_logits"),
        (lambda: nn.generate(translator(), [1], 3), ArgumentError, "source"),
        (lambda: nn.generate(translator(), [[1], [2]], 3, source=[[1]]), ShapeError, "each of 2 prompts"),
        (lambda: nn.generate(translator(pad_id=None), [1], 3, source=[[1], [1, 2]]), ShapeError, "pad_id"),
    ],
)
def test_mistakes_are_explained(call, kind, text):
    with pytest.raises(kind, match=rf"(?s)Expected: .*{text}"):
        call()
