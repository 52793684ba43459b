"""Words that say much about each other's pronunciation, grouped: forms of one stem, and words that sound alike.

A learner that was taught ``walked`` and ``walks`` has nearly been taught ``walk``. Which words are forms of one stem is
guessed from their letters, with a short list of English endings: it joins ``walk``, ``walk's``, ``walks``, ``walked``,
``walking``, ``walker`` and ``walkers``, and some pairs too many, such as ``bus`` and ``bused`` with ``bu``. A pair too
many makes a group larger and a split no less strict. Forms that change their stem (``go``, ``went``), prefixes and
compounds are not found.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

ENDINGS = ("'s", "'", "s", "es", "ed", "ing", "in'", "er", "est", "ly")
SHORTEST_STEM = 2  # letters


def stems(word: str) -> Iterator[str]:
    """What ``word`` may be a form of, by one ending less.

    >>> sorted(set(stems("stopped")))
    ['stop', 'stopp', 'stoppe']
    >>> sorted(set(stems("carries")))
    ['carri', 'carrie', 'carry']
    """
    for ending in ENDINGS:
        stem = word.removesuffix(ending)
        if stem == word or len(stem) < SHORTEST_STEM:
            continue
        yield stem
        if stem.endswith("i"):
            yield stem[:-1] + "y"  # carry, carried; happy, happily
        if ending[0] in "aeiou":
            yield stem + "e"  # bake, baking
            if stem[-1] == stem[-2]:
                yield stem[:-1]  # stop, stopped


class DisjointSets:
    """Sets that only ever merge (union-find with path halving)."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def __contains__(self, item: Hashable) -> bool:
        return item in self._parent

    def find(self, item: Hashable) -> Hashable:
        """The member that stands for the set of ``item``; a new item is a set of its own."""
        parent = self._parent
        parent.setdefault(item, item)
        while parent[item] != item:
            parent[item] = item = parent[parent[item]]
        return item

    def join(self, one: Hashable, other: Hashable) -> None:
        """Merge the sets of two items."""
        self._parent[self.find(one)] = self.find(other)


def word_families(words: Mapping[str, Iterable[Sequence[str]]]) -> dict[str, str]:
    """The family of each word, given its pronunciations: the shortest word of it, the first one in the alphabet.

    A word and what it may be a form of are of one family, whether that is a word or not, and so are words that share a
    pronunciation.

    >>> words = {"knight": [("N", "AY", "T")], "night": [("N", "AY", "T")], "nights": [("N", "AY", "T", "S")]}
    >>> word_families({**words, "day": [("D", "EY")]})
    {'knight': 'night', 'night': 'night', 'nights': 'night', 'day': 'day'}
    """
    sets = DisjointSets()

    def join_with_stems(word: str) -> None:
        for stem in stems(word):
            if stem not in sets:
                join_with_stems(stem)
            sets.join(word, stem)

    for word, pronunciations in words.items():
        join_with_stems(word)
        for spoken in pronunciations:
            sets.join(word, tuple(spoken))
    names: dict[Hashable, str] = {}
    for word in sorted(words, key=lambda word: (len(word), word)):
        names.setdefault(sets.find(word), word)
    return {word: names[sets.find(word)] for word in words}
